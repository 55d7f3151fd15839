"""One bit per number: its sign, and one scale for a block of numbers.

Layer 2, loads torch. Invariant: a sign is one bit of a byte, the first number in the lowest bit; zero counts as
positive. What is lost is kept by who compresses: compressed + error = original.

The scale of a block is the mean of its magnitudes: of all c, c × sign(x) is then the nearest to x, and the error is
smaller than x by a factor that depends on no number of x: ‖x − c sign(x)‖² = ‖x‖² − ‖x‖₁²/n < ‖x‖².

Source: Bernstein et al. 2018, "signSGD" (arXiv 1802.04434), for the sign; Karimireddy et al. 2019, "Error Feedback
Fixes SignSGD" (arXiv 1901.09847), for the scale and its bound. DeepSpeed's `compressed_allreduce` scales so that the
norm is kept, ‖x‖₂/√n; that overshoots where few numbers are large, and has no such bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlojz.optim.messages import BLOCK_ELEMENTS, SIGNS_PER_BYTE


def pack(values: Tensor) -> Tensor:
    """The signs of numbers, eight to a byte.

    Args:
        values: shape (n,), any n.

    Returns:
        uint8, shape (⌈n/8⌉,); bit i of byte j is 1 where `values[8 j + i]` is not negative, or is not there.
    """
    bits = torch.ones(-(-values.numel() // SIGNS_PER_BYTE) * SIGNS_PER_BYTE, dtype=torch.uint8, device=values.device)
    bits[: values.numel()] = values >= 0
    bits_J8 = bits.view(-1, SIGNS_PER_BYTE)  # noqa: N806 - J bytes of 8 signs
    packed = bits_J8[:, 0].clone()
    for place in range(1, SIGNS_PER_BYTE):
        packed |= bits_J8[:, place] << place
    return packed


def unpack(packed: Tensor, numel: int) -> Tensor:
    """The signs again, as numbers: +1 or −1.

    Args:
        packed: as `pack` gives it.
        numel: how many there are.

    Returns:
        fp32, shape (numel,).
    """
    bits_J8 = torch.stack([(packed >> place) & 1 for place in range(SIGNS_PER_BYTE)], dim=1)  # noqa: N806
    return bits_J8.view(-1)[:numel].float().mul_(2).sub_(1)


def scales_of(values: Tensor, numel: int) -> Tensor:
    """The mean magnitude of every block of `BLOCK_ELEMENTS` numbers.

    Args:
        values: shape (n,); beyond the first `numel` there is padding, of zeros, which does not count.
        numel: numbers that count, from 0 to n.

    Returns:
        fp32, shape (⌈n/BLOCK_ELEMENTS⌉,); 0 for a block of padding.
    """
    blocks = -(-values.numel() // BLOCK_ELEMENTS)
    whole = values.numel() // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    sums = values.new_zeros(blocks, dtype=torch.float32)
    sums[: whole // BLOCK_ELEMENTS] = values[:whole].view(-1, BLOCK_ELEMENTS).abs().sum(dim=1)
    if whole < values.numel():
        sums[-1] = values[whole:].abs().sum()
    starts = torch.arange(blocks, device=values.device) * BLOCK_ELEMENTS
    return sums / (numel - starts).clamp(1, BLOCK_ELEMENTS)


def decompress(packed: Tensor, scales: Tensor, numel: int) -> Tensor:
    """Every sign times the scale of its block.

    Args:
        packed: as `pack` gives it.
        scales: as `scales_of` gives them.
        numel: how many numbers there are.

    Returns:
        fp32, shape (numel,).
    """
    values = unpack(packed, numel)
    whole = numel // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    values[:whole].view(-1, BLOCK_ELEMENTS).mul_(scales[: whole // BLOCK_ELEMENTS, None])
    values[whole:].mul_(scales[-1] if whole < numel else 1.0)
    return values
