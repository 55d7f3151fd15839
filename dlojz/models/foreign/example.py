"""Example inputs of a model from elsewhere: one tensor, a tuple for its arguments, or a dict for its keywords.

A batch of square images or of tokens makes a model of the family `image` or `text`, whose size can be chosen. Any other
batch makes one of the family `tensors`, which reads samples of these shapes and no others.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dlojz.base.errors import LabError
from dlojz.models.foreign.names import model_sentence

Batch = Any
"""A tensor, or a tuple, list or dict of tensors, whose first dimension is the sample."""


class Example(NamedTuple):
    """Inputs of a model of the family `tensors`.

    Attributes:
        batch: Example of them.
        targets: Shape of a sample's targets, which are class numbers.
    """

    batch: Batch
    targets: tuple[int, ...]

    def inputs(self, samples: int, device: str) -> Batch:
        """Make inputs of so many samples: shapes and types, no values."""
        return tree_map(
            lambda tensor: torch.empty(samples, *tensor.shape[1:], dtype=tensor.dtype, device=device), self.batch
        )

    def sample(self, index: int, generator: torch.Generator) -> Batch:
        """Make one sample: normal numbers, and of whole numbers and booleans the example's own, in turn."""

        def made(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point():
                return torch.randn(tensor.shape[1:], dtype=tensor.dtype, generator=generator)
            if tensor.device.type == "meta":  # an example without values: class 0 for all
                return torch.zeros(tensor.shape[1:], dtype=tensor.dtype)
            return tensor[index % len(tensor)].cpu()

        return tree_map(made, self.batch)


def run_on(module: nn.Module, inputs: Batch) -> Any:
    """Run a module on a tensor, on a tuple as its arguments, or on a dict as its keywords."""
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)


def shapes_text(batch: Batch) -> str:
    """Write the shape of a tensor, or those of a tuple or dict of them."""
    if isinstance(batch, dict):
        return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())
    return " and ".join(str(tuple(tensor.shape)) for tensor in tree_leaves(batch))


def check_batch(source: str, batch: object) -> int:
    """Refuse what is no batch of tensors, and return its number of samples.

    Args:
        source: What gave it, for the refusal.
        batch: Example of inputs.

    Raises:
        LabError: if it holds anything but tensors, or they have not one first dimension in common.
    """
    parts = list(batch.values()) if isinstance(batch, dict) else batch
    parts = parts if isinstance(parts, tuple | list) else [batch]
    wrong_types = {type(part).__name__: None for part in parts if not isinstance(part, Tensor)}
    if wrong_types or not parts or (isinstance(batch, dict) and not all(isinstance(name, str) for name in batch)):
        raise _no_batch(source, ", ".join(wrong_types) or type(batch).__name__)
    # One number of samples, above 0; a scalar has none.
    samples = {part.shape[0] if part.dim() else 0 for part in parts if isinstance(part, Tensor)}
    if len(samples) > 1 or not min(samples):
        raise _no_batch(source, shapes_text(batch))
    return min(samples)


def _no_batch(source: str, text: str) -> LabError:
    return model_sentence.refused("no example of tensors", source=source, text=text)


def family_name(batch: Batch) -> Literal["image", "text", "tensors"]:
    """Name the family of a model that reads such a batch: `image`, `text` or `tensors`."""
    if not isinstance(batch, Tensor):
        return "tensors"
    if batch.dim() == 2 and batch.dtype in (torch.long, torch.int):  # (B, T), token ids
        return "text"
    square = batch.dim() == 4 and batch.shape[1:] == (3, batch.shape[3], batch.shape[3])  # (B, 3, side, side)
    return "image" if square and batch.dtype == torch.float32 else "tensors"
