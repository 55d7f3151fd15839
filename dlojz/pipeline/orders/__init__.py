"""The orders of the published schedules: one pure function per schedule, which gives each rank its list of actions.

An order depends on counts (ranks, micro-batches, chunks) and, where a schedule searches, on costs; it holds no times.
Stages are counted from the input over all chunks, micro-batches over all pipes.
"""
