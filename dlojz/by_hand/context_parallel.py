"""Context parallelism: a Llama-like decoder whose ranks share the tokens of every sequence.

All weights are whole on every rank, and each rank computes all layers for its own T / n tokens. Embedding, norms, MLP
and head treat each token on its own; attention alone needs the others, and asks them for keys and values
(`ring_attention`). What each rank keeps of the activations is 1 / n of what one process would keep.

Shape suffixes: B batch, T tokens of the sequence, S = T / n tokens of one rank, D width, N heads, G key-value heads, H
width of a head, V vocabulary.

Sources: Liu, Zaharia & Abbeel 2023 (arXiv 2310.01889), §3; Llama Team 2024 (arXiv 2407.21783), §3.3.2, where it is the
fourth dimension beside data, pipeline and tensor parallelism.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.base.language import refusal
from dlojz.by_hand.ddp import DataParallel, ranks_of
from dlojz.by_hand.ring_attention import Order, chunks_of, ring_attention, visible_pairs, wide
from dlojz.models.blocks import merge_heads
from dlojz.models.llama import Llama, LlamaBlock, rotate


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


class RingBlock(LlamaBlock):
    """Decoder block on this rank's tokens, with ring attention.

    Args:
        whole: the block, whose parameters become this one's, under the same names.
        group: the ranks that share the sequence.
        order: which tokens each holds.
    """

    def __init__(self, whole: LlamaBlock, group: dist.ProcessGroup | None, order: Order) -> None:
        nn.Module.__init__(self)
        self.head_dim, self.rope_theta = whole.head_dim, whole.rope_theta
        self.mixture = whole.mixture  # None is no child
        for name, child in whole.named_children():
            self.add_module(name, child)
        self.group, self.order = group, order

    def _attend(self, x_BSD: Tensor) -> Tensor:
        q_BNSH, k_BGSH, v_BGSH = (
            project(x_BSD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        position_S = positions_of(x_BSD.shape[1], *ranks_of(self.group), self.order).to(x_BSD.device)
        # A key is turned where its token stands, before it travels.
        turned_BNSH, turned_BGSH = (rotate(one, self.rope_theta, position_S) for one in (q_BNSH, k_BGSH))
        attended_BNSH = ring_attention(turned_BNSH, turned_BGSH, v_BGSH, self.group, order=self.order)
        output: Tensor = self.attention_project(merge_heads(attended_BNSH))
        return output


class ContextParallel(DataParallel):
    """Llama-like decoder whose ranks share every sequence; for the weights they are replicas, as in `DataParallel`.

    A training step is `loss = parallel.loss(tokens, targets)`, `loss.backward()`, `parallel.synchronize()`,
    `optimizer.step()`, `optimizer.zero_grad()`, with the same whole tokens on every rank. With a data axis besides, its
    ranks belong to the same mean of gradients.

    Args:
        model: the decoder; its blocks are replaced by `RingBlock`, its parameters and their names stay.
        group: the ranks that share the sequence; by default all. One process communicates nothing.
        order: `contiguous`, or `zigzag`, which gives every rank as much attention to compute.

    Raises:
        LabError: if the model has no such blocks, or the order is unknown.
    """

    def __init__(self, model: Llama, group: dist.ProcessGroup | None = None, *, order: Order = "contiguous") -> None:
        chunks_of(0, 1, order)
        blocks = getattr(model, "blocks", nn.ModuleList())
        if not any(isinstance(block, LlamaBlock) for block in blocks):
            name = type(model).__name__
            raise refusal(
                en=f"{name} has no block of the Llama-like decoder: give a model such as llama_tiny.",
                fr=f"{name} n’a aucun bloc du décodeur de type Llama : donnez un modèle comme llama_tiny.",
            )
        for number, block in enumerate(blocks):
            if isinstance(block, LlamaBlock):
                blocks[number] = RingBlock(block, group, order)
        super().__init__(model, overlap=False, group=group)  # the ring has the links while backward runs
        self.rank, self.order = ranks_of(group)[0], order

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Compute the logits of this rank's tokens from whole sequences: ``(B, T)`` to ``(B, T / n, V)``.

        Raises:
            LabError: if the sequence cannot be shared equally.
        """
        logits_BSV: Tensor = super().forward(own_tokens(tokens_BT, self.rank, self.size, self.order))
        return logits_BSV

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross-entropy over this rank's tokens; its mean over the ranks (`mean`) is that of all tokens.

        The targets are shifted before the sequence is cut: the target of a rank's last token is the next rank's first.
        """
        target_BS = own_tokens(targets_BT, self.rank, self.size, self.order)
        return F.cross_entropy(self(tokens_BT).float().flatten(0, 1), target_BS.flatten())

    @torch.no_grad()
    def mean(self, value: Tensor) -> Tensor:
        """Average a tensor over the ranks, which have equally many tokens."""
        total = value.detach().clone()
        if self.size > 1:
            # Who: all ranks of the group. What: the tensor given, summed. How much: its bytes.
            dist.all_reduce(total, group=self.group)
        return total / self.size
