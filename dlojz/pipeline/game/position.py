"""Position of the game: which actions each rank has got so far, what may follow, and what the simulator says of it.

Actions are placed one after the other, each behind those of its rank whose inputs are placed already, so no position
deadlocks. Micro-batches are alike, and every stage takes them in turn; this excludes no time and no memory: in any
schedule, give the k-th interval of a stage's actions of one kind to its k-th micro-batch. The k-th output of a stage
was there before the k-th action that reads one, as each of those read an output of its own.

A position is one line of text, `1.LEVEL.MOVES.CHECK`: the version of this writing, the level, the actions in the order
in which they were placed (`0F1F`, without the micro-batch, which follows), and a checksum of all before it.
"""

from __future__ import annotations

import math
import re
import tomllib
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, language, shortest
from dlojz.pipeline.analysis import gaps, lower_bound
from dlojz.pipeline.exchange_formats import read_csv
from dlojz.pipeline.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTES,
    FORWARD,
    Action,
    Costs,
    Schedule,
)
from dlojz.pipeline.schedule_catalogue import SCHEDULES, build
from dlojz.pipeline.shortest_schedule import Objective, optimum
from dlojz.pipeline.simulator import Timeline, deltas, input_delay, simulate
from dlojz.pipeline.validity import check

DATA = Path(__file__).with_name("data")
OPTIMUM = "optimum"
"""Reference of a level that is no schedule of the catalogue, but the shortest one that was proven."""
MAX_TEXT = 4096
SAME = 1e-9
"""Times and amounts of memory that differ by less are equal."""
_POSITION = re.compile(r"1\.(?P<level>\d{1,3})\.(?P<moves>(?:u?\d{1,2}[FBIW])*)\.(?P<check>[0-9a-f]{8})")


class Stream(NamedTuple):
    """Actions of one kind of one stage, which run in the order of their micro-batches."""

    pipe: int
    stage: int
    kind: str

    def __str__(self) -> str:
        return f"{'u' if self.pipe else ''}{self.stage}{self.kind}"


def stream_of(action: Action) -> Stream:
    """The stream of an action."""
    return Stream(action.pipe, action.stage, action.kind)


@dataclass(frozen=True)
class Level:
    """Level of the game.

    Attributes:
        number: from 1.
        title, text: in the reader's language.
        reference: a schedule that reaches the goal; its actions are those of the level.
        costs: times, and memory kept, of the actions.
        memory_limit: activations that a rank may keep, in stage-micro-batches; None: any number.
        measure: "makespan" or "span".
    """

    number: int
    title: str
    text: str
    reference: Schedule
    costs: Costs
    memory_limit: float | None
    measure: Objective

    def value_of(self, timeline: Timeline) -> float:
        """Return what counts in this level: the makespan or the span."""
        return timeline.makespan if self.measure == "makespan" else timeline.span

    @cached_property
    def goal(self) -> float:
        """Makespan or span that the level asks for: what the reference takes."""
        return self.value_of(simulate(self.reference, self.costs))

    @cached_property
    def bound(self) -> tuple[float, bool]:
        """The best that is known to be impossible to beat, and whether a schedule is known that reaches it."""
        ordinary = self.reference.placement == (tuple(range(self.reference.ranks)),)
        try:
            if ordinary:
                solution = optimum(
                    self.reference.ranks,
                    self.reference.micro_batches,
                    costs=self.costs,
                    split=self.reference.splits_backward,
                    memory_limit=self.memory_limit,
                    objective=self.measure,
                )
                return solution.bound, solution.proven
        except LabError:  # not in the table of proven cases: the bound that does not look at memory holds
            pass
        bound = lower_bound(self.reference, self.costs)
        return bound, self.goal <= bound + SAME

    @cached_property
    def streams(self) -> dict[Stream, tuple[Action, ...]]:
        """Actions of each stream in order, each stream after those whose output it reads."""
        actions: dict[Stream, list[Action]] = {}
        for action in sorted(self.reference.actions, key=lambda action: action.micro_batch):
            actions.setdefault(stream_of(action), []).append(action)
        # Forwards from the first stage on, then backwards from the last one on, then those for weights.
        phases = (FORWARD, BACKWARD + BACKWARD_INPUT, BACKWARD_WEIGHT)

        def depth(stream: Stream) -> tuple[int, int, int]:
            phase = next(number for number, kinds in enumerate(phases) if stream.kind in kinds)
            return stream.pipe, phase, stream.stage if phase == 0 else -stream.stage

        return {stream: tuple(actions[stream]) for stream in sorted(actions, key=depth)}

    def rank_of(self, stream: Stream) -> int:
        """The rank that holds the stage of a stream."""
        return self.reference.placement[stream.pipe][stream.stage]

    def inputs_of(self, stream: Stream) -> tuple[Stream, ...]:
        """The streams whose action of the same micro-batch comes before one of this stream."""
        pipe, stage, kind = stream
        last_stage = self.reference.stages - 1
        candidates = {
            FORWARD: [(stage - 1, FORWARD)] if stage else [],
            BACKWARD_WEIGHT: [(stage, BACKWARD_INPUT)],
        }.get(kind, [(stage, FORWARD), *([(stage + 1, kind)] if stage < last_stage else [])])
        return tuple(Stream(pipe, *candidate) for candidate in candidates)

    def memory_of(self, stream: Stream) -> tuple[float, float]:
        """What an action adds to its rank's memory at its highest moment, and from its end on."""
        changes = [units for _, _, units in deltas(self.streams[stream][0], self.rank_of(stream), self.costs)]
        return max(accumulate(changes, initial=0.0)), sum(changes)


