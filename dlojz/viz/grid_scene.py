"""Where the ranks of a grid are drawn: cells in the boxes of their nodes, and lines along the groups of one axis.

Layer 4. Invariant: the notebook's SVG and the matplotlib figure draw the same scene; lengths are in cells, y goes down.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil, sqrt
from typing import NamedTuple

from dlojz.grid import Grid, Place
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.palette import SERIES

MOST_DRAWN = 512
"""Ranks of the largest picture: beyond, a cell has no room for its number."""
MOST_JOINED = 32
"""Ranks of the largest picture that shows the lines of all groups; beyond, those of some, chosen evenly."""
MOST_LINES = 4
FEW = 64
"""Ranks up to which each cell tells its position."""
GAP, PAD, HEAD, WIDEST = 0.14, 0.2, 0.42, 8
DOT = (0.88, 0.8)
"""Where in a cell its dot is, from which lines start: beside the text."""


class Cell(NamedTuple):
    """One rank: its place (upper left corner), the number of its group, and its position along (pp, dp, tp)."""

    rank: int
    x: float
    y: float
    group: int
    place: Place

    @property
    def color(self) -> str:
        """Of its group; the colours recur, so the number of the group stands in the cell."""
        return SERIES[self.group % len(SERIES)]

    @property
    def dot(self) -> tuple[float, float]:
        """Where lines start and end."""
        return self.x + DOT[0], self.y + DOT[1]


class NodeBox(NamedTuple):
    """The frame of a node."""

    number: int
    x: float
    y: float
    width: float
    height: float


class Join(NamedTuple):
    """A line between neighbours of a group: from, to, and the point that bends it (quadratic Bézier curve)."""

    start: tuple[float, float]
    bend: tuple[float, float]
    end: tuple[float, float]
    crosses: bool


@dataclass(frozen=True)
class GridScene:
    """A picture of the groups along one axis.

    Args:
        title: axis, groups, and whether they leave their node.
        width: of the picture, in cells.
        height: likewise.
        nodes: frames.
        cells: one per rank.
        joins: lines along groups.
    """

    title: str
    width: float
    height: float
    nodes: tuple[NodeBox, ...]
    cells: tuple[Cell, ...]
    joins: tuple[Join, ...]


def scene_of(grid: Grid, axis: str) -> GridScene:
    """Arrange a grid for the groups along one axis.

    Raises:
        LabError: if there is no such axis, or the grid is too large to draw.
    """
    if grid.world_size > MOST_DRAWN:
        raise LabError(
            say(
                en=f"a picture shows at most {MOST_DRAWN} ranks, but {grid.degrees} make {grid.world_size}: draw a "
                "smaller grid.",
                fr=f"une image montre au plus {MOST_DRAWN} rangs, mais {grid.degrees} en font {grid.world_size} : "
                "dessinez une grille plus petite.",
            )
        )
    groups = grid.groups(axis)
    group_of = {rank: number for number, group in enumerate(groups) for rank in group}
    in_node = len(grid.nodes[0])
    columns = min(in_node, WIDEST)
    rows = ceil(in_node / columns)
    box = columns + (columns - 1) * GAP + 2 * PAD, rows + (rows - 1) * GAP + 2 * PAD + HEAD
    abreast = max(1, round(sqrt(len(grid.nodes) * rows / columns)))
    boxes, cells = [], []
    for number, ranks in enumerate(grid.nodes):
        left, top = number % abreast * (box[0] + PAD), number // abreast * (box[1] + PAD)
        boxes.append(NodeBox(number, left, top, *box))
        for slot, rank in enumerate(ranks):
            x = left + PAD + slot % columns * (1 + GAP)
            y = top + HEAD + PAD / 2 + slot // columns * (1 + GAP)
            cells.append(Cell(rank, x, y, group_of[rank], grid.coordinates(rank)))
    shown = groups if grid.world_size <= MOST_JOINED else groups[:: ceil(len(groups) / MOST_LINES)]
    joins = [
        _join(cells[one], cells[other], grid.node_of(one) != grid.node_of(other))
        for group in shown
        for one, other in pairwise(group)
    ]
    lines = ceil(len(grid.nodes) / abreast)
    width = min(abreast, len(grid.nodes)) * (box[0] + PAD) - PAD
    return GridScene(
        title_of(grid, axis), width, lines * (box[1] + PAD) - PAD, tuple(boxes), tuple(cells), tuple(joins)
    )


def title_of(grid: Grid, axis: str) -> str:
    """How many groups an axis has, how large they are, and whether they leave their node."""
    size, groups, spanning = grid.size(axis), len(grid.groups(axis)), len(grid.links(axis))
    if size == 1:
        return say(en=f"{axis} = 1: each rank is alone", fr=f"{axis} = 1 : chaque rang est seul")
    near = say(en="inside a node", fr="dans un nœud")
    stays = near if not spanning else say(en="across nodes", fr="à cheval sur des nœuds")
    if 0 < spanning < groups:
        stays = say(en=f"{spanning} across nodes", fr=f"dont {spanning} à cheval sur des nœuds")
    many = "" if groups == 1 else "s"
    return say(
        en=f"{axis}: {groups} group{many} of {size}, {stays}", fr=f"{axis} : {groups} groupe{many} de {size}, {stays}"
    )


def _join(one: Cell, other: Cell, crosses: bool) -> Join:
    """A curve that leaves the straight line by more the farther it goes: below a row of cells, right of a column."""
    (x, y), (to_x, to_y) = one.dot, other.dot
    far = sqrt((to_x - x) ** 2 + (to_y - y) ** 2)
    bulge = 0.1 + 0.06 * far
    across = ((to_y - y) / far, -(to_x - x) / far) if to_y != y else (0.0, 1.0)
    bend = (x + to_x) / 2 + across[0] * bulge, (y + to_y) / 2 + across[1] * bulge
    return Join(one.dot, bend, other.dot, crosses)
