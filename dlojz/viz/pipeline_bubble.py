"""How the bubble shrinks with more micro-batches: one small panel per schedule, formula as a line, simulation as marks.

Layer 4. Invariant: all panels share their axes; a mark off its line is a formula that does not hold there, and is left
to be seen. Where a schedule has no formula there are marks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from dlojz.pipeline.catalogue import build, entry
from dlojz.pipeline.closed_forms import closed_form
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.simulator import UNIT_COSTS, simulate
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import BLACK, BLUE, VERMILION
from dlojz.viz.pipeline_draw import decimal_marks
from dlojz.viz.pipeline_words import share

DEFAULT_NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "chimera", "dualpipe", "hanayo")
MICRO_BATCHES = (4, 8, 12, 16, 24, 32, 48, 64)
_COLUMNS = 4


class Point(NamedTuple):
    """The bubble fraction of one size: simulated, and by the formula where there is one."""

    micro_batches: int
    simulated: float
    formula: float | None


def bubble_points(name: str, ranks: int, micro_batches: Sequence[int], costs: Costs = UNIT_COSTS) -> list[Point]:
    """The bubble fraction of a schedule at several sizes; sizes that it does not allow are left out.

    Args:
        name: a schedule of the catalogue.
        ranks: number of ranks.
        micro_batches: sizes to try.
        costs: times, in any unit.

    Raises:
        LabError: for an unknown name.
    """
    known = entry(name).name
    points = []
    for number in micro_batches:
        try:
            timeline = simulate(build(known, ranks, number, costs=costs), costs)
        except LabError:  # the schedule's own rule (a multiple, an even number …) excludes this size
            continue
        form = closed_form(known, ranks, number, costs=costs)
        points.append(Point(number, timeline.bubble_fraction, form.bubble_fraction if form else None))
    return points


def bubble_figure(
    names: Sequence[str] = DEFAULT_NAMES,
    ranks: int = 4,
    micro_batches: Sequence[int] = MICRO_BATCHES,
    path: str | Path | None = None,
    costs: Costs = UNIT_COSTS,
) -> LabFigure:
    """Draw the bubble fraction against the number of micro-batches, one panel per schedule.

    Args:
        names: schedules of the catalogue.
        ranks: number of ranks.
        micro_batches: numbers of micro-batches.
        path: picture to write, if any.
        costs: times, in any unit.

    Raises:
        LabError: for an unknown name, if no size is legal for any of them, or the picture cannot be written.
    """
    curves = {entry(name).name: bubble_points(name, ranks, micro_batches, costs) for name in names}
    drawn = {name: points for name, points in curves.items() if points}
    if not drawn:
        raise LabError(
            say(
                en=f"none of {', '.join(names) or '(no names)'} exists for {ranks} ranks and the micro-batches "
                f"{', '.join(map(str, micro_batches)) or '(none)'}: give other sizes, such as 4 ranks and 8, 16, 32.",
                fr=f"aucun de {', '.join(names) or '(aucun nom)'} n’existe pour {ranks} rangs et les micro-batches "
                f"{', '.join(map(str, micro_batches)) or '(aucun)'} : donnez d’autres tailles, comme 4 rangs et 8, 16, "
                "32.",
            )
        )
    last = {name: points[-1] for name, points in drawn.items()}
    words = "; ".join(f"{name}: {share(point.simulated)} (m = {point.micro_batches})" for name, point in last.items())
    title = say(
        en=f"Bubble fraction against micro-batches, {ranks} ranks",
        fr=f"Fraction de bulle selon le nombre de micro-batches, {ranks} rangs",
    )
    columns = min(_COLUMNS, len(drawn))
    rows = -(-len(drawn) // columns)
    figure = new_figure(max(3.0 * columns, 5.0), 2.3 * rows + 1.0, alt=f"{title}. {words}.")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    flat = list(grid.flat)
    for axes in flat[len(drawn) :]:
        axes.remove()
    for number, (axes, (name, points)) in enumerate(zip(flat, drawn.items(), strict=False)):
        formula = [(point.micro_batches, 100 * point.formula) for point in points if point.formula is not None]
        if formula:
            axes.plot(*zip(*formula, strict=True), color=BLUE, linewidth=1.6)
        axes.plot(
            [point.micro_batches for point in points],
            [100 * point.simulated for point in points],
            linestyle="none",
            marker="o",
            markersize=5,
            markerfacecolor="none",
            markeredgecolor=VERMILION if formula else BLACK,
            markeredgewidth=1.4,
        )
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_ylim(bottom=0)
        if number + columns >= len(drawn):
            axes.set_xlabel(say(en="micro-batches", fr="micro-batches"))
            axes.xaxis.set_tick_params(labelbottom=True)
        if number % columns == 0:
            axes.set_ylabel(say(en="bubble, % of time", fr="bulle (% du temps)"))
        plain(axes)
        decimal_marks(axes.xaxis, axes.yaxis)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    handles = [
        *flat[0].plot([], [], color=BLUE, linewidth=1.6, label=say(en="formula", fr="formule")),
        *_mark(flat[0], VERMILION, say(en="simulated", fr="simulé")),
        *_mark(flat[0], BLACK, say(en="simulated, no formula", fr="simulé, sans formule")),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    return finish(figure, path)


def _mark(axes: Axes, color: str, label: str) -> list[Line2D]:
    return axes.plot(
        [], [], linestyle="none", marker="o", markerfacecolor="none", markeredgecolor=color, markeredgewidth=1.4,
        label=label,
    )  # fmt: skip
