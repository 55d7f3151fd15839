"""What the length of an iteration hangs on: the chain of actions without slack, and the slack of all others.

Layer 2. Invariant: O(actions). The chain leads from an action at the first start to the one that ends last, each action
followed by the one that waited for it; nothing on it can take longer without the makespan growing as much.

Source: Kelley & Walker 1959, "Critical-path planning and scheduling", for activities on nodes with delays between them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlojz.pipeline.action import LOAD
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.rendezvous import programs_of
from dlojz.pipeline.timeline import Timeline


def critical_path(timeline: Timeline, costs: Costs | None = None) -> tuple[int, ...]:
    """Numbers of the actions of one critical path, in order of time.

    Each one starts when the one before it ends, plus the delay of the message between them where they are on two
    ranks. Where several would do, the one on the same rank is taken: looking back, the chain changes rank only where it
    must.

    Args:
        timeline: simulated, or measured: there the chain goes on with what arrived last, overheads between.
        costs: tells how long messages take; by default those that were simulated, else nothing.
    """
    if not timeline.starts.size:
        return ()
    waits = _waits(timeline, costs or timeline.costs)
    ends = timeline.ends.tolist()
    current = int(np.argmax(timeline.ends))
    path = [current]
    while waits[current]:
        # max() keeps the first of equals, and the action before on the same rank stands first.
        current = max(waits[current], key=lambda wait: ends[wait[0]] + wait[1])[0]
        path.append(current)
    return tuple(reversed(path))


def slack(timeline: Timeline, costs: Costs | None = None) -> NDArray[np.float64]:
    """Per action, how much later it could end, or how much longer it could take, without a longer makespan.

    0 on the critical path. Each value holds if nothing else changes: slack that two actions share is there once.

    Args:
        timeline: simulated with sends that do not block, for exact values.
        costs: as in `critical_path`.
    """
    graph = timeline.schedule.graph
    latest = [timeline.start + timeline.makespan] * graph.actions
    durations = timeline.durations.tolist()
    costs = costs or timeline.costs
    waits = _waits(timeline, costs)
    # Where sends block, actions also wait for receivers, which the graph does not know: the times do.
    blocking = costs is not None and costs.sends != "buffered"
    order = sorted(graph.order, key=timeline.ends.tolist().__getitem__) if blocking else graph.order
    for index in reversed(order):
        start = latest[index] - durations[index]
        for needed, delay in waits[index]:
            latest[needed] = min(latest[needed], start - delay)
    return np.array(latest) - timeline.ends


def _waits(timeline: Timeline, costs: Costs | None) -> list[list[tuple[int, float]]]:
    """For each action, those that it waits for, with the delay in between; the one before on its rank stands first."""
    schedule = timeline.schedule
    graph = schedule.graph
    rank = graph.rank.tolist()
    waits: list[list[tuple[int, float]]] = [
        [(previous, 0.0)] if previous < graph.actions else [] for previous in graph.previous
    ]
    inputs = [(index, needed) for index, needed in enumerate(graph.needs) if needed < graph.actions]
    for index, needed in (*inputs, *graph.also):
        if schedule.actions[needed].kind == LOAD:
            delay = costs.eviction_transfer if costs else 0.0
        else:
            delay = costs.delay(rank[needed], rank[index]) if costs else 0.0
        waits[index].append((needed, delay))
    if costs and costs.sends != "buffered":
        _add_receivers(timeline, costs, waits)
    return waits


def _add_receivers(timeline: Timeline, costs: Costs, waits: list[list[tuple[int, float]]]) -> None:
    """Where sends block, what follows a send also waits for the receiver to be ready: for what it did before."""
    graph = timeline.schedule.graph
    rank = graph.rank.tolist()
    for number, program in enumerate(programs_of(timeline.schedule, costs.sends == "paired")):
        passed: list[tuple[int, float]] = []
        for step in program:
            if isinstance(step, int):
                waits[step] += passed
                passed = []
                continue
            for message in step:
                before = graph.previous[message.consumer]
                if rank[message.producer] == number and before < graph.actions:
                    passed.append((before, costs.delay(number, rank[message.consumer])))
