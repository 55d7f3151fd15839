"""Bytes and calls that one training step hands to each collective.

Layer 3. Invariant: equal, byte for byte, to what the probe counts at c10d. With Ψ parameters, the volumes each rank
sends in a ring are 2Ψ for stages 0 to 2 and 3Ψ for stage 3; the messages below are the tensors behind them. In fp16
they are those of bf16.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §7; the libraries' sources named in `states`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dlojz.config import DEEPSPEED_BUCKET_ELEMENTS, RunConfig
from dlojz.footprint import Collective, Traffic
from dlojz.optim.messages import message_bytes
from dlojz.optimizer_stages import COMPRESSED, LOCAL, sending_interval
from dlojz.predict.experts import exchange_traffic, gradient_traffic
from dlojz.predict.parts import part_of
from dlojz.predict.shapes import ModelShapes
from dlojz.predict.states import FP32_BYTES, compute_bytes, padded_parameters, zero_by_hand_shares
from dlojz.units import MEBIBYTE

DDP_FIRST_BUCKET_BYTES = 1 * MEBIBYTE
DDP_BUCKET_BYTES = 25 * MEBIBYTE
"""torch DDP closes a bucket once it holds so much (`bucket_cap_mb`); the first is small, so that it leaves early."""
DEEPSPEED_REDUCED_ELEMENTS = 500_000_000
"""Gradients that DeepSpeed's stage 0 reduces in one call (`buffered_allreduce_fallback`)."""
LOSS_BYTES = 8
"""The lab's own bookkeeping: one fp64 loss per step, in its control group."""


def ddp_buckets(
    sizes_bytes: Iterable[int], first_bytes: int = DDP_FIRST_BUCKET_BYTES, bucket_bytes: int = DDP_BUCKET_BYTES
) -> int:
    """Number of buckets for gradients in this order, where a bucket is closed once it holds so much."""
    count, filled_bytes, limit_bytes = 0, 0, first_bytes
    for size_bytes in sizes_bytes:
        filled_bytes += size_bytes
        if filled_bytes >= limit_bytes:
            count, filled_bytes, limit_bytes = count + 1, 0, bucket_bytes
    return count + (filled_bytes > 0)


def deepspeed_buckets(sizes: Iterable[int]) -> int:
    """Number of DeepSpeed's reduce buckets for gradients (in elements) in the order in which they become ready."""
    count, filled = 0, 0
    for size in sizes:
        if filled and filled + size > DEEPSPEED_BUCKET_ELEMENTS:
            count, filled = count + 1, 0
        filled += size
    return count + (filled > 0)


