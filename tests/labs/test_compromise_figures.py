"""Figures and tables of lab 08: what is drawn is what was given or predicted; what is still to do is said."""

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

import dlojz
from dlojz import labs
from dlojz.base.errors import LabError
from dlojz.base.language import Sentences
from dlojz.cost_model import bill
from dlojz.cost_model.step import SECONDS_PER_DAY
from dlojz.display.figures.plan_figures import _waterfall
from dlojz.hardware import cluster
from dlojz.hardware.evidence import table
from dlojz.labs import NotDone
from dlojz.labs.kit.exercise import Verdict
from dlojz.labs.kit.figures import Illustrated, Picture
from dlojz.labs.lab08_compromise import compromise_tables as tables
from dlojz.labs.lab08_compromise import figures
from dlojz.labs.lab08_compromise.exercises_alpa import chain_cost
from dlojz.labs.lab08_compromise.exercises_layouts import shares_of_peak
from dlojz.labs.lab08_compromise.figures_published import (
    CHOSEN,
    course_table,
    duration,
    neighbours_of_bloom,
    published_table,
    splits,
    sweep,
)
from dlojz.planner.answer import seconds
from tests.display.overlap import overlapping

WEEK, YEAR = 7 * SECONDS_PER_DAY, 365.25 * SECONDS_PER_DAY
CHAIN = SimpleNamespace(
    strategies=("column", "row", "batch"),
    costs=[[0.0, 5.0, 9.0], [5.0, 5.0, 9.0], [5.0, 5.0, 9.0]],
    resharding=[[[3.0, 0.0, 3.0], [0.0, 3.0, 3.0], [3.0, 3.0, 0.0]]] * 2,
)


def undone(*_: Any, **__: Any) -> Any:
    raise NotDone("some-exercise")


def drawn(shown: Any) -> Any:
    """The figure of what a function of the lab gave, whose texts do not lie on one another."""
    assert isinstance(shown, Picture | Illustrated)
    assert shown.figure.alt
    assert overlapping(shown.figure) == []
    return shown.figure


def test_mlp_sharding_says_what_is_to_do() -> None:
    for said in (figures.mlp_sharding(CHAIN, undone),):
        assert isinstance(said, Verdict)
        assert said.state == "todo"


def test_a_picture_and_its_table_are_two_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    giants: Any = figures.giants()
    giants._ipython_display_()
    assert shown == [giants.picture, giants.sheet]
    assert repr(giants).startswith(giants.figure.alt) and str(giants.sheet) in repr(giants)


def test_the_formula_gives_the_courses_table() -> None:
    """300 billion tokens on 1 and 4 DGX A100: 6 and 2 weeks, 65 and 16 weeks, 5 and 1 years, 65 and 17 years."""
    printed = (6 * WEEK, 2 * WEEK, 65 * WEEK, 16 * WEEK, 5 * YEAR, YEAR, 65 * YEAR, 17 * YEAR)
    for one, told in zip(course_table(), printed, strict=True):
        unit = YEAR if one.parameters > 5e10 else WEEK
        assert abs(one.formula_s - told) <= max(0.55 * unit, 0.06 * told)
    assert [one.model_s is None for one in course_table()] == [False] * 4 + [True, False, True, True]


def test_the_published_table_has_the_days_of_its_flops() -> None:
    rows = {row.row: row for row in table("sc21-1")}
    last = published_table()[-1]
    row = rows["sc21-1/1008.0"]
    assert row.seconds is not None and last.published_s is not None and last.model_s is not None
    assert last.published_s == pytest.approx(300e9 / (3072 * 2048) * row.seconds)
    assert last.account.gpu_hours == pytest.approx(3072 * last.model_s / 3600)
    assert last.account == bill(cluster("selene"), 3072, last.model_s)
    assert last.model_s == pytest.approx(last.published_s, rel=0.04)


def test_the_giants_are_drawn_with_what_fits_nowhere(language: str) -> None:
    shown: Any = figures.giants()
    left, right = drawn(shown).axes
    formula, cost, out = left.lines[0], left.containers[0].lines[0], left.lines[-1]
    assert [len(one.get_xdata()) for one in (formula, cost, out)] == [8, 5, 3]
    assert len(right.lines[0].get_xdata()) == 10
    assert len(shown.sheet.rows) == 18
    assert sum("ne tient pas" in row or "fits nowhere" in row for row in shown.sheet.rows) == 3


