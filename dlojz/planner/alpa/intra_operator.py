"""Intra-operator planning: shardings of all tensors by an integer linear programme.

Which tensors are in memory at the same time, and how much that makes on one device.

Inputs, weights (with the optimizer's states) and gradients of weights stay during the whole step; any other tensor
lives from the operator that makes it to the last one that reads it. No torch.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.2, for a memory limit in the ILP; its code puts one row per moment, the
sum over the tensors alive then.

A sharding of every tensor of a graph: what it communicates, what it holds, and how it shows itself.

The cost is the sum of the communications listed. No torch.

The inner level: how to share out every operator of a graph on one mesh, so that communication is least.

Each tensor v has a one-hot vector s_v over the k_v algorithms of its operator, c_v their communication, and R_vu the
resharding cost of each pair of choices of a tensor and its reader:

    minimise   Σ_v s_v·c_v + Σ_(v,u) s_vᵀ R_vu s_u

The products are made linear by a matrix e_vu per edge that stands for s_v s_uᵀ: its row sums are s_v and its column
sums s_u. As s is whole, e then is too, and only s need be declared so. A limit of memory adds one row per moment.

The cost told is summed again from the choices, not read off the solver. No torch.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.2, equation 1; solver: `scipy.optimize.milp` (HiGHS).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from dlojz.base.errors import LabError
from dlojz.base.language import format_bytes, say, significant
from dlojz.planner.alpa.graph import PAPER, Node, OperatorGraph, OperatorSharding, ShardingSpace, ShownAsTable
from dlojz.planner.alpa.mesh import DeviceMesh, ShardingSpec, all_specs, resharding_matrix, resharding_moves


def alive(graph: OperatorGraph) -> dict[str, frozenset[str]]:
    """For the moment at which each operator runs, the tensors in memory, its result included.

    Moments whose tensors are all alive at another moment too are left out: their sum can never be the largest.
    """
    names = list(graph.nodes)
    number = {name: index for index, name in enumerate(names)}
    last = dict(number)
    for node in graph.nodes.values():
        for operand in node.operands:
            last[operand] = max(last[operand], number[node.name])
    staying = {node.name for node in graph.nodes.values() if node.stays}
    sets = {
        name: frozenset(staying | {other for other in names if number[other] <= number[name] <= last[other]})
        for name in names
        if graph.nodes[name].operator is not None
    }
    return {
        name: own
        for name, own in sets.items()
        if not any(own < other or (own == other and number[later] > number[name]) for later, other in sets.items())
    }


def device_bytes(graph: OperatorGraph, name: str, spec: ShardingSpec, mesh: DeviceMesh) -> float:
    """What one device holds of a tensor, and of the optimizer's states beside it."""
    node = graph.nodes[name]
    return spec.tile_bytes(node.tensor_bytes, mesh) * (1.0 + node.states)


def peak(graph: OperatorGraph, specs: Mapping[str, ShardingSpec], mesh: DeviceMesh) -> tuple[float, str]:
    """Bytes of one device when most is in memory, and the tensor that is being made then."""
    held = {name: device_bytes(graph, name, spec, mesh) for name, spec in specs.items()}
    totals = {name: sum(held[other] for other in own) for name, own in alive(graph).items()}
    if not totals:
        return sum(held.values()), next(iter(graph.nodes), "")
    worst = max(totals, key=lambda name: totals[name])
    return totals[worst], worst


