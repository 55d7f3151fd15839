"""Floating-point operations of one training step.

Layer 3. Invariant: counted from shapes on the meta device, never typed by hand; two operations per multiply-add.
"""

from __future__ import annotations

from functools import lru_cache

from dlojz import models
from dlojz.config import RunConfig
from dlojz.layout_experts import routing_of
from dlojz.moe.routing import Routing
from dlojz.pipeline.cuts import schedule_of
from dlojz.predict.parts import axes_of, bounds_of, num_blocks, rank_stages
from dlojz.predict.shapes import WHOLE, Split, build_on_meta, model_shapes, split_of


def step_flops(config: RunConfig, rank: int = 0) -> float:
    """FLOPs of one rank in one step: forward once, backward twice as much, and what is computed again.

    A pipeline rank computes the share of its own stages' blocks; a tensor-parallel one its part of each layer, and all
    of what is not split.

    A count differs by little: it falls short by the gradient of the images, which nothing needs, and exceeds it by the
    scores that fused attention kernels compute again in backward (2 % for the lab's small text models).
    Normalisations and activation functions are not counted. With full checkpointing the forward pass is
    computed again, but for the end of each block (see `_not_recomputed`); selective checkpointing computes no product
    again.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), appendix A, for the factors 3 and, at most, 4.
    """
    layout = config.layout
    if config.experts is not None:
        return _mixed_flops(config, rank)
    if layout.tp > 1:
        return _split_flops(config, rank) * layout.micro_batch * layout.micro_batches
    summary = models.describe(
        config.model, config.image_size, sequence_length=config.sequence_length, num_classes=config.num_classes
    )
    sample_flops = 3 * summary.flops
    if layout.checkpointing == "full":
        flops_of = _flops_by_module(config.model, config.image_size, config.sequence_length, config.num_classes, WHOLE)
        sample_flops += summary.flops - sum(flops_of.get(name, 0) for name in _not_recomputed(config))
    return float(sample_flops * layout.micro_batch * layout.micro_batches) * _share(config, rank)


def _mixed_flops(config: RunConfig, rank: int) -> float:
    """FLOPs of a model with mixtures, whose experts compute all rows of their buffers, also those that stay empty.

    Counted for a whole micro-batch, as capacities are rounded up; shared out, an expert computes as many rows more as
    there are fewer experts on a rank.
    """
    layout = config.layout
    flops_of = _flops_by_module(
        config.model,
        None,
        config.sequence_length,
        config.num_classes,
        WHOLE,
        routing=routing_of(config),
        samples=layout.micro_batch,
    )
    forward = flops_of[""]
    again = 0
    if layout.checkpointing == "full":
        again = forward - sum(flops_of.get(name, 0) for name in _not_recomputed(config))
    return float(3 * forward + again) * layout.micro_batches * _share(config, rank)


def _split_flops(config: RunConfig, rank: int) -> float:
    """FLOPs of one sample on a rank that holds part of each layer, counted on that part."""
    _, tp_rank, _ = axes_of(config, rank)
    split = split_of(config, tp_rank)
    flops_of = _flops_by_module(config.model, config.image_size, config.sequence_length, config.num_classes, split)
    bounds = bounds_of(config, model_shapes(config)) if config.layout.pp > 1 else (0, num_blocks(model_shapes(config)))
    own = [block for stage in rank_stages(config, rank) for block in range(*bounds[stage : stage + 2])]
    forward = sum(flops_of.get(f"blocks.{block}", 0) for block in own)
    again = 0
    if config.layout.checkpointing == "full":
        last = {name: int(name.split(".")[1]) for name in _not_recomputed(config)}
        again = forward - sum(own.count(block) * flops_of.get(name, 0) for name, block in last.items())
    pipes = schedule_of(config.layout).pipes if config.layout.pp > 1 else 1
    return float(3 * forward + again) / pipes


def _share(config: RunConfig, rank: int) -> float:
    """Part of the model's FLOPs, by blocks, that one rank computes per micro-batch of its replica."""
    if config.layout.pp == 1:
        return 1.0
    from dlojz.pipeline.block_weights import block_weights

    flops = block_weights(config, "flops").weights
    bounds = bounds_of(config, model_shapes(config))
    own = sum(sum(flops[slice(*bounds[stage : stage + 2])]) for stage in rank_stages(config, rank))
    # A bidirectional pipeline sends half of the micro-batches each way.
    return float(own / sum(flops)) / schedule_of(config.layout).pipes


def _not_recomputed(config: RunConfig) -> tuple[str, ...]:
    """The last module of each block, where torch stops recomputing as soon as it has saved all that backward needs.

    Engines that gather weights (FSDP2, DeepSpeed stage 3) make a linear layer save its inputs after the product and
    not before it, so that they spare convolutions only; FSDP2 sometimes spares linear layers without bias too.
    """
    # A mixture weighs what its experts give, and so needs all of it again.
    mixed = {one.block for one in model_shapes(config).parameters if one.is_expert}
    last = [block[-1].module for block in model_shapes(config).blocks() if block[-1].block not in mixed]
    if config.layout.strategy not in ("fsdp2", "zero-3"):
        return tuple(last)
    convolutions = {parameter.module for parameter in model_shapes(config).parameters if len(parameter.shape) == 4}
    return tuple(module for module in last if module in convolutions)


@lru_cache(maxsize=64)
def _flops_by_module(
    model: str,
    image_size: int | None,
    sequence_length: int | None,
    num_classes: int,
    split: Split,
    *,
    routing: Routing | None = None,
    samples: int = 1,
) -> dict[str, int]:
    """Forward FLOPs of so many samples within each module of the model, or of one rank's part of it."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    built = build_on_meta(model, image_size, sequence_length, num_classes, split, routing=routing).eval()
    if models.spec(model).family == "image":
        sample = torch.empty(samples, 3, image_size or 1, image_size or 1, device="meta")
    else:
        sample = torch.empty(samples, sequence_length or 1, dtype=torch.long, device="meta")
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        built(sample)
    return {name.partition(".")[2]: sum(of_op.values()) for name, of_op in counter.get_flop_counts().items()}
