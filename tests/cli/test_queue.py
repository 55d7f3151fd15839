"""`dlojz queue` and `dlojz watch`: what a terminal shows of jobs and runs."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlojz.cli import machines
from dlojz.cli.main import DONE, main
from dlojz.config.run_config import RunConfig
from dlojz.results.record import write_record
from dlojz.running.ending import Ending
from dlojz.running.folder import Job
from dlojz.running.state import assemble
from dlojz.running.store import claim

_spec = importlib.util.spec_from_file_location(
    "fakeslurm_fixture", Path(__file__).parents[1] / "fakeslurm" / "fixture.py"
)
assert _spec is not None and _spec.loader is not None
says: Any = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = says
_spec.loader.exec_module(says)
CONFIG = RunConfig.of(dp=2, steps=4)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("DLOJZ_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("COLUMNS", "200")
    with says.scheduler(tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run that is a job."""
    made, _ = claim(CONFIG, tmp_path / "runs", force_new=True)
    Job(machine="local", name=made.name, job_id="12", submitted_utc="2020-01-01T00:00:00+00:00").write(made)
    return made


def test_main_queue_lists_the_jobs_and_their_runs(fake: Any, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fake.plays(
        says.squeue(
            says.line("12", "PENDING", "PartitionTimeLimit", name=folder.name),
            says.line("13", "RUNNING", name="another<img src=x>\x1b[2J", left="1-00:00:01"),
            says.line("11", "TIMEOUT", "TimeLimit"),
        )
    )
    assert main(["queue"]) == DONE
    heading, waiting, running, ended = capfd.readouterr().out.splitlines()[:4]
    assert heading.split()[:2] == ["job", "run"]
    assert folder.name in waiting and "queued" in waiting
    assert "24 h 00 min" in running and "(another<img src=x>\\u001b[2J)" in running
    assert ended.split()[0] == "11" and "TIMEOUT" in ended
    assert main(["queue", "--json"]) == DONE
    told = json.loads(capfd.readouterr().out)
    assert [(job["number"], job["run_id"]) for job in told["jobs"]] == [("12", folder.name), ("13", None), ("11", None)]
    assert "PartitionTimeLimit" in told["jobs"][0]["words"] and told["problem"] == ""
    assert len(fake.calls) == 1


def test_a_scheduler_that_is_down(
    fake: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLOJZ_QUEUE_INTERVAL_S", "0")
    fake.plays(says.squeue(says.line("12", "RUNNING")), says.squeue(**says.DOWN))
    assert main(["queue"]) == DONE
    capfd.readouterr()
    assert main(["queue"]) == DONE
    printed = capfd.readouterr().out
    assert "unknown, last RUNNING" in printed and "Unable to contact slurm controller" in printed
    assert "last known" in printed and "go on running" in printed


def test_no_job_and_no_scheduler(fake: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fake.plays(says.squeue())
    assert main(["queue"]) == DONE
    assert "no job in the queue" in capfd.readouterr().out
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["queue"]) == DONE
    assert "there is no scheduler here" in capfd.readouterr().out


def end(folder: Path) -> None:
    events: dict[int, list[dict[str, Any]]] = {0: [{"event": "step", "step": 0, "loss": 2.0, "step_s": 0.1}]}
    write_record(folder / "record.json", assemble(folder.name, CONFIG, events, Ending("completed"), 1.0))


def test_main_watch_ends_with_the_run(
    fake: Any, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.plays(says.squeue(says.line("12", "PENDING", "Priority", name=folder.name)))
    assert main(["watch", "--once"]) == DONE
    once = capfd.readouterr().out
    assert folder.name in once and "0/4" in once and "12 on local" in once and "(Priority)" in once
    monkeypatch.setattr(machines, "time", SimpleNamespace(sleep=lambda _: end(folder)))
    assert main(["watch", folder.name[:20]]) == DONE
    printed = capfd.readouterr().out
    assert "queued" in printed and "1/4" in printed and "completed" in printed
    assert main(["watch"]) == DONE
    assert "no run waits or runs" in capfd.readouterr().out


def test_main_watch_at_ctrl_c_leaves_the_runs_alone(
    fake: Any, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.plays(says.squeue(says.line("12", "RUNNING")))

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    # Its own pause only: one in subprocess, which waits for squeue, is another matter.
    monkeypatch.setattr(machines, "time", SimpleNamespace(sleep=interrupt))
    assert main(["watch"]) == DONE
    assert "the runs go on" in capfd.readouterr().err
    assert not (folder / "cancel").exists()


def test_main_watch_does_not_wait_for_a_record_that_it_cannot_read(
    fake: Any, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "record.json").write_text('{"schema_version": 7}')
    pauses: list[float] = []
    monkeypatch.setattr(machines, "time", SimpleNamespace(sleep=pauses.append))
    assert main(["watch", folder.name]) == DONE
    assert "newer than this dlojz knows" in capfd.readouterr().out
    assert len(pauses) == machines.MOST_REFUSALS - 1
