"""What one rank holds at its peak: stacked by category, against the device's limit, and block by block.

Layer 4. Invariant: the stacks are what the forecast holds; a limit too far away to be drawn without flattening the
bars is said in words.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dlojz.footprint import CATEGORIES
from dlojz.text import say
from dlojz.units import byte_units, format_bytes
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.footprint_sheet import grouped_blocks
from dlojz.viz.footprint_words import headline, peak_sentence
from dlojz.viz.markup import visible
from dlojz.viz.palette import BLACK, CATEGORY_STYLES, Style, category_label

if TYPE_CHECKING:
    from dlojz.predict.forecast import Forecast

MOST_BARS = 10
FARTHEST = 3.0
"""Times the longest bar: a limit beyond is told in words, as drawing it would leave bars too short to read."""
CACHED, OUTSIDE = Style("#FFFFFF", "oo"), Style("#FFFFFF", "xx")


def scale_of(num_bytes: float) -> tuple[str, int]:
    """The unit in which a figure of this size reads well, and how many bytes it has."""
    units = byte_units()
    power = max(n for n in range(len(units)) if max(num_bytes, 1) >= 1024**n)
    return units[power], 1024**power


def far_limit(limit_bytes: int, highest_bytes: float) -> str:
    """A limit that is not drawn, in words; empty for one near enough."""
    times = limit_bytes / max(highest_bytes, 1)
    if times <= FARTHEST:
        return ""
    times_text = f"{times:.1f}" if times < 10 else f"{times:.0f}"
    return say(
        en=f"limit: {format_bytes(limit_bytes)}, {times_text} times as much",
        fr=f"limite : {format_bytes(limit_bytes)}, {times_text.replace('.', ',')} fois plus",
    )


def footprint_figure(
    forecast: Forecast,
    path: str | Path | None = None,
    limit_bytes: int | None = None,
) -> LabFigure:
    """Draw a forecast at its peak.

    Args:
        forecast: of one rank.
        path: picture to write, if any.
        limit_bytes: memory of the device, drawn as a line; by default that of the forecast's device, if any.

    Raises:
        LabError: if the picture cannot be written.
    """
    if limit_bytes is None and forecast.device is not None:
        limit_bytes = forecast.device.memory_bytes
    blocks = grouped_blocks(forecast, MOST_BARS)
    figure = new_figure(12.0, 2.4 + 0.32 * max(len(blocks), 8), alt=f"{headline(forecast)}. {peak_sentence(forecast)}")
    grid = figure.add_gridspec(1, 2, width_ratios=(1.0, 1.5), wspace=0.06)
    totals, by_block = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    handles = _totals(totals, forecast, limit_bytes)
    _blocks(by_block, blocks)
    figure.suptitle(headline(forecast), fontweight="bold", fontsize=11)
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9, handleheight=1.2)
    return finish(figure, path)


def _totals(axes: Axes, forecast: Forecast, limit_bytes: int | None) -> list[Patch | Line2D]:
    memory = forecast.memory
    at_peak = memory.at_peak_bytes or {}
    allocated = memory.peak_bytes or 0
    bars = [(say(en="allocated", fr="alloué"), allocated, 0, 0)]
    if memory.reserved_bytes is not None:
        cached = memory.reserved_bytes - allocated
        bars.append((say(en="reserved", fr="réservé"), memory.reserved_bytes, cached, 0))
        if memory.device_bytes is not None:
            outside = memory.device_bytes - memory.reserved_bytes
            bars.append(
                (say(en="as nvidia-smi\nshows it", fr="vu par\nnvidia-smi"), memory.device_bytes, cached, outside)
            )
    highest = max(total for _, total, _, _ in bars)
    unit, scale = scale_of(highest)
    shown = [name for name in CATEGORIES if at_peak.get(name)]
    for number, (_, total, cached, outside) in enumerate(bars):
        bottom = 0.0
        for name in shown:
            _piece(axes, number, bottom, at_peak[name] / scale, CATEGORY_STYLES[name])
            bottom += at_peak[name] / scale
        for extra, style in ((cached, CACHED), (outside, OUTSIDE)):
            if extra > 0:
                _piece(axes, number, bottom, extra / scale, style)
                bottom += extra / scale
        axes.annotate(
            format_bytes(total),
            (number, bottom),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontweight="bold",
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
        )
    title = textwrap.fill(say(en="At the peak: ", fr="Au pic : ") + visible(forecast.moment), 54)
    ceiling = highest / scale * 1.14
    if limit_bytes is not None:
        far = far_limit(limit_bytes, highest)
        if far:
            title += f"\n({far})"
        else:
            axes.axhline(limit_bytes / scale, color=BLACK, linestyle="--", linewidth=1.5)
            ceiling = max(ceiling, limit_bytes / scale * 1.1)
    axes.set_xticks(range(len(bars)), [label for label, *_ in bars])
    axes.set(xlim=(-0.65, len(bars) - 0.35), ylim=(0, ceiling), ylabel=unit)
    axes.set_title(title, loc="left", fontsize=10)
    plain(axes)
    axes.grid(visible=False, axis="x")
    handles: list[Patch | Line2D] = [_patch(CATEGORY_STYLES[name], category_label(name)) for name in shown]
    if len(bars) > 1:
        handles.append(_patch(CACHED, say(en="cached, fragmented", fr="caché, fragmenté")))
    if len(bars) > 2:
        handles.append(_patch(OUTSIDE, say(en="CUDA context, NCCL", fr="contexte CUDA, NCCL")))
    if axes.lines:
        label = say(en="limit: ", fr="limite : ") + format_bytes(limit_bytes)
        handles.append(Line2D([], [], color=BLACK, linestyle="--", linewidth=1.5, label=label))
    return handles


def _piece(axes: Axes, number: int, bottom: float, height: float, style: Style) -> None:
    axes.bar(
        number,
        height,
        bottom=bottom,
        width=0.55,
        color=style.color,
        hatch=style.hatch,
        edgecolor="#333333",
        linewidth=0.6,
    )


def _patch(style: Style, label: str) -> Patch:
    return Patch(facecolor=style.color, hatch=style.hatch, edgecolor="#333333", linewidth=0.6, label=label)


def _blocks(axes: Axes, blocks: list[tuple[str, dict[str, int]]]) -> None:
    longest = max((sum(held.values()) for _, held in blocks), default=1)
    unit, scale = scale_of(longest)
    for number, (_, held) in enumerate(blocks):
        start = 0.0
        for name in CATEGORIES:
            if length := held.get(name, 0) / scale:
                style = CATEGORY_STYLES[name]
                axes.barh(
                    number,
                    length,
                    left=start,
                    height=0.7,
                    color=style.color,
                    hatch=style.hatch,
                    edgecolor="#333333",
                    linewidth=0.6,
                )
                start += length
        axes.annotate(
            format_bytes(sum(held.values())),
            (start, number),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set_yticks(range(len(blocks)), [label for label, _ in blocks])
    axes.set(ylim=(len(blocks) - 0.45, -0.55), xlim=(0, longest / scale * 1.17), xlabel=unit)
    axes.set_title(say(en="What fills it, by block", fr="Ce qui le remplit, par bloc"), loc="left", fontsize=10)
    plain(axes)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
