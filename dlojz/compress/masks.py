"""Masks of pruned weights, chosen by magnitude.

A mask is boolean and true where a weight stays; `torch.nn.utils.prune` holds the others at zero while these learn. It
removes `pruned_count` weights exactly.

Source: magnitude as a criterion, per layer: Han et al. 2015 (arXiv 1506.02626).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from dlojz.base.language import refusal

Masks = Mapping[str, Tensor]
"""One mask for each layer, by the layer's name."""
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose weights are pruned; their biases, the norms, the embeddings and the positions are not."""


def check_sparsity(sparsity: float) -> float:
    """Check a sparsity, and return it.

    Raises:
        LabError: unless 0 ≤ sparsity < 1.
    """
    if not 0 <= sparsity < 1:  # false for NaN too
        raise refusal(
            en=f"sparsity is the share of the weights that are removed, from 0 to below 1, but {sparsity} was "
            "received; 0.8 keeps one weight in five.",
            fr=f"sparsity est la part des poids retirés, de 0 compris à 1 exclu, mais {sparsity} a été reçu ; 0.8 "
            "garde un poids sur cinq.",
        )
    return sparsity


def pruned_count(elements: int, sparsity: float) -> int:
    """Count the weights to remove: the nearest integer, as `torch.nn.utils.prune` rounds it.

    Example:
        >>> pruned_count(10, 0.75)
        8
    """
    return round(check_sparsity(sparsity) * elements)


def magnitude_mask(weight: Tensor, sparsity: float) -> Tensor:
    """Mask the smallest magnitudes of a weight; of equal ones, the first goes.

    Raises:
        LabError: unless 0 ≤ sparsity < 1.
    """
    magnitude = weight.detach().abs().flatten()
    mask = torch.ones_like(magnitude, dtype=torch.bool)
    mask[magnitude.argsort(stable=True)[: pruned_count(magnitude.numel(), sparsity)]] = False
    return mask.reshape(weight.shape)


def magnitude_masks(weights_by_name: Mapping[str, Tensor], sparsity: float, *, per_layer: bool = False) -> Masks:
    """Mask the smallest magnitudes of several weights.

    Args:
        sparsity: share of the weights that go.
        per_layer: each layer loses the same share; else the smallest of all layers together go, and a layer whose
            weights are small loses more than the others.

    Raises:
        LabError: unless 0 ≤ sparsity < 1.
    """
    if per_layer:
        return {name: magnitude_mask(weight, sparsity) for name, weight in weights_by_name.items()}
    # All layers as one row, so that one order of magnitudes holds for all.
    together = torch.cat([weight.detach().flatten() for weight in weights_by_name.values()])
    parts = magnitude_mask(together, sparsity).split([weight.numel() for weight in weights_by_name.values()])
    return {
        name: part.reshape(weight.shape) for (name, weight), part in zip(weights_by_name.items(), parts, strict=True)
    }


def prunable(model: nn.Module) -> dict[str, Any]:
    """Find the layers whose weights are pruned, by name; untyped, for masks add attributes to them."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LAYERS)}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Read the weights of these layers as the model computes with them now: masked ones are zero."""
    return {name: _effective(module) for name, module in prunable(model).items()}


def _effective(module: Any) -> Tensor:
    # `module.weight` of a masked layer is what its last forward pass computed: an update since then is not in it.
    weight: Tensor = module.weight_orig * module.weight_mask if prune.is_pruned(module) else module.weight
    return weight.detach()


def hold(model: nn.Module, masks: Masks | None = None) -> None:
    """Mask a model's layers in place: what is masked is zero in every forward pass and gets no gradient.

    Args:
        model: whose layers get `weight_orig` and `weight_mask` in the place of `weight`.
        masks: by layer, those without one stay as they are; None: all layers get one that removes nothing yet (see
            `renew`).
    """
    for name, module in prunable(model).items():
        if masks is None:
            prune.identity(module, "weight")  # a mask of ones
        elif name in masks:
            prune.custom_from_mask(module, "weight", masks[name].to(module.weight.dtype))


def renew(model: nn.Module, masks: Masks) -> None:
    """Replace the masks of a held model."""
    layers = prunable(model)
    for name, mask in masks.items():
        # In place: the layer multiplies by this very buffer in each forward pass.
        layers[name].weight_mask.copy_(mask)


def release(model: nn.Module) -> None:
    """Write the masks into the weights: plain layers again, with zeros."""
    for module in prunable(model).values():
        if prune.is_pruned(module):
            prune.remove(module, "weight")


def removed_and_all(model: nn.Module) -> tuple[int, int]:
    """Count the weights that are zero, and all weights, of the layers that are pruned."""
    layer_weights = weights(model).values()
    return sum(int((weight == 0).sum()) for weight in layer_weights), sum(weight.numel() for weight in layer_weights)
