"""Exercise of lab 10 on the all-to-all: each token to the rank of its expert, and back.

Values are compared with those of one process; then an answer must have sent each token only to the rank of its expert.
The faults are journeys: how rows are laid out for the experts, and how they are laid out for the way back.

Shape suffixes: E experts, L = E / n experts of one rank, N = n C places of all ranks, C places of an expert, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.rank_judges import OUTPUT, asked_for, normals
from dlojz.processes.forks import RankAnswer

TEXTS = Texts(__file__)

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
