"""Inter-operator planning: which layers make a pipeline stage, and which submesh runs it, by dynamic programming.

A step of B micro-batches on stages that take t₁ … t_S for one of them lasts T = Σ t_i + (B − 1)·max t_j. The maximum
couples all stages. So it is fixed: for each t_max that could be the slowest stage, dynamic programming finds the least
sum of stages that are none slower,

    F(s, k, d) = min over i and submesh n × m of t(k … i, n × m, s) + F(s − 1, i + 1, d − n·m)

with s stages left, layers k and following, d devices left. T*(t_max) = min over s of F(s, 1, N·M) + (B − 1)·t_max, and
the smallest of these is T*. The s-th stage from the end keeps s micro-batches in flight (1F1B), unless the step has
fewer, which decides what fits. The plan uses all devices and every layer once.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §5.2, equations 2 to 5; its code counts stages from the end for this reason.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlojz.base.errors import LabError
from dlojz.base.language import format_bytes, significant
from dlojz.base.table import Table, Tabular, titles
from dlojz.planner.alpa.mesh import Submesh, alpa_refused, alpa_sentence, submeshes, tiled


class PlannedStage(NamedTuple):
    """Stage of a pipeline plan.

    Args:
        last: its last layer, included.
        submesh: nodes × GPUs that run it.
        time_s: forward and backward of one micro-batch.
        device_bytes: on one of its devices, with its micro-batches in flight.
        in_flight: micro-batches whose activations it keeps at most.
        label: how the submesh is used.
    """

    first: int
    last: int
    submesh: Submesh
    time_s: float
    device_bytes: float
    in_flight: int
    label: str


@dataclass(frozen=True)
class PipelinePlan(Tabular):
    """Pipeline plan: all stages.

    Args:
        stages: from the first layer to the last.
        micro_batches: B of a step.
        tried: candidates of t_max for which the dynamic programme was run, of so many `candidates`.
    """

    stages: tuple[PlannedStage, ...]
    micro_batches: int
    nodes: int
    gpus_per_node: int
    tried: int = 0
    candidates: int = 0

    @property
    def step_s(self) -> float:
        """T = Σ t_i + (B − 1)·max t_j."""
        times = [stage.time_s for stage in self.stages]
        return sum(times) + (self.micro_batches - 1) * max(times)

    @property
    def bubble(self) -> float:
        """Part of the step in which the slowest stage waits: its filling and draining."""
        return 1 - self.micro_batches * max(stage.time_s for stage in self.stages) / self.step_s

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the GPUs of each stage, node by node."""
        return tiled([stage.submesh for stage in self.stages])

    def table(self) -> Table:
        """What was planned, how long a step takes, and one line per stage."""
        time, bubble = significant(self.step_s, 6, grouped=True), f"{100 * self.bubble:.0f}"
        title = alpa_sentence("pipeline plan", plan=self, stages=len(self.stages), time=time, bubble=bubble)
        head = titles(
            en="stage; layers; submesh; used as; GPU; time; in flight; memory per device",
            fr="étage; couches; sous-maillage; utilisé en; GPU; temps; en cours; mémoire par périphérique",
        )
        rows = (
            (
                str(index),
                f"{stage.first}" if stage.first == stage.last else f"{stage.first}–{stage.last}",
                str(stage.submesh),
                stage.label,
                f"{devices[0]}" if len(devices) == 1 else f"{devices[0]}–{devices[-1]}",
                significant(stage.time_s, 6, grouped=True),
                str(stage.in_flight),
                format_bytes(stage.device_bytes) if stage.device_bytes else "—",
            )
            for index, (stage, devices) in enumerate(zip(self.stages, self.devices, strict=True))
        )
        return Table(head, tuple(rows), title, align="l")


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
        """Bytes of one device with so many micro-batches in flight."""
        return self.state_bytes + micro_batches * self.activation_bytes


StageOptions = Callable[[int, int, Submesh], Sequence[StageOption]]
"""Called with first layer, last layer (included), submesh; gives the ways to run them there, none if there is none."""


