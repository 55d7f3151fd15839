"""How fast a schedule is in the long run: the time per micro-batch of its steady state.

Layer 2. Invariant: found from the order and the costs alone, as the largest ratio of a cycle of actions that wait for
each other; what happens while the pipeline fills and drains has no part in it.

Where a rank repeats the same actions for ever later micro-batches, each action X of micro-batch k waits for others, of
the same or of another micro-batch. A cycle of such waits that takes the time T and leads n micro-batches on can be gone
through once per T, so n micro-batches take at least T; the largest T/n of all cycles is the period. A rank's own cycle
gives its work; 1F1B has one through all ranks and back, which takes p (F + B) + 2 (p − 1) c and leads p on: that is why
it is slower than GPipe as soon as messages take time.

Source: Reiter 1968, "Scheduling parallel computations", for periods as cycle ratios; cycles are improved one after the
other as in Burns 1991, "Performance analysis and optimization of asynchronous circuits".
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from dlojz.pipeline.action import BACKWARD, BACKWARD_INPUT, FORWARD, LOAD, Action
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.simulator import UNIT_COSTS, durations_of

_MARGIN = 1e-9

Signature = tuple[tuple[str, int, int, int], ...]
"""What an action is, whatever its micro-batch: kind, stage, pipe and token slice of its elements."""
Node = tuple[Signature, int]
"""An action of the steady state: what it is, and its micro-batch within the repeated group."""


class _Arc(NamedTuple):
    """`after` waits for `before`, which is of a group of micro-batches `lead` later (earlier, if negative)."""

    before: int
    after: int
    time: float
    lead: int


def steady_period(schedule: Schedule, costs: Costs = UNIT_COSTS) -> float | None:
    """Time per micro-batch in the long run; None for a schedule that has no steady state (GPipe), or not yet.

    Args:
        schedule: with enough micro-batches that all ranks repeat themselves in the middle of their order.
        costs: times; sends that do not block.
    """
    windows = [_repeated(order) for order in schedule.orders]
    if not schedule.actions or not all(windows):
        return None
    group = math.lcm(*(window[2] for window in windows if window))
    numbers: list[int] = []
    for rank, window in enumerate(windows):
        if window is None:
            return None
        start, length, own = window
        stop = start + length * (group // own)
        if stop > len(schedule.orders[rank]):
            return None
        first = schedule.first_of_rank[rank]
        numbers += range(first + start, first + stop)
    arcs = _arcs(schedule, costs, numbers, group)
    return None if arcs is None else _largest_ratio(arcs, len(numbers)) / (group * schedule.pipes)


def _signature(action: Action) -> Signature:
    return tuple((e.kind, e.stage, e.pipe, e.token_slice) for e in action.elements)


def _repeated(order: tuple[Action, ...]) -> tuple[int, int, int] | None:
    """(start, length, micro-batches) of the shortest stretch in the middle of an order that stands there twice."""
    signatures = [_signature(action) for action in order]
    forwards = {element for signature in signatures for element in signature if element[0] == FORWARD}
    middle = len(order) // 2
    for length in range(1, middle + 1):
        start = middle - length // 2
        if start + length > len(order) or start < length:
            break
        steps = {
            here.micro_batch - before.micro_batch if signature == signatures[number - length] else 0
            for number, signature in enumerate(signatures[start : start + length], start)
            for here, before in zip(order[number].elements, order[number - length].elements, strict=False)
        }
        step = steps.pop()
        found = Counter(element for signature in signatures[start : start + length] for element in signature)
        passed = all(
            found[one] == step == sum(found[kind, *one[1:]] for kind in (BACKWARD, BACKWARD_INPUT)) for one in forwards
        )
        if not steps and step > 0 and passed:
            return start - length, length, step
    return None


def _arcs(schedule: Schedule, costs: Costs, numbers: list[int], group: int) -> list[_Arc] | None:
    """What the actions of the steady state wait for; None if one waits for something that is not repeated."""
    graph, actions, durations = schedule.graph, schedule.actions, durations_of(schedule, costs)
    rank = graph.rank.tolist()
    node_of: dict[Node, int] = {}
    for node, number in enumerate(numbers):
        node_of[_signature(actions[number]), actions[number].micro_batch % group] = node
    more: dict[int, list[int]] = {}
    for index, needed in graph.also:
        more.setdefault(index, []).append(needed)
    arcs = []
    for node, number in enumerate(numbers):
        previous = graph.previous[number]
        inputs = [one for one in (graph.needs[number], *more.get(number, ())) if one < graph.actions]
        for needed in (*([previous] if previous < graph.actions else []), *inputs):
            action = actions[needed]
            before = node_of.get((_signature(action), action.micro_batch % group))
            if before is None:
                return None
            delay = 0.0
            if needed in inputs:
                fetched = action.kind == LOAD
                delay = costs.eviction_transfer if fetched else costs.delay(rank[needed], rank[number])
            lead = action.micro_batch // group - actions[number].micro_batch // group
            arcs.append(_Arc(before, node, durations[needed] + delay, lead))
    return arcs


def _largest_ratio(arcs: list[_Arc], nodes: int) -> float:
    """The largest time over micro-batch groups of all cycles: go to a better cycle until there is none."""
    ratio = 0.0
    while True:
        cycle = _better_cycle(arcs, nodes, ratio)
        if cycle is None:
            return ratio
        ratio = sum(arc.time for arc in cycle) / -sum(arc.lead for arc in cycle)


def _better_cycle(arcs: list[_Arc], nodes: int, ratio: float) -> list[_Arc] | None:
    """A cycle that takes longer than `ratio` per group, by Bellman & Ford's algorithm for longest paths."""
    longest = [0.0] * nodes
    by: list[_Arc | None] = [None] * nodes
    changed = -1
    for _ in range(nodes + 1):
        changed = -1
        for arc in arcs:
            length = longest[arc.before] + arc.time + ratio * arc.lead
            if length > longest[arc.after] + _MARGIN:
                longest[arc.after], by[arc.after], changed = length, arc, arc.after
        if changed < 0:
            return None
        cycle = _cycle(by, changed)
        if cycle:
            return cycle
    return None


def _cycle(by: list[_Arc | None], start: int) -> list[_Arc] | None:
    """The cycle that one comes to by going back from a node, if there is one."""
    seen: dict[int, int] = {}
    path: list[_Arc] = []
    node = start
    while node not in seen:
        seen[node] = len(path)
        arc = by[node]
        if arc is None:
            return None
        path.append(arc)
        node = arc.before
    return path[seen[node] :]
