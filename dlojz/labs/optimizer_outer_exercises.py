"""Lab 09: the outer step of DiLoCo on real ranks.

Layer 6 (labs). Invariant: what ranks should hold is computed in one process, round after round; the weights, the anchor
and the momentum are written in place.

Source: Douillard et al. 2023, "DiLoCo" (arXiv 2311.08105), algorithm 1; the outer optimizer is torch's SGD with
Nesterov momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.optimizer_trials import normal
from dlojz.labs.tensor_diagnosis import Fault, asked_for, by_shares
from dlojz.labs.verdict import Said
from dlojz.ranks.forks import RankAnswer
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

NUMEL, ROUNDS = 20, 3
RATE, MOMENTUM = 0.7, 0.9
_ANCHOR, _MOMENTUM = "anchor", "momentum"


def local_steps(rank: int, seed: int, number: int) -> Tensor:
    """How far a rank's own training takes its weights in one round, shape (NUMEL,)."""
    return normal(1000 * seed + 10 * rank + number, NUMEL) + 0.5


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    import torch

    anchor = normal(seed, NUMEL)
    weights, momentum = anchor.clone(), torch.zeros(NUMEL)
    given: dict[str, Any] = {}
    for number in range(ROUNDS):
        weights += local_steps(rank, seed, number)
        answer(weights, anchor, momentum, RATE, MOMENTUM)
        given[f"weights of round {number}"] = weights.clone()
    return {}, given | {_ANCHOR: anchor, _MOMENTUM: momentum}


def simulated(  # noqa: PLR0913 - each is one way to go wrong
    size: int,
    seed: int,
    *,
    sign: float = 1.0,
    add: bool = False,
    alone: bool = False,
    nesterov: bool = True,
    keep: bool = True,
    bring: bool = True,
    move_anchor: bool = True,
    average: bool = False,
) -> list[dict[str, Tensor]]:
    """What each rank holds after all rounds, computed in one process.

    Args:
        size: ranks.
        seed: of their weights.
        sign: of the outer gradient.
        add: whether the ranks' differences are added up rather than averaged.
        alone: whether each rank takes its own difference for all ranks'.
        nesterov: whether the step looks ahead.
        keep: whether the momentum is kept.
        bring: whether the new weights are written into `weights`.
        move_anchor: whether the new weights are written into `anchor`.
        average: whether the weights are averaged, and nothing else.
    """
    import torch

    anchors = [normal(seed, NUMEL) for _ in range(size)]
    weights = [anchor.clone() for anchor in anchors]
    momenta = [torch.zeros(NUMEL) for _ in range(size)]
    held: list[dict[str, Tensor]] = [{} for _ in range(size)]
    for number in range(ROUNDS):
        for rank in range(size):
            weights[rank] = weights[rank] + local_steps(rank, seed, number)
        gaps = torch.stack([anchor - own for anchor, own in zip(anchors, weights, strict=True)])
        mean = gaps.sum(0) if add else gaps.mean(0)
        for rank in range(size):
            gradient = sign * (gaps[rank] if alone else mean)
            momentum = MOMENTUM * momenta[rank] + gradient
            step = gradient + MOMENTUM * momentum if nesterov else momentum
            new = anchors[rank] - (mean if average else RATE * step)
            if keep and not average:
                momenta[rank] = momentum
            if move_anchor:
                anchors[rank] = new
            if bring:
                weights[rank] = new.clone()
            held[rank][f"weights of round {number}"] = weights[rank]
    for rank in range(size):
        held[rank] |= {_ANCHOR: anchors[rank], _MOMENTUM: momenta[rank]}
    return held


def _values(**ways: Any) -> Callable[[int, int, int], dict[str, Tensor]]:
    return lambda rank, size, seed: simulated(size, seed, **ways)[rank]


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """All values are right: has more been sent than the weights, once per round?"""
    if sum(asked_for(answers[0], "all_reduce")) > ROUNDS * NUMEL or asked_for(answers[0], "all_gather"):
        raise Wrong(
            say(
                en="The values are right, but more is sent than the weights, once per round, by one all-reduce: "
                "anchor and momentum are the same on all ranks already.",
                fr="Les valeurs sont justes, mais on envoie davantage que les poids, une fois par tour, en un "
                "all-reduce : anchor et momentum sont déjà les mêmes sur tous les rangs.",
            )
        )


