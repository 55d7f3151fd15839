"""How one tensor lies on a mesh: which of its dimensions is cut along which axis of the mesh.

Layer 4. Invariant: an axis cuts at most one dimension; what no axis cuts is held whole by all devices along it. A
dimension cut along both axes is cut along axis 0 first, so its parts lie in the order of the devices. No torch.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.1 and table 1: a matrix on a 2-D mesh has the nine specs RR, S0R, S1R,
RS0, RS1, S0S1, S1S0, S01R and RS01.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dlojz.plan.alpa.mesh import DeviceMesh
from dlojz.schema import LabError
from dlojz.text import say

_NAME = re.compile(r"(?:R|S01|S0|S1)+")
_PART = re.compile(r"R|S01|S0|S1")


@dataclass(frozen=True)
class ShardingSpec:
    """For each dimension of a tensor the mesh axes that cut it: ((0,), ()) is S0R.

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
        axes = "".join(parts).replace("R", "").replace("S", "")
        if not parts or len(set(axes)) < len(axes):
            raise LabError(
                say(
                    en=f"{name!r} is no sharding spec: write R or S0, S1, S01 for each dimension, each axis once, "
                    "such as S0R or RS01.",
                    fr=f"{name!r} n’est pas une spécification de découpe : écrivez R ou S0, S1, S01 pour chaque "
                    "dimension, chaque axe une seule fois, comme S0R ou RS01.",
                )
            )
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
        """What one device holds of a tensor of `tensor_bytes`."""
        return tensor_bytes / mesh.size(self.axes)

    def part_of(self, device: tuple[int, int], mesh: DeviceMesh) -> tuple[tuple[float, float], ...]:
        """What the device at (row, column) of the mesh holds: from where to where of each dimension, 0 to 1."""
        part = []
        for axes in self.cuts:
            number, count = 0, 1
            for axis in axes:
                number, count = number * mesh.shape[axis] + device[axis], count * mesh.shape[axis]
            part.append((number / count, (number + 1) / count))
        return tuple(part)


def all_specs(
    shape: Sequence[int], mesh: DeviceMesh, splittable: Iterable[int] | None = None, *, mixed: bool = True
) -> tuple[ShardingSpec, ...]:
    """Every spec that a tensor of this shape can have on a mesh, the replicated one first.

    Args:
        shape: elements along each dimension.
        mesh: axes of one device are left out.
        splittable: dimensions that may be cut; by default all.
        mixed: whether both axes may cut the same dimension.
    """
    dims = range(len(shape)) if splittable is None else sorted(splittable)
    specs = (_assigned(len(shape), dict(places)) for places in _places(mesh.axes, dims))
    allowed = (spec for spec in specs if mixed or all(len(axes) < 2 for axes in spec.cuts))
    return tuple(spec for spec in allowed if spec.fits(shape, mesh))


def _places(axes: Sequence[int], dims: Iterable[int]) -> Iterator[tuple[tuple[int, int | None], ...]]:
    options: list[int | None] = [None, *dims]
    for places in itertools.product(options, repeat=len(axes)):
        yield tuple(zip(axes, places, strict=True))


def _assigned(dims: int, place: dict[int, int | None]) -> ShardingSpec:
    return ShardingSpec(tuple(tuple(axis for axis in sorted(place) if place[axis] == dim) for dim in range(dims)))


def tensor_bytes(shape: Sequence[int], element_bytes: int) -> int:
    """Bytes of a whole tensor."""
    return math.prod(shape) * element_bytes
