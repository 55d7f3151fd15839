"""Exercise of lab 10 on the curriculum: the length of the sequences, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dlojz.labs.kit.exercise_texts import Texts

if TYPE_CHECKING:
    pass

TEXTS = Texts(__file__)

SETTINGS = ((16, 128, 37, 1, 8), (16, 128, 37, 2, 8), (64, 1024, 53, 3, 16), (8, 48, 23, 1, 1))
"""Start, end, steps, degree, multiple. The numbers of steps are prime: no length but the last is a whole number by
chance, so no order of the operations rounds otherwise than another."""


def pacing(t: int, start: int, end: int, steps: int, degree: int, multiple: int) -> int:
    """Compute the tokens per sample of the t-th step, from 1: a degree-th root, rounded down to a multiple.

    Source: Li et al. 2021 (arXiv 2108.06084), the pacing function; DeepSpeed's `CurriculumScheduler`, fixed_root.
    """
    length = math.floor(start + (end - start) * min(t / steps, 1) ** (1 / degree))
    return min(length - length % multiple, end)


def _curriculum_pacing_cases() -> Iterator[tuple[int, ...]]:
    for start, end, steps, degree, multiple in SETTINGS:
        for t in (1, 2, 5, 11, 17, 22, steps - 1, steps, steps + 9):
            yield t, start, end, steps, degree, multiple


def _way(length: Callable[..., float], *, rounded: Callable[[float, int], float] | None = None) -> Callable[..., float]:
    """A pacing function under a fault: its length before rounding, and how that is rounded."""

    def way(t: int, start: int, end: int, steps: int, degree: int, multiple: int) -> float:
        raw = length(t, start, end, steps, degree)
        return min((rounded or _down)(raw, multiple), end)

    return way


def _down(length: float, multiple: int) -> float:
    return math.floor(length) // multiple * multiple


def _right(t: int, start: int, end: int, steps: int, degree: int) -> float:
    return start + (end - start) * min(t / steps, 1) ** (1 / degree)


PACING = TEXTS.exercise(
    "pacing",
    pacing,
    cases=_curriculum_pacing_cases,
    counts=True,
    mistakes={
        "the growth goes on after the last step": lambda t, start, end, steps, degree, multiple: _down(
            start + (end - start) * (t / steps) ** (1 / degree), multiple
        ),
        "not rounded to a multiple": _way(_right, rounded=lambda length, multiple: math.floor(length)),
        "not rounded at all": _way(_right, rounded=lambda length, multiple: length),
        "you round up": _way(_right, rounded=lambda length, multiple: math.ceil(length / multiple) * multiple),
        "you round to the nearest multiple": _way(
            _right, rounded=lambda length, multiple: round(length / multiple) * multiple
        ),
        "you take a power where a root is due": _way(
            lambda t, start, end, steps, degree: start + (end - start) * min(t / steps, 1) ** degree
        ),
        "the degree is left out": _way(lambda t, start, end, steps, degree: _right(t, start, end, steps, 1)),
        "the growth begins at 0": _way(lambda t, start, end, steps, degree: end * min(t / steps, 1) ** (1 / degree)),
        "you add a share of end to start": _way(
            lambda t, start, end, steps, degree: start + end * min(t / steps, 1) ** (1 / degree)
        ),
        "you are one step late": _way(lambda t, start, end, steps, degree: _right(t - 1, start, end, steps, degree)),
        "you divide the share by the degree": _way(
            lambda t, start, end, steps, degree: start + (end - start) * min(t / steps, 1) / degree
        ),
        "your share is a whole number": _way(
            lambda t, start, end, steps, degree: _right(t // steps * steps, start, end, steps, degree)
        ),
        "you are one step ahead": _way(lambda t, start, end, steps, degree: _right(t + 1, start, end, steps, degree)),
        "max in place of min": lambda t, start, end, steps, degree, multiple: _down(
            start + (end - start) * max(t / steps, 1) ** (1 / degree), multiple
        ),
        "the root's exponent is a whole number": _way(
            lambda t, start, end, steps, degree: start + (end - start) * min(t / steps, 1) ** (1 // degree)
        ),
        "your sequences become shorter": _way(
            lambda t, start, end, steps, degree: end - (end - start) * min(t / steps, 1) ** (1 / degree)
        ),
        "you give what is gained alone": lambda t, start, end, steps, degree, multiple: _down(
            _right(t, start, end, steps, degree) - start, multiple
        ),
        "you return the remainder": _way(_right, rounded=lambda length, multiple: math.floor(length) % multiple),
        "you return how many multiples there are": _way(
            _right, rounded=lambda length, multiple: math.floor(length) // multiple
        ),
        "you round to a multiple of 8": _way(_right, rounded=lambda length, multiple: math.floor(length) // 8 * 8),
    },
)
