"""Intra-operator planning: shardings of all tensors by an integer linear programme, so that communication is least.

Each tensor v has a one-hot vector s_v over the k_v algorithms of its operator, c_v their communication, and R_vu the
resharding cost of each pair of choices of a tensor and its reader:

    minimise   Σ_v s_v·c_v + Σ_(v,u) s_vᵀ R_vu s_u

The products are made linear by a matrix e_vu per edge that stands for s_v s_uᵀ: its row sums are s_v and its column
sums s_u. As s is whole, e then is too, and only s need be declared so. The cost shown is summed again from the choices,
not read off the solver.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.2, equation 1; solver: `scipy.optimize.milp` (HiGHS).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from dlojz.base.language import format_bytes, significant
from dlojz.base.machine import c_output_discarded
from dlojz.base.table import Table, Tabular, titles
from dlojz.planner.alpa.graph import Node, OperatorGraph, OperatorSharding
from dlojz.planner.alpa.mesh import (
    DeviceMesh,
    all_specs,
    alpa_refused,
    alpa_sentence,
    resharding_matrix,
    resharding_moves,
)


@dataclass(frozen=True)
class PlannedCollective:
    """Collective of a sharding plan.

    Args:
        reader: the operator that wants it so; empty if it belongs to the operator that makes the tensor.
        collective: `all_reduce`, `all_gather` or `all_to_all`.
        axes: of the mesh, along which groups of devices exchange.
        message_bytes: the whole message of one group.
        cost: per micro-batch, in the unit of the mesh.
    """

    tensor: str
    reader: str
    collective: str
    axes: tuple[int, ...]
    message_bytes: float
    cost: float


@dataclass(frozen=True)
class ShardingPlan(Tabular):
    """Sharding plan: a choice for every tensor.

    Args:
        algorithms: of each tensor how it is made.
        communications: all collectives of one micro-batch and of the update.
        micro_batches: in a step.
    """

    graph: OperatorGraph
    mesh: DeviceMesh
    algorithms: Mapping[str, OperatorSharding]
    communications: tuple[PlannedCollective, ...]
    micro_batches: int

    @property
    def cost(self) -> float:
        """Cost of all communications, per micro-batch, in the unit of the mesh."""
        return sum(message.cost for message in self.communications)

    def table(self) -> Table:
        """What was planned and what it costs, with one line per tensor, in the order of computation."""
        rows, columns = self.mesh.shape
        plan_cost = significant(self.cost, 6, grouped=True)
        title = alpa_sentence("sharding plan", rows=rows, columns=columns, plan_cost=plan_cost)
        head = titles(
            en="tensor; operator; sharded; spec; communication; cost",
            fr="tenseur; opérateur; réparti; découpe; communication; coût",
        )
        lines: list[tuple[str, ...]] = []
        for name, algorithm in self.algorithms.items():
            node = self.graph.nodes[name]
            messages = [message for message in self.communications if message.tensor == name]
            message_text = "; ".join(
                f"{message.collective}({format_bytes(message.message_bytes)}, {'+'.join(map(str, message.axes))})"
                + (f" → {message.reader}" if message.reader else "")
                for message in messages
            )
            cost = sum(message.cost for message in messages)
            equation = node.operator.equation if node.operator else node.kind
            total = significant(cost, 6, grouped=True) if messages else ""
            lines.append((name, equation, algorithm.name, str(algorithm.output), message_text, total))
        return Table(head, tuple(lines), title, align="l")


def _communications(
    graph: OperatorGraph, mesh: DeviceMesh, algorithms: Mapping[str, OperatorSharding], micro_batches: int
) -> Iterator[PlannedCollective]:
    for name, sharding in algorithms.items():
        node = graph.nodes[name]
        share = micro_batches if node.kind == "gradient" else 1  # those of weights are communicated once per step
        if sharding.reduced_axes:
            yield PlannedCollective(
                name, "", "all_reduce", sharding.reduced_axes, sharding.message_bytes, sharding.cost / share
            )
        required_specs = [
            (reader.name, algorithms[reader.name].inputs[position]) for reader, position in graph.readers(name)
        ]
        # The update reads each gradient as its weight is cut.
        required_specs += [(weight, algorithms[weight].output) for gradient, weight in graph.ties if gradient == name]
        for reader, spec in required_specs:
            for move in resharding_moves(sharding.output, spec, node.tensor_bytes, mesh):
                if move.collective != "slice":  # a slice sends nothing
                    yield PlannedCollective(
                        name, reader, move.collective, (move.axis,), move.message_bytes, move.cost / share
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


def choices(graph: OperatorGraph, mesh: DeviceMesh, *, micro_batches: int = 1) -> Choices:
    """List what can be chosen for each tensor of a graph, and what it costs.

    Args:
        micro_batches: gradients of weights are communicated once for so many; their cost is divided by it.

    Raises:
        LabError: less than one micro-batch, or an operator that cannot be sharded.
    """
    if micro_batches < 1:
        raise alpa_refused("no micro-batch", micro_batches=micro_batches)
    options = {node.name: _options(node, mesh) for node in graph.nodes.values()}
    costs = {
        name: np.array([sharding.cost for sharding in shardings])
        / (micro_batches if graph.nodes[name].kind == "gradient" else 1)
        for name, shardings in options.items()
    }
    edges = []
    for node in graph.nodes.values():
        output_specs = [sharding.output for sharding in options[node.name]]  # row: how the tensor is made
        for reader, position in graph.readers(node.name):
            # Column: how this reader needs it.
            input_specs = [sharding.inputs[position] for sharding in options[reader.name]]
            # Gradients of weights are summed over the micro-batches before anyone reads them.
            share = micro_batches if node.kind == "gradient" else 1
            matrix = resharding_matrix(output_specs, input_specs, node.tensor_bytes, mesh) / share
            edges.append(Edge(node.name, reader.name, matrix))
    # The update reads gradients as the weights lie; it comes once per step.
    for gradient, weight in graph.ties:
        output_specs, weight_specs = ([sharding.output for sharding in options[name]] for name in (gradient, weight))
        matrix = resharding_matrix(output_specs, weight_specs, graph.nodes[weight].tensor_bytes, mesh) / micro_batches
        edges.append(Edge(gradient, weight, matrix))
    return Choices(options, costs, tuple(edges))


def _options(node: Node, mesh: DeviceMesh) -> tuple[OperatorSharding, ...]:
    if node.operator is not None:
        return node.operator.algorithms(mesh)
    # An input or a weight: any spec, made for free.
    return tuple(OperatorSharding("", (), spec, (), 0.0, 0.0) for spec in all_specs(node.shape, mesh))


def shard(graph: OperatorGraph, mesh: DeviceMesh, *, micro_batches: int = 1) -> ShardingPlan:
    """Find the sharding of every tensor that communicates least.

    Args:
        graph: operators of a training step, for one micro-batch.
        micro_batches: accumulated before the update.

    Returns:
        The optimum (no gap is left), with its cost per micro-batch.

    Raises:
        LabError: less than one micro-batch, or an operator that cannot be sharded.
    """
    candidates = choices(graph, mesh, micro_batches=micro_batches)
    algorithms = {name: candidates.options[name][index] for name, index in solve(candidates).items()}
    communications = tuple(_communications(graph, mesh, algorithms, micro_batches))
    return ShardingPlan(graph, mesh, algorithms, communications, micro_batches)


def solve(candidates: Choices) -> dict[str, int]:
    """Solve the ILP: the best option of each tensor."""
    problem = _Problem(candidates)
    # Costs are scaled so that the largest is 1000: the solver's tolerances are absolute.
    largest = max((float(np.max(cost)) for cost in problem.costs if cost.size), default=0.0)
    return problem.minimum(np.concatenate(problem.costs) * (1e3 / largest if largest else 1.0))


class _Problem:
    """Variables and rows of the ILP: first all s, then all e; the rows are equations."""

    def __init__(self, candidates: Choices) -> None:
        self.costs: list[Matrix] = []
        self.start: dict[str, int] = {}
        self.size = 0
        self.rows: list[tuple[list[tuple[int, float]], float]] = []
        for name, cost in candidates.costs.items():
            self.start[name] = self._reserve(cost)
        self.num_whole = self.size
        self.options = {name: len(cost) for name, cost in candidates.costs.items()}
        for name, count in self.options.items():
            self.rows.append(([(self.start[name] + index, 1.0) for index in range(count)], 1.0))  # Σ s_v = 1
        for edge in candidates.edges:
            if edge.matrix.any():  # where resharding is free whatever is chosen, there is nothing to decide
                self._edge(edge)

    def _edge(self, edge: Edge) -> None:
        rows, columns = edge.matrix.shape
        e = self._reserve(edge.matrix.ravel()) + np.arange(rows * columns).reshape(rows, columns)
        # Row sums are s of the maker, column sums s of the reader.
        for ends, name in ((e, edge.maker), (e.T, edge.reader)):
            for index, variables in enumerate(ends):
                row = [(int(variable), 1.0) for variable in variables]
                self.rows.append(([*row, (self.start[name] + index, -1.0)], 0.0))  # Σ e − s = 0

    def _reserve(self, costs: Matrix) -> int:
        self.costs.append(costs)
        self.size += len(costs)  # a flat vector of variables; returns where these begin
        return self.size - len(costs)

    def minimum(self, objective: Matrix) -> dict[str, int]:
        """The option of each tensor at the optimum."""
        entries = [(number, column, value) for number, row in enumerate(self.rows) for column, value in row[0]]
        numbers, columns, values = zip(*entries, strict=True)
        # (equations, variables), a few entries a row.
        matrix = coo_array((values, (numbers, columns)), shape=(len(self.rows), self.size))
        is_binary = np.arange(self.size) < self.num_whole  # s comes before all e
        right = [row[1] for row in self.rows]
        with c_output_discarded():
            answer = milp(
                objective,
                constraints=LinearConstraint(matrix.tocsr(), right, right),
                integrality=is_binary.astype(int),
                bounds=Bounds(0, np.where(is_binary, 1.0, np.inf)),  # e needs no upper bound: its rows sum to s ≤ 1
                options={"mip_rel_gap": 0.0},  # the optimum, not a plan near it
            )
        return {
            name: int(np.argmax(answer.x[start : start + self.options[name]])) for name, start in self.start.items()
        }
