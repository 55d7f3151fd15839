"""A timeline as a trace for Perfetto or chrome://tracing: slices, messages as flows, activation memory as counters.

Layer 2. Invariant: what the trace shows is the timeline, simulated or measured, at its own scale; every flow begins
inside the slice that made the message and ends at the slice that needs it.

Source of the format: "Trace Event Format" (Chromium project): "X" complete events with `ts` and `dur` in microseconds,
"s"/"f" flow events that bind to the slice around them, "C" counters, "M" metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlojz.pipeline.memory import memory_curves
from dlojz.pipeline.timeline import Timeline
from dlojz.schema import LabError
from dlojz.text import say

COMPUTE_THREAD = 0
SIMULATED_UNIT_US = 1000.0
"""A time unit of a simulation is shown as a millisecond: viewers know no units without seconds."""
MEASURED_UNIT_US = 1e6
"""Measured times are seconds."""
_INSIDE = 1e-3
"""How far before its end, in parts of a slice, a flow begins: at its very end it would bind to the next slice."""

Event = dict[str, Any]


def chrome_trace(timeline: Timeline, unit_us: float | None = None) -> dict[str, Any]:
    """The trace as JSON data: one process per rank, its computations on thread 0, its activations as a counter.

    Args:
        timeline: simulated or measured.
        unit_us: microseconds of one unit of time; by default 1000 where simulated, 1 000 000 where measured (seconds).
    """
    if unit_us is None:
        unit_us = MEASURED_UNIT_US if timeline.origin == "measured" else SIMULATED_UNIT_US
    events = [*_names(timeline), *_slices(timeline, unit_us), *_flows(timeline, unit_us), *_counters(timeline, unit_us)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": timeline.schedule.name,
            "origin": timeline.origin,
            "micro_batches": timeline.schedule.micro_batches,
            "unit_us": unit_us,
        },
    }


def write_chrome_trace(timeline: Timeline, path: str | Path, unit_us: float | None = None) -> Path:
    """Write the trace as JSON; open it at https://ui.perfetto.dev.

    Raises:
        LabError: if the file cannot be written.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(chrome_trace(timeline, unit_us), allow_nan=False), encoding="utf-8")
    except OSError as error:
        raise LabError(
            say(
                en=f"the trace cannot be written to {target}: {error.strerror}; give another path.",
                fr=f"la trace ne peut pas être écrite dans {target} : {error.strerror} ; donnez un autre chemin.",
            )
        ) from None
    return target


def _names(timeline: Timeline) -> Iterator[Event]:
    for rank in range(timeline.schedule.ranks):
        name = say(en=f"rank {rank}", fr=f"rang {rank}")
        yield _event("M", rank, name="process_name", args={"name": name})
        yield _event("M", rank, name="process_sort_index", args={"sort_index": rank})
        yield _event("M", rank, name="thread_name", args={"name": "compute"})


def _slices(timeline: Timeline, unit_us: float) -> Iterator[Event]:
    rank_of = timeline.schedule.graph.rank.tolist()
    versions = _versions(timeline)
    for number, action in enumerate(timeline.schedule.actions):
        args: dict[str, Any] = {
            "stage": action.stage,
            "kind": action.kind,
            "micro_batch": action.micro_batch,
            "version": versions.get(number),
        }
        if timeline.schedule.pipes > 1:
            args["pipe"] = action.pipe
        if timeline.schedule.token_slices > 1:
            args["token_slice"] = action.token_slice
        yield _event(
            "X",
            rank_of[number],
            name=str(action),
            cat=action.kind,
            ts=_us(timeline, float(timeline.starts[number]), unit_us),
            dur=round(float(timeline.durations[number]) * unit_us, 3),
            args=args,
        )


def _flows(timeline: Timeline, unit_us: float) -> Iterator[Event]:
    """One arrow per message between ranks, from the action that makes it to the one that needs it."""
    graph, actions = timeline.schedule.graph, timeline.schedule.actions
    rank_of = graph.rank.tolist()
    edges = [(needed, number) for number, needed in enumerate(graph.needs) if needed < graph.actions]
    edges += [(needed, number) for number, needed in graph.also]
    crossing = ((producer, consumer) for producer, consumer in edges if rank_of[producer] != rank_of[consumer])
    for flow, (producer, consumer) in enumerate(crossing):
        sent = float(timeline.ends[producer]) - _INSIDE * float(timeline.durations[producer])
        name = f"{actions[producer]} → {actions[consumer]}"
        common = {"name": name, "cat": "message", "id": flow}
        yield _event("s", rank_of[producer], ts=_us(timeline, sent, unit_us), **common)
        yield _event(
            "f", rank_of[consumer], ts=_us(timeline, float(timeline.starts[consumer]), unit_us), bp="e", **common
        )


def _counters(timeline: Timeline, unit_us: float) -> Iterator[Event]:
    for rank, curve in enumerate(memory_curves(timeline)):
        for time, units in zip(curve.times.tolist(), curve.units.tolist(), strict=True):
            yield _event(
                "C",
                rank,
                name="activations (stage-micro-batches)",
                ts=_us(timeline, time, unit_us),
                args={"kept": round(units, 9)},
            )


def _event(phase: str, rank: int, **fields: Any) -> Event:
    return {"ph": phase, "pid": rank, "tid": COMPUTE_THREAD, **fields}


def _us(timeline: Timeline, time: float, unit_us: float) -> float:
    return round((time - timeline.start) * unit_us, 3)


def _versions(timeline: Timeline) -> dict[int, int]:
    """Weight version of each action, where versions differ; empty for synchronous schedules."""
    if not timeline.schedule.asynchronous:
        return {}
    from dlojz.pipeline.versions import version_of_action

    versions = enumerate(version_of_action(timeline.schedule))
    return {number: version for number, version in versions if version is not None}
