"""Coach of the game: which moves are genuinely equal, by an exact search with bounds where a position is small enough.

A completion is searched as an active schedule (Giffler & Thompson 1960): of all actions that may come next, the one
that can end earliest names a rank, and only actions of that rank that can begin before this end are tried next. Such
schedules contain a shortest one: an action that fits into a gap of its rank moves there without delay of any other.
With memory limits this holds for one stage per rank: a forward that moves forward passes backwards only, which do not
ask for memory, as the forwards of its stage keep their order.

A partial schedule is given up when its bound is no better than the best one: each rank's remaining actions, with the
earliest moment their inputs can be there and the time that must follow them, take at least what Jackson's preemptive
rule says (Carlier 1982). Equal states, by their counts and times, are searched once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from dlojz.pipeline.game.position import SAME, Level, Position, position_of, stream_of
from dlojz.pipeline.schedule import Action
from dlojz.pipeline.simulator import durations_of

MOST_STATES = 6000
"""Partial schedules that are looked at for one answer: some seconds."""


class Advice(NamedTuple):
    """What the coach says of a position.

    Attributes:
        equal: ready actions from which the best reachable value is `best`.
        best: the smallest makespan or span that can still be reached; infinite at a dead end.
        unknown: ready actions of which the search did not learn whether they are among the equal ones.
        is_proven: whether no completion is shorter than `best`.
        bound: what no completion can beat.
    """

    equal: tuple[Action, ...]
    best: float
    unknown: tuple[Action, ...]
    is_proven: bool
    bound: float


class _State(NamedTuple):
    """Partial schedule: per stream the ends of its actions, per rank its clock and its memory."""

    ends: tuple[tuple[float, ...], ...]
    clocks: tuple[float, ...]
    memory: tuple[float, ...]


class _OutOfStates(Exception):  # noqa: N818 - it ends a search, and is no error
    pass


class _Search:
    """Search of one level; streams are numbered in the level's order."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.streams = list(level.streams)
        number_of = {stream: number for number, stream in enumerate(self.streams)}
        self.rank = [level.rank_of(stream) for stream in self.streams]
        self.total = [len(level.streams[stream]) for stream in self.streams]
        durations = dict(zip(level.reference.actions, durations_of(level.reference, level.costs), strict=True))
        self.duration = [durations[level.streams[stream][0]] for stream in self.streams]
        self.limit = math.inf if level.memory_limit is None else level.memory_limit + SAME
        self.memory = [level.memory_of(stream) for stream in self.streams]
        self.inputs = [
            [
                (number_of[source], level.costs.delay(level.rank_of(source), level.rank_of(stream)))
                for source in level.inputs_of(stream)
            ]
            for stream in self.streams
        ]
        # A span counts from the rank's own start: nothing comes before its first forward but those of earlier stages.
        self.offset = [0.0] * level.reference.ranks
        if level.measure == "span":
            heads = self._earliest(self.empty)
            for stream_number, rank in reversed(list(enumerate(self.rank))):
                if self.streams[stream_number].kind == "F":
                    self.offset[rank] = heads[stream_number][0]
        self.tails = self._tails()
        self.states_left = 0

    @property
    def empty(self) -> _State:
        """The state in which nothing is placed."""
        zeros = (0.0,) * self.level.reference.ranks
        return _State(((),) * len(self.streams), zeros, zeros)

    def state_of(self, position: Position) -> _State:
        """The state of a position."""
        state, numbers = self.empty, {stream: number for number, stream in enumerate(self.streams)}
        for action in position.moves:
            state = self.after(state, numbers[stream_of(action)])
        return state

    def _tails(self) -> list[list[float]]:
        """Per action, the time from its end on that must still pass; a span is shorter by its rank's start."""
        tails = [[-self.offset[rank]] * total for rank, total in zip(self.rank, self.total, strict=True)]
        # Streams stand after their inputs: what reads an action has its tail already.
        for number in reversed(range(len(self.streams))):
            for index in reversed(range(self.total[number])):
                after = self.duration[number] + tails[number][index]
                if index:
                    tails[number][index - 1] = max(tails[number][index - 1], after)
                for source, delay in self.inputs[number]:
                    tails[source][index] = max(tails[source][index], delay + after)
        return tails

    def start_of(self, state: _State, number: int) -> float | None:
        """When the next action of a stream can start; None where it cannot come next."""
        index = len(state.ends[number])
        if index == self.total[number]:
            return None
        rank = self.rank[number]
        if state.memory[rank] + self.memory[number][0] > self.limit:
            return None
        start = state.clocks[rank]
        for source, delay in self.inputs[number]:
            if len(state.ends[source]) <= index:
                return None
            start = max(start, state.ends[source][index] + delay)
        return start

    def after(self, state: _State, number: int) -> _State:
        """The state after the next action of a stream, which can come next."""
        start, rank = self.start_of(state, number), self.rank[number]
        assert start is not None
        end = start + self.duration[number]
        ends, clocks, memory = list(state.ends), list(state.clocks), list(state.memory)
        ends[number] = (*ends[number], end)
        clocks[rank], memory[rank] = end, memory[rank] + self.memory[number][1]
        return _State(tuple(ends), tuple(clocks), tuple(memory))

    def _earliest(self, state: _State) -> list[list[float]]:
        """Per stream, the ends of what is placed; of the other actions, the earliest starts, as if ranks were free."""
        starts: list[list[float]] = []
        for number, ends in enumerate(state.ends):
            earliest, free_at = list(ends), state.clocks[self.rank[number]]
            for index in range(len(ends), self.total[number]):
                for source, delay in self.inputs[number]:
                    ready = starts[source][index] + delay
                    if index >= len(state.ends[source]):
                        ready += self.duration[source]
                    free_at = max(free_at, ready)
                earliest.append(free_at)
                free_at += self.duration[number]
            starts.append(earliest)
        return starts

    def bound(self, state: _State) -> float:
        """What no completion of a state can beat."""
        starts = self._earliest(state)
        value = max(clock - offset for clock, offset in zip(state.clocks, self.offset, strict=True))
        remaining: list[list[tuple[float, float, float]]] = [[] for _ in state.clocks]
        for number, ends in enumerate(state.ends):
            for index in range(len(ends), self.total[number]):
                job = starts[number][index], self.duration[number], self.tails[number][index]
                remaining[self.rank[number]].append(job)
        return max([value, *map(_preemptive, remaining)])

    def best(self, state: _State, target: float = math.inf) -> tuple[float, bool]:
        """The smallest value that a completion reaches, and whether that is proven; values above `target` do not count.

        Infinite where no completion reaches the target.
        """
        self.best_value, self.target, self.seen = math.inf, target + SAME, set[tuple[object, ...]]()
        self.floor = self.bound(state)
        try:
            self._dive(state, self.floor)
        except _OutOfStates:
            return self.best_value, False
        return self.best_value, True

    def _dive(self, state: _State, bound: float) -> None:
        # Nothing is better than the bound of the beginning, and nothing above the target counts.
        if self.best_value <= self.floor + SAME or bound > min(self.target, self.best_value - SAME):
            return
        if all(len(ends) == total for ends, total in zip(state.ends, self.total, strict=True)):
            self.best_value = bound
            return
        key = self._key(state)
        if key in self.seen:
            return
        self.seen.add(key)
        self.states_left -= 1
        if self.states_left < 0:
            raise _OutOfStates
        possible = [
            (start + self.duration[number], start, number)
            for number in range(len(self.streams))
            if (start := self.start_of(state, number)) is not None
        ]
        if not possible:  # a dead end at the memory wall
            return
        earliest_end, _, leading = min(possible)
        children = []
        for _, start, number in possible:
            if self.rank[number] == self.rank[leading] and start < earliest_end - SAME:
                child = self.after(state, number)
                children.append((self.bound(child), start, number, child))
        for child_bound, _, _, child in sorted(children, key=lambda child: child[:3]):
            self._dive(child, child_bound)

    def _key(self, state: _State) -> tuple[object, ...]:
        """What decides over all completions: how far each stream is, clocks, and messages that arrive later."""
        arrivals = [
            max(end + delay, state.clocks[self.rank[number]])
            for number in range(len(self.streams))
            for source, delay in self.inputs[number]
            for end in state.ends[source][len(state.ends[number]) :]
        ]
        return tuple(map(len, state.ends)), state.clocks, tuple(arrivals)