def in_turn(schedule: Schedule) -> Schedule:
    """Number the micro-batches anew, so that every stage takes them in turn; times and memory stay."""
    streams: dict[Stream, list[int]] = {}
    for action in schedule.actions:
        streams.setdefault(stream_of(action), []).append(action.micro_batch)
    numbers = {stream: iter(sorted(micro_batches)) for stream, micro_batches in streams.items()}
    return schedule.with_orders(
        [action._replace(micro_batch=next(numbers[stream_of(action)])) for action in order] for order in schedule.orders
    )


sentence = Sentences(DATA / "sentences.md")


def page_words() -> dict[str, str]:
    """Return the words of the page in the reader's language, by name."""
    return {name: str(said) for name, said in sentence.sentences["page"].items()}


@cache
def _entries() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = tomllib.loads((DATA / "levels.toml").read_text(encoding="utf-8"))["level"]
    return entries


def level_count() -> int:
    """Return the number of levels."""
    return len(_entries())


def level_of(number: int) -> Level:
    """Look up a level by its number, from 1.

    Raises:
        LabError: if there is none.
    """
    if not 1 <= number <= level_count():
        raise LabError(sentence("no_level", levels=level_count(), number=number))
    entry = _entries()[number - 1]
    reference, costs = _reference(number)
    text = entry[f"text_{language()}"]
    if "rival" in entry:
        rivals = dict(_catalogue(number))
        text = text.replace("{rival}", shortest(simulate(rivals[entry["rival"]], costs).makespan))
    return Level(
        number,
        entry[f"title_{language()}"],
        text,
        reference,
        costs,
        entry.get("memory_limit"),
        entry.get("measure", "makespan"),
    )


@cache
def _reference(number: int) -> tuple[Schedule, Costs]:
    entry = _entries()[number - 1]
    costs, size = Costs(**entry.get("costs", {})), (entry["ranks"], entry["micro_batches"])
    if entry["reference"] == OPTIMUM:
        return in_turn(optimum(*size, costs=costs, memory_limit=entry.get("memory_limit")).schedule), costs
    return in_turn(build(entry["reference"], *size, chunks=entry.get("chunks"), costs=costs)), costs


@cache
def _catalogue(number: int) -> list[tuple[str, Schedule]]:
    """All schedules of the catalogue at a level's size, by name."""
    reference, costs = _reference(number)
    built = []
    for name, entry in SCHEDULES.items():
        chunks = reference.chunks if "chunks" in entry.options else None
        try:
            schedule = build(name, reference.ranks, reference.micro_batches, chunks=chunks, costs=costs)
        except LabError:  # it does not exist at this size
            continue
        if schedule.token_slices == 1 and all(action.kind in COMPUTES for action in schedule.actions):
            built.append((name, in_turn(schedule)))
    return built


