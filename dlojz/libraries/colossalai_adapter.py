"""Draw the lab's initial weights in the older torch of Colossal-AI's environment.

Random numbers are the same in both; `nn.init.trunc_normal_` has changed: once a uniform number through the inverse of
the error function, now a normal number, drawn again where it falls outside the bounds.

Source: the source of `torch.nn.init` in torch 2.5 and 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@torch.no_grad()
def trunc_normal_(
    tensor: Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fill a tensor from a normal distribution truncated to `[a, b]`, as torch 2.13 does; returns the tensor.

    Args:
        tensor: filled in place.
        mean: of the whole distribution.
        std: the same.
        a: least value, as a number and not in deviations.
        b: greatest value; between the two must lie 3 tenths of the distribution.
        generator: of random numbers; by default torch's own.
    """
    drawn = tensor.normal_(mean, std, generator=generator)
    while bool((outside := (drawn < a) | (drawn > b)).any()):
        drawn = torch.where(outside, torch.empty_like(drawn).normal_(mean, std, generator=generator), drawn)
    return tensor if drawn is tensor else tensor.copy_(drawn)


@contextmanager
def weights_as_in_the_lab() -> Iterator[None]:
    """Initialise models within this context with the weights that the lab's torch draws."""
    before = nn.init.trunc_normal_
    nn.init.trunc_normal_ = trunc_normal_
    try:
        yield
    finally:
        nn.init.trunc_normal_ = before
