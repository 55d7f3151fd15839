"""The transformer block of ViT and GPT, tensor-parallel: attention split by heads, the MLP by hidden features.

Layer 2. Invariant: each of the two halves is one parallel region, with one sum at its end in forward and one at its
beginning in backward. Heads do not see each other, and the activation function treats each feature alone: that is why
nothing has to be sent between the two matrices of a region.

    x ─ norm1 ─ enter ─ qkv (columns: whole heads) ─ attention ─ project (rows) leave ─ + ─
      ─ norm2 ─ enter ─ expand (columns) ─ GELU ─ project (rows) leave ─ + ─

Shape suffixes: B batch, T tokens, D width, N heads of this rank, H width of a head, e = N × 3 × H rows of its
projection, f its hidden features; S = T / n tokens where the sequence is split.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), §3, figure 3; Korthikanti et al. 2022
(arXiv 2205.05198), figure 5, for where sequence parallelism begins and ends.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.models import gpt, llama
from dlojz.models.blocks import merge_heads, split_heads
from dlojz.models.transformer import TransformerBlock
from dlojz.tensor.axis import ALONE, TensorAxis
from dlojz.tensor.linear import ColumnParallelLinear, RowParallelLinear
from dlojz.tensor.operators import enter
from dlojz.tensor.sequence import SequenceLayerNorm, SequenceRMSNorm
from dlojz.tensor.slicing import share_bounds


class ParallelTransformerBlock(nn.Module):
    """A `TransformerBlock` of which each rank computes some heads and some hidden features.

    Args:
        whole: the block to split; its norms are used as they are.
        axis: the ranks that share it.
        attention: split the attention; else every rank computes all of it.
        mlp: the same for the MLP.
    """

    def __init__(self, whole: TransformerBlock, axis: TensorAxis, *, attention: bool = True, mlp: bool = True) -> None:
        super().__init__()
        self.head_dim, self.causal, self.gelu = whole.head_dim, whole.causal, whole.gelu
        self.heads_axis = axis if attention else ALONE
        self.mlp_axis = axis if mlp else ALONE
        self.norm1 = SequenceLayerNorm(whole.norm1, axis)
        # The projection's rows are laid out head by head, (N, 3, H): a slice of them is a whole number of heads.
        self.qkv = ColumnParallelLinear(whole.qkv, self.heads_axis)
        self.attention_project = RowParallelLinear(whole.attention_project, self.heads_axis)
        self.norm2 = SequenceLayerNorm(whole.norm2, axis)
        self.mlp_expand = ColumnParallelLinear(whole.mlp_expand, self.mlp_axis)
        self.mlp_project = RowParallelLinear(whole.mlp_project, self.mlp_axis)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, D)`` to the same shape; with sequence parallelism ``(B, S, D)``."""
        qkv_BTe = self.qkv(enter(self.norm1(x_BTD), self.heads_axis))
        q_BNTH, k_BNTH, v_BNTH = split_heads(qkv_BTe, self.head_dim)  # N: the heads of this rank
        attended_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=self.causal)
        x_BTD = x_BTD + self.attention_project(merge_heads(attended_BNTH))
        hidden_BTf = F.gelu(self.mlp_expand(enter(self.norm2(x_BTD), self.mlp_axis)), approximate=self.gelu)
        output_BTD: Tensor = x_BTD + self.mlp_project(hidden_BTf)
        return output_BTD


class ParallelHead(nn.Module):
    """The last block of a text model: norm, then the logits of this rank's words (`cross_entropy` takes them so).

    Args:
        whole: the block to split.
        axis: the ranks that share the vocabulary.
    """

    def __init__(self, whole: gpt.Head | llama.Head, axis: TensorAxis) -> None:
        super().__init__()
        self.axis = axis
        self.start, _ = share_bounds(whole.output.out_features, axis.size, axis.rank)
        self.norm = (SequenceLayerNorm if isinstance(whole, gpt.Head) else SequenceRMSNorm)(whole.norm, axis)  # type: ignore[arg-type]
        self.output = ColumnParallelLinear(whole.output, axis)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, D)``, or ``(B, S, D)``, to ``(B, T, v)``."""
        logits_BTv: Tensor = self.output(enter(self.norm(x_BTD), self.axis))
        return logits_BTv
