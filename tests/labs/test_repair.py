"""A damaged notebook is put right: locked cells restored, answers and the student's own cells kept, nothing lost."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlojz.base.errors import LabError
from dlojz.cli.main import main
from dlojz.labs.kit.build import repair

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "notebooks" / "fr" / "00_getting_started.ipynb"
ANSWER = "def global_batch(micro_batch, micro_batches, dp):\n    return micro_batch * micro_batches * dp"


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    """A student's copy with one answer, in a folder that does not tell its language."""
    path = tmp_path / "mine.ipynb"
    content = json.loads(SHIPPED.read_bytes())
    cell(content, "global-batch")["source"] = ANSWER
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def cell(content: dict[str, Any], name: str) -> dict[str, Any]:
    """The code cell of a name."""
    found = [one for one in content["cells"] if one["id"].rsplit("-", 1)[0] == name and one["cell_type"] == "code"]
    return found[0]  # type: ignore[no-any-return]


def damage(path: Path, how: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_bytes())
    how(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def sources(path: Path) -> dict[str, str]:
    return {one.id: one.source for one in nbformat.read(path, as_version=4).cells}


def expected() -> dict[str, str]:
    """What every repair must lead to: the notebook handed out, with the answer."""
    shipped = sources(SHIPPED)
    return {**shipped, cell(json.loads(SHIPPED.read_bytes()), "global-batch")["id"]: ANSWER}


def test_repair_leaves_a_sound_notebook_as_it_is(notebook: Path) -> None:
    before = notebook.read_bytes()
    done = repair(notebook)
    assert (done.restored, done.returned, done.answers, done.added, done.before) == ((), (), 1, 0, None)
    assert notebook.read_bytes() == before
    assert [path.name for path in notebook.parent.iterdir()] == ["mine.ipynb"]
    assert "nothing to repair" in str(done)


DAMAGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "changed": lambda content: cell(content, "setup").update(source="import dlojz\nlab = None"),
    "deleted": lambda content: content["cells"].remove(cell(content, "config")),
    "another kind": lambda content: cell(content, "setup").update(cell_type="markdown"),
    "disordered": lambda content: content["cells"].reverse(),
    "metadata lost": lambda content: content.update(metadata={"dlojz": content["metadata"]["dlojz"]}),
    "outputs no format knows": lambda content: cell(content, "global-batch").update(outputs=[{"output_type": 3}]),
    "prose changed": lambda content: content["cells"][0].update(source=["# Rien\n"]),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_every_damage_is_undone_and_the_answer_kept(notebook: Path, how: str) -> None:
    damage(notebook, DAMAGES[how])
    damage(notebook, lambda content: cell(content, "first-ranks").update(source="%%ranks\n0"))
    before = notebook.read_bytes()
    done = repair(notebook)
    assert list(sources(notebook).items()) == list(expected().items())
    assert done.answers == 1
    assert done.before is not None
    assert done.before.read_bytes() == before
    nbformat.validate(nbformat.read(notebook, as_version=4))
    assert repair(notebook).before is None


def test_cells_of_ones_own_stay_behind_the_cell_they_followed(notebook: Path) -> None:
    def add(content: dict[str, Any]) -> None:
        after = content["cells"].index(cell(content, "config")) + 1
        own = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
        twice = {**own, "id": cell(content, "config")["id"], "source": "again"}  # an id that is taken
        content["cells"][after:after] = [{**own, "id": "mine", "source": "1 + 1"}, twice]
        cell(content, "setup")["source"] = "lab = None"

    damage(notebook, add)
    done = repair(notebook)
    assert done.added == 2
    told = list(sources(notebook).values())
    place = told.index("1 + 1")
    assert told[place + 1] == "again"
    assert told[place - 1].startswith("config = dlojz.RunConfig.of(")
    assert [text for text in told if text not in ("1 + 1", "again")] == list(expected().values())


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"cells": 3}', '{"nbformat": 4, "metadata": {}, "cells": [1]}']
)
def test_repair_refuses_what_is_no_notebook_and_leaves_it_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "00_getting_started.ipynb"
    path.write_text(text)
    with pytest.raises(LabError, match="is no notebook any more"):
        repair(path)
    assert path.read_text() == text


def test_a_notebook_of_no_lab_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shopping.ipynb"
    nbformat.write(nbformat.v4.new_notebook(), path)
    with pytest.raises(LabError, match="00_getting_started.ipynb"):
        repair(path)


def test_without_its_metadata_name_and_folder_tell_which_it_was(tmp_path: Path) -> None:
    path = tmp_path / "fr" / SHIPPED.name
    path.parent.mkdir()
    content = {**json.loads(SHIPPED.read_bytes()), "metadata": {}, "cells": []}
    path.write_text(json.dumps(content))
    assert len(repair(path).returned) == len(sources(SHIPPED))
    assert sources(path) == sources(SHIPPED)


@settings(max_examples=25)
@given(data=st.data())
def test_any_cells_lost_changed_or_moved_come_back(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("any") / SHIPPED.name
    content = json.loads(SHIPPED.read_bytes())
    cell(content, "global-batch")["source"] = ANSWER
    answer = cell(content, "global-batch")
    locked = [one for one in content["cells"] if "TODO" not in "".join(one["source"]) and one is not answer]
    for one in data.draw(st.lists(st.sampled_from(locked), max_size=6, unique_by=id)):
        if data.draw(st.booleans()):
            content["cells"].remove(one)
        else:
            one["source"] = data.draw(st.text(max_size=20))
    content["cells"] = data.draw(st.permutations(content["cells"]))
    path.write_text(json.dumps(content), encoding="utf-8")
    repair(path, SHIPPED)
    assert list(sources(path).items()) == list(expected().items())


def test_main_labs_repair_says_what_it_did(notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(notebook, DAMAGES["deleted"])
    assert main(["labs", "repair", str(notebook)]) == 0
    said = capsys.readouterr().out
    assert "1 answers" in said or "1 answer" in said
    assert "mine.before-repair-1.ipynb" in said
    assert cell(json.loads(SHIPPED.read_bytes()), "config")["id"] in said
    for words in (["labs", "repair"], ["labs", "repair", str(notebook), "--force"], ["labs", "repair", "none.ipynb"]):
        assert main(words) == 2
        assert "Traceback" not in capsys.readouterr().err
