"""Read SLURM's queue: parse squeue and sacct, cache their answers, follow and cancel jobs, explain its messages.

A job has ended only if the scheduler says so: it names the job's end, or it was asked after the job was submitted,
answered, and does not know the job any more. Silence, an error or an answer cut short mean `unknown`: the job is
believed alive, and what was last known is reported with its age. So that an answer cut short is recognised, every
record that is asked for ends with a special character.

One `squeue` serves all jobs and all processes of a user, by a small file: the scheduler is asked at most once per
interval, and less and less often while it does not answer. Where there is accounting, `sacct` tells how a job ended
that the queue has forgotten. No program is run through a shell. The scheduler's own words (why a job waits, why sbatch
refused it) are always shown; those that are not known stay unexplained, never guessed.

Sources: squeue(1) and sacct(1) of Slurm 22.05, "OUTPUT FORMAT" and "JOB STATE CODES" (`--states=all` also lists jobs
that ended within the last `MinJobAge` seconds, 300 by default); sbatch(1), section PERFORMANCE: "Do not run sbatch or
other Slurm client commands … from loops".
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from filelock import FileLock, Timeout
from pydantic import Field

from dlojz.base.contract import Contract
from dlojz.base.errors import LabError
from dlojz.base.files import cache_folder, write_atomic
from dlojz.base.language import Sentences, refusal, say
from dlojz.running.folder import Job, launched_utc, open_regular, visible

Standing = Literal["pending", "running", "ended", "unknown"]
# Characters that nobody types in a name or a comment; a comment may hold a line break.
phrase = Sentences(Path(__file__).parent / "data" / "slurm_queue.md")

FIELD_END, RECORD_END = "\x1f", "\x1e"
_FORMAT = ("%i", "%T", "%r", "%S", "%e", "%l", "%L", "%M", "%D", "%P", "%j", "%k")
_FIELDS = ("state", "reason", "start_utc", "end_utc", "limit", "left", "used", "nodes", "partition", "name", "comment")
"""Of `QueueLine`, in the order of `_FORMAT` after the number."""
_SACCT = ("JobID", "State", "ExitCode", "Start", "End")
ENVIRONMENT = {"TZ": "UTC0", "SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0", "LC_ALL": "C"}
"""Times in UTC, in the standard form, and arrays written in full."""

_STATES: dict[Standing, tuple[str, ...]] = {
    "pending": ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
    "running": (
        *("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED"),
        *("STOPPED", "STAGE_OUT", "SIGNALING", "RESIZING"),
    ),
    "ended": (
        *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY"),
        *("NODE_FAIL", "BOOT_FAIL", "DEADLINE", "PREEMPTED", "REVOKED"),
    ),
}
# 12, 12_3, 12_[3-5,9%2]; 12+1 is a part of a heterogeneous job, 12.batch a step.
_NUMBER = re.compile(r"(\d{1,18})(?:\+\d+)?(?:_(\d{1,9}|\[[^\]]*\]))?(?:\.\S+)?")
# First task, last task and step: 3, 3-5, 0-8:2.
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")
_MOST_TASKS = 100_000


def standing_of(state: str) -> Standing:
    """Standing of a job in one of SLURM's states; `unknown` for a state that this package does not know."""
    return next((standing for standing, states in _STATES.items() if state in states), "unknown")


class UnreadableAnswer(LabError):  # noqa: N818 - a state of the answer, not a fault of the program
    """Answer of the scheduler that is cut short or holds something else: nothing follows from it."""


