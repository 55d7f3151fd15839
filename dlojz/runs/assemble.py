"""From what every rank wrote to the one record of the run. Pure.

Layer 5. Invariant: what is damaged is left out, never guessed: losses stop at the first step that no rank tells of.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from dlojz.config import RunConfig
from dlojz.footprint import Footprint
from dlojz.record import MemorySample, RunRecord, Span
from dlojz.runs.ending import Ending
from dlojz.runs.expert_loads import loads_of
from dlojz.runs.logs import visible
from dlojz.schema import Contract, LabError

Event = Mapping[str, Any]
Part = TypeVar("Part", bound=Contract)
Number = TypeVar("Number", int, float)
MOST = sys.float_info.max
"""What is greater, or no number, is damaged."""


def losses_of(events: Mapping[int, Sequence[Event]]) -> tuple[float, ...]:
    """Finite losses from the first step on; each is the same on all ranks, so any rank that tells it is believed."""
    return tuple(told[0] for told in _of_steps(events, "loss", float))


def tokens_of(events: Mapping[int, Sequence[Event]]) -> tuple[int, ...]:
    """Tokens of each step's global batch, as any rank tells them; none of images, or of runs that told none."""
    return tuple(told[0] for told in _of_steps(events, "tokens", int, least=1))


def step_seconds_of(events: Mapping[int, Sequence[Event]]) -> tuple[float, ...]:
    """Seconds of each step on the rank that took longest."""
    return tuple(max(told) for told in _of_steps(events, "step_s", float, least=0.0))


def _of_steps(
    events: Mapping[int, Sequence[Event]], key: str, kind: type[Number], least: float = -MOST
) -> list[list[Number]]:
    """What the ranks told of each step, rank 0 first, up to the first step that none tells of.

    A step that was done twice, before and after a checkpoint, is as it was done last.
    """
    by_step: dict[int, dict[int, Number]] = defaultdict(dict)
    for rank, told in sorted(events.items()):
        for event in told:
            step, value = event.get("step"), event.get(key)
            # An exact test: JSON's true is an int for isinstance.
            if event["event"] == "step" and type(step) is int and type(value) is kind and least <= value <= MOST:
                by_step[step][rank] = value
    found: list[list[Number]] = []
    while len(found) in by_step:
        found.append(list(by_step[len(found)].values()))
    return found


def finished_steps(events: Sequence[Event]) -> int:
    """Steps that one rank has finished."""
    return max(
        (event["step"] + 1 for event in events if event["event"] == "step" and type(event.get("step")) is int),
        default=0,
    )


DEVICE_TEXTS = ("device", "library", "wrapped_in")
"""What a rank tells of where it trains, once it knows: its device; a library, and what it put the model in."""


def assemble(
    run_id: str, config: RunConfig, events: Mapping[int, Sequence[Event]], ending: Ending, elapsed_s: float
) -> RunRecord:
    """The record of a run: its losses, the last footprint of each rank, its timeline, its environment and its end.

    Args:
        events: by rank, in the order written.
        elapsed_s: seconds from the start of the launcher to the end.
    """
    footprints = (_last(Footprint, events[rank], "footprint", "footprint") for rank in sorted(events))
    first = _event(events.get(0, ()), "start")
    return RunRecord(
        run_id=run_id,
        config=config,
        status=ending.status,
        reason=ending.reason,
        losses=losses_of(events),
        step_tokens=tokens_of(events),
        step_s=step_seconds_of(events),
        weights_sha256=_text(_event(events.get(0, ()), "weights").get("sha256")) or None,
        footprints=tuple(footprint for footprint in footprints if footprint is not None),
        spans=tuple(span for rank in sorted(events) for span in _parts(Span, _latest(events[rank]), "spans", "spans")),
        memory_timeline=tuple(_parts(MemorySample, _latest(events.get(0, ())), "memory_timeline", "samples")),
        expert_loads=loads_of(events),
        environment=_texts(first.get("environment")) | _texts(_event(events.get(0, ()), "device"), only=DEVICE_TEXTS),
        started_utc=_text(first.get("time_utc")),
        elapsed_s=max(0.0, elapsed_s),
    )


def _latest(events: Sequence[Event]) -> Sequence[Event]:
    """Those of the last attempt: each attempt's timeline counts from its own first step."""
    starts = [index for index, event in enumerate(events) if event["event"] == "start"]
    return events[starts[-1] :] if starts else events


def _event(events: Sequence[Event], name: str) -> Event:
    """The last event of that name, or an empty one."""
    return next((event for event in reversed(events) if event["event"] == name), {})


def _text(value: object) -> str:
    return visible(value) if isinstance(value, str) else ""


def _texts(value: object, only: Sequence[str] | None = None) -> dict[str, str]:
    """A mapping as texts; of some keys only, where they are given."""
    if not isinstance(value, Mapping):
        return {}
    return {visible(str(key)): visible(str(item)) for key, item in value.items() if only is None or key in only}


def _legal(contract: type[Part], data: object) -> Part | None:
    try:
        return contract.from_dict(data)  # type: ignore[arg-type]
    except LabError:
        return None


def _last(contract: type[Part], events: Sequence[Event], name: str, key: str) -> Part | None:
    """The last event of that name whose content is legal."""
    found = (_legal(contract, event.get(key)) for event in reversed(events) if event["event"] == name)
    return next((part for part in found if part is not None), None)


def _parts(contract: type[Part], events: Sequence[Event], name: str, key: str) -> list[Part]:
    """All legal parts that the events of that name list."""
    lists = (event.get(key) for event in events if event["event"] == name)
    parts = (_legal(contract, data) for listed in lists if isinstance(listed, list) for data in listed)
    return [part for part in parts if part is not None]
