"""The zero-bubble heuristic: a split backward, ordered so that bubbles are filled within a memory limit.

Layer 2. Invariant: no rank ever keeps more than the limit, whatever the costs; the schedule depends on the costs, so
they are an argument. ZB-1p is the limit of 1F1B (`ranks` micro-batches), ZB-2p twice that.

The rule, of Qi et al. 2024 (arXiv 2401.10241, §3.1):

1. Warm-up: each rank takes as many forwards as fit before its first gradient comes, within the limit, and at least one
   more than the rank behind it.
2. Then forward and backward for the input take turns. Backwards for the weights are put where they fill a gap: while
   one fits into the wait for a message, or where one that does not fit costs less than the wait would.
3. At the limit, backwards for the weights are run first, to make room.

Three of its choices are left open: whether a forward may make the first backward wait (`late`), whether a forward is
left out of a round so that the next rank's backward comes earlier (`backward_first`), and whether a weight gradient is
begun although the gap it fills is smaller than the bubble that another rank has anyway (`greedy`). All eight
combinations are tried and that of the shortest span is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

from dlojz.pipeline.action import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.simulator import UNIT_COSTS
from dlojz.schema import LabError
from dlojz.text import say

_MARGIN = 1e-9
"""Sums of memory shares are floats: a limit that is met exactly must count as met."""


def zero_bubble(ranks: int, micro_batches: int, memory_limit: float, costs: Costs = UNIT_COSTS) -> Schedule:
    """The best of the eight schedules of the zero-bubble heuristic.

    Args:
        ranks: stages, one per rank, at least 1.
        micro_batches: at least 1.
        memory_limit: activations that a rank may keep, in micro-batches of a stage (M_B of the paper is
            `costs.kept_for_input`, M_W is `costs.kept_for_weight`); `ranks` gives ZB-1p, `2 * ranks` ZB-2p.
        costs: times per stage and of messages.

    Returns:
        A schedule whose ranks step on their own (`barrier=False`), as the paper's does.

    Raises:
        LabError: for no rank or no micro-batch, or a limit below one micro-batch.

    Source: Qi et al. 2024 (arXiv 2401.10241), §3.1; the three flags as in the authors' implementation.
    """
    _refuse(ranks, micro_batches, memory_limit, costs)
    tries = [
        _Plan(ranks, micro_batches, memory_limit, costs, late, backward_first, greedy).run()
        for late, backward_first, greedy in product((True, False), repeat=3)
    ]
    best = min(tries, key=lambda plan: plan.span)
    orders = [rank.order for rank in best.ranks]
    return Schedule.of("zero-bubble", orders, list(range(ranks)), micro_batches, barrier=False)


def _refuse(ranks: int, micro_batches: int, memory_limit: float, costs: Costs) -> None:
    for en, fr, value in (("ranks", "rangs", ranks), ("micro-batches", "micro-batches", micro_batches)):
        if value < 1:
            raise LabError(
                say(
                    en=f"a pipeline needs 1 or more {en}, but {value} was received.",
                    fr=f"il faut au moins 1 pour le nombre de {fr} d’un pipeline, mais {value} a été reçu.",
                )
            )
    pairs = zip(costs.per_stage("kept_for_input", ranks), costs.per_stage("kept_for_weight", ranks), strict=True)
    least = max(max(pair) for pair in pairs)
    if memory_limit < least - _MARGIN:
        raise LabError(
            say(
                en=f"a memory limit of {memory_limit:g} is less than one micro-batch of a stage ({least:g}): give "
                f"{least:g} or more; ZB-1p has {ranks}, ZB-2p has {2 * ranks}.",
                fr=f"une limite mémoire de {memory_limit:g} est inférieure à un micro-batch d’un étage ({least:g}) : "
                f"donnez au moins {least:g} ; ZB-1p a {ranks}, ZB-2p a {2 * ranks}.",
            )
        )


@dataclass
class _Rank:
    """What a rank has done so far."""

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
    """One run of the rule with its three choices."""

    size: int
    micro_batches: int
    limit: float
    costs: Costs
    late: bool
    backward_first: bool
    greedy: bool

    def __post_init__(self) -> None:
        self.limit += _MARGIN
        names = {FORWARD: "forward", BACKWARD_INPUT: "backward_input", BACKWARD_WEIGHT: "backward_weight"}
        self.ranks = []
        for stage in range(self.size):
            kept, for_weight = (self.costs.of_stage(n, stage) for n in ("kept_for_input", "kept_for_weight"))
            takes = {FORWARD: kept, BACKWARD_INPUT: for_weight - kept, BACKWARD_WEIGHT: -for_weight}
            self.ranks.append(_Rank({kind: self.costs.of_stage(name, stage) for kind, name in names.items()}, takes))

    @property
    def span(self) -> float:
        return max(rank.clock - rank.begun for rank in self.ranks)

    def run(self) -> _Plan:
        self._warm_up()
        for _ in range(1, self.micro_batches):
            for number, wanted in enumerate(self._forwards_wanted()):
                if wanted:
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
        other = number - 1 if kind == FORWARD else number + 1
        if not 0 <= other < self.size:
            return 0.0
        return self.ranks[other].ends[kind][micro_batch] + self.costs.delay(other, number)

    def _do(self, number: int, kind: str) -> None:
        rank = self.ranks[number]
        start = rank.clock if kind == BACKWARD_WEIGHT else max(rank.clock, self._arrival(number, kind))
        if rank.order:
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
        while rank.pending and rank.held + rank.takes[kind] > self.limit:
            self._do(number, BACKWARD_WEIGHT)
        while rank.pending and rank.clock + rank.time[BACKWARD_WEIGHT] <= arrival:
            self._do(number, BACKWARD_WEIGHT)
        gap = arrival - rank.clock
        if rank.pending and gap > 0 and (self.greedy or gap > self._spare(number)):
            self._do(number, BACKWARD_WEIGHT)

    def _warm_up(self) -> None:
        """Each rank's forwards before its first backward, then that backward."""
        for number in range(self.size):
            self._do(number, FORWARD)
        more = [0] * self.size
        gradient = 0.0
        for number in reversed(range(self.size)):
            rank = self.ranks[number]
            clock, held = rank.clock, rank.held
            if number < self.size - 1:
                gradient += self.costs.delay(number + 1, number)
                while 1 + more[number] < self.micro_batches and held + rank.takes[FORWARD] <= self.limit:
                    if (clock + rank.time[FORWARD] > gradient) if self.late else (clock >= gradient):
                        break
                    clock, held, more[number] = clock + rank.time[FORWARD], held + rank.takes[FORWARD], more[number] + 1
            gradient = max(clock, gradient) + rank.time[BACKWARD_INPUT]
        for number in range(1, self.size):
            if 1 + more[number] < self.micro_batches:
                more[number] = max(0, min(more[number], more[number - 1] - 1))
            more[number] = min(more[number], more[number - 1])
        for number, count in enumerate(more):
            for _ in range(count):
                self._do(number, FORWARD)
        for number in reversed(range(self.size)):
            self._do(number, BACKWARD_INPUT)

    def _forwards_wanted(self) -> list[bool]:
        """Which ranks take a forward in this round; none does whose next rank takes none, lest they pile up there."""
        wanted = [self._forward_wanted(number) for number in range(self.size)]
        for number in reversed(range(self.size - 1)):
            wanted[number] = wanted[number] and wanted[number + 1]
        return wanted

    def _forward_wanted(self, number: int) -> bool:
        rank = self.ranks[number]
        if rank.done(FORWARD) == self.micro_batches:
            return False
        if not self.backward_first or number + 1 == self.size:
            return True
        behind = self.ranks[number + 1]
        if rank.done(FORWARD) < behind.done(FORWARD) + 2:
            return True
        # The next rank has enough to go on with: when would the gradient come that it makes from that?
        gradient = behind.clock + behind.time[FORWARD] + behind.time[BACKWARD_INPUT]
        gradient += self.costs.delay(number + 1, number)
        if rank.clock >= gradient:
            return False
        to_free = max(0.0, rank.held + rank.takes[FORWARD] - self.limit)
        for_weight = -rank.takes[BACKWARD_WEIGHT]
        weights = min(rank.pending, -int(-to_free // for_weight)) if to_free and for_weight else 0
        if rank.clock + rank.time[FORWARD] + weights * rank.time[BACKWARD_WEIGHT] <= gradient:
            return True
        return gradient - rank.clock > self._spare(number)
