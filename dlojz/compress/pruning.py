"""Pruning: by magnitude, gradually, as a lottery ticket, 2:4; and the bytes that a file keeps.

A file keeps a bit for each place and the values that stay, or 2:4 values and indices; its bytes are known from shapes
and sparsity alone. Rewinding to step k is training again from the same seed and masking after step k: weights there are
those of the dense training to the bit, and so are moments, learning rate and batches.

Source: Frankle and Carbin 2019 (arXiv 1803.03635), rewinding to the first weights; Frankle et al. 2020, "Linear mode
connectivity and the lottery ticket hypothesis" (arXiv 1912.05671), rewinding to step k.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dlojz.base.contract import check_at_least
from dlojz.base.errors import LabError
from dlojz.base.language import one_of, percent, refusal, say
from dlojz.compress import masks
from dlojz.compress import two_to_four as sparse_ste
from dlojz.compress.masks import CubicSchedule, GradualPruning
from dlojz.compress.method import Shrunk, Start
from dlojz.compress.permutations import permuted_for_2_of_4, together
from dlojz.compress.task import Progress, Settings, Task, fit, new_model, parameters, stored_weights
from dlojz.compress.two_to_four import linear_layers, masks_2_of_4, pack, packed_bytes

BITS, VALUES, INDICES = ".mask_bits", ".kept_values", ".kept_indices"


def pack_bits(mask: Tensor) -> Tensor:
    """Pack eight places of a mask into a byte, the first in the lowest bit; the last byte is filled up with zeros."""
    bits = mask.flatten().to(torch.uint8)
    bits = torch.cat((bits, bits.new_zeros(-bits.numel() % 8))).reshape(-1, 8)  # up to 7 zeros, to whole bytes
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(dim=1, dtype=torch.uint8)


def bitmask_tensors(model: nn.Module, layer_masks: masks.Masks) -> dict[str, Tensor]:
    """List what a file keeps of a masked model: of each pruned weight a mask and the values that stay."""
    stored = stored_weights(model)
    for layer, mask in layer_masks.items():
        weight = stored.pop(f"{layer}.weight")
        stored[layer + BITS] = pack_bits(mask)
        stored[layer + VALUES] = weight[mask]
    return stored


def two_to_four_tensors(model: nn.Module) -> dict[str, Tensor]:
    """List what a file keeps of a model whose dense layers are 2:4."""
    stored = stored_weights(model)
    for layer in linear_layers(model):
        packed = pack(stored.pop(f"{layer}.weight"))
        stored[layer + VALUES], stored[layer + INDICES] = packed.values_OK, packed.indices
    return stored


def bitmask_bytes(model: nn.Module, sparsity: float, *, per_layer: bool = False) -> int:
    """Predict the bytes of `bitmask_tensors`: a bit for each place, the values that stay, the rest.

    Args:
        model: of the shapes; its weights are not looked at.
        sparsity: share of the weights that go, from 0 to below 1.
        per_layer: the same share of each layer, else of all together.

    Raises:
        LabError: unless 0 ≤ sparsity < 1.
    """
    layer_weights = [module.weight for module in masks.prunable(model).values()]
    elements, size = [weight.numel() for weight in layer_weights], layer_weights[0].element_size()
    # Rounded once for each group, as the masks are chosen.
    groups = elements if per_layer else [sum(elements)]
    num_kept = sum(count - masks.pruned_count(count, sparsity) for count in groups)
    return _dense_bytes(model) - sum(elements) * size + sum((count + 7) // 8 for count in elements) + num_kept * size


def two_to_four_bytes(model: nn.Module) -> int:
    """Predict the bytes of `two_to_four_tensors` from shapes alone.

    Raises:
        LabError: if the inputs of a dense layer are no multiple of 4.
    """
    layer_weights = [layer.weight for layer in linear_layers(model).values()]
    dense = sum(weight.numel() * weight.element_size() for weight in layer_weights)
    return (
        _dense_bytes(model) - dense + sum(packed_bytes(weight.shape, weight.element_size()) for weight in layer_weights)
    )


def _dense_bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


@dataclass(frozen=True)
class Race:
    """Training that all tickets of one seed share.

    Args:
        model_name: in the catalogue.
        rewind_step: k, steps of the dense training that a ticket starts after; 0: its first weights.
        per_layer: whether each layer loses the same share.

    Raises:
        LabError: if the step is not one of the training.
    """

    model_name: str
    task: Task
    settings: Settings
    rewind_step: int = 0
    seed: int = 0
    per_layer: bool = False

    def __post_init__(self) -> None:
        last_step = self.settings.steps(self.task) - 1  # what a mask leaves is trained for a step at least
        if not 0 <= self.rewind_step <= last_step:
            raise refusal(
                en=f"rewind_step must be from 0 to {last_step}, a step before the end of the training, but "
                f"{self.rewind_step} was received.",
                fr=f"rewind_step va de 0 à {last_step}, un pas avant la fin de l’entraînement, mais {self.rewind_step} "
                "a été reçu.",
            )


def sparsities(final: float, rounds: int) -> tuple[float, ...]:
    """Compute the sparsity after each round, which removes the same share of what is left: 1 − (1 − s)^(r / n).

    Args:
        final: s, after the last round.
        rounds: n, at least 1.

    Raises:
        LabError: unless 0 ≤ final < 1 and there is a round.

    Source: Frankle and Carbin 2019 (arXiv 1803.03635), each round removes p^(1/n) of the weights that survive.

    Example:
        >>> [round(one, 3) for one in sparsities(0.936, 3)]
        [0.6, 0.84, 0.936]
    """
    masks.check_sparsity(final)
    check_at_least(1, rounds=rounds)
    return tuple(1 - (1 - final) ** (turn / rounds) for turn in range(1, rounds + 1))


def train_ticket(
    race: Race, ticket: masks.Masks | None, *, seed: int | None = None, progress: Progress | None = None
) -> nn.Module:
    """Train from the first weights, masked after `race.rewind_step` steps.

    Args:
        ticket: what stays; None: everything, the dense training.
        seed: of the first weights, where they are not the race's.

    Returns:
        The trained model, its layers plain, with zeros.
    """
    model = new_model(race.model_name, race.task, race.seed if seed is None else seed)

    def put_on(step: int) -> None:
        if ticket is not None and step == race.rewind_step:
            masks.renew(model, ticket)

    masks.hold(model)  # masks of ones, until the ticket is put on
    try:
        put_on(0)  # before the first update, for a rewind to the first weights
        fit(model, race.task, race.settings, after_step=put_on, progress=progress)
    finally:
        masks.release(model)
    return model


def winning_tickets(
    race: Race, levels: Sequence[float], progress: Progress | None = None, dense: nn.Module | None = None
) -> Iterator[tuple[masks.Masks, nn.Module]]:
    """Train and prune in turns; yield of each level the mask, and the model trained from the rewound weights.

    The first training is dense; what it and each later one end in says what goes next.

    Args:
        levels: rising sparsities (see `sparsities`).
        progress: told after each step of all trainings.
        dense: what the dense training has ended in, where that is known already.
    """
    training_steps = race.settings.steps(race.task)
    dense_steps = 0 if dense is not None else training_steps
    # The dense training, unless it is done, and one for each level.
    total = dense_steps + training_steps * len(levels)
    model = dense if dense is not None else train_ticket(race, None, progress=shifted(progress, 0, total))
    for turn, level in enumerate(levels):
        # Weights that are zero already are the smallest, and go again: masks only grow.
        ticket = masks.magnitude_masks(masks.weights(model), level, per_layer=race.per_layer)
        model = train_ticket(race, ticket, progress=shifted(progress, dense_steps + turn * training_steps, total))
        yield ticket, model


def shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Report the progress of one training among several."""
    return None if progress is None else lambda steps, _: progress(before + steps, total)


