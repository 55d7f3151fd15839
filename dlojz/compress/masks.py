"""Masks of pruned weights, chosen by magnitude, and the schedule by which they grow.

A mask is boolean and true where a weight stays; `torch.nn.utils.prune` holds the others at zero while these learn. It
removes `pruned_count` weights exactly. Masks of a gradual pruning only grow.

Source: magnitude as a criterion, per layer: Han et al. 2015 (arXiv 1506.02626). Gradual pruning: Zhu and Gupta 2017,
"To prune, or not to prune" (arXiv 1710.01878), equation 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from dlojz.base.contract import check_at_least
from dlojz.base.language import refusal
from dlojz.compress.task import Progress, Settings, Task, fit

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
    """Count the weights that are zero, and all weights, of the layers that are pruned."""
    layer_weights = weights(model).values()
    return sum(int((weight == 0).sum()) for weight in layer_weights), sum(weight.numel() for weight in layer_weights)


@dataclass(frozen=True)
class CubicSchedule:
    """Schedule of a gradual pruning: s_f − s_f (1 − t / (n Δt))³ from step 0 on, then constant.

    Source: Zhu and Gupta 2017, equation 1, for a dense start (s_i = 0) at once (t₀ = 0).

    Example:
        >>> schedule = CubicSchedule(0.8, every=10, renewals=4)
        >>> [round(schedule.sparsity(step), 4) for step in (0, 10, 20, 30, 40, 50)]
        [0.0, 0.4625, 0.7, 0.7875, 0.8, 0.8]

    Args:
        final: s_f, sparsity at the end, from 0 to below 1.
        every: Δt, steps from one renewal of the masks to the next, at least 1.
        renewals: n, how many after the first, at least 1.

    Raises:
        LabError: if one of them is out of its range.
    """

    final: float
    every: int = 10
    renewals: int = 10

    def __post_init__(self) -> None:
        check_sparsity(self.final)
        check_at_least(1, every=self.every, renewals=self.renewals)

    def sparsity(self, step: int) -> float:
        """Compute the sparsity wanted after so many updates."""
        return self.final - self.final * (1 - min(step / self.end, 1.0)) ** 3

    def renews(self, step: int) -> bool:
        """Tell whether the masks are renewed after this step."""
        return step <= self.end and step % self.every == 0

    @property
    def end(self) -> int:
        """Step of the last renewal."""
        return self.renewals * self.every

    @staticmethod
    def over(steps: int, final: float, interval_steps: int = 10, pruned_share: float = 0.35) -> CubicSchedule:
        """Make a schedule for a training of so many steps: pruned first, while the learning rate is high.

        Args:
            interval_steps: steps between renewals; fewer where the training is too short for one.
            pruned_share: of the steps, until the last renewal.
        """
        room = max(int(pruned_share * steps), 1)  # steps until the last renewal
        interval_steps = max(1, min(interval_steps, room))
        return CubicSchedule(final=final, every=interval_steps, renewals=max(room // interval_steps, 1))


@dataclass
class GradualPruning:
    """Renew the masks of a held model when the schedule says so; `fit` calls this after every step.

    Args:
        model: held by `masks.hold`.
        schedule: when, and to which sparsity.
        per_layer: see `masks.magnitude_masks`.
        measured: (step, share of zeros) after each renewal.
    """

    model: nn.Module
    schedule: CubicSchedule
    per_layer: bool = False
    measured: list[tuple[int, float]] = field(default_factory=list)

    def __call__(self, step: int) -> None:
        """Follow one update."""
        if not self.schedule.renews(step):
            return
        # Of the masked weights: what is zero is the smallest there is, and stays.
        sparsity, masked_weights = self.schedule.sparsity(step), weights(self.model)
        renew(self.model, magnitude_masks(masked_weights, sparsity, per_layer=self.per_layer))
        removed, total = removed_and_all(self.model)
        self.measured.append((step, removed / total))