@dataclass(frozen=True)
class Position:
    """Position of a level: the actions placed so far, in the order in which they were placed."""

    level: Level
    moves: tuple[Action, ...] = ()

    @cached_property
    def schedule(self) -> Schedule:
        """What is placed, as a schedule; each action stands behind those of its rank."""
        orders: list[list[Action]] = [[] for _ in range(self.level.reference.ranks)]
        for action in self.moves:
            orders[self.level.reference.rank_of(action)].append(action)
        return replace(self.level.reference, name=f"{self.level.number}", orders=tuple(map(tuple, orders)))

    @cached_property
    def timeline(self) -> Timeline:
        """The simulation of what is placed."""
        return simulate(self.schedule, self.level.costs)

    @property
    def is_complete(self) -> bool:
        """Whether all actions are placed."""
        return len(self.moves) == len(self.level.reference.actions)

    @property
    def reaches_goal(self) -> bool:
        """Whether it is complete and no longer than the goal."""
        return self.is_complete and self.level.value_of(self.timeline) <= self.level.goal + SAME

    @cached_property
    def counts(self) -> Counter[Stream]:
        """How many actions of each stream are placed."""
        return Counter(stream_of(action) for action in self.moves)

    @cached_property
    def memory(self) -> tuple[float, ...]:
        """Activations that each rank keeps after what is placed, in stage-micro-batches."""
        kept_units = [0.0] * self.level.reference.ranks
        for stream, count in self.counts.items():
            kept_units[self.level.rank_of(stream)] += count * self.level.memory_of(stream)[1]
        return tuple(kept_units)

    def next_of(self, stream: Stream) -> Action | None:
        """Return the next action of a stream; None where all are placed."""
        actions = self.level.streams[stream]
        return actions[self.counts[stream]] if self.counts[stream] < len(actions) else None

    @property
    def ready(self) -> tuple[Action, ...]:
        """The actions that may be placed now: their inputs are placed, and their ranks have the memory."""
        candidates = (self.next_of(stream) for stream in self.level.streams)
        return tuple(action for action in candidates if action is not None and self.refusal_of(action) is None)

    def refusal_of(self, action: Action, rank: int | None = None) -> str | None:
        """Say in one sentence why an action cannot be placed now; None where it can.

        Args:
            rank: where it is to be placed; by default the rank that holds its stage.
        """
        stream, values = stream_of(action), {"action": action, "stage": action.stage, "level": self.level.number}
        if action not in self.level.streams.get(stream, ()):
            return sentence("no_action", **values)
        holder = self.level.rank_of(stream)
        if rank is not None and rank != holder:
            return sentence("other_rank", holder=holder, rank=rank, **values)
        expected = self.next_of(stream)
        if action in self.moves or expected is None:
            return sentence("already_placed", holder=holder, **values)
        if action != expected:
            return sentence("not_in_turn", expected=expected, **values)
        for source in self.level.inputs_of(stream):
            needed = self.level.streams[source][self.counts[stream]]
            if self.counts[source] <= self.counts[stream]:
                return sentence("input_missing", action=action, needed=needed, rank=self.level.rank_of(source))
        return self._memory_wall(action, stream, self.memory[holder])

    def _memory_wall(self, action: Action, stream: Stream, kept_units: float) -> str | None:
        limit, highest = self.level.memory_limit, kept_units + self.level.memory_of(stream)[0]
        if limit is None or highest <= limit + SAME:
            return None
        amounts = {"units": shortest(kept_units), "limit": shortest(limit), "highest": shortest(highest)}
        return sentence("memory_wall", action=action, rank=self.level.rank_of(stream), **amounts)

    def after(self, action: Action, rank: int | None = None) -> Position:
        """Place an action.

        Raises:
            LabError: if it cannot be placed now, with the reason.
        """
        reason = self.refusal_of(action, rank)
        if reason is not None:
            raise LabError(reason)
        return Position(self.level, (*self.moves, action))

    @property
    def undone(self) -> Position:
        """The position before the latest action was placed; itself where none is."""
        return Position(self.level, self.moves[:-1])

    @property
    def text(self) -> str:
        """The position as one line, safe in a URL."""
        moves = "".join(str(stream_of(action)) for action in self.moves)
        return _checked(f"1.{self.level.number}.{moves}.")

    @property
    def recognised(self) -> tuple[str, ...]:
        """Titles of the catalogue's schedules whose orders these are."""
        if not self.is_complete:
            return ()
        orders, placement = self.schedule.orders, self.schedule.placement
        return tuple(
            SCHEDULES[name].title()
            for name, schedule in _catalogue(self.level.number)
            if (schedule.orders, schedule.placement) == (orders, placement)
        )

    def waits(self) -> Iterator[str]:
        """Say of each idle gap of each rank what it waits for."""
        schedule, costs, ends = self.schedule, self.level.costs, self.timeline.ends
        graph = schedule.graph
        # A wait that ends with the way of a message is two gaps, of which the later one has the end.
        merged: dict[tuple[int, int | None], tuple[float, float]] = {}
        for gap in gaps(self.timeline):
            begin, _ = merged.get((gap.rank, gap.before), (gap.start, gap.end))
            merged[gap.rank, gap.before] = begin, gap.end
        for (rank, number), (start, end) in merged.items():
            span = {"rank": rank, "start": shortest(start), "end": shortest(end)}
            if number is None:
                yield sentence("wait", reason=self._end_of(rank), **span)
                continue
            producers = [graph.needs[number], *(source for index, source in graph.also if index == number)]
            arrivals = [
                (float(ends[source]) + input_delay(schedule, costs, source, number), source)
                for source in producers
                if source < graph.actions
            ]
            source = max(arrivals)[1]
            yield sentence(
                "wait_for",
                action=schedule.actions[number],
                needed=schedule.actions[source],
                holder=int(graph.rank[source]),
                arrival=shortest(float(ends[source])),
                wall=self._wall_in(rank, number, end),
                **span,
            )

    def _end_of(self, rank: int) -> str:
        """Why a rank has nothing after its latest action."""
        streams = [stream for stream in self.level.streams if self.level.rank_of(stream) == rank]
        actions = [action for action in map(self.next_of, streams) if action is not None]
        if not actions:
            latest = self.schedule.actions[int(self.timeline.ends.argmax())]
            return sentence("rank_complete", latest=latest, rank=self.schedule.rank_of(latest))
        ready = [str(action) for action in actions if action in self.ready]
        if ready:
            return sentence("could_be_placed", actions=", ".join(ready))
        # Of what cannot be placed, what lacks nothing of this rank: a backward first, or a forward at the memory wall.
        counts, holds = self.counts, self.level.rank_of

        def obstacles(action: Action) -> tuple[int, bool]:
            stream = stream_of(action)
            missing = [source for source in self.level.inputs_of(stream) if counts[source] <= counts[stream]]
            return sum(holds(source) == rank for source in missing), action.kind == FORWARD

        nearest = min(actions, key=obstacles)
        return self.refusal_of(nearest) or ""

    def _wall_in(self, rank: int, number: int, end: float) -> str:
        """What to add to a wait in which a forward could have run, but for the memory wall."""
        schedule = self.schedule
        before = schedule.orders[rank][: number - schedule.first_of_rank[rank]]
        counts = Counter(stream_of(action) for action in before)
        memory = sum(count * self.level.memory_of(stream)[1] for stream, count in counts.items())
        number_of = {action: index for index, action in enumerate(schedule.actions)}
        for stream, actions in self.level.streams.items():
            if self.level.rank_of(stream) != rank or stream.kind != FORWARD or counts[stream] == len(actions):
                continue
            action = actions[counts[stream]]
            sources = [self.level.streams[source][counts[stream]] for source in self.level.inputs_of(stream)]
            arrivals = [
                self.timeline.ends[number_of[source]] + self.level.costs.delay(schedule.rank_of(source), rank)
                if source in number_of
                else math.inf
                for source in sources
            ]
            if max(arrivals, default=0.0) < end - SAME and self._memory_wall(action, stream, memory):
                return sentence("wall_in_wait", action=action)
        return ""


