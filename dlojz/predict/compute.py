"""Floating-point operations of one training step.

Layer 3. Invariant: counted from shapes on the meta device, never typed by hand; two operations per multiply-add.
"""

from __future__ import annotations

from functools import lru_cache

from dlojz import models
from dlojz.config import RunConfig
from dlojz.pipeline.cuts import schedule_of
from dlojz.predict.parts import bounds_of, rank_stages
from dlojz.predict.shapes import build_on_meta, model_shapes


def step_flops(config: RunConfig, rank: int = 0) -> float:
    """FLOPs of one rank in one step: forward once, backward twice as much, and what is computed again.

    A pipeline rank computes the share of its own stages' blocks.

    A count differs by little: it falls short by the gradient of the images, which nothing needs, and exceeds it by the
    scores that fused attention kernels compute again in backward (2 % for the lab's small text models).
    Normalisations and activation functions are not counted. With full checkpointing the forward pass is
    computed again, but for the end of each block (see `_not_recomputed`); selective checkpointing computes no product
    again.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), appendix A, for the factors 3 and, at most, 4.
    """
    summary = models.describe(
        config.model, config.image_size, sequence_length=config.sequence_length, num_classes=config.num_classes
    )
    sample_flops = 3 * summary.flops
    if config.layout.checkpointing == "full":
        sample_flops += summary.flops - _modules_flops(
            config.model, config.image_size, config.sequence_length, config.num_classes, _not_recomputed(config)
        )
    return float(sample_flops * config.layout.micro_batch * config.layout.micro_batches) * _share(config, rank)


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
    last = [block[-1].module for block in model_shapes(config).blocks()]
    if config.layout.strategy not in ("fsdp2", "zero-3"):
        return tuple(last)
    convolutions = {parameter.module for parameter in model_shapes(config).parameters if len(parameter.shape) == 4}
    return tuple(module for module in last if module in convolutions)


@lru_cache(maxsize=64)
def _modules_flops(
    model: str, image_size: int | None, sequence_length: int | None, num_classes: int, names: tuple[str, ...]
) -> int:
    """Forward FLOPs of one sample within the modules named."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    built = build_on_meta(model, image_size, sequence_length, num_classes).eval()
    if models.spec(model).family == "image":
        sample = torch.empty(1, 3, image_size or 1, image_size or 1, device="meta")
    else:
        sample = torch.empty(1, sequence_length or 1, dtype=torch.long, device="meta")
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        built(sample)
    flops = {name.partition(".")[2]: sum(of_op.values()) for name, of_op in counter.get_flop_counts().items()}
    return int(sum(flops.get(name, 0) for name in names))
