"""What `dlojz grid` answers: words, tables, a JSON document.

Layer 6. Invariant: every figure is asked of `dlojz.grid` and `dlojz.predict.link_traffic`; bytes are those of one step,
sent by all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from dlojz.collectives.cost import Link
from dlojz.grid import AXES, Grid
from dlojz.predict.link_traffic import Crossing
from dlojz.text import say
from dlojz.units import format_bytes

MOST_TOLD = 64
"""Ranks up to which the text lists all of them and all groups."""


def document(
    grid: Grid, found: dict[str, Crossing], unknown: str, links: tuple[Link, Link] | None = None
) -> dict[str, Any]:
    """Everything about a grid as plain JSON data; bytes per step, sent by all ranks."""
    from dlojz.viz.grid_words import advice

    own = found.get(grid.order)
    told: dict[str, Any] = {
        **{axis: grid.size(axis) for axis in ("dp", "pp", "tp")},
        "world_size": grid.world_size,
        "gpus_per_node": grid.gpus_per_node,
        "order": grid.order,
        "ranks": [
            {"rank": rank, "node": grid.node_of(rank), **grid.coordinates(rank)._asdict()}
            for rank in range(grid.world_size)
        ],
        "nodes": [list(ranks) for ranks in grid.nodes],
        "groups": {axis: [list(group) for group in grid.groups(axis)] for axis in AXES},
        "inside": {axis: grid.inside(axis) for axis in AXES},
        "spanning": {axis: [list(group) for group in grid.links(axis)] for axis in AXES},
        "advice": advice(grid),
        "traffic": [row._asdict() for row in own.rows] if own else None,
        "node_table_bytes": [list(row) for row in own.node_table] if own else None,
        "between_bytes_by_order": {
            order: {axis: one.bytes_of(axis, between=True) for axis in AXES} for order, one in found.items()
        }
        or None,
        "unknown": unknown or None,
    }
    if links and own:
        told["seconds_per_axis"] = own.seconds(*links)
    return told


def show_grid(
    grid: Grid,
    found: dict[str, Crossing],
    unknown: str,
    links: tuple[Link, Link] | None,
    answer: Callable[[Any], None],
    run: str = "",
) -> None:
    """Tell a grid in words and tables: ranks, groups, what would be better, bytes.

    Args:
        grid: the ranks.
        found: traffic by order, that of the grid among them; empty where it is not known.
        unknown: why it is not known.
        links: inside a node and between nodes, for seconds.
        answer: prints.
        run: whose bytes they are, in words.
    """
    from dlojz.viz import grid_words as words

    answer(words.size_sentence(grid) + "\n")
    answer(_ranks(grid))
    answer("")
    for axis in words.AXIS_ORDER:
        answer(_groups(grid, axis))
    answer("\n" + words.advice(grid) + "\n")
    own = found.get(grid.order)
    if own is None:
        answer(say(en="The bytes are not known: ", fr="Les octets ne sont pas connus : ") + unknown)
        return
    answer(
        say(
            en=f"Bytes per step, sent by all ranks, for {run}:",
            fr=f"Octets par pas, envoyés par tous les rangs, pour {run} :",
        )
    )
    answer(_table(words.crossing_titles(), words.crossing_rows(own), left=2))
    if 1 < len(grid.nodes) <= 8:
        titles = [say(en=f"to node {node}", fr=f"vers nœud {node}") for node in range(len(grid.nodes))]
        rows = [
            (say(en=f"node {node}", fr=f"nœud {node}"), *map(format_bytes, row))
            for node, row in enumerate(own.node_table)
        ]
        answer("")
        answer(_table(("", *titles), rows))
    if len(found) > 1:
        answer("\n" + say(en="Between nodes, by order of the axes:", fr="Entre nœuds, selon l’ordre des axes :"))
        answer(_table(words.order_titles(grid), words.order_rows(found)))
    if links:
        answer("\n" + words.seconds_sentence(own.seconds(*links)))


def _ranks(grid: Grid) -> str:
    """One line per node: each rank with its position (pp,dp,tp)."""
    lines = [say(en="rank (pp,dp,tp) on each node:", fr="rang (pp,dp,tp) sur chaque nœud :")]
    named = [
        f"{rank} ({','.join(map(str, grid.coordinates(rank)))})" for rank in range(min(grid.world_size, MOST_TOLD))
    ]
    width = max(map(len, named))
    for node, ranks in enumerate(grid.nodes):
        if ranks[0] >= MOST_TOLD:
            lines.append(
                say(en="  … (--json lists all ranks)", fr="  … (--json énumère tous les rangs)"),
            )
            break
        cells = named[ranks[0] : ranks[-1] + 1]
        name = say(en=f"node {node}", fr=f"nœud {node}")
        for start in range(0, len(cells), 8):
            shown = "  ".join(cell.ljust(width) for cell in cells[start : start + 8]).rstrip()
            lines.append(f"  {name if not start else ' ' * len(name)}  {shown}")
    return "\n".join(lines)


def _groups(grid: Grid, axis: str) -> str:
    """The groups along an axis, those that leave their node marked."""
    from dlojz.viz.grid_scene import title_of

    title = title_of(grid, axis)
    if grid.size(axis) == 1:
        return title
    spanning, told, shown = set(grid.links(axis)), [], 0
    for group in grid.groups(axis):
        if shown + len(group) > MOST_TOLD:
            told.append("…")
            break
        shown += len(group)
        told.append("[" + " ".join(map(str, group)) + "]" + ("*" if group in spanning else ""))
    mark = say(en="   (*: across nodes)", fr="   (* : à cheval sur des nœuds)") if "*" in "".join(told) else ""
    return f"{title}{mark}\n  " + " ".join(told)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number_of, title in enumerate(titles):
        table.add_column(title, justify="left" if number_of < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
