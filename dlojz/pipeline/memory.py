"""Activation memory of each rank over the time of a schedule, in stage-micro-batches.

Layer 2. Invariant: every micro-batch that a forward takes, a backward gives back: each curve ends at zero. A unit is
what one stage (chunk) keeps of one micro-batch between its forward and its backward; a whole micro-batch of a rank with
v chunks is v units.

Source: Qi et al. 2024 (arXiv 2401.10241), §2.3 and App. G: a forward takes M_B, its backward for the input leaves M_W,
its backward for the weights gives that back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlojz.pipeline.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    EVICT,
    FORWARD,
    LOAD,
    Action,
)
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.simulator import UNIT_COSTS
from dlojz.pipeline.timeline import Timeline, Times


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """A rank's activation memory: from `times[i]` on it is `units[i]`."""

    times: Times
    units: Times

    @property
    def peak(self) -> float:
        """The most it ever is."""
        return float(self.units.max()) if self.units.size else 0.0


def memory_curves(timeline: Timeline, costs: Costs | None = None) -> tuple[MemoryCurve, ...]:
    """Each rank's activation memory over time; what is given back at an instant is so before anything is taken."""
    schedule = timeline.schedule
    events: list[list[tuple[float, int, float]]] = [[] for _ in range(schedule.ranks)]
    costs = costs or timeline.costs or UNIT_COSTS
    partners = eviction_partners(schedule)
    for rank in range(schedule.ranks):
        part = timeline.of_rank(rank)
        for number in range(part.start, part.stop):
            start, end = float(timeline.starts[number]), float(timeline.ends[number])
            for element in schedule.actions[number].elements:
                for holder, at_end, units in deltas(element, rank, partners, costs, 1 / schedule.token_slices):
                    late = costs.eviction_transfer if at_end and element.kind in (EVICT, LOAD) else 0.0
                    # A rank's own order settles ties: what it gives back is noted at its place in the order.
                    events[holder].append((end + late if at_end else start, number, units))
    return tuple(_curve(of_rank) for of_rank in events)


def peak_activations(schedule: Schedule, costs: Costs = UNIT_COSTS) -> tuple[float, ...]:
    """Per rank, the most that it ever keeps; it follows from the order alone where nothing is evicted.

    With evictions the order of the ranks matters too, and the simulated times decide.
    """
    if any(action.kind == EVICT for action in schedule.actions):
        from dlojz.pipeline.simulator import simulate

        return tuple(curve.peak for curve in memory_curves(simulate(schedule, costs), costs))
    peaks = []
    share = 1 / schedule.token_slices
    for rank, order in enumerate(schedule.orders):
        held = peak = 0.0
        for action in order:
            for _, _, units in (d for e in action.elements for d in deltas(e, rank, {}, costs, share)):
                held += units
                peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def eviction_partners(schedule: Schedule) -> dict[int, int]:
    """Who takes what a rank evicts: rank r's partner is rank p − 1 − r (Kim et al. 2023, BPipe, §3)."""
    return {rank: schedule.ranks - 1 - rank for rank in range(schedule.ranks)}


def deltas(
    action: Action, rank: int, partners: dict[int, int], costs: Costs, share: float = 1.0
) -> tuple[tuple[int, bool, float], ...]:
    """What an action changes: (rank, at its end rather than at its start, units taken or given back).

    `share` is the part of a micro-batch that an action treats: one slice of a sequence, or all of it.
    """
    kept, for_weight = (costs.of_stage(name, action.stage) * share for name in ("kept_for_input", "kept_for_weight"))
    changes: dict[str, tuple[tuple[int, bool, float], ...]] = {
        FORWARD: ((rank, False, kept),),
        BACKWARD: ((rank, True, -kept),),
        BACKWARD_INPUT: ((rank, True, for_weight - kept),),
        BACKWARD_WEIGHT: ((rank, True, -for_weight),),
        EVICT: ((rank, True, -kept), (partners.get(rank, -1), False, kept)),
        LOAD: ((rank, False, kept), (partners.get(rank, -1), True, -kept)),
    }
    return changes.get(action.kind, ())


def _curve(events: list[tuple[float, int, float]]) -> MemoryCurve:
    events.sort(key=lambda event: (event[0], event[1]))
    times = np.array([time for time, _, _ in events])
    units = np.cumsum([units for _, _, units in events]) if events else np.zeros(0)
    return MemoryCurve(times, np.asarray(units, float))
