"""Floating-point operations of one training step.

Layer 3. Invariant: counted from shapes on the meta device, never typed by hand; two operations per multiply-add.
"""

from __future__ import annotations

from dlojz import models
from dlojz.config import RunConfig


def step_flops(config: RunConfig) -> float:
    """FLOPs of one rank in one step: forward once, backward twice as much, forward once more where it is recomputed.

    The first layer needs no gradient for its input, so that a count falls short of this by about one forward pass of
    that layer; normalisations and activation functions are not counted.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), appendix A, for the factors 3 and 4.
    """
    summary = models.describe(
        config.model, config.image_size, sequence_length=config.sequence_length, num_classes=config.num_classes
    )
    passes = 4 if config.layout.checkpointing == "full" else 3
    return float(passes * summary.flops * config.layout.micro_batch * config.layout.micro_batches)
