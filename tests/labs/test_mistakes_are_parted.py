"""The mistakes that judges know: the cases of each exercise part every one from the right answer and from the others.

A mistake that only one case shows is named by that case alone; where a result is a single number, it may fit by chance.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest

import dlojz.labs
from dlojz.labs.kit.answer_numbers import is_number
from dlojz.labs.kit.exercise import Exercise
from dlojz.labs.kit.judges import Judge

ONE_CASE: dict[tuple[str, str], str] = {
    ("best-split", "You give replicas that the micro-batches cannot"): "a cluster with an odd number of micro-batches",
    ("best-split", "States that fill a GPU exactly do fit"): "a GPU that is full to the last byte",
    ("paired-rounds", "A probability is at most 1"): "as many wins as defeats",
    ("freeze-step", "Δ is not rounded to the nearest"): "int() makes another Δ of 0.95 alone",
    ("fused-traffic", "A state that is written before it is first read"): "an update that is kept",
}
"""Mistakes in single numbers that one case shows, with that case."""
BY_CHOICE = {
    ("best-split", 0): "the number of replicas alone does not tell why a split was chosen",
    ("best-split", 1): "nor does that of the stages",
    ("best-split", 2): "nor the seconds of what was chosen",
}
"""Numbers, by their place, that several mistakes share: none is named for such a number alone."""


def judged() -> Iterator[Any]:
    """Every exercise whose judge knows mistakes in one process."""
    for module in pkgutil.iter_modules(dlojz.labs.__path__):
        for one in getattr(importlib.import_module(f"dlojz.labs.{module.name}"), "EXERCISES", ()):
            judge = one.judge
            if isinstance(judge, Judge) and judge.mistakes and not judge.on_ranks and judge.reference is not None:
                yield pytest.param(one, id=one.id)


def _outcomes(judge: Judge, way: Any, cases: list[Any]) -> list[Any]:
    outcomes: list[Any] = []
    for case in cases:
        try:
            outcomes.append(judge._outcome(way, case))
        except Exception as error:
            outcomes.append(error)
    return outcomes


def _apart(judge: Judge, ones: list[Any], others: list[Any]) -> int:
    """In how many cases two ways give something else."""
    pairs = list(zip(ones, others, strict=True))
    return sum(isinstance(a, Exception) or isinstance(b, Exception) or not _same(judge, a, b) for a, b in pairs)


def _same(judge: Judge, value: Any, other: Any) -> bool:
    try:
        return judge._same(value, other)
    except (TypeError, ValueError, RuntimeError):
        return False


@pytest.mark.parametrize("exercise", list(judged()))
def test_mistakes_are_parted_by_the_cases(exercise: Exercise) -> None:
    judge = exercise.judge
    assert isinstance(judge, Judge)
    cases = list(judge.cases() if callable(judge.cases) else judge.cases)
    right = _outcomes(judge, judge.reference, cases)
    shown = []
    for mistake in judge.mistakes:
        wanted = right if mistake.part is None else [one[mistake.part] for one in right]
        outcomes = _outcomes(judge, mistake.way, cases)
        times = _apart(judge, outcomes, wanted)
        if times:  # a mistake of several numbers may leave one of them right
            shown.append((mistake, outcomes))
        excused = any(name == exercise.id and mistake.en.startswith(words) for name, words in ONE_CASE)
        single = all(is_number(one) for one in wanted)
        assert mistake.part is not None or times > (single and not excused and len(cases) > 1), mistake.en
    for (one, own), (other, others) in combinations(shown, 2):
        if one.part == other.part and one.en != other.en and (exercise.id, one.part) not in BY_CHOICE:
            assert _apart(judge, own, others), f"{one.en}\n{other.en}"
