"""Whether a schedule can be executed: what is missing, doubled, out of order, blocked or too big.

Layer 2. Invariant: `problems` is empty exactly if every rank can run its list to the end and every micro-batch passes
every stage forward and backward once. Each problem is one sentence that names the action and the rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dlojz.pipeline.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTES,
    FORWARD,
    Action,
)
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.memory import deltas
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.simulator import UNIT_COSTS
from dlojz.pipeline.token_slices import slice_order_problems
from dlojz.schema import LabError
from dlojz.text import say

MAX_PROBLEMS = 5
"""After these many a list of problems only tires."""


def check(schedule: Schedule, memory_limit: float | None = None, costs: Costs = UNIT_COSTS) -> None:
    """Refuse a schedule that cannot be executed.

    Raises:
        LabError: with the first problem.
    """
    for problem in problems(schedule, memory_limit, costs):
        raise LabError(problem)


def problems(schedule: Schedule, memory_limit: float | None = None, costs: Costs = UNIT_COSTS) -> list[str]:
    """All that is wrong with a schedule, at most five sentences; empty if it is valid.

    Args:
        schedule: what to check.
        memory_limit: activations that a rank may keep, in stage-micro-batches; None: any number.
        costs: tells how much each stage keeps.
    """
    found: list[str] = []
    for problem in _problems(schedule, memory_limit, costs):
        found.append(problem)
        if len(found) == MAX_PROBLEMS:
            break
    return found


def _problems(schedule: Schedule, memory_limit: float | None, costs: Costs) -> Iterator[str]:
    sound = True
    for problem in (*_counted(schedule), *_placed(schedule), *_ordered(schedule)):
        sound = False
        yield problem
    if sound:
        try:
            schedule.graph  # noqa: B018  (compiling it finds the deadlocks)
        except LabError as error:
            yield str(error)
    if memory_limit is not None:
        yield from _over_limit(schedule, memory_limit, costs)


def _elements(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    for rank, order in enumerate(schedule.orders):
        for action in order:
            for element in action.elements:
                yield rank, element


def _counted(schedule: Schedule) -> Iterator[str]:
    """Each forward once; each backward once, whole or in its two parts."""
    counted = Counter(element for _, element in _elements(schedule))
    for action, times in counted.items():
        if times > 1 and action.kind in COMPUTES:
            yield say(
                en=f"{action} stands {times} times: each action runs once, remove the others.",
                fr=f"{action} figure {times} fois : chaque action s’exécute une fois, retirez les autres.",
            )
    pipe_of = {(e.micro_batch): e.pipe for _, e in _elements(schedule)} if schedule.pipes > 1 else {}
    for micro_batch in range(schedule.micro_batches):
        for stage in range(schedule.stages):
            for token_slice in range(schedule.token_slices):
                action = Action(FORWARD, stage, micro_batch, pipe_of.get(micro_batch, 0), token_slice)
                yield from _passes(action, counted, schedule.rank_of(action))


def _passes(action: Action, counted: Counter[Action], rank: int) -> Iterator[str]:
    if not counted[action]:
        yield say(
            en=f"{action} is missing: add it to rank {rank}, which holds stage {action.stage}.",
            fr=f"{action} manque : ajoutez-la au rang {rank}, qui porte l’étage {action.stage}.",
        )
    whole, for_input, for_weight = (action._replace(kind=kind) for kind in (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT))
    has = tuple(bool(counted[one]) for one in (whole, for_input, for_weight))
    if has in ((True, False, False), (False, True, True)):
        return
    if not any(has):
        yield say(
            en=f"{whole} is missing: add it to rank {rank} (or {for_input} and {for_weight}, if you split it).",
            fr=f"{whole} manque : ajoutez-la au rang {rank} (ou {for_input} et {for_weight}, si vous la découpez).",
        )
    elif has[0]:
        extra = for_input if has[1] else for_weight
        yield say(
            en=f"{whole} is a whole backward, so {extra} computes the same again: keep one of the two writings.",
            fr=f"{whole} est une passe arrière entière : {extra} recalcule la même chose, gardez une des écritures.",
        )
    else:
        there, other = (for_input, for_weight) if has[1] else (for_weight, for_input)
        yield say(
            en=f"{there} is there, but {other} is missing: a split backward has both parts.",
            fr=f"{there} est là, mais {other} manque : une passe arrière découpée a ses deux parties.",
        )


def _placed(schedule: Schedule) -> Iterator[str]:
    """Every action on the rank that holds its stage, and within the schedule's numbers."""
    for rank, action in _elements(schedule):
        inside = (
            0 <= action.stage < schedule.stages
            and 0 <= action.micro_batch < schedule.micro_batches
            and 0 <= action.pipe < schedule.pipes
            and 0 <= action.token_slice < schedule.token_slices
        )
        if not inside:
            yield say(
                en=f"{action} on rank {rank} is outside the schedule, which has stages 0 to {schedule.stages - 1} and "
                f"micro-batches 0 to {schedule.micro_batches - 1}: correct its numbers.",
                fr=f"{action}, sur le rang {rank}, sort de l’ordonnancement, qui a les étages 0 à "
                f"{schedule.stages - 1} et les micro-batches 0 à {schedule.micro_batches - 1} : corrigez ses numéros.",
            )
        elif schedule.rank_of(action) != rank:
            yield say(
                en=f"{action} is on rank {rank}, but stage {action.stage} is on rank {schedule.rank_of(action)}: move "
                "it there.",
                fr=f"{action} est sur le rang {rank}, mais l’étage {action.stage} est sur le rang "
                f"{schedule.rank_of(action)} : déplacez-la.",
            )


def _ordered(schedule: Schedule) -> Iterator[str]:
    """On its rank, a micro-batch is first passed forward, then backward, then its weight gradients are computed."""
    for rank, order in enumerate(schedule.orders):
        at = {element: number for number, action in enumerate(order) for element in action.elements}
        for action, number in at.items():
            if action.kind in (BACKWARD, BACKWARD_INPUT):
                before = action._replace(kind=FORWARD)
            elif action.kind == BACKWARD_WEIGHT:
                before = action._replace(kind=BACKWARD_INPUT)
            else:
                continue
            if before in at and at[before] >= number:
                yield say(
                    en=f"rank {rank} runs {action} before {before}, whose result it needs: put {before} first.",
                    fr=f"le rang {rank} exécute {action} avant {before}, dont il a besoin : placez {before} d’abord.",
                )
    yield from slice_order_problems(schedule)


def _over_limit(schedule: Schedule, limit: float, costs: Costs) -> Iterator[str]:
    share = 1 / schedule.token_slices
    for rank, order in enumerate(schedule.orders):
        held = 0.0
        for action in order:
            changes = [
                u for e in action.elements for holder, _, u in deltas(e, rank, {}, costs, share) if holder == rank
            ]
            for units in changes:
                held += units
                if held > limit + 1e-9:
                    yield say(
                        en=f"rank {rank} keeps {held:g} stage-micro-batches at {action}, but the limit is {limit:g}: "
                        "run a backward before that forward, or raise the limit.",
                        fr=f"le rang {rank} garde {held:g} micro-batches d’étage à {action}, mais la limite est "
                        f"{limit:g} : exécutez une passe arrière avant cette passe avant, ou relevez la limite.",
                    )
                    break
            else:
                continue
            break
