"""What is known of a timeline besides its times: bounds, critical path, causes of idleness, weight versions.

Layer 4. Invariant: nothing is computed here; the modules of `dlojz.pipeline` are asked, and what does not apply to a
schedule is left out.
"""

from __future__ import annotations

from typing import TypedDict

from dlojz.pipeline.bounds import lower_bound
from dlojz.pipeline.critical_path import critical_path
from dlojz.pipeline.idle import gaps
from dlojz.pipeline.optimum import optimum
from dlojz.pipeline.simulator import UNIT_COSTS
from dlojz.pipeline.timeline import Timeline
from dlojz.pipeline.versions import version_of_action
from dlojz.schema import LabError
from dlojz.viz.pipeline_scene import Band


class Facts(TypedDict, total=False):
    """Keyword arguments of `scene_of`; what is left out is not drawn."""

    critical: tuple[int, ...]
    idle: tuple[Band, ...]
    versions: tuple[int | None, ...]
    lower_bound: float | None
    optimum: float | None


MOST_RANKS, MOST_MICRO_BATCHES = 4, 8
"""Up to here the proven optimum is looked up; beyond, a solver needs longer than a drawing may take."""


def facts_of(
    timeline: Timeline,
    *,
    critical: bool = True,
    idle: bool = False,
    bounds: bool = True,
    memory_limit: float | None = None,
) -> Facts:
    """All that `scene_of` can draw besides the times themselves.

    Args:
        timeline: simulated or measured.
        critical: find the critical path.
        idle: find the causes of idle time.
        bounds: the lower bound, and the optimum where it is stored; both need costs, so a measured timeline has none.
        memory_limit: that of the optimum, in stage-micro-batches.
    """
    facts = Facts()
    if critical:
        facts["critical"] = critical_path(timeline)
    if idle:
        facts["idle"] = tuple(Band(gap.rank, gap.start, gap.end, gap.cause) for gap in gaps(timeline))
    if timeline.schedule.asynchronous:
        facts["versions"] = version_of_action(timeline.schedule)
    if bounds and timeline.costs is not None:
        facts["lower_bound"] = lower_bound(timeline.schedule, timeline.costs)
        facts["optimum"] = known_optimum(timeline, memory_limit)
    return facts


def known_optimum(timeline: Timeline, memory_limit: float | None = None) -> float | None:
    """The proven shortest makespan of the same stages and micro-batches, where the stored table has it.

    Args:
        timeline: simulated; other costs than F = I = W = 1 have no entry.
        memory_limit: activations that a rank may keep, in stage-micro-batches.
    """
    schedule = timeline.schedule
    ordinary = (
        schedule.placement == (tuple(range(schedule.ranks)),)
        and schedule.token_slices == 1
        and not (schedule.asynchronous or schedule.overlaps)
    )
    small = schedule.ranks <= MOST_RANKS and schedule.micro_batches <= MOST_MICRO_BATCHES
    if not (ordinary and small and timeline.costs == UNIT_COSTS):
        return None
    try:
        found = optimum(
            schedule.ranks,
            schedule.micro_batches,
            split=schedule.splits_backward,
            memory_limit=memory_limit,
            time_limit_s=1.0,
        )
    except LabError:  # no schedule within the limit, or no solver: there is nothing to draw
        return None
    return found.value if found.proven else None
