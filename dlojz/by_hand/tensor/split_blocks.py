"""Tensor-parallel blocks: attention split by heads, the MLP by hidden features.

Each of the two halves is one parallel region, with one sum at its end in forward and one at its beginning in backward.
Heads do not see each other, and the activation function treats each feature alone: nothing has to be sent between the
two matrices of a region.

    x ─ norm1 ─ enter ─ qkv (columns: whole heads) ─ attention ─ project (rows) leave ─ + ─
      ─ norm2 ─ enter ─ expand (columns) ─ GELU ─ project (rows) leave ─ + ─

In Llama's block a rank holds whole groups of heads, each with all the queries that read it; query, key and value are
three layers that read one entered tensor: one sum in backward, not three. In CoAtNet's block the residual connection
and the pooling treat whole channels on every rank.

Shape suffixes: B batch, T tokens, D width, N heads of this rank, H width of a head, e = N × 3 × H rows of its
projection, h = N × H, f its hidden features; S = T / n tokens with sequence parallelism. CoAtNet: C channels, H and W
of the feature map, T = H × W tokens, K classes.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), §3, figure 3; Korthikanti et al. 2022 (arXiv 2205.05198),
figure 5, for sequence parallelism; Ainslie et al. 2023, "GQA" (arXiv 2305.13245), §2, for groups under tensor
parallelism; Dai et al. 2021 (arXiv 2106.04803), appendix A.1, for CoAtNet's blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.by_hand.tensor.axis import ALONE, TensorAxis, enter, own_slice, share_bounds
from dlojz.by_hand.tensor.layers import ColumnParallelLinear, RowParallelLinear, SequenceNorm
from dlojz.models.blocks import TransformerBlock, VocabularyHead, merge_heads, split_heads
from dlojz.models.coatnet import AttentionBlock, PoolingHead, RelativeAttention
from dlojz.models.llama import LlamaBlock, attended_heads


class ParallelTransformerBlock(nn.Module):
    """Transformer block of which each rank computes some heads and some hidden features.

    Args:
        block: the block to split; its norms are used as they are.
        attention: split the attention; else every rank computes all of it.
        mlp: the same for the MLP.
    """

    def __init__(self, block: TransformerBlock, axis: TensorAxis, *, attention: bool = True, mlp: bool = True) -> None:
        super().__init__()
        self.head_dim, self.causal, self.gelu = block.head_dim, block.causal, block.gelu
        self.heads_axis = axis if attention else ALONE
        self.mlp_axis = axis if mlp else ALONE
        self.norm1 = SequenceNorm(block.norm1, axis)
        # The projection's rows are laid out head by head, (N, 3, H): a slice of them is a whole number of heads.
        self.qkv = ColumnParallelLinear(block.qkv, self.heads_axis)
        self.attention_project = RowParallelLinear(block.attention_project, self.heads_axis)
        self.norm2 = SequenceNorm(block.norm2, axis)
        self.mlp_expand = ColumnParallelLinear(block.mlp_expand, self.mlp_axis)
        self.mlp_project = RowParallelLinear(block.mlp_project, self.mlp_axis)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, D)`` to the same shape; with sequence parallelism ``(B, S, D)``."""
        # (B, T, D) @ (D, e). `enter` sends the gradient of its input in backward, (B, T, D).
        qkv_BTe = self.qkv(enter(self.norm1(x_BTD), self.heads_axis))
        q_BNTH, k_BNTH, v_BNTH = split_heads(qkv_BTe, self.head_dim)  # N: the heads of this rank
        # Each head alone: nothing is sent.
        attended_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=self.causal)
        # (B, T, h) @ (h, D), summed over the ranks: (B, T, D).
        x_BTD = x_BTD + self.attention_project(merge_heads(attended_BNTH))
        # (B, T, D) @ (D, f); the activation treats each feature alone.
        hidden_BTf = F.gelu(self.mlp_expand(enter(self.norm2(x_BTD), self.mlp_axis)), approximate=self.gelu)
        output_BTD: Tensor = x_BTD + self.mlp_project(hidden_BTf)
        return output_BTD


