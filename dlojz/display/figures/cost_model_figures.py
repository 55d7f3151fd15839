"""Figures and tables of the cost model: a machine's calibration, and validation against published rows.

Dots are measurements, lines and crosses are the model; no measurement and no row is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from dlojz.base.language import brief_percent, decimal, say, shortest
from dlojz.base.table import visible
from dlojz.cost_model.validation import LEFT_OUT_GOALS, REGRET_GOAL, Goal, first_choices
from dlojz.display.canvas import LabFigure, caption, finish, logarithmic, new_figure, plain
from dlojz.display.style import (
    BASELINE,
    BLACK,
    BLUE,
    GREEN,
    GREY,
    HEADING,
    NORMAL,
    ORANGE,
    PURPLE,
    SKY,
    SMALL,
    VERMILION,
    YELLOW,
)

if TYPE_CHECKING:
    from dlojz.cost_model.measured_machine import Measured, MeasuredSite, Residual
    from dlojz.cost_model.validation import FirstChoice, TableResult

LOOKS = ((BLUE, "o"), (VERMILION, "s"), (GREEN, "^"), (PURPLE, "D"), (ORANGE, "v"), (SKY, "P"))
COMPUTED = ("product", "attention", "convolution")


def kind_title(kind: str) -> str:
    """Name a kind of measurement."""
    titles = {
        "product": say(en="matrix product", fr="produit de matrices"),
        "attention": say(en="product of attention", fr="produit d’attention"),
        "convolution": say(en="convolution", fr="convolution"),
        "pass": say(en="pass over memory", fr="passage sur la mémoire"),
        "update": say(en="AdamW", fr="AdamW"),
    }
    return titles.get(kind, visible(kind).replace("_", "-"))


def calibrate_figure(measured: Measured, sites: Sequence[MeasuredSite], path: str | Path | None = None) -> LabFigure:
    """Draw what was measured on each number of ranks, with what the parameters say of it.

    Args:
        sites: what its measurements came to, by number of ranks.
    """
    figure = new_figure(13.0, 8.0, alt=description(measured, sites))
    axes = figure.subplots(2, 2)
    _speeds(axes[0, 0], sites, COMPUTED)
    computed = say(en="operations of a product or convolution", fr="opérations d’un produit ou d’une convolution")
    caption(axes[0, 0], x=computed, title=say(en="GFLOP/s of one rank", fr="GFLOP/s d’un rang"), size=NORMAL)
    _speeds(axes[0, 1], sites, ("pass",))
    passed = say(en="bytes read and written", fr="octets lus et écrits")
    caption(axes[0, 1], x=passed, title=say(en="GB/s of one rank", fr="Go/s d’un rang"), size=NORMAL)
    _messages(axes[1, 0], sites)
    _errors(axes[1, 1], sites)
    title = say(
        en=f"{visible(measured.processor)}, {measured.cores} core(s), {measured.date}: dots measured, lines and "
        "crosses fitted",
        fr=f"{visible(measured.processor)}, {measured.cores} cœur(s), {measured.date} : points mesurés, traits et "
        "croix ajustés",
    )
    figure.suptitle(title, fontsize=HEADING, x=0.01, ha="left")
    return finish(figure, path)


def description(measured: Measured, sites: Sequence[MeasuredSite]) -> str:
    """Describe the figure in words."""
    site_sentences = "; ".join(
        say(
            en=f"{site.ranks} rank(s): median residual {100 * site.median_error:.0f}%",
            fr=f"{site.ranks} rang(s) : résidu médian {100 * site.median_error:.0f} %",
        )
        for site in sites
    )
    return say(
        en=f"Measurements of {visible(measured.processor)} and what the parameters say of them. {site_sentences}.",
        fr=f"Mesures de {visible(measured.processor)} et ce qu’en disent les paramètres. {site_sentences}.",
    )


def _speeds(axes: Axes, sites: Sequence[MeasuredSite], kinds: Sequence[str]) -> None:
    for (color, marker), site in zip(cycle(LOOKS), sites, strict=False):
        rows = sorted((row for row in site.residuals if row.what in kinds), key=lambda row: row.size)
        sizes = [row.size for row in rows]
        # size is operations or bytes: divided by seconds and 1e9, GFLOP/s or GB/s.
        measured = [row.size / row.measured_s / 1e9 for row in rows]
        fitted = [row.size / row.fitted_s / 1e9 for row in rows]
        axes.plot(sizes, measured, color=color, marker=marker, linestyle="", markersize=5, label=_ranks(site.ranks))
        axes.plot(sizes, fitted, color=color, marker="x", linestyle="")
    _logarithmic(axes)
    axes.legend(frameon=False, fontsize=SMALL)


def _messages(axes: Axes, sites: Sequence[MeasuredSite]) -> None:
    for site in sites:
        names = list(dict.fromkeys(row.what for row in site.residuals if row.what not in (*COMPUTED, "pass", "update")))
        for (color, marker), name in zip(cycle(LOOKS), names, strict=False):
            rows = sorted((row for row in site.residuals if row.what == name), key=lambda row: row.size)
            sizes = [row.size for row in rows]
            measured, fitted = [1e3 * row.measured_s for row in rows], [1e3 * row.fitted_s for row in rows]
            # Two ranks are full and solid, more ranks hollow and dashed.
            face, dashes = (color, "-") if site.ranks == 2 else ("none", "--")
            label = f"{kind_title(name)}, {_ranks(site.ranks)}"
            axes.plot(sizes, measured, marker, color=color, markersize=5, markerfacecolor=face, label=label)
            axes.plot(sizes, fitted, color=color, linewidth=1, linestyle=dashes)
    _logarithmic(axes)
    title = say(en="messages, ms", fr="messages, ms")
    caption(axes, x=say(en="bytes of the message", fr="octets du message"), title=title, size=NORMAL)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=SMALL, loc="upper left", ncols=2)
        low, high = axes.get_ylim()
        # Room for the legend above the curves.
        axes.set_ylim(low, high * 100)


def _errors(axes: Axes, sites: Sequence[MeasuredSite]) -> None:
    kinds = list(dict.fromkeys(row.what for site in sites for row in site.residuals))
    for number, ((color, marker), site) in enumerate(zip(cycle(LOOKS), sites, strict=False)):
        for kind_index, kind in enumerate(kinds):
            errors = [100 * row.error for row in site.residuals if row.what == kind]
            # Sites of a kind lie side by side, 0.2 apart, around the kind's place.
            shift = kind_index + 0.2 * (number - (len(sites) - 1) / 2)
            label = None if kind_index else _ranks(site.ranks)
            axes.plot(errors, [shift] * len(errors), marker, color=color, markersize=4, alpha=0.8, label=label)
    axes.axvline(0, color=BASELINE, linewidth=0.8)
    # Linear to ±20 %, logarithmic beyond: one bad measurement does not press the others flat.
    axes.set_xscale("symlog", linthresh=20)
    ticks = (-50, -20, -10, 0, 10, 20, 50, 100, 300)
    axes.set_xticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks], fontsize=SMALL)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(kinds)), [kind_title(kind) for kind in kinds], fontsize=SMALL)
    axes.invert_yaxis()
    plain(axes)
    caption(axes, title=say(en="fitted over measured, %", fr="ajusté sur mesuré, %"), size=NORMAL)
    axes.legend(frameon=False, fontsize=SMALL, loc="lower right")


def _logarithmic(axes: Axes) -> None:
    """Two logarithmic axes with 1 k, 1 M, 0.1 rather than powers of ten."""
    for axis in ("x", "y"):
        logarithmic(axes, axis, _short, (1.0,))
    plain(axes)


def _short(value: float) -> str:
    for factor, prefix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= factor:
            return f"{shortest(value / factor)}{prefix}"
    return shortest(value)


def _ranks(number: int) -> str:
    return say(en=f"{number} rank(s)", fr=f"{number} rang(s)")


def residual_rows(sites: Sequence[MeasuredSite]) -> list[tuple[int, str, int, float, float]]:
    """Summarize residuals: ranks, kind, how many, median and largest of the errors' absolute values."""
    rows = []
    for site in sites:
        by_kind: dict[str, list[Residual]] = {}
        for row in site.residuals:
            by_kind.setdefault(row.what, []).append(row)
        for kind, kind_rows in by_kind.items():
            errors = sorted(abs(row.error) for row in kind_rows)
            # The list is sorted: its middle is the median, its end the largest error.
            rows.append((site.ranks, kind, len(errors), errors[len(errors) // 2], errors[-1]))
    return rows


COLORS = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, BLACK, YELLOW, GREY)
MARKERS = "osD^vP*X<>h"


def validation_figure(results: Sequence[TableResult], path: str | Path | None = None) -> LabFigure:
    """Draw the step times of all published rows, predicted against measured, the error of each table, and regrets.

    Rows that were fitted on are hollow, held-out rows are full.
    """
    alt = say(
        en="Predicted against measured seconds of a step, on logarithmic axes; what the planner's first choice loses; "
        "the mean error of each table, on its held-out half and left out: ",
        fr="Durées d’un pas prédites et mesurées, en échelle logarithmique ; ce que perd le premier choix du "
        "planificateur ; erreur moyenne par tableau, sur sa moitié mise de côté et tableau écarté : ",
    )
    errors = (
        f"{result.name} {brief_percent(result.mean)}, {brief_percent(result.left_out_mean)}" for result in results
    )
    figure = new_figure(13.0, 9.2, alt + "; ".join(errors))
    sides = figure.add_gridspec(1, 2, width_ratios=(1.25, 1.0))
    choices = {result.name: first_choices(result) for result in results}
    # Tables too small for a choice have none, and no line.
    drawn = {name: table_choices for name, table_choices in choices.items() if table_choices}
    bars = figure.add_subplot(sides[1])
    if drawn:
        left_grid = sides[0].subgridspec(2, 1, height_ratios=(4.0, 0.5 + 0.5 * len(drawn)))
        points = figure.add_subplot(left_grid[0])
        _regrets(figure.add_subplot(left_grid[1]), drawn)
    else:
        points = figure.add_subplot(sides[0])
    for number, result in enumerate(results):
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        # Hollow first, full over it; only the full ones are in the legend, once per table.
        for held_out in (False, True):
            rows = [row for row in result.rows if row.held_out == held_out]
            measured, predicted = [row.measured_s for row in rows], [row.predicted_s for row in rows]
            marker_properties: dict[str, Any] = {"markerfacecolor": color if held_out else "none", "markersize": 5.5}
            points.plot(
                measured, predicted, marker, color=color, label=result.name if held_out else None, **marker_properties
            )
    times = [value for result in results for row in result.rows for value in (row.measured_s, row.predicted_s)]
    limits = (0.8 * min(times), 1.25 * max(times))
    points.plot(limits, limits, color=BLACK, linewidth=1)
    for factor in (0.9, 1.1):
        points.plot(limits, [factor * limit for limit in limits], color=GREY, linewidth=1, linestyle=":")
    points.set(xscale="log", yscale="log", xlim=limits, ylim=limits)
    for axis in (points.xaxis, points.yaxis):
        axis.set_minor_formatter(NullFormatter())
    title = say(
        en="full: held out; hollow: fitted on; dotted: ±10 %",
        fr="plein : mis de côté ; creux : ajusté ; pointillé : ±10 %",
    )
    caption(
        points,
        x=say(en="measured, seconds of a step", fr="mesuré, secondes par pas"),
        y=say(en="predicted, seconds of a step", fr="prédit, secondes par pas"),
        title=title,
    )
    points.legend(fontsize=SMALL, loc="upper left")
    _bars(bars, results)
    plain(points)
    plain(bars)
    return finish(figure, path)


PLATE: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
"""A number stays legible where a line of the grid lies under it."""
ROOM = 4.0
"""Percent that a number beside its bar takes."""


def _regrets(axes: Axes, drawn: Mapping[str, Sequence[FirstChoice]]) -> None:
    """One dot for each model of a table, and the regret of a random layout beside it."""
    # From the top down.
    positions = list(range(len(drawn)))[::-1]
    lots = [
        (position, 100 * choice.random)
        for position, table_choices in zip(positions, drawn.values(), strict=True)
        for choice in table_choices
    ]
    ours = [
        (position, 100 * choice.regret)
        for position, table_choices in zip(positions, drawn.values(), strict=True)
        for choice in table_choices
    ]
    at_random = say(en="a random layout", fr="une configuration tirée au sort")
    planner_label = say(en="the first choice, table left out", fr="le premier choix, tableau écarté")
    # A table has one row: the first choice 0.15 above it, the random layout as much below.
    axes.plot([x for _, x in lots], [y - 0.15 for y, _ in lots], "x", color=ORANGE, label=at_random)
    axes.plot([x for _, x in ours], [y + 0.15 for y, _ in ours], "o", color=BLUE, alpha=0.75, label=planner_label)
    if REGRET_GOAL.worst is not None:
        goal = say(en="goal, median", fr="objectif, médiane")
        worst = say(en="goal, worst", fr="objectif, pire")
        axes.axvline(100 * REGRET_GOAL.mean, color=VERMILION, linewidth=1.2, label=goal)
        axes.axvline(100 * REGRET_GOAL.worst, color=VERMILION, linewidth=1.2, linestyle="--", label=worst)
    axes.set_xscale("symlog", linthresh=5)
    axes.set_xlim(left=-0.3)
    axes.set_xticks([0, 1, 2, 5, 10, 20, 50, 100], list(map(str, [0, 1, 2, 5, 10, 20, 50, 100])))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(-0.7, len(drawn) + 0.7)
    axes.set_yticks(positions, list(drawn))
    caption(axes, x=say(en="longer than the best measured layout, %", fr="de plus que la meilleure mesurée, %"))
    axes.legend(fontsize=SMALL, loc="upper center", ncols=2, framealpha=1)
    plain(axes)


def _bars(axes: Axes, results: Sequence[TableResult]) -> None:
    positions = list(range(len(results)))[::-1]
    trivial = say(en="constant FLOP/s per GPU", fr="FLOP/s par GPU constants")
    half, left_out_label = (
        say(en="half held out", fr="moitié mise de côté"),
        say(en="table left out", fr="tableau écarté"),
    )
    # The trivial model has no goal.
    none: list[Goal | None] = [None] * len(results)
    left_out_goals = [LEFT_OUT_GOALS.get(result.name) for result in results]
    for offset, values, goals, color, hatch, label in (
        (0.27, [result.mean for result in results], [result.goal for result in results], BLUE, "", half),
        (0.0, [result.left_out_mean for result in results], left_out_goals, SKY, "..", left_out_label),
        (-0.27, [result.trivial for result in results], none, ORANGE, "//", trivial),
    ):
        shares = [100 * value for value in values]
        heights = [position + offset for position in positions]
        axes.barh(heights, shares, 0.26, color=color, hatch=hatch, edgecolor=BLACK, linewidth=0.6, label=label)
        for height, share, goal in zip(heights, shares, goals, strict=True):
            limit = 100 * goal.mean if goal else 0.0
            if goal:
                axes.plot([limit] * 2, [height - 0.13, height + 0.13], color=VERMILION, linewidth=2.2, zorder=3)
            label_x = limit if share < limit < share + ROOM else share  # where the mark would lie under the number
            axes.annotate(
                decimal(share),
                (label_x, height),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=SMALL,
                bbox=PLATE,
            )
    axes.plot([], [], color=VERMILION, linewidth=2.2, label=say(en="goal", fr="objectif"))
    axes.set_yticks(positions, [result.name for result in results])
    axes.margins(x=0.12)
    caption(axes, x=say(en="mean absolute error, %", fr="erreur absolue moyenne, %"))
    axes.legend(fontsize=SMALL, loc="upper right")
