"""What is said of a grid of ranks: which axis leaves its node and what to do about it, bytes by link as rows.

Layer 4. Invariant: every sentence follows from the grid and from counted bytes; figure, panel and
terminal say the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlojz.grid import AXES, DEFAULT_ORDER, Grid
from dlojz.predict.link_traffic import Crossing
from dlojz.text import say
from dlojz.units import format_bytes, format_seconds

AXIS_ORDER = ("tp", "dp", "pp")
"""As axes are listed: from the one that communicates most to the one that communicates least, as a rule."""


def axis_title(axis: str) -> str:
    """An axis by its full name; what is no axis as it is."""
    return {
        "tp": "Tensor Parallelism",
        "dp": "Data Parallelism",
        "pp": "Pipeline Parallelism",
        "twins": say(en="two copies of a stage", fr="deux copies d’un étage"),
        "control": say(en="the lab’s own bookkeeping", fr="la comptabilité du TP"),
    }.get(axis, axis)


def size_sentence(grid: Grid) -> str:
    """Ranks, degrees, nodes and order in one line."""
    nodes, world = len(grid.nodes), grid.world_size
    return say(
        en=f"{world} rank{_s(world)} = dp {grid.dp} × pp {grid.pp} × tp {grid.tp}, on {nodes} node{_s(nodes)} of "
        f"{grid.gpus_per_node} GPU{_s(grid.gpus_per_node)}, order {grid.order} (innermost first)",
        fr=f"{world} rang{_s(world)} = dp {grid.dp} × pp {grid.pp} × tp {grid.tp}, sur {nodes} nœud{_s(nodes)} de "
        f"{grid.gpus_per_node} GPU, ordre {grid.order} (du plus intérieur au plus extérieur)",
    )


def advice(grid: Grid) -> str:
    """One sentence on the placement: what leaves its node, and what would be better.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §3.2, takeaway 1: tensor parallelism up to the GPUs of a node,
    pipelines across nodes.
    """
    crossing = [axis for axis in AXIS_ORDER if not grid.inside(axis)]
    if not crossing:
        return say(
            en="No group leaves its node: nothing of a step goes over the network between nodes.",
            fr="Aucun groupe ne sort de son nœud : rien d’un pas ne passe par le réseau entre les nœuds.",
        )
    if "tp" in crossing:
        return _tensor_crosses(grid)
    told = {
        "stays": say(en="tp stays inside the nodes", fr="tp reste dans les nœuds"),
        "dp": say(
            en="dp crosses nodes with the gradients of each step, which backward can hide",
            fr="dp sort du nœud avec les gradients de chaque pas, que la passe arrière peut recouvrir",
        ),
        "pp": say(
            en="pp crosses nodes with activations and their gradients, at the boundaries of stages alone",
            fr="pp sort du nœud avec des activations et leurs gradients, aux seules frontières des étages",
        ),
    }
    clauses = [told[axis] for axis in (*(["stays"] if grid.tp > 1 else []), *crossing)]
    return say(en="; ", fr=" ; ").join(clauses) + "."


def _tensor_crosses(grid: Grid) -> str:
    """Why tensor parallelism leaves its node, and the nearest placement where it does not."""
    fits = max(size for size in range(1, min(grid.tp, grid.gpus_per_node) + 1) if grid.gpus_per_node % size == 0)
    if grid.tp > grid.gpus_per_node:
        remedy = say(
            en=f"a node has {grid.gpus_per_node} GPUs, so use tp={fits} or less, and a larger pp",
            fr=f"un nœud a {grid.gpus_per_node} GPU : prenez tp={fits} ou moins, et un pp plus grand",
        )
    elif grid.gpus_per_node % grid.tp:
        remedy = say(
            en=f"{grid.tp} does not divide the {grid.gpus_per_node} GPUs of a node, so use tp={fits}",
            fr=f"{grid.tp} ne divise pas les {grid.gpus_per_node} GPU d’un nœud : prenez tp={fits}",
        )
    else:
        remedy = say(
            en=f"put it innermost, order {DEFAULT_ORDER}",
            fr=f"mettez-le à l’intérieur, ordre {DEFAULT_ORDER}",
        )
    return say(
        en=f"tp crosses nodes: its collectives, several per layer and hardly hidden, go over the network; {remedy}.",
        fr=f"tp sort du nœud : ses collectives, plusieurs par couche et à peine recouvertes, passent par le réseau ; "
        f"{remedy}.",
    )


def cell_words(every_group: bool = True) -> str:
    """What stands in a cell of the picture, and what its lines say.

    Args:
        every_group: whether there are lines for all groups, or for some.
    """
    whose = say(en="a group", fr="un groupe") if every_group else say(en="some groups", fr="quelques groupes")
    return say(
        en=f"in each cell: rank, position (pp,dp,tp), group; lines: neighbours in {whose}, dashed from node to node",
        fr=f"dans chaque case : rang, position (pp,dp,tp), groupe ; traits : voisins dans {whose}, en tirets d’un nœud "
        "à l’autre",
    )


def crossing_rows(crossing: Crossing) -> list[tuple[str, str, str, str]]:
    """Axis, collective, bytes inside nodes, bytes between them: per step, over all ranks."""
    return [
        (row.group, row.collective, format_bytes(row.inside_bytes), format_bytes(row.between_bytes))
        for row in crossing.rows
    ]


def crossing_titles() -> tuple[str, str, str, str]:
    """The titles of `crossing_rows`."""
    return (
        say(en="axis", fr="axe"),
        say(en="collective", fr="collective"),
        say(en="inside a node", fr="dans un nœud"),
        say(en="between nodes", fr="entre nœuds"),
    )


def order_rows(placed: Mapping[str, Crossing]) -> list[tuple[str, ...]]:
    """Per order, what goes between nodes in one step: along each axis of more than one rank, and in all."""
    return [(order, *(format_bytes(value) for value in _between(one))) for order, one in placed.items()]


def order_titles(grid: Grid) -> tuple[str, ...]:
    """The titles of `order_rows`."""
    return (say(en="order", fr="ordre"), *_used(grid), say(en="in all", fr="en tout"))


def seconds_sentence(times_s: Mapping[str, float]) -> str:
    """Seconds that each axis keeps its busiest rank's links busy."""
    told = ", ".join(f"{axis} {format_seconds(times_s[axis])}" for axis in AXIS_ORDER if axis in times_s)
    return say(en=f"on the links per step: {told}", fr=f"sur les liens, par pas : {told}")


def _between(crossing: Crossing) -> list[int]:
    each = [crossing.bytes_of(axis, between=True) for axis in _used(crossing.grid)]
    return [*each, sum(each)]


def _used(grid: Grid) -> tuple[str, ...]:
    return tuple(axis for axis in AXIS_ORDER if axis in AXES and grid.size(axis) > 1)


def _s(number: int) -> str:
    """The ending of a plural: French begins it at 2, as English does for whole numbers above 0."""
    return "" if number == 1 else "s"