class StageTable:
    """Costs of all stages, and the dynamic programme over them.

    Args:
        layers: K.
        micro_batches: B.
        shapes: submeshes that a stage may have.
    """

    def __init__(
        self, options: StageOptions, layers: int, micro_batches: int, shapes: Sequence[Submesh], devices: int
    ) -> None:
        self.layers, self.shapes, self.devices, self.micro_batches = layers, shapes, devices, micro_batches
        self.most = min(layers, devices)  # stages: each has a layer and a device at least
        self.options = {
            (first, last, number): tuple(options(first, last, shape))
            for first in range(layers)
            for last in range(first, layers)
            for number, shape in enumerate(shapes)
        }

    def in_flight(self, stages_left: int) -> int:
        """Micro-batches that the s-th stage from the end keeps in flight (1F1B)."""
        return min(stages_left, self.micro_batches)

    def stage_times(self, memory_bytes: float) -> Array:
        """Time of the fastest option that fits, by stages left, first layer, last layer, submesh; or infinite."""
        # (stages left, first, last, submesh)
        times = np.full((self.most, self.layers, self.layers, len(self.shapes)), np.inf)
        for (first, last, shape), options in self.options.items():
            for option in options:
                for stages_left in range(1, self.most + 1):
                    if option.bytes_in_flight(self.in_flight(stages_left)) <= memory_bytes:
                        index = (stages_left - 1, first, last, shape)
                        times[index] = min(times[index], option.time_s)
        return times

    def least_max(self, times: Array) -> float:
        """No plan's slowest stage is faster: each layer is in some stage, none in one faster than its fastest."""
        fastest = times.min(axis=(0, 3))  # (first, last): over all numbers of stages and submeshes
        # The interval that holds this layer and is fastest.
        return max(float(fastest[: layer + 1, layer:].min()) for layer in range(self.layers))

    def least_sum(self, times: Array, t_max: float) -> tuple[float, int, Array]:
        """Least sum of stages none slower than t_max, for how many stages, and F."""
        allowed = np.where(times <= t_max, times, np.inf)
        f = np.full((self.most + 1, self.layers + 1, self.devices + 1), np.inf)
        f[0, self.layers, 0] = 0.0  # F(0, K, 0) = 0: no stages left, no layers, no devices; all else is infeasible
        for first in range(self.layers - 1, -1, -1):  # F of all s at once: each looks at later layers only
            for number, shape in enumerate(self.shapes):
                n = shape.num_devices
                max_stages = min(self.most, self.layers - first)  # a stage has a layer at least
                # (s, last, d): F of the layers after `last` with n devices fewer, plus [first, last] on this submesh.
                sums = (
                    f[:max_stages, first + 1 :, : self.devices + 1 - n]
                    + allowed[:max_stages, first, first:, number, None]
                )
                f[1 : max_stages + 1, first, n:] = np.minimum(f[1 : max_stages + 1, first, n:], sums.min(axis=1))
        ends = f[:, 0, self.devices]  # all layers, all devices, by number of stages
        num_stages = int(np.argmin(ends))
        return float(ends[num_stages]), num_stages, f

    def total(self, times: Array, t_max: float) -> float:
        """T*(t_max), infinite if no plan has stages so fast."""
        return self.least_sum(times, t_max)[0] + (self.micro_batches - 1) * t_max

    def plan(self, times: Array, t_max: float) -> list[PlannedStage]:
        """Trace back the stages of F, from the first layer on."""
        _, stages_left, f = self.least_sum(times, t_max)
        first, devices, stages = 0, self.devices, []
        while stages_left:
            # Floats are compared exactly: the same additions gave F, in the same order.
            last, number = next(
                (last, number)
                for number, shape in enumerate(self.shapes)
                for last in range(first, self.layers)
                if shape.num_devices <= devices
                and times[stages_left - 1, first, last, number] <= t_max
                and f[stages_left, first, devices]
                == f[stages_left - 1, last + 1, devices - shape.num_devices]
                + times[stages_left - 1, first, last, number]
            )
            time_s = times[stages_left - 1, first, last, number]
            flight = self.in_flight(stages_left)
            # Of options that take the same time, the one with the least memory.
            fastest_options = [option for option in self.options[first, last, number] if option.time_s == time_s]
            option = min(fastest_options, key=lambda option: option.bytes_in_flight(flight))
            device_bytes = option.bytes_in_flight(flight)
            stages.append(
                PlannedStage(first, last, self.shapes[number], option.time_s, device_bytes, flight, option.label)
            )
            first, devices, stages_left = last + 1, devices - self.shapes[number].num_devices, stages_left - 1
        return stages

    def smallest_memory(self) -> float:
        """Bytes that a device must have for some plan to exist; infinite if none does with any memory."""
        needs = sorted(
            {  # the memory is one of these: between two, nothing changes
                option.bytes_in_flight(self.in_flight(stages_left))
                for options in self.options.values()
                for option in options
                for stages_left in range(1, self.most + 1)
            }
        )
        low, high = 0, len(needs)  # the smallest index whose memory has a plan; len(needs) if none has
        while low < high:
            middle = (low + high) // 2
            if math.isfinite(self.least_sum(self.stage_times(needs[middle]), math.inf)[0]):
                high = middle
            else:
                low = middle + 1
        return needs[low] if low < len(needs) else math.inf


