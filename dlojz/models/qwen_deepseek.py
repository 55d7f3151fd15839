"""Decoders of 2024 and 2025: Qwen-3 (normalised queries and keys) and DeepSeek (latent attention, shared experts).

``tokens_BT`` (integers) in, ``logits_BTV`` out, as Llama's; sizes named after them have their numbers of parameters.
Both have rotary positions, RMS norms, gated MLPs and no biases; a block has an MLP or a mixture of experts.

Shape suffixes: B batch, T tokens, D width, N heads, G key-value heads, H width of a head, R width of what is rotated,
L width of a latent vector, V vocabulary.

Source: Qwen Team 2025, "Qwen3" (arXiv 2505.09388), section 2; DeepSeek-AI 2024, "DeepSeek-V2" (arXiv 2405.04434),
section 2, and "DeepSeek-V3" (arXiv 2412.19437), section 2.1; that one's gate is a sigmoid with a bias for balance, ours
the softmax of the others.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.models.blocks import WHOLE_SEQUENCE, BlockList, VocabularyHead, initialise_transformer, merge_heads
from dlojz.models.checkpointing import Checkpointing
from dlojz.models.experts.layer import MixtureOfExperts
from dlojz.models.experts.routing import Routing
from dlojz.models.llama import rotate
from dlojz.models.sizes import DeepSeekSize, QwenSize


class _Decoder(BlockList):
    """Decoder of blocks that attend and then read an MLP or a mixture of experts.

    Args:
        size: Width, depth, heads, MLP, experts.
        sequence_length: Kept for symmetry with the other models; rotary positions need no table.
        vocabulary_size: Number of different tokens (256 for bytes).
        checkpointing: Recomputation in the backward pass (see `BlockList`).
        routing: Of the mixtures of experts, in the blocks that ``size.experts`` chooses; None without.
    """

    def __init__(
        self,
        size: QwenSize | DeepSeekSize,
        *,
        sequence_length: int,
        vocabulary_size: int,
        checkpointing: Checkpointing | bool = "none",
        routing: Routing | None = None,
    ) -> None:
        mixed = [size.experts is not None and size.experts.has_mixture(index) for index in range(size.depth)]
        embedding = nn.Embedding(vocabulary_size, size.width)
        tied = embedding if isinstance(size, QwenSize) and size.tied_head else None
        blocks = [
            embedding,
            *(DecoderBlock(size, routing if has_mixture else None) for has_mixture in mixed),
            VocabularyHead(nn.RMSNorm(size.width, eps=size.norm_eps), vocabulary_size, tied),
        ]
        super().__init__(blocks, checkpointing=checkpointing)
        self.sequence_length = sequence_length
        self.apply(initialise_transformer)


class Qwen(_Decoder):
    """Qwen-3-like decoder of any size."""


class DeepSeek(_Decoder):
    """DeepSeek-like decoder of any size."""


class DecoderBlock(nn.Module):
    """Block of Qwen-3 and DeepSeek: attention, then an MLP or a mixture, each pre-norm with a residual connection."""

    def __init__(self, size: QwenSize | DeepSeekSize, routing: Routing | None = None) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(size.width, eps=size.norm_eps)
        self.attention = QwenAttention(size) if isinstance(size, QwenSize) else LatentAttention(size)
        self.norm2 = nn.RMSNorm(size.width, eps=size.norm_eps)
        self.mlp: GatedMLP | None = None
        self.mixture: MixtureOfExperts | None = None
        if routing is None:
            self.mlp = GatedMLP(size.width, size.mlp_width)
            return
        assert size.experts is not None
        width = size.experts.mlp_width or size.mlp_width  # DeepSeek's experts are narrower than its MLP
        self.mixture = MixtureOfExperts(size.width, width, routing, "swiglu")
        if size.experts.shared:  # every token meets them: one MLP, as wide as all of them together
            self.mlp = GatedMLP(size.width, size.experts.shared * width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, width)`` to the same shape."""
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        normed_BTD = self.norm2(x_BTD)
        if self.mixture is not None:
            x_BTD = x_BTD + self.mixture(normed_BTD)
        return x_BTD if self.mlp is None else x_BTD + self.mlp(normed_BTD)


