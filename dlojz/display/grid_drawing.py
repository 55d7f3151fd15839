"""Drawing of the grid of ranks: nodes, the groups of each axis, the bytes that cross which link; and its sentences.

The panel's SVG and the figure show the same drawing. Colour never speaks alone: each cell has the number of its group;
what goes between nodes is hatched or dashed. Lengths of a scene are in cells, y goes down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, sqrt
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

from dlojz.base.language import Sentences, format_bytes, format_seconds, say
from dlojz.base.table import titles
from dlojz.config.layout import DEFAULT_ORDER, RankGrid, RankPlace
from dlojz.display.drawing import LETTER, Box, Dashes, Drawing, Line, Shape, Words
from dlojz.display.style import EDGE, GREY, INK, PALE, SERIES, SKY, VERMILION, label, legible
from dlojz.prediction.link_traffic import Crossing

if TYPE_CHECKING:
    from dlojz.display.canvas import LabFigure

phrase = Sentences(Path(__file__).parent / "data" / "grid_drawing.md")

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


class GridCell(NamedTuple):
    """Rank: its upper left corner, the number of its group, its position along (pp, dp, tp), and that in words."""

    rank: int
    x: float
    y: float
    group: int
    place: RankPlace
    words: str
    tip: str

    @property
    def color(self) -> str:
        """Colour of the group; colours recur, so the number of the group stands in the cell."""
        return SERIES[self.group % len(SERIES)]

    @property
    def dot(self) -> tuple[float, float]:
        """Point where lines start and end."""
        return self.x + DOT[0], self.y + DOT[1]


class NodeBox(NamedTuple):
    """Frame of a node."""

    number: int
    x: float
    y: float
    width: float
    height: float


class Join(NamedTuple):
    """Line between neighbours of a group: a quadratic Bézier curve."""

    start: tuple[float, float]
    bend: tuple[float, float]
    end: tuple[float, float]
    crosses: bool


@dataclass(frozen=True)
class GridScene:
    """Picture of the groups along one axis.

    Args:
        title: axis, groups, and whether they leave their node.
        width: of the picture, in cells.
        height: likewise.
    """

    title: str
    width: float
    height: float
    nodes: tuple[NodeBox, ...]
    cells: tuple[GridCell, ...]
    joins: tuple[Join, ...]


def scene_of(grid: RankGrid, axis: str) -> GridScene:
    """Arrange a grid for the groups along one axis.

    Raises:
        LabError: if there is no such axis, or the grid is too large to draw.
    """
    if grid.world_size > MOST_DRAWN:
        raise phrase.refused(
            "too many ranks to draw", most_drawn=MOST_DRAWN, degrees=grid.degrees, world_size=grid.world_size
        )
    groups = grid.groups(axis)
    # rank → number of its group along this axis.
    group_of = {rank: number for number, group in enumerate(groups) for rank in group}
    in_node = len(grid.nodes[0])
    columns = min(in_node, WIDEST)
    rows = ceil(in_node / columns)
    box = columns + (columns - 1) * GAP + 2 * PAD, rows + (rows - 1) * GAP + 2 * PAD + HEAD
    # Nodes side by side such that the picture is about square, in cells.
    abreast = max(1, round(sqrt(len(grid.nodes) * rows / columns)))
    boxes, cells = [], []
    for number, ranks in enumerate(grid.nodes):
        left, top = number % abreast * (box[0] + PAD), number // abreast * (box[1] + PAD)
        boxes.append(NodeBox(number, left, top, *box))
        for slot, rank in enumerate(ranks):
            x = left + PAD + slot % columns * (1 + GAP)
            y = top + HEAD + PAD / 2 + slot // columns * (1 + GAP)
            group, coordinates = group_of[rank], grid.coordinates(rank)
            # `cells` is in the order of the ranks: nodes hold consecutive ranks, so cells[rank] is that rank's.
            cells.append(
                GridCell(rank, x, y, group, coordinates, grid.position_words(rank), _tip(grid, rank, group, axis))
            )
    drawn_groups = groups if grid.world_size <= MOST_JOINED else groups[:: ceil(len(groups) / MOST_LINES)]
    joins = [
        _join(cells[rank], cells[neighbour], grid.node_of(rank) != grid.node_of(neighbour))
        for group in drawn_groups
        for rank, neighbour in pairwise(group)
    ]
    lines = ceil(len(grid.nodes) / abreast)
    width = min(abreast, len(grid.nodes)) * (box[0] + PAD) - PAD
    return GridScene(
        title_of(grid, axis), width, lines * (box[1] + PAD) - PAD, tuple(boxes), tuple(cells), tuple(joins)
    )


def _tip(grid: RankGrid, rank: int, group: int, axis: str) -> str:
    """Tell a rank's position and group, for whoever points at its cell."""
    positions = ", ".join(f"{name} {grid.position(rank, name)}" for name in grid.named_axes)
    return phrase("tip of a rank", rank=rank, positions=positions, group=group, axis=axis)


