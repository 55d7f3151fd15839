"""Device meshes: shardings on them, the cost of resharding, and submeshes.

A cost is that of `dlojz.hardware.links.Link` with the bytes of a ring; all costs of one mesh are in one unit (seconds,
or the unit-free figures of Alpa's own tests).

A sharding spec says which dimension of a tensor is cut along which axis of the mesh. An axis cuts at most one
dimension; what no axis cuts is held whole by all devices along it. A dimension cut along both axes is cut along axis 0
first, so its parts lie in the order of the devices. A matrix on a 2-D mesh has the nine specs RR, S0R, S1R, RS0, RS1,
S0S1, S1S0, S01R and RS01.

Resharding is made of three moves: to slice (free: each device keeps part of what it holds), to all-gather along an
axis, to all-to-all along an axis from one dimension to another. Only the innermost cut of a dimension moves, as
otherwise parts would not be neighbours, and an axis goes nowhere but to its final place.

A submesh is a power of two of GPUs of one node, or whole nodes; whatever such shapes have together as many GPUs as the
cluster tile it.

Sources: Zheng et al. 2022, "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning" (OSDI
22, arXiv 2201.12023), §4.1 with tables 1 and 2, §5.2 and appendix A (tiling); Alpa's `LogicalDeviceMesh` for the
factors and for `tie_break`; Thakur, Rabenseifner & Gropp 2005 for the ring's bytes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlojz.base.language import Sentences
from dlojz.hardware.links import Collective, Link, bus_factor

_FILE: Final = Path(__file__).with_name("data") / "alpa.md"
alpa_sentence = Sentences(_FILE)
alpa_refused = alpa_sentence.refused
"""A sentence about a plan, by its key, and the error that says one."""

UNIT: Final = Link(1.0, 1.0)
"""The link of Alpa's own tests, without a unit."""


