"""Lab 09: a vector as a message of bytes, and back: what ranks hand to one another in the compressed all-reduce.

Layer 6 (labs), on `dlojz.optim`. Invariant: a message is what `dlojz.optim.compressed_all_reduce` sends of a chunk:
eight signs to a byte, then 4 bytes of scale for every 2048 numbers begun.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlojz.schema import LabError
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor


def write(values: Tensor) -> Tensor:
    """Signs and scales of a vector, as bytes.

    Args:
        values: fp32, shape (n,), n a multiple of 8.

    Returns:
        uint8, shape (n/8 + 4 ⌈n/2048⌉,).

    Raises:
        LabError: if n is not a multiple of 8.
    """
    import torch

    from dlojz.optim.messages import SIGNS_PER_BYTE
    from dlojz.optim.signs import pack, scales_of

    if values.dim() != 1 or values.numel() % SIGNS_PER_BYTE:
        shape = tuple(values.shape)
        raise LabError(
            say(
                en=f"write takes a vector whose length is a multiple of {SIGNS_PER_BYTE}, but the shape {shape} was "
                "received.",
                fr=f"write prend un vecteur dont la longueur est un multiple de {SIGNS_PER_BYTE}, mais la forme "
                f"{shape} a été reçue.",
            )
        )
    return torch.cat([pack(values), scales_of(values, values.numel()).view(torch.uint8)])


def read(message: Tensor) -> Tensor:
    """The vector that a message stands for: every sign times its scale.

    Args:
        message: as `write` gives it.

    Returns:
        fp32, shape (n,).
    """
    import torch

    from dlojz.optim.messages import BLOCK_ELEMENTS, SCALE_BYTES, SIGNS_PER_BYTE
    from dlojz.optim.signs import decompress

    blocks = -(-message.numel() // (BLOCK_ELEMENTS // SIGNS_PER_BYTE + SCALE_BYTES))
    signs = message.numel() - SCALE_BYTES * blocks
    return decompress(message[:signs], message[signs:].clone().view(torch.float32), SIGNS_PER_BYTE * signs)
