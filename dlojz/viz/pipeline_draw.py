"""A scene drawn with matplotlib: all bars in one collection, whatever their number.

Layer 4. Invariant: one `PolyCollection` holds every bar of a panel, with a colour per bar; hatches, memory, strips and
the critical path are one collection each, so that thousands of actions draw as fast as ten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from dlojz.pipeline.idle import title_of
from dlojz.text import say
from dlojz.viz.canvas import plain
from dlojz.viz.palette import IDLE_STYLES, OTHER, SERIES, VERMILION
from dlojz.viz.pipeline_scene import Band, Bar, Scene, framed, readable
from dlojz.viz.pipeline_words import amount

EDGE, MEMORY, LIMIT, CRITICAL = "#555555", "#4D4D4D", VERMILION, "#000000"
FONT_PT = 7.0
LETTER = 0.62
"""Width of a letter, in parts of its height."""


def draw_scene(axes: Axes, scene: Scene, width_in: float, row_in: float) -> None:
    """Draw a scene into axes.

    Args:
        axes: empty axes; rows go from rank 0 at the top down.
        scene: what to draw.
        width_in, row_in: inches of the time axis and of one row, which tell what can be read.
    """
    _idle(axes, scene)
    _bars(axes, scene)
    _texts(axes, scene, width_in, row_in)
    _strip(axes, scene, width_in)
    _memory(axes, scene)
    _critical(axes, scene)
    for mark in scene.marks:
        axes.axvline(mark.time, color=CRITICAL, linestyle=mark.dashes, linewidth=1.4, zorder=5)
    middle = scene.lanes.bars[0] + scene.lanes.bars[1] / 2
    axes.set_yticks([row + middle for row in range(len(scene.rows))], scene.rows)
    axes.set_ylim(len(scene.rows), 0)
    axes.set_xlim(0, scene.width * 1.002)
    axes.set_xlabel(scene.time_label)
    plain(axes)
    decimal_marks(axes.xaxis)
    axes.grid(visible=False, axis="y")
    axes.hlines(range(1, len(scene.rows)), 0, scene.width, color="#dddddd", linewidth=0.6, zorder=0)


def decimal_marks(*axes: Axis) -> None:
    """Write the numbers of axes with the decimal mark of the reader's language."""
    for axis in axes:
        axis.set_major_formatter(lambda value, position: say(en=f"{value:g}", fr=f"{value:g}".replace(".", ",")))


def legend_of(scene: Scene) -> list[Artist]:
    """What looks how in a drawing, for `figure.legend`."""
    handles: list[Artist] = [
        Patch(facecolor=style.color, hatch=style.hatch * 2, edgecolor=EDGE, linewidth=0.5, label=label)
        for style, label in scene.legend
    ]
    for cause in IDLE_STYLES:
        if any(band.name == cause for band in scene.idle):
            style = IDLE_STYLES[cause]
            label = say(en="idle: ", fr="inactif : ") + title_of(cause)
            handles.append(Patch(facecolor=style.color, hatch=style.hatch, edgecolor="#AAAAAA", label=label))
    if scene.critical:
        label = say(en="critical path", fr="chemin critique")
        handles.append(Line2D([], [], color=CRITICAL, linewidth=2.2, label=label))
    if scene.memory:
        label = say(en="activations kept (peak at the right)", fr="activations gardées (pic à droite)")
        handles.append(Patch(facecolor=MEMORY, alpha=0.45, label=label))
    if scene.memory_limit is not None:
        label = say(en=f"memory limit {amount(scene.memory_limit)}", fr=f"limite mémoire {amount(scene.memory_limit)}")
        handles.append(Line2D([], [], color=LIMIT, linestyle="--", linewidth=1.2, label=label))
    if scene.strip:
        handles.append(
            Patch(
                facecolor=SERIES[1],
                edgecolor=EDGE,
                linewidth=0.5,
                label=say(en="strip: weight version used", fr="bandeau : version des poids utilisée"),
            )
        )
    handles += [
        Line2D([], [], color=CRITICAL, linestyle=mark.dashes, linewidth=1.4, label=mark.words) for mark in scene.marks
    ]
    return handles


def boxes(places: Iterable[Bar | Band], lane: tuple[float, float]) -> list[NDArray[np.float64]]:
    """Corners of the rectangles of bars or bands within a lane, as a collection takes them."""
    rows = np.array([(place.row, place.start, place.end) for place in places], float).reshape(-1, 3)
    top = rows[:, 0] + lane[0]
    bottom = top + lane[1]
    corners = [(rows[:, 1], top), (rows[:, 2], top), (rows[:, 2], bottom), (rows[:, 1], bottom)]
    return list(np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1))


