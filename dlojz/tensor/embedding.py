"""A token embedding split along the vocabulary.

Layer 2. Invariant: exactly one rank knows each token's vector; the others give zeros, and the sum is the vector. With
positions (GPT), these are added after the sum, once.

Shape suffixes: B batch, T tokens, D width, V vocabulary; v = V / n words of one rank.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), §3, "the input embedding".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.models import gpt
from dlojz.tensor.axis import TensorAxis
from dlojz.tensor.operators import leave, take_tokens
from dlojz.tensor.slicing import own_slice, share_bounds


class VocabularyParallelEmbedding(nn.Module):
    """An embedding of which each rank holds the vectors of v consecutive words.

    Args:
        whole: the table to split, V × D.
        axis: the ranks that share it.
    """

    def __init__(self, whole: nn.Embedding, axis: TensorAxis) -> None:
        super().__init__()
        self.axis = axis
        self.start, self.end = share_bounds(whole.num_embeddings, axis.size, axis.rank)
        self.weight = own_slice(whole.weight, 0, axis)
        self.split_dims = {"weight": 0}

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """``(B, T)`` integers below V to ``(B, T, D)``; with sequence parallelism each rank keeps ``(B, S, D)``."""
        elsewhere_BT = (tokens_BT < self.start) | (tokens_BT >= self.end)
        # A word of another rank is looked up as this rank's first, then made zero: the table has no row for it.
        own_BT = (tokens_BT - self.start).masked_fill(elsewhere_BT, 0)
        x_BTD = F.embedding(own_BT, self.weight).masked_fill(elsewhere_BT.unsqueeze(-1), 0.0)
        # Who: the ranks of the axis. What: (B, T, D), added up. How much: its bytes.
        return leave(x_BTD, self.axis)


class ParallelEmbedding(nn.Module):
    """GPT's first block: the token vectors split along the vocabulary, the positions whole on every rank.

    Args:
        whole: the block to split.
        axis: the ranks that share it.
    """

    def __init__(self, whole: gpt.Embedding, axis: TensorAxis) -> None:
        super().__init__()
        self.axis = axis
        self.token = VocabularyParallelEmbedding(whole.token, axis)
        self.position = whole.position

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """``(B, T)`` to ``(B, T, D)``, or to this rank's ``(B, S, D)``."""
        position_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        position_TD: Tensor = self.position(position_T)
        if self.axis.sequence_parallel:
            # In backward the ranks' parts of this gradient are gathered: each then has the whole table's.
            position_TD = take_tokens(position_TD.unsqueeze(0), self.axis).squeeze(0)
        x_BTD: Tensor = self.token(tokens_BT) + position_TD
        return x_BTD
