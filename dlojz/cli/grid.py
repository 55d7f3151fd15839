"""Command `dlojz grid`: the ranks of a run on their nodes, who shares which group, what crosses which link.

Nothing is run; bytes are those of one step, sent by all ranks. Where they are not known, the grid is shown with one
sentence that says why. A picture is written before anything is printed, so that a wrong path is the only answer.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dlojz.base.errors import LabError
from dlojz.base.language import format_bytes, say
from dlojz.base.table import Table
from dlojz.cli.options import Answer, Given, check_needs, config_flags, config_of, phrase, tell_written, verb
from dlojz.config.layout import DEFAULT_GPUS_PER_NODE, DEFAULT_ORDER, GRID_AXES, ORDERS, RankGrid, complete
from dlojz.hardware.links import Link
from dlojz.prediction.link_traffic import Crossing, link_traffic, placements

MOST_TOLD = 64
"""Ranks up to which the text lists all of them and all groups."""


def document(
    grid: RankGrid, crossings: dict[str, Crossing], unknown: str, links: tuple[Link, Link] | None = None
) -> dict[str, Any]:
    """Write a grid as plain JSON data; bytes per step, sent by all ranks."""
    from dlojz.display.grid_drawing import advice

    crossing = crossings.get(grid.order)
    fields: dict[str, Any] = {
        **{axis: grid.size(axis) for axis in ("dp", "pp", "tp", "cp")},
        "world_size": grid.world_size,
        "gpus_per_node": grid.gpus_per_node,
        "order": grid.order,
        "ranks": [
            {"rank": rank, "node": grid.node_of(rank), **{axis: grid.position(rank, axis) for axis in GRID_AXES}}
            for rank in range(grid.world_size)
        ],
        "nodes": [list(ranks) for ranks in grid.nodes],
        "groups": {axis: [list(group) for group in grid.groups(axis)] for axis in GRID_AXES},
        "inside": {axis: grid.inside(axis) for axis in GRID_AXES},
        "spanning": {axis: [list(group) for group in grid.links(axis)] for axis in GRID_AXES},
        "advice": advice(grid),
        "traffic": [row._asdict() for row in crossing.rows] if crossing else None,
        # Row: the node that sends, column: the node that receives; bytes per step.
        "node_table_bytes": [list(row) for row in crossing.node_table] if crossing else None,
        "between_bytes_by_order": {
            order: {axis: order_crossing.bytes_of(axis, between=True) for axis in GRID_AXES}
            for order, order_crossing in crossings.items()
        }
        or None,
        "unknown": unknown or None,
    }
    if links and crossing:
        fields["seconds_per_axis"] = crossing.seconds(*links)
    return fields


def show_grid(
    grid: RankGrid,
    crossings: dict[str, Crossing],
    unknown: str,
    links: tuple[Link, Link] | None,
    answer: Answer,
    run: str = "",
) -> None:
    """Print a grid: ranks, groups, advice, bytes by link.

    Args:
        crossings: traffic by order, that of the grid among them; empty where it is not known.
        unknown: why it is not known.
        links: inside a node and between nodes, for seconds.
        run: whose bytes they are, in words.
    """
    from dlojz.display import grid_drawing as words

    answer(words.size_sentence(grid) + "\n")
    answer(_ranks(grid))
    answer("")
    for axis in words.AXIS_ORDER:
        if axis in grid.named_axes:
            answer(_groups(grid, axis))
    answer("\n" + words.advice(grid) + "\n")
    crossing = crossings.get(grid.order)
    if crossing is None:
        answer(say(en="The bytes are not known: ", fr="Les octets ne sont pas connus : ") + unknown)
        return
    answer(phrase("bytes per step", run=run))
    answer(_table(words.crossing_titles(), words.crossing_rows(crossing), text_columns=2))
    if 1 < len(grid.nodes) <= 8:
        titles = [say(en=f"to node {node}", fr=f"vers nœud {node}") for node in range(len(grid.nodes))]
        rows = [
            (say(en=f"node {node}", fr=f"nœud {node}"), *map(format_bytes, row))
            for node, row in enumerate(crossing.node_table)
        ]
        answer("")
        answer(_table(("", *titles), rows))
    if len(crossings) > 1:
        answer("\n" + say(en="Between nodes, by order of the axes:", fr="Entre nœuds, selon l’ordre des axes :"))
        answer(_table(words.order_titles(grid), words.order_rows(crossings)))
    if links:
        answer("\n" + words.seconds_sentence(crossing.seconds(*links)))


def _ranks(grid: RankGrid) -> str:
    """List the ranks, one line per node, each with its position."""
    axes = ",".join(grid.named_axes)
    lines = [say(en=f"rank ({axes}) on each node:", fr=f"rang ({axes}) sur chaque nœud :")]
    # Only ranks that are printed get a text.
    labels = [f"{rank} ({grid.position_words(rank)})" for rank in range(min(grid.world_size, MOST_TOLD))]
    width = max(map(len, labels))
    for node, ranks in enumerate(grid.nodes):
        if ranks[0] >= MOST_TOLD:
            lines.append(say(en="  … (--json lists all ranks)", fr="  … (--json énumère tous les rangs)"))
            break
        cells = labels[ranks[0] : ranks[-1] + 1]
        name = say(en=f"node {node}", fr=f"nœud {node}")
        # Eight ranks a line; the name of the node stands before the first of its lines only.
        for start in range(0, len(cells), 8):
            line = "  ".join(cell.ljust(width) for cell in cells[start : start + 8]).rstrip()
            lines.append(f"  {name if not start else ' ' * len(name)}  {line}")
    return "\n".join(lines)


def _groups(grid: RankGrid, axis: str) -> str:
    """List the groups along an axis; those that span nodes are marked."""
    from dlojz.display.grid_drawing import title_of

    title = title_of(grid, axis)
    if grid.size(axis) == 1:
        return title
    spanning, group_texts, rank_count = set(grid.links(axis)), [], 0
    for group in grid.groups(axis):
        if rank_count + len(group) > MOST_TOLD:
            group_texts.append("…")
            break
        rank_count += len(group)
        group_texts.append("[" + " ".join(map(str, group)) + "]" + ("*" if group in spanning else ""))
    mark = say(en="   (*: across nodes)", fr="   (* : à cheval sur des nœuds)") if "*" in "".join(group_texts) else ""
    return f"{title}{mark}\n  " + " ".join(group_texts)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> Table:
    return Table(tuple(titles), tuple(map(tuple, rows)), align="l" * text_columns + "r", whole=text_columns)


OF_THE_RUN = config_flags(
    *("model", "sequence_length", "image_size", "precision", "engine", "zero", "ep", "schedule", "chunks", "partition"),
    *("micro_batch", "micro_batches", "sequence_parallel", "tensor_parts", "checkpointing"),
    model="gpt_tiny",
    micro_batches=4,
)
"""Options of a run that change what it sends."""


@verb(
    "grid",
    axes=[replace(flag, kind="value", least=1, default=None) for flag in config_flags(*GRID_AXES)],
    of_the_run=OF_THE_RUN,
    default_gpus_per_node=DEFAULT_GPUS_PER_NODE,
    orders="|".join(ORDERS),
    default_order=DEFAULT_ORDER,
    grid_axes="|".join(GRID_AXES),
)
def grid_command(args: Given, answer: Answer) -> None:
    """Print a grid of ranks, its groups, its nodes and its traffic."""
    grid, links = _grid(args), _links(args)
    check_needs(args, "axis", "png")
    if "axis" in args:
        grid.size(args["axis"])  # refuses what is no axis
    crossings, unknown = _traffic(args, grid)
    if "png" in args:
        from dlojz.display.grid_drawing import grid_figure

        grid_figure(grid, crossings.get(grid.order), args["png"], axis=args["axis"])
        tell_written(args["png"])
    if args["json"]:
        answer(document(grid, crossings, unknown, links))
    else:
        count, size = args["micro_batches"], args["micro_batch"]
        batches = say(en=f"{count} micro-batches of {size}", fr=f"{count} micro-batches de {size}")
        show_grid(grid, crossings, unknown, links, answer, f"{args['model']}, {batches}")


def _grid(args: Given) -> RankGrid:
    degrees, cp = {axis: args[axis] for axis in ("dp", "pp", "tp")}, args["cp"] or 1
    if args["processes"] is None:
        # Without a number of processes, a degree that is left out is 1; with one, `complete` works it out.
        degrees = {axis: degree or 1 for axis, degree in degrees.items()}
    else:
        degrees = dict(zip(degrees, complete(args["processes"], **degrees, cp=cp), strict=True))
    return RankGrid(**degrees, cp=cp, gpus_per_node=args["gpus_per_node"], order=args["order"])


def _links(args: Given) -> tuple[Link, Link] | None:
    """Parse the links inside a node and between nodes; None where they are not given."""
    check_needs(args, "latencies", "bandwidths")
    if "bandwidths" not in args:
        return None
    speeds = _pair("--bandwidths", args["bandwidths"], "300,25", zero=False)
    waits = _pair("--latencies", args["latencies"], "2,10", zero=True)
    # From µs and GB/s to s and bytes/s.
    inside, between = (Link(wait * 1e-6, 1e9 * speed) for wait, speed in zip(waits, speeds, strict=True))
    return inside, between


def _pair(option: str, text: str, example: str, *, zero: bool) -> tuple[float, float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if len(values) != 2 or not all(0 <= value < float("inf") and (zero or value) for value in values):
        raise phrase.refused("two positive numbers", option=option, text=text, example=example)
    return values[0], values[1]


def _traffic(args: Given, grid: RankGrid) -> tuple[dict[str, Crossing], str]:
    """Predict the traffic in every order that makes a difference, the grid's first; or why it is not known."""
    names = [flag.name for flag in OF_THE_RUN]
    fields: dict[str, Any] = {name: args[name] for name in ("model", "micro_batches")}
    fields |= {name: args[name] for name in names if name in args}
    try:
        config = config_of({**fields, **{axis: grid.size(axis) for axis in GRID_AXES}})
        return (placements(config, grid) if len(grid.nodes) > 1 else {grid.order: link_traffic(config, grid)}), ""
    except LabError as error:
        if any(name in args for name in names):  # what was asked for is refused; the default model is only an example
            raise
        return {}, str(error)
