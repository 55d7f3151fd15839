"""Engine memory of sharded engines: FSDP2, DeepSpeed, ZeRO by hand, experts.

torch's FSDP2: blocks that are gathered before use and freed after it.

See `base`.

DeepSpeed, stages 0 to 3.

See `base`.

ZeRO by hand: stages 1, 2 and 3 of `dlojz.by_hand.zero`.

See `base`.

Expert parallelism, by hand and by DeepSpeed: buckets of experts' gradients apart from those of the rest.

See `base`; the all-to-alls' tensors are in the trace itself, which is of the rank's own experts. What DeepSpeed's own
layer keeps between its products is taken to be what the lab's keeps, which it is not to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlojz.config.engines import DEEPSPEED_BUCKET_ELEMENTS
from dlojz.config.run_config import RunConfig
from dlojz.prediction.engine_memory import ByHand, EngineMemory, Moments
from dlojz.prediction.shapes import FP32_BYTES, ModelShapes, ParameterShape, expert_buckets
from dlojz.prediction.states import (
    ZERO_BUCKET_BYTES,
    compute_bytes,
    deepspeed_sizes,
    touching_names,
    zero_by_hand_shares,
)
from dlojz.results.footprint import Category


class FSDP2(EngineMemory):
    """FSDP2: a block's weights are gathered, copied out, and freed; its gradients are reduce-scattered in fp32.

    Source: torch 2.13 `distributed/fsdp/_fully_shard/_fsdp_param_group.py` and `_fsdp_collectives.py`.
    """

    keeps_gradients = False

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        dp = config.layout.dp
        self.units = {f"blocks.{block[0].block}": block for block in shapes.blocks()}
        self.order = list(self.units)
        self.padded = {
            name: dp * sum(parameter.padded_rows_numel(dp) for parameter in block) for name, block in self.units.items()
        }
        self.each = compute_bytes(config)
        self.current: str | None = None

    def gathered_bytes(self) -> int:
        return self.each * sum(self.padded.values()) if self.config.layout.zero == 2 else 0

    def gather(self, step: Moments, unit: str) -> None:
        """All-gather into one buffer: all shards of the unit."""
        if step.ledger.holds(("weights", unit)) or step.ledger.holds(("gather", unit)):
            return
        step.ledger.hold(("gather", unit), "workspace", self.each * self.padded[unit] * (self.config.layout.dp > 1))

    def copy_out(self, step: Moments, unit: str) -> None:
        """From the buffer into the unit's weights, as its modules read them."""
        category: Category = "weights" if self.config.layout.zero == 2 else "workspace"
        if not step.ledger.holds(("weights", unit)):
            step.ledger.hold(("weights", unit), category, self.each * self.padded[unit], unit)

    def forward(self, step: Moments, module: str) -> None:
        if module not in self.units or self.current is not None:
            return
        self.gather(step, module)
        self.copy_out(step, module)
        for former in self.order:  # a buffer waits for the next unit's, so that copy and gathering may overlap
            if former != module:
                step.ledger.drop(("gather", former))

    def forwarded(self, step: Moments, module: str) -> None:
        if module in self.units and self.current is None and self.config.layout.zero == 3:
            step.ledger.drop(("weights", module))

    def backward(self, step: Moments, module: str) -> None:
        if module not in self.units or module == self.current:
            return
        self.finish(step)
        self.current = module
        for former in self.order:
            if former != module:
                step.ledger.drop(("gather", former))
        if not step.ledger.holds(("weights", module)):
            self.gather(step, module)
            self.copy_out(step, module)
        step.ledger.drop(("gather", module))
        number = self.order.index(module)
        if number > 0 and self.config.layout.zero == 3:
            self.gather(step, self.order[number - 1])  # prefetch

    def finish(self, step: Moments) -> None:
        """The unit whose backward is over: its weights go, its gradients are reduced, each rank keeps its shard."""
        unit = self.current
        if unit is None:
            return
        step.ledger.drop(("weights", unit))
        step.ledger.drop("reduce")
        step.ledger.hold("reduce", "workspace", FP32_BYTES * self.padded[unit], unit)
        if self.each < FP32_BYTES and not self.on_gpu:  # no CPU kernel joins and casts in one go
            step.ledger.hold("joined", "workspace", self.each * self.padded[unit], unit)
        # The shard is there before the gradients go: autograd still holds these when the unit's last hook runs.
        shard_bytes = FP32_BYTES * self.padded[unit] // self.config.layout.dp
        if step.ledger.holds(("shard", unit)):  # accumulated into the shard of the former micro-batch
            step.ledger.hold("reduced", "workspace", shard_bytes, unit)
            step.ledger.drop("reduced")
        else:
            step.ledger.hold(("shard", unit), "gradients", shard_bytes, unit)
        step.ledger.drop("joined")
        for parameter in self.units[unit]:
            step.free_gradient(parameter.name)

    def end_backward(self, step: Moments) -> None:
        self.finish(step)
        self.current = None
        step.ledger.drop("reduce")
        for unit in self.order:
            step.ledger.drop(("gather", unit))

    def update(self, step: Moments) -> None:
        dp = self.config.layout.dp
        step.ledger.hold(
            "update", "workspace", self.update_bytes([p.rows_numel(dp, 0) for p in self.shapes.parameters])
        )
        step.ledger.drop("update")


class DeepSpeed(EngineMemory):
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
        elements = sum(parameter.numel for parameter in self.filled)
        # A gradient larger than the bucket is reduced by itself, and still there when its share is made.
        large = elements > DEEPSPEED_BUCKET_ELEMENTS
        if layout.zero == 2:
            step.ledger.hold("reduce", "workspace", self.each * elements)
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


class ZeroStage1Memory(EngineMemory):
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


class ZeroStage2Memory(EngineMemory):
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


class ZeroStage3Memory(ZeroStage2Memory):
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


class ExpertsMemory(ByHand):
    """A bucket of experts that no other rank holds is never made: its gradients are divided where they are.

    Source: `dlojz.train.engines.expert_engines`.
    """

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        alone = config.layout.dp == config.layout.ep
        self.bucket_of, self.bucket_bytes = {}, []
        for experts, bucket in expert_buckets(config, shapes):
            self.bucket_of |= {parameter.name: len(self.bucket_bytes) for parameter in bucket}
            sent = not (experts and alone)
            self.bucket_bytes.append(FP32_BYTES * sum(parameter.numel for parameter in bucket) * sent)


class DeepSpeedExperts(DeepSpeed):
    """After backward the gradients of the rest go into one tensor, are reduced and come back; then those of experts.

    Source: DeepSpeed 0.19 `runtime/engine.py`, `buffered_allreduce_fallback`.
    """

    def end_backward(self, step: Moments) -> None:
        if not step.last:
            return
        for experts in (False, True):
            own = sum(parameter.numel for parameter in self.shapes.parameters if parameter.is_expert == experts)
            step.ledger.hold("reduce", "workspace", self.each * own)
            step.ledger.drop("reduce")

    def updated(self) -> list[int]:
        return deepspeed_sizes(self.config, self.shapes)
