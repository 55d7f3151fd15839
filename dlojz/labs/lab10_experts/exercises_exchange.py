"""Exercise of lab 10 on the all-to-all: each token to the rank of its expert, and back.

Values are compared with those of one process; then an answer must have sent each token only to the rank of its expert.
The faults are journeys: how rows are laid out for the experts, and how they are laid out for the way back.

Shape suffixes: E experts, L = E / n experts of one rank, N = n C places of all ranks, C places of an expert, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlojz.base.language import say
from dlojz.labs.kit.exercise import Mistake, Said, Wrong
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.rank_judges import OUTPUT, added, asked_for, normals
from dlojz.processes.forks import RankAnswer

if TYPE_CHECKING:
    from torch import Tensor

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
            raise WrongShape(
                say(
                    en=f"own_experts takes (own experts, ranks × capacity, width), here {target}, but received {shape}",
                    fr=f"own_experts attend (experts du rang, rangs × capacité, largeur), ici {target}, mais "
                    f"a reçu {shape}",
                )
            )
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
        import torch

        buffers = [buffer.view(size, LOCAL_EXPERTS, ROOM, WIDTH) for buffer in _buffers(seed, size)]
        # first all-to-all: piece `rank` of every buffer
        arrived = torch.stack([buffers[source][rank] for source in range(size)]) if dispatch else buffers[rank]
        rows = _arrange(arrival, arrived.reshape(LOCAL_EXPERTS * size, ROOM, WIDTH), size)
        return _restore(back, _computed(rows, _own(rank), seed, size), size)

    def held(rank: int, size: int, seed: int) -> dict[str, Tensor]:
        import torch

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
    import torch

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


_BACK_LATE = Said(
    "The tokens meet the right experts, but you bring the ranks to the front after the second all-to-all: it cuts "
    "what it is given into one piece per rank, so (ranks, own experts, C, D) is its input; what arrives needs no "
    "other order.",
    "Les tokens rencontrent les bons experts, mais vous ramenez les rangs devant après le second all-to-all : il coupe "
    "ce qu’il reçoit en un morceau par rang ; c’est donc à l’entrée qu’il faut (rangs, experts du rang, C, D), et ce "
    "qui arrive est déjà dans l’ordre.",
)
_NOT_RETURNED = Said(
    "The results stay with the experts: a second all-to-all must bring each back to the rank of its token.",
    "Les résultats restent chez les experts : un second all-to-all doit ramener chacun au rang de son token.",
)
_PLACES_FIRST = Said(
    "The tokens meet the right experts, but return to the wrong places: what own_experts gives has, in its second "
    "dimension, the places of rank 0, then those of rank 1: view(own experts, ranks, C, D), and swap the first two.",
    "Les tokens rencontrent les bons experts, mais reviennent aux mauvaises places : dans ce que rend own_experts, la "
    "deuxième dimension porte les places du rang 0, puis celles du rang 1 : view(experts du rang, rangs, C, D), puis "
    "échangez les deux premières.",
)
_READ_WRONG_THERE = Said(
    "Tokens meet the wrong experts: you read what arrives as (own experts, ranks, C, D), but piece i comes from rank "
    "i, so the ranks come first: view(ranks, own experts, C, D), then transpose(0, 1).",
    "Des tokens rencontrent les mauvais experts : vous lisez ce qui arrive comme (experts du rang, rangs, C, D), mais "
    "le morceau i vient du rang i, donc les rangs sont devant : view(rangs, experts du rang, C, D), puis "
    "transpose(0, 1).",
)
_EXCHANGE_FAULTS = (
    Mistake(
        _journey("as it came", "as it is"),
        "The two all-to-all are there, but tokens meet the wrong experts: what arrives is ordered by source rank, then "
        "by expert, (ranks, own experts, C, D). Bring the expert to the front (transpose(0, 1)) before you merge ranks "
        "and places, and undo it on the way back.",
        "Les deux all-to-all y sont, mais des tokens rencontrent les mauvais experts : ce qui arrive est rangé par "
        "rang d’origine, puis par expert, (rangs, experts du rang, C, D). Ramenez l’expert devant (transpose(0, 1)) "
        "avant de fusionner rangs et places, et faites l’inverse au retour.",
    ),
    Mistake(
        _journey("as it came"),
        "Tokens meet the wrong experts: what arrives is ordered by source rank, then by expert, (ranks, own experts, "
        "C, D). Bring the expert to the front (transpose(0, 1)) before you merge ranks and places.",
        "Des tokens rencontrent les mauvais experts : ce qui arrive est rangé par rang d’origine, puis par expert, "
        "(rangs, experts du rang, C, D). Ramenez l’expert devant (transpose(0, 1)) avant de fusionner rangs et places.",
    ),
    *(Mistake(_journey("read so, and swapped", back), *_READ_WRONG_THERE) for back in ("ranks first", "as it is")),
    Mistake(_journey("read so, and swapped", "read so, and swapped"), *_READ_WRONG_THERE),
    Mistake(
        _journey("places first"),
        "What arrives is merged places first, then ranks, and taken apart ranks first: rows return to the wrong "
        "places. Merge (ranks, C), as transpose(0, 1) leaves them.",
        "Ce qui arrive est fusionné places d’abord, rangs ensuite, puis redécoupé rangs d’abord : des lignes "
        "reviennent aux mauvaises places. Fusionnez (rangs, C), tels que transpose(0, 1) les laisse.",
    ),
    Mistake(
        _journey(back="as it is"),
        "The tokens meet the right experts, but return to the wrong places: before the second all-to-all, bring the "
        "ranks to the front again, (ranks, own experts, C, D).",
        "Les tokens rencontrent les bons experts, mais reviennent aux mauvaises places : avant le second all-to-all, "
        "ramenez les rangs devant, (rangs, experts du rang, C, D).",
    ),
    Mistake(
        _journey(back="read so, and swapped"),
        "The tokens meet the right experts, but return to the wrong places: what own_experts gives is (own experts, "
        "ranks, C, D), and you read it as (ranks, own experts, C, D) before you swap the two.",
        "Les tokens rencontrent les bons experts, mais reviennent aux mauvaises places : own_experts rend (experts du "
        "rang, rangs, C, D), et vous le lisez comme (rangs, experts du rang, C, D) avant d’échanger les deux.",
    ),
    *(Mistake(_journey(back=back), *_PLACES_FIRST) for back in ("places before ranks", "places split first")),
    *(Mistake(_journey(back="as it is", after=after), *_BACK_LATE) for after in (_swapped_again, _swapped_late)),
    *(
        Mistake(
            _journey(after=after),
            "The second all-to-all brings everything to its place, but what arrives is read with two dimensions "
            "swapped: by a transpose behind it, or because it is received into a tensor that is not contiguous "
            "(empty_like of a transposed one). It is already in the order of buffer.",
            "Le second all-to-all remet tout à sa place, mais ce qui arrive est lu avec deux dimensions échangées : "
            "par un transpose après lui, ou parce que le tenseur qui reçoit n’est pas contigu (empty_like d’un tenseur "
            "transposé). Tout est déjà dans l’ordre de buffer.",
        )
        for after in (_swapped_again, _swapped_late)
    ),
    *(Mistake(_journey(back=back, combine=False), *_NOT_RETURNED) for back in ("ranks first", "as it is")),
    Mistake(_journey("as it came", "as it is", combine=False), *_NOT_RETURNED),
    Mistake(_not_even_restored, *_NOT_RETURNED),
    Mistake(
        _journey(dispatch=False),
        "The first all-to-all is missing, or own_experts does not get its result: this rank's experts compute the "
        "rows of this rank's buffer, and the second one sends these away.",
        "Le premier all-to-all manque, ou own_experts ne reçoit pas son résultat : les experts de ce rang calculent "
        "les lignes de son propre buffer, et le second les envoie ailleurs.",
    ),
    Mistake(
        _sent_again,
        "What you return are the tokens that have arrived here, which no expert has seen: send back what own_experts "
        "gives.",
        "Vous renvoyez les tokens arrivés ici, qu’aucun expert n’a vus : renvoyez ce que rend own_experts.",
    ),
    Mistake(
        _with_itself,
        "You add the tokens themselves: the residual connection is around the layer, not in it.",
        "Vous ajoutez les tokens eux-mêmes : la connexion résiduelle est autour de la couche, et non dedans.",
    ),
    Mistake(
        _added_up,
        "On the way back you add up what all ranks have computed (all-reduce): each row is meant for one rank, and "
        "nothing is to be added.",
        "Au retour, vous additionnez ce que tous les rangs ont calculé (all-reduce) : chaque ligne est destinée à un "
        "seul rang, et rien ne s’additionne.",
    ),
    Mistake(
        lambda rank, size, seed: {OUTPUT: _buffers(seed, size)[rank]},
        "The tokens come back as they left: own_experts is not called, or its result is thrown away.",
        "Les tokens reviennent comme ils sont partis : own_experts n’est pas appelé, ou son résultat est perdu.",
    ),
    Mistake(
        lambda rank, size, seed: {OUTPUT: _alone(rank, size, seed)},
        "Nothing is exchanged: this rank's experts compute all of its tokens. Each row goes to the rank of its expert.",
        "Rien n’est échangé : les experts de ce rang calculent tous ses tokens. Chaque ligne va au rang de son expert.",
    ),
)


def _inspect_calls(answers: list[RankAnswer], size: int) -> None:
    answer = answers[0]
    if asked_for(answer, "all_gather", "all_gather_into_tensor", "gather", "broadcast", "all_reduce"):
        raise Wrong(
            en=f"The output is right, but every token goes to every rank, {size} times what is needed: an all-to-all "
            "sends each only to the rank of its expert.",
            fr=f"La sortie est juste, mais chaque token va à chaque rang, {size} fois ce qu’il faut : un all-to-all "
            "n’envoie chacun qu’au rang de son expert.",
        )
    if answer.value["asked"] != 1:
        raise Wrong(
            en=f"The output is right, but own_experts is called {answer.value['asked']} times: give it all that has "
            "arrived at once, so that its products are large.",
            fr=f"La sortie est juste, mais own_experts est appelé {answer.value['asked']} fois : donnez-lui d’un seul "
            "coup tout ce qui est arrivé, pour que ses produits soient grands.",
        )


EXCHANGE = TEXTS.exercise(
    "exchange",
    _whole,
    on_ranks=True,
    trial=_exchange_trial,
    cases=EXCHANGE_CASES,
    faults=_EXCHANGE_FAULTS,
    inspect=_inspect_calls,
)
