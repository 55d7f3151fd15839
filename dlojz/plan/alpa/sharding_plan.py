"""A sharding of every tensor of a graph: what it communicates, what it holds, and how it shows itself.

Layer 4. Invariant: the cost is the sum of the communications listed. No torch; matplotlib only to draw.

Source of the last step, an all-reduce of gradients as reduce-scatter and all-gather with the update between them:
Zheng et al. 2022 (Alpa, OSDI 22), §4.2, post-ILP optimization; Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), §5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlojz.plan.alpa.graph import Graph
from dlojz.plan.alpa.liveness import kept_for_backward, peak
from dlojz.plan.alpa.mesh import DeviceMesh
from dlojz.plan.alpa.operators import Algorithm
from dlojz.plan.alpa.resharding import resharding_moves
from dlojz.plan.alpa.sharding_spec import ShardingSpec
from dlojz.plan.alpa.showing import ShownAsTable, number
from dlojz.text import say
from dlojz.units import format_bytes

if TYPE_CHECKING:
    from dlojz.viz.canvas import LabFigure


@dataclass(frozen=True)
class Communication:
    """One collective of a plan.

    Args:
        tensor: what is communicated.
        reader: the operator that wants it so; empty if it belongs to the operator that makes the tensor.
        collective: `all_reduce`, `all_gather` or `all_to_all`.
        axes: of the mesh, along which groups of devices exchange.
        message_bytes: the whole message of one group.
        cost: per micro-batch, in the unit of the mesh.
        per_step: once per step and not once per micro-batch.
    """

    tensor: str
    reader: str
    collective: str
    axes: tuple[int, ...]
    message_bytes: float
    cost: float
    per_step: bool


@dataclass(frozen=True)
class ShardingPlan(ShownAsTable):
    """A choice for every tensor.

    Args:
        graph: what is computed.
        mesh: on what.
        algorithms: of each tensor how it is made.
        communications: all collectives of one micro-batch and of the update.
        micro_batches: in a step.
        memory_bytes: limit of a device; None without one.
    """

    graph: Graph
    mesh: DeviceMesh
    algorithms: Mapping[str, Algorithm]
    communications: tuple[Communication, ...]
    micro_batches: int
    memory_bytes: float | None

    @classmethod
    def of(
        cls,
        graph: Graph,
        mesh: DeviceMesh,
        algorithms: Mapping[str, Algorithm],
        *,
        micro_batches: int = 1,
        memory_bytes: float | None = None,
    ) -> ShardingPlan:
        """The plan that these algorithms make."""
        found = tuple(_communications(graph, mesh, algorithms, micro_batches))
        return cls(graph, mesh, algorithms, found, micro_batches, memory_bytes)

    @property
    def cost(self) -> float:
        """Of all communications, per micro-batch, in the unit of the mesh."""
        return sum(one.cost for one in self.communications)

    @property
    def specs(self) -> dict[str, ShardingSpec]:
        """How each tensor lies."""
        return {name: one.output for name, one in self.algorithms.items()}

    @property
    def peak_bytes(self) -> float:
        """Bytes of one device when most is in memory."""
        return peak(self.graph, self.specs, self.mesh)[0]

    @property
    def state_bytes(self) -> float:
        """Weights, their gradients and the optimizer's states on one device."""
        return sum(
            spec.tile_bytes(self.graph.nodes[name].tensor_bytes, self.mesh) * (1 + self.graph.nodes[name].states)
            for name, spec in self.specs.items()
            if self.graph.nodes[name].kind in ("weight", "gradient")
        )

    @property
    def device_flops(self) -> float:
        """Operations of one device in one micro-batch; what an axis does not share out, all devices along it repeat."""
        total = 0.0
        for name, algorithm in self.algorithms.items():
            operator = self.graph.nodes[name].operator
            if operator is not None:
                used = {axis for spec in (algorithm.output, *algorithm.inputs) for axis in spec.axes}
                total += operator.flops / self.mesh.size(tuple(used))
        return total

    @property
    def kept_bytes(self) -> float:
        """Activations that one device keeps for the backward pass of one micro-batch."""
        return kept_for_backward(self.graph, self.specs, self.mesh)

    def zero_pairs(self) -> tuple[Communication, ...]:
        """The all-reduces of gradients that may become a reduce-scatter and an all-gather of the same bytes.

        Each device then updates one n-th of that weight and holds one n-th of the optimizer's states: ZeRO.
        """
        weights = dict(self.graph.ties)
        return tuple(
            one
            for one in self.communications
            if one.collective == "all_reduce"
            and one.tensor in weights
            and any(size % self.mesh.size(one.axes) == 0 for size in self.graph.nodes[one.tensor].shape)
        )

    def zero_saves_bytes(self) -> float:
        """States of the optimizer that one device need not hold if the gradients go that way."""
        nodes, weights = self.graph.nodes, dict(self.graph.ties)
        return sum(
            nodes[weights[one.tensor]].states
            * self.specs[weights[one.tensor]].tile_bytes(nodes[one.tensor].tensor_bytes, self.mesh)
            * (1 - 1 / self.mesh.size(one.axes))
            for one in self.zero_pairs()
        )

    def title(self) -> str:
        """What was planned, and what it costs."""
        rows, columns = self.mesh.shape
        cost, memory = number(self.cost), format_bytes(self.peak_bytes)
        return say(
            en=f"Sharding on {rows} × {columns} devices: communication {cost} per micro-batch, "
            f"{memory} per device at most",
            fr=f"Découpe sur {rows} × {columns} périphériques : communication {cost} par "
            f"micro-batch, {memory} par périphérique au plus",
        )

    def columns(self) -> tuple[str, ...]:
        """Headings of the table."""
        return (
            say(en="tensor", fr="tenseur"),
            say(en="operator", fr="opérateur"),
            say(en="shared out", fr="réparti"),
            say(en="lies as", fr="découpe"),
            say(en="communication", fr="communication"),
            say(en="cost", fr="coût"),
        )

    def rows(self) -> list[tuple[str, ...]]:
        """One line per tensor, in the order of computation."""
        lines: list[tuple[str, ...]] = []
        for name, algorithm in self.algorithms.items():
            node = self.graph.nodes[name]
            own = [one for one in self.communications if one.tensor == name]
            told = "; ".join(
                f"{one.collective}({format_bytes(one.message_bytes)}, {'+'.join(map(str, one.axes))})"
                + (f" → {one.reader}" if one.reader else "")
                for one in own
            )
            cost = sum(one.cost for one in own)
            equation = node.operator.equation if node.operator else node.kind
            lines.append((name, equation, algorithm.name, str(algorithm.output), told, number(cost) if own else ""))
        return lines

    def figure(self) -> LabFigure:
        """The part of each tensor that each device holds."""
        from dlojz.viz.alpa_figure import sharding_figure

        return sharding_figure(self)


def _communications(
    graph: Graph, mesh: DeviceMesh, algorithms: Mapping[str, Algorithm], micro_batches: int
) -> Iterator[Communication]:
    for name, one in algorithms.items():
        node = graph.nodes[name]
        per_step = node.kind == "gradient"
        share = micro_batches if per_step else 1
        if one.reduced_axes:
            yield Communication(name, "", "all_reduce", one.reduced_axes, one.message_bytes, one.cost / share, per_step)
        wanted = [(reader.name, algorithms[reader.name].inputs[place]) for reader, place in graph.readers(name)]
        wanted += [(weight, algorithms[weight].output) for gradient, weight in graph.ties if gradient == name]
        for reader, spec in wanted:
            for move in resharding_moves(one.output, spec, node.tensor_bytes, mesh):
                if move.collective != "slice":
                    yield Communication(
                        name, reader, move.collective, (move.axis,), move.message_bytes, move.cost / share, per_step
                    )
