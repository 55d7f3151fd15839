"""What crosses which link in one training step: the traffic of every rank, laid on a grid of ranks and nodes.

Layer 3. Invariant: every byte is the traffic's; the placement only decides whether it stays inside a node. So the sum
over all links is the same for every placement of the same run.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (arXiv
2104.04473), §3.2 (what each axis sends); `link_flows` for each collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import NamedTuple

from dlojz.collectives.cost import Link
from dlojz.config import RunConfig
from dlojz.footprint import Traffic
from dlojz.grid import AXES, ORDERS, Grid
from dlojz.predict.link_flows import EXPERT_GROUPS, Destinations, Flow, flows_of, plain_destinations
from dlojz.schema import LabError
from dlojz.text import say

PARTS_OF = {"pp": ("twins",), "dp": EXPERT_GROUPS}
"""Groups that are told by themselves and belong to an axis."""


class LinkTraffic(NamedTuple):
    """What one collective of one axis moves per step, over all ranks.

    Args:
        group: as in `Flow`.
        collective: its name.
        inside_bytes: sent to a rank of the same node.
        between_bytes: sent to a rank of another node.
    """

    group: str
    collective: str
    inside_bytes: int
    between_bytes: int


@dataclass(frozen=True)
class Crossing:
    """All that a step sends, on its links.

    Args:
        grid: where the ranks stand.
        flows: what each rank sends to whom.
    """

    grid: Grid
    flows: tuple[Flow, ...]

    @cached_property
    def rows(self) -> tuple[LinkTraffic, ...]:
        """Bytes per axis and collective, inside nodes and between them, in whole bytes; axes pp, dp, tp first."""
        sums: dict[tuple[str, str], list[Fraction]] = {}
        for flow in self.flows:
            sums.setdefault((flow.group, flow.collective), [Fraction(0)] * 2)[self.crosses(flow)] += flow.num_bytes
        first = [*AXES, *EXPERT_GROUPS, "twins", "control"]
        ranked = sorted(sums.items(), key=lambda item: (first.index(item[0][0]), item[0][1]))
        return tuple(LinkTraffic(*key, round(inside), round(between)) for key, (inside, between) in ranked)

    @cached_property
    def node_table(self) -> tuple[tuple[int, ...], ...]:
        """Bytes from each node (row) to each node (column); the diagonal is what stays inside."""
        count = len(self.grid.nodes)
        table = [[Fraction(0)] * count for _ in range(count)]
        for flow in self.flows:
            table[self.grid.node_of(flow.source)][self.grid.node_of(flow.target)] += flow.num_bytes
        return tuple(tuple(round(cell) for cell in row) for row in table)

    def crosses(self, flow: Flow) -> bool:
        """Whether a flow leaves its node."""
        return self.grid.node_of(flow.source) != self.grid.node_of(flow.target)

    def bytes_of(self, axis: str, *, between: bool) -> int:
        """Bytes per step of one axis on links between nodes, or on those inside, with the groups that belong to it."""
        names = (axis, *PARTS_OF.get(axis, ()))
        rows = [row for row in self.rows if row.group in names]
        return sum(row.between_bytes if between else row.inside_bytes for row in rows)

    def seconds(self, inside: Link, between: Link) -> dict[str, float]:
        """Seconds per step that each axis keeps its busiest rank's links busy: α per message and β per byte.

        A rank has a link of its own of each kind: what several ranks of a node share (a network adapter) is not in it,
        nor what compute hides. A ring is as slow as its slowest link.

        Args:
            inside: links between ranks of a node.
            between: links between nodes.
        """
        busy: dict[tuple[str, str, int], float] = {}
        for flow in self.flows:
            link = between if self.crosses(flow) else inside
            key = (flow.group, flow.collective, flow.source)
            took_s = float(flow.messages) * link.alpha_s + float(flow.num_bytes) * link.beta_s_per_byte
            busy[key] = busy.get(key, 0.0) + took_s
        worst: dict[tuple[str, str], float] = {}
        for (group, collective, _), took_s in busy.items():
            worst[group, collective] = max(took_s, worst.get((group, collective), 0.0))
        names = {part: axis for axis, parts in PARTS_OF.items() for part in parts}
        total_s: dict[str, float] = {axis: 0.0 for axis in AXES if self.grid.size(axis) > 1}
        for (group, _), took_s in worst.items():
            if (axis := names.get(group, group)) in total_s:
                total_s[axis] += took_s
        return total_s


def link_traffic(config: RunConfig, grid: Grid | None = None) -> Crossing:
    """What one step of a run sends over which link, from the predicted traffic of every rank.

    Args:
        config: the run.
        grid: where its ranks stand, with the same degrees; by default the lab's order and 4 GPUs per node.

    Raises:
        LabError: if the degrees are not those of the run, or what it sends is not predicted.
    """
    layout = config.layout
    grid = grid or Grid(layout.dp, layout.pp, layout.tp)
    if (grid.dp, grid.pp, grid.tp) != (layout.dp, layout.pp, layout.tp):
        raise LabError(
            say(
                en=f"the grid has {grid.degrees}, but the run has {layout.degrees}: give both the same degrees.",
                fr=f"la grille a {grid.degrees}, mais l’exécution a {layout.degrees} : donnez-leur les mêmes degrés.",
            )
        )
    by_place, destinations = _predicted(config)
    traffic = [by_place[(place := grid.coordinates(rank)).pp, place.tp] for rank in range(grid.world_size)]
    return crossing(traffic, grid, destinations)


def crossing(traffic: Sequence[Sequence[Traffic]], grid: Grid, destinations: Destinations | None = None) -> Crossing:
    """Traffic laid on a grid, whether predicted, measured or made up.

    Args:
        traffic: per rank of the grid, what it hands to each collective in one step.
        grid: where the ranks stand.
        destinations: to whom pipeline ranks send; by default those of a plain pipeline with boundaries of one size.

    Raises:
        LabError: if there is not one entry per rank, or a group does not have the size that the grid gives it.
    """
    if len(traffic) != grid.world_size:
        raise LabError(
            say(
                en=f"the grid has {grid.world_size} ranks, but the traffic of {len(traffic)} was received: give one "
                "entry per rank.",
                fr=f"la grille a {grid.world_size} rangs, mais le trafic de {len(traffic)} a été reçu : donnez une "
                "entrée par rang.",
            )
        )
    to = plain_destinations(grid.pp) if destinations is None else destinations
    flows = (flow for rank, told in enumerate(traffic) for each in told for flow in flows_of(each, rank, grid, to))
    return Crossing(grid, tuple(flow for flow in flows if flow.num_bytes))


def placements(config: RunConfig, grid: Grid) -> dict[str, Crossing]:
    """The same run in every order of the axes that makes a difference, the grid's own first.

    Axes of one rank count for nothing: orders that differ in their place alone are one placement.

    Args:
        config: the run.
        grid: where its ranks stand; the other placements have its nodes.
    """
    seen, found = set(), {}
    for order in (grid.order, *ORDERS):
        placed = replace(grid, order=order)
        matters = tuple(axis for axis in placed.axes if placed.size(axis) > 1)
        if matters not in seen:
            seen.add(matters)
            found[order] = link_traffic(config, placed)
    return found


@lru_cache(maxsize=32)
def _predicted(config: RunConfig) -> tuple[dict[tuple[int, int], tuple[Traffic, ...]], Destinations]:
    """Traffic by position along pp and tp (replicas send the same), and whom pipeline ranks send to."""
    from dlojz.predict.communication import predict_communication
    from dlojz.predict.shapes import model_shapes

    layout, shapes = config.layout, model_shapes(config)
    found = {
        (pp, tp): predict_communication(config, shapes, pp * layout.dp * layout.tp + tp)
        for pp in range(layout.pp)
        for tp in range(layout.tp)
    }
    return found, destinations_of(config)


def destinations_of(config: RunConfig) -> Destinations:
    """Whom each pipeline rank of a run sends to, with which share of its bytes, read off its schedule."""
    if config.layout.pp == 1:
        return [{}]
    from dlojz.pipeline.action import BACKWARD, BACKWARD_INPUT, FORWARD
    from dlojz.pipeline.cuts import schedule_of
    from dlojz.predict.parts import bounds_of
    from dlojz.predict.pipeline_communication import boundary_bytes
    from dlojz.predict.shapes import model_shapes

    schedule, at_block = schedule_of(config.layout), boundary_bytes(config)
    bounds, found = bounds_of(config, model_shapes(config)), []
    for own, order in enumerate(schedule.orders):
        sent: dict[int, int] = {}
        for element in (element for action in order for element in action.elements):
            if element.kind not in (FORWARD, BACKWARD, BACKWARD_INPUT):
                continue
            forward = element.kind == FORWARD
            after, leaving = (element.stage + 1,) * 2 if forward else (element.stage - 1, element.stage)
            if not 0 <= after < schedule.stages or (to := schedule.placement[element.pipe][after]) == own:
                continue
            sent[to] = sent.get(to, 0) + at_block[bounds[leaving]]
        total = sum(sent.values())
        found.append({to: Fraction(num_bytes, total) for to, num_bytes in sorted(sent.items())})
    return found
