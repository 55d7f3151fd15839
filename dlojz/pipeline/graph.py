"""What waits for what: the dependencies of a schedule, compiled once and put in an order that respects them all.

Layer 2. Invariant: compiling is O(actions); a schedule that cannot end is refused with the cycle of actions that wait
for each other. Within a rank, each action waits for the one before it; across ranks, a forward waits for the forward of
the stage before, a backward (or a backward for the input) for that of the stage behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from dlojz.pipeline.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, EVICT, FORWARD, LOAD, UPDATE, Action
from dlojz.schema import LabError
from dlojz.text import say

Orders = tuple[tuple[Action, ...], ...]
Placement = tuple[tuple[int, ...], ...]
Integers = NDArray[np.int64]

_FORWARDS, _BACKWARDS, _WEIGHTS, _EVICTIONS, _LOADS, _UPDATES = range(6)
_TABLE = {
    FORWARD: _FORWARDS,
    BACKWARD: _BACKWARDS,
    BACKWARD_INPUT: _BACKWARDS,
    BACKWARD_WEIGHT: _WEIGHTS,
    EVICT: _EVICTIONS,
    LOAD: _LOADS,
    UPDATE: _UPDATES,
}
"""Which table an action is entered in: B and I alike produce the gradient that the stage before waits for."""


@dataclass(frozen=True)
class Graph:
    """The compiled dependencies; actions are numbered rank after rank, and number `actions` stands for "nothing".

    Attributes:
        actions: how many there are.
        order: all of them, each after everything it waits for.
        previous: for each, the one before it on its rank.
        needs: for each, the one on another rank (or stage) whose output it takes.
        also: further (action, needed action) pairs: of overlapped actions, and loads that a backward waits for.
        rank: rank of each action.
    """

    actions: int
    order: list[int]
    previous: list[int]
    needs: list[int]
    also: tuple[tuple[int, int], ...]
    rank: Integers


def compile_graph(orders: Orders, placement: Placement, micro_batches: int, token_slices: int = 1) -> Graph:
    """Find what each action waits for, and an order in which all can run.

    Raises:
        LabError: if an action waits for one that no rank has, or if actions wait for each other.
    """
    actions = [action for order in orders for action in order]
    count = len(actions)
    elements, owner = _elements(actions)
    stages, pipes, units = len(placement[0]), len(placement), micro_batches * token_slices
    kind = np.array([_TABLE[element[0]] for element in elements], np.int64)
    stage = np.array([element[1] for element in elements], np.int64)
    micro_batch = np.array([element[2] for element in elements], np.int64)
    pipe = np.array([element[3] for element in elements], np.int64)
    token_slice = np.array([element[4] for element in elements], np.int64)
    unit = micro_batch * token_slices + token_slice
    _refuse_out_of_range(elements, stage, unit, pipe, (stages, units, pipes))
    where = np.full((6, pipes, stages, units), count, np.int64)
    where[kind, pipe, stage, unit] = owner

    needs = np.full(len(elements), count, np.int64)
    later = (kind == _FORWARDS) & (stage > 0)
    needs[later] = where[_FORWARDS, pipe[later], stage[later] - 1, unit[later]]
    earlier = (kind == _BACKWARDS) & (stage < stages - 1)
    needs[earlier] = where[_BACKWARDS, pipe[earlier], stage[earlier] + 1, unit[earlier]]
    missing = np.flatnonzero((later | earlier) & (needs == count))
    if missing.size:
        raise LabError(_waits_for_nobody(elements[int(missing[0])]))

    _refuse_backward_first(elements, owner, where, kind, (pipe, stage, unit))
    rank = np.repeat(np.arange(len(orders)), [len(order) for order in orders])
    previous = np.arange(-1, count - 1)
    firsts = np.cumsum([0, *(len(order) for order in orders)])[:-1]
    previous[firsts[firsts < count]] = count
    also: list[tuple[int, int]] = []
    main = needs
    if len(elements) != count:
        main = np.full(count, count, np.int64)
        seen: set[int] = set()
        for index, needed in zip(owner.tolist(), needs.tolist(), strict=True):
            if index in seen:
                if needed != count:
                    also.append((index, needed))
            else:
                main[index] = needed
                seen.add(index)
    if np.any(kind == _LOADS):
        backwards = kind == _BACKWARDS
        loads = where[_LOADS, pipe[backwards], stage[backwards], unit[backwards]]
        also += [(b, load) for b, load in zip(owner[backwards].tolist(), loads.tolist(), strict=True) if load != count]
    order = _run_order(orders, main.tolist(), also, rank)
    return Graph(count, order, previous.tolist(), main.tolist(), tuple(also), rank)


def _elements(actions: list[Action]) -> tuple[list[Action], Integers]:
    """Actions with the overlapped ones taken apart, and for each the number of the action it belongs to."""
    if not any(action[5] for action in actions):
        return actions, np.arange(len(actions))
    pairs = [(element, number) for number, action in enumerate(actions) for element in action.elements]
    return [element for element, _ in pairs], np.array([number for _, number in pairs], np.int64)


def _refuse_out_of_range(
    elements: list[Action], stage: Integers, unit: Integers, pipe: Integers, limits: tuple[int, int, int]
) -> None:
    stages, units, pipes = limits
    wrong = np.flatnonzero((stage >= stages) | (unit >= units) | (pipe >= pipes) | (stage < 0) | (unit < 0))
    if wrong.size:
        action = elements[int(wrong[0])]
        raise LabError(
            say(
                en=f"{action} is outside the schedule, which has stages 0 to {stages - 1}, micro-batches (times token "
                f"slices) 0 to {units - 1} and {pipes} pipe(s): correct its numbers.",
                fr=f"{action} sort de l’ordonnancement, qui a les étages 0 à {stages - 1}, les micro-batches (fois les "
                f"tranches de tokens) 0 à {units - 1} et {pipes} pipeline(s) : corrigez ses numéros.",
            )
        )


def _refuse_backward_first(
    elements: list[Action], owner: Integers, where: Integers, kind: Integers, place: tuple[Integers, Integers, Integers]
) -> None:
    """A backward stands after its own forward, and a backward for the weights after that for the input."""
    for late, early in ((_BACKWARDS, _FORWARDS), (_WEIGHTS, _BACKWARDS)):
        numbers = np.flatnonzero(kind == late)
        before = where[early][tuple(column[numbers] for column in place)]
        wrong = np.flatnonzero(before >= owner[numbers])  # later on the rank, or nowhere
        if wrong.size:
            action = elements[int(numbers[wrong[0]])]
            needed = action._replace(kind=FORWARD if late == _BACKWARDS else BACKWARD_INPUT)
            raise LabError(
                say(
                    en=f"{action} needs the result of {needed}, which does not stand before it on its rank: put "
                    f"{needed} first.",
                    fr=f"{action} a besoin du résultat de {needed}, qui n’est pas placée avant elle sur son rang : "
                    f"placez {needed} d’abord.",
                )
            )


def _waits_for_nobody(action: Action) -> str:
    forward = action.kind == FORWARD
    needed = action._replace(kind=FORWARD if forward else "B", stage=action.stage + (-1 if forward else 1))
    spelled = str(needed) if forward else f"{needed} (or {needed._replace(kind='I')})"
    return say(
        en=f"{action} waits for {spelled}, but no rank has it: add it to the rank that holds stage {needed.stage}.",
        fr=f"{action} attend {spelled.replace('or', 'ou')}, mais aucun rang ne l’a : ajoutez-la au rang qui porte "
        f"l’étage {needed.stage}.",
    )


def _run_order(orders: Orders, needs: list[int], also: list[tuple[int, int]], rank: Integers) -> list[int]:
    """Let each rank advance until it must wait, and wake it when what it waits for has run: O(actions).

    Raises:
        LabError: if ranks wait for each other, with the cycle.
    """
    count = len(needs)
    done = bytearray(count + 1)
    done[count] = 1
    extra: dict[int, list[int]] = {}
    for index, needed in also:
        extra.setdefault(index, []).append(needed)
    firsts = [0]
    for actions in orders:
        firsts.append(firsts[-1] + len(actions))
    position, last = firsts[:-1], firsts[1:]
    rank_of = rank.tolist()
    waiters: dict[int, list[int]] = {}
    order: list[int] = []
    add = order.append
    ready = list(range(len(orders)))[::-1]
    while ready:
        current = ready.pop()
        index, end = position[current], last[current]
        while index < end:
            needed = needs[index]
            if extra and done[needed] and index in extra:
                needed = next((one for one in extra[index] if not done[one]), count)
            if not done[needed]:
                if needed in waiters:
                    waiters[needed].append(current)
                else:
                    waiters[needed] = [current]
                break
            done[index] = 1
            add(index)
            if index in waiters:
                ready += waiters.pop(index)
            index += 1
        position[current] = index
    if len(order) < count:
        raise LabError(_deadlock(orders, needs, extra, done, position, last, rank_of))
    return order


def _deadlock(
    orders: Orders,
    needs: list[int],
    extra: dict[int, list[int]],
    done: bytearray,
    position: list[int],
    last: list[int],
    rank_of: list[int],
) -> str:
    """The cycle: each blocked rank's next action, and the one it waits for, which stands behind another blocked one."""
    actions = list(chain.from_iterable(orders))
    current = next(rank for rank, (at, end) in enumerate(zip(position, last, strict=True)) if at < end)
    seen: list[int] = []
    while current not in seen:
        seen.append(current)
        index = position[current]
        needed = next(one for one in (needs[index], *extra.get(index, ())) if not done[one])
        current = rank_of[needed]
    cycle = seen[seen.index(current) :]
    parts_en, parts_fr = [], []
    for rank in cycle:
        index = position[rank]
        needed = next(one for one in (needs[index], *extra.get(index, ())) if not done[one])
        holder = rank_of[needed]
        behind_en = "" if needed == position[holder] else f", which comes after {actions[position[holder]]}"
        behind_fr = "" if needed == position[holder] else f", placée après {actions[position[holder]]}"
        parts_en.append(f"rank {rank} at {actions[index]} waits for {actions[needed]} of rank {holder}{behind_en}")
        parts_fr.append(f"le rang {rank}, à {actions[index]}, attend {actions[needed]} du rang {holder}{behind_fr}")
    return say(
        en=f"deadlock: {'; '.join(parts_en)}. Reorder one of these ranks so that the cycle is broken.",
        fr=f"interblocage : {' ; '.join(parts_fr)}. Changez l’ordre d’un de ces rangs pour rompre le cycle.",
    )
