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

from dlojz.labs.kit.exercise import Mistake
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.rank_judges import OUTPUT, added, asked_for, normals
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
            raise WrongShape(str(TEXTS.sentence("exchange", "own_experts of another kind", target=target, shape=shape)))
        return _computed(x_LND, _own(rank), seed, size)

    y = answer(_buffers(seed, size)[rank].clone(), own_experts)
    return {"asked": calls}, {OUTPUT: y}


def _whole(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """Every expert computes what this rank's tokens have sent it."""
    return {OUTPUT: _computed(_buffers(seed, size)[rank], slice(None), seed, size)}


def _arrange(layout: str, arrived: Tensor, size: int) -> Tensor:
    """Lay what has arrived, (E, C, D) with the source ranks first, out for own_experts: (L, n C, D)."""
    # (n, L, C, D): an all-to-all gives the pieces in the order of their ranks
    by_source = arrived.view(size, LOCAL_EXPERTS, ROOM, WIDTH)
    laid = {
        "experts first": by_source.transpose(0, 1),
        "as it came": by_source,
        "experts read first": arrived.view(LOCAL_EXPERTS, size, ROOM, WIDTH),
        "read so, and swapped": arrived.view(LOCAL_EXPERTS, size, ROOM, WIDTH).transpose(0, 1),
        "places first": by_source.permute(1, 2, 0, 3),
    }[layout]
    return laid.reshape(LOCAL_EXPERTS, size * ROOM, WIDTH)


def _restore(layout: str, outputs: Tensor, size: int) -> Tensor:
    """Lay out what experts have made, (L, n C, D), for the way back: n pieces."""
    # (L, n, C, D)
    by_expert = outputs.view(LOCAL_EXPERTS, size, ROOM, WIDTH)
    laid = {
        "ranks first": by_expert.transpose(0, 1),
        "as it is": by_expert,
        "read so, and swapped": outputs.view(size, LOCAL_EXPERTS, ROOM, WIDTH).transpose(0, 1),
        "places before ranks": by_expert.transpose(1, 2),
        "places split first": outputs.view(LOCAL_EXPERTS, ROOM, size, WIDTH).permute(2, 0, 1, 3),
    }[layout]
    return laid.reshape(size, LOCAL_EXPERTS, ROOM, WIDTH)


def _journey(
    arrival: str = "experts first",
    back: str = "ranks first",
    *,
    dispatch: bool = True,
    combine: bool = True,
    after: Callable[[Tensor, int], Tensor] = lambda pieces, size: pieces,
) -> Callable[[int, int, int], dict[str, Tensor]]:
    """Compute what a rank would hold in the end.

    Args:
        arrival: how what has arrived is laid out for the experts (`_arrange`).
        back: how what they have made is laid out for the way back (`_restore`).
        dispatch: whether the first all-to-all is made.
        combine: whether the second one is.
        after: what happens to the pieces that have come back, (n, L, C, D), with the number of ranks.
    """

    def leaving(rank: int, size: int, seed: int) -> Tensor:
        buffers = [buffer.view(size, LOCAL_EXPERTS, ROOM, WIDTH) for buffer in _buffers(seed, size)]
        # first all-to-all: piece `rank` of every buffer
        arrived = torch.stack([buffers[source][rank] for source in range(size)]) if dispatch else buffers[rank]
        rows = _arrange(arrival, arrived.reshape(LOCAL_EXPERTS * size, ROOM, WIDTH), size)
        return _restore(back, _computed(rows, _own(rank), seed, size), size)

    def held(rank: int, size: int, seed: int) -> dict[str, Tensor]:
        pieces = leaving(rank, size, seed)
        if combine:
            # second all-to-all: piece `rank` of what every rank sends back
            pieces = torch.stack([leaving(source, size, seed)[rank] for source in range(size)])
        return {OUTPUT: after(pieces, size).reshape(LOCAL_EXPERTS * size, ROOM, WIDTH)}

    return held


def _swapped_again(pieces: Tensor, size: int) -> Tensor:
    return pieces.transpose(0, 1)


def _swapped_late(pieces: Tensor, size: int) -> Tensor:
    """The two dimensions read as (own experts, ranks), although ranks come first."""
    return pieces.reshape(LOCAL_EXPERTS, size, ROOM, WIDTH).transpose(0, 1)


def _alone(rank: int, size: int, seed: int) -> Tensor:
    """A rank's own experts on all rows of its buffer, as if each had come from another rank."""
    buffer = _buffers(seed, size)[rank]
    rows = buffer.view(size, LOCAL_EXPERTS, ROOM, WIDTH).transpose(0, 1).reshape(LOCAL_EXPERTS, size * ROOM, WIDTH)
    outputs = _computed(rows, _own(rank), seed, size).view(LOCAL_EXPERTS, size, ROOM, WIDTH)
    return outputs.transpose(0, 1).reshape(buffer.shape)


def _sent_again(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """The second all-to-all brings buffers, which no expert has seen."""
    # piece `rank` of each buffer: as it has come by the first all-to-all
    pieces = [buffer.view(size, LOCAL_EXPERTS, ROOM, WIDTH)[rank] for buffer in _buffers(seed, size)]
    return {OUTPUT: torch.cat(pieces)}


def _not_even_restored(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """What own_experts gives, in its own shape."""
    outputs = _journey(back="as it is", combine=False)(rank, size, seed)[OUTPUT]
    return {OUTPUT: outputs.reshape(LOCAL_EXPERTS, size * ROOM, WIDTH)}


def _with_itself(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    return {OUTPUT: _whole(rank, size, seed)[OUTPUT] + _buffers(seed, size)[rank]}


def _added_up(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """An all-reduce in place of the way back."""
    outputs_of = _journey(combine=False)
    return {OUTPUT: added(outputs_of(source_rank, size, seed)[OUTPUT] for source_rank in range(size))}


_BACK_LATE = TEXTS.sentence("exchange", "ranks to the front too late")
_NOT_RETURNED = TEXTS.sentence("exchange", "results stay with the experts")
_PLACES_FIRST = TEXTS.sentence("exchange", "results taken apart places first")
_READ_WRONG_THERE = TEXTS.sentence("exchange", "arrivals read experts first")
_EXCHANGE_FAULTS = (
    TEXTS.mistake("exchange", "source rank and expert exchanged, both ways", _journey("as it came", "as it is")),
    TEXTS.mistake("exchange", "source rank and expert exchanged", _journey("as it came")),
    *(Mistake(_journey("read so, and swapped", back), *_READ_WRONG_THERE) for back in ("ranks first", "as it is")),
    Mistake(_journey("read so, and swapped", "read so, and swapped"), *_READ_WRONG_THERE),
    TEXTS.mistake("exchange", "arrivals merged places first", _journey("places first")),
    TEXTS.mistake("exchange", "ranks not brought to the front again", _journey(back="as it is")),
    TEXTS.mistake("exchange", "results read ranks first", _journey(back="read so, and swapped")),
    *(Mistake(_journey(back=back), *_PLACES_FIRST) for back in ("places before ranks", "places split first")),
    *(Mistake(_journey(back="as it is", after=after), *_BACK_LATE) for after in (_swapped_again, _swapped_late)),
    *(
        TEXTS.mistake("exchange", "arrivals with two dimensions exchanged", _journey(after=after))
        for after in (_swapped_again, _swapped_late)
    ),
    *(Mistake(_journey(back=back, combine=False), *_NOT_RETURNED) for back in ("ranks first", "as it is")),
    Mistake(_journey("as it came", "as it is", combine=False), *_NOT_RETURNED),
    Mistake(_not_even_restored, *_NOT_RETURNED),
    TEXTS.mistake("exchange", "the first all-to-all is missing", _journey(dispatch=False)),
    TEXTS.mistake("exchange", "what has arrived is returned", _sent_again),
    TEXTS.mistake("exchange", "tokens are added", _with_itself),
    TEXTS.mistake("exchange", "results of all ranks are added", _added_up),
    TEXTS.mistake(
        "exchange", "tokens come back unchanged", lambda rank, size, seed: {OUTPUT: _buffers(seed, size)[rank]}
    ),
    TEXTS.mistake("exchange", "nothing is exchanged", lambda rank, size, seed: {OUTPUT: _alone(rank, size, seed)}),
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
    faults=_EXCHANGE_FAULTS,
    inspect=_inspect_calls,
)
