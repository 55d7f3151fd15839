"""CoAtNet's attention block and its head, tensor-parallel.

Layer 2. Invariant: as in `transformer_block`; a head's learned position bias goes with the head. The shortcut and the
pooling treat whole channels on every rank.

Shape suffixes: B batch, C channels, H and W of the feature map, T = H × W tokens, D width, N heads of this rank, K
classes; f hidden features of this rank.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), §3; blocks: Dai et al. 2021 (arXiv 2106.04803), appendix A.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.models.blocks import merge_heads, split_heads
from dlojz.models.coatnet import AttentionBlock, Head, RelativeAttention
from dlojz.tensor.axis import ALONE, TensorAxis
from dlojz.tensor.linear import ColumnParallelLinear, RowParallelLinear
from dlojz.tensor.operators import enter
from dlojz.tensor.slicing import own_slice


class ParallelRelativeAttention(nn.Module):
    """A `RelativeAttention` of which each rank computes some heads, with their position biases.

    Args:
        whole: the module to split.
        axis: the ranks that share it.
    """

    def __init__(self, whole: RelativeAttention, axis: TensorAxis) -> None:
        super().__init__()
        self.axis, self.side, self.head_dim = axis, whole.side, whole.head_dim
        self.qkv = ColumnParallelLinear(whole.qkv, axis)
        self.position_bias = own_slice(whole.position_bias, 0, axis)
        self.project = RowParallelLinear(whole.project, axis)
        self.split_dims = {"position_bias": 0}

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, in_width)`` to ``(B, T, width)``, with T = side²."""
        q_BNTH, k_BNTH, v_BNTH = split_heads(self.qkv(enter(x_BTD, self.axis)), self.head_dim)
        bias_NTT = RelativeAttention.relative_bias(self).to(q_BNTH.dtype)  # type: ignore[arg-type]
        attended_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, attn_mask=bias_NTT)
        output_BTD: Tensor = self.project(merge_heads(attended_BNTH))
        return output_BTD


class ParallelAttentionBlock(nn.Module):
    """An `AttentionBlock` of which each rank computes some heads and some hidden features.

    Args:
        whole: the block to split.
        axis: the ranks that share it.
        attention: split the attention; else every rank computes all of it.
        mlp: the same for the MLP.
    """

    def __init__(self, whole: AttentionBlock, axis: TensorAxis, *, attention: bool = True, mlp: bool = True) -> None:
        super().__init__()
        self.mlp_axis = axis if mlp else ALONE
        self.shortcut, self.norm1, self.pool = whole.shortcut, whole.norm1, whole.pool
        self.attention = ParallelRelativeAttention(whole.attention, axis if attention else ALONE)
        self.norm2 = whole.norm2
        self.mlp_expand = ColumnParallelLinear(whole.mlp_expand, self.mlp_axis)
        self.mlp_project = RowParallelLinear(whole.mlp_project, self.mlp_axis)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """``(B, in_width, H, W)`` to ``(B, width, H/stride, W/stride)``."""
        shortcut_BCHW = self.shortcut(x_BCHW)
        normed_BCHW = self.norm1(x_BCHW.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x_BTD = _tokens(shortcut_BCHW) + self.attention(_tokens(self.pool(normed_BCHW)))
        hidden_BTf = F.gelu(self.mlp_expand(enter(self.norm2(x_BTD), self.mlp_axis)))
        x_BTD = x_BTD + self.mlp_project(hidden_BTf)
        output: Tensor = x_BTD.transpose(1, 2).reshape(shortcut_BCHW.shape).contiguous()
        return output


class ParallelCoAtNetHead(nn.Module):
    """CoAtNet's classifier: its hidden layer by columns, the logits by rows, so that every rank has all of them.

    Args:
        whole: the block to split.
        axis: the ranks that share it.
    """

    def __init__(self, whole: Head, axis: TensorAxis) -> None:
        super().__init__()
        self.axis, self.norm = axis, whole.norm
        self.hidden = ColumnParallelLinear(whole.hidden, axis)
        self.classifier = RowParallelLinear(whole.classifier, axis)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """``(B, width, H, W)`` to ``(B, K)``."""
        pooled_BD = self.norm(x_BCHW.mean(dim=(2, 3)))
        logits_BK: Tensor = self.classifier(torch.tanh(self.hidden(enter(pooled_BD, self.axis))))
        return logits_BK


def _tokens(x_BCHW: Tensor) -> Tensor:
    return x_BCHW.flatten(2).transpose(1, 2)
