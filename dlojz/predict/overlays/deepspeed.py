"""DeepSpeed, stages 0 to 3.

Layer 3. Invariant: see `base`.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlojz.config import DEEPSPEED_BUCKET_ELEMENTS, RunConfig
from dlojz.footprint import Category
from dlojz.predict.overlays.base import Moments, Overlay
from dlojz.predict.shapes import ModelShapes, ParameterShape
from dlojz.predict.states import FP32_BYTES, compute_bytes, touching_names


class DeepSpeed(Overlay):
    """DeepSpeed stage 0: after backward all gradients go into one tensor, are reduced, and come back.

    Source: DeepSpeed 0.19 `runtime/engine.py`, `buffered_allreduce_fallback`.
    """

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        self.each = compute_bytes(config)

    def end_backward(self, step: Moments) -> None:
        if step.last:
            step.ledger.hold("reduce", "workspace", self.each * self.shapes.num_parameters)
            step.ledger.drop("reduce")

    def update(self, step: Moments) -> None:
        if self.config.precision != "fp32":
            step.ledger.hold("fp32 gradients", "workspace", FP32_BYTES * sum(self.updated()))
        step.ledger.hold("update", "workspace", self.update_bytes(self.updated()))
        step.ledger.drop("update")
        step.ledger.drop("fp32 gradients")

    def updated(self) -> list[int]:
        """Elements of the tensors that the optimizer updates on this rank."""
        return [parameter.numel for parameter in self.shapes.parameters]


class DeepSpeed12(DeepSpeed):
    """Stages 1 and 2: gradients go through one reduce bucket; stage 2 forgets them there, stage 1 at the update.

    Source: DeepSpeed 0.19 `runtime/zero/stage_1_and_2.py`, `reduce_independent_p_g_buckets_and_remove_grads`.
    """

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        self.filled: list[ParameterShape] = []
        self.keeps_gradients = config.layout.zero == 1
        self.gradients_are_states = config.layout.micro_batches > 1
        self.touching: frozenset[str] = frozenset()

    def begin_step(self, step: Moments) -> None:
        self.touching = touching_names(self.shapes, self.config.layout.dp, self.dp_rank)

    def flush(self, step: Moments) -> None:
        """Reduce what the bucket holds, in stage 2 in a copy; what reaches into this rank's share stays, whole."""
        layout = self.config.layout
        # A gradient larger than the bucket is reduced by itself, and still there when its share is made.
        large = any(parameter.numel > DEEPSPEED_BUCKET_ELEMENTS for parameter in self.filled)
        if layout.zero == 2:
            step.ledger.hold("reduce", "workspace", self.each * sum(parameter.numel for parameter in self.filled))
        if not large:
            step.ledger.drop("reduce")
        if layout.zero == 2 or layout.micro_batches == 1:
            for parameter in self.filled:
                if not large:
                    step.free_gradient(parameter.name)
                if parameter.name in self.touching and not step.ledger.holds(("share", parameter.name)):
                    step.ledger.hold(("share", parameter.name), "gradients", self.each * parameter.numel)
                step.free_gradient(parameter.name)
        step.ledger.drop("reduce")
        self.filled = []

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        if not step.last and self.config.layout.zero == 1:
            return
        if not step.ledger.holds("bucket"):
            step.ledger.hold("bucket", "workspace", self.each * DEEPSPEED_BUCKET_ELEMENTS)
        filled = sum(one.numel for one in self.filled)
        if filled and filled + parameter.numel > DEEPSPEED_BUCKET_ELEMENTS:
            self.flush(step)
        self.filled.append(parameter)
        if self.config.layout.zero == 2:
            step.free_gradient(parameter.name)

    def end_backward(self, step: Moments) -> None:
        if self.filled:
            self.flush(step)
        step.ledger.drop("bucket")

    def update(self, step: Moments) -> None:
        step.ledger.hold("flat share", "gradients", self.each * sum(self.updated()))
        for parameter in self.shapes.parameters:
            step.free_gradient(parameter.name)
            step.ledger.drop(("share", parameter.name))
        if self.each < FP32_BYTES:
            step.ledger.hold("fp32 share", "gradients", FP32_BYTES * sum(self.updated()))
            step.ledger.drop("flat share")
        step.ledger.hold("update", "workspace", self.update_bytes(self.updated()))
        for key in ("update", "fp32 share", "flat share"):
            step.ledger.drop(key)

    def updated(self) -> list[int]:
        return [-(-self.shapes.num_parameters // self.config.layout.dp)]


class DeepSpeed3(DeepSpeed12):
    """Stage 3: each module's weights are gathered for its forward, and again for its backward.

    Source: DeepSpeed 0.19 `runtime/zero/stage3.py` and `partitioned_param_coordinator.py`.
    """

    gradients_stay = True

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        self.keeps_gradients = False
        dp = config.layout.dp
        self.whole: dict[str, int] = {}
        for parameter in shapes.parameters:
            padded = dp * parameter.padded_numel(dp)
            self.whole[parameter.module] = self.whole.get(parameter.module, 0) + padded

    def standing(self) -> Mapping[str, tuple[Category, int]]:
        return {"bucket": ("workspace", self.each * DEEPSPEED_BUCKET_ELEMENTS)}

    def gather(self, step: Moments, module: str) -> None:
        """The module's whole weights; those of another module went with its pass."""
        num_bytes = self.each * self.whole.get(module, 0)
        if num_bytes:
            step.ledger.hold(("weights", module), "workspace", num_bytes, module)

    def forward(self, step: Moments, module: str) -> None:
        self.gather(step, module)

    def forwarded(self, step: Moments, module: str) -> None:
        step.ledger.drop(("weights", module))

    def backward(self, step: Moments, module: str) -> None:
        self.gather(step, module)

    def flush(self, step: Moments) -> None:
        step.ledger.hold("reduce", "workspace", 2 * self.each * sum(parameter.numel for parameter in self.filled))
        step.ledger.drop("reduce")
        self.filled = []

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        filled = sum(one.numel for one in self.filled)
        if filled and filled + parameter.numel > DEEPSPEED_BUCKET_ELEMENTS:
            self.flush(step)
        self.filled.append(parameter)
        step.free_gradient(parameter.name)
        step.ledger.drop(("weights", parameter.module))

    def end_backward(self, step: Moments) -> None:
        self.flush(step)
        for module in self.whole:
            step.ledger.drop(("weights", module))

    def update(self, step: Moments) -> None:
        if self.each < FP32_BYTES:
            step.ledger.hold("fp32 share", "workspace", FP32_BYTES * sum(self.updated()))
        step.ledger.hold("update", "workspace", self.update_bytes(self.updated()))
        step.ledger.drop("update")
        step.ledger.drop("fp32 share")

    def updated(self) -> list[int]:
        dp = self.config.layout.dp
        return [sum(parameter.padded_numel(dp) for parameter in self.shapes.parameters)]
