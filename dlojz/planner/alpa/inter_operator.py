"""Inter-operator planning: stages and submeshes by dynamic programming.

A pipeline of stages on submeshes: its step time, its memory, and how it shows itself.

Stages are in the order of the layers and hold every layer once. No torch.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §5.2, equation 2, for the step time.

The dynamic programme over stages: F(s, k, d) of the outer level, for one t_max after the other.

S counts stages from the end of the pipeline, so it is also the number of micro-batches that the stage keeps in flight
under 1F1B, unless the step has fewer. No torch.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §5.2, equations 3 to 5; its code counts stages from the end for this reason.

The outer level: which layers make a pipeline stage, and which submesh runs it.

A step of B micro-batches on stages that take t₁ … t_S for one of them lasts T = Σ t_i + (B − 1)·max t_j. The maximum
couples all stages. So it is fixed: for each t_max that could be the slowest stage, dynamic programming finds the least
sum of stages that are none slower,

    F(s, k, d) = min over i and submesh n × m of t(k … i, n × m, s) + F(s − 1, i + 1, d − n·m)

with s stages left, layers k and following, d devices left. T*(t_max) = min over s of F(s, 1, N·M) + (B − 1)·t_max, and
the smallest of these is T*. The s-th stage from the end keeps s micro-batches in flight (1F1B), which decides what
fits.

The plan uses all devices and every layer once; pruned or not, the optimum is the same. No torch.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §5.2, equations 2 to 5.
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
from dlojz.base.language import format_bytes, say, significant
from dlojz.planner.alpa.graph import ShownAsTable
from dlojz.planner.alpa.mesh import Submesh, submeshes, tiled


class PlannedStage(NamedTuple):
    """One stage.

    Args:
        first: its first layer.
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
class PipelinePlan(ShownAsTable):
    """All stages.

    Args:
        stages: from the first layer to the last.
        micro_batches: B of a step.
        nodes: of the cluster.
        gpus_per_node: of the cluster.
        memory_bytes: of one device; infinite if there is no limit.
        tried: candidates of t_max for which the dynamic programme was run.
        candidates: all of them.
    """

    stages: tuple[PlannedStage, ...]
    micro_batches: int
    nodes: int
    gpus_per_node: int
    memory_bytes: float = math.inf
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
        return tiled([stage.submesh for stage in self.stages], self.gpus_per_node)

    def title(self) -> str:
        """What was planned, and how long a step takes."""
        time, bubble = significant(self.step_s, 6, grouped=True), f"{100 * self.bubble:.0f}"
        return say(
            en=f"{len(self.stages)} stages on {self.nodes} × {self.gpus_per_node} devices, B = {self.micro_batches}: "
            f"T = {time}, filling and draining {bubble} % "
            f"(t_max tried: {self.tried} of {self.candidates})",
            fr=f"Étages : {len(self.stages)}, sur {self.nodes} × {self.gpus_per_node} périphériques, "
            f"B = {self.micro_batches} : T = {time}, remplissage et vidage {bubble} % "
            f"(t_max essayés : {self.tried} sur {self.candidates})",
        )

    def columns(self) -> tuple[str, ...]:
        """Headings of the table."""
        return (
            say(en="stage", fr="étage"),
            say(en="layers", fr="couches"),
            say(en="submesh", fr="sous-maillage"),
            say(en="used as", fr="utilisé en"),
            "GPU",
            say(en="time", fr="temps"),
            say(en="in flight", fr="en vol"),
            say(en="memory per device", fr="mémoire par périphérique"),
        )

    def rows(self) -> list[tuple[str, ...]]:
        """One line per stage."""
        return [
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
        ]


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


def pipeline(  # noqa: PLR0913 - a cluster, a step, and how to search
    options: StageOptions,
    layers: int,
    micro_batches: int,
    nodes: int = 1,
    gpus_per_node: int = 1,
    *,
    memory_bytes: float = math.inf,
    stages: int | None = None,
    epsilon: float = 0.0,
    prune: bool = True,
) -> PipelinePlan:
    """Cut layers into stages and give each a submesh, so that a step is shortest.

    Args:
        options: costs of a stage (see `StageOptions`).
        layers: K, at least 1.
        micro_batches: B of a step, at least 1.
        nodes: N.
        gpus_per_node: M, a power of two.
        memory_bytes: of one device.
        stages: how many, if that is not free; at most `layers`.
        epsilon: of candidates of t_max nearer than this to each other only the largest is tried (Alpa: 1e-6 s); the
            plan is then at most B·ε from the optimum.
        prune: leave out candidates of t_max that cannot be better than the best plan known.

    Returns:
        The plan. O(K³ · submeshes · N·M) per candidate, of which there are at most K² · submeshes.

    Raises:
        LabError: no layer, no micro-batch, more stages than layers or devices, or a model that fits nowhere; the
            sentence says how much memory is missing.
    """
    _check(layers, micro_batches, stages, nodes * gpus_per_node)
    shapes = submeshes(nodes, gpus_per_node)
    table = StageTable(options, layers, micro_batches, shapes, nodes * gpus_per_node, stages)
    times = table.stage_times(memory_bytes)
    candidates = np.unique(times[np.isfinite(times)])
    num_candidates = len(candidates)
    if not num_candidates or math.isinf(table.least_sum(times, math.inf)[0]):
        raise LabError(_nothing_fits(table, memory_bytes))
    candidates = _spread(candidates[candidates >= table.least_max(times)] if prune else candidates, epsilon)
    t_max, tried = _search(table, times, candidates) if prune else _try_all(table, times, candidates)
    found = table.plan(times, t_max)
    return PipelinePlan(tuple(found), micro_batches, nodes, gpus_per_node, memory_bytes, tried, num_candidates)