ORIGINS = ("teacher", "scratch")
COLLAPSED = 0.02
"""Share of its weights below which a layer is said to be left with nothing: see Tanaka et al. 2020
(arXiv 2006.05467), who name it layer collapse."""


def magnitude(start: Start, *, sparsity: float, epochs: int, learning_rate: float, per_layer: bool) -> Shrunk:
    """Remove the smallest magnitudes once, then train what is left.

    Raises:
        LabError: unless 0 ≤ sparsity < 1.
    """
    predicted = bitmask_bytes(start.teacher, sparsity, per_layer=per_layer)
    model = copy.deepcopy(start.teacher)
    layer_masks = masks.magnitude_masks(masks.weights(model), sparsity, per_layer=per_layer)
    masks.fine_tune(model, layer_masks, start.task, Settings(epochs, learning_rate, seed=start.seed), start.progress)
    return _unstructured(model, layer_masks, predicted)


def gradual(start: Start, *, sparsity: float, epochs: int, learning_rate: float, every: int, per_layer: bool) -> Shrunk:
    """Remove more and more along the cubic while training.

    Raises:
        LabError: unless 0 ≤ sparsity < 1, or if the masks are renewed less often than at every step.
    """
    predicted = bitmask_bytes(start.teacher, sparsity, per_layer=per_layer)
    settings = Settings(epochs, learning_rate, seed=start.seed)
    if every < 1:
        raise refusal(
            en=f"every is the number of steps between two renewals of the masks, at least 1, but {every} was received.",
            fr=f"every est le nombre de pas entre deux renouvellements des masques, au moins 1, mais {every} a été "
            "reçu.",
        )
    schedule = CubicSchedule.over(settings.steps(start.task), sparsity, every)
    pruning = GradualPruning(copy.deepcopy(start.teacher), schedule, per_layer)
    masks.hold(pruning.model)
    try:
        pruning(0)  # at step 0 the schedule removes nothing yet
        fit(pruning.model, start.task, settings, after_step=pruning, progress=start.progress)
        # Before `release` takes the masks away.
        layer_masks = {
            name: module.weight_mask.bool().clone() for name, module in masks.prunable(pruning.model).items()
        }
    finally:
        masks.release(pruning.model)
    return _unstructured(pruning.model, layer_masks, predicted)


