"""Engine memory of sharded engines: FSDP2, DeepSpeed stages 0 to 3, ZeRO by hand, experts.

The all-to-alls' tensors of experts are in the trace itself, which is of the rank's own experts. DeepSpeed's own expert
layer is assumed to keep between its products what the lab's keeps, which it does not to the byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dlojz.config.compatibility import has_tied_head
from dlojz.config.engines import DEEPSPEED_BUCKET_ELEMENTS
from dlojz.config.run_config import RunConfig
from dlojz.prediction.engine_memory import ByHand, EngineMemory, Moments
from dlojz.prediction.shapes import (
    FP32_BYTES,
    ModelShapes,
    ParameterShape,
    expert_buckets,
    fill_buckets,
    shapes_of_modules,
)
from dlojz.prediction.states import (
    ZERO_BUCKET_BYTES,
    compute_bytes,
    deepspeed_messages,
    deepspeed_sizes,
    gathered_element_bytes,
    gradient_bytes,
    padded_of_modules,
    touching_names,
    zero_3_sub_groups,
    zero_3_units,
    zero_by_hand_shares,
)
from dlojz.results.footprint import Category

FP64_BYTES = 8
"""DeepSpeed sums the squares of gradients in doubles (`get_norm_dtype`)."""
COPY_IN_STREAM, REDUCE_STREAM = 1, 2
"""Streams of FSDP2 that allocate: gathered buffers, and what is reduced (`foreach_all_gather`, `foreach_reduce`)."""


def last_parameter(module: str, unit: Iterable[ParameterShape]) -> str:
    """Name the last parameter of a unit in FSDP2's order, in which a module's own ones come after its children's.

    Source: torch 2.13 `distributed/fsdp/_fully_shard/_fsdp_init.py`, `_get_managed_modules`.

    Args:
        module: the unit's, or of a unit of several the last one's.
        unit: its parameters, as in `model.parameters()`.
    """
    # A dot ends both, so that `blocks.1` does not take what is in `blocks.10`.
    within = [parameter for parameter in unit if f"{parameter.name}.".startswith(f"{module}.")]
    parameter_names = [parameter.name for parameter in within if parameter.module == module]
    if parameter_names:
        return parameter_names[-1]
    child = within[-1].name.removeprefix(f"{module}.").split(".")[0]
    return last_parameter(f"{module}.{child}", within)


class FSDP2(EngineMemory):
    """Engine memory of FSDP2: a block's weights are gathered, copied out, and freed; gradients are reduced in fp32,
    or, where nothing is cast, in the type of the weights. Frozen parameters are gathered, but not reduced.

    Source: torch 2.13 `distributed/fsdp/_fully_shard/_fsdp_param_group.py` and `_fsdp_collectives.py`.
    """

    keeps_gradients = False

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        dp = config.layout.dp
        self.units = {f"blocks.{unit[-1].block}": unit for unit in shapes.units()}
        self.unit_of = {f"blocks.{parameter.block}": name for name, unit in self.units.items() for parameter in unit}
        self.enclosing = f"blocks.{shapes.enclosing}" if shapes.enclosing is not None else ""
        self.until_the_end = {name for name, unit in self.units.items() if any(parameter.tied for parameter in unit)}
        """Units whose gradients are whole at the end of backward: they compute in its first and its last block."""
        if self.enclosing in self.units:
            self.until_the_end.add(self.enclosing)
        self.order = list(self.units)
        self.last_of = {name: last_parameter(name, unit) for name, unit in self.units.items()}
        """Parameter of each unit whose gradient stays until the unit is reduced: a loop's variable names it still."""
        self.unit_bytes = {
            name: dp
            * sum(gathered_element_bytes(config, parameter) * parameter.padded_rows_numel(dp) for parameter in unit)
            for name, unit in self.units.items()
        }
        """Bytes of each unit's weights as they are gathered."""
        trained = {name: [parameter for parameter in unit if parameter.is_trained] for name, unit in self.units.items()}
        self.reduced = {
            name: dp * sum(parameter.padded_rows_numel(dp) for parameter in parameters)
            for name, parameters in trained.items()
        }
        """Elements of each unit's gradients, padded: fewer than its weights' where some are frozen."""
        for name, parameters in trained.items():
            if parameters and len(parameters) < len(self.units[name]):
                self.last_of[name] = last_parameter(name, parameters)
        self.frozen = frozenset(parameter.name for parameter in shapes.parameters if not parameter.is_trained)
        # Gradients of weights that are cast are reduced in fp32; else in their own type, which a unit's have in common.
        own_bytes = {parameter.element_bytes for parameter in shapes.parameters if parameter.is_trained} or {FP32_BYTES}
        self.shard_each = max(own_bytes)
        self.each = compute_bytes(config) if config.precision in ("bf16", "fp16") else self.shard_each
        self.reduced_each = FP32_BYTES if config.precision in ("bf16", "fp16") else self.shard_each
        """Bytes of a gradient as it is reduced."""
        self.kept = frozenset(self.units) if config.layout.zero == 2 else frozenset()
        """Units whose gathered weights stay from forward to backward."""
        self.current: str | None = None

    def gathered_bytes(self) -> int:
        return sum(self.unit_bytes[unit] for unit in self.kept)

    def gather(self, step: Moments, unit: str) -> None:
        """All-gather the shards of a unit into one buffer."""
        if step.ledger.holds(("weights", unit)) or step.ledger.holds(("gather", unit)):
            return
        # One rank alone gathers nothing: it copies out of its own shard.
        num_bytes = self.unit_bytes[unit] * (self.config.layout.dp > 1)
        step.ledger.hold(("gather", unit), "workspace", num_bytes, stream=COPY_IN_STREAM)

    def copy_out(self, step: Moments, unit: str) -> None:
        """Copy a unit's weights out of the buffer."""
        category: Category = "weights" if unit in self.kept else "workspace"
        if not step.ledger.holds(("weights", unit)):
            step.ledger.hold(("weights", unit), category, self.unit_bytes[unit], unit)

    def forward(self, step: Moments, module: str) -> None:
        unit = self.unit_of.get(module)
        # In backward (`current`) a recomputed block finds its weights gathered.
        if unit is None or self.current is not None or step.ledger.holds(("weights", unit)):
            return
        self.gather(step, unit)
        self.copy_out(step, unit)
        for name in self.order:  # a buffer waits for the next unit's, so that copy and gathering may overlap
            if name != unit:
                step.ledger.drop(("gather", name))

    def forwarded(self, step: Moments, module: str) -> None:
        if module in self.units and self.current is None and module not in self.kept:
            step.ledger.drop(("weights", module))
        if not module:  # the whole model's forward is over: the last buffer goes
            for unit in self.order:
                step.ledger.drop(("gather", unit))

    def backward(self, step: Moments, module: str) -> None:
        if self.enclosing and module.startswith(f"{self.enclosing}.") and self.current not in (None, self.enclosing):
            self.finish(step)  # backward has left a part for what calls it
            self.current = self.enclosing
            return
        unit = self.unit_of.get(module)
        if unit is None or module == self.current:
            return
        if self.current not in self.until_the_end:
            self.finish(step)
        self.current = unit
        if unit != module:  # the embedding: gathered for the head's backward
            return
        for name in self.order:
            if name != module:
                step.ledger.drop(("gather", name))
        if not step.ledger.holds(("weights", module)):
            self.gather(step, module)
            self.copy_out(step, module)
        step.ledger.drop(("gather", module))
        number = self.order.index(module)
        if number > 0:
            self.gather(step, self.order[number - 1])  # prefetch, unless it was kept

    def finish(self, step: Moments) -> None:
        """End a unit's backward: its weights are freed, its gradients reduced, each rank keeps its shard."""
        unit = self.current
        if unit is None:
            return
        step.ledger.drop(("weights", unit))
        step.ledger.drop("reduce")
        if not self.reduced[unit]:  # all frozen
            return
        step.ledger.hold("reduce", "workspace", self.reduced_each * self.reduced[unit], unit)
        if self.each < self.reduced_each and not self.on_gpu:  # no CPU kernel joins and casts in one go
            step.ledger.hold("joined", "workspace", self.each * self.reduced[unit], unit)
        last_name = self.last_of[unit]
        for parameter in self.units[unit]:
            if parameter.name != last_name and parameter.name not in self.frozen:
                step.free_gradient(parameter.name)
        step.ledger.drop("joined")
        shard_bytes = self.shard_each * self.reduced[unit] // self.config.layout.dp
        is_new_shard = not step.ledger.holds(
            ("shard", unit)
        )  # else accumulated into the shard of the former micro-batch
        if is_new_shard:
            step.ledger.hold(("shard", unit), "gradients", shard_bytes, unit, REDUCE_STREAM)
        else:
            step.ledger.hold("reduced", "workspace", shard_bytes, unit, REDUCE_STREAM)
        if self.config.layout.dp > 1 and not self.on_gpu:  # gloo reduces the whole message in a copy
            step.ledger.hold_briefly("copy", "workspace", self.reduced_each * self.reduced[unit], unit)
        step.ledger.drop("reduced")
        step.free_gradient(last_name)

    def end_backward(self, step: Moments) -> None:
        self.finish(step)
        for unit in self.until_the_end - {self.current}:
            self.current = unit
            self.finish(step)
        self.current = None
        step.ledger.drop("reduce")
        for unit in self.order:
            step.ledger.drop(("gather", unit))

    def elements_of(self, parameter: ParameterShape) -> int:
        """Count the elements of a parameter that this rank updates: its rows."""
        return parameter.rows_numel(self.config.layout.dp, 0)

    def updated(self) -> list[int]:
        return [self.elements_of(parameter) for parameter in self.shapes.parameters if parameter.is_trained]


