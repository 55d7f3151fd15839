"""A machine's measurements beside what their parameters say: products, passes, messages, and all residuals.

Layer 4. Invariant: dots are measurements, lines and crosses are the model; no measurement is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.markup import visible
from dlojz.viz.palette import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlojz.predict.time.measured import Measured
    from dlojz.predict.time.measured_site import Residual, Site

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


def calibrate_figure(measured: Measured, sites: Sequence[Site], path: str | Path | None = None) -> LabFigure:
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


def description(measured: Measured, sites: Sequence[Site]) -> str:
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


def _speeds(axes: Axes, sites: Sequence[Site], kinds: Sequence[str], title: str, sizes: str) -> None:
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


def _messages(axes: Axes, sites: Sequence[Site]) -> None:
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


def _errors(axes: Axes, sites: Sequence[Site]) -> None:
    kinds = list(dict.fromkeys(row.what for one in sites for row in one.residuals))
    for number, ((color, marker), one) in enumerate(zip(LOOKS, sites, strict=False)):
        for place, kind in enumerate(kinds):
            errors = [100 * row.error for row in one.residuals if row.what == kind]
            shift = place + 0.2 * (number - (len(sites) - 1) / 2)
            axes.plot(errors, [shift] * len(errors), color=color, marker=marker, linestyle="", markersize=4, alpha=0.8,
                      label=_ranks(one.ranks) if place == 0 else None)  # fmt: skip
    axes.axvline(0, color="#444444", linewidth=0.8)
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
            return f"{value / factor:g}{prefix}"
    return f"{value:g}".replace(".", say(en=".", fr=","))


def _ranks(number: int) -> str:
    return say(en=f"{number} rank(s)", fr=f"{number} rang(s)")


def residual_rows(sites: Sequence[Site]) -> list[tuple[int, str, int, float, float]]:
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
