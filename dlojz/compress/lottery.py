"""The lottery ticket: a sparse network that learns as well as the dense one, if it starts from the right weights.

Layer 2. Invariant: rewinding to step k is beginning again from the same seed and putting the mask on after step k: the
weights there are those of the dense training to the bit, and so are the optimizer's moments, the learning rate and the
batches that follow.

    iterative   train, remove a share of what is left, rewind, and so on: the winning ticket
    one_shot    all removed at once after one dense training, then rewound
    new_weights the winning ticket's mask on the weights of another seed
    new_mask    the winning ticket's weights under a mask drawn at random, with as many in each layer

Source: Frankle and Carbin 2019 (arXiv 1803.03635), rewinding to the first weights; Frankle et al. 2020, "Linear mode
connectivity and the lottery ticket hypothesis" (arXiv 1912.05671), rewinding to step k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from dlojz.compress import masks
from dlojz.compress.fitting import Progress, Settings, accuracy, fit, new_model
from dlojz.compress.task import Task
from dlojz.schema import LabError
from dlojz.text import say

Kind = Literal["iterative", "one_shot", "new_weights", "new_mask"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_OTHER_SEED = 100_003


@dataclass(frozen=True)
class Race:
    """What all tickets of one seed have in common.

    Args:
        model_name: in the catalogue.
        task: what is learnt.
        settings: of each training.
        rewind_step: k, steps of the dense training that a ticket starts after; 0: its first weights.
        seed: of the first weights.
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
        last = self.settings.steps(self.task) - 1
        if not 0 <= self.rewind_step <= last:
            raise LabError(
                say(
                    en=f"rewind_step must be from 0 to {last}, a step before the end of the training, but "
                    f"{self.rewind_step} was received.",
                    fr=f"rewind_step va de 0 à {last}, un pas avant la fin de l’entraînement, mais {self.rewind_step} "
                    "a été reçu.",
                )
            )


@dataclass(frozen=True)
class Ticket:
    """One sparse network after its training.

    Args:
        kind: where its mask and its weights come from.
        seed: of the race.
        sparsity: share of the prunable weights that are zero, counted.
        accuracy: on the held-out samples, from 0 to 1.
    """

    kind: Kind
    seed: int
    sparsity: float
    accuracy: float


def sparsities(final: float, rounds: int) -> tuple[float, ...]:
    """Sparsity after each round, when every round removes the same share of what is left: 1 − (1 − s)^(r / n).

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
    if rounds < 1:
        raise LabError(
            say(
                en=f"rounds must be at least 1, but {rounds} was received.",
                fr=f"rounds doit être au moins égal à 1, mais {rounds} a été reçu.",
            )
        )
    return tuple(1 - (1 - final) ** (turn / rounds) for turn in range(1, rounds + 1))


def train_ticket(
    race: Race, ticket: masks.Masks | None, *, seed: int | None = None, progress: Progress | None = None
) -> nn.Module:
    """Train from the first weights, masked after `race.rewind_step` steps.

    Args:
        race: the training.
        ticket: what stays; None: everything, the dense training.
        seed: of the first weights, where they are not the race's.
        progress: told after each step.

    Returns:
        The trained model, its layers plain, with zeros.
    """
    model = new_model(race.model_name, race.task, race.seed if seed is None else seed)

    def put_on(step: int) -> None:
        if ticket is not None and step == race.rewind_step:
            masks.renew(model, ticket)

    masks.hold(model)
    try:
        put_on(0)
        fit(model, race.task, race.settings, after_step=put_on, progress=progress)
    finally:
        masks.release(model)
    return model


def winning_tickets(
    race: Race, levels: Sequence[float], progress: Progress | None = None, dense: nn.Module | None = None
) -> Iterator[tuple[masks.Masks, nn.Module]]:
    """Train and prune in turns; of each level the mask, and the model that was trained from the rewound weights.

    The first training is dense; what it and each later one end in says what goes next.

    Args:
        race: the training.
        levels: rising sparsities (see `sparsities`).
        progress: told after each step of all trainings.
        dense: what the dense training has ended in, where that is known already.
    """
    own = race.settings.steps(race.task)
    done = 0 if dense is not None else own
    total = done + own * len(levels)
    model = dense if dense is not None else train_ticket(race, None, progress=_shifted(progress, 0, total))
    for turn, level in enumerate(levels):
        ticket = masks.magnitude_masks(masks.weights(model), level, per_layer=race.per_layer)
        model = train_ticket(race, ticket, progress=_shifted(progress, done + turn * own, total))
        yield ticket, model


def random_mask_like(ticket: masks.Masks, seed: int) -> dict[str, Tensor]:
    """As many places open in each layer as in the ticket, but drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: mask.flatten()[torch.randperm(mask.numel(), generator=generator)].reshape(mask.shape)
        for name, mask in ticket.items()
    }


def run_race(
    race: Race, levels: Sequence[float], kinds: Sequence[Kind] = KINDS, progress: Progress | None = None
) -> list[Ticket]:
    """Every kind of ticket at every sparsity, from one seed.

    Args:
        race: the training.
        levels: rising sparsities.
        kinds: those that are compared; the winning ticket is always there, the others' masks come from it.
        progress: told after each step of all trainings.

    Returns:
        The tickets; first the dense network, as an iterative ticket of sparsity 0.
    """
    own = race.settings.steps(race.task)
    others = [kind for kind in kinds if kind != "iterative"]
    total = own * (1 + len(levels) * (1 + len(others)))
    dense = train_ticket(race, None, progress=_shifted(progress, 0, total))
    winners = list(winning_tickets(race, levels, _shifted(progress, own, total), dense))
    found = [_judged(race, "iterative", model) for model in (dense, *(model for _, model in winners))]
    done = own * (1 + len(levels))
    for level, (ticket, _) in zip(levels, winners, strict=True):
        for kind in others:
            seed = race.seed + _OTHER_SEED if kind == "new_weights" else None
            mask = _other_mask(kind, race, dense, level, ticket)
            model = train_ticket(race, mask, seed=seed, progress=_shifted(progress, done, total))
            found.append(_judged(race, kind, model))
            done += own
    return found


def _other_mask(kind: Kind, race: Race, dense: nn.Module, level: float, ticket: masks.Masks) -> masks.Masks:
    if kind == "one_shot":
        return masks.magnitude_masks(masks.weights(dense), level, per_layer=race.per_layer)
    return ticket if kind == "new_weights" else random_mask_like(ticket, race.seed + _OTHER_SEED)


def _judged(race: Race, kind: Kind, model: nn.Module) -> Ticket:
    removed, total = masks.removed_and_all(model)
    return Ticket(kind, race.seed, removed / total, accuracy(model, race.task))


def _shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Progress of one training among several."""
    return None if progress is None else lambda done, _: progress(before + done, total)
