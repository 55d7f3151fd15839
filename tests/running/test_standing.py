"""A run that is a scheduler's job: what its state is, whatever the scheduler says or does not say."""

import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dlojz.config.run_config import RunConfig
from dlojz.results.record import write_record
from dlojz.running.ending import Ending
from dlojz.running.folder import Job
from dlojz.running.run import Run
from dlojz.running.slurm.slurm_queue import QueueLine, _is_ours
from dlojz.running.state import assemble, read_all_events, read_state

Told = Callable[..., list[dict[str, Any]]]
MakeFolder = Callable[..., Path]
COMPLETED = {"event": "end", "status": "completed", "reason": ""}


@pytest.fixture
def job_folder(config: RunConfig, make_folder: MakeFolder) -> Callable[..., Path]:
    """The folder of a run that was submitted long ago by a process that has gone, untouched since."""

    def make(events: dict[int, list[dict[str, Any]]] | None = None, *, log: str = "", job_id: str = "12") -> Path:
        folder = make_folder(config, events)
        Job(machine="local", name=folder.name, job_id=job_id, submitted_utc="2020-01-01T00:00:00+00:00").write(folder)
        (folder / "logs" / "slurm.log").write_text(log)
        age(folder)
        return folder

    return make


def age(folder: Path) -> None:
    """Let everything in the folder be an hour old."""
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - 3600,) * 2)


def test_read_state_of_a_run_without_a_record_asks_the_scheduler(
    fake: Any, says: Any, job_folder: Any, told: Told
) -> None:
    waiting, running = job_folder(), job_folder({0: told(2)}, job_id="13")
    # A requeued job has told of steps, and waits.
    fake.plays(
        says.squeue(says.line("12", "PENDING", "Priority"), says.line("13", "RUNNING"), says.line("14", "PENDING"))
    )
    requeued = job_folder({0: told(2)}, job_id="14")
    assert [read_state(folder)[0] for folder in (waiting, running, requeued)] == ["queued", "running", "queued"]


def test_read_state_is_no_end_where_the_scheduler_is_silent(fake: Any, says: Any, job_folder: Any, told: Told) -> None:
    fake.plays(says.squeue(**says.DOWN))
    assert read_state(job_folder())[0] == "queued"
    folder = job_folder({0: told(2)})
    assert read_state(folder) == ("running", None)
    assert not (folder / "record.json").exists()


def test_the_record_wins(fake: Any, says: Any, config: RunConfig, job_folder: Any, told: Told) -> None:
    """A controller that came back after a crash lists a job that has ended as waiting: nobody asks it."""
    folder = job_folder({0: told(4, COMPLETED), 1: told(4, COMPLETED)})
    write_record(
        folder / "record.json", assemble(folder.name, config, read_all_events(folder), Ending("completed"), 1.0)
    )
    assert Run(folder).state == "completed"
    assert fake.calls == []


def test_read_state_believes_ranks_that_all_told_their_end_whatever_the_queue_says(
    fake: Any, says: Any, job_folder: Any, told: Told
) -> None:
    fake.plays(says.squeue(says.line("12", "PENDING", "launch failed requeued held")))
    folder = job_folder({0: told(4, COMPLETED), 1: told(4, COMPLETED)})
    state, record = read_state(folder)
    assert state == "completed" and record is not None and len(record.losses) == 4


OOM_TEXT = "slurmstepd: error: Job 12 exceeded memory limit (5242880 > 4194304), being killed\n"
LIMIT_TEXT = "slurmstepd: error: *** JOB 12 ON n0 CANCELLED AT 2030-01-01T01:00:00 DUE TO TIME LIMIT ***\n"
STEP_TEXT = (
    "srun: error: n1: task 1: Exited with exit code 3\nslurmstepd: error: *** STEP 12.0 ON n0 CANCELLED AT 2030 ***\n"
)


