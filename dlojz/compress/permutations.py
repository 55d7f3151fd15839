"""Permute channels so that 2:4 sparsity keeps more magnitude: the search of an order.

An order that is found keeps at least as much as the one given; for eight columns it is the best there is, and for more
no other exchange between any two groups is better, unless the sweeps ran out. Only the order of the model's sums
changes.

2:4 groups lie along a layer's inputs: the dimensions of Q and K, whose order moves rows only, change none of them.

Shape suffixes: R rows, C columns, P pairs of groups, S ways of taking four columns of eight; H width of a head.

Source: Pool and Yu 2021, "Channel permutations for N:M sparsity" (NeurIPS), whose exhaustive search of a window of two
stripes this is, the windows visited as teams meet in a tournament.
"""

from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlojz.compress import GROUP, check_groups
from dlojz.models.blocks import TransformerBlock

_FOURS = list(combinations(range(2 * GROUP), GROUP))
_ALONE = [four for four in _FOURS if 0 in four]  # the other four of the eight are the other group: 35 ways
_OTHERS = [tuple(column for column in range(2 * GROUP) if column not in four) for four in _ALONE]
_CACHED = 8192
"""Pairs times rows that are worked on at once: few enough for what is computed of them to stay near the processor."""
Array = NDArray[np.float64]


def best_permutation(columns_RC: Tensor, sweeps: int = 6) -> Tensor:
    """Find an order of the columns that keeps at least as much magnitude: new column c is old column order[c].

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
        has_gain = False
        for pairs_P2 in _meetings(len(order_G4)):
            for start in range(0, len(pairs_P2), chunk):
                has_gain |= _share_out(magnitude_CR, order_G4, pairs_P2[start : start + chunk])
        if not has_gain:
            break
    return torch.from_numpy(order_G4.reshape(-1))


def _meetings(groups: int) -> list[NDArray[np.int64]]:
    """Rounds of a tournament: in each, every group meets at most one other; in all, every other group once."""
    teams = list(range(groups + groups % 2))  # of an odd number, one group rests in each round
    rounds = []
    for _ in range(len(teams) - 1):
        half = len(teams) // 2
        pairs = zip(teams[:half], reversed(teams[half:]), strict=True)
        rounds.append(np.array([pair for pair in pairs if max(pair) < groups], dtype=np.int64).reshape(-1, 2))
        # The first team stays, the others move round by one.
        teams = [teams[0], teams[-1], *teams[1:-1]]
    return rounds


def _share_out(magnitude_CR: Array, order_G4: NDArray[np.int64], pairs_P2: NDArray[np.int64]) -> bool:
    """Let pairs of groups share their columns at best, in place; whether any did."""
    eight_P8 = order_G4[pairs_P2].reshape(-1, 2 * GROUP)  # (P, 2, 4) → (P, 8)
    shares_PS = _kept_by_share(magnitude_CR[eight_P8.T])  # (P, S), S = 35
    best_P, present_P = shares_PS.argmax(axis=1), shares_PS[:, _ALONE.index(tuple(range(GROUP)))]
    # Below this a gain is rounding, and two shares of the same worth could be exchanged for ever.
    changed = shares_PS.max(axis=1) > present_P * (1 + 1e-12)
    for side, choices in enumerate((_ALONE, _OTHERS)):
        columns_P4 = np.take_along_axis(eight_P8[changed], np.array(choices)[best_P[changed]], axis=1)
        order_G4[pairs_P2[changed, side]] = columns_P4
    return bool(changed.any())


def _kept_by_share(magnitude_8PR: Array) -> Array:
    """What each pair of groups keeps in each of the 35 ways of sharing its eight columns."""
    # Sum and maximum of the 28 pairs of columns, (P, R) each: the 70 fours are made of them.
    total, largest = {}, {}
    for column, partner in combinations(range(2 * GROUP), 2):
        total[column, partner] = magnitude_8PR[column] + magnitude_8PR[partner]
        largest[column, partner] = np.maximum(magnitude_8PR[column], magnitude_8PR[partner])
    same_half_PR, split_PR = np.empty_like(magnitude_8PR[0]), np.empty_like(magnitude_8PR[0])

    def kept(four: tuple[int, ...]) -> Array:
        """The two largest of four are both of one half, or the largest of each."""
        low, high = (four[0], four[1]), (four[2], four[3])
        np.maximum(total[low], total[high], out=same_half_PR)
        np.add(largest[low], largest[high], out=split_PR)
        kept_P: Array = np.maximum(same_half_PR, split_PR, out=same_half_PR).sum(axis=1)  # (P,)
        return kept_P

    return np.stack([kept(four) + kept(complement) for four, complement in zip(_ALONE, _OTHERS, strict=True)], axis=1)


_QUERY, _KEY = range(2)


def permute_query_key(block: TransformerBlock, head: int, order: Tensor) -> None:
    """Reorder the dimensions in which one head compares queries and keys, in place: q · k is a sum over them.

    Args:
        head: from 0.
        order: of the H dimensions of a head.
    """
    for part in (_QUERY, _KEY):
        _permute_rows(block, head, part, order)


def _permute_rows(block: TransformerBlock, head: int, part: int, order: Tensor) -> None:
    start = (3 * head + part) * block.head_dim  # see `dlojz.models.blocks.split_heads`: (head, 3, H)
    for parameter in (block.qkv.weight, block.qkv.bias):
        head_rows = parameter.data[start : start + block.head_dim]
        head_rows.copy_(head_rows[order])  # a view, overwritten by a copy of itself
