"""The lab a student holds: language, checks, hints, predictions, progress."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlojz import labs
from dlojz.base.errors import LabError
from dlojz.base.language import Language, use_language
from dlojz.campaign.class_board import read_class
from dlojz.cli.teach import board_table
from dlojz.labs.kit.exercise import Challenge, Prediction, Said, Verdict, Wrong, or_to_do
from dlojz.labs.kit.judges import Judge
from dlojz.labs.kit.lab import content_of, notebook_language
from dlojz.labs.kit.progress_page import read_overview
from dlojz.labs.script import script_judge


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.chdir(tmp_path)
    use_language("en")
    yield
    use_language("en")


@pytest.fixture
def lab(tmp_path: Path) -> labs.Lab:
    return labs.start("00", root=tmp_path / "runs")


def right(micro_batch: int, micro_batches: int, dp: int) -> int:
    return micro_batch * micro_batches * dp


def per_step(micro_batch: int, micro_batches: int, dp: int) -> Any:
    return None


def test_or_to_do_gives_a_message_where_a_cell_fails_of_a_refused_answer(lab: labs.Lab) -> None:
    @or_to_do
    def figure(values: Callable[..., Any]) -> Any:
        return values(1, 2, 3) + 1

    with pytest.raises(TypeError):
        figure(per_step)  # not judged yet: this is no fault of an answer
    lab.check("global-batch", per_step)
    for said in (figure(per_step), figure(lambda *case: [per_step(*case) + one for one in case])):
        assert (said.state, "your function per_step right" in said.message) == ("wrong", True)
    lab.check("global-batch", right)
    assert figure(right) == 7
    with pytest.raises(TypeError):
        figure(lambda *case: str(right(*case)))


def folder(base: Path, *names: str) -> Path:
    made = base.joinpath(*names)
    made.mkdir(parents=True)
    return made


@pytest.mark.parametrize("language", ["en", "fr"])
def test_the_language_is_that_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, language: str
) -> None:
    monkeypatch.chdir(folder(tmp_path, "notebooks", language))
    assert notebook_language() == language


def test_the_path_of_the_notebook_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder(tmp_path, "en"))
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "fr" / "00_getting_started.ipynb"))
    assert notebook_language() == "fr"


def test_a_notebook_moved_elsewhere_keeps_its_language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = folder(tmp_path, "en") / "copy.ipynb"
    moved.write_text(json.dumps({"metadata": {"dlojz": {"language": "fr"}}, "cells": []}))
    monkeypatch.setenv("JPY_SESSION_NAME", str(moved))
    assert notebook_language() == "fr"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"metadata": 3}', '{"metadata": {"dlojz": {"language": 7}}}'])
def test_a_damaged_notebook_falls_back_to_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    path = folder(tmp_path, "fr") / "lab.ipynb"
    path.write_text(content)
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    assert notebook_language() == "fr"


def test_start_refuses_an_unknown_lab_with_the_list() -> None:
    with pytest.raises(LabError, match="unknown lab '99'.*00"):
        labs.start("99")


@pytest.mark.parametrize("number", labs.NUMBERS)
def test_every_lab_opens_with_three_to_fifteen_exercises(number: str, tmp_path: Path) -> None:
    assert 3 <= len(labs.start(number, root=tmp_path).exercises) <= 15


def test_hints_come_one_after_the_other(lab: labs.Lab, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        lab.hint("global-batch")
    first, second, third = capsys.readouterr().out.strip().split("\n")
    assert "1/2" in first
    assert "2/2" in second
    assert second == third


def test_progress_is_remembered_by_another_kernel(
    lab: labs.Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.check("global-batch", right)
    lab.check("steps-per-epoch", right)
    labs.start("00", root=tmp_path / "runs").progress()
    told = capsys.readouterr().out
    assert "✓ global-batch" in told
    assert "· steps-per-epoch" in told
    assert "1 of 4 exercises done" in told


def test_a_challenge_keeps_the_best_score_and_does_not_count_as_an_exercise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def scored(answer: Callable[[], float]) -> float:
        if (given := answer()) < 0:
            raise Wrong(en="Below zero.", fr="Négatif.")
        return given

    texts = dict.fromkeys(("praise", "hint", "nearer"), Said("Well done.", "Well done."))
    unit = Said("sent", "envoyés")
    few = Challenge(id="few", title=Said("Few", "Peu"), judge=scored, target=3, unit=unit, **texts)
    content = content_of("00")
    monkeypatch.setattr(content, "EXERCISES", (*content.EXERCISES, few))
    lab = labs.start("00", root=tmp_path)
    told = []
    for given in (-1.0, 5.0, 2.0, 4.0):
        lab.check("few", lambda given=given: given)
        told.append(capsys.readouterr().out.strip())
    assert told == [
        "✗ Below zero.",
        "→ A valid answer: 5 sent (target: 3).",
        "✓ Target reached: 2 sent. Well done.",
        "→ A valid answer: 4 sent (target: 3).",
    ]
    lab.progress()
    assert "✓ few" in (shown := capsys.readouterr().out) and "Few — 2 sent" in shown and "0 of 4 exercises" in shown
    assert read_overview(tmp_path).table().rows[0][1:4:2] == ("0 / 4", "✓ 2 sent")
    (tmp_path / "class" / "ada").mkdir(parents=True)
    shutil.copy(tmp_path / "progress-00.json", tmp_path / "class" / "ada")
    assert board_table(read_class(tmp_path / "class")).rows[0][3] == "00: 2 sent"


def test_a_script_that_is_not_there_yet_is_to_do_and_a_right_one_is_remembered(
    lab: labs.Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    labs.judge_script(lab, "my_training/train.py")
    assert "… my_training/train.py is not there yet: `dlojz labs script 00 my_training`" in capsys.readouterr().out
    monkeypatch.setattr(script_judge, "judge_script", lambda *_, **__: Verdict("right", "Right."))
    (tmp_path / "train.py").write_text("")
    labs.judge_script(lab, "train.py")
    assert "✓ Right." in capsys.readouterr().out
    row = read_overview(tmp_path / "runs").table().rows[0]
    assert (row[1], row[4]) == ("0 / 4", "✓")
    (tmp_path / "class").mkdir()
    shutil.copytree(tmp_path / "runs", tmp_path / "class" / "ada")
    assert board_table(read_class(tmp_path / "class")).rows[0][2:5:2] == ("00: 0", "00")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"done": 3}', "\x00\xff"])
def test_a_damaged_progress_file_costs_only_the_memory(
    lab: labs.Lab, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path, "runs") / "progress-00.json"
    path.write_text(content)
    lab.progress()
    assert "0 of 4" in capsys.readouterr().out
    lab.check("global-batch", right)
    lab.progress()
    assert "1 of 4" in capsys.readouterr().out


def test_check_calls_no_answer_wrong_for_a_library_of_the_course_that_is_missing(
    lab: labs.Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    def needs(module: str) -> Callable[..., int]:
        def answer(micro_batch: int, micro_batches: int, dp: int) -> int:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)

        return answer

    lab.check("global-batch", needs("megatron.core"))
    assert capsys.readouterr().out == (
        "… Not judged: megatron-core is not installed: pip install 'dlojz[libraries]'.\n"
    )
    lab.check("global-batch", needs("acelerate"))
    assert "✗ Your function raised ModuleNotFoundError" in capsys.readouterr().out


def test_check_tells_of_an_unwritable_folder_and_the_answer_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    labs.start("00", root=tmp_path / "runs").check("global-batch", right)
    told = capsys.readouterr().out
    assert "✓ Right" in told
    assert "could not be saved" in told


@pytest.mark.parametrize(
    "call",
    [
        lambda lab: lab.check("global_batch", right),
        lambda lab: lab.hint("global_batch"),
        lambda lab: lab.predict("gradient_bytes", 3),
        lambda lab: lab.reveal("gradient_bytes", 3),
    ],
)
def test_check_hint_and_predict_answer_an_unknown_name_with_the_closest(
    lab: labs.Lab, call: Callable[[labs.Lab], None], capsys: pytest.CaptureFixture[str]
) -> None:
    call(lab)
    assert "did you mean 'g" in capsys.readouterr().out


@pytest.mark.parametrize("typed", [(3, 75), ("3,75",)])
def test_predict_answers_a_decimal_comma_in_one_sentence(
    lab: labs.Lab, typed: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    lab.predict("gradient-bytes", *typed)
    assert "3.75, not 3,75" in capsys.readouterr().out


def test_reveal_shows_nothing_before_a_prediction(lab: labs.Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.reveal("gradient-bytes", 4096)
    assert "4096" not in capsys.readouterr().out.replace(",", "")
    lab.predict("gradient-bytes", ...)
    lab.reveal("gradient-bytes", 4096)
    assert "4096" not in capsys.readouterr().out.replace(",", "")
    lab.predict("gradient-bytes", 4096)
    lab.reveal("gradient-bytes", 4096)
    assert "Exactly right" in capsys.readouterr().out
    lab.reveal("gradient-bytes", Verdict("wrong", "an exercise is not right"))
    assert capsys.readouterr().out.strip() == "✗ an exercise is not right"


def test_reveal_knows_a_prediction_of_an_earlier_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """6,000 of 4,000 bytes: a factor of 1.5, whether revealed before the restart or not."""
    labs.start("00", root=tmp_path).predict("gradient-bytes", 6000)
    capsys.readouterr()
    earlier = "→ Your prediction from an earlier session of the notebook:\nPredicted: 5.86 KiB (6,000 B)\n"
    for _ in range(2):  # the first time it is noted, then revealed
        labs.start("00", root=tmp_path).reveal("gradient-bytes", 4000)
        said = capsys.readouterr().out
        assert said.startswith(earlier) and "50.0% apart" in said
    content = json.loads((tmp_path / "progress-00.json").read_text())
    assert content == {
        "schema_version": 1,
        "done": {},
        "predictions": {"gradient-bytes": {"predicted": 6000.0, "value": 4000.0}},
    }
    lab = labs.start("00", root=tmp_path)
    lab.predict("gradient-bytes", 4000)
    lab.reveal("gradient-bytes", 4000)
    assert "earlier" not in capsys.readouterr().out, "the one of this kernel counts"
    lab = labs.start("00", root=tmp_path)
    use_language("fr")
    lab.reveal("gradient-bytes", 4000)
    assert "Votre prédiction d’une session précédente du notebook :" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"noted": [4000]}',
        '{"noted": {"gradient-bytes": "4000"}}',
        '{"noted": {"gradient-bytes": true}}',
        '{"noted": {"gradient-bytes": -1}}',
        '{"noted": {"gradient-bytes": 1' + 400 * "0" + "}}",
        '{"predictions": {"gradient-bytes": 4000}}',
        '{"predictions": {"gradient-bytes": {"value": 4000}}}',
    ],
)
def test_reveal_tells_of_a_damaged_progress_file(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "progress-00.json").write_text(content)
    lab = labs.start("00", root=tmp_path)
    lab.reveal("gradient-bytes", 4000)
    said = capsys.readouterr().out
    assert "Predict first" in said and "progress-00.json of your progress is damaged" in said and "4,000" not in said
    lab.predict("gradient-bytes", 4000)
    lab.reveal("gradient-bytes", 4000)
    assert "Exactly right" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["3", None, True, float("nan"), float("inf"), [3], 3j])
def test_predict_refuses_a_prediction_that_is_no_number(
    lab: labs.Lab, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.predict("gradient-bytes", value)
    assert "one number" in capsys.readouterr().out


@pytest.mark.parametrize(("value", "words"), [(97, "(a share between 0 and 1), but 97"), (0.97, "Noted: 0.97")])
def test_predict_takes_a_share_between_0_and_1(
    tmp_path: Path, value: float, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    labs.start("09", root=tmp_path / "runs").predict("share-saved", value)
    assert words in capsys.readouterr().out


def test_check_and_predict_answer_an_unknown_name_in_french(lab: labs.Lab, capsys: pytest.CaptureFixture[str]) -> None:
    use_language("fr")
    lab.check("nimporte", right)
    lab.predict("nimporte", 3)
    said = capsys.readouterr().out
    assert "exercice 'nimporte'" in said and "prédiction 'nimporte'" in said


def test_predict_refuses_a_prediction_that_is_negative(lab: labs.Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.predict("gradient-bytes", -3)
    assert "never negative" in capsys.readouterr().out


def test_reveal_knows_a_prediction_after_a_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = labs.start("00", root=tmp_path / "runs")
    before.predict("gradient-bytes", 1000)
    before.reveal("gradient-bytes", 1100.0)
    capsys.readouterr()
    after = labs.start("00", root=tmp_path / "runs")
    after.reveal("gradient-bytes", 1000.0)
    assert "Exactly right" in capsys.readouterr().out
    after.reveal("ddp-optimizer", 1000.0)
    assert "Predict first" in capsys.readouterr().out


def test_compare_gives_no_figure_of_a_run_that_measured_nothing() -> None:
    prediction = Prediction(id="x", en="?", fr="?", kind="bytes")
    assert prediction.compare(1000, None).state == "wrong"


def test_bytes_are_written_as_each_language_does() -> None:
    prediction = Prediction(id="x", en="?", fr="?", kind="bytes")
    assert prediction.format(2 * 2**20) == "2.00 MiB (2,097,152 B)"
    use_language("fr")
    assert prediction.format(2 * 2**20) == "2,00 Mio (2\u202f097\u202f152 octets)"


def test_format_of_a_prediction_writes_a_large_count_short_and_in_full() -> None:
    prediction = Prediction(id="x", en="?", fr="?", kind="count")
    assert [prediction.format(value) for value in (9_999, 10_000, -25_000)] == [
        "9999",
        "10.0 k (10,000)",
        "-25.0 k (-25,000)",
    ]


def test_start_gives_a_notebook_its_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks, given = SimpleNamespace(), []
    shell = SimpleNamespace(user_ns={"ranks": ranks}, dlojz_unfinished=object())
    monkeypatch.setattr("dlojz.ranks.load_ipython_extension", given.append)
    labs.start("00", root=tmp_path / "runs")
    assert given == []
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: shell)
    labs.start("00", root=tmp_path / "runs")
    assert given == [shell]
    for answer in (per_step, folder):
        labs.start("00", root=tmp_path / "runs").check("global-batch", answer)
    assert "your functions per_step, folder right: correct them" in ranks.advice([per_step, folder])
    assert ranks.advice([per_step]).startswith("lab.check has not found your function per_step right: correct it")
    assert ranks.advice([right]) == ""


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", "but 50% of the values differ from the reference, by up to 3"),
        ("fr", "mais 50 % des valeurs diffèrent de la référence, jusqu’à 3"),
    ],
)
def test_a_tensor_that_differs_is_told_how_far(language: Language, words: str) -> None:
    use_language(language)
    expected = torch.tensor([1.0, 2.0, 3.0, 4.0])
    judge = Judge(lambda x: expected, cases=lambda: [(0,)])
    with pytest.raises(Wrong) as refused:
        judge(lambda x: torch.tensor([1.0, 2.0, 0.0, 3.0]))
    assert words in str(refused.value).replace("\u202f", " ").replace("\xa0", " ")


def test_verdict_is_escaped_where_it_is_shown() -> None:
    verdict = Verdict("wrong", "<img src=x onerror=alert(1)>", "<script>")
    shown = verdict._repr_html_()
    assert "<img" not in shown
    assert "<script" not in shown
    assert "&lt;img" in shown
    assert "<img" in str(verdict)
