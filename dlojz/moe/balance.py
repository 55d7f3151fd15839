"""Add the gradient of a loss to a backward pass that does not know of it.

Layer 0, loads torch. Invariant: the activation passes through unchanged, and the loss that a run reports is that of
its task alone; so any engine, schedule or checkpointing trains a mixture without hearing of its auxiliary losses.

Source: the same device as Megatron-LM's ``MoEAuxLossAutoScaler`` (megatron/core/transformer/moe/moe_utils.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        context.scale, context.like = scale, (loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = context.like
        return gradients[0], torch.full((), context.scale, dtype=dtype, device=device), None


def with_auxiliary_loss(x: Tensor, loss: Tensor, scale: float = 1.0) -> Tensor:
    """The activation as it is; when its gradient comes, `loss` gets one too, as if scale · loss had been added.

    Args:
        x: any tensor that the task's loss depends on.
        loss: a scalar.
        scale: what the engine multiplies the task's loss by: 1 / micro_batches where it averages them.
    """
    added: Tensor = _WithLoss.apply(x, loss, scale)
    return added
