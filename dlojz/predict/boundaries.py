"""What enters each block of a run's model, and last what leaves it: shape and type, for one micro-batch.

Layer 3. Invariant: the blocks themselves say it, on fake tensors; of a tensor-parallel run, one rank's blocks on a
pretended axis. Nothing is computed and nothing sent.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from dlojz import models
from dlojz.config import RunConfig
from dlojz.predict.shapes import WHOLE, Split, build_on_meta, split_of
from dlojz.predict.states import AUTOCAST

if TYPE_CHECKING:
    from dlojz.pipeline.runtime import Boundary


def boundaries_of_run(config: RunConfig) -> tuple[Boundary, ...]:
    """What enters each block, and last what leaves the model; with sequence parallelism, of one rank's tokens."""
    split = split_of(config)
    # Without sequence parallelism every rank has all of what passes between two blocks.
    return _boundaries(
        config.model,
        config.image_size,
        config.sequence_length,
        config.num_classes,
        config.layout.micro_batch,
        config.precision == "bf16",
        config.layout.strategy in AUTOCAST,
        split if split.sequence_parallel else WHOLE,
    )


@lru_cache(maxsize=64)
def _boundaries(
    model: str,
    image_size: int | None,
    sequence_length: int | None,
    num_classes: int,
    micro_batch: int,
    bf16: bool,
    autocast: bool,
    split: Split,
) -> tuple[Boundary, ...]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from dlojz.pipeline.runtime_stages import boundaries_of

    built = build_on_meta(model, image_size, sequence_length, num_classes, split)
    if models.spec(model).family == "text":
        sample = torch.empty(micro_batch, sequence_length or 1, dtype=torch.long, device="meta")
    else:
        sample = torch.empty(micro_batch, 3, image_size or 1, image_size or 1, device="meta")
    if bf16 and not autocast:
        built = built.bfloat16()
        sample = sample.bfloat16() if sample.is_floating_point() else sample
    with FakeTensorMode(allow_non_fake_inputs=True):
        built.to_empty(device="cpu")
        sample = torch.empty(sample.shape, dtype=sample.dtype, device="cpu")
        return tuple(boundaries_of(list(built.blocks), sample, compute=torch.bfloat16 if bf16 and autocast else None))
