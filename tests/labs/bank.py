"""What every lab's bank of answers goes through: a class of tests that a lab's file inherits with its own bank.

class TestBank(BankTests):
    exercises, predictions = EXERCISES, lab.PREDICTIONS
    wrong, right, others = BANK, REFERENCES, OTHER_RIGHT_ANSWERS
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from dlojz.base.language import use_language
from dlojz.labs.kit.exercise import Wrong, judge

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


class BankTests:
    """Wrong answers are refused for what is wrong with them, right ones are praised, in both languages.

    Attributes:
        exercises: of the lab, by id.
        predictions: that the lab asks for.
        wrong: by exercise, answers and words that each must be told.
        right: by exercise, one answer that is praised.
        others: other right ways, with their exercise.
        least: wrong answers that an exercise must have.
    """

    exercises: ClassVar[Mapping[str, Any]]
    predictions: ClassVar[Sequence[Any]] = ()
    wrong: ClassVar[Mapping[str, Sequence[tuple[Answer, str]]]]
    right: ClassVar[Mapping[str, Answer]]
    others: ClassVar[Sequence[tuple[str, Answer]]] = ()
    least: ClassVar[int] = 3

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for every answer."""
        wanted = metafunc.fixturenames
        if "words" in wanted:
            rows = [(name, answer, words) for name, answers in self.wrong.items() for answer, words in answers]
            ids = [f"{name}-{words}" for name, _, words in rows]
            metafunc.parametrize(("exercise_id", "answer", "words"), rows, ids=ids)
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

    @pytest.mark.parametrize("language", ["en", "fr"])
    def test_a_right_answer_is_accepted_in_both_languages(self, exercise_id: str, language: Any) -> None:
        use_language(language)
        exercise = self.exercises[exercise_id]
        verdict = judge(exercise, self.right[exercise_id])
        assert (verdict.state, verdict.message) == ("right", getattr(exercise.praise, language))

    def test_another_right_way_is_accepted(self) -> None:
        for place, (exercise_id, answer) in enumerate(self.others):
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
