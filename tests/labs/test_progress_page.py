"""Where a student stands in all labs: read from files that may be damaged, told in a table, a sentence and JSON."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dlojz import labs
from dlojz.base.language import use_language
from dlojz.cli.main import DONE, REFUSED, main
from dlojz.labs.kit.contents import LABS
from dlojz.labs.kit.exercise import Challenge, Said
from dlojz.labs.kit.lab import NUMBERS, LabProgress, Predicted, content_of
from dlojz.labs.kit.progress_page import Overview, Standing, is_good, read_overview

HOSTILE = "<img src=x onerror=alert(1)>\u202e"


def right(dp: int, micro_batch: int, micro_batches: int) -> int:
    return dp * micro_batch * micro_batches


def finish(root: Path, number: str, day: int = 1, leave: int = 0) -> None:
    progress = LabProgress(root / f"progress-{number}.json")
    exercises = [one for one in content_of(number).EXERCISES if not isinstance(one, Challenge)]
    for exercise in exercises[: len(exercises) - leave]:
        progress.done(exercise.id, datetime(2030, 1, day, tzinfo=UTC))


def standing(overview: Overview, number: str) -> dict[str, object]:
    return next(one.data() for one in overview.standings if one.entry.number == number)


def test_read_overview_of_nothing_done_begins_at_the_first_lab(tmp_path: Path) -> None:
    overview = read_overview(tmp_path / "nowhere")
    assert [one.entry for one in overview.standings] == list(LABS)
    assert overview.data()["next"] == {"lab": "00", "exercise": "global-batch"}
    assert "Exercises done: 0 of " in str(overview)
    assert "Next: lab 00, Getting started" in str(overview)


def test_read_overview_goes_on_where_one_has_worked_last(tmp_path: Path) -> None:
    finish(tmp_path, "00")
    assert read_overview(tmp_path).data()["next"]["lab"] == "01"
    finish(tmp_path, "03", day=2, leave=1)
    finish(tmp_path, "01", day=3, leave=2)
    overview = read_overview(tmp_path)
    assert overview.data()["next"] == {"lab": "01", "exercise": content_of("01").EXERCISES[-2].id}
    assert standing(overview, "00")["finished"] is True
    assert standing(overview, "03")["finished"] is False


def test_all_done_says_so(tmp_path: Path) -> None:
    for number in NUMBERS:
        finish(tmp_path, number)
    overview = read_overview(tmp_path)
    assert overview.data()["next"] is None
    assert "Every exercise of every lab is done." in str(overview)
    assert "Every exercise of every lab is done." in overview._repr_html_()


def test_a_prediction_is_kept_when_first_revealed(tmp_path: Path) -> None:
    lab = labs.start("00", root=tmp_path)
    lab.reveal("gradient-bytes", 100)
    assert standing(read_overview(tmp_path), "00")["predictions_made"] == 0
    lab.predict("gradient-bytes", 300)
    lab.reveal("gradient-bytes", 100)
    lab.predict("gradient-bytes", 100)  # in knowledge of the value
    lab.reveal("gradient-bytes", 100)
    lab.predict("ddp-optimizer", 104)
    lab.reveal("ddp-optimizer", None)  # no figure to compare with
    lab.reveal("ddp-optimizer", 100)
    found = standing(read_overview(tmp_path), "00")
    assert (found["predictions"], found["predictions_made"], found["predictions_good"]) == (4, 2, 1)
    assert LabProgress(tmp_path / "progress-00.json").predictions() == {
        "gradient-bytes": Predicted(300.0, 100.0),
        "ddp-optimizer": Predicted(104.0, 100.0),
    }


def test_check_and_reveal_keep_what_the_other_has_written(tmp_path: Path) -> None:
    lab = labs.start("00", root=tmp_path)
    lab.check("global-batch", right)
    lab.predict("ddp-optimizer", 1)
    lab.reveal("ddp-optimizer", 2)
    lab.check("global-batch", right)
    kept = json.loads((tmp_path / "progress-00.json").read_text())
    assert set(kept["done"]) == {"global-batch"}
    assert kept["predictions"] == {"ddp-optimizer": {"predicted": 1.0, "value": 2.0}}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[",
        "[]",
        "\x00\xff",
        '{"done": 3, "predictions": 4}',
        '{"done": {"<b>": 1}, "predictions": {"ddp-optimizer": 3, "<b>": {"predicted": 1, "value": 1}}}',
        '{"predictions": {"ddp-optimizer": {"predicted": "1", "value": 2}, "zero-2-64": {"predicted": 1}}}',
        '{"predictions": {"ddp-optimizer": {"predicted": true, "value": [1]}}}',
    ],
)
def test_read_overview_counts_a_damaged_file_as_empty(tmp_path: Path, content: str) -> None:
    (tmp_path / "progress-00.json").write_text(content)
    found = standing(read_overview(tmp_path), "00")
    assert (found["done"], found["predictions_made"]) == ({}, 0)
    labs.start("00", root=tmp_path).check("global-batch", right)
    assert list(standing(read_overview(tmp_path), "00")["done"]) == ["global-batch"]  # type: ignore[call-overload]


def test_a_prediction_of_nothing_is_good_only_if_exact() -> None:
    prediction = content_of("00").PREDICTIONS[0]
    assert is_good(prediction, Predicted(0.0, 0.0))
    assert not is_good(prediction, Predicted(1e-9, 0.0))
    assert is_good(prediction, Predicted(110.0, 100.0))
    assert not is_good(prediction, Predicted(111.0, 100.0))


def test_overview_is_escaped_where_it_is_shown() -> None:
    entry = replace(LABS[0], number=HOSTILE, title=Said(HOSTILE, HOSTILE), file=f'"{HOSTILE}')
    overview = Overview((Standing(entry=entry, exercises=(("x", HOSTILE),), done={}, predictions=2, made=1, good=1),))
    for shown in (overview._repr_html_(), overview.page()):
        assert "<img" not in shown
        assert 'href=""' not in shown
        assert "\u202e" not in shown
    assert "\u202e" not in str(overview)


def test_table_of_the_overview_has_numbers_and_a_mark_for_a_full_bar(tmp_path: Path) -> None:
    finish(tmp_path, "00")
    finish(tmp_path, "01", leave=2)
    overview = read_overview(tmp_path)
    assert overview.table().rows[0][:2] == ("✓ 00 Getting started", "4 / 4")
    assert overview.table().rows[1][:2] == ("· 01 Big models", "5 / 7")
    assert overview.table().shares[:3] == (1.0, 5 / 7, 0.0)
    assert f'<a href="{LABS[0].notebook}">✓ 00 Getting started</a>' in overview._repr_html_()
    assert "<a " not in overview.page()


def test_the_overview_speaks_the_language_of_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "fr" / "contents.ipynb"))
    assert "La suite : TP 00, Prise en main" in str(labs.overview(root=tmp_path))


def test_the_command_answers_as_text_page_and_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    finish(tmp_path, "00")
    page = tmp_path / "page.html"
    assert main(["labs", "progress", "--root", str(tmp_path), "--html", str(page)]) == DONE
    assert "✓ 00 Getting started" in capfd.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>") and "<script" not in text and "href" not in text
    use_language("en")
    assert main(["labs", "progress", "--root", str(tmp_path), "--json"]) == DONE
    told = json.loads(capfd.readouterr().out)
    assert [one["lab"] for one in told["labs"]] == [entry.number for entry in LABS]
    assert told["next"]["lab"] == "01"


def test_the_command_lists_the_labs_and_refuses_what_it_does_not_take(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["labs"]) == DONE
    assert "05 Pipeline parallelism" in capfd.readouterr().out
    assert main(["labs", "--json"]) == DONE
    assert [one["lab"] for one in json.loads(capfd.readouterr().out)] == [entry.number for entry in LABS]
    for words in (["labs", "list", "05"], ["labs", "progress", "05"], ["labs", "progress", "--check"]):
        assert main(words) == REFUSED
        assert capfd.readouterr().err.count("\n") == 1


def test_a_challenge_is_called_one_in_the_table_of_progress() -> None:
    found = [one for entry in LABS for one in content_of(entry.number).EXERCISES if isinstance(one, Challenge)]
    assert len(found) == 9
    for one in found:
        assert one.title.en.startswith("challenge: ") and one.title.fr.startswith("défi : ")
