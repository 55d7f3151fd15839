"""A two-dimensional mesh of devices, and what a collective along one of its axes costs.

Layer 4. Invariant: a cost is α + β × bytes with the factors of a ring; all costs of one mesh are in one unit (seconds,
or the unit-free figures of Alpa's own tests). No torch.

Sources: Zheng et al. 2022, "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning"
(OSDI 22, arXiv 2201.12023), §4.1, for the mesh; Alpa's `LogicalDeviceMesh` for the factors and for `tie_break`; Thakur,
Rabenseifner & Gropp 2005 for the ring's bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dlojz.schema import LabError
from dlojz.text import say


@dataclass(frozen=True)
class DeviceMesh:
    """n₀ × n₁ devices; all those in one row along an axis are joined by links of the same kind.

    Args:
        shape: (n₀, n₁), each at least 1. An axis of one device shares nothing out.
        alpha: latency of a collective along each axis, in the unit of cost.
        beta: cost of one byte along each axis (1 ÷ bandwidth).
        tie_break: Alpa adds 0.1 to an all-gather, 0.01 to an all-reduce and 0.001 to the two others, so that of two
            plans that cost the same one is always preferred; this multiplies them. 0 where costs are seconds.
        hierarchical: an all-reduce over both axes goes by stages (reduce-scatter along one, all-reduce of the part
            along the other, all-gather). Alpa's is one ring over all devices, as fast as its slowest link.

    Raises:
        LabError: no device along an axis, or a negative cost.
    """

    shape: tuple[int, int]
    alpha: tuple[float, float] = (1.0, 1.0)
    beta: tuple[float, float] = (1.0, 1.0)
    tie_break: float = 1.0
    hierarchical: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != 2 or any(not isinstance(size, int) or size < 1 for size in self.shape):
            raise LabError(
                say(
                    en=f"a mesh has at least one device along each of its two axes, but {self.shape!r} was received: "
                    "use for example (1, 4), or (2, 4).",
                    fr=f"un maillage a au moins un périphérique selon chacun de ses deux axes, mais {self.shape!r} a "
                    "été reçu : prenez par exemple (1, 4), ou (2, 4).",
                )
            )
        costs = (*self.alpha, *self.beta, self.tie_break)
        if any(not math.isfinite(cost) or cost < 0 for cost in costs):
            raise LabError(
                say(
                    en=f"alpha and beta of a mesh are at least 0, but {self.alpha!r} and {self.beta!r} were received: "
                    "give latency and 1 ÷ bandwidth of each axis.",
                    fr=f"les alpha et bêta d’un maillage valent au moins 0, mais {self.alpha!r} et {self.beta!r} ont "
                    "été reçus : donnez la latence et 1 ÷ débit de chaque axe.",
                )
            )

    @property
    def num_devices(self) -> int:
        """n₀ × n₁."""
        return self.shape[0] * self.shape[1]

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that can share something out: those with more than one device."""
        return tuple(axis for axis in (0, 1) if self.shape[axis] > 1)

    def size(self, axes: Sequence[int]) -> int:
        """Devices in one group along these axes; 1 for none."""
        return math.prod(self.shape[axis] for axis in axes)

    def all_gather(self, gathered_bytes: float, axis: int) -> float:
        """Every device of a group ends with all `gathered_bytes`, of which it held one n-th."""
        n = self.shape[axis]
        return self.alpha[axis] + self.beta[axis] * (n - 1) / n * gathered_bytes + 0.1 * self.tie_break

    def reduce_scatter(self, summed_bytes: float, axis: int) -> float:
        """Every device of a group ends with one n-th of the sum of what all held, `summed_bytes` each."""
        n = self.shape[axis]
        return self.alpha[axis] + self.beta[axis] * (n - 1) / n * summed_bytes + 0.001 * self.tie_break

    def all_to_all(self, held_bytes: float, axis: int) -> float:
        """The tensor of `held_bytes` that a group shares is shared out along another of its dimensions.

        Each device sends (n − 1) ÷ n of its n-th. Alpa multiplies by n ÷ 2, as pairwise exchanges use the links badly.
        """
        n = self.shape[axis]
        return self.alpha[axis] + self.beta[axis] * (n - 1) / n**2 * held_bytes * n / 2 + 0.001 * self.tie_break

    def all_reduce(self, message_bytes: float, axes: Sequence[int]) -> float:
        """Every device of a group along `axes` (one or both) ends with the sum of what all held."""
        if len(axes) == 2 and self.hierarchical:
            return min(self._by_stages(message_bytes, first, 1 - first) for first in (0, 1))
        n = self.size(axes)
        alpha, beta = max(self.alpha[axis] for axis in axes), max(self.beta[axis] for axis in axes)
        return alpha + beta * 2 * (n - 1) / n * message_bytes + 0.01 * self.tie_break

    def _by_stages(self, message_bytes: float, first: int, then: int) -> float:
        ends = self.reduce_scatter(message_bytes, first) + self.all_gather(message_bytes, first)
        return ends + self.all_reduce(message_bytes / self.shape[first], [then])
