"""Shapes of a model's parameters and buffers, read on the meta device.

Layer 3. Invariant: the order is that of `model.parameters()`, on which every engine's flattening rests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from dlojz import models
from dlojz.config import RunConfig

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ParameterShape:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    block: int
    """Number of the model's block it belongs to."""
    module: str
    """Name of the module that owns it directly."""

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    def padded_rows_numel(self, dp: int) -> int:
        """Elements of one shard when dimension 0 is cut into `dp` equal parts, the last ones padded (FSDP2)."""
        rows = self.shape[0] if self.shape else 1
        return -(-rows // dp) * (self.numel // rows)

    def rows_numel(self, dp: int, rank: int) -> int:
        """Elements of one rank's shard without its padding (FSDP2)."""
        rows = self.shape[0] if self.shape else 1
        share = -(-rows // dp)
        return max(0, min(share, rows - rank * share)) * (self.numel // rows)

    def padded_numel(self, dp: int) -> int:
        """Elements of one shard when the flattened parameter is cut into `dp` parts (DeepSpeed stage 3)."""
        return -(-self.numel // dp)


@dataclass(frozen=True)
class ModelShapes:
    """All that predictions need to know of a model."""

    parameters: tuple[ParameterShape, ...]
    float_buffer_elements: int
    integer_buffer_bytes: int

    @property
    def num_parameters(self) -> int:
        """Ψ, the number of parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    def blocks(self) -> Iterator[tuple[ParameterShape, ...]]:
        """Parameters block by block, blocks without any left out."""
        for number in sorted({parameter.block for parameter in self.parameters}):
            yield tuple(parameter for parameter in self.parameters if parameter.block == number)


def model_shapes(config: RunConfig) -> ModelShapes:
    """Shapes of the model of a run."""
    return _shapes(config.model, config.image_size, config.sequence_length, config.num_classes)


def build_on_meta(model: str, image_size: int | None, sequence_length: int | None, num_classes: int) -> nn.Module:
    """The model with shapes and without memory."""
    import torch

    with torch.device("meta"):
        return models.build(model, image_size=image_size, sequence_length=sequence_length, num_classes=num_classes)


@lru_cache(maxsize=64)
def _shapes(model: str, image_size: int | None, sequence_length: int | None, num_classes: int) -> ModelShapes:
    built = build_on_meta(model, image_size, sequence_length, num_classes)
    parameters = tuple(
        ParameterShape(name, tuple(parameter.shape), int(name.split(".")[1]), name.rpartition(".")[0])
        for name, parameter in built.named_parameters()
    )
    buffers = list(built.buffers())
    return ModelShapes(
        parameters=parameters,
        float_buffer_elements=sum(buffer.numel() for buffer in buffers if buffer.is_floating_point()),
        integer_buffer_bytes=sum(b.numel() * b.element_size() for b in buffers if not b.is_floating_point()),
    )
