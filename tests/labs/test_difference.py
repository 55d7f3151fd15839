"""A student's answer beside the solution: the exercise's part only, nothing executed, everything escaped."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import dlojz
from dlojz import labs
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.cli.main import DONE, REFUSED, main
from dlojz.labs.kit.exercise import NotDone
from dlojz.labs.kit.lab import Difference, diff
from dlojz.running.folder import launched_utc
from dlojz.running.run import Run, answer_with
from dlojz.running.store import claim

ROOT = Path(dlojz.__file__).parent.parent
STUDENT = ROOT / "notebooks" / "en" / "01_big_models.ipynb"
SOLUTION = ROOT / "solutions" / "en" / "01_big_models.ipynb"
STUB = """\
    # TODO: write this part, then run the cell.
    raise labs.NotDone("attention")"""
HOSTILE = '    return "<img src=x onerror=alert(1)>\u202e"'


def answered(folder: Path, text: str, *, name: str = "01_big_models.ipynb", **changes: Any) -> Path:
    """A copy of a notebook in which the exercise `attention` is answered so."""
    content = json.loads(STUDENT.read_text(encoding="utf-8"))
    for cell in content["cells"]:
        source = "".join(cell["source"])
        if 'lab.check("attention"' in source:
            cell["source"] = source.replace(STUB, text).splitlines(keepends=True)
            cell["id"] = changes.get("cell_id", cell["id"])
    path = folder / name
    path.write_text(json.dumps({**content, **changes.get("content", {})}), encoding="utf-8")
    return path


def test_diff_of_an_exercise_that_is_still_to_do() -> None:
    found = diff("attention", STUDENT)
    assert found.todo and found.answer[-1] == 'raise labs.NotDone("attention")'
    assert found.solution == (
        "scores_TT = q_TD @ k_TD.T / q_TD.shape[-1] ** 0.5",
        "return torch.softmax(scores_TT, dim=-1) @ v_TD",
    )
    assert "still to do" in repr(found) and "lab.check" not in "".join(found.solution)


def test_the_solution_beside_itself() -> None:
    for exercise in ("attention", "patches", "relative-bias", "predict-vit-encoder"):
        found = diff(exercise, SOLUTION)
        assert found.answer == found.solution and not found.todo
        assert all(pair.same for pair in found.pairs)


def test_an_answer_of_ones_own(tmp_path: Path) -> None:
    found = diff("attention", answered(tmp_path, "    scale = 1\n    return torch.softmax(scores_TT, dim=-1) @ v_TD"))
    assert found.answer == ("scale = 1", "return torch.softmax(scores_TT, dim=-1) @ v_TD")
    assert [pair.same for pair in found.pairs] == [False, True]
    assert not found.todo


def test_diff_of_an_exercise_that_is_a_value(tmp_path: Path) -> None:
    found = diff("predict-vit-tokens", STUDENT)
    assert found.todo and len(found.solution) == 1


def test_diff_finds_a_cell_whose_id_an_editor_has_changed(tmp_path: Path) -> None:
    path = answered(tmp_path, "    return 1", cell_id="another")
    assert diff("attention", path).answer == ("return 1",)


def test_diff_knows_a_notebook_of_another_name_by_its_metadata(tmp_path: Path) -> None:
    assert diff("attention", answered(tmp_path, "    return 1", name="mine.ipynb")).answer == ("return 1",)
    with pytest.raises(LabError, match="unknown lab"):
        diff("attention", answered(tmp_path, "    return 1", name="mine.ipynb", content={"metadata": {}}))


def test_what_the_student_changed_around_the_answer_is_shown(tmp_path: Path) -> None:
    path = answered(tmp_path, "    return 1")
    path.write_text(path.read_text().replace("def attention(q_TD, k_TD, v_TD)", "def attention(q, k, v)"))
    assert diff("attention", path).answer == ("def attention(q, k, v):", "    return 1")


def test_hostile_answers_are_text(tmp_path: Path) -> None:
    found = diff("attention", answered(tmp_path, HOSTILE))
    page = found._repr_html_()
    assert "<img" not in page and "&lt;img src=x onerror" in page
    assert "\u202e" not in page + repr(found)
    title = Difference("attention", "<script>.ipynb", ("a",), ("b",))._repr_html_()
    assert "<script" not in title


def test_difference_puts_lines_too_wide_for_two_columns_below_one_another() -> None:
    mine, theirs = "x" * 60, "z" * 60
    shown = repr(Difference("attention", "n.ipynb", ("y", mine, "y"), ("y", theirs, "y")))
    assert shown.splitlines()[-4:] == ["  y", f"- {mine}", f"+ {theirs}", "  y"]


def test_an_endless_answer_is_cut(tmp_path: Path) -> None:
    found = diff("attention", answered(tmp_path, "\n".join(f"    x = {n}" for n in range(10_000))))
    assert len(found.answer) == 400


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "cannot be read"),
        ("", "is no notebook"),
        ("[]", "has no cells"),
        ('{"cells": 7}', "has no cells"),
        ('{"cells": [7, {"cell_type": "code"}], "metadata": {"dlojz": {"lab": "01"}}}', "has no cell for the exercise"),
        ('{"cells": [], "metadata": {"dlojz": {"lab": "99"}}}', "unknown lab '99'"),
    ],
)
def test_diff_refuses_what_is_no_notebook(text: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "n.ipynb"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LabError, match=words):
        diff("attention", path)


def test_diff_refuses_an_unknown_exercise_and_lists_those_there_are() -> None:
    with pytest.raises(LabError, match="did you mean 'attention'"):
        diff("atention", STUDENT)


def test_the_open_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", str(STUDENT))
    assert labs.diff("attention").notebook == STUDENT.name
    monkeypatch.delenv("JPY_SESSION_NAME")
    with pytest.raises(LabError, match="no notebook is open"):
        labs.diff("attention")


@pytest.fixture
def a_run(tmp_path: Path) -> Iterator[Run]:
    """A run, while no lab is open."""
    answer_with(None)
    folder, _ = claim(dlojz.RunConfig.of(model="vit_tiny", steps=1), tmp_path / "runs", force_new=True)
    yield Run(folder)
    answer_with(None)


def test_a_run_shows_the_exercise_it_belongs_to(
    a_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LabError, match=r'no lab is open here.*labs.start\("01"\)'):
        a_run.diff("attention")
    monkeypatch.setenv("JPY_SESSION_NAME", str(STUDENT))
    lab = labs.start("01", root=tmp_path / "runs")
    with pytest.raises(LabError, match=r"no exercise of this lab has been checked yet.*run.diff.*attention, "):
        a_run.diff()
    assert a_run.diff("patches").exercise == "patches"  # type: ignore[attr-defined]
    lab.check("attention", NotDone("attention"))
    found = a_run.diff()
    assert isinstance(found, Difference) and found.exercise == "attention" and found.notebook == STUDENT.name
    with pytest.raises(LabError, match="did you mean 'attention'"):
        a_run.diff("atention")
    use_language("fr")
    assert "votre réponse" in repr(found)
    capsys.readouterr()


def test_the_exercise_is_the_last_one_checked_before_the_run(a_run: Run, tmp_path: Path) -> None:
    launched = launched_utc(a_run.run_id)
    assert launched is not None and launched_utc("another") is None
    assert abs(datetime.now(UTC) - launched) < timedelta(minutes=5)
    told = {"attention": -60, "patches": -30, "tokens": 60, "of-another-lab": -1}
    done = {exercise: (launched + timedelta(seconds=after_s)).isoformat() for exercise, after_s in told.items()}
    (tmp_path / "runs" / "progress-01.json").write_text(json.dumps({"done": {**done, "multi-head": "yesterday"}}))
    lab = labs.start("01", root=tmp_path / "runs")
    assert lab.checked_before(launched) == "patches"
    assert lab.checked_before(launched - timedelta(seconds=45)) == "attention"
    assert lab.checked_before(launched - timedelta(days=1)) == lab.checked_before(None) == "tokens"


def test_main_labs_diff_answers_at_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(SOLUTION), "patches"]) == DONE
    assert "+ the solution" in capfd.readouterr().out
    assert main(["diff", str(STUDENT), "attention", "--json"]) == DONE
    assert json.loads(capfd.readouterr().out)["todo"] is True
    assert main(["diff", str(STUDENT)]) == REFUSED
    assert "takes NOTEBOOK EXERCISE (file of the notebook, then id of the exercise)" in capfd.readouterr().err
    use_language("fr")
    assert main(["diff", str(STUDENT), "attention"]) == DONE
    assert "votre réponse" in capfd.readouterr().out
