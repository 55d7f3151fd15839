"""Lab 05: schedules that block, and one to be repaired: 1F1B with blocking sends.

Layer 6 (labs). Invariant: an answer is executed by the simulator under the very sends that deadlocked; a cycle that
remains is told as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.pipeline_answers import read_schedule, refuse_invalid
from dlojz.labs.verdict import Said
from dlojz.pipeline.catalogue import build
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.memory import peak_activations
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.simulator import simulate
from dlojz.schema import LabError
from dlojz.text import say

RANKS, MICRO_BATCHES = 2, 4
LIMIT = 3
"""Micro-batches that a rank may keep: GPipe, which never deadlocks, keeps 4."""
BLOCKING = Costs(sends="rendezvous")


def unblocked() -> list[list[str]]:
    """An order of 2 ranks and 4 micro-batches that runs with blocking sends and keeps at most 3 micro-batches.

    A rank that sends must find the other one receiving. In 1F1B both ranks send between their first backward and the
    forward that follows: one more forward before it, on the last rank as on the first, and they take turns.
    """
    ahead = ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]
    return [ahead, ahead]


def _judge(answer: Callable[..., Any]) -> None:
    schedule = read_schedule(answer(), RANKS, MICRO_BATCHES)
    refuse_invalid(schedule)
    try:
        length = simulate(schedule, BLOCKING).makespan
    except LabError as error:
        same = schedule.orders == build("1f1b", RANKS, MICRO_BATCHES).orders
        raise Wrong(
            (say(en="That is 1F1B still. ", fr="C’est encore 1F1B. ") if same else "") + _first_sentence(str(error))
        ) from None
    peak = max(peak_activations(schedule))
    if peak > LIMIT:
        raise Wrong(
            say(
                en=f"Nothing deadlocks, but a rank keeps {peak:g} micro-batches, and only {LIMIT} are allowed: put a "
                "backward before the last forward.",
                fr=f"Plus d’interblocage, mais un rang garde {peak:g} micro-batches, et {LIMIT} seulement sont permis "
                ": placez une passe arrière avant la dernière passe avant.",
            )
        )
    slow = simulate(build("naive", RANKS, MICRO_BATCHES)).makespan
    if length >= slow:
        raise Wrong(
            say(
                en=f"Nothing deadlocks, but the step takes {length:g} time units, as without a pipeline: one rank "
                "always waits for the other. Let each run at least two forwards before its first backward.",
                fr=f"Plus d’interblocage, mais le pas dure {length:g} unités de temps, comme sans pipeline : un rang "
                "attend toujours l’autre. Laissez chacun exécuter au moins deux passes avant d’abord.",
            )
        )


def _first_sentence(text: str) -> str:
    """The cycle, without the advice that follows it, which is the answer to another question."""
    return text[0].upper() + text[1:].split(". ", 1)[0] + "."


UNBLOCK = Exercise(
    id="unblock",
    title=Said("repair a deadlock", "réparer un interblocage"),
    judge=_judge,
    praise=Said(
        "Right: whenever one rank sends, the other receives. The price is time or memory, which posting both at once "
        "does not ask for.",
        "Exact : quand un rang envoie, l’autre reçoit. Le prix se paie en temps ou en mémoire ; poster les deux à la "
        "fois ne coûte rien de cela.",
    ),
    hints=(
        Said(
            "Both ranks send at the same time: rank 0 the output of F1, rank 1 the gradient of B0. What if rank 1 "
            "first took that output, by running F1 before B0?",
            "Les deux rangs envoient au même moment : le rang 0 la sortie de F1, le rang 1 le gradient de B0. Et si le "
            "rang 1 prenait d’abord cette sortie, en exécutant F1 avant B0 ?",
        ),
        Said(
            "Give both ranks the same order, with two or three forwards at its head, then backwards and forwards in "
            "turn.",
            "Donnez aux deux rangs le même ordre, avec deux ou trois passes avant en tête, puis une passe arrière et "
            "une passe avant en alternance.",
        ),
    ),
)


def without_bubble() -> list[list[str]]:
    """ZB-H1 for 2 ranks and 4 micro-batches: 13 time units, which is the lower bound; each rank keeps 2.

    Source: Qi et al. 2024 (arXiv 2401.10241), §2.1.
    """
    return [[str(action) for action in order] for order in build("zb-h1", RANKS, MICRO_BATCHES).orders]


BEST, KEPT = 13, 2
"""The proven optimum of 2 ranks and 4 micro-batches, F = I = W = 1, and what 1F1B's rank 0 keeps."""


def _judge_split(answer: Callable[..., Any]) -> None:
    schedule = read_schedule(answer(), RANKS, MICRO_BATCHES)
    refuse_invalid(schedule)
    if not schedule.splits_backward:
        raise Wrong(
            say(
                en="Your backwards are whole: write I and W in place of B. Only I makes the rank before go on, W can "
                "wait for a gap.",
                fr="Vos passes arrière sont entières : écrivez I et W au lieu de B. Seul I fait avancer le rang "
                "précédent, W peut attendre un creux.",
            )
        )
    refuse_invalid(schedule, KEPT)
    length = simulate(schedule).makespan
    if length > BEST:
        raise Wrong(
            say(
                en=f"Valid, within {KEPT} micro-batches, but {length:g} time units; {BEST} are possible. "
                f"{_who_waits(schedule)}",
                fr=f"Valide, sans dépasser {KEPT} micro-batches, mais {length:g} unités de temps ; on peut faire "
                f"{BEST}. {_who_waits(schedule)}",
            )
        )


def _who_waits(schedule: Schedule) -> str:
    """The first gap that a pending weight gradient could have filled, or else the idlest rank."""
    timeline = simulate(schedule)
    rank = max(range(schedule.ranks), key=lambda one: timeline.idle[one])
    return say(
        en=f"Rank {rank} waits for {timeline.idle[rank]:g} of them: which W could it run meanwhile, or which I should "
        "come sooner?",
        fr=f"Le rang {rank} en passe {timeline.idle[rank]:g} à attendre : quel W pourrait-il exécuter pendant ce temps,"
        " ou quel I devrait venir plus tôt ?",
    )


ZERO_BUBBLE = Exercise(
    id="zero-bubble",
    title=Said("your own schedule, with the backward split", "votre ordonnancement, passe arrière découpée"),
    judge=_judge_split,
    praise=Said(
        "Right: 13 time units in place of 15, with no more memory. No schedule is shorter.",
        "Exact : 13 unités de temps au lieu de 15, sans mémoire de plus. Aucun ordonnancement n’est plus court.",
    ),
    hints=(
        Said(
            "Start from 1F1B and write each B as I, then W. Where does rank 0 wait for a gradient? Rank 1 could send "
            "it sooner if its W came later; but W also gives the memory back.",
            "Partez de 1F1B et écrivez chaque B comme I, puis W. Où le rang 0 attend-il un gradient ? Le rang 1 "
            "pourrait l’envoyer plus tôt en retardant ses W ; mais c’est aussi W qui rend la mémoire.",
        ),
        Said(
            "Rank 0 stays F0 F1 I0 W0 F2 I1 W1 F3 … Rank 1 always keeps one W back: F0 I0 F1 I1 W0 F2 I2 W1 … and its "
            "last W at the end.",
            "Le rang 0 reste F0 F1 I0 W0 F2 I1 W1 F3 … Le rang 1 garde toujours un W en réserve : F0 I0 F1 I1 W0 F2 I2 "
            "W1 … et son dernier W à la fin.",
        ),
    ),
)
