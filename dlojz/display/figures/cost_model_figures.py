"""Figure and table of a machine's calibration: dots are measurements, lines and crosses are the model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from dlojz.base.language import say, shortest
from dlojz.base.table import visible
from dlojz.display.canvas import LabFigure, caption, finish, logarithmic, new_figure, phrase, plain
from dlojz.display.style import BASELINE, BLUE, GREEN, HEADING, NORMAL, ORANGE, PURPLE, SKY, SMALL, VERMILION

if TYPE_CHECKING:
    from dlojz.cost_model.measured_machine import Measured, MeasuredSite, Residual

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
    title = phrase("title of a machine", measured=measured)
    figure.suptitle(title, fontsize=HEADING, x=0.01, ha="left")
    return finish(figure, path)


def description(measured: Measured, sites: Sequence[MeasuredSite]) -> str:
    """Describe the figure in words."""
    site_sentences = "; ".join(phrase("residual of ranks", site=site, error=100 * site.median_error) for site in sites)
    return phrase("alt of a machine", measured=measured, sites=site_sentences)


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
