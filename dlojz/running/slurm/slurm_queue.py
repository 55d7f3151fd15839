"""Read SLURM's queue: parse squeue and sacct, cache their answers, follow jobs.

What `squeue` and `sacct` are asked, and what they answer. Pure: no process is started here.

An answer is believed only if it is whole: every record ends with a sign of its own, so that an answer cut short, or one
with something else in it, is `Unreadable` and never taken for "there is no such job".

Sources: squeue(1) and sacct(1) of Slurm 22.05, "OUTPUT FORMAT" and "JOB STATE CODES"; `--states=all` also lists jobs
that ended within the last `MinJobAge` seconds (300 by default), which is all there is where sacct is off.

The last answer of the scheduler, shared by all processes of a user: one small file, and when to ask again.

However many notebooks look, the scheduler is asked at most once per interval, and less and less often while it does not
answer; a file that is not ours, or is damaged, is as good as none.

sbatch(1), section PERFORMANCE: "Do not run sbatch or other Slurm client commands … from loops".

Running the programs of a scheduler: a list of words, a time limit, and what they said.

Never through a shell; however a program behaves, there is an answer, and no process is left.

The scheduler's view of a run's job: waiting, running, ended, or unknown.

A job has ended only if the scheduler says so: it names the job's end, or it was asked after the job was submitted,
answered, and does not know the job any more. Silence, an error or an answer cut short mean `unknown`: the job is
believed alive, and what was last known is told with its age.

One `squeue` serves all jobs and all processes of a user (`queue_cache`); where there is accounting, `sacct` tells how a
job ended that the queue has forgotten.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pwd
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from filelock import FileLock, Timeout

from dlojz.base.contract import parse_json
from dlojz.base.errors import LabError
from dlojz.base.language import say
from dlojz.results.record import write_atomic
from dlojz.running.folder import Job, open_regular, visible

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


INTERVAL_VARIABLE = "DLOJZ_QUEUE_INTERVAL_S"
"""Environment variable: seconds between two questions instead of 10; for tests on a cluster of one's own."""
INTERVAL_S, LONGEST_S = 10.0, 300.0
ACCOUNTING_AGAIN_S, NO_ACCOUNTING_S = 60.0, 86_400.0
MOST_ENDINGS = 500
MAX_BYTES = 4 * 2**20
_UNANSWERED = ""


@dataclass(frozen=True)
class Cached:
    """What is known of the queue. Times are seconds since 1970.

    Args:
        asked_s: when the scheduler last answered; 0 if it never did.
        tried_s: when it was last asked.
        failures: questions without an answer since then.
        problem: why the last one had none, in the scheduler's words.
        jobs: the last answer.
        endings: how jobs ended that the scheduler has told of once, the oldest first; it forgets them soon.
        no_accounting_s: when sacct last said that there is none; 0 where it has not.
        accounted_s: by job, when sacct was last asked for it.
    """

    asked_s: float = 0.0
    tried_s: float = 0.0
    failures: int = 0
    problem: str = ""
    jobs: tuple[Listed, ...] = ()
    endings: tuple[Listed, ...] = ()
    no_accounting_s: float = 0.0
    accounted_s: dict[str, float] = field(default_factory=dict)

    def due(self, now_s: float) -> bool:
        """Whether the scheduler may be asked again."""
        waited_s = now_s - self.tried_s
        return waited_s >= self.wait_s or waited_s < 0  # the clock was set back

    @property
    def wait_s(self) -> float:
        """Seconds to leave between two questions: 10, then 10, 20, 40 … 300 while there is no answer."""
        return min(LONGEST_S, interval_s() * 2.0 ** min(10, max(0, self.failures - 1)))

    def answered(self, now_s: float, jobs: list[Listed]) -> Cached:
        """After an answer: what has ended is kept, what is queued again has not ended."""
        numbers = {job.number for job in jobs}
        kept = [job for job in self.endings if job.number not in numbers]
        kept += [job for job in jobs if job.standing == "ended"]
        return replace(
            self,
            asked_s=now_s,
            tried_s=now_s,
            failures=0,
            problem="",
            jobs=tuple(jobs),
            endings=tuple(kept[-MOST_ENDINGS:]),
        )

    def unanswered(self, now_s: float, problem: str) -> Cached:
        """After a question without an answer: all that was known stays."""
        return replace(self, tried_s=now_s, failures=self.failures + 1, problem=problem)

    def may_account(self, number: str, now_s: float) -> bool:
        """Whether sacct may be asked about a job."""
        if self.no_accounting_s and 0 <= now_s - self.no_accounting_s < NO_ACCOUNTING_S:
            return False
        lately = (self.accounted_s.get(key, -math.inf) for key in (number, _UNANSWERED))
        return not any(0 <= now_s - asked_s < ACCOUNTING_AGAIN_S for asked_s in lately)

    def accounted(self, now_s: float, number: str, found: list[Listed]) -> Cached:
        """After sacct has answered about a job."""
        known = {job.number for job in found}
        asked = dict(list({**self.accounted_s, number: now_s}.items())[-MOST_ENDINGS:])
        ended = [job for job in found if job.standing == "ended"]
        endings = (*(job for job in self.endings if job.number not in known), *ended)
        return replace(self, endings=endings[-MOST_ENDINGS:], accounted_s=asked)

    def unaccounted(self, now_s: float, *, for_good: bool) -> Cached:
        """After a question to sacct without an answer: because there is no accounting, or for the moment."""
        if for_good:
            return replace(self, no_accounting_s=now_s)
        return replace(self, accounted_s={**self.accounted_s, _UNANSWERED: now_s})

    def to_json(self) -> str:
        """The JSON document that is kept."""
        data = {**vars(self), "schema_version": 1}
        data |= {name: [job.to_dict() for job in data[name]] for name in ("jobs", "endings")}
        return json.dumps(data, allow_nan=False)

    @classmethod
    def from_json(cls, text: bytes) -> Cached:
        """Read back what was kept.

        Raises:
            LabError: if it is anything else.
        """
        data = parse_json(text)
        if not isinstance(data, dict) or data.pop("schema_version", None) != 1 or set(data) != set(vars(cls())):
            raise LabError("this is no cache of a queue.")
        numbers = (data["asked_s"], data["tried_s"], data["no_accounting_s"], *dict(data["accounted_s"]).values())
        if not all(type(number) in (int, float) for number in numbers) or type(data["failures"]) is not int:
            raise LabError("this cache of a queue holds other things than times.")
        data |= {name: tuple(Listed.from_dict(job) for job in data[name]) for name in ("jobs", "endings")}
        return cls(**{**data, "problem": str(data["problem"])})


