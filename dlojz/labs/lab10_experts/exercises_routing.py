"""Exercises of lab 10 on routing: the gate, capacity, the balance loss, the gate of two levels; and on sequence length.

A gate is judged by the weight of every expert for every token, then by the order of the choices. First choices are
placed before second ones, tokens in their order; a choice without a place is dropped.

Shape suffixes: T tokens, E experts, K choices of a token, N = K × T choices, G groups, J = E / G experts of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dlojz.labs.kit.exercise import Exercise, Mistake, Said, Wrong
from dlojz.labs.kit.judges import Judge, refuse_nothing
from dlojz.labs.kit.rank_judges import same

if TYPE_CHECKING:
    from torch import Tensor

Chosen = tuple["Tensor", "Tensor"]
"""Weights and numbers of the chosen experts, both (T, K)."""


def gate(logits_TE: Tensor, k: int) -> Chosen:
    """Return weights and numbers of each token's k most probable experts, (T, K) each.

    With k = 1 the weight is the probability itself; with more, the probabilities of the chosen ones are divided by
    their sum.

    Source: Fedus et al. 2021 (arXiv 2101.03961), for k = 1; Lepikhin et al. 2020 (arXiv 2006.16668), for k = 2.
    """
    return _normalized(logits_TE.softmax(-1).topk(k))


def _normalized(choice: Chosen) -> Chosen:
    """With k ≥ 2, weights divided by their sum."""
    weights_TK, chosen_TK = choice
    return (weights_TK if weights_TK.shape[1] == 1 else weights_TK / weights_TK.sum(-1, keepdim=True)), chosen_TK


def _spread(choice: Any, experts: int, k: int, tokens: int) -> Tensor:
    """The weight of every expert for every token, (T, E), whatever the order of the choices.

    Raises:
        Wrong: if this is no pair of tensors (T, K), or an expert is none.
    """
    import torch

    refuse_nothing(choice)
    if not isinstance(choice, tuple | list) or len(choice) != 2 or not all(map(torch.is_tensor, choice)):
        raise Wrong(
            en="A pair of tensors is expected: the weights, then the numbers of the experts.",
            fr="On attend deux tenseurs : les poids, puis les numéros des experts.",
        )
    weights_TK, chosen_TK = choice
    if weights_TK.shape != (tokens, k) or chosen_TK.shape != (tokens, k):
        shapes = tuple(weights_TK.shape), tuple(chosen_TK.shape)
        raise Wrong(
            en=f"For {tokens} tokens and k = {k} the two tensors have the shapes {shapes[0]} and {shapes[1]}, but "
            f"({tokens}, {k}) is expected of both.",
            fr=f"Pour {tokens} tokens et k = {k}, les deux tenseurs ont les formes {shapes[0]} et {shapes[1]}, mais "
            f"({tokens}, {k}) est attendue pour les deux.",
        )
    if chosen_TK.is_floating_point() or int(chosen_TK.min()) < 0 or int(chosen_TK.max()) >= experts:
        raise Wrong(
            en=f"The second tensor must hold the numbers of experts, whole numbers from 0 to {experts - 1}.",
            fr=f"Le second tenseur doit contenir des numéros d’experts, des entiers de 0 à {experts - 1}.",
        )
    return torch.zeros(tokens, experts).scatter_add(1, chosen_TK, weights_TK.float())


def _weights(answer: Callable[..., Any], *case: Any) -> Tensor:
    """What a gate is judged by."""
    logits_TE, k = case[-2:]
    return _spread(answer(*case), logits_TE.shape[1], k, len(logits_TE))


def _expert_gate_cases() -> Iterator[tuple[Any, ...]]:
    import torch

    generator = torch.Generator().manual_seed(10)
    for tokens, experts, k in ((6, 4, 1), (9, 8, 2), (5, 6, 3), (7, 5, 1), (8, 6, 2)):
        yield 2 * torch.randn(tokens, experts, generator=generator), k


def _always_divided(logits_TE: Tensor, k: int) -> Chosen:
    weights_TK, chosen_TK = logits_TE.softmax(-1).topk(k)
    return weights_TK / weights_TK.sum(-1, keepdim=True), chosen_TK


def _undivided_gate(logits_TE: Tensor, k: int) -> Chosen:
    return logits_TE.softmax(-1).topk(k)


def _shared_by(logits_TE: Tensor, k: int, by: Callable[[Tensor], Any]) -> Chosen:
    """With k ≥ 2, weights divided by something else than their sum."""
    weights_TK, chosen_TK = _undivided_gate(logits_TE, k)
    return (weights_TK if k == 1 else weights_TK / by(weights_TK)), chosen_TK


def _refuse_other_choices(answer: Callable[..., Any]) -> None:
    """Refuse a gate whose first choices are not in column 0: they are placed first."""
    for logits_TE, k in _expert_gate_cases():
        weights_TK, _ = answer(logits_TE.clone(), k)
        if bool((weights_TK[:, 1:] > weights_TK[:, :-1]).any()):
            raise Wrong(
                en="Weights and experts are right, but a token's first choice, its most probable expert, belongs in "
                "column 0, the second in column 1: exercise 2 gives places to column 0 first.",
                fr="Les poids et les experts sont justes, mais le premier choix d’un token, son expert le plus "
                "probable, va dans la colonne 0, le deuxième dans la colonne 1 : l’exercice 2 donne d’abord des places "
                "à la colonne 0.",
            )


GATE = Exercise(
    id="gate",
    title=Said("the gate", "la porte"),
    judge=Judge(
        gate,
        cases=_expert_gate_cases,
        trial=_weights,
        leaves={0: Said("the router's logits", "les logits du routeur")},
        then=_refuse_other_choices,
        mistakes=(
            Mistake(
                _always_divided,
                "The experts are the right ones; but with k = 1 your weight is always 1. Then the output does not "
                "depend on the router's probabilities, and no gradient reaches the router: it would never learn. With "
                "k = 1, keep the probability.",
                "Les experts sont les bons ; mais avec k = 1 votre poids vaut toujours 1. La sortie ne dépend alors "
                "plus des probabilités du routeur, et aucun gradient ne lui parvient : il n’apprendrait jamais. Avec k "
                "= 1, gardez la probabilité.",
            ),
            Mistake(
                lambda logits_TE, k: logits_TE.softmax(-1).topk(k),
                "The experts are the right ones, and k = 1 is right; with k ≥ 2, divide the weights of a token by "
                "their sum, so that they add up to 1.",
                "Les experts sont les bons, et k = 1 est juste ; avec k ≥ 2, divisez les poids d’un token par leur "
                "somme, pour qu’elle vaille 1.",
            ),
            Mistake(
                lambda logits_TE, k: _normalized(logits_TE.softmax(0).topk(k)),
                "The softmax runs over the tokens: it is each token that shares itself among the experts, so it runs "
                "over the last dimension.",
                "Le softmax porte sur les tokens : c’est chaque token qui se répartit entre les experts, donc il porte "
                "sur la dernière dimension.",
            ),
            *(
                Mistake(
                    way,
                    "The weights are logits: pass them through softmax first, over all experts.",
                    "Les poids sont des logits : passez-les d’abord par softmax, sur tous les experts.",
                )
                for way in (lambda logits_TE, k: logits_TE.topk(k), lambda logits_TE, k: _normalized(logits_TE.topk(k)))
            ),
            Mistake(
                lambda logits_TE, k: _normalized(logits_TE.softmax(-1).topk(k, largest=False)),
                "You choose the experts of lowest probability.",
                "Vous choisissez les experts les moins probables.",
            ),
            *(
                Mistake(
                    lambda logits_TE, k, of=of: _normalized(of(logits_TE).topk(k)),
                    "The weights do not come from a softmax over the experts, whose probabilities add up to 1 for "
                    "each token.",
                    "Les poids ne viennent pas d’un softmax sur les experts, dont les probabilités ont pour somme 1 "
                    "par token.",
                )
                for of in (
                    lambda logits_TE: logits_TE.sigmoid(),
                    lambda logits_TE: logits_TE.log_softmax(-1),
                    lambda logits_TE: logits_TE.exp(),
                )
            ),
            *(
                Mistake(
                    lambda logits_TE, k, by=by: _shared_by(logits_TE, k, by),
                    "With k ≥ 2 the weights of a token must add up to 1: divide by their sum over its own experts, "
                    "weights.sum(-1, keepdim=True), and by nothing else.",
                    "Avec k ≥ 2, les poids d’un token doivent avoir pour somme 1 : divisez par leur somme sur ses "
                    "experts, "
                    "weights.sum(-1, keepdim=True), et par rien d’autre.",
                )
                for by in (
                    lambda weights_TK: weights_TK.sum(0),
                    lambda weights_TK: weights_TK.shape[1],
                    lambda weights_TK: weights_TK.amax(-1, keepdim=True),
                    lambda weights_TK: weights_TK.norm(dim=-1, keepdim=True),
                )
            ),
            Mistake(
                lambda logits_TE, k: (gate if k > 2 else _undivided_gate)(logits_TE, k),
                "The weights are divided from k = 3 on: with k = 2, too.",
                "Les poids sont divisés à partir de k = 3 : avec k = 2 aussi.",
            ),
            Mistake(
                lambda logits_TE, k: (gate(logits_TE, 1)[0].expand(-1, k), gate(logits_TE, k)[1]),
                "Every expert of a token has the weight of the first: each has its own probability.",
                "Chaque expert d’un token a le poids du premier : à chacun sa propre probabilité.",
            ),
        ),
    ),
    praise_en="Right: every weight depends on the probabilities; only through them does a gradient reach the router.",
    praise_fr="Exact : chaque poids dépend des probabilités ; ce n’est que par elles qu’un gradient parvient au "
    "routeur.",
    hint_en="First the probabilities of all experts, then the k largest of them. What would the weight of one single "
    "expert be, divided by the sum of the weights?",
    hint_fr="D’abord les probabilités de tous les experts, puis les k plus grandes. Que vaudrait le poids d’un seul "
    "expert, divisé par la somme des poids ?",
    nearer_en="weights, chosen = logits.softmax(-1).topk(k); if k > 1, weights / weights.sum(-1, keepdim=True).",
    nearer_fr="weights, chosen = logits.softmax(-1).topk(k) ; si k > 1, weights / weights.sum(-1, keepdim=True).",
)


def capacity(tokens: int, experts: int, k: int, factor: float) -> int:
    """Compute the places of each expert: `factor` times its fair share, rounded up, at most the tokens.

    Source: Fedus et al. 2021 (arXiv 2101.03961), expert capacity, for k = 1; k times as many choices for more.
    """
    return min(tokens, math.ceil(factor * k * tokens / experts))


def places(chosen_TK: Tensor, experts: int, factor: float) -> Tensor:
    """Return the place of each choice within its expert, from 0, (T, K); -1 where the expert is full.

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
            "unlimited": k * tokens,
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