class GatedMLP(nn.Module):
    """SwiGLU MLP without biases: ``x_BTD`` in, ``x_BTD`` out.

    Source: Shazeer 2020, "GLU Variants Improve Transformer" (arXiv 2002.05202).
    """

    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, mlp_width, bias=False)
        self.expand = nn.Linear(width, mlp_width, bias=False)
        self.project = nn.Linear(mlp_width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, width)`` to the same shape."""
        y_BTD: Tensor = self.project(F.silu(self.gate(x_BTD)) * self.expand(x_BTD))
        return y_BTD


class QwenAttention(nn.Module):
    """Grouped-query attention whose queries and keys are normalised head by head: ``x_BTD`` in, ``x_BTD`` out.

    N × H, the width of all heads, may differ from D.

    Source: Qwen Team 2025 (arXiv 2505.09388), section 2: QK-Norm (Dehghani et al. 2023, arXiv 2302.05442).
    """

    sequence = WHOLE_SEQUENCE

    def __init__(self, size: QwenSize) -> None:
        super().__init__()
        self.head_dim, self.rope_theta = size.head_dim, size.rope_theta
        self.query = nn.Linear(size.width, size.num_heads * size.head_dim, bias=False)
        self.key = nn.Linear(size.width, size.num_kv_heads * size.head_dim, bias=False)
        self.value = nn.Linear(size.width, size.num_kv_heads * size.head_dim, bias=False)
        self.query_norm = nn.RMSNorm(size.head_dim, eps=size.norm_eps)
        self.key_norm = nn.RMSNorm(size.head_dim, eps=size.norm_eps)
        self.project = nn.Linear(size.num_heads * size.head_dim, size.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, width)`` to the same shape."""
        # (B, T, D) @ (D, N·H) → (B, T, N, H): the norm works along H, head by head.
        q_BTNH, k_BTGH, v_BTGH = (
            linear(x_BTD).unflatten(-1, (-1, self.head_dim)) for linear in (self.query, self.key, self.value)
        )
        attended_BNTH = self.sequence.attend(
            rotate(self.query_norm(q_BTNH).transpose(1, 2), self.rope_theta, self.sequence),
            rotate(self.key_norm(k_BTGH).transpose(1, 2), self.rope_theta, self.sequence),
            v_BTGH.transpose(1, 2),
        )
        output_BTD: Tensor = self.project(merge_heads(attended_BNTH))
        return output_BTD


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA): ``x_BTD`` in, ``x_BTD`` out.

    Keys and values of all heads are made of one latent vector per token, which is all that inference would cache beside
    one rotated key that the heads share; queries are made of a latent vector too, where ``query_latent`` says so. In
    training both are computed whole, as here.

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1 and equations 37 to 47.
    """

    sequence = WHOLE_SEQUENCE

    def __init__(self, size: DeepSeekSize) -> None:
        super().__init__()
        self.size = size
        key_dim = size.head_dim + size.rotated_dim  # H + R
        if size.query_latent:
            self.query_down = nn.Linear(size.width, size.query_latent, bias=False)
            self.query_norm = nn.RMSNorm(size.query_latent, eps=size.norm_eps)
        self.query = nn.Linear(size.query_latent or size.width, size.num_heads * key_dim, bias=False)
        self.latent_down = nn.Linear(size.width, size.latent + size.rotated_dim, bias=False)  # L + R
        self.latent_norm = nn.RMSNorm(size.latent, eps=size.norm_eps)
        self.latent_up = nn.Linear(size.latent, 2 * size.num_heads * size.head_dim, bias=False)
        self.project = nn.Linear(size.num_heads * size.head_dim, size.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, width)`` to the same shape."""
        size = self.size
        latent_BTL = self.query_norm(self.query_down(x_BTD)) if size.query_latent else x_BTD
        q_BNTH = self.query(latent_BTL).unflatten(-1, (size.num_heads, -1)).transpose(1, 2)  # (B, N, T, H + R)
        plain_BNTH, turned_BNTR = q_BNTH.split((size.head_dim, size.rotated_dim), dim=-1)
        q_BNTH = torch.cat((plain_BNTH, rotate(turned_BNTR, size.rope_theta, self.sequence)), dim=-1)
        latent_BTL, shared_BTR = self.latent_down(x_BTD).split((size.latent, size.rotated_dim), dim=-1)
        # (B, T, L) @ (L, N·2H) → (B, N, T, 2H), then keys and values of H each.
        kv_BNTH = self.latent_up(self.latent_norm(latent_BTL)).unflatten(-1, (size.num_heads, -1)).transpose(1, 2)
        k_BNTH, v_BNTH = kv_BNTH.chunk(2, dim=-1)
        # One rotated key for all heads: (B, 1, T, R), expanded without a copy.
        shared_BNTR = rotate(shared_BTR[:, None], size.rope_theta, self.sequence).expand(-1, size.num_heads, -1, -1)
        k_BNTH = torch.cat((k_BNTH, shared_BNTR), dim=-1)
        # A fused kernel takes values as wide as keys: zeros are added and cut off, as DeepSeek's own code does.
        v_BNTH = F.pad(v_BNTH, (0, size.rotated_dim))
        attended_BNTH = self.sequence.attend(q_BNTH, k_BNTH, v_BNTH)
        output_BTD: Tensor = self.project(merge_heads(attended_BNTH[..., : size.head_dim]))
        return output_BTD
