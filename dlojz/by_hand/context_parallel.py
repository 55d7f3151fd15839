"""Context parallelism: a text model whose ranks share the tokens of every sequence.

All weights are whole on every rank, and each rank computes all layers for its own T / n tokens. Embedding, norms, MLP,
head and loss treat each token on its own; attention alone needs the others, and asks them for keys and values
(`ring_attention`). What each rank keeps of the activations is 1 / n of what one process would keep.

A training step needs three things beside those of data parallelism (`dlojz.by_hand.ddp`):

    own_tokens      each rank reads the same samples as the others, and keeps its own tokens and their targets
    RingShare       positions are those in the whole sequence, and attention goes round the ring
    the mean        ranks have equally many tokens, so the mean of their losses is that of all tokens, and gradients
                    are averaged over all ranks that hold the weights: data-parallel replicas × n

Shape suffixes: B batch, T tokens of the sequence, S = T / n tokens of one rank, N heads, G key-value heads, H width of
a head.

Sources: Liu, Zaharia & Abbeel 2023 (arXiv 2310.01889), §3; Llama Team 2024 (arXiv 2407.21783), §3.3.2, where it is the
fourth dimension beside data, pipeline and tensor parallelism; Liang et al. 2024, "TorchTitan" (arXiv 2410.06511), whose
`context_parallel` likewise replaces attention alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from dlojz.base.language import Sentences
from dlojz.by_hand.ring_attention import Order, Ring, chunks_of, ring_attention, visible_pairs, wide
from dlojz.models.blocks import SequenceShare

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

Model = TypeVar("Model", bound=nn.Module)


class RingBytes(NamedTuple):
    """Bytes that one rank sends, and receives, in one call of ring attention."""

    forward: int
    backward: int


def ring_bytes(size: int, batch: int, kv_heads: int, tokens: int, head_dim: int, dtype: torch.dtype) -> RingBytes:
    """Compute the bytes each rank sends, with S = `tokens` per rank, elements of e bytes (`dtype`), sums of w bytes.

    Forward n − 1 messages, (n − 1)·2·B·G·S·H·e bytes; backward twice as many messages, (n − 1)·2·B·G·S·H·(e + w) bytes,
    w = 4 (8 for float64): keys and values once more, and the gradients that follow them home. A block under activation
    checkpointing runs its forward pass twice.

    Example:
        >>> ring_bytes(4, batch=1, kv_heads=2, tokens=8, head_dim=16, dtype=torch.bfloat16)
        RingBytes(forward=3072, backward=9216)

    Source: Liu et al. 2023, §3, for the forward pass; the backward pass is that of `ring_attention`.
    """
    # n − 1 messages of keys and values together, each (2, B, G, S, H).
    elements = (size - 1) * 2 * batch * kv_heads * tokens * head_dim
    return RingBytes(elements * dtype.itemsize, elements * (dtype.itemsize + wide(dtype).itemsize))


def positions_of(tokens: int, rank: int, size: int, order: Order = "contiguous") -> Tensor:
    """Return the positions in the sequence of a rank's tokens, shape (tokens,).

    Example:
        >>> positions_of(4, 1, 2).tolist(), positions_of(4, 1, 2, "zigzag").tolist()
        ([4, 5, 6, 7], [2, 3, 4, 5])
    """
    chunks = chunks_of(rank, size, order)
    # In zigzag order a rank has two chunks, each of half its tokens.
    length = tokens // len(chunks)
    return torch.cat([torch.arange(chunk * length, (chunk + 1) * length) for chunk in chunks])


def own_tokens(whole_BT: Tensor, rank: int, size: int, order: Order = "contiguous") -> Tensor:
    """Copy a rank's tokens out of whole sequences: `(B, T, …)` to `(B, T / n, …)`.

    Targets are shifted before they are cut: the target of a chunk's last token is the first of the chunk after it.

    Raises:
        LabError: if the sequence cannot be cut into equal chunks.
    """
    # Chunks of the whole sequence: n, or 2·n in zigzag order.
    length, chunks = whole_BT.shape[1], len(chunks_of(rank, size, order)) * size
    if length % chunks:
        raise phrase.refused(
            "uneven sequences",
            length=length,
            chunks=chunks,
            order=order,
            size=size,
            longer=-(-length // chunks) * chunks,
        )
    # (B, T, …) at the (T / n,) positions of this rank's chunks, in their order.
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


class RingShare(SequenceShare):
    """A rank's tokens of each sequence, which attend to those of all ranks of a ring.

    Args:
        order: which tokens each holds: `zigzag` gives every rank as much attention to compute.
    """

    def __init__(self, ring: Ring, order: Order = "zigzag") -> None:
        # Refuses an unknown order now, not in the first forward pass.
        chunks_of(ring.rank, ring.size, order)
        self.ring, self.order = ring, order

    def positions(self, tokens: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the positions in the whole sequence of this rank's S tokens, shape (S,)."""
        return positions_of(tokens, self.ring.rank, self.ring.size, self.order).to(device, dtype)

    def attend(self, q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor, *, causal: bool = True) -> Tensor:
        """Compute ring attention of this rank's queries, `(B, N, S, H)`."""
        return ring_attention(q_BNTH, k_BGTH, v_BGTH, self.ring, causal, self.order)


def share_sequences(model: Model, share: SequenceShare) -> Model:
    """Let a text model compute a rank's tokens of each sequence, in place; its parameters and their names stay.

    Args:
        model: any with modules that ask a `SequenceShare` (gpt, llama, qwen, deepseek).

    Raises:
        LabError: if the model has no attention that can be shared so.
    """
    # Every module that asks a `SequenceShare` for positions or attention has this attribute.
    asking = [module for module in model.modules() if hasattr(module, "sequence")]
    if not asking:
        name = type(model).__name__
        raise phrase.refused("no attention to share", name=name)
    for module in asking:
        module.sequence = share  # type: ignore[assignment]
    return model
