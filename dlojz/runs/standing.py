"""Where the run of a scheduler's job stands: from what the scheduler says and what the folder shows.

Layer 5. Invariant: the scheduler's word is a hint, the folder's is the truth: a run whose ranks have all told their end
has ended whatever the queue says, and one whose folder was written to just now has not, because files may arrive late.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from dlojz.runs.ending import JobEnd, end_of
from dlojz.runs.job import Job
from dlojz.runs.logs import read_tail
from dlojz.runs.owner import Owner
from dlojz.runs.scheduler import View, view_of

QUIET_S = 15.0
"""Seconds without a change in the folder after which a job that has ended writes no more, on a slow file system too."""
SUBMITTING_S = 120.0
"""Seconds after which a submission is over, whatever came of it: sbatch is given up after 60."""
SLURM_LOG = "logs/slurm.log"
_LOG_BYTES = 8192


def job_state(
    folder: Path, job: Job, owner: Owner | None, events: Mapping[int, list[dict[str, Any]]], world_size: int
) -> Literal["queued", "running"] | JobEnd:
    """How the run of a job stands that has no record: queued, running, or how the scheduler says it ended.

    Args:
        owner: who submits it; as long as that process lives, a job just sent that has no number is about to get one.
        events: of every rank that has told any.
        world_size: number of ranks.
    """
    believed: Literal["queued", "running"] = "running" if any(events.values()) else "queued"
    if not job.job_id and owner is not None and owner.is_alive(folder) and _just_sent(job):
        return "queued"
    view = view_of(job)
    if view.standing == "running":
        return "running"
    ends = [end_of(told) for told in events.values()]
    completed = len(ends) == world_size and all(end is not None and end[0] == "completed" for end in ends)
    if view.standing != "ended" and not completed:
        return "queued" if view.standing == "pending" else believed
    if quiet_s(folder) < QUIET_S and not _never_ran(view, events):
        return believed
    return JobEnd(
        number=job.number or view.number,
        state=view.state if view.standing == "ended" else "",
        reason=view.reason if view.standing == "ended" else "",
        exit_code=view.exit_code,
        log=read_tail(folder / SLURM_LOG, _LOG_BYTES),
        cancel_asked=(folder / "cancel").exists(),
    )


def _just_sent(job: Job) -> bool:
    """Whether the submission may still be under way; its process may live on, though it was interrupted."""
    try:
        sent_s = datetime.fromisoformat(job.submitted_utc).timestamp()
    except ValueError:
        return True
    return abs(time.time() - sent_s) < SUBMITTING_S


def quiet_s(folder: Path) -> float:
    """Seconds since a rank, the launcher or the scheduler last wrote into the folder of a run."""
    written = [folder / "events", folder / "logs", *(folder / "events").glob("*.jsonl"), *(folder / "logs").glob("*")]
    times = []
    for path in written:
        try:
            times.append(path.lstat().st_mtime)
        except OSError:
            continue
    return max(0.0, time.time() - max(times, default=0.0))


def _never_ran(view: View, events: Mapping[int, list[dict[str, Any]]]) -> bool:
    """Whether the job was cancelled while it waited: nobody will write anything."""
    # Slurm gives such a job its end as its start.
    return view.state == "CANCELLED" and view.start_utc in ("", view.end_utc) and not any(events.values())
