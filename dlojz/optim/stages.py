"""When 0/1 Adam sends what: its two sets of steps.

Layer 2, loads no torch. Invariant: every rank, and who predicts, counts the same steps; they are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Iterator

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
