"""Compare the libraries on one training: lines of code, losses, bytes predicted and measured, seconds per step.

A missing number is `None`, and a library that was not run has a sentence.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any

from dlojz.base.errors import LabError
from dlojz.base.language import colon, say
from dlojz.config.run_config import RunConfig, fallback_note
from dlojz.config.schedules import settled_step
from dlojz.libraries.library_catalogue import LIBRARIES, REFERENCE, LineChange, absence, lines_changed
from dlojz.prediction import predict
from dlojz.results.footprint import Footprint, Traffic
from dlojz.results.record import RunRecord

Rounds = Sequence[RunRecord | None]
"""Records of a library's runs, round by round; None where a round has left none."""
CONTROL = "control"  # the lab's own group, whose few bytes are no library's


@dataclass(frozen=True)
class LibraryRow:
    """Results of one library; bytes are those of rank 0, seconds those of a step."""

    name: str
    title: str
    version: str
    change: LineChange
    hides: str
    config: RunConfig | None
    """Run; None where it was not run."""
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
    """Each collective, with the bytes of its messages predicted and measured."""
    sent_bytes: tuple[float | None, float | None] = (None, None)
    """Bytes that leave the rank for all of them, predicted and measured; see `sent`."""
    step_s: float | None = None
    """Median over the rounds of the median over the timed steps."""
    step_ratio: float | None = None
    """Median over the rounds of its step over plain torch's in the same round."""
    step_ratio_low: float | None = None
    step_ratio_high: float | None = None
    rounds: int = 0
    """Rounds in the ratio; without plain torch, those that were timed."""
    steps_timed: int = 0
    """Steps of a round in that median, without the first, traced ones."""
    otherwise: bool = False
    """Whether the library trained otherwise than asked (see `note`): another training is timed."""

    @property
    def ran(self) -> bool:
        """Whether there is a measurement."""
        return self.config is not None

    @property
    def bytes_equal(self) -> bool | None:
        """Whether every collective moved the predicted bytes; None where one of the two is not known."""
        if any(None in pair[1:] for pair in self.traffic_bytes) or not self.ran:
            return None
        return all(predicted == measured for _, predicted, measured in self.traffic_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        pairs = ("states_bytes", "peak_bytes", "sent_bytes")
        plain = [
            field.name for field in fields(self) if field.name not in ("name", "change", "config", "difference", *pairs)
        ]
        return {
            **{name: getattr(self, name) for name in plain},
            **{name: dict(zip(("predicted", "measured"), getattr(self, name), strict=True)) for name in pairs},
            "library": self.name,
            "lines": self.change.lines,
            "lines_added": self.change.added,
            "lines_removed": self.change.removed,
            "ran": self.ran,
            "config": self.config.to_dict() if self.config else None,
            "losses": list(self.losses),
            "largest_difference": self.difference,
            "traffic_bytes": [
                {"collective": name, "predicted": predicted, "measured": measured}
                for name, predicted, measured in self.traffic_bytes
            ],
            "bytes_equal": self.bytes_equal,
        }


def rows(
    records: Mapping[str, Rounds] | Sequence[RunRecord],
    names: Sequence[str] | None = None,
    refused: Mapping[str, str] | None = None,
) -> list[LibraryRow]:
    """Build the rows of the libraries from their records.

    Args:
        records: of one training, by library the record of each round, None where a round has left none; or, for one
            round, a list of records.
        names: libraries; by default all of the catalogue.
        refused: by library, why it was not run.
    """
    if not isinstance(records, Mapping):
        records = {record.config.library: [record] for record in records}
    base: Rounds = records.get(REFERENCE, ())
    table = []
    for name in names or tuple(LIBRARIES):
        rounds: Rounds = records.get(name, ())
        if _last(rounds) is not None:
            table.append(_measured(name, rounds, base))
            continue
        reason, library = (refused or {}).get(name) or _why(name, rounds), LIBRARIES[name]
        table.append(
            LibraryRow(name, library.title, library.version, lines_changed(name), library.hides(), None, reason)
        )
    return table


def _last(rounds: Rounds) -> RunRecord | None:
    # The last round with losses gives losses, bytes and weights; seconds are of all rounds.
    return next((record for record in reversed(rounds) if record is not None and record.losses), None)


def _why(name: str, rounds: Rounds) -> str:
    return next((_ended(record) for record in rounds if record is not None), "") or absence(name) or ""


def _ended(record: RunRecord) -> str:
    return f"{status_words(record.status)}{colon()}{record.reason}"


def status_words(status: str) -> str:
    """Translate the status of a run into the reader's language."""
    french = {
        "completed": "terminé",
        "oom": "mémoire insuffisante",
        "timeout": "temps dépassé",
        "cancelled": "annulé",
        "failed": "échec",
        "diverged": "divergence",
    }
    return say(en=status, fr=french.get(status, status))


def _measured(name: str, rounds: Rounds, base: Rounds) -> LibraryRow:
    library, run, plain = LIBRARIES[name], _last(rounds), _last(base)
    assert run is not None  # whoever asks has seen its losses
    measured, predicted = run.footprint(), _predicted(run.config)
    step_s = [_step_s(record) for record in rounds]
    ratios = [
        seconds / base_seconds
        for seconds, record in zip(step_s, base, strict=False)  # round by round: one that failed leaves its place
        if seconds is not None and (base_seconds := _step_s(record)) is not None
    ]
    low, high = _quartiles(ratios)
    timed_s = [seconds for seconds in step_s if seconds is not None]
    otherwise = fallback_note(run.config, run.environment.get("wrapped_in", ""))
    version = run.environment.get("library", "").removeprefix(library.title).strip()
    # None where plain torch was not run, or a run has kept no weights.
    hashes = run.weights_sha256, plain.weights_sha256 if plain else None
    return LibraryRow(
        name=name,
        title=library.title,
        version=version or library.version,
        change=lines_changed(name),
        hides=library.hides(),
        config=run.config,
        note=" ".join(sentence for sentence in (otherwise, _not_done(rounds)) if sentence),
        losses=run.losses,
        difference=largest_difference(run.losses, plain.losses) if plain else None,
        same_weights=hashes[0] == hashes[1] if all(hashes) else None,
        states_bytes=(_states(predicted), _states(measured)),
        peak_bytes=(
            predicted.memory.peak_bytes if predicted else None,
            measured.memory.peak_bytes if measured else None,
        ),
        traffic_bytes=traffic_pairs(predicted, measured),
        sent_bytes=(sent(predicted), sent(measured)),
        step_s=statistics.median(timed_s) if timed_s else None,
        step_ratio=statistics.median(ratios) if ratios else None,
        step_ratio_low=low,
        step_ratio_high=high,
        rounds=len(ratios) if plain else len(timed_s),
        steps_timed=len(_timed(run)),
        otherwise=bool(otherwise),
    )


def _not_done(rounds: Rounds) -> str:
    """Report the incomplete rounds, and how the first of them ended; empty without."""
    short = [record for record in rounds if record is None or record.status != "completed"]
    if not short:
        return ""
    ended = next(
        (_ended(record) for record in short if record is not None), say(en="no record.", fr="aucun enregistrement.")
    )
    if len(rounds) == 1:
        return ended
    return say(
        en=f"{len(short)} of {len(rounds)} rounds: {ended}",
        fr=f"{len(short)} tour{'s' * (len(short) > 1)} sur {len(rounds)} : {ended}",
    )


def _predicted(config: RunConfig) -> Footprint | None:
    try:
        return predict(config)
    except LabError:
        return None


def _states(footprint: Footprint | None) -> int | None:
    return footprint.memory.states_bytes if footprint else None


def _timed(record: RunRecord) -> Sequence[float]:
    """Seconds of the steps after the traced ones."""
    # Steps are numbered from 0: the first one behind the settled step.
    return record.step_s[settled_step(record.config, 0) + 1 :]


def _step_s(record: RunRecord | None) -> float | None:
    """Median of their seconds; None for an incomplete run."""
    timed = _timed(record) if record is not None and record.status == "completed" else ()
    return statistics.median(timed) if timed else None


def _quartiles(ratios: Sequence[float]) -> tuple[float | None, float | None]:
    if not ratios:
        return None, None
    if len(ratios) == 1:
        return ratios[0], ratios[0]
    # Inclusive: quartiles lie within what was measured, even of two rounds.
    cuts = statistics.quantiles(ratios, n=4, method="inclusive")
    return cuts[0], cuts[2]


def largest_difference(losses: Sequence[float], reference_losses: Sequence[float]) -> float | None:
    """Compute the largest difference of two losses of the same step; None without a common step."""
    return max((abs(loss - reference) for loss, reference in zip(losses, reference_losses, strict=False)), default=None)


def leaves(traffic: Traffic) -> bool:
    """Whether a rank sends this for the library: not the lab's own messages, nor those it receives."""
    return traffic.group != CONTROL and traffic.collective != "recv"


def sent(footprint: Footprint | None) -> float | None:
    """Sum the bytes that leave a rank in one step, without the lab's own, as `Traffic.sent_bytes` counts them."""
    return (
        None if footprint is None else sum(traffic.sent_bytes for traffic in footprint.communication if leaves(traffic))
    )


def traffic_pairs(
    predicted: Footprint | None, measured: Footprint | None
) -> tuple[tuple[str, int | None, int | None], ...]:
    """Pair the bytes predicted and measured of each collective of one step, without the lab's own group.

    A collective that only one of the two has counts 0 bytes in the other; None where a whole footprint is missing.
    """
    summed: list[dict[str, int] | None] = []
    for footprint in (predicted, measured):
        if footprint is None:
            summed.append(None)
            continue
        bytes_by_collective: dict[str, int] = {}
        for traffic in footprint.communication:
            if traffic.group != CONTROL:
                bytes_by_collective[traffic.collective] = (
                    bytes_by_collective.get(traffic.collective, 0) + traffic.message_bytes
                )
        summed.append(bytes_by_collective)
    # Every collective that one of the two has, those predicted first.
    names = list(dict.fromkeys(name for totals in summed if totals for name in totals))
    before, after = ([None if totals is None else totals.get(name, 0) for name in names] for totals in summed)
    return tuple(zip_longest(names, before, after))