class QueueLine(Contract):
    """Line of the queue: a job, or tasks of an array in the same state.

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
    tasks: tuple[int, ...] | None = None
    more_tasks: bool = False
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
        """Standing of the job."""
        return standing_of(self.state)

    @property
    def number(self) -> str:
        """The job as the scheduler writes it, e.g. `12`, `12_3` or `12_[3,4,5]`."""
        if self.tasks is None and not self.more_tasks:
            return self.job_id
        indices = ",".join(map(str, self.tasks or ())) + (",…" if self.more_tasks else "")
        return f"{self.job_id}_{indices}" if indices.isdecimal() else f"{self.job_id}_[{indices}]"

    def is_task(self, task: int | None) -> bool:
        """Whether this line stands for a task of an array, or, with None, for a job that is no array."""
        return (task is None and self.tasks is None) or (task is not None and task in (self.tasks or ()))


def squeue_argv(user: str) -> list[str]:
    """Return the command that lists all jobs of a user, those that ended just now included."""
    return ["squeue", "--noheader", "--states=all", f"--user={user}", f"--format={FIELD_END.join(_FORMAT)}{RECORD_END}"]


def sacct_argv(job_ids: Iterable[str]) -> list[str]:
    """Return the command that lists the ends of jobs; of their allocations, not of their steps."""
    return [
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        f"--jobs={','.join(job_ids)}",
        f"--format={','.join(_SACCT)}",
    ]


def scancel_argv(number: str, name: str, user: str) -> list[str]:
    """Return the command that ends a job, by its number, or by its name while it has none."""
    return ["scancel", number] if number else ["scancel", f"--user={user}", f"--name={name}"]


def parse_squeue(text: str) -> list[QueueLine]:
    """Parse an answer of `squeue`; an empty one lists no job.

    Raises:
        UnreadableAnswer: if the answer is cut short or holds anything else.
    """
    *records, remainder = text.split(RECORD_END)
    if remainder.strip():
        raise UnreadableAnswer(f"squeue's answer is cut short or is none: it ends with {remainder.strip()[-100:]!r}.")
    lines = []
    for record in records:
        cells = [_known(cell) for cell in record.removeprefix("\n").split(FIELD_END, len(_FORMAT) - 1)]
        if len(cells) != len(_FORMAT) or not cells[1]:
            raise UnreadableAnswer(f"squeue's answer holds a line that is none: {record.strip()[:100]!r}.")
        job_id, tasks, more_tasks = parse_number(cells[0])
        texts = dict(zip(_FIELDS, cells[1:], strict=True))
        texts |= {"state": texts["state"].upper(), "start_utc": _utc(cells[3]), "end_utc": _utc(cells[4])}
        lines.append(QueueLine(job_id=job_id, tasks=tasks, more_tasks=more_tasks, **texts))
    return lines


def parse_sacct(text: str) -> list[QueueLine]:
    """Parse an answer of `sacct --parsable2`; other lines are left out.

    Nothing follows from a job that is not listed: the accounting lags behind.
    """
    lines = []
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) != len(_SACCT):
            continue
        number, state, code, start, end = cells
        try:
            job_id, tasks, more_tasks = parse_number(number)
        except UnreadableAnswer:
            continue
        if state.split():  # "CANCELLED by 1000"
            fields = {"state": state.split()[0].rstrip("+"), "exit_code": code}
            fields |= {"start_utc": _utc(start), "end_utc": _utc(end)}
            lines.append(QueueLine(job_id=job_id, tasks=tasks, more_tasks=more_tasks, **fields))
    return lines


def parse_number(text: str) -> tuple[str, tuple[int, ...] | None, bool]:
    """Parse a job's number: its id, the tasks of the array (None: no array), and whether there are more tasks.

    Example:
        >>> parse_number("12_[3-5,9%2]")
        ('12', (3, 4, 5, 9), False)

    Raises:
        UnreadableAnswer: if it is none.
    """
    match = _NUMBER.fullmatch(text.strip())
    if not match:
        raise UnreadableAnswer(f"the scheduler's answer names the job {text.strip()[:100]!r}, which is no number.")
    job_id, index = match[1], match[2]
    if index is None:
        return job_id, None, False
    if not index.startswith("["):
        return job_id, (int(index),), False
    tasks: set[int] = set()
    more_tasks = False
    # `%2` is how many may run at once, and no task.
    for part in index[1:-1].partition("%")[0].split(","):
        span = _RANGE.fullmatch(part.strip())
        if not span:
            # So squeue shortens a list, where it does not heed SLURM_BITSTR_LEN.
            if part.strip() in ("...", "…"):
                more_tasks = True
                continue
            raise UnreadableAnswer(f"the scheduler's answer names the tasks {index[:100]!r}, which are none.")
        first, last, step = int(span[1]), int(span[2] or span[1]), int(span[3] or 1)
        if step < 1 or (last - first) // step > _MOST_TASKS:
            raise UnreadableAnswer(f"the scheduler's answer names the tasks {index[:100]!r}, which are too many.")
        tasks.update(range(first, last + 1, step))
    return job_id, tuple(sorted(tasks)), more_tasks


def _known(cell: str) -> str:
    """Return a field's text; squeue has several words for nothing."""
    text = cell.strip()
    return "" if text in ("N/A", "None", "(null)", "n/a", "NONE", "NOT_SET") else text