def two_to_four(start: Start, *, epochs: int, learning_rate: float) -> Shrunk:
    """Remove the two smaller of every four weights of the dense layers, then train what is left.

    Raises:
        LabError: if the inputs of a dense layer are no multiple of 4.
    """
    return _held_2_of_4(copy.deepcopy(start.teacher), start, epochs, learning_rate)


def two_to_four_permuted(start: Start, *, epochs: int, learning_rate: float, sweeps: int) -> Shrunk:
    """Prune to 2:4 after permuting the dimensions so that 2:4 keeps more and the output stays.

    Raises:
        LabError: if the model is no ViT and no GPT, or the inputs of a dense layer are no multiple of 4.
    """
    model, kept_magnitudes = permuted_for_2_of_4(start.teacher, sweeps=sweeps)
    mean = together(kept_magnitudes)
    note = say(
        en=f"the order of the dimensions raises what 2:4 keeps of the magnitude from {percent(mean.before, 2)} to "
        f"{percent(mean.after, 2)}.",
        fr=f"l’ordre des dimensions fait passer de {percent(mean.before, 2)} à {percent(mean.after, 2)} la part de "
        "la magnitude que 2:4 garde.",
    )
    return _held_2_of_4(model, start, epochs, learning_rate, note)


def two_to_four_sr_ste(start: Start, *, epochs: int, learning_rate: float, decay: float, origin: str) -> Shrunk:
    """Train with masks that follow the weights, from the teacher's weights or from scratch.

    Raises:
        LabError: if the origin is unknown, the decay negative, or the inputs of a dense layer are no multiple of 4.
    """
    if origin not in ORIGINS:
        raise LabError(one_of("origin", origin, ORIGINS))
    predicted = two_to_four_bytes(start.teacher)
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
    """Find the winning ticket by pruning in rounds and rewinding, from scratch, without the teacher.

    Raises:
        LabError: unless 0 ≤ sparsity < 1 and there is a round, or if it rewinds to the end of the training or beyond.
    """
    levels = sparsities(sparsity, rounds)
    predicted = bitmask_bytes(start.teacher, levels[-1], per_layer=per_layer)  # the last level is the final sparsity
    settings = Settings(epochs, learning_rate, seed=start.seed)
    rewound = rewind_epochs * start.task.batches_per_epoch(settings.batch_size)
    race = Race(start.teacher_name, start.task, settings, rewound, start.seed, per_layer)
    ticket, model = list(winning_tickets(race, levels, start.progress))[-1]  # of the last level
    note = say(
        en=f"{rounds + 1} trainings of {epochs} epochs found this ticket, which learns from weights rewound to step "
        f"{race.rewind_step}.",
        fr=f"{rounds + 1} entraînements de {epochs} époques ont trouvé ce ticket, qui apprend à partir des poids "
        f"ramenés au pas {race.rewind_step}.",
    )
    return _unstructured(model, ticket, predicted, note)


