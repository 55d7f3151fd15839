"""Which order of the columns keeps the most magnitude under 2:4: pairs of groups, each pair at its best, in turns.

Layer 2. Invariant: an order that is found keeps at least as much as the order that was given; for eight columns it is
the best there is, and for more no other way of sharing the columns of any two groups between them is better, unless
the sweeps ran out.

Shape suffixes: R rows, C columns, P pairs of groups, S ways of taking four columns of eight.

Source: Pool and Yu 2021, "Channel permutations for N:M sparsity" (NeurIPS), whose exhaustive search of a window of
two stripes this is, the windows visited as teams meet in a tournament.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlojz.compress.two_to_four import GROUP, check_groups
from dlojz.schema import LabError
from dlojz.text import say

LARGEST_EXHAUSTIVE = 12
_FOURS = list(combinations(range(2 * GROUP), GROUP))
_ALONE = [four for four in _FOURS if 0 in four]  # the other four of the eight are the other group: 35 ways
_OTHERS = [tuple(place for place in range(2 * GROUP) if place not in four) for four in _ALONE]
_CACHED = 8192
"""Pairs times rows that are worked on at once: few enough for what is computed of them to stay near the processor."""
Array = NDArray[np.float64]


def kept_magnitude(columns_RC: Tensor) -> float:
    """Sum of the two largest magnitudes of every four in a row.

    Raises:
        LabError: if the columns are no multiple of 4.
    """
    check_groups(columns_RC.shape, "columns")
    grouped = columns_RC.detach().abs().double().unflatten(1, (-1, GROUP))
    return float(grouped.topk(2, dim=-1).values.sum())


def best_permutation(columns_RC: Tensor, sweeps: int = 6) -> Tensor:
    """An order of the columns that keeps more magnitude, or the given one: new column c is old column order[c].

    Every two groups of four meet once in a sweep, and share their eight columns in the best of the 35 ways; a sweep
    that brings nothing is the last.

    Args:
        columns_RC: the weights; rows that are permuted together are stacked.
        sweeps: at most so many.

    Raises:
        LabError: if the columns are no multiple of 4.
    """
    check_groups(columns_RC.shape, "columns")
    # numpy: hundreds of thousands of small operations, each too short to be worth waking torch's threads.
    magnitude_CR = np.ascontiguousarray(columns_RC.detach().cpu().abs().double().numpy().T)
    order_G4 = np.arange(len(magnitude_CR)).reshape(-1, GROUP)
    chunk = max(1, _CACHED // magnitude_CR.shape[1])
    for _ in range(sweeps):
        moved = False
        for pairs_P2 in _meetings(len(order_G4)):
            for start in range(0, len(pairs_P2), chunk):
                moved |= _share_out(magnitude_CR, order_G4, pairs_P2[start : start + chunk])
        if not moved:
            break
    return torch.from_numpy(order_G4.reshape(-1))


def _meetings(groups: int) -> list[NDArray[np.int64]]:
    """Rounds of a tournament: in each, every group meets at most one other; in all, every other group once."""
    teams = list(range(groups + groups % 2))
    rounds = []
    for _ in range(len(teams) - 1):
        half = len(teams) // 2
        pairs = zip(teams[:half], reversed(teams[half:]), strict=True)
        rounds.append(np.array([pair for pair in pairs if max(pair) < groups], dtype=np.int64).reshape(-1, 2))
        teams = [teams[0], teams[-1], *teams[1:-1]]
    return rounds


def _share_out(magnitude_CR: Array, order_G4: NDArray[np.int64], pairs_P2: NDArray[np.int64]) -> bool:
    """Let pairs of groups share their columns at best, in place; whether any did."""
    eight_P8 = order_G4[pairs_P2].reshape(-1, 2 * GROUP)
    shares_PS = _kept_by_share(magnitude_CR[eight_P8.T])
    best_P, present_P = shares_PS.argmax(axis=1), shares_PS[:, _ALONE.index(tuple(range(GROUP)))]
    # Below this a gain is rounding, and two shares of the same worth could be exchanged for ever.
    changed = shares_PS.max(axis=1) > present_P * (1 + 1e-12)
    for side, places in enumerate((_ALONE, _OTHERS)):
        taken = np.take_along_axis(eight_P8[changed], np.array(places)[best_P[changed]], axis=1)
        order_G4[pairs_P2[changed, side]] = taken
    return bool(changed.any())


def _kept_by_share(magnitude_8PR: Array) -> Array:
    """What each pair of groups keeps in each of the 35 ways of sharing its eight columns."""
    total, largest = {}, {}
    for one, other in combinations(range(2 * GROUP), 2):
        total[one, other] = magnitude_8PR[one] + magnitude_8PR[other]
        largest[one, other] = np.maximum(magnitude_8PR[one], magnitude_8PR[other])
    both, each = np.empty_like(magnitude_8PR[0]), np.empty_like(magnitude_8PR[0])

    def kept(four: tuple[int, ...]) -> Array:
        """The two largest of four are both of one half, or the largest of each."""
        low, high = (four[0], four[1]), (four[2], four[3])
        np.maximum(total[low], total[high], out=both)
        np.add(largest[low], largest[high], out=each)
        found: Array = np.maximum(both, each, out=both).sum(axis=1)
        return found

    return np.stack([kept(four) + kept(others) for four, others in zip(_ALONE, _OTHERS, strict=True)], axis=1)


def exhaustive_permutation(columns_RC: Tensor) -> Tensor:
    """The best order of all, found by trying every way of dividing the columns into groups: 5,775 for 12 columns.

    Raises:
        LabError: if the columns are no multiple of 4, or more than 12.
    """
    check_groups(columns_RC.shape, "columns")
    if columns_RC.shape[1] > LARGEST_EXHAUSTIVE:
        raise LabError(
            say(
                en=f"an exhaustive search takes at most {LARGEST_EXHAUSTIVE} columns, but {columns_RC.shape[1]} were "
                "received; best_permutation takes any number.",
                fr=f"une recherche exhaustive prend au plus {LARGEST_EXHAUSTIVE} colonnes, mais {columns_RC.shape[1]} "
                "ont été reçues ; best_permutation en prend autant qu’il y en a.",
            )
        )
    orders = _divisions(list(range(columns_RC.shape[1])))
    return torch.tensor(max(orders, key=lambda order: kept_magnitude(columns_RC[:, order])))


def _divisions(columns: list[int]) -> list[list[int]]:
    """Every way of dividing columns into groups of four, as an order."""
    if not columns:
        return [[]]
    first, rest = columns[0], columns[1:]
    return [
        [first, *three, *others]
        for three in combinations(rest, GROUP - 1)
        for others in _divisions([column for column in rest if column not in three])
    ]