def _utc(text: str) -> str:
    """Convert a time of the scheduler, which is in UTC, to ISO 8601; empty where it is none."""
    try:
        return datetime.fromisoformat(text.strip()).replace(tzinfo=UTC).isoformat(timespec="seconds")
    except ValueError:
        return ""


INTERVAL_VARIABLE = "DLOJZ_QUEUE_INTERVAL_S"
"""Environment variable: seconds between two questions instead of 10; for tests on a local cluster."""
INTERVAL_S, LONGEST_S = 10.0, 300.0
ACCOUNTING_AGAIN_S, NO_ACCOUNTING_S = 60.0, 86_400.0
MOST_ENDINGS = 500
MAX_BYTES = 4 * 2**20


class QueueCache(Contract):
    """Last answers of the scheduler. Times are seconds since 1970.

    Args:
        asked_s: when the scheduler last answered; 0 if it never did.
        tried_s: when it was last asked.
        failures: questions without an answer since then.
        problem: why the last one had none, in the scheduler's words.
        jobs: the last answer.
        endings: how jobs ended that the scheduler has told of once, the oldest first; it forgets them soon.
        no_accounting_until_s: until when sacct, which gave no answer, is not asked.
        accounted_s: by job, when sacct last answered about it.
    """

    schema_version: Literal[2] = 2
    asked_s: float = 0.0
    tried_s: float = 0.0
    failures: int = 0
    problem: str = ""
    jobs: tuple[QueueLine, ...] = ()
    endings: tuple[QueueLine, ...] = ()
    no_accounting_until_s: float = 0.0
    accounted_s: dict[str, float] = Field(default_factory=dict)

    def due(self, now_s: float) -> bool:
        """Return whether the scheduler may be asked again."""
        waited_s = now_s - self.tried_s
        return waited_s >= self.wait_s or waited_s < 0  # the clock was set back

    @property
    def wait_s(self) -> float:
        """Seconds to leave between two questions: 10, then 10, 20, 40 … 300 while there is no answer."""
        # It doubles from the second failure on; the exponent is bounded, so that the power cannot overflow.
        return min(LONGEST_S, interval_s() * 2.0 ** min(10, max(0, self.failures - 1)))

    def answered(self, now_s: float, jobs: list[QueueLine]) -> QueueCache:
        """Update after an answer: what has ended is kept, what is queued again has not ended."""
        # A job that is listed again was requeued: its former end counts no more.
        numbers = {job.number for job in jobs}
        endings = [job for job in self.endings if job.number not in numbers]
        endings += [job for job in jobs if job.standing == "ended"]
        changes = {"asked_s": now_s, "tried_s": now_s, "failures": 0, "problem": ""}
        changes |= {"jobs": tuple(jobs), "endings": tuple(endings[-MOST_ENDINGS:])}
        return self.model_copy(update=changes)

    def unanswered(self, now_s: float, problem: str) -> QueueCache:
        """Update after a question without an answer: all that was known stays."""
        return self.model_copy(update={"tried_s": now_s, "failures": self.failures + 1, "problem": problem})

    def may_account(self, number: str, now_s: float) -> bool:
        """Return whether sacct may be asked about a job."""
        if 0 < self.no_accounting_until_s - now_s <= NO_ACCOUNTING_S:
            return False
        # The bound 0: after a clock that was set back it may be asked.
        return not 0 <= now_s - self.accounted_s.get(number, -math.inf) < ACCOUNTING_AGAIN_S

    def accounted(self, now_s: float, number: str, lines: list[QueueLine]) -> QueueCache:
        """Update after sacct has answered about a job."""
        numbers = {job.number for job in lines}
        earlier = {job: asked_s for job, asked_s in self.accounted_s.items() if job != number}
        accounted_s = dict(
            [*earlier.items(), (number, now_s)][-MOST_ENDINGS:]
        )  # the latest last: the oldest are forgotten
        ended = [job for job in lines if job.standing == "ended"]
        endings = (*(job for job in self.endings if job.number not in numbers), *ended)
        return self.model_copy(update={"endings": endings[-MOST_ENDINGS:], "accounted_s": accounted_s})

    def unaccounted(self, now_s: float, *, for_good: bool) -> QueueCache:
        """Update after a question to sacct without an answer: there is no accounting, or not for the moment."""
        wait_s = NO_ACCOUNTING_S if for_good else ACCOUNTING_AGAIN_S
        return self.model_copy(update={"no_accounting_until_s": now_s + wait_s})


