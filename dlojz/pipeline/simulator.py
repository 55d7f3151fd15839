"""When each action starts and ends, given a schedule and its costs.

Layer 2. Invariant: O(actions), exact: an action starts when its rank is free and what it takes has arrived, not before
and not after. The semantics are those with which published tables are reproduced (Qi et al. 2024, Table 5): sends do
not block, links have no contention, ranks keep strictly to their order. `Costs.sends` chooses blocking sends instead.
"""

from __future__ import annotations

import numpy as np

from dlojz.pipeline.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    EVICT,
    FORWARD,
    LOAD,
    OVERLAPPED,
    UPDATE,
    Action,
)
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.graph import Graph
from dlojz.pipeline.rendezvous import simulate_blocking
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.timeline import Timeline
from dlojz.schema import LabError
from dlojz.text import say

UNIT_COSTS = Costs()
"""F = I = W = 1, so B = 2; no latency: the unit of figures and tables."""

_PER_STAGE = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward_input",
    BACKWARD_WEIGHT: "backward_weight",
    UPDATE: "update",
}


def simulate(schedule: Schedule, costs: Costs = UNIT_COSTS) -> Timeline:
    """Start and end of every action.

    Args:
        schedule: what each rank does, in order; its dependencies are compiled at the first call and kept.
        costs: times, in any unit.

    Raises:
        LabError: if the schedule cannot be executed (with the cycle, where it deadlocks), or the costs do not fit it.
    """
    graph = schedule.graph
    durations = durations_of(schedule, costs)
    if costs.sends != "buffered":
        return simulate_blocking(schedule, costs, durations)
    delays = _delays(schedule, graph, costs)
    ends = [0.0] * (graph.actions + 1)
    needs, previous = graph.needs, graph.previous
    if graph.also:
        _run_with_more(graph, durations, delays, ends, _extra(schedule, graph, costs), costs.overhead)
    elif delays is None and not costs.overhead:
        for index in graph.order:
            at, end = ends[previous[index]], ends[needs[index]]
            ends[index] = (at if at > end else end) + durations[index]
    else:
        overhead = costs.overhead
        delays = delays or [0.0] * graph.actions
        for index in graph.order:
            at, end = ends[previous[index]] + overhead, ends[needs[index]] + delays[index]
            ends[index] = (at if at > end else end) + durations[index]
    finish = np.array(ends[:-1])
    return Timeline(schedule, finish - np.array(durations), finish, costs=costs)


def _run_with_more(
    graph: Graph,
    durations: list[float],
    delays: list[float] | None,
    ends: list[float],
    extra: dict[int, list[tuple[int, float]]],
    overhead: float,
) -> None:
    needs, previous = graph.needs, graph.previous
    for index in graph.order:
        at, end = ends[previous[index]] + overhead, ends[needs[index]] + (delays[index] if delays else 0.0)
        at = max(at, end)
        for needed, delay in extra.get(index, ()):
            at = max(at, ends[needed] + delay)
        ends[index] = at + durations[index]


def _extra(schedule: Schedule, graph: Graph, costs: Costs) -> dict[int, list[tuple[int, float]]]:
    extra: dict[int, list[tuple[int, float]]] = {}
    for index, needed in graph.also:
        source, destination = int(graph.rank[needed]), int(graph.rank[index])
        fetched = schedule.actions[needed].kind == LOAD
        delay = costs.eviction_transfer if fetched else costs.delay(source, destination)
        extra.setdefault(index, []).append((needed, delay))
    return extra


def _delays(schedule: Schedule, graph: Graph, costs: Costs) -> list[float] | None:
    """Delay of each action's main input; None where no message takes any time."""
    ranks = schedule.ranks
    matrix = np.array([[costs.delay(source, destination) for destination in range(ranks)] for source in range(ranks)])
    if not matrix.any():
        return None
    needs = np.array(graph.needs, np.int64)
    has = needs < graph.actions
    source = graph.rank[np.where(has, needs, 0)] if graph.actions else needs
    delays: list[float] = np.where(has, matrix[source, graph.rank], 0.0).tolist()
    return delays


def durations_of(schedule: Schedule, costs: Costs) -> list[float]:
    """Duration of each action, in the order of `schedule.actions`.

    Raises:
        LabError: if the costs have values for another number of stages or of slices than the schedule.
    """
    stages = schedule.stages
    table = {kind: costs.per_stage(name, stages) for kind, name in _PER_STAGE.items()}
    table[EVICT], table[LOAD] = [costs.evict] * stages, [costs.load] * stages
    slices = _slices(schedule, costs)
    if schedule.overlaps:
        return [_duration(action, table, costs) * slices[action.token_slice] for action in schedule.actions]
    if schedule.token_slices > 1 or costs.slice_times:
        return [table[action[0]][action[1]] * slices[action[4]] for action in schedule.actions]
    return [table[action[0]][action[1]] for action in schedule.actions]


def _slices(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    if not costs.slice_times:
        return (1.0 / schedule.token_slices,) * schedule.token_slices
    if len(costs.slice_times) != schedule.token_slices:
        raise LabError(
            say(
                en=f"slice_times holds {len(costs.slice_times)} values, but sequences are cut into "
                f"{schedule.token_slices} slices: give one value per slice.",
                fr=f"slice_times contient {len(costs.slice_times)} valeurs, mais les séquences sont coupées en "
                f"{schedule.token_slices} tranches : donnez une valeur par tranche.",
            )
        )
    return costs.slice_times


def _duration(action: Action, table: dict[str, list[float]], costs: Costs) -> float:
    if action.kind != OVERLAPPED:
        return table[action.kind][action.stage]
    if costs.overlapped is None:
        return sum(table[part.kind][part.stage] for part in action.parts)
    return costs.of_stage("overlapped", action.stage)
