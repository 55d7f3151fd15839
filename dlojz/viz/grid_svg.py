"""A grid of ranks as SVG and its bytes as HTML, for a panel that redraws at every move of a slider.

Layer 4. Invariant: the same scene and colours as in the matplotlib figure; numbers and the lab's own words are
escaped, and no other text is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from dlojz.predict.link_traffic import Crossing
from dlojz.text import say
from dlojz.units import format_bytes
from dlojz.viz.grid_scene import DOT, FEW, HEAD, PAD, Cell, GridScene, Join, NodeBox
from dlojz.viz.grid_words import AXIS_ORDER, axis_title
from dlojz.viz.markup import safe
from dlojz.viz.palette import GREY, SKY, VERMILION

MOST_PX, SHEET_PX = 58.0, 1000.0
"""Width of a cell at most, and of the picture."""
EDGE = "#333333"
CELL = '<td style="text-align:right;padding-left:1.5em">'


def grid_svg(scene: GridScene, axis: str) -> str:
    """One axis of a grid as one `<svg>` element, with its description for screen readers and a tooltip per rank."""
    cell_px = min(MOST_PX, SHEET_PX / scene.width)
    return "".join(
        [
            f'<svg role="img" aria-label="{safe(f"{axis_title(axis)}. {scene.title}")}" '
            f'viewBox="-0.05 -0.05 {scene.width + 0.1:.2f} {scene.height + 0.1:.2f}" '
            f'style="width:100%;max-width:{scene.width * cell_px:.0f}px;background:#fff" '
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
        f'fill="#f4f4f4" stroke="{GREY}" stroke-width="0.03"/>'
        f'<text x="{box.x + PAD:.2f}" y="{box.y + HEAD * 0.78:.2f}" font-size="0.22">{name}</text>'
    )


def _cell(cell: Cell, axis: str) -> str:
    pp, dp, tp = cell.place
    told = say(
        en=f"rank {cell.rank}: pp {pp}, dp {dp}, tp {tp}; group {cell.group} along {axis}",
        fr=f"rang {cell.rank} : pp {pp}, dp {dp}, tp {tp} ; groupe {cell.group} selon {axis}",
    )
    return (
        f'<g><title>{escape(told)}</title><rect x="{cell.x:.2f}" y="{cell.y:.2f}" width="1" height="1" '
        f'fill="{cell.color}" stroke="{EDGE}" stroke-width="0.02"/></g>'
    )


def _texts(cell: Cell, told: bool) -> Iterator[str]:
    place = ",".join(map(str, cell.place)) if told else ""
    for words, down, look in (
        (str(cell.rank), 0.33, ' font-weight="bold" font-size="0.32"'),
        (place, 0.6, ""),
        (f"g{cell.group}", DOT[1] + 0.09, ""),
    ):
        if not words:  # a large picture leaves the position to the tooltip
            continue
        yield (
            f'<text x="{cell.x + 0.07:.2f}" y="{cell.y + down:.2f}" stroke="{cell.color}"{look} fill="#000">'
            f"{escape(words)}</text>"
        )


def _line(join: Join) -> str:
    (x, y), (bend_x, bend_y), (to_x, to_y) = join.start, join.bend, join.end
    look = f'stroke="{VERMILION}" stroke-dasharray="0.12 0.07"' if join.crosses else 'stroke="#222"'
    dots = "".join(f'<circle cx="{at:.2f}" cy="{down:.2f}" r="0.05" fill="#222"/>' for at, down in (join[0], join[2]))
    return (
        f'<path d="M{x:.2f},{y:.2f} Q{bend_x:.2f},{bend_y:.2f} {to_x:.2f},{to_y:.2f}" fill="none" {look} '
        f'stroke-width="0.035" pointer-events="none"/>{dots}'
    )


def bars_html(crossing: Crossing) -> str:
    """Bytes of one step along each axis as bars: plain inside nodes, hatched between them, each with its figures."""
    axes = [axis for axis in AXIS_ORDER if crossing.grid.size(axis) > 1]
    if not axes:
        return ""
    both = {axis: [crossing.bytes_of(axis, between=here) for here in (False, True)] for axis in axes}
    most = max(*(sum(pair) for pair in both.values()), 1)
    hatched = f"repeating-linear-gradient(45deg,{VERMILION} 0 5px,#f2c2a2 5px 8px)"
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


def table_html(caption: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A small table, every cell escaped; the first column names the row."""
    head = "".join(f'<th scope="col" style="padding-left:1.5em">{safe(title)}</th>' for title in titles)
    body = "".join(
        f'<tr><th scope="row" style="text-align:left;font-weight:normal">{safe(first)}</th>'
        + "".join(f"{CELL}{safe(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<table style="margin-top:1em"><caption style="text-align:left;font-weight:bold">{safe(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )
