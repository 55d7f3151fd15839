"""Traffic of each link between ranks and nodes, and of ways to send less.

**Links**: the predicted traffic of every rank as flows to other ranks of a grid. The placement only decides whether a
byte stays inside a node, so the sum over all links is the same for every placement. Per step and rank, for a message of
M bytes in a group of n ranks:

| collective | goes to | bytes |
|--|--|--|
| all_reduce | the next rank of the group | 2(n − 1)/n · M |
| all_gather, reduce_scatter | the next rank of the group | (n − 1)/n · M |
| broadcast | the next rank, but for the last | M |
| reduce | the rank before, but for the first | M |
| all_to_all | every other rank | M/n each |
| gather, scatter | the first rank, from the first rank | M/n each |
| send along pp | the ranks that hold the neighbouring stages | M in all |
| send along cp | the next rank of the ring | M |

A ring goes through its group in the order of the ranks, so it enters and leaves each node once, the least possible.
Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", §3 (rings);
Narayanan et al. 2021 (Megatron-LM, arXiv 2104.04473), §3.2 (what each axis sends).

**Ways to send less**: bytes of each way in the mean over the steps of a run (`predict_communication`, step by step:
first stages that send in full, steps that send nothing, all others), and their time on a link. Source: Hockney 1994,
"The communication challenge for MPP", for α + β bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from dlojz.base.language import Sentences
from dlojz.by_hand.optimizers import sent_bytes as stages
from dlojz.config.layout import GRID_AXES, ORDERS, RankGrid
from dlojz.config.optimizers import LOCAL, OPTIMIZERS
from dlojz.config.run_config import RunConfig
from dlojz.config.schedules import meets, powersgd_start
from dlojz.hardware.links import Link
from dlojz.prediction.communication import boundary_bytes, communication_by_place, predict_communication
from dlojz.prediction.shapes import FP32_BYTES, RankPart, bounds_of, model_shapes
from dlojz.results.footprint import Traffic

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

Destinations = Sequence[Mapping[int, Fraction]]
"""Per pipeline rank, the pipeline ranks to which it sends, with the share of the bytes sent."""
EXPERT_GROUPS = ("ep", "edp")
"""Groups within the data axis: ranks that shard the experts, and ranks that hold the same ones."""
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Rounds of a ring, as a multiple of n − 1 messages."""


class Flow(NamedTuple):
    """Bytes that one rank sends to another in one step, for one collective.

    Args:
        group: mesh axis (dp, tp, pp, cp), `ep` and `edp` (parts of dp, see `EXPERT_GROUPS`), `twins` (the two copies
            of a stage, along pp), `tied` (those of a tied embedding, along pp) or `control` (the lab's own).
        num_bytes: exact; a ring's chunks need not be whole bytes.
        messages: one after the other.
    """

    group: str
    collective: str
    source: int
    target: int
    num_bytes: Fraction
    messages: Fraction


def flows_of(traffic: Traffic, rank: int, grid: RankGrid, destinations: Destinations) -> Iterator[Flow]:
    """Split one line of a rank's traffic into flows; none where it is alone in its group.

    Raises:
        LabError: if the grid has no such group, or gives it another size.
    """
    group = _members(traffic.group, rank, grid, traffic.group_size)
    size, message_bytes, count = len(group), Fraction(traffic.message_bytes), traffic.count or 0
    if traffic.group_size != size:
        raise phrase.refused("group of another size", traffic=traffic, size=size)
    if size == 1:
        return
    position, share = group.index(rank), message_bytes / size

    def flow(target: int, num_bytes: Fraction, messages: int | Fraction = count) -> Flow:
        return Flow(traffic.group, traffic.collective, rank, target, num_bytes, Fraction(messages))

    if traffic.collective in _ROUNDS:
        # A ring: in each round a chunk of B / n bytes to the right neighbour.
        hops = _ROUNDS[traffic.collective] * (size - 1)
        yield flow(group[(position + 1) % size], share * hops, count * hops)
    # Every message goes to the right neighbour. `recv` is the same bytes, counted where they are sent.
    elif traffic.collective == "send" and traffic.group == "cp":
        yield flow(group[(position + 1) % size], message_bytes)
    elif traffic.collective == "send":
        for stage, part in destinations[grid.coordinates(rank).pp].items():
            yield flow(group[stage], message_bytes * part, count * part)
    elif traffic.collective == "all_to_all":
        # One of n shares stays here.
        yield from (flow(peer, share) for peer in group if peer != rank)
    # Rank 0 of the group gives to all, and takes from all.
    elif traffic.collective == "scatter" and position == 0:
        yield from (flow(peer, share) for peer in group[1:])
    elif traffic.collective == "gather" and position:
        yield flow(group[0], share)
    # A chain: each rank hands everything on to the next one, or, to reduce, to the one before.
    elif traffic.collective == "broadcast" and position < size - 1:
        yield flow(group[position + 1], message_bytes)
    elif traffic.collective == "reduce" and position:
        yield flow(group[position - 1], message_bytes)


def _members(name: str, rank: int, grid: RankGrid, told_size: int) -> tuple[int, ...]:
    """The ranks of a group, in the order in which a ring goes through them.

    Groups of experts are parts of a data-parallel one: `ep` neighbours on the axis, or ranks as far apart (`edp`).
    """
    if name in EXPERT_GROUPS:
        replicas, position = grid.group_of(rank, "dp"), grid.coordinates(rank).dp
        if name == "ep":
            start = position - position % told_size
            return replicas[start : start + told_size]
        stride = max(1, grid.dp // told_size)
        return replicas[position % stride :: stride]
    if name == "dp":  # gradients: of all samples, and of all their tokens
        return grid.replicas_of(rank)
    if name in GRID_AXES:
        return grid.group_of(rank, name)
    if name in ("twins", "tied"):
        # A bidirectional pipeline holds each stage on two ranks, as far from one end as from the other; a tied
        # embedding is on the first stage and the last.
        stages, position = grid.group_of(rank, "pp"), 0 if name == "tied" else grid.coordinates(rank).pp
        return tuple(sorted({stages[position], stages[grid.pp - 1 - position]}))
    if name == "control":
        return tuple(range(grid.world_size))
    raise phrase.refused("no group of a grid", name=name)


PARTS_OF = {"pp": ("twins", "tied"), "dp": EXPERT_GROUPS}
"""Groups that belong to an axis."""


class LinkTraffic(NamedTuple):
    """Bytes that one collective of one axis moves per step, over all ranks.

    Args:
        inside_bytes: sent to a rank of the same node.
        between_bytes: sent to a rank of another node.
    """

    group: str
    collective: str
    inside_bytes: int
    between_bytes: int


@dataclass(frozen=True)
class Crossing:
    """Traffic of a step on the links of a grid."""

    grid: RankGrid
    flows: tuple[Flow, ...]

    @cached_property
    def rows(self) -> tuple[LinkTraffic, ...]:
        """Bytes per axis and collective, inside nodes and between them, in whole bytes; axes first."""
        sums: dict[tuple[str, str], list[Fraction]] = {}
        for flow in self.flows:
            # A pair of sums: inside nodes (False), between nodes (True).
            sums.setdefault((flow.group, flow.collective), [Fraction(0)] * 2)[self.crosses(flow)] += flow.num_bytes
        group_order = [*GRID_AXES, *EXPERT_GROUPS, "twins", "tied", "control"]
        ranked = sorted(sums.items(), key=lambda item: (group_order.index(item[0][0]), item[0][1]))
        return tuple(LinkTraffic(*key, round(inside), round(between)) for key, (inside, between) in ranked)

    @cached_property
    def node_table(self) -> tuple[tuple[int, ...], ...]:
        """Bytes from each node (row) to each node (column); the diagonal stays inside."""
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

        Each rank has its own link of each kind: shared network adapters are not modelled, nor overlap with compute. A
        ring is as slow as its slowest link.

        Args:
            inside: links between ranks of a node.
            between: links between nodes.
        """
        busy: dict[tuple[str, str, int], float] = {}
        for flow in self.flows:
            # α for each message, β for each byte.
            link = between if self.crosses(flow) else inside
            key = (flow.group, flow.collective, flow.source)
            busy[key] = busy.get(key, 0.0) + link.seconds(float(flow.num_bytes), float(flow.messages))
        # Collectives of an axis follow one another; in each, all wait for the busiest rank.
        worst: dict[tuple[str, str], float] = {}
        for (group, collective, _), took_s in busy.items():
            worst[group, collective] = max(took_s, worst.get((group, collective), 0.0))
        names = {part: axis for axis, parts in PARTS_OF.items() for part in parts}
        total_s: dict[str, float] = {axis: 0.0 for axis in GRID_AXES if self.grid.communicates(axis)}
        for (group, _), took_s in worst.items():
            if (axis := names.get(group, group)) in total_s:
                total_s[axis] += took_s
        return total_s


def link_traffic(config: RunConfig, grid: RankGrid | None = None) -> Crossing:
    """Lay the predicted traffic of one step of a run on the links of a grid.

    Args:
        grid: placement of its ranks, with the same degrees; by default the lab's order and 4 GPUs per node.

    Raises:
        LabError: if the degrees are not those of the run, or what it sends is not predicted.
    """
    layout = config.layout
    grid = grid or RankGrid(layout.dp, layout.pp, layout.tp, cp=layout.cp)
    if any(grid.size(axis) != getattr(layout, axis) for axis in GRID_AXES):
        raise phrase.refused("other degrees", grid=grid, layout=layout)
    by_place, destinations = _predicted(config)
    # Along the data and context axes all ranks send the same.
    traffic = [by_place[(coordinates := grid.coordinates(rank)).pp, coordinates.tp] for rank in range(grid.world_size)]
    return crossing(traffic, grid, destinations)


def crossing(
    traffic: Sequence[Sequence[Traffic]], grid: RankGrid, destinations: Destinations | None = None
) -> Crossing:
    """Lay traffic on the links of a grid.

    Args:
        traffic: per rank of the grid, what it hands to each collective in one step.
        destinations: of pipeline ranks; by default the neighbours of a plain pipeline with boundaries of one size.

    Raises:
        LabError: if there is not one entry per rank, or a group does not have the size that the grid gives it.
    """
    if len(traffic) != grid.world_size:
        raise phrase.refused("other number of ranks", grid=grid, traffic=len(traffic))
    # Half of a middle rank's bytes go either way, all of an end rank's to its one neighbour.
    if destinations is None:
        neighbours = [
            [neighbour for neighbour in (rank - 1, rank + 1) if 0 <= neighbour < grid.pp] for rank in range(grid.pp)
        ]
        destinations = [
            {neighbour: Fraction(1, len(rank_neighbours)) for neighbour in rank_neighbours}
            for rank_neighbours in neighbours
        ]
    to = destinations
    flows = (flow for rank, lines in enumerate(traffic) for line in lines for flow in flows_of(line, rank, grid, to))
    return Crossing(grid, tuple(flow for flow in flows if flow.num_bytes))


def placements(config: RunConfig, grid: RankGrid) -> dict[str, Crossing]:
    """Lay a run's traffic on the grid in every order of the axes that makes a difference, the grid's own first.

    Orders that differ only in the place of axes of one rank are one placement.
    """
    axis_orders, crossings = set(), {}
    for order in (grid.order, *ORDERS):
        placed = replace(grid, order=order)
        # An axis of one rank moves nobody.
        matters = tuple(axis for axis in placed.axes if placed.size(axis) > 1)
        if matters not in axis_orders:
            axis_orders.add(matters)
            crossings[order] = link_traffic(config, placed)
    return crossings


@lru_cache(maxsize=32)
def _predicted(config: RunConfig) -> tuple[dict[tuple[int, int], tuple[Traffic, ...]], Destinations]:
    """Traffic by position along pp and tp (replicas send the same), and destinations of pipeline ranks."""
    return communication_by_place(config), destinations_of(config)


def destinations_of(config: RunConfig) -> Destinations:
    """Read the destinations of each pipeline rank of a run off its schedule, with their shares of the bytes."""
    if config.layout.pp == 1:
        return [{}]
    from dlojz.pipeline.schedule import BACKWARD, BACKWARD_INPUT, FORWARD
    from dlojz.pipeline.schedule_catalogue import schedule_of

    schedule, at_block = schedule_of(config.layout), boundary_bytes(config)
    bounds, shares = bounds_of(config), []
    for pipeline_rank, order in enumerate(schedule.orders):
        bytes_to: dict[int, int] = {}
        for element in (element for action in order for element in action.elements):
            if element.kind not in (FORWARD, BACKWARD, BACKWARD_INPUT):
                continue
            forward = element.kind == FORWARD
            # A boundary has the number of the block behind it: the next stage's first, or, backward, this stage's own.
            after, leaving = (element.stage + 1,) * 2 if forward else (element.stage - 1, element.stage)
            # Between two stages of one rank nothing is sent.
            if not 0 <= after < schedule.stages or (to := schedule.placement[element.pipe][after]) == pipeline_rank:
                continue
            bytes_to[to] = bytes_to.get(to, 0) + at_block[bounds[leaving]]
        total = sum(bytes_to.values())
        shares.append({to: Fraction(num_bytes, total) for to, num_bytes in sorted(bytes_to.items())})
    return shares


ADAM_RATE: Final = 1e-3
LAMB_RATE: Final = 1e-2
SGD_RATE: Final = 0.5
"""Learning rates of the board, one per inner optimizer."""
BY_HAND: Final[Mapping[str, Any]] = {"engine": "by_hand"}
WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "AdamW": {},
    "AdamW, fp16": {"gradient_compression": "fp16"},
    "AdamW, bf16": {"gradient_compression": "bf16"},
    "AdamW, PowerSGD-4": {"gradient_compression": "powersgd", "powersgd_rank": 4},
    "AdamW, PowerSGD-1": {"gradient_compression": "powersgd"},
    "1-bit Adam": {**BY_HAND, "optimizer": "one_bit_adam"},
    "0/1 Adam": {**BY_HAND, "optimizer": "zero_one_adam"},
    "DiLoCo": {**BY_HAND, "optimizer": "diloco"},
    "LAMB": {"optimizer": "lamb", "learning_rate": LAMB_RATE},
    "1-bit LAMB": {**BY_HAND, "optimizer": "one_bit_lamb", "learning_rate": LAMB_RATE},
    "SGD": {"optimizer": "sgd", "learning_rate": SGD_RATE},
    "local SGD": {**BY_HAND, "optimizer": "local_sgd", "learning_rate": SGD_RATE},
}
"""Fields by which the ways differ, by name; a way that sends everything comes before those compared with it."""


@dataclass(frozen=True)
class Reduction:
    """One way to average over replicas.

    Attributes:
        name: e.g. `1-bit Adam`.
        against: name of its baseline, which sends everything; its own name if it is one.
        sent_bytes: what one rank sends, in the mean of all steps, predicted.
        steady_bytes: the same after the first stage: the limit of a long run.
        rounds: messages that wait for each other, in the mean of all steps.
        counted_bytes: the bytes counted by a probe; None where nothing was run.
        step_s: seconds of a step, in the mean of all kinds of steps, measured; None where nothing was run.
        losses: of each seed, the mean loss of the last tenth of the steps.
    """

    name: str
    against: str
    sent_bytes: float
    steady_bytes: float
    rounds: float
    counted_bytes: float | None = None
    step_s: float | None = None
    losses: tuple[float, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether it sends everything, in fp32."""
        return self.name == self.against

    def link_s(self, latency_s: float, bytes_per_s: float) -> float:
        """Seconds of a step's messages over a link without overlap: α rounds + β bytes.

        Args:
            latency_s: α, before the first byte of a message.
            bytes_per_s: 1/β, in one direction.
        """
        took_s: float = Link(latency_s, bytes_per_s).seconds(self.sent_bytes, self.rounds)
        return took_s


def gaps_percent(reduction: Reduction, against: Reduction) -> tuple[float, ...]:
    """Compute by how many percent each seed's loss exceeds that of the same seed in another way."""
    return tuple(
        100 * (loss / baseline_loss - 1) for loss, baseline_loss in zip(reduction.losses, against.losses, strict=True)
    )


def ways(steps: int, **fields: Any) -> dict[str, RunConfig]:
    """Build the runs of the board, by name; `fields` of `RunConfig` and `Layout` are common, with `dp` at least 2.

    Raises:
        LabError: if the fields do not fit one of the ways.
    """
    shared = {"learning_rate": ADAM_RATE, **fields, "steps": steps}
    return {name: RunConfig.of(**{**shared, **overrides}) for name, overrides in WAYS.items()}


def traffic_of_step(config: RunConfig, step: int) -> tuple[Traffic, ...]:
    """Predict the traffic of one rank along the data axis in a step, from 0, without pipeline or tensor axis."""
    kind = _kind(config, step)
    if config.layout.dp == 1 or kind == "nothing":
        return ()
    if kind == "in full":
        # Before compression begins, all gradients leave as one fp32 message.
        whole_bytes = FP32_BYTES * model_shapes(config).num_parameters
        dp = config.layout.dp
        return (Traffic(collective="all_reduce", group="dp", group_size=dp, count=1, message_bytes=whole_bytes),)
    return tuple(traffic for traffic in predict_communication(RankPart(config)) if traffic.group == "dp")


def _kind(config: RunConfig, step: int) -> str:
    """Whether a step sends everything, nothing, or the steady traffic of its way."""
    full_steps = config.warmup_steps or 0
    if config.layout.gradient_compression == "powersgd":
        # PowerSGD's hook counts its own first steps, whatever the optimizer warms up.
        full_steps = powersgd_start(config.steps)
    in_full, silent = step < full_steps, False
    if config.optimizer == "zero_one_adam":
        in_full = step in stages.variance_steps(full_steps)
        silent = not stages.synchronises(step, full_steps, config.steps)
    elif config.optimizer in LOCAL:
        silent = not meets(step, config.local_steps or 1, full_steps, config.steps)
    return "in full" if in_full else "nothing" if silent else "steady"


def rounds_of(traffic: Traffic) -> int:
    """Count the messages that wait for each other when a collective runs as a ring (all-to-all: in pairs)."""
    # An all-reduce is a reduce-scatter, n − 1 rounds, then an all-gather, n − 1 more.
    once = traffic.group_size - 1
    return (2 * once if traffic.collective == "all_reduce" else once) * (traffic.count or 1)


def predicted_way(name: str, config: RunConfig) -> Reduction:
    """Predict a way's traffic: the mean over all steps of the run."""
    kinds = [_kind(config, step) for step in range(config.steps)]
    traffic_of_kind = {kind: traffic_of_step(config, kinds.index(kind)) for kind in set(kinds)}
    step_traffic = [traffic_of_kind[kind] for kind in kinds]
    # From the step after the last full one on.
    later = step_traffic[max((step + 1 for step, kind in enumerate(kinds) if kind == "in full"), default=0) :]
    return Reduction(
        name,
        OPTIMIZERS[OPTIMIZERS[config.optimizer].baseline or config.optimizer].label,
        sent_bytes=sum(traffic.sent_bytes for step in step_traffic for traffic in step) / config.steps,
        steady_bytes=sum(traffic.sent_bytes for step in later for traffic in step) / len(later),
        rounds=sum(rounds_of(traffic) for step in step_traffic for traffic in step) / config.steps,
    )
