"""Record of a run: events as they happen, the record made of them, and the loss step by step.

A record is written whole or not at all (temporary file, fsync, rename), carries the checksum of its content, and
never holds NaN; events are JSON lines flushed one by one, so that a killed run still shows how far it got. Nothing is
ever parsed from printed text.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import stat
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

from pydantic import Field

from dlojz.base.contract import Contract, parse_json
from dlojz.base.errors import LabError
from dlojz.base.fault_injection import faultpoint
from dlojz.base.files import write_atomic
from dlojz.base.language import Sentences, format_bytes, say
from dlojz.base.machine import cores_available, rank_limit
from dlojz.config.run_config import ReadContract, RunConfig
from dlojz.results.footprint import Category, Footprint

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

Status = Literal["completed", "oom", "timeout", "cancelled", "failed", "diverged"]
STATUSES: tuple[Status, ...] = get_args(Status)
UNTRAINED = "untrained"
"""Event of a rank whose script has made no step of an optimizer."""
CHILDREN_EVENTS = "children.jsonl"
"""Ends of processes that a script or its launcher has started, and that trained nothing."""
MAX_RECORD_BYTES = 64 * 2**20
MAX_EVENTS_BYTES = 256 * 2**20
STEPS_REMEMBERED = 20
"""Ends of steps of which a log remembers the time."""


class Span(Contract):
    """Phase of one step on one rank; times count from the first step, which all ranks begin together.

    Phases of the rank itself: data, forward, backward, optimizer, and `wait`, the end of a backward that waits for
    communication. `communication` is under way beside them, bucket by bucket where the engine tells that much.
    In a pipeline a span is one action, whose name (`2F0`, `1B3`, …) is in `action`.
    """

    rank: int = Field(ge=0)
    step: int = Field(ge=0)
    phase: str
    start_s: float
    end_s: float
    action: str = Field("", description="action of the pipeline schedule; empty elsewhere")


class MemorySample(Contract):
    """Bytes held at one moment of a traced step, by category."""

    time_s: float
    phase: str
    bytes_by_category: dict[str, int]


class ExpertLoad(Contract):
    """Load of one mixture of experts in one step, over all ranks and micro-batches."""

    step: int = Field(ge=0)
    layer: str = Field(description="name of the mixture in its model")
    tokens: tuple[int, ...] = Field(description="choices that each expert has got, before its capacity cuts them")
    capacity: int = Field(ge=0, description="choices that each expert could take")
    dropped: float = Field(ge=0, le=1, description="share of all choices that found their expert full")


class ScriptLever(Contract):
    """One change of a script that would lower its peak, and by how much on this rank."""

    name: str
    taken_bytes: int = Field(ge=0, description="needed of the device with it")
    saved_bytes: int = Field(description="less than without it")


REST = "(rest)"
"""Module of a peak: what is in the model and in none of its blocks."""
OTHERS = "(others)"
"""Module of a peak: states of a script's other models, which a step leaves as they are."""


class ModuleMemory(Contract):
    """Bytes of one module at a peak, by category; of what belongs to none under an empty name."""

    module: str
    bytes_by_category: dict[Category, int]


class ScriptPrediction(Contract):
    """What was recognised of a script's training in its first step, and what was predicted from it."""

    recognised: dict[str, str] = Field(default_factory=dict, description="what wraps the model, its batch, and so on")
    note: str = Field("", description="why something is not predicted; empty where all is")
    footprint: Footprint | None = Field(None, description="of rank 0; None where nothing is predicted")
    messages_known: bool = Field(True, description="False where a custom hook sends DDP's gradients")
    other_ranks: tuple[Footprint, ...] = Field((), description="of the other ranks of a pipeline")
    at_peak: tuple[ModuleMemory, ...] = Field((), description="modules at the predicted peak")
    levers: tuple[ScriptLever, ...] = Field((), description="of a run that came near its limit")

    def of_rank(self, rank: int) -> Footprint | None:
        """Find the footprint of a rank: its own, where its ranks differ."""
        return next((footprint for footprint in self.other_ranks if footprint.rank == rank), self.footprint)