def test_the_published_share_of_the_peak_stands_beside_the_student_s(language: str) -> None:
    shown: Any = tables.peak_shares(shares_of_peak)
    assert len(shown.rows) == 10
    mfu, hfu = (float(cell.replace(" %", "").replace("\u202f", "").rstrip("%")) for cell in shown.rows[6][4:])
    assert (mfu, hfu) == (35, 46)
    assert tables.peak_shares(undone).state == "todo"


def test_durations_are_told_in_the_unit_of_a_person() -> None:
    assert [duration(days * SECONDS_PER_DAY) for days in (2, 28, 730.5)] == ["2.0 d", "4.0 weeks", "2.0 years"]


def test_every_split_has_what_it_waits_for(language: str) -> None:
    found = splits("bloom-176b", gpus=384, batch=2048, tp=4, micro_batch=2)
    assert [(one.pp, one.dp) for one in found] == [(3, 32), (6, 16), (12, 8), (24, 4)]
    assert sorted(found, key=lambda one: one.bubble_s) == list(found)
    assert sorted(found, key=lambda one: -one.data_s) == list(found)
    assert [one.fits for one in found] == [False, True, True, True]
    assert min((one for one in found if one.fits), key=lambda one: one.step_s).pp == 12  # as BLOOM was trained
    shown: Any = figures.bubble_or_all_reduce("bloom-176b", gpus=384, batch=2048, tp=4, micro_batch=2)
    axes = drawn(shown).axes[0]
    heights = np.array([bar.get_height() for bar in axes.patches]).reshape(4, 4)
    assert heights[:3].sum(axis=0) == pytest.approx([one.bubble_s + one.pipeline_s + one.data_s for one in found])
    left_out = np.array([one.step_s for one in found]) - heights.sum(axis=0)
    assert left_out == pytest.approx(left_out[0])  # what no split avoids
    assert min((2, 1, 3), key=lambda place: heights[:, place].sum()) == 2  # the lowest bar that fits has the star
    assert list(axes.lines[-1].get_xdata()) == [2]
    assert [row[0] for row in shown.sheet.rows] == ["3", "6", "12", "24"]


@pytest.mark.parametrize(
    "fields",
    [{"gpus": 7}, {"tp": 3}, {"tp": 0}, {"batch": 1, "gpus": 384, "tp": 1}, {"model": "<b>"}, {"gpus": 8, "tp": 16}],
)
def test_a_question_without_splits_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(LabError):
        splits(**{"model": "bloom-176b", "gpus": 64, "batch": 512, "cluster": "jean_zay_h100", **fields})


def test_an_image_model_is_split_too() -> None:
    found = splits("vit_tiny", gpus=8, batch=64)
    assert found[0].bubble_s == 0 and found[0].pp == 1 and found[0].data_s > found[-1].data_s


def test_all_that_was_measured_around_bloom_is_drawn(language: str) -> None:
    found = neighbours_of_bloom()
    assert sum(len(one.measured_s) or 1 for one in found) == len(sweep())
    ran_out = {one.layout[:3] for one in found if not one.measured_s}
    assert ran_out == {(48, 8, 1), (32, 2, 6)}
    limit = cluster("jean_zay_a100").gpu.memory_bytes
    for one in found:
        assert (sum(one.parts.values()) > limit) == (not one.measured_s)
    assert found[0].layout == CHOSEN and min(found[0].measured_s) == pytest.approx(110.42)
    shown: Any = figures.bloom()
    left, right = drawn(shown).axes
    dots = next(line for line in left.lines if line.get_marker() == "o")
    assert sorted(dots.get_xdata()) == sorted(value for one in found for value in one.measured_s)
    assert [text.get_text() for text in right.texts] == ["OOM"] * 3
    assert shown.sheet.rows[0][0].startswith("★ dp 8 · tp 4 · pp 12")


