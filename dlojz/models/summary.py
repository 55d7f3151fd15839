"""Count what a model is: parameters, FLOPs, blocks.

Layer 1 (models). Invariant: every number is counted on the meta device, where a tensor has a shape and no memory; none
is typed by hand. torch is imported by the functions, not by the module.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from dlojz.models.catalogue import build, check_input, spec

if TYPE_CHECKING:
    from torch import Tensor

    from dlojz.models.blocks import BlockList


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """What a model is, at one input size.

    ``flops`` are the floating-point operations of one sample's forward pass in matrix products and convolutions,
    attention included, two per multiply-add; ``multiply_adds`` are half of them, the figure that papers on vision
    print as "FLOPs". Causal attention is counted as full attention, as is the custom. ``active_parameters`` are those
    that one token meets: of the experts of a mixture its k; elsewhere they are all ``parameters``. The
    operations of experts are those of their whole buffers, capacity factor included.
    """

    name: str
    parameters: int
    active_parameters: int
    flops: int
    multiply_adds: int
    image_size: int | None
    sequence_length: int | None
    blocks: int


@lru_cache(maxsize=256)
def describe(
    name: str,
    image_size: int | None = None,
    *,
    sequence_length: int | None = None,
    num_classes: int | None = None,
    in_channels: int | None = None,
) -> ModelSummary:
    """Count a model's parameters, FLOPs and blocks, without allocating its weights.

    Args:
        name: A model of the catalogue.
        image_size: Side of the square image in pixels; by default the catalogue's.
        sequence_length: Tokens per sample; by default the catalogue's.
        num_classes: Classes of images, or vocabulary of text; by default the catalogue's.
        in_channels: Channels of the images; by default the catalogue's.

    Raises:
        LabError: unknown model, or a size that the model cannot have.
    """
    check_input(name, image_size, sequence_length)

    import torch

    entry = spec(name)
    image_size, sequence_length = image_size or entry.image_size, sequence_length or entry.sequence_length
    with torch.device("meta"):
        model = build(
            name,
            image_size=image_size,
            sequence_length=sequence_length,
            num_classes=num_classes,
            in_channels=in_channels,
        ).eval()
        if entry.family == "image":
            sample = torch.empty(1, in_channels or entry.in_channels or 3, image_size or 1, image_size or 1)
        else:
            sample = torch.empty(1, sequence_length or 1, dtype=torch.long)
    flops = _forward_flops(model, sample)
    return ModelSummary(
        name=name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        active_parameters=_met_by_a_token(model),
        flops=flops,
        multiply_adds=flops // 2,
        image_size=image_size,
        sequence_length=sequence_length,
        blocks=len(model.blocks),
    )


def _met_by_a_token(model: BlockList) -> int:
    from dlojz.moe.parallel import expert_parameters, mixtures

    experts = set(expert_parameters(model))
    total = sum(parameter.numel() for name, parameter in model.named_parameters() if name not in experts)
    for _, layer in mixtures(model):
        held = sum(parameter.numel() for parameter in layer.experts.parameters())
        total += held // layer.routing.experts * layer.routing.top_k
    return total


def _forward_flops(model: BlockList, x: Tensor) -> int:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # Blocks of one model that print alike and read the same shape cost the same: each kind is run once, which keeps
    # models of a hundred blocks within a second.
    known: dict[tuple[str, torch.Size], tuple[int, Tensor]] = {}
    total = 0
    # The fused attention kernels are one opaque operator each, which the counter misses on some devices; the plain one
    # is made of two matrix products, which it knows.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        for block in model.blocks:
            kind = (repr(block), x.shape)
            if kind not in known:
                with FlopCounterMode(display=False) as counter:
                    output = block(x)
                known[kind] = (int(counter.get_total_flops()), output)
            flops, x = known[kind]
            total += flops
    return total
