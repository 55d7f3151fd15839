"""Finish a job: write the record of the run.

Run by the job script as `python -m dlojz.running.slurm.slurm_finish RUN_FOLDER EXIT_CODE [--stopped 0|1] [--ran-s
SECONDS]`. If it is not (the node was lost, say), the record is rebuilt later from the events.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dlojz.base.errors import LabError
from dlojz.results.record import read_events
from dlojz.running.ending import JOB_LATE, JOB_OOM, Ending, classify
from dlojz.running.folder import last_line, read_owner, read_tail
from dlojz.running.slurm.slurm_job import LOG, STOPPED_IN_TIME
from dlojz.running.slurm.slurm_rank import meeting_file, start_name
from dlojz.running.state import (
    CANCEL,
    EVENTS,
    Events,
    attempts_of,
    evidence_of,
    lasted_s,
    read_all_events,
    read_config,
    record_end,
)

Cause = Literal["cancelled", "timeout"]
_SAME_MOMENT_S = 5.0
_KILLED = 128 + signal.SIGKILL


def exits_of(folder: Path, start: str) -> dict[int, int]:
    """Read the exit codes, by rank, of the ranks that failed first in this start of the job (negative: signal)."""
    exits: dict[int, tuple[int, float]] = {}
    for path in sorted((folder / EVENTS).glob("task-*.jsonl")):
        for event in read_events(path):
            if event["event"] == "exit" and event.get("start") == start and event.get("code"):
                exits[int(event["rank"])] = (int(event["code"]), float(event.get("time_s", 0)))
    first_end_s = min((time_s for _, time_s in exits.values()), default=0.0)
    # What ends 5 s or more after the first failure follows from it.
    return {rank: code for rank, (code, time_s) in exits.items() if time_s - first_end_s < _SAME_MOMENT_S}


def cause_of(folder: Path, code: int, *, stopped: bool, ran_s: float, limit_s: float | None, log: str) -> Cause | None:
    """Find what stopped the job from outside, if anything did."""
    if code == STOPPED_IN_TIME or JOB_LATE.search(log):
        return "timeout"
    if (folder / CANCEL).exists():
        return "cancelled"
    if not stopped:
        return None
    # The shell may get the signal before the log has the text; the scheduler counts in minutes.
    return "timeout" if limit_s is not None and ran_s > limit_s - 30 else "cancelled"


def finish(folder: Path, code: int, *, stopped: bool = False, ran_s: float = 0.0, start: str = "") -> Ending:
    """Write the record of a run whose job is ending.

    Args:
        stopped: whether the job's shell got SIGTERM: cancelled, or out of time.
        ran_s: seconds since the job started.
        start: name of this start of the job.

    Raises:
        LabError: if the folder's configuration cannot be read.
    """
    config, owner = read_config(folder), read_owner(folder)
    events, log = read_all_events(folder), read_tail(folder / LOG, 8192)
    limit_s = owner.time_limit_s if owner else None
    world_size = config.layout.world_size
    exits = exits_of(folder, start)
    job_facts: dict[str, Any] = {
        "stopped_by": cause_of(folder, code, stopped=stopped, ran_s=ran_s, limit_s=limit_s, log=log),
        # Where a whole task was killed, nobody was left to write an exit code.
        "exit_codes": exits or _whole_tasks_killed(code, events, world_size),
        # Without such a line nothing is known: the kernel's message may be on another node.
        "kernel_oom": True if JOB_OOM.search(log) else None,
        "memory_of": f"the SLURM job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else "the job",
        "time_limit_s": limit_s,
        "launcher": f"srun ended with exit code {code}: {last_line(log)}" if code and not exits else "",
    }
    ending = classify(evidence_of(events, folder, config, **job_facts))
    record_end(folder, config, events, ending, _elapsed_s(events, time.time()))
    with contextlib.suppress(OSError):
        meeting_file(folder, start).unlink(missing_ok=True)
    return ending


def _whole_tasks_killed(code: int, events_by_rank: Mapping[int, Any], world_size: int) -> dict[int, int]:
    """Return the ranks without an `end` event as killed, where srun's exit code is that of SIGKILL."""
    if code != _KILLED:
        return {}
    silent = [
        rank for rank in range(world_size) if not any(event["event"] == "end" for event in events_by_rank.get(rank, ()))
    ]
    return dict.fromkeys(silent, -signal.SIGKILL)


def _elapsed_s(events_by_rank: Events, now_s: float) -> float | None:
    """Return the seconds of all attempts, the last of which ends now; None where no rank has started."""
    attempts = attempts_of(
        {rank: [*events, {"event": "now", "time_s": now_s}] for rank, events in events_by_rank.items()}
    )
    return lasted_s(attempts)


def main(words: list[str]) -> int:
    """Write the record; return 0, or 1 if it could not be written."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the seconds until SIGKILL are enough
    parser = argparse.ArgumentParser(prog="python -m dlojz.running.slurm.slurm_finish")
    parser.add_argument("folder", type=Path)
    parser.add_argument("code", type=int)
    parser.add_argument("--stopped", type=int, choices=(0, 1), default=0)
    parser.add_argument("--ran-s", type=float, default=0.0)
    arguments = parser.parse_args(words)
    start = start_name() if "SLURM_JOB_ID" in os.environ else ""
    try:
        ending = finish(
            arguments.folder, arguments.code, stopped=bool(arguments.stopped), ran_s=arguments.ran_s, start=start
        )
    except (OSError, LabError) as error:
        print(f"the record cannot be written: {error}", file=sys.stderr)
        return 1
    print(f"{ending.status} {ending.reason}".strip())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
