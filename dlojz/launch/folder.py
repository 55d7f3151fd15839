"""The run folder of a job script that is written by hand.

Layer 5. Invariant: one folder per job: a job that is put back into the queue finds the one that it began with.

Run in a job as `python -m dlojz.launch.folder model=coatnet_tiny dp=4 steps=20`; prints the folder's path.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dlojz.config import RunConfig
from dlojz.runs.job import Job, read_job
from dlojz.runs.owner import DEFAULT_WORKER
from dlojz.runs.store import claim, run_ids, runs_root
from dlojz.schema import LabError
from dlojz.train import check_runnable


def folder_of_job(words: Sequence[str], root: Path) -> Path:
    """The folder of the run that this job makes, new unless the job has begun it before.

    Args:
        words: fields of `RunConfig` and `Layout`, each as NAME=VALUE.

    Raises:
        LabError: if a word or the configuration is not legal, or the root cannot be written.
    """
    number = os.environ.get("SLURM_JOB_ID", "")
    if int(os.environ.get("SLURM_RESTART_COUNT") or 0):
        for run_id in run_ids(root):
            job = read_job(root / run_id)
            if job is not None and job.job_id == number:
                return root / run_id
    config = RunConfig.of(**dict(_field(word) for word in words))
    check_runnable(config)
    folder, _ = claim(config, root, again=True, worker_module=DEFAULT_WORKER)
    if number:
        sent = datetime.now(UTC).isoformat(timespec="seconds")
        Job(machine="", name=folder.name, job_id=number, submitted_utc=sent).write(folder)
    return folder


def _field(word: str) -> tuple[str, Any]:
    name, sign, value = word.partition("=")
    if not sign:
        raise LabError(f"{word[:100]!r} is no field: write NAME=VALUE, as in dp=4.")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


if __name__ == "__main__":
    try:
        print(folder_of_job(sys.argv[1:], runs_root()))
    except LabError as error:
        sys.exit(f"dlojz: {error}")