def _spread(candidates: Array, epsilon: float) -> Array:
    """Of candidates that lie within ε of each other, the largest: what is feasible for the others is for it."""
    kept: list[float] = []
    start = math.inf
    for candidate in candidates[::-1]:
        if start - candidate > max(epsilon, 1e-12 * start) or not kept:  # sums that differ by rounding are one
            start = float(candidate)
            kept.append(start)
    return np.array(kept[::-1])


def _try_all(table: StageTable, times: Array, candidates: Array) -> tuple[float, int]:
    totals = [table.total(times, float(t_max)) for t_max in candidates]
    return float(candidates[int(np.argmin(totals))]), len(totals)


def _search(table: StageTable, times: Array, candidates: Array) -> tuple[float, int]:
    """The best t_max and how many were tried.

    As t_max grows, the sum of stages falls: between two candidates a < b no plan beats F(b) + (B − 1)·a. The interval
    with the lowest such bound is halved, until no bound is below the best plan. (The paper walks upwards and stops at
    B·t_max ≥ best, which needs many more tries where all times differ.)
    """
    pace = table.micro_batches - 1

    def tried_at(index: int) -> tuple[float, float]:
        total = table.total(times, float(candidates[index]))
        return total, total - pace * float(candidates[index])

    end = len(candidates) - 1
    best, least_sum = tried_at(end)
    best_index, tried = end, 1
    queue = [(least_sum + pace * float(candidates[0]), 0, end - 1, least_sum)]
    while queue:
        bound, low, high, after = heapq.heappop(queue)
        if bound >= best:
            break
        if low > high:
            continue
        middle = (low + high) // 2
        total, own = tried_at(middle)
        tried += 1
        if total < best:
            best, best_index = total, middle
        if math.isfinite(own) and low < middle:
            heapq.heappush(queue, (own + pace * float(candidates[low]), low, middle - 1, own))
        if middle < high:
            heapq.heappush(queue, (after + pace * float(candidates[middle + 1]), middle + 1, high, after))
    return float(candidates[best_index]), tried


def _nothing_fits(table: StageTable, memory_bytes: float) -> str:
    needed = table.smallest_memory()
    if math.isinf(needed):
        return say(
            en=f"no cut of {table.layers} layers uses all {table.devices} devices: use fewer devices, or give costs "
            "for larger submeshes.",
            fr=f"aucun découpage de {table.layers} couches n’utilise les {table.devices} périphériques : prenez moins "
            "de périphériques, ou donnez les coûts de sous-maillages plus grands.",
        )
    total, has, lacking = format_bytes(needed), format_bytes(memory_bytes), format_bytes(needed - memory_bytes)
    return say(
        en=f"no cut of {table.layers} layers on {table.devices} devices fits: a device needs at least {total} and has "
        f"{has}, so {lacking} are missing: use more devices, a smaller micro-batch, or recomputation.",
        fr=f"aucun découpage de {table.layers} couches sur {table.devices} périphériques ne tient : un périphérique a "
        f"besoin d’au moins {total} et en a {has}, il manque donc {lacking} : prenez plus de périphériques, un "
        "micro-batch plus petit, ou le recalcul.",
    )


def _check(layers: int, micro_batches: int, stages: int | None, devices: int) -> None:
    if layers < 1 or micro_batches < 1:
        raise LabError(
            say(
                en=f"a pipeline has at least one layer and one micro-batch, but layers={layers!r} and "
                f"micro_batches={micro_batches!r} were received: use 1 or more of each.",
                fr=f"un pipeline a au moins une couche et un micro-batch, mais layers={layers!r} et "
                f"micro_batches={micro_batches!r} ont été reçus : prenez-en 1 ou plus.",
            )
        )
    most = min(layers, max(devices, 1))
    if stages is not None and not 1 <= stages <= most:
        raise LabError(
            say(
                en=f"{layers} layers on {devices} devices make 1 to {most} stages, but stages={stages} was received: "
                f"use {most} at most.",
                fr=f"{layers} couches sur {devices} périphériques font de 1 à {most} étages, mais stages={stages} a "
                f"été reçu : prenez {most} au plus.",
            )
        )