class RunRecord(ReadContract):
    """Record of a finished run: what was asked, how it ended, what was measured on every rank."""

    schema_version: Literal[1] = 1
    run_id: str
    config: RunConfig
    status: Status
    reason: str = Field("", description="why it ended so, in one sentence; empty for a completed run")
    losses: tuple[float, ...] = Field((), description="mean loss over the global batch, one per finished step")
    step_tokens: tuple[int, ...] = Field((), description="tokens of the global batch, one per finished step of a text")
    step_s: tuple[float, ...] = Field(
        (), description="seconds of each finished step on its slowest rank; the steps that are traced take longer"
    )
    step_samples: tuple[int, ...] = Field(
        (), description="samples of all replicas, one per finished step of a script; 0 where they were not seen"
    )
    named_losses: dict[str, tuple[float, ...]] = Field(
        default_factory=dict, description="of a script with several losses: each under its variable's name, on rank 0"
    )
    steps_of: dict[str, int] = Field(
        default_factory=dict, description="of a script with several optimizers: steps in which each was stepped"
    )
    held_bytes: tuple[int, ...] = Field(
        (), description="of a script, on rank 0: resident (on a GPU: allocated) at the end of each step"
    )
    variables: dict[str, int] = Field(
        default_factory=dict, description="of a script, on rank 0: bytes that its variables hold, by their names"
    )
    notes: tuple[str, ...] = Field((), description="what was not measured, and why")
    watch_ended: bool = Field(False, description="of a script: whether its later steps were not seen, for a fault")
    weights_sha256: str | None = Field(None, description="checksum of the final weights")
    footprints: tuple[Footprint, ...] = Field((), description="measured, one per rank that got so far")
    spans: tuple[Span, ...] = Field((), description="timeline of the steps kept")
    memory_timeline: tuple[MemorySample, ...] = Field((), description="rank 0, last traced step")
    expert_loads: tuple[ExpertLoad, ...] = Field((), description="of a model with experts: step by step, each mixture")
    script_prediction: ScriptPrediction | None = Field(None, description="of a script, made in its first step")
    environment: dict[str, str] = Field(default_factory=dict, description="versions and machine")
    started_utc: str = ""
    ended_utc: str = ""
    elapsed_s: float | None = Field(None, ge=0, description="of all attempts, without the waiting between them")

    @property
    def replayed_from(self) -> str:
        """Machine that a replayed record was measured on; empty for one that was measured where it lies."""
        return self.environment.get("replayed_from", "")

    @property
    def title(self) -> str:
        """Title of the run in every table and figure; a replayed record says so."""
        return self.config.title + self.mark

    @property
    def mark(self) -> str:
        """Mark after the name of a replayed record; empty for a measurement made here."""
        return say(en=" (replayed)", fr=" (rejoué)") if self.replayed_from else ""

    def footprint(self, rank: int = 0) -> Footprint | None:
        """Return the measured footprint of one rank, or None where the run did not get so far."""
        return next((footprint for footprint in self.footprints if footprint.rank == rank), None)


def _checksum(content: dict[str, Any]) -> str:
    # One text per content: sorted keys, no blanks.
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def write_record(path: Path, record: RunRecord) -> None:
    """Write a record atomically, with the checksum of its content under the key `sha256`."""
    content = record.to_dict()
    write_atomic(
        path, json.dumps({**content, "sha256": _checksum(content)}, indent=1, allow_nan=False, ensure_ascii=False)
    )


class DamagedRecordError(LabError):
    """Error: a record that cannot be used, and that no newer version would read either.

    Args:
        why: what is wrong, without a full stop, in the reader's language.
    """

    def __init__(self, path: Path, why: str) -> None:
        self.why = why
        super().__init__(say(en=f"the record {path} is damaged: {why}.", fr=f"le bilan {path} est abîmé : {why}."))


def read_record(path: Path) -> RunRecord:
    """Read a record and verify its checksum.

    Raises:
        DamagedRecordError: if the file is missing, cut short, altered or too large.
        LabError: if it was written by a newer version.
    """
    try:
        size = path.stat().st_size
        if size > MAX_RECORD_BYTES:
            beyond = phrase("record too large", size=size, max_record_bytes=MAX_RECORD_BYTES)
            raise DamagedRecordError(path, beyond)
        content = parse_json(path.read_bytes())
    except OSError as error:
        unread = say(en=f"it cannot be read: {error.strerror}", fr=f"il est illisible : {error.strerror}")
        raise DamagedRecordError(path, unread) from None
    except DamagedRecordError:  # a LabError too
        raise
    except LabError as error:
        raise DamagedRecordError(path, str(error).rstrip(".")) from None
    if not isinstance(content, dict):
        raise DamagedRecordError(path, say(en="it holds no JSON object", fr="il ne contient pas d’objet JSON"))
    version = content.get("schema_version")
    if isinstance(version, int) and version > 1:
        raise phrase.refused("newer record", path=path, version=version)
    # The checksum covers everything but itself.
    stored = content.pop("sha256", None)
    if stored != _checksum(content):
        changed = say(
            en="its checksum does not match its content", fr="sa somme de contrôle ne correspond pas à son contenu"
        )
        raise DamagedRecordError(path, changed)
    try:
        return RunRecord.from_dict(content)
    except LabError as error:
        why = str(error).rstrip(".")
        raise DamagedRecordError(path, say(en=f"it is not legal: {why}", fr=f"il n’est pas valable : {why}")) from None


