"""Lab 05: 1F1B's order, written rank by rank, and what GPipe and 1F1B keep.

Layer 6 (labs). Invariant: an order is right if it can be executed, takes as long as 1F1B and keeps as little; how it is
written does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.pipeline_answers import case_of, read_order, refuse_invalid, schedule_from
from dlojz.labs.verdict import Said
from dlojz.pipeline.catalogue import build
from dlojz.pipeline.memory import peak_activations
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.simulator import simulate
from dlojz.text import say

_SIZES = ((4, 8), (2, 4), (3, 7), (1, 3), (4, 2), (8, 16), (5, 5))
"""Ranks and micro-batches: fewer micro-batches than ranks, and one rank, among them."""


def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> list[str]:
    """1F1B's order of a rank: min(p − r, m) forwards, then a backward and a forward in turn, then the backwards left.

    Source: Fan et al. 2021 (arXiv 2007.01045), §4; Narayanan et al. 2021 (arXiv 2006.09503), §2.2.
    """
    warm_up = min(ranks - rank, micro_batches)
    order = [f"F{number}" for number in range(warm_up)]
    for number in range(micro_batches):
        order.append(f"B{number}")
        if warm_up + number < micro_batches:
            order.append(f"F{warm_up + number}")
    return order


def _judge_order(answer: Callable[..., Any]) -> None:
    for ranks, micro_batches in _SIZES:
        given = [read_order(answer(rank, ranks, micro_batches), rank) for rank in range(ranks)]
        schedule = schedule_from(given, micro_batches)
        reference = build("1f1b", ranks, micro_batches)
        if schedule.orders == reference.orders:
            continue
        said = _known(schedule)
        if said:
            raise Wrong(case_of(schedule) + said)
        refuse_invalid(schedule)
        _compare(schedule, reference)


def _known(schedule: Schedule) -> str:
    """The usual slips, by their order."""
    size = (schedule.ranks, schedule.micro_batches)
    forwards = [next((n for n, action in enumerate(order) if action.kind != "F"), 0) for order in schedule.orders]
    if schedule.orders == build("gpipe", *size).orders:
        return say(
            en="this is GPipe, all forwards before the first backward: each rank keeps all micro-batches. 1F1B begins "
            "its backwards as soon as it can.",
            fr="c’est GPipe, toutes les passes avant d’abord : chaque rang garde tous les micro-batches. 1F1B commence "
            "ses passes arrière dès que possible.",
        )
    if schedule.ranks > 1 and forwards == [min(rank + 1, size[1]) for rank in range(schedule.ranks)] != [
        min(schedule.ranks - rank, size[1]) for rank in range(schedule.ranks)
    ]:
        return say(
            en="your warm-up is the wrong way round: the last rank is next to the loss and can go back after 1 "
            "forward; rank 0 is the one that waits longest, so it runs p forwards first.",
            fr="votre démarrage est inversé : le dernier rang calcule la perte et peut repartir après 1 passe avant ; "
            "c’est le rang 0 qui attend le plus longtemps : il exécute d’abord p passes avant.",
        )
    if schedule.ranks > 1 and forwards == [min(schedule.ranks - rank - 1, size[1]) for rank in range(schedule.ranks)]:
        return say(
            en="your warm-up is one forward short: p − 1 − r forwards are right if the loop that follows is (forward, "
            "backward), but before (backward, forward) it takes p − r.",
            fr="il manque une passe avant au démarrage : p − 1 − r suffisent si la boucle qui suit est (avant, "
            "arrière), mais devant (arrière, avant) il en faut p − r.",
        )
    return ""


def _compare(schedule: Schedule, reference: Schedule) -> None:
    """Valid; but is it as short, and does it keep as little?"""
    peaks, right = peak_activations(schedule), peak_activations(reference)
    for rank, (kept, wanted) in enumerate(zip(peaks, right, strict=True)):
        if kept > wanted:
            raise Wrong(
                case_of(schedule)
                + say(
                    en=f"rank {rank} keeps up to {kept:g} micro-batches, but 1F1B keeps {wanted:g} there: it runs "
                    f"{wanted:g} forward(s), then a backward before each further one.",
                    fr=f"le rang {rank} garde jusqu’à {kept:g} micro-batches, alors que 1F1B n’en garde que "
                    f"{wanted:g} : {wanted:g} passe(s) avant, puis une passe arrière avant chacune des suivantes.",
                )
            )
    length, best = simulate(schedule).makespan, simulate(reference).makespan
    if length > best:
        raise Wrong(
            case_of(schedule)
            + say(
                en=f"your order can be executed, but takes {length:g} time units and not {best:g}: some rank turns "
                "back too early, and its neighbours wait. How many forwards fit before the first gradient comes back?",
                fr=f"votre ordre s’exécute, mais dure {length:g} unités de temps au lieu de {best:g} : un rang repart "
                "trop tôt en arrière, et ses voisins attendent. Combien de passes avant tiennent avant le retour du "
                "premier gradient ?",
            )
        )


ONE_F_ONE_B = Exercise(
    id="one-f-one-b",
    title=Said("1F1B's order", "l’ordre de 1F1B"),
    judge=_judge_order,
    praise=Said(
        "Right, for 1 to 8 ranks, with fewer micro-batches than ranks too: as long as GPipe, and far less kept.",
        "Exact, de 1 à 8 rangs, et même avec moins de micro-batches que de rangs : aussi long que GPipe, pour bien "
        "moins de mémoire.",
    ),
    hints=(
        Said(
            "Rank r first runs p − r forwards (m at most): so many go in before the first gradient comes back to it. "
            "Then each backward makes room for one more forward.",
            "Le rang r exécute d’abord p − r passes avant (m au plus) : autant entrent avant que le premier gradient "
            "lui revienne. Ensuite, chaque passe arrière fait place à une passe avant de plus.",
        ),
        Said(
            "order = the forwards 0 … w − 1 with w = min(ranks - rank, micro_batches); then, for each micro-batch k: "
            'add f"B{k}", and f"F{k + w}" if k + w < micro_batches.',
            "order = les passes avant 0 … w − 1, avec w = min(ranks - rank, micro_batches) ; puis, pour chaque "
            'micro-batch k : ajoutez f"B{k}", et f"F{k + w}" si k + w < micro_batches.',
        ),
    ),
)


def kept(schedule: str, rank: int, ranks: int, micro_batches: int) -> int:
    """Micro-batches whose activations a rank keeps at most: m for GPipe, min(p − r, m) for 1F1B.

    Source: Narayanan et al. 2021 (arXiv 2006.09503), §2.2.
    """
    return micro_batches if schedule == "gpipe" else min(ranks - rank, micro_batches)


def _places() -> Iterator[tuple[str, int, int, int]]:
    for ranks, micro_batches in ((4, 8), (2, 6), (8, 3), (3, 7)):
        for rank in range(ranks):
            for schedule in ("1f1b", "gpipe"):
                yield schedule, rank, ranks, micro_batches


KEPT = Exercise(
    id="kept-micro-batches",
    title=Said("what GPipe and 1F1B keep", "ce que gardent GPipe et 1F1B"),
    judge=by_reference(
        kept,
        cases=_places,
        mistakes=(
            Mistake(
                lambda schedule, r, p, m: m if schedule == "gpipe" else min(p, m),
                Said(
                    "For 1F1B you give what rank 0 keeps; each further rank gets its first gradient sooner and keeps "
                    "one fewer.",
                    "Pour 1F1B, vous donnez ce que garde le rang 0 ; chaque rang suivant reçoit son premier gradient "
                    "plus tôt et en garde un de moins.",
                ),
            ),
            Mistake(
                lambda schedule, r, p, m: m if schedule == "gpipe" else p - r,
                Said(
                    "Right as long as there are enough micro-batches; but a rank cannot keep more than there are, m.",
                    "C’est juste tant qu’il y a assez de micro-batches ; mais un rang ne peut en garder plus qu’il n’y "
                    "en a, m.",
                ),
            ),
            Mistake(
                lambda schedule, r, p, m: m if schedule == "gpipe" else min(r + 1, m),
                Said(
                    "For 1F1B the ranks are the wrong way round: the last one, next to the loss, keeps 1.",
                    "Pour 1F1B, les rangs sont inversés : c’est le dernier, où se calcule la perte, qui en garde 1.",
                ),
            ),
            Mistake(
                lambda schedule, r, p, m: min(p - r, m),
                Said(
                    "GPipe keeps more: its first backward comes after the last forward.",
                    "GPipe garde davantage : sa première passe arrière vient après la dernière passe avant.",
                ),
            ),
            Mistake(
                lambda schedule, r, p, m: m if schedule == "gpipe" else min(p - r - 1, m),
                Said(
                    "For 1F1B the micro-batch that is in its own backward is missing: even the last rank keeps 1.",
                    "Pour 1F1B, il manque le micro-batch dont la passe arrière est en cours : même le dernier rang en "
                    "garde 1.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right. GPipe's memory grows with the micro-batches, 1F1B's with the ranks: that is all 1F1B gains, and it is "
        "much.",
        "Exact. La mémoire de GPipe croît avec les micro-batches, celle de 1F1B avec les rangs : c’est tout ce que "
        "gagne 1F1B, et c’est beaucoup.",
    ),
    hints=(
        Said(
            "A forward takes one, its backward gives it back. How many forwards does each rank run before its first "
            "backward?",
            "Une passe avant en prend un, sa passe arrière le rend. Combien de passes avant chaque rang exécute-t-il "
            "avant sa première passe arrière ?",
        ),
        Said(
            "GPipe: micro_batches, on every rank. 1F1B: min(ranks - rank, micro_batches).",
            "GPipe : micro_batches, sur chaque rang. 1F1B : min(ranks - rank, micro_batches).",
        ),
    ),
)