@pytest.mark.parametrize(
    "state, log, status, words",
    [
        ("TIMEOUT", "", "timeout", "the time limit of the job 12 was reached after step 2"),
        ("", LIMIT_TEXT, "timeout", "time limit"),
        ("CANCELLED", "", "cancelled", "cancelled after step 2"),
        ("CANCELLED", LIMIT_TEXT, "timeout", "time limit"),
        ("OUT_OF_MEMORY", "", "oom", "OUT_OF_MEMORY"),
        ("FAILED", OOM_TEXT, "oom", "exceeded memory limit (5242880 > 4194304)"),
        ("NODE_FAIL", "", "failed", "a node of the job 12 failed after step 2 (NODE_FAIL)"),
        ("PREEMPTED", "", "failed", "PREEMPTED"),
        ("FAILED", "", "failed", "the scheduler says: FAILED, NonZeroExitCode"),
        ("FAILED", STEP_TEXT, "failed", "the scheduler says: FAILED"),
        ("", "", "failed", "no longer knows how"),
    ],
)
def test_read_state_tells_how_a_job_ended(
    state: str, log: str, status: str, words: str, fake: Any, says: Any, job_folder: Any, told: Told
) -> None:
    lines = [says.line("12", state, "NonZeroExitCode" if state == "FAILED" else "None")] if state else []
    fake.plays(says.squeue(*lines), says.NO_ACCOUNTING)
    folder = job_folder({0: told(2), 1: told(1)}, log=log)
    found, record = read_state(folder)
    assert found == status and record is not None
    assert words in record.reason and record.losses == (2.0, 1.875)
    assert json.loads((folder / "record.json").read_text())["status"] == status


def test_read_state_knows_a_kill_by_the_137_of_the_accounting(
    fake: Any, says: Any, job_folder: Any, told: Told
) -> None:
    fake.plays(says.squeue(), {"command": "^sacct ", "out": "12|FAILED|137:0|Unknown|Unknown\n"})
    state, record = read_state(job_folder({0: told(2)}))
    assert state == "oom" and record is not None and "exit code 137:0" in record.reason


def test_read_state_believes_a_rank_that_named_a_cause_before_the_scheduler(
    fake: Any, says: Any, job_folder: Any, told: Told
) -> None:
    fake.plays(says.squeue(says.line("12", "FAILED", "NonZeroExitCode")))
    end = {"event": "end", "status": "failed", "reason": "rank 1: ValueError: the batch is empty"}
    _, record = read_state(job_folder({0: told(2), 1: told(2, end)}))
    assert record is not None and record.reason == "rank 1: ValueError: the batch is empty"


def test_read_state_of_a_resumed_run_is_not_ended_by_its_first_end(
    fake: Any, says: Any, job_folder: Any, told: Told
) -> None:
    fake.plays(says.squeue(says.line("12", "NODE_FAIL")))
    stopped = {"event": "end", "status": "timeout", "reason": "rank 0 stopped in time."}
    _, record = read_state(job_folder({0: [*told(2, stopped), *told(3)], 1: [*told(2, stopped), *told(3)]}))
    assert record is not None and "NODE_FAIL" in record.reason and len(record.losses) == 3


def test_read_state_gives_files_time_to_arrive(fake: Any, says: Any, job_folder: Any, told: Told) -> None:
    """On a slow file system the end of a job is seen before its last files."""
    fake.plays(says.squeue(says.line("12", "FAILED")))
    folder = job_folder({0: told(2)})
    (folder / "events" / "rank-0.jsonl").touch()
    assert read_state(folder) == ("running", None)
    age(folder)
    assert read_state(folder)[0] == "failed"


def test_read_state_ends_at_once_a_job_cancelled_while_it_waited(fake: Any, says: Any, job_folder: Any) -> None:
    fake.plays(says.squeue(says.line("12", "CANCELLED", start="2030-01-01T00:00:10", end="2030-01-01T00:00:10")))
    folder = job_folder()
    (folder / "logs" / "slurm.log").touch()
    assert read_state(folder)[0] == "cancelled"


