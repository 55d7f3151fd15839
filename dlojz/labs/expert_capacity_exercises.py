"""Lab 10: how many tokens an expert takes, and at which place each token stands.

Layer 6 (labs). Invariant: first choices go before second ones, and among choices of one order tokens go in their order;
what finds no place is dropped.

Shape suffixes: T tokens, E experts, K choices of a token, N = K × T choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said

if TYPE_CHECKING:
    from torch import Tensor


def capacity(tokens: int, experts: int, k: int, factor: float) -> int:
    """Places of each expert: `factor` times its fair share of the choices, rounded up, and never more than the tokens.

    Source: Fedus et al. 2021 (arXiv 2101.03961), expert capacity, for k = 1; k times as many choices for more.
    """
    return min(tokens, math.ceil(factor * k * tokens / experts))


def places(chosen_TK: Tensor, experts: int, factor: float) -> Tensor:
    """The place of each choice within its expert, from 0, (T, K); -1 where the expert is full.

    Source: Lepikhin et al. 2020 (arXiv 2006.16668): first choices are placed before second ones.
    """
    import torch
    import torch.nn.functional as F

    tokens, k = chosen_TK.shape
    taken_NE = F.one_hot(chosen_TK.T.flatten(), experts)
    place_N = (taken_NE.cumsum(0) * taken_NE).sum(1) - 1
    place_N = torch.where(place_N < capacity(tokens, experts, k, factor), place_N, -1)
    return place_N.view(k, tokens).T


def _spoilt(way: str) -> Callable[..., Tensor]:
    """Places under a fault."""

    def spoilt(chosen_TK: Tensor, experts: int, factor: float) -> Tensor:
        import torch
        import torch.nn.functional as F

        tokens, k = chosen_TK.shape
        share = factor * k * tokens / experts
        room = {
            "floor": math.floor(share),
            "without k": math.ceil(share / k),
            "without factor": math.ceil(share / factor),
            "unlimited": tokens,
        }.get(way, math.ceil(share))
        if way == "each apart":
            columns = [_spoilt("right")(column.unsqueeze(1), experts, factor * k) for column in chosen_TK.T]
            return torch.cat(columns, 1)
        order_N = chosen_TK.flatten() if way == "by tokens" else chosen_TK.T.flatten()
        taken_NE = F.one_hot(order_N, experts)
        place_N = (taken_NE.cumsum(0) * taken_NE).sum(1) - int(way != "from 1")
        limit = room + int(way == "from 1")
        refused = room - 1 if way == "last place" else -1
        place_N = torch.where(place_N < limit, place_N, refused)
        return place_N.view(tokens, k) if way == "by tokens" else place_N.view(k, tokens).T

    return spoilt


def crowded() -> Iterator[tuple[Any, ...]]:
    """Choices, experts and capacity factors, such that some expert has no room for all."""
    import torch

    generator = torch.Generator().manual_seed(12)
    for tokens, experts, k, factor in ((12, 4, 1, 1.0), (13, 4, 2, 1.25), (11, 3, 2, 0.8)):
        logits_TE = torch.randn(tokens, experts, generator=generator) + torch.linspace(1.5, 0, experts)
        yield logits_TE.topk(k).indices, experts, factor


PLACES = Exercise(
    id="places",
    title=Said("capacity and places", "capacité et places"),
    judge=by_reference(
        places,
        cases=crowded,
        mistakes=(
            Mistake(
                _spoilt("by tokens"),
                Said(
                    "The capacity is right, but a token's second choice goes before the first choices of the tokens "
                    "that follow: place all first choices, then all second ones. A second choice that is lost costs "
                    "less.",
                    "La capacité est juste, mais le second choix d’un token passe avant les premiers choix des tokens "
                    "suivants : placez tous les premiers choix, puis tous les seconds. Perdre un second choix coûte "
                    "moins cher.",
                ),
            ),
            Mistake(
                _spoilt("each apart"),
                Said(
                    "Second choices are counted from 0 again: two tokens then stand at the same place of an expert. Go "
                    "on counting after the first choices.",
                    "Les seconds choix sont comptés à nouveau à partir de 0 : deux tokens occupent alors la même place "
                    "d’un expert. Continuez à compter après les premiers choix.",
                ),
            ),
            Mistake(
                _spoilt("floor"),
                Said(
                    "The capacity is rounded down: round it up (math.ceil).",
                    "La capacité est arrondie vers le bas : arrondissez-la vers le haut (math.ceil).",
                ),
            ),
            Mistake(
                _spoilt("without k"),
                Said(
                    "The capacity forgets k: there are k × tokens choices to share out among the experts.",
                    "La capacité oublie k : ce sont k × tokens choix qu’il faut répartir entre les experts.",
                ),
            ),
            Mistake(
                _spoilt("without factor"),
                Said(
                    "The capacity factor is left out: multiply the fair share by it, before rounding.",
                    "Le facteur de capacité est oublié : multipliez-en la juste part, avant d’arrondir.",
                ),
            ),
            Mistake(
                _spoilt("unlimited"),
                Said(
                    "The places are right, but none is refused: a place that is not smaller than the capacity is -1.",
                    "Les places sont justes, mais aucune n’est refusée : une place qui n’est pas inférieure à la "
                    "capacité devient -1.",
                ),
            ),
            Mistake(
                _spoilt("last place"),
                Said(
                    "The tokens that are too many all stand at the last place, one upon the other: they are dropped, "
                    "which is written -1.",
                    "Les tokens en trop se retrouvent tous à la dernière place, les uns sur les autres : ils sont "
                    "abandonnés, ce qui s’écrit -1.",
                ),
            ),
            Mistake(
                _spoilt("from 1"),
                Said("The places begin at 1: they begin at 0.", "Les places commencent à 1 : elles commencent à 0."),
            ),
        ),
    ),
    praise=Said(
        "Right: tensors of a fixed size, whatever the router does; the price is the tokens that find no place.",
        "Exact : des tenseurs de taille fixe, quoi que fasse le routeur ; le prix, ce sont les tokens sans place.",
    ),
    hints=(
        Said(
            "For each choice, in order (all first ones, then all second ones): how many before it have taken the same "
            "expert? A loop with a counter per expert does; so does a cumulative sum of one_hot.",
            "Pour chaque choix, dans l’ordre (tous les premiers, puis tous les seconds) : combien avant lui ont pris "
            "le même expert ? Une boucle avec un compteur par expert convient ; une somme cumulée de one_hot aussi.",
        ),
        Said(
            "taken = F.one_hot(chosen.T.flatten(), experts); place = (taken.cumsum(0) * taken).sum(1) - 1; -1 where "
            "place >= math.ceil(factor * k * tokens / experts); then view(k, tokens).T.",
            "taken = F.one_hot(chosen.T.flatten(), experts) ; place = (taken.cumsum(0) * taken).sum(1) - 1 ; -1 là où "
            "place >= math.ceil(factor * k * tokens / experts) ; enfin view(k, tokens).T.",
        ),
    ),
)