@dataclass(frozen=True)
class PlannedCollective:
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

    graph: OperatorGraph
    mesh: DeviceMesh
    algorithms: Mapping[str, OperatorSharding]
    communications: tuple[PlannedCollective, ...]
    micro_batches: int
    memory_bytes: float | None

    @classmethod
    def of(
        cls,
        graph: OperatorGraph,
        mesh: DeviceMesh,
        algorithms: Mapping[str, OperatorSharding],
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

    def title(self) -> str:
        """What was planned, and what it costs."""
        rows, columns = self.mesh.shape
        cost, memory = significant(self.cost, 6, grouped=True), format_bytes(self.peak_bytes)
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
            total = significant(cost, 6, grouped=True) if own else ""
            lines.append((name, equation, algorithm.name, str(algorithm.output), told, total))
        return lines


def _communications(
    graph: OperatorGraph, mesh: DeviceMesh, algorithms: Mapping[str, OperatorSharding], micro_batches: int
) -> Iterator[PlannedCollective]:
    for name, one in algorithms.items():
        node = graph.nodes[name]
        per_step = node.kind == "gradient"
        share = micro_batches if per_step else 1
        if one.reduced_axes:
            yield PlannedCollective(name, "", "all_reduce", one.reduced_axes, one.message_bytes, one.cost / share,
                per_step)
        wanted = [(reader.name, algorithms[reader.name].inputs[place]) for reader, place in graph.readers(name)]
        wanted += [(weight, algorithms[weight].output) for gradient, weight in graph.ties if gradient == name]
        for reader, spec in wanted:
            for move in resharding_moves(one.output, spec, node.tensor_bytes, mesh):
                if move.collective != "slice":
                    yield PlannedCollective(
                        name, reader, move.collective, (move.axis,), move.message_bytes, move.cost / share, per_step
                    )


Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Edge:
    """A tensor and who reads it, with the resharding cost of every pair of choices."""

    maker: str
    reader: str
    matrix: Matrix


@dataclass(frozen=True)
class Choices:
    """All that the ILP chooses among.

    Args:
        options: of each tensor the ways to make it.
        costs: of each tensor the communication of these ways, per micro-batch, in the unit of the mesh.
        edges: who reads what.
    """

    options: dict[str, tuple[OperatorSharding, ...]]
    costs: dict[str, Matrix]
    edges: tuple[Edge, ...]


def choices(graph: OperatorGraph, mesh: DeviceMesh, *, micro_batches: int = 1, space: ShardingSpace = PAPER) -> Choices:
    """List what can be chosen for each tensor of a graph, and what it costs.

    Args:
        graph: its operators.
        mesh: the devices.
        micro_batches: gradients of weights are communicated once for so many; their cost is divided by it.
        space: which algorithms may be chosen.

    Raises:
        LabError: less than one micro-batch, or an operator that cannot be shared out.
    """
    if micro_batches < 1:
        raise LabError(
            say(
                en=f"a step has at least one micro-batch, but micro_batches={micro_batches!r} was received: use 1.",
                fr=f"un pas a au moins un micro-batch, mais micro_batches={micro_batches!r} a été reçu : prenez 1.",
            )
        )
    options = {node.name: _options(node, mesh, space) for node in graph.nodes.values()}
    costs = {
        name: np.array([one.cost for one in some]) / (micro_batches if graph.nodes[name].kind == "gradient" else 1)
        for name, some in options.items()
    }
    edges = []
    for node in graph.nodes.values():
        made = [one.output for one in options[node.name]]
        for reader, place in graph.readers(node.name):
            wanted = [one.inputs[place] for one in options[reader.name]]
            # Gradients of weights are summed over the micro-batches before anyone reads them.
            share = micro_batches if node.kind == "gradient" else 1
            matrix = resharding_matrix(made, wanted, node.tensor_bytes, mesh) / share
            edges.append(Edge(node.name, reader.name, matrix))
    for gradient, weight in graph.ties:
        made, wanted = ([one.output for one in options[name]] for name in (gradient, weight))
        matrix = resharding_matrix(made, wanted, graph.nodes[weight].tensor_bytes, mesh) / micro_batches
        edges.append(Edge(gradient, weight, matrix))
    return Choices(options, costs, tuple(edges))


def _options(node: Node, mesh: DeviceMesh, space: ShardingSpace) -> tuple[OperatorSharding, ...]:
    if node.operator is None:
        dims = [dim for dim in range(len(node.shape)) if dim not in node.whole]
        specs = (node.spec,) if node.spec else all_specs(node.shape, mesh, dims, mixed=space.mixed)
        return tuple(OperatorSharding("", (), spec, (), 0.0, 0.0) for spec in specs)
    found = node.operator.algorithms(mesh, space)
    if node.spec is None:
        return found
    chosen = tuple(one for one in found if one.output == node.spec)
    if not chosen:
        raise LabError(
            say(
                en=f"{node.name!r} should lie as {node.spec}, which its shape {node.shape} does not allow on a mesh of "
                f"{mesh.shape[0]} × {mesh.shape[1]}: use sizes that divide, or another mesh.",
                fr=f"{node.name!r} devrait être découpé en {node.spec}, ce que sa forme {node.shape} ne permet pas sur "
                f"un maillage de {mesh.shape[0]} × {mesh.shape[1]} : prenez des tailles divisibles, ou un autre "
                "maillage.",
            )
        )
    return chosen


def shard(
    graph: OperatorGraph,
    mesh: DeviceMesh,
    *,
    memory_bytes: float | None = None,
    micro_batches: int = 1,
    space: ShardingSpace = PAPER,
) -> ShardingPlan:
    """Find the sharding of every tensor that communicates least.

    Args:
        graph: operators of a training step, for one micro-batch.
        mesh: the devices.
        memory_bytes: limit of each device; none by default.
        micro_batches: accumulated before the update.
        space: which algorithms may be chosen; by default all of the paper's.

    Returns:
        The optimum (no gap is left), with its cost per micro-batch.

    Raises:
        LabError: nothing fits in the memory; the sentence says how much is missing.
    """
    found = choices(graph, mesh, micro_batches=micro_batches, space=space)
    picked = solve(found, graph, mesh, memory_bytes)
    if picked is None:
        needed = smallest_peak(found, graph, mesh)
        missing = needed - (memory_bytes or 0.0)
        available, lacking, total = format_bytes(memory_bytes), format_bytes(missing), format_bytes(needed)
        raise LabError(
            say(
                en=f"this graph does not fit on a mesh of {mesh.shape[0]} × {mesh.shape[1]}: however it is shared out, "
                f"a device needs {total} and has {available}, so {lacking} are missing: use more devices or a smaller "
                "micro-batch.",
                fr=f"ce graphe ne tient pas sur un maillage de {mesh.shape[0]} × {mesh.shape[1]} : quelle que soit la "
                f"découpe, un périphérique a besoin de {total} et en a {available}, il manque donc {lacking} : prenez "
                "plus de périphériques ou un micro-batch plus petit.",
            )
        )
    algorithms = {name: found.options[name][index] for name, index in picked.items()}
    return ShardingPlan.of(graph, mesh, algorithms, micro_batches=micro_batches, memory_bytes=memory_bytes)


def solve(
    found: Choices, graph: OperatorGraph, mesh: DeviceMesh, memory_bytes: float | None = None
) -> dict[str, int] | None:
    """The best option of each tensor, by integer linear programming; None if memory allows none."""
    problem = _Problem(found)
    if memory_bytes is not None:
        for row in _memory_rows(found, graph, mesh).values():
            # In units of the limit: the solver's tolerances are absolute.
            problem.at_most(problem.over(row, 1.0 / max(memory_bytes, 1.0)), 1.0 if memory_bytes > 0 else 0.0)
    largest = max((float(np.max(cost)) for cost in problem.costs if cost.size), default=0.0)
    return problem.minimum(np.concatenate(problem.costs) * (1e3 / largest if largest else 1.0))


def smallest_peak(found: Choices, graph: OperatorGraph, mesh: DeviceMesh) -> float:
    """Bytes that a device needs at least, whatever the sharding: the same ILP with the peak as its objective."""
    problem = _Problem(found)
    rows = _memory_rows(found, graph, mesh)
    scale = max((sum(float(row.max()) for row in some.values()) for some in rows.values()), default=1.0)
    peak = problem.variable()
    for row in rows.values():
        problem.at_most([*problem.over(row, 1.0 / scale), (peak, -1.0)], 0.0)
    objective = np.zeros(problem.size)
    objective[peak] = 1.0
    picked = problem.minimum(objective)
    if picked is None:
        raise AssertionError("without a limit there is always a sharding")
    return max(sum(float(row[picked[name]]) for name, row in some.items()) for some in rows.values())


def _memory_rows(found: Choices, graph: OperatorGraph, mesh: DeviceMesh) -> dict[str, dict[str, Matrix]]:
    """For each moment, the bytes that each option of each tensor alive then takes of a device."""
    held = {
        name: np.array([device_bytes(graph, name, one.output, mesh) for one in some])
        for name, some in found.options.items()
    }
    return {moment: {name: held[name] for name in own} for moment, own in alive(graph).items()}


class _Problem:
    """Variables and rows of the ILP: first all s, then all e, then what else is asked for."""

    def __init__(self, found: Choices) -> None:
        self.costs: list[Matrix] = []
        self.start: dict[str, int] = {}
        self.size = 0
        self.rows: list[tuple[list[tuple[int, float]], float, float]] = []
        for name, cost in found.costs.items():
            self.start[name] = self._reserve(cost)
        self.num_whole = self.size
        self.options = {name: len(cost) for name, cost in found.costs.items()}
        for name, count in self.options.items():
            self.rows.append(([(self.start[name] + index, 1.0) for index in range(count)], 1.0, 1.0))
        for edge in found.edges:
            if edge.matrix.any():  # where resharding is free whatever is chosen, there is nothing to decide
                self._edge(edge)

    def _edge(self, edge: Edge) -> None:
        rows, columns = edge.matrix.shape
        e = self._reserve(edge.matrix.ravel()) + np.arange(rows * columns).reshape(rows, columns)
        for ends, name in ((e, edge.maker), (e.T, edge.reader)):
            for index, variables in enumerate(ends):
                row = [(int(variable), 1.0) for variable in variables]
                self.rows.append(([*row, (self.start[name] + index, -1.0)], 0.0, 0.0))

    def _reserve(self, costs: Matrix) -> int:
        self.costs.append(costs)
        self.size += len(costs)
        return self.size - len(costs)

    def variable(self) -> int:
        """A further variable, not negative, that costs nothing."""
        return self._reserve(np.zeros(1))

    def over(self, row: dict[str, Matrix], factor: float) -> list[tuple[int, float]]:
        """Coefficients of Σ s_v·m_v × factor."""
        return [
            (self.start[name] + index, float(value) * factor)
            for name, values in row.items()
            for index, value in enumerate(values)
        ]

    def at_most(self, row: list[tuple[int, float]], limit: float) -> None:
        """Demand that a linear form does not exceed a limit."""
        self.rows.append((row, -np.inf, limit))

    def minimum(self, objective: Matrix) -> dict[str, int] | None:
        """The option of each tensor at the optimum; None if no choice meets the rows."""
        entries = [(number, column, value) for number, row in enumerate(self.rows) for column, value in row[0]]
        numbers, columns, values = zip(*entries, strict=True)
        matrix = coo_array((values, (numbers, columns)), shape=(len(self.rows), self.size))
        whole = np.zeros(self.size)
        whole[: self.num_whole] = 1
        upper = np.full(self.size, np.inf)
        upper[: self.num_whole] = 1
        answer = milp(
            objective,
            constraints=LinearConstraint(matrix.tocsr(), [row[1] for row in self.rows], [row[2] for row in self.rows]),
            integrality=whole,
            bounds=Bounds(0, upper),
            options={"mip_rel_gap": 0.0},
        )
        if answer.x is None:
            return None
        return {
            name: int(np.argmax(answer.x[start : start + self.options[name]])) for name, start in self.start.items()
        }
