"""What a real Slurm 22.05.8 (Debian 12) said, word by word; tests/cluster/test_scheduler.py asks a real one again.

Each entry is used by a scenario of the fake one: what a program prints and its exit code, as `fixture.py` plays them.
"""

from typing import NamedTuple


class Refusal(NamedTuple):
    """How sbatch refuses a job.

    Args:
        options: with which it was asked.
        code: its exit code.
        err: what it prints.
        meaning, sens: some words of our explanation; empty where its own words are all that is told.
    """

    options: tuple[str, ...]
    code: int
    err: str
    meaning: str = ""
    sens: str = ""


_FAILED = "sbatch: error: Batch job submission failed: "
REFUSALS = {
    "partition": Refusal(
        ("--partition=nowhere",),
        1,
        f"sbatch: error: invalid partition specified: nowhere\n{_FAILED}Invalid partition name specified\n",
        "`sinfo -s` lists those it has",
        "`sinfo -s` liste les siennes",
    ),
    "memory": Refusal(
        ("--mem=900G",),
        1,
        f"sbatch: error: Memory specification can not be satisfied\n{_FAILED}"
        "Requested node configuration is not available\n",
        "lower memory_gib_per_node",
        "baissez memory_gib_per_node",
    ),
    "GPUs of a node": Refusal(
        ("--gres=gpu:8",),
        1,
        f"{_FAILED}Requested node configuration is not available\n",
        "gpus_per_node of the machine file",
        "gpus_per_node dans le fichier de machine",
    ),
    "kind of GPU": Refusal(
        ("--gres=tpu:1",),
        1,
        "sbatch: error: Invalid generic resource (gres) specification\n",
        "`sinfo -o '%G'`",
        "`sinfo -o '%G'`",
    ),
    "constraint": Refusal(
        ("--constraint=h100",), 1, f"{_FAILED}Invalid feature specification\n", "`sinfo -o '%f'`", "`sinfo -o '%f'`"
    ),
    "reservation": Refusal(
        ("--reservation=none",),
        1,
        f"{_FAILED}Requested reservation is invalid\n",
        "leave reservation= out",
        "retirez reservation=",
    ),
    "time": Refusal(("--time=banana",), 255, "sbatch: error: Invalid --time specification\n"),
}
CONTROLLER_DOWN = {
    "sbatch": (1, f"{_FAILED}Unable to contact slurm controller (connect failure)\n"),
    "squeue": (1, "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"),
    "scancel": (
        8,
        "scancel: error: Kill job error on job id 1: Unable to contact slurm controller (connect failure)\n",
    ),
}
"""Exit code and words of each program, each after 3 to 6 s; the job goes on running."""
PURGED = (1, "slurm_load_jobs error: Invalid job id specified\n")
"""squeue -j about a job that ended 300 s ago, however it ended: why it is never asked for one job."""
NO_ACCOUNTING = (1, "Slurm accounting storage is disabled\n")
"""sacct where the site keeps none."""
FOR_EVER = ("PartitionTimeLimit", "PartitionNodeLimit", "PartitionConfig")
"""Reasons of jobs that were accepted (rc 0) although no node will ever take them."""
