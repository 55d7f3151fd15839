"""The Llama-like block, tensor-parallel: queries by heads, keys and values by their groups, the gated MLP by features.

Layer 2. Invariant: a rank holds whole groups, each with all the queries that read it, so that attention sends nothing;
query, key and value are three layers that read one entered tensor: one sum in backward, not three. Gate and expansion
are multiplied feature by feature: they are cut at the same places.

Shape suffixes: B batch, T tokens, D width, h width of all query heads of this rank, f its hidden features; S = T / n
tokens where the sequence is split.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), §3; Ainslie et al. 2023, "GQA" (arXiv 2305.13245), §2, for groups under
tensor parallelism.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.models.llama import LlamaBlock, attended_heads
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
        self.head_dim, self.rope_theta = whole.head_dim, whole.rope_theta
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
        entered_BTD = enter(self.norm1(x_BTD), self.heads_axis)
        projections = self.query, self.key, self.value
        heads_BTh = attended_heads(entered_BTD, projections, head_dim=self.head_dim, theta=self.rope_theta)
        x_BTD = x_BTD + self.attention_project(heads_BTh)
        entered_BTD = enter(self.norm2(x_BTD), self.mlp_axis)
        hidden_BTf = F.silu(self.mlp_gate(entered_BTD)) * self.mlp_expand(entered_BTD)
        output_BTD: Tensor = x_BTD + self.mlp_project(hidden_BTf)
        return output_BTD
