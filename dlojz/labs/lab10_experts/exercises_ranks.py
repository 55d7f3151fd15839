"""Exercises of lab 10 on the mixture and its ranks: dispatch and combine, the all-to-all, gradients, bytes.

On ranks, values are compared with those of one process; an all-to-all must have sent each token only to the rank of its
expert, and its faults are how rows are laid out on the way there and back. The challenge places experts, some of them
twice, on ranks by their loads.

Shape suffixes: T tokens, E experts, L = E / n experts of one rank, K choices of a token, C places of an expert, D
width, N choices that have a place; in the all-to-all N = n C places of all ranks.
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlojz.labs.kit.answer_numbers import plain
from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.rank_judges import OUTPUT, added, asked_for, normals, same
from dlojz.labs.lab10_experts.exercises_routing import capacity, crowded, places
from dlojz.processes.forks import RankAnswer

TEXTS = Texts(__file__)

Experts = Callable[[Tensor], Tensor]


def mixture(
    x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, places_TK: Tensor, experts: Experts, shape: tuple[int, int]
) -> Tensor:
    """Add up each token's experts by weight, (T, D); zero for a token without a place.

    Args:
        x_TD: the tokens.
        weights_TK: of the choices.
        chosen_TK: numbers of the experts.
        places_TK: places within the experts; -1 where dropped.
        experts: takes and gives (E, C, D): expert e computes row e.
        shape: (E, C).

    Source: Lepikhin et al. 2020 (arXiv 2006.16668): dispatch and combine.
    """
    # N: choices that have a place
    token_N, choice_N = (places_TK >= 0).nonzero(as_tuple=True)
    slots = chosen_TK[token_N, choice_N], places_TK[token_N, choice_N]
    buffer_ECD = x_TD.new_zeros(*shape, x_TD.shape[1])
    # no two choices have the same place, so nothing is overwritten
    buffer_ECD[slots] = x_TD[token_N]
    weighted_ND = weights_TK[token_N, choice_N].unsqueeze(1) * experts(buffer_ECD)[slots]
    # the rows of one token add up: index_add, where y[token_N] += … would keep one of them
    return torch.zeros_like(x_TD).index_add(0, token_N, weighted_ND)


class _Asked:
    """Experts that differ, and are not zero at zero, so that an empty place that is read shows."""

    def __init__(self, num_experts: int, room: int, width: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape = (num_experts, room, width)
        self.matrices_EDD = torch.randn(num_experts, width, width, generator=generator)
        self.biases_ED = torch.randn(num_experts, width, generator=generator)

    def __call__(self, buffer_ECD: Tensor) -> Tensor:
        shape = tuple(getattr(buffer_ECD, "shape", ()))
        if shape != self.shape:
            raise TEXTS.wrong("mixture", "a tensor of another shape", shape=shape, width=self.shape)
        return (buffer_ECD @ self.matrices_EDD + self.biases_ED.unsqueeze(1)).tanh()

    def __repr__(self) -> str:
        return "experts"


def _mixtures() -> Iterator[tuple[Any, ...]]:
    for number, (chosen_TK, experts, factor) in enumerate(crowded()):
        generator = torch.Generator().manual_seed(20 + number)
        tokens, k = chosen_TK.shape
        x_TD = torch.randn(tokens, 5, generator=generator)
        weights_TK = torch.rand(tokens, k, generator=generator)
        room = capacity(tokens, experts, k, factor)
        expert_network = _Asked(experts, room, 5, seed=30 + number)
        yield x_TD, weights_TK, chosen_TK, places(chosen_TK, experts, factor), expert_network, (experts, room)


def _written(share_of: Callable[[Tensor], Tensor], by_token: bool = False) -> Callable[..., Tensor]:
    """Dropped tokens are written over the last place; `share_of`: the share of what is then read of each choice."""

    def way(x: Tensor, weights: Tensor, chosen: Tensor, places_TK: Tensor, experts: Experts, shape: Any) -> Tensor:
        buffer, (tokens, choices) = x.new_zeros(*shape, x.shape[1]), chosen.shape
        written = [(token, choice) for choice in range(choices) for token in range(tokens)]
        for token, choice in sorted(written) if by_token else written:
            buffer[chosen[token, choice], places_TK[token, choice]] = x[token]
        return ((weights * share_of(places_TK)).unsqueeze(-1) * experts(buffer)[chosen, places_TK]).sum(1)

    return way


def _last_choice(x: Tensor, weights: Tensor, chosen: Tensor, places_TK: Tensor, experts: Experts, shape: Any) -> Tensor:
    """Each choice overwrites the one before."""
    y = torch.zeros_like(x)
    for column in torch.arange(chosen.shape[1]).view(-1, 1):
        alone = mixture(x, weights[:, column], chosen[:, column], places_TK[:, column], experts, shape)
        y = torch.where(places_TK[:, column] >= 0, alone, y)
    return y


MIXTURE = TEXTS.exercise(
    "mixture",
    mixture,
    cases=_mixtures,
    leaves={0: Said("x", "x"), 1: Said("the weights", "les poids")},
    mistakes={
        "dropped tokens are written over the last place": tuple(
            TEXTS.mistake("mixture", "tokens over the last place", _written(share_of, by_token), en=en, fr=fr)
            for share_of, en, fr in (
                (lambda places_TK: places_TK**0, ", both ways", ", à l’aller comme au retour"),
                (lambda places_TK: places_TK >= 0, " there, too", " là aussi"),
            )
            for by_token in (False, True)
        ),
        "each choice overwrites the one before": _last_choice,
    },
)


EP = {4: 2, 3: 3}
"""Expert-parallel degree by the number of ranks: two copies of each expert, then one of each."""
PARITY_CASES = ((4, 41), (3, 42))
SHARED, OWN = "gradient of shared", "gradient of own"
PARITY_LABELS = {
    SHARED: Said("the gradient of a parameter that all ranks have", "le gradient d’un paramètre que tous ont"),
    OWN: Said("the gradient of this rank's experts", "le gradient des experts de ce rang"),
}
WORLD, REPLICAS, ALONE, PEERS = "world", "replicas", "alone", "peers"


def average_gradients(shared: list[Tensor], own: list[Tensor], replicas: Any) -> None:
    """Turn gradients of this rank's loss into those of the mean loss of all ranks, in place.

    Backward has already added up, for each expert, what the tokens of its group of ranks have found: the all-to-all
    brings gradients back to it. What is missing are the other groups, and the division.

    Args:
        shared: gradients of what every rank has: attention, norms, router.
        own: gradients of this rank's experts.
        replicas: the group of ranks that hold the same experts.

    Source: Rajbhandari et al. 2022, "DeepSpeed-MoE" (arXiv 2201.05596), expert and data parallelism combined.
    """
    world = dist.get_world_size()
    for gradient in shared:
        dist.all_reduce(gradient)  # Who: all ranks. What: the gradient. How much: its bytes.
        gradient.div_(world)
    for gradient in own:
        dist.all_reduce(gradient, group=replicas)  # Who: those with the same experts. How much: its bytes.
        gradient.div_(world)


def _found(size: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """What each rank's tokens give for the shared parameter, (n, 3), and for all experts, (n, E, 2)."""
    shared_R3, experts_RE2 = normals(seed, (size, 3), (size, 2 * EP[size], 2))
    return list(shared_R3), list(experts_RE2)


