"""Start and end of every action of a schedule, simulated or measured, and what follows from them.

Layer 2. Invariant: makespan and span, fraction and overhead are told apart by name; whether the times were simulated or
measured makes no difference to any figure here.

- makespan: from the first start to the last end over all ranks: an iteration's length where the optimizer is a barrier.
- span: the longest time from a rank's own first start to its own last end: an iteration's length without that barrier
  ("cost" of Qi et al. 2024, arXiv 2401.10241, Table 5).
- bubble fraction: idle time over ranks × makespan. Bubble overhead: idle time over work (Narayanan et al. 2021,
  arXiv 2104.04473, §2.2, give the overhead; Huang et al. 2019, arXiv 1811.06965, §2.3, the fraction).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from dlojz.pipeline.costs import Costs

if TYPE_CHECKING:
    from dlojz.pipeline.schedule import Schedule

Times = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Times of all actions, numbered as `schedule.actions`.

    Attributes:
        schedule: what was executed.
        starts, ends: one value per action, in the unit of the costs; in seconds where measured.
        costs: what was assumed; None where the times were measured.
        origin: "simulated" or "measured".
    """

    schedule: Schedule
    starts: Times
    ends: Times
    costs: Costs | None = None
    origin: Literal["simulated", "measured"] = "simulated"

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

    @property
    def iteration(self) -> float:
        """How long an iteration lasts: the makespan, or the span where no barrier ends the step."""
        return self.makespan if self.schedule.barrier else self.span

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Per rank: the time it computes."""
        return tuple(float(self.durations[self.of_rank(rank)].sum()) for rank in range(self.schedule.ranks))

    @property
    def ideal(self) -> float:
        """The makespan if all work were shared out evenly and nobody waited."""
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
    def span_bubble_rate(self) -> float:
        """(span − work of the busiest rank) / span: the bubble rate of Qi et al. 2024, §3, Table 5."""
        return (self.span - max(self.work)) / self.span if self.span else 0.0

    @property
    def speedup(self) -> float:
        """Over one rank that does all the work: Σ work / makespan."""
        return sum(self.work) / self.makespan if self.makespan else 0.0
