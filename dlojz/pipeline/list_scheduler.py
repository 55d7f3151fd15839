"""One scheduler for many schedules: each rank runs, of all that is ready, what its priority puts first.

Layer 2. Invariant: event-driven over the costs; every schedule it returns can be executed, and simulating it with the
same costs gives the times that it was made with. On each stage the micro-batches keep their order.

A rank that is free looks at what could run now: for each of its stages the next forward, backward (or the two parts of
a split backward) whose input has come. The cap leaves out forwards for which there is no room; the priority orders the
rest. One knob at a time:

| placement | priority | cap of rank r | what comes out |
|--|--|--|--|
| one stage per rank | forward first | none | GPipe |
| one stage per rank | backward first | p − r | 1F1B |
| one stage per rank | backward first | 2(p − r) − 1 | eager 1F1B |
| one stage per rank | either | 1 | naive model parallelism, one micro-batch at a time |
| one stage per rank | forward first | p − r | 1F1B again: the cap is what makes it |
| one stage per rank, split | backward first | 2p − 1 | ZB-H2's makespan, span and peaks |
| one stage per rank, split | backward first | p | ZB-H1's peaks, but 2 units longer: greed does not plan ahead |
| looped, v chunks | forward first | none | looped BFS |
| zigzag, 2W chunks | backward first | none | Hanayo with W waves |

Source: list scheduling, Graham 1969, "Bounds on multiprocessing timing anomalies"; the reading of pipeline schedules as
placement plus priority plus cap is that of Lamy-Poirier 2023 (arXiv 2211.05953, §4) and of Fan et al. 2021
(DAPPLE, §4).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dlojz.pipeline.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.memory import deltas
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.simulator import UNIT_COSTS
from dlojz.schema import LabError, one_of
from dlojz.text import say

_MARGIN = 1e-9
"""Times that two ranks add up in another order differ in their last digits: such are the same instant."""


@dataclass
class RankState:
    """What a priority may look at: the rank that chooses, now.

    Attributes:
        rank, ranks: which one, of how many.
        micro_batches: of the step.
        time: now.
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
"""The smaller the sooner; None: not now, rather wait."""
Named = Literal["forward-first", "backward-first"]
Cap = float | Sequence[float] | Callable[[int], float]


def forward_first(action: Action, state: RankState) -> tuple[float, ...] | None:
    """All forwards before any backward, unless the cap stops them; chunk after chunk, the backwards in reverse."""
    if action.kind == FORWARD:
        return (0, action.stage, action.micro_batch)
    if state.forwards_left and state.room and action.kind != BACKWARD_WEIGHT:
        return None
    return (2 if action.kind == BACKWARD_WEIGHT else 1, -action.stage, action.micro_batch)


def backward_first(action: Action, state: RankState) -> tuple[float, ...]:
    """A backward as soon as its gradient is there; weight gradients when there is nothing else."""
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
    """The schedule that comes about when every rank always runs the first of what it may.

    Args:
        ranks: number of ranks, at least 1.
        micro_batches: micro-batches of a step, at least 1.
        placement: rank of each stage, in order of the stages; by default stage s is on rank s.
        priority: "forward-first", "backward-first", or a function of an action that is ready and of the state of the
            rank; what it returns least for is run, and what it returns None for is not.
        cap: activations that a rank may keep, in stage-micro-batches: one for all, one per rank, or a function of the
            rank; None: any number.
        split: whether the backward is split into its part for the input and its part for the weights.
        costs: times, and what a micro-batch keeps.

    Raises:
        LabError: for an unknown priority, a placement that leaves a rank without stage, or a cap with which no rank can
            go on.
    """
    stages = tuple(range(ranks)) if placement is None else tuple(placement)
    _refuse(ranks, micro_batches, stages, priority)
    rule = PRIORITIES[priority] if isinstance(priority, str) else priority
    caps = _caps(cap, ranks)
    run = _Run(stages, micro_batches, rule, caps, split, costs)
    run.all()
    return Schedule.of("list", run.orders, stages, micro_batches)


def _refuse(ranks: int, micro_batches: int, stages: tuple[int, ...], priority: object) -> None:
    for name, value in (("ranks", ranks), ("micro_batches", micro_batches)):
        if value < 1:
            raise LabError(
                say(
                    en=f"{name} must be 1 or more, but {value!r} was received.",
                    fr=f"{name} doit valoir au moins 1, mais {value!r} a été reçu.",
                )
            )
    if isinstance(priority, str) and priority not in PRIORITIES:
        raise LabError(one_of("priority", priority, tuple(PRIORITIES)))
    if set(stages) != set(range(ranks)):
        raise LabError(
            say(
                en=f"the placement {stages} must give every one of the {ranks} ranks (0 to {ranks - 1}) a stage, and "
                "no other rank.",
                fr=f"le placement {stages} doit donner un étage à chacun des {ranks} rangs (0 à {ranks - 1}), et à "
                "aucun autre.",
            )
        )


