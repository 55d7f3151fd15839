"""A job is dead only when the scheduler says so; silence is never an answer."""

import json
import os
import sys
import threading
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.running.folder import Job
from dlojz.running.slurm import slurm_queue
from dlojz.running.slurm.slurm_queue import (
    QueueCache,
    cache_path,
    cancel,
    parse_squeue,
    read_cache,
    view_of,
    views,
    write_cache,
)

NAME = "20300101-000000-0123456789ab-cdef"
JOB = Job(machine="local", name=NAME, job_id="12", submitted_utc="2030-01-01T00:00:00+00:00")
SUBMITTED_S = datetime(2030, 1, 1, tzinfo=UTC).timestamp()


class Clock:
    """The time of the test, which only the test moves."""

    def __init__(self) -> None:
        self.s = SUBMITTED_S + 60

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_views_of_all_jobs_take_one_question_in_ten_seconds(fake: Any, says: Any, clock: Clock) -> None:
    fake.plays(
        says.squeue(says.line("12", "PENDING", "Priority"), says.line("13", "RUNNING")),
        says.squeue(says.line("12", "RUNNING", start="2030-01-01T00:01:00")),
    )
    for _ in range(3):
        view = view_of(JOB, now_s=clock)
        clock.s += 3
    assert (view.standing, view.reason, view.age_s) == ("pending", "Priority", 6)
    assert [job.number for job in views(now_s=clock).jobs] == ["12", "13"]
    assert len(fake.calls) == 1
    clock.s += 1
    assert view_of(JOB, now_s=clock).start_utc == "2030-01-01T00:01:00+00:00"
    assert len(fake.calls) == 2


