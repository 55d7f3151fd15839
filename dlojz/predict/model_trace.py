"""The trace of a run's own model and micro-batch, in the precision in which its engine computes.

Layer 3. Invariant: what is traced is what `train.engines` runs: the same model, loss and casts. One trace serves all
layouts that compute alike, so that a question about another layout costs no further trace; and alike blocks are not
each traced (`dlojz.predict.repeats`).
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch

from dlojz import models
from dlojz.config import RunConfig
from dlojz.layout_experts import routing_of
from dlojz.models.blocks import Checkpointing
from dlojz.moe.routing import Routing
from dlojz.predict.parts import axes_of
from dlojz.predict.repeats import trace_repeating
from dlojz.predict.shapes import WHOLE, Split, build_on_meta, split_of
from dlojz.predict.states import AUTOCAST
from dlojz.predict.tracing import Compute, Trace, trace
from dlojz.tensor.split import parallel_loss
from dlojz.train.engines.base import mean_loss
from dlojz.train.offload import ActivationOffload


def compute_of(config: RunConfig) -> Compute:
    """In which precision the engine of a run computes: DeepSpeed and FSDP2 cast the weights, the others autocast."""
    if config.precision == "fp32":
        return "fp32"
    return "autocast" if config.layout.strategy in AUTOCAST else "bf16"


def trace_of(config: RunConfig, rank: int = 0, *, on_gpu: bool = False) -> Trace:
    """What one micro-batch of a run allocates on the ranks that share the model's layers, all blocks of it.

    Args:
        config: the run.
        rank: whose part of each layer is traced.
        on_gpu: with the corrections for a GPU.
    """
    return _traced(
        config.model,
        config.image_size,
        config.sequence_length,
        config.num_classes,
        config.layout.checkpointing,
        config.layout.micro_batch,
        compute_of(config),
        config.layout.offload == "activations",
        split_of(config, axes_of(config, rank)[1]),
        on_gpu,
        routing_of(config),
        config.layout.ep,
        config.library == "megatron",
    )


@lru_cache(maxsize=32)
def _traced(  # noqa: PLR0913, PLR0917 - all that a trace depends on
    name: str,
    image_size: int | None,
    sequence_length: int | None,
    num_classes: int,
    checkpointing: Checkpointing,
    micro_batch: int,
    compute: Compute,
    offloaded: bool,
    split: Split,
    on_gpu: bool,
    routing: Routing | None,
    ep: int,
    in_megatron: bool,
) -> Trace:
    model = build_on_meta(name, image_size, sequence_length, num_classes, split, checkpointing, routing=routing, ep=ep)
    with torch.device("meta"):
        if models.spec(name).family == "image":
            side = image_size or 1
            inputs = torch.empty(micro_batch, 3, side, side)
            targets = torch.empty(micro_batch, dtype=torch.long)
        else:
            inputs = torch.empty(micro_batch, sequence_length or 1, dtype=torch.long)
            targets = torch.empty_like(inputs)
    how = partial(
        trace,
        compute=compute,
        targets=targets,
        loss=mean_loss if split == WHOLE else parallel_loss(model),
        around_forward=ActivationOffload if offloaded else None,
        on_gpu=on_gpu,
        in_megatron=in_megatron,
    )
    return trace_repeating(model, lambda shortened: how(shortened, inputs))
