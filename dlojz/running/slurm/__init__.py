"""SLURM: job scripts, the rank in an allocation, the queue, and the reasons of jobs that wait."""
