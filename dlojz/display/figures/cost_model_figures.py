"""Figures and tables of the cost model: a machine's calibration, and validation against published rows.

Dots are measurements, lines and crosses are the model; no measurement and no row is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from dlojz.base.language import brief_percent, decimal, say, shortest, spaced_percent
from dlojz.base.table import Table, titles, visible
from dlojz.display.canvas import LabFigure, caption, decimal_marks, finish, logarithmic, new_figure, plain
from dlojz.display.style import BASELINE, BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW

if TYPE_CHECKING:
    from dlojz.cost_model.measured_machine import Measured, MeasuredSite, Residual
    from dlojz.cost_model.validation import TableResult

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
    caption(axes[0, 0], x=computed, title=say(en="GFLOP/s of one rank", fr="GFLOP/s d’un rang"), size=9)
    _speeds(axes[0, 1], sites, ("pass",))
    passed = say(en="bytes read and written", fr="octets lus et écrits")
    caption(axes[0, 1], x=passed, title=say(en="GB/s of one rank", fr="Go/s d’un rang"), size=9)
    _messages(axes[1, 0], sites)
    _errors(axes[1, 1], sites)
    title = say(
        en=f"{visible(measured.processor)}, {measured.cores} core(s), {measured.date}: dots measured, lines and "
        "crosses fitted",
        fr=f"{visible(measured.processor)}, {measured.cores} cœur(s), {measured.date} : points mesurés, traits et "
        "croix ajustés",
    )
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return finish(figure, path)


def description(measured: Measured, sites: Sequence[MeasuredSite]) -> str:
    """Describe the figure in words."""
    each = "; ".join(
        say(
            en=f"{one.ranks} rank(s): median residual {100 * one.median_error:.0f}%",
            fr=f"{one.ranks} rang(s) : résidu médian {100 * one.median_error:.0f} %",
        )
        for one in sites
    )
    return say(
        en=f"Measurements of {visible(measured.processor)} and what the parameters say of them. {each}.",
        fr=f"Mesures de {visible(measured.processor)} et ce qu’en disent les paramètres. {each}.",
    )


def _speeds(axes: Axes, sites: Sequence[MeasuredSite], kinds: Sequence[str]) -> None:
    for (color, marker), one in zip(LOOKS, sites, strict=False):
        rows = sorted((row for row in one.residuals if row.what in kinds), key=lambda row: row.size)
        sizes = [row.size for row in rows]
        measured = [row.size / row.measured_s / 1e9 for row in rows]
        fitted = [row.size / row.fitted_s / 1e9 for row in rows]
        axes.plot(sizes, measured, color=color, marker=marker, linestyle="", markersize=5, label=_ranks(one.ranks))
        axes.plot(sizes, fitted, color=color, marker="x", linestyle="")
    _logarithmic(axes)
    axes.legend(frameon=False, fontsize=8)


def _messages(axes: Axes, sites: Sequence[MeasuredSite]) -> None:
    for one in sites:
        names = list(dict.fromkeys(row.what for row in one.residuals if row.what not in (*COMPUTED, "pass", "update")))
        for (color, marker), name in zip(LOOKS, names, strict=False):
            rows = sorted((row for row in one.residuals if row.what == name), key=lambda row: row.size)
            sizes = [row.size for row in rows]
            measured, fitted = [1e3 * row.measured_s for row in rows], [1e3 * row.fitted_s for row in rows]
            face, dashes = (color, "-") if one.ranks == 2 else ("none", "--")
            label = f"{kind_title(name)}, {_ranks(one.ranks)}"
            axes.plot(sizes, measured, marker, color=color, markersize=5, markerfacecolor=face, label=label)
            axes.plot(sizes, fitted, color=color, linewidth=1, linestyle=dashes)
    _logarithmic(axes)
    title = say(en="messages, ms", fr="messages, ms")
    caption(axes, x=say(en="bytes of the message", fr="octets du message"), title=title, size=9)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=6, loc="upper left", ncols=2)
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * 30)


def _errors(axes: Axes, sites: Sequence[MeasuredSite]) -> None:
    kinds = list(dict.fromkeys(row.what for one in sites for row in one.residuals))
    for number, ((color, marker), one) in enumerate(zip(LOOKS, sites, strict=False)):
        for place, kind in enumerate(kinds):
            errors = [100 * row.error for row in one.residuals if row.what == kind]
            shift = place + 0.2 * (number - (len(sites) - 1) / 2)
            label = None if place else _ranks(one.ranks)
            axes.plot(errors, [shift] * len(errors), marker, color=color, markersize=4, alpha=0.8, label=label)
    axes.axvline(0, color=BASELINE, linewidth=0.8)
    axes.set_xscale("symlog", linthresh=20)
    ticks = (-50, -20, -10, 0, 10, 20, 50, 100, 300)
    axes.set_xticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks], fontsize=7)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(kinds)), [kind_title(kind) for kind in kinds], fontsize=8)
    axes.invert_yaxis()
    plain(axes)
    caption(axes, title=say(en="fitted over measured, %", fr="ajusté sur mesuré, %"), size=9)
    axes.legend(frameon=False, fontsize=8, loc="lower right")


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
    for one in sites:
        by_kind: dict[str, list[Residual]] = {}
        for row in one.residuals:
            by_kind.setdefault(row.what, []).append(row)
        for kind, some in by_kind.items():
            errors = sorted(abs(row.error) for row in some)
            rows.append((one.ranks, kind, len(errors), errors[len(errors) // 2], errors[-1]))
    return rows


COLORS = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, BLACK, YELLOW, GREY)
MARKERS = "osD^vP*X<>h"


def validation_figure(results: Sequence[TableResult], path: str | Path | None = None) -> LabFigure:
    """Draw the step times of all published rows, predicted against measured, and the error of each table.

    Rows that were fitted on are hollow, held-out rows are full.
    """
    alt = say(
        en="Predicted against measured seconds of a step, on logarithmic axes, and the mean error of each table: ",
        fr="Durées d’un pas prédites et mesurées, en échelle logarithmique, et erreur moyenne par tableau : ",
    )
    figure = new_figure(13.0, 6.2, alt + ", ".join(f"{one.name} {brief_percent(one.mean)}" for one in results))
    points, bars = figure.subplots(1, 2, width_ratios=(1.25, 1.0))
    for number, one in enumerate(results):
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        for held in (False, True):
            rows = [row for row in one.rows if row.held_out == held]
            measured, predicted = [row.measured_s for row in rows], [row.predicted_s for row in rows]
            look: dict[str, Any] = {"markerfacecolor": color if held else "none", "markersize": 5.5}
            points.plot(measured, predicted, marker, color=color, label=one.name if held else None, **look)
    times = [value for one in results for row in one.rows for value in (row.measured_s, row.predicted_s)]
    limits = (0.8 * min(times), 1.25 * max(times))
    points.plot(limits, limits, color=BLACK, linewidth=1)
    for factor in (0.9, 1.1):
        points.plot(limits, [factor * limit for limit in limits], color=GREY, linewidth=1, linestyle=":")
    points.set(xscale="log", yscale="log", xlim=limits, ylim=limits)
    for axis in (points.xaxis, points.yaxis):
        decimal_marks(axis)
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
    points.legend(fontsize=8, loc="upper left")
    _bars(bars, results)
    plain(points)
    plain(bars)
    return finish(figure, path)


PLATE = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
"""A number stays legible where the mark of the goal lies under it."""


def _bars(axes: Axes, results: Sequence[TableResult]) -> None:
    places = list(range(len(results)))[::-1]
    trivial = say(en="constant FLOP/s per GPU", fr="FLOP/s par GPU constants")
    for offset, values, color, hatch, label in (
        (0.2, [100 * one.mean for one in results], BLUE, "", say(en="this model", fr="ce modèle")),
        (-0.2, [100 * one.trivial for one in results], ORANGE, "//", trivial),
    ):
        shifted = [place + offset for place in places]
        drawn = axes.barh(shifted, values, 0.38, color=color, hatch=hatch, edgecolor=BLACK, label=label)
        axes.bar_label(drawn, list(map(decimal, values)), padding=3, fontsize=8, bbox=PLATE, zorder=4)
    for place, one in zip(places, results, strict=True):
        if one.goal is not None:
            axes.plot([100 * one.goal.mean] * 2, [place - 0.02, place + 0.42], color=VERMILION, linewidth=2.2, zorder=3)
    axes.plot([], [], color=VERMILION, linewidth=2.2, label=say(en="goal", fr="objectif"))
    axes.set_yticks(places, [one.name for one in results])
    axes.margins(x=0.12)
    error = say(en="mean absolute error of held-out rows, %", fr="erreur absolue moyenne, lignes mises de côté, %")
    caption(axes, x=error)
    axes.legend(fontsize=8, loc="upper right")


def validation_table(results: Sequence[TableResult]) -> Table:
    """List the errors of all tables."""
    from dlojz.cost_model.validation import TOOLS

    head = titles(
        en="table; rows; error; max; goal; trivial; table left out; rank corr.; published tool",
        fr="tableau; lignes; erreur; max; objectif; trivial; tableau écarté; corr. rang; outil publié",
    )
    rows = []
    for one in results:
        tool, goal = TOOLS.get(one.name), one.goal
        rows.append(
            (
                one.name,
                f"{len(one.held)}/{len(one.rows)}",
                brief_percent(one.mean),
                brief_percent(one.worst),
                "" if goal is None else f"{brief_percent(goal.mean)} {'✓' if one.reached else '✗'}",
                brief_percent(one.trivial),
                brief_percent(one.left_out_mean),
                decimal(one.rank_correlation, 2),
                "" if tool is None else f"{tool.name} {brief_percent(tool.mean)}",
            )
        )
    title = say(
        en="Seconds of a step: mean absolute error on rows not used in the fit",
        fr="Durée d’un pas : erreur absolue moyenne sur les lignes que l’ajustement n’a pas vues",
    )
    note = say(
        en="trivial: constant FLOP/s per GPU, fitted on half of the table; table left out: fits without any row of it",
        fr="trivial : FLOP/s par GPU constants, ajustés sur la moitié du tableau ; tableau écarté : sans ses lignes",
    )
    return Table(head, tuple(rows), title, align="lrrrrrrrl", whole=1, notes=(note,))


def rows_table(result: TableResult) -> Table:
    """List every row of one table."""
    head = titles(
        en="row; dp·tp·pp·cp; micro-batch; measured; predicted; error; ",
        fr="ligne; dp·tp·pp·cp; micro-batch; mesuré; prédit; erreur; ",
    )
    rows = (
        (
            one.row.row.partition("/")[2],
            f"{one.row.dp}·{one.row.tp}·{one.row.pp}·{one.row.cp}",
            str(one.row.micro_batch),
            f"{decimal(one.measured_s, 2)} s",
            f"{decimal(one.predicted_s, 2)} s",
            spaced_percent(one.error, signed=True),
            "" if one.held_out else say(en="fitted", fr="ajusté"),
        )
        for one in result.rows
    )
    return Table(head, tuple(rows), result.name)
