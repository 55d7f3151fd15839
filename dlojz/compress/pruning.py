"""Lottery tickets: train, prune by magnitude, rewind, and train again.

Rewinding to step k is training again from the same seed and masking after step k: weights there are those of the dense
training to the bit, and so are moments, learning rate and batches.

Source: Frankle and Carbin 2019 (arXiv 1803.03635), rewinding to the first weights; Frankle et al. 2020, "Linear mode
connectivity and the lottery ticket hypothesis" (arXiv 1912.05671), rewinding to step k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from dlojz.base.contract import check_at_least
from dlojz.base.language import refusal
from dlojz.compress import masks
from dlojz.compress.task import Progress, Settings, Task, fit, new_model


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
