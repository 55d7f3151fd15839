"""Exercise of lab 09 on when to freeze the variance of 1-bit Adam."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence

from dlojz.base.language import significant
from dlojz.labs.kit.exercise import Mistake, Said
from dlojz.labs.kit.exercise_texts import Texts

TEXTS = Texts(__file__)

Norms = Sequence[float]
Rests = Callable[[float, float], bool]


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
    return _first(_smaller)(norms, beta2, threshold)


def _delta(beta2: float) -> int:
    # round, not int: 1 / (1 − 0.95) is 19.99… in floating point
    return round(1 / (1 - beta2))


def _smaller(before: float, after: float) -> float:
    """The smaller of two norms over the larger."""
    return min(before, after) / max(before, after)


def _first(
    ratio: Callable[[float, float], float], back: Callable[[float], int] = _delta, rests: Rests = operator.ge
) -> Callable[[Norms, float, float], int]:
    """A criterion: which ratio of norms, how many steps apart, and how it compares with the threshold."""

    def step(norms: Norms, beta2: float, threshold: float) -> int:
        # from step Δ on: before it there is no norm to compare with
        delta = back(beta2)
        steps = (t for t in range(delta, len(norms)) if rests(ratio(norms[t - delta], norms[t]), threshold))
        return next(steps, len(norms))

    return step


def _from(norms: Norms, beta2: float, threshold: float, start: int) -> int:
    delta = _delta(beta2)
    steps = (t for t in range(start, len(norms)) if _smaller(norms[t - delta], norms[t]) >= threshold)
    return next(steps, len(norms))


def _beside(norms: Norms, threshold: float, start: int) -> int:
    """The first step from `start` on whose norm is near that of the step before."""
    steps = (t for t in range(start, len(norms)) if _smaller(norms[t - 1], norms[t]) >= threshold)
    return next(steps, len(norms))


_NEIGHBOURS = TEXTS.sentence("freeze-step", "you compare neighbouring steps")


def _last(norms: Norms, beta2: float, threshold: float) -> int:
    delta = _delta(beta2)
    steps = [t for t in range(delta, len(norms)) if _smaller(norms[t - delta], norms[t]) >= threshold]
    return steps[-1] if steps else len(norms)


def _looked_back_to(norms: Norms, beta2: float, threshold: float) -> int:
    step = freeze_step(norms, beta2, threshold)
    return step - _delta(beta2) if step < len(norms) else step


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


FREEZE_STEP = TEXTS.exercise(
    "freeze-step",
    freeze_step,
    cases=_freeze_cases,
    told=_freeze_told,
    mistakes={
        "neighbouring steps compared": tuple(
            Mistake(wrong_answer, *_NEIGHBOURS)
            for wrong_answer in (
                _first(_smaller, lambda beta2: 1),
                lambda norms, beta2, threshold: _beside(norms, threshold, _delta(beta2)),
                lambda norms, beta2, threshold: _beside(norms, threshold, 0),
            )
        ),
        "ratio before / now, above 1 where the norm falls": _first(lambda before, after: before / after),
        "ratio now / before, above 1 where the norm rises": _first(lambda before, after: after / before),
        "you stop where the norm still moves": _first(_smaller, rests=operator.le),
        "the step that is looked back to": tuple(
            wrong_answer
            for wrong_answer in (
                _looked_back_to,
                lambda norms, beta2, threshold: freeze_step(norms, beta2, threshold) - _delta(beta2),
            )
        ),
        "a norm compared with itself": _first(_smaller, lambda beta2: 0),
        "ratio must exceed the threshold": _first(_smaller, rests=operator.gt),
        "you begin one step late": lambda norms, beta2, threshold: _from(norms, beta2, threshold, _delta(beta2) + 1),
        "you begin before step Δ": tuple(
            lambda norms, beta2, threshold, start=start: _from(norms, beta2, threshold, start) for start in (1, 0)
        ),
        "not rounded to the nearest": tuple(
            _first(_smaller, cut)
            for cut in (lambda beta2: int(1 / (1 - beta2)), lambda beta2: math.ceil(1 / (1 - beta2)))
        ),
        "a step beside the right one": tuple(
            lambda norms, beta2, threshold, shift=shift: (
                step + shift if (step := freeze_step(norms, beta2, threshold)) < len(norms) else step
            )
            for shift in (1, -1)
        ),
        "wrong where there is no such step": tuple(
            lambda norms, beta2, threshold, never=never: (
                never(norms)
                if freeze_step(norms, beta2, threshold) == len(norms)
                else freeze_step(norms, beta2, threshold)
            )
            for never in (lambda norms: -1, lambda norms: len(norms) - 1, lambda norms: 0)
        ),
        "you compare the difference of the norms": _first(lambda before, after: 1 - abs(before - after)),
        "you divide the larger by the smaller": _first(lambda before, after: max(before, after) / min(before, after)),
        "you return the last such step": _last,
    },
)
