"""Analyse a schedule: idle time and its causes, the critical path, lower bounds of the makespan.

**Idle time.** Each moment in which a rank does not compute has one cause, which the order of the rank, the times and
the delays of messages decide; the gaps of a rank sum to its idle time.

| where the rank waits | cause |
|--|--|
| before its first backward | warm-up: the pipeline fills |
| after its last action, until the last rank is done | barrier: only the optimizer step ends that wait |
| else, after its last forward | drain: the pipeline empties |
| else, between forwards and backwards | imbalance: another rank was slower, or the order made it later |
| at the end of any of these waits, while the message that ends it is under way | latency |

Latency is what would vanish if that one message took no time: min(gap, its delay). Delays added up earlier on other
ranks count under the other causes.

Source: own definition, from the kinds of idle time that Narayanan et al. 2021 (arXiv 2104.04473, §2.2: flush), Fan et
al. 2021 (DAPPLE, §4: warm-up, steady phase, ending) and Qi et al. 2024 (arXiv 2401.10241, §4: optimizer barrier) name.

**Critical path.** A chain of actions without slack, from the first start to the last end, found in O(actions). Source:
Kelley & Walker 1959, "Critical-path planning and scheduling", for activities on nodes with delays between them.

**Lower bounds.** A bound depends on the placement, the micro-batches and the costs, never on the order of actions or on
memory. A rank waits for the first micro-batch (its head), does all its work, and after its last backward the gradient
still has to reach stage 0 (its tail). With F, I, W the times of one stage's forward and its two backwards, B = I + W,
c the delay of a message and m micro-batches:

    head(s) = Σ_{j<s} (F_j + c)
    whole backward:  head(s) + m (F_s + B_s) + Σ_{j<s} (B_j + c)
    split backward:  head(s) + m (F_s + I_s + W_s)   and   head(s) + m (F_s + I_s) + tail(s),
                     tail(s) = the longest of W_s and I_{s−1} + c + tail(s − 1);  tail(0) = W_0

The bound is the largest of these over all stages. A rank with several chunks does the work of all of them from the head
of the first; each of its later chunks, with those behind it, gives a bound too.

Token slices, of relative times t_0, t_1, …: on a stage, forwards of a sequence run in order and backwards in reverse,
so the first action of a stage and its last backward are of some slice 0: heads and tails take t_0. A longer slice makes
later stages wait too, whatever the order (`validity.least_waits` has the proof), which gives the bound

    longest wait before stage s + m Σ t_i (F_s + B_s) + longest wait after its backwards

For equal stages it is (m Σ t_i + (p − 1) max t_i)(F + B) + 2 (p − 1) c, TeraPipe's makespan. Slices of one sequence
alone have one order only: its makespan is the bound for m = 1, equal stages or not.

Source: the heads-and-tails bound of machine scheduling (Carlier 1982, "The one-machine sequencing problem"), applied to
pipelines; for one chunk per rank and equal stages it gives (m + p − 1)(F + B) (Huang et al. 2019, arXiv 1811.06965,
§2.3) and (m + p − 1)(F + I) + W for m ≤ p (Qi et al. 2024, arXiv 2401.10241, App. H).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dlojz.base.errors import LabError
from dlojz.base.language import one_of, say
from dlojz.pipeline.schedule import BACKWARD, BACKWARD_INPUT, FORWARD, Costs, Schedule
from dlojz.pipeline.simulator import UNIT_COSTS, Timeline, input_delay, programs_of, relative_slice_times
from dlojz.pipeline.validity import least_waits, sequence_makespan

WARM_UP, LATENCY, IMBALANCE, DRAIN, BARRIER = CAUSES = ("warm-up", "latency", "imbalance", "drain", "barrier")
"""Every cause of idle time, in the order in which figures stack them."""


class IdleGap(NamedTuple):
    """Idle time of a rank with one cause; a wait that ends with latency is two gaps.

    `before` is the number of the action that ends the wait, None after the rank's last action.
    """

    rank: int
    start: float
    end: float
    cause: str
    before: int | None

    @property
    def duration(self) -> float:
        """How long it lasts, in the unit of the timeline."""
        return self.end - self.start


def title_of(cause: str) -> str:
    """Return the title of a cause for figures and tables.

    Raises:
        LabError: if there is no such cause.
    """
    titles = {
        WARM_UP: say(en="warm-up", fr="démarrage"),
        LATENCY: say(en="latency", fr="latence"),
        IMBALANCE: say(en="imbalance", fr="déséquilibre"),
        DRAIN: say(en="drain", fr="vidange"),
        BARRIER: say(en="barrier", fr="barrière"),
    }
    if cause not in titles:
        raise LabError(one_of("cause of idle time", cause, CAUSES))
    return titles[cause]


def idle_by_cause(timeline: Timeline, costs: Costs | None = None) -> tuple[dict[str, float], ...]:
    """Sum, per rank, the idle time of each of `CAUSES`; the sum over all causes is the rank's `timeline.idle`.

    Args:
        costs: delays of messages; by default those that were simulated. A measured timeline has none: without costs
            none of its waits counts as latency.
    """
    idle_times: tuple[dict[str, float], ...] = tuple(dict.fromkeys(CAUSES, 0.0) for _ in range(timeline.schedule.ranks))
    for gap in gaps(timeline, costs):
        idle_times[gap.rank][gap.cause] += gap.duration
    return idle_times


def gaps(timeline: Timeline, costs: Costs | None = None) -> tuple[IdleGap, ...]:
    """List all waits of all ranks within the makespan, in order of time on each rank; `costs` as in `idle_by_cause`."""
    schedule = timeline.schedule
    costs = costs or timeline.costs
    # A measured timeline has no costs: then no wait counts as latency.
    under_way = _delays(timeline, costs) if costs else [0.0] * len(schedule.actions)
    starts, ends = timeline.starts.tolist(), timeline.ends.tolist()
    first_start, last_end = timeline.start, timeline.start + timeline.makespan
    idle_gaps: list[IdleGap] = []
    for rank, (begin, stop) in enumerate(pairwise(schedule.first_of_rank)):
        # Forwards still to run and backwards run so far tell in which phase the rank is.
        forwards = sum(e.kind == FORWARD for action in schedule.orders[rank] for e in action.elements)
        backwards, free_at = 0, first_start
        for number in range(begin, stop):
            if starts[number] > free_at:
                cause = WARM_UP if not backwards else IMBALANCE if forwards else DRAIN
                # Latency is the end of the wait, at most as long as the message was under way.
                arrives = starts[number] - min(starts[number] - free_at, under_way[number])
                parts = (
                    IdleGap(rank, free_at, arrives, cause, number),
                    IdleGap(rank, arrives, starts[number], LATENCY, number),
                )
                idle_gaps += [gap for gap in parts if gap.end > gap.start]
            free_at = ends[number]
            for element in schedule.actions[number].elements:
                forwards -= element.kind == FORWARD
                # W does not count: it waits for no gradient from the next stage.
                backwards += element.kind in (BACKWARD, BACKWARD_INPUT)
        if last_end > free_at:
            idle_gaps.append(IdleGap(rank, free_at, last_end, BARRIER, None))
    return tuple(idle_gaps)


def _delays(timeline: Timeline, costs: Costs) -> list[float]:
    """For each action, the delay of the message that arrived last; 0 where it takes none."""
    if costs.sends == "buffered":
        ends = timeline.ends.tolist()
        return [
            # The message that arrives last: the end of its producer plus its delay.
            max(inputs, key=lambda wait: ends[wait[0]] + wait[1])[1] if inputs else 0.0
            for inputs in _inputs(timeline.schedule, costs)
        ]
    # Where sends block, a rank also waits while it sends: all that it passes between two actions counts.
    rank = timeline.schedule.graph.rank.tolist()
    delays = [0.0] * len(timeline.schedule.actions)
    for program in programs_of(timeline.schedule, costs.sends == "paired"):
        passed = 0.0
        for step in program:
            if isinstance(step, int):
                # All that the rank passes since its last action counts; of messages posted together the longest.
                delays[step], passed = passed, 0.0
            else:
                passed += max(costs.delay(rank[message.producer], rank[message.consumer]) for message in step)
    return delays


def _inputs(schedule: Schedule, costs: Costs | None) -> list[list[tuple[int, float]]]:
    """For each action, the actions whose output it takes, with the delay of the message."""
    graph = schedule.graph
    inputs: list[list[tuple[int, float]]] = [[] for _ in range(graph.actions)]
    for producer, index in graph.edges():
        inputs[index].append((producer, input_delay(schedule, costs, producer, index) if costs else 0.0))
    return inputs


def critical_path(timeline: Timeline) -> tuple[int, ...]:
    """Return the numbers of the actions of one critical path, in order of time.

    Each one starts when the one before it ends, plus the delay of the message between two ranks. Among several
    candidates the predecessor on the same rank is taken.

    Args:
        timeline: simulated, or measured: there the chain follows what arrived last, overheads between.
    """
    if not timeline.starts.size:
        return ()
    waits = _waits(timeline, timeline.costs)
    ends = timeline.ends.tolist()
    # Of several actions that end last, the first.
    current = int(np.argmax(timeline.ends))
    path = [current]
    while waits[current]:
        # max() keeps the first of equals, and the action before on the same rank stands first.
        current = max(waits[current], key=lambda wait: ends[wait[0]] + wait[1])[0]
        path.append(current)
    return tuple(reversed(path))


def _waits(timeline: Timeline, costs: Costs | None) -> list[list[tuple[int, float]]]:
    """For each action, those that it waits for, with the delay in between; the one before on its rank stands first."""
    graph = timeline.schedule.graph
    waits = [
        # The number `graph.actions` stands for "nothing": the first action of a rank has none before it.
        [(previous, 0.0)] * (previous < graph.actions) + inputs
        for previous, inputs in zip(graph.previous, _inputs(timeline.schedule, costs), strict=True)
    ]
    if costs and costs.sends != "buffered":
        _add_messages(timeline, costs, waits)
    return waits


def _add_messages(timeline: Timeline, costs: Costs, waits: list[list[tuple[int, float]]]) -> None:
    """Where sends block, an action also waits until its rank has passed the messages that stand before it.

    A message is passed its delay after both sides are there, so what a rank did last counts with the delay too.
    """
    programs = programs_of(timeline.schedule, costs.sends == "paired")
    rank = timeline.schedule.graph.rank.tolist()
    # Number of the step in which each rank passes each message.
    positions = {
        (number, message): position
        for number, program in enumerate(programs)
        for position, step in enumerate(program)
        if not isinstance(step, int)
        for message in step
    }

    @cache
    def hangs_on(number: int, position: int) -> dict[int, float]:
        """The actions that a rank has waited for when it comes to this step, with the longest delay since each."""
        if not position:
            return {}
        if isinstance(step := programs[number][position - 1], int):
            return {step: 0.0}
        delays: dict[int, float] = {}
        for message in step:
            ends = rank[message.producer], rank[message.consumer]
            # The rank on the other side: the receiver where this one sends, else the sender.
            peer = ends[ends[0] == number]
            # Both sides must have come that far: what either has waited for holds the message up.
            for sources in (hangs_on(number, position - 1), hangs_on(peer, positions[peer, message])):
                for action, since in sources.items():
                    delays[action] = max(delays.get(action, 0.0), since + costs.delay(*ends))
        return delays

    for number, program in enumerate(programs):
        for position, step in enumerate(program):
            if isinstance(step, int):
                waits[step] += hangs_on(number, position).items()


@dataclass(frozen=True)
class _Stage:
    """Times of one stage of one pipe, and what lies before and after it.

    `tail` is the way of its gradient to stage 0; `tail_of_input` goes on to the weight gradients on that way.
    """

    rank: int
    forward: float
    backward: float
    backward_input: float
    head: float
    tail: float
    tail_of_input: float


def lower_bound(schedule: Schedule, costs: Costs = UNIT_COSTS) -> float:
    """Return the makespan that no order of the same stages on the same ranks can beat.

    Splitting the backward counts as allowed only where the schedule does it. Orders of token slices are those that
    `validity` accepts.

    Args:
        schedule: gives placement, micro-batches (of each pipe), token slices; its order does not matter.
    """
    return max(_makespans(schedule, costs), default=0.0)


def lower_bound_of(
    ranks: int,
    micro_batches: int,
    costs: Costs = UNIT_COSTS,
    *,
    placement: Sequence[int] | None = None,
    split: bool = False,
) -> float:
    """Return the lower bound of the makespan without a schedule.

    Args:
        placement: rank of each stage; by default stage s is on rank s.
        split: whether backwards may be split.
    """
    return max(_bounds(_stages(tuple(placement or range(ranks)), costs, split, 1.0), micro_batches, split), default=0.0)


def span_bound_of(
    ranks: int,
    micro_batches: int,
    costs: Costs = UNIT_COSTS,
    *,
    placement: Sequence[int] | None = None,
    split: bool = False,
) -> float:
    """Return the span that no order of the same stages on the same ranks can beat; arguments as in `lower_bound_of`.

    The busiest rank's work; or the way from a rank's first forward to another rank, through all the work there and on
    the later stages of that rank, and back to its own last backward. With whole backwards, rank 0's span is the
    makespan.
    """
    stages = _stages(tuple(placement or range(ranks)), costs, split, 1.0)
    # Each rank does all its own work within its span.
    bounds = [micro_batches * sum(s.forward + s.backward for s in stages if s.rank == rank) for rank in range(ranks)]
    remaining_work = [0.0] * ranks
    for number, stage in reversed(list(enumerate(stages))):
        # Work of this stage and of the later ones on the same rank.
        remaining_work[stage.rank] += stage.forward + (stage.backward_input if split else stage.backward)
        path_time = stage.head + micro_batches * remaining_work[stage.rank] + stage.tail
        for origin in stages[: number + 1]:
            # First forward of `origin` to the last backward there; with split backwards one W is left after it.
            bounds.append(
                path_time - origin.head - origin.tail + (origin.backward - origin.backward_input if split else 0.0)
            )
    return max(bounds, default=0.0)


def _stages(
    placement: tuple[int, ...], costs: Costs, split: bool, share: float, overlaps: bool = False
) -> list[_Stage]:
    """The stages of one pipe; `share` is the relative time of the slice that comes first and leaves last."""
    count = len(placement)
    stages: list[_Stage] = []
    times = {n: costs.per_stage(n, count) for n in ("forward", "backward", "backward_input", "backward_weight")}
    head = tail = tail_of_input = 0.0
    for number, rank in enumerate(placement):
        forward, backward, for_input, for_weight = (times[name][number] for name in times)
        if overlaps and costs.overlapped is not None:
            together = min(costs.per_stage("overlapped", count))
            # A bound must hold for every order, and in some each pass hides behind another.
            forward, backward = min(forward, together), min(backward, together)
        if split:
            # A schedule may split some backwards only: the shorter way bounds both.
            backward = min(backward, for_input + for_weight)
            for_input = min(backward, for_input)
            for_weight = backward - for_input
        if number:
            before = stages[-1]
            forward_delay, backward_delay = costs.delay(before.rank, rank), costs.delay(rank, before.rank)
            head = before.head + share * before.forward + forward_delay
            tail = before.tail + share * (before.backward_input if split else before.backward) + backward_delay
            tail_of_input = max(
                share * for_weight, before.tail_of_input + share * before.backward_input + backward_delay
            )
        else:
            tail_of_input = share * for_weight
        stages.append(_Stage(rank, forward, backward, for_input, head, tail, tail_of_input))
    return stages


def _bounds(stages: list[_Stage], micro_batches: float, split: bool) -> Iterator[float]:
    """The bounds of one pipe: each rank's last chunks, from the last one alone to all of them.

    `micro_batches` is multiplied by the relative time of a sequence, where that is not 1.
    """
    forwards, backwards, for_input = (dict.fromkeys((stage.rank for stage in stages), 0.0) for _ in range(3))
    for stage in reversed(stages):
        # Of this stage and of the rank's later ones: the bounds of these chunks alone.
        forwards[stage.rank] += stage.forward
        backwards[stage.rank] += stage.backward
        for_input[stage.rank] += stage.backward_input
        forward = forwards[stage.rank]
        if split:
            yield stage.head + micro_batches * (forward + backwards[stage.rank])
            yield stage.head + micro_batches * (forward + for_input[stage.rank]) + stage.tail_of_input
        else:
            yield stage.head + micro_batches * (forward + backwards[stage.rank]) + stage.tail


def _makespans(schedule: Schedule, costs: Costs) -> Iterator[float]:
    split = schedule.splits_backward
    pipes = _pipes(schedule, costs)
    if len(pipes) == 1 and not schedule.overlaps:
        yield from _bounds(pipes[0], schedule.micro_batches * sum(relative_slice_times(schedule, costs)), split)
        yield from _sliced(schedule, costs)
        return
    # Several pipes share a rank, or a forward hides behind a backward: the work that a rank is left with, between the
    # earliest of its heads and the shortest of its tails.
    for rank, work in enumerate(_work(schedule, costs)):
        rank_stages = [stage for pipe in pipes for stage in pipe if stage.rank == rank]
        if rank_stages:
            tail = 0.0 if split else min(stage.tail for stage in rank_stages)
            yield min(stage.head for stage in rank_stages) + work + tail
    # One micro-batch alone, or one slice of it: there and back.
    share = _share(schedule, costs)
    for pipe, count in zip(pipes, _counts(schedule), strict=True):
        last_stage = pipe[-1]
        if count and split:
            yield last_stage.head + share * (last_stage.forward + last_stage.backward_input) + last_stage.tail_of_input
        elif count:
            yield last_stage.head + share * (last_stage.forward + last_stage.backward) + last_stage.tail


def _sliced(schedule: Schedule, costs: Costs) -> Iterator[float]:
    """The bounds that the lengths of token slices add, in one pipe without overlaps; of makespans."""
    if schedule.token_slices == 1 or schedule.pipes > 1 or schedule.overlaps or not schedule.micro_batches:
        return
    slices, split, [stages] = relative_slice_times(schedule, costs), schedule.splits_backward, _pipes(schedule, costs)
    forward = [stage.forward for stage in stages]
    whole_backward = [stage.backward for stage in stages]
    backward = [stage.backward_input if split else stage.backward for stage in stages]
    # One delay per boundary and direction, as the two directions of a link may differ.
    forward_delays = [costs.delay(stage.rank, after.rank) for stage, after in pairwise(stages)]
    backward_delays = [costs.delay(after.rank, stage.rank) for stage, after in pairwise(stages)]
    # After the last backward for the input of stage 0, which is of a slice 0, its weight gradient is left.
    weight_time = slices[0] * (whole_backward[0] - backward[0])
    yield sequence_makespan(forward, backward, forward_delays, backward_delays, slices) + weight_time
    work = schedule.micro_batches * sum(slices)
    before = least_waits(forward, forward_delays, slices, schedule.micro_batches)
    after = least_waits(backward, backward_delays, slices, schedule.micro_batches)
    for number in range(len(stages)):
        yield before[number] + work * (forward[number] + backward[number]) + after[number] + weight_time
        yield before[number] + work * (forward[number] + whole_backward[number])


def _pipes(schedule: Schedule, costs: Costs) -> list[list[_Stage]]:
    share = _share(schedule, costs)
    return [
        _stages(placement, costs, schedule.splits_backward, share, schedule.overlaps)
        for placement in schedule.placement
    ]


def _share(schedule: Schedule, costs: Costs) -> float:
    """Relative time of the slice that comes first to a stage and leaves it last; of overlapped passes, of the least."""
    slices = relative_slice_times(schedule, costs)
    return min(slices) if schedule.overlaps else slices[0]


def _counts(schedule: Schedule) -> list[int]:
    """Micro-batches of each pipe."""
    if schedule.pipes == 1:
        return [schedule.micro_batches]
    elements = (element for action in schedule.actions for element in action.elements)
    # A micro-batch belongs to the pipe in which its forwards run.
    pairs = {(element.pipe, element.micro_batch) for element in elements if element.kind == FORWARD}
    return [sum(pipe == number for pipe, _ in pairs) for number in range(schedule.pipes)]


def _work(schedule: Schedule, costs: Costs) -> list[float]:
    """Per rank, the least time it computes; where passes may overlap, as if all its forwards did with a backward."""
    sequence = sum(relative_slice_times(schedule, costs))
    work = [0.0] * schedule.ranks
    rank_stages: list[list[_Stage]] = [[] for _ in work]
    pairs = [0] * schedule.ranks
    for placement, count in zip(schedule.placement, _counts(schedule), strict=True):
        for stage in _stages(placement, costs, schedule.splits_backward, 1.0):
            work[stage.rank] += sequence * count * (stage.forward + stage.backward)
            rank_stages[stage.rank].append(stage)
            pairs[stage.rank] += count
    if schedule.overlaps and costs.overlapped is not None:
        together = min(costs.per_stage("overlapped", schedule.stages))
        for rank, stages in enumerate(rank_stages):
            # Most that a pair can save: the longest forward and backward, less the time of both at once.
            saved = max(s.forward for s in stages) + max(s.backward for s in stages) - together
            # At most one pair per micro-batch and stage of the rank.
            work[rank] -= pairs[rank] * max(0.0, saved)
    return work


def total_time(ranks: int, micro_batches: int, forward: float, backward: float) -> float:
    """Compute the length of an iteration of GPipe or 1F1B: (m + p − 1)(t_f + t_b).

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §2.2.1; equal stages, no latency, any m and p.
    """
    return (micro_batches + ranks - 1) * (forward + backward)


def overhead(ranks: int, micro_batches: int) -> float:
    """Compute the bubble over work: (p − 1)/m.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §2.2.1.
    """
    return (ranks - 1) / micro_batches


def fraction(ranks: int, micro_batches: int) -> float:
    """Compute the bubble over the whole iteration: (p − 1)/(m + p − 1).

    Source: Huang et al. 2019 (arXiv 1811.06965), §2.3.
    """
    return (ranks - 1) / (micro_batches + ranks - 1)
