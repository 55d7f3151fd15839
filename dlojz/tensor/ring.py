"""The ranks of a group in a circle: what a rank holds goes to the next one, what comes is from the one before.

Layer 2. Invariant: all n ranks send and receive alike, whatever they compute, so that none waits for a message that
never leaves; what is under way is not touched before it has arrived.

    step   rank 0   rank 1   rank 2   (whose keys and values a rank holds)
    0      0        1        2
    1      2        0        1
    2      1        2        0

Shape suffixes: B batch, G key-value heads, S tokens of one rank, H width of a head.

Source: Liu, Zaharia & Abbeel 2023, "Ring Attention" (arXiv 2310.01889), §3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dlojz.zero.flat import ranks_of

_KEYS_AND_VALUES, _GRADIENTS = 0, 1  # tags: one of each may be under way


class Ring:
    """A rank's two neighbours.

    Args:
        group: the ranks; by default all. One process sends nothing.

    Attributes:
        rank: this rank's number in the circle.
        size: how many ranks it has.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.size = ranks_of(group)

    def tour(self, k_BGSH: Tensor, v_BGSH: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each rank's keys and values, this rank's own first: whose they are, keys, values.

        While those at hand are used, the next ones are on their way: two ranks' are held at a time. Each rank sends
        (n − 1)·2·B·G·S·H elements in all.
        """
        here = torch.stack((k_BGSH, v_BGSH))
        for step in range(self.size):
            arrived = self._pass_on(here, _KEYS_AND_VALUES) if step < self.size - 1 else None
            yield (self.rank - step) % self.size, here[0], here[1]
            here = arrived() if arrived else here

    def pass_gradients(self, dkv_2BGSH: Tensor) -> Callable[[], Tensor]:
        """Send gradients after the keys and values they are of; see `_pass_on`."""
        return self._pass_on(dkv_2BGSH, _GRADIENTS)

    def _pass_on(self, outgoing: Tensor, tag: int) -> Callable[[], Tensor]:
        """Send to the next rank; the function given back waits for what the rank before has sent, of the same shape."""
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
    """Bytes that one rank sends in one call of ring attention, and as many that it receives."""

    forward: int
    backward: int


def ring_bytes(size: int, batch: int, kv_heads: int, tokens: int, head_dim: int, dtype: torch.dtype) -> RingBytes:
    """Bytes each rank sends, with S = `tokens` per rank, elements of e bytes (`dtype`) and sums of w bytes.

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
    """The type of sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
