"""Figure of the grid of ranks: nodes, the groups of each axis, and the bytes that cross which link.

Colour never speaks alone: each cell has the number of its group; what goes between nodes is hatched or dashed.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, PathPatch, Rectangle
from matplotlib.path import Path as Curve
from matplotlib.patheffects import withStroke

from dlojz.base.language import byte_scale, format_bytes, say
from dlojz.config.layout import RankGrid
from dlojz.display.canvas import LabFigure, caption, finish, new_figure, plain, stack
from dlojz.display.grid_scene import (
    AXIS_ORDER,
    DOT,
    FEW,
    HEAD,
    MOST_JOINED,
    PAD,
    GridScene,
    advice,
    axis_title,
    cell_words,
    scene_of,
    size_sentence,
)
from dlojz.display.style import EDGE, GREY, INK, PALE, SKY, VERMILION, Style
from dlojz.prediction.link_traffic import Crossing

WIDTH_IN, CELL_IN = 13.0, 0.62
WRAPPED = 150
"""Characters of a line of the title."""


def grid_figure(
    grid: RankGrid, crossing: Crossing | None = None, path: str | Path | None = None, *, axis: str | None = None
) -> LabFigure:
    """Draw a grid: one panel for each axis of more than one rank, or for one axis alone.

    Args:
        grid: the ranks.
        crossing: what a step sends on its links, for the bars; without it there are none.
        axis: pp, dp or tp.

    Raises:
        LabError: if there is no such axis, or the grid is too large to draw.
    """
    axes = [axis] if axis is not None else [one for one in AXIS_ORDER if grid.size(one) > 1] or ["dp"]
    scenes = [scene_of(grid, one) for one in axes]
    alone = len(scenes) == 1 and crossing is not None
    room_in = (WIDTH_IN / 2 if alone else WIDTH_IN) - 0.5
    cell_in = min(CELL_IN, room_in / sum(scene.width + 0.6 for scene in scenes))
    panels_in = max(max(scene.height for scene in scenes) * cell_in + 0.35, 1.2)
    bars_in = 0.95 + 0.36 * sum(grid.size(one) > 1 for one in AXIS_ORDER)
    words = [size_sentence(grid), *textwrap.wrap(advice(grid), WRAPPED), cell_words(grid.world_size <= MOST_JOINED)]
    high_in = max(panels_in, bars_in) if alone else panels_in + (bars_in if crossing else 0.0)
    alt = ". ".join([size_sentence(grid), *(scene.title for scene in scenes), advice(grid)])
    figure = new_figure(WIDTH_IN, high_in + 0.45 + 0.2 * len(words), alt=alt)
    if alone:
        spaces = figure.add_gridspec(1, 2, width_ratios=[scenes[0].width * cell_in + 0.5, WIDTH_IN / 2])
    else:
        heights = [panels_in, bars_in] if crossing else [panels_in]
        spaces = figure.add_gridspec(len(heights), len(scenes), height_ratios=heights)
    for column, (one, scene) in enumerate(zip(axes, scenes, strict=True)):
        _draw(figure.add_subplot(spaces[0, column]), scene, one, cell_in)
    if crossing is not None:
        _bars(figure.add_subplot(spaces[0, 1] if alone else spaces[1, :]), crossing, 1.5 if alone else 1.32)
    figure.suptitle("\n".join(words), x=0.01, ha="left", fontsize=10.5)
    return finish(figure, path)


def _draw(panel: Axes, scene: GridScene, axis: str, cell_in: float) -> None:
    """One axis: frames, cells, lines along the groups."""
    points = cell_in * 72
    panel.set(xlim=(-0.1, scene.width + 0.1), ylim=(scene.height + 0.1, -0.1), aspect="equal")
    panel.axis("off")
    caption(panel, title=f"{axis_title(axis)}\n{scene.title}", size=9.5)
    look: dict[str, Any] = {"boxstyle": "round,pad=0.06", "facecolor": PALE, "edgecolor": GREY}
    for box in scene.nodes:
        corner = (box.x + 0.08, box.y + 0.08)
        panel.add_patch(FancyBboxPatch(corner, box.width - 0.16, box.height - 0.16, **look))
        name = say(en=f"node {box.number}", fr=f"nœud {box.number}")
        panel.text(box.x + PAD, box.y + HEAD / 2 + 0.06, name, fontsize=max(points * 0.17, 4.5), va="center")
    told = len(scene.cells) <= FEW
    for cell in scene.cells:
        panel.add_patch(Rectangle((cell.x, cell.y), 1, 1, facecolor=cell.color, edgecolor=EDGE, linewidth=0.6))
        position = ",".join(map(str, cell.place)) if told else ""
        halo = [withStroke(linewidth=points * 0.05, foreground=cell.color)]
        for words, down, share, weight in (
            (str(cell.rank), 0.22 if told else 0.3, 0.28, "bold"),
            (position, 0.52, 0.2, "normal"),
            (f"g{cell.group}", DOT[1], 0.2, "normal"),
        ):
            place = (cell.x + 0.07, cell.y + down)
            drawn: dict[str, Any] = {"fontsize": points * share, "fontweight": weight, "path_effects": halo}
            panel.text(*place, words, va="center", zorder=4, **drawn)
    for join in scene.joins:
        curve = Curve([join.start, join.bend, join.end], [Curve.MOVETO, Curve.CURVE3, Curve.CURVE3])
        look = {"edgecolor": VERMILION, "linestyle": (0, (4, 2))} if join.crosses else {"edgecolor": INK}
        panel.add_patch(PathPatch(curve, facecolor="none", linewidth=1.3, zorder=3, **look))
        for x, y in (join.start, join.end):
            panel.plot(x, y, "o", color=INK, markersize=2.6, zorder=5)


def _bars(panel: Axes, crossing: Crossing, room: float) -> None:
    """Bytes of one step along each axis: inside nodes, and between them; `room` leaves place for words."""
    axes = [axis for axis in AXIS_ORDER if crossing.grid.size(axis) > 1] or ["dp"]
    inside, between = ([crossing.bytes_of(axis, between=here) for axis in axes] for here in (False, True))
    most = max(*(a + b for a, b in zip(inside, between, strict=True)), 1)
    unit, scale = byte_scale(most)
    plain(panel)
    for row, (near, far) in enumerate(zip(inside, between, strict=True)):
        told = say(
            en=f"{format_bytes(near)} inside, {format_bytes(far)} between nodes",
            fr=f"{format_bytes(near)} dedans, {format_bytes(far)} entre nœuds",
        )
        stack(panel, row, [(near / scale, Style(SKY, "")), (far / scale, Style(VERMILION, "//"))], 0.62)
        panel.text((near + far + most * 0.008) / scale, row, told, va="center", fontsize=8.5)
    panel.set_yticks(range(len(axes)), axes)
    panel.set_ylim(len(axes) - 0.5, -0.5)
    panel.set_xlim(0, most / scale * room)
    label = say(en=f"{unit} per step, sent by all ranks", fr=f"{unit} par pas, envoyés par tous les rangs")
    title = say(
        en="What crosses which link (plain: inside a node; hatched: between nodes)",
        fr="Ce qui passe par quel lien (uni : dans un nœud ; hachuré : entre nœuds)",
    )
    caption(panel, x=label, title=title, size=9.5)