def _caps(cap: Cap | None, ranks: int) -> list[float]:
    if cap is None:
        return [float("inf")] * ranks
    if callable(cap):
        return [float(cap(rank)) for rank in range(ranks)]
    if isinstance(cap, int | float):
        return [float(cap)] * ranks
    if len(cap) != ranks:
        raise LabError(
            say(
                en=f"cap holds {len(cap)} values for {ranks} ranks: give one per rank, or one for all.",
                fr=f"cap contient {len(cap)} valeurs pour {ranks} rangs : donnez-en une par rang, ou une pour tous.",
            )
        )
    return [float(one) for one in cap]


@dataclass
class _Run:
    """The clock, and what each rank has been given and has done."""

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
        names = {FORWARD: "forward", BACKWARD: "backward", BACKWARD_INPUT: "backward_input"}
        self.times = {kind: self.costs.per_stage(names.get(kind, "backward_weight"), stages) for kind in kinds}
        self.queues: list[list[tuple[str, int]]] = [[] for _ in range(ranks)]
        self.arrivals: dict[tuple[str, int], list[float]] = {}
        self.taken: dict[tuple[str, int], int] = {}
        for stage, rank in enumerate(self.placement):
            self.states[rank].forwards_left += self.micro_batches
            for kind in kinds:
                self.queues[rank].append((kind, stage))
                self.arrivals[kind, stage], self.taken[kind, stage] = [], 0
        self.arrivals[FORWARD, 0] = [0.0] * self.micro_batches
        self.left = stages * self.micro_batches * len(kinds)
        self.events = [(0.0, rank) for rank in range(ranks)]

    def all(self) -> None:
        """Run everything; at each instant, every rank for which something changed chooses once."""
        while self.events:
            now = self.events[0][0]
            woken = set()
            while self.events and self.events[0][0] <= now + _MARGIN:
                woken.add(heapq.heappop(self.events)[1])
            for rank in sorted(woken):
                if self.free_at[rank] <= now + _MARGIN:
                    self._choose(rank, max(now, self.free_at[rank]))
        if self.left:
            raise LabError(self._stuck())

    def _choose(self, rank: int, now: float) -> None:
        state = self.states[rank]
        state.time = now
        ready = []
        for kind, stage in self.queues[rank]:
            arrivals, taken = self.arrivals[kind, stage], self.taken[kind, stage]
            kept = self.costs.of_stage("kept_for_input", stage) if kind == FORWARD else 0.0
            fits = state.held + kept <= self.caps[rank] + _MARGIN
            if taken < len(arrivals) and arrivals[taken] <= now + _MARGIN and fits:
                ready.append(Action(kind, stage, taken))
        least = min(self.costs.of_stage("kept_for_input", stage) for _, stage in self.queues[rank])
        state.room = state.held + least <= self.caps[rank] + _MARGIN
        ranked = [(key, action) for action in ready if (key := self.rule(action, state)) is not None]
        if ranked:
            self._run(rank, min(ranked, key=lambda pair: pair[0])[1], now)

    def _run(self, rank: int, action: Action, now: float) -> None:
        state, kind, stage = self.states[rank], action.kind, action.stage
        end = now + self.times[kind][stage]
        self.orders[rank].append(action)
        self.taken[kind, stage] += 1
        self.free_at[rank] = end
        self.left -= 1
        # What is given back at the end of an action is there for whatever comes next on the same rank.
        state.held += sum(units for _, _, units in deltas(action, rank, {}, self.costs))
        state.forwards_left -= kind == FORWARD
        self._wake(rank, end)
        last = len(self.placement) - 1
        gradient = BACKWARD_INPUT if self.split else BACKWARD
        if kind == FORWARD:
            following = (FORWARD, stage + 1) if stage < last else (gradient, stage)
            self._send(rank, *following, end)
        elif kind != BACKWARD_WEIGHT:
            if stage:
                self._send(rank, gradient, stage - 1, end)
            if self.split:
                self._send(rank, BACKWARD_WEIGHT, stage, end)

    def _send(self, rank: int, kind: str, stage: int, end: float) -> None:
        receiver = self.placement[stage]
        arrival = end + self.costs.delay(rank, receiver)
        self.arrivals[kind, stage].append(arrival)
        self._wake(receiver, arrival)

    def _wake(self, rank: int, at: float) -> None:
        heapq.heappush(self.events, (at, rank))

    def _stuck(self) -> str:
        rank = next(r for r, queue in enumerate(self.queues) if any(self.taken[q] < self.micro_batches for q in queue))
        held, cap = self.states[rank].held, self.caps[rank]
        return say(
            en=f"with this priority and cap nobody can go on: rank {rank} keeps {held:g} stage-micro-batches of at "
            f"most {cap:g}, and what it waits for waits for it. Raise the cap, or put backwards first.",
            fr=f"avec cette priorité et ce plafond, personne ne peut continuer : le rang {rank} garde {held:g} "
            f"micro-batches d’étage sur {cap:g} au plus, et ce qu’il attend l’attend. Relevez le plafond, ou faites "
            "passer les passes arrière d’abord.",
        )
