"""`dlojz bench`: refused before anything starts, dry, resumed, reported."""

import json
from pathlib import Path
from typing import Any

import pytest

import dlojz.running.launch
from dlojz.campaign import report
from dlojz.cli.main import DONE, FAILED, INTERRUPTED, REFUSED, main
from dlojz.config.run_config import RunConfig
from dlojz.results.footprint import Footprint, Memory, Phases
from dlojz.results.record import RunRecord, write_record
from dlojz.running.run import Run
from dlojz.running.store import claim

TINY = """
title = "Tiny"
time_limit_s = 3600
[base]
model = "vit_tiny"
image_size = 32
steps = 4
[axes]
layout = [{ name = "alone", engine = "single" }, { name = "DDP", dp = 2 }]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


def _ends(config: RunConfig, root: Path, status: str = "completed") -> Run:
    """In place of `dlojz.running.launch.run`: a run that ends at once."""
    folder, _ = claim(config, root, force_new=True)
    measured = Footprint(
        source="measured", memory=Memory(peak_bytes=2**24), phases=Phases(step_s=0.1), samples_per_s=99.0
    )
    content: dict[str, Any] = {"run_id": folder.name, "config": config, "status": status, "footprints": (measured,)}
    write_record(folder / "record.json", RunRecord(**content))
    return Run(folder)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["zero_stage"], "did you mean"),
        (["none.toml"], "cannot be used: No such file"),
        (["zero_stages_local", "tiny_local"], "takes [CAMPAIGN] (a campaign of the course"),
        (["tiny_local", "--on", "cluster"], "unknown --on 'cluster'"),
        (["tiny_local", "--on", "slurm"], "names no machine"),
        (["tiny_local", "--machine", "x; rm -rf ~"], "a machine is named with"),
        (["zero_stages", "--on", "local"], "not for this machine"),
        (["tiny_local", "--dry"], "did you mean '--dry-run'"),
    ],
)
def test_refused_in_a_sentence(
    words: list[str], sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words, "--root", str(tmp_path / "runs")]) == REFUSED
    told = capfd.readouterr()
    assert sentence in told.err and not told.out
    assert not (tmp_path / "runs").exists()


def test_main_bench_with_an_impossible_point_starts_nothing_of_the_campaign(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "impossible.toml"
    path.write_text(TINY + "zero = [0, 1]\n")
    assert main(["bench", str(path), "--root", str(tmp_path / "runs")]) == REFUSED
    told = capfd.readouterr().err
    assert "2 of the campaign's points cannot be run" in told and "DDP, zero 1: engine 'torch' has no ZeRO-1" in told
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_predicts_every_point_and_writes_nothing(
    tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["bench", tiny, "--dry-run", "--json", "--root", str(tmp_path / "runs")]) == DONE
    alone, ddp = json.loads(capfd.readouterr().out)
    assert alone["predicted_to_fit"] and alone["state"] == "waiting" and alone["most_hours"] == 1
    assert ddp["most_hours"] == 2 and ddp["predicted_message_bytes"] > alone["predicted_message_bytes"] == 0
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["bench", tiny, "--dry-run", "--root", str(tmp_path / "runs")]) == DONE
    told = capfd.readouterr()
    assert "not run yet" in told.out and "at most 3 GPU-hours. Nothing was started." in told.err
    assert not (tmp_path / "runs").exists()


def test_interrupted_resumed_and_reported(
    tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    fate: list[str | BaseException] = ["completed", KeyboardInterrupt(), "failed", "completed"]

    def run(config: RunConfig, *, root: Path, **_: Any) -> Run:
        launched.append(config.layout.title)
        now = fate.pop(0)
        if isinstance(now, BaseException):
            raise now
        return _ends(config, root, now)

    monkeypatch.setattr(dlojz.running.launch, "run", run)
    monkeypatch.setattr(report, "campaign_figures", lambda *_: {})  # drawn in tests/campaign/test_results.py
    words = ["bench", tiny, "--root", str(tmp_path / "runs")]
    assert main(words) == INTERRUPTED
    assert main(words) == FAILED
    assert main(words) == DONE
    assert launched == ["one process", "DDP", "DDP", "DDP"]
    assert "2/2 DDP: completed, 99 samples/s" in capfd.readouterr().err
    folder = tmp_path / "runs" / "campaigns" / "tiny"
    assert {path.name for path in folder.iterdir()} == {"report.html", "report.md", "points.csv"}
    before = (folder / "points.csv").read_text()
    (folder / "points.csv").unlink()
    assert main([*words, "--report"]) == DONE
    assert (folder / "points.csv").read_text() == before and len(launched) == 4


def test_main_bench_lists_the_campaigns(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--json"]) == DONE
    assert {"tiny_local", "data_parallelism"} <= {each["name"] for each in json.loads(capfd.readouterr().out)}


def test_main_bench_cancel_answers_in_json_and_alone(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", tiny, "--cancel", "--json"]) == DONE
    assert json.loads(capfd.readouterr().out) == {"asked_to_stop": [], "points": 2}
    assert main(["bench", tiny, "--cancel", "--report", "--dry-run"]) == REFUSED
    assert "--cancel --report --dry-run were received together" in capfd.readouterr().err


def test_main_bench_tells_a_remark_that_many_points_share_once(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", tiny, "--dry-run", "--machine", "jean_zay_a100"]) == DONE
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if "account" in line]
    assert line.startswith("1 (") and ", 2 (" in line
