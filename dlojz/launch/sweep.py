"""Several runs at once: one job array on a cluster, one after the other on this machine.

Layer 5. Invariant: each run has its own folder and stays what it would be alone; only those that are new are sent, and
what one array cannot hold (other nodes, another number of ranks, another interpreter) goes into another.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from dlojz.config import RunConfig
from dlojz.launch.limits import Allocation, Request
from dlojz.launch.machines import Machine
from dlojz.launch.slurm import SCRIPT, prepare, recorded, send
from dlojz.launch.slurm_script import Array, array_script, job_script
from dlojz.libraries import own_python
from dlojz.record import write_atomic
from dlojz.runs.job import Job
from dlojz.runs.state import LOGS

SWEEPS = ".sweeps"
MAX_TASKS = 1000
"""Tasks of one array: slurm.conf's MaxArraySize is 1001 where a site does not change it."""

New = tuple[Path, RunConfig, Allocation]


def submit_array(
    new: Sequence[New], root: Path, machine: Machine, request: Request, worker_module: str, at_once: int
) -> None:
    """Send runs that have just been claimed, as one job array per shape.

    Args:
        new: folder, configuration and allocation of each.
        at_once: how many of an array may run at the same time, at least 1.

    Raises:
        LabError: if the scheduler refuses one of the arrays (its runs are recorded as failed; those of the others
            stay), or the folders cannot be written.
    """
    shaped = sorted(new, key=lambda one: (_shape(one), one[0].name))
    for _, same in groupby(shaped, key=_shape):
        runs = list(same)
        for first in range(0, len(runs), MAX_TASKS):
            _submit_one(runs[first : first + MAX_TASKS], root, machine, request, worker_module, at_once)


def _shape(run: New) -> tuple[int, int, int, str, str]:
    """What the runs of one array have in common: nodes, time, and the interpreter."""
    _, config, asked = run
    return asked.nodes, asked.ranks_per_node, asked.minutes, asked.qos, str(own_python(config) or "")


def _submit_one(
    runs: Sequence[New], root: Path, machine: Machine, request: Request, worker_module: str, at_once: int
) -> None:
    now = datetime.now(UTC)
    name = f"{now:%Y%m%d-%H%M%S}-sweep-{secrets.token_hex(4)}"
    folder = root / SWEEPS / name
    _, config, asked = runs[0]
    array = Array(folder, len(runs), min(at_once, len(runs)))
    job = Job(machine=machine.name, name=name, submitted_utc=now.isoformat(timespec="seconds"))
    jobs = [(run, Job(**{**job.to_dict(), "array_task": task})) for task, (run, _, _) in enumerate(runs)]
    with recorded([run for run, _ in jobs]):
        text = array_script(machine, config, asked, array, worker_module=worker_module, requeues=request.requeues)
        (folder / LOGS).mkdir(parents=True)
        write_atomic(folder / "folders.txt", "".join(f"{run}\n" for run, _, _ in runs))
        write_atomic(folder / SCRIPT, text)
        (folder / SCRIPT).chmod(0o755)
        for (run, one, its), (_, its_job) in zip(runs, jobs, strict=True):
            # Its own script beside the sweep's: with it, this run alone can be sent again.
            alone = job_script(machine, one, its, run, worker_module=worker_module, requeues=request.requeues)
            prepare(run, alone, its_job)
    send(folder, jobs)
