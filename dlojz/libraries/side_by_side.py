"""The same training with each library, laid side by side: what a user writes, what it costs, what comes out.

Layer 3, loads no torch. Invariant: every figure is read from a record, asked of `predict`, or counted in the programs'
text; a figure that is not there stays `None`, and a library that was not run has its sentence.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from dlojz.config import RunConfig
from dlojz.footprint import Footprint
from dlojz.libraries import LIBRARIES, REFERENCE, absence, laid_out_otherwise, lines_changed
from dlojz.libraries.lines import Change
from dlojz.optimizer_stages import settled_step
from dlojz.predict import predict
from dlojz.record import RunRecord
from dlojz.schema import LabError

CONTROL = "control"
"""The lab's own group, whose few bytes are no library's."""


@dataclass(frozen=True)
class LibraryRow:
    """One library beside the others; bytes are those of rank 0, seconds those of a step."""

    name: str
    title: str
    version: str
    change: Change
    hides: str
    config: RunConfig | None
    """What was run; None where it was not."""
    note: str
    """Why it was not run, or what it did otherwise than asked; empty where all is as asked."""
    losses: tuple[float, ...] = ()
    difference: float | None = None
    """Largest difference of a loss to plain torch's of the same step."""
    same_weights: bool | None = None
    """Whether the final weights are plain torch's, bit for bit."""
    states_bytes: tuple[int | None, int | None] = (None, None)
    """Predicted and measured: weights, gradients, optimizer states, master copy and buffers."""
    peak_bytes: tuple[int | None, int | None] = (None, None)
    """Predicted and measured."""
    traffic_bytes: tuple[tuple[str, int | None, int | None], ...] = ()
    """Each collective, with its bytes predicted and measured."""
    step_s: float | None = None
    """Median over the steps that were timed, of the rounds' medians."""
    step_ratio: float | None = None
    """Median over the rounds of its step over plain torch's in the same round."""
    step_ratio_low: float | None = None
    step_ratio_high: float | None = None
    rounds: int = 0

    @property
    def ran(self) -> bool:
        """Whether there is a measurement."""
        return self.config is not None

    @property
    def bytes_equal(self) -> bool | None:
        """Whether every collective moved the bytes that were predicted; None where one of the two is not known."""
        if any(None in pair[1:] for pair in self.traffic_bytes) or not self.ran:
            return None
        return all(predicted == measured for _, predicted, measured in self.traffic_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "library": self.name,
            "title": self.title,
            "version": self.version,
            "lines": self.change.lines,
            "lines_added": self.change.added,
            "lines_removed": self.change.removed,
            "hides": self.hides,
            "ran": self.ran,
            "note": self.note,
            "config": self.config.to_dict() if self.config else None,
            "losses": list(self.losses),
            "largest_difference": self.difference,
            "same_weights": self.same_weights,
            "states_bytes": dict(zip(("predicted", "measured"), self.states_bytes, strict=True)),
            "peak_bytes": dict(zip(("predicted", "measured"), self.peak_bytes, strict=True)),
            "traffic_bytes": [
                {"collective": name, "predicted": predicted, "measured": measured}
                for name, predicted, measured in self.traffic_bytes
            ],
            "bytes_equal": self.bytes_equal,
            "step_s": self.step_s,
            "step_ratio": self.step_ratio,
            "step_ratio_low": self.step_ratio_low,
            "step_ratio_high": self.step_ratio_high,
            "rounds": self.rounds,
        }


def rows(
    records: Mapping[str, Sequence[RunRecord]] | Sequence[RunRecord],
    names: Sequence[str] | None = None,
    refused: Mapping[str, str] | None = None,
) -> list[LibraryRow]:
    """The libraries side by side, each with what its records tell.

    Args:
        records: of runs with a library, of the same training: by library the record of each round, or, for one round,
            records alone.
        names: libraries to have a row; by default all of the catalogue.
        refused: why some were not run.
    """
    if not isinstance(records, Mapping):
        records = {record.config.library: [record] for record in records}
    done = {name: [one for one in told if one.losses] for name, told in records.items()}
    base = done.get(REFERENCE, [])
    found = []
    for name in names or tuple(LIBRARIES):
        own = done.get(name, [])
        why = (refused or {}).get(name) or _why(name, records.get(name, ()))
        found.append(_measured(name, own, base) if own else _silent(name, why))
    return found


