"""The search of an order: never worse than none, the best there is where all can be tried."""

from itertools import combinations

import pytest
import torch
from torch import Tensor

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress import permutations
from dlojz.compress.permutations import best_permutation


def kept_magnitude(columns_RC: Tensor) -> float:
    """The two largest magnitudes of every four in a row, summed."""
    return float(columns_RC.abs().double().unflatten(1, (-1, 4)).topk(2, dim=-1).values.sum())


def columns(rows: int, count: int, seed: int) -> Tensor:
    return torch.randn(rows, count, generator=torch.Generator().manual_seed(seed))


def divisions(places: list[int]) -> list[list[int]]:
    """Every way of dividing columns into groups of four, as an order: 5,775 for 12."""
    if not places:
        return [[]]
    first, rest = places[0], places[1:]
    return [
        [first, *three, *others]
        for three in combinations(rest, 3)
        for others in divisions([place for place in rest if place not in three])
    ]


def most_kept(weight: Tensor) -> float:
    """By the best of all orders."""
    return max(kept_magnitude(weight[:, order]) for order in divisions(list(range(weight.shape[1]))))


@pytest.mark.parametrize("seed", range(12))
def test_best_permutation_orders_eight_columns_as_well_as_can_be(seed: int) -> None:
    weight = columns(1 + seed, 8, seed)
    found = kept_magnitude(weight[:, best_permutation(weight)])
    assert found == pytest.approx(most_kept(weight), rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_twelve_columns_come_close_to_the_best_of_all_5775_orders(seed: int) -> None:
    """Pairs of groups at their best need not be the best of three: 0.25 % were missing at most in twenty draws."""
    weight = columns(16, 12, seed)
    best = most_kept(weight)
    found = kept_magnitude(weight[:, best_permutation(weight)])
    assert kept_magnitude(weight) <= found <= best * (1 + 1e-12)
    assert found >= 0.99 * best


@pytest.mark.parametrize(("rows", "count"), [(1, 4), (3, 8), (7, 20), (16, 64), (2, 36)])
def test_an_order_is_a_permutation_never_worse_and_no_pair_of_groups_can_share_better(rows: int, count: int) -> None:
    for seed in range(3):
        weight = columns(rows, count, seed)
        order = best_permutation(weight, sweeps=50)
        assert sorted(order.tolist()) == list(range(count))
        ordered = weight[:, order]
        assert kept_magnitude(ordered) >= kept_magnitude(weight)
        for one, other in combinations(range(count // 4), 2):
            eight = torch.cat((ordered[:, 4 * one : 4 * one + 4], ordered[:, 4 * other : 4 * other + 4]), dim=1)
            best = most_kept(eight)
            assert best <= kept_magnitude(eight) * (1 + 1e-9)


def test_best_permutation_shares_out_large_columns_that_stand_together() -> None:
    """Eight large ones in two groups of four lose half of their magnitude; two in each of four groups lose none."""
    weight = torch.cat((torch.full((3, 8), 10.0), torch.full((3, 8), 1.0)), dim=1)
    assert kept_magnitude(weight) == 3 * (40 + 4)
    assert kept_magnitude(weight[:, best_permutation(weight)]) == 3 * 80


def test_best_permutation_that_may_do_nothing_does_nothing() -> None:
    weight = columns(5, 16, 0)
    assert best_permutation(weight, sweeps=0).tolist() == list(range(16))


@pytest.mark.parametrize("groups", [1, 2, 5, 8])
def test_meetings_have_every_two_groups_once_and_no_group_twice_at_a_time(groups: int) -> None:
    met = []
    for pairs in permutations._meetings(groups):
        playing = pairs.flatten().tolist()
        assert len(playing) == len(set(playing))
        met += [frozenset(pair) for pair in pairs.tolist()]
    assert len(met) == len(set(met)) == groups * (groups - 1) // 2


def test_best_permutation_refuses_columns_that_do_not_divide() -> None:
    for language, divide in (("en", "multiple of 4"), ("fr", "multiple de 4")):
        use_language(language)
        with pytest.raises(LabError, match=divide):
            best_permutation(columns(3, 6, 0))
