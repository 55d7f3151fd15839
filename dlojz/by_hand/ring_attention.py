"""Ring attention: each rank holds part of the sequence; keys and values travel round the ring, queries stay.

After n steps every query has met every key it may see; no rank has held more than two ranks' keys and values nor more
than one block of scores. Output and gradients are those of one process with the whole sequence. Each rank sends to the
next one and receives from the one before; all send and receive alike, whatever they compute, so that none waits for a
message that never leaves.

    step   rank 0   rank 1   rank 2   (whose keys and values a rank holds)
    0      0        1        2
    1      2        0        1
    2      1        2        0

All ranks hold equally many tokens, in one of two orders. The sequence is cut into chunks; a rank holds one (contiguous)
or two (zigzag). With a causal mask the first tokens have little attention to compute and the last ones much: contiguous
ranks are unequally busy, zigzag ranks equally.

    4 ranks      rank 0   rank 1   rank 2   rank 3
    contiguous   0        1        2        3
    zigzag       0 7      1 6      2 5      3 4

Shape suffixes: B batch, N heads, G key-value heads (G divides N), S tokens of one rank, H width of a head; C tokens of
a chunk, R rows: those tokens once for each of the N / G query heads that share a key-value head.

Sources: Liu, Zaharia & Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (arXiv
2310.01889), §3; Milakov & Gimelshein 2018, "Online normalizer calculation for softmax" (arXiv 1805.02867), §3; Dao et
al. 2022, "FlashAttention" (arXiv 2205.14135), appendix B.2, for the backward pass from the log-sum-exp; Brandon et al.
2023, "Striped Attention" (arXiv 2311.09431), for the imbalance; Llama Team 2024, "The Llama 3 Herd of Models" (arXiv
2407.21783), §3.3.2, for the zigzag order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, one_of
from dlojz.by_hand.ddp import ranks_of

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

Order = Literal["contiguous", "zigzag"]
ORDERS: tuple[Order, ...] = get_args(Order)
_KEYS_AND_VALUES, _GRADIENTS = 0, 1  # tags: one of each may be under way


def chunks_of(rank: int, size: int, order: Order) -> tuple[int, ...]:
    """Return the chunks of a rank, by their number in the sequence: of n (contiguous) or 2·n (zigzag).

    Raises:
        LabError: if the order is unknown.
    """
    if order not in ORDERS:
        raise LabError(one_of("order", order, ORDERS))
    return (rank,) if order == "contiguous" else (rank, 2 * size - 1 - rank)  # zigzag: an early chunk and a late one


def visible_pairs(rank: int, source: int, size: int, causal: bool, order: Order) -> Iterator[tuple[int, int, bool]]:
    """Yield the pairs of chunks of `rank`'s queries and of `source`'s keys that see each other.

    Yields:
        Numbers of the chunk among those of `rank` and of `source`, and whether the pair lies on the diagonal, where
        each token sees itself and those before it.
    """
    for query_number, query_chunk in enumerate(chunks_of(rank, size, order)):
        for key_number, key_chunk in enumerate(chunks_of(source, size, order)):
            if not causal or key_chunk <= query_chunk:  # else masked wholly
                yield query_number, key_number, causal and key_chunk == query_chunk


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class Ring:
    """Ring of ranks, as one rank sees it.

    Args:
        group: the ranks; by default all. One process sends nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.size = ranks_of(group)

    def tour(self, k_BGSH: Tensor, v_BGSH: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each rank's keys and values, this rank's own first: rank, keys, values.

        While they are used, the next ones are under way: two ranks' are held at a time. Each rank sends
        (n − 1)·2·B·G·S·H elements in all.
        """
        key_values = torch.stack((k_BGSH, v_BGSH))  # (2, B, G, S, H): one message for both
        for step in range(self.size):
            arrived = self._pass_on(key_values, _KEYS_AND_VALUES) if step < self.size - 1 else None
            yield (self.rank - step) % self.size, key_values[0], key_values[1]  # step s: those of rank r − s
            key_values, arrived = arrived() if arrived else key_values, None  # what was sent is held no longer

    def pass_gradients(self, dkv_2BGSH: Tensor) -> Callable[[], Tensor]:
        """Send gradients after their keys and values; see `_pass_on`."""
        return self._pass_on(dkv_2BGSH, _GRADIENTS)

    def _pass_on(self, outgoing: Tensor, tag: int) -> Callable[[], Tensor]:
        """Send to the next rank; the function returned waits for the tensor of the rank before, of the same shape."""
        incoming = torch.empty_like(outgoing)
        works = self._exchange(outgoing, incoming, tag)

        def arrived() -> Tensor:
            for work in works:
                work.wait()
            return incoming

        return arrived

    def _exchange(self, outgoing: Tensor, incoming: Tensor, tag: int) -> list[Any]:
        """Begin to send and to receive; what is returned waits for the end, and holds the tensors until then."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        # Who: every rank, to the one after it. What: two tensors in one, (2, B, G, S, H). How much: its bytes. Send and
        # receive are posted together: if all ranks sent first and waited, none would ever receive.
        return dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, outgoing, group=self.group, group_peer=after, tag=tag),
                dist.P2POp(dist.irecv, incoming, group=self.group, group_peer=before, tag=tag),
            ]
        )


