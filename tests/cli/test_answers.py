"""What the commands answer: one JSON document on stdout and nothing else, for real runs of two processes.

Processes of their own are the commands of which more is judged than the text: what trains first, what looks at this
machine, what is interrupted. The others are called here, and their two streams taken at the level of the descriptors.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dlojz import models
from dlojz.cli import doctor
from dlojz.cli.doctor import Check, check_disk
from dlojz.cli.main import main
from dlojz.config.run_config import RunConfig
from dlojz.results.footprint import Footprint
from dlojz.results.record import RunRecord
from tests.cli.process import dlojz_process

RUN = ["run", "--dp", "2", "--zero", "2", "--engine", "deepspeed", "--micro-batch", "4", "--steps", "3"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


class Answer(NamedTuple):
    """What a command has left: its exit code and its two streams."""

    returncode: int
    stdout: str
    stderr: str


Dlojz = Callable[..., Answer]


@pytest.fixture
def dlojz(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Dlojz:
    """One command line, called here: `dlojz(root, *words)`."""

    def command(root: Path, *words: str) -> Answer:
        monkeypatch.setenv("DLOJZ_RUNS", str(root))
        capfd.readouterr()
        code = main(words)
        return Answer(code, *capfd.readouterr())

    return command


def _json(done: Answer | subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def record(root: Path) -> RunRecord:
    """One real run, asked for through the command line."""
    return RunRecord.from_dict(_json(dlojz_process(*RUN, "--json", DLOJZ_RUNS=str(root))))


def test_run_answers_with_its_record(record: RunRecord) -> None:
    assert record.status == "completed" and len(record.losses) == 3 and len(record.footprints) == 2
    assert record.config == RunConfig.of(dp=2, zero=2, engine="deepspeed", micro_batch=4, steps=3)


def test_main_run_finds_the_same_run_id_for_the_same_request(dlojz: Dlojz, root: Path, record: RunRecord) -> None:
    done = dlojz(root, *RUN, "--json")
    assert _json(done)["run_id"] == record.run_id
    assert "was run before" in done.stderr


def test_main_run_prints_the_table_and_the_place(dlojz: Dlojz, root: Path, record: RunRecord) -> None:
    done = dlojz(root, *RUN)
    assert done.returncode == 0
    assert "weights, " in done.stdout and str(root / record.run_id) in done.stdout


def test_main_runs_lists_the_record(dlojz: Dlojz, root: Path, record: RunRecord) -> None:
    assert [
        (run["run_id"], run["state"], run["steps"], run["last_loss"]) for run in _json(dlojz(root, "runs", "--json"))
    ] == [(record.run_id, "completed", 3, record.losses[-1])]
    assert record.run_id in dlojz(root, "runs").stdout


def test_main_logs_finds_a_run_by_the_beginning_of_its_name(dlojz: Dlojz, root: Path, record: RunRecord) -> None:
    done = dlojz(root, "logs", record.run_id[:15])
    assert done.returncode == 0
    refused = dlojz(root, "logs", record.run_id, "--rank", "7")
    assert refused.returncode == 2 and "rank 7" in refused.stderr


def test_main_compare_answers_and_draws(dlojz: Dlojz, root: Path, record: RunRecord, tmp_path: Path) -> None:
    picture = tmp_path / "figure.png"
    data = _json(dlojz(root, "compare", record.run_id, "--json", "--figure", str(picture)))
    assert data["rows"][0]["run_id"] == record.run_id and data["exact"] is True
    assert picture.stat().st_size > 10_000


def test_main_compare_takes_the_newest_run_that_measured_something(
    dlojz: Dlojz, root: Path, record: RunRecord, tmp_path: Path
) -> None:
    """Its training is another one: the comparison is of the newest run that measured something."""
    shutil.copytree(root / record.run_id, tmp_path / record.run_id)
    failed = dlojz(tmp_path, *RUN, "--steps", "400", "--time-limit-s", "0.2")
    assert failed.returncode == 1
    data = _json(dlojz(tmp_path, "compare", "--json"))
    assert [row["run_id"] for row in data["rows"]] == [record.run_id]


def test_main_cancel_of_a_finished_run_changes_nothing(dlojz: Dlojz, root: Path, record: RunRecord) -> None:
    done = dlojz(root, "cancel", record.run_id)
    assert done.returncode == 0 and "ended already" in done.stdout


def test_main_runs_names_a_damaged_run_and_hides_no_other(dlojz: Dlojz, root: Path, record: RunRecord) -> None:
    damaged = root / "20200101-000000-000000000000-0000"
    damaged.mkdir()
    (damaged / "config.json").write_text('{"model": "coat')
    done = dlojz(root, "runs", "--json")
    damaged.joinpath("config.json").unlink()
    damaged.rmdir()
    assert [run["run_id"] for run in _json(done)] == [record.run_id]
    assert damaged.name in done.stderr


def test_main_run_stopped_by_its_time_limit_fails_with_its_reason(dlojz: Dlojz, tmp_path: Path) -> None:
    done = dlojz(tmp_path, "run", "--engine", "single", "--steps", "100000", "--time-limit-s", "4", "--json")
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    assert data["status"] == "timeout" and data["reason"] in done.stderr


# A shell's background job has SIGINT ignored, and what it starts inherits that.
LISTENING = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("dlojz", run_name="__main__")
"""