def _ddp(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    if config.layout.gradient_compression != "none":
        from dlojz.predict.gradient_hooks import hook_traffic

        return hook_traffic(config, shapes)
    from dlojz.predict.order import ready_order  # loads torch

    # After its first step DDP fills its buckets in the order in which backward has made the gradients ready.
    sizes_bytes = [FP32_BYTES * shapes.parameters[number].numel for number in ready_order(config)]
    given_mib = config.layout.bucket_mib
    first_bytes, bucket_bytes = DDP_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES
    if given_mib is not None:
        first_bytes = bucket_bytes = int(given_mib * MEBIBYTE)
    if config.library == "colossalai":  # its plugin names the size, which then holds for the first bucket too
        first_bytes = bucket_bytes
    return [_dp(config, "all_reduce", ddp_buckets(sizes_bytes, first_bytes, bucket_bytes), sum(sizes_bytes))]


def _by_hand(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    sizes_bytes = [FP32_BYTES * parameter.numel for parameter in reversed(shapes.parameters)]
    given_mib = config.layout.bucket_mib
    bucket_bytes = DDP_BUCKET_BYTES if given_mib is None else int(given_mib * MEBIBYTE)
    return [_dp(config, "all_reduce", ddp_buckets(sizes_bytes, bucket_bytes, bucket_bytes), sum(sizes_bytes))]


def _experts(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    # DeepSpeed reduces at most so many elements at once, the engine by hand a bucket.
    elements = DEEPSPEED_REDUCED_ELEMENTS if config.layout.engine == "deepspeed" else None
    return [*gradient_traffic(config, shapes, elements), *exchange_traffic(config, shapes)]


def _compressed(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    """In the second stage, in a step that synchronises; in the first it is one all-reduce of all gradients in fp32."""
    sent = message_bytes(shapes.num_parameters, config.layout.dp)
    return [_dp(config, "all_to_all", 1, sent.all_to_all), _dp(config, "all_gather", 1, sent.all_gather)]


def _local_steps(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    """In a step after which the replicas meet: all weights, or how far they have come; in all others nothing."""
    sent = _dp(config, "all_reduce", 1, FP32_BYTES * shapes.num_parameters)
    return [sent.model_copy(update={"every_steps": sending_interval(config)})]


def _zero_by_hand(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    layout = config.layout
    shares = zero_by_hand_shares(config, shapes)
    flats, whole = len(shares), layout.dp * sum(shares)
    # Gradients: stage 1 accumulates whole ones and reduces them once per step, 2 and 3 with every micro-batch, in fp32.
    reductions = 1 if layout.zero == 1 else layout.micro_batches
    # Weights: after the update once, in fp32; in stage 3 for every forward and every backward, in the type computed in.
    # A checkpointed block is computed again while its weights are gathered for its backward: no third time.
    gathers, each = (2 * layout.micro_batches, compute_bytes(config)) if layout.zero == 3 else (1, FP32_BYTES)
    return [
        _dp(config, "reduce_scatter", reductions * flats, reductions * FP32_BYTES * whole),
        _dp(config, "all_gather", gathers * flats, gathers * each * whole),
    ]


def _fsdp2(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    layout = config.layout
    whole = layout.dp * sum(parameter.padded_rows_numel(layout.dp) for parameter in shapes.parameters)
    blocks = len(list(shapes.blocks()))
    # ZeRO-3 frees the weights after forward and gathers them again for backward; ZeRO-2 keeps them.
    gathers = layout.micro_batches * (2 if layout.zero == 3 else 1)
    return [
        _dp(config, "all_gather", gathers * blocks, gathers * compute_bytes(config) * whole),
        _dp(config, "reduce_scatter", layout.micro_batches * blocks, layout.micro_batches * FP32_BYTES * whole),
    ]


def _zero_0(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    # All gradients of a step in one call, unless there are too many.
    calls = -(-shapes.num_parameters // DEEPSPEED_REDUCED_ELEMENTS)
    return [_dp(config, "all_reduce", calls, compute_bytes(config) * shapes.num_parameters)]


def _zero_1_or_2(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    layout, each = config.layout, compute_bytes(config)
    padded = padded_parameters(shapes.num_parameters, layout.dp)
    # Stage 1 reduces once per step, stage 2 with every micro-batch, as it keeps no whole gradient in between. Both
    # all-reduce the bucket where the paper's scheme would reduce-scatter it, then each rank keeps its share.
    reductions = layout.micro_batches if layout.zero == 2 else 1
    buckets = deepspeed_buckets(parameter.numel for parameter in reversed(shapes.parameters))
    # With every update: the gradient's norm (4 bytes) and, in bf16 and fp16, a flag for overflow (1 byte).
    checks = 1 if config.precision == "fp32" else 2
    check_bytes = 4 if config.precision == "fp32" else 5
    return [
        _dp(
            config, "all_reduce", reductions * buckets + checks, reductions * each * shapes.num_parameters + check_bytes
        ),
        _dp(config, "all_gather", 1, each * padded),
    ]


def _zero_3(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    layout, each = config.layout, compute_bytes(config)
    padded_of_module: dict[str, int] = {}
    for parameter in shapes.parameters:
        padded = parameter.padded_numel(layout.dp) * layout.dp
        padded_of_module[parameter.module] = padded_of_module.get(parameter.module, 0) + padded
    whole, modules = sum(padded_of_module.values()), len(padded_of_module)
    # Every module gathers its weights for its forward and again for its backward.
    gathered, gathers = 2 * whole, 2 * modules
    if layout.checkpointing != "none":
        # Once more to recompute; but torch ends the recomputation of a block inside its last module, whose weights are
        # then still there for its backward.
        last_modules = {block[-1].module for block in shapes.blocks()}
        gathered += whole - sum(padded_of_module[module] for module in last_modules)
        gathers += modules - len(last_modules)
    buckets = deepspeed_buckets(
        parameter.padded_numel(layout.dp) * layout.dp for parameter in reversed(shapes.parameters)
    )
    times = layout.micro_batches
    return [
        _dp(config, "all_gather", times * gathers, times * each * gathered),
        _dp(config, "reduce_scatter", times * buckets, times * each * whole),
        _dp(config, "all_reduce", 1, 8),  # the gradient's norm, in fp64
    ]


def _dp(config: RunConfig, collective: Collective, count: int, message_bytes: int) -> Traffic:
    return Traffic(
        collective=collective, group="dp", group_size=config.layout.dp, count=count, message_bytes=message_bytes
    )


_RULES: dict[str, Callable[[RunConfig, ModelShapes], list[Traffic]]] = {
    "single": lambda config, shapes: [],
    "ddp": _ddp,
    "by_hand": _by_hand,
    "by_hand-1": _zero_by_hand,
    "by_hand-2": _zero_by_hand,
    "by_hand-3": _zero_by_hand,
    "fsdp2": _fsdp2,
    "zero-0": _zero_0,
    "zero-1": _zero_1_or_2,
    "zero-2": _zero_1_or_2,
    "zero-3": _zero_3,
}


def _rule(config: RunConfig) -> Callable[[RunConfig, ModelShapes], list[Traffic]]:
    """What says what the engine of a run sends along its data axis."""
    if config.layout.ep > 1:
        return _experts
    if config.optimizer in LOCAL:
        return _local_steps
    return _compressed if config.optimizer in COMPRESSED else _RULES[config.layout.strategy]


def predict_communication(config: RunConfig, shapes: ModelShapes, rank: int = 0) -> tuple[Traffic, ...]:
    """One rank's traffic in a steady step, sorted by collective and group; empty for one process.

    Args:
        config: the run.
        shapes: of the whole model.
        rank: matters where ranks hold different parts of the model, as in a pipeline.

    Raises:
        LabError: if an engine shares the layers in a way of which it is not known what it sends.
    """
    layout = config.layout
    if layout.world_size == 1:
        return ()
    control = Traffic(
        collective="all_reduce", group="control", group_size=layout.world_size, count=1, message_bytes=LOSS_BYTES
    )
    part = part_of(config, shapes, rank)
    rule: list[Traffic] = []
    if layout.pp > 1:
        from dlojz.predict.pipeline_communication import pipeline_traffic

        rule += pipeline_traffic(config, shapes, rank)
    if layout.dp > 1 and (layout.pp == 1 or layout.engine == "deepspeed"):
        rule += _rule(config)(config, part)
    if layout.tp > 1:
        from dlojz.predict.tensor_communication import tensor_traffic

        rule += tensor_traffic(config, shapes, rank)
    return tuple(sorted([control, *rule], key=lambda t: (t.collective, t.group)))
