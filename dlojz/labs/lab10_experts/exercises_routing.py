"""Exercises of lab 10 on routing: the gate, capacity, the balance loss, the gate of two levels; and on sequence length.

A gate is judged by the weight of every expert for every token, then by the order of the choices. First choices are
placed before second ones, tokens in their order; a choice without a place is dropped.

Shape suffixes: T tokens, E experts, K choices of a token, N = K × T choices, G groups, J = E / G experts of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import refuse_nothing
from dlojz.labs.kit.rank_judges import same

TEXTS = Texts(__file__)

Chosen = tuple[Tensor, Tensor]
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
    """The weight of every expert for every token, (T, E), whatever the order of the choices."""
    refuse_nothing(choice)
    if not isinstance(choice, tuple | list) or len(choice) != 2 or not all(map(torch.is_tensor, choice)):
        raise TEXTS.wrong("shared", "no pair of tensors")
    weights_TK, chosen_TK = choice
    if weights_TK.shape != (tokens, k) or chosen_TK.shape != (tokens, k):
        shapes = tuple(weights_TK.shape), tuple(chosen_TK.shape)
        raise TEXTS.wrong("shared", "other shapes", tokens=tokens, k=k, weight_shape=shapes[0], expert_shape=shapes[1])
    if chosen_TK.is_floating_point() or int(chosen_TK.min()) < 0 or int(chosen_TK.max()) >= experts:
        raise TEXTS.wrong("shared", "experts that are no whole numbers", experts=experts - 1)
    # an expert that stands twice in a row gets both weights
    return torch.zeros(tokens, experts).scatter_add(1, chosen_TK, weights_TK.float())


def _weights(answer: Callable[..., Any], *case: Any) -> Tensor:
    """What a gate is judged by."""
    logits_TE, k = case[-2:]
    return _spread(answer(*case), logits_TE.shape[1], k, len(logits_TE))


def _expert_gate_cases() -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(10)
    for tokens, experts, k in ((6, 4, 1), (9, 8, 2), (5, 6, 3), (7, 5, 1), (8, 6, 2)):
        yield 2 * torch.randn(tokens, experts, generator=generator), k


def _always_divided(logits_TE: Tensor, k: int) -> Chosen:
    weights_TK, chosen_TK = logits_TE.softmax(-1).topk(k)
    return weights_TK / weights_TK.sum(-1, keepdim=True), chosen_TK


def _undivided_gate(logits_TE: Tensor, k: int) -> Chosen:
    return logits_TE.softmax(-1).topk(k)


def _shared_by(logits_TE: Tensor, k: int, divisor: Callable[[Tensor], Any]) -> Chosen:
    """With k ≥ 2, weights divided by something else than their sum."""
    weights_TK, chosen_TK = _undivided_gate(logits_TE, k)
    return (weights_TK if k == 1 else weights_TK / divisor(weights_TK)), chosen_TK


def _refuse_other_choices(answer: Callable[..., Any]) -> None:
    """Refuse a gate whose first choices are not in column 0: they are placed first."""
    for logits_TE, k in _expert_gate_cases():
        weights_TK, _ = answer(logits_TE.clone(), k)
        if bool((weights_TK[:, 1:] > weights_TK[:, :-1]).any()):
            raise TEXTS.wrong("gate", "weights and experts swapped")


GATE = TEXTS.exercise(
    "gate",
    gate,
    cases=_expert_gate_cases,
    trial=_weights,
    leaves={0: Said("the router's logits", "les logits du routeur")},
    then=_refuse_other_choices,
    mistakes={
        "weight 1 with k = 1": _always_divided,
        "weights not divided by their sum": lambda logits_TE, k: logits_TE.softmax(-1).topk(k),
        "the softmax runs over the tokens": lambda logits_TE, k: _normalized(logits_TE.softmax(0).topk(k)),
        "weights are logits": tuple(
            wrong_gate
            for wrong_gate in (
                lambda logits_TE, k: logits_TE.topk(k),
                lambda logits_TE, k: _normalized(logits_TE.topk(k)),
            )
        ),
        "you choose the experts of lowest probability": lambda logits_TE, k: _normalized(
            logits_TE.softmax(-1).topk(k, largest=False)
        ),
        "no softmax over the experts": tuple(
            lambda logits_TE, k, probability_of=probability_of: _normalized(probability_of(logits_TE).topk(k))
            for probability_of in (
                lambda logits_TE: logits_TE.sigmoid(),
                lambda logits_TE: logits_TE.log_softmax(-1),
                lambda logits_TE: logits_TE.exp(),
            )
        ),
        "weights do not add up to 1": tuple(
            lambda logits_TE, k, divisor=divisor: _shared_by(logits_TE, k, divisor)
            for divisor in (
                lambda weights_TK: weights_TK.sum(0),
                lambda weights_TK: weights_TK.shape[1],
                lambda weights_TK: weights_TK.amax(-1, keepdim=True),
                lambda weights_TK: weights_TK.norm(dim=-1, keepdim=True),
            )
        ),
        "the weights are divided from k = 3 on": lambda logits_TE, k: (gate if k > 2 else _undivided_gate)(
            logits_TE, k
        ),
        "every expert has the weight of the first": lambda logits_TE, k: (
            gate(logits_TE, 1)[0].expand(-1, k),
            gate(logits_TE, k)[1],
        ),
    },
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
    tokens, k = chosen_TK.shape
    # (K T, E): all first choices, then all second ones
    taken_NE = F.one_hot(chosen_TK.T.flatten(), experts)
    # cumsum: how many have chosen the expert so far; × taken: of the chosen expert alone
    place_N = (taken_NE.cumsum(0) * taken_NE).sum(1) - 1
    place_N = torch.where(place_N < capacity(tokens, experts, k, factor), place_N, -1)
    return place_N.view(k, tokens).T


def _spoilt(fault: str) -> Callable[..., Tensor]:
    """Places under a fault."""

    def spoilt(chosen_TK: Tensor, experts: int, factor: float) -> Tensor:
        tokens, k = chosen_TK.shape
        share = factor * k * tokens / experts
        room = {
            "floor": math.floor(share),
            "without k": math.ceil(share / k),
            "without factor": math.ceil(share / factor),
            "unlimited": k * tokens,
        }.get(fault, math.ceil(share))
        if fault == "each apart":
            columns = [_spoilt("right")(column.unsqueeze(1), experts, factor * k) for column in chosen_TK.T]
            return torch.cat(columns, 1)
        order_N = chosen_TK.flatten() if fault == "by tokens" else chosen_TK.T.flatten()
        taken_NE = F.one_hot(order_N, experts)
        place_N = (taken_NE.cumsum(0) * taken_NE).sum(1) - int(fault != "from 1")
        limit = room + int(fault == "from 1")
        refused = room - 1 if fault == "last place" else -1
        place_N = torch.where(place_N < limit, place_N, refused)
        return place_N.view(tokens, k) if fault == "by tokens" else place_N.view(k, tokens).T

    return spoilt


def _refused(
    mark_refused: Callable[[Tensor, int], Tensor], count: Callable[[float], int] = math.ceil
) -> Callable[..., Tensor]:
    """Places where those that find no room are told by `mark_refused(places, room)`; the room is counted by `count`."""

    def way(chosen_TK: Tensor, experts: int, factor: float) -> Tensor:
        tokens, k = chosen_TK.shape
        return mark_refused(
            _spoilt("unlimited")(chosen_TK, experts, float(experts)), count(factor * k * tokens / experts)
        )

    return way


def _numbered(chosen_TK: Tensor) -> Tensor:
    return torch.arange(chosen_TK.numel()).view(chosen_TK.shape)


def _minus_one(place_TK: Tensor, room: int) -> Tensor:
    return place_TK.masked_fill(place_TK >= room, -1)


def crowded() -> Iterator[tuple[Any, ...]]:
    """Make choices, experts and capacity factors with which some expert is full."""
    generator = torch.Generator().manual_seed(12)
    for tokens, experts, k, factor in ((12, 4, 1, 1.0), (13, 4, 2, 1.25), (11, 3, 2, 0.8)):
        logits_TE = torch.randn(tokens, experts, generator=generator) + torch.linspace(1.5, 0, experts)
        yield logits_TE.topk(k).indices, experts, factor


PLACES = TEXTS.exercise(
    "places",
    places,
    cases=crowded,
    mistakes={
        "places given token by token": _spoilt("by tokens"),
        "second choices are counted from 0 again": _spoilt("each apart"),
        "the capacity is rounded down": _spoilt("floor"),
        "the capacity forgets k": _spoilt("without k"),
        "the capacity factor is left out": _spoilt("without factor"),
        "no choice is refused": _spoilt("unlimited"),
        "refused tokens stand at the last place": _spoilt("last place"),
        "the places begin at 1": _spoilt("from 1"),
        "one place too many": _refused(lambda place_TK, room: place_TK.masked_fill(place_TK > room, -1)),
        "a dropped choice gets place 0": _refused(lambda place_TK, room: place_TK.masked_fill(place_TK >= room, 0)),
        "places begin again when an expert is full": _refused(lambda place_TK, room: place_TK % room),
        "the capacity is rounded to the nearest": _refused(_minus_one, round),
        "no capacity factor, and rounded down": lambda chosen_TK, experts, factor: _refused(_minus_one, math.floor)(
            chosen_TK, experts, 1.0
        ),
        "places laid out by token, not choice": lambda chosen_TK, experts, factor: places(
            chosen_TK, experts, factor
        ).T.reshape(chosen_TK.shape),
        "you serve in reverse order": lambda chosen_TK, experts, factor: places(
            chosen_TK.flip(0, 1), experts, factor
        ).flip(0, 1),
        "all choices get the first's place": lambda chosen_TK, experts, factor: places(
            chosen_TK[:, :1], experts, factor * chosen_TK.shape[1]
        ).expand(-1, chosen_TK.shape[1]),
        "all choices get the first's place, capacity without k": lambda chosen_TK, experts, factor: places(
            chosen_TK[:, :1], experts, factor
        ).expand(chosen_TK.shape),
        "you tell whether a choice has a place": lambda chosen_TK, experts, factor: (
            places(chosen_TK, experts, factor) >= 0
        ).long(),
        "tokens and choices are exchanged": lambda chosen_TK, experts, factor: places(chosen_TK, experts, factor).T,
        "you number the choices one after the other": lambda chosen_TK, experts, factor: _numbered(chosen_TK),
    },
)


def balance_loss(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    """Compute E · Σ f_e · P_e: 1 for an even spread, E where one expert has all.

    f_e is the share of all choices, (T, K), that fall on expert e; P_e its mean probability over the tokens.

    Source: Fedus et al. 2021 (arXiv 2101.03961), the load-balancing loss, for K = 1; here all K choices count.
    """
    experts = logits_TE.shape[1]
    # counts have no gradient: it comes through the probabilities
    share_E = F.one_hot(chosen_TK, experts).float().mean((0, 1))
    return experts * (share_E * logits_TE.softmax(-1).mean(0)).sum()


def _expert_balance_cases() -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(13)
    for tokens, experts, k in ((8, 4, 1), (12, 6, 2), (10, 8, 2)):
        logits_TE = torch.randn(tokens, experts, generator=generator) + torch.linspace(2, 0, experts)
        yield logits_TE, logits_TE.topk(k).indices


def _parts(logits_TE: Tensor, chosen_TK: Tensor) -> tuple[Tensor, Tensor, int]:
    experts = logits_TE.shape[1]
    return F.one_hot(chosen_TK, experts).float().mean((0, 1)), logits_TE.softmax(-1).mean(0), experts


def _squared(factor: int) -> Callable[..., Tensor]:
    def way(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        share_E, mean_E, experts = _parts(logits_TE, chosen_TK)
        return experts * ((share_E, mean_E)[factor] ** 2).sum()

    return way


def _of_logits(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    share_E, _, experts = _parts(logits_TE, chosen_TK)
    return experts * (share_E * logits_TE.mean(0)).sum()


def _with_mean(mean_of: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The mean probabilities taken in another way."""

    def way(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        share_E, _, experts = _parts(logits_TE, chosen_TK)
        return experts * (share_E * mean_of(logits_TE)).sum()

    return way


def _ended(loss_of: Callable[[Tensor, Tensor, int], Tensor]) -> Callable[..., Tensor]:
    return lambda logits_TE, chosen_TK: loss_of(*_parts(logits_TE, chosen_TK))


def _check_gradient(answer: Callable[..., Any]) -> None:
    for logits_TE, chosen_TK in _expert_balance_cases():
        gradient, expected_gradient = (
            _gradient(loss_function, logits_TE, chosen_TK) for loss_function in (answer, balance_loss)
        )
        if gradient is None or not bool(gradient.any()):
            raise TEXTS.wrong("balance-loss", "no gradient of the logits")
        if expected_gradient is None or not same(gradient, expected_gradient):
            raise TEXTS.wrong("balance-loss", "another gradient of the logits")


def _gradient(loss_function: Callable[..., Any], logits_TE: Tensor, chosen_TK: Tensor) -> Tensor | None:
    # a leaf for each of the two functions: gradients would add up
    leaf_TE = logits_TE.clone().requires_grad_()
    loss = loss_function(leaf_TE, chosen_TK)
    if not loss.requires_grad:
        return None
    loss.backward()
    return leaf_TE.grad


BALANCE = TEXTS.exercise(
    "balance-loss",
    balance_loss,
    cases=_expert_balance_cases,
    mistakes={
        "the number of experts is missing": lambda logits_TE, chosen_TK: (
            balance_loss(logits_TE, chosen_TK) / logits_TE.shape[1]
        ),
        "you take the mean over the experts": lambda logits_TE, chosen_TK: (
            balance_loss(logits_TE, chosen_TK) / logits_TE.shape[1] ** 2
        ),
        "you square the shares of the choices": _squared(0),
        "you square the mean probabilities": _squared(1),
        "f is a number of choices": lambda logits_TE, chosen_TK: chosen_TK.numel() * balance_loss(logits_TE, chosen_TK),
        "f adds up to k": lambda logits_TE, chosen_TK: chosen_TK.shape[1] * balance_loss(logits_TE, chosen_TK),
        "you count first choices only": lambda logits_TE, chosen_TK: balance_loss(logits_TE, chosen_TK[:, :1]),
        "P is a mean of logits": _of_logits,
        "you multiply by E twice": _ended(lambda share, mean, experts: experts**2 * (share * mean).sum()),
        "squared distance of f and P": _ended(lambda share, mean, experts: experts * ((share - mean) ** 2).sum()),
        "your softmax runs over the tokens": _with_mean(lambda logits_TE: logits_TE.softmax(0).mean(0)),
        "P is a sum over the tokens": _with_mean(lambda logits_TE: logits_TE.softmax(-1).sum(0)),
        "P is the largest probability of the tokens": _with_mean(lambda logits_TE: logits_TE.softmax(-1).amax(0)),
        "you take the mean of the logits": _with_mean(lambda logits_TE: logits_TE.mean(0).softmax(-1)),
        "one number per expert is left": _ended(lambda share, mean, experts: experts * share * mean),
    },
    then=_check_gradient,
)


def two_level_gate(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
    """Return weights and numbers of the k best experts of each token's best group, (T, K) each.

    The weight is the probability of the group times what the flat gate gives among the experts of the group.

    Source: Shazeer et al. 2017 (arXiv 1701.06538), the hierarchical mixture of experts.
    """
    groups = group_logits_TG.shape[1]
    group_T = group_logits_TG.argmax(-1)
    # (T, G, J): the J experts of a group follow one another
    inside_TGJ = expert_logits_TE.unflatten(1, (groups, -1))
    weights_TK, chosen_TK = gate(inside_TGJ[range(len(group_T)), group_T], k)
    group_weight_T1 = group_logits_TG.softmax(-1).amax(-1, keepdim=True)
    # number within the group + number of the first expert of the group
    return group_weight_T1 * weights_TK, chosen_TK + group_T.unsqueeze(-1) * inside_TGJ.shape[2]


def _two_level_cases() -> Iterator[tuple[Any, ...]]:
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
        group_experts = expert_logits_TE.shape[1] // group_logits_TG.shape[1]
        return weights_TK, number(chosen_TK // group_experts, chosen_TK % group_experts, group_experts)

    return way


TWO_LEVEL = TEXTS.exercise(
    "two-level-gate",
    two_level_gate,
    leaves={
        0: Said("the logits of the groups", "les logits des groupes"),
        1: Said("the logits of the experts", "les logits des experts"),
    },
    cases=_two_level_cases,
    trial=_weights,
    mistakes={
        "the groups are left out": lambda group_logits_TG, expert_logits_TE, k: gate(expert_logits_TE, k),
        "the group's probability is missing": _without_group,
        "the expert's probability is missing": _without_expert,
        "the second softmax runs over all experts": _over_all,
        "weights within the group not divided": _undivided,
        "you take the largest products over all experts": _best_product,
        "experts numbered within their group": _local_numbers,
        "probabilities of group and expert added": _in_group(lambda group_T1, weights_TK: group_T1 + weights_TK),
        "you multiply by the logit of the group": _in_group(probability=lambda logits: logits.amax(-1, keepdim=True)),
        "the softmax of the groups runs over the tokens": _in_group(
            probability=lambda logits: logits.softmax(0).amax(-1, keepdim=True),
            group=lambda logits: logits.softmax(0).argmax(-1),
        ),
        "you take the least probable group": tuple(
            _in_group(group=lambda logits: logits.argmin(-1), probability=probability)
            for probability in (_best_group, lambda logits: logits.softmax(-1).amin(-1, keepdim=True))
        ),
        "groups of experts that are far apart": _in_group(strided=True),
        "weight within the group 1 with k = 1": _in_group(always=True),
        "the products are divided by their sum": _in_group(
            lambda group_T1, weights_TK: weights_TK / weights_TK.sum(-1, keepdim=True)
        ),
        "group's number added to the expert's": _renumbered(lambda group, inside, group_experts: group + inside),
    },
)