def test_a_chain_of_strategies_is_drawn_with_its_totals(language: str) -> None:
    figure = drawn(figures.mlp_sharding(CHAIN, [0, 1, 0], alone=lambda: [0, 0, 0], other=[2, 2, 2]))
    assert chain_cost(CHAIN.costs, CHAIN.resharding, [0, 1, 0]) == 10
    assert chain_cost(CHAIN.costs, CHAIN.resharding, [0, 0, 0]) == 16
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [text.rpartition(" ")[2] for text in legend] == ["10", "16", "27"]
    frames = [patch.get_xy()[1] + patch.get_height() / 2 for patch in figure.axes[0].patches[:3]]
    assert frames == pytest.approx([0, 1, 0])
    assert "redécoupage" in figure.axes[1].get_title() or "resharding" in figure.axes[1].get_title()
    assert figures.mlp_sharding(CHAIN).figure.legends == []  # type: ignore[union-attr]
    solved = SimpleNamespace(strategies=lambda: [0, 1, 0])
    assert drawn(figures.mlp_sharding(CHAIN, solved)).alt == drawn(figures.mlp_sharding(CHAIN, (0, 1, 0))).alt


@pytest.mark.parametrize("wrong", [[0, 1], [0, 1, 3], [0, -1, 0], "row", 5, [0.5, 1, 0]])
def test_mlp_sharding_refuses_a_solution_without_a_strategy_for_each_layer(wrong: Any) -> None:
    with pytest.raises(LabError, match="one strategy"):
        figures.mlp_sharding(CHAIN, wrong)


def test_neighbours_stand_beside_their_measurements(language: str) -> None:
    rows = [SimpleNamespace(title=name, step_s=step_s) for name, step_s in (("c", 0.3), ("a", 0.1), ("<b>$x$", 0.2))]
    shown: Any = figures.neighbours(rows, [0.33, 0.22, 0.2])  # type: ignore[arg-type]
    axes = drawn(shown).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "<b>$x$", "c"]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([100, 200, 300, 220, 200, 330])
    assert "10 %" in axes.get_title(loc="left")
    assert shown.sheet.rows[0][0] == "★ a" and "&lt;b&gt;" in shown.sheet._repr_html_()
    first: Any = figures.neighbours(rows, [0.33, 0.1, 0.2])  # type: ignore[arg-type]
    assert "%" not in first.figure.axes[0].get_title(loc="left")


@pytest.mark.parametrize("measured", [[], [0.1], [0.1, 0.2, 0.0]])
def test_neighbours_refuse_a_layout_without_its_measurement(measured: list[float]) -> None:
    rows: Any = [SimpleNamespace(title="a", step_s=0.1)] * 3
    with pytest.raises(LabError):
        figures.neighbours(rows, measured)


def test_a_table_has_as_many_titles_in_both_languages() -> None:
    """Those that a call spells, and those that stand under `heads` in a lab's file of sentences."""
    heads: dict[str, tuple[str, ...]] = {}
    for path in sorted(Path(labs.__file__).parents[1].glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "titles" and node.keywords:
                heads[f"{path.name}:{node.lineno}"] = tuple(ast.unparse(keyword.value) for keyword in node.keywords)
    for path in sorted(Path(labs.__file__).parent.glob("lab*/*.md")):
        for section, sentences in Sentences(path).sentences.items():
            heads |= {f"{path.name}: {section}": tuple(sentences["heads"])} if "heads" in sentences else {}
    assert len(heads) > 40
    for where, texts in heads.items():
        english, french = (text.count(";") for text in texts)
        assert english == french > 0, where


def test_a_waterfall_names_the_closed_form_beside_the_simulation(language: str) -> None:
    best = dlojz.plan("gpt3-175b", "jean_zay_a100", gpus=384, batch=1536).best
    assert best.simulation is not None
    figure = Figure()
    _waterfall(figure.add_subplot(), replace(best, estimated_s=2 * best.estimated_s))
    told = figure.axes[0].get_xlabel()
    assert seconds(2 * best.estimated_s) in told
    assert (f"simulated: {seconds(best.step_s)}" if language == "en" else f"simulée : {seconds(best.step_s)}") in told
