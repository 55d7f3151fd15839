"""Panel of the grid of ranks: choose degrees, nodes and the order of the axes; see who shares a group and a link.

The SVG draws the same scene as the matplotlib figure. Where only the bytes are unknown, the picture stands and a
sentence says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.language import format_bytes, say
from dlojz.base.table import Table, safe, tables_html
from dlojz.config.layout import AXES, DEFAULT_GPUS_PER_NODE, DEFAULT_ORDER, ORDERS, Layout, RankGrid
from dlojz.config.run_config import RunConfig
from dlojz.display.canvas import LabFigure
from dlojz.display.figures.grid_figures import grid_figure
from dlojz.display.grid_scene import (
    AXIS_ORDER,
    DOT,
    FEW,
    HEAD,
    MOST_JOINED,
    PAD,
    GridCell,
    GridScene,
    Join,
    NodeBox,
    advice,
    axis_title,
    cell_words,
    crossing_rows,
    crossing_titles,
    scene_of,
    size_sentence,
)
from dlojz.display.style import BLACK, EDGE, GREY, INK, PALE, SKY, VERMILION, VERMILION_TINT, WHITE
from dlojz.display.widgets.panel import Panel, import_widgets, status_html, with_defaults
from dlojz.prediction.link_traffic import Crossing, link_traffic

MOST_PX, SHEET_PX = 58.0, 1000.0
"""Width of a cell at most, and of the picture."""
CELL = '<td style="text-align:right;padding-left:1.5em">'


def grid_svg(scene: GridScene, axis: str) -> str:
    """Draw one axis of a grid as an `<svg>` element, with a description for screen readers and a tooltip per rank."""
    cell_px = min(MOST_PX, SHEET_PX / scene.width)
    return "".join(
        [
            f'<svg role="img" aria-label="{safe(f"{axis_title(axis)}. {scene.title}")}" '
            f'viewBox="-0.05 -0.05 {scene.width + 0.1:.2f} {scene.height + 0.1:.2f}" '
            f'style="width:100%;max-width:{scene.width * cell_px:.0f}px;background:{WHITE}" '
            'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="0.24">',
            *(_node(box) for box in scene.nodes),
            *(_cell(cell, axis) for cell in scene.cells),
            *(_line(join) for join in scene.joins),
            '<g pointer-events="none" paint-order="stroke" stroke-width="0.05">',
            *(text for cell in scene.cells for text in _texts(cell, len(scene.cells) <= FEW)),
            "</g></svg>",
        ]
    )


def _node(box: NodeBox) -> str:
    name = escape(say(en=f"node {box.number}", fr=f"nœud {box.number}"))
    return (
        f'<rect x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" height="{box.height:.2f}" rx="0.1" '
        f'fill="{PALE}" stroke="{GREY}" stroke-width="0.03"/>'
        f'<text x="{box.x + PAD:.2f}" y="{box.y + HEAD * 0.78:.2f}" font-size="0.22">{name}</text>'
    )


def _cell(cell: GridCell, axis: str) -> str:
    pp, dp, tp = cell.place
    told = say(
        en=f"rank {cell.rank}: pp {pp}, dp {dp}, tp {tp}; group {cell.group} along {axis}",
        fr=f"rang {cell.rank} : pp {pp}, dp {dp}, tp {tp} ; groupe {cell.group} selon {axis}",
    )
    return (
        f'<g><title>{escape(told)}</title><rect x="{cell.x:.2f}" y="{cell.y:.2f}" width="1" height="1" '
        f'fill="{cell.color}" stroke="{EDGE}" stroke-width="0.02"/></g>'
    )


def _texts(cell: GridCell, told: bool) -> Iterator[str]:
    place = ",".join(map(str, cell.place)) if told else ""
    for words, down, look in (
        (str(cell.rank), 0.33, ' font-weight="bold" font-size="0.32"'),
        (place, 0.6, ""),
        (f"g{cell.group}", DOT[1] + 0.09, ""),
    ):
        if not words:  # a large picture leaves the position to the tooltip
            continue
        yield (
            f'<text x="{cell.x + 0.07:.2f}" y="{cell.y + down:.2f}" stroke="{cell.color}"{look} fill="{BLACK}">'
            f"{escape(words)}</text>"
        )


def _line(join: Join) -> str:
    (x, y), (bend_x, bend_y), (to_x, to_y) = join.start, join.bend, join.end
    look = f'stroke="{VERMILION}" stroke-dasharray="0.12 0.07"' if join.crosses else f'stroke="{INK}"'
    dots = "".join(f'<circle cx="{at:.2f}" cy="{down:.2f}" r="0.05" fill="{INK}"/>' for at, down in (join[0], join[2]))
    return (
        f'<path d="M{x:.2f},{y:.2f} Q{bend_x:.2f},{bend_y:.2f} {to_x:.2f},{to_y:.2f}" fill="none" {look} '
        f'stroke-width="0.035" pointer-events="none"/>{dots}'
    )


def bars_html(crossing: Crossing) -> str:
    """Draw the bytes of one step along each axis as bars, plain inside nodes and hatched between them."""
    axes = [axis for axis in AXIS_ORDER if crossing.grid.size(axis) > 1]
    if not axes:
        return ""
    both = {axis: [crossing.bytes_of(axis, between=here) for here in (False, True)] for axis in axes}
    most = max(*(sum(pair) for pair in both.values()), 1)
    hatched = f"repeating-linear-gradient(45deg,{VERMILION} 0 5px,{VERMILION_TINT} 5px 8px)"
    rows = []
    for axis, (near, far) in both.items():
        bars = "".join(
            f'<div style="display:inline-block;height:1em;background:{look};width:{100 * value / most:.2f}%"></div>'
            for value, look in ((near, SKY), (far, hatched))
            if value
        )
        rows.append(
            f'<tr><th scope="row" style="text-align:left">{axis}</th><td aria-hidden="true" style="width:22em;'
            f'text-align:left;white-space:nowrap">{bars}</td>{CELL}{safe(format_bytes(near))}</td>'
            f"{CELL}{safe(format_bytes(far))}</td></tr>"
        )
    titles = "".join(
        f'<th scope="col" style="padding-left:1.5em">{safe(title)}</th>'
        for title in (
            say(en="bytes per step", fr="octets par pas"),
            say(en="inside a node (plain)", fr="dans un nœud (uni)"),
            say(en="between nodes (hatched)", fr="entre nœuds (hachuré)"),
        )
    )
    return f"<table><thead><tr><td></td>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


DEFAULTS: dict[str, Any] = {
    "dp": 2,
    "pp": 2,
    "tp": 2,
    "gpus_per_node": DEFAULT_GPUS_PER_NODE,
    "order": DEFAULT_ORDER,
    "axis": "tp",
    "model": "gpt_tiny",
    "micro_batch": 4,
    "micro_batches": 4,
}
MOST = 8
"""Degrees that the sliders reach; with it a picture has at most 512 ranks."""


@dataclass(frozen=True)
class GridAnswer:
    """Grid of ranks that a choice leads to; shows itself in a notebook.

    Attributes:
        grid: the ranks; None where the choice makes none.
        axis: the one whose groups are coloured.
        crossing: what a step sends on its links; None where that is not known.
        problem: why there is no grid, or no bytes; empty if nothing is wrong.
    """

    grid: RankGrid | None
    axis: str = "tp"
    crossing: Crossing | None = None
    problem: str = ""

    @property
    def figure(self) -> LabFigure | None:
        """All axes of the grid as a matplotlib figure, which can be saved."""
        return grid_figure(self.grid, self.crossing) if self.grid else None

    def html(self) -> str:
        """Write the answer for the panel: sentences, an SVG of one axis, bars and a table of bytes."""
        if self.grid is None:
            return status_html(self.problem)
        scene = scene_of(self.grid, self.axis)
        return (
            f"<p><b>{safe(axis_title(self.axis))}</b> · {safe(scene.title)}<br>{safe(size_sentence(self.grid))}</p>"
            + status_html(advice(self.grid))
            + grid_svg(scene, self.axis)
            + f"<p>{safe(cell_words(self.grid.world_size <= MOST_JOINED))}</p>"
            + status_html(self.problem)
            + (bars_html(self.crossing) if self.crossing else "")
            + self._table()
        )

    def _repr_html_(self) -> str:
        figure = self.figure
        return (figure.html() if figure else "") + status_html(self.problem) + self._table()

    def __repr__(self) -> str:
        told = f"{size_sentence(self.grid)}. {advice(self.grid)}" if self.grid else ""
        return f"{told} {self.problem}".strip()

    def _table(self) -> str:
        if self.crossing is None:
            return ""
        caption = say(en="Bytes per step, sent by all ranks", fr="Octets par pas, envoyés par tous les rangs")
        return tables_html([Table(crossing_titles(), tuple(crossing_rows(self.crossing)), caption, align="llr")])


def still_grid(**fields: Any) -> GridAnswer:
    """Answer one choice of the panel: a picture and its bytes, or the sentence that refuses.

    Args:
        fields: dp, pp, tp, gpus_per_node, order (axes, innermost first), axis (whose groups the panel colours), and
            those of a run (model, micro_batch, micro_batches, sequence_length, engine, zero, …), for the bytes.
    """
    try:
        chosen = _fields(fields)
        axis, placed = chosen.pop("axis"), {name: chosen.pop(name) for name in ("gpus_per_node", "order")}
        grid = RankGrid(**{name: chosen[name] for name in AXES}, **placed)
        scene_of(grid, axis)
    except LabError as error:
        return GridAnswer(None, problem=str(error))
    try:
        return GridAnswer(grid, axis, link_traffic(RunConfig.of(**chosen), grid))
    except LabError as error:
        unknown = say(en="The bytes are not known: ", fr="Les octets ne sont pas connus : ")
        return GridAnswer(grid, axis, problem=unknown + str(error))


def grid_panel(**fields: Any) -> Any:
    """Show a widget: choose a grid of ranks and a model, and see the groups, the nodes and what crosses which link.

    Args:
        fields: what is shown first, as `still_grid` takes them.

    Returns:
        An ipywidgets box.

    Raises:
        LabError: for an unknown field, a value out of reach, or if ipywidgets is not installed; `still_grid` needs
            none.
    """
    return GridPanel(**fields).box


class GridPanel(Panel):
    """Panel of the grid.

    Args:
        fields: what is shown first.
    """

    def __init__(self, **fields: Any) -> None:
        chosen = _fields(fields)
        first = still_grid(**chosen)
        if first.grid is None:
            raise LabError(first.problem)
        models.spec(chosen["model"])  # refuses what is none
        widgets = import_widgets(en="the panel", fr="le panneau", instead="still_grid")

        def number(name: str, label: str, most: int) -> Any:
            return widgets.IntSlider(value=chosen[name], min=1, max=max(most, chosen[name]), description=label)

        def choice(name: str, label: str, options: Any) -> Any:
            return widgets.Dropdown(options=options, value=chosen[name], description=label)

        axes = [(f"{one}: {axis_title(one)}", one) for one in AXES]
        controls = {
            "dp": number("dp", "dp (data)", MOST),
            "pp": number("pp", "pp (pipeline)", MOST),
            "tp": number("tp", "tp (tensor)", MOST),
            "gpus_per_node": number("gpus_per_node", say(en="GPUs per node", fr="GPU par nœud"), 16),
            "order": choice("order", say(en="order (inside first)", fr="ordre (intérieur…)"), ORDERS),
            "axis": choice("axis", say(en="colour", fr="couleur"), axes),
            "model": choice("model", say(en="model", fr="modèle"), models.names()),
            "micro_batch": number("micro_batch", "micro-batch", 64),
            "micro_batches": number("micro_batches", "micro-batches", 64),
        }
        super().__init__(widgets, controls, in_column=3, label_width="10em", control_width="25em")
        self._others = {name: value for name, value in chosen.items() if name not in controls}
        self.follow(controls.values())
        self.answer = first
        self.shown.value = first.html()

    def answered(self) -> GridAnswer:
        """Answer what is chosen."""
        return still_grid(**self._others, **self.fields)


def _fields(fields: dict[str, Any]) -> dict[str, Any]:
    others = {*RunConfig.model_fields, *Layout.model_fields} - {"layout", "schema_version"}
    return with_defaults(fields, DEFAULTS, others)
