"""Exercise of lab 09 on when to freeze the variance of 1-bit Adam."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from dlojz.base.language import significant
from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import Texts

TEXTS = Texts(__file__)

Norms = Sequence[float]


def freeze_step(norms: Norms, beta2: float, threshold: float) -> int:
    """Find the first step whose norm of the variance is that of Δ = 1/(1 − β2) steps before, up to a threshold.

    Args:
        norms: of the variance after each step, counted from 0.
        beta2: its decay.
        threshold: least ratio of the smaller of the two norms to the larger, from 0 to 1.

    Returns:
        a step; the number of steps where there is none.

    Source: after Tang et al. 2021, "1-bit Adam" (arXiv 2102.02888), where the variance is frozen once its norm has
    become stable; that both directions count is ours.
    """
    # round, not int: 1 / (1 − 0.95) is 19.99… in floating point
    delta = round(1 / (1 - beta2))
    # from step Δ on: before it there is no norm to compare with
    for t in range(delta, len(norms)):
        before, after = norms[t - delta], norms[t]
        if min(before, after) / max(before, after) >= threshold:
            return t
    return len(norms)


def _freeze_cases() -> Iterator[tuple[list[float], float, float]]:
    rising = [1 - math.exp(-step / 20) + 0.01 for step in range(200)]
    falling = [1 + 6 * math.exp(-step / 25) for step in range(200)]
    hill = [(step + 1) * math.exp(-step / 15) + 0.5 for step in range(200)]
    yield from ((rising, 0.9, 0.9), (falling, 0.95, 0.96), (hill, 0.9, 0.95), (falling[:40], 0.95, 0.96))
    # At rest from the beginning: the first step that can be compared is the one, and the ratio equals the threshold.
    yield [2.0] * 30, 0.9, 1.0
    # Equal to the threshold later, once.
    yield [1.0] + [8.0 * (1 + step % 2) for step in range(14)] + [16.0] * 9, 0.8, 0.5
    # At rest from the beginning, then moving.
    yield [1.0] * 8 + [1.3**step for step in range(1, 30)] + [1.3**29] * 12, 0.8, 0.9
    # Never: the norm doubles with every step, and with beta2 = 0.95 floor and rounding of Δ differ.
    yield [2.0**step for step in range(40)], 0.95, 0.9


def _freeze_told(case: tuple[list[float], float, float]) -> Said:
    norms, beta2, threshold = case
    return TEXTS.sentence(
        "freeze-step",
        "the case",
        norms_count=len(norms),
        first_norm=significant(norms[0], 3),
        last_norm=significant(norms[-1], 3),
        beta2=beta2,
        threshold=threshold,
    )


_RATIO = "min(before, after) / max(before, after)"

FREEZE_STEP = TEXTS.exercise(
    "freeze-step",
    freeze_step,
    cases=_freeze_cases,
    told=_freeze_told,
    mistakes={
        "you compare neighbouring steps": (
            "delta = round(1 / (1 - beta2)) → delta = 1",
            "norms[t - delta] → norms[t - 1]",
            "norms[t - delta] → norms[t - 1]; range(delta, → range(",
        ),
        "ratio before / now, above 1 where the norm falls": f"{_RATIO} → before / after",
        "ratio now / before, above 1 where the norm rises": f"{_RATIO} → after / before",
        "you stop where the norm still moves": ">= threshold → <= threshold",
        "the step that is looked back to": (
            "return t → return t - delta",
            "return t → return t - delta; return len(norms) → return len(norms) - delta",
        ),
        "a norm compared with itself": "delta = round(1 / (1 - beta2)) → delta = 0",
        "ratio must exceed the threshold": ">= threshold → > threshold",
        "you begin one step late": "range(delta, → range(delta + 1,",
        "you begin before step Δ": ("range(delta, → range(1,", "range(delta, → range("),
        "not rounded to the nearest": ("round(1 → int(1", "round(1 → math.ceil(1"),
        "a step beside the right one": ("return t → return t + 1", "return t → return t - 1"),
        "wrong where there is no such step": (
            "return len(norms) → return -1",
            "return len(norms) → return len(norms) - 1",
            "return len(norms) → return 0",
        ),
        "you compare the difference of the norms": f"{_RATIO} → 1 - abs(before - after)",
        "you divide the larger by the smaller": f"{_RATIO} → max(before, after) / min(before, after)",
        "you return the last such step": "range(delta, len(norms)) → reversed(range(delta, len(norms)))",
    },
)
