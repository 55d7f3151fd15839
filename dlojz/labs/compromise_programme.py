"""Lab 08: integer linear programmes whose variables have names, solved; and a perceptron as a chain of choices.

Layer 6 (labs). Invariant: the costs of the chain are those of `dlojz.plan.alpa`'s mesh and resharding; the tests hold
its optimum against that of the whole graph of operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlojz.plan.alpa.mesh import DeviceMesh
from dlojz.plan.alpa.resharding import resharding_cost
from dlojz.plan.alpa.sharding_spec import ShardingSpec

Name = tuple[Any, ...]
"""('s', layer, strategy), which is 0 or 1, or ('e', layer, strategy, strategy of the next layer), from 0 to 1."""
Row = tuple[dict[Name, float], float]
"""Coefficients, and what the sum of coefficient × variable must be."""
Programme = tuple[dict[Name, float], list[Row]]
"""Objective, and equations."""


@dataclass(frozen=True)
class Solution:
    """The optimum of a programme.

    Attributes:
        cost: of the objective.
        values: of each variable.
    """

    cost: float
    values: dict[Name, float]

    def strategies(self) -> list[int]:
        """The strategy that each layer takes; the first of several, -1 for none."""
        layers = 1 + max((name[1] for name in self.values if name[0] == "s"), default=-1)
        taken = [[k for k in range(len(self.values)) if self.values.get(("s", v, k), 0.0) > 0.5] for v in range(layers)]
        return [some[0] if some else -1 for some in taken]


def solve(objective: Mapping[Name, float], equations: Sequence[tuple[Mapping[Name, float], float]]) -> Solution | None:
    """The least cost of a programme; None if its equations contradict each other.

    Args:
        objective: cost of each variable; 0 for those that are left out.
        equations: coefficients and value of each.

    Source: `scipy.optimize.milp` (HiGHS), which `dlojz.plan.alpa.intra_operator` uses too.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    names = sorted({*objective, *(name for row, _ in equations for name in row)}, key=str)
    place = {name: number for number, name in enumerate(names)}
    if not names:
        return Solution(0.0, {})
    matrix = np.zeros((len(equations), len(names)))
    for number, (row, _) in enumerate(equations):
        for name, factor in row.items():
            matrix[number, place[name]] = factor
    cost = np.array([objective.get(name, 0.0) for name in names])
    largest = float(np.abs(cost).max()) or 1.0  # the solver's tolerances are absolute
    values = np.array([value for _, value in equations])
    answer = milp(
        cost / largest,
        constraints=[LinearConstraint(matrix, values, values)] if len(equations) else [],
        integrality=np.array([float(name[0] == "s") for name in names]),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    if answer.x is None:
        return None
    return Solution(float(cost @ answer.x), dict(zip(names, answer.x.tolist(), strict=True)))


def told(row: Mapping[Name, float]) -> str:
    """The left side of an equation, as one writes it."""
    parts = []
    for (kind, *rest), factor in row.items():
        sign = "− " if factor < 0 else "+ "
        times = "" if abs(factor) == 1 else f"{abs(factor):g}·"
        parts.append(f"{sign}{times}{kind}[{','.join(map(str, rest))}]")
    return " ".join(parts).removeprefix("+ ") or "0"


@dataclass(frozen=True)
class Chain:
    """Layers of which each takes one of several strategies.

    Attributes:
        strategies: their names.
        costs: of each layer, the communication of each strategy.
        resharding: between each layer and the next, what every pair of strategies costs.
    """

    strategies: tuple[str, ...]
    costs: list[list[float]]
    resharding: list[list[list[float]]]


def perceptron(batch: int, width: int, layers: int, mesh: DeviceMesh, element_bytes: int = 4) -> Chain:
    """A multi-layer perceptron as such a chain: forward, backward and the gradients of its weights.

    A layer is split by columns (its outputs), by rows (its inputs), or along the batch. By columns it reads the whole
    input, and its input's gradient is all-reduced, except the first layer's, which nobody needs; by rows its output is
    all-reduced; along the batch its weights' gradients are.

    Args:
        batch: samples of a micro-batch.
        width: of every layer, in and out.
        layers: at least 1.
        mesh: the devices; axis 1 is used.
        element_bytes: 4 for fp32.

    Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.1; Shoeybi et al. 2019 (arXiv 1909.08053), §3, for the two splits.
    """
    message, matrix = batch * width * element_bytes, width * width * element_bytes
    reads = [ShardingSpec.named(one) for one in ("RR", "RS1", "S1R")]
    makes = [ShardingSpec.named(one) for one in ("RS1", "RR", "S1R")]
    activation, weights = mesh.all_reduce(message, (1,)), mesh.all_reduce(matrix, (1,))
    bias = mesh.all_reduce(width * element_bytes, (1,))
    costs = [[activation if layer else 0.0, activation, weights + bias] for layer in range(layers)]
    # Forward from what one makes to what the next reads; backward the gradient, the other way.
    between = [
        [
            resharding_cost(made, wanted, message, mesh) + resharding_cost(wanted, made, message, mesh)
            for wanted in reads
        ]
        for made in makes
    ]
    return Chain(("column", "row", "batch"), costs, [between for _ in range(layers - 1)])
