"""Count what an optimizer sends in a step: the bytes of a compressed all-reduce, and the steps in which 0/1 Adam sends.

The bytes equal, byte for byte, what the probe counts at c10d. Steps are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Iterator

BLOCK_ELEMENTS = 2048
"""Elements that share one scale, at most; a scale is 4 bytes beside their 256 bytes of signs."""
SIGNS_PER_BYTE = 8
SCALE_BYTES = 4
FP32_BYTES = 4


def chunk_elements(numel: int, ranks: int) -> int:
    """Count the elements of the chunk that each rank serves: an equal share, padded to whole bytes of signs."""
    share = -(-numel // ranks)
    return -(-share // SIGNS_PER_BYTE) * SIGNS_PER_BYTE


def chunk_bytes(elements: int) -> int:
    """Count the bytes of one packed chunk: its signs, then its scales, one for every `BLOCK_ELEMENTS` begun."""
    return elements // SIGNS_PER_BYTE + SCALE_BYTES * -(-elements // BLOCK_ELEMENTS)


def message_bytes(numel: int, ranks: int) -> int:
    """Count the bytes of each of the two messages of a compressed all-reduce; none for one rank, which sends nothing.

    The all-to-all takes every rank's chunks for all servers, the all-gather gives every server's chunk. On the wire
    each of N ranks sends (N − 1)/N of both, and as much of the 2 × 4 bytes per element of an all-reduce in fp32: the
    ratio is that of the bytes, 1/32 and 1/2048 for the scales.

    Args:
        numel: elements of the tensor that is averaged.
        ranks: that average it.

    Source: Tang et al. 2021 (arXiv 2102.02888) and DeepSpeed's `compressed_allreduce` for what is sent; the count is
    ours.
    """
    if ranks == 1:
        return 0
    # One chunk for each of N servers.
    return ranks * chunk_bytes(chunk_elements(numel, ranks))


def saved_share(numel: int, ranks: int) -> float:
    """Compute the share of the bytes of an all-reduce in fp32 that the compressed one saves, from 0 to 1."""
    # Both all-reduces send two messages: the 2 cancels.
    return 1 - message_bytes(numel, ranks) / (FP32_BYTES * numel)


VARIANCE_SCALER = 16
"""κ: renewals of the variance after which the interval between two of them doubles; DeepSpeed's too."""
LOCAL_SCALER = 1000
"""Synchronisations after which the interval between two of them doubles, once the variance is frozen.

In the paper it doubles as the learning rate halves, and the lab's is constant: by default a shorter run synchronises in
every step. 1000 is that of DeepSpeed's tutorial on 0/1 Adam; its ZeroOneAdam has 32,678.
"""
LOCAL_CLIPPER = 16
"""H: the longest interval between two synchronisations, in steps."""


def variance_steps(freeze_step: int, scaler: int = VARIANCE_SCALER) -> Iterator[int]:
    """Yield T_v: the steps, below `freeze_step`, in which 0/1 Adam renews the variance from gradients sent in full.

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
    # The last step synchronises, so that the run ends with equal weights.
    if step < freeze_step or step + 1 == total_steps:
        return True
    # T_u, walked from the freezing on: nothing to keep in a checkpoint.
    synchronised, interval, number = freeze_step - 1, 1, 0
    while synchronised < step:
        synchronised += interval
        number += 1
        if number % scaler == 0:
            interval = min(clipper, 2 * interval)
    return synchronised == step