def _refused(what: Callable[[Tensor, int], Tensor], count: Callable[[float], int] = math.ceil) -> Callable[..., Tensor]:
    """Places where those that find no room are told by `what(places, room)`, and the room is counted by `count`."""

    def way(chosen_TK: Tensor, experts: int, factor: float) -> Tensor:
        tokens, k = chosen_TK.shape
        return what(_spoilt("unlimited")(chosen_TK, experts, float(experts)), count(factor * k * tokens / experts))

    return way


def _numbered(chosen_TK: Tensor) -> Tensor:
    import torch

    return torch.arange(chosen_TK.numel()).view(chosen_TK.shape)


def _minus_one(place_TK: Tensor, room: int) -> Tensor:
    return place_TK.masked_fill(place_TK >= room, -1)


def crowded() -> Iterator[tuple[Any, ...]]:
    """Make choices, experts and capacity factors with which some expert is full."""
    import torch

    generator = torch.Generator().manual_seed(12)
    for tokens, experts, k, factor in ((12, 4, 1, 1.0), (13, 4, 2, 1.25), (11, 3, 2, 0.8)):
        logits_TE = torch.randn(tokens, experts, generator=generator) + torch.linspace(1.5, 0, experts)
        yield logits_TE.topk(k).indices, experts, factor


