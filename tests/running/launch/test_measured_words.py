"""The words of a real scheduler (tests/fakeslurm/measured.py): told in full, and explained in both languages."""

from pathlib import Path
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.running.folder import Job, read_job
from dlojz.running.launch import run
from dlojz.running.run import Run, runs
from dlojz.running.slurm.slurm_queue import explain_reason, view_of

CONFIG = RunConfig.of(model="vit_tiny", dp=2, device="cpu")
NAMES = ("partition", "memory", "GPUs of a node", "kind of GPU", "constraint", "reservation", "time")


def send() -> Run:
    return run(CONFIG, on="slurm", machine="local", wait=False)


def test_every_measured_refusal_is_tried(measured: Any) -> None:
    assert tuple(measured.REFUSALS) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("language", ["en", "fr"])
def test_a_refusal_is_told_in_full_and_explained(name: str, language: Any, fake: Any, measured: Any) -> None:
    refusal = measured.REFUSALS[name]
    fake.plays({"command": "^sbatch --parsable job.sh$", "code": refusal.code, "err": refusal.err})
    use_language(language)
    with pytest.raises(LabError) as told:
        send()
    said = str(told.value)
    for line in refusal.err.splitlines():
        assert line.removeprefix("sbatch: error: ") in said
    assert (refusal.meaning if language == "en" else refusal.sens) in said
    assert "\n" not in said
    [one] = runs()  # it has ended: the scheduler is not asked about it
    assert one.record is not None
    assert (one.record.status, one.record.reason) == ("failed", said)
    job = read_job(one.folder)
    assert job is not None
    assert job.job_id == ""


def test_nothing_is_sent_while_the_controller_is_down_and_all_is_sent_afterwards(fake: Any, measured: Any) -> None:
    code, err = measured.CONTROLLER_DOWN["sbatch"]
    fake.plays({"command": "^sbatch ", "code": code, "err": err}, {"command": "^sbatch ", "out": "41\n"})
    with pytest.raises(LabError, match=r"nothing was sent; try again"):
        send()
    one = send()  # a run that was refused has failed: this is another one
    job = read_job(one.folder)
    assert job is not None
    assert job.job_id == "41"


def test_while_the_controller_is_down_a_job_is_alive_and_a_cancel_says_so(fake: Any, measured: Any) -> None:
    down = {name: {"code": code, "err": err} for name, (code, err) in measured.CONTROLLER_DOWN.items()}
    fake.plays(
        {"command": "^sbatch ", "out": "1\n"},
        {"command": "^squeue ", **down["squeue"]},
        {"command": "^scancel 1$", **down["scancel"]},
    )
    one = send()
    assert one.state == "queued"
    job = read_job(one.folder)
    assert job is not None
    assert view_of(job).standing == "unknown"
    with pytest.raises(LabError, match="could not be cancelled: .*Unable to contact slurm controller"):
        one.cancel()
    assert (one.folder / "cancel").exists(), "its ranks see the request although the scheduler does not answer"


def test_what_is_said_of_a_purged_job_is_never_taken_for_an_end(fake: Any, measured: Any, tmp_path: Path) -> None:
    """squeue -j would say this of a job that completed an hour ago, too: one question is asked for all jobs instead."""
    code, err = measured.PURGED
    fake.plays({"command": "^squeue (?!.*(-j|--job))", "code": code, "err": err})
    job = Job(machine="local", name="a", job_id="12", submitted_utc="2020-01-01T00:00:00+00:00")
    assert view_of(job).standing == "unknown"


def test_explain_reason_tells_of_a_job_that_was_accepted_and_will_never_start(measured: Any) -> None:
    for reason in measured.FOR_EVER:
        use_language("en")
        assert "for ever" in explain_reason(reason)
        use_language("fr")
        assert "sans fin" in explain_reason(reason)
