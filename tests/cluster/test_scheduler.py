"""What is made of a real scheduler's words: its refusals, a job's whole life, and the time in which it is down."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.running.folder import Job
from dlojz.running.slurm import slurm_queue
from dlojz.running.slurm.slurm_queue import INTERVAL_VARIABLE, ask
from tests.fakeslurm import measured

from .conftest import until

SLEEP = "#!/bin/bash\nexec sleep 600\n"


def sbatch(slurm: Any, *options: str, script: str = SLEEP) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sbatch", "--parsable", "--chdir=/tmp", "--output=/dev/null", *options],
        env=slurm.environment,
        input=script,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def sent(slurm: Any, name: str, *options: str) -> Job:
    done = sbatch(slurm, f"--job-name={name}", *options)
    assert done.returncode == 0, done.stderr
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Job(machine="local", name=name, job_id=done.stdout.strip(), submitted_utc=now)


@pytest.fixture
def at_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look is a question."""
    monkeypatch.setenv(INTERVAL_VARIABLE, "0")


@pytest.fixture(scope="module", autouse=True)
def limited(slurm: Any) -> Job:
    """A job whose time is over; the controller looks every half minute, beside the other tests."""
    job = sent(slurm, "limited")
    command = ["scontrol", "update", f"JobId={job.job_id}", "EndTime=now+1"]
    until(lambda: subprocess.run(command, env=slurm.environment, capture_output=True, check=False).returncode == 0)
    return job


@pytest.mark.parametrize("name", measured.REFUSALS)
def test_the_words_of_the_fake_are_those_of_the_real_one(name: str, slurm: Any) -> None:
    refusal = measured.REFUSALS[name]
    done = sbatch(slurm, *refusal.options)
    assert (done.returncode, done.stdout, done.stderr) == (refusal.code, "", refusal.err)


def test_what_squeue_and_sacct_say_of_a_job_that_is_gone(slurm: Any, at_once: None) -> None:
    answers = [ask(["squeue", "-j", "999999"]), ask(["sacct", "-j", "999999"])]
    assert [(answer.code, answer.err) for answer in answers] == [measured.PURGED, measured.NO_ACCOUNTING]


def test_a_filter_in_the_students_shell_hides_no_job(
    slurm: Any, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = sent(slurm, "not-hidden")
    monkeypatch.setenv("SQUEUE_PARTITION", "nowhere")
    monkeypatch.setenv("SQUEUE_FORMAT2", "JobID")
    assert until(lambda: slurm_queue.view_of(job).standing == "running")
    slurm_queue.cancel(job)
    assert until(lambda: slurm_queue.view_of(job).state == "CANCELLED")


def test_a_job_that_no_node_will_ever_take_is_pending_with_its_reason(slurm: Any, at_once: None) -> None:
    """Accepted with exit code 0: only the reason tells that it will never start."""
    jobs = [sent(slurm, "for-ever", *options) for options in (("--nodes=9",), ("--time=99:00:00",))]
    for job in jobs:
        reason = until(lambda job=job: slurm_queue.view_of(job).reason)
        assert reason in measured.FOR_EVER
        assert slurm_queue.view_of(job).standing == "pending"
        slurm_queue.cancel(job)


def test_while_the_controller_is_down_a_job_is_believed_alive(slurm: Any, at_once: None) -> None:
    job = sent(slurm, "lives")
    until(lambda: slurm_queue.view_of(job).standing == "running")
    # In good order: killed, it may come back with a job of some seconds ago as one that waits (see test_jobs).
    assert slurm.stop("slurmctld") == ["slurmctld"]
    try:
        view = slurm_queue.view_of(job)
        assert (view.standing, view.state) == ("unknown", "RUNNING"), "silence is no end"
        assert "Unable to contact slurm controller (connect failure)" in view.problem
        assert view.age_s is not None
        answer = ask(["squeue"])
        assert (answer.code, answer.err) == measured.CONTROLLER_DOWN["squeue"]
        with pytest.raises(LabError, match="Unable to contact slurm controller"):
            slurm_queue.cancel(job)
    finally:
        slurm.start(controller_only=True)
    assert until(lambda: slurm_queue.view_of(job).standing == "running")
    slurm_queue.cancel(job)


def test_a_job_at_its_limit_has_ended_by_its_limit(limited: Job, at_once: None) -> None:
    view = until(lambda: (seen := slurm_queue.view_of(limited)).standing == "ended" and seen)
    assert (view.state, view.reason) == ("TIMEOUT", "TimeLimit")