def title_of(grid: RankGrid, axis: str) -> str:
    """Say how many groups an axis has, how large they are, and whether they leave their node."""
    size, groups, spanning = grid.size(axis), len(grid.groups(axis)), len(grid.links(axis))
    if size == 1:
        return say(en=f"{axis} = 1: each rank is alone", fr=f"{axis} = 1 : chaque rang est seul")
    # What is said of an axis all of whose groups lie inside nodes.
    same_node = say(en="inside a node", fr="dans un nœud")
    stays = same_node if not spanning else say(en="across nodes", fr="à cheval sur des nœuds")
    if 0 < spanning < groups:
        stays = say(en=f"{spanning} across nodes", fr=f"dont {spanning} à cheval sur des nœuds")
    many = "" if groups == 1 else "s"
    return phrase("title of an axis", axis=axis, groups=groups, many=many, size=size, stays=stays)


def _join(source: GridCell, target: GridCell, crosses: bool) -> Join:
    """A curve that leaves the straight line by more the farther it goes: below a row of cells, right of a column.

    It enters a lower cell by its upper edge, so that it does not go through the cell's text.
    """
    highest = min(source.y, target.y)
    (x, y), (to_x, to_y) = ((cell.dot[0], cell.y) if cell.y > highest else cell.dot for cell in (source, target))
    far = sqrt((to_x - x) ** 2 + (to_y - y) ** 2)
    bulge = min(0.1 + 0.06 * far, 0.4)
    # Unit normal of the line; two cells of a row bend downwards, below their texts.
    across = ((to_y - y) / far, -(to_x - x) / far) if to_y != y else (0.0, 1.0)
    bend = (x + to_x) / 2 + across[0] * bulge, (y + to_y) / 2 + across[1] * bulge
    return Join((x, y), bend, (to_x, to_y), crosses)


AXIS_ORDER = ("tp", "cp", "dp", "pp")
"""As axes are listed: from the one that communicates most to the one that communicates least, as a rule."""
WIDTH_PT, CELL_PT, BAR_PT = 936.0, 44.0, 26.0
"""Of the sheet, of a cell at most, of a bar with the space below it."""
LEAST_CELL_PT = 26.0
"""Where cells would be smaller, with no room for a rank and its group, fewer panels stand side by side."""
WRAPPED = 150
"""Characters of a line of the title."""


