"""Lab 05: the shortest schedule under a memory limit.

Layer 6 (labs). Invariant: an answer is held to the proven optimum of each case, from the stored table: whatever way it
was found, it must be valid, keep within the limit, and be as short.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.pipeline_answers import case_of, read_schedule, refuse_invalid
from dlojz.labs.verdict import Said
from dlojz.pipeline.list_scheduler import list_schedule
from dlojz.pipeline.memory import peak_activations
from dlojz.pipeline.optimum import optimum
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.simulator import simulate
from dlojz.text import say

CASES = ((4, 8, 3), (4, 8, 2), (3, 6, 2), (4, 6, 4), (2, 6, 1), (4, 8, 8))
"""Ranks, micro-batches, and how many of them each rank may keep."""


def under_cap(ranks: int, micro_batches: int, limit: int) -> Schedule:
    """The shortest schedule that keeps within a limit: backwards first, and forwards only as long as there is room.

    For F = 1, B = 2, p ≤ 4 and m ≤ 8 this is the proven optimum (`dlojz.pipeline.optimum`).
    """
    return list_schedule(ranks, micro_batches, priority="backward-first", cap=limit)


def _judge(answer: Callable[..., Any]) -> None:
    for ranks, micro_batches, limit in CASES:
        schedule = read_schedule(answer(ranks, micro_batches, limit), ranks, micro_batches)
        refuse_invalid(schedule)
        peaks = peak_activations(schedule)
        if max(peaks) > limit:
            rank = peaks.index(max(peaks))
            raise Wrong(
                _case(schedule, limit)
                + say(
                    en=f"rank {rank} keeps {max(peaks):g}. A forward must wait until a backward has made room: see "
                    "the argument cap.",
                    fr=f"le rang {rank} en garde {max(peaks):g}. Une passe avant doit attendre qu’une passe arrière "
                    "ait fait de la place : voyez l’argument cap.",
                )
            )
        length, best = simulate(schedule).makespan, optimum(ranks, micro_batches, memory_limit=limit).value
        if length > best:
            raise Wrong(_case(schedule, limit) + _too_long(length, best, max(peaks), limit))


def _case(schedule: Schedule, limit: int) -> str:
    text = case_of(schedule).removesuffix(": ").rstrip()
    return say(en=f"{text}, {limit} of them kept at most: ", fr=f"{text}, dont {limit} gardés au plus : ")


def _too_long(length: float, best: float, peak: float, limit: int) -> str:
    if peak < limit and peak <= 1:
        return say(
            en=f"the step takes {length:g} time units, and {best:g} are possible: you keep {peak:g} micro-batch, as "
            "without a pipeline; use the memory there is.",
            fr=f"le pas dure {length:g} unités de temps, alors que {best:g} suffisent : vous gardez {peak:g} "
            "micro-batch, comme sans pipeline ; servez-vous de la mémoire disponible.",
        )
    return say(
        en=f"the step takes {length:g} time units, and {best:g} are possible. Some rank waits for a forward while a "
        "backward is ready, and holds up the others: run a backward as soon as its gradient has come, see the argument "
        "priority.",
        fr=f"le pas dure {length:g} unités de temps, alors que {best:g} suffisent. Un rang attend une passe avant "
        "quand une passe arrière est prête, et bloque les autres : exécutez une passe arrière dès que son gradient est "
        "arrivé, voyez l’argument priority.",
    )


MEMORY_CAP = Exercise(
    id="memory-cap",
    title=Said("a schedule under a memory limit", "un ordonnancement sous contrainte de mémoire"),
    judge=_judge,
    praise=Said(
        "Right: in every case your schedule is as short as the proven optimum.",
        "Exact : dans tous les cas, votre ordonnancement est aussi court que l’optimum prouvé.",
    ),
    hints=(
        Said(
            "list_schedule makes the orders; you only choose what goes first, and how many micro-batches a rank may "
            "keep. GPipe is forward-first without a cap. What gives memory back?",
            "list_schedule écrit les ordres ; vous choisissez seulement ce qui passe d’abord, et combien de "
            "micro-batches un rang peut garder. GPipe, c’est forward-first sans cap. Qu’est-ce qui rend la mémoire ?",
        ),
        Said(
            'Two arguments: priority="backward-first", and cap=limit.',
            'Deux arguments : priority="backward-first" et cap=limit.',
        ),
    ),
)
