"""Bytes of the model states on one rank, by category, for every engine and ZeRO stage.

Layer 3. Invariant: closed forms over parameter shapes, padding included; equal to what the probe counts, to the byte.

With Ψ parameters over N ranks, mixed precision and Adam, the paper's forms are 2Ψ + 2Ψ + 12Ψ (stage 0),
4Ψ + 12Ψ/N (1), 2Ψ + 14Ψ/N (2), 16Ψ/N (3). What follows adds what the libraries really do: fp32 gradients where they
keep them, a master copy in fp32 even where the weights are fp32, padding, whole parameters at the edges of a partition.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §5; DeepSpeed 0.19 `runtime/zero/stage_1_and_2.py` and `stage3.py`;
torch 2.13 `distributed/fsdp/_fully_shard`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from dlojz.config import RunConfig
from dlojz.footprint import Memory
from dlojz.predict.shapes import ModelShapes

FP32_BYTES = 4
MOMENTS = {"sgd": 0, "momentum": 1, "adamw": 2}
"""Tensors of the parameter's size that an optimizer keeps."""
DEEPSPEED_ALIGNMENT = 2
"""Stages 1 and 2 pad the flat weights to a multiple of N times this (`nccl_start_alignment_factor`)."""
SUB_GROUP_ELEMENTS = 10**9
"""Stage 3 updates the shards in groups of at most so many elements (`sub_group_size`)."""


def compute_bytes(config: RunConfig) -> int:
    """Bytes of one weight as DeepSpeed and FSDP2 compute with it."""
    return 2 if config.precision == "bf16" else FP32_BYTES


def optimizer_bytes(config: RunConfig, num_elements: int, num_tensors: int) -> int:
    """States of the optimizer over so many elements in so many tensors; AdamW adds an fp32 step count per tensor."""
    step_counts = num_tensors if config.optimizer == "adamw" else 0
    return FP32_BYTES * (MOMENTS[config.optimizer] * num_elements + step_counts)


def padded_parameters(num_parameters: int, dp: int) -> int:
    """Elements of DeepSpeed's flat weights (stages 1 and 2), padded so that all ranks get the same share."""
    multiple = dp * DEEPSPEED_ALIGNMENT
    return -(-num_parameters // multiple) * multiple


def touching_elements(shapes: ModelShapes, dp: int, rank: int) -> int:
    """Elements of all parameters that reach into one rank's share of the flat weights, and the padding in it.

    Stages 1 and 2 keep the gradient of a parameter whole on each rank whose share it touches.
    """
    share = padded_parameters(shapes.num_parameters, dp) // dp
    start, end = rank * share, (rank + 1) * share
    ends = list(accumulate(parameter.numel for parameter in shapes.parameters))
    touching = sum(
        parameter.numel
        for parameter, last in zip(shapes.parameters, ends, strict=True)
        if last - parameter.numel < end and last > start
    )
    padding = max(0, end - max(start, shapes.num_parameters))
    return touching + padding


def _replicated(config: RunConfig, shapes: ModelShapes, rank: int) -> Memory:
    """One process, or DDP, also by hand: everything whole on every rank; bf16 is autocast over fp32 weights."""
    whole_bytes = FP32_BYTES * shapes.num_parameters
    return Memory(
        weights_bytes=whole_bytes,
        gradients_bytes=whole_bytes,
        optimizer_bytes=optimizer_bytes(config, shapes.num_parameters, len(shapes.parameters)),
        master_bytes=0,
    )


def _fsdp2(config: RunConfig, shapes: ModelShapes, rank: int) -> Memory:
    """FSDP2: fp32 shards of rows; with ZeRO-2 the weights gathered in forward stay until backward has used them."""
    dp = config.layout.dp
    padded = sum(parameter.padded_rows_numel(dp) for parameter in shapes.parameters)
    own = sum(parameter.rows_numel(dp, rank) for parameter in shapes.parameters)
    gathered_bytes = compute_bytes(config) * dp * padded if config.layout.zero == 2 else 0
    return Memory(
        weights_bytes=FP32_BYTES * padded + gathered_bytes,
        gradients_bytes=FP32_BYTES * padded,
        optimizer_bytes=optimizer_bytes(config, own, len(shapes.parameters)),
        master_bytes=0,
    )


def _zero_0(config: RunConfig, shapes: ModelShapes, rank: int) -> Memory:
    whole_bytes = compute_bytes(config) * shapes.num_parameters
    return Memory(
        weights_bytes=whole_bytes,
        gradients_bytes=whole_bytes,
        optimizer_bytes=optimizer_bytes(config, shapes.num_parameters, len(shapes.parameters)),
        master_bytes=FP32_BYTES * shapes.num_parameters if config.precision == "bf16" else 0,
    )


def _zero_1_or_2(config: RunConfig, shapes: ModelShapes, rank: int) -> Memory:
    dp, each = config.layout.dp, compute_bytes(config)
    padded = padded_parameters(shapes.num_parameters, dp)
    # Stage 1 accumulates whole gradients over micro-batches; with a single one it reduces them on the way, as stage 2.
    accumulates = config.layout.zero == 1 and config.layout.micro_batches > 1
    gradient_elements = shapes.num_parameters if accumulates else touching_elements(shapes, dp, rank)
    return Memory(
        weights_bytes=each * padded,
        gradients_bytes=each * gradient_elements,
        optimizer_bytes=optimizer_bytes(config, padded // dp, 1),
        master_bytes=FP32_BYTES * (padded // dp),
    )


def _zero_3(config: RunConfig, shapes: ModelShapes, rank: int) -> Memory:
    each = compute_bytes(config)
    own = sum(parameter.padded_numel(config.layout.dp) for parameter in shapes.parameters)
    return Memory(
        weights_bytes=each * own,
        gradients_bytes=each * own,
        optimizer_bytes=optimizer_bytes(config, own, -(-own // SUB_GROUP_ELEMENTS)),
        master_bytes=FP32_BYTES * own,
    )


_RULES: dict[str, Callable[[RunConfig, ModelShapes, int], Memory]] = {
    "single": _replicated,
    "ddp": _replicated,
    "by_hand": _replicated,
    "fsdp2": _fsdp2,
    "zero-0": _zero_0,
    "zero-1": _zero_1_or_2,
    "zero-2": _zero_1_or_2,
    "zero-3": _zero_3,
}


def predict_states(config: RunConfig, shapes: ModelShapes, rank: int = 0) -> Memory:
    """Weights, gradients, optimizer states, master copies and buffers of one rank; the rest is None."""
    strategy = config.layout.strategy
    # Under autocast BatchNorm's statistics stay fp32; engines that cast the weights cast them too.
    buffer_bytes = FP32_BYTES if strategy in ("single", "ddp", "by_hand") else compute_bytes(config)
    return _RULES[strategy](config, shapes, rank).model_copy(
        update={"buffers_bytes": buffer_bytes * shapes.float_buffer_elements + shapes.integer_buffer_bytes}
    )
