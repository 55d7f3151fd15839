"""Simulate a schedule: start and end of each action, blocking sends, activation memory; compare with measured times.

- makespan: from the first start to the last end over all ranks: an iteration's length where the optimizer is a barrier.
- span: the longest time from a rank's own first start to its own last end: an iteration's length without that barrier
  ("cost" of Qi et al. 2024, arXiv 2401.10241, Table 5).
- bubble fraction: idle time over ranks × makespan. Bubble overhead: idle time over work (Narayanan et al. 2021,
  arXiv 2104.04473, §2.2, give the overhead; Huang et al. 2019, arXiv 1811.06965, §2.3, the fraction).

Simulation is O(actions) and exact: an action starts as soon as its rank is free and its inputs have arrived. As in
published tables (Qi et al. 2024, Table 5), sends do not block, links have no contention, ranks keep to their order.

`Costs.sends` chooses blocking sends instead. A rank then receives just before the action that needs the message and
sends just after the action that made it. "rendezvous" does these one after the other, which deadlocks as soon as two
neighbours send to each other; "paired" posts them together, as `batch_isend_irecv` does (Narayanan et al. 2021,
Megatron-LM's `send_forward_recv_backward`).

Activation memory is counted in stage-micro-batches: what one stage (chunk) keeps of one micro-batch. A forward takes
M_B, its backward for the input leaves M_W, its backward for the weights frees that (Qi et al. 2024, §2.3 and App. G).

A measured timeline has one span for every action. An overlapped forward and backward are executed one after the other
and joined again here; weight updates are timed apart from the schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlojz.base.display_hook import figure_of
from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, say
from dlojz.pipeline.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTES,
    COST_OF,
    EVICT,
    FORWARD,
    LOAD,
    OVERLAPPED,
    UPDATE,
    Action,
    ActionGraph,
    Costs,
    Schedule,
)
from dlojz.results.record import Span

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

Times = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Times of all actions, numbered as `schedule.actions`.

    Attributes:
        starts, ends: one value per action, in the unit of the costs; in seconds where measured.
        costs: what was assumed; None where the times were measured.
        origin: "simulated" or "measured".
    """

    schedule: Schedule
    starts: Times
    ends: Times
    costs: Costs | None = None
    origin: Literal["simulated", "measured"] = "simulated"

    def __repr__(self) -> str:
        """The schedule and its makespan, ten lines at most; a notebook draws it."""
        head, *orders = repr(self.schedule).split("\n")
        return "\n".join([f"{head}, {self.origin}, makespan {self.makespan:g}", *orders])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        try:
            figure: Any = figure_of(self)
        except LabError:  # more actions than a drawing can hold
            return {"text/plain": repr(self)}
        return figure._repr_mimebundle_(include, exclude)

    @cached_property
    def durations(self) -> Times:
        """Duration of each action."""
        return self.ends - self.starts

    def of_rank(self, rank: int) -> slice:
        """The numbers of a rank's actions."""
        return slice(self.schedule.first_of_rank[rank], self.schedule.first_of_rank[rank + 1])

    @cached_property
    def start(self) -> float:
        """The first start of all."""
        return float(self.starts.min()) if self.starts.size else 0.0

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end, over all ranks."""
        return float(self.ends.max()) - self.start if self.ends.size else 0.0

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """Per rank: from its own first start to its own last end."""
        spans = []
        for rank in range(self.schedule.ranks):
            part = self.of_rank(rank)
            spans.append(float(self.ends[part].max() - self.starts[part].min()) if self.ends[part].size else 0.0)
        return tuple(spans)

    @property
    def span(self) -> float:
        """The longest of the ranks' spans."""
        return max(self.spans, default=0.0)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Per rank: the time it computes."""
        return tuple(float(self.durations[self.of_rank(rank)].sum()) for rank in range(self.schedule.ranks))

    @property
    def ideal(self) -> float:
        """The makespan if work were evenly distributed and nobody waited."""
        return sum(self.work) / self.schedule.ranks if self.schedule.ranks else 0.0

    @property
    def idle(self) -> tuple[float, ...]:
        """Per rank: the time within the makespan when it does not compute."""
        return tuple(self.makespan - work for work in self.work)

    @property
    def bubble_fraction(self) -> float:
        """Idle time over all time: Σ idle / (ranks × makespan)."""
        total = self.schedule.ranks * self.makespan
        return sum(self.idle) / total if total else 0.0

    @property
    def bubble_overhead(self) -> float:
        """Idle time over work: Σ idle / Σ work."""
        work = sum(self.work)
        return sum(self.idle) / work if work else 0.0

    @property
    def speedup(self) -> float:
        """Over one rank that does all the work: Σ work / makespan."""
        return sum(self.work) / self.makespan if self.makespan else 0.0


class ScheduledMessage(NamedTuple):
    """Message from the action that makes it to the action that needs it, both by number."""

    producer: int
    consumer: int


Step = int | tuple[ScheduledMessage, ...]
"""What a rank does next: run an action, or pass these messages (together)."""


def programs_of(schedule: Schedule, paired: bool) -> list[list[Step]]:
    """List, per rank, its actions with the sends and receives between them."""
    graph = schedule.graph
    receives: dict[int, list[ScheduledMessage]] = {}
    sends: dict[int, list[ScheduledMessage]] = {}
    rank = graph.rank.tolist()
    for producer, consumer in graph.edges():
        # Neighbours on one rank hand over in memory.
        if rank[producer] != rank[consumer]:
            message = ScheduledMessage(producer, consumer)
            sends.setdefault(producer, []).append(message)
            receives.setdefault(consumer, []).append(message)
    programs: list[list[Step]] = []
    for number in range(schedule.ranks):
        program: list[Step] = []
        waiting: list[ScheduledMessage] = []
        for index in range(schedule.first_of_rank[number], schedule.first_of_rank[number + 1]):
            # What the action before has made and what this one needs: between the two.
            waiting = waiting + receives.get(index, [])
            if waiting:
                program += [tuple(waiting)] if paired else [(message,) for message in waiting]
            program.append(index)
            waiting = list(sends.get(index, []))
        if waiting:
            program += [tuple(waiting)] if paired else [(message,) for message in waiting]
        programs.append(program)
    return programs


def simulate_blocking(schedule: Schedule, costs: Costs, durations: Sequence[float]) -> Timeline:
    """Compute start and end of every action where sends block.

    Raises:
        LabError: if ranks wait for each other, with the cycle.
    """
    programs = programs_of(schedule, costs.sends == "paired")
    rank = schedule.graph.rank.tolist()
    starts, ends = np.zeros(len(durations)), np.zeros(len(durations))
    # Each rank has its own clock; `posted` is when a rank came to a message.
    clock, position = [0.0] * schedule.ranks, [0] * schedule.ranks
    # End of a rank's last action, and the overhead after it; as in `simulate`, one stands before the first, too.
    free_at = [costs.overhead] * schedule.ranks
    posted: dict[tuple[int, ScheduledMessage], float] = {}
    ready = list(range(schedule.ranks))[::-1]
    while ready:
        current = ready.pop()
        while position[current] < len(programs[current]):
            step = programs[current][position[current]]
            if isinstance(step, int):
                starts[step] = max(clock[current], free_at[current])
                clock[current] = ends[step] = starts[step] + durations[step]
                free_at[current] = ends[step] + costs.overhead
                position[current] += 1
                continue
            arrival = clock[current]
            complete = True
            for message in step:
                ours, theirs = (current, message), (_other(rank, message, current), message)
                # The first visit: note the time, and look at the other side again, which may be waiting for it.
                if ours not in posted:
                    posted[ours] = clock[current]
                    ready.append(theirs[0])
                if theirs not in posted:
                    complete = False
                    continue
                delay = costs.delay(rank[message.producer], rank[message.consumer])
                # Under way from the moment both sides are there.
                arrival = max(arrival, max(posted[ours], posted[theirs]) + delay)
            if not complete:
                break
            # Resumed once the other side has posted.
            clock[current] = arrival
            position[current] += 1
    if any(position[number] < len(programs[number]) for number in range(schedule.ranks)):
        raise LabError(_deadlock(schedule, programs, position, posted))
    return Timeline(schedule, starts, ends, costs=costs)


def _other(rank: list[int], message: ScheduledMessage, current: int) -> int:
    producer, consumer = rank[message.producer], rank[message.consumer]
    return consumer if current == producer else producer


def _deadlock(
    schedule: Schedule,
    programs: list[list[Step]],
    position: list[int],
    posted: dict[tuple[int, ScheduledMessage], float],
) -> str:
    rank, actions = schedule.graph.rank.tolist(), schedule.actions
    # Any blocked rank leads to a cycle, as each waits for another one.
    current = next(number for number, step_number in enumerate(position) if step_number < len(programs[number]))
    blocked_on: dict[int, ScheduledMessage] = {}
    while current not in blocked_on:
        step = programs[current][position[current]]
        messages = step if isinstance(step, tuple) else ()
        message = next(
            candidate for candidate in messages if (_other(rank, candidate, current), candidate) not in posted
        )
        blocked_on[current] = message
        current = _other(rank, message, current)
    cycle = list(blocked_on)[list(blocked_on).index(current) :]
    parts_en, parts_fr = [], []
    for number in cycle:
        message = blocked_on[number]
        peer = _other(rank, message, number)
        producer, consumer = actions[message.producer], actions[message.consumer]
        if rank[message.producer] == number:
            parts_en.append(f"rank {number} sends the output of {producer} to rank {peer}")
            parts_fr.append(f"le rang {number} envoie le résultat de {producer} au rang {peer}")
        else:
            parts_en.append(f"rank {number} waits to receive what {consumer} needs from rank {peer}")
            parts_fr.append(f"le rang {number} attend du rang {peer} ce qu’il faut à {consumer}")
    return phrase("blocking deadlock", parts_en="; ".join(parts_en), parts_fr=" ; ".join(parts_fr))


UNIT_COSTS = Costs()
"""F = I = W = 1, so B = 2; no latency: the unit of figures and tables."""


def simulate(schedule: Schedule, costs: Costs = UNIT_COSTS) -> Timeline:
    """Compute start and end of every action.

    Args:
        schedule: what each rank does, in order; its dependencies are compiled at the first call and kept.

    Raises:
        LabError: if the schedule cannot be executed (with the cycle, where it deadlocks), or the costs do not fit it.
    """
    graph = schedule.graph
    durations = durations_of(schedule, costs)
    if costs.sends != "buffered":
        return simulate_blocking(schedule, costs, durations)
    delays = _delays(schedule, graph, costs)
    # The last entry, 0, is the end of "nothing", which first actions wait for.
    ends = [0.0] * (graph.actions + 1)
    needs, previous = graph.needs, graph.previous
    # Without latency, overhead and further inputs, two look-ups per action are enough.
    if delays is None and not costs.overhead and not graph.also:
        for index in graph.order:
            start, end = ends[previous[index]], ends[needs[index]]
            ends[index] = (start if start > end else end) + durations[index]
    else:
        overhead = costs.overhead
        delays = delays or [0.0] * graph.actions
        extra: dict[int, list[tuple[int, float]]] = {}
        for index, producer in graph.also:
            extra.setdefault(index, []).append((producer, input_delay(schedule, costs, producer, index)))
        for index in graph.order:
            # The rank is free after its overhead; the input is there after its delay.
            start = max(ends[previous[index]] + overhead, ends[needs[index]] + delays[index])
            for producer, delay in extra.get(index, ()):
                start = max(start, ends[producer] + delay)
            ends[index] = start + durations[index]
    finish = np.array(ends[:-1])
    return Timeline(schedule, finish - np.array(durations), finish, costs=costs)


def input_delay(schedule: Schedule, costs: Costs, producer: int, index: int) -> float:
    """Return how long the output of action `producer` is under way to action `index`, where sends do not block."""
    if schedule.actions[producer].kind == LOAD:
        return costs.eviction_transfer
    return costs.delay(int(schedule.graph.rank[producer]), int(schedule.graph.rank[index]))


def _delays(schedule: Schedule, graph: ActionGraph, costs: Costs) -> list[float] | None:
    """Delay of each action's main input; None where no message takes any time."""
    ranks = schedule.ranks
    matrix = np.array([[costs.delay(source, destination) for destination in range(ranks)] for source in range(ranks)])
    if not matrix.any():
        return None
    needs = np.array(graph.needs, np.int64)
    has = needs < graph.actions
    # Without an input any rank will do: its delay is masked below.
    source = graph.rank[np.where(has, needs, 0)] if graph.actions else needs
    delays: list[float] = np.where(has, matrix[source, graph.rank], 0.0).tolist()
    return delays


