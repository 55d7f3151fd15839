"""Predicted beside measured: the step times of all published rows, and each table's error beside the trivial model's.

Layer 4. Invariant: rows that were fitted on are hollow, held-out rows are full; nothing is left out of the picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.ticker import NullFormatter
from rich.table import Table

from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.footprint_words import percent
from dlojz.viz.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW

if TYPE_CHECKING:
    from dlojz.plan.validation import TableResult

COLORS = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, BLACK, YELLOW, GREY)
MARKERS = "osD^vP*X<>h"


def validation_figure(results: Sequence[TableResult], path: str | Path | None = None) -> LabFigure:
    """Draw tables; save the picture too where a path is given.

    Raises:
        LabError: if the picture cannot be written.
    """
    figure = new_figure(
        13.0,
        6.2,
        alt=say(
            en="Predicted against measured seconds of a step, on logarithmic axes, and the mean error of each table: ",
            fr="Durées d’un pas prédites et mesurées, en échelle logarithmique, et erreur moyenne par tableau : ",
        )
        + ", ".join(f"{one.name} {percent(one.mean)}" for one in results),
    )
    cells = figure.add_gridspec(1, 2, width_ratios=(1.25, 1.0))
    points, bars = figure.add_subplot(cells[0, 0]), figure.add_subplot(cells[0, 1])
    for number, one in enumerate(results):
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        for held in (False, True):
            rows = [row for row in one.rows if row.held_out == held]
            points.scatter(
                [row.measured_s for row in rows],
                [row.predicted_s for row in rows],
                s=30,
                marker=marker,
                facecolors=color if held else "none",
                edgecolors=color,
                linewidths=0.9,
                label=one.name if held else None,
            )
    times = [value for one in results for row in one.rows for value in (row.measured_s, row.predicted_s)]
    limits = (0.8 * min(times), 1.25 * max(times))
    points.plot(limits, limits, color=BLACK, linewidth=1)
    for factor, style in ((0.9, ":"), (1.1, ":")):
        points.plot(limits, [factor * limit for limit in limits], color=GREY, linewidth=1, linestyle=style)
    points.set(xscale="log", yscale="log", xlim=limits, ylim=limits)
    for axis in (points.xaxis, points.yaxis):
        axis.set_major_formatter(lambda value, place: f"{value:g}")
        axis.set_minor_formatter(NullFormatter())
    points.set_xlabel(say(en="measured, seconds of a step", fr="mesuré, secondes par pas"))
    points.set_ylabel(say(en="predicted, seconds of a step", fr="prédit, secondes par pas"))
    points.set_title(
        say(
            en="full: held out; hollow: fitted on; dotted: ±10 %",
            fr="plein : mis de côté ; creux : ajusté ; pointillé : ±10 %",
        ),
        fontsize=10,
    )
    points.legend(fontsize=8, loc="upper left")
    _bars(bars, results)
    plain(points)
    plain(bars)
    return finish(figure, path)


PLATE = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
"""A number stays legible where the mark of the goal lies under it."""


def _bars(axes: object, results: Sequence[TableResult]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    places = list(range(len(results)))[::-1]
    for offset, values, color, hatch, label in (
        (0.2, [100 * one.mean for one in results], BLUE, "", say(en="this model", fr="ce modèle")),
        (
            -0.2,
            [100 * one.trivial for one in results],
            ORANGE,
            "//",
            say(en="constant FLOP/s per GPU", fr="FLOP/s par GPU constants"),
        ),
    ):
        drawn = axes.barh(
            [place + offset for place in places], values, 0.38, color=color, hatch=hatch, edgecolor=BLACK, label=label
        )
        written = [say(en=f"{value:.1f}", fr=f"{value:.1f}".replace(".", ",")) for value in values]
        axes.bar_label(drawn, written, padding=3, fontsize=8, bbox=PLATE, zorder=4)
    for place, one in zip(places, results, strict=True):
        if one.goal is not None:
            axes.plot([100 * one.goal.mean] * 2, [place - 0.02, place + 0.42], color=VERMILION, linewidth=2.2, zorder=3)
    axes.plot([], [], color=VERMILION, linewidth=2.2, label=say(en="goal", fr="objectif"))
    axes.set_yticks(places, [one.name for one in results])
    axes.margins(x=0.12)
    axes.set_xlabel(
        say(en="mean absolute error of held-out rows, %", fr="erreur absolue moyenne, lignes mises de côté, %")
    )
    axes.legend(fontsize=8, loc="upper right")


def validation_table(results: Sequence[TableResult]) -> Table:
    """The errors of all tables, as a terminal shows them."""
    from dlojz.plan.validation import TOOLS

    made = Table(
        title=say(
            en="Seconds of a step: mean absolute error on rows not used in the fit",
            fr="Durée d’un pas : erreur absolue moyenne sur les lignes que l’ajustement n’a pas vues",
        ),
        caption=say(
            en="trivial: constant FLOP/s per GPU, fitted on the same half; unseen model: fits without any of its rows",
            fr="trivial : FLOP/s par GPU constants, ajustés sur la même moitié ; modèle non vu : sans ses lignes",
        ),
    )
    made.add_column(say(en="table", fr="tableau"), no_wrap=True)
    for title in (
        say(en="rows", fr="lignes"),
        say(en="error", fr="erreur"),
        "max",
        say(en="goal", fr="objectif"),
        "trivial",
        say(en="unseen model", fr="modèle non vu"),
        say(en="rank corr.", fr="corr. rang"),
        say(en="published tool", fr="outil publié"),
    ):
        made.add_column(title, justify="right", overflow="fold")
    for one in results:
        tool, goal, unseen = TOOLS.get(one.name), one.goal, one.left_out_mean
        made.add_row(
            one.name,
            f"{len(one.held)}/{len(one.rows)}",
            percent(one.mean),
            percent(one.worst),
            "" if goal is None else f"{percent(goal.mean)} {'✓' if one.reached else '✗'}",
            percent(one.trivial),
            "" if unseen is None else percent(unseen),
            f"{one.rank_correlation:.2f}",
            "" if tool is None else f"{tool.name} {percent(tool.mean)}",
        )
    return made


def rows_table(result: TableResult) -> Table:
    """Every row of one table."""
    made = Table(title=result.name)
    for title in (
        say(en="row", fr="ligne"),
        "dp·tp·pp·cp",
        "micro-batch",
        say(en="measured", fr="mesuré"),
        say(en="predicted", fr="prédit"),
        say(en="error", fr="erreur"),
        "",
    ):
        made.add_column(title, justify="right")
    for one in result.rows:
        row = one.row
        made.add_row(
            row.row.partition("/")[2],
            f"{row.dp}·{row.tp}·{row.pp}·{row.cp}",
            str(row.micro_batch),
            f"{one.measured_s:.2f} s",
            f"{one.predicted_s:.2f} s",
            f"{100 * one.error:+.1f} %",
            "" if one.held_out else say(en="fitted", fr="ajusté"),
        )
    return made
