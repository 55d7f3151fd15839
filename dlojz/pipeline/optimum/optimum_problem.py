"""Problem of the shortest schedule, and its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from dlojz.pipeline.analysis import lower_bound_of, span_bound_of
from dlojz.pipeline.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, COST_OF, FORWARD, Costs, Schedule
from dlojz.pipeline.simulator import simulate

Objective = Literal["makespan", "span"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


@dataclass(frozen=True)
class Optimum:
    """Shortest schedule, proven or the best found.

    Attributes:
        value: its makespan or span, in the unit of the costs.
        proven: whether no schedule is shorter.
        bound: proven lower bound; `value` where proven.
        schedule: one of that length.
        source: "table", "bound" (a simple schedule meets the lower bound) or "solver".
    """

    value: float
    proven: bool
    bound: float
    schedule: Schedule
    source: str


@dataclass(frozen=True)
class Problem:
    """Problem: sizes, costs, whether backwards are split, memory limit (None: any), makespan or span."""

    ranks: int
    micro_batches: int
    costs: Costs
    placement: tuple[int, ...]
    split: bool
    memory_limit: float | None
    objective: Objective

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of actions."""
        return (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT) if self.split else (FORWARD, BACKWARD)

    @property
    def bound(self) -> float:
        """The lower bound that does not look at memory."""
        bound = lower_bound_of if self.objective == "makespan" else span_bound_of
        return bound(self.ranks, self.micro_batches, self.costs, placement=self.placement, split=self.split)

    def value_of(self, schedule: Schedule) -> float:
        """Simulate a schedule's makespan or span."""
        timeline = simulate(schedule, self.costs)
        return timeline.makespan if self.objective == "makespan" else timeline.span

    def key(self, limit: float | None) -> str | None:
        """Name it in the table with another limit; None where the table has no such case."""
        costs = self.costs
        # The table holds cases of M_B = M_W = 1 and sends that do not block.
        unusual = (costs.kept_for_input, costs.kept_for_weight, costs.sends) != (1.0, 1.0, "buffered")
        if self.placement != tuple(range(self.ranks)) or unusual:
            return None
        # Messages pass between neighbours only.
        delays = {costs.delay(a, b) for a in range(self.ranks) for b in (a - 1, a + 1) if 0 <= b < self.ranks}
        if len(delays) > 1:
            return None
        times = []
        for kind in self.kinds:
            values = costs.per_stage(COST_OF[kind], self.ranks)
            # One number where all stages are alike.
            times.append(kind + ",".join(f"{v:g}" for v in (values if len(set(values)) > 1 else values[:1])))
        limited = "" if limit is None else f" limit {limit:g}"
        delay = f" c{delays.pop():g}" if any(delays) else ""
        return f"{self.ranks}x{self.micro_batches} {self.objective} {' '.join(times)}{delay}{limited}"