def _why(name: str, told: Sequence[RunRecord]) -> str:
    ended = next((f"{one.status}: {one.reason}" for one in told), "")
    return ended or absence(name) or ""


def _silent(name: str, why: str) -> LibraryRow:
    one = LIBRARIES[name]
    return LibraryRow(name, one.title, one.version, lines_changed(name), one.hides(), None, why)


def _measured(name: str, own: Sequence[RunRecord], base: Sequence[RunRecord]) -> LibraryRow:
    one, last = LIBRARIES[name], own[-1]
    measured, predicted = last.footprint(), _predicted(last.config)
    step_s = [_step_s(record) for record in own]
    ratios = [
        mine / other
        for mine, record in zip(step_s, base, strict=False)
        if mine is not None and (other := _step_s(record)) is not None
    ]
    low, high = _quartiles(ratios)
    version = last.environment.get("library", "").removeprefix(one.title).strip()
    return LibraryRow(
        name=name,
        title=one.title,
        version=version or one.version,
        change=lines_changed(name),
        hides=one.hides(),
        config=last.config,
        note=laid_out_otherwise(last.config, last.environment.get("wrapped_in", ""))
        or ("" if last.status == "completed" else f"{last.status}: {last.reason}"),
        losses=last.losses,
        difference=largest_difference(last.losses, base[-1].losses) if base else None,
        same_weights=_same(last.weights_sha256, base[-1].weights_sha256) if base else None,
        states_bytes=(_states(predicted), _states(measured)),
        peak_bytes=(
            predicted.memory.peak_bytes if predicted else None,
            measured.memory.peak_bytes if measured else None,
        ),
        traffic_bytes=traffic_pairs(predicted, measured),
        step_s=statistics.median(known) if (known := [one for one in step_s if one is not None]) else None,
        step_ratio=statistics.median(ratios) if ratios else None,
        step_ratio_low=low,
        step_ratio_high=high,
        rounds=len(own),
    )


def _predicted(config: RunConfig) -> Footprint | None:
    try:
        return predict(config)
    except LabError:
        return None


def _states(footprint: Footprint | None) -> int | None:
    return footprint.memory.states_bytes if footprint else None


def _same(mine: str | None, other: str | None) -> bool | None:
    return mine == other if mine and other else None


def _step_s(record: RunRecord) -> float | None:
    """Median of the steps behind those that are traced."""
    timed = record.step_s[settled_step(record.config, 0) + 1 :]
    return statistics.median(timed) if timed else None


def _quartiles(ratios: Sequence[float]) -> tuple[float | None, float | None]:
    if not ratios:
        return None, None
    if len(ratios) == 1:
        return ratios[0], ratios[0]
    cuts = statistics.quantiles(ratios, n=4, method="inclusive")
    return cuts[0], cuts[2]


def largest_difference(losses: Sequence[float], others: Sequence[float]) -> float | None:
    """The largest difference of two losses of the same step; None where no step is common."""
    return max((abs(one - other) for one, other in zip(losses, others, strict=False)), default=None)


def traffic_pairs(
    predicted: Footprint | None, measured: Footprint | None
) -> tuple[tuple[str, int | None, int | None], ...]:
    """Each collective of one step, all groups but the lab's own together: bytes predicted and measured.

    A collective that one of the two knows and the other not has moved 0 bytes there; None where the whole footprint is
    missing.
    """
    summed: list[dict[str, int] | None] = []
    for footprint in (predicted, measured):
        if footprint is None:
            summed.append(None)
            continue
        found: dict[str, int] = {}
        for one in footprint.communication:
            if one.group != CONTROL:
                found[one.collective] = found.get(one.collective, 0) + one.message_bytes
        summed.append(found)
    names = list(dict.fromkeys(name for found in summed if found for name in found))
    before, after = ([None if found is None else found.get(name, 0) for name in names] for found in summed)
    return tuple(zip_longest(names, before, after))