def grid_drawing(
    grid: RankGrid, crossing: Crossing | None = None, *, axis: str | None = None, titled: bool = True
) -> Drawing:
    """Draw a grid: one panel for each axis of more than one rank, or for one axis alone; below, the bytes of a step.

    Args:
        crossing: what a step sends on its links, for the bars; without it there are none.
        axis: pp, dp, cp or tp.
        titled: whether size, advice and the meaning of the signs are written above.

    Raises:
        LabError: if there is no such axis, or the grid is too large to draw.
    """
    axes, scenes = _axes(grid, axis), _scenes(grid, axis)
    abreast, cell_pt = _abreast(scenes)
    lines = [size_sentence(grid), *wrap(advice(grid), WRAPPED), cell_words(grid, axis)]
    shapes: list[Shape] = [Words(6, 12 + 15 * row, line, 10.5) for row, line in enumerate(lines if titled else ())]
    top, left, right = 15.0 * len(shapes) + (18 if titled else 12), 8.0, 0.0
    for number, (axis_name, scene) in enumerate(zip(axes, scenes, strict=True)):
        if number and number % abreast == 0:
            left, top = 8.0, top + 36 + cell_pt * scene.height
        titles = (axis_title(axis_name), scene.title)
        shapes += [Words(left, top + 13 * row, title, 9.5) for row, title in enumerate(titles)]
        shapes += _panel(scene, left, top + 24, cell_pt)
        # The panel is as wide as its picture or its titles (5.6 points a letter), whichever is wider.
        left += max(cell_pt * (scene.width + 0.6), 5.6 * max(map(len, titles)))
        right = max(left, right)
    top += 36 + cell_pt * scenes[-1].height
    if crossing is not None:
        shapes += _bars(crossing, top)
        top = 12 + max(shape.y for shape in shapes if isinstance(shape, Words))
    alt = ". ".join([size_sentence(grid), *(scene.title for scene in scenes), advice(grid)])
    return Drawing(max(WIDTH_PT if titled or crossing else 0.0, right), top, alt, tuple(shapes))


def _abreast(scenes: Sequence[GridScene]) -> tuple[int, float]:
    """How many panels of equal width stand side by side, and how large their cells are, in points."""
    sizes = [min(CELL_PT, (WIDTH_PT - 16) / (many * (scenes[0].width + 0.6))) for many in range(1, len(scenes) + 1)]
    return max((many, size) for many, size in enumerate(sizes, 1) if many == 1 or size >= LEAST_CELL_PT)


def _words_of(scene: GridScene, cell_pt: float) -> list[list[Words]]:
    """What stands in each cell, as far as it fits into all: rank, group and position, or rank and group.

    The lines of the groups go through the lowest third. A pointer over a cell is told all of it.
    """
    few = len(scene.cells) <= FEW
    number, spot_beside, below, position_spot = (
        (0.07, 0.22, 0.28),
        (0.56, 0.22, 0.21),
        (0.07, 0.58, 0.19),
        (0.07, 0.52, 0.26),
    )
    for spots in ((number, spot_beside, position_spot), (number, below)) if few else ((number, below),):
        written = []
        for cell in scene.cells:
            texts = (str(cell.rank), f"g{cell.group}", cell.words)
            words = [
                Words(cell.x + right, cell.y + down, text, legible(share * cell_pt, WIDTH_PT), bold=share > 0.26)
                for text, (right, down, share) in zip(texts, spots, strict=False)
            ]
            if len(words) == 3:  # the group ends where the cell does
                group_em = LETTER * len(words[1].text) * words[1].size / cell_pt
                words[1] = words[1]._replace(x=cell.x + min(0.56, 0.96 - group_em))
            written.append(words)
        if all(_fit(words, cell, cell_pt) for words, cell in zip(written, scene.cells, strict=True)):
            break
    return written


def _fit(words: Sequence[Words], cell: GridCell, cell_pt: float) -> bool:
    """Whether texts stay in their cell, and those of one line clear of one another."""
    ends = [word.x + LETTER * len(word.text) * word.size / cell_pt for word in words]
    inside = all(end <= cell.x + 1.0 for end in ends)
    return inside and (words[0].y != words[1].y or ends[0] < words[1].x)


def grid_figure(
    grid: RankGrid, crossing: Crossing | None = None, path: str | Path | None = None, *, axis: str | None = None
) -> LabFigure:
    """Paint a grid (see `grid_drawing`), and write the picture if a path is given.

    Raises:
        LabError: as `grid_drawing` and `dlojz.display.canvas.finish`.
    """
    from dlojz.display.canvas import figure_of  # matplotlib, which sentences do without

    return figure_of(grid_drawing(grid, crossing, axis=axis), path)


