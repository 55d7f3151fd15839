"""What every lab's bank of answers goes through: a class of tests that a lab's file inherits with its own bank.

A bank has one answer of each kind: what a judge cannot tell apart (the same values, types and changed arguments on all
its cases) proves the same twice. Of right answers one more is kept whose last bits differ, for the tolerance.

class TestBank(BankTests):
    exercises, predictions = EXERCISES, lab.PREDICTIONS
    wrong, right, others = BANK, REFERENCES, OTHER_RIGHT_ANSWERS
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch

from dlojz.base.language import use_language
from dlojz.labs.kit.exercise import Wrong, judge
from dlojz.labs.kit.lab import NUMBERS, content_of

Answer = Callable[..., Any]


def each_number(convert: Answer) -> Answer:
    """Make a function that converts the numbers in what an answer returned, also those in tuples and lists."""

    def converted(given: Any) -> Any:
        if type(given) in (tuple, list):
            return type(given)(map(converted, given))
        return convert(given) if type(given) in (int, float) else given

    return converted


def all_numbers(convert: Answer) -> Answer:
    """Make a function that converts a tuple or list of numbers alone as a whole."""

    def converted(given: Any) -> Any:
        whole = type(given) in (tuple, list) and given and all(type(one) in (int, float) for one in given)
        return convert(given) if whole else given

    return converted


def listed(given: Any) -> Any:
    """Turn tuples into lists, at every depth."""
    return list(map(listed, given)) if type(given) in (tuple, list) else given


def detached(answer: Answer) -> Answer:
    """Make an answer that gives the same values, but no gradient."""

    def cut(given: Any) -> Any:
        if type(given) in (tuple, list):
            return type(given)(map(cut, given))
        return given.detach() if torch.is_tensor(given) else given

    return lambda *case: cut(answer(*case))


HELD: Mapping[str, Answer] = {
    "NumPy": each_number(lambda number: np.float32(number) if isinstance(number, float) else np.int64(number)),
    "torch": each_number(torch.tensor),
    "a float that was float32": each_number(lambda number: torch.tensor(number).item()),
    "lists": listed,
    "an array": all_numbers(np.array),
    "a tensor": all_numbers(torch.tensor),
}
"""What a right answer may hold its numbers in."""
DAILY, DAILY_ON_RANKS = 2, 1
"""So many wrong answers to each exercise, and so many other right ones, are judged every day, the rest every night; one
that is judged on real ranks takes seconds."""
MOST_HELD = 4
"""So many ways to hold the numbers of one answer count as right variants of an exercise."""
GENERAL = (
    re.compile(r"is expected, but your function returns (?!an? )"),
    re.compile(r": .* should be \S+, but your function gives "),
    re.compile(r"of the values differ from the reference, by up to"),
    re.compile(r"^The shape is .*, but .* is expected\."),
    re.compile(r"^On rank \d+ .* has the shape "),
    re.compile(r"away from what one process computes \(rank \d+\)\.$"),
    re.compile(r"^The check could not use what your function is or returned"),
    re.compile(r"some values are infinite or NaN"),
)
"""Sentences of the kit that state a difference, and name no mistake."""


def exercises_of_all_labs() -> dict[str, Any]:
    """Every exercise, by its id."""
    return {one.id: one for number in NUMBERS for one in content_of(number).EXERCISES}


def is_general(message: str) -> bool:
    """Whether a verdict only says that something differs."""
    return any(sentence.search(message) for sentence in GENERAL)


class Counts(NamedTuple):
    """How the answers to an exercise, or to several, are judged.

    Attributes:
        exercises: how many.
        right, praised: right variants, and those of them that are accepted.
        wrong, refused, named: wrong ones, those that are refused, and those whose mistake is named.
        amiss: what should have been judged otherwise, one line each.
        unnamed: the verdicts of the wrong ones whose mistake is not named.
    """

    exercises: int = 0
    right: int = 0
    praised: int = 0
    wrong: int = 0
    refused: int = 0
    named: int = 0
    amiss: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def held_variants(exercise: Any, answer: Answer) -> dict[str, Answer]:
    """The ways to hold an answer's numbers that change what it returns, each unlike those before it.

    Args:
        exercise: judged in this process, with `answer` wrapped.
        answer: a right one.
    """
    if getattr(exercise.judge, "on_ranks", False):
        return {}  # there a tensor is what is asked for
    found: dict[str, Answer] = {}
    kinds = {_kinds_returned(exercise, answer)}
    for name, held in HELD.items():
        kind = _kinds_returned(exercise, lambda *case, held=held: held(answer(*case)))
        if kind not in kinds:
            kinds.add(kind)
            found[name] = lambda *case, held=held: held(answer(*case))
    return found


def _kinds_returned(exercise: Any, answer: Answer) -> str:
    """Types and values of all that an answer returns while it is judged, as text."""
    returned: list[str] = []

    def watched(*case: Any) -> Any:
        given = answer(*case)
        returned.append(_written(given))
        return given

    with contextlib.suppress(Wrong):
        exercise.judge(watched)
    return "; ".join(returned)


def _written(given: Any) -> str:
    if type(given) in (tuple, list):
        return f"{type(given).__name__}({', '.join(map(_written, given))})"
    return f"{type(given).__name__} {given!r}" if isinstance(given, int | float | np.generic) else type(given).__name__


def daily(exercise: Any) -> int:
    """How many answers of a kind are judged every day."""
    return DAILY_ON_RANKS if getattr(exercise.judge, "on_ranks", False) else DAILY


def first_of_each(rows: Sequence[tuple[str, Answer, str]]) -> list[Any]:
    """Wrong answers as parameters: of each exercise the first one is judged every day, the others every night."""
    exercises: set[str] = set()
    parameters = []
    for row in rows:
        later = row[0] in exercises
        parameters.append(pytest.param(*row, id=f"{row[0]}-{row[2]}", marks=pytest.mark.nightly if later else []))
        exercises.add(row[0])
    return parameters


class BankTests:
    """Wrong answers are refused for what is wrong with them, right ones are praised, in both languages.

    Attributes:
        exercises: of the lab, by id.
        predictions: that the lab asks for.
        wrong: by exercise, answers and words that each must be told.
        right: by exercise, one answer that is praised.
        others: other right ways, with their exercise.
        least: wrong answers that an exercise must have.
        least_right: right ones, the ways to hold the numbers of one among them.
    """

    exercises: ClassVar[Mapping[str, Any]]
    predictions: ClassVar[Sequence[Any]] = ()
    wrong: ClassVar[Mapping[str, Sequence[tuple[Answer, str]]]]
    right: ClassVar[Mapping[str, Answer]]
    others: ClassVar[Sequence[tuple[str, Answer]]] = ()
    least: ClassVar[int] = 6
    least_right: ClassVar[int] = 2

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for every answer."""
        wanted = metafunc.fixturenames
        if "words" in wanted:
            rows = [(name, answer, words) for name, answers in self.wrong.items() for answer, words in answers]
            early = {
                id(row[0]) for name, answers in self.wrong.items() for row in answers[: daily(self.exercises[name])]
            }
            marked = [
                pytest.param(*row, id=f"{row[0]}-{row[2]}", marks=[] if id(row[1]) in early else pytest.mark.nightly)
                for row in rows
            ]
            metafunc.parametrize(("exercise_id", "answer", "words"), marked)
        elif "later" in wanted:
            metafunc.parametrize("later", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["daily", "more"])
        elif "exercise_id" in wanted:
            metafunc.parametrize("exercise_id", list(self.exercises))

    def test_a_wrong_answer_is_refused_for_what_is_wrong_with_it(
        self, exercise_id: str, answer: Answer, words: str
    ) -> None:
        verdict = judge(self.exercises[exercise_id], answer)
        assert verdict.state == "wrong"
        assert words in verdict.message

    def test_every_exercise_has_wrong_answers_and_a_right_one(self) -> None:
        assert set(self.wrong) == set(self.right) == set(self.exercises)
        assert all(len(answers) >= self.least for answers in self.wrong.values())
        counts = {exercise_id: len(self.rights(exercise_id)) for exercise_id in self.exercises}
        assert {exercise_id: count for exercise_id, count in counts.items() if count < self.least_right} == {}

    @classmethod
    def rights(cls, exercise_id: str) -> list[tuple[str, Answer]]:
        """The right variants of an exercise, each with a name."""
        reference, exercise = cls.right[exercise_id], cls.exercises[exercise_id]
        held = list(held_variants(exercise, reference).items())[:MOST_HELD]
        others = [answer for other_id, answer in cls.others if other_id == exercise_id]
        return [("reference", reference), *held, *((f"other {place}", each) for place, each in enumerate(others))]

    @classmethod
    def counted(cls, exercise_id: str) -> Counts:
        """Judge all variants of an exercise, in English."""
        exercise, amiss, unnamed = cls.exercises[exercise_id], [], []
        rights, wrongs = cls.rights(exercise_id), cls.wrong[exercise_id]
        for name, answer in rights:
            verdict = judge(exercise, answer)
            if verdict.state != "right":
                amiss.append(f"{exercise_id}, right ({name}) refused: {verdict.message}")
        refused = len(amiss)
        for answer, words in wrongs:
            verdict = judge(exercise, answer)
            if verdict.state != "wrong":
                amiss.append(f"{exercise_id}, wrong answer praised; it should be told: {words}")
            elif words not in verdict.message or is_general(verdict.message):
                unnamed.append(f"{exercise_id}: {verdict.message}")
        praised = len(amiss) - refused
        return Counts(
            1,
            len(rights),
            len(rights) - refused,
            len(wrongs),
            len(wrongs) - praised,
            len(wrongs) - praised - len(unnamed),
            tuple(amiss),
            tuple(unnamed),
        )

    @pytest.mark.parametrize("language", ["en", pytest.param("fr", marks=pytest.mark.nightly)])
    def test_a_right_answer_is_accepted_in_both_languages(self, exercise_id: str, language: Any) -> None:
        use_language(language)
        exercise = self.exercises[exercise_id]
        verdict = judge(exercise, self.right[exercise_id])
        assert verdict.state == "right"
        assert verdict.message.endswith(getattr(exercise.praise, language))  # a challenge tells the score before

    def test_another_right_way_is_accepted(self, later: bool) -> None:
        """The first ones of each exercise, or those that come later."""
        before: Counter[str] = Counter()
        for place, (exercise_id, answer) in enumerate(self.others):
            before[exercise_id] += 1
            if (before[exercise_id] > daily(self.exercises[exercise_id])) is not later:
                continue
            verdict = judge(self.exercises[exercise_id], answer)
            assert verdict.state == "right", f"{exercise_id}, other right answer {place}: {verdict.message}"

    def test_a_right_answer_is_accepted_whatever_holds_its_numbers(self, exercise_id: str) -> None:
        exercise = self.exercises[exercise_id]
        if getattr(exercise.judge, "on_ranks", False):
            return  # there a tensor is what is asked for
        for name, held in HELD.items():
            try:
                exercise.judge(lambda *case, held=held: held(self.right[exercise_id](*case)))
            except Wrong as refused:
                pytest.fail(f"{exercise_id}, {name}: {refused}")

    def test_every_exercise_speaks_both_languages(self, exercise_id: str) -> None:
        exercise = self.exercises[exercise_id]
        for said in (exercise.title, exercise.praise, *exercise.hints):
            assert said.en and said.fr and said.en != said.fr

    def test_a_prediction_of_the_lab_is_asked_for_in_both_languages(self) -> None:
        for prediction in self.predictions:
            asked = prediction.question
            assert asked.en and asked.fr and asked.en != asked.fr
