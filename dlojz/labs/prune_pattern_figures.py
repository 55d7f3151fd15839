"""Figures and tables of lab 11 on zeros in a pattern: gradual pruning, two of four trained, and in another order.

Layer 6 (labs), on `dlojz.viz`. Invariant: masks, gradients and orders come from the student's own functions, except for
the gradual pruning, which is the package's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlojz.labs.compress_shown import answered
from dlojz.labs.pipeline_figures import Picture, Sheet, or_to_do, percent
from dlojz.labs.prune_figures import TUNING_RATE
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dlojz.compress.task import Task

TwoOfFour = Callable[["Tensor"], "Tensor"]
SrSte = Callable[["Tensor", "Tensor", "Tensor", float], "Tensor"]
Reorder = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], tuple["Tensor", "Tensor", "Tensor"]]
SPARSITY, EPOCHS, RATE, EVERY, PRUNED_SHARE = 0.9, 3, 1e-3, 4, 0.5
DECAY, REFINING_EPOCHS, SWEEPS = 2e-4, 2, 2
SPEED_SPARSITIES = (0.0, 0.5, 0.9, 0.99)


def gradual(teacher: nn.Module, task: Task) -> Gradual:
    """Prune the teacher along the cubic of Zhu and Gupta while it goes on learning; and at once, for as many epochs."""
    from dlojz.compress import masks
    from dlojz.compress.fitting import Settings, accuracy, fit
    from dlojz.compress.gradual import CubicSchedule, GradualPruning
    from dlojz.viz.pruning_figure import schedule_figure

    settings = Settings(epochs=EPOCHS, learning_rate=RATE)
    steps = settings.steps(task)
    schedule = CubicSchedule.over(steps, SPARSITY, every=EVERY, pruned_share=PRUNED_SHARE)
    model, other = copy.deepcopy(teacher), copy.deepcopy(teacher)
    masks.hold(model)
    pruning = GradualPruning(model, schedule, per_layer=True)
    losses = fit(model, task, settings, after_step=pruning)
    masks.release(model)
    masks.fine_tune(other, masks.magnitude_masks(masks.weights(other), SPARSITY, per_layer=True), task, settings)
    picture = Picture(schedule_figure(schedule, pruning.measured, steps, losses))
    return Gradual(picture, *(accuracy(one, task) for one in (teacher, model, other)))


class Gradual:
    """A gradual pruning as it went; shows its figure.

    Args:
        picture: sparsity and loss by step.
        teacher: accuracy without zeros.
        gradually: accuracy with the zeros that came one after the other.
        at_once: accuracy with as many zeros that came first of all.
    """

    def __init__(self, picture: Picture, teacher: float, gradually: float, at_once: float) -> None:
        self.picture, self.teacher, self.gradually, self.at_once = picture, teacher, gradually, at_once

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.picture._repr_mimebundle_()

    def table(self) -> Sheet:
        """The three accuracies."""
        head = (
            say(en="teacher", fr="professeur"),
            say(en=f"{percent(SPARSITY)} of zeros, gradually", fr=f"{percent(SPARSITY)} de zéros, peu à peu"),
            say(en="at once, as many epochs", fr="d’un coup, autant d’époques"),
        )
        return Sheet(head, (tuple(percent(one) for one in (self.teacher, self.gradually, self.at_once)),))

    def seen(self) -> Sheet:
        """Yes or no: whether it was worth waiting."""
        return answered(
            [
                (
                    say(en="gradually does better than at once", fr="peu à peu fait mieux que d’un coup"),
                    self.gradually > self.at_once,
                )
            ]
        )


@or_to_do
def refined(two_of_four: TwoOfFour, sr_ste: SrSte, teacher: nn.Module, task: Task) -> Sheet:
    """Two of four at once, then trained with masks that stay and with masks that follow the student's gradient."""
    import torch
    from torch.nn.utils import parametrize

    from dlojz.compress.fitting import Settings, accuracy, fit
    from dlojz.compress.two_to_four import linear_layers

    class Sparse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight_OI: Tensor, fixed_OI: Tensor | None) -> Tensor:
            mask_OI = two_of_four(weight_OI) if fixed_OI is None else fixed_OI
            ctx.save_for_backward(weight_OI, mask_OI)
            ctx.fixed = fixed_OI is not None
            return weight_OI * mask_OI

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            weight_OI, mask_OI = ctx.saved_tensors
            if ctx.fixed:
                return gradients[0] * mask_OI, None
            return sr_ste(weight_OI, mask_OI, gradients[0], DECAY), None

    class Masked(torch.nn.Module):
        def __init__(self, fixed_OI: Tensor | None) -> None:
            super().__init__()
            self.fixed_OI = fixed_OI

        def forward(self, weight_OI: Tensor) -> Tensor:
            found: Tensor = Sparse.apply(weight_OI, self.fixed_OI)
            return found

    first = {name: two_of_four(layer.weight.detach()) for name, layer in linear_layers(teacher).items()}
    some = next(iter(first.values()))
    sr_ste(some, some, some, DECAY)  # still to do? then nothing is trained
    rows = [(say(en="dense", fr="dense"), percent(accuracy(teacher, task)), "–")]
    for name, fixed, epochs in (
        (say(en="2:4 at once", fr="2:4 d’un coup"), True, 0),
        (say(en="2:4, mask that stays", fr="2:4, masque figé"), True, REFINING_EPOCHS),
        (say(en="2:4, SR-STE", fr="2:4, SR-STE"), False, REFINING_EPOCHS),
    ):
        model = copy.deepcopy(teacher)
        for place, layer in linear_layers(model).items():
            parametrize.register_parametrization(layer, "weight", Masked(first[place] if fixed else None))
        if epochs:
            fit(model, task, Settings(epochs=epochs, learning_rate=TUNING_RATE))
        now = {place: layer.weight.detach() != 0 for place, layer in linear_layers(model).items()}
        moved = sum(int((now[place] & (first[place] == 0)).sum()) for place in first)
        share = percent(moved / sum(float(mask.sum()) for mask in first.values()))
        rows.append((name, percent(accuracy(model, task)), share))
    head = (
        say(en="weights", fr="poids"),
        say(en="accuracy", fr="exactitude"),
        say(en="kept weights that are others now", fr="poids gardés qui ont changé"),
    )
    return Sheet(head, tuple(rows))


