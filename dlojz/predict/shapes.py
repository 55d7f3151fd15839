"""Shapes of a model's parameters and buffers, read on the meta device.

Layer 3. Invariant: the order is that of `model.parameters()`, on which every engine's flattening rests. What one
tensor-parallel rank holds is read off the very model that it trains: split, on a pretended axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dlojz import models
from dlojz.config import RunConfig
from dlojz.layout_experts import routing_of
from dlojz.models.sizes import CoAtNetSize

if TYPE_CHECKING:
    from dlojz.models.blocks import BlockList, Checkpointing
    from dlojz.moe.routing import Routing


@dataclass(frozen=True)
class ParameterShape:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    block: int
    """Number of the model's block it belongs to."""
    module: str
    """Name of the module that owns it directly."""
    is_expert: bool = False
    """Whether its first dimension counts the experts of a mixture."""

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
    buffers: tuple[tuple[int, int, int], ...] = ()
    """The same buffer by buffer: block, elements of floating point, bytes of integers."""

    @property
    def num_parameters(self) -> int:
        """Ψ, the number of parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    def blocks(self) -> Iterator[tuple[ParameterShape, ...]]:
        """Parameters block by block, blocks without any left out."""
        for number in sorted({parameter.block for parameter in self.parameters}):
            yield tuple(parameter for parameter in self.parameters if parameter.block == number)


class Split(NamedTuple):
    """Which part of each layer a rank holds; ranks whose parts have the same shapes have equal ones.

    Args:
        size: ranks that share each layer.
        rank: the first whose part has these shapes.
        sequence_parallel: between the parallel regions too a rank holds part of the tokens.
        pattern: the parts that are split, as `dlojz.tensor.split.split_model` takes it.
    """

    size: int = 1
    rank: int = 0
    sequence_parallel: bool = False
    pattern: str = ""


WHOLE = Split()
CONVOLUTIONS = "(stem|convolution)$"
"""Parts that torch's engine leaves whole on each rank."""


def split_of(config: RunConfig, tp_rank: int = 0) -> Split:
    """The part of a run's model that a rank of the tensor axis holds."""
    layout = config.layout
    if layout.tp == 1:
        return WHOLE
    rank = 0
    if models.spec(config.model).family == "text":  # a vocabulary alone may be shared out unequally
        share = -(-config.num_classes // layout.tp)
        rank = tp_rank if (tp_rank + 1) * share > config.num_classes else 0
    pattern = layout.tensor_parts
    if layout.engine == "torch" and isinstance(models.spec(config.model).size, CoAtNetSize):
        pattern = rf"^(?!.*{CONVOLUTIONS}).*({pattern})"
    return Split(layout.tp, rank, layout.sequence_parallel, pattern)


def model_shapes(config: RunConfig) -> ModelShapes:
    """Shapes of the whole model of a run."""
    return _shapes(
        config.model, config.image_size, config.sequence_length, config.num_classes, WHOLE, routing_of(config)
    )


def share_shapes(config: RunConfig, tp_rank: int) -> ModelShapes:
    """Shapes of what one rank of the tensor axis holds of the model of a run, all blocks of it."""
    split = split_of(config, tp_rank)
    return _shapes(config.model, config.image_size, config.sequence_length, config.num_classes, split)


def build_on_meta(
    model: str,
    image_size: int | None,
    sequence_length: int | None,
    num_classes: int,
    split: Split = WHOLE,
    checkpointing: Checkpointing = "none",
    *,
    routing: Routing | None = None,
    ep: int = 1,
) -> BlockList:
    """The model, or one rank's part of it, with shapes and without memory."""
    import torch

    with torch.device("meta"):
        built = models.build(
            model,
            image_size=image_size,
            sequence_length=sequence_length,
            num_classes=num_classes,
            checkpointing=checkpointing,
            routing=routing,
        )
        if ep > 1:
            from dlojz.moe.parallel import shard_experts

            shard_experts(built, 0, ep)
        if split == WHOLE:
            return built
        from dlojz.tensor.axis import TensorAxis
        from dlojz.tensor.split import split_model

        axis = TensorAxis(rank=split.rank, size=split.size, sequence_parallel=split.sequence_parallel)
        return split_model(built, axis, split.pattern)


@lru_cache(maxsize=64)
def _shapes(
    model: str,
    image_size: int | None,
    sequence_length: int | None,
    num_classes: int,
    split: Split,
    routing: Routing | None = None,
) -> ModelShapes:
    from dlojz.moe.parallel import expert_parameters

    built = build_on_meta(model, image_size, sequence_length, num_classes, split, routing=routing)
    experts = frozenset(expert_parameters(built))
    parameters = tuple(
        ParameterShape(name, tuple(parameter.shape), int(name.split(".")[1]), name.rpartition(".")[0], name in experts)
        for name, parameter in built.named_parameters()
    )
    buffers = tuple(
        (int(name.split(".")[1]), *((one.numel(), 0) if one.is_floating_point() else (0, one.numel() * one.itemsize)))
        for name, one in built.named_buffers()
    )
    return ModelShapes(
        parameters=parameters,
        float_buffer_elements=sum(elements for _, elements, _ in buffers),
        integer_buffer_bytes=sum(integer_bytes for _, _, integer_bytes in buffers),
        buffers=buffers,
    )