def test_main_run_at_ctrl_c_cancels_keeps_and_says_so(dlojz: Dlojz, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENING, "run", "--engine", "single", "--steps", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DLOJZ_RUNS": str(tmp_path), "DLOJZ_LANG": "en"},
    )
    try:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not any(
            '"step"' in path.read_text() for path in tmp_path.glob("*/events/rank-0.jsonl")
        ):
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=240)
    finally:
        if process.poll() is None:  # only where the test fails: nothing may train on for ever
            process.kill()
            for run in _json(dlojz(tmp_path, "runs", "--json")):
                dlojz(tmp_path, "cancel", run["run_id"])
    assert process.returncode == 130 and "Traceback" not in told and "interrupted" in told
    states = [run["state"] for run in _json(dlojz(tmp_path, "runs", "--json"))]
    assert states == ["cancelled"]


def test_predict_answers_with_a_footprint(dlojz: Dlojz, tmp_path: Path) -> None:
    footprint = Footprint.from_dict(
        _json(dlojz(tmp_path, "predict", "--model", "coatnet_0", "--dp", "8", "--zero", "3", "--json"))
    )
    assert (
        footprint.source == "predicted"
        and footprint.parameters == models.describe("coatnet_0", num_classes=10).parameters
    )
    assert "weights" in dlojz(tmp_path, "predict", "--dp", "2").stdout


def test_models_answers_with_the_catalogue(dlojz: Dlojz, tmp_path: Path) -> None:
    listed = _json(dlojz(tmp_path, "models", "--json"))
    assert [model["name"] for model in listed] == models.names()
    assert all({"name", "parameters", "flops", "image_size", "blocks"} <= model.keys() for model in listed)


def test_doctor_finds_this_machine_fit(tmp_path: Path) -> None:
    answer = _json(dlojz_process("doctor", "--json", DLOJZ_RUNS=str(tmp_path)))
    states = {check["name"]: check["state"] for check in answer["checks"]}
    assert answer["problems"] == 0 and states["gloo"] == "ok" and states["torch"] == "ok"


def test_check_disk_of_doctor_names_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    check = check_disk(tmp_path / "file" / "runs")
    assert check.state == "problem" and "DLOJZ_RUNS" in check.advice


def test_doctor_fails_where_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        doctor,
        "examine",
        lambda root: [Check("torch", "ok", "2"), Check("disk", "problem", "/x: Read-only", "choose another folder")],
    )
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "choose another folder" in told and "1 problem" in told


def test_a_reader_who_goes_away_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "dlojz", "--help"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