def _unstructured(model: nn.Module, layer_masks: masks.Masks, predicted: int, *notes: str) -> Shrunk:
    removed = sum(int((~mask).sum()) for mask in layer_masks.values())
    dense = say(
        en="its zeros are multiplied like any other number: a dense layer is no faster for them.",
        fr="ses zéros sont multipliés comme tout autre nombre : une couche dense n’en est pas plus rapide.",
    )
    return _shrunk(
        model, bitmask_tensors(model, layer_masks), predicted, removed, (*notes, *_collapsed(layer_masks), dense)
    )


def _shrunk(
    model: nn.Module, stored: dict[str, Tensor], predicted: int, removed: int, notes: tuple[str, ...]
) -> Shrunk:
    nonzero_parameters = parameters(model) - removed
    return Shrunk(model.eval(), stored, predicted, nonzero_parameters, notes=notes, predicted_latency_ratio=1.0)


def _collapsed(layer_masks: masks.Masks) -> tuple[str, ...]:
    """A warning of layers that hardly have a weight left: pruned together, those whose weights are small lose all."""
    empty = [name for name, mask in layer_masks.items() if int(mask.sum()) < COLLAPSED * mask.numel()]
    if not empty:
        return ()
    worst = min(empty, key=lambda name: float(layer_masks[name].float().mean()))
    count, total = int(layer_masks[worst].sum()), layer_masks[worst].numel()
    return (
        say(
            en=f"{len(empty)} layer(s) keep less than {percent(COLLAPSED, 0)} of their weights: {worst} keeps {count} "
            f"of {total}.",
            fr=f"{len(empty)} couche(s) gardent moins de {percent(COLLAPSED, 0)} de leurs poids : {worst} en garde "
            f"{count} sur {total}.",
        ),
    )


def _held_2_of_4(model: nn.Module, start: Start, epochs: int, learning_rate: float, *notes: str) -> Shrunk:
    predicted = two_to_four_bytes(start.teacher)
    chosen = masks_2_of_4(model)
    settings = Settings(epochs, learning_rate, seed=start.seed)
    masks.fine_tune(model, chosen, start.task, settings, start.progress)
    return _two_to_four(model, predicted, *notes)


def _two_to_four(model: nn.Module, predicted: int, *notes: str) -> Shrunk:
    # After the training the two that are not zero are still the largest of their four.
    removed = sum(int((~mask).sum()) for mask in masks_2_of_4(model).values())
    hardware = say(
        en="2:4 is faster only where the hardware has units for it, such as NVIDIA GPUs since Ampere.",
        fr="2:4 n’est plus rapide que sur un matériel qui a des unités pour lui, comme les GPU NVIDIA depuis Ampere.",
    )
    return _shrunk(model, two_to_four_tensors(model), predicted, removed, (*notes, hardware))
