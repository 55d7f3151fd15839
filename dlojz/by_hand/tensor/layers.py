"""Tensor-parallel layers: linear by columns and by rows, embedding, cross-entropy, norms on part of the sequence.

Linear: a column-parallel layer, then anything that treats each feature (or head) alone, then a row-parallel layer
compute what the two whole layers would, with one sum over the ranks. "Columns" and "rows" are those of the paper's A in
Y = X A; torch keeps Aᵀ, of shape (out, in), so that columns are rows of `weight`.

    column   Y_i = X A_i          weight (out / n, in)    nothing is sent: X is whole, Y_i is this rank's features
    row      Y = Σ_i X_i A_i      weight (out, in / n)    the partial products are summed: one all-reduce

Embedding, split along the vocabulary: one rank knows each token's vector, the others give zeros, and the sum is the
vector. GPT's positions are added after the sum, once.

Cross-entropy of logits split along the vocabulary: gathered, the logits would be the largest tensor of many models
(B × T × V); here three numbers per token are sent instead.

    loss of a token = log Σ_v exp(logit_v − m) − (logit_target − m),  m the largest logit

Sequence parallelism: between two parallel regions each rank holds, normalises and adds T / n tokens only. The weights
of a norm, whole on every rank, get a gradient from each rank's tokens, and these are summed. The all-reduce at the
region's end becomes a reduce-scatter, the next region begins with an all-gather: the same bytes sent, and 1 / n of the
activations outside the regions.

Shape suffixes: B batch, T tokens, S = T / n; D in-features or width, F out-features; f = F / n, d = D / n of one rank;
V vocabulary, v = V / n words of one rank.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), §3, figure 3; Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), §4.2.2, for sequence parallelism.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.by_hand.tensor.axis import TensorAxis, gather_features, leave, own_slice, share_bounds, shared, take_tokens
from dlojz.models import gpt


class ColumnParallelLinear(nn.Module):
    """Linear layer of which each rank computes some outputs.

    Its input is whole on every rank and has passed `operators.enter`, once for all layers that read it.

    Args:
        gather_output: give all outputs to every rank (one all-gather of them), not each rank its own.
    """

    def __init__(self, linear: nn.Linear, axis: TensorAxis, *, gather_output: bool = False) -> None:
        super().__init__()
        self.axis, self.gather_output = axis, gather_output
        self.weight = own_slice(linear.weight, 0, axis)
        # A bias belongs to an output: it is split with them.
        self.bias = None if linear.bias is None else own_slice(linear.bias, 0, axis)
        self.split_dims = {"weight": 0} if self.bias is None else {"weight": 0, "bias": 0}

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, D)`` to ``(B, T, f)``, or ``(B, T, F)`` where the output is gathered."""
        y_BTf = F.linear(x_BTD, self.weight, self.bias)
        return gather_features(y_BTf, self.axis) if self.gather_output else y_BTf


class RowParallelLinear(nn.Module):
    """Linear layer of which each rank holds the weights of some inputs; it ends the region."""

    def __init__(self, linear: nn.Linear, axis: TensorAxis) -> None:
        super().__init__()
        self.axis = axis
        self.weight = own_slice(linear.weight, 1, axis)
        self.bias = linear.bias
        self.split_dims = {"weight": 1}

    def forward(self, x_BTd: Tensor) -> Tensor:
        """``(B, T, d)`` to ``(B, T, F)``; with sequence parallelism each rank keeps ``(B, S, F)`` of it."""
        # Who: the ranks of the axis. What: their partial products, (B, T, F). How much: its bytes, all-reduced (or
        # reduce-scattered).
        y_BTF = leave(F.linear(x_BTd, self.weight), self.axis)
        # After the sum: added by every rank before it, the bias would count n times.
        return y_BTF if self.bias is None else y_BTF + shared(self.bias, self.axis).to(y_BTF.dtype)


