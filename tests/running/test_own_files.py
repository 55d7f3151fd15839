"""Reading a run executes no file that its record names, unless this user has executed it as it is now."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.cli.main import main
from dlojz.compare import compare
from dlojz.config.run_config import RunConfig
from dlojz.models.foreign.elsewhere import executing_no_file
from dlojz.models.foreign.sources import origin_of
from dlojz.results.footprint import Footprint, Memory
from dlojz.results.record import read_record
from dlojz.running.run import Run
from dlojz.running.state import read_config
from tests.models import own_models

MARKING = 'from pathlib import Path\n\nPath(__file__).with_suffix(".marker").touch()\n'


class Case:
    """A run out of memory, of a model whose file leaves a marker when it is executed."""

    def __init__(self, tmp_path: Path, make_folder: Callable[..., Path], told: Callable[..., Any]) -> None:
        self.file = tmp_path / "theirs.py"
        self.file.write_text(Path(own_models.__file__).read_text() + MARKING)
        self.marker = self.file.with_suffix(".marker")
        self.name = f"{self.file}:build"
        memory = Memory(peak_bytes=100, device_bytes=100, at_peak_bytes={"weights": 100}, peak_moment="forward")
        footprint = Footprint(source="measured", rank=0, memory=memory).to_dict()
        end = {"event": "end", "status": "oom", "reason": "rank 0 ran out of memory"}
        config = RunConfig.of(model=self.name, data="text", sequence_length=own_models.TOKENS, steps=4)
        events = {0: told(2, {"event": "footprint", "footprint": footprint}, end)}
        self.folder = make_folder(config, events)
        self.root = str(self.folder.parent)


@pytest.fixture
def case(
    tmp_path: Path, make_folder: Callable[..., Path], told: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Case:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Case(tmp_path, make_folder, told)


@pytest.mark.parametrize("gone", [False, True])
def test_a_run_is_listed_compared_and_diagnosed_without_its_file(
    case: Case, gone: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if gone:
        case.file.unlink()
    run = Run(case.folder)
    assert run.title == "theirs.py:build, one process" and run.record is not None
    assert main(["runs", "--root", case.root]) == 0
    assert main(["doctor", run.run_id, "--root", case.root]) == 0
    assert main(["compare", run.run_id, "--root", case.root]) == 0
    told = capsys.readouterr().out
    assert told.count("theirs.py") > 2 and "ran out of memory" in told
    why = "does not exist" if gone else "reading a record executes no file"
    assert why in compare([run]).rows[0].prediction_note
    with pytest.raises(LabError, match=why):
        _ = run.predicted
    assert read_record(case.folder / "record.json").config == run.config
    assert not case.marker.exists()


def test_read_config_refuses_what_is_not_whole_rather_than_look_it_up(case: Case) -> None:
    path = case.folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sequence_length": None}))
    with pytest.raises(LabError, match="no whole configuration"):
        read_config(case.folder)
    assert not case.marker.exists()


def test_a_file_that_the_user_has_executed_is_predicted_until_it_changes(case: Case) -> None:
    origin_of(case.name)  # by its name, as a run or a prediction does
    assert case.marker.exists()
    case.marker.unlink()
    origin_of.cache_clear()
    with executing_no_file():
        assert origin_of(case.name).family == "text"
    origin_of.cache_clear()
    case.marker.unlink()
    case.file.write_text(case.file.read_text() + "# changed\n")
    with executing_no_file(), pytest.raises(LabError, match="as it is now"):
        origin_of(case.name)
    assert not case.marker.exists()
