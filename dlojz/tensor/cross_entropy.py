"""Cross-entropy of logits that are split along the vocabulary: the logits are never gathered.

Layer 2. Invariant: equal to the cross-entropy of the whole logits. Gathered, the logits would be the largest tensor of
many models (B × T × V); here three numbers per token cross the wire instead.

    loss of a token = log Σ_v exp(logit_v − m) − (logit_target − m),  m the largest logit

Shape suffixes: B batch, T tokens, V vocabulary, v = V / n words of one rank.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), §3: fuse the output of the parallel GEMM with the
cross-entropy loss.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from dlojz.tensor.axis import TensorAxis


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BTv: Tensor, targets_BT: Tensor, start: int, axis: TensorAxis) -> Tensor:
        # Who: the ranks of the axis. What: each token's largest logit, (B, T). How much: 4 bytes per token.
        largest_BT = axis.all_reduce(logits_BTv.amax(dim=-1), largest=True)
        shifted_BTv = logits_BTv - largest_BT.unsqueeze(-1)
        elsewhere_BT = (targets_BT < start) | (targets_BT >= start + logits_BTv.shape[-1])
        own_BT = (targets_BT - start).masked_fill(elsewhere_BT, 0)
        target_BT = shifted_BTv.gather(-1, own_BT.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere_BT, 0.0)
        exp_BTv = shifted_BTv.exp_()
        # Who: the same. What: each token's sum of exponentials and the logit of its target, (2, B, T), added up. How
        # much: 8 bytes per token.
        sum_BT, target_BT = axis.all_reduce(torch.stack((exp_BTv.sum(dim=-1), target_BT))).unbind()
        probability_BTv = exp_BTv.div_(sum_BT.unsqueeze(-1))
        ctx.save_for_backward(probability_BTv, own_BT, elsewhere_BT)
        return (sum_BT.log() - target_BT).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        # Nothing is sent: each rank has the probabilities of its own words. What forward kept becomes the gradient:
        # probability, less one at the target; a second pass through this graph would find it changed.
        gradient_BTv, own_BT, elsewhere_BT = ctx.saved_tensors
        minus_one_BT = elsewhere_BT.logical_not().to(gradient_BTv.dtype).neg()
        gradient_BTv = gradient_BTv.scatter_add(-1, own_BT.unsqueeze(-1), minus_one_BT.unsqueeze(-1))
        return gradient_BTv.mul_(gradients[0] / own_BT.numel()), None, None, None


def vocabulary_parallel_cross_entropy(logits_BTv: Tensor, targets_BT: Tensor, start: int, axis: TensorAxis) -> Tensor:
    """Mean cross-entropy over all tokens, a scalar that every rank has.

    Args:
        logits_BTv: this rank's logits, fp32, `(B, T, v)`.
        targets_BT: the words to predict, integers below V, `(B, T)`, the same on all ranks.
        start: this rank's first word.
        axis: the ranks that share the vocabulary.
    """
    return cast(Tensor, _CrossEntropy.apply(logits_BTv, targets_BT, start, axis))
