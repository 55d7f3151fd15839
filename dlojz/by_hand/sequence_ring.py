"""Ring of ranks that pass on parts of a sequence, and the tokens that each rank holds.

**Ring**: each rank sends to the next one and receives from the one before. All n ranks send and receive alike, whatever
they compute, so that none waits for a message that never leaves. Source: Liu, Zaharia & Abbeel 2023, "Ring Attention"
(arXiv 2310.01889), §3.

    step   rank 0   rank 1   rank 2   (whose keys and values a rank holds)
    0      0        1        2
    1      2        0        1
    2      1        2        0

Shape suffixes: B batch, G key-value heads, S tokens of one rank, H width of a head.

**Order**: all ranks hold equally many tokens, in the order of the sequence. The sequence is cut into chunks; a rank
holds one (contiguous) or two (zigzag):

    4 ranks      rank 0   rank 1   rank 2   rank 3
    contiguous   0        1        2        3
    zigzag       0 7      1 6      2 5      3 4

With a causal mask the first tokens have little attention to compute and the last ones much: contiguous ranks are
unequally busy, zigzag ranks equally. Sources: Brandon et al. 2023, "Striped Attention" (arXiv 2311.09431), for the
imbalance; Llama Team 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783), §3.3.2, for the zigzag placement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal
from dlojz.by_hand.ddp import ranks_of

_KEYS_AND_VALUES, _GRADIENTS = 0, 1  # tags: one of each may be under way


class Ring:
    """Ring of ranks, as one rank sees it.

    Args:
        group: the ranks; by default all. One process sends nothing.

    Attributes:
        rank: this rank's number in the ring.
        size: how many ranks it has.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.size = ranks_of(group)

    def tour(self, k_BGSH: Tensor, v_BGSH: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each rank's keys and values, this rank's own first: rank, keys, values.

        While they are used, the next ones are under way: two ranks' are held at a time. Each rank sends
        (n − 1)·2·B·G·S·H elements in all.
        """
        here = torch.stack((k_BGSH, v_BGSH))
        for step in range(self.size):
            arrived = self._pass_on(here, _KEYS_AND_VALUES) if step < self.size - 1 else None
            yield (self.rank - step) % self.size, here[0], here[1]
            here = arrived() if arrived else here

    def pass_gradients(self, dkv_2BGSH: Tensor) -> Callable[[], Tensor]:
        """Send gradients after their keys and values; see `_pass_on`."""
        return self._pass_on(dkv_2BGSH, _GRADIENTS)

    def _pass_on(self, outgoing: Tensor, tag: int) -> Callable[[], Tensor]:
        """Send to the next rank; the function returned waits for the tensor of the rank before, of the same shape."""
        incoming = torch.empty_like(outgoing)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        # Who: every rank, to the one after it. What: two tensors in one, (2, B, G, S, H). How much: its bytes. Send and
        # receive are posted together: if all ranks sent first and waited, none would ever receive.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, outgoing, group=self.group, group_peer=after, tag=tag),
                dist.P2POp(dist.irecv, incoming, group=self.group, group_peer=before, tag=tag),
            ]
        )

        def arrived() -> Tensor:
            for work in works:
                work.wait()
            return incoming

        return arrived


class RingBytes(NamedTuple):
    """Bytes that one rank sends, and receives, in one call of ring attention."""

    forward: int
    backward: int


def ring_bytes(size: int, batch: int, kv_heads: int, tokens: int, head_dim: int, dtype: torch.dtype) -> RingBytes:
    """Compute the bytes each rank sends, with S = `tokens` per rank, elements of e bytes (`dtype`), sums of w bytes.

    Forward (n − 1)·2·B·G·S·H·e; backward (n − 1)·2·B·G·S·H·(e + w), w = 4 (8 for float64): keys and values once more,
    and the gradients that follow them home. A block under activation checkpointing runs its forward pass twice.

    Example:
        >>> ring_bytes(4, batch=1, kv_heads=2, tokens=8, head_dim=16, dtype=torch.bfloat16)
        RingBytes(forward=3072, backward=9216)

    Source: Liu et al. 2023, §3, for the forward pass; the backward pass is that of `ring_attention`.
    """
    elements = (size - 1) * 2 * batch * kv_heads * tokens * head_dim
    return RingBytes(elements * dtype.itemsize, elements * (dtype.itemsize + wide(dtype).itemsize))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


Order = Literal["contiguous", "zigzag"]
ORDERS: tuple[Order, ...] = get_args(Order)


def chunks_of(rank: int, size: int, order: Order) -> tuple[int, ...]:
    """Return the chunks of a rank, by their number in the sequence: of n (contiguous) or 2·n (zigzag).

    Raises:
        LabError: if the order is unknown.
    """
    if order not in ORDERS:
        raise LabError(one_of("order", order, ORDERS))
    return (rank,) if order == "contiguous" else (rank, 2 * size - 1 - rank)


def positions_of(tokens: int, rank: int, size: int, order: Order = "contiguous") -> Tensor:
    """Return the positions in the sequence of a rank's tokens, shape (tokens,).

    Example:
        >>> positions_of(4, 1, 2).tolist(), positions_of(4, 1, 2, "zigzag").tolist()
        ([4, 5, 6, 7], [2, 3, 4, 5])
    """
    chunks = chunks_of(rank, size, order)
    length = tokens // len(chunks)
    return torch.cat([torch.arange(chunk * length, (chunk + 1) * length) for chunk in chunks])


def own_tokens(whole_BT: Tensor, rank: int, size: int, order: Order = "contiguous") -> Tensor:
    """Cut a rank's tokens out of whole sequences: `(B, T, …)` to `(B, T / n, …)`.

    Raises:
        LabError: if the sequence cannot be cut into equal chunks.
    """
    length, chunks = whole_BT.shape[1], len(chunks_of(rank, size, order)) * size
    if length % chunks:
        raise refusal(
            en=f"a sequence of {length} tokens cannot be cut into {chunks} equal chunks ({order}, {size} ranks): "
            f"use a length that {chunks} divides, e.g. {-(-length // chunks) * chunks}.",
            fr=f"une séquence de {length} tokens ne se coupe pas en {chunks} parts égales ({order}, {size} rangs) "
            f": prenez une longueur que {chunks} divise, par exemple {-(-length // chunks) * chunks}.",
        )
    return whole_BT[:, positions_of(length // size, rank, size, order).to(whole_BT.device)]


def visible_pairs(rank: int, source: int, size: int, causal: bool, order: Order) -> Iterator[tuple[int, int, bool]]:
    """Yield the pairs of chunks of `rank`'s queries and of `source`'s keys that see each other.

    Yields:
        Numbers of the chunk among those of `rank` and of `source`, and whether the pair lies on the diagonal, where
        each token sees itself and those before it.
    """
    for own, query_chunk in enumerate(chunks_of(rank, size, order)):
        for other, key_chunk in enumerate(chunks_of(source, size, order)):
            if not causal or key_chunk <= query_chunk:
                yield own, other, causal and key_chunk == query_chunk


def pairs_computed(size: int, order: Order = "contiguous", causal: bool = True) -> list[int]:
    """Count the pairs of chunks (queries × keys) whose scores each rank computes, of n² (contiguous) or 4·n² (zigzag).

    A contiguous pair has (T / n)² scores, a zigzag one a quarter of that; those on the diagonal are computed whole.

    Example:
        >>> pairs_computed(4), pairs_computed(4, "zigzag")
        ([1, 2, 3, 4], [9, 9, 9, 9])
    """
    return [
        sum(len(list(visible_pairs(rank, source, size, causal, order))) for source in range(size))
        for rank in range(size)
    ]
