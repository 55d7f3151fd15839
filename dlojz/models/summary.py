"""Count a model's parameters, FLOPs and blocks on the meta device.

torch is imported by the functions only, and not at all for the usual sizes of the catalogue, whose counts are kept in
`data/counted.json` (written by `benchmarks/count_models.py`).
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from dlojz.models.catalogue import build, check_input, names, spec

if TYPE_CHECKING:
    from dlojz.models.blocks import BlockList


KEPT = Path(__file__).with_name("data") / "counted.json"
FEW_CLASSES = 10
"""Classes of the course's image data sets (digits, CIFAR-10): kept for every image model, beside its default."""


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """Counts of a model at one input size.

    ``flops`` are the floating-point operations of one sample's forward pass in matrix products and convolutions,
    attention included, two per multiply-add; ``multiply_adds`` are half of them, which papers on vision call "FLOPs".
    Causal attention is counted as full attention, as is the custom; experts with their whole buffers, capacity factor
    included. ``active_parameters`` are those of one token: k experts of each mixture, and all the others.
    """

    name: str
    parameters: int
    active_parameters: int
    flops: int
    multiply_adds: int
    image_size: int | None
    sequence_length: int | None
    blocks: int
    num_classes: int | None = field(repr=False)
    """Classes that it tells apart, or words of its vocabulary; None where its output is neither."""


class CountedSizes(NamedTuple):
    """Sizes on which a count depends: a model of the catalogue, and each size that can be chosen."""

    name: str
    image_size: int | None
    sequence_length: int | None
    num_classes: int
    in_channels: int | None


def usual_sizes() -> list[CountedSizes]:
    """List the sizes whose counts are kept: each model's defaults, and images with few classes."""
    usual = [
        CountedSizes(entry.name, entry.image_size, entry.sequence_length, classes, entry.in_channels)
        for entry in map(spec, names())
        for classes in (entry.num_classes, *((FEW_CLASSES,) if entry.family == "image" else ()))
    ]
    return list(dict.fromkeys(usual))  # a default of 10 classes gives the same sizes twice


def about(name: str) -> str:
    """Say what is special about a model of timm or torchvision, in the reader's language; empty where nothing is."""
    if not name.startswith(("timm:", "torchvision:")):
        return ""
    return cast(str, importlib.import_module("dlojz.models.foreign.vision_packages").about(name))


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
    entry = spec(name)
    sizes = CountedSizes(
        name,
        image_size or entry.image_size,
        sequence_length or entry.sequence_length,
        entry.num_classes if num_classes is None else num_classes,  # 0 must reach `build`, which refuses it
        entry.in_channels if in_channels is None else in_channels,
    )
    return _kept().get(sizes) or count(sizes)


@lru_cache(maxsize=1)
def _kept() -> dict[CountedSizes, ModelSummary]:
    counts = {CountedSizes(*row["sizes"]): row["counted"] for row in json.loads(KEPT.read_text(encoding="utf-8"))}
    return {sizes: _summary(sizes, *counted) for sizes, counted in counts.items()}


def count(sizes: CountedSizes) -> ModelSummary:
    """Build a model on the meta device and count it there.

    Raises:
        LabError: unknown model, or a size that the model cannot have.
    """
    from dlojz.models.meta import flops_by_block, on_meta, sample_inputs

    name, image_size, sequence_length, num_classes, in_channels = sizes
    with on_meta():
        model = build(
            name,
            image_size=image_size,
            sequence_length=sequence_length,
            num_classes=num_classes,
            in_channels=in_channels,
        ).eval()
    sample = sample_inputs(name, image_size=image_size, sequence_length=sequence_length, in_channels=in_channels)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return _summary(sizes, parameters, _active_parameters(model), sum(flops_by_block(model, sample)), len(model.blocks))


def _summary(sizes: CountedSizes, parameters: int, active_parameters: int, flops: int, blocks: int) -> ModelSummary:
    return ModelSummary(
        name=sizes.name,
        parameters=parameters,
        active_parameters=active_parameters,
        flops=flops,
        multiply_adds=flops // 2,
        image_size=sizes.image_size,
        sequence_length=sizes.sequence_length,
        blocks=blocks,
        num_classes=sizes.num_classes if spec(sizes.name).has_classes else None,
    )


def _active_parameters(model: BlockList) -> int:
    from dlojz.models.experts.layer import expert_parameters, mixtures

    experts = set(expert_parameters(model))
    total = sum(parameter.numel() for name, parameter in model.named_parameters() if name not in experts)
    for _, layer in mixtures(model):
        layer_parameters = sum(parameter.numel() for parameter in layer.experts.parameters())
        # Exact: all experts of a mixture have the same shapes.
        total += layer_parameters // layer.routing.experts * layer.routing.top_k
    return total