def _panel(scene: GridScene, left: float, top: float, cell_pt: float) -> Iterator[Shape]:
    """One axis: frames, cells, lines along the groups, and the words of the cells above them."""

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x * cell_pt, top + y * cell_pt

    for box in scene.nodes:
        yield Box(*at(box.x, box.y), box.width * cell_pt, box.height * cell_pt, PALE, edge=GREY, line=1.0)
    for cell in scene.cells:
        yield Box(*at(cell.x, cell.y), cell_pt, cell_pt, cell.color, edge=EDGE, line=0.6, tip=cell.tip)
    for join in scene.joins:
        dashes: Dashes = "--" if join.crosses else "-"
        color = VERMILION if join.crosses else INK
        yield Line([at(*join.start), at(*join.bend), at(*join.end)], color, 1.3, dashes, curved=True)
    # A dict drops doubles: neighbours share their ends.
    for x, y in {point: None for join in scene.joins for point in (at(*join.start), at(*join.end))}:
        yield Box(x - 1.4, y - 1.4, 2.8, 2.8, INK)
    for box in scene.nodes:
        name = say(en=f"node {box.number}", fr=f"nœud {box.number}")
        yield Words(*at(box.x + PAD, box.y + HEAD / 2 + 0.06), name, 0.2 * cell_pt, halo=PALE)
    for cell, words in zip(scene.cells, _words_of(scene, cell_pt), strict=True):
        for word in words:
            x, y = at(word.x, word.y)
            yield word._replace(x=x, y=y, halo=cell.color)


def _bars(crossing: Crossing, top: float) -> Iterator[Shape]:
    """Bytes of one step along each axis: plain inside nodes, hatched between them."""
    axes = [axis for axis in AXIS_ORDER if crossing.grid.communicates(axis)] or ["dp"]
    heading = phrase("caption of bars")
    yield Words(8, top, heading, 9.5)
    # At least 1, so that a grid that sends nothing has no division by 0.
    largest_bytes = max(
        *(crossing.bytes_of(axis, between=False) + crossing.bytes_of(axis, between=True) for axis in axes), 1
    )
    for row, axis in enumerate(axes):
        inside_bytes, far = (crossing.bytes_of(axis, between=between) for between in (False, True))
        y, per_byte = top + 12 + BAR_PT * row, 0.7 * (WIDTH_PT - 46) / largest_bytes
        yield Box(46, y, inside_bytes * per_byte, 0.65 * BAR_PT, SKY)
        yield Box(46 + inside_bytes * per_byte, y, far * per_byte, 0.65 * BAR_PT, VERMILION, "//")
        yield Words(40, y + 0.33 * BAR_PT, axis, 9.5, "end")
        label = phrase("bytes of a bar", inside_bytes=inside_bytes, far=far)
        yield Words(54 + (inside_bytes + far) * per_byte, y + 0.33 * BAR_PT, label, 8.5)


def axis_title(axis: str) -> str:
    """Name an axis in full; what is no axis stays."""
    return label("axis", axis)


def size_sentence(grid: RankGrid) -> str:
    """Say ranks, degrees, nodes and order in one line."""
    nodes, world = len(grid.nodes), grid.world_size
    times = f"dp {grid.dp} × pp {grid.pp} × tp {grid.tp}" + (f" × cp {grid.cp}" if grid.cp > 1 else "")
    return phrase(
        "size", world=world, s=_s(world), times=times, nodes=nodes, s_2=_s(nodes), grid=grid, s_3=_s(grid.gpus_per_node)
    )


def advice(grid: RankGrid) -> str:
    """Judge the placement in one sentence: what leaves its node, and what would be better.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §3.2, takeaway 1: tensor parallelism up to the GPUs of a node,
    pipelines across nodes.
    """
    crossing = [axis for axis in AXIS_ORDER if not grid.inside(axis)]
    if not crossing:
        return phrase("no group leaves its node")
    if "tp" in crossing:
        return _tensor_crosses(grid)
    clause_of = {
        "stays": say(en="tp stays inside the nodes", fr="tp reste dans les nœuds"),
        "cp": phrase("cp crosses nodes"),
        "dp": phrase("dp crosses nodes"),
        "pp": phrase("pp crosses nodes"),
    }
    clauses = [clause_of[axis] for axis in (*(["stays"] if grid.tp > 1 else []), *crossing)]
    return say(en="; ", fr=" ; ").join(clauses) + "."


