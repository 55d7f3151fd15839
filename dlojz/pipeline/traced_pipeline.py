"""Recognise the pipeline schedule in the traces of its ranks, lay it over its simulation, and say who waits for what.

torch's pipeline runtime marks each action in the profiler's trace (`PP:2F0`, `PP:3RECV_B1`), and its GPipe marks
`Forward 3` and `Backward 3`; where nothing is marked (its 1F1B), the passes are those that autograd numbers. An action
begins when its message has arrived, not where its mark begins, and on the host ends with its last operator.
Source: `torch/distributed/pipelining/schedules.py` (2.13).

**Recognised** is a schedule of the catalogue that gives each rank the same actions in the same order.

**Head-of-line blocking.** Messages of one stream, and calls of one thread, pass one after the other. A receive that
waits for a message not yet made, or a send whose receiver has not posted its receive yet, holds up whatever stands
behind it and could already go.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dlojz.base.errors import LabError
from dlojz.base.language import refusal
from dlojz.pipeline.schedule import BACKWARD, BACKWARD_INPUT, FORWARD, Action, Schedule, parse_action
from dlojz.pipeline.schedule_catalogue import ENTRIES, ScheduleEntry, build
from dlojz.pipeline.simulator import MeasuredOverlay, measured_timeline, overlay
from dlojz.results.rank_activities import AlignedRanks, RankActivities, TracedMark, TracedMessage, aligned
from dlojz.results.record import Span

TRANSFER = re.compile(r"PP:(\d{1,9})(SEND|RECV)_([FB])(\d{1,9})")
SIMPLE = re.compile(r"(Forward|Backward) (\d{1,9})")
LEAST_SHARE = 0.005
"""Waits shorter than this part of the step are not told."""
MOST_COMPARED = 20_000
"""Actions up to which the closest schedule is looked for, and schedules are tried that search for their order."""


class TracedAction(NamedTuple):
    """Action of one rank in one step; it computes from `start_s` on."""

    rank: int
    step: int
    action: Action
    start_s: float
    end_s: float
    lane: str


class TracedTransfer(NamedTuple):
    """Send or receive of one rank, as it stands in its stream or thread; `direction` is F or B."""

    rank: int
    step: int
    sends: bool
    direction: str
    stage: int
    micro_batch: int
    start_s: float
    end_s: float
    lane: str

    def __str__(self) -> str:
        return f"{self.stage}{'SEND' if self.sends else 'RECV'}_{self.direction}{self.micro_batch}"

    @property
    def producer(self) -> tuple[str, int, int]:
        """What makes the message: direction, stage, micro-batch."""
        # A receive on stage s brings what s − 1 has made in forward, s + 1 in backward.
        offset = 1 if self.direction == FORWARD else -1
        return self.direction, self.stage if self.sends else self.stage - offset, self.micro_batch

    @property
    def consumer(self) -> tuple[str, int, int]:
        """What needs it."""
        direction, stage, micro_batch = self.producer
        return direction, stage + (1 if direction == FORWARD else -1), micro_batch


@dataclass(frozen=True)
class TracedPasses:
    """All actions and transfers that the traces show."""

    actions: tuple[TracedAction, ...]
    transfers: tuple[TracedTransfer, ...]


def aligned_pipelines(ranks: Sequence[RankActivities]) -> tuple[AlignedRanks, tuple[TracedPipeline, ...]]:
    """Put ranks on one clock, by the messages of their pipelines too, and recognise these.

    Args:
        ranks: at least two, in order, each on its own clock.

    Raises:
        LabError: if the actions make no whole step of a pipeline.
    """
    unaligned_passes = passes_of(ranks)
    if unaligned_passes is None or not pipelines_of(unaligned_passes):
        return aligned(ranks), ()
    # Messages between the stages put the clocks in order; then everything is read on the common clock.
    together = aligned(ranks, messages_of(unaligned_passes))
    passes = passes_of(together.ranks)
    return together, pipelines_of(passes) if passes else ()


def passes_of(ranks: Sequence[RankActivities]) -> TracedPasses | None:
    """Find the actions of the pipeline in the activities of all ranks; None where there are none.

    Complete steps are numbered from 0 up to the last; what precedes or follows them is left out.
    """
    actions: list[TracedAction] = []
    transfers: list[TracedTransfer] = []
    of_ranks = [list(_marked(rank, position)) for position, rank in enumerate(ranks)]
    if not any(of_ranks):
        of_ranks = list(_renumbered([list(_unmarked(rank, position)) for position, rank in enumerate(ranks)]))
    if not all(of_ranks):
        return None
    for rank, rank_events in zip(ranks, of_ranks, strict=True):
        step_events = _whole_steps(rank_events)
        actions += [event._replace(step=step) for step, event in step_events]
        transfers += _transfers(rank, [event for _, event in step_events], [step for step, _ in step_events])
    # The step that all ranks have: the rank with the fewest steps says how many.
    last_step = min(max(event.step for event in actions if event.rank == rank.rank) for rank in ranks)
    # Ranks that recorded more leave out their first ones, so that the last steps are the same.
    first_step = {
        rank.rank: max(event.step for event in actions if event.rank == rank.rank) - last_step for rank in ranks
    }
    return TracedPasses(
        tuple(
            event._replace(step=event.step - first_step[event.rank])
            for event in actions
            if event.step >= first_step[event.rank]
        ),
        tuple(
            transfer._replace(step=transfer.step - first_step[transfer.rank])
            for transfer in transfers
            if transfer.step >= first_step[transfer.rank]
        ),
    )


def _main_lane(marks: Iterable[TracedMark]) -> str:
    """The stream or thread that computes most."""
    seconds: dict[str, float] = defaultdict(float)
    for mark in marks:
        seconds[mark.lane] += mark.end_s - mark.start_s
    return max(seconds, key=lambda lane: seconds[lane], default="")


def _marked(rank: RankActivities, position: int) -> Iterator[TracedAction]:
    """Actions that the program has marked, in order."""
    marked_actions = [(mark, action) for mark in rank.marks if (action := _action(mark.name, position))]
    lane = _main_lane(mark for mark, _ in marked_actions)
    arrivals = sorted(exchange.end_s for exchange in rank.exchanges if exchange.kind == "recv")
    next_arrival = 0
    for mark, action in marked_actions:
        if mark.lane != lane:
            continue
        start = mark.start_s
        if not mark.on_device:  # a kernel does not wait; the host does, at the beginning of the mark
            while next_arrival < len(arrivals) and arrivals[next_arrival] < mark.end_s:
                start = max(start, arrivals[next_arrival])
                next_arrival += 1
        end = mark.end_s if mark.on_device else _computed(rank, start, mark.end_s)
        yield TracedAction(rank.rank, 0, action, start, end, mark.lane)


def _computed(rank: RankActivities, start_s: float, end_s: float) -> float:
    """Where the host has computed what a mark holds: the message may leave before the mark ends, and arrive too."""
    # The last operator that begins before the mark ends.
    index = int(np.searchsorted(rank.computing[:, 0], end_s)) - 1
    computed_s = float(rank.computing[index, 1]) if index >= 0 else start_s
    # None in this action: the mark's own end.
    return min(computed_s, end_s) if computed_s > start_s else end_s


def _action(name: str, position: int) -> Action | None:
    if simple := SIMPLE.fullmatch(name):
        return Action(FORWARD if simple[1] == "Forward" else BACKWARD, position, int(simple[2]))
    if TRANSFER.fullmatch(name) or not name.startswith("PP:"):
        return None
    try:
        return parse_action(name.removeprefix("PP:"))
    except LabError:  # UNSHARD, RESHARD, REDUCE_GRAD
        return None


def _unmarked(rank: RankActivities, position: int) -> Iterator[TracedAction]:
    """Forwards and backwards as autograd numbers them; one stage per rank."""
    for autograd_pass in rank.passes:
        action = Action(BACKWARD if autograd_pass.backward else FORWARD, position, autograd_pass.micro_batch)
        yield TracedAction(rank.rank, 0, action, autograd_pass.start_s, autograd_pass.end_s, "")


def _renumbered(of_ranks: Sequence[Sequence[TracedAction]]) -> Iterator[list[TracedAction]]:
    """Begin the micro-batches of each step at 0 where nothing marks the steps.

    A rank has no micro-batch in flight where a step ends; the rank that is least often so tells how many steps there
    are.
    """
    # After this backward nothing is in flight: a step may end here.
    steps = min(
        sum(event.action.kind == BACKWARD and not flying for event, flying in _in_flight(rank_events))
        for rank_events in of_ranks
    )
    for rank_events in of_ranks:
        step_micro_batches = sum(event.action.kind == BACKWARD for event in rank_events) // max(steps, 1)
        yield [
            event._replace(
                action=event.action._replace(micro_batch=event.action.micro_batch % max(step_micro_batches, 1))
            )
            for event in rank_events
        ]


def _in_flight(rank_events: Sequence[TracedAction]) -> Iterator[tuple[TracedAction, int]]:
    """Each action, and how many micro-batches are in flight after it."""
    flying = 0
    for event in rank_events:
        flying += 1 if event.action.kind == FORWARD else -1
        yield event, flying


def _whole_steps(rank_events: Sequence[TracedAction]) -> list[tuple[int, TracedAction]]:
    """Number the steps: one begins where an action comes again; those that lack actions are left out."""
    steps: list[list[TracedAction]] = [[]]
    step_actions: set[Action] = set()
    for event in rank_events:
        if event.action in step_actions:
            steps.append([])
            step_actions = set()
        step_actions.add(event.action)
        steps[-1].append(event)
    # The record may begin or end within a step, which is then shorter.
    full_length = max(map(len, steps))
    full_steps = [step for step in steps if len(step) == full_length]
    return [(number, event) for number, step in enumerate(full_steps) for event in step]


def _transfers(rank: RankActivities, actions: Sequence[TracedAction], steps: Sequence[int]) -> list[TracedTransfer]:
    """Sends and receives that are marked, each in the step of the actions around it."""
    main = actions[0].lane
    marked_transfers = [(mark, name_match) for mark in rank.marks if (name_match := TRANSFER.fullmatch(mark.name))]
    # Where transfers have lanes of their own, their marks on the computing lane are not the transfers.
    transfer_lanes = {mark.lane for mark, _ in marked_transfers} - {main}
    ends = {
        step: max(event.end_s for event, event_step in zip(actions, steps, strict=True) if event_step == step)
        for step in set(steps)
    }
    limits = [ends[step] for step in sorted(ends)]
    transfers, step_names = [], set()
    for mark, name_match in marked_transfers:
        if transfer_lanes and mark.lane == main:
            continue
        middle = (mark.start_s + mark.end_s) / 2
        # In the first step whose last action ends after the middle of the transfer.
        step = min(int(np.searchsorted(limits, middle)), len(limits) - 1)
        if (step, mark.name) in step_names:
            continue
        step_names.add((step, mark.name))
        fields = int(name_match[1]), int(name_match[4]), mark.start_s, mark.end_s, mark.lane
        transfers.append(TracedTransfer(rank.rank, step, name_match[2] == "SEND", name_match[3], *fields))
    return transfers


def messages_of(passes: TracedPasses) -> Iterator[TracedMessage]:
    """List the messages between ranks, each from the end of what makes it to the start of what needs it."""
    events = _by_place(passes.actions)
    for origin, event in events.items():
        target = origin._replace(stage=origin.stage + (1 if origin.direction == FORWARD else -1))
        needs = events.get(target)
        if needs and needs.rank != event.rank:
            yield TracedMessage(event.rank, needs.rank, event.end_s, needs.start_s)


class _Place(NamedTuple):
    """What one message comes from: the forward, or the gradient of the input, of a micro-batch on a stage."""

    step: int
    pipe: int
    direction: str
    stage: int
    micro_batch: int
    token_slice: int


def _by_place(actions: Iterable[TracedAction]) -> dict[_Place, TracedAction]:
    events = {}
    for event in actions:
        for element in event.action.elements:
            if element.kind in (FORWARD, BACKWARD, BACKWARD_INPUT):
                direction = FORWARD if element.kind == FORWARD else BACKWARD
                events[
                    _Place(event.step, element.pipe, direction, element.stage, element.micro_batch, element.token_slice)
                ] = event
    return events


class ScheduleMatch(NamedTuple):
    """Schedules of the catalogue that give these orders; the closest one where none does.

    `share` is the part of the actions that stand in the order of the closest; `first_difference` the rank, the action
    there and the one that the closest has in its place.
    """

    names: tuple[str, ...]
    closest: str = ""
    share: float = 0.0
    first_difference: tuple[int, str, str] | None = None


@dataclass(frozen=True)
class TracedPipeline:
    """One pipeline as traced, beside its simulation with the measured mean times.

    Attributes:
        ranks: processes of it, in the order of its stages.
        step: the one that is laid over the simulation, of median length.
        steps: how many whole ones were traced.
        overlay: that step, measured and simulated.
        match: what schedule it is.
    """

    ranks: tuple[int, ...]
    step: int
    steps: int
    overlay: MeasuredOverlay
    match: ScheduleMatch
    passes: TracedPasses


def pipelines_of(passes: TracedPasses) -> tuple[TracedPipeline, ...]:
    """Divide the ranks into pipelines (replicas hold the same stages), and recognise the schedule of each.

    None where no rank holds another stage than the others, or where passes that autograd numbers make no pipeline.

    Raises:
        LabError: if the actions make no whole step of a pipeline.
    """
    rank_stages: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for event in passes.actions:
        rank_stages[event.rank] |= {(element.pipe, element.stage) for element in event.action.elements}
    ranks_of_stages: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
    for rank in sorted(rank_stages):
        ranks_of_stages[tuple(sorted(rank_stages[rank]))].append(rank)
    replicas = [ranks_of_stages[stages] for stages in sorted(ranks_of_stages)]
    # Passes that autograd numbers have no lane.
    inferred = not any(event.lane for event in passes.actions)
    if len(replicas) == 1 or (inferred and _impossible(passes)):
        # Replicas: each set of stages must lie on as many ranks.
        return ()
    if len({len(stage_ranks) for stage_ranks in replicas}) != 1:
        raise _not_whole()
    try:
        return tuple(_pipeline(passes, ranks) for ranks in zip(*replicas, strict=True))
    except LabError:
        if not inferred:
            raise
        return ()


def _impossible(passes: TracedPasses) -> bool:
    """Whether messages would arrive before they are sent, there and back: whatever the clocks say, no pipeline."""
    shortest_s: dict[tuple[int, int], float] = {}
    for sender, receiver, sent_s, arrived_s in messages_of(passes):
        shortest_s[sender, receiver] = min(arrived_s - sent_s, shortest_s.get((sender, receiver), math.inf))
    # There and back: an offset between two clocks cancels in the sum.
    return any(
        duration_s + shortest_s.get((receiver, sender), math.inf) < 0
        for (sender, receiver), duration_s in shortest_s.items()
    )


def _not_whole() -> LabError:
    return refusal(
        en="the traces show stages of a pipeline, but no whole step of one: give the traces of all its ranks, of at "
        "least one step from beginning to end.",
        fr="les traces montrent des étages d’un pipeline, mais aucun pas entier : donnez les traces de tous ses rangs, "
        "d’au moins un pas du début à la fin.",
    )


def _pipeline(passes: TracedPasses, ranks: tuple[int, ...]) -> TracedPipeline:
    position_of = {rank: position for position, rank in enumerate(ranks)}
    pipeline_passes = TracedPasses(
        tuple(event for event in passes.actions if event.rank in position_of),
        tuple(transfer for transfer in passes.transfers if transfer.rank in position_of),
    )
    steps = sorted({event.step for event in pipeline_passes.actions})
    orders: list[list[Action]] = [[] for _ in ranks]
    # The order of the last step stands for all.
    for event in sorted(pipeline_passes.actions, key=lambda event: (event.start_s, event.end_s)):
        if event.step == steps[-1]:
            orders[position_of[event.rank]].append(event.action)
    schedule, match = recognised(orders)
    spans = [
        Span(
            rank=position_of[event.rank],
            step=event.step,
            phase="forward" if element.kind == FORWARD else "backward",
            start_s=event.start_s,
            end_s=event.end_s,
            action=str(element),
        )
        for event in pipeline_passes.actions
        for element in event.action.elements
    ]
    by_length = sorted(steps, key=lambda step: measured_timeline(schedule, spans, step).makespan)
    # The lower median by length: a step that was measured.
    step = by_length[(len(by_length) - 1) // 2]
    return TracedPipeline(ranks, step, len(steps), overlay(schedule, spans, step), match, pipeline_passes)


def recognised(orders: Sequence[Sequence[Action]]) -> tuple[Schedule, ScheduleMatch]:
    """Name the schedule that these orders are, and build it: with the catalogue's flags where it has it.

    Args:
        orders: actions of each rank in the order in which it executed them.

    Raises:
        LabError: if the orders lack a stage or a micro-batch, or cannot be executed.
    """
    traced = _schedule(orders)
    matches, closest, best, share = [], None, None, 0.0
    for schedule in _candidates(traced):
        if schedule.orders == traced.orders:
            matches.append(schedule)
        # Likeness costs the square of the length: not for large ones, and not once a schedule has matched.
        elif len(traced.actions) <= MOST_COMPARED and not matches:
            likeness = _likeness(schedule, traced)
            if likeness > share:
                best, share = schedule, likeness
    if matches:
        names = tuple(dict.fromkeys(candidate.name for candidate in matches))
        return matches[0], ScheduleMatch(names, names[0], 1.0)
    closest = best.name if best else ""
    return traced, ScheduleMatch((), closest, share, _first_difference(best, traced) if best else None)


def _schedule(orders: Sequence[Sequence[Action]]) -> Schedule:
    elements = [(rank, element) for rank, order in enumerate(orders) for action in order for element in action.elements]
    rank_of = {(element.pipe, element.stage): rank for rank, element in elements}
    pipes, stages = (1 + max((key[side] for key in rank_of), default=0) for side in (0, 1))
    micro_batches, slices = (
        {element.micro_batch for _, element in elements},
        {element.token_slice for _, element in elements},
    )
    units = stages * (1 + max(micro_batches, default=0)) * (1 + max(slices, default=0))
    if len(rank_of) != pipes * stages or units > len(elements):  # every stage treats every micro-batch
        raise _not_whole()
    placement = [[rank_of[pipe, stage] for stage in range(stages)] for pipe in range(pipes)]
    updates = any(element.kind == "U" for _, element in elements)
    schedule = Schedule.of(
        "custom",
        orders,
        placement,
        1 + max(micro_batches),
        token_slices=1 + max(slices),
        barrier=not updates,
        asynchronous=updates,
    )
    try:
        if schedule.graph.actions:
            return schedule
    except LabError:  # an action waits for one that no rank has
        pass
    raise _not_whole()


def _candidates(traced: Schedule) -> Iterator[Schedule]:
    """Every schedule of the catalogue of this size, with each of its options that an order can show."""
    per_rank = traced.stages * traced.pipes // traced.ranks
    large = len(traced.actions) > MOST_COMPARED
    for entry in ENTRIES:
        if large and "costs" in entry.options:  # which search for their order
            continue
        for options in _options(entry, traced, per_rank):
            try:
                schedule = build(entry.name, traced.ranks, traced.micro_batches, **options)  # type: ignore[arg-type]
            except LabError:  # the schedule's own rule excludes this size
                continue
            if schedule.placement == traced.placement and schedule.token_slices == traced.token_slices:
                yield schedule


def _options(entry: ScheduleEntry, traced: Schedule, per_rank: int) -> Iterator[dict[str, object]]:
    plain: dict[str, object] = {}
    if "chunks" in entry.options:
        plain["chunks"] = per_rank
    elif "waves" in entry.options:
        plain["waves"] = max(1, per_rank // 2)
    if "token_slices" in entry.options:
        plain["token_slices"] = traced.token_slices
    yield plain
    if "lifo" in entry.options:
        yield plain | {"lifo": True}
    if "stashing" in entry.options:
        yield from (plain | {"stashing": how} for how in ("vertical", "none"))
    if "group" in entry.options:
        groups = range(traced.ranks, traced.micro_batches + 1)
        yield from (plain | {"group": group} for group in groups if traced.micro_batches % group == 0)


def _likeness(schedule: Schedule, traced: Schedule) -> float:
    """The part of all actions that stand in the same order on their ranks."""
    num_matching = sum(
        sum(block.size for block in SequenceMatcher(None, order, traced_order, autojunk=False).get_matching_blocks())
        for order, traced_order in zip(schedule.orders, traced.orders, strict=True)
    )
    # As difflib's ratio: 1 where all orders are the same.
    return 2 * num_matching / (len(schedule.actions) + len(traced.actions))


def _first_difference(schedule: Schedule, traced: Schedule) -> tuple[int, str, str] | None:
    for rank, (expected, order) in enumerate(zip(schedule.orders, traced.orders, strict=True)):
        for action, expected_action in zip(order, expected, strict=False):
            if action != expected_action:
                return rank, str(action), str(expected_action)
    return None


class MessageWait(NamedTuple):
    """A rank that waits for a message: which action needs it, what makes it where, how long, and how long by design.

    `simulated_s` is the wait of the same action in the simulation.
    """

    rank: int
    action: str
    producer: str
    source: int
    waited_s: float
    simulated_s: float

    @property
    def excess_s(self) -> float:
        """What the schedule itself does not explain."""
        return self.waited_s - self.simulated_s


def message_waits(pipeline: TracedPipeline) -> tuple[MessageWait, ...]:
    """List the waits for messages of the step, the longest first."""
    measured, simulated = pipeline.overlay.measured, pipeline.overlay.simulated
    schedule = measured.schedule
    graph, long_waits = schedule.graph, []
    threshold_s = LEAST_SHARE * measured.makespan
    latest: dict[int, int] = {}  # of several messages that an action needs, the one that is made last
    for producer, index in graph.edges():
        if graph.rank[producer] != graph.rank[index]:
            latest_producer = latest.get(index, producer)
            latest[index] = max(latest_producer, producer, key=lambda candidate: float(measured.ends[candidate]))
    for index, producer in latest.items():
        before = graph.previous[index]
        waits = []
        for timeline in (measured, simulated):
            free = float(timeline.ends[before]) if before < graph.actions else timeline.start
            waits.append(max(0.0, float(timeline.starts[index]) - free))
        free = float(measured.ends[before]) if before < graph.actions else measured.start
        # The producer ended after this rank was free: the wait is for it, not for the rank itself.
        if waits[0] > threshold_s and float(measured.ends[producer]) > free:
            rank, source = (pipeline.ranks[int(graph.rank[number])] for number in (index, producer))
            action_names = str(schedule.actions[index]), str(schedule.actions[producer])
            long_waits.append(MessageWait(rank, *action_names, source, *waits))
    return tuple(sorted(long_waits, key=lambda wait: -wait.waited_s))


class SlowStage(NamedTuple):
    """Stage that takes longest for a micro-batch, with its rank, its seconds and the mean of all stages."""

    stage: int
    rank: int
    seconds: float
    mean_s: float


def slow_stage(pipeline: TracedPipeline) -> SlowStage:
    """Return the stage with the longest forward and backward of a micro-batch."""
    measured = pipeline.overlay.measured
    schedule, seconds = measured.schedule, [0.0] * measured.schedule.stages
    for action, lasts in zip(schedule.actions, measured.durations.tolist(), strict=True):
        # Both parts of an overlapped action share its time.
        for element in action.elements:
            seconds[element.stage] += lasts / len(action.elements) / schedule.micro_batches
    stage = max(range(len(seconds)), key=seconds.__getitem__)
    rank = pipeline.ranks[schedule.placement[0][stage]]
    return SlowStage(stage, rank, seconds[stage], sum(seconds) / len(seconds))


class HeadOfLine(NamedTuple):
    """Transfer that holds up what stands behind it on its rank.

    `blocker` waits for rank `source` from `start_s` for `held_s`; meanwhile `blocked` could go, the first of them for
    `ready_s`. `delayed_rank` idles before `delayed_action`, which needs the first one, for `idle_s`.
    """

    rank: int
    blocker: str
    source: int
    start_s: float
    held_s: float
    blocked: tuple[str, ...]
    ready_s: float
    delayed_rank: int
    delayed_action: str
    idle_s: float


def head_of_line(pipeline: TracedPipeline) -> tuple[HeadOfLine, ...]:
    """List the transfers of the step that hold up others that are ready, those that cost most first."""
    makespan, step = pipeline.overlay.measured.makespan, pipeline.step
    actions = [event for event in pipeline.passes.actions if event.step == step]
    transfers = [transfer for transfer in pipeline.passes.transfers if transfer.step == step]
    # What makes each message, by direction, stage and micro-batch.
    events = {
        (origin.direction, origin.stage, origin.micro_batch): event for origin, event in _by_place(actions).items()
    }
    # Each message has two ends: (what makes it, whether this is the send).
    posted = {(transfer.producer, transfer.sends): transfer for transfer in transfers}
    idle = _idle_before(actions)
    lanes: dict[tuple[int, str], list[TracedTransfer]] = defaultdict(list)
    for transfer in transfers:
        lanes[transfer.rank, transfer.lane].append(transfer)
    blockings = []
    for queue in lanes.values():
        queue.sort(key=lambda transfer: transfer.start_s)
        for number, blocker in enumerate(queue):
            counterpart = posted.get((blocker.producer, not blocker.sends))
            maker = events.get(blocker.producer)
            # A receive waits until its message is made, a send until its receive is posted.
            free_s = (
                (counterpart.start_s if counterpart else None) if blocker.sends else (maker.end_s if maker else None)
            )
            if free_s is None or counterpart is None:
                continue
            # It stands at the head of its queue until it can go, at most to its own end.
            until = min(blocker.end_s, free_s)
            if until - blocker.start_s <= LEAST_SHARE * makespan:
                continue
            ready_transfers = _ready_behind(queue[number + 1 :], events, blocker.start_s, until)
            if not ready_transfers:
                continue
            first_blocked, ready_s = ready_transfers[0]
            consumer = events.get(first_blocked.consumer)
            rank, name = (consumer.rank, str(consumer.action)) if consumer else (first_blocked.rank, "")
            # It costs as much as its consumer idles, at most as long as it stood ready.
            cost = min(ready_s, idle.get((rank, name), 0.0))
            blocked_s = until - blocker.start_s
            names = tuple(str(transfer) for transfer, _ in ready_transfers)
            blockings.append(
                HeadOfLine(
                    blocker.rank,
                    str(blocker),
                    counterpart.rank,
                    blocker.start_s,
                    blocked_s,
                    names,
                    ready_s,
                    rank,
                    name,
                    cost,
                )
            )
    blockings = [blocking for blocking in blockings if blocking.ready_s > LEAST_SHARE * makespan]
    return tuple(sorted(blockings, key=lambda blocking: (-blocking.idle_s, -blocking.ready_s)))


def _ready_behind(
    queue: Sequence[TracedTransfer], events: Mapping[tuple[str, int, int], TracedAction], start_s: float, until: float
) -> list[tuple[TracedTransfer, float]]:
    """The transfers behind a blocker whose message was made before the wait ended, and how long each stood there."""
    ready_transfers = []
    for transfer in queue:
        maker = events.get(transfer.producer)
        # Behind one that is not ready nothing can go either.
        if maker is None or maker.end_s >= until:
            break
        ready_transfers.append((transfer, until - max(maker.end_s, start_s)))
    return ready_transfers


def _idle_before(actions: Iterable[TracedAction]) -> dict[tuple[int, str], float]:
    """By rank and action: how long the rank computed nothing before it."""
    by_rank: dict[int, list[TracedAction]] = defaultdict(list)
    for event in actions:
        by_rank[event.rank].append(event)
    idle = {}
    for rank, rank_events in by_rank.items():
        rank_events.sort(key=lambda event: event.start_s)
        for before, event in pairwise(rank_events):
            idle[rank, str(event.action)] = max(0.0, event.start_s - before.end_s)
    return idle
