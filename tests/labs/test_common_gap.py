"""What the wrong results of all cases have in common, and that nothing is said that does not hold in all of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dlojz.labs.kit.common_gap import common_gap
from dlojz.labs.kit.exercise import Exercise, Said, judge
from dlojz.labs.kit.judges import Judge

CASES = ((2, 3), (5, 4), (7, 0))
PRODUCT = [6, 20, 0]


def product(first: int, second: int) -> int:
    return first * second


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([6, 6, 6], "returns 6 in every case of this check"),
        ([7, 21, 1], "too large by 1"),
        ([5, 19, -1], "too small by 1"),
        ([12, 40, 0], "2 times too large"),
        ([0.75, 2.5, 0], "8 times too small"),
        ([6.144, 20.48, 0], "is 2.4% too large: look for a constant"),
        ([5.94, 19.8, 0], "is 1% too small: look for a constant"),
        ([-6, -20, 0], "sign is the other way round"),
        ([12, 100, 0], "`first` times too large"),
        ([2, 5, 0], "`second` times too small"),
        ([np.int64(7), np.float64(21), np.int64(1)], "too large by 1"),
    ],
)
def test_what_numbers_have_in_common_is_said(given: list[Any], words: str) -> None:
    said = common_gap(given, PRODUCT, CASES, product)
    assert said is not None
    assert words in said.en
    assert said.fr != said.en


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ([7, 21, 0], PRODUCT),  # in two cases alone
        ([12, 40, 1], PRODUCT),
        ([6.5, 20.5, 0.5], PRODUCT),  # by half a unit nobody miscounts
        ([5, 5], [4, 4]),  # one result tells nothing about others
        (["6"], ["7"]),
        ([[1, 2]], [[2, 1]]),
    ],
)
def test_common_gap_says_nothing_that_does_not_hold_everywhere(given: list[Any], right: list[Any]) -> None:
    assert common_gap(given, right, CASES, product) is None


SQUARE, WIDE = torch.arange(9.0).reshape(3, 3), torch.arange(1.0, 9).reshape(2, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda right: 3 * right, "3 times too large"),
        (lambda right: right / 7, "7 times too small"),
        (lambda right: -right, "sign"),
        (torch.zeros_like, "Every value is zero"),
        (torch.t, "transposed"),
        (torch.flatten, "another one: reshape"),
        (lambda right: right.flip(0), "reverse order"),
        (lambda right: right[:-1], "last ones are missing"),
        (lambda right: right + 1, None),
        (lambda right: right.flip(1), None),
        (lambda right: right[1:], None),
    ],
)
def test_what_tensors_have_in_common_is_said(change: Callable[..., Any], words: str | None) -> None:
    said = common_gap([change(SQUARE), change(WIDE)], [SQUARE, WIDE])
    assert (words in said.en) if words and said else (said is None and words is None)
    assert common_gap([change(SQUARE), WIDE], [SQUARE, WIDE]) is None


def test_common_gap_knows_rows_in_another_order() -> None:
    said = common_gap([SQUARE[[1, 0, 2]]], [SQUARE])
    assert said is not None
    assert "in another order" in said.en
    assert common_gap([SQUARE[[1, 1, 2]]], [SQUARE]) is None


def exercise_of(checked: Judge) -> Exercise:
    """An exercise with a judge, and no more to say."""
    said = dict.fromkeys(("title", "praise", "hint", "nearer"), Said("—", "—"))
    return Exercise(id="gap", judge=checked, **said)


def test_judge_names_the_number_and_what_it_lacks() -> None:
    two = Judge(lambda a, b: (a + b, a * b), cases=CASES, parts=(Said("the sum", "la somme"), Said("x", "x")))
    assert judge(exercise_of(two), lambda a, b: (2 * (a + b), a * b)).message.startswith("The sum: in every case")
    one = Judge(product, cases=CASES)
    assert "`second` times too small" in judge(exercise_of(one), lambda first, second: first).message


def test_judge_holds_no_gradient_that_is_only_rounding_to_the_reference() -> None:
    """A softmax that keeps one token has no gradient but rounding; another way to write it rounds otherwise."""

    def attend(scores: Any, values: Any) -> Any:
        return scores.softmax(-1) @ values

    def by_hand(scores: Any, values: Any) -> Any:
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights @ values / weights.sum(-1, keepdim=True)

    scores = 1e3 * torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    case = (scores, torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    checked = exercise_of(Judge(attend, cases=(case,), leaves={0: Said("s", "s"), 1: Said("v", "v")}))
    assert judge(checked, by_hand).state == "right"
    assert "no gradient reaches v" in judge(checked, lambda s, v: by_hand(s, v.detach())).message


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize(("off", "state"), [(0.0, "right"), (5e-4, "right"), (2e-3, "wrong"), (1.0, "wrong")])
def test_judge_compares_gradients_in_shares_of_the_largest(scale: float, off: float, state: str) -> None:
    """The gradient of scale·x is scale; an answer of the same value whose gradient is (1 + off)·scale."""

    def reference(x: Any) -> Any:
        return scale * x

    def answer(x: Any) -> Any:
        return scale * (1 + off) * x - scale * off * x.detach()

    case = (torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64),)
    assert judge(exercise_of(Judge(reference, cases=(case,), leaves={0: Said("x", "x")})), answer).state == state
