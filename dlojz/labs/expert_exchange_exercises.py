"""Lab 10: tokens that travel to the experts of other ranks and back, by all-to-all on real ranks.

Layer 6 (labs). Invariant: what each rank ends with is what one process computes that has all experts; then an answer is
held to what it has sent: a token goes to the rank of its expert, and to no other.

Shape suffixes: E experts, L = E / n experts of one rank, C places of an expert, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.rank_diagnosis import diagnose
from dlojz.labs.rank_evidence import gathered, same
from dlojz.labs.rank_judging import by_ranks
from dlojz.labs.tensor_diagnosis import asked_for, normal
from dlojz.labs.verdict import Said
from dlojz.ranks.forks import RankAnswer
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

CASES = ((2, 31), (3, 32))
LOCAL_EXPERTS, ROOM, WIDTH = 2, 3, 4
OUTPUT = "output"
LABELS = {OUTPUT: Said("the output", "la sortie")}


class WrongShape(ValueError):  # noqa: N818 - what the experts of the check say of what they are given
    """The experts of a rank were given a tensor of another shape than theirs."""


def _experts(seed: int, size: int) -> tuple[Tensor, Tensor]:
    experts = LOCAL_EXPERTS * size
    matrices_EDD, biases_ED = normal(seed, (experts, WIDTH, WIDTH), (experts, WIDTH))
    return matrices_EDD, biases_ED


def _buffers(seed: int, size: int) -> list[Tensor]:
    """What each rank's tokens have filled."""
    return list(normal(seed + 100, *[(LOCAL_EXPERTS * size, ROOM, WIDTH)] * size))


def _computed(x_ECD: Tensor, experts: slice, seed: int, size: int) -> Tensor:
    matrices_EDD, biases_ED = _experts(seed, size)
    return (x_ECD @ matrices_EDD[experts] + biases_ED[experts].unsqueeze(1)).tanh()


def _own(rank: int) -> slice:
    return slice(rank * LOCAL_EXPERTS, (rank + 1) * LOCAL_EXPERTS)


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    wanted = (LOCAL_EXPERTS, size * ROOM, WIDTH)
    asked = 0

    def own_experts(x_LND: Tensor) -> Tensor:
        nonlocal asked
        asked += 1
        given = tuple(getattr(x_LND, "shape", ()))
        if given != wanted:
            raise WrongShape(
                say(
                    en=f"own_experts takes (own experts, ranks × capacity, width), here {wanted}, but received {given}",
                    fr=f"own_experts attend (experts du rang, rangs × capacité, largeur), ici {wanted}, mais a reçu "
                    f"{given}",
                )
            )
        return _computed(x_LND, _own(rank), seed, size)

    y = answer(_buffers(seed, size)[rank].clone(), own_experts)
    return {"asked": asked}, {OUTPUT: y}


def _whole(rank: int, size: int, seed: int) -> Tensor:
    """Every expert computes what this rank's tokens have sent it."""
    return _computed(_buffers(seed, size)[rank], slice(None), seed, size)


def _journey(size: int, seed: int, way: str) -> list[Tensor]:
    """What each rank would hold in the end, all of them in one process."""
    import torch

    buffers, rows = _buffers(seed, size), LOCAL_EXPERTS * size
    sent = [one.view(size, LOCAL_EXPERTS, ROOM, WIDTH) for one in buffers]
    back: list[list[Tensor]] = []
    for rank in range(size):
        arrived = torch.stack([sent[source][rank] for source in range(size)])  # (n, L, C, D)
        swapped = way not in ("arrives as it came", "neither")
        given = (arrived.transpose(0, 1) if swapped else arrived).reshape(LOCAL_EXPERTS, size * ROOM, WIDTH)
        made = _computed(given, _own(rank), seed, size)
        if way in ("leaves as it is", "neither"):
            leaving = made.reshape(size, LOCAL_EXPERTS, ROOM, WIDTH)
        else:
            leaving = made.view(LOCAL_EXPERTS, size, ROOM, WIDTH).transpose(0, 1)
        back.append(list(leaving))
    if way == "no return":
        return [torch.stack(back[rank]).reshape(rows, ROOM, WIDTH) for rank in range(size)]
    return [torch.cat([back[source][rank] for source in range(size)]) for rank in range(size)]