FAULTS = {
    "down": {"code": 1, "err": "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"},
    "garbage": {"out": "Segmentation fault\n"},
    "partial": {"out": "12\x1fRUNNING\x1fNone\x1f2030-01"},
    "empty with a complaint": {"err": "slurm_load_jobs error: Zero Bytes were transmitted or received\n"},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_view_of_a_job_does_not_end_where_the_scheduler_does_not_answer(
    fault: dict[str, Any], fake: Any, says: Any, clock: Clock
) -> None:
    fake.plays(says.squeue(says.line("12", "RUNNING")), says.squeue(times=0) | fault)
    assert view_of(JOB, now_s=clock).standing == "running"
    clock.s += 35
    view = view_of(JOB, now_s=clock)
    assert (view.standing, view.state, view.age_s) == ("unknown", "RUNNING", 35)
    assert view.problem
    stranger = Job(**{**JOB.to_dict(), "job_id": "99"})
    assert view_of(stranger, now_s=clock).standing == "unknown"
    assert views(now_s=clock).problem == view.problem


def test_view_of_a_job_gives_up_a_question_that_hangs(
    fake: Any, says: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.plays(says.squeue(delay_s=60))
    ask = slurm_queue.ask
    monkeypatch.setattr(slurm_queue, "ask", lambda argv: ask(argv, 0.5))
    view = view_of(JOB, now_s=clock)
    assert (view.standing, view.age_s) == ("unknown", None)
    assert "did not answer within 0.5 s" in view.problem


def test_view_of_a_job_asks_less_and_less_often_while_there_is_no_answer(fake: Any, says: Any, clock: Clock) -> None:
    fake.plays(says.squeue(**says.DOWN, times=0))
    asked_s: list[float] = []
    for _ in range(100):
        view_of(JOB, now_s=clock)
        if len(fake.calls) > len(asked_s):
            asked_s.append(clock.s)
        clock.s += 10
    assert [after - before for before, after in pairwise(asked_s)] == [10, 20, 40, 80, 160, 300, 300]


def test_view_of_a_job_goes_on_asking_after_a_clock_set_back(fake: Any, says: Any, clock: Clock) -> None:
    fake.plays(says.squeue(says.line("12", "RUNNING"), times=2))
    view_of(JOB, now_s=clock)
    clock.s -= 3600
    view_of(JOB, now_s=clock)
    assert len(fake.calls) == 2


def test_view_of_an_absent_job_has_ended_only_if_asked_late_enough(fake: Any, says: Any, clock: Clock) -> None:
    fake.plays(says.squeue(times=2), says.NO_ACCOUNTING)
    clock.s = SUBMITTED_S + 5
    assert view_of(JOB, now_s=clock).standing == "unknown"
    clock.s += 60
    view = view_of(JOB, now_s=clock)
    assert (view.standing, view.state) == ("ended", "")


def test_view_of_an_absent_job_takes_its_end_from_the_accounting(fake: Any, says: Any, clock: Clock) -> None:
    told = {"command": "^sacct .*--jobs=12 ", "out": "12|FAILED|137:0|2030-01-01T00:00:10|2030-01-01T00:00:20\n"}
    fake.plays(says.squeue(), told)
    for _ in range(2):  # asked once, then remembered
        view = view_of(JOB, now_s=clock)
        assert (view.standing, view.state, view.exit_code) == ("ended", "FAILED", "137:0")


def test_where_there_is_no_accounting_it_is_asked_once(fake: Any, says: Any, clock: Clock) -> None:
    fake.plays(says.squeue(), {**says.NO_ACCOUNTING, "times": 1}, says.squeue())
    view_of(JOB, now_s=clock)
    clock.s += 100
    other = Job(**{**JOB.to_dict(), "job_id": "14"})
    assert view_of(other, now_s=clock).standing == "ended"


def test_view_of_a_job_keeps_an_end_that_the_scheduler_has_forgotten(fake: Any, says: Any, clock: Clock) -> None:
    ended = says.line("12", "TIMEOUT", "TimeLimit", end="2030-01-01T01:00:00")
    fake.plays(says.squeue(ended), says.squeue(), says.squeue(says.line("12", "PENDING", "BeginTime")))
    assert view_of(JOB, now_s=clock).state == "TIMEOUT"
    clock.s += 400
    assert (view_of(JOB, now_s=clock).standing, view_of(JOB, now_s=clock).state) == ("ended", "TIMEOUT")
    clock.s += 10  # requeued by hand: it has not ended
    assert view_of(JOB, now_s=clock).standing == "pending"


def test_a_job_without_a_number_is_found_by_its_name(fake: Any, says: Any, clock: Clock) -> None:
    nameless = Job(**{**JOB.to_dict(), "job_id": "", "submitted_utc": ""})
    earlier = says.line("7", "TIMEOUT", name=NAME, end="2029-12-31T00:00:00")
    fake.plays(says.squeue(earlier, says.line("12", "RUNNING", name=NAME)), says.squeue(earlier))
    assert (view_of(nameless, now_s=clock).standing, view_of(nameless, now_s=clock).number) == ("running", "12")
    clock.s += 10
    view = view_of(nameless, now_s=clock)  # an earlier job of the same run is not this one
    assert (view.standing, view.state) == ("ended", "")


def test_view_of_a_task_of_an_array_is_that_of_its_line(fake: Any, says: Any, clock: Clock) -> None:
    fake.plays(
        says.squeue(says.line("12_[3-5%2]", "PENDING", "JobArrayTaskLimit"), says.line("12_1", "RUNNING"), times=0)
    )

    def standing(task: int | None) -> str:
        return view_of(Job(**{**JOB.to_dict(), "array_task": task}), now_s=clock).standing

    assert [standing(task) for task in (1, 3, 5)] == ["running", "pending", "pending"]


def test_view_of_a_job_in_a_state_that_nobody_knows_is_believed_alive(fake: Any, says: Any, clock: Clock) -> None:
    fake.plays(says.squeue(says.line("12", "TELEPORTING")))
    assert view_of(JOB, now_s=clock).standing == "unknown"


def test_cancel(fake: Any, says: Any) -> None:
    refused = {"command": "^scancel 12$", "code": 8, "err": "scancel: error: Unable to contact slurm controller\n"}
    gone = {
        "command": "^scancel 12$",
        "code": 1,
        "err": "scancel: error: Kill job error on job id 12: Invalid job id specified\n",
    }
    fake.plays({"command": "^scancel 12$"}, gone, refused)
    cancel(JOB)
    cancel(JOB)
    with pytest.raises(LabError, match="Unable to contact slurm controller"):
        cancel(JOB)


def test_many_threads_ask_once(fake: Any, says: Any, clock: Clock) -> None:
    fake.plays(says.squeue(says.line("12", "RUNNING"), delay_s=0.3))
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(view_of(JOB, now_s=clock).standing)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["running"] * 6 and len(fake.calls) == 1


def test_queue_cache_begins_its_pauses_anew_after_an_answer() -> None:
    """10 s between two questions, then 10, 20, 40 … 300 while there is no answer."""
    known, waits = QueueCache(), []
    for _ in range(2):
        for failed in range(7):
            known = known.unanswered(0.0, "?") if failed else known.answered(0.0, [])
            waits.append(known.wait_s)
    assert waits == [10, 10, 20, 40, 80, 160, 300] * 2


def test_a_cache_that_is_damaged_or_not_ours_is_as_good_as_none(fake: Any, tmp_path: Path) -> None:
    path = cache_path()
    assert path is not None and path.is_relative_to(tmp_path / "cache")
    # Asked again, a job is the last to be forgotten.
    asked = QueueCache(accounted_s={"7": 1.0, "8": 2.0}).accounted(3.0, "7", [])
    assert list(asked.accounted_s.items()) == [("8", 2.0), ("7", 3.0)]
    known = QueueCache(asked_s=5.0).answered(7.0, parse_squeue("1\x1fRUNNING" + "\x1f" * 10 + "\x1e\n"))
    write_cache(path, known)
    assert read_cache(path) == known and path.stat().st_mode & 0o777 == 0o600
    whole = json.loads(path.read_text())
    for damage in (
        "",
        "[]",
        "[" * 100_000,
        '{"schema_version": 1}',
        json.dumps({**whole, "asked_s": "x"}),
        json.dumps({**whole, "jobs": [7]}),
        json.dumps({**whole, "accounted_s": 7}),
        json.dumps({**whole, "x": 1}),
    ):
        path.write_text(damage)
        assert read_cache(path) == QueueCache()
    write_cache(path, known)
    for mode in (0o666, 0o620, 0o660, 0o602):  # anybody could have written it, or anybody of the group
        path.chmod(mode)
        assert read_cache(path) == QueueCache()
    path.chmod(0o644)
    assert read_cache(path) == known
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))
    assert read_cache(path) == QueueCache()


