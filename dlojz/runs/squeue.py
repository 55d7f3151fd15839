"""What `squeue` and `sacct` are asked, and what they answer. Pure: no process is started here.

Layer 5. Invariant: an answer is believed only if it is whole: every record ends with a sign of its own, so that an
answer cut short, or one with something else in it, is `Unreadable` and never taken for "there is no such job".

Sources: squeue(1) and sacct(1) of Slurm 22.05, "OUTPUT FORMAT" and "JOB STATE CODES"; `--states=all` also lists jobs
that ended within the last `MinJobAge` seconds (300 by default), which is all there is where sacct is off.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, Literal

from dlojz.schema import LabError

Standing = Literal["pending", "running", "ended", "unknown"]
# Neither sign can be part of a name or a comment that a person types; a comment may hold a line break.
FIELD_END, RECORD_END = "\x1f", "\x1e"
_FORMAT = ("%i", "%T", "%r", "%S", "%e", "%l", "%L", "%M", "%D", "%P", "%j", "%k")
_SACCT = ("JobID", "State", "ExitCode", "Start", "End")
ENVIRONMENT = {"TZ": "UTC0", "SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0", "LC_ALL": "C"}
"""Times in UTC, in the standard form, and arrays written in full."""

PENDING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
RUNNING = frozenset(
    {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING", "RESIZING"}
)
ENDED = frozenset(
    {
        "COMPLETED",
        "CANCELLED",
        "FAILED",
        "TIMEOUT",
        "OUT_OF_MEMORY",
        "NODE_FAIL",
        "BOOT_FAIL",
        "DEADLINE",
        "PREEMPTED",
        "REVOKED",
    }
)
_NUMBER = re.compile(r"(\d{1,18})(?:\+\d+)?(?:_(\d{1,9}|\[[^\]]*\]))?(?:\.\S+)?")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")
_MOST_TASKS = 100_000


class Unreadable(LabError):  # noqa: N818 - a state of the answer, not a fault of the program
    """An answer of the scheduler that is not whole: it says nothing, not even that a job is gone."""


@dataclass(frozen=True)
class Listed:
    """One line of the queue: a job, or the tasks of an array that stand alike.

    Args:
        job_id: the job's number, without the index of a task.
        tasks: indices of the array's tasks in this line; None for a job that is no array.
        more_tasks: the line was shortened: it stands for other tasks of the array, too.
        state: raw, e.g. `TIMEOUT`.
        reason: raw, e.g. `PartitionTimeLimit`; empty where there is none.
        start_utc, end_utc: when it started and ends, or is expected to; empty where that is not known.
        limit, left, used: durations as the scheduler writes them.
        exit_code: `code:signal`, where known (sacct only).
    """

    job_id: str
    tasks: tuple[int, ...] | None
    more_tasks: bool
    state: str
    reason: str = ""
    start_utc: str = ""
    end_utc: str = ""
    limit: str = ""
    left: str = ""
    used: str = ""
    nodes: str = ""
    partition: str = ""
    name: str = ""
    comment: str = ""
    exit_code: str = ""

    @property
    def standing(self) -> Standing:
        """Where the job stands; `unknown` for a state that this package has never heard of."""
        return standing_of(self.state)

    @property
    def number(self) -> str:
        """The job as the scheduler writes it, e.g. `12`, `12_3` or `12_[3,4,5]`."""
        if self.tasks is None and not self.more_tasks:
            return self.job_id
        shown = ",".join(map(str, self.tasks or ())) + (",…" if self.more_tasks else "")
        return f"{self.job_id}_{shown}" if shown.isdecimal() else f"{self.job_id}_[{shown}]"

    def is_task(self, task: int | None) -> bool:
        """Whether this line stands for a task of an array, or, with None, for a job that is no array."""
        return (task is None and self.tasks is None) or (task is not None and task in (self.tasks or ()))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Listed:
        """Read back what `to_dict` gave.

        Raises:
            LabError: if it is anything else.
        """
        texts = {field.name: data.get(field.name, "") for field in fields(cls)}
        tasks, more = texts.pop("tasks"), texts.pop("more_tasks")
        whole = tasks is None or (isinstance(tasks, (list, tuple)) and all(type(task) is int for task in tasks))
        if not whole or not isinstance(more, bool) or not all(isinstance(text, str) for text in texts.values()):
            raise LabError(f"no line of a queue: {str(dict(data))[:100]!r}.")
        return cls(tasks=None if tasks is None else tuple(tasks), more_tasks=more, **texts)


def standing_of(state: str) -> Standing:
    """Where a job in this raw state stands."""
    return (
        "pending" if state in PENDING else "running" if state in RUNNING else "ended" if state in ENDED else "unknown"
    )


def squeue_argv(user: str) -> list[str]:
    """The one command that lists all jobs of a user, those that ended just now included."""
    return [
        "squeue",
        "--noheader",
        "--states=all",
        f"--user={user}",
        f"--format={FIELD_END.join(_FORMAT)}{RECORD_END}",
    ]


def sacct_argv(job_ids: Iterable[str]) -> list[str]:
    """The command that tells how jobs ended; only their allocations, not their steps."""
    return [
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        f"--jobs={','.join(job_ids)}",
        f"--format={','.join(_SACCT)}",
    ]


def scancel_argv(number: str, name: str, user: str) -> list[str]:
    """The command that ends a job, by its number, or by its name while it has none."""
    return ["scancel", number] if number else ["scancel", f"--user={user}", f"--name={name}"]


def parse_squeue(text: str) -> list[Listed]:
    """All jobs of an answer of `squeue`; none where the answer is empty.

    Raises:
        Unreadable: if the answer is cut short or holds anything else.
    """
    *records, rest = text.split(RECORD_END)
    if rest.strip():
        raise Unreadable(f"squeue's answer is cut short or is none: it ends with {rest.strip()[-100:]!r}.")
    found = []
    for record in records:
        cells = [_known(cell) for cell in record.removeprefix("\n").split(FIELD_END, len(_FORMAT) - 1)]
        if len(cells) != len(_FORMAT) or not cells[1]:
            raise Unreadable(f"squeue's answer holds a line that is none: {record.strip()[:100]!r}.")
        number, state, reason, start, end, limit, left, used, nodes, partition, name, comment = cells
        job_id, tasks, more = parse_number(number)
        found.append(
            Listed(
                job_id=job_id,
                tasks=tasks,
                more_tasks=more,
                state=state.upper(),
                reason=reason,
                start_utc=_utc(start),
                end_utc=_utc(end),
                limit=limit,
                left=left,
                used=used,
                nodes=nodes,
                partition=partition,
                name=name,
                comment=comment,
            )
        )
    return found


def parse_sacct(text: str) -> list[Listed]:
    """How jobs ended, by an answer of `sacct --parsable2`; lines that are none are left out.

    Nothing follows from a job that is not in it: the accounting lags behind.
    """
    found = []
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) != len(_SACCT):
            continue
        number, state, code, start, end = cells
        try:
            job_id, tasks, more = parse_number(number)
        except Unreadable:
            continue
        if state.split():  # "CANCELLED by 1000"
            ending = Listed(job_id, tasks, more, state.split()[0].rstrip("+"), exit_code=code)
            found.append(replace(ending, start_utc=_utc(start), end_utc=_utc(end)))
    return found


def parse_number(text: str) -> tuple[str, tuple[int, ...] | None, bool]:
    """A job's number, the tasks it stands for (None: no array), and whether there are more than were written.

    Example:
        >>> parse_number("12_[3-5,9%2]")
        ('12', (3, 4, 5, 9), False)

    Raises:
        Unreadable: if it is none.
    """
    found = _NUMBER.fullmatch(text.strip())
    if not found:
        raise Unreadable(f"the scheduler's answer names the job {text.strip()[:100]!r}, which is no job's number.")
    job_id, index = found[1], found[2]
    if index is None:
        return job_id, None, False
    if not index.startswith("["):
        return job_id, (int(index),), False
    tasks: set[int] = set()
    more = False
    for part in index[1:-1].partition("%")[0].split(","):
        span = _RANGE.fullmatch(part.strip())
        if not span:
            if part.strip() in ("...", "…"):
                more = True
                continue
            raise Unreadable(f"the scheduler's answer names the tasks {index[:100]!r}, which are none.")
        first, last, step = int(span[1]), int(span[2] or span[1]), int(span[3] or 1)
        if step < 1 or (last - first) // step > _MOST_TASKS:
            raise Unreadable(f"the scheduler's answer names the tasks {index[:100]!r}, which are too many.")
        tasks.update(range(first, last + 1, step))
    return job_id, tuple(sorted(tasks)), more


def _known(cell: str) -> str:
    """What a field says; squeue has several words for nothing."""
    text = cell.strip()
    return "" if text in ("N/A", "None", "(null)", "n/a", "NONE", "NOT_SET") else text


def _utc(text: str) -> str:
    """A time of the scheduler, asked for in UTC, as ISO 8601; empty where it is none."""
    try:
        return datetime.fromisoformat(text.strip()).replace(tzinfo=UTC).isoformat(timespec="seconds")
    except ValueError:
        return ""