PLACES = Exercise(
    id="places",
    title=Said("capacity and places", "capacité et places"),
    judge=Judge(
        places,
        cases=crowded,
        mistakes=(
            Mistake(
                _spoilt("by tokens"),
                "The capacity is right, but a token's second choice goes before the first choices of the tokens that "
                "follow: place all first choices, then all second ones. A second choice that is lost costs less.",
                "La capacité est juste, mais le second choix d’un token passe avant les premiers choix des tokens "
                "suivants : placez tous les premiers choix, puis tous les seconds. Perdre un second choix coûte moins "
                "cher.",
            ),
            Mistake(
                _spoilt("each apart"),
                "Second choices are counted from 0 again: two tokens then stand at the same place of an expert. Go on "
                "counting after the first choices.",
                "Les seconds choix sont comptés à nouveau à partir de 0 : deux tokens occupent alors la même place "
                "d’un expert. Continuez à compter après les premiers choix.",
            ),
            Mistake(
                _spoilt("floor"),
                "The capacity is rounded down: round it up (math.ceil).",
                "La capacité est arrondie vers le bas : arrondissez-la vers le haut (math.ceil).",
            ),
            Mistake(
                _spoilt("without k"),
                "The capacity forgets k: there are k × tokens choices to divide among the experts.",
                "La capacité oublie k : ce sont k × tokens choix qu’il faut répartir entre les experts.",
            ),
            Mistake(
                _spoilt("without factor"),
                "The capacity factor is left out: multiply the fair share by it, before rounding.",
                "Le facteur de capacité est oublié : multipliez-en la part équitable, avant d’arrondir.",
            ),
            Mistake(
                _spoilt("unlimited"),
                "The places are right, but none is refused: a place that is not smaller than the capacity is -1.",
                "Les places sont justes, mais aucune n’est refusée : une place qui n’est pas inférieure à la capacité "
                "devient -1.",
            ),
            Mistake(
                _spoilt("last place"),
                "The tokens that are too many all stand at the last place, one upon the other: they are dropped, which "
                "is written -1.",
                "Les tokens en trop se retrouvent tous à la dernière place, les uns sur les autres : ils sont "
                "abandonnés, ce qui s’écrit -1.",
            ),
            Mistake(
                _spoilt("from 1"),
                "The places begin at 1: they begin at 0.",
                "Les places commencent à 1 : elles commencent à 0.",
            ),
            Mistake(
                _refused(lambda place, room: place.masked_fill(place > room, -1)),
                "One place too many: places go from 0 to C − 1, so a place that equals the capacity is dropped too "
                "(>=).",
                "Une place de trop : les places vont de 0 à C − 1, une place égale à la capacité est donc perdue "
                "aussi (>=).",
            ),
            Mistake(
                _refused(lambda place, room: place.masked_fill(place >= room, 0)),
                "A choice that is dropped gets place 0, which another one has: mark it by -1.",
                "Un choix refusé reçoit la place 0, qu’un autre occupe : marquez-le par -1.",
            ),
            Mistake(
                _refused(lambda place, room: place % room),
                "You begin again at place 0 when an expert is full (%): a choice that finds no place is dropped, -1.",
                "Vous recommencez à la place 0 quand un expert est plein (%) : un choix sans place est refusé, -1.",
            ),
            Mistake(
                _refused(_minus_one, round),
                "The capacity is rounded to the nearest: it is rounded up, math.ceil.",
                "La capacité est arrondie au plus proche : on l’arrondit vers le haut, math.ceil.",
            ),
            Mistake(
                lambda chosen_TK, experts, factor: _refused(_minus_one, math.floor)(chosen_TK, experts, 1.0),
                "The capacity factor is left out, and the share is rounded down (//): math.ceil(factor * k * tokens / "
                "experts).",
                "Le facteur de capacité est oublié, et la part est arrondie vers le bas (//) : math.ceil(factor * k * "
                "tokens / "
                "experts).",
            ),
            Mistake(
                lambda chosen_TK, experts, factor: places(chosen_TK, experts, factor).T.reshape(chosen_TK.shape),
                "The places are right, but laid out wrongly: they come by choice, then by token, so view(k, tokens) "
                "and then .T.",
                "Les places sont justes, mais mal rangées : elles viennent par choix, puis par token, donc view(k, "
                "tokens), puis .T.",
            ),
            Mistake(
                lambda chosen_TK, experts, factor: places(chosen_TK.flip(0, 1), experts, factor).flip(0, 1),
                "You serve in reverse order: the first choices of the first tokens come first.",
                "Vous servez dans l’ordre inverse : les premiers choix des premiers tokens passent d’abord.",
            ),
            Mistake(
                lambda chosen_TK, experts, factor: places(
                    chosen_TK[:, :1], experts, factor * chosen_TK.shape[1]
                ).expand(-1, chosen_TK.shape[1]),
                "All choices of a token get the place of its first: each choice has its own, with its own expert.",
                "Tous les choix d’un token reçoivent la place du premier : chacun a la sienne, chez son expert.",
            ),
            Mistake(
                lambda chosen_TK, experts, factor: places(chosen_TK[:, :1], experts, factor).expand(chosen_TK.shape),
                "All choices of a token get the place of its first, with room for first choices only: each choice has "
                "its own place, with its own expert.",
                "Tous les choix d’un token reçoivent la place du premier, avec de la place pour les seuls premiers "
                "choix : chacun a la sienne, chez son expert.",
            ),
            Mistake(
                lambda chosen_TK, experts, factor: (places(chosen_TK, experts, factor) >= 0).long(),
                "You tell whether a choice has a place; the place itself is asked for, from 0, and -1 where it is "
                "dropped.",
                "Vous dites si un choix a une place ; on demande la place elle-même, à partir de 0, et -1 s’il est "
                "refusé.",
            ),
            Mistake(
                lambda chosen_TK, experts, factor: places(chosen_TK, experts, factor).T,
                "Tokens and choices are exchanged: one row per token, one column per choice (.T at the end).",
                "Tokens et choix sont échangés : une ligne par token, une colonne par choix (.T à la fin).",
            ),
            Mistake(
                lambda chosen_TK, experts, factor: _numbered(chosen_TK),
                "You number the choices one after the other: each expert counts its own places from 0.",
                "Vous numérotez les choix à la suite : chaque expert compte ses propres places à partir de 0.",
            ),
        ),
    ),
    praise_en="Right: the tensors have a fixed size, whatever the router does; tokens without a place are dropped.",
    praise_fr="Exact : les tenseurs ont une taille fixe, quoi que fasse le routeur ; les tokens sans place sont "
    "abandonnés.",
    hint_en="For each choice, in order (all first ones, then all second ones): how many before it have taken the same "
    "expert? A loop with a counter per expert does; so does a cumulative sum of one_hot.",
    hint_fr="Pour chaque choix, dans l’ordre (tous les premiers, puis tous les seconds) : combien avant lui ont pris "
    "le même expert ? Une boucle avec un compteur par expert convient ; une somme cumulée de one_hot aussi.",
    nearer_en="taken = F.one_hot(chosen.T.flatten(), experts); place = (taken.cumsum(0) * taken).sum(1) - 1; -1 where "
    "place >= math.ceil(factor * k * tokens / experts); then view(k, tokens).T.",
    nearer_fr="taken = F.one_hot(chosen.T.flatten(), experts) ; place = (taken.cumsum(0) * taken).sum(1) - 1 ; -1 là "
    "où place >= math.ceil(factor * k * tokens / experts) ; enfin view(k, tokens).T.",
)


