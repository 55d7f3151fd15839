"""Lab 10: the loss that balances the experts, which the router must be able to learn from.

Layer 6 (labs). Invariant: an answer is held to its value, then to the gradient that it gives the router's logits: a
loss with the right value and no gradient balances nothing.

Shape suffixes: T tokens, E experts, K choices of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.rank_evidence import same
from dlojz.labs.verdict import Said
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor


def balance_loss(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    """E · Σ f_e · P_e: 1 where choices and probabilities are spread evenly, E where one expert has them all.

    f_e is the share of all choices, (T, K), that fall on expert e; P_e its mean probability over the tokens.

    Source: Fedus et al. 2021 (arXiv 2101.03961), the load-balancing loss, for K = 1; here all K choices count.
    """
    import torch.nn.functional as F

    experts = logits_TE.shape[1]
    share_E = F.one_hot(chosen_TK, experts).float().mean((0, 1))
    return experts * (share_E * logits_TE.softmax(-1).mean(0)).sum()


def _cases() -> Iterator[tuple[Any, ...]]:
    import torch

    generator = torch.Generator().manual_seed(13)
    for tokens, experts, k in ((8, 4, 1), (12, 6, 2), (10, 8, 2)):
        logits_TE = torch.randn(tokens, experts, generator=generator) + torch.linspace(2, 0, experts)
        yield logits_TE, logits_TE.topk(k).indices


def _parts(logits_TE: Tensor, chosen_TK: Tensor) -> tuple[Tensor, Tensor, int]:
    import torch.nn.functional as F

    experts = logits_TE.shape[1]
    return F.one_hot(chosen_TK, experts).float().mean((0, 1)), logits_TE.softmax(-1).mean(0), experts


def _without_experts(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    share_E, mean_E, _ = _parts(logits_TE, chosen_TK)
    return (share_E * mean_E).sum()


def _squared(which: int) -> Callable[..., Tensor]:
    def way(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        share_E, mean_E, experts = _parts(logits_TE, chosen_TK)
        return experts * ((share_E, mean_E)[which] ** 2).sum()

    return way


def _times_k(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    return chosen_TK.shape[1] * balance_loss(logits_TE, chosen_TK)


def _mean(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    return balance_loss(logits_TE, chosen_TK) / logits_TE.shape[1] ** 2


def _counts(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    return chosen_TK.numel() * balance_loss(logits_TE, chosen_TK)


def _of_logits(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    share_E, _, experts = _parts(logits_TE, chosen_TK)
    return experts * (share_E * logits_TE.mean(0)).sum()


def _first_only(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    return balance_loss(logits_TE, chosen_TK[:, :1])


_BY_VALUE = by_reference(
    balance_loss,
    cases=_cases,
    mistakes=(
        Mistake(
            _without_experts,
            Said(
                "The number of experts is missing: without it the value of a perfect balance, 1/E, depends on how many "
                "experts there are.",
                "Le nombre d’experts manque : sans lui, la valeur de l’équilibre parfait, 1/E, dépend du nombre "
                "d’experts.",
            ),
        ),
        Mistake(
            _mean,
            Said(
                "You take the mean over the experts; it is their sum, times E.",
                "Vous prenez la moyenne sur les experts ; c’est leur somme, multipliée par E.",
            ),
        ),
        Mistake(
            _squared(0),
            Said(
                "You square the shares of the choices: they are counts, through which no gradient passes; nothing "
                "would be learnt. Multiply each share by the mean probability.",
                "Vous élevez au carré les parts des choix : ce sont des comptes, par lesquels aucun gradient ne "
                "passe ; rien ne serait appris. Multipliez chaque part par la probabilité moyenne.",
            ),
        ),
        Mistake(
            _squared(1),
            Said(
                "You square the mean probabilities: that leaves out where the tokens really go. Multiply them by the "
                "shares of the choices.",
                "Vous élevez au carré les probabilités moyennes : c’est ignorer où vont vraiment les tokens. "
                "Multipliez-les par les parts des choix.",
            ),
        ),
        Mistake(
            _counts,
            Said(
                "f is a number of choices: divide it by how many there are, tokens × k, so that f adds up to 1.",
                "f est un nombre de choix : divisez-le par leur nombre total, tokens × k, pour que f ait pour somme 1.",
            ),
        ),
        Mistake(
            _times_k,
            Said(
                "f adds up to k: count the share of all choices, so that it adds up to 1.",
                "f a pour somme k : comptez la part de tous les choix, pour qu’elle ait pour somme 1.",
            ),
        ),
        Mistake(
            _first_only,
            Said(
                "You count first choices only; all k choices of a token weigh on the experts.",
                "Vous ne comptez que les premiers choix ; les k choix d’un token chargent tous les experts.",
            ),
        ),
        Mistake(
            _of_logits,
            Said(
                "P is a mean of logits: pass them through softmax first.",
                "P est une moyenne de logits : passez-les d’abord par softmax.",
            ),
        ),
    ),
)


def _judge(answer: Callable[..., Any]) -> None:
    _BY_VALUE(answer)
    for logits_TE, chosen_TK in _cases():
        found, wanted = (_gradient(way, logits_TE, chosen_TK) for way in (answer, balance_loss))
        if found is None or not bool(found.any()):
            raise Wrong(
                say(
                    en="The value is right, but it gives the router's logits no gradient: the probabilities must stay "
                    "linked to them (no detach, no item, no no_grad).",
                    fr="La valeur est juste, mais elle ne donne aucun gradient aux logits du routeur : les "
                    "probabilités doivent leur rester liées (ni detach, ni item, ni no_grad).",
                )
            )
        if wanted is None or not same(found, wanted):
            raise Wrong(
                say(
                    en="The value is right, but not its gradient: it comes through the mean probabilities, and through "
                    "nothing else.",
                    fr="La valeur est juste, mais pas son gradient : il passe par les probabilités moyennes, et par "
                    "rien d’autre.",
                )
            )


def _gradient(way: Callable[..., Any], logits_TE: Tensor, chosen_TK: Tensor) -> Tensor | None:
    leaf_TE = logits_TE.clone().requires_grad_()
    loss = way(leaf_TE, chosen_TK)
    if not loss.requires_grad:
        return None
    loss.backward()
    return leaf_TE.grad


BALANCE = Exercise(
    id="balance-loss",
    title=Said("the balance loss", "la perte d’équilibrage"),
    judge=_judge,
    praise=Said(
        "Right: counts say where the tokens go, probabilities carry the gradient; 1 at best, E at worst.",
        "Exact : les comptes disent où vont les tokens, les probabilités portent le gradient ; 1 au mieux, E au pire.",
    ),
    hints=(
        Said(
            "f: how often each expert is chosen, divided by the number of choices. P: the mean over the tokens of each "
            "expert's probability. Which of the two has a gradient?",
            "f : combien de fois chaque expert est choisi, divisé par le nombre de choix. P : la moyenne sur les "
            "tokens de la probabilité de chaque expert. Lequel des deux a un gradient ?",
        ),
        Said(
            "f = F.one_hot(chosen, experts).float().mean((0, 1)); P = logits.softmax(-1).mean(0); experts * (f * "
            "P).sum().",
            "f = F.one_hot(chosen, experts).float().mean((0, 1)) ; P = logits.softmax(-1).mean(0) ; experts * (f * "
            "P).sum().",
        ),
    ),
)