def _bars(axes: Axes, scene: Scene) -> None:
    lane = scene.lanes.bars
    vertices = boxes(scene.bars, lane)
    colors = [bar.style.color for bar in scene.bars]
    axes.add_collection(
        PolyCollection(vertices, facecolors=colors, edgecolors=EDGE, linewidths=0.5, zorder=2), autolim=False
    )
    for hatch in sorted({bar.style.hatch for bar in scene.bars} - {""}):
        chosen = [number for number, bar in enumerate(scene.bars) if bar.style.hatch == hatch]
        overlay = PolyCollection(
            [vertices[number] for number in chosen],
            facecolors="none",
            edgecolors="#00000038",
            linewidths=0,
            hatch=hatch,
            zorder=2.1,
        )
        axes.add_collection(overlay, autolim=False)


def _texts(axes: Axes, scene: Scene, width_in: float, row_in: float) -> None:
    """What a bar is, while it can be read."""
    top, height = scene.lanes.bars
    if row_in * height * 72 < FONT_PT:
        return
    for bar, text in readable(scene, width_in * 72 / (FONT_PT * LETTER)):
        middle = ((bar.start + bar.end) / 2, bar.row + top + height / 2)
        drawn = axes.text(*middle, text, ha="center", va="center_baseline", fontsize=FONT_PT, zorder=4)
        drawn.set_in_layout(False)  # it lies within its bar: hundreds of texts need not be measured to place the axes
        if bar.style.hatch:  # which would strike the letters through
            drawn.set_path_effects([withStroke(linewidth=2.2, foreground=bar.style.color)])


def _strip(axes: Axes, scene: Scene, width_in: float) -> None:
    if not scene.strip or not scene.lanes.strip:
        return
    lane = scene.lanes.strip
    colors = [SERIES[int(band.name) % len(SERIES)] for band in scene.strip]
    vertices = boxes(scene.strip, lane)
    axes.add_collection(
        PolyCollection(vertices, facecolors=colors, edgecolors=EDGE, linewidths=0.4, zorder=2), autolim=False
    )
    letters_per_unit = width_in * 72 / (6 * LETTER) / scene.width
    for band in scene.strip:
        if (band.end - band.start) * letters_per_unit >= len(band.name) + 0.3:
            middle = ((band.start + band.end) / 2, band.row + lane[0] + lane[1] / 2)
            drawn = axes.text(*middle, band.name, ha="center", va="center_baseline", fontsize=6, zorder=4)
            drawn.set_in_layout(False)


def _memory(axes: Axes, scene: Scene) -> None:
    if not scene.memory or not scene.lanes.memory:
        return
    top, height = scene.lanes.memory
    polygons, limits = [], []
    for rank, steps in enumerate(scene.memory):
        base = rank + top + height
        y = base - height * np.array([0.0, *steps.units, 0.0]) / scene.memory_top
        polygons.append(np.column_stack([[0.0, *steps.times, steps.times[-1]], y]))
        if scene.memory_limit is not None:
            level = base - height * scene.memory_limit / scene.memory_top
            limits.append([(0.0, level), (scene.width, level)])
        axes.text(
            1.004,
            base - height / 2,
            amount(steps.peak),
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
            color=LIMIT if scene.memory_limit is not None and steps.peak > scene.memory_limit + 1e-9 else MEMORY,
        )
    axes.add_collection(
        PolyCollection(polygons, facecolors=MEMORY, alpha=0.45, edgecolors=MEMORY, linewidths=0.6, zorder=2),
        autolim=False,
    )
    if limits:
        axes.add_collection(
            LineCollection(limits, colors=LIMIT, linestyles="--", linewidths=1.2, zorder=3), autolim=False
        )


def _critical(axes: Axes, scene: Scene) -> None:
    """Frames around the actions of the path, and lines where it goes to another rank."""
    frames = framed(scene)
    if not frames:
        return
    lane = scene.lanes.bars
    axes.add_collection(
        PolyCollection(boxes(frames, lane), facecolors="none", edgecolors=CRITICAL, linewidths=2.0, zorder=3),
        autolim=False,
    )
    axes.add_collection(
        LineCollection(path_lines(frames, lane), colors=CRITICAL, linewidths=2.0, zorder=3), autolim=False
    )


def path_lines(frames: Sequence[Band], lane: tuple[float, float]) -> list[list[tuple[float, float]]]:
    """Where the critical path goes on: from the end of one frame to the start of the next."""
    middle = lane[0] + lane[1] / 2
    return [
        [(before.end, before.row + middle), (after.start, after.row + middle)] for before, after in pairwise(frames)
    ]


def _idle(axes: Axes, scene: Scene) -> None:
    for cause in sorted({band.name for band in scene.idle}):
        style = IDLE_STYLES.get(cause, OTHER)
        places = [band for band in scene.idle if band.name == cause]
        axes.add_collection(
            PolyCollection(
                boxes(places, scene.lanes.bars),
                facecolors=style.color,
                edgecolors="#BBBBBB",
                linewidths=0,
                hatch=style.hatch,
                zorder=1,
            ),
            autolim=False,
        )
