"""Figures and tables of lab 07: grids, groups and placements, and what crosses which link.

Layer 6 (labs), on `dlojz.viz`. Invariant: what the student's own function gives stands beside what the package finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from dlojz.config import RunConfig
from dlojz.footprint import Traffic
from dlojz.grid import DEFAULT_ORDER, Grid
from dlojz.labs.hybrid_answers import read_groups, read_triple
from dlojz.labs.hybrid_link_exercises import ROUNDS, BetweenNodes
from dlojz.labs.pipeline_figures import Sheet, or_to_do, percent, pictured
from dlojz.predict.communication import predict_communication
from dlojz.predict.link_traffic import link_traffic
from dlojz.predict.parts import part_of
from dlojz.predict.shapes import model_shapes
from dlojz.predict.states import predict_states
from dlojz.text import say
from dlojz.units import format_bytes
from dlojz.viz.canvas import LabFigure
from dlojz.viz.grid_figure import grid_figure

AXES = ("tp", "dp", "pp")


@pictured
def drawn(dp: int, pp: int, tp: int, gpus_per_node: int, axis: str | None = None) -> LabFigure:
    """A grid of ranks on its nodes, coloured by the groups of each axis, or of one."""
    return grid_figure(Grid(dp=dp, pp=pp, tp=tp, gpus_per_node=gpus_per_node), axis=axis)


@pictured
def placed(config: RunConfig, gpus_per_node: int, order: str) -> LabFigure:
    """A run laid on nodes in an order of the axes, with what crosses which link."""
    grid = _grid(config, gpus_per_node, order)
    return grid_figure(grid, link_traffic(config, grid), axis="tp")


@or_to_do
def places(
    place_of: Callable[[int, int, int, int], Sequence[int]], dp: int, pp: int, tp: int, ranks: Iterable[int]
) -> Sheet:
    """Where the student's function puts some ranks, and which rank the formula gives there."""
    rows = []
    for rank in ranks:
        stage, replica, piece = read_triple(place_of(rank, dp, pp, tp), "(pp_rank, dp_rank, tp_rank)")
        rows.append((*map(str, (rank, stage, replica, piece)), str((stage * dp + replica) * tp + piece)))
    head = (
        say(en="rank", fr="rang"),
        "pp_rank",
        "dp_rank",
        "tp_rank",
        "(pp_rank · dp + dp_rank) · tp + tp_rank",
    )
    return Sheet(head, tuple(rows))


@or_to_do
def groups(groups_of: Callable[[str, int, int, int], Any], dp: int, pp: int, tp: int) -> Sheet:
    """The groups that the student's function gives along each axis."""
    rows = []
    for axis in AXES:
        found = read_groups(groups_of(axis, dp, pp, tp), dp * pp * tp)
        told = "  ".join("[" + " ".join(map(str, group)) + "]" for group in found)
        rows.append((axis, str(len(found)), told))
    return Sheet((say(en="axis", fr="axe"), say(en="groups", fr="groupes"), say(en="ranks", fr="rangs")), tuple(rows))


@or_to_do
def crossings(between_nodes: BetweenNodes, config: RunConfig, gpus_per_node: int, orders: Sequence[str]) -> Sheet:
    """Bytes per step between nodes along tp and dp, by the student's function and by the package, in several orders."""
    rows = []
    for order in orders:
        grid = _grid(config, gpus_per_node, order)
        crossing = link_traffic(config, grid)
        for axis in AXES:
            theirs = crossing.bytes_of(axis, between=True)
            own = "" if axis == "pp" else format_bytes(_own(between_nodes, config, grid, axis))
            rows.append((order, axis, own, format_bytes(theirs), format_bytes(crossing.bytes_of(axis, between=False))))
    head = (
        say(en="order (innermost first)", fr="ordre (du plus intérieur)"),
        say(en="axis", fr="axe"),
        say(en="between nodes: yours", fr="entre nœuds : chez vous"),
        say(en="the package", fr="le paquet"),
        say(en="inside nodes", fr="dans les nœuds"),
    )
    return Sheet(head, tuple(rows))


def between_bytes(config: RunConfig, gpus_per_node: int, order: str) -> int:
    """Bytes per step between nodes, over all axes, with the axes in this order."""
    crossing = link_traffic(config, _grid(config, gpus_per_node, order))
    return sum(crossing.bytes_of(axis, between=True) for axis in AXES)


def _grid(config: RunConfig, gpus_per_node: int, order: str) -> Grid:
    layout = config.layout
    return Grid(dp=layout.dp, pp=layout.pp, tp=layout.tp, gpus_per_node=gpus_per_node, order=order)


def _own(between_nodes: BetweenNodes, config: RunConfig, grid: Grid, axis: str) -> float:
    """The student's sum over the groups of an axis: ranks of a group hand the same messages to its collectives."""
    return sum(
        between_nodes(told.collective, told.message_bytes, group, grid.gpus_per_node)
        for group in grid.groups(axis)
        for told in _told(config, grid, group[0])
        if told.group == axis and told.collective in ROUNDS and grid.size(axis) > 1
    )


@lru_cache(maxsize=64)
def _told(config: RunConfig, grid: Grid, rank: int) -> tuple[Traffic, ...]:
    """Predicted traffic of a rank, wherever the order of the axes has put it."""
    place, layout = grid.coordinates(rank), config.layout
    own = Grid(dp=layout.dp, pp=layout.pp, tp=layout.tp).rank_of(pp=place.pp, tp=place.tp)
    return tuple(predict_communication(config, model_shapes(config), own))


def degrees(
    fields: Mapping[str, Any], gpus_per_node: int, choices: Sequence[tuple[int, int, int]], samples: int
) -> Sheet:
    """One model in several degrees (dp, pp, tp): states of the fullest rank, bubble, bytes of a step per rank and link.

    Args:
        fields: of the run, without its degrees and micro-batches.
        gpus_per_node: of the cluster.
        choices: degrees that make the same number of ranks.
        samples: of a step, which the replicas share out in micro-batches of one.
    """
    rows = []
    for dp, pp, tp in choices:
        micro_batches = samples // dp
        config = RunConfig.of(**fields, dp=dp, pp=pp, tp=tp, micro_batch=1, micro_batches=micro_batches)
        crossing = link_traffic(config, _grid(config, gpus_per_node, DEFAULT_ORDER))
        inside, between = (sum(crossing.bytes_of(axis, between=far) for axis in AXES) for far in (False, True))
        # Replicas and slices hold about the same: the first rank of each stage is asked.
        stages = range(0, dp * pp * tp, dp * tp)
        parts = (part_of(config, model_shapes(config), rank) for rank in stages)
        states = max(predict_states(config, part).states_bytes for part in parts)
        rows.append(
            (
                f"{dp} × {pp} × {tp}",
                format_bytes(states),
                percent((pp - 1) / (micro_batches + pp - 1)),
                format_bytes(inside / (dp * pp * tp)),
                format_bytes(between / (dp * pp * tp)),
            )
        )
    head = (
        "dp × pp × tp",
        say(en="states of the fullest rank", fr="états du rang le plus chargé"),
        say(en="bubble", fr="bulle"),
        say(en="sent inside, per rank", fr="envoyé dans le nœud, par rang"),
        say(en="between nodes, per rank", fr="entre nœuds, par rang"),
    )
    return Sheet(head, tuple(rows))
