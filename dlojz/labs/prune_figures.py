"""Figures and tables of lab 11 on pruning: accuracy by sparsity, winning tickets.

Layer 6 (labs), on `dlojz.viz`. Invariant: masks and tickets come from the student's own functions; whoever is
compared starts from the same weights and makes as many updates.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlojz.labs.compress_shown import answered
from dlojz.labs.pipeline_figures import Picture, Sheet, or_to_do, percent
from dlojz.labs.verdict import Verdict
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import LINE_STYLES

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dlojz.compress.task import Task

GlobalMasks = Callable[[list["Tensor"], float], Sequence["Tensor"]]
NextTicket = Callable[["Tensor", "Tensor", "Tensor", float], tuple["Tensor", "Tensor"]]
SPARSITIES, TUNED = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9), (0.7, 0.8, 0.9)
TUNING_EPOCHS, TUNING_RATE = 2, 5e-4
TICKET_MODEL, TICKET_EPOCHS, ROUNDS, RATE = "vit_mini", 4, 2, 0.6


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
        """Two lines over sparsity."""
        colon = say(en=":", fr=" :")
        told = ", ".join(f"{percent(one)}{colon} {percent(found)}" for one, found in self.at_once.items())
        alt = say(
            en=f"Accuracy by share of zeros, at once: {told}.",
            fr=f"Exactitude selon la part de zéros, d’un coup : {told}.",
        )
        figure = new_figure(8.0, 3.6, alt=alt)
        axes = figure.subplots()
        names = (
            say(en="one threshold, no training", fr="un seul seuil, sans entraînement"),
            say(en=f"one threshold, {TUNING_EPOCHS} epochs", fr=f"un seul seuil, {TUNING_EPOCHS} époques"),
            say(en=f"layer by layer, {TUNING_EPOCHS} epochs", fr=f"couche par couche, {TUNING_EPOCHS} époques"),
        )
        for name, found, (color, line, marker) in zip(
            names, (self.at_once, self.tuned, self.by_layer), LINE_STYLES, strict=False
        ):
            axes.plot([100 * one for one in found], [100 * value for value in found.values()], color=color,
                      linestyle=line, marker=marker, label=name)  # fmt: skip
        axes.set_ylim(0, 102)
        axes.set_xlabel(say(en="weights that are zero (%)", fr="poids nuls (%)"))
        axes.set_ylabel(say(en="accuracy (%)", fr="exactitude (%)"))
        axes.legend(frameon=False, loc="lower left")
        plain(axes)
        return finish(figure)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, object]:
        return Picture(self.figure())._repr_mimebundle_()


@or_to_do
def pruned(global_masks: GlobalMasks, teacher: nn.Module, task: Task) -> Pruned:
    """Zero the smallest weights by the student's masks, then fine-tune what is left; all layers together, or each."""
    from dlojz.compress import masks
    from dlojz.compress.fitting import Settings, accuracy

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
def who_keeps(global_masks: GlobalMasks, teacher: nn.Module, sparsities: Sequence[float] = (0.5, 0.8, 0.9)) -> Sheet:
    """Which share of its weights each kind of layer keeps under one threshold for all."""
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
    return Sheet(head, rows)


@or_to_do
def spared(
    global_masks: GlobalMasks, teacher: nn.Module, task: Task, *, layer: str = "classifier", sparsity: float = 0.8
) -> Sheet:
    """Yes or no: whether one threshold costs little after fine-tuning, with a kind of layer pruned and with it spared.

    Args:
        global_masks: the student's.
        teacher: trained; it stays as it is.
        task: what it was trained for.
        layer: what is spared, by the end of its name.
        sparsity: share of zeros, of those weights that are pruned.
    """
    from dlojz.compress import masks
    from dlojz.compress.fitting import Settings, accuracy

    def tuned(names: Sequence[str]) -> float:
        found = global_masks([own[name] for name in names], sparsity)
        named = {name: mask.bool() for name, mask in zip(names, found, strict=True)}
        model = copy.deepcopy(teacher)
        masks.fine_tune(model, named, task, Settings(epochs=TUNING_EPOCHS, learning_rate=TUNING_RATE))
        return accuracy(model, task)

    own, whole = masks.weights(teacher), accuracy(teacher, task)
    others = [name for name in own if name.rpartition(".")[2] != layer]
    zeros = say(en=f"{sparsity:.0%}", fr=f"{100 * sparsity:.0f} %")
    questions = (
        say(en=f"{zeros} of zeros, {layer} pruned too: less than 10 points lost",
            fr=f"{zeros} de zéros, {layer} compris : moins de 10 points perdus"),
        say(en=f"{zeros} of zeros, {layer} left dense: less than 10 points lost",
            fr=f"{zeros} de zéros, {layer} laissé dense : moins de 10 points perdus"),
    )  # fmt: skip
    return answered(
        (question, tuned(names) > whole - 0.1) for question, names in zip(questions, (list(own), others), strict=True)
    )


def pruned_seen(found: Pruned | Verdict) -> Sheet | Verdict:
    """Yes or no: how far one comes without training, and with a little."""
    if isinstance(found, Verdict):
        return found
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
def tickets(next_ticket: NextTicket, task: Task, *, rounds: int = ROUNDS, rate: float = RATE, seed: int = 0) -> Sheet:
    """Look for a ticket by the student's function, and draw it again: with its own weights, and with others."""
    import torch

    from dlojz.compress import masks
    from dlojz.compress.fitting import Settings, accuracy, fit, new_model

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
    return Sheet(head, tuple(rows))