class DeepSpeed(EngineMemory):
    """Engine memory of DeepSpeed stage 0: after backward all gradients are reduced in one tensor, and come back.

    A parameter that backward does not reach has zeros as its gradient by then.

    Source: DeepSpeed 0.19 `runtime/engine.py`, `_get_gradients_for_reduction` and `buffered_allreduce_fallback`.
    """

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        self.each = compute_bytes(config)

    def end_backward(self, step: Moments) -> None:
        if step.last:
            for parameter in self.unreached():
                step.ledger.hold(("gradient", parameter.name), "gradients", self.each * parameter.numel)
            step.ledger.hold_briefly("reduce", "workspace", self.each * self.shapes.num_parameters)

    def unreached(self) -> list[ParameterShape]:
        """List the parameters that backward does not reach."""
        return [parameter for parameter in self.shapes.parameters if not parameter.is_trained]

    def update(self, step: Moments) -> None:
        if self.config.precision != "fp32":
            step.ledger.hold("fp32 gradients", "workspace", FP32_BYTES * sum(self.updated()))
        super().update(step)
        step.ledger.drop("fp32 gradients")


class DeepSpeed12(DeepSpeed):
    """Engine memory of DeepSpeed stages 1 and 2: gradients are copied into a bucket, reduced there, and kept in a copy.

    Stage 2 fills the bucket in backward, as gradients become ready; stage 1 after the last micro-batch, in the order of
    `model.parameters()`, when all whole gradients are there. A gradient in the bucket is a view of it; one that is
    larger than the bucket stays in its own tensor. The copy (`grads_in_partition`) holds all parameters that reach into
    the rank's share, whole; it is allocated with the first bucket that has one of them. Stage 2 makes another with each
    further micro-batch, which is added to the first. It has room for parameters that backward does not reach too, but
    zeros of their own stand for their gradients.

    Source: DeepSpeed 0.19 `runtime/zero/stage_1_and_2.py`, `setup_buckets`, `reduce_gradients`, `reduce_ipg_grads`,
    `copy_grads_in_partition`, `independent_gradient_partition_epilogue` and `step`.
    """

    bucket_elements = DEEPSPEED_BUCKET_ELEMENTS

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        self.groups: tuple[ModelShapes, ...] = (shapes,)
        """Parameters that are flattened together."""
        self.filled: list[ParameterShape] = []
        self.keeps_gradients = config.layout.zero == 1
        self.gradients_are_states = config.layout.micro_batches > 1
        self.touching: frozenset[str] = frozenset()

    def begin_step(self, step: Moments) -> None:
        dp = self.config.layout.dp
        # Not in `__init__`: `states_and_overlay` sets `dp_rank` after it.
        self.touching = frozenset(name for group in self.groups for name in touching_names(group, dp, self.dp_rank))

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        if not step.ledger.holds("bucket"):
            step.ledger.hold("bucket", "workspace", self.each * self.bucket_elements)
        if self.config.layout.zero == 2:
            self.collect(step, parameter)

    def collect(self, step: Moments, parameter: ParameterShape) -> None:
        """Copy a gradient into the bucket, which is reduced first where it would not fit."""
        filled = sum(gradient.numel for gradient in self.filled)
        if filled and filled + parameter.numel > self.bucket_elements:
            self.flush(step)
        self.filled.append(parameter)
        if parameter.numel <= self.bucket_elements:
            step.free_gradient(parameter.name)

    def flush(self, step: Moments) -> None:
        """Reduce the bucket, in a copy where it reaches into several ranks' shares; then copy what this rank keeps."""
        for message in deepspeed_messages(self.groups, self.config.layout.dp, self.filled, self.bucket_elements):
            if len(message) > 1:
                # A single piece is reduced where it lies in the bucket.
                step.ledger.hold_briefly("reduce", "workspace", self.each * sum(message))
        share_names = [parameter.name for parameter in self.filled if parameter.name in self.touching]
        if share_names and not step.ledger.holds("copy"):
            elements = sum(self.by_name[name].numel for name in self.touching)
            is_first_copy = not step.ledger.holds("share")
            step.ledger.hold("copy", "gradients" if is_first_copy else "workspace", self.each * elements)
            if self.config.layout.zero == 1 and self.gradients_are_states:
                step.gradient_bytes = max(step.gradient_bytes, step.ledger.bytes_of_category("gradients"))
        for parameter in self.filled:  # that of stage 1 which is no share of this rank stays until the end
            if self.config.layout.zero == 2 or parameter.name in share_names:
                step.free_gradient(parameter.name)
        self.filled = []

    def end_backward(self, step: Moments) -> None:
        if self.config.layout.zero == 1:
            if not step.last:
                return
            for parameter in self.shapes.trained.parameters:
                self.collect(step, parameter)
        if self.filled:
            self.flush(step)
        step.ledger.drop("bucket")
        for parameter in self.shapes.parameters:
            step.free_gradient(parameter.name)
        zeros_bytes = self.each * sum(
            parameter.numel for parameter in self.unreached() if parameter.name in self.touching
        )
        if step.ledger.holds("share") or step.ledger.holds("zeros"):
            step.ledger.hold_briefly("new zeros", "workspace", zeros_bytes)
            step.ledger.drop("copy")  # added to the first
        else:
            step.ledger.rename("copy", "share")
            step.ledger.hold("zeros", "gradients", zeros_bytes)

    def update(self, step: Moments) -> None:
        step.ledger.hold("flat share", "gradients", self.each * sum(self.updated()))
        if self.each < FP32_BYTES:
            step.ledger.hold("fp32 share", "gradients", FP32_BYTES * sum(self.updated()))
            # Its copy in fp32 is there.
            step.ledger.drop("flat share")
        step.ledger.drop("share")
        step.ledger.drop("zeros")
        step.ledger.hold("update", "workspace", self.update_bytes(self.updated()))
        for key in ("update", "fp32 share", "flat share"):
            step.ledger.drop(key)

    def updated(self) -> list[int]:
        # One flat share per group, whatever the number of parameters.
        return [-(-group.num_parameters // self.config.layout.dp) for group in self.groups]


class DeepSpeed3(DeepSpeed12):
    """Engine memory of DeepSpeed stage 3: each module's weights are gathered for its forward and for its backward.

    Source: DeepSpeed 0.19 `runtime/zero/partitioned_param_coordinator.py` and `stage3.py`, for the update `step`,
    `_prepare_fp32_grad_for_sub_group`, `get_grad_norm_direct` and `has_overflow`; for what a recomputed block keeps,
    torch 2.13 `utils/checkpoint.py`, `_recomputation_hook`.
    """

    gradients_stay = True
    in_backward = False

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        self.keeps_gradients = False
        of_modules = self.of_modules()
        self.whole = padded_of_modules(of_modules, config.layout.dp)
        self.head = of_modules[-1].module if self.has_tied_head() else ""
        trained = {parameter.module for parameter in of_modules if parameter.is_trained}
        self.frozen = [module for module in self.whole if module not in trained]
        """Modules without a gradient whose readiness would free their weights: they go with the next module's turn."""

    def of_modules(self) -> Sequence[ParameterShape]:
        """List the parameters of all modules, with a tied matrix in each module that computes with it."""
        return shapes_of_modules(self.config).parameters

    def has_tied_head(self) -> bool:
        """Whether the last module computes with a matrix of another one."""
        return has_tied_head(self.config)

    def standing(self) -> Mapping[str, tuple[Category, int]]:
        return {"bucket": ("workspace", self.each * self.bucket_elements)}

    def gather(self, step: Moments, module: str) -> None:
        """Gather a module's weights."""
        num_bytes = self.each * self.whole.get(module, 0)
        if num_bytes:
            step.ledger.hold(("weights", module), "workspace", num_bytes, module)

    def forward(self, step: Moments, module: str) -> None:
        self.gather(step, module)

    def begin_backward(self, step: Moments) -> None:
        super().begin_backward(step)
        self.in_backward = True

    def forwarded(self, step: Moments, module: str) -> None:
        if self.in_backward:  # recomputed: torch keeps what backward will read, the gathered weights too
            step.ledger.rename(("weights", module), ("recomputed", module))
        step.ledger.drop(("weights", module))

    def backward(self, step: Moments, module: str) -> None:
        for frozen in self.frozen:
            if frozen != module:
                step.ledger.drop(("weights", frozen))
        self.gather(step, module)
        if self.head != module:  # its gradient is ready with the embedding's only
            step.ledger.drop(("weights", self.head))

    def flush(self, step: Moments) -> None:
        step.ledger.hold_briefly("reduce", "workspace", 2 * self.each * sum(gradient.numel for gradient in self.filled))
        self.filled = []

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        filled = sum(gradient.numel for gradient in self.filled)
        if filled and filled + parameter.numel > self.bucket_elements:
            self.flush(step)
        self.filled.append(parameter)
        step.free_gradient(parameter.name)
        for kind in ("weights", "recomputed"):
            step.ledger.drop((kind, parameter.module))

    def end_backward(self, step: Moments) -> None:
        self.flush(step)
        self.in_backward = False
        for module in self.whole:
            for kind in ("weights", "recomputed"):
                step.ledger.drop((kind, module))

    def update(self, step: Moments) -> None:
        """Check fp16 for overflow, take the norm parameter by parameter, then update one sub-group after the other."""
        sub_groups, ledger = self.sub_groups(), step.ledger
        if self.config.layout.offload in ("optimizer", "parameters"):  # on the host, where the gradients are already
            if not self.on_gpu:
                ledger.hold_briefly("update", "workspace", max(self.update_bytes([size]) for size in self.updated()))
            return
        if self.config.precision == "fp16":  # `isinf`: the magnitudes of all gradients, and whether each is infinite
            ledger.hold_briefly("overflow", "workspace", (self.each + 1) * sum(map(sum, sub_groups)))
        # Of one parameter's shard at a time, in fp64.
        ledger.hold_briefly("norm", "workspace", FP64_BYTES * max(map(max, sub_groups)))
        element_bytes = gradient_bytes(self.config)
        for sizes in sub_groups:
            elements, is_copied = sum(sizes), len(sizes) > 1  # the gradient of one parameter alone is flat already
            if is_copied:
                ledger.hold("flat gradients", "workspace", element_bytes * elements)
            if element_bytes < FP32_BYTES:
                ledger.hold("fp32 gradients", "workspace", FP32_BYTES * elements)
                ledger.drop("flat gradients")
            ledger.hold_briefly("update", "workspace", self.update_bytes([elements]))
            for key in ("flat gradients", "fp32 gradients"):
                ledger.drop(key)

    def sub_groups(self) -> list[list[int]]:
        """List the elements of the shards in each sub-group."""
        return zero_3_sub_groups(self.config, self.shapes)

    def updated(self) -> list[int]:
        return [sum(sizes) for sizes in self.sub_groups()]


class ZeroStage1Memory(EngineMemory):
    """Engine memory of ZeRO-1 by hand: gradients are added into one flat tensor, which is there all the time."""

    keeps_gradients = False
    gradients_stay = True

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        step.free_gradient(parameter.name)

    def update(self, step: Moments) -> None:
        if self.config.layout.dp > 1 and not self.on_gpu:  # gloo reduces the whole message in a copy
            step.ledger.hold_briefly("reduce", "workspace", FP32_BYTES * self.config.layout.dp * sum(self.updated()))
        super().update(step)

    def updated(self) -> list[int]:
        return zero_by_hand_shares(self.config, self.shapes)


class ZeroStage2Memory(EngineMemory):
    """Engine memory of ZeRO-2 by hand: a bucket is copied into a flat tensor, and reduced from there into the share."""

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
        """Fill buckets in the order in which they are reduced: from the last parameter on."""
        return fill_buckets(reversed(self.shapes.parameters), ZERO_BUCKET_BYTES)

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
        # The first micro-batch's share stays; a later one's is beside it until the next bucket leaves.
        is_first_share = not step.ledger.holds(("share", number))
        key: tuple[str, int] = ("share" if is_first_share else "part", number)
        category: Category = "gradients" if is_first_share else "workspace"
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

    def updated(self) -> list[int]:
        return self.shares

    def end_step(self, step: Moments) -> None:
        for number in range(len(self.buckets)):
            step.ledger.drop(("share", number))


class ZeroStage3Memory(ZeroStage2Memory):
    """Engine memory of ZeRO-3 by hand: a block's weights are whole for its passes, and those of the next one follow."""

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        self.each = compute_bytes(config)
        self.units = [f"blocks.{unit[0].block}" for unit in zero_3_units(shapes)[0]]
        self.in_backward = False

    def make_buckets(self) -> list[list[ParameterShape]]:
        """One per unit, from the last on; then what two blocks share."""
        units, loose_parameters = zero_3_units(self.shapes)
        return [*units[::-1], loose_parameters] if loose_parameters else units[::-1]

    def standing(self) -> Mapping[str, tuple[Category, int]]:
        return {}

    def gather(self, step: Moments, unit: int, name: str = "") -> None:
        """All-gather a unit's weights, unless they are there; number −1 is what belongs to no unit."""
        if unit >= len(self.units) or step.ledger.holds(("weights", unit)):
            return
        # Shares are in the order of reduction, from the last unit on; that of no unit (−1) comes after all others.
        share = self.shares[len(self.units) - 1 - unit]
        step.ledger.hold(("weights", unit), "workspace", self.each * self.config.layout.dp * share, name)
        if self.each < FP32_BYTES:
            # This rank's share is cast before it is sent.
            step.ledger.hold_briefly("cast", "workspace", self.each * share)

    def forward(self, step: Moments, module: str) -> None:
        if not module and len(self.buckets) > len(self.units):
            self.gather(step, -1)
        if module in self.units:
            unit = self.units.index(module)
            self.gather(step, unit, module)
            if not self.in_backward and unit + 1 < len(self.units):
                self.gather(step, unit + 1, self.units[unit + 1])

    def forwarded(self, step: Moments, module: str) -> None:
        if module in self.units and not self.in_backward:
            step.ledger.drop(("weights", self.units.index(module)))

    def begin_backward(self, step: Moments) -> None:
        super().begin_backward(step)
        self.in_backward = True

    def backward(self, step: Moments, module: str) -> None:
        if module in self.units:
            unit = self.units.index(module)
            self.gather(step, unit, module)
            if unit:
                self.gather(step, unit - 1, self.units[unit - 1])

    def reduce_next(self, step: Moments) -> None:
        """Free the unit's weights, then reduce as stage 2."""
        step.ledger.drop(("weights", len(self.units) - 1 - self.next))
        super().reduce_next(step)

    def end_backward(self, step: Moments) -> None:
        super().end_backward(step)
        self.in_backward = False
        for unit in range(-1, len(self.units)):
            step.ledger.drop(("weights", unit))


class ExpertsMemory(ByHand):
    """Engine memory of experts by hand: a bucket of experts that no other rank holds is never made.

    Source: `dlojz.train.engines.expert_engines`.
    """

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        buckets = expert_buckets(config, shapes)
        self.set_buckets([bucket for _, bucket in buckets])
        if config.layout.dp == config.layout.ep:  # gradients of experts are divided where they are
            sent_flags = (not experts for experts, _ in buckets)
            self.bucket_bytes = [
                num_bytes * is_sent for num_bytes, is_sent in zip(self.bucket_bytes, sent_flags, strict=True)
            ]


class DeepSpeedExperts(DeepSpeed):
    """Engine memory of DeepSpeed's experts: after backward the other gradients are reduced in one tensor, then theirs.

    Source: DeepSpeed 0.19 `runtime/engine.py`, `buffered_allreduce_fallback`.
    """

    def end_backward(self, step: Moments) -> None:
        if not step.last:
            return
        for experts in (False, True):
            group_elements = sum(
                parameter.numel for parameter in self.shapes.parameters if parameter.is_expert == experts
            )
            step.ledger.hold_briefly("reduce", "workspace", self.each * group_elements)

    def updated(self) -> list[int]:
        return deepspeed_sizes(self.config, self.shapes)
