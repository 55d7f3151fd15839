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
from dlojz.cost_model.launched_operators import PASS, Operator, Operators, operators_of, operators_of_level
from dlojz.cost_model.measuring import Timed
from dlojz.cost_model.measuring_kernels import APART, LEVEL_LAYERS
from dlojz.hardware import Precision
from dlojz.hardware.links import fit_line
from dlojz.models.checkpointing import LEVELS, Checkpointing

NEAREST: Final = 3
"""Measured sizes that a kernel's seconds are taken from, by their distance in logarithms."""
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
        for one in timings:
            if one.what == "kernel":
                self.kernels.setdefault((one.label, one.precision), {})[one.size] = one.seconds
            elif one.what == "host":
                launches.setdefault((one.label, one.precision), []).append(one.seconds)
            elif one.what == "level":
                self.levels[one.label, one.precision, one.size[0]] = one.seconds
        # Median seconds over all sizes: launching does not depend on the size.
        self.launches = {case: statistics.median(seconds) for case, seconds in launches.items()}
        self.updates = {
            one.label: (_update(timings, "kernel", one.label), _update(timings, "host", one.label))
            for one in timings
            if one.what == "kernel" and one.label.startswith("update")
        }
        # Seconds of the smallest pass: no kernel takes less.
        self.least_s = min(self.kernels.get((PASS, "fp32"), {(): 0.0}).values())
        self._known: dict[Operator, float] = {}

    def knows(self, config: RunConfig) -> bool:
        """Whether all is measured that a run on one GPU is made of."""
        layout = config.layout
        known = layout.checkpointing in LEVELS and _label(config) in self.updates
        return known and layout.world_size == 1 and layout.offload == "none" and not layout.activation_plan

    def kernel_s(self, one: Operator) -> float:
        """Seconds of an operator on the GPU; 0 for a view."""
        if not one.label:
            return 0.0
        if one not in self._known:
            self._known[one] = self._interpolated(one)
        return self._known[one]

    def _interpolated(self, one: Operator) -> float:
        # Precisions that a label was not measured in (an embedding, a view) fall back on fp32.
        of_label = self.kernels.get((one.label, one.precision)) or self.kernels[one.label, "fp32"]
        if one.size in of_label:
            return of_label[one.size]
        near = sorted((_distance(one.size, size), size) for size in of_label)[:NEAREST]
        weights = [distance**-2 for distance, _ in near]  # no distance is 0: a measured size has returned above
        logarithms = []
        for _, size in near:
            share = _work(one.label, one.size) / _work(one.label, size)
            # Above the least time, seconds grow with the work.
            scaled_s = max(of_label[size] - self.least_s, 0.0) * share
            logarithms.append(math.log(self.least_s + scaled_s))
        # Weighted geometric mean.
        return math.exp(sum(map(math.prod, zip(weights, logarithms, strict=True))) / sum(weights))

    def launch_s(self, one: Operator) -> float:
        """Seconds of launching an operator by itself; one in backward counts as a sum."""
        if not one.label:
            return self.launches["view", "fp32"]
        label = PASS if "backward" in one.label else one.label
        return self.launches.get((label, one.precision)) or self.launches[label, "fp32"]

    @lru_cache(maxsize=16)  # noqa: B019
    def launching(self, level: Checkpointing, precision: Precision) -> Launching:
        """What launching costs at a level of checkpointing: from blocks of few and of more layers."""
        few, more = (operators_of_level(layers, level, precision) for layers in LEVEL_LAYERS)
        few_s, more_s = (self.levels[level, precision, layers] for layers in LEVEL_LAYERS)
        few_launches_s, more_launches_s = (sum(map(self.launch_s, one.calls)) / one.blocks for one in (few, more))
        # Both per block, of 1 and of 5 layers: in the difference what a block itself costs cancels.
        slower = (more_s - few_s) / (more_launches_s - few_launches_s)
        return Launching(slower, max(few_s - slower * few_launches_s, 0.0))

    def step_s(self, config: RunConfig) -> float:
        """Predict the seconds of a step."""
        found = operators_of(config)
        launching = self.launching(config.layout.checkpointing, config.compute_precision)
        host_s = gpu_s = 0.0
        for micro_batch in range(config.layout.micro_batches):
            host_s, gpu_s = self._played(found, launching, host_s, gpu_s)
            if micro_batch:  # gradients are added to those of the micro-batch before
                host_s += len(found.tensors) * launching.slower * self.launches[PASS, "fp32"]
                gpu_s += self.kernel_s(Operator(PASS, (sum(found.tensors),)))  # one pass over all gradients
        (tensor_s, element_s), (call_s, launch_s) = self.updates[_label(config)]
        # The update's kernels begin when the GPU is done with backward, and the host has come to the update.
        gpu_s = max(gpu_s, host_s) + tensor_s * len(found.tensors) + element_s * sum(found.tensors)
        # The step ends when both GPU and host have.
        return max(gpu_s, host_s + call_s + launch_s * len(found.tensors))

    def _played(self, found: Operators, launching: Launching, host_s: float, gpu_s: float) -> tuple[float, float]:
        """When the host and the GPU are done with a micro-batch, from when they are with what was before."""
        # A block's own cost, spread evenly over its operators.
        around_s = launching.block_s * found.blocks / len(found.calls)
        for one in found.calls:
            host_s += around_s + launching.slower * self.launch_s(one)
            if one.label:  # a view occupies the host alone
                gpu_s = max(gpu_s, host_s) + self.kernel_s(one)
        return host_s, gpu_s


def _label(config: RunConfig) -> str:
    return f"update: {config.optimizer}, {FORMS.get(config.update, config.update)}"


def _update(timings: Sequence[Timed], what: str, label: str) -> tuple[float, float]:
    """Seconds of an update: of its kernels per tensor and per element, of its launches per call and per tensor."""
    own = [one for one in timings if one.what == what and one.label == label]
    if what == "host":  # calls are 1 each: seconds = call_s · 1 + launch_s · tensors
        return fit_line([(1.0, float(one.size[0]), one.seconds) for one in own])
    return fit_line([(float(one.size[0]), float(math.prod(one.size)), one.seconds) for one in own])


def _distance(size: Sequence[int], other: Sequence[int]) -> float:
    return math.dist([math.log1p(one) for one in size], [math.log1p(one) for one in other])


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