def durations_of(schedule: Schedule, costs: Costs) -> list[float]:
    """Return the duration of each action, in the order of `schedule.actions`.

    Raises:
        LabError: if the costs have values for another number of stages or of slices than the schedule.
    """
    stages = schedule.stages
    table = {kind: costs.per_stage(COST_OF[kind], stages) for kind in (*COMPUTES, UPDATE)}
    table[EVICT], table[LOAD] = [costs.evict] * stages, [costs.load] * stages
    slices = relative_slice_times(schedule, costs)
    if schedule.overlaps:
        return [_duration(action, table, costs) * slices[action.token_slice] for action in schedule.actions]
    if schedule.token_slices > 1 or costs.slice_times:
        return [table[action[0]][action[1]] * slices[action[4]] for action in schedule.actions]
    # By number, not by name: one look-up for each action of each simulation. [0] kind, [1] stage, [4] token slice.
    return [table[action[0]][action[1]] for action in schedule.actions]


def relative_slice_times(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return the relative time of each token slice; equal slices where the costs name none.

    Raises:
        LabError: if the costs hold values for another number of slices than the schedule.
    """
    if not costs.slice_times:
        return (1.0 / schedule.token_slices,) * schedule.token_slices
    if len(costs.slice_times) != schedule.token_slices:
        raise phrase.refused("other number of slices", slice_times=len(costs.slice_times), schedule=schedule)
    return costs.slice_times


def _duration(action: Action, table: dict[str, list[float]], costs: Costs) -> float:
    if action.kind != OVERLAPPED:
        return table[action.kind][action.stage]
    if costs.overlapped is None:
        return sum(table[part.kind][part.stage] for part in action.parts)
    return costs.of_stage("overlapped", action.stage)


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """Activation memory of a rank: from `times[i]` on it is `units[i]` stage-micro-batches."""

    times: Times
    units: Times

    @property
    def peak(self) -> float:
        """The most it ever is."""
        return float(self.units.max()) if self.units.size else 0.0


def memory_curves(timeline: Timeline, costs: Costs | None = None) -> tuple[MemoryCurve, ...]:
    """Compute each rank's activation memory over time; at equal times, the rank's own order decides.

    Times are equal where they differ by less than `SAME_TIME` of the last one: sums of the same durations in another
    order differ in their last bits.
    """
    schedule = timeline.schedule
    events: list[list[tuple[float, int, float]]] = [[] for _ in range(schedule.ranks)]
    costs = costs or timeline.costs or UNIT_COSTS
    share = 1 / schedule.token_slices
    for rank in range(schedule.ranks):
        part = timeline.of_rank(rank)
        # Rank r evicts to rank p − 1 − r (Kim et al. 2023, BPipe, §3).
        partner = schedule.ranks - 1 - rank
        for number in range(part.start, part.stop):
            start, end = float(timeline.starts[number]), float(timeline.ends[number])
            for element in schedule.actions[number].elements:
                for holder, at_end, units in deltas(element, rank, costs, share, partner):
                    # A transfer goes on after its action: memory is given back only at its end.
                    late = costs.eviction_transfer if at_end and element.kind in (EVICT, LOAD) else 0.0
                    events[holder].append((end + late if at_end else start, number, units))
    return tuple(_curve(of_rank) for of_rank in events)


def peak_activations(schedule: Schedule, costs: Costs = UNIT_COSTS) -> tuple[float, ...]:
    """Return, per rank, the most activations kept at a time, in stage-micro-batches.

    It follows from the order alone; with evictions the order between ranks matters too, and simulated times decide.
    """
    if any(action.kind == EVICT for action in schedule.actions):
        return tuple(curve.peak for curve in memory_curves(simulate(schedule, costs), costs))
    peaks = []
    share = 1 / schedule.token_slices
    for rank, order in enumerate(schedule.orders):
        memory = peak = 0.0
        # In the order of the rank's list: times are not needed.
        for action in order:
            for _, _, units in (d for e in action.elements for d in deltas(e, rank, costs, share)):
                memory += units
                peak = max(peak, memory)
        peaks.append(peak)
    return tuple(peaks)


def deltas(
    action: Action, rank: int, costs: Costs, share: float = 1.0, partner: int = -1
) -> tuple[tuple[int, bool, float], ...]:
    """Return what an action changes: (rank, at its end rather than at its start, units taken or given back).

    `share` is the part of a micro-batch that an action treats: one slice of a sequence, or all of it. `partner` is the
    rank that receives evicted activations.
    """
    # M_B and M_W, times the part of a micro-batch.
    for_input, for_weight = (
        costs.of_stage(name, action.stage) * share for name in ("kept_for_input", "kept_for_weight")
    )
    changes: dict[str, tuple[tuple[int, bool, float], ...]] = {
        FORWARD: ((rank, False, for_input),),
        BACKWARD: ((rank, True, -for_input),),
        BACKWARD_INPUT: ((rank, True, for_weight - for_input),),
        BACKWARD_WEIGHT: ((rank, True, -for_weight),),
        # While under way they take memory on both ranks.
        EVICT: ((rank, True, -for_input), (partner, False, for_input)),
        LOAD: ((rank, False, for_input), (partner, True, -for_input)),
    }
    return changes.get(action.kind, ())


SAME_TIME = 1e-9
"""Relative difference of two times below which they are the same moment."""


def _curve(events: list[tuple[float, int, float]]) -> MemoryCurve:
    """Sum up the changes (time, number of the action, units) of one rank in the order in which they happen."""
    if not events:
        return MemoryCurve(np.zeros(0), np.zeros(0))
    events.sort(key=lambda event: event[0])
    times = np.array([time for time, _, _ in events])
    # A new moment only where the difference is more than rounding.
    later = np.diff(times, prepend=times[0]) > SAME_TIME * np.abs(times).max()
    moments = np.cumsum(later)
    # lexsort takes its last key first: by moment, then by number of the action.
    order = np.lexsort((np.array([number for _, number, _ in events]), moments))
    firsts = np.flatnonzero(np.concatenate(([True], later[1:])))
    units = np.cumsum(np.array([units for _, _, units in events])[order])
    # All events of a moment have the time of its first one.
    return MemoryCurve(times[firsts][moments], units)


def steps_of(spans: Iterable[Span]) -> tuple[int, ...]:
    """List the steps of which actions were timed, in order."""
    return tuple(sorted({span.step for span in spans if span.action}))


def measured_timeline(
    schedule: Schedule, spans: Iterable[Span], step: int | None = None, ranks: Mapping[int, int] | None = None
) -> Timeline:
    """Build the timeline of one measured step, in seconds from its first action.

    Args:
        spans: of any steps and ranks; those without an action are left out.
        step: which step; by default the last one timed.
        ranks: pipeline rank of each process that counts; by default every process is its own.

    Raises:
        LabError: if the step does not have every action of the schedule, once.
    """
    timed = [span for span in spans if span.action and (ranks is None or span.rank in ranks)]
    steps = steps_of(timed)
    target = steps[-1] if step is None and steps else step
    interval_of = {
        (span.rank if ranks is None else ranks[span.rank], span.action): (span.start_s, span.end_s)
        for span in timed
        if span.step == target
    }
    starts, ends = np.zeros(len(schedule.actions)), np.zeros(len(schedule.actions))
    for rank, order in enumerate(schedule.orders):
        for number, action in enumerate(order, schedule.first_of_rank[rank]):
            times = [interval_of.get((rank, str(element))) for element in action.elements]
            if any(time is None for time in times):
                raise phrase.refused("action without a time", action=action, rank=rank, target=target)
            # Parts of an overlapped action ran one after the other: from the first start to the last end.
            starts[number] = min(time[0] for time in times if time)
            ends[number] = max(time[1] for time in times if time)
    origin = starts.min() if len(starts) else 0.0
    return Timeline(schedule, starts - origin, ends - origin, origin="measured")


def calibrated(timelines: Iterable[Timeline]) -> Costs:
    """Average measured durations into costs: per stage, the mean of each kind over the timelines given.

    Args:
        timelines: measured ones of one schedule; several steps give steadier means.

    Raises:
        LabError: if there is no timeline.
    """
    timeline_list = list(timelines)
    if not timeline_list:
        raise LabError(say(en="no timeline to calibrate with was given.", fr="aucune chronologie pour calibrer."))
    schedule = timeline_list[0].schedule
    seconds: dict[str, list[list[float]]] = {}
    for timeline in timeline_list:
        for action, duration in zip(schedule.actions, timeline.durations.tolist(), strict=True):
            if action.kind in COST_OF:
                of_kind = seconds.setdefault(COST_OF[action.kind], [[] for _ in range(schedule.stages)])
                of_kind[action.stage].append(duration)
    means = {
        name: tuple(float(np.mean(of_stage)) if of_stage else 0.0 for of_stage in stages)
        for name, stages in seconds.items()
    }
    # Median: single late messages do not count.
    latency = float(np.median([measured_latency(timeline) for timeline in timeline_list]))
    overhead = float(np.median([measured_overhead(timeline, latency) for timeline in timeline_list]))
    return Costs(latency=latency, overhead=overhead, **means)  # type: ignore[arg-type]


def measured_latency(timeline: Timeline) -> float:
    """Median time from a producer's end to its consumer's start on another rank that was already waiting."""
    graph, gaps = timeline.schedule.graph, []
    starts, ends = timeline.starts, timeline.ends
    for index, producer in enumerate(graph.needs):
        before = graph.previous[index]
        if producer == graph.actions or graph.rank[producer] == graph.rank[index]:
            continue
        # Before a rank's first action it was free all the time.
        free = ends[before] if before < graph.actions else -np.inf
        # Only where the rank was free first, so that the wait is the message's.
        if free <= ends[producer]:
            gaps.append(max(0.0, float(starts[index] - ends[producer])))
    return float(np.median(gaps)) if gaps else 0.0


def measured_overhead(timeline: Timeline, latency: float = 0.0) -> float:
    """Mean time between two actions of a rank where the second waited for nothing: the runtime's own time."""
    graph, gaps = timeline.schedule.graph, []
    starts, ends = timeline.starts, timeline.ends
    for index, before in enumerate(graph.previous):
        producer = graph.needs[index]
        # Its input was there when the rank became free: nothing but the runtime held it up.
        if before < graph.actions and (producer == graph.actions or ends[producer] + latency <= ends[before]):
            gaps.append(max(0.0, float(starts[index] - ends[before])))
    return float(np.mean(gaps)) if gaps else 0.0


class MeasuredOverlay(NamedTuple):
    """A step as measured and as simulated with the measured means."""

    measured: Timeline
    simulated: Timeline
    costs: Costs

    @property
    def error(self) -> float:
        """(measured − predicted) / measured of the makespan."""
        return (self.measured.makespan - self.simulated.makespan) / self.measured.makespan


def overlay(
    schedule: Schedule, spans: Iterable[Span], step: int | None = None, ranks: Mapping[int, int] | None = None
) -> MeasuredOverlay:
    """Simulate a measured step with the mean times of its actions.

    Args:
        schedule, spans, ranks: as for `measured_timeline`.
        step: which step; by default, of those that were timed, the one of median length.

    Raises:
        LabError: if the step was not timed as a whole.
    """
    span_list = list(spans)
    steps = steps_of(span_list) if step is None else (step,)
    timelines = [measured_timeline(schedule, span_list, number, ranks) for number in steps or (None,)]
    # The lower median: a step that was measured.
    measured = sorted(timelines, key=lambda timeline: timeline.makespan)[(len(timelines) - 1) // 2]
    costs = calibrated([measured])
    return MeasuredOverlay(measured, simulate(schedule, costs), costs)