def masked_ratio(
    *, outputs: int = 1024, inputs: int = 1024, rows: int = 64, device: str = "cpu", rounds: int = 60
) -> tuple[Picture, float]:
    """A dense layer with more and more zeros, timed; its figure, and the time with nine zeros of ten over that without.

    Sparse rows (CSR) stand beside it, and the share of the multiplications that is left.

    Args:
        outputs: of the layer.
        inputs: of the layer.
        rows: that it multiplies.
        device: `cpu` or `cuda`.
        rounds: of the timing.
    """
    from dlojz.compress.dense_hardware import sparse_speed
    from dlojz.viz.pruning_figure_speed import speed_figure

    speeds = sparse_speed(outputs, inputs, rows, SPEED_SPARSITIES, rounds=rounds, device=device)
    (found,) = (one.ratio for one in speeds if one.form == "masked" and one.sparsity == 0.9)
    layer = f"{outputs} × {inputs}, {rows}"
    where = say(en=f"layer {layer} rows, {device.upper()}", fr=f"couche {layer} lignes, {device.upper()}")
    return Picture(speed_figure(speeds, where)), found


@or_to_do
def in_order(two_of_four: TwoOfFour, reorder: Reorder, teacher: nn.Module, images: Tensor) -> Sheet:
    """For each MLP: what 2:4 keeps of its second matrix as it is and in a better order, and whether outputs differ."""
    import torch

    from dlojz.compress.permutation_search import best_permutation
    from dlojz.models.transformer import TransformerBlock

    def kept(weight: Tensor) -> float:
        return float((two_of_four(weight) * weight.abs()).sum() / weight.abs().sum())

    model, rows = copy.deepcopy(teacher), []
    blocks = [one for one in model.modules() if isinstance(one, TransformerBlock)]
    for number, block in enumerate(blocks, start=1):
        expand, project = block.mlp_expand, block.mlp_project
        before = kept(project.weight.detach())
        order = best_permutation(project.weight.detach(), SWEEPS)
        moved = reorder(expand.weight.detach(), expand.bias.detach(), project.weight.detach(), order)
        with torch.no_grad():
            for own, new in zip((expand.weight, expand.bias, project.weight), moved, strict=True):
                own.copy_(new)
            apart = float((model(images) - teacher(images)).abs().max())
        same = say(en="yes", fr="oui") if apart < 1e-4 else say(en="no", fr="non")
        rows.append((str(number), percent(before), percent(kept(project.weight.detach())), same))
    head = (
        say(en="block", fr="bloc"),
        say(en="magnitude kept by 2:4", fr="grandeur gardée par 2:4"),
        say(en="in a better order", fr="dans un meilleur ordre"),
        say(en="same output", fr="même sortie"),
    )
    return Sheet(head, tuple(rows))
