"""SR-STE: a 2:4 network whose mask follows the weights while they learn, and a pull on what the mask hides.

Layer 2. Invariant: the forward pass computes with W̃ = E ⊙ W, E the 2:4 mask of W at this step; every weight learns,
hidden ones too.

Source: Zhou et al. 2021, "Learning N:M fine-grained structured sparse neural networks from scratch"
(arXiv 2102.04010).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dlojz.compress.masks import Masks
from dlojz.compress.two_to_four import linear_layers, mask_2_of_4
from dlojz.schema import LabError
from dlojz.text import say

DECAY = 2e-4
"""λ_W of the paper, found for SGD with momentum; Adam divides it by the size of the gradients, as all it is given."""

_DENSE = ".parametrizations.weight.original"
"""What torch calls the dense weight that a parametrized layer learns."""


class SparseRefined(torch.autograd.Function):
    """W ↦ E ⊙ W forward; backward, what arrives passes straight through, and λ (1 − E) ⊙ W is added.

    With λ = 0 this is the plain straight-through estimator. The mask is no function that has a gradient: the estimator
    takes it for the identity, so that a hidden weight may grow and come back; the added term makes it small instead,
    and the mask settles.

    Source: Zhou et al. 2021 (arXiv 2102.04010): W ← W − γ (g(W̃) + λ (1 − E) ⊙ W).
    """

    @staticmethod
    def forward(ctx: Any, weight_OI: Tensor, decay: float) -> Tensor:
        """The masked weight, of the same shape."""
        mask_OI = mask_2_of_4(weight_OI)
        ctx.save_for_backward(weight_OI, mask_OI)
        ctx.decay = decay
        return weight_OI * mask_OI

    @staticmethod
    def backward(ctx: Any, gradient_OI: Tensor) -> tuple[Tensor, None]:
        """The gradient by the weight; none by λ."""
        weight_OI, mask_OI = ctx.saved_tensors
        return gradient_OI + ctx.decay * ~mask_OI * weight_OI, None


class TwoToFour(nn.Module):
    """The parametrization of one weight: what is learnt is dense, what is used is 2:4.

    Args:
        decay: λ, at least 0.
    """

    def __init__(self, decay: float = DECAY) -> None:
        super().__init__()
        self.decay = decay

    def forward(self, weight_OI: Tensor) -> Tensor:
        """``(O, I)`` to the same shape, with half of it zero."""
        masked_OI: Tensor = SparseRefined.apply(weight_OI, self.decay)
        return masked_OI


def attach(model: nn.Module, decay: float = DECAY) -> None:
    """Make every dense layer of a model 2:4 in place, learning with SR-STE.

    Raises:
        LabError: if the inputs of a layer are no multiple of 4, or the decay is negative or no number.
    """
    if not 0 <= decay < math.inf:
        raise LabError(
            say(
                en=f"decay pulls the hidden weights towards 0 and must be at least 0 (the paper's is {DECAY}), but "
                f"{decay} was received.",
                fr=f"decay tire vers 0 les poids cachés et doit être positif ou nul (celui de l’article vaut {DECAY}), "
                f"mais {decay} a été reçu.",
            )
        )
    for layer in linear_layers(model).values():
        parametrize.register_parametrization(layer, "weight", TwoToFour(decay))


def bake(model: nn.Module) -> None:
    """Write the masks into the weights: plain layers again, with zeros."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


def current_masks(model: nn.Module) -> dict[str, Tensor]:
    """The masks that a model with SR-STE computes with now, by layer."""
    return {
        name.removesuffix(_DENSE): mask_2_of_4(weight)
        for name, weight in model.named_parameters()
        if name.endswith(_DENSE)
    }


def divergence(before: Masks, after: Masks) -> int:
    """How many places of the masks have changed, those that opened and those that closed.

    Source: Zhou et al. 2021 (arXiv 2102.04010), sparse architecture divergence.
    """
    return sum(int((before[name] ^ after[name]).sum()) for name in before)
