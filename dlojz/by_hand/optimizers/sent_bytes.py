"""Bytes that an optimizer sends in a step, and the stages in which it sends them.

Bytes of a compressed all-reduce: signs, scales, padding.

Equal, byte for byte, to what the probe counts at c10d.

When 0/1 Adam sends what: its two sets of steps.

Every rank, and who predicts, counts the same steps; they are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Iterator
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


VARIANCE_SCALER = 16
"""κ: renewals of the variance after which the interval between two of them doubles; DeepSpeed's too."""
LOCAL_SCALER = 1000
"""Synchronisations after which the interval between two of them doubles, once the variance is frozen.

In the paper it doubles as the learning rate halves, and the lab's is constant: a shorter run synchronises in every step
unless it is told otherwise. 1000 is that of DeepSpeed's tutorial on 0/1 Adam; its ZeroOneAdam has 32,678.
"""
LOCAL_CLIPPER = 16
"""H: the longest interval between two synchronisations, in steps."""


def variance_steps(freeze_step: int, scaler: int = VARIANCE_SCALER) -> Iterator[int]:
    """T_v: the steps, below `freeze_step`, in which 0/1 Adam renews the variance from gradients sent in full.

    The first, then each after an interval that doubles every `scaler` renewals: k_{j+1} − k_j = 2^⌊j/κ⌋.

    Source: Lu et al. 2022 (arXiv 2202.06009); DeepSpeed's ZeroOneAdam doubles `var_interval` so.
    """
    step = number = 0
    while step < freeze_step:
        yield step
        step += 2 ** (number // scaler)
        number += 1


def synchronises(
    step: int,
    freeze_step: int,
    total_steps: int | None = None,
    scaler: int = LOCAL_SCALER,
    clipper: int = LOCAL_CLIPPER,
) -> bool:
    """Whether a step is in T_u, the steps after which 0/1 Adam synchronises the ranks.

    All up to the freezing of the variance; then the interval doubles every `scaler` synchronisations, up to `clipper`
    steps; and the last step of the run.

    Source: Lu et al. 2022 (arXiv 2202.06009), where the interval follows the learning rate; for a constant rate, as
    DeepSpeed's `local_step_scaler` and `local_step_clipper` have it.
    """
    if step < freeze_step or step + 1 == total_steps:
        return True
    synchronised, interval, number = freeze_step - 1, 1, 0
    while synchronised < step:
        synchronised += interval
        number += 1
        if number % scaler == 0:
            interval = min(clipper, 2 * interval)
    return synchronised == step