def _checked(body: str) -> str:
    return f"{body}{zlib.crc32(body.encode()):08x}"


def position_of(text: str, level: Level | None = None) -> Position:
    """Read a position from its text.

    Args:
        level: the level that is open; by default that of the text.

    Raises:
        LabError: for a text that is damaged, of another version or of another level.
    """
    written = text.strip().removeprefix("#")
    version = re.match(r"(\d{1,9})\.\d", written)
    if version and version[1] != "1":
        raise LabError(sentence("other_version", version=version[1]))
    match = _POSITION.fullmatch(written) if len(written) <= MAX_TEXT and written.isascii() else None
    if match is None or _checked(written[:-8]) != written:
        raise _damaged(written)
    if level is not None and int(match["level"]) != level.number:
        raise LabError(sentence("other_level", number=int(match["level"]), level=level.number))
    position = Position(level or level_of(int(match["level"])))
    for pipe, stage, kind in re.findall(r"(u?)(\d{1,2})([FBIW])", match["moves"]):
        stream = Stream(int(bool(pipe)), int(stage), kind)
        action = position.next_of(stream) if stream in position.level.streams else None
        if action is None or position.refusal_of(action):
            raise _damaged(written)
        position = position.after(action)
    return position


def _damaged(text: str) -> LabError:
    beginning = text[:40].encode("ascii", "backslashreplace").decode()
    return LabError(sentence("damaged", text=repr(beginning)))


def position_of_csv(text: str, level: Level) -> Position:
    """Read the orders of a schedule, one row per rank, as a position of a level.

    Raises:
        LabError: for a text that is no schedule, one of another size, one that deadlocks, or breaks a rule of the
            level; the sentence names the action.
    """
    schedule = read_csv(text)
    if (schedule.placement, schedule.micro_batches) != (level.reference.placement, level.reference.micro_batches):
        sizes = [f"{s.ranks} × {s.stages} × {s.micro_batches}" for s in (level.reference, schedule)]
        raise LabError(sentence("other_size", level=level.number, size=sizes[0], received=sizes[1]))
    if len(set(schedule.actions)) < len(schedule.actions):
        check(schedule)  # which names the action that stands twice
    position, renamed = Position(level), in_turn(schedule)
    # An order in which all can run; compiling it refuses deadlocks.
    for number in schedule.graph.order:
        position = position.after(renamed.actions[number], int(schedule.graph.rank[number]))
    return position
