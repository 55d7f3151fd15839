"""Figures and tables of lab 08: what is drawn is what was given or predicted; what is still to do is said."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
from dlojz.base.language import use_language
from dlojz.cost_model import bill
from dlojz.cost_model.step import SECONDS_PER_DAY
from dlojz.cost_model.validation import validate, validated
from dlojz.display.figures.plan_figures import _waterfall
from dlojz.hardware import cluster
from dlojz.hardware.evidence import table
from dlojz.labs import NotDone
from dlojz.labs.kit.exercise import Verdict
from dlojz.labs.kit.figures import Illustrated, Picture
from dlojz.labs.lab08_compromise import compromise_tables as tables
from dlojz.labs.lab08_compromise import figures
from dlojz.labs.lab08_compromise.exercises_alpa import chain_cost
from dlojz.labs.lab08_compromise.figures import FAR, known
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
POINTS = [(4**k * 1024, 1e-4 + 1.4e-9 * 4**k * 1024) for k in range(8)]
CHAIN = SimpleNamespace(
    strategies=("column", "row", "batch"),
    costs=[[0.0, 5.0, 9.0], [5.0, 5.0, 9.0], [5.0, 5.0, 9.0]],
    resharding=[[[3.0, 0.0, 3.0], [0.0, 3.0, 3.0], [3.0, 3.0, 0.0]]] * 2,
)
# Layers of work 4, 1, 1, 1, 1 on submeshes of 1, 2 and 4 GPUs that reach 100, 90 and 75 %.
TIMES = {
    (first, last, gpus): sum((4, 1, 1, 1, 1)[first : last + 1]) / (gpus * share)
    for gpus, share in ((1, 1.0), (2, 0.9), (4, 0.75))
    for first in range(5)
    for last in range(first, 5)
}


@pytest.fixture(params=["en", "fr"])
def language(request: pytest.FixtureRequest) -> Iterator[str]:
    use_language(request.param)
    yield request.param
    use_language("en")


def undone(*_: Any, **__: Any) -> Any:
    raise NotDone("some-exercise")


def drawn(shown: Any) -> Any:
    """The figure of what a function of the lab gave, whose texts do not lie on one another."""
    assert isinstance(shown, Picture | Illustrated)
    assert shown.figure.alt
    assert overlapping(shown.figure) == []
    return shown.figure


def test_what_is_to_do_is_said() -> None:
    for said in (
        figures.alpha_beta(POINTS, yours=undone),
        figures.mlp_sharding(CHAIN, undone),
        figures.stages(TIMES, undone, 4),
    ):
        assert isinstance(said, Verdict)
        assert said.state == "todo"


def test_a_picture_and_its_table_are_two_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    errors: Any = figures.errors("sc21-2")
    errors._ipython_display_()
    assert shown == [errors.picture, errors.sheet]
    assert repr(errors).startswith(errors.figure.alt) and str(errors.sheet) in repr(errors)


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


def test_durations_are_told_in_the_unit_of_a_person() -> None:
    assert [duration(days * SECONDS_PER_DAY) for days in (2, 28, 730.5)] == ["2.0 d", "4.0 weeks", "2.0 years"]


def test_a_line_is_drawn_through_the_messages_and_its_residuals_below(language: str) -> None:
    figure = drawn(figures.alpha_beta(POINTS, yours=lambda: (1e-4, 1.4e-9), package=(2e-4, 1.4e-9)))
    upper, lower = figure.axes
    assert list(upper.lines[0].get_ydata()) == pytest.approx([1e3 * seconds for _, seconds in POINTS])
    exact, other = (np.asarray(line.get_ydata()) for line in lower.lines[:2])
    assert exact == pytest.approx(0, abs=1e-9) and other[0] == pytest.approx(100e-4 / POINTS[0][1])
    scaled = drawn(figures.alpha_beta(POINTS, factor=2.0, yours=(1e-4, 0.7e-9)))
    assert np.asarray(scaled.axes[1].lines[0].get_ydata()) == pytest.approx(0, abs=1e-9)


def test_a_line_may_go_below_zero() -> None:
    figure = drawn(figures.alpha_beta(POINTS, yours=(-1e-3, 2e-9)))
    assert min(figure.axes[0].lines[1].get_ydata()) > 0
    assert "−1.00 ms" in figure.axes[0].get_legend().get_texts()[1].get_text()


def test_bad_messages_are_refused() -> None:
    for points, fit in (([], (0, 1)), ([(0, 1.0)], (0, 1)), (POINTS, 3), (POINTS, (1, 2, 3))):
        with pytest.raises(LabError):
            figures.alpha_beta(points, yours=fit)


def test_every_split_has_what_it_waits_for(language: str) -> None:
    found = splits("bloom-176b", gpus=384, batch=2048, tp=4, micro_batch=2)
    assert [(one.pp, one.dp) for one in found] == [(3, 32), (6, 16), (12, 8), (24, 4)]
    assert sorted(found, key=lambda one: one.bubble_s) == list(found)
    assert sorted(found, key=lambda one: -one.data_s) == list(found)
    assert [one.fits for one in found] == [False, True, True, True]
    assert min((one for one in found if one.fits), key=lambda one: one.step_s).pp == 12  # as BLOOM was trained
    shown: Any = figures.bubble_or_all_reduce("bloom-176b", gpus=384, batch=2048, tp=4, micro_batch=2)
    axes = drawn(shown).axes[0]
    heights = np.array([bar.get_height() for bar in axes.patches]).reshape(3, 4)
    assert heights.sum(axis=0) == pytest.approx([one.bubble_s + one.pipeline_s + one.data_s for one in found])
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
def test_a_solution_names_a_strategy_for_each_layer(wrong: Any) -> None:
    with pytest.raises(LabError, match="one strategy"):
        figures.mlp_sharding(CHAIN, wrong)


def test_stages_are_framed_in_their_table_and_make_their_pipeline(language: str) -> None:
    figure = drawn(figures.stages(TIMES, [(0, 0, 2), (1, 4, 2)], 16))
    *heat, pipeline = figure.axes
    assert len(heat) == 3
    framed = [patch.get_xy() for patch in heat[1].patches]
    assert framed == [(-0.5, -0.5), (3.5, 0.5)]
    boxes = [patch for patch in pipeline.patches if patch.get_height() == pytest.approx(0.8)]
    ends = [box.get_x() + box.get_width() for box in boxes]
    total = 4 / 1.8 * 17  # Σt + 15 max t of two stages of 4 ÷ (2 × 0.9)
    assert len(boxes) == 32 and max(ends) == pytest.approx(total)
    assert ("37.78" if language == "en" else "37,78") in pipeline.get_title(loc="left")
    planned = SimpleNamespace(
        stages=[
            SimpleNamespace(first=first, last=last, submesh=SimpleNamespace(num_devices=2))
            for first, last in ((0, 0), (1, 4))
        ]
    )
    assert drawn(figures.stages(TIMES, lambda: planned, 16)).alt == figure.alt


@pytest.mark.parametrize(
    ("chosen", "micro_batches"),
    [([(0, 0, 2)], 4), ([(0, 0, 2), (2, 4, 2)], 4), ([(0, 4, 8)], 4), ("stage", 4), ([], 4), ([(0, 4, 4)], 0)],
)
def test_stages_hold_every_layer_once(chosen: Any, micro_batches: int) -> None:
    with pytest.raises(LabError):
        figures.stages(TIMES, chosen, micro_batches)


def test_layouts_of_this_machine_stand_beside_their_measurements(language: str) -> None:
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
def test_each_layout_has_its_measurement(measured: list[float]) -> None:
    rows: Any = [SimpleNamespace(title="a", step_s=0.1)] * 3
    with pytest.raises(LabError):
        figures.neighbours(rows, measured)


@pytest.mark.parametrize("name", validated())
def test_every_row_of_a_table_is_drawn_and_the_far_ones_are_told(name: str) -> None:
    found = validate(name)
    shown: Any = figures.errors(name)
    figure = shown.figure
    axes = figure.axes[0]
    held, fitted = ([line for line in axes.lines if line.get_marker() == "o"])[:2]
    drawn_errors = sorted([*held.get_ydata(), *fitted.get_ydata()])
    assert drawn_errors == pytest.approx(sorted(100 * one.error for one in found.rows))
    far = [one for one in found.rows if abs(one.error) > FAR]
    assert len(shown.sheet.rows) == len(far) == sum(len(text.get_text()) == 1 for text in axes.texts)
    assert all(row[-1] for row in shown.sheet.rows)


def test_what_is_known_of_a_row_comes_from_its_table_or_its_neighbours(language: str) -> None:
    rows = {one.row.row: one for one in validate("jean-zay-a100").rows}
    among = tuple(rows.values())
    told = known(rows["jean-zay-a100/830"], among)
    assert "micro-batch" in told and "4" in told  # row 834: the same layout with micro-batch 4 is predicted well
    assert ("heads 128" if language == "en" else "largeur 128") in known(rows["jean-zay-a100/930"], among)
    assert known(rows["jean-zay-a100/830"]) == ("nothing is known" if language == "en" else "rien n’est connu")
    assert ("open" if language == "en" else "ouverte") in known(rows["jean-zay-a100/455"], among)
    drawn(figures.errors("jean-zay-a100"))


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(LabError, match="unknown table"):
        figures.errors("korthikanti-9")


def test_a_table_has_as_many_titles_in_both_languages() -> None:
    found = 0
    for path in sorted(Path(labs.__file__).parents[1].glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "titles":
                found += 1
                english, french = (ast.unparse(keyword.value).count(";") for keyword in node.keywords)
                assert english == french > 0, f"{path.name}:{node.lineno}"
    assert found


def test_tables_that_no_fit_has_seen_are_told_with_the_interval(language: str) -> None:
    shown = tables.unseen(("mpt-h100-fp8", "mt-nlg"))
    assert [row[:2] for row in shown.rows] == [("mpt-h100-fp8", "7"), ("mt-nlg", "3")]
    assert [int(row[5].split()[0].rstrip("%")) for row in shown.rows] == [100, 0]
    assert [row[-1] for row in shown.rows] == ["0", "0"]  # all of them ran
    assert "A100" in shown.notes[0] and "H100" in shown.notes[0]


def test_layouts_that_cost_the_same_are_no_other_front(language: str) -> None:
    plan = dlojz.plan("coatnet_7", "jean_zay_a100", gpus=16, batch=256)

    def front(points: list[tuple[float, ...]]) -> list[int]:
        return [
            place
            for place, one in enumerate(points)
            if not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in points)
        ]

    assert ("the same" if language == "en" else "le même") in tables.front(front, plan).caption


def test_the_front_shows_the_planner_s_choice_and_both_of_its_times(language: str) -> None:
    plan = dlojz.plan("gpt3-175b", "jean_zay_a100", gpus=384, batch=1536)
    slowest_first = sorted(range(plan.found.admitted.size), key=lambda place: -plan.found.step_s[place])
    shown = tables.front(lambda points: slowest_first[:3], plan, most=3)
    assert len(shown.rows) == 4  # the choice is none of the three that such a "front" would show
    assert shown.rows[0][0] == f"{plan.best.candidate.title} ★"
    times = [seconds(time) for time in (plan.best.estimated_s, plan.best.step_s)]
    assert all(time in shown.notes[0] for time in times)


def test_a_waterfall_names_the_closed_form_beside_the_simulation(language: str) -> None:
    best = dlojz.plan("gpt3-175b", "jean_zay_a100", gpus=384, batch=1536).best
    assert best.simulation is not None
    figure = Figure()
    _waterfall(figure.add_subplot(), replace(best, estimated_s=2 * best.estimated_s))
    told = figure.axes[0].get_xlabel()
    assert seconds(2 * best.estimated_s) in told
    assert (f"simulated: {seconds(best.step_s)}" if language == "en" else f"simulée : {seconds(best.step_s)}") in told
