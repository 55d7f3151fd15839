"""`dlojz plan --cluster here`: planned from a calibration, and really run with --measure."""

import json
from pathlib import Path

import pytest

from dlojz.base.errors import LabError
from dlojz.cli import main
from dlojz.cli.plan import plan_command
from dlojz.running.measure import calibrated
from tests.models import own_models


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    calibrated((1,), path=folder / "dlojz" / "calibration.json")
    return folder


def test_plan_command_here_predicts_then_measures(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    asked = ["--cluster", "here", "--model", "coatnet_tiny", "--gpus", "1", "--batch", "4"]
    drawn = ["--figure", str(tmp_path / "here.png")]
    assert plan_command([*asked, *drawn, "--measure", "--top", "2", "--json"]) == main.DONE
    told = json.loads(capfd.readouterr().out)
    assert [row["layout"]["checkpointing"] for row in told["rows"]] == ["none", "full"]
    assert all(row["measured_s"] > 0 and row["step_s"] > 0 for row in told["rows"])
    assert (tmp_path / "here.png").stat().st_size > 10_000
    assert plan_command(asked) == main.DONE
    assert "one process, micro-batch 4 × 1" in capfd.readouterr().out


def test_a_model_of_one_s_own_file_is_planned_then_run_and_the_verdict_names_the_winner(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    own = f"{own_models.__file__}:build"
    asked = ["--cluster", "here", "--model", own, "--gpus", "1", "--batch", "4", "--measure"]
    assert plan_command(asked) == main.DONE
    told = capfd.readouterr()
    words = " ".join(told.out.split())
    assert "own_models.py:build on one process of this machine, batch 4" in words
    assert "fastest of the 2 that were measured" in words
    assert str(Path.cwd()) not in told.out and "Running 2 layouts" in told.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--cluster here --why tp=2", "--why does not go with --cluster here"),
        ("--model coatnet_tiny --measure", "goes with --cluster here"),
        ("--cluster here --gpus 3 --model coatnet_tiny", "dlojz calibrate --ranks 3"),
    ],
)
def test_plan_command_here_refuses_what_does_not_go_together(
    home: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    with pytest.raises(LabError, match=said):
        plan_command(words.split())
