"""Figures and tables of lab 11 on zeros in a pattern: gradual pruning, two of four trained, and in another order.

Layer 6 (labs), on `dlojz.viz`. Invariant: masks, gradients and orders come from the student's own functions, except for
the gradual pruning, which is the package's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
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
SPARSITY, EPOCHS, LONGER_EPOCHS, RATE, EVERY, PRUNED_SHARE = 0.9, 3, 9, 1e-3, 4, 0.5
DECAY, REFINING_EPOCHS, SWEEPS, TOLERANCE = 2e-4, 2, 2, 1e-4
SPEED_SPARSITIES, CROSSING_SPARSITIES = (0.0, 0.5, 0.9, 0.99), (0.5, 0.75, 0.9, 0.95, 0.99)


def gradual(teacher: nn.Module, task: Task, epochs: Sequence[int] = (EPOCHS, LONGER_EPOCHS)) -> Gradual:
    """Prune the teacher along the cubic of Zhu and Gupta while it goes on learning; and at once, for as many epochs.

    Args:
        teacher: trained; it stays as it is.
        task: what it was trained for.
        epochs: of the trainings, the first of which is drawn; masks are renewed during the same share of each.
    """
    from dlojz.compress import masks
    from dlojz.compress.fitting import Settings, accuracy, fit
    from dlojz.compress.gradual import CubicSchedule, GradualPruning
    from dlojz.viz.pruning_figure import schedule_figure

    pictures: list[Picture] = []
    found: dict[int, tuple[float, float]] = {}
    for count in epochs:
        settings = Settings(epochs=count, learning_rate=RATE)
        steps = settings.steps(task)
        schedule = CubicSchedule.over(steps, SPARSITY, every=EVERY, pruned_share=PRUNED_SHARE)
        model, other = copy.deepcopy(teacher), copy.deepcopy(teacher)
        masks.hold(model)
        pruning = GradualPruning(model, schedule, per_layer=True)
        losses = fit(model, task, settings, after_step=pruning)
        masks.release(model)
        masks.fine_tune(other, masks.magnitude_masks(masks.weights(other), SPARSITY, per_layer=True), task, settings)
        found[count] = (accuracy(model, task), accuracy(other, task))
        if not pictures:
            pictures.append(Picture(schedule_figure(schedule, pruning.measured, steps, losses)))
    return Gradual(pictures[0], accuracy(teacher, task), found)


class Gradual:
    """A gradual pruning as it went; shows its figure.

    Args:
        picture: sparsity and loss by step.
        teacher: accuracy without zeros.
        found: by number of epochs, accuracy with zeros that came one after the other, and with as many that came first
            of all.
    """

    def __init__(self, picture: Picture, teacher: float, found: Mapping[int, tuple[float, float]]) -> None:
        self.picture, self.teacher, self.found = picture, teacher, dict(found)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.picture._repr_mimebundle_()

    def table(self) -> Sheet:
        """One row per number of epochs, below that of the teacher."""
        head = (
            say(en="training", fr="entraînement"),
            say(en=f"{percent(SPARSITY)} of zeros, gradually", fr=f"{percent(SPARSITY)} de zéros, peu à peu"),
            say(en=f"{percent(SPARSITY)} at once", fr=f"{percent(SPARSITY)} d’un coup"),
        )
        rows = [(say(en="none (the teacher, without zeros)", fr="aucun (le professeur, sans zéro)"),
                 percent(self.teacher), percent(self.teacher))]  # fmt: skip
        for epochs, pair in self.found.items():
            rows.append((say(en=f"{epochs} epochs", fr=f"{epochs} époques"), percent(pair[0]), percent(pair[1])))
        return Sheet(head, tuple(rows))

    def seen(self) -> Sheet:
        """Yes or no: whether it costs to go gradually, by number of epochs."""
        return answered(
            (
                say(
                    en=f"in {epochs} epochs, gradually loses more than 2 points to at once",
                    fr=f"en {epochs} époques, peu à peu fait moins bien que d’un coup, de plus de 2 points",
                ),
                at_once - gradually > 0.02,
            )
            for epochs, (gradually, at_once) in self.found.items()
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
        say(en="kept places that are new", fr="places gardées qui sont nouvelles"),
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


def break_even(rows: Sequence[int] = (1,), *, size: int = 1024, rounds: int = 60) -> Sheet:
    """From which share of zeros on sparse rows (CSR) are as fast as the dense layer here, measured.

    Args:
        rows: that the layer multiplies at once, one column each.
        size: of the layer: its outputs, and its inputs.
        rounds: of the timing.
    """
    from dlojz.compress.dense_hardware import crossing, sparse_speed

    found = [crossing(sparse_speed(size, size, one, CROSSING_SPARSITIES, rounds=rounds)) for one in rows]
    head = (
        say(en="rows multiplied at once", fr="lignes multipliées à la fois"),
        *(str(one) for one in rows),
    )
    never = say(en="never", fr="jamais")
    cells = (never if one is None else say(en=f"{one:.0%}", fr=f"{100 * one:.0f} %") for one in found)
    return Sheet(head, ((say(en="CSR gains time from", fr="CSR gagne du temps à partir de"), *cells),))


def same_outputs(teacher: nn.Module, both: nn.Module, alone: nn.Module, images: Tensor) -> Sheet:
    """Yes or no: whether models with columns of Q and of K in another order answer as before.

    Args:
        teacher: as it was.
        both: columns of Q and of K moved in the same way.
        alone: those of Q only.
        images: that they are asked about.
    """
    import torch

    with torch.no_grad():
        same = [bool((model(images) - teacher(images)).abs().max() < TOLERANCE) for model in (both, alone)]
    return answered(
        zip(
            (
                say(
                    en="Q and K in the same new order: same output", fr="Q et K dans le même nouvel ordre : même sortie"
                ),
                say(en="Q alone in a new order: same output", fr="Q seul dans un nouvel ordre : même sortie"),
            ),
            same,
            strict=True,
        )
    )


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
        same = say(en="yes", fr="oui") if apart < TOLERANCE else say(en="no", fr="non")
        rows.append((str(number), percent(before), percent(kept(project.weight.detach())), same))
    head = (
        say(en="block", fr="bloc"),
        say(en="magnitude kept by 2:4", fr="magnitude gardée par 2:4"),
        say(en="in a better order", fr="dans un meilleur ordre"),
        say(en="same output", fr="même sortie"),
    )
    return Sheet(head, tuple(rows))
