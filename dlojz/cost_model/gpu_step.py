"""Predict the seconds of a step on one GPU from its kernels and its host, measured apart (`measuring_kernels`).

    kernel    seconds of the measured sizes nearest to its own, each scaled by the work that the two sizes come to
    host      of an operator what its launch took, times how much slower all are with this checkpointing and precision;
              and what a block costs beside its operators
    step      a kernel begins when it is launched, and the one before it is over; the update follows

Nothing is fitted to the seconds of a model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from dlojz.config.run_config import RunConfig
from dlojz.cost_model.calibration import nearest_mean
from dlojz.cost_model.launched_operators import PASS, Operator, Operators, operators_of, operators_of_level
from dlojz.cost_model.measuring import Timed
from dlojz.cost_model.measuring_kernels import APART, LEVEL_LAYERS
from dlojz.hardware import Precision
from dlojz.hardware.links import fit_line
from dlojz.models.checkpointing import LEVELS, Checkpointing

FORMS: Final = {"auto": "foreach", "in_backward": APART, "in_forward": APART}
"""Under which an update is measured, where it has another name."""


class Launching(NamedTuple):
    """What the host takes, beside what its launches take one by one.

    Attributes:
        slower: factor of a launch.
        block_s: of a block.
    """

    slower: float
    block_s: float


class Kernels:
    """A GPU's kernels and its host, as measured.

    Args:
        timings: of one rank.
    """

    def __init__(self, timings: Sequence[Timed]) -> None:
        self.kernels: dict[tuple[str, Precision], dict[tuple[int, ...], float]] = {}
        launches: dict[tuple[str, Precision], list[float]] = {}
        self.levels: dict[tuple[str, Precision, int], float] = {}
        for timing in timings:
            if timing.what == "kernel":
                self.kernels.setdefault((timing.label, timing.precision), {})[timing.size] = timing.seconds
            elif timing.what == "host":
                launches.setdefault((timing.label, timing.precision), []).append(timing.seconds)
            elif timing.what == "level":
                self.levels[timing.label, timing.precision, timing.size[0]] = timing.seconds
        # Median seconds over all sizes: launching does not depend on the size.
        self.launches = {case: statistics.median(seconds) for case, seconds in launches.items()}
        self.updates = {
            timing.label: (_update(timings, "kernel", timing.label), _update(timings, "host", timing.label))
            for timing in timings
            if timing.what == "kernel" and timing.label.startswith("update")
        }
        # Seconds of the smallest pass: no kernel takes less.
        self.least_s = min(self.kernels.get((PASS, "fp32"), {(): 0.0}).values())
        self._known: dict[Operator, float] = {}

    def knows(self, config: RunConfig) -> bool:
        """Whether all is measured that a run on one GPU is made of."""
        layout = config.layout
        is_measured = layout.checkpointing in LEVELS and _label(config) in self.updates
        return is_measured and layout.world_size == 1 and layout.offload == "none" and not layout.activation_plan

    def kernel_s(self, operator: Operator) -> float:
        """Seconds of an operator on the GPU; 0 for a view."""
        if not operator.label:
            return 0.0
        if operator not in self._known:
            self._known[operator] = self._interpolated(operator)
        return self._known[operator]

    def _interpolated(self, operator: Operator) -> float:
        # Precisions that a label was not measured in (an embedding, a view) fall back on fp32.
        of_label = self.kernels.get((operator.label, operator.precision)) or self.kernels[operator.label, "fp32"]
        scaled_s = {}
        for size, seconds in of_label.items():
            share = _work(operator.label, operator.size) / _work(operator.label, size)
            # Above the least time, seconds grow with the work.
            scaled_s[size] = self.least_s + max(seconds - self.least_s, 0.0) * share
        return of_label.get(operator.size) or nearest_mean(operator.size, scaled_s)

    def launch_s(self, operator: Operator) -> float:
        """Seconds of launching an operator by itself; one in backward counts as a sum."""
        if not operator.label:
            return self.launches["view", "fp32"]
        label = PASS if "backward" in operator.label else operator.label
        return self.launches.get((label, operator.precision)) or self.launches[label, "fp32"]

    @lru_cache(maxsize=16)  # noqa: B019
    def launching(self, level: Checkpointing, precision: Precision) -> Launching:
        """What launching costs at a level of checkpointing: from blocks of few and of more layers."""
        few, many = (operators_of_level(layers, level, precision) for layers in LEVEL_LAYERS)
        few_s, more_s = (self.levels[level, precision, layers] for layers in LEVEL_LAYERS)
        few_launches_s, more_launches_s = (
            sum(map(self.launch_s, operators.calls)) / operators.blocks for operators in (few, many)
        )
        # Both per block, of 1 and of 5 layers: in the difference what a block itself costs cancels.
        slower = (more_s - few_s) / (more_launches_s - few_launches_s)
        return Launching(slower, max(few_s - slower * few_launches_s, 0.0))

    def step_s(self, config: RunConfig) -> float:
        """Predict the seconds of a step."""
        operators = operators_of(config)
        launching = self.launching(config.layout.checkpointing, config.compute_precision)
        host_s = gpu_s = 0.0
        for micro_batch in range(config.layout.micro_batches):
            host_s, gpu_s = self._played(operators, launching, host_s, gpu_s)
            if micro_batch:  # gradients are added to those of the micro-batch before
                host_s += len(operators.tensors) * launching.slower * self.launches[PASS, "fp32"]
                gpu_s += self.kernel_s(Operator(PASS, (sum(operators.tensors),)))  # one pass over all gradients
        (tensor_s, element_s), (call_s, launch_s) = self.updates[_label(config)]
        # The update's kernels begin when the GPU is done with backward, and the host has come to the update.
        gpu_s = max(gpu_s, host_s) + tensor_s * len(operators.tensors) + element_s * sum(operators.tensors)
        # The step ends when both GPU and host have.
        return max(gpu_s, host_s + call_s + launch_s * len(operators.tensors))

    def _played(self, operators: Operators, launching: Launching, host_s: float, gpu_s: float) -> tuple[float, float]:
        """When the host and the GPU are done with a micro-batch, from when they are with what was before."""
        # A block's own cost, spread evenly over its operators.
        around_s = launching.block_s * operators.blocks / len(operators.calls)
        for operator in operators.calls:
            host_s += around_s + launching.slower * self.launch_s(operator)
            if operator.label:  # a view occupies the host alone
                gpu_s = max(gpu_s, host_s) + self.kernel_s(operator)
        return host_s, gpu_s


def _label(config: RunConfig) -> str:
    return f"update: {config.optimizer}, {FORMS.get(config.update, config.update)}"


def _update(timings: Sequence[Timed], kind: str, label: str) -> tuple[float, float]:
    """Seconds of an update: of its kernels per tensor and per element, of its launches per call and per tensor."""
    label_timings = [timing for timing in timings if timing.what == kind and timing.label == label]
    if kind == "host":  # calls are 1 each: seconds = call_s · 1 + launch_s · tensors
        return fit_line([(1.0, float(timing.size[0]), timing.seconds) for timing in label_timings])
    return fit_line(
        [(float(timing.size[0]), float(math.prod(timing.size)), timing.seconds) for timing in label_timings]
    )


def _work(label: str, size: Sequence[int]) -> float:
    """What the seconds of large kernels with this label are in proportion to."""
    if label.startswith("convolution"):
        # Multiply-adds: outputs × (kernel² · inside / groups) each.
        images, inside, outside, side, kernel, stride, groups = size
        return images * outside * (side / stride) ** 2 * kernel**2 * inside / groups
    if label.startswith("attention"):
        samples, heads, tokens, width = size[:4]
        return samples * heads * tokens**2 * width
    if label.startswith("embedding"):
        tokens, words, width = size
        # Backward writes the gradient of the whole matrix.
        return words * width if "backward" in label else tokens * width
    return math.prod(size)
