"""Exercise of lab 10 on the curriculum: the length of the sequences, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dlojz.labs.kit.exercise_texts import Texts

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


PACING = TEXTS.exercise(
    "pacing",
    pacing,
    cases=_curriculum_pacing_cases,
    counts=True,
    mistakes={
        "the growth goes on after the last step": "min(t / steps, 1) → (t / steps); , end) → , math.inf)",
        "not rounded to a multiple": "length - length % multiple → length",
        "not rounded at all": "math.floor →; length - length % multiple → length",
        "you round up": "math.floor →; length - length % multiple → math.ceil(length / multiple) * multiple",
        "you round to the nearest multiple": (
            "math.floor →; length - length % multiple → round(length / multiple) * multiple"
        ),
        "you take a power where a root is due": "(1 / degree) → degree",
        "the degree is left out": "** (1 / degree) →",
        "the growth begins at 0": "start + (end - start) → end",
        "you add a share of end to start": "(end - start) → end",
        "you are one step late": "t / steps → (t - 1) / steps",
        "you divide the share by the degree": "** (1 / degree) → / degree",
        "your share is a whole number": "t / steps → t // steps",
        "you are one step ahead": "t / steps → (t + 1) / steps",
        "max in place of min": "min(t / steps, 1) → max(t / steps, 1); , end) → , math.inf)",
        "the root's exponent is a whole number": "1 / degree → 1 // degree",
        "your sequences become shorter": "start + (end → end - (end",
        "you give what is gained alone": "start + (end → (end",
        "you return the remainder": "length - length % multiple → length % multiple",
        "you return how many multiples there are": "length - length % multiple → length // multiple",
        "you round to a multiple of 8": "length % multiple → length % 8",
    },
)
