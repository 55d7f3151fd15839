"""Bytes of a compressed all-reduce: signs, scales, padding.

Layer 2, loads no torch. Invariant: equal, byte for byte, to what the probe counts at c10d.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_ELEMENTS = 2048
"""Elements that share one scale, at most; a scale is 4 bytes beside their 256 bytes of signs."""
SIGNS_PER_BYTE = 8
SCALE_BYTES = 4
FP32_BYTES = 4


@dataclass(frozen=True)
class MessageBytes:
    """What one rank hands to the two collectives of a compressed all-reduce, in bytes: the whole messages.

    Args:
        all_to_all: every rank's chunks for all servers, packed: what a rank gives in.
        all_gather: every server's chunk, packed: what a rank gets out.
    """

    all_to_all: int
    all_gather: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.all_to_all + self.all_gather


def chunk_elements(numel: int, ranks: int) -> int:
    """Elements of the chunk that each rank serves: an equal share, padded to whole bytes of signs."""
    share = -(-numel // ranks)
    return -(-share // SIGNS_PER_BYTE) * SIGNS_PER_BYTE


def chunk_bytes(elements: int) -> int:
    """Bytes of one packed chunk: its signs, then its scales, one for every `BLOCK_ELEMENTS` begun."""
    return elements // SIGNS_PER_BYTE + SCALE_BYTES * -(-elements // BLOCK_ELEMENTS)


def message_bytes(numel: int, ranks: int) -> MessageBytes:
    """Bytes of one compressed all-reduce of so many elements; none for one rank, which sends nothing.

    On the wire each of N ranks sends (N − 1)/N of both; of the 2 × 4 bytes per element of an all-reduce in fp32 it
    sends as much (N − 1)/N. Their ratio is that of the bytes: 1/32, and 1/2048 for the scales.

    Args:
        numel: elements of the tensor that is averaged.
        ranks: that average it.

    Source: Tang et al. 2021 (arXiv 2102.02888) and DeepSpeed's `compressed_allreduce` for what is sent; the count is
    ours.
    """
    if ranks == 1:
        return MessageBytes(0, 0)
    whole = ranks * chunk_bytes(chunk_elements(numel, ranks))
    return MessageBytes(whole, whole)


def saved_share(numel: int, ranks: int) -> float:
    """Share of the bytes of an all-reduce in fp32 that the compressed one does not send, from 0 to 1."""
    return 1 - message_bytes(numel, ranks).total / (2 * FP32_BYTES * numel)
