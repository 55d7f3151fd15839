"""Pruning as methods of the catalogue: from a trained teacher to a model with zeros, and what a file keeps of it.

Layer 2. Invariant: the teacher is not changed; `predicted_bytes` is computed before anything is trained.
"""

from __future__ import annotations

import copy

from torch import nn

from dlojz.compress import lottery, masks, pruning_storage, sparse_ste
from dlojz.compress.fitting import Settings, fit, new_model
from dlojz.compress.gradual import CubicSchedule, GradualPruning
from dlojz.compress.measuring import parameters
from dlojz.compress.method import Shrunk, Start
from dlojz.compress.permutations import permuted_for_2_of_4, together
from dlojz.compress.two_to_four import masks_2_of_4
from dlojz.schema import LabError, one_of
from dlojz.text import say

ORIGINS = ("teacher", "scratch")
COLLAPSED = 0.02
"""Share of its weights below which a layer is said to be left with nothing: see Tanaka et al. 2020
(arXiv 2006.05467), who name it layer collapse."""


def magnitude(start: Start, *, sparsity: float, epochs: int, learning_rate: float, per_layer: bool) -> Shrunk:
    """Remove the smallest magnitudes once, then train what is left.

    Raises:
        LabError: unless 0 ≤ sparsity < 1.
    """
    predicted = pruning_storage.bitmask_bytes(start.teacher, sparsity, per_layer=per_layer)
    model = copy.deepcopy(start.teacher)
    kept = masks.magnitude_masks(masks.weights(model), sparsity, per_layer=per_layer)
    masks.fine_tune(model, kept, start.task, Settings(epochs, learning_rate, seed=start.seed), start.progress)
    return _unstructured(model, kept, predicted)


def gradual(start: Start, *, sparsity: float, epochs: int, learning_rate: float, every: int, per_layer: bool) -> Shrunk:
    """Remove more and more along the cubic while training.

    Raises:
        LabError: unless 0 ≤ sparsity < 1, or if the masks are renewed less often than at every step.
    """
    predicted = pruning_storage.bitmask_bytes(start.teacher, sparsity, per_layer=per_layer)
    settings = Settings(epochs, learning_rate, seed=start.seed)
    _check_every(every)
    schedule = CubicSchedule.over(settings.steps(start.task), sparsity, every)
    pruning = GradualPruning(copy.deepcopy(start.teacher), schedule, per_layer)
    masks.hold(pruning.model)
    try:
        pruning(0)
        fit(pruning.model, start.task, settings, after_step=pruning, progress=start.progress)
        kept = {name: module.weight_mask.bool().clone() for name, module in masks.prunable(pruning.model).items()}
    finally:
        masks.release(pruning.model)
    return _unstructured(pruning.model, kept, predicted)


def two_to_four(start: Start, *, epochs: int, learning_rate: float) -> Shrunk:
    """Remove the two smaller of every four weights of the dense layers, then train what is left.

    Raises:
        LabError: if the inputs of a dense layer are no multiple of 4.
    """
    return _held_2_of_4(copy.deepcopy(start.teacher), start, epochs, learning_rate)


def two_to_four_permuted(start: Start, *, epochs: int, learning_rate: float, sweeps: int) -> Shrunk:
    """The same, after an order of the dimensions that computes the same and of which 2:4 keeps more.

    Raises:
        LabError: if the model is no ViT and no GPT, or the inputs of a dense layer are no multiple of 4.
    """
    model, found = permuted_for_2_of_4(start.teacher, sweeps=sweeps)
    whole = together(found)
    note = say(
        en=f"the order of the dimensions raises what 2:4 keeps of the magnitude from {whole.before:.2%} to "
        f"{whole.after:.2%}.",
        fr=f"l’ordre des dimensions fait passer de {_percent(whole.before)} à {_percent(whole.after)} la part de la "
        "magnitude que 2:4 garde.",
    )
    return _held_2_of_4(model, start, epochs, learning_rate, note)


def two_to_four_sr_ste(start: Start, *, epochs: int, learning_rate: float, decay: float, origin: str) -> Shrunk:
    """Train with masks that follow the weights, from the teacher's weights or from scratch.

    Raises:
        LabError: if the origin is unknown, the decay negative, or the inputs of a dense layer are no multiple of 4.
    """
    if origin not in ORIGINS:
        raise LabError(one_of("origin", origin, ORIGINS))
    predicted = pruning_storage.two_to_four_bytes(start.teacher)
    from_teacher = origin == "teacher"
    model = copy.deepcopy(start.teacher) if from_teacher else new_model(start.teacher_name, start.task, start.seed)
    sparse_ste.attach(model, decay)
    try:
        fit(model, start.task, Settings(epochs, learning_rate, seed=start.seed), progress=start.progress)
    finally:
        sparse_ste.bake(model)
    return _two_to_four(model, predicted)


