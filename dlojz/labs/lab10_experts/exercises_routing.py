"""Exercises of lab 10 on routing: the gate, capacity, the balance loss, the gate of two levels; and on sequence length.

A gate is judged by the weight of every expert for every token, then by the order of the choices. First choices are
placed before second ones, tokens in their order; a choice without a place is dropped.

Shape suffixes: T tokens, E experts, K choices of a token, N = K × T choices, G groups, J = E / G experts of a group.
"""

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
    source=(gate, _normalized),
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
    source=(places, capacity),
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


def _best_product(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
    inside_TGJ = expert_logits_TE.unflatten(1, (group_logits_TG.shape[1], -1)).softmax(-1)
    products_TE = (group_logits_TG.softmax(-1).unsqueeze(-1) * inside_TGJ).flatten(1)
    return products_TE.topk(k)


TWO_LEVEL = TEXTS.exercise(
    "two-level-gate",
    two_level_gate,
    leaves={
        0: Said("the logits of the groups", "les logits des groupes"),
        1: Said("the logits of the experts", "les logits des experts"),
    },
    cases=_two_level_cases,
    trial=_weights,
    source=(two_level_gate, gate, _normalized),
    mistakes={
        "you take the largest products over all experts": _best_product,
    },
)

SETTINGS = ((16, 128, 37, 1, 8), (16, 128, 37, 2, 8), (64, 1024, 53, 3, 16), (8, 48, 23, 1, 1))
"""Start, end, steps, degree, multiple. The numbers of steps are prime: no length but the last is a whole number by
chance, so no order of the operations rounds otherwise than another."""


def pacing(t: int, start: int, end: int, steps: int, degree: int, multiple: int) -> int:
    """Compute the tokens per sample of the t-th step, from 1: a degree-th root, rounded down to a multiple.

    Source: Li et al. 2021 (arXiv 2108.06084), the pacing function; DeepSpeed's `CurriculumScheduler`, fixed_root.
    """
    length = math.floor(start + (end - start) * min(t / steps, 1) ** (1 / degree))
    return min(length - length % multiple, end)


def _curriculum_pacing_cases() -> Iterator[tuple[int, ...]]:
    for start, end, steps, degree, multiple in SETTINGS:
        for t in (1, 2, 5, 11, 17, 22, steps - 1, steps, steps + 9):
            yield t, start, end, steps, degree, multiple


PACING = TEXTS.exercise(
    "pacing",
    pacing,
    cases=_curriculum_pacing_cases,
    counts=True,
)
