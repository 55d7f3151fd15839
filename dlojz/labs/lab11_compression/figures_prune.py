"""Figures and tables of lab 11 on pruning: accuracy by sparsity, winning tickets, gradual pruning, 2:4, permutations.

What is compared starts from the same weights and makes as many updates.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlojz.base.language import percent, say
from dlojz.base.table import Table, titles
from dlojz.display.canvas import LabFigure
from dlojz.display.style import LINE_STYLES
from dlojz.labs.kit.exercise import or_to_do
from dlojz.labs.kit.figures import Picture, answered, labelled, panel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dlojz.compress.task import Task

GlobalMasks = Callable[[list["Tensor"], float], Sequence["Tensor"]]
NextTicket = Callable[["Tensor", "Tensor", "Tensor", float], tuple["Tensor", "Tensor"]]
SPARSITIES, TUNED = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9), (0.7, 0.8, 0.9)
TUNING_EPOCHS, TUNING_RATE = 2, 5e-4
TICKET_MODEL, TICKET_EPOCHS, ROUNDS, PRUNE_RATE = "vit_mini", 4, 2, 0.6


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """Accuracy by sparsity.

    Args:
        at_once: without any training.
        tuned: after a fine-tuning with the masks held.
        by_layer: the same, where each layer has lost the same share.
    """

    at_once: dict[float, float]
    tuned: dict[float, float]
    by_layer: dict[float, float]

    def figure(self) -> LabFigure:
        """Draw accuracy over sparsity."""
        colon = say(en=":", fr=" :")
        told = ", ".join(f"{percent(one)}{colon} {percent(found)}" for one, found in self.at_once.items())
        axes = panel(
            8.0,
            3.6,
            f"Accuracy by share of zeros, at once: {told}.",
            f"Exactitude selon la part de zéros, d’un coup : {told}.",
        )
        names = (
            say(en="one threshold, no training", fr="un seul seuil, sans entraînement"),
            say(en=f"one threshold, {TUNING_EPOCHS} epochs", fr=f"un seul seuil, {TUNING_EPOCHS} époques"),
            say(en=f"layer by layer, {TUNING_EPOCHS} epochs", fr=f"couche par couche, {TUNING_EPOCHS} époques"),
        )
        for name, found, (color, line, marker) in zip(
            names, (self.at_once, self.tuned, self.by_layer), LINE_STYLES, strict=False
        ):
            accuracies = [100 * value for value in found.values()]
            axes.plot([100 * one for one in found], accuracies, color=color, linestyle=line, marker=marker, label=name)
        axes.set_ylim(0, 102)
        x = say(en="weights that are zero (%)", fr="poids nuls (%)")
        return labelled(axes, x, say(en="accuracy (%)", fr="exactitude (%)"), loc="lower left")

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, object]:
        return Picture(self.figure())._repr_mimebundle_()


@or_to_do
def pruned(global_masks: GlobalMasks, teacher: nn.Module, task: Task) -> Pruned:
    """Zero the smallest weights by the student's masks, then fine-tune what is left; all layers together, or each."""
    from dlojz.compress import masks
    from dlojz.compress.task import Settings, accuracy

    own = masks.weights(teacher)
    settings = Settings(epochs=TUNING_EPOCHS, learning_rate=TUNING_RATE)

    def with_masks(found: Sequence[Tensor], tuned: bool) -> float:
        named = {name: mask.bool() for name, mask in zip(own, found, strict=True)}
        model = copy.deepcopy(teacher)
        masks.hold(model, named)
        masks.release(model)
        if tuned:
            masks.fine_tune(model, named, task, settings)
        return accuracy(model, task)

    together = {one: list(global_masks(list(own.values()), one)) for one in SPARSITIES}
    each = {one: [global_masks([weight], one)[0] for weight in own.values()] for one in TUNED}
    return Pruned(
        at_once={one: with_masks(found, False) for one, found in together.items()},
        tuned={one: with_masks(together[one], True) for one in TUNED},
        by_layer={one: with_masks(found, True) for one, found in each.items()},
    )


