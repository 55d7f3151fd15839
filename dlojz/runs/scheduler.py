"""The scheduler's view of a run's job: waiting, running, ended, or unknown.

Layer 5. Invariant: a job has ended only if the scheduler says so: it names the job's end, or it was asked after the
job was submitted, answered, and does not know the job any more. Silence, an error or an answer cut short mean
`unknown`: the job is believed alive, and what was last known is told with its age.

One `squeue` serves all jobs and all processes of a user (`queue_cache`); where there is accounting, `sacct` tells how a
job ended that the queue has forgotten.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from dlojz.runs.job import Job
from dlojz.runs.logs import visible
from dlojz.runs.programs import TIMEOUT_S, ask, user, words_of
from dlojz.runs.queue_cache import Cached, alone, cache_path, read_cache, write_cache
from dlojz.runs.squeue import (
    Listed,
    Standing,
    Unreadable,
    parse_sacct,
    parse_squeue,
    sacct_argv,
    scancel_argv,
    squeue_argv,
)
from dlojz.schema import LabError
from dlojz.text import say

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