def _group(rank: int, size: int) -> range:
    """The expert-parallel group of a rank: its neighbours."""
    start = rank - rank % EP[size]
    return range(start, start + EP[size])


def _after_backward(rank: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    shared, experts = _found(size, seed)
    group_rank = rank % EP[size]
    # the two experts of this rank; backward adds up what the tokens of its group give
    return shared[rank], added(experts[peer][2 * group_rank : 2 * group_rank + 2] for peer in _group(rank, size))


def _members(rank: int, size: int, whom: str) -> range:
    # replicas: one rank in every group, ep ranks apart
    groups = {WORLD: range(size), REPLICAS: range(rank % EP[size], size, EP[size]), PEERS: _group(rank, size)}
    return groups.get(whom, range(rank, rank + 1))


def _reduced(name: str, whom: str, divisor: str) -> Callable[[int, int, int], dict[str, Tensor] | None]:
    """What a rank would hold under this name if it were added up over some ranks, and divided by the number of some."""

    def held(rank: int, size: int, seed: int) -> dict[str, Tensor] | None:
        terms = [_after_backward(peer, size, seed)[name == OWN] for peer in _members(rank, size, whom)]
        value = added(terms) / len(_members(rank, size, divisor))
        return None if same(value, expected(rank, size, seed)[name]) else {name: value}

    return held


def expected(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """Average over the replicas the gradients that a rank holds."""
    shared, experts = _found(size, seed)
    group_rank = rank % EP[size]
    expert_gradients = [gradients[2 * group_rank : 2 * group_rank + 2] for gradients in experts]
    # / size for both: each rank divides its loss by its own tokens
    return {SHARED: added(shared) / size, OWN: added(expert_gradients) / size}


def _parity_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    replicas = None
    for group_rank in range(EP[size]):
        ranks = list(range(group_rank, size, EP[size]))
        group = dist.new_group(ranks)  # every rank makes every group, and keeps its own
        if rank in ranks:
            replicas = group
    shared, expert_gradient = (gradient.clone() for gradient in _after_backward(rank, size, seed))
    answer([shared], [expert_gradient], replicas)
    return None, {SHARED: shared, OWN: expert_gradient}


def _highest(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).amax(0)


PARITY = TEXTS.exercise(
    "expert-gradients",
    expected,
    on_ranks=True,
    trial=_parity_trial,
    cases=PARITY_CASES,
    labels=PARITY_LABELS,
    faults={
        "common gradients left as they are": _reduced(SHARED, ALONE, ALONE),
        "common gradients averaged over dp": _reduced(SHARED, REPLICAS, REPLICAS),
        "common gradients added up": _reduced(SHARED, WORLD, ALONE),
        "common gradients added up over dp": _reduced(SHARED, WORLD, REPLICAS),
        "expert gradients divided by ep": _reduced(OWN, REPLICAS, PEERS),
        "expert gradients divided by the ranks": _reduced(OWN, REPLICAS, REPLICAS),
        "expert gradients added over all ranks": _reduced(OWN, WORLD, WORLD),
        "expert gradients left as they are": _reduced(OWN, ALONE, ALONE),
        "expert gradients divided": _reduced(OWN, ALONE, WORLD),
        "expert gradients added up": _reduced(OWN, REPLICAS, ALONE),
        "expert gradients divided twice": lambda rank, size, seed: (
            {
                OWN: added(_after_backward(peer, size, seed)[1] for peer in _members(rank, size, REPLICAS))
                / (size * len(_members(rank, size, REPLICAS)))
            }
            if len(_members(rank, size, REPLICAS)) > 1
            else None
        ),
        "largest gradient over the ranks": lambda rank, size, seed: {SHARED: _highest(_found(size, seed)[0]) / size},
    },
)


MORE_VOLUMES = ((300, 256, 8, 2, 1.1, 2, 2), (77, 32, 4, 3, 1.5, 2, 4))
"""Capacities of 82.5 and 86.6 places before they are rounded up, and more than one choice of a token."""
VOLUME_CASES = ((2048, 4096, 8, 2, 1.25, 8, 2), (100, 64, 8, 1, 1.0, 4, 4), (512, 128, 16, 1, 2.0, 2, 4), *MORE_VOLUMES)
"""Tokens of a rank, width, experts, choices of a token, capacity factor, ranks, bytes of a number."""


def exchange_bytes(
    tokens: int, width: int, experts: int, k: int, factor: float, ranks: int, number_bytes: int
) -> float:
    """Count the bytes that each rank sends for one mixture and one micro-batch, forward and backward.

    Four all-to-all of (E, C, D), of which the share for a rank's own experts, 1/n, stays.

    Source: Lepikhin et al. 2020 (arXiv 2006.16668), dispatch and combine, each the other's backward pass.
    """
    # empty places travel too
    room = math.ceil(factor * k * tokens / experts)
    return 4 * experts * room * width * number_bytes * (ranks - 1) / ranks


EXCHANGE_BYTES = TEXTS.exercise(
    "exchange-bytes",
    exchange_bytes,
    cases=lambda: VOLUME_CASES,
)


Loads = Sequence[int]
PLACEMENT_CASES = ((8, 4, 3), (12, 4, 4), (16, 4, 5), (16, 8, 3), (24, 8, 4))
"""Experts, ranks, places of a rank: more places than experts, so that some experts may stand twice or more."""


def _loads(experts: int, seed: int) -> list[int]:
    """Tokens of each expert: few have many, as after a real router."""
    draws = Random(seed)
    return [max(1, round(200 * draws.random() ** 3)) for _ in range(experts)]


def busiest_rank(loads: Loads, placement: Sequence[Sequence[int]]) -> float:
    """Compute the tokens of the busiest rank, where the copies of an expert share its tokens equally.

    Args:
        loads: tokens of each expert.
        placement: numbers of the experts on each rank.
    """
    copies = Counter(expert for rank_experts in placement for expert in rank_experts)
    return max(sum(loads[expert] / copies[expert] for expert in rank_experts) for rank_experts in placement)


def _placed(answer: Any, loads: Loads, ranks: int, room: int) -> list[list[int]]:
    """Read the experts of each rank, or refuse them."""
    try:
        layout = [[operator.index(expert) for expert in rank_experts] for rank_experts in plain(answer)]
    except (TypeError, ValueError):
        raise TEXTS.wrong("expert-placement", "no lists of experts", ranks=ranks, kind=type(answer).__name__) from None
    if len(layout) != ranks:
        raise TEXTS.wrong("expert-placement", "another number of lists", ranks=ranks, layout_count=len(layout))
    if (max_experts := max(map(len, layout))) > room:
        raise TEXTS.wrong("expert-placement", "too many experts on a rank", room=room, max_experts=max_experts)
    expert_numbers = set(range(len(loads)))
    if strange := {expert for rank_experts in layout for expert in rank_experts} - expert_numbers:
        raise TEXTS.wrong("expert-placement", "no such expert", strange=min(strange), loads_count=len(loads) - 1)
    if missing := expert_numbers - {expert for rank_experts in layout for expert in rank_experts}:
        raise TEXTS.wrong("expert-placement", "an expert on no rank", missing=min(missing))
    return layout


def _placement_score(answer: Callable[..., Any]) -> float:
    """Load of the busiest rank over the mean, in per cent, mean over the cases."""
    scores = []
    for number, (experts, ranks, room) in enumerate(PLACEMENT_CASES):
        loads = _loads(experts, 100 + number)
        layout = _placed(answer(list(loads), ranks, room), loads, ranks, room)
        scores.append(100 * busiest_rank(loads, layout) * ranks / sum(loads))
    return round(sum(scores) / len(scores), 1)


PLACEMENT = TEXTS.challenge("expert-placement", _placement_score, target=103)


EXCHANGE_CASES = ((2, 31), (3, 32))
LOCAL_EXPERTS, ROOM, WIDTH = 2, 5, 4
"""As many places as there are ranks would not tell both dimensions apart."""


class WrongShape(ValueError):  # noqa: N818 - what the experts of the check say of what they are given
    """Raised where the experts of a rank receive a tensor of another shape than theirs."""


def _experts(seed: int, size: int) -> tuple[Tensor, Tensor]:
    experts = LOCAL_EXPERTS * size
    matrices_EDD, biases_ED = normals(seed, (experts, WIDTH, WIDTH), (experts, WIDTH))
    return matrices_EDD, biases_ED


def _buffers(seed: int, size: int) -> list[Tensor]:
    """What each rank's tokens have filled."""
    return list(normals(seed + 100, *[(LOCAL_EXPERTS * size, ROOM, WIDTH)] * size))


def _computed(x_ECD: Tensor, experts: slice, seed: int, size: int) -> Tensor:
    matrices_EDD, biases_ED = _experts(seed, size)
    # (E, C, D) @ (E, D, D): one matrix for each expert
    return (x_ECD @ matrices_EDD[experts] + biases_ED[experts].unsqueeze(1)).tanh()


def _own(rank: int) -> slice:
    return slice(rank * LOCAL_EXPERTS, (rank + 1) * LOCAL_EXPERTS)


def _exchange_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    target = (LOCAL_EXPERTS, size * ROOM, WIDTH)
    calls = 0

    def own_experts(x_LND: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        shape = tuple(getattr(x_LND, "shape", ()))
        if shape != target:
            raise WrongShape(TEXTS.say("exchange", "own_experts of another kind", target=target, shape=shape))
        return _computed(x_LND, _own(rank), seed, size)

    y = answer(_buffers(seed, size)[rank].clone(), own_experts)
    return {"asked": calls}, {OUTPUT: y}


def _whole(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """Every expert computes what this rank's tokens have sent it."""
    return {OUTPUT: _computed(_buffers(seed, size)[rank], slice(None), seed, size)}


def _leaving(rank: int, size: int, seed: int) -> Tensor:
    """What a rank's experts send back, (n, L, C, D): a piece for each rank."""
    buffers = [buffer.view(size, LOCAL_EXPERTS, ROOM, WIDTH) for buffer in _buffers(seed, size)]
    # first all-to-all: piece `rank` of every buffer, in the order of their ranks, (n, L, C, D)
    arrived = torch.stack([buffers[source][rank] for source in range(size)])
    rows_LND = arrived.transpose(0, 1).reshape(LOCAL_EXPERTS, size * ROOM, WIDTH)
    made = _computed(rows_LND, _own(rank), seed, size)
    pieces = made.view(LOCAL_EXPERTS, size, ROOM, WIDTH).transpose(0, 1)
    return pieces.reshape(size, LOCAL_EXPERTS, ROOM, WIDTH)


def _returned(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    # second all-to-all: piece `rank` of what every rank sends back
    back = torch.stack([_leaving(source, size, seed)[rank] for source in range(size)])
    return {OUTPUT: back.reshape(LOCAL_EXPERTS * size, ROOM, WIDTH)}


_ARRIVED, _MADE = "arrived.transpose(0, 1)", "made.view(LOCAL_EXPERTS, size, ROOM, WIDTH).transpose(0, 1)"
_AS_IT_CAME = f"{_ARRIVED} → arrived"
_READ_EXPERTS_FIRST = f"{_ARRIVED} → arrived.view(LOCAL_EXPERTS, size, ROOM, WIDTH).transpose(0, 1)"
_AS_IT_IS = f"{_MADE} → made"
_READ_RANKS_FIRST = f"{_MADE} → made.view(size, LOCAL_EXPERTS, ROOM, WIDTH).transpose(0, 1)"
_NOT_SENT = "torch.stack([buffers[source][rank] for source in range(size)]) → buffers[rank]"
_BACK = "torch.stack([_leaving(source, size, seed)[rank] for source in range(size)])"
_NOT_SENT_BACK = f"{_BACK} → _leaving(rank, size, seed)"
_IN_ORDER = "back.reshape(LOCAL_EXPERTS * size, ROOM, WIDTH)"
# The two dimensions exchanged once more, or read as (own experts, ranks), although ranks come first.
_SWAPPED = (
    "back.reshape → back.transpose(0, 1).reshape",
    "back.reshape → back.reshape(LOCAL_EXPERTS, size, ROOM, WIDTH).transpose(0, 1).reshape",
)


def _inspect_calls(answers: list[RankAnswer], size: int) -> None:
    answer = answers[0]
    if asked_for(answer, "all_gather", "all_gather_into_tensor", "gather", "broadcast", "all_reduce"):
        raise TEXTS.wrong("exchange", "every token goes to every rank", size=size)
    if answer.value["asked"] != 1:
        raise TEXTS.wrong("exchange", "experts are called several times", asked=answer.value["asked"])


EXCHANGE = TEXTS.exercise(
    "exchange",
    _whole,
    on_ranks=True,
    trial=_exchange_trial,
    cases=EXCHANGE_CASES,
    source=(_returned, _leaving),
    faults={
        "source rank and expert exchanged, both ways": f"{_AS_IT_CAME}; {_AS_IT_IS}",
        "source rank and expert exchanged": _AS_IT_CAME,
        "arrivals read experts first": (
            _READ_EXPERTS_FIRST,
            f"{_READ_EXPERTS_FIRST}; {_AS_IT_IS}",
            f"{_READ_EXPERTS_FIRST}; {_READ_RANKS_FIRST}",
        ),
        "arrivals merged places first": f"{_ARRIVED} → arrived.permute(1, 2, 0, 3)",
        "ranks not brought to the front again": _AS_IT_IS,
        "results read ranks first": _READ_RANKS_FIRST,
        "results taken apart places first": (
            f"{_MADE} → made.view(LOCAL_EXPERTS, size, ROOM, WIDTH).transpose(1, 2)",
            f"{_MADE} → made.view(LOCAL_EXPERTS, ROOM, size, WIDTH).permute(2, 0, 1, 3)",
        ),
        "ranks to the front too late": tuple(f"{_AS_IT_IS}; {swapped}" for swapped in _SWAPPED),
        "arrivals with two dimensions exchanged": _SWAPPED,
        "results stay with the experts": (
            _NOT_SENT_BACK,
            f"{_NOT_SENT_BACK}; {_AS_IT_IS}",
            f"{_NOT_SENT_BACK}; {_AS_IT_CAME}; {_AS_IT_IS}",
            # What own_experts gives, in its own shape.
            f"{_NOT_SENT_BACK}; {_AS_IT_IS}; {_IN_ORDER} → back.reshape(LOCAL_EXPERTS, size * ROOM, WIDTH)",
        ),
        "the first all-to-all is missing": _NOT_SENT,
        # The second all-to-all brings buffers, which no expert has seen.
        "what has arrived is returned": (
            f"{_BACK} → torch.stack([part.view(size, -1, ROOM, WIDTH)[rank] for part in _buffers(seed, size)])"
        ),
        "tokens are added": f"{_IN_ORDER} → {_IN_ORDER} + _buffers(seed, size)[rank]",
        # An all-reduce in place of the way back.
        "results of all ranks are added": f"{_BACK} → sum(_leaving(source, size, seed) for source in range(size))",
        "tokens come back unchanged": lambda rank, size, seed: {OUTPUT: _buffers(seed, size)[rank]},
        "nothing is exchanged": f"{_NOT_SENT}; {_NOT_SENT_BACK}",
    },
    inspect=_inspect_calls,
)
