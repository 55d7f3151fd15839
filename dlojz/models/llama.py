"""Llama-like decoder: rotary positions, gated MLP, RMS norms, grouped-query attention.

``tokens_BT`` (integers) in, ``logits_BTV`` out; the logits of a token depend on no later token, and the sizes named
after Llama have exactly its number of parameters. A size with experts has mixtures instead of MLPs; if these drop
choices, a later token can be the cause (see `dlojz.models.experts.gate.rows`).

Shape suffixes: B batch, T tokens, D width, N heads, G key-value heads (G divides N), H width of a head, V vocabulary.

Source: Touvron et al. 2023, "Llama 2" (arXiv 2307.09288), section 2.2; Llama Team 2024 (arXiv 2407.21783), section 3.2.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.models.blocks import (
    WHOLE_SEQUENCE,
    BlockList,
    SequenceShare,
    VocabularyHead,
    initialise_transformer,
    merge_heads,
)
from dlojz.models.checkpointing import Checkpointing
from dlojz.models.experts.layer import MixtureOfExperts
from dlojz.models.experts.routing import Routing
from dlojz.models.sizes import LlamaSize


class Llama(BlockList):
    """Llama-like decoder of any size: ``tokens_BT`` in, ``logits_BTV`` out.

    Args:
        size: Width, depth, heads, key-value heads, MLP width.
        sequence_length: Kept for symmetry with the other models; rotary positions need no table.
        vocabulary_size: Number of different tokens (256 for bytes).
        checkpointing: Recomputation in the backward pass (see `BlockList`).
        routing: Of the mixtures of experts, in the blocks that ``size.experts`` chooses; None without.
    """

    def __init__(
        self,
        size: LlamaSize,
        *,
        sequence_length: int,
        vocabulary_size: int,
        checkpointing: Checkpointing | bool = "none",
        routing: Routing | None = None,
    ) -> None:
        mixed = [size.experts is not None and size.experts.has_mixture(index) for index in range(size.depth)]
        embedding = nn.Embedding(vocabulary_size, size.width)
        tied = embedding if size.tied_head else None
        blocks = [
            embedding,
            *(LlamaBlock(size, routing if has_mixture else None) for has_mixture in mixed),
            VocabularyHead(nn.RMSNorm(size.width, eps=size.norm_eps), vocabulary_size, tied),
        ]
        super().__init__(blocks, checkpointing=checkpointing)
        self.sequence_length = sequence_length
        self.apply(initialise_transformer)


class LlamaBlock(nn.Module):
    """Block of Llama: grouped-query attention, then a SwiGLU MLP, each pre-norm with a residual connection; no biases.

    With a `routing`, a mixture of experts replaces the MLP.
    """

    sequence = WHOLE_SEQUENCE

    def __init__(self, size: LlamaSize, routing: Routing | None = None) -> None:
        super().__init__()
        self.head_dim = size.width // size.num_heads
        self.rope_theta = size.rope_theta
        kv_width = size.num_kv_heads * self.head_dim  # G × H
        self.norm1 = nn.RMSNorm(size.width, eps=size.norm_eps)
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, kv_width, bias=False)
        self.value = nn.Linear(size.width, kv_width, bias=False)
        self.attention_project = nn.Linear(size.width, size.width, bias=False)
        self.norm2 = nn.RMSNorm(size.width, eps=size.norm_eps)
        self.mixture: MixtureOfExperts | None = None
        if routing is None:
            self.mlp_gate = nn.Linear(size.width, size.mlp_width, bias=False)
            self.mlp_expand = nn.Linear(size.width, size.mlp_width, bias=False)
            self.mlp_project = nn.Linear(size.mlp_width, size.width, bias=False)
        else:
            self.mixture = MixtureOfExperts(size.width, size.mlp_width, routing, "swiglu")

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, width)`` to the same shape."""
        x_BTD = x_BTD + self._attend(self.norm1(x_BTD))
        normed_BTD = self.norm2(x_BTD)
        if self.mixture is not None:
            mixed_BTD: Tensor = self.mixture(normed_BTD)
            return x_BTD + mixed_BTD
        # (B, T, D) @ (D, F), twice, and the product @ (F, D); F = mlp_width.
        return x_BTD + self.mlp_project(F.silu(self.mlp_gate(normed_BTD)) * self.mlp_expand(normed_BTD))

    def _attend(self, x_BTD: Tensor) -> Tensor:
        projections = self.query, self.key, self.value
        heads_BTD = attended_heads(
            x_BTD, projections, head_dim=self.head_dim, theta=self.rope_theta, sequence=self.sequence
        )
        output_BTD: Tensor = self.attention_project(heads_BTD)
        return output_BTD


def attended_heads(
    x_BTD: Tensor,
    projections: Iterable[nn.Module],
    *,
    head_dim: int,
    theta: float,
    sequence: SequenceShare = WHOLE_SEQUENCE,
) -> Tensor:
    """Compute causal attention of some heads and concatenate their outputs: ``(B, T, D)`` to ``(B, T, N * H)``.

    Args:
        x_BTD: tokens.
        projections: to queries, keys and values; with fewer keys than queries, a group of queries reads one.
        head_dim: width of a head.
        theta: base of the rotary positions.
        sequence: which tokens these are, and how they attend.

    Source: Ainslie et al. 2023, "GQA" (arXiv 2305.13245), §2.
    """
    # (B, T, D) @ (D, N·H) → (B, T, N, H) → (B, N, T, H); of keys and values, G heads.
    q_BNTH, k_BGTH, v_BGTH = (project(x_BTD).unflatten(-1, (-1, head_dim)).transpose(1, 2) for project in projections)
    # A key is rotated where its token stands, before it travels to other ranks.
    attended_BNTH = sequence.attend(rotate(q_BNTH, theta, sequence), rotate(k_BGTH, theta, sequence), v_BGTH)
    return merge_heads(attended_BNTH)


def rotate(x_BNTH: Tensor, theta: float, sequence: SequenceShare = WHOLE_SEQUENCE) -> Tensor:
    """Rotate pair i of each head, (x[i], x[i + H/2]), by the angle ``position × theta^(-2i/H)``.

    The product of two rotated vectors depends on their distance only. The positions are 0 … T − 1 by default; those of
    part of a longer sequence are given by `sequence`.

    Source: Su et al. 2021, "RoFormer" (arXiv 2104.09864), section 3.2; pairs as halves, like Hugging Face's Llama.
    """
    half = x_BNTH.shape[-1] // 2
    # In float32 whatever the precision of x: bfloat16 cannot tell positions above 256 apart.
    position_T = sequence.positions(x_BNTH.shape[-2], x_BNTH.device)
    frequency_H = theta ** (-torch.arange(half, device=x_BNTH.device, dtype=torch.float32) / half)
    angle_TH = position_T[:, None] * frequency_H  # (T, 1) × (H/2,) → (T, H/2)
    cos_TH, sin_TH = angle_TH.cos(), angle_TH.sin()
    lower, upper = x_BNTH.float().split(half, dim=-1)
    # cos and sin, (T, H/2), serve every sample and head.
    turned_BNTH = torch.cat((lower * cos_TH - upper * sin_TH, upper * cos_TH + lower * sin_TH), dim=-1)
    return turned_BNTH.to(x_BNTH.dtype)