class PretendedRing(Ring):
    """Ring of which one rank alone exists: it sends nothing, so that this rank's memory can be traced.

    What it receives has the right shapes, and no values.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.group, self.rank, self.size = None, rank, size

    def _exchange(self, outgoing: Tensor, incoming: Tensor, tag: int) -> list[Any]:
        return [_Sent(outgoing)]


class _Sent(NamedTuple):
    """A message that is held as one under way is."""

    outgoing: Tensor

    def wait(self) -> None:
        """Nothing."""


def ring_attention(
    q_BNSH: Tensor,
    k_BGSH: Tensor,
    v_BGSH: Tensor,
    ring: Ring | None = None,
    causal: bool = True,
    order: Order = "contiguous",
) -> Tensor:
    """Compute attention of this rank's queries over the keys and values of all ranks of a ring.

    Scores are `q·k / √H`. Scores and sums are float32 (float64 for float64) whatever the type of the messages. Each of
    n ranks sends (n − 1)·2·B·G·S·H elements forward; backward the same again, and as many gradients (`ring_bytes`).

    Pairs of chunks that causality masks wholly are not computed, but all messages are sent. With contiguous tokens rank
    0 computes one block of scores, the last rank n, and the others wait for it; in zigzag order all ranks have as much
    to do (`pairs_computed`).

    Args:
        q_BNSH: queries of this rank's tokens, positions applied.
        k_BGSH: keys of the same tokens; query head i reads key-value head i // (N / G).
        v_BGSH: values, of the shape of the keys.
        ring: the ranks that share the sequence; by default all. One process communicates nothing.
        causal: whether a token sees only itself and those before it.
        order: which tokens of the sequence the ranks hold.

    Returns:
        `(B, N, S, H)`, of the type of the queries.

    Raises:
        LabError: if the shapes do not fit together, or the tokens cannot be cut into the chunks of the order.
    """
    _check(q_BNSH, k_BGSH, v_BGSH, len(chunks_of(0, 1, order)))
    return cast(Tensor, _RingAttention.apply(q_BNSH, k_BGSH, v_BGSH, _Blocks(ring or Ring(), causal, order)))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BNSH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, blocks: _Blocks) -> Tensor:
        with torch.autocast(q_BNSH.device.type, enabled=False):
            q = blocks.rows(q_BNSH, k_BGSH.shape[1])  # chunks, (B, G, R, H) each
            outputs = [torch.zeros_like(chunk) for chunk in q]
            lse = [torch.full_like(chunk[..., :1], -torch.inf) for chunk in q]  # so far, (B, G, R, 1)
            for source, k, v in blocks.ring.tour(k_BGSH, v_BGSH):
                keys, values = blocks.cut(k), blocks.cut(v)
                for a, b, diagonal in blocks.pairs(source):
                    scores_BGRC = _scores(q[a], keys[b], diagonal)  # the only block of scores at this time
                    block_lse = scores_BGRC.logsumexp(dim=-1, keepdim=True)
                    block_out = (scores_BGRC - block_lse).exp() @ values[b]
                    # Two averages of values, over different keys: each weighs as its sum of exponentials does.
                    total_lse = torch.logaddexp(lse[a], block_lse)
                    outputs[a] = outputs[a] * (lse[a] - total_lse).exp() + block_out * (block_lse - total_lse).exp()
                    lse[a] = total_lse
                del k, v, keys, values  # before the next ones set out
            output_BNSH = blocks.heads(outputs, q_BNSH)
        ctx.blocks = blocks
        ctx.save_for_backward(q_BNSH, k_BGSH, v_BGSH, output_BNSH, *lse)  # scores are computed anew
        return output_BNSH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNSH: Tensor) -> tuple[Tensor | None, ...]:
        blocks: _Blocks = ctx.blocks
        q_BNSH, k_BGSH, v_BGSH, output_BNSH, *lse = ctx.saved_tensors
        with torch.autocast(q_BNSH.device.type, enabled=False):
            q, grad, outputs = (blocks.rows(x, k_BGSH.shape[1]) for x in (q_BNSH, grad_BNSH, output_BNSH))
            # The softmax's derivative needs, for each row, the sum of weights × their gradients, which is grad · out.
            dot = [(g * o).sum(dim=-1, keepdim=True) for g, o in zip(grad, outputs, strict=True)]
            dq = [torch.zeros_like(chunk) for chunk in q]
            own_2BGSH, arrived = grad_BNSH, cast("Callable[[], Tensor] | None", None)
            for source, k, v in blocks.ring.tour(k_BGSH, v_BGSH):
                keys, values = blocks.cut(k), blocks.cut(v)
                dkv_2BGSH = torch.zeros(2, *k.shape, dtype=wide(k.dtype), device=k.device)
                dk, dv = (gradient.chunk(len(q), dim=2) for gradient in dkv_2BGSH)
                for a, b, diagonal in blocks.pairs(source):
                    weights_BGRC = (_scores(q[a], keys[b], diagonal) - lse[a]).exp()  # of all keys: lse is whole by now
                    dscores_BGRC = weights_BGRC * (grad[a] @ values[b].mT - dot[a]) * _scale(q[a])
                    dq[a] += dscores_BGRC @ keys[b]  # (B, G, R, C) @ (B, G, C, H)
                    dk[b].add_(dscores_BGRC.mT @ q[a])  # (B, G, C, R) @ (B, G, R, H)
                    dv[b].add_(weights_BGRC.mT @ grad[a])
                if source == blocks.ring.rank:
                    own_2BGSH = dkv_2BGSH  # stays here: gradients set out from the first rank that is not their own
                else:
                    # What the ranks before have found for these keys has followed them here; added to, it goes on.
                    arrived = blocks.ring.pass_gradients(dkv_2BGSH + arrived() if arrived else dkv_2BGSH)
                del k, v, keys, values
            dk_BGSH, dv_BGSH = own_2BGSH + arrived() if arrived else own_2BGSH  # home after n − 1 hops
        return blocks.heads(dq, q_BNSH), dk_BGSH.to(k_BGSH.dtype), dv_BGSH.to(v_BGSH.dtype), None


class _Blocks:
    """Chunks of one rank's queries, keys and values, and which of them meet."""

    def __init__(self, ring: Ring, causal: bool, order: Order) -> None:
        self.ring, self._causal, self._order = ring, causal, order
        self._chunks = len(chunks_of(ring.rank, ring.size, order))

    def pairs(self, source: int) -> list[tuple[int, int, bool]]:
        return list(visible_pairs(self.ring.rank, source, self.ring.size, self._causal, self._order))

    def cut(self, x_BNSH: Tensor) -> list[Tensor]:
        """Its chunks in the type of sums, `(B, N, C, H)` each."""
        return list(x_BNSH.to(wide(x_BNSH.dtype)).chunk(self._chunks, dim=2))

    def rows(self, x_BNSH: Tensor, kv_heads: int) -> list[Tensor]:
        """Its chunks, the query heads of one key-value head below each other: `(B, G, R, H)` each."""
        return [chunk.unflatten(1, (kv_heads, -1)).flatten(2, 3) for chunk in self.cut(x_BNSH)]

    def heads(self, rows: list[Tensor], like_BNSH: Tensor) -> Tensor:
        """The inverse of `rows`, in the type and shape of `like_BNSH`."""
        tokens = like_BNSH.shape[2] // self._chunks
        return torch.cat([chunk.unflatten(2, (-1, tokens)).flatten(1, 2) for chunk in rows], dim=2).to(like_BNSH.dtype)


def _scores(q_BGRH: Tensor, k_BGCH: Tensor, diagonal: bool) -> Tensor:
    """`q·k / √H` for a pair of chunks; on the diagonal without the tokens that come after each."""
    scores_BGRC = q_BGRH @ k_BGCH.mT * _scale(q_BGRH)
    if not diagonal:
        return scores_BGRC
    rows, tokens = scores_BGRC.shape[-2:]
    token_R = torch.arange(rows, device=q_BGRH.device) % tokens  # of each row: heads lie below each other
    return scores_BGRC.masked_fill(torch.arange(tokens, device=q_BGRH.device) > token_R[:, None], -torch.inf)


def _scale(q_BGRH: Tensor) -> float:
    return float(q_BGRH.shape[-1] ** -0.5)


def _check(q_BNSH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, chunks: int) -> None:
    query, key, value = (tuple(tensor.shape) for tensor in (q_BNSH, k_BGSH, v_BGSH))
    if len(query) != 4 or key != value or query[:1] + query[2:] != key[:1] + key[2:] or query[1] % key[1]:
        raise phrase.refused("shapes do not fit", query=query, key=key, value=value)
    if query[2] % chunks:
        raise phrase.refused("uneven chunks", tokens=query[2], chunks=chunks)