def test_read_state_of_a_submission_that_broke_off_says_to_send_it_again(
    fake: Any, says: Any, config: RunConfig, make_folder: MakeFolder
) -> None:
    """Before its job has a number, a run is queued while its submitter lives; then the scheduler is asked by name."""
    folder = make_folder(config, alive=True)
    Job(machine="local", name=folder.name).write(folder)
    assert read_state(folder)[0] == "queued" and fake.calls == []
    folder = make_folder(config)
    Job(machine="local", name=folder.name, submitted_utc="2020-01-01T00:00:00+00:00").write(folder)
    fake.plays(says.squeue(says.line("12", "RUNNING", name=folder.name)))
    assert read_state(folder)[0] == "running"
    lost = make_folder(config)
    Job(machine="local", name=lost.name, submitted_utc="2020-01-01T00:00:00+00:00").write(lost)
    age(lost)
    state, record = read_state(lost)
    assert state == "failed" and record is not None and "submit it again" in record.reason


@pytest.mark.parametrize(("ended_before_s", "ours"), [(3600, False), (60, False), (1, False), (0, True), (-1, True)])
def test_is_ours_tells_an_earlier_line_of_the_same_name_by_its_end(ended_before_s: int, ours: bool) -> None:
    """A job that ended a minute before this one was submitted is another one."""
    submitted = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    ended = submitted - timedelta(seconds=ended_before_s)
    line = QueueLine(job_id="12", state="FAILED", end_utc=ended.isoformat())
    assert line.standing == "ended"
    assert _is_ours(line, Job(machine="local", name="one", submitted_utc=submitted.isoformat())) is ours


def test_read_state_ends_a_submission_interrupted_in_a_notebook_that_lives_on(
    fake: Any, says: Any, config: RunConfig, make_folder: MakeFolder
) -> None:
    """Ctrl-C while sbatch is asked: the kernel is alive, and nobody is about to write a number any more."""
    folder = make_folder(config, alive=True)
    sent = datetime.now(UTC)
    Job(machine="local", name=folder.name, submitted_utc=sent.isoformat()).write(folder)
    assert read_state(folder)[0] == "queued" and fake.calls == []
    sent -= timedelta(hours=1)
    Job(machine="local", name=folder.name, submitted_utc=sent.isoformat()).write(folder)
    age(folder)
    fake.plays(says.squeue(says.line("12", "RUNNING", name="another")), says.NO_ACCOUNTING)
    state, record = read_state(folder)
    assert state == "failed" and record is not None and "submit it again" in record.reason


def test_read_state_takes_the_scheduler_s_word_alone_without_a_log_folder(
    fake: Any, says: Any, job_folder: Any
) -> None:
    """sbatch takes it, it fails at once, and it leaves no log at all."""
    fake.plays(says.squeue(says.line("12", "FAILED", "JobLaunchFailure")))
    folder = job_folder()
    (folder / "logs" / "slurm.log").unlink()
    age(folder)
    state, record = read_state(folder)
    assert state == "failed" and record is not None
    assert "the scheduler says: FAILED, JobLaunchFailure" in record.reason


def test_read_state_of_a_job_sent_again_is_not_the_end_of_the_earlier_one(
    fake: Any, says: Any, job_folder: Any, told: Told
) -> None:
    """The first said how it ended; the second's node was lost, and nobody could say anything."""
    fake.plays(says.squeue(says.line("12", "NODE_FAIL")))
    failed = {"event": "end", "status": "failed", "reason": "rank 1 was killed by signal 9."}
    folder = job_folder({0: [*told(2, failed), *told(3)], 1: [*told(2, failed), *told(3)]})
    lines = ({"event": "started", "start": "7-0"}, failed, {"event": "started", "start": "12-0"})
    (folder / "events" / "launcher.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    age(folder)
    state, record = read_state(folder)
    assert state == "failed" and record is not None and "NODE_FAIL" in record.reason


def test_cancel_asks_the_scheduler_and_the_record_says_so(fake: Any, says: Any, job_folder: Any, told: Told) -> None:
    fake.plays(
        says.squeue(says.line("12", "RUNNING")),
        {"command": "^scancel 12$"},
    )
    folder = job_folder({0: told(2)})
    assert "is asked to stop" in Run(folder).cancel()
    assert (folder / "cancel").exists()
    fake.plays(says.squeue(says.line("12", "FAILED", "NonZeroExitCode")))
    (Path(os.environ["XDG_CACHE_HOME"]) / "dlojz").rename(folder.parent / "forgotten")
    age(folder)
    assert Run(folder).state == "cancelled"
