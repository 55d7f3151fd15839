"""The inner level: how to share out every operator of a graph on one mesh, so that communication is least.

Each tensor v has a one-hot vector s_v over the k_v algorithms of its operator, c_v their communication, and R_vu the
resharding cost of each pair of choices of a tensor and its reader:

    minimise   Σ_v s_v·c_v + Σ_(v,u) s_vᵀ R_vu s_u

The products are made linear by a matrix e_vu per edge that stands for s_v s_uᵀ: its row sums are s_v and its column
sums s_u. As s is whole, e then is too, and only s need be declared so. A limit of memory adds one row per moment.

Layer 4. Invariant: the cost told is summed again from the choices, not read off the solver. No torch.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.2, equation 1; solver: `scipy.optimize.milp` (HiGHS).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from dlojz.plan.alpa.graph import Graph, Node
from dlojz.plan.alpa.liveness import alive, device_bytes
from dlojz.plan.alpa.mesh import DeviceMesh
from dlojz.plan.alpa.operators import PAPER, Algorithm, Space
from dlojz.plan.alpa.resharding import resharding_matrix
from dlojz.plan.alpa.sharding_plan import ShardingPlan
from dlojz.plan.alpa.sharding_spec import ShardingSpec, all_specs
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import format_bytes

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

    options: dict[str, tuple[Algorithm, ...]]
    costs: dict[str, Matrix]
    edges: tuple[Edge, ...]


def choices(graph: Graph, mesh: DeviceMesh, *, micro_batches: int = 1, space: Space = PAPER) -> Choices:
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


def _options(node: Node, mesh: DeviceMesh, space: Space) -> tuple[Algorithm, ...]:
    if node.operator is None:
        dims = [dim for dim in range(len(node.shape)) if dim not in node.whole]
        specs = (node.spec,) if node.spec else all_specs(node.shape, mesh, dims, mixed=space.mixed)
        return tuple(Algorithm("", (), spec, (), 0.0, 0.0) for spec in specs)
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
    graph: Graph,
    mesh: DeviceMesh,
    *,
    memory_bytes: float | None = None,
    micro_batches: int = 1,
    space: Space = PAPER,
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


def cost_of(found: Choices, picked: dict[str, int]) -> float:
    """The objective of one full choice, term by term: Σ s·c + Σ sᵀRs."""
    own = sum(float(found.costs[name][index]) for name, index in picked.items())
    return own + sum(float(edge.matrix[picked[edge.maker], picked[edge.reader]]) for edge in found.edges)


def solve(found: Choices, graph: Graph, mesh: DeviceMesh, memory_bytes: float | None = None) -> dict[str, int] | None:
    """The best option of each tensor, by integer linear programming; None if memory allows none."""
    problem = _Problem(found)
    if memory_bytes is not None:
        for row in _memory_rows(found, graph, mesh).values():
            # In units of the limit: the solver's tolerances are absolute.
            problem.at_most(problem.over(row, 1.0 / max(memory_bytes, 1.0)), 1.0 if memory_bytes > 0 else 0.0)
    largest = max((float(np.max(cost)) for cost in problem.costs if cost.size), default=0.0)
    return problem.minimum(np.concatenate(problem.costs) * (1e3 / largest if largest else 1.0))


def smallest_peak(found: Choices, graph: Graph, mesh: DeviceMesh) -> float:
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


def _memory_rows(found: Choices, graph: Graph, mesh: DeviceMesh) -> dict[str, dict[str, Matrix]]:
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


def specs_of(found: Choices, picked: dict[str, int]) -> dict[str, ShardingSpec]:
    """How each tensor lies under a full choice."""
    return {name: found.options[name][index].output for name, index in picked.items()}
