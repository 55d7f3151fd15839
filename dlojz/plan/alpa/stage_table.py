"""The dynamic programme over stages: F(s, k, d) of the outer level, for one t_max after the other.

Layer 4. Invariant: s counts stages from the end of the pipeline, so it is also the number of micro-batches that the
stage keeps in flight under 1F1B, unless the step has fewer. No torch.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §5.2, equations 3 to 5; its code counts stages from the end for this reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlojz.plan.alpa.pipeline_plan import PlannedStage
from dlojz.plan.alpa.submesh import Submesh

Array = NDArray[np.float64]


class StageOption(NamedTuple):
    """One way to run some layers on a submesh.

    Args:
        time_s: forward and backward of one micro-batch, in seconds or any one unit.
        state_bytes: weights, gradients, optimizer states and temporaries of one device.
        activation_bytes: what one device keeps of one micro-batch between its forward and its backward pass.
        label: how the submesh is used, such as `dp2 × tp4`.
    """

    time_s: float
    state_bytes: float = 0.0
    activation_bytes: float = 0.0
    label: str = ""

    def bytes_in_flight(self, micro_batches: int) -> float:
        """Bytes of one device with so many micro-batches under way."""
        return self.state_bytes + micro_batches * self.activation_bytes


StageOptions = Callable[[int, int, Submesh], Sequence[StageOption]]
"""Called with first layer, last layer (included), submesh; gives the ways to run them there, none if there is none."""


class StageTable:
    """Costs of all stages, and the dynamic programme over them.

    Args:
        options: costs of a stage.
        layers: K.
        micro_batches: B.
        shapes: submeshes that a stage may have.
        devices: of the cluster.
        stages: how many, if that is not free.
    """

    def __init__(
        self,
        options: StageOptions,
        layers: int,
        micro_batches: int,
        shapes: Sequence[Submesh],
        devices: int,
        stages: int | None,
    ) -> None:
        self.layers, self.shapes, self.devices, self.micro_batches = layers, shapes, devices, micro_batches
        self.most, self.exactly = stages or min(layers, devices), stages
        self.options = {
            (first, last, number): tuple(options(first, last, shape))
            for first in range(layers)
            for last in range(first, layers)
            for number, shape in enumerate(shapes)
        }
        self._least_max: float | None = None

    def in_flight(self, stages_left: int) -> int:
        """Micro-batches that the s-th stage from the end keeps under way (1F1B)."""
        return min(stages_left, self.micro_batches)

    def stage_times(self, memory_bytes: float) -> Array:
        """Time of the fastest option that fits, by stages left, first layer, last layer, submesh; or infinite."""
        times = np.full((self.most, self.layers, self.layers, len(self.shapes)), np.inf)
        for (first, last, shape), some in self.options.items():
            for option in some:
                for left in range(1, self.most + 1):
                    if option.bytes_in_flight(self.in_flight(left)) <= memory_bytes:
                        place = (left - 1, first, last, shape)
                        times[place] = min(times[place], option.time_s)
        return times

    def least_max(self, times: Array) -> float:
        """No plan's slowest stage is faster: each layer is in some stage, none in one faster than its fastest."""
        if self._least_max is None:
            fastest = times.min(axis=(0, 3))
            of_layer = [fastest[: layer + 1, layer:].min() for layer in range(self.layers)]
            self._least_max = float(max(of_layer))
        return self._least_max

    def least_sum(self, times: Array, t_max: float) -> tuple[float, int, Array]:
        """Least sum of stages none slower than t_max, for how many stages, and F."""
        allowed = np.where(times <= t_max, times, np.inf)
        f = np.full((self.most + 1, self.layers + 1, self.devices + 1), np.inf)
        f[0, self.layers, 0] = 0.0
        for first in range(self.layers - 1, -1, -1):  # F of all s at once: each looks at later layers only
            for number, shape in enumerate(self.shapes):
                n = shape.num_devices
                left = min(self.most, self.layers - first)  # a stage has a layer at least
                rest = f[:left, first + 1 :, : self.devices + 1 - n] + allowed[:left, first, first:, number, None]
                f[1 : left + 1, first, n:] = np.minimum(f[1 : left + 1, first, n:], rest.min(axis=1))
        ends = f[:, 0, self.devices]
        left = self.exactly or int(np.argmin(ends))
        return float(ends[left]), left, f

    def total(self, times: Array, t_max: float) -> float:
        """T*(t_max), infinite if no plan has stages so fast."""
        return self.least_sum(times, t_max)[0] + (self.micro_batches - 1) * t_max

    def plan(self, times: Array, t_max: float) -> list[PlannedStage]:
        """The stages that F came from, from the first layer on."""
        _, left, f = self.least_sum(times, t_max)
        first, devices, found = 0, self.devices, []
        while left:
            last, number = next(
                (last, number)
                for number, shape in enumerate(self.shapes)
                for last in range(first, self.layers)
                if shape.num_devices <= devices
                and times[left - 1, first, last, number] <= t_max
                and f[left, first, devices]
                == f[left - 1, last + 1, devices - shape.num_devices] + times[left - 1, first, last, number]
            )
            time_s = times[left - 1, first, last, number]
            flight = self.in_flight(left)
            alike = [one for one in self.options[first, last, number] if one.time_s == time_s]
            option = min(alike, key=lambda one: one.bytes_in_flight(flight))
            held = option.bytes_in_flight(flight)
            found.append(PlannedStage(first, last, self.shapes[number], option.time_s, held, flight, option.label))
            first, devices, left = last + 1, devices - self.shapes[number].num_devices, left - 1
        return found

    def smallest_memory(self) -> float:
        """Bytes that a device must have for some plan to exist; infinite if none does with any memory."""
        needs = sorted(
            {
                option.bytes_in_flight(self.in_flight(left))
                for some in self.options.values()
                for option in some
                for left in range(1, self.most + 1)
            }
        )
        low, high = 0, len(needs)
        while low < high:
            middle = (low + high) // 2
            if math.isfinite(self.least_sum(self.stage_times(needs[middle]), math.inf)[0]):
                high = middle
            else:
                low = middle + 1
        return needs[low] if low < len(needs) else math.inf