_WAYS = (
    (
        "neither",
        Said(
            "The two all-to-all are there, but tokens meet the wrong experts: what arrives is ordered by source rank, "
            "then by expert, (ranks, own experts, C, D). Bring the expert to the front (transpose(0, 1)) before you "
            "merge ranks and places, and undo it on the way back.",
            "Les deux all-to-all y sont, mais des tokens rencontrent les mauvais experts : ce qui arrive est rangé par "
            "rang d’origine, puis par expert, (rangs, experts du rang, C, D). Ramenez l’expert devant "
            "(transpose(0, 1)) avant de fusionner rangs et places, et faites l’inverse au retour.",
        ),
    ),
    (
        "arrives as it came",
        Said(
            "Tokens meet the wrong experts: what arrives is ordered by source rank, then by expert, (ranks, own "
            "experts, C, D). Bring the expert to the front (transpose(0, 1)) before you merge ranks and places.",
            "Des tokens rencontrent les mauvais experts : ce qui arrive est rangé par rang d’origine, puis par expert, "
            "(rangs, experts du rang, C, D). Ramenez l’expert devant (transpose(0, 1)) avant de fusionner rangs et "
            "places.",
        ),
    ),
    (
        "leaves as it is",
        Said(
            "The tokens meet the right experts, but return to the wrong places: before the second all-to-all, bring "
            "the ranks to the front again, (ranks, own experts, C, D).",
            "Les tokens rencontrent les bons experts, mais reviennent aux mauvaises places : avant le second "
            "all-to-all, ramenez les rangs devant, (rangs, experts du rang, C, D).",
        ),
    ),
    (
        "no return",
        Said(
            "The results stay with the experts: a second all-to-all must bring each back to the rank of its token.",
            "Les résultats restent chez les experts : un second all-to-all doit ramener chacun au rang de son token.",
        ),
    ),
)


def _inspect(answers: list[RankAnswer], size: int) -> None:
    seed = next(seed for ranks, seed in CASES if ranks == size)
    given = [one.tensors for one in answers]
    truth = [{OUTPUT: _whole(rank, size, seed)} for rank in range(size)]
    if not _equal(given, [one[OUTPUT] for one in truth]):
        for way, says in _WAYS:
            if _equal(given, _journey(size, seed, way)):
                raise Wrong(str(says))
        for evidence in gathered(given, truth, labels=LABELS):
            said = diagnose(evidence)
            if said is not None:
                raise Wrong(str(said))
    _inspect_calls(answers[0], size)


def _equal(given: list[dict[str, Tensor]], expected: list[Tensor]) -> bool:
    return all(OUTPUT in mine and same(mine[OUTPUT], theirs) for mine, theirs in zip(given, expected, strict=True))


def _inspect_calls(first: RankAnswer, size: int) -> None:
    if asked_for(first, "all_gather", "all_gather_into_tensor", "gather", "broadcast", "all_reduce"):
        raise Wrong(
            say(
                en=f"The output is right, but every token goes to every rank, {size} times what is needed: an "
                "all-to-all sends each only to the rank of its expert.",
                fr=f"La sortie est juste, mais chaque token va à chaque rang, {size} fois ce qu’il faut : un "
                "all-to-all n’envoie chacun qu’au rang de son expert.",
            )
        )
    if first.value["asked"] != 1:
        raise Wrong(
            say(
                en=f"The output is right, but own_experts is called {first.value['asked']} times: give it all that "
                "has arrived at once, so that its products are large.",
                fr=f"La sortie est juste, mais own_experts est appelé {first.value['asked']} fois : donnez-lui d’un "
                "seul coup tout ce qui est arrivé, pour que ses produits soient grands.",
            )
        )


def _judge() -> Callable[[Callable[..., Any]], None]:
    judge = by_ranks(trial=_trial, expected=lambda rank, size, seed: {}, cases=CASES, inspect=_inspect)
    judge.on_ranks = True  # type: ignore[attr-defined]
    return judge


EXCHANGE = Exercise(
    id="exchange",
    title=Said("the all-to-all by hand", "l’all-to-all à la main"),
    judge=_judge(),
    praise=Said(
        "Right, on 2 and on 3 ranks: there and back, each token goes to one rank only.",
        "Exact, sur 2 et sur 3 rangs : à l’aller comme au retour, chaque token ne va qu’à un rang.",
    ),
    hints=(
        Said(
            "The rows of buffer are already in the order of the ranks that hold the experts. After the all-to-all, "
            "piece i comes from rank i: of which shape is it, and where must the dimension of experts stand?",
            "Les lignes de buffer sont déjà dans l’ordre des rangs qui détiennent les experts. Après l’all-to-all, le "
            "morceau i vient du rang i : quelle est sa forme, et où doit se trouver la dimension des experts ?",
        ),
        Said(
            "arrived.view(size, own, C, D).transpose(0, 1).reshape(own, size * C, D) for own_experts; then "
            ".view(own, size, C, D).transpose(0, 1).contiguous(), and the second all-to-all into a tensor like buffer.",
            "arrived.view(size, own, C, D).transpose(0, 1).reshape(own, size * C, D) pour own_experts ; puis "
            ".view(own, size, C, D).transpose(0, 1).contiguous(), et le second all-to-all vers un tenseur comme "
            "buffer.",
        ),
    ),
)