def interval_s() -> float:
    """Return the seconds between two questions: `$DLOJZ_QUEUE_INTERVAL_S`, by default 10."""
    try:
        seconds = float(os.environ.get(INTERVAL_VARIABLE, ""))
    except ValueError:
        return INTERVAL_S
    return seconds if 0 <= seconds <= LONGEST_S else INTERVAL_S


def cache_path() -> Path | None:
    """Return the cache file of this user and this cluster; None where there is no folder of our own for it."""
    folder = cache_folder()
    if folder is None:
        return None
    # Another cluster, or another set of programs, has another queue.
    identity = (shutil.which("squeue") or "", *(os.environ.get(name, "") for name in ("SLURM_CONF", "SLURM_CLUSTERS")))
    return folder / f"queue-{hashlib.sha256(chr(0).join(identity).encode()).hexdigest()[:12]}.json"


def read_cache(path: Path) -> QueueCache:
    """Read the cache file; an empty cache where it is missing, damaged, or not a file of ours."""
    file = open_regular(path)
    if file is None:
        return QueueCache()
    with file:
        status = os.fstat(file.fileno())
        # What another user wrote, or may write, is not believed.
        ours = status.st_uid == os.getuid() and not status.st_mode & 0o022
        with contextlib.suppress(LabError, OSError):
            if ours and status.st_size <= MAX_BYTES:
                return QueueCache.from_json(file.read(MAX_BYTES))
    return QueueCache()


def write_cache(path: Path, cached: QueueCache) -> None:
    """Write the cache file, whole or not at all; where it cannot be written, each process asks the scheduler."""
    with contextlib.suppress(OSError):
        write_atomic(path, cached.to_json())
        path.chmod(0o600)


@contextlib.contextmanager
def alone(path: Path, patience_s: float) -> Iterator[bool]:
    """Lock the cache; False where another thread or process is asking, and still is after `patience_s` seconds."""
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
_WITHOUT_CONF = re.compile(r"resolve_ctls_from_dns_srv|configuration source|No such file or directory.*slurm\.conf")
"""What SLURM's programs print where there is neither a slurm.conf nor a name server that knows the controller."""


class SchedulerAnswer(NamedTuple):
    """Output of a program of the scheduler; `code` is None where it did not end in time or is not there."""

    code: int | None
    out: str
    err: str


