"""Stands for idr_torch where no torch is wanted, which takes seconds per rank: the same answers."""

import os

rank = int(os.environ["SLURM_PROCID"])
local_rank = int(os.environ["SLURM_LOCALID"])
size = int(os.environ["SLURM_STEP_NUM_TASKS"])
local_world_size = int(os.environ["SLURM_STEP_TASKS_PER_NODE"].split("(")[0])
master_addr = "n0"