class EventLog:
    """Log of one rank's events: a JSON line each with its time (`time_s`, Unix), flushed as it happens.

    Args:
        path: file that is appended to; its folder must exist.
    """

    def __init__(self, path: Path) -> None:
        cut = _ends_in_mid_line(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the rank
        self.step_ends_s: deque[float] = deque([time.monotonic()], maxlen=STEPS_REMEMBERED)
        """Times of the start and of the last ends of steps, on the monotonic clock."""
        if cut:  # of an attempt that was killed: what is written next must not be lost with that line
            self._file.write("\n")

    def write(self, event: str, **fields: Any) -> None:
        """Append one event and flush it to the operating system."""
        faultpoint("events.write:1")
        entry = {"event": event, "time_s": time.time(), **fields}
        self._file.write(json.dumps(entry, allow_nan=False) + "\n")
        self._file.flush()
        if event == "step":
            self.step_ends_s.append(time.monotonic())
        faultpoint("events.write:2")

    def close(self) -> None:
        """Flush to the disk and close."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _ends_in_mid_line(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # not there, or empty
        return False


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read all whole events of a file; a last line cut short by a kill is left out.

    A missing file has none, nor has what is no file of events: a link, a folder, a pipe (who waits for one waits for
    ever), or more than `MAX_EVENTS_BYTES`.

    Raises:
        OSError: if the file is there and cannot be read.
    """
    try:
        # A link is not followed, a pipe not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            return []
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_EVENTS_BYTES:
        os.close(descriptor)
        return []
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(MAX_EVENTS_BYTES)  # it may grow while it is read
    return parse_events(content)


def parse_events(content: bytes) -> list[dict[str, Any]]:
    """Parse lines of events; what is damaged is left out."""
    events = []
    for line in content.decode("utf-8", errors="replace").split("\n"):
        try:
            event = parse_json(line) if line else None
        except LabError:
            continue
        if isinstance(event, dict) and "event" in event:
            events.append(event)
    return events


def append_event(path: Path, event: str, **fields: Any) -> None:
    """Append one event to a file, where that can be done: a disk that is full changes nothing else."""
    with suppress(OSError):
        log = EventLog(path)
        log.write(event, **fields)
        log.close()


_SETTLED_STEPS, _LEAST_STEPS, _LEAST_GROWTH_BYTES = 3, 8, 2**25


def environment(world_size: int = 1) -> dict[str, str]:
    """Collect versions and machine for the record, with the memory limit of each of so many ranks."""
    limit = rank_limit(world_size)
    facts = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": str(cores_available()),
        "threads_per_rank": os.environ.get("OMP_NUM_THREADS", ""),
        "memory_limit_bytes": str(limit.num_bytes),
        "memory_limit_of": limit.code,
    }
    for package in ("dlojz", "torch", "deepspeed", "timm", "numpy", "idr-torch"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "absent"
    return facts


def start_of(rank: int, world_size: int) -> dict[str, Any]:
    """Describe the start of a rank, for its first event."""
    return {
        "rank": rank,
        "world_size": world_size,
        "environment": environment(world_size),
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


class MemoryGrowth(NamedTuple):
    """Growth of what a process holds from step to step, after the first ones; steps are counted from 1."""

    bytes_per_step: float
    first_step: int
    first_bytes: int
    last_step: int
    last_bytes: int

    def text(self) -> str:
        """Name the growth, and what usually causes it."""
        growth, before, after = map(format_bytes, (self.bytes_per_step, self.first_bytes, self.last_bytes))
        return phrase("memory grew", growth=growth, before=before, after=after, series=self)


def memory_growth(held_bytes: Sequence[int]) -> MemoryGrowth | None:
    """Find growth in the bytes that a process held at the end of each step; None where there is none to name.

    Growth is named where it goes on in each third of the steps after the first ones, and comes to 32 MiB or more.

    Args:
        held_bytes: resident or allocated; 0 where it is not known.
    """
    settled = held_bytes[_SETTLED_STEPS:]
    if len(settled) < _LEAST_STEPS or not all(settled):
        return None
    third = len(settled) // 3
    # Medians at the beginning of each third, which single steps do not move; then the last step.
    corners = [median(settled[start : start + max(1, third // 2)]) for start in (0, third, 2 * third)] + [settled[-1]]
    rises = [later - earlier for earlier, later in pairwise(corners)]
    total_bytes = settled[-1] - settled[0]
    # Each of the three rises has at least a tenth of the whole.
    if total_bytes < _LEAST_GROWTH_BYTES or min(rises) < total_bytes / 10:
        return None
    return MemoryGrowth(
        bytes_per_step=total_bytes / (len(settled) - 1),
        first_step=_SETTLED_STEPS + 1,
        first_bytes=settled[0],
        last_step=len(held_bytes),
        last_bytes=settled[-1],
    )