def balance_loss(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    """Compute E · Σ f_e · P_e: 1 for an even spread, E where one expert has all.

    f_e is the share of all choices, (T, K), that fall on expert e; P_e its mean probability over the tokens.

    Source: Fedus et al. 2021 (arXiv 2101.03961), the load-balancing loss, for K = 1; here all K choices count.
    """
    import torch.nn.functional as F

    experts = logits_TE.shape[1]
    share_E = F.one_hot(chosen_TK, experts).float().mean((0, 1))
    return experts * (share_E * logits_TE.softmax(-1).mean(0)).sum()


def _expert_balance_cases() -> Iterator[tuple[Any, ...]]:
    import torch

    generator = torch.Generator().manual_seed(13)
    for tokens, experts, k in ((8, 4, 1), (12, 6, 2), (10, 8, 2)):
        logits_TE = torch.randn(tokens, experts, generator=generator) + torch.linspace(2, 0, experts)
        yield logits_TE, logits_TE.topk(k).indices


def _parts(logits_TE: Tensor, chosen_TK: Tensor) -> tuple[Tensor, Tensor, int]:
    import torch.nn.functional as F

    experts = logits_TE.shape[1]
    return F.one_hot(chosen_TK, experts).float().mean((0, 1)), logits_TE.softmax(-1).mean(0), experts


def _squared(which: int) -> Callable[..., Tensor]:
    def way(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        share_E, mean_E, experts = _parts(logits_TE, chosen_TK)
        return experts * ((share_E, mean_E)[which] ** 2).sum()

    return way


def _of_logits(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    share_E, _, experts = _parts(logits_TE, chosen_TK)
    return experts * (share_E * logits_TE.mean(0)).sum()


def _with_mean(of: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The mean probabilities taken in another way."""

    def way(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        share_E, _, experts = _parts(logits_TE, chosen_TK)
        return experts * (share_E * of(logits_TE)).sum()

    return way


def _ended(of: Callable[[Tensor, Tensor, int], Tensor]) -> Callable[..., Tensor]:
    return lambda logits_TE, chosen_TK: of(*_parts(logits_TE, chosen_TK))


def _check_gradient(answer: Callable[..., Any]) -> None:
    for logits_TE, chosen_TK in _expert_balance_cases():
        found, wanted = (_gradient(way, logits_TE, chosen_TK) for way in (answer, balance_loss))
        if found is None or not bool(found.any()):
            raise Wrong(
                en="The value is right, but it gives the router's logits no gradient: the probabilities must stay "
                "linked to them (no detach, no item, no no_grad).",
                fr="La valeur est juste, mais elle ne donne aucun gradient aux logits du routeur : les probabilités "
                "doivent leur rester liées (ni detach, ni item, ni no_grad).",
            )
        if wanted is None or not same(found, wanted):
            raise Wrong(
                en="The value is right, but not its gradient: it comes through the mean probabilities, and through "
                "nothing else.",
                fr="La valeur est juste, mais pas son gradient : il passe par les probabilités moyennes, et par rien "
                "d’autre.",
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
    judge=Judge(
        balance_loss,
        cases=_expert_balance_cases,
        mistakes=(
            Mistake(
                lambda logits_TE, chosen_TK: balance_loss(logits_TE, chosen_TK) / logits_TE.shape[1],
                "The number of experts is missing: without it the value of a perfect balance, 1/E, depends on how many "
                "experts there are.",
                "Le nombre d’experts manque : sans lui, la valeur de l’équilibre parfait, 1/E, dépend du nombre "
                "d’experts.",
            ),
            Mistake(
                lambda logits_TE, chosen_TK: balance_loss(logits_TE, chosen_TK) / logits_TE.shape[1] ** 2,
                "You take the mean over the experts; it is their sum, times E, so that it is 1 where all is even.",
                "Vous prenez la moyenne sur les experts ; c’est leur somme, multipliée par E, pour valoir 1 quand tout "
                "est égal.",
            ),
            Mistake(
                _squared(0),
                "You square the shares of the choices: they are counts, through which no gradient passes; nothing "
                "would be learnt. Multiply each share by the mean probability.",
                "Vous élevez au carré les parts des choix : ce sont des comptes, par lesquels aucun gradient ne passe "
                "; rien ne serait appris. Multipliez chaque part par la probabilité moyenne.",
            ),
            Mistake(
                _squared(1),
                "You square the mean probabilities: that leaves out where the tokens really go. Multiply them by the "
                "shares of the choices.",
                "Vous élevez au carré les probabilités moyennes : c’est ignorer où vont vraiment les tokens. "
                "Multipliez-les par les parts des choix.",
            ),
            Mistake(
                lambda logits_TE, chosen_TK: chosen_TK.numel() * balance_loss(logits_TE, chosen_TK),
                "f is a number of choices: divide it by how many there are, tokens × k, so that f adds up to 1.",
                "f est un nombre de choix : divisez-le par leur nombre total, tokens × k, pour que f ait pour somme 1.",
            ),
            Mistake(
                lambda logits_TE, chosen_TK: chosen_TK.shape[1] * balance_loss(logits_TE, chosen_TK),
                "f adds up to k: count the share of all choices, so that it adds up to 1.",
                "f a pour somme k : comptez la part de tous les choix, pour qu’elle ait pour somme 1.",
            ),
            Mistake(
                lambda logits_TE, chosen_TK: balance_loss(logits_TE, chosen_TK[:, :1]),
                "You count first choices only; all k choices of a token weigh on the experts.",
                "Vous ne comptez que les premiers choix ; les k choix d’un token chargent tous les experts.",
            ),
            Mistake(
                _of_logits,
                "P is a mean of logits: pass them through softmax first.",
                "P est une moyenne de logits : passez-les d’abord par softmax.",
            ),
            Mistake(
                _ended(lambda share, mean, experts: experts**2 * (share * mean).sum()),
                "You multiply by E twice: once is enough, so that it is 1 where all is even.",
                "Vous multipliez deux fois par E : une fois suffit, pour valoir 1 quand tout est égal.",
            ),
            Mistake(
                _ended(lambda share, mean, experts: experts * ((share - mean) ** 2).sum()),
                "That is the distance of f and P: the loss is E Σ f P, their product.",
                "C’est la distance entre f et P : la perte est E Σ f P, leur produit.",
            ),
            Mistake(
                _with_mean(lambda logits_TE: logits_TE.softmax(0).mean(0)),
                "Your softmax runs over the tokens: the probabilities of one token add up to 1 over the experts, "
                "dim=-1.",
                "Votre softmax court sur les tokens : les probabilités d’un token ont pour somme 1 sur les experts, "
                "dim=-1.",
            ),
            Mistake(
                _with_mean(lambda logits_TE: logits_TE.softmax(-1).sum(0)),
                "P is a sum over the tokens: take the mean of their probabilities.",
                "P est une somme sur les tokens : prenez la moyenne de leurs probabilités.",
            ),
            Mistake(
                _with_mean(lambda logits_TE: logits_TE.softmax(-1).amax(0)),
                "P is the largest probability of the tokens: take their mean.",
                "P est la plus grande probabilité des tokens : prenez leur moyenne.",
            ),
            Mistake(
                _with_mean(lambda logits_TE: logits_TE.mean(0).softmax(-1)),
                "You take the mean of the logits, then the softmax: first the probabilities of each token, then their "
                "mean.",
                "Vous prenez la moyenne des logits, puis le softmax : d’abord les probabilités de chaque token, puis "
                "leur moyenne.",
            ),
            Mistake(
                _ended(lambda share, mean, experts: experts * share * mean),
                "One number per expert is left: add them up.",
                "Il reste un nombre par expert : additionnez-les.",
            ),
        ),
        then=_check_gradient,
    ),
    praise_en="Right: the counts say where the tokens go, the probabilities carry the gradient. The loss is 1 at best, "
    "E at worst.",
    praise_fr="Exact : les comptes disent où vont les tokens, les probabilités portent le gradient. La perte vaut 1 au "
    "mieux, E au pire.",
    hint_en="f: how often each expert is chosen, divided by the number of choices. P: the mean over the tokens of each "
    "expert's probability. Which of the two has a gradient?",
    hint_fr="f : combien de fois chaque expert est choisi, divisé par le nombre de choix. P : la moyenne sur les "
    "tokens de la probabilité de chaque expert. Lequel des deux a un gradient ?",
    nearer_en="f = F.one_hot(chosen, experts).float().mean((0, 1)); P = logits.softmax(-1).mean(0); experts * (f * "
    "P).sum().",
    nearer_fr="f = F.one_hot(chosen, experts).float().mean((0, 1)) ; P = logits.softmax(-1).mean(0) ; experts * (f * "
    "P).sum().",
)


def two_level_gate(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
    """Return weights and numbers of the k best experts of each token's best group, (T, K) each.

    The weight is the probability of the group times what the flat gate gives among the experts of the group.

    Source: Shazeer et al. 2017 (arXiv 1701.06538), the hierarchical mixture of experts.
    """
    groups = group_logits_TG.shape[1]
    group_T = group_logits_TG.argmax(-1)
    inside_TGJ = expert_logits_TE.unflatten(1, (groups, -1))
    weights_TK, chosen_TK = gate(inside_TGJ[range(len(group_T)), group_T], k)
    group_weight_T1 = group_logits_TG.softmax(-1).amax(-1, keepdim=True)
    return group_weight_T1 * weights_TK, chosen_TK + group_T.unsqueeze(-1) * inside_TGJ.shape[2]


def _two_level_cases() -> Iterator[tuple[Any, ...]]:
    import torch

    generator = torch.Generator().manual_seed(11)
    for tokens, groups, inside, k in ((7, 2, 4, 1), (9, 3, 2, 1), (6, 2, 4, 2)):
        yield (
            torch.randn(tokens, groups, generator=generator),
            2 * torch.randn(tokens, groups * inside, generator=generator),
            k,
        )


def _best_group(group_logits_TG: Tensor) -> Tensor:
    """Probability of each token's group, (T, 1)."""
    return group_logits_TG.softmax(-1).amax(-1, keepdim=True)


def _without_group(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
    weights_TK, chosen_TK = two_level_gate(group_logits_TG, expert_logits_TE, k)
    return weights_TK / _best_group(group_logits_TG), chosen_TK


def _without_expert(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
    weights_TK, chosen_TK = two_level_gate(group_logits_TG, expert_logits_TE, k)
    return _best_group(group_logits_TG).expand_as(weights_TK), chosen_TK


def _over_all(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
    _, chosen_TK = two_level_gate(group_logits_TG, expert_logits_TE, k)
    return _best_group(group_logits_TG) * expert_logits_TE.softmax(-1).gather(1, chosen_TK), chosen_TK


def _undivided(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
    _, chosen_TK = two_level_gate(group_logits_TG, expert_logits_TE, k)
    inside_TE = expert_logits_TE.unflatten(1, (group_logits_TG.shape[1], -1)).softmax(-1).flatten(1)
    return _best_group(group_logits_TG) * inside_TE.gather(1, chosen_TK), chosen_TK


def _best_product(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
    inside_TGJ = expert_logits_TE.unflatten(1, (group_logits_TG.shape[1], -1)).softmax(-1)
    products_TE = (group_logits_TG.softmax(-1).unsqueeze(-1) * inside_TGJ).flatten(1)
    return products_TE.topk(k)


def _local_numbers(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
    weights_TK, chosen_TK = two_level_gate(group_logits_TG, expert_logits_TE, k)
    return weights_TK, chosen_TK % (expert_logits_TE.shape[1] // group_logits_TG.shape[1])


def _in_group(
    weight: Callable[[Tensor, Tensor], Tensor] = lambda group_T1, weights_TK: group_T1 * weights_TK,
    probability: Callable[[Tensor], Tensor] = _best_group,
    group: Callable[[Tensor], Tensor] = lambda logits: logits.argmax(-1),
    strided: bool = False,
    always: bool = False,
) -> Callable[..., Chosen]:
    """The gate of two levels under a fault."""

    def way(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
        groups = group_logits_TG.shape[1]
        group_T = group(group_logits_TG)
        inside_TGJ = (
            expert_logits_TE.unflatten(1, (-1, groups)).mT if strided else expert_logits_TE.unflatten(1, (groups, -1))
        )
        weights_TK, chosen_TK = (_always_divided if always else gate)(inside_TGJ[range(len(group_T)), group_T], k)
        return weight(probability(group_logits_TG), weights_TK), chosen_TK + group_T.unsqueeze(-1) * inside_TGJ.shape[2]

    return way


def _renumbered(number: Callable[[Tensor, Tensor, int], Tensor]) -> Callable[..., Chosen]:
    def way(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
        weights_TK, chosen_TK = two_level_gate(group_logits_TG, expert_logits_TE, k)
        each = expert_logits_TE.shape[1] // group_logits_TG.shape[1]
        return weights_TK, number(chosen_TK // each, chosen_TK % each, each)

    return way


TWO_LEVEL = Exercise(
    id="two-level-gate",
    title=Said("the gate of two levels", "la porte à deux niveaux"),
    judge=Judge(
        two_level_gate,
        leaves={
            0: Said("the logits of the groups", "les logits des groupes"),
            1: Said("the logits of the experts", "les logits des experts"),
        },
        cases=_two_level_cases,
        trial=_weights,
        mistakes=(
            Mistake(
                lambda group_logits_TG, expert_logits_TE, k: gate(expert_logits_TE, k),
                "The groups are left out: that is the flat gate, over all experts. Choose each token's group first, "
                "then look at the experts of that group alone.",
                "Les groupes sont ignorés : c’est la porte plate, sur tous les experts. Choisissez d’abord le groupe "
                "de chaque token, puis ne regardez que les experts de ce groupe.",
            ),
            Mistake(
                _without_group,
                "The experts are the right ones, but the probability of the group is missing from the weight: without "
                "it the router of groups gets no gradient.",
                "Les experts sont les bons, mais la probabilité du groupe manque dans le poids : sans elle, le routeur "
                "des groupes ne reçoit aucun gradient.",
            ),
            Mistake(
                _without_expert,
                "The experts are the right ones, but the weight is that of the group alone: times the probability of "
                "the expert within its group.",
                "Les experts sont les bons, mais le poids est celui du groupe seul : multipliez par la probabilité de "
                "l’expert dans son groupe.",
            ),
            Mistake(
                _over_all,
                "The second softmax runs over all experts: it is over those of the chosen group, whose probabilities "
                "add up to 1.",
                "Le second softmax porte sur tous les experts : il porte sur ceux du groupe choisi, dont les "
                "probabilités ont pour somme 1.",
            ),
            Mistake(
                _undivided,
                "The experts are the right ones; but with k ≥ 2 the weights within the group must add up to 1, as "
                "those of the flat gate do, before they are multiplied by the probability of the group.",
                "Les experts sont les bons ; mais avec k ≥ 2, les poids dans le groupe doivent avoir pour somme 1, "
                "comme ceux de la porte plate, avant d’être multipliés par la probabilité du groupe.",
            ),
            Mistake(
                _best_product,
                "You take the largest products over all experts; but the group is chosen first, by its own probability "
                "alone, and the others are not even looked at: that is what makes it cheaper.",
                "Vous prenez les plus grands produits sur tous les experts ; or le groupe se choisit d’abord, par sa "
                "seule probabilité, sans même regarder les autres : c’est ce qui coûte moins cher.",
            ),
            Mistake(
                _local_numbers,
                "The numbers of the experts are counted within their group: add the first number of the group, group × "
                "(experts per group).",
                "Les numéros des experts sont comptés dans leur groupe : ajoutez le premier numéro du groupe, groupe × "
                "(experts par groupe).",
            ),
            Mistake(
                _in_group(lambda group_T1, weights_TK: group_T1 + weights_TK),
                "You add the probability of the group to the weight within it: multiply them.",
                "Vous additionnez la probabilité du groupe et le poids dans le groupe : multipliez-les.",
            ),
            Mistake(
                _in_group(probability=lambda logits: logits.amax(-1, keepdim=True)),
                "You multiply by the logit of the group: pass the groups' logits through softmax first.",
                "Vous multipliez par le logit du groupe : passez d’abord les logits des groupes par softmax.",
            ),
            Mistake(
                _in_group(
                    probability=lambda logits: logits.softmax(0).amax(-1, keepdim=True),
                    group=lambda logits: logits.softmax(0).argmax(-1),
                ),
                "The softmax of the groups runs over the tokens: it runs over the groups, dim=-1.",
                "Le softmax des groupes court sur les tokens : il porte sur les groupes, dim=-1.",
            ),
            *(
                Mistake(
                    _in_group(group=lambda logits: logits.argmin(-1), probability=probability),
                    "You take the least probable group: take the most probable one.",
                    "Vous prenez le groupe le moins probable : prenez le plus probable.",
                )
                for probability in (_best_group, lambda logits: logits.softmax(-1).amin(-1, keepdim=True))
            ),
            Mistake(
                _in_group(strided=True),
                "The experts of a group are not those that you take: they follow one another, unflatten(1, (groups, "
                "-1)).",
                "Les experts d’un groupe ne sont pas ceux que vous prenez : ils se suivent, unflatten(1, (groups, "
                "-1)).",
            ),
            Mistake(
                _in_group(always=True),
                "With k = 1 the weight within the group is its expert's probability, as in exercise 1: you always "
                "divide by the "
                "sum.",
                "Avec k = 1, le poids dans le groupe est la probabilité de l’expert, comme à l’exercice 1 : vous "
                "divisez toujours "
                "par la somme.",
            ),
            Mistake(
                _in_group(lambda group_T1, weights_TK: weights_TK / weights_TK.sum(-1, keepdim=True)),
                "The products are divided by their sum: the probability of the group is lost, and with it its "
                "gradient.",
                "Les produits sont divisés par leur somme : la probabilité du groupe se perd, et avec elle son "
                "gradient.",
            ),
            Mistake(
                _renumbered(lambda group, inside, each: group + inside),
                "You add the number of the group to that of the expert: a group begins at group × experts per group.",
                "Vous ajoutez le numéro du groupe à celui de l’expert : un groupe commence à groupe × experts par "
                "groupe.",
            ),
        ),
    ),
    praise_en="Right: two small choices replace a large one, and a token stays within one group.",
    praise_fr="Exact : deux petits choix remplacent un grand, et un token reste dans un seul groupe.",
    hint_en="The best group of each token, by argmax; then the logits of that group's experts only: unflatten the "
    "experts into (groups, experts per group).",
    hint_fr="Le meilleur groupe de chaque token, par argmax ; puis les logits des seuls experts de ce groupe : "
    "unflatten coupe les experts en (groupes, experts par groupe).",
    nearer_en="inside = expert_logits.unflatten(1, (groups, -1))[torch.arange(tokens), group]; choose(inside, k); "
    "weights times the group's probability; numbers plus group × experts per group.",
    nearer_fr="inside = expert_logits.unflatten(1, (groups, -1))[torch.arange(tokens), group] ; choose(inside, k) ; "
    "poids fois la probabilité du groupe ; numéros plus groupe × experts par groupe.",
)