@or_to_do
def who_keeps(global_masks: GlobalMasks, teacher: nn.Module, sparsities: Sequence[float] = (0.5, 0.8, 0.9)) -> Table:
    """Tabulate the share of weights that each kind of layer keeps under one threshold for all."""
    from dlojz.compress import masks

    own = masks.weights(teacher)
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in own)
    columns = [dict(zip(own, global_masks(list(own.values()), one), strict=True)) for one in sparsities]

    def share(kind: str, found: dict[str, Tensor]) -> str:
        chosen = [mask for name, mask in found.items() if name.rpartition(".")[2] == kind]
        return percent(sum(float(mask.sum()) for mask in chosen) / sum(mask.numel() for mask in chosen))

    rows = tuple((kind, *(share(kind, found) for found in columns)) for kind in kinds)
    head = (
        say(en="layer", fr="couche"),
        *(say(en=f"kept, {percent(one)} removed", fr=f"gardé, {percent(one)} enlevés") for one in sparsities),
    )
    return Table(head, rows)


@or_to_do
def spared(
    global_masks: GlobalMasks, teacher: nn.Module, task: Task, *, layer: str = "classifier", sparsity: float = 0.8
) -> Table:
    """Answer whether one threshold costs little after fine-tuning, with a kind of layer pruned and spared.

    Args:
        layer: what is spared, by the end of its name.
        sparsity: share of zeros, of those weights that are pruned.
    """
    from dlojz.compress import masks
    from dlojz.compress.task import Settings, accuracy

    def tuned(names: Sequence[str]) -> float:
        found = global_masks([own[name] for name in names], sparsity)
        named = {name: mask.bool() for name, mask in zip(names, found, strict=True)}
        model = copy.deepcopy(teacher)
        masks.fine_tune(model, named, task, Settings(epochs=TUNING_EPOCHS, learning_rate=TUNING_RATE))
        return accuracy(model, task)

    own, whole = masks.weights(teacher), accuracy(teacher, task)
    others = [name for name in own if name.rpartition(".")[2] != layer]
    zeros = percent(sparsity, 0)
    questions = (
        say(en=f"{zeros} of zeros, {layer} pruned too: less than 10 points lost",
            fr=f"{zeros} de zéros, {layer} compris : moins de 10 points perdus"),
        say(en=f"{zeros} of zeros, {layer} left dense: less than 10 points lost",
            fr=f"{zeros} de zéros, {layer} laissé dense : moins de 10 points perdus"),
    )  # fmt: skip
    return answered(
        (question, tuned(names) > whole - 0.1) for question, names in zip(questions, (list(own), others), strict=True)
    )


@or_to_do
def pruned_seen(found: Pruned) -> Table:
    """Answer how much accuracy is lost at several sparsities, without and with fine-tuning."""
    whole = found.at_once[0.0]
    questions = (
        (
            say(en="30% of zeros at once: less than 2 points lost", fr="30 % d’un coup : moins de 2 points perdus"),
            found.at_once[0.3] > whole - 0.02,
        ),
        (
            say(en="80% at once: less than 2 points lost", fr="80 % d’un coup : moins de 2 points perdus"),
            found.at_once[0.8] > whole - 0.02,
        ),
        (
            say(en="70%, fine-tuned: less than 5 points lost", fr="70 %, avec fine-tuning : moins de 5 points perdus"),
            found.tuned[0.7] > whole - 0.05,
        ),
        (
            say(en="80%: a common threshold does better", fr="80 % : un seuil commun fait mieux"),
            found.tuned[0.8] > found.by_layer[0.8],
        ),
    )
    return answered(questions)


