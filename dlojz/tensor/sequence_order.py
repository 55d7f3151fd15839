"""Which tokens of a sequence each rank holds when n ranks share it, and how much attention each then computes.

Layer 2. Invariant: every token belongs to one rank, all ranks hold equally many, and within a rank they stay in the
order of the sequence. The sequence is cut into chunks; a rank holds one (contiguous) or two (zigzag):

    4 ranks      rank 0   rank 1   rank 2   rank 3
    contiguous   0        1        2        3
    zigzag       0 7      1 6      2 5      3 4

A causal mask leaves the first tokens little to do and the last ones much: contiguous ranks are unequally busy, zigzag
ranks equally.

Sources: Brandon et al. 2023, "Striped Attention" (arXiv 2311.09431), for the imbalance; Llama Team 2024, "The
Llama 3 Herd of Models" (arXiv 2407.21783), §3.3.2, for the placement called zigzag here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from dlojz.schema import LabError, one_of
from dlojz.text import say

Order = Literal["contiguous", "zigzag"]
ORDERS: tuple[Order, ...] = get_args(Order)


def chunks_of(rank: int, size: int, order: Order) -> tuple[int, ...]:
    """The chunks a rank holds, by their number in the sequence: of n (contiguous) or 2·n (zigzag).

    Raises:
        LabError: if the order is another one.
    """
    if order not in ORDERS:
        raise LabError(one_of("order", order, ORDERS))
    return (rank,) if order == "contiguous" else (rank, 2 * size - 1 - rank)


def positions_of(tokens: int, rank: int, size: int, order: Order = "contiguous") -> Tensor:
    """Positions in the sequence of a rank's tokens, shape (tokens,).

    Example:
        >>> positions_of(4, 1, 2).tolist(), positions_of(4, 1, 2, "zigzag").tolist()
        ([4, 5, 6, 7], [2, 3, 4, 5])
    """
    chunks = chunks_of(rank, size, order)
    length = tokens // len(chunks)
    return torch.cat([torch.arange(chunk * length, (chunk + 1) * length) for chunk in chunks])


def own_tokens(whole_BT: Tensor, rank: int, size: int, order: Order = "contiguous") -> Tensor:
    """A rank's tokens of whole sequences: `(B, T, …)` to `(B, T / n, …)`.

    Raises:
        LabError: if the sequence cannot be cut into equal chunks.
    """
    length, chunks = whole_BT.shape[1], len(chunks_of(rank, size, order)) * size
    if length % chunks:
        raise LabError(
            say(
                en=f"a sequence of {length} tokens cannot be cut into {chunks} equal chunks ({order}, {size} ranks): "
                f"use a length that {chunks} divides, e.g. {-(-length // chunks) * chunks}.",
                fr=f"une séquence de {length} tokens ne se coupe pas en {chunks} parts égales ({order}, {size} rangs) "
                f": prenez une longueur que {chunks} divise, par exemple {-(-length // chunks) * chunks}.",
            )
        )
    return whole_BT[:, positions_of(length // size, rank, size, order).to(whole_BT.device)]


def visible_pairs(rank: int, source: int, size: int, causal: bool, order: Order) -> Iterator[tuple[int, int, bool]]:
    """Which chunks of `rank`'s queries see which of `source`'s keys, and whether the pair lies on the diagonal.

    Yields:
        Number of the chunk among those of `rank`, of the one among those of `source`, and whether the two are the
        same part of the sequence, of which each token sees itself and those before it.
    """
    for own, query_chunk in enumerate(chunks_of(rank, size, order)):
        for other, key_chunk in enumerate(chunks_of(source, size, order)):
            if not causal or key_chunk <= query_chunk:
                yield own, other, causal and key_chunk == query_chunk


def pairs_computed(size: int, order: Order = "contiguous", causal: bool = True) -> list[int]:
    """Pairs of chunks (queries × keys) whose scores each rank computes, of n² (contiguous) or 4·n² (zigzag) in all.

    A contiguous pair has (T / n)² scores, a zigzag one a quarter of that; those on the diagonal are computed whole.

    Example:
        >>> pairs_computed(4), pairs_computed(4, "zigzag")
        ([1, 2, 3, 4], [9, 9, 9, 9])
    """
    return [
        sum(len(list(visible_pairs(rank, source, size, causal, order))) for source in range(size))
        for rank in range(size)
    ]