class VocabularyParallelEmbedding(nn.Module):
    """Embedding of which each rank holds the vectors of v consecutive words."""

    def __init__(self, embedding: nn.Embedding, axis: TensorAxis) -> None:
        super().__init__()
        self.axis = axis
        self.start, self.end = share_bounds(embedding.num_embeddings, axis.size, axis.rank)
        self.weight = own_slice(embedding.weight, 0, axis)
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
    """First block of GPT: the token vectors split along the vocabulary, the positions whole on every rank."""

    def __init__(self, embedding: gpt.Embedding, axis: TensorAxis) -> None:
        super().__init__()
        self.axis = axis
        self.token = VocabularyParallelEmbedding(embedding.token, axis)
        self.position = embedding.position

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """``(B, T)`` to ``(B, T, D)``, or to this rank's ``(B, S, D)``."""
        position_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        position_TD: Tensor = self.position(position_T)
        if self.axis.sequence_parallel:
            # In backward the ranks' parts of this gradient are gathered: each then has the whole table's.
            position_TD = take_tokens(position_TD.unsqueeze(0), self.axis).squeeze(0)
        x_BTD: Tensor = self.token(tokens_BT) + position_TD
        return x_BTD


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BTv: Tensor, targets_BT: Tensor, start: int, axis: TensorAxis) -> Tensor:
        # Who: the ranks of the axis. What: each token's largest logit, (B, T). How much: 4 bytes per token.
        largest_BT = axis.all_reduce(logits_BTv.amax(dim=-1), largest=True)
        # exp of numbers ≤ 0 cannot overflow, and the loss stays the same.
        shifted_BTv = logits_BTv - largest_BT.unsqueeze(-1)
        elsewhere_BT = (targets_BT < start) | (targets_BT >= start + logits_BTv.shape[-1])
        own_BT = (targets_BT - start).masked_fill(elsewhere_BT, 0)
        # (B, T): 0 on the ranks without the target, so that the sum over ranks is its logit.
        target_BT = shifted_BTv.gather(-1, own_BT.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere_BT, 0.0)
        # In place: (B, T, v) may be the largest tensor of the model.
        exp_BTv = shifted_BTv.exp_()
        # Who: the same. What: each token's sum of exponentials and the logit of its target, (2, B, T), added up. How
        # much: 8 bytes per token.
        sum_BT, target_BT = axis.all_reduce(torch.stack((exp_BTv.sum(dim=-1), target_BT))).unbind()
        probability_BTv = exp_BTv.div_(sum_BT.unsqueeze(-1))
        ctx.save_for_backward(probability_BTv, own_BT, elsewhere_BT)
        return (sum_BT.log() - target_BT).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        # Nothing is sent: each rank has the probabilities of its words. What forward kept becomes the gradient:
        # probability, less one at the target; a second pass through this graph would find it changed.
        gradient_BTv, own_BT, elsewhere_BT = ctx.saved_tensors
        # −1 where this rank has the target, else 0.
        minus_one_BT = elsewhere_BT.logical_not().to(gradient_BTv.dtype).neg()
        gradient_BTv = gradient_BTv.scatter_add(-1, own_BT.unsqueeze(-1), minus_one_BT.unsqueeze(-1))
        # Over the number of tokens, as the loss is their mean.
        return gradient_BTv.mul_(gradients[0] / own_BT.numel()), None, None, None


def vocabulary_parallel_cross_entropy(logits_BTv: Tensor, targets_BT: Tensor, start: int, axis: TensorAxis) -> Tensor:
    """Mean cross-entropy over all tokens, a scalar that every rank has.

    Args:
        logits_BTv: this rank's logits, fp32, `(B, T, v)`.
        targets_BT: the words to predict, integers below V, `(B, T)`, the same on all ranks.
        start: this rank's first word.
    """
    return cast(Tensor, _CrossEntropy.apply(logits_BTv, targets_BT, start, axis))


class SequenceNorm(nn.Module):
    """Layer norm, or root-mean-square norm, over this rank's tokens; all tokens without sequence parallelism."""

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm, axis: TensorAxis) -> None:
        super().__init__()
        self.axis, self.shape, self.eps = axis, norm.normalized_shape, norm.eps
        self.weight, self.bias = norm.weight, getattr(norm, "bias", None)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """``(B, S, D)`` to the same shape."""
        weight = shared(self.weight, self.axis)
        if self.bias is None:
            return F.rms_norm(x_BSD, self.shape, weight, self.eps)
        assert self.eps is not None
        return F.layer_norm(x_BSD, self.shape, weight, shared(self.bias, self.axis), self.eps)