class ParallelHead(nn.Module):
    """Last block of a text model: norm, then the logits of this rank's words."""

    def __init__(self, head: VocabularyHead, axis: TensorAxis) -> None:
        super().__init__()
        self.axis = axis
        # First word of this rank: the loss subtracts it from the targets.
        self.start, _ = share_bounds(head.output.out_features, axis.size, axis.rank)
        self.norm = SequenceNorm(head.norm, axis)
        self.output = ColumnParallelLinear(head.output, axis)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, D)``, or ``(B, S, D)``, to ``(B, T, v)``."""
        logits_BTv: Tensor = self.output(enter(self.norm(x_BTD), self.axis))
        return logits_BTv


class ParallelLlamaBlock(nn.Module):
    """Block of Llama of which each rank computes some groups of heads and some hidden features.

    Args:
        block: the block to split; its norms are used as they are.
        attention: split the attention; else every rank computes all of it.
        mlp: the same for the MLP.
    """

    def __init__(self, block: LlamaBlock, axis: TensorAxis, *, attention: bool = True, mlp: bool = True) -> None:
        super().__init__()
        self.head_dim, self.rope_theta = block.head_dim, block.rope_theta
        self.heads_axis = axis if attention else ALONE
        self.mlp_axis = axis if mlp else ALONE
        self.norm1 = SequenceNorm(block.norm1, axis)
        self.query = ColumnParallelLinear(block.query, self.heads_axis)
        self.key = ColumnParallelLinear(block.key, self.heads_axis)
        self.value = ColumnParallelLinear(block.value, self.heads_axis)
        self.attention_project = RowParallelLinear(block.attention_project, self.heads_axis)
        self.norm2 = SequenceNorm(block.norm2, axis)
        self.mlp_gate = ColumnParallelLinear(block.mlp_gate, self.mlp_axis)
        self.mlp_expand = ColumnParallelLinear(block.mlp_expand, self.mlp_axis)
        self.mlp_project = RowParallelLinear(block.mlp_project, self.mlp_axis)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, D)`` to the same shape; with sequence parallelism ``(B, S, D)``."""
        entered_BTD = enter(self.norm1(x_BTD), self.heads_axis)
        projections = self.query, self.key, self.value
        heads_BTh = attended_heads(entered_BTD, projections, head_dim=self.head_dim, theta=self.rope_theta)
        x_BTD = x_BTD + self.attention_project(heads_BTh)
        entered_BTD = enter(self.norm2(x_BTD), self.mlp_axis)
        # SiLU gate: (B, T, f) × (B, T, f), both of this rank's features.
        hidden_BTf = F.silu(self.mlp_gate(entered_BTD)) * self.mlp_expand(entered_BTD)
        output_BTD: Tensor = x_BTD + self.mlp_project(hidden_BTf)
        return output_BTD


class ParallelRelativeAttention(nn.Module):
    """CoAtNet attention of which each rank computes some heads, with their position biases."""

    def __init__(self, attention: RelativeAttention, axis: TensorAxis) -> None:
        super().__init__()
        self.axis, self.side, self.head_dim = axis, attention.side, attention.head_dim
        self.qkv = ColumnParallelLinear(attention.qkv, axis)
        self.position_bias = own_slice(attention.position_bias, 0, axis)
        self.project = RowParallelLinear(attention.project, axis)
        self.split_dims = {"position_bias": 0}

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, in_width)`` to ``(B, T, width)``, with T = side²."""
        q_BNTH, k_BNTH, v_BNTH = split_heads(self.qkv(enter(x_BTD, self.axis)), self.head_dim)
        # Unbound: it reads only `side` and `position_bias`, and here these are of this rank's heads.
        bias_NTT = RelativeAttention.relative_bias(self).to(q_BNTH.dtype)  # type: ignore[arg-type]
        attended_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, attn_mask=bias_NTT)
        output_BTD: Tensor = self.project(merge_heads(attended_BNTH))
        return output_BTD


class ParallelAttentionBlock(nn.Module):
    """CoAtNet attention block of which each rank computes some heads and some hidden features.

    Args:
        attention: split the attention; else every rank computes all of it.
        mlp: the same for the MLP.
    """

    def __init__(self, block: AttentionBlock, axis: TensorAxis, *, attention: bool = True, mlp: bool = True) -> None:
        super().__init__()
        self.mlp_axis = axis if mlp else ALONE
        self.shortcut, self.norm1, self.pool = block.shortcut, block.norm1, block.pool
        self.attention = ParallelRelativeAttention(block.attention, axis if attention else ALONE)
        self.norm2 = block.norm2
        self.mlp_expand = ColumnParallelLinear(block.mlp_expand, self.mlp_axis)
        self.mlp_project = RowParallelLinear(block.mlp_project, self.mlp_axis)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """``(B, in_width, H, W)`` to ``(B, width, H/stride, W/stride)``."""
        shortcut_BCHW = self.shortcut(x_BCHW)
        # Channels last for the layer norm, and back.
        normed_BCHW = self.norm1(x_BCHW.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x_BTD = _tokens(shortcut_BCHW) + self.attention(_tokens(self.pool(normed_BCHW)))
        hidden_BTf = F.gelu(self.mlp_expand(enter(self.norm2(x_BTD), self.mlp_axis)))
        x_BTD = x_BTD + self.mlp_project(hidden_BTf)
        # (B, T, D) to (B, D, H/stride, W/stride).
        output: Tensor = x_BTD.transpose(1, 2).reshape(shortcut_BCHW.shape).contiguous()
        return output


class ParallelCoAtNetHead(nn.Module):
    """Classifier of CoAtNet: its hidden layer by columns, the logits by rows, so that every rank has all of them."""

    def __init__(self, head: PoolingHead, axis: TensorAxis) -> None:
        super().__init__()
        self.axis, self.norm = axis, head.norm
        self.hidden = ColumnParallelLinear(head.hidden, axis)
        self.classifier = RowParallelLinear(head.classifier, axis)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """``(B, width, H, W)`` to ``(B, K)``."""
        pooled_BD = self.norm(x_BCHW.mean(dim=(2, 3)))
        logits_BK: Tensor = self.classifier(torch.tanh(self.hidden(enter(pooled_BD, self.axis))))
        return logits_BK


def _tokens(x_BCHW: Tensor) -> Tensor:
    return x_BCHW.flatten(2).transpose(1, 2)