def test_a_cache_folder_that_cannot_be_made_is_done_without(
    fake: Any, says: Any, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(slurm_queue, "_kept", QueueCache())
    fake.plays(says.squeue(says.line("12", "RUNNING")))
    assert [view_of(JOB, now_s=clock).standing for _ in range(2)] == ["running"] * 2
    assert len(fake.calls) == 1


def test_slurm_queue_ask_hides_no_job_whatever_options_the_environment_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter in a student's shell would make a job absent, and an absent one has ended."""
    for name in ("SQUEUE_PARTITION", "SQUEUE_FORMAT2", "SACCT_FORMAT", "SCANCEL_INTERACTIVE", "SLURM_CLUSTERS"):
        monkeypatch.setenv(name, "other")
    monkeypatch.setenv("SLURM_CONF", "/kept")
    code = "import os; print(*sorted(name for name in os.environ if name.startswith('S') and '_' in name))"
    seen = slurm_queue.ask([sys.executable, "-c", code]).out.split()
    assert [name for name in seen if name.startswith(("SQUEUE_", "SACCT_", "SCANCEL_", "SLURM_"))] == [
        "SLURM_BITSTR_LEN",
        "SLURM_CONF",
        "SLURM_TIME_FORMAT",
    ]


def test_the_words_of_a_program_hide_nothing() -> None:
    assert slurm_queue.words_of(slurm_queue.SchedulerAnswer(1, "", "a\x1b[2J\n b")) == "a\\x1b[2J b"
    assert "without a word" in slurm_queue.words_of(slurm_queue.SchedulerAnswer(1, "", ""))
    assert os.environ.get("DLOJZ_QUEUE_INTERVAL_S") is None
