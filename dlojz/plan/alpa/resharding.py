"""What it costs to lay a tensor differently: the cheapest way from one sharding spec to another.

Layer 4. Invariant: a way is made of three moves: to slice (free: each device keeps part of what it holds), to
all-gather along an axis, to all-to-all along an axis from one dimension to another; only the innermost cut of a
dimension moves, as otherwise parts would not be neighbours. An axis goes nowhere but to its final place. No torch.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.1, table 2.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlojz.plan.alpa.mesh import DeviceMesh
from dlojz.plan.alpa.sharding_spec import ShardingSpec
from dlojz.schema import LabError
from dlojz.text import say


class Move(NamedTuple):
    """One step of a resharding.

    Args:
        collective: `slice`, `all_gather` or `all_to_all`.
        axis: of the mesh, along which groups of devices exchange.
        message_bytes: what one such group holds together, once.
        cost: in the unit of the mesh.
        result: how the tensor lies afterwards.
    """

    collective: str
    axis: int
    message_bytes: float
    cost: float
    result: ShardingSpec


def resharding_moves(
    before: ShardingSpec, after: ShardingSpec, tensor_bytes: float, mesh: DeviceMesh
) -> tuple[Move, ...]:
    """The cheapest sequence of moves from one spec to another; empty if they are the same.

    Found by Dijkstra's shortest path over the specs. Of S0R → RR it is an all-gather of M bytes along axis 0, of
    S0S1 → S0R one of M ÷ n₀ along axis 1, of S0R → RS0 an all-to-all, of RR → anything slices (table 2 of the paper).

    Raises:
        LabError: if the two specs are of tensors with different numbers of dimensions.
    """
    if len(before.cuts) != len(after.cuts):
        raise LabError(
            say(
                en=f"a tensor keeps its dimensions when it is resharded, but {before} and {after} were received: give "
                "two specs of the same length.",
                fr=f"un tenseur garde ses dimensions quand sa découpe change, mais {before} et {after} ont été "
                "reçus : donnez deux spécifications de même longueur.",
            )
        )
    return _shortest(before, after, float(tensor_bytes), mesh)


def resharding_cost(before: ShardingSpec, after: ShardingSpec, tensor_bytes: float, mesh: DeviceMesh) -> float:
    """Cost of `resharding_moves`, in the unit of the mesh."""
    return sum(move.cost for move in resharding_moves(before, after, tensor_bytes, mesh))


def resharding_matrix(
    befores: Sequence[ShardingSpec], afters: Sequence[ShardingSpec], tensor_bytes: float, mesh: DeviceMesh
) -> NDArray[np.float64]:
    """R of an edge of the graph: row, how the tensor is made; column, how its reader wants it.

    Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.2, the matrix R_vu of equation 1.
    """
    return np.array(_rows(tuple(befores), tuple(afters), tensor_bytes, mesh)).reshape(len(befores), len(afters))


@lru_cache(maxsize=10_000)
def _rows(
    befores: tuple[ShardingSpec, ...], afters: tuple[ShardingSpec, ...], tensor_bytes: float, mesh: DeviceMesh
) -> list[list[float]]:
    return [[resharding_cost(before, after, tensor_bytes, mesh) for after in afters] for before in befores]


@lru_cache(maxsize=100_000)
def _shortest(before: ShardingSpec, after: ShardingSpec, tensor_bytes: float, mesh: DeviceMesh) -> tuple[Move, ...]:
    best: dict[ShardingSpec, float] = {before: 0.0}
    tie = 0  # specs have no order of their own, and a heap compares what stands behind equal costs
    queue: list[tuple[float, int, ShardingSpec, tuple[Move, ...]]] = [(0.0, tie, before, ())]
    while queue:
        cost, _, spec, moves = heapq.heappop(queue)
        if spec == after:
            return moves
        for move in _moves(spec, after, tensor_bytes, mesh):
            total = cost + move.cost
            if total < best.get(move.result, float("inf")):
                best[move.result] = total
                tie += 1
                heapq.heappush(queue, (total, tie, move.result, (*moves, move)))
    raise AssertionError(f"no way from {before} to {after}")  # gathering everything, then slicing, is always one


def _moves(spec: ShardingSpec, target: ShardingSpec, tensor_bytes: float, mesh: DeviceMesh) -> Iterator[Move]:
    for axis in mesh.axes:
        here, goal = spec.dim_of(axis), target.dim_of(axis)
        if here is None:
            if goal is not None and _can_append(spec, goal, axis):
                yield Move("slice", axis, 0.0, 0.0, _changed(spec, {goal: (*spec.cuts[goal], axis)}))
            continue
        if spec.cuts[here][-1] != axis:
            continue
        held_bytes = tensor_bytes / mesh.size([other for other in spec.axes if other != axis])
        without = {here: spec.cuts[here][:-1]}
        yield Move("all_gather", axis, held_bytes, mesh.all_gather(held_bytes, axis), _changed(spec, without))
        if goal is not None and goal != here and _can_append(spec, goal, axis):
            moved = without | {goal: (*spec.cuts[goal], axis)}
            yield Move("all_to_all", axis, held_bytes, mesh.all_to_all(held_bytes, axis), _changed(spec, moved))


def _can_append(spec: ShardingSpec, dim: int, axis: int) -> bool:
    return all(outer < axis for outer in spec.cuts[dim])


def _changed(spec: ShardingSpec, cuts: dict[int, tuple[int, ...]]) -> ShardingSpec:
    return ShardingSpec(tuple(cuts.get(dim, axes) for dim, axes in enumerate(spec.cuts)))
