"""ZeRO by hand: stages 1, 2 and 3 of `dlojz.zero`.

Layer 3. Invariant: see `base`.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlojz.config import RunConfig
from dlojz.footprint import Category
from dlojz.predict.overlays.base import Moments, Overlay
from dlojz.predict.shapes import ModelShapes, ParameterShape
from dlojz.predict.states import FP32_BYTES, ZERO_BUCKET_BYTES, compute_bytes, zero_by_hand_shares


class ZeroStage1(Overlay):
    """Gradients are added into one flat tensor, which is there all the time."""

    keeps_gradients = False
    gradients_stay = True

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        step.free_gradient(parameter.name)

    def update(self, step: Moments) -> None:
        shares, dp = zero_by_hand_shares(self.config, self.shapes), self.config.layout.dp
        if dp > 1 and not self.on_gpu:  # gloo reduces the whole message in a copy, whoever wants which part of it
            step.ledger.hold("reduce", "workspace", FP32_BYTES * dp * sum(shares))
            step.ledger.drop("reduce")
        step.ledger.hold("update", "workspace", self.update_bytes(shares))
        step.ledger.drop("update")


class ZeroStage2(Overlay):
    """A bucket whose gradients are ready is laid into a flat tensor, and reduced from there into the share's part."""

    keeps_gradients = False
    gradients_are_states = False

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        self.buckets = self.make_buckets()
        self.bucket_of = {parameter.name: number for number, bucket in enumerate(self.buckets) for parameter in bucket}
        self.shares = zero_by_hand_shares(config, shapes)
        self.missing: list[int] = []
        self.next = 0

    def make_buckets(self) -> list[list[ParameterShape]]:
        """Parameters in the order in which they are reduced: from the last one on, until a bucket is full."""
        buckets: list[list[ParameterShape]] = [[]]
        for parameter in reversed(self.shapes.parameters):
            if FP32_BYTES * sum(one.numel for one in buckets[-1]) >= ZERO_BUCKET_BYTES:
                buckets.append([])
            buckets[-1].append(parameter)
        return buckets

    def begin_backward(self, step: Moments) -> None:
        self.missing = [len(bucket) for bucket in self.buckets]
        self.next = 0

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        self.missing[self.bucket_of[parameter.name]] -= 1
        while self.next < len(self.buckets) and not self.missing[self.next]:
            self.reduce_next(step)

    def reduce_next(self, step: Moments) -> None:
        """Reduce-scatter the next bucket; the one before has arrived."""
        number, dp = self.next, self.config.layout.dp
        self.next += 1
        step.ledger.drop(("part", number - 1))
        step.ledger.drop("flat")
        share_bytes = FP32_BYTES * self.shares[number]
        first = not step.ledger.holds(("share", number))
        key: tuple[str, int] = ("share" if first else "part", number)
        category: Category = "gradients" if first else "workspace"
        if dp == 1:  # the flat tensor is the share
            step.ledger.hold(key, category, share_bytes)
        else:
            step.ledger.hold("flat", "workspace", dp * share_bytes)
        for parameter in self.buckets[number]:
            step.free_gradient(parameter.name)
        if dp > 1:
            step.ledger.hold(key, category, share_bytes)

    def end_backward(self, step: Moments) -> None:
        while self.next < len(self.buckets):
            self.reduce_next(step)
        step.ledger.drop(("part", self.next - 1))
        step.ledger.drop("flat")

    def update(self, step: Moments) -> None:
        step.ledger.hold("update", "workspace", self.update_bytes(self.shares))
        step.ledger.drop("update")

    def end_step(self, step: Moments) -> None:
        for number in range(len(self.buckets)):
            step.ledger.drop(("share", number))


class ZeroStage3(ZeroStage2):
    """Each block's weights are whole for its forward and its backward, and those of the next one are on their way."""

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        self.each = compute_bytes(config)
        self.units = [f"blocks.{block[0].block}" for block in shapes.blocks()]
        self.in_backward = False

    def make_buckets(self) -> list[list[ParameterShape]]:
        """One per block, from the last on."""
        return [list(block) for block in self.shapes.blocks()][::-1]

    def standing(self) -> Mapping[str, tuple[Category, int]]:
        return {}

    def gather(self, step: Moments, unit: int) -> None:
        """All-gather a unit's weights, unless they are there."""
        if not 0 <= unit < len(self.units) or step.ledger.holds(("weights", unit)):
            return
        share = self.shares[len(self.units) - 1 - unit]
        step.ledger.hold(("weights", unit), "workspace", self.each * self.config.layout.dp * share, self.units[unit])
        if self.each < FP32_BYTES:
            step.ledger.hold("cast", "workspace", self.each * share)
            step.ledger.drop("cast")

    def forward(self, step: Moments, module: str) -> None:
        if module in self.units:
            unit = self.units.index(module)
            self.gather(step, unit)
            if not self.in_backward:
                self.gather(step, unit + 1)

    def forwarded(self, step: Moments, module: str) -> None:
        if module in self.units and not self.in_backward:
            step.ledger.drop(("weights", self.units.index(module)))

    def begin_backward(self, step: Moments) -> None:
        super().begin_backward(step)
        self.in_backward = True

    def backward(self, step: Moments, module: str) -> None:
        if module in self.units:
            unit = self.units.index(module)
            self.gather(step, unit)
            self.gather(step, unit - 1)

    def reduce_next(self, step: Moments) -> None:
        """As stage 2, once the unit's weights are freed."""
        step.ledger.drop(("weights", len(self.units) - 1 - self.next))
        super().reduce_next(step)

    def end_backward(self, step: Moments) -> None:
        super().end_backward(step)
        self.in_backward = False
        for unit in range(len(self.units)):
            step.ledger.drop(("weights", unit))
