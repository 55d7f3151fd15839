"""Masks: which weights stay, chosen by magnitude, and held at zero by `torch.nn.utils.prune` while the others learn.

Layer 2. Invariant: a mask is boolean and true where a weight stays; the number of weights that it removes is
`pruned_count`, exactly, whatever the weights are.

Source: magnitude as a criterion, per layer: Han et al. 2015 (arXiv 1506.02626).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from dlojz.compress.fitting import Progress, Settings, fit
from dlojz.compress.task import Task
from dlojz.schema import LabError
from dlojz.text import say

Masks = Mapping[str, Tensor]
"""One mask for each layer, by the layer's name."""
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose weights are pruned; their biases, the norms, the embeddings and the positions are not."""


def check_sparsity(sparsity: float) -> float:
    """The sparsity itself, if there can be one.

    Raises:
        LabError: unless 0 ≤ sparsity < 1.
    """
    if not 0 <= sparsity < 1:  # false for NaN too
        raise LabError(
            say(
                en=f"sparsity is the share of the weights that are removed, from 0 to below 1, but {sparsity} was "
                "received; 0.8 keeps one weight in five.",
                fr=f"sparsity est la part des poids retirés, de 0 compris à 1 exclu, mais {sparsity} a été reçu ; 0.8 "
                "garde un poids sur cinq.",
            )
        )
    return sparsity


def pruned_count(elements: int, sparsity: float) -> int:
    """How many of so many weights go: the nearest integer, as `torch.nn.utils.prune` rounds it.

    Example:
        >>> pruned_count(10, 0.75)
        8
    """
    return round(check_sparsity(sparsity) * elements)


def magnitude_mask(weight: Tensor, sparsity: float) -> Tensor:
    """Mask of the weight's shape that removes the smallest magnitudes; of equal ones, the first goes.

    Raises:
        LabError: unless 0 ≤ sparsity < 1.
    """
    magnitude = weight.detach().abs().flatten()
    mask = torch.ones_like(magnitude, dtype=torch.bool)
    mask[magnitude.argsort(stable=True)[: pruned_count(magnitude.numel(), sparsity)]] = False
    return mask.reshape(weight.shape)


def magnitude_masks(weights_by_name: Mapping[str, Tensor], sparsity: float, *, per_layer: bool = False) -> Masks:
    """A mask for each weight.

    Args:
        weights_by_name: of the layers.
        sparsity: share of the weights that go.
        per_layer: each layer loses the same share; else the smallest of all layers together go, and a layer whose
            weights are small loses more than the others.

    Raises:
        LabError: unless 0 ≤ sparsity < 1.
    """
    if per_layer:
        return {name: magnitude_mask(weight, sparsity) for name, weight in weights_by_name.items()}
    together = torch.cat([weight.detach().flatten() for weight in weights_by_name.values()])
    parts = magnitude_mask(together, sparsity).split([weight.numel() for weight in weights_by_name.values()])
    return {
        name: part.reshape(weight.shape) for (name, weight), part in zip(weights_by_name.items(), parts, strict=True)
    }


def prunable(model: nn.Module) -> dict[str, Any]:
    """The layers whose weights are pruned, by name; untyped, for masks add attributes to them."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LAYERS)}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of these layers as the model computes with them now: masked ones are zero."""
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
            prune.identity(module, "weight")
        elif name in masks:
            prune.custom_from_mask(module, "weight", masks[name].to(module.weight.dtype))


def renew(model: nn.Module, masks: Masks) -> None:
    """Give a held model other masks."""
    layers = prunable(model)
    for name, mask in masks.items():
        layers[name].weight_mask.copy_(mask)


def release(model: nn.Module) -> None:
    """Write the masks into the weights: plain layers again, with zeros."""
    for module in prunable(model).values():
        if prune.is_pruned(module):
            prune.remove(module, "weight")


def fine_tune(
    model: nn.Module, masks: Masks, task: Task, settings: Settings, progress: Progress | None = None
) -> list[float]:
    """Train in place what the masks leave; the layers are plain again at the end, however it ends.

    Returns:
        The loss of every step.
    """
    hold(model, masks)
    try:
        return fit(model, task, settings, progress=progress)
    finally:
        release(model)


def removed_and_all(model: nn.Module) -> tuple[int, int]:
    """Weights that are zero, and weights there are, in the layers that are pruned."""
    found = weights(model).values()
    return sum(int((weight == 0).sum()) for weight in found), sum(weight.numel() for weight in found)
