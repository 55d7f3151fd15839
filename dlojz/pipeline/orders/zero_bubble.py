"""Orders that split the backward pass: ZB-H1, ZB-H2, ZB-V, the zero-bubble heuristic; and a list scheduler.

A backward is split into its part for the input, for which the previous stage waits, and its part for the weights, for
which nobody waits: the latter fill what would be bubbles. In ZB-V rank r holds stages r and 2p − 1 − r: the last rank
turns round without a message, the first sees both the input and the loss, and every rank keeps as many activations.

**The heuristic** (Qi et al. 2024, arXiv 2401.10241, §3.1) keeps every rank within a memory limit, whatever the costs:
ZB-1p with the limit of 1F1B (`ranks` micro-batches), ZB-2p with twice that.

1. Warm-up: each rank takes as many forwards as fit before its first gradient comes, within the limit, and at least one
   more than the next rank.
2. Then forward and backward for the input take turns. Backwards for the weights fill gaps: while one fits into the wait
   for a message, or where one that does not fit costs less than the wait would.
3. At the limit, backwards for the weights are run first, to make room.

Three choices are left open: whether a forward that would make the first backward wait is left for later (`late`),
whether a forward is left out of a round so that the next rank's backward comes earlier (`backward_first`), and whether
a weight gradient is begun although the gap it fills is smaller than the bubble that another rank has anyway (`greedy`).
All eight combinations are tried and the one of the shortest span is kept.

**The list scheduler** is event-driven: a free rank runs, of all actions that are ready, the first by its priority. The
cap leaves out forwards for which there is no room. Simulating the schedule with the same costs gives the same times.

| placement | priority | cap of rank r | result |
|--|--|--|--|
| one stage per rank | forward first | none | GPipe |
| one stage per rank | backward first | p − r | 1F1B |
| one stage per rank | backward first | 2(p − r) − 1 | eager 1F1B |
| one stage per rank | either | 1 | naive model parallelism |
| one stage per rank | forward first | p − r | 1F1B again: the cap decides |
| one stage per rank, split | backward first | 2p − 1 | ZB-H2's makespan, span and peaks |
| one stage per rank, split | backward first | p | ZB-H1's peaks, but 2 units longer |
| looped, v chunks | forward first | none | looped BFS |
| zigzag, 2W chunks | backward first | none | Hanayo with W waves |

Source: list scheduling, Graham 1969, "Bounds on multiprocessing timing anomalies"; pipeline schedules as placement plus
priority plus cap: Lamy-Poirier 2023 (arXiv 2211.05953, §4) and Fan et al. 2021 (DAPPLE, §4).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, one_of, shortest
from dlojz.pipeline.orders.synchronous import OrderBuilder, counted, need_micro_batches, put_off, zigzag
from dlojz.pipeline.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, COST_OF, FORWARD, Action, Costs, Schedule
from dlojz.pipeline.simulator import UNIT_COSTS, deltas

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """Order ZB-H1: 1F1B's memory and a third of its bubble.

    Rank r runs p − r forwards, then backward for the input and forward in turn; after the j-th (from 1) backward for
    the input, one for the weights if j > r; the r that remain come at the end.

    Raises:
        LabError: for fewer micro-batches than ranks.

    Source: Qi et al. 2024 (arXiv 2401.10241), §2.1 and Fig. 2.
    """
    counted("zb-h1", ranks=ranks, micro_batches=micro_batches)
    need_micro_batches("zb-h1", micro_batches, ranks, "p", "1f1b")
    ahead = [ranks - 1 - rank for rank in range(ranks)]
    return put_off("zb-h1", ranks, micro_batches, 1, micro_batches, ahead=ahead, lag=list(range(ranks)))


def zb_h2(ranks: int, micro_batches: int) -> Schedule:
    """Order ZB-H2: no bubble on any rank between its own first and last action, for about twice the memory of 1F1B.

    Rank r runs 2(p − r) − 1 forwards first and postpones 2r backwards for the weights. Ranks then start and end one
    after the other, so only the span shrinks: with an optimizer that waits for all ranks nothing is gained over ZB-H1
    (`barrier` is False: the paper validates the step afterwards instead, §4).

    Raises:
        LabError: for fewer than 2p − 1 micro-batches.

    Source: Qi et al. 2024 (arXiv 2401.10241), §2.2 and Fig. 3.
    """
    counted("zb-h2", ranks=ranks, micro_batches=micro_batches)
    need_micro_batches("zb-h2", micro_batches, 2 * ranks - 1, "2p − 1", "zb-h1" if micro_batches >= ranks else "1f1b")
    ahead = [2 * (ranks - 1 - rank) for rank in range(ranks)]
    lag = [2 * rank for rank in range(ranks)]
    return put_off("zb-h2", ranks, micro_batches, 1, micro_batches, ahead=ahead, lag=lag, barrier=False)


def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """Order ZB-V: no bubble on any rank for F = I = W, with 1F1B's peak memory (p micro-batches) on every rank.

    With a and b the two chunks of rank r: 2(p − r) − 1 forwards a; r × (F b, F a); (p − r) × (F b, I b, W b); then
    (F a, I a, W a), (F b, I b, W b) in turn; r × (I a, I b), (p − r) × (I a, W a), then the weight gradients that
    remain, b before a. With fewer than 2p − 1 micro-batches, the actions of the missing ones are left out.

    Source: Qi et al. 2024 (arXiv 2401.10241), §6; torch's ScheduleZBVZeroBubble.
    """
    counted("zb-v", ranks=ranks, micro_batches=micro_batches)
    padded = max(2 * ranks - 1, micro_batches)
    orders = []
    for rank in range(ranks):
        order = _order(rank, ranks, padded)
        orders.append([action for action in order.actions if action.micro_batch < micro_batches])
    return Schedule.of("zb-v", orders, zigzag(ranks, 2), micro_batches, barrier=False)


def _order(rank: int, ranks: int, micro_batches: int) -> OrderBuilder:
    order = OrderBuilder()
    first_chunk, second_chunk = rank, 2 * ranks - 1 - rank

    def step(stage: int) -> None:
        order.forward(stage)
        order.backward_input(stage)
        order.weight(stage)

    for _ in range(2 * (ranks - rank) - 1):
        order.forward(first_chunk)
    for _ in range(rank):
        order.forward(second_chunk)
        order.forward(first_chunk)
    for _ in range(ranks - rank):
        step(second_chunk)
    forwards = 2 * ranks - 1 - rank  # of the first chunk so far; of the second: p
    # The second chunk has had p forwards and p − r backwards: m − p rounds bring its other forwards.
    for _ in range(micro_batches - ranks):
        if forwards < micro_batches:
            order.forward(first_chunk)
            forwards += 1
        order.backward_input(first_chunk)
        order.weight(first_chunk)
        step(second_chunk)
    for _ in range(rank):
        order.backward_input(first_chunk)
        order.backward_input(second_chunk)
    for _ in range(ranks - rank):
        order.backward_input(first_chunk)
        order.weight(first_chunk)
    for stage in (second_chunk, first_chunk):
        # `weight` does nothing once no gradient waits.
        for _ in range(micro_batches):
            order.weight(stage)
    return order


_MARGIN = 1e-9
"""Rounding errors of sums of memory shares and of times."""


def zero_bubble(ranks: int, micro_batches: int, memory_limit: float, costs: Costs = UNIT_COSTS) -> Schedule:
    """Choose the shortest of the eight schedules of the zero-bubble heuristic.

    Args:
        memory_limit: activations that a rank may keep, in micro-batches of a stage (M_B of the paper is
            `costs.kept_for_input`, M_W is `costs.kept_for_weight`); `ranks` gives ZB-1p, `2 * ranks` ZB-2p.
        costs: times per stage and of messages.

    Returns:
        A schedule whose ranks step on their own (`barrier=False`), as the paper's does.

    Raises:
        LabError: for no rank or no micro-batch, or a limit below one micro-batch.

    Source: Qi et al. 2024 (arXiv 2401.10241), §3.1; the three flags as in the authors' implementation.
    """
    counted("zero-bubble", ranks=ranks, micro_batches=micro_batches)
    pairs = zip(costs.per_stage("kept_for_input", ranks), costs.per_stage("kept_for_weight", ranks), strict=True)
    # The most that one micro-batch takes on a stage, before or after its backward for the input.
    minimum = max(max(pair) for pair in pairs)
    if memory_limit < minimum - _MARGIN:
        raise phrase.refused(
            "memory limit too small",
            memory_limit=shortest(memory_limit),
            minimum=shortest(minimum),
            ranks=ranks,
            twice_ranks=2 * ranks,
        )
    tries = [
        _Plan(ranks, micro_batches, memory_limit, costs, late, backward_first, greedy).run()
        for late, backward_first, greedy in product((True, False), repeat=3)
    ]
    best = min(tries, key=lambda plan: plan.span)
    orders = [rank.order for rank in best.ranks]
    return Schedule.of("zero-bubble", orders, list(range(ranks)), micro_batches, barrier=False)


@dataclass
class _Rank:
    """State of a rank in the heuristic."""

    time: dict[str, float]
    takes: dict[str, float]
    order: list[Action] = field(default_factory=list)
    ends: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in "FIW"})
    clock: float = 0.0
    begun: float = 0.0
    held: float = 0.0
    waited: float = 0.0

    def done(self, kind: str) -> int:
        return len(self.ends[kind])

    @property
    def pending(self) -> int:
        """Weight gradients that may be computed now."""
        return self.done(BACKWARD_INPUT) - self.done(BACKWARD_WEIGHT)


@dataclass
class _Plan:
    """One run of the heuristic with its three choices."""

    size: int
    micro_batches: int
    limit: float
    costs: Costs
    late: bool
    backward_first: bool
    greedy: bool

    def __post_init__(self) -> None:
        self.limit += _MARGIN
        self.ranks = []
        for stage in range(self.size):
            for_input, for_weight = (self.costs.of_stage(n, stage) for n in ("kept_for_input", "kept_for_weight"))
            # Memory that each kind takes: M_B, M_W − M_B, −M_W.
            takes = {FORWARD: for_input, BACKWARD_INPUT: for_weight - for_input, BACKWARD_WEIGHT: -for_weight}
            self.ranks.append(_Rank({kind: self.costs.of_stage(COST_OF[kind], stage) for kind in takes}, takes))

    @property
    def span(self) -> float:
        return max(rank.clock - rank.begun for rank in self.ranks)

    def run(self) -> _Plan:
        self._warm_up()
        # One round per further micro-batch: forwards down the ranks, then backwards up.
        for _ in range(1, self.micro_batches):
            for number, takes_forward in enumerate(self._forwards_wanted()):
                if takes_forward:
                    self._fill(number, FORWARD)
                    self._do(number, FORWARD)
            for number in reversed(range(self.size)):
                self._fill(number, BACKWARD_INPUT)
                if number == 0 and self.ranks[0].done(FORWARD) == self.micro_batches:
                    self._weights(0)  # nobody waits for rank 0's backwards any more: nothing is gained by postponing
                self._do(number, BACKWARD_INPUT)
        for number in range(self.size):
            self._weights(number)
        return self

    def _arrival(self, number: int, kind: str) -> float:
        """When the message comes that the rank's next forward or backward takes."""
        micro_batch = self.ranks[number].done(kind)
        neighbour = number - 1 if kind == FORWARD else number + 1
        # The sample on the first stage, the loss on the last one: there at once.
        if not 0 <= neighbour < self.size:
            return 0.0
        return self.ranks[neighbour].ends[kind][micro_batch] + self.costs.delay(neighbour, number)

    def _do(self, number: int, kind: str) -> None:
        rank = self.ranks[number]
        # Weight gradients wait for no message.
        start = rank.clock if kind == BACKWARD_WEIGHT else max(rank.clock, self._arrival(number, kind))
        if rank.order:
            # Before a rank's first action nothing is lost.
            rank.waited += start - rank.clock
        else:
            rank.begun = start
        rank.order.append(Action(kind, number, rank.done(kind)))
        rank.clock = start + rank.time[kind]
        rank.ends[kind].append(rank.clock)
        rank.held += rank.takes[kind]

    def _weights(self, number: int) -> None:
        while self.ranks[number].pending:
            self._do(number, BACKWARD_WEIGHT)

    def _spare(self, number: int) -> float:
        """How much this rank may wait without waiting more than the one that waits most."""
        return max(rank.waited for rank in self.ranks) - self.ranks[number].waited

    def _fill(self, number: int, kind: str) -> None:
        """Weight gradients before the next forward or backward: to make room, then to fill the wait for its message."""
        rank, arrival = self.ranks[number], self._arrival(number, kind)
        # Each weight part frees M_W.
        while rank.pending and rank.held + rank.takes[kind] > self.limit:
            self._do(number, BACKWARD_WEIGHT)
        while rank.pending and rank.clock + rank.time[BACKWARD_WEIGHT] <= arrival:
            self._do(number, BACKWARD_WEIGHT)
        gap = arrival - rank.clock
        # None fits whole: one is begun if `greedy`, or if the wait would make this rank the one that waits most.
        if rank.pending and gap > 0 and (self.greedy or gap > self._spare(number)):
            self._do(number, BACKWARD_WEIGHT)

    def _warm_up(self) -> None:
        """Each rank's forwards before its first backward, then that backward."""
        for number in range(self.size):
            self._do(number, FORWARD)
        extra = [0] * self.size
        gradient = 0.0
        for number in reversed(range(self.size)):
            rank = self.ranks[number]
            clock, memory = rank.clock, rank.held
            # The last rank makes its own gradient after one forward: it takes no further ones.
            if number < self.size - 1:
                gradient += self.costs.delay(number + 1, number)
                while 1 + extra[number] < self.micro_batches and memory + rank.takes[FORWARD] <= self.limit:
                    if (clock + rank.time[FORWARD] > gradient) if self.late else (clock >= gradient):
                        break
                    clock, memory, extra[number] = (
                        clock + rank.time[FORWARD],
                        memory + rank.takes[FORWARD],
                        extra[number] + 1,
                    )
            gradient = max(clock, gradient) + rank.time[BACKWARD_INPUT]
        for number in range(1, self.size):
            # Down the ranks: each at least one fewer than the rank before, which feeds it, unless it runs all now.
            if 1 + extra[number] < self.micro_batches:
                extra[number] = max(0, min(extra[number], extra[number - 1] - 1))
            extra[number] = min(extra[number], extra[number - 1])
        for number, count in enumerate(extra):
            for _ in range(count):
                self._do(number, FORWARD)
        for number in reversed(range(self.size)):
            self._do(number, BACKWARD_INPUT)

    def _forwards_wanted(self) -> list[bool]:
        """Which ranks take a forward in this round; none does whose next rank takes none, lest they pile up there."""
        takes_forward = [self._forward_wanted(number) for number in range(self.size)]
        for number in reversed(range(self.size - 1)):
            takes_forward[number] = takes_forward[number] and takes_forward[number + 1]
        return takes_forward

    def _forward_wanted(self, number: int) -> bool:
        rank = self.ranks[number]
        if rank.done(FORWARD) == self.micro_batches:
            return False
        if not self.backward_first or number + 1 == self.size:
            return True
        next_rank = self.ranks[number + 1]
        if rank.done(FORWARD) < next_rank.done(FORWARD) + 2:
            return True
        # The next rank has enough to go on with: when would the gradient come that it makes from that?
        gradient = next_rank.clock + next_rank.time[FORWARD] + next_rank.time[BACKWARD_INPUT]
        gradient += self.costs.delay(number + 1, number)
        if rank.clock >= gradient:
            return False
        to_free = max(0.0, rank.held + rank.takes[FORWARD] - self.limit)
        for_weight = -rank.takes[BACKWARD_WEIGHT]
        # ⌈to_free / M_W⌉ weight parts make room for the forward.
        weights = min(rank.pending, -int(-to_free // for_weight)) if to_free and for_weight else 0
        if rank.clock + rank.time[FORWARD] + weights * rank.time[BACKWARD_WEIGHT] <= gradient:
            return True
        return gradient - rank.clock > self._spare(number)


@dataclass
class RankState:
    """State of the rank that chooses, which a priority may look at.

    Attributes:
        held: activations that it keeps, in stage-micro-batches.
        room: whether its cap lets it take one more.
        forwards_left: forwards that it has not run yet, of all its stages.
    """

    rank: int
    ranks: int
    micro_batches: int
    time: float = 0.0
    held: float = 0.0
    room: bool = True
    forwards_left: int = 0


Priority = Callable[[Action, RankState], tuple[float, ...] | float | None]
"""The smallest runs first; None: wait."""
Named = Literal["forward-first", "backward-first"]
Cap = float | Sequence[float] | Callable[[int], float]


def forward_first(action: Action, state: RankState) -> tuple[float, ...] | None:
    """Prefer all forwards to any backward, unless the cap stops them; chunk after chunk, the backwards in reverse."""
    if action.kind == FORWARD:
        return (0, action.stage, action.micro_batch)
    if state.forwards_left and state.room and action.kind != BACKWARD_WEIGHT:
        return None
    return (2 if action.kind == BACKWARD_WEIGHT else 1, -action.stage, action.micro_batch)


def backward_first(action: Action, state: RankState) -> tuple[float, ...]:
    """Prefer a backward as soon as its gradient is there; weight gradients when there is nothing else."""
    order = {BACKWARD: 0, BACKWARD_INPUT: 0, FORWARD: 1, BACKWARD_WEIGHT: 2}[action.kind]
    return (order, action.micro_batch, -action.stage if action.kind == FORWARD else action.stage)


PRIORITIES: dict[str, Priority] = {"forward-first": forward_first, "backward-first": backward_first}


def list_schedule(
    ranks: int,
    micro_batches: int,
    *,
    placement: Sequence[int] | None = None,
    priority: Named | Priority = "forward-first",
    cap: Cap | None = None,
    split: bool = False,
    costs: Costs = UNIT_COSTS,
) -> Schedule:
    """Schedule greedily: every rank always runs, of all actions that are ready, the first by its priority.

    Args:
        placement: rank of each stage, in order of the stages; by default stage s is on rank s.
        priority: "forward-first", "backward-first", or a function of a ready action and of the state of the rank; the
            smallest value runs first, None means not now.
        cap: activations that a rank may keep, in stage-micro-batches: one for all, one per rank, or a function of the
            rank; None: any number.
        split: whether the backward is split into its part for the input and its part for the weights.
        costs: times, and what a micro-batch keeps.

    Raises:
        LabError: for an unknown priority, a placement that leaves a rank without stage, or a cap with which no rank can
            go on.
    """
    stages = tuple(range(ranks)) if placement is None else tuple(placement)
    counted("list_schedule", ranks=ranks, micro_batches=micro_batches)
    if isinstance(priority, str) and priority not in PRIORITIES:
        raise LabError(one_of("priority", priority, tuple(PRIORITIES)))
    if set(stages) != set(range(ranks)):
        raise phrase.refused("no placement", stages=stages, ranks=ranks, last_rank=ranks - 1)
    rule = PRIORITIES[priority] if isinstance(priority, str) else priority
    run = _Run(stages, micro_batches, rule, _caps(cap, ranks), split, costs)
    run.all()
    return Schedule.of("list", run.orders, stages, micro_batches)


def _caps(cap: Cap | None, ranks: int) -> list[float]:
    if cap is None:
        return [float("inf")] * ranks
    if callable(cap):
        return [float(cap(rank)) for rank in range(ranks)]
    if isinstance(cap, int | float):
        return [float(cap)] * ranks
    if len(cap) != ranks:
        raise phrase.refused("other number of caps", cap=len(cap), ranks=ranks)
    return [float(rank_cap) for rank_cap in cap]


@dataclass
class _Run:
    """Clock and state of a run of the list scheduler."""

    placement: tuple[int, ...]
    micro_batches: int
    rule: Priority
    caps: list[float]
    split: bool
    costs: Costs
    orders: list[list[Action]] = field(init=False)

    def __post_init__(self) -> None:
        ranks, stages = len(self.caps), len(self.placement)
        self.orders = [[] for _ in range(ranks)]
        self.free_at = [0.0] * ranks
        self.states = [RankState(rank, ranks, self.micro_batches) for rank in range(ranks)]
        kinds = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT) if self.split else (FORWARD, BACKWARD)
        self.times = {kind: self.costs.per_stage(COST_OF[kind], stages) for kind in kinds}
        self.queues: list[list[tuple[str, int]]] = [[] for _ in range(ranks)]
        self.arrivals: dict[tuple[str, int], list[float]] = {}
        self.taken: dict[tuple[str, int], int] = {}
        for stage, rank in enumerate(self.placement):
            self.states[rank].forwards_left += self.micro_batches
            for kind in kinds:
                # (kind, stage), not single actions: micro-batches come to a stage in order.
                self.queues[rank].append((kind, stage))
                self.arrivals[kind, stage], self.taken[kind, stage] = [], 0
        # All samples are there from the start.
        self.arrivals[FORWARD, 0] = [0.0] * self.micro_batches
        self.left = stages * self.micro_batches * len(kinds)
        self.events = [(0.0, rank) for rank in range(ranks)]

    def all(self) -> None:
        """Run everything; at each instant, every rank for which something changed chooses once."""
        while self.events:
            time = self.events[0][0]
            woken = set()
            while self.events and self.events[0][0] <= time + _MARGIN:
                woken.add(heapq.heappop(self.events)[1])
            for rank in sorted(woken):
                # A busy rank is woken again when it is free.
                if self.free_at[rank] <= time + _MARGIN:
                    self._choose(rank, max(time, self.free_at[rank]))
        if self.left:
            raise LabError(self._stuck())

    def _choose(self, rank: int, time: float) -> None:
        state = self.states[rank]
        state.time = time
        ready = []
        for kind, stage in self.queues[rank]:
            arrivals, micro_batch = self.arrivals[kind, stage], self.taken[kind, stage]
            units = self.costs.of_stage("kept_for_input", stage) if kind == FORWARD else 0.0
            fits = state.held + units <= self.caps[rank] + _MARGIN
            # A stage's micro-batches come in order: the next one's number is how many it has run.
            if micro_batch < len(arrivals) and arrivals[micro_batch] <= time + _MARGIN and fits:
                ready.append(Action(kind, stage, micro_batch))
        minimum_units = min(self.costs.of_stage("kept_for_input", stage) for _, stage in self.queues[rank])
        state.room = state.held + minimum_units <= self.caps[rank] + _MARGIN
        # None: the priority wants to wait.
        ranked = [(key, action) for action in ready if (key := self.rule(action, state)) is not None]
        if ranked:
            self._run(rank, min(ranked, key=lambda pair: pair[0])[1], time)

    def _run(self, rank: int, action: Action, time: float) -> None:
        state, kind, stage = self.states[rank], action.kind, action.stage
        end = time + self.times[kind][stage]
        self.orders[rank].append(action)
        self.taken[kind, stage] += 1
        self.free_at[rank] = end
        self.left -= 1
        # What is given back at the end of an action is there for whatever comes next on the same rank.
        state.held += sum(units for _, _, units in deltas(action, rank, self.costs))
        state.forwards_left -= kind == FORWARD
        self._wake(rank, end)
        last_stage = len(self.placement) - 1
        gradient = BACKWARD_INPUT if self.split else BACKWARD
        if kind == FORWARD:
            following = (FORWARD, stage + 1) if stage < last_stage else (gradient, stage)
            self._send(rank, *following, end)
        elif kind != BACKWARD_WEIGHT:
            if stage:
                self._send(rank, gradient, stage - 1, end)
            if self.split:
                # Its weight part is ready on this rank at once.
                self._send(rank, BACKWARD_WEIGHT, stage, end)

    def _send(self, rank: int, kind: str, stage: int, end: float) -> None:
        receiver = self.placement[stage]
        arrival = end + self.costs.delay(rank, receiver)
        self.arrivals[kind, stage].append(arrival)
        self._wake(receiver, arrival)

    def _wake(self, rank: int, time: float) -> None:
        heapq.heappush(self.events, (time, rank))

    def _stuck(self) -> str:
        rank = next(r for r, queue in enumerate(self.queues) if any(self.taken[q] < self.micro_batches for q in queue))
        load, cap = self.states[rank].held, self.caps[rank]
        return phrase("nobody goes on", rank=rank, load=shortest(load), cap=shortest(cap))
