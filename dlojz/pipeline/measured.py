"""The timeline that a run has measured, and the costs with which the simulator is held against it.

Layer 2. Invariant: a measured timeline has one span for every action of its schedule, or there is none; the calibrated
costs are means of what was measured, so whatever then differs between simulation and run is not the actions' own time.

A rank's list may hold actions that the run spells otherwise: an overlapped forward and backward are executed one after
the other, and are put together again here; weight updates are timed apart from the schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from dlojz.pipeline.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, OVERLAPPED, UPDATE, Action
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.simulator import simulate
from dlojz.pipeline.timeline import Timeline
from dlojz.schema import LabError
from dlojz.text import say

_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward_input",
    BACKWARD_WEIGHT: "backward_weight",
    OVERLAPPED: "overlapped",
    UPDATE: "update",
}


class TimedAction(Protocol):
    """What a record keeps of one action: a `Span`."""

    @property
    def rank(self) -> int:
        """Process that ran it."""

    @property
    def step(self) -> int:
        """Training step."""

    @property
    def start_s(self) -> float:
        """Its start, on one clock for all ranks."""

    @property
    def end_s(self) -> float:
        """Its end."""

    @property
    def action(self) -> str:
        """Its name, e.g. `2F0`; empty for what is no action."""


def steps_of(spans: Iterable[TimedAction]) -> tuple[int, ...]:
    """Steps of which actions were timed, in order."""
    return tuple(sorted({span.step for span in spans if span.action}))


def measured_timeline(
    schedule: Schedule, spans: Iterable[TimedAction], step: int | None = None, ranks: Mapping[int, int] | None = None
) -> Timeline:
    """One step as it was measured, in seconds from its first action.

    Args:
        schedule: what was executed.
        spans: of any steps and ranks; those without an action are left out.
        step: which step; by default the last one timed.
        ranks: pipeline rank of each process that counts; by default every process is its own.

    Raises:
        LabError: if the step does not have every action of the schedule, once.
    """
    timed = [span for span in spans if span.action and (ranks is None or span.rank in ranks)]
    steps = steps_of(timed)
    wanted = steps[-1] if step is None and steps else step
    found = {
        (span.rank if ranks is None else ranks[span.rank], span.action): (span.start_s, span.end_s)
        for span in timed
        if span.step == wanted
    }
    starts, ends = np.zeros(len(schedule.actions)), np.zeros(len(schedule.actions))
    for rank, order in enumerate(schedule.orders):
        for number, action in enumerate(order, schedule.first_of_rank[rank]):
            times = [found.get((rank, str(element))) for element in action.elements]
            if any(time is None for time in times):
                raise LabError(_not_timed(action, rank, wanted))
            starts[number] = min(time[0] for time in times if time)
            ends[number] = max(time[1] for time in times if time)
    origin = starts.min() if len(starts) else 0.0
    return Timeline(schedule, starts - origin, ends - origin, origin="measured")


def _not_timed(action: Action, rank: int, step: int | None) -> str:
    return say(
        en=f"the record has no time for {action} of rank {rank} in step {step}: it is of another schedule, or ended "
        "before that step; run it again.",
        fr=f"l’enregistrement n’a pas de temps pour {action} du rang {rank} au pas {step} : il vient d’un autre "
        "ordonnancement, ou s’est terminé avant ; relancez l’exécution.",
    )


def calibrated(timelines: Iterable[Timeline], latency: float | None = None) -> Costs:
    """Costs of a schedule's actions: per stage, the mean of each kind over the timelines given.

    Args:
        timelines: measured ones of one schedule; several steps give steadier means.
        latency: between two ranks; by default what was measured: see `measured_latency`.

    Raises:
        LabError: if there is no timeline.
    """
    given = list(timelines)
    if not given:
        raise LabError(say(en="no timeline to calibrate with was given.", fr="aucune chronologie pour calibrer."))
    schedule = given[0].schedule
    seconds: dict[str, list[list[float]]] = {}
    for timeline in given:
        for action, duration in zip(schedule.actions, timeline.durations.tolist(), strict=True):
            if action.kind in _NAMES:
                of_kind = seconds.setdefault(_NAMES[action.kind], [[] for _ in range(schedule.stages)])
                of_kind[action.stage].append(duration)
    means = {
        name: tuple(float(np.mean(of_stage)) if of_stage else 0.0 for of_stage in stages)
        for name, stages in seconds.items()
    }
    if latency is None:
        latency = float(np.median([measured_latency(timeline) for timeline in given]))
    overhead = float(np.median([measured_overhead(timeline, latency) for timeline in given]))
    return Costs(latency=latency, overhead=overhead, **means)  # type: ignore[arg-type]


def measured_latency(timeline: Timeline) -> float:
    """Median time from a producer's end to its consumer's start on another rank, where the consumer was waiting.

    Only those count whose rank had nothing else to do: it had ended its action before by the producer's end.
    """
    graph, gaps = timeline.schedule.graph, []
    starts, ends = timeline.starts, timeline.ends
    for index, needed in enumerate(graph.needs):
        before = graph.previous[index]
        if needed == graph.actions or graph.rank[needed] == graph.rank[index]:
            continue
        free = ends[before] if before < graph.actions else -np.inf
        if free <= ends[needed]:
            gaps.append(max(0.0, float(starts[index] - ends[needed])))
    return float(np.median(gaps)) if gaps else 0.0


def measured_overhead(timeline: Timeline, latency: float = 0.0) -> float:
    """Mean time between two actions of a rank where the second waited for nothing: the runtime's own time."""
    graph, gaps = timeline.schedule.graph, []
    starts, ends = timeline.starts, timeline.ends
    for index, before in enumerate(graph.previous):
        needed = graph.needs[index]
        if before < graph.actions and (needed == graph.actions or ends[needed] + latency <= ends[before]):
            gaps.append(max(0.0, float(starts[index] - ends[before])))
    return float(np.mean(gaps)) if gaps else 0.0


class Overlay(NamedTuple):
    """A step as measured and as simulated with the measured means.

    Attributes:
        measured: the step.
        simulated: the same schedule with the calibrated costs.
        costs: those.
    """

    measured: Timeline
    simulated: Timeline
    costs: Costs

    @property
    def error(self) -> float:
        """(measured − predicted) / measured of the makespan."""
        return (self.measured.makespan - self.simulated.makespan) / self.measured.makespan


def overlay(
    schedule: Schedule, spans: Iterable[TimedAction], step: int | None = None, ranks: Mapping[int, int] | None = None
) -> Overlay:
    """Simulate a measured step with the means of its own actions.

    Args:
        schedule, spans, ranks: as for `measured_timeline`.
        step: which step; by default, of those that were timed, the one of median length.

    Raises:
        LabError: if the step was not timed as a whole.
    """
    kept = list(spans)
    steps = steps_of(kept) if step is None else (step,)
    timelines = [measured_timeline(schedule, kept, one, ranks) for one in steps or (None,)]
    measured = sorted(timelines, key=lambda one: one.makespan)[(len(timelines) - 1) // 2]
    costs = calibrated([measured])
    return Overlay(measured, simulate(schedule, costs), costs)
