"""Cut a model into stages, and tell what passes between them.

Layer 2, loads torch. Invariant: the stages together are the model's own blocks, in order, none copied; boundaries are
found on fake tensors, so nothing is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dlojz.models.blocks import BlockList
from dlojz.pipeline.runtime import Boundary


class Stage(BlockList):
    """Some consecutive blocks of a model, with tensors at its boundaries that can be cut off and sent.

    torch cuts the autograd graph at a stage's output once its first half of a backward is done, and cannot do so with a
    view; where a block ends with one (CoAtNet's attention does), it is copied: the boundary's bytes, once per
    micro-batch. And torch sends the gradient of a stage's input as it is, but gloo takes contiguous tensors only.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks."""
        if x.requires_grad:
            x.register_hook(Tensor.contiguous)
        output = super().forward(x)
        return output.clone() if output._is_view() else output


def stage_modules(model: BlockList, bounds: Sequence[int]) -> list[BlockList]:
    """The stages of a model, as lists of its own blocks.

    Args:
        model: a flat list of blocks.
        bounds: number of the first block of each stage, and the number of blocks at the end.
    """
    return [Stage(model.blocks[start:end], checkpointing=model.checkpointing) for start, end in pairwise(bounds)]


def boundaries_of(stages: Sequence[nn.Module], sample: Tensor, *, compute: torch.dtype | None = None) -> list[Boundary]:
    """What enters each stage for a micro-batch like `sample`, and last what leaves the model.

    Args:
        stages: the stages, in order, on any device.
        sample: one micro-batch.
        compute: the type of an autocast around the stages; None: there is none.
    """
    boundaries = []
    made = sample if isinstance(sample, FakeTensor) else None
    with made.fake_mode if made is not None else FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
        x = sample if made is not None else fake.from_tensor(sample)
        for stage in stages:
            boundaries.append(Boundary(tuple(x.shape), x.dtype))
            was_training = stage.training
            stage.eval()  # no running statistic may move
            with torch.autocast(sample.device.type, compute, enabled=compute is not None):
                x = stage(x)
            stage.train(was_training)
        boundaries.append(Boundary(tuple(x.shape), x.dtype))
    return boundaries
