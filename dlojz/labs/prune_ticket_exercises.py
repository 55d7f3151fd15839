"""Lab 11: one round of the search for a winning ticket: prune what has been trained, rewind what is left.

Layer 6 (labs). Invariant: an answer is held to the mask and to the weights with which the next training starts; what
was removed in earlier rounds is not zero in the trained weights, so that whoever forgets the mask is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dlojz.labs.compress_judging import masks_of, normal, several, shaped
from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake
from dlojz.labs.optimizer_trials import by_trial
from dlojz.labs.verdict import Said
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

Ticket = tuple["Tensor", "Tensor"]


def next_ticket(start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Ticket:
    """The mask of the next round, and the weights it starts from.

    Args:
        start: weights before any training.
        trained: weights after training with the mask.
        mask: 1 where a weight is still there.
        rate: share of the remaining weights that goes; round(rate × remaining) of them, the smallest when trained.

    Source: Frankle and Carbin 2019, "The Lottery Ticket Hypothesis" (arXiv 1803.03635): iterative pruning.
    """
    import torch

    remaining = int(mask.sum())
    sizes = torch.where(mask > 0, trained.abs(), torch.inf).flatten()
    new_mask = mask.clone().flatten()
    new_mask[sizes.argsort()[: round(rate * remaining)]] = 0.0
    new_mask = new_mask.view_as(mask)
    return new_mask, start * new_mask


def _cases() -> Iterator[tuple[Any, ...]]:
    import torch

    for seed, rows, removed, rate in ((1, 5, 10, 0.2), (2, 6, 20, 0.4), (3, 5, 0, 0.3)):
        start, trained = normal(seed, rows, 8), normal(seed + 10, rows, 8)
        mask = torch.ones(rows * 8)
        mask[torch.randperm(rows * 8, generator=torch.Generator().manual_seed(seed))[:removed]] = 0.0
        yield start, trained, mask.view(rows, 8), rate


def _trial(answer: Callable[..., Any], start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Tensor:
    import torch

    found, weights = several(answer(start.clone(), trained.clone(), mask.clone(), rate), "(mask, weights)", 2)
    # A name that is singular in both languages: it is the subject of the sentences that refuse a shape.
    names = say(en="The mask", fr="Le masque"), say(en="The tensor of weights", fr="Le tenseur des poids")
    read = masks_of(found, names[0], mask.shape), shaped(weights, names[1], mask.shape).double()
    return torch.cat([one.flatten() for one in read])


def _with_mask(choose: Callable[..., Tensor]) -> Callable[..., Ticket]:
    def way(start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Ticket:
        new_mask = choose(start, trained, mask, rate)
        return new_mask, start * new_mask

    return way


def _of_all(start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Tensor:
    """The rate of all weights: those removed before are lost from sight."""
    return next_ticket(start, trained, mask, min(rate * mask.numel() / float(mask.sum()), 1.0))[0]


def _masked_sizes(start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Tensor:
    """Zeros are the smallest: the same weights are removed again."""
    import torch

    sizes = (trained * mask).abs().flatten()
    found = torch.ones_like(sizes)
    found[sizes.argsort()[: round(rate * len(sizes))]] = 0.0
    return found.view_as(mask) * mask


def _forgets(start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Tensor:
    import torch

    return next_ticket(start, trained, torch.ones_like(mask), rate)[0]


def _by_start(start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Tensor:
    return next_ticket(start, start, mask, rate)[0]


def _largest_go(start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Tensor:
    return next_ticket(start, 1 / trained, mask, rate)[0]


def _not_rewound(start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Ticket:
    new_mask, _ = next_ticket(start, trained, mask, rate)
    return new_mask, trained * new_mask


def _not_masked(start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Ticket:
    return next_ticket(start, trained, mask, rate)[0], start


TICKET = Exercise(
    id="ticket",
    title=Said("the winning ticket", "le ticket gagnant"),
    judge=by_trial(
        _trial,
        next_ticket,
        cases=_cases,
        mistakes=(
            Mistake(
                _not_rewound,
                Said(
                    "The weights go on from where they were trained: that is fine-tuning. A ticket is rewound to its "
                    "weights before training, start * mask.",
                    "Les poids repartent de là où ils ont été entraînés : c’est du fine-tuning. Un ticket est ramené à "
                    "ses poids d’avant l’entraînement, start * mask.",
                ),
            ),
            Mistake(
                _not_masked,
                Said(
                    "The weights are rewound, but those removed are there again: multiply start by the new mask.",
                    "Les poids sont ramenés au départ, mais ceux qui ont été enlevés y sont de nouveau : multipliez "
                    "start par le nouveau masque.",
                ),
            ),
            Mistake(
                _with_mask(_of_all),
                Said(
                    "The rate is taken of all weights: it is a share of those that remain, mask.sum().",
                    "Le taux porte sur tous les poids : c’est une part de ceux qui restent, mask.sum().",
                ),
            ),
            Mistake(
                _with_mask(_masked_sizes),
                Said(
                    "Weights removed before count among the smallest, so the same ones are removed again: leave them "
                    "out of the choice, and take the share of those that remain.",
                    "Les poids déjà enlevés comptent parmi les plus petits, et ce sont les mêmes qu’on enlève encore : "
                    "écartez-les du choix, et prenez la part de ceux qui restent.",
                ),
            ),
            Mistake(
                _with_mask(_forgets),
                Said(
                    "The mask of the earlier rounds is forgotten: what was removed comes back.",
                    "Le masque des tours précédents est oublié : ce qui avait été enlevé revient.",
                ),
            ),
            Mistake(
                _with_mask(_by_start),
                Said(
                    "You compare the weights before training: what training has made of them tells which ones matter.",
                    "Vous comparez les poids d’avant l’entraînement : c’est ce que l’entraînement en a fait qui dit "
                    "lesquels comptent.",
                ),
            ),
            Mistake(
                _with_mask(_largest_go),
                Said("The largest weights go: the smallest ones must.",
                     "Ce sont les plus grands poids qui partent : il faut que ce soient les plus petits."),
            ),
        ),
    ),
    praise=Said(
        "Right: the trained weights choose the ticket, the untrained ones are what is drawn again.",
        "Exact : les poids entraînés choisissent le ticket, les poids de départ sont ceux que l’on rejoue.",
    ),
    hints=(
        Said(
            "Two different sets of weights serve for two things: trained to choose which go, start to begin again. "
            "How do you keep removed weights from being chosen once more?",
            "Deux jeux de poids servent à deux choses : trained pour choisir ceux qui partent, start pour recommencer. "
            "Comment éviter que des poids enlevés soient choisis de nouveau ?",
        ),
        Said(
            "sizes = torch.where(mask > 0, trained.abs(), torch.inf).flatten(): what is removed is never small. Then "
            "as in the global mask, with round(rate * mask.sum()) of them.",
            "sizes = torch.where(mask > 0, trained.abs(), torch.inf).flatten() : ce qui est enlevé n’est jamais petit. "
            "Puis comme pour le masque global, en enlevant round(rate * mask.sum()) poids.",
        ),
    ),
)  # fmt: skip
