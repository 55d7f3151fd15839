"""Numbers as answers give them: in whatever holds them, in their own precision, and written so that they differ."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlojz import labs
from dlojz.base.language import use_language
from dlojz.labs.kit.answer_numbers import plain, plain_like, same_number, single, told_apart
from dlojz.labs.kit.exercise import Prediction, Said, Wrong
from dlojz.labs.kit.judges import Judge


@pytest.fixture
def lab(tmp_path: Path) -> labs.Lab:
    use_language("en")
    return labs.start("00", root=tmp_path / "runs")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (np.int64(3), 3),
        (np.array(2.5), 2.5),
        (torch.tensor([2.5], requires_grad=True), [2.5]),
        ((torch.tensor(1), np.float32(0.5), 2), (1, 0.5, 2)),
        ([np.array([1, 2]), 3], [[1, 2], 3]),
        ("a word", "a word"),
        (None, None),
    ],
)
def test_plain_reads_numbers_out_of_what_holds_them(given: Any, read: Any) -> None:
    assert plain(given) == read
    assert type(plain(given)) is type(read)


def test_single_takes_one_element_for_a_number_where_one_is_expected() -> None:
    assert single(torch.tensor([[2.5]])) == 2.5
    assert single(np.array([4])) == 4
    assert single([4]) == [4]
    assert single(torch.ones(2)).shape == (2,)


def test_what_should_be_a_tensor_stays_one() -> None:
    pair = (torch.ones(2), torch.tensor(3.0))
    assert plain_like(pair, (torch.ones(2), torch.tensor(3.0))) is pair
    assert plain_like(torch.ones(2), [1, 1]) == [1, 1]


@pytest.mark.parametrize(
    ("given", "right", "same"),
    [
        (float(np.float32(0.1)), 0.1, True),
        (float(np.float32(1e10 / 3)), 1e10 / 3, True),
        (0.1000001, 0.1, False),  # no float32: somebody's own formula
        (3_000_001, 3_000_000, False),
        (3_000_001.0, 3_000_000, False),
        (float(np.float32(0.1)) * (1 + 1e-5), 0.1, False),
        (float("inf"), 1.0, False),
    ],
)
def test_a_number_is_compared_in_its_own_precision(given: float, right: float, same: bool) -> None:
    assert same_number(given, right, 1e-9) is same


def test_told_apart_gives_two_numbers_that_print_alike_the_digits_that_differ() -> None:
    assert told_apart(1.0, 2.0, 5) == ("1", "2")
    assert told_apart(1.0000001, 1.0, 5) == ("1.0000001", "1")
    judge = Judge(lambda: 123456.7, cases=[()])
    with pytest.raises(Wrong, match=r"123,456\.7 is expected, but your function returns 123,456\.8"):
        judge(lambda: 123456.8)
    judge = Judge(lambda: (1.0, 2.0), cases=[()], parts=(Said("one", "un"), Said("two", "deux")))
    with pytest.raises(Wrong, match=r"two should be 2, but your function gives 2\.0000003"):
        judge(lambda: (1.0, 2.0000003))


def test_a_prediction_and_a_result_that_print_alike_get_the_digits_that_differ() -> None:
    prediction = Prediction(id="x", en="How many?", fr="Combien ?", kind="seconds", tolerance=1e-9)
    told = prediction.compare(1.00000012, 1.0).message
    assert "1.0000001" in told.split("\n")[0]
    assert "(" not in prediction.compare(1.0, 1.0).message


@pytest.mark.parametrize("value", [np.float32(2.5), np.int64(3), torch.tensor(2.5), np.array([4]), 7])
def test_predict_takes_any_number(value: Any, lab: labs.Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.predict("gradient-bytes", value)
    assert "Noted: " in capsys.readouterr().out
    lab.reveal("gradient-bytes", single(value))
    assert "Exactly right" in capsys.readouterr().out


@pytest.mark.parametrize("value", [np.bool_(True), torch.ones(2), np.float32("nan"), np.array("3")])
def test_predict_refuses_what_is_no_number(value: Any, lab: labs.Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.predict("gradient-bytes", value)
    assert "A prediction is one number" in capsys.readouterr().out