def interval_s() -> float:
    """Seconds between two questions: 10, or what `$DLOJZ_QUEUE_INTERVAL_S` says."""
    try:
        told = float(os.environ.get(INTERVAL_VARIABLE, ""))
    except ValueError:
        return INTERVAL_S
    return told if 0 <= told <= LONGEST_S else INTERVAL_S


def cache_path() -> Path | None:
    """The file for this user and this cluster; None where there is no folder of our own for it."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = (base if base.is_absolute() else Path("~/.cache").expanduser()) / "dlojz"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not os.access(folder, os.W_OK):
            return None
    except (OSError, RuntimeError):
        return None
    # Another cluster, or another set of programs, has another queue.
    of = (shutil.which("squeue") or "", *(os.environ.get(name, "") for name in ("SLURM_CONF", "SLURM_CLUSTERS")))
    return folder / f"queue-{hashlib.sha256(chr(0).join(of).encode()).hexdigest()[:12]}.json"


def read_cache(path: Path) -> Cached:
    """What the file tells; nothing where it is missing, damaged, or not a file of ours."""
    file = open_regular(path)
    if file is None:
        return Cached()
    with file:
        status = os.fstat(file.fileno())
        ours = status.st_uid == os.getuid() and not status.st_mode & 0o022
        if not ours or status.st_size > MAX_BYTES:
            return Cached()
        try:
            return Cached.from_json(file.read(MAX_BYTES))
        except (LabError, OSError, TypeError, ValueError, AttributeError, KeyError):
            return Cached()


def write_cache(path: Path, cached: Cached) -> None:
    """Write the file, whole or not at all; where it cannot be written, everybody asks for himself."""
    with contextlib.suppress(OSError):
        write_atomic(path, cached.to_json())
        path.chmod(0o600)


@contextlib.contextmanager
def alone(path: Path, patience_s: float) -> Iterator[bool]:
    """Hold the right to ask; False where another process is asking, and still is after `patience_s` seconds."""
    lock: Any = FileLock(path.with_suffix(".lock"), timeout=patience_s)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    except (OSError, NotImplementedError):  # a file system without locks
        yield True
        return
    try:
        yield True
    finally:
        lock.release()


TIMEOUT_S = 15.0
_MOST_WORDS = 2000
_FOREIGN = (
    *("SBATCH_", "SLURM_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_"),
    *("PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_"),
)
_KEPT = ("SLURM_CONF", "SLURM_JWT")


class SchedulerAnswer(NamedTuple):
    """What a program of the scheduler said; `code` is None where it did not end in time or is not there."""

    code: int | None
    out: str
    err: str


def ask(argv: Sequence[str], timeout_s: float = TIMEOUT_S) -> SchedulerAnswer:
    """Run one program of the scheduler to its end, or for `timeout_s` seconds; never through a shell, never raises."""
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment() | ENVIRONMENT,
            start_new_session=True,  # a wrapper's children, which hold the pipes, end with it
        )
    except OSError as error:
        return SchedulerAnswer(None, "", f"{argv[0]}: {error.strerror}")
    with process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return SchedulerAnswer(None, "", f"{argv[0]} did not answer within {timeout_s:g} s")
    return SchedulerAnswer(process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))


def clean_environment() -> dict[str, str]:
    """This process's environment without what changes a scheduler's program: its options, and the job one may be in.

    A filter such as `SQUEUE_PARTITION` would hide jobs, and a job that is hidden is taken for one that has ended.
    Source: section ENVIRONMENT VARIABLES of sbatch(1), squeue(1) and scancel(1).
    """
    return {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(_FOREIGN)}


def words_of(answer: SchedulerAnswer) -> str:
    """The scheduler's own words on what went wrong, in one line, control characters made visible."""
    said = visible(" ".join((answer.err.strip() or answer.out.strip()).split()))[:_MOST_WORDS]
    return said or f"exit code {answer.code}, without a word"