@dataclass(frozen=True)
class DeviceMesh:
    """Mesh of n₀ × n₁ devices; those along an axis are joined by links of the same kind.

    Args:
        shape: (n₀, n₁), each at least 1. An axis of one device shards nothing.
        links: along each axis, with the latency of a whole collective, in the unit of cost.
        tie_break: Alpa adds 0.1 to an all-gather, 0.01 to an all-reduce and 0.001 to an all-to-all, so that of two
            plans that cost the same one is always preferred; this multiplies them. 0 where costs are seconds.

    Raises:
        LabError: no device along an axis, or a negative cost.
    """

    shape: tuple[int, int]
    links: tuple[Link, Link] = (UNIT, UNIT)
    tie_break: float = 1.0

    def __post_init__(self) -> None:
        if len(self.shape) != 2 or any(not isinstance(size, int) or size < 1 for size in self.shape):
            raise alpa_refused("mesh shape", shape=self.shape)
        if any(not (0 <= link.latency_s < math.inf and link.bytes_per_s > 0) for link in self.links):
            raise alpa_refused("mesh links", links=self.links)

    @property
    def num_devices(self) -> int:
        """n₀ × n₁."""
        return self.shape[0] * self.shape[1]

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that can shard something: those with more than one device."""
        return tuple(axis for axis in (0, 1) if self.shape[axis] > 1)

    def size(self, axes: Sequence[int]) -> int:
        """Devices in one group along these axes; 1 for none."""
        return math.prod(self.shape[axis] for axis in axes)

    def all_gather(self, gathered_bytes: float, axis: int) -> float:
        """Every device of a group ends with all `gathered_bytes`, of which it held one n-th."""
        return self._seconds("all_gather", gathered_bytes, [axis]) + 0.1 * self.tie_break

    def all_to_all(self, held_bytes: float, axis: int) -> float:
        """A tensor of `held_bytes`, sharded over a group along one dimension, is sharded along another.

        Each device sends (n − 1) ÷ n of its n-th. Alpa multiplies by n ÷ 2, as pairwise exchanges use the links badly.
        """
        # A device's n-th, times n ÷ 2, is half of the tensor; `bus_factor` takes (n − 1) ÷ n of that.
        return self._seconds("all_to_all", held_bytes / 2, [axis]) + 0.001 * self.tie_break

    def all_reduce(self, message_bytes: float, axes: Sequence[int]) -> float:
        """Every device of a group along `axes` (one or both) ends with the sum of what all held."""
        return self._seconds("all_reduce", message_bytes, axes) + 0.01 * self.tie_break

    def _seconds(self, collective: Collective, message_bytes: float, axes: Sequence[int]) -> float:
        """The cost of one ring over all devices of a group, as slow as its slowest link."""
        links = [self.links[axis] for axis in axes]
        # Both axes as one ring: its slowest hop counts.
        slowest = Link(max(link.latency_s for link in links), min(link.bytes_per_s for link in links))
        seconds: float = slowest.seconds(bus_factor(collective, self.size(axes)) * message_bytes)
        return seconds


_NAME = re.compile(r"(?:R|S01|S0|S1)+")
_PART = re.compile(r"R|S01|S0|S1")


@dataclass(frozen=True)
class ShardingSpec:
    """Sharding spec: for each dimension of a tensor the mesh axes that cut it; ((0,), ()) is S0R.

    Example:
        >>> spec = ShardingSpec.named("S0R")
        >>> spec.cuts, str(spec)
        (((0,), ()), 'S0R')
    """

    cuts: tuple[tuple[int, ...], ...]

    @classmethod
    def named(cls, name: str) -> ShardingSpec:
        """The spec of a name such as `S0R`, `RS01`: R for a dimension held whole, S and its axes for one that is cut.

        Raises:
            LabError: if this is no such name, or an axis cuts two dimensions.
        """
        parts = _PART.findall(name) if _NAME.fullmatch(name) else []
        # "S01" → "01": each digit is an axis, and none may cut twice.
        axes = "".join(parts).replace("R", "").replace("S", "")
        if not parts or len(set(axes)) < len(axes):
            raise alpa_refused("spec", name=name)
        return cls(tuple(tuple(int(sign) for sign in part[1:]) for part in parts))

    def __str__(self) -> str:
        return "".join("S" + "".join(map(str, axes)) if axes else "R" for axes in self.cuts) or "scalar"

    @property
    def axes(self) -> tuple[int, ...]:
        """All axes that cut some dimension, in order."""
        return tuple(sorted(axis for axes in self.cuts for axis in axes))

    def dim_of(self, axis: int) -> int | None:
        """The dimension that this axis cuts; None if it cuts none."""
        return next((dim for dim, axes in enumerate(self.cuts) if axis in axes), None)

    def fits(self, shape: Sequence[int], mesh: DeviceMesh) -> bool:
        """Whether all parts are equal: each dimension divides by the devices that share it."""
        return all(size % mesh.size(axes) == 0 for size, axes in zip(shape, self.cuts, strict=True))

    def tile_bytes(self, tensor_bytes: float, mesh: DeviceMesh) -> float:
        """Bytes that one device holds of a tensor of `tensor_bytes`."""
        return tensor_bytes / mesh.size(self.axes)


def all_specs(shape: Sequence[int], mesh: DeviceMesh) -> tuple[ShardingSpec, ...]:
    """List the specs that a tensor of this shape can have on a mesh, the replicated one first, without axes of 1."""
    dims: list[int | None] = [None, *range(len(shape))]
    assignments = itertools.product(dims, repeat=len(mesh.axes))
    # Each axis cuts one dimension, or none (None).
    specs = (_assigned(len(shape), dict(zip(mesh.axes, dims_of_axes, strict=True))) for dims_of_axes in assignments)
    return tuple(spec for spec in specs if spec.fits(shape, mesh))


def _assigned(dims: int, dim_of_axis: dict[int, int | None]) -> ShardingSpec:
    # Sorted: a dimension cut by both is cut along axis 0 first.
    return ShardingSpec(
        tuple(tuple(axis for axis in sorted(dim_of_axis) if dim_of_axis[axis] == dim) for dim in range(dims))
    )


class Move(NamedTuple):
    """One step of a resharding.

    Args:
        collective: `slice`, `all_gather` or `all_to_all`.
        axis: of the mesh, along which groups of devices exchange.
        message_bytes: what one such group holds together, once.
        cost: in the unit of the mesh.
    """

    collective: str
    axis: int
    message_bytes: float
    cost: float
    result: ShardingSpec


def resharding_moves(
    before: ShardingSpec, after: ShardingSpec, tensor_bytes: float, mesh: DeviceMesh
) -> tuple[Move, ...]:
    """Find the cheapest sequence of moves from one spec to another; empty if they are the same.

    Found by Dijkstra's shortest path over the specs. Of S0R → RR it is an all-gather of M bytes along axis 0, of
    S0S1 → S0R one of M ÷ n₀ along axis 1, of S0R → RS0 an all-to-all, of RR → anything slices (table 2 of the paper).

    Raises:
        LabError: if the two specs are of tensors with different numbers of dimensions.
    """
    if len(before.cuts) != len(after.cuts):
        raise alpa_refused("dimensions", before=before, after=after)
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
    # (ways to make it, ways to read it)
    return np.array(_rows(tuple(befores), tuple(afters), tensor_bytes, mesh)).reshape(len(befores), len(afters))


@lru_cache(maxsize=10_000)
def _rows(
    befores: tuple[ShardingSpec, ...], afters: tuple[ShardingSpec, ...], tensor_bytes: float, mesh: DeviceMesh
) -> list[list[float]]:
    return [[resharding_cost(before, after, tensor_bytes, mesh) for after in afters] for before in befores]


@lru_cache(maxsize=100_000)
def _shortest(before: ShardingSpec, after: ShardingSpec, tensor_bytes: float, mesh: DeviceMesh) -> tuple[Move, ...]:
    # Nodes of the path are specs, at most nine of a matrix on a 2-D mesh.
    best: dict[ShardingSpec, float] = {before: 0.0}
    tie = 0  # specs have no order of their own, and a heap compares what stands behind equal costs
    queue: list[tuple[float, int, ShardingSpec, tuple[Move, ...]]] = [(0.0, tie, before, ())]
    while queue:
        cost, _, spec, moves = heapq.heappop(queue)
        if spec == after:
            return moves
        for move in _moves(spec, after, tensor_bytes, mesh):
            total = cost + move.cost
            # A cheaper way to a spec that is queued already: the old entry is popped later, and changes nothing.
            if total < best.get(move.result, float("inf")):
                best[move.result] = total
                tie += 1
                heapq.heappush(queue, (total, tie, move.result, (*moves, move)))
    raise AssertionError(f"no way from {before} to {after}")  # gathering everything, then slicing, is always one


def _moves(spec: ShardingSpec, target: ShardingSpec, tensor_bytes: float, mesh: DeviceMesh) -> Iterator[Move]:
    for axis in mesh.axes:
        dim, goal = spec.dim_of(axis), target.dim_of(axis)
        if dim is None:
            if goal is not None and _can_append(spec, goal, axis):  # slice: each device keeps its part, no bytes
                yield Move("slice", axis, 0.0, 0.0, _changed(spec, {goal: (*spec.cuts[goal], axis)}))
            continue
        if spec.cuts[dim][-1] != axis:  # only the innermost cut of a dimension can be undone
            continue
        # A group holds together what the other axes leave uncut.
        held_bytes = tensor_bytes / mesh.size([cut_axis for cut_axis in spec.axes if cut_axis != axis])
        without = {dim: spec.cuts[dim][:-1]}
        yield Move("all_gather", axis, held_bytes, mesh.all_gather(held_bytes, axis), _changed(spec, without))
        # Straight to the final dimension, or not at all.
        if goal is not None and goal != dim and _can_append(spec, goal, axis):
            cuts = without | {goal: (*spec.cuts[goal], axis)}
            yield Move("all_to_all", axis, held_bytes, mesh.all_to_all(held_bytes, axis), _changed(spec, cuts))


def _can_append(spec: ShardingSpec, dim: int, axis: int) -> bool:
    return all(outer < axis for outer in spec.cuts[dim])  # axis 0 stays outside of axis 1


def _changed(spec: ShardingSpec, cuts: dict[int, tuple[int, ...]]) -> ShardingSpec:
    return ShardingSpec(tuple(cuts.get(dim, axes) for dim, axes in enumerate(spec.cuts)))


class Submesh(NamedTuple):
    """Nodes × GPUs of each."""

    nodes: int
    gpus_per_node: int

    @property
    def num_devices(self) -> int:
        """GPUs in all."""
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.nodes} × {self.gpus_per_node}"


def submeshes(nodes: int, gpus_per_node: int) -> tuple[Submesh, ...]:
    """List the submeshes of N nodes of M GPUs: (1, 1), (1, 2), (1, 4) … (1, M), (2, M) … (N, M).

    Raises:
        LabError: no node, or a number of GPUs per node that is no power of two.
    """
    if nodes < 1 or gpus_per_node < 1:
        raise alpa_refused("empty cluster", nodes=nodes, gpus_per_node=gpus_per_node)
    if gpus_per_node & (gpus_per_node - 1):  # n & (n − 1) is 0 for powers of two alone
        raise alpa_refused("power of two", gpus_per_node=gpus_per_node, below=1 << gpus_per_node.bit_length() - 1)
    within = [Submesh(1, 1 << power) for power in range(gpus_per_node.bit_length())]
    return (*within, *(Submesh(count, gpus_per_node) for count in range(2, nodes + 1)))


def tiled(shapes: Sequence[Submesh]) -> tuple[tuple[int, ...], ...]:
    """Assign GPUs to submeshes, numbered node by node: the largest are placed first, so that nodes are not split.

    Args:
        shapes: submeshes of one cluster, in any order.
    """
    order = sorted(range(len(shapes)), key=lambda index: -shapes[index].num_devices)
    devices: list[tuple[int, ...]] = [()] * len(shapes)
    start = 0
    for index in order:  # whole nodes, then halves of nodes, then quarters …: each starts at a multiple of its size
        devices[index] = tuple(range(start, start + shapes[index].num_devices))
        start += shapes[index].num_devices
    return tuple(devices)