def _preemptive(jobs: Sequence[tuple[float, float, float]]) -> float:
    """The least of what one machine needs for jobs (start, duration, tail) if it may interrupt them (Jackson)."""
    waiting: list[list[float]] = []
    value, clock = -math.inf, 0.0
    ordered = sorted(jobs)
    upcoming = 0
    while upcoming < len(ordered) or waiting:
        if not waiting:
            clock = max(clock, ordered[upcoming][0])
        while upcoming < len(ordered) and ordered[upcoming][0] <= clock + SAME:
            heapq.heappush(waiting, [-ordered[upcoming][2], ordered[upcoming][1]])
            upcoming += 1
        # The longest tail runs, until it ends or another job comes.
        until = ordered[upcoming][0] if upcoming < len(ordered) else math.inf
        step = min(waiting[0][1], until - clock)
        clock += step
        waiting[0][1] -= step
        if waiting[0][1] <= SAME:
            value = max(value, clock - waiting[0][0])
            heapq.heappop(waiting)
    return value


@lru_cache(maxsize=256)
def advice_of(text: str) -> Advice:
    """Search what can still be reached from a position, given as its text, and by which moves.

    Raises:
        LabError: if the text is no position.
    """
    position = position_of(text)
    search = _Search(position.level)
    search.states_left = MOST_STATES
    state = search.state_of(position)
    moves = []
    for action in position.ready:
        child = search.after(state, search.streams.index(stream_of(action)))
        moves.append((search.bound(child), action, child))
    # The most promising first: what cannot reach its value need not be searched.
    moves.sort(key=lambda move: move[0])
    values: dict[Action, float] = {}
    unknown, best, floor = list[Action](), math.inf, min((move[0] for move in moves), default=math.inf)
    for bound, action, child in moves:
        values[action], is_proven = (math.inf, True) if bound > best + SAME else search.best(child, best)
        best = min(best, values[action])
        # What is as short as the bound is known to the end, whatever was left to search.
        if not is_proven and values[action] > floor + SAME:
            unknown.append(action)
    equal = tuple(action for action in position.ready if values[action] <= best + SAME < math.inf)
    unknown = [action for action in unknown if action not in equal or best > floor + SAME]
    # Exact where a shift to the front breaks no memory limit: without a limit, or with one stage per rank.
    is_exact = position.level.memory_limit is None or position.level.reference.chunks == 1
    is_proven = best <= floor + SAME or (is_exact and not unknown)
    return Advice(equal, best, tuple(unknown), is_proven, floor)
