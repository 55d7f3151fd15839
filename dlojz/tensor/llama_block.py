"""The Llama-like block, tensor-parallel: queries by heads, keys and values by their groups, the gated MLP by features.

Layer 2. Invariant: a rank holds whole groups, each with all the queries that read it, so that attention sends nothing;
query, key and value are three layers that read one entered tensor: one sum in backward, not three. Gate and expansion
are multiplied feature by feature: they are cut at the same places.

Shape suffixes: B batch, T tokens, D width, N query heads and G key-value heads of this rank, H width of a head, f its
hidden features; S = T / n tokens where the sequence is split.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), §3; Ainslie et al. 2023, "GQA" (arXiv 2305.13245), §2, for groups under
tensor parallelism.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.models.blocks import merge_heads
from dlojz.models.llama import LlamaBlock, rotate
from dlojz.tensor.axis import ALONE, TensorAxis
from dlojz.tensor.linear import ColumnParallelLinear, RowParallelLinear
from dlojz.tensor.operators import enter
from dlojz.tensor.sequence import SequenceRMSNorm


class ParallelLlamaBlock(nn.Module):
    """A `LlamaBlock` of which each rank computes some groups of heads and some hidden features.

    Args:
        whole: the block to split; its norms are used as they are.
        axis: the ranks that share it.
        attention: split the attention; else every rank computes all of it.
        mlp: the same for the MLP.
    """

    def __init__(self, whole: LlamaBlock, axis: TensorAxis, *, attention: bool = True, mlp: bool = True) -> None:
        super().__init__()
        self.head_dim, self.rope_theta, self.grouped = whole.head_dim, whole.rope_theta, whole.grouped
        self.heads_axis = axis if attention else ALONE
        self.mlp_axis = axis if mlp else ALONE
        self.norm1 = SequenceRMSNorm(whole.norm1, axis)
        self.query = ColumnParallelLinear(whole.query, self.heads_axis)
        self.key = ColumnParallelLinear(whole.key, self.heads_axis)
        self.value = ColumnParallelLinear(whole.value, self.heads_axis)
        self.attention_project = RowParallelLinear(whole.attention_project, self.heads_axis)
        self.norm2 = SequenceRMSNorm(whole.norm2, axis)
        self.mlp_gate = ColumnParallelLinear(whole.mlp_gate, self.mlp_axis)
        self.mlp_expand = ColumnParallelLinear(whole.mlp_expand, self.mlp_axis)
        self.mlp_project = RowParallelLinear(whole.mlp_project, self.mlp_axis)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, D)`` to the same shape; with sequence parallelism ``(B, S, D)``."""
        x_BTD = x_BTD + self._attend(enter(self.norm1(x_BTD), self.heads_axis))
        entered_BTD = enter(self.norm2(x_BTD), self.mlp_axis)
        hidden_BTf = F.silu(self.mlp_gate(entered_BTD)) * self.mlp_expand(entered_BTD)
        output_BTD: Tensor = x_BTD + self.mlp_project(hidden_BTf)
        return output_BTD

    def _attend(self, x_BTD: Tensor) -> Tensor:
        q_BNTH, k_BGTH, v_BGTH = (
            project(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended_BNTH = F.scaled_dot_product_attention(
            rotate(q_BNTH, self.rope_theta),
            rotate(k_BGTH, self.rope_theta),
            v_BGTH,
            is_causal=True,
            enable_gqa=self.grouped,
        )
        output_BTD: Tensor = self.attention_project(merge_heads(attended_BNTH))
        return output_BTD
