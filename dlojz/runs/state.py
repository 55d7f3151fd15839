"""What state a run is in, told from its folder alone.

Layer 5. Invariant: the record wins; without one, a run whose process or job is alive is queued or running, and a run
whose process or job is gone has ended: its record is rebuilt from the events and, of a job, from what its scheduler
says. A damaged record is set aside, never deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from dlojz.config import RunConfig
from dlojz.record import (
    STATUSES,
    DamagedRecordError,
    RunRecord,
    Status,
    read_events,
    read_record,
    write_record,
)
from dlojz.runs.assemble import assemble, finished_steps
from dlojz.runs.ending import Ending, Evidence, JobEnd, classify, end_of
from dlojz.runs.job import read_job
from dlojz.runs.logs import MAX_FILE_BYTES, read_regular, read_tail
from dlojz.runs.owner import Owner, read_owner
from dlojz.runs.standing import job_state, quiet_s
from dlojz.schema import LabError
from dlojz.text import say

State = Literal["queued", "running"] | Status
CONFIG, RECORD, EVENTS, LOGS, CANCEL, QUARANTINE = (
    "config.json",
    "record.json",
    "events",
    "logs",
    "cancel",
    "quarantine",
)
LAUNCHER_EVENTS = "launcher.jsonl"
UNHEARD_S = 120.0
"""Seconds after which a launcher on another machine that was asked to stop, and has not, is taken for gone."""
_RANK_EVENTS = re.compile(r"rank-(\d{1,6})\.jsonl")

Events = dict[int, list[dict[str, Any]]]


def read_config(folder: Path) -> RunConfig:
    """What was asked of a run.

    Raises:
        LabError: if config.json is missing, damaged or illegal.
    """
    try:
        return RunConfig.from_json(read_regular(folder / CONFIG, MAX_FILE_BYTES))
    except OSError as error:
        raise LabError(
            say(
                en=f"the run {folder.name} has no readable {CONFIG}: {error.strerror}.",
                fr=f"le fichier {CONFIG} de l’exécution {folder.name} est illisible : {error.strerror}.",
            )
        ) from None
    except LabError as error:
        raise LabError(
            say(
                en=f"the {CONFIG} of run {folder.name} is damaged: {error}",
                fr=f"le fichier {CONFIG} de l’exécution {folder.name} est abîmé : {error}",
            )
        ) from None


def read_all_events(folder: Path) -> Events:
    """The events of every rank that wrote any; files that cannot be read have none."""
    found: Events = {}
    for path in sorted((folder / EVENTS).glob("rank-*.jsonl")):
        name = _RANK_EVENTS.fullmatch(path.name)
        if name:
            with contextlib.suppress(OSError):
                found[int(name[1])] = read_events(path)
    return found


def evidence_of(events: Mapping[int, list[dict[str, Any]]], folder: Path, world_size: int, **known: Any) -> Evidence:
    """What the folder tells of the end of a run, beside what the launcher knows."""
    ends = {rank: end for rank, told in events.items() if (end := end_of(told))}
    return Evidence(
        world_size=world_size,
        ends=ends,
        steps={rank: finished_steps(told) for rank, told in events.items()},
        log_tails={rank: read_tail(folder / LOGS / f"rank-{rank}.log", 8192) for rank in range(world_size)},
        **known,
    )


def look(folder: Path) -> tuple[State, RunRecord | None]:
    """State of a run, and its record once it has ended.

    Raises:
        LabError: if neither its record nor its configuration can be read, or a newer dlojz wrote its record.
    """
    path = folder / RECORD
    # Asked before the record is looked for: a launcher that ends in between has written its record by then.
    standing = None if os.path.lexists(path) else _standing(folder)
    damage = ""
    if os.path.lexists(path):
        try:
            record = _own_record(path, folder.name)
            return record.status, record
        except DamagedRecordError as error:  # one that a newer dlojz wrote is not damaged, only unknown here
            damage = error.why
            _set_aside(path)
    else:
        standing = standing or _standing(folder)
        if standing == "queued" or standing == "running":  # noqa: PLR1714 - mypy narrows these
            return standing, None
    record = rebuild(folder, damage, standing if isinstance(standing, JobEnd) else None)
    with contextlib.suppress(OSError):  # a folder that is read-only or full still tells what it holds
        write_record(path, record)
    return record.status, record


def _standing(folder: Path) -> Literal["queued", "running", "gone"] | JobEnd:
    """Where a run without a record stands: by its job where it has one, else by the process that drives it."""
    owner, job = read_owner(folder), read_job(folder)
    if job is not None:
        return job_state(folder, job, owner, read_all_events(folder), read_config(folder).layout.world_size)
    if owner is None or not owner.is_alive(folder) or _unheard(folder, owner):
        return "gone"
    told = any(file.stat().st_size for file in (folder / EVENTS).glob("rank-*.jsonl"))
    return "running" if told else "queued"


def _unheard(folder: Path, owner: Owner) -> bool:
    """Whether a launcher on another machine, which cannot be looked at, was asked to stop and does nothing any more.

    One that lives ends within seconds of the request, and writes so. Without this, a run whose machine is gone for good
    would be running for ever.
    """
    if owner.host == socket.gethostname():
        return False
    try:
        asked_s = time.time() - (folder / CANCEL).lstat().st_mtime
    except OSError:
        return False
    return min(asked_s, quiet_s(folder)) > UNHEARD_S


def rebuild(folder: Path, damage: str = "", job: JobEnd | None = None) -> RunRecord:
    """The record of a run whose launcher wrote none, or whose record was damaged, from its events.

    Args:
        damage: what was wrong with its record, if it had one.
        job: how its scheduler says that its job ended, if it had one.

    Raises:
        LabError: if its configuration cannot be read.
    """
    config = read_config(folder)
    events = read_all_events(folder)
    told: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        told = read_events(folder / EVENTS / LAUNCHER_EVENTS)
    known = end_of(told)
    asked: Literal["cancelled"] | None = "cancelled" if job is None and (folder / CANCEL).exists() else None
    ending = (
        Ending(*known)
        if known
        else classify(
            evidence_of(events, folder, config.layout.world_size, launcher="vanished", job=job, stopped_by=asked)
        )
    )
    if damage:
        note = say(
            en=f"its record was damaged ({damage}), has been set aside in quarantine/ and is rebuilt from the events",
            fr=f"son bilan était abîmé ({damage}) : il a été mis de côté dans quarantine/ et reconstruit à partir des "
            "événements",
        )
        ending = Ending(ending.status, f"{ending.reason.rstrip('.')}; {note}." if ending.reason else f"{note}.")
    return assemble(folder.name, config, events, ending, _lasted_s(folder))


def _own_record(path: Path, run_id: str) -> RunRecord:
    if path.is_symlink() or not path.is_file():
        if path.is_symlink():
            raise DamagedRecordError(path, say(en="it is a symbolic link", fr="c’est un lien symbolique"))
        raise DamagedRecordError(path, say(en="it is no regular file", fr="ce n’est pas un fichier ordinaire"))
    record = read_record(path)
    if record.run_id != run_id:
        other = record.run_id
        raise DamagedRecordError(path, say(en=f"it belongs to the run {other}", fr=f"il est de l’exécution {other}"))
    return record


def _set_aside(path: Path) -> None:
    """Move a damaged record into quarantine/; where the folder cannot be changed it stays."""
    try:
        shelf = path.parent / QUARANTINE
        shelf.mkdir(exist_ok=True)
        number = sum(1 for _ in shelf.iterdir()) + 1
        path.rename(shelf / f"{path.stem}-{number}-{os.getpid()}{path.suffix}")
    except OSError:
        pass


def _lasted_s(folder: Path) -> float:
    """Seconds from the submission to the last event."""
    owner = read_owner(folder)
    written = [path.stat().st_mtime for path in (folder / EVENTS).glob("*.jsonl") if path.is_file()]
    try:
        started = datetime.fromisoformat(owner.submitted_utc).timestamp() if owner else 0.0
    except ValueError:
        return 0.0
    return max(written, default=started) - started if started else 0.0


def is_final(state: str) -> bool:
    """Whether nothing more will happen in this state."""
    return state in STATUSES