@or_to_do
def tickets(
    next_ticket: NextTicket, task: Task, *, rounds: int = ROUNDS, rate: float = PRUNE_RATE, seed: int = 0
) -> Table:
    """Search a ticket by the student's function, then train it with its own weights, and with others."""
    import torch

    from dlojz.compress import masks
    from dlojz.compress.task import Settings, accuracy, fit, new_model

    settings = Settings(epochs=TICKET_EPOCHS, seed=seed)

    def trained(model: nn.Module, kept: dict[str, Tensor]) -> nn.Module:
        masks.hold(model, kept)
        fit(model, task, settings)
        masks.release(model)
        return model

    start = masks.weights(new_model(TICKET_MODEL, task, seed))
    start = {name: weight.clone() for name, weight in start.items() if weight.dim() == 2}
    kept = {name: torch.ones_like(weight) for name, weight in start.items()}
    first = next(iter(start))
    next_ticket(start[first], start[first], kept[first], rate)  # still to do? then nothing is trained
    dense = trained(new_model(TICKET_MODEL, task, seed), kept)
    rows = [(say(en="the whole network", fr="le réseau entier"), percent(0.0), percent(accuracy(dense, task)))]
    model = dense
    for number in range(rounds):
        after = masks.weights(model)
        kept = {name: next_ticket(start[name], after[name], kept[name], rate)[0] for name in start}
        model = trained(new_model(TICKET_MODEL, task, seed), kept)
        share = percent(1 - sum(float(mask.sum()) for mask in kept.values()) / sum(map(torch.numel, kept.values())))
        name = say(en=f"ticket, round {number + 1}", fr=f"ticket, tour {number + 1}")
        rows.append((name, share, percent(accuracy(model, task))))
    other = trained(new_model(TICKET_MODEL, task, seed + 1000), kept)
    rows.append(
        (say(en="same mask, other weights", fr="même masque, autres poids"), share, percent(accuracy(other, task)))
    )
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        name: mask.flatten()[torch.randperm(mask.numel(), generator=generator)].view_as(mask)
        for name, mask in kept.items()
    }
    chance = trained(new_model(TICKET_MODEL, task, seed), drawn)
    rows.append(
        (
            say(en="same weights, random mask", fr="mêmes poids, masque tiré au sort"),
            share,
            percent(accuracy(chance, task)),
        )
    )
    head = (say(en="network", fr="réseau"), say(en="zeros", fr="zéros"), say(en="accuracy", fr="exactitude"))
    return Table(head, tuple(rows))


TwoOfFour = Callable[["Tensor"], "Tensor"]
SrSte = Callable[["Tensor", "Tensor", "Tensor", float], "Tensor"]
Reorder = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], tuple["Tensor", "Tensor", "Tensor"]]
SPARSITY, EPOCHS, LONGER_EPOCHS, PATTERN_RATE, EVERY, PRUNED_SHARE = 0.9, 3, 9, 1e-3, 4, 0.5
DECAY, REFINING_EPOCHS, SWEEPS, TOLERANCE = 2e-4, 2, 2, 1e-4
SPEED_SPARSITIES, CROSSING_SPARSITIES = (0.0, 0.5, 0.9, 0.99), (0.5, 0.75, 0.9, 0.95, 0.99)


def gradual(teacher: nn.Module, task: Task, epochs: Sequence[int] = (EPOCHS, LONGER_EPOCHS)) -> Gradual:
    """Prune the teacher along the cubic of Zhu and Gupta while it trains; and at once, for as many epochs.

    Args:
        epochs: of the trainings, the first of which is drawn; masks are renewed during the same share of each.
    """
    from dlojz.compress import masks
    from dlojz.compress.masks import CubicSchedule, GradualPruning
    from dlojz.compress.task import Settings, accuracy, fit
    from dlojz.display.figures.compress_figures import schedule_figure

    pictures: list[Picture] = []
    found: dict[int, tuple[float, float]] = {}
    for count in epochs:
        settings = Settings(epochs=count, learning_rate=PATTERN_RATE)
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
    """Gradual pruning, shown as a figure.

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

    def table(self) -> Table:
        """Table with one row per number of epochs, below that of the teacher."""
        head = titles(
            en=f"training; {percent(SPARSITY)} of zeros, gradually; {percent(SPARSITY)} at once",
            fr=f"entraînement; {percent(SPARSITY)} de zéros, peu à peu; {percent(SPARSITY)} d’un coup",
        )
        rows = [(say(en="none (the teacher, without zeros)", fr="aucun (le professeur, sans zéro)"),
                 percent(self.teacher), percent(self.teacher))]  # fmt: skip
        for epochs, pair in self.found.items():
            rows.append((say(en=f"{epochs} epochs", fr=f"{epochs} époques"), percent(pair[0]), percent(pair[1])))
        return Table(head, tuple(rows))

    def seen(self) -> Table:
        """Answer whether gradual pruning loses to pruning at once, by number of epochs."""
        return answered(
            (
                say(
                    en=f"in {epochs} epochs, gradual pruning loses more than 2 points against pruning at once",
                    fr=f"en {epochs} époques, l’élagage graduel perd plus de 2 points face à l’élagage d’un coup",
                ),
                at_once - gradually > 0.02,
            )
            for epochs, (gradually, at_once) in self.found.items()
        )


@or_to_do
def refined(two_of_four: TwoOfFour, sr_ste: SrSte, teacher: nn.Module, task: Task) -> Table:
    """Compare 2:4 at once with trainings whose masks stay or follow the student's gradient."""
    import torch
    from torch.nn.utils import parametrize

    from dlojz.compress.task import Settings, accuracy, fit
    from dlojz.compress.two_to_four import linear_layers

    class Sparse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight_OI: Tensor, fixed_OI: Tensor | None) -> Tensor:
            mask_OI = two_of_four(weight_OI).to(weight_OI) if fixed_OI is None else fixed_OI
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

    weights = {name: layer.weight.detach() for name, layer in linear_layers(teacher).items()}
    first = {name: two_of_four(weight_OI).to(weight_OI) for name, weight_OI in weights.items()}
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
    head = titles(
        en="weights; accuracy; kept places that are new", fr="poids; exactitude; places gardées qui sont nouvelles"
    )
    return Table(head, tuple(rows))