def user() -> str:
    """The name of this user, or the number of one that has none here."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


SETTLING_S = 30.0
"""An answer younger than this after the submission does not show that a job is gone: it may not be listed yet."""
_NO_ACCOUNTING = "accounting storage is disabled"
_one_at_a_time = threading.Lock()
_kept = Cached()  # where no file can be kept


@dataclass(frozen=True)
class View:
    """What the scheduler says of one job.

    Args:
        standing: pending, running, ended, or `unknown`: it did not answer, and the job is believed alive.
        state, reason: raw, e.g. `TIMEOUT` and `PartitionTimeLimit`; the last known ones where the standing is unknown.
        start_utc, end_utc: when it started and ends, or is expected to; empty where that is not known.
        age_s: seconds since the scheduler answered; None if it never has.
        absent: the scheduler answered, and does not know the job.
        number, name, nodes, partition: of the job.
        left, limit: time left and time limit, as the scheduler writes them.
        exit_code: `code:signal`, where the accounting tells it.
        problem: why there is no answer, in the scheduler's words.
    """

    standing: Standing
    state: str = ""
    reason: str = ""
    start_utc: str = ""
    end_utc: str = ""
    age_s: float | None = None
    absent: bool = False
    number: str = ""
    name: str = ""
    nodes: str = ""
    partition: str = ""
    left: str = ""
    limit: str = ""
    exit_code: str = ""
    problem: str = ""


class Queue(NamedTuple):
    """All jobs of the user that the scheduler last told of, how old that is, and why it is not newer."""

    jobs: list[View]
    age_s: float | None
    problem: str


def view_of(job: Job, *, now_s: Callable[[], float] = time.time) -> View:
    """What the scheduler says of a run's job; found by its name as long as its number is not known.

    Asks at most every 10 s for all jobs together; between two questions the last answer serves.
    """
    cached = _refreshed(now_s)
    listed = _the_line(cached.jobs, job)
    if listed is not None and (not cached.failures or listed.standing == "ended"):
        return _seen(listed, cached, now_s())
    ended = _the_line(cached.endings, job)
    if listed is None and ended is not None and _whole(cached, job):
        return _seen(ended, cached, now_s())
    if cached.failures or not _whole(cached, job):
        return _seen(listed, cached, now_s(), standing="unknown")
    told = _the_line(_accounting(job, cached, now_s), job) if job.job_id else None
    if told is not None:
        return _seen(told, cached, now_s())
    return _seen(None, cached, now_s(), standing="ended", absent=True)


def views(*, now_s: Callable[[], float] = time.time) -> Queue:
    """All jobs of this user, those that ended just now included, as the scheduler last told."""
    cached = _refreshed(now_s)
    stale: Standing | None = "unknown" if cached.failures else None
    jobs = [
        _seen(job, cached, now_s(), standing=job.standing if job.standing == "ended" else stale) for job in cached.jobs
    ]
    return Queue(jobs, _age_s(cached, now_s()), cached.problem)


def cancel(job: Job) -> None:
    """End a job: the scheduler sends SIGTERM, and SIGKILL where that does not do; one that has ended stays as it is.

    Raises:
        LabError: if the scheduler refuses or does not answer; its words are told.
    """
    answer = ask(scancel_argv(job.number, job.name, user()))
    if answer.code == 0 or "Invalid job id" in answer.err or "already complet" in answer.err:
        return
    said = words_of(answer)
    raise LabError(
        say(
            en=f"the job {job.number or job.name} could not be cancelled: {said}. Try again, or use "
            f"`scancel {job.number or '--name=' + job.name}` on the cluster.",
            fr=f"le travail {job.number or job.name} n’a pas pu être annulé : {said}. Réessayez, ou tapez "
            f"`scancel {job.number or '--name=' + job.name}` sur le calculateur.",
        )
    )


def _refreshed(now_s: Callable[[], float]) -> Cached:
    """The last answer, after a question where one is due."""
    return _changed(lambda cached: cached.due(now_s()), lambda cached: _asked(cached, now_s))


def _asked(cached: Cached, now_s: Callable[[], float]) -> Cached:
    # The time before the question: a job submitted while squeue runs may be missing from the answer.
    started_s = now_s()
    answer = ask(squeue_argv(user()))
    if answer.code != 0:
        return cached.unanswered(now_s(), words_of(answer))
    try:
        jobs = parse_squeue(answer.out)
    except Unreadable as error:
        return cached.unanswered(now_s(), visible(str(error)))
    if answer.err.strip() and not jobs:  # an empty answer with a complaint is no answer
        return cached.unanswered(now_s(), words_of(answer))
    return cached.answered(started_s, jobs)


def _accounting(job: Job, cached: Cached, now_s: Callable[[], float]) -> tuple[Listed, ...]:
    """How jobs ended, after asking sacct about this one where that is of use."""

    def account(known: Cached) -> Cached:
        answer = ask(sacct_argv([job.number]))
        if answer.code == 0:
            return known.accounted(now_s(), job.number, parse_sacct(answer.out))
        none = (answer.code is None and "did not answer" not in answer.err) or _NO_ACCOUNTING in answer.err
        return known.unaccounted(now_s(), for_good=none)

    if not cached.may_account(job.number, now_s()):
        return cached.endings
    return _changed(lambda known: known.may_account(job.number, now_s()), account).endings


def _changed(wanted: Callable[[Cached], bool], change: Callable[[Cached], Cached]) -> Cached:
    """The shared knowledge, changed by one process at a time where a change is wanted."""
    global _kept
    path = cache_path()
    if path is None:
        with _one_at_a_time:
            if wanted(_kept):
                _kept = change(_kept)
            return _kept
    cached = read_cache(path)
    if not wanted(cached):
        return cached
    # Who has an answer does not wait for another thread or process that is asking; who has none does.
    patience_s = 0.0 if cached.asked_s else TIMEOUT_S + 1
    if not _one_at_a_time.acquire(timeout=patience_s):
        return cached
    try:
        with alone(path, patience_s) as mine:
            cached = read_cache(path)
            if mine and wanted(cached):
                cached = change(cached)
                write_cache(path, cached)
            return cached
    finally:
        _one_at_a_time.release()


def _the_line(lines: Iterable[Listed], job: Job) -> Listed | None:
    """The line of a job: by its number, else by its name or comment; of several, one that lasts, then the newest."""
    if job.job_id:
        same = [line for line in lines if line.job_id == job.job_id]
    else:
        same = [line for line in lines if job.name in (line.name, line.comment) and _is_ours(line, job)]
    own = [line for line in same if line.is_task(job.array_task)]
    own = own or [line for line in same if job.array_task is not None and line.more_tasks]
    return max(own, key=lambda line: (line.standing != "ended", int(line.job_id)), default=None)


def _is_ours(line: Listed, job: Job) -> bool:
    """Whether a line of this name can be this job and not an earlier one of the same run."""
    return line.standing != "ended" or _seconds(line.end_utc) >= _seconds(job.submitted_utc)


def _whole(cached: Cached, job: Job) -> bool:
    """Whether the last answer is late enough to know this job."""
    submitted_s = _seconds(job.submitted_utc) if job.submitted_utc else _born_s(job.name)
    return bool(cached.asked_s) and cached.asked_s >= submitted_s + SETTLING_S


def _seconds(time_utc: str) -> float:
    """A time in seconds since 1970; never, for one that is not known."""
    try:
        return datetime.fromisoformat(time_utc).timestamp()
    except ValueError:
        return float("inf")


def _born_s(name: str) -> float:
    """The time that a run's name begins with; never, for another name."""
    try:
        return datetime.strptime(f"{name[:15]}+0000", "%Y%m%d-%H%M%S%z").timestamp()
    except ValueError:
        return float("inf")


def _age_s(cached: Cached, now_s: float) -> float | None:
    return max(0.0, now_s - cached.asked_s) if cached.asked_s else None


def _seen(
    line: Listed | None, cached: Cached, now_s: float, *, standing: Standing | None = None, absent: bool = False
) -> View:
    age_s, problem = _age_s(cached, now_s), cached.problem
    if line is None:
        return View(standing or "unknown", age_s=age_s, absent=absent, problem=problem)
    return View(
        standing or line.standing,
        state=line.state,
        reason=line.reason,
        start_utc=line.start_utc,
        end_utc=line.end_utc,
        age_s=age_s,
        number=line.number,
        name=line.name,
        nodes=line.nodes,
        partition=line.partition,
        left=line.left,
        limit=line.limit,
        exit_code=line.exit_code,
        problem=problem,
    )
