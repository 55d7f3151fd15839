"""Figures of two traces beside each other, and of memory snapshots over their records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from dlojz.base.language import byte_scale, format_bytes, say
from dlojz.display.canvas import LabFigure, caption, finish, key, new_figure, note, phrase, plain, swatch
from dlojz.display.style import BLUE, EDGE, GREY, LINE_STYLES, ORANGE, TITLE, Style
from dlojz.display.trace_tables import MOST_FRAMES, frame_label, kernel_kind
from dlojz.results.memory_snapshot import FrameBytes, FrameGrowth, MemorySnapshot
from dlojz.results.rank_profile import ProfileComparison

MOST_POINTS = 2000
"""Points of a curve that a drawing can tell apart."""
BEFORE_AFTER = (Style(BLUE, ""), Style(ORANGE, "//"))
BAR = 0.36


def _pairs(axes: Axes, names: Sequence[str], pairs: Sequence[tuple[float, float]], labels: Sequence[str]) -> None:
    """Draw a bar before and one after for each name, the largest on top."""
    for side, style in enumerate(BEFORE_AFTER):
        rows = [number + (side - 0.5) * BAR for number in range(len(names))]
        widths = [pair[side] for pair in pairs]
        axes.barh(rows, widths, BAR, color=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=0.5)
    axes.set_yticks(range(len(names)), list(names))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(left=0)
    plain(axes, "x")
    handles = [swatch(style, " " + label) for style, label in zip(BEFORE_AFTER, labels, strict=True)]
    # Below the axis, where no bar lies under it.
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)


def profiles_figure(comparison: ProfileComparison, path: str | Path | None = None) -> LabFigure:
    """Draw parts of the time and kinds of kernels of two traces, before above after, in ms per step."""
    panels = (comparison.parts, comparison.kinds)
    names = (comparison.before.name, comparison.after.name)
    alt = phrase("alt of profiles", before=names[0], after=names[1])
    figure = new_figure(11.0, 1.6 + 0.5 * max(map(len, panels)), alt)
    unit = say(en="ms per step", fr="ms par pas") if comparison.per_step else say(en="ms", fr="ms")
    heads = say(en="Parts of the time", fr="Parts du temps"), say(en="By kind of kernel", fr="Par sorte de noyau")
    for axes, changes, head in zip(figure.subplots(1, 2), panels, heads, strict=True):
        pairs = [(change.before_s * 1e3, change.after_s * 1e3) for change in changes]
        _pairs(axes, [kernel_kind(change.name) for change in changes], pairs, names)
        caption(axes, x=unit, title=head, size=TITLE)
    return finish(figure, path)


def snapshots_figure(
    snapshots: Sequence[MemorySnapshot], growth: Sequence[FrameGrowth] = (), path: str | Path | None = None
) -> LabFigure:
    """Draw bytes in use of one snapshot or two over their records, on one axis, and what holds them at the peak.

    Args:
        growth: of two snapshots, their lines side by side.
    """
    names = ", ".join(snapshot.name for snapshot in snapshots)
    alt = phrase("alt of snapshots", names=names)
    unit, scale = byte_scale(max(snapshot.peak_bytes for snapshot in snapshots))
    figure = new_figure(13.0, 4.8, alt)
    over_time, by_line = figure.subplots(1, 2, width_ratios=(1.3, 1.0))
    handles = []
    for snapshot, (color, dashes, _) in zip(snapshots, LINE_STYLES, strict=False):
        positions, heights = _thinned(snapshot.in_use_bytes, scale)
        over_time.step(positions, heights, where="post", color=color, linestyle=dashes)
        handles.append(key(snapshot.name, color=color, linestyle=dashes))
        if len(snapshots) == 1 and snapshot.recorded:
            over_time.step(*_thinned(snapshot.reserved_bytes, scale), where="post", color=GREY, linestyle=":")
            handles.append(key(say(en="reserved", fr="réservé"), color=GREY, linestyle=":"))
        point = float(snapshot.peak), snapshot.peak_bytes / scale
        over_time.plot(*point, marker="o", color=color)
        note(over_time, format_bytes(snapshot.peak_bytes), point, (0, 8), ha="center", va="bottom")
    over_time.margins(y=0.15)
    over_time.set_ylim(bottom=0)
    plain(over_time)
    over_time.legend(handles=handles, loc="lower right", frameon=False)
    entries = say(en="entries of the record", fr="entrées de l’enregistrement")
    caption(over_time, x=entries, y=unit, title=say(en="In use", fr="Utilisé"), size=TITLE)
    title = say(en="At the peak, by line", fr="Au pic, par ligne")
    if growth:
        pairs = [(row.before_bytes / scale, row.after_bytes / scale) for row in growth[:MOST_FRAMES]]
        _pairs(by_line, [frame_label(row.frame) for row in growth[:MOST_FRAMES]], pairs, [s.name for s in snapshots])
    else:
        rows: Sequence[FrameBytes] = snapshots[0].at_peak[:MOST_FRAMES]
        by_line.barh(range(len(rows)), [row.size_bytes / scale for row in rows], 0.6, color=BLUE, edgecolor=EDGE)
        by_line.set_yticks(range(len(rows)), [frame_label(row.frame) for row in rows])
        by_line.invert_yaxis()
        plain(by_line, "x")
    caption(by_line, x=unit, title=title, size=TITLE)
    return finish(figure, path)


def _thinned(curve: NDArray[np.float64], scale: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Take at most so many points of a curve: of each stretch the highest, so that no peak is lost."""
    starts = np.unique(np.linspace(0, len(curve) - 1, MOST_POINTS).astype(np.int64))
    return starts, np.maximum.reduceat(curve, starts) / scale
