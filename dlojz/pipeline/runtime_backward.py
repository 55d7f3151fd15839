"""The two halves of a backward pass: first for the input, later for the weights.

Layer 2, loads torch. Invariant: both halves together leave the same gradients as one whole backward.

torch has the surgery on its autograd graph in `torch.distributed.pipelining`, in a module that is not public; it is
imported here and nowhere else. The graph is cut where the paths to the input and to the weights part; the first half
notes what arrives at the cuts, the second goes on from there, so that nothing is computed twice.

Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), §2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight


class Deferred(NamedTuple):
    """What the second half goes on from.

    Attributes:
        module: the stage.
        input_gradient: what the first half gave; None for a first stage, which owes nobody a gradient.
        cuts: where to go on from; None where the second half is the whole backward.
        output, gradient: what the backward starts from, where it is still to be done as a whole.
    """

    module: nn.Module
    input_gradient: Tensor | None
    cuts: list[dict[str, Any]] | None
    output: Tensor | None
    gradient: Tensor | None


def backward_for_input(module: nn.Module, entered: Tensor, output: Tensor, gradient: Tensor | None) -> Deferred:
    """First half: the gradient of the stage's input.

    Args:
        module: the stage.
        entered: its input; a first stage's needs no gradient, and then nothing is computed yet.
        output: its output, or the loss.
        gradient: gradient of the output; None for a loss.
    """
    if not entered.requires_grad:
        return Deferred(module, None, None, output, gradient)
    gradients = None if gradient is None else [gradient]
    made, cuts = stage_backward_input([output], gradients, [entered], module.parameters())
    return Deferred(module, made[0], cuts, None, None)


def backward_for_weights(deferred: Deferred) -> None:
    """Second half: add to the gradients of the stage's weights."""
    if deferred.cuts is not None:
        stage_backward_weight(deferred.module.parameters(), deferred.cuts)
    elif deferred.output is not None:
        torch.autograd.backward(deferred.output, deferred.gradient)