def _tensor_crosses(grid: RankGrid) -> str:
    """Why tensor parallelism leaves its node, and the nearest placement where it does not."""
    # The largest degree, at most tp, that divides the GPUs of a node.
    fits = max(size for size in range(1, min(grid.tp, grid.gpus_per_node) + 1) if grid.gpus_per_node % size == 0)
    if grid.tp > grid.gpus_per_node:
        remedy = phrase("smaller tp", grid=grid, fits=fits)
    elif grid.gpus_per_node % grid.tp:
        remedy = phrase("tp that divides a node", grid=grid, fits=fits)
    else:
        remedy = phrase("tp innermost", order=DEFAULT_ORDER)
    return phrase("tp crosses nodes", remedy=remedy)


def cell_words(grid: RankGrid, axis: str | None = None) -> str:
    """Explain what stands in a cell of the picture, and what its lines mean: those of all groups, or of some.

    Args:
        axis: the only one drawn; by default all of more than one rank.
    """
    every_group, axes = grid.world_size <= MOST_JOINED, ",".join(grid.named_axes)
    whose = say(en="a group", fr="un groupe") if every_group else say(en="some groups", fr="quelques groupes")
    scenes = _scenes(grid, axis)
    cell_pt = _abreast(scenes)[1]
    has_positions = all(len(words) == 3 for scene in scenes for words in _words_of(scene, cell_pt))
    position_phrase = f" position ({axes})," if has_positions else ""
    return phrase("signs of a cell", position_phrase=position_phrase, whose=whose)


def _axes(grid: RankGrid, axis: str | None) -> list[str]:
    return [axis] if axis is not None else [axis_name for axis_name in AXIS_ORDER if grid.size(axis_name) > 1] or ["dp"]


def _scenes(grid: RankGrid, axis: str | None) -> list[GridScene]:
    return [scene_of(grid, axis_name) for axis_name in _axes(grid, axis)]


def crossing_rows(crossing: Crossing) -> list[tuple[str, str, str, str]]:
    """List axis, collective, bytes inside nodes and bytes between them: per step, over all ranks."""
    return [
        (row.group, row.collective, format_bytes(row.inside_bytes), format_bytes(row.between_bytes))
        for row in crossing.rows
    ]


def crossing_titles() -> tuple[str, ...]:
    """Name the columns of `crossing_rows`."""
    return titles(en="axis; collective; inside a node; between nodes", fr="axe; collective; dans un nœud; entre nœuds")


def order_rows(placed: Mapping[str, Crossing]) -> list[tuple[str, ...]]:
    """List the bytes between nodes in one step, per order: along each axis of more than one rank, and in all."""
    return [(order, *(format_bytes(value) for value in _between(crossing))) for order, crossing in placed.items()]


def order_titles(grid: RankGrid) -> tuple[str, ...]:
    """Name the columns of `order_rows`."""
    return (say(en="order", fr="ordre"), *_used(grid), say(en="in all", fr="en tout"))


def seconds_sentence(times_s: Mapping[str, float]) -> str:
    """Say for how many seconds each axis keeps its busiest rank's links busy."""
    busy_times = ", ".join(f"{axis} {format_seconds(times_s[axis])}" for axis in AXIS_ORDER if axis in times_s)
    return say(en=f"on the links per step: {busy_times}", fr=f"sur les liens, par pas : {busy_times}")


def _between(crossing: Crossing) -> list[int]:
    axis_bytes = [crossing.bytes_of(axis, between=True) for axis in _used(crossing.grid)]
    return [*axis_bytes, sum(axis_bytes)]


def _used(grid: RankGrid) -> tuple[str, ...]:
    return tuple(axis for axis in AXIS_ORDER if grid.communicates(axis))


def _s(number: int) -> str:
    """The ending of a plural: French begins it at 2, as English does for whole numbers above 0."""
    return "" if number == 1 else "s"
