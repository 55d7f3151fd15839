"""Pipeline parallelism: schedules, their simulation, their memory, their optimum, and stage partition.

Everything here is pure and creates no process, but for `runtime.py`, which executes a schedule on ranks that exist
already and alone loads torch.
"""