def pipeline(
    options: StageOptions,
    layers: int,
    micro_batches: int,
    nodes: int = 1,
    gpus_per_node: int = 1,
    *,
    memory_bytes: float = math.inf,
) -> PipelinePlan:
    """Cut layers into stages and give each a submesh, so that a step is shortest.

    Args:
        options: costs of a stage (see `StageOptions`).
        layers: K, at least 1.
        micro_batches: B of a step, at least 1.
        nodes: N.
        gpus_per_node: M, a power of two.
        memory_bytes: of one device.

    Returns:
        The plan. O(K³ · submeshes · N·M) per candidate of t_max, of which there are at most K² · submeshes.

    Raises:
        LabError: no layer, no micro-batch, or a model that fits nowhere; the sentence says how much memory is missing.
    """
    if layers < 1 or micro_batches < 1:
        raise alpa_refused("empty pipeline", layers=layers, micro_batches=micro_batches)
    shapes = submeshes(nodes, gpus_per_node)
    table = StageTable(options, layers, micro_batches, shapes, nodes * gpus_per_node)
    times = table.stage_times(memory_bytes)
    candidates = np.unique(times[np.isfinite(times)])
    if not len(candidates) or math.isinf(table.least_sum(times, math.inf)[0]):
        raise LabError(_nothing_fits(table, memory_bytes))
    # A t_max below any plan's slowest stage is infeasible.
    t_max, tried = _search(table, times, _distinct(candidates[candidates >= table.least_max(times)]))
    stages = table.plan(times, t_max)
    return PipelinePlan(tuple(stages), micro_batches, nodes, gpus_per_node, tried, len(candidates))


def _distinct(candidates: Array) -> Array:
    """Of candidates that differ by rounding, the largest: what is feasible for the others is for it."""
    distinct: list[float] = []
    for candidate in candidates[::-1].tolist():  # from the largest down, so that it stands for its neighbours
        if not distinct or distinct[-1] - candidate > 1e-12 * distinct[-1]:
            distinct.append(candidate)
    return np.array(distinct[::-1])


def _search(table: StageTable, times: Array, candidates: Array) -> tuple[float, int]:
    """The best t_max and how many were tried.

    As t_max grows, the sum of stages falls: between two candidates a < b no plan beats F(b) + (B − 1)·a. The interval
    with the lowest such bound is halved, until no bound is below the best plan. (The paper walks upwards and stops at
    B·t_max ≥ best, which needs many more tries where all times differ.)
    """
    pace = table.micro_batches - 1  # B − 1

    def tried_at(index: int) -> tuple[float, float]:
        total = table.total(times, float(candidates[index]))
        return total, total - pace * float(candidates[index])  # T*(t_max), and F(t_max) alone, which falls with t_max

    end = len(candidates) - 1
    best, least_sum = tried_at(end)
    best_index, tried = end, 1
    queue = [(least_sum + pace * float(candidates[0]), 0, end - 1, least_sum)]
    while queue:
        # `after`: F at the candidate behind `high`, known already; it bounds F of the whole interval from below.
        bound, low, high, after = heapq.heappop(queue)
        if bound >= best:  # the heap's least bound: no interval can be better
            break
        if low > high:
            continue
        middle = (low + high) // 2
        total, middle_sum = tried_at(middle)
        tried += 1
        if total < best:
            best, best_index = total, middle
        if math.isfinite(middle_sum) and low < middle:  # infeasible at `middle`: so is everything below it
            heapq.heappush(queue, (middle_sum + pace * float(candidates[low]), low, middle - 1, middle_sum))
        if middle < high:
            heapq.heappush(queue, (after + pace * float(candidates[middle + 1]), middle + 1, high, after))
    return float(candidates[best_index]), tried


def _nothing_fits(table: StageTable, memory_bytes: float) -> str:
    required_bytes = table.smallest_memory()
    if math.isinf(required_bytes):
        return alpa_sentence("devices left over", table=table)
    total, has, lacking = (
        format_bytes(required_bytes),
        format_bytes(memory_bytes),
        format_bytes(required_bytes - memory_bytes),
    )
    return alpa_sentence("too large", table=table, total=total, has=has, lacking=lacking)
