"""Pipeline parallelism: schedules, their simulation, their memory, their optimum, and stage partition.

Layer 2. Invariant: everything here is pure and creates no process, but for `runtime*.py`, which execute a schedule on
ranks that exist already; only those load torch.
"""