def ask(
    argv: Sequence[str],
    timeout_s: float = TIMEOUT_S,
    *,
    folder: Path | None = None,
    variables: Mapping[str, str] = ENVIRONMENT,
) -> SchedulerAnswer:
    """Run one program of the scheduler to its end, or for `timeout_s` seconds; it never raises.

    Args:
        timeout_s: seconds until it is killed, with the processes it has started.
        folder: in which it runs; by default the current one.
    """
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={**clean_environment(), **variables},
            start_new_session=True,  # a wrapper's children, which hold the pipes, end with it
        )
    except OSError as error:
        return SchedulerAnswer(None, "", f"{argv[0]}: {error.strerror}")
    with process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return SchedulerAnswer(None, "", f"{argv[0]} did not answer within {timeout_s:g} s")
    return SchedulerAnswer(process.returncode, stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace"))


def clean_environment() -> dict[str, str]:
    """Return this process's environment without options of the scheduler's programs, and without the enclosing job.

    A filter such as `SQUEUE_PARTITION` would hide jobs, and a job that is hidden is taken for one that has ended.
    Source: section ENVIRONMENT VARIABLES of sbatch(1), squeue(1) and scancel(1).
    """
    return {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(_FOREIGN)}


def words_of(answer: SchedulerAnswer) -> str:
    """Return the scheduler's words on what went wrong, in one line, control characters made visible."""
    words = visible(" ".join((answer.err.strip() or answer.out.strip()).split()))[:_MOST_WORDS]
    if answer.code and _WITHOUT_CONF.search(words) and not os.environ.get("SLURM_CONF"):
        return phrase("no configuration")
    return words or f"exit code {answer.code}, without a word"


def user() -> str:
    """Return the name of this user, or the number of one that has none here."""
    try:
        import pwd

        return pwd.getpwuid(os.getuid()).pw_name
    except (KeyError, ModuleNotFoundError):
        return str(os.getuid())


SETTLING_S = 30.0
"""An answer younger than this after the submission does not show that a job is gone: it may not be listed yet."""
_NO_ACCOUNTING = "accounting storage is disabled"
_keeping = threading.Lock()
_kept = QueueCache()  # where no file can be kept


_SHOWN = (
    *("state", "reason", "start_utc", "end_utc", "number", "name"),
    *("nodes", "partition", "left", "limit", "exit_code"),
)
"""Fields of a line that a `JobView` shows."""


@dataclass(frozen=True)
class JobView:
    """Standing of one job, as the scheduler last reported it.

    Args:
        standing: pending, running, ended, or `unknown`: it did not answer, and the job is believed alive.
        state, reason: raw, e.g. `TIMEOUT` and `PartitionTimeLimit`; the last known ones where the standing is unknown.
        start_utc, end_utc: when it started and ends, or is expected to; empty where that is not known.
        age_s: seconds since the scheduler answered; None if it never has.
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
    number: str = ""
    name: str = ""
    nodes: str = ""
    partition: str = ""
    left: str = ""
    limit: str = ""
    exit_code: str = ""
    problem: str = ""


class QueueView(NamedTuple):
    """Jobs of the user as the scheduler last listed them, the age of that list, and why it is not newer."""

    jobs: list[JobView]
    age_s: float | None
    problem: str


def view_of(job: Job, *, now_s: Callable[[], float] = time.time) -> JobView:
    """Look a run's job up in the queue; by its name as long as its number is not known.

    The scheduler is asked at most every 10 s for all jobs together; between two questions the last answer serves.
    """
    cached = _refreshed(now_s)
    queue_line = _the_line(cached.jobs, job)
    # While there is no answer, a job that was listed may have changed; an end does not change.
    if queue_line is not None and (not cached.failures or queue_line.standing == "ended"):
        return _seen(queue_line, cached, now_s())
    ended = _the_line(cached.endings, job)
    # The answer is late enough to know the job and lists it no more: it ended as was last told.
    if queue_line is None and ended is not None and _whole(cached, job):
        return _seen(ended, cached, now_s())
    if cached.failures or not _whole(cached, job):
        return _seen(queue_line, cached, now_s(), standing="unknown")
    # The queue has forgotten it, or never knew it: the accounting may tell.
    accounting_line = _the_line(_accounting(job, cached, now_s), job) if job.job_id else None
    if accounting_line is not None:
        return _seen(accounting_line, cached, now_s())
    # Nobody knows the job any more: it has ended, how is not known.
    return _seen(None, cached, now_s(), standing="ended")


def views(*, now_s: Callable[[], float] = time.time) -> QueueView:
    """List all jobs of this user, those that ended just now included."""
    cached = _refreshed(now_s)
    stale: Standing | None = "unknown" if cached.failures else None
    jobs = [
        _seen(job, cached, now_s(), standing=job.standing if job.standing == "ended" else stale) for job in cached.jobs
    ]
    return QueueView(jobs, _age_s(cached, now_s()), cached.problem)


def cancel(job: Job) -> None:
    """Cancel a job: the scheduler sends SIGTERM, then SIGKILL; a job that has ended stays as it is.

    Raises:
        LabError: if the scheduler refuses or does not answer, with its words.
    """
    answer = ask(scancel_argv(job.number, job.name, user()))
    if answer.code == 0 or "Invalid job id" in answer.err or "already complet" in answer.err:
        return
    words = words_of(answer)
    raise refusal(
        en=f"the job {job.number or job.name} could not be cancelled: {words}. Try again, or use "
        f"`scancel {job.number or '--name=' + job.name}` on the cluster.",
        fr=f"le travail {job.number or job.name} n’a pas pu être annulé : {words}. Réessayez, ou tapez "
        f"`scancel {job.number or '--name=' + job.name}` sur le calculateur.",
    )


def _refreshed(now_s: Callable[[], float]) -> QueueCache:
    """Return the cache, after a question where one is due."""
    return _changed(lambda cached: cached.due(now_s()), lambda cached: _asked(cached, now_s))


def _asked(cached: QueueCache, now_s: Callable[[], float]) -> QueueCache:
    # The time before the question: a job submitted while squeue runs may be missing from the answer.
    started_s = now_s()
    answer = ask(squeue_argv(user()))
    if answer.code != 0:
        return cached.unanswered(now_s(), words_of(answer))
    try:
        jobs = parse_squeue(answer.out)
    except UnreadableAnswer as error:
        return cached.unanswered(now_s(), visible(str(error)))
    if answer.err.strip() and not jobs:  # an empty answer with a complaint is no answer
        return cached.unanswered(now_s(), words_of(answer))
    return cached.answered(started_s, jobs)


def _accounting(job: Job, cached: QueueCache, now_s: Callable[[], float]) -> tuple[QueueLine, ...]:
    """Return how jobs ended, after asking sacct about this one where it may know."""

    def account(latest_cache: QueueCache) -> QueueCache:
        answer = ask(sacct_argv([job.number]))
        if answer.code == 0:
            return latest_cache.accounted(now_s(), job.number, parse_sacct(answer.out))
        # No such program, or accounting is off: not asked again for a day.
        none = (answer.code is None and "did not answer" not in answer.err) or _NO_ACCOUNTING in answer.err
        return latest_cache.unaccounted(now_s(), for_good=none)

    if not cached.may_account(job.number, now_s()):
        return cached.endings
    return _changed(lambda latest_cache: latest_cache.may_account(job.number, now_s()), account).endings


def _changed(is_due: Callable[[QueueCache], bool], change: Callable[[QueueCache], QueueCache]) -> QueueCache:
    """Return the cache, changed by one process at a time where a change is wanted."""
    global _kept
    path = cache_path()
    if path is None:
        with _keeping:
            if is_due(_kept):
                _kept = change(_kept)
            return _kept
    cached = read_cache(path)
    if not is_due(cached):
        return cached
    # Another thread or process that is asking is waited for only where there is no answer yet.
    with alone(path, 0.0 if cached.asked_s else TIMEOUT_S + 1) as locked:
        # Read again under the lock: whoever held it may just have asked.
        cached = read_cache(path)
        if locked and is_due(cached):
            cached = change(cached)
            write_cache(path, cached)
        return cached


def _the_line(lines: Iterable[QueueLine], job: Job) -> QueueLine | None:
    """Find the line of a job by its number, else by its name or comment; one that has not ended, then the newest."""
    if job.job_id:
        candidates = [line for line in lines if line.job_id == job.job_id]
    else:
        candidates = [line for line in lines if job.name in (line.name, line.comment) and _is_ours(line, job)]
    task_lines = [line for line in candidates if line.is_task(job.array_task)]
    # A line that was cut short may stand for this task too.
    task_lines = task_lines or [line for line in candidates if job.array_task is not None and line.more_tasks]
    return max(task_lines, key=lambda line: (line.standing != "ended", int(line.job_id)), default=None)


def _is_ours(line: QueueLine, job: Job) -> bool:
    """Return whether a line of this name can be this job and not an earlier one of the same run."""
    return line.standing != "ended" or _seconds(line.end_utc) >= _seconds(job.submitted_utc)


def _whole(cached: QueueCache, job: Job) -> bool:
    """Return whether the last answer is late enough to know this job."""
    born = launched_utc(job.name)
    # Where no submission is noted, the run's name tells when it was asked for.
    submitted_s = born.timestamp() if born and not job.submitted_utc else _seconds(job.submitted_utc)
    return bool(cached.asked_s) and cached.asked_s >= submitted_s + SETTLING_S


def _seconds(time_utc: str) -> float:
    """Convert a time to seconds since 1970; infinite where it is not known."""
    try:
        return datetime.fromisoformat(time_utc).timestamp()
    except ValueError:
        return float("inf")


def _age_s(cached: QueueCache, now_s: float) -> float | None:
    return max(0.0, now_s - cached.asked_s) if cached.asked_s else None


def _seen(line: QueueLine | None, cached: QueueCache, now_s: float, standing: Standing | None = None) -> JobView:
    freshness: dict[str, Any] = {"age_s": _age_s(cached, now_s), "problem": cached.problem}
    if line is None:
        return JobView(standing or "unknown", **freshness)
    return JobView(standing or line.standing, **freshness, **{name: getattr(line, name) for name in _SHOWN})


UNCERTAIN = re.compile(r"[Ss]ocket timed out|[Zz]ero [Bb]ytes were transmitted|did not answer")
"""Words of sbatch after which nobody knows whether the job was taken."""
_LIMIT = re.compile(r"(Assoc|QOS)(Grp|Max)([A-Za-z]*)")


@cache
def _messages() -> dict[str, list[dict[str, Any]]]:
    path = Path(__file__).with_name("data") / "slurm_messages.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def explain_refusal(words: str) -> str:
    """Explain a refusal of sbatch in one sentence; empty where it is not known."""
    for message in _messages()["refusal"]:
        if re.search(message["pattern"], words, re.IGNORECASE):
            return say(en=message["en"], fr=message["fr"])
    return ""


def explain_reason(reason: str) -> str:
    """Explain a raw reason of `squeue` in one sentence; empty where there is none."""
    name = reason.strip().strip("()")
    if name in ("", "None"):
        return ""
    key = name.partition(",")[0].replace(" ", "_").lower()
    for message in _messages()["reason"]:
        if any(fnmatchcase(key, pattern) for pattern in message["names"]):
            return say(en=message["en"], fr=message["fr"])
    limit = _LIMIT.match(name)
    if limit:
        return _explain_limit(*limit.groups())
    words = visible(name)[:200]
    return phrase("scheduler says why", words=words)


def _explain_limit(owner: str, kind: str, resource: str) -> str:
    """Explain a limit by its owner (account or QoS), whether all its users share it, and what it counts."""
    en, fr = ("your account", "de votre compte") if owner == "Assoc" else ("the QoS", "de la QoS")
    shared = kind == "Grp"
    unit = resource.partition("Per")[0].lower()  # WallDurationPerJob counts hours, not jobs
    counted = next((message for message in _messages()["counted"] if message["part"] in unit), None)
    counted = counted or {"en": "resources", "fr": "de ressources"}
    # A limit per job, not a sum over jobs: that other jobs end helps nothing.
    if not shared and any(word in resource for word in ("WallDuration", "PerJob", "PerNode", "MinutesPerJob")):
        return phrase("more than a job is given", en=en, counted_en=counted["en"], fr=fr, counted_fr=counted["fr"])
    if "Minutes" in resource and shared:
        return phrase("hours used up", en=en, fr=fr)
    return say(
        en=f"{en} has reached its limit of {counted['en']}{' together with all who share it' if shared else ''}: it "
        "starts when other jobs end.",
        fr=f"la limite {counted['fr']} {fr} est atteinte{', tous utilisateurs confondus' if shared else ''} : il "
        "démarrera quand d’autres travaux finiront.",
    )
