"""The planner's widget and its twin: the same tables of the same plan; a sentence for what has no answer."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.base.table import safe
from dlojz.display.plan_tables import asked_memory, asked_times
from dlojz.display.widgets import planner_panel
from dlojz.display.widgets.planner_panel import Planner, planner, still_planner
from dlojz.planner import plan
from dlojz.planner.answer import seconds
from dlojz.planner.space import gigabytes

from .overlap import overlapping

QUESTION: dict[str, Any] = {"model": "gpt2", "cluster": "jean_zay_a100", "gpus": 8, "batch": 64}
BLOOM: dict[str, Any] = {"model": "bloom-176b", "cluster": "jean_zay_a100", "gpus": 384, "batch": 2048}


@pytest.fixture(params=["en", "fr"])
def language(request: pytest.FixtureRequest) -> Iterator[str]:
    use_language(request.param)
    yield request.param
    use_language("en")


def cells(answer: Any) -> set[str]:
    return {cell for part in answer.parts for row in part.rows for cell in row}


def test_the_best_layout_is_that_of_the_planner(language: str) -> None:
    answer, told = still_planner(**QUESTION), plan(*QUESTION.values())
    assert answer.plan is not None
    assert answer.plan.best.candidate == told.best.candidate and answer.plan.best.step_s == told.best.step_s
    assert told.best.candidate.title in answer.sentence and told.best.time_words in answer.sentence
    assert {gigabytes(told.best.memory_bytes), seconds(told.best.parts["forward"])} <= cells(answer)
    shown = answer._repr_html_()
    assert "data:image/png;base64," in shown and safe(told.best.candidate.title) in shown
    assert safe(told.best.candidate.title) in answer.html() and "<img" not in answer.html()


def test_times_and_bytes_of_the_tables_add_up() -> None:
    answer = still_planner(**QUESTION)
    times, memory = answer.parts[1:3]
    assert sum(times.shares) == pytest.approx(1)
    assert sum(memory.shares[:-1]) == pytest.approx(memory.shares[-1])


def test_the_front_is_drawn_and_listed(language: str) -> None:
    answer = still_planner(**BLOOM, show="pareto")
    assert answer.plan is not None and answer.figure is not None
    front = answer.plan.pareto
    titles = [row[0] for row in answer.parts[0].rows]
    assert titles[0] == front[0].candidate.title and titles[-1] == front[-1].candidate.title
    assert len(titles) == min(len(front), 16) and set(titles) <= {one.candidate.title for one in front}
    assert answer.html() == answer._repr_html_() and 'src="data:image/png;base64,' in answer.html()
    crosses = next(line for line in answer.figure.axes[0].lines if line.get_marker() == "x")
    assert list(crosses.get_xdata()) == [one.estimated_s for one in front]
    assert overlapping(answer.figure) == []


def test_a_layout_asked_about_stands_beside_the_best(language: str) -> None:
    answer = still_planner(**BLOOM, show="why", tp=4, pp=3, checkpointing="none")
    assert answer.plan is not None and answer.verdict is not None and answer.verdict.admitted
    verdict = answer.plan.why(tp=4, pp=3, checkpointing="none")
    assert answer.verdict.candidate == verdict.candidate and verdict.sentence in answer.sentence
    assert sum(asked_times(answer.plan, verdict).values()) == pytest.approx(verdict.step_s)
    assert sum(asked_memory(answer.plan, verdict).values()) == pytest.approx(verdict.memory_bytes)
    assert seconds(verdict.step_s) in cells(answer) and answer.figure is not None
    assert overlapping(answer.figure) == []


def test_a_layout_that_does_not_fit_shows_what_it_would_take() -> None:
    answer = still_planner(**BLOOM, show="why", tp=1, pp=12, engine="torch", zero=0, checkpointing="none")
    assert answer.verdict is not None and answer.verdict.reason == "memory" and answer.verdict.levers
    assert answer.plan is not None
    assert sum(asked_memory(answer.plan, answer.verdict).values()) > answer.plan.question.device_bytes
    assert any("not enough" in cell or "fits" in cell for cell in cells(answer))
    assert answer.figure is not None and "OOM" in answer.sentence


def test_degrees_that_do_not_come_to_the_gpus_have_a_sentence_and_no_figure() -> None:
    answer = still_planner(**BLOOM, show="why", tp=5)
    assert answer.verdict is not None and answer.verdict.reason == "gpus"
    assert answer.figure is None and "384" in answer.sentence and answer.parts


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"gpus": 7, "cluster": "jean_zay_h100"}, "do not fill whole nodes"),
        ({"model": "alexnet", "gpus": 64, "batch": 7}, "can deal a batch of 7 out"),
        ({"model": "megatron-1t"}, "fits in no layout"),
        ({"gpus": 10**6}, "gpus must be a whole number"),
        ({"gpus": [8, "<b>"]}, "gpus must be a whole number"),
        ({"batch": 0}, "batch must be a whole number"),
        ({"model": "<b>"}, "unknown model"),
        ({"cluster": "<b>"}, "unknown cluster"),
        ({"show": "<b>"}, "unknown show"),
        ({"show": "why", "colour": 1}, "unknown field"),
        ({"show": "why", "engine": "<b>"}, "unknown engine"),
    ],
)
def test_what_has_no_answer_is_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    answer = still_planner(**{**QUESTION, **fields})
    assert sentence in answer.sentence and answer.figure is None and answer.parts == ()
    for shown in (answer.html(), answer._repr_html_()):
        assert "<b><b>" not in shown and "Traceback" not in shown
        assert shown.count("<p") == 1 and safe(answer.sentence) in shown


def test_a_number_is_not_taken_for_another_kind() -> None:
    assert still_planner(**{**QUESTION, "gpus": 1}).plan is not None
    assert "gpus" in still_planner(**{**QUESTION, "gpus": True}).refusal  # although True == 1


def test_the_widget_shows_what_its_twin_gives(language: str) -> None:
    widget = Planner(QUESTION)
    assert widget.shown.value == still_planner(**QUESTION).html() and widget.asked.layout.display == "none"
    widget.controls["gpus"].value = 16
    widget.controls["batch"].value = 128
    assert widget.fields == {**QUESTION, "gpus": 16, "batch": 128, "show": "best"}
    assert widget.shown.value == still_planner(**widget.fields).html()
    widget.show.value = "pareto"
    assert "data:image/png" in widget.shown.value and widget.shown.value == still_planner(**widget.fields).html()
    widget.show.value = "why"
    assert widget.asked.layout.display == ""
    widget.numbers["tp"].value = 2
    widget.words["zero"].value = 0
    assert widget.fields == {**QUESTION, "gpus": 16, "batch": 128, "show": "why", "tp": 2, "zero": 0}
    assert widget.shown.value == still_planner(**widget.fields).html()
    assert widget.answer.verdict is not None and widget.answer.verdict.candidate.tp == 2


def test_whatever_is_typed_in_the_widget_answers() -> None:
    widget = Planner(QUESTION)
    before = widget.shown.value
    widget.controls["gpus"].value = 12
    assert "do not fill whole nodes" in widget.shown.value and widget.answer.plan is None
    widget.controls["gpus"].value = 8
    assert widget.shown.value == before
    widget.controls["model"].value = "megatron-1t"
    assert "fits in no layout" in widget.shown.value and "Traceback" not in widget.shown.value
    widget.controls["gpus"].value = -5  # out of reach: the control itself holds it
    assert widget.controls["gpus"].value == 1


def test_the_first_answer_is_shown_before_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    widget = Planner(QUESTION)
    shown: list[str] = []
    widget.shown.observe(lambda change: shown.append(change["new"]), names="value")
    monkeypatch.setattr(planner_panel, "AT_ONCE", 0)
    widget.controls["batch"].value = 32
    quick = planner_panel.answered({**QUESTION, "batch": 32}, quick=True)
    assert shown == [quick.html(), still_planner(**{**QUESTION, "batch": 32}).html()]
    assert quick.plan is not None and not quick.plan.simulations


def test_what_the_widget_cannot_begin_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for fields, sentence in (
        ({"model": "gpt9"}, "unknown model"),
        ({"cluster": "moon"}, "unknown cluster"),
        ({"show": "all"}, "unknown show"),
        ({"gpus": "8"}, "gpus must be"),
        ({"colour": 3}, "unknown field"),
        ({"engine": "jax"}, "unknown engine"),
        ({"tp": 0}, "tp must be"),
    ):
        with pytest.raises(LabError, match=sentence):
            planner(**{**QUESTION, **fields})
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "ipywidgets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(LabError, match="still_planner"):
        planner(**QUESTION)