def masked_ratio(
    *, outputs: int = 1024, inputs: int = 1024, rows: int = 64, device: str = "cpu", rounds: int = 60
) -> tuple[Picture, float]:
    """Time a dense layer with more and more zeros; return the figure, and the ratio with nine zeros of ten.

    The figure also has sparse rows (CSR), and the share of the multiplications that is left. `device` is `cpu` or
    `cuda`, `rounds` those of the timing.
    """
    from dlojz.compress.two_to_four import sparse_speed
    from dlojz.display.figures.compress_figures import speed_figure

    speeds = sparse_speed(outputs, inputs, rows, SPEED_SPARSITIES, rounds=rounds, device=device)
    (found,) = (one.ratio for one in speeds if one.form == "masked" and one.sparsity == 0.9)
    layer = f"{outputs} × {inputs}, {rows}"
    where = say(en=f"layer {layer} rows, {device.upper()}", fr=f"couche {layer} lignes, {device.upper()}")
    return Picture(speed_figure(speeds, where)), found


def break_even(rows: Sequence[int] = (1,), *, size: int = 1024, rounds: int = 60) -> Table:
    """Measure the share of zeros from which sparse rows (CSR) are as fast as the dense layer here.

    Args:
        rows: that the layer multiplies at once, one column each.
        size: outputs, and inputs, of the layer.
    """
    from dlojz.compress.two_to_four import crossing, sparse_speed

    found = [crossing(sparse_speed(size, size, one, CROSSING_SPARSITIES, rounds=rounds)) for one in rows]
    head = (say(en="rows multiplied at once", fr="lignes multipliées à la fois"), *(str(one) for one in rows))
    never = say(en="never", fr="jamais")
    cells = (never if one is None else percent(one, 0) for one in found)
    return Table(head, ((say(en="CSR gains time from", fr="CSR gagne du temps à partir de"), *cells),))


def same_outputs(teacher: nn.Module, both: nn.Module, alone: nn.Module, images: Tensor) -> Table:
    """Answer whether models whose columns of Q and K (`both`), or of Q `alone`, are permuted answer as before."""
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
def in_order(two_of_four: TwoOfFour, reorder: Reorder, teacher: nn.Module, images: Tensor) -> Table:
    """Tabulate for each MLP what 2:4 keeps of its second matrix, as it is and permuted, and whether outputs differ."""
    import torch

    from dlojz.compress.permutations import best_permutation
    from dlojz.models.blocks import TransformerBlock

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
    head = titles(
        en="block; magnitude kept by 2:4; in a better order; same output",
        fr="bloc; magnitude gardée par 2:4; dans un meilleur ordre; même sortie",
    )
    return Table(head, tuple(rows))
