"""Integers of a few bits side by side in bytes, as a file keeps them.

Layer 2. Invariant: unpacking gives back what was packed; n integers of b bits take ⌈n·b / 8⌉ bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_bytes(values: int, bits: int) -> int:
    """Bytes that so many integers of so many bits take."""
    return -(-values * bits // 8)


def pack(integers: Tensor, bits: int) -> Tensor:
    """Signed integers, laid bit by bit into bytes, the lowest bit first; int8 itself where 8 bits are kept.

    Args:
        integers: int8, any shape, each from −2^(bits−1) to 2^(bits−1) − 1.
        bits: from 2 to 8.

    Returns:
        int8 of the same shape for 8 bits, else uint8 of ⌈n·bits / 8⌉ bytes.
    """
    if bits == 8:
        return integers
    unsigned = integers.flatten().to(torch.int32) + 2 ** (bits - 1)
    stream = ((unsigned.unsqueeze(1) >> torch.arange(bits, device=integers.device)) & 1).flatten()
    stream = torch.nn.functional.pad(stream, (0, -len(stream) % 8)).reshape(-1, 8)
    return (stream << torch.arange(8, device=integers.device)).sum(dim=1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """The integers that `pack` was given, int8 of that shape."""
    if bits == 8:
        return packed
    stream = ((packed.to(torch.int32).unsqueeze(1) >> torch.arange(8, device=packed.device)) & 1).flatten()
    values = torch.Size(shape).numel()
    unsigned = (stream[: values * bits].reshape(values, bits) << torch.arange(bits, device=packed.device)).sum(dim=1)
    return (unsigned - 2 ** (bits - 1)).to(torch.int8).reshape(shape)