def lottery_ticket(
    start: Start,
    *,
    sparsity: float,
    rounds: int,
    epochs: int,
    learning_rate: float,
    rewind_epochs: int,
    per_layer: bool,
) -> Shrunk:
    """The winning ticket, found by pruning in rounds and rewinding; trained from scratch, without the teacher.

    Raises:
        LabError: unless 0 ≤ sparsity < 1 and there is a round, or if it rewinds to the end of the training or beyond.
    """
    levels = lottery.sparsities(sparsity, rounds)
    predicted = pruning_storage.bitmask_bytes(start.teacher, levels[-1], per_layer=per_layer)
    settings = Settings(epochs, learning_rate, seed=start.seed)
    race = lottery.Race(start.teacher_name, start.task, settings, seed=start.seed, per_layer=per_layer,
                        rewind_step=rewind_epochs * start.task.batches_per_epoch(settings.batch_size))  # fmt: skip
    kept, model = list(lottery.winning_tickets(race, levels, start.progress))[-1]
    note = say(
        en=f"{rounds + 1} trainings of {epochs} epochs found this ticket, which learns from weights rewound to step "
        f"{race.rewind_step}.",
        fr=f"{rounds + 1} entraînements de {epochs} époques ont trouvé ce ticket, qui apprend à partir des poids "
        f"ramenés au pas {race.rewind_step}.",
    )
    return _unstructured(model, kept, predicted, note)


def _unstructured(model: nn.Module, kept: masks.Masks, predicted: int, *notes: str) -> Shrunk:
    removed = sum(int((~mask).sum()) for mask in kept.values())
    dense = say(
        en="its zeros are multiplied like any other number: a dense layer is no faster for them.",
        fr="ses zéros sont multipliés comme tout autre nombre : une couche dense n’en est pas plus rapide.",
    )
    stored = pruning_storage.bitmask_tensors(model, kept)
    notes = (*notes, *_collapsed(kept), dense)
    return Shrunk(
        model.eval(), stored, predicted, parameters(model) - removed, notes=notes, predicted_latency_ratio=1.0
    )


def _collapsed(kept: masks.Masks) -> tuple[str, ...]:
    """A warning of layers that hardly have a weight left: pruned together, those whose weights are small lose all."""
    empty = [name for name, mask in kept.items() if int(mask.sum()) < COLLAPSED * mask.numel()]
    if not empty:
        return ()
    worst = min(empty, key=lambda name: float(kept[name].float().mean()))
    left, total = int(kept[worst].sum()), kept[worst].numel()
    return (
        say(
            en=f"{len(empty)} layer(s) keep less than {COLLAPSED:.0%} of their weights: {worst} keeps {left} of "
            f"{total}.",
            fr=f"{len(empty)} couche(s) gardent moins de {100 * COLLAPSED:.0f} % de leurs poids : {worst} en garde "
            f"{left} sur {total}.",
        ),
    )


def _held_2_of_4(model: nn.Module, start: Start, epochs: int, learning_rate: float, *notes: str) -> Shrunk:
    predicted = pruning_storage.two_to_four_bytes(start.teacher)
    chosen = masks_2_of_4(model)
    settings = Settings(epochs, learning_rate, seed=start.seed)
    masks.fine_tune(model, chosen, start.task, settings, start.progress)
    return _two_to_four(model, predicted, *notes)


def _two_to_four(model: nn.Module, predicted: int, *notes: str) -> Shrunk:
    removed = sum(int((~mask).sum()) for mask in masks_2_of_4(model).values())
    hardware = say(
        en="2:4 is faster only where the hardware has units for it, such as NVIDIA GPUs since Ampere.",
        fr="2:4 n’est plus rapide que sur un matériel qui a des unités pour lui, comme les GPU NVIDIA depuis Ampere.",
    )
    stored = pruning_storage.two_to_four_tensors(model)
    notes = (*notes, hardware)
    return Shrunk(
        model.eval(), stored, predicted, parameters(model) - removed, notes=notes, predicted_latency_ratio=1.0
    )


def _check_every(every: int) -> None:
    if every < 1:
        raise LabError(
            say(
                en=f"every is the number of steps between two renewals of the masks, at least 1, but {every} was "
                "received.",
                fr=f"every est le nombre de pas entre deux renouvellements des masques, au moins 1, mais {every} a été "
                "reçu.",
            )
        )


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %".replace(".", ",")
