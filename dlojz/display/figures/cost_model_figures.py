"""Figures of the cost model: a machine's calibration, and validation against published rows.

A machine's measurements beside what their parameters say: products, passes, messages, and all residuals.

Dots are measurements, lines and crosses are the model; no measurement is left out.

Predicted beside measured: the step times of all published rows, and each table's error beside the trivial model's.

Rows that were fitted on are hollow, held-out rows are full; nothing is left out of the picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter
from rich.table import Table

from dlojz.base.language import brief_percent, decimal, say, shortest, spaced_percent
from dlojz.base.table import visible
from dlojz.display.canvas import LabFigure, decimal_marks, finish, new_figure, plain
from dlojz.display.style import BASELINE, BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW

if TYPE_CHECKING:
    from dlojz.cost_model.measured_machine import Measured, MeasuredSite, Residual
    from dlojz.cost_model.validation import TableResult

LOOKS = ((BLUE, "o"), (VERMILION, "s"), (GREEN, "^"), (PURPLE, "D"), (ORANGE, "v"), (SKY, "P"))
COMPUTED = ("product", "attention", "convolution")


def kind_title(kind: str) -> str:
    """What a kind of measurement is called."""
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
        measured: the machine.
        sites: what its measurements came to, by number of ranks.
        path: picture to write, if any.

    Raises:
        LabError: if the picture cannot be written.
    """
    figure = new_figure(13.0, 8.0, alt=description(measured, sites))
    axes = figure.subplots(2, 2)
    computed = say(en="operations of a product or convolution", fr="opérations d’un produit ou d’une convolution")
    passed = say(en="bytes read and written", fr="octets lus et écrits")
    speed = say(en="GFLOP/s of one rank", fr="GFLOP/s d’un rang")
    _speeds(axes[0, 0], sites, COMPUTED, speed, computed)
    _speeds(axes[0, 1], sites, ("pass",), say(en="GB/s of one rank", fr="Go/s d’un rang"), passed)
    _messages(axes[1, 0], sites)
    _errors(axes[1, 1], sites)
    figure.suptitle(
        say(
            en=f"{visible(measured.processor)}, {measured.cores} core(s), {measured.date}: dots measured, lines and "
            "crosses fitted",
            fr=f"{visible(measured.processor)}, {measured.cores} cœur(s), {measured.date} : points mesurés, traits et "
            "croix ajustés",
        ),
        fontsize=10,
        x=0.01,
        ha="left",
    )
    return finish(figure, path)


def description(measured: Measured, sites: Sequence[MeasuredSite]) -> str:
    """The figure in words."""
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


def _speeds(axes: Axes, sites: Sequence[MeasuredSite], kinds: Sequence[str], title: str, sizes: str) -> None:
    for (color, marker), one in zip(LOOKS, sites, strict=False):
        rows = sorted((row for row in one.residuals if row.what in kinds), key=lambda row: row.size)
        x = [row.size for row in rows]
        axes.loglog(x, [row.size / row.measured_s / 1e9 for row in rows], color=color, marker=marker, linestyle="",
                    markersize=5, label=_ranks(one.ranks))  # fmt: skip
        axes.loglog(x, [row.size / row.fitted_s / 1e9 for row in rows], color=color, marker="x", linestyle="",
                    markersize=6)  # fmt: skip
    plain(axes)
    _plain_numbers(axes)
    axes.set_xlabel(sizes)
    axes.set_title(title, loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=8)


def _messages(axes: Axes, sites: Sequence[MeasuredSite]) -> None:
    for one in sites:
        names = list(dict.fromkeys(row.what for row in one.residuals if row.what not in (*COMPUTED, "pass", "update")))
        for (color, marker), name in zip(LOOKS, names, strict=False):
            rows = sorted((row for row in one.residuals if row.what == name), key=lambda row: row.size)
            filled = one.ranks == 2
            axes.loglog([row.size for row in rows], [1e3 * row.measured_s for row in rows], color=color, marker=marker,
                        linestyle="", markersize=5, markerfacecolor=color if filled else "none",
                        label=f"{kind_title(name)}, {_ranks(one.ranks)}")  # fmt: skip
            axes.loglog([row.size for row in rows], [1e3 * row.fitted_s for row in rows], color=color, linewidth=1,
                        linestyle="-" if filled else "--")  # fmt: skip
    plain(axes)
    _plain_numbers(axes)
    axes.set_xlabel(say(en="bytes of the message", fr="octets du message"))
    axes.set_title(say(en="messages, ms", fr="messages, ms"), loc="left", fontsize=9)
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
            axes.plot(errors, [shift] * len(errors), color=color, marker=marker, linestyle="", markersize=4, alpha=0.8,
                      label=_ranks(one.ranks) if place == 0 else None)  # fmt: skip
    axes.axvline(0, color=BASELINE, linewidth=0.8)
    axes.set_xscale("symlog", linthresh=20)
    ticks = (-50, -20, -10, 0, 10, 20, 50, 100, 300)
    axes.set_xticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks], fontsize=7)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(kinds)), [kind_title(kind) for kind in kinds], fontsize=8)
    axes.invert_yaxis()
    plain(axes)
    axes.set_title(say(en="fitted over measured, %", fr="ajusté sur mesuré, %"), loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _plain_numbers(axes: Axes) -> None:
    """1 k, 1 M, 0.1 rather than powers of ten."""
    short = FuncFormatter(lambda value, _: _short(value))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(short)
        axis.set_minor_formatter(NullFormatter())


def _short(value: float) -> str:
    for factor, prefix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= factor:
            return f"{shortest(value / factor)}{prefix}"
    return shortest(value)


def _ranks(number: int) -> str:
    return say(en=f"{number} rank(s)", fr=f"{number} rang(s)")


def residual_rows(sites: Sequence[MeasuredSite]) -> list[tuple[int, str, int, float, float]]:
    """Ranks, kind, how many, median of the errors' absolute values and the largest of them."""
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
        + ", ".join(f"{one.name} {brief_percent(one.mean)}" for one in results),
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
        decimal_marks(axis)
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
        written = [decimal(value) for value in values]
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
    from dlojz.cost_model.validation import TOOLS

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
            brief_percent(one.mean),
            brief_percent(one.worst),
            "" if goal is None else f"{brief_percent(goal.mean)} {'✓' if one.reached else '✗'}",
            brief_percent(one.trivial),
            "" if unseen is None else brief_percent(unseen),
            decimal(one.rank_correlation, 2),
            "" if tool is None else f"{tool.name} {brief_percent(tool.mean)}",
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
            f"{decimal(one.measured_s, 2)} s",
            f"{decimal(one.predicted_s, 2)} s",
            spaced_percent(one.error, signed=True),
            "" if one.held_out else say(en="fitted", fr="ajusté"),
        )
    return made