OUTER_STEP = Exercise(
    id="outer-step",
    title=Said("the outer step of DiLoCo", "le pas extérieur de DiLoCo"),
    judge=by_shares(
        trial=_trial,
        expected=_values(),
        labels={
            **{
                f"weights of round {number}": Said(f"weights (round {number + 1})", f"weights (tour {number + 1})")
                for number in range(ROUNDS)
            },
            _ANCHOR: Said("anchor", "anchor"),
            _MOMENTUM: Said("momentum", "momentum"),
        },
        inspect=_inspect,
        faults=(
            Fault(
                _values(alone=True),
                Said(
                    "Every rank goes by its own difference: the ranks drift apart and never meet. The mean over the "
                    "ranks is missing (all-reduce, divided by their number).",
                    "Chaque rang suit sa propre différence : les rangs s’éloignent et ne se retrouvent jamais. Il "
                    "manque la moyenne sur les rangs (all-reduce, divisé par leur nombre).",
                ),
            ),
            Fault(
                _values(sign=-1.0),
                Said(
                    "You walk back: the outer gradient is anchor less the mean of the weights, for an optimizer steps "
                    "against the gradient.",
                    "Vous marchez à reculons : le gradient extérieur est anchor moins la moyenne des poids, car un "
                    "optimiseur avance à l’opposé du gradient.",
                ),
            ),
            Fault(
                _values(add=True),
                Said(
                    "The differences are added up over the ranks: the step is as many times too long as there are "
                    "ranks. Divide by their number.",
                    "Les différences sont additionnées sur les rangs : le pas est trop long d’un facteur égal au "
                    "nombre de rangs. Divisez par ce nombre.",
                ),
            ),
            Fault(
                _values(nesterov=False),
                Said(
                    "That is plain momentum; Nesterov's looks one step ahead: anchor −= rate · (gradient + decay · "
                    "momentum), with the momentum just renewed.",
                    "C’est le momentum ordinaire ; celui de Nesterov regarde un pas plus loin : anchor −= rate · "
                    "(gradient + decay · momentum), avec le momentum que l’on vient de renouveler.",
                ),
            ),
            Fault(
                _values(keep=False),
                Said(
                    "The first round is right, the next ones are not: momentum is not kept. Write into the tensor you "
                    "are given (mul_, add_): a new tensor of the same name is lost.",
                    "Le premier tour est juste, pas les suivants : momentum n’est pas gardé. Écrivez dans le tenseur "
                    "reçu (mul_, add_) : un nouveau tenseur du même nom est perdu.",
                ),
            ),
            Fault(
                _values(bring=False),
                Said(
                    "anchor moves, but weights stay where each rank has left them: all begin the next round from the "
                    "anchor, weights.copy_(anchor).",
                    "anchor avance, mais weights reste là où chaque rang l’a laissé : tous commencent le tour suivant "
                    "à partir de l’ancre, weights.copy_(anchor).",
                ),
            ),
            Fault(
                _values(move_anchor=False),
                Said(
                    "weights move, but anchor stays at the start: write the new weights there too, in place.",
                    "weights avance, mais anchor reste au départ : écrivez-y aussi les nouveaux poids, en place.",
                ),
            ),
            Fault(
                _values(average=True),
                Said(
                    "That is Local SGD: the weights are averaged, and that is all. DiLoCo takes the way gone as a "
                    "gradient, and makes a step with momentum of it.",
                    "C’est Local SGD : les poids sont moyennés, rien de plus. DiLoCo prend le chemin parcouru pour un "
                    "gradient, et en fait un pas avec momentum.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: one all-reduce for a whole round of local steps.",
        "Exact : un all-reduce pour tout un tour de pas locaux.",
    ),
    hints=(
        Said(
            "The way all have gone on average, turned round, is the gradient: anchor − mean(weights). Then a step of "
            "SGD with Nesterov momentum, from the anchor.",
            "Le chemin moyen parcouru, retourné, tient lieu de gradient : anchor − moyenne(weights). Puis un pas de "
            "SGD avec momentum de Nesterov, à partir de l’ancre.",
        ),
        Said(
            "gradient = anchor − weights, all-reduced and divided by size; momentum.mul_(decay).add_(gradient); "
            "anchor −= rate · (gradient + decay · momentum); weights.copy_(anchor).",
            "gradient = anchor − weights, après all-reduce et division par size ; momentum.mul_(decay)"
            ".add_(gradient) ; anchor −= rate · (gradient + decay · momentum) ; weights.copy_(anchor).",
        ),
    ),
)
