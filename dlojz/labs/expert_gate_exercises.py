"""Lab 10: which experts see a token, and with what weight: the gate.

Layer 6 (labs). Invariant: an answer is held to the weight of every expert for every token; the order in which it names
the experts that it chooses is its own.

Shape suffixes: T tokens, E experts, K choices of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

Chosen = tuple["Tensor", "Tensor"]
"""Weights and numbers of the chosen experts, both (T, K)."""


def gate(logits_TE: Tensor, k: int) -> Chosen:
    """The k experts of highest probability of each token, and their weights, (T, K) each.

    With k = 1 the weight is the probability itself; with more, the probabilities of the chosen ones are divided by
    their sum.

    Source: Fedus et al. 2021 (arXiv 2101.03961), for k = 1; Lepikhin et al. 2020 (arXiv 2006.16668), for k = 2.
    """
    weights_TK, chosen_TK = logits_TE.softmax(-1).topk(k)
    return (weights_TK if k == 1 else weights_TK / weights_TK.sum(-1, keepdim=True)), chosen_TK


def _spread(choice: Any, experts: int, k: int, tokens: int) -> Tensor:
    """The weight of every expert for every token, (T, E), whatever the order of the choices.

    Raises:
        Wrong: if this is no pair of tensors (T, K), or an expert is none.
    """
    import torch

    if choice is None:
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return.",
                fr="Votre fonction ne renvoie rien : terminez-la par return.",
            )
        )
    if not isinstance(choice, tuple | list) or len(choice) != 2 or not all(map(torch.is_tensor, choice)):
        raise Wrong(
            say(
                en="A pair of tensors is expected: the weights, then the numbers of the experts.",
                fr="On attend deux tenseurs : les poids, puis les numéros des experts.",
            )
        )
    weights_TK, chosen_TK = choice
    if weights_TK.shape != (tokens, k) or chosen_TK.shape != (tokens, k):
        shapes = tuple(weights_TK.shape), tuple(chosen_TK.shape)
        raise Wrong(
            say(
                en=f"For {tokens} tokens and k = {k} the two tensors have the shapes {shapes[0]} and {shapes[1]}, but "
                f"({tokens}, {k}) is expected of both.",
                fr=f"Pour {tokens} tokens et k = {k}, les deux tenseurs ont les formes {shapes[0]} et {shapes[1]}, "
                f"mais ({tokens}, {k}) est attendue pour les deux.",
            )
        )
    if chosen_TK.is_floating_point() or int(chosen_TK.min()) < 0 or int(chosen_TK.max()) >= experts:
        raise Wrong(
            say(
                en=f"The second tensor must hold the numbers of experts, whole numbers from 0 to {experts - 1}.",
                fr=f"Le second tenseur doit contenir des numéros d’experts, des entiers de 0 à {experts - 1}.",
            )
        )
    return torch.zeros(tokens, experts).scatter_add(1, chosen_TK, weights_TK.float())


def _spreading(answer: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda *case: _spread(answer(*case), case[-2].shape[1], case[-1], len(case[-2]))


def by_weights(reference: Callable[..., Any], cases: Callable[[], Any], mistakes: tuple[Mistake, ...]) -> Any:
    """A judge of a gate: the weight that each expert has for each token, whatever the order of the choices."""
    judged = by_reference(
        _spreading(reference),
        cases=cases,
        mistakes=[Mistake(_spreading(mistake.way), mistake.says) for mistake in mistakes],
    )
    return lambda answer: judged(_spreading(answer))


def _cases() -> Iterator[tuple[Any, ...]]:
    import torch

    generator = torch.Generator().manual_seed(10)
    for tokens, experts, k in ((6, 4, 1), (9, 8, 2), (5, 6, 3)):
        yield 2 * torch.randn(tokens, experts, generator=generator), k


def _plain(logits_TE: Tensor, k: int) -> Chosen:
    weights_TK, chosen_TK = logits_TE.softmax(-1).topk(k)
    return weights_TK, chosen_TK


def _always_divided(logits_TE: Tensor, k: int) -> Chosen:
    weights_TK, chosen_TK = _plain(logits_TE, k)
    return weights_TK / weights_TK.sum(-1, keepdim=True), chosen_TK


def _over_tokens(logits_TE: Tensor, k: int) -> Chosen:
    weights_TK, chosen_TK = logits_TE.softmax(0).topk(k)
    return (weights_TK if k == 1 else weights_TK / weights_TK.sum(-1, keepdim=True)), chosen_TK


def _logits(logits_TE: Tensor, k: int) -> Chosen:
    weights_TK, chosen_TK = logits_TE.topk(k)
    return weights_TK, chosen_TK


def _lowest(logits_TE: Tensor, k: int) -> Chosen:
    weights_TK, chosen_TK = logits_TE.softmax(-1).topk(k, largest=False)
    return (weights_TK if k == 1 else weights_TK / weights_TK.sum(-1, keepdim=True)), chosen_TK


GATE = Exercise(
    id="gate",
    title=Said("the gate", "la porte"),
    judge=by_weights(
        gate,
        _cases,
        (
            Mistake(
                _always_divided,
                Said(
                    "The experts are the right ones; but with k = 1 your weight is always 1. Then the output does not "
                    "depend on the router's probabilities, and no gradient reaches the router: it would never learn. "
                    "With k = 1, keep the probability.",
                    "Les experts sont les bons ; mais avec k = 1 votre poids vaut toujours 1. La sortie ne dépend "
                    "alors plus des probabilités du routeur, et aucun gradient ne lui parvient : il n’apprendrait "
                    "jamais. Avec k = 1, gardez la probabilité.",
                ),
            ),
            Mistake(
                _plain,
                Said(
                    "The experts are the right ones, and k = 1 is right; with k ≥ 2, divide the weights of a token by "
                    "their sum, so that they add up to 1.",
                    "Les experts sont les bons, et k = 1 est juste ; avec k ≥ 2, divisez les poids d’un token par leur "
                    "somme, pour qu’elle vaille 1.",
                ),
            ),
            Mistake(
                _over_tokens,
                Said(
                    "The softmax runs over the tokens: it is each token that shares itself among the experts, so it "
                    "runs over the last dimension.",
                    "Le softmax porte sur les tokens : c’est chaque token qui se répartit entre les experts, donc il "
                    "porte sur la dernière dimension.",
                ),
            ),
            Mistake(
                _logits,
                Said(
                    "The weights are logits: pass them through softmax first, over all experts.",
                    "Les poids sont des logits : passez-les d’abord par softmax, sur tous les experts.",
                ),
            ),
            Mistake(
                _lowest,
                Said(
                    "You choose the experts of lowest probability.", "Vous choisissez les experts les moins probables."
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: every weight depends on the probabilities, and that is the only way by which the router learns.",
        "Exact : chaque poids dépend des probabilités, et c’est le seul chemin par lequel le routeur apprend.",
    ),
    hints=(
        Said(
            "First the probabilities of all experts, then the k largest of them. What would the weight of one single "
            "expert be, divided by the sum of the weights?",
            "D’abord les probabilités de tous les experts, puis les k plus grandes. Que vaudrait le poids d’un seul "
            "expert, divisé par la somme des poids ?",
        ),
        Said(
            "weights, chosen = logits.softmax(-1).topk(k); if k > 1, weights / weights.sum(-1, keepdim=True).",
            "weights, chosen = logits.softmax(-1).topk(k) ; si k > 1, weights / weights.sum(-1, keepdim=True).",
        ),
    ),
)
