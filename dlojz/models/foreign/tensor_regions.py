"""Regions of a module that tensor-parallel ranks share: linear layers by columns, then one by rows."""

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn


class SplitLayer(NamedTuple):
    """Linear layer of which each rank holds a part.

    Attributes:
        path: in the block.
        style: of its split: by columns (outputs) or by rows (inputs).
        parts: outputs of each fused part, each of which is split (`(768, 768, 768)` of queries, keys and values); of a
            row layer its inputs.
    """

    path: str
    style: Literal["colwise", "rowwise"]
    parts: tuple[int, ...]


class Region(NamedTuple):
    """Linear layers that are split together.

    Attributes:
        block: path of the repeated block that it is in; all other paths are in the block.
        columns: those that begin it.
        row: the one that ends it.
        heads: attention heads that are distributed; 0 in an MLP.
        settings: module, attribute and its value on a rank.
        inner: parameters that are read within it, whole on each rank.
    """

    block: str
    columns: tuple[SplitLayer, ...]
    row: SplitLayer
    heads: int
    settings: tuple[tuple[str, str, int], ...]
    inner: tuple[str, ...]

    @property
    def layers(self) -> tuple[SplitLayer, ...]:
        """All of them, in the order of the forward pass."""
        return (*self.columns, self.row)


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module is a linear layer that is called.

    transformers' `Conv1D` is one, whose weight is (in, out); the last layer of `nn.MultiheadAttention` is not called.
    """
    kind = type(module).__name__
    return kind == "Conv1D" or (isinstance(module, nn.Linear) and kind != "NonDynamicallyQuantizableLinear")


def widths(layer: nn.Module) -> tuple[int, int]:
    """Return the inputs and the outputs of a linear layer."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape
    return (columns, rows) if isinstance(layer, nn.Linear) else (rows, columns)  # Conv1D's weight is (in, out)


def own_columns(parts: Sequence[int], size: int, rank: int, device: torch.device | str | None = None) -> Tensor:
    """Return the indices that a rank holds: its equal share of each part, one part after the other.

    Example:
        >>> own_columns((4, 4), 2, 1).tolist()
        [2, 3, 6, 7]
    """
    indices, start = [], 0
    for part in parts:
        share = part // size
        indices.append(torch.arange(start + rank * share, start + (rank + 1) * share, device=device))
        start += part
    return torch.cat(indices)


def fused_ways(outputs: int, inputs: int) -> list[tuple[int, ...]]:
    """List the ways in which outputs may be fused before a row layer with so many inputs, the commonest first."""
    # Queries, keys and values, or gate and up, each as wide as the row layer's input.
    partitions = [(inputs,) * (outputs // inputs)] if outputs in (2 * inputs, 3 * inputs) else []
    if outputs > inputs and (outputs - inputs) % 2 == 0 and outputs != 3 * inputs:
        partitions.append((inputs, *[(outputs - inputs) // 2] * 2))  # fewer keys and values than queries
    return [*partitions, (outputs,)]


@contextmanager
def setting(module: nn.Module, settings: Sequence[tuple[str, str, int]]) -> Iterator[None]:
    """Give modules a rank's numbers of heads, and widths, within this context."""
    # All attributes, since `put` replaces a configuration by a copy.
    saved_attributes = [(owner, dict(vars(owner))) for owner in {module.get_submodule(path) for path, *_ in settings}]
    try:
        put(module, settings)
        yield
    finally:
        for owner, attributes in saved_attributes:
            vars(owner).update(attributes)


def put(module: nn.Module, settings: Sequence[tuple[str, str, int]]) -> None:
    """Give modules a rank's numbers of heads, and widths; of a configuration that others read too, a copy."""
    for path, attribute, value in settings:
        owner: Any = module.get_submodule(path)
        if attribute.startswith("config."):
            owner.config = copy.copy(owner.config)
            owner = owner.config
        setattr(owner, attribute.removeprefix("config."), value)


def head_counts(owner: object) -> list[tuple[str, int]]:
    """List the attributes of a module, or of its configuration, that are numbers of heads, by their names."""
    attributes = getattr(owner, "__dict__", {}).items()
    return [
        (key, value)
        for key, value in attributes
        # `head_dim` and its like are widths of a head, and no numbers of heads.
        if type(value) is int and "head" in key and not re.search("dim|size|width|per", key)
    ]
