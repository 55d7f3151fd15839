"""State of a run, read from its folder, and the record assembled from its events.

The record decides. Without one, a run whose process or job is alive is queued or running; a run whose process or job is
gone has ended, and its record is rebuilt from the events and, of a job, from what the scheduler says. A damaged record
is set aside, never deleted; damaged events are left out, never guessed.

The folder counts for more than the scheduler: a run whose ranks have all written their end has ended whatever the queue
says, and one whose folder was written to just now has not, because files may arrive late.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from dlojz.base.contract import Contract
from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, say
from dlojz.config.layout import Layout
from dlojz.config.run_config import RunConfig
from dlojz.models.foreign.elsewhere import executing_no_file
from dlojz.results.footprint import Footprint
from dlojz.results.record import (
    CHILDREN_EVENTS,
    STATUSES,
    UNTRAINED,
    DamagedRecordError,
    ExpertLoad,
    MemorySample,
    RunRecord,
    ScriptPrediction,
    Span,
    Status,
    append_event,
    read_events,
    read_record,
    write_record,
)
from dlojz.running.ending import EndEvidence, Ending, JobEnd, classify, end_of
from dlojz.running.folder import MAX_FILE_BYTES, Job, Owner, read_job, read_owner, read_regular, read_tail, visible
from dlojz.running.slurm.slurm_queue import JobView, view_of

phrase = Sentences(Path(__file__).parent / "data" / "runs.md")

Event = Mapping[str, Any]


def loads_of(events: Mapping[int, Sequence[Event]]) -> tuple[ExpertLoad, ...]:
    """Sum the experts' loads over the ranks: step by step, and in a step mixture by mixture in the model's order.

    A step of which one of the ranks with experts wrote nothing is left out.

    Args:
        events: by rank, in the order written; of a step that was done twice, before and after a checkpoint, the last
            one counts.
    """
    rank_loads: dict[tuple[int, str], dict[int, ExpertLoad]] = defaultdict(dict)
    for rank, events_of_rank in sorted(events.items()):
        for event in events_of_rank:
            for load in _loads(event) if event["event"] == "experts" else ():
                rank_loads[load.step, load.layer][rank] = load
    # Only ranks with experts write loads: a pipeline stage without any is not waited for.
    ranks = {rank for of_rank in rank_loads.values() for rank in of_rank}
    summed_loads = [_sum(list(of_rank.values())) for of_rank in rank_loads.values() if set(of_rank) == ranks]
    return tuple(sorted((load for load in summed_loads if load is not None), key=lambda load: load.step))


def _loads(event: Event) -> list[ExpertLoad]:
    layers = event.get("layers")
    loads = []
    for layer in layers if isinstance(layers, list) else ():
        try:
            loads.append(ExpertLoad.from_dict({"step": event.get("step"), **layer}))
        except (LabError, TypeError):
            continue
    return loads


def _sum(loads: list[ExpertLoad]) -> ExpertLoad | None:
    """Sum the loads of one mixture in one step over the ranks; None where their numbers of experts differ."""
    reference = loads[0]
    if len({len(load.tokens) for load in loads}) > 1:
        return None
    return ExpertLoad(
        step=reference.step,
        layer=reference.layer,
        # (ranks, experts) → (experts,): tokens add up, as does the capacity; the dropped share is a mean.
        tokens=tuple(sum(of_expert) for of_expert in zip(*(load.tokens for load in loads), strict=True)),
        capacity=sum(load.capacity for load in loads),
        dropped=sum(load.dropped for load in loads) / len(loads),
    )


Part = TypeVar("Part", bound=Contract)
Number = TypeVar("Number", int, float)
MOST = sys.float_info.max
"""Greater values, and NaN, are damaged."""


def losses_of(events: Mapping[int, Sequence[Event]]) -> tuple[float, ...]:
    """Read the finite losses from the first step on: the ranks' mean, where a script's ranks each have their own."""
    steps = _of_steps(events, "loss", float)
    return tuple(
        rank_losses[0] if len(set(rank_losses)) == 1 else statistics.fmean(rank_losses) for rank_losses in steps
    )


def _of_steps(
    events: Mapping[int, Sequence[Event]], key: str, kind: type[Number], minimum: float = -MOST
) -> list[list[Number]]:
    """Read what the ranks wrote of each step, rank 0 first, up to the first step of which none wrote.

    Of a step that was done twice, before and after a checkpoint, the last one counts.
    """
    by_step: dict[int, dict[int, Number]] = defaultdict(dict)
    for rank, rank_events in sorted(events.items()):
        for event in rank_events:
            step, value = event.get("step"), event.get(key)
            # An exact test: JSON's true is an int for isinstance.
            if event["event"] == "step" and type(step) is int and type(value) is kind and minimum <= value <= MOST:
                by_step[step][rank] = value
    step_values: list[list[Number]] = []
    while len(step_values) in by_step:
        step_values.append(list(by_step[len(step_values)].values()))
    return step_values


def _of_script(events: Sequence[Event]) -> dict[str, Any]:
    """Read what the watch of a script wrote of each step, and its notes; what is damaged is left out."""
    steps = [event for event in events if event["event"] == "step"]
    losses: dict[str, list[float]] = defaultdict(list)
    of_optimizers: Counter[str] = Counter()
    for event in steps:
        step_losses = event.get("losses")
        for name, value in step_losses.items() if isinstance(step_losses, dict) else ():
            if type(value) is float and abs(value) <= MOST:
                losses[name] += [value]
    for names in (event.get("optimizers") for event in events if event["event"] in ("step", "late_update")):
        of_optimizers.update(name for name in (names if isinstance(names, list) else ()) if isinstance(name, str))
    variables = _event(events, "variables").get("names")
    return {
        "step_samples": tuple(_whole(event.get("samples")) for event in steps),
        "named_losses": {name: tuple(values) for name, values in losses.items()} if len(losses) > 1 else {},
        "steps_of": dict(of_optimizers) if len(of_optimizers) > 1 else {},
        "held_bytes": tuple(_whole(event.get("resident_bytes")) for event in steps),
        "variables": {name: _whole(value) for name, value in variables.items()} if isinstance(variables, dict) else {},
        "notes": tuple(_text(event.get("text")) for event in events if event["event"] == "note"),
        "watch_ended": any(event["event"] == "note" and event.get("ends_watch") is True for event in events),
    }


def _whole(value: object) -> int:
    return value if type(value) is int and 0 <= value < 2**63 else 0


def finished_steps(events: Sequence[Event]) -> int:
    """Count the steps that one rank has finished."""
    return max(
        (event["step"] + 1 for event in events if event["event"] == "step" and type(event.get("step")) is int),
        default=0,
    )


DEVICE_TEXTS = ("device", "library", "wrapped_in", "threads")
"""Keys of a rank's `device` event: its device; the library, the class that it wrapped the model in; a script's
threads."""


def assemble(
    run_id: str,
    config: RunConfig,
    events: Mapping[int, Sequence[Event]],
    ending: Ending,
    elapsed_s: float | None,
    ended_s: float | None = None,
) -> RunRecord:
    """Assemble a run's record: losses, the last footprint of each rank, timeline, environment and end.

    Args:
        elapsed_s: seconds of all attempts, each from its start to its end; None where that is not known.
        ended_s: Unix time of the end; None where that is not known.
    """
    if config.script and len(events) != config.layout.world_size:
        # Processes that the script, or its launcher, has started itself.
        config = config.model_copy(update={"layout": Layout(dp=max(1, len(events)))})
    footprints = (_last(Footprint, events[rank], "footprint", "footprint") for rank in sorted(events))
    start_event = _event(events.get(0, ()), "start")
    return RunRecord(
        run_id=run_id,
        config=config,
        status=ending.status,
        reason=ending.reason,
        losses=losses_of(events),
        step_tokens=tuple(token_counts[0] for token_counts in _of_steps(events, "tokens", int, minimum=1)),
        step_s=tuple(max(times_s) for times_s in _of_steps(events, "step_s", float, minimum=0.0)),
        **(_of_script(_latest(events.get(0, ()))) if config.script else {}),
        weights_sha256=_text(_event(events.get(0, ()), "weights").get("sha256")) or None,
        footprints=tuple(footprint for footprint in footprints if footprint is not None),
        spans=tuple(span for rank in sorted(events) for span in _parts(Span, _latest(events[rank]), "spans", "spans")),
        memory_timeline=tuple(_parts(MemorySample, _latest(events.get(0, ())), "memory_timeline", "samples")),
        expert_loads=loads_of(events),
        script_prediction=_predicted(events),
        environment=_texts(start_event.get("environment"))
        | _texts(_event(events.get(0, ()), "device"), only=DEVICE_TEXTS),
        started_utc=_text(start_event.get("time_utc")),
        ended_utc=_utc(ended_s),
        elapsed_s=None if elapsed_s is None else max(0.0, elapsed_s),
    )


def _predicted(events: Mapping[int, Sequence[Event]]) -> ScriptPrediction | None:
    """Join the predictions of a script's ranks, where several made one."""
    candidates = [_last(ScriptPrediction, events[rank], *2 * ("prediction",)) for rank in sorted(events)]
    predictions = [prediction for prediction in candidates if prediction is not None]
    other_footprints = tuple(prediction.footprint for prediction in predictions[1:] if prediction.footprint is not None)
    return predictions[0].model_copy(update={"other_ranks": other_footprints}) if predictions else None


def _latest(events: Sequence[Event]) -> Sequence[Event]:
    """Return the events of the last attempt: each attempt's timeline counts from its own first step."""
    starts = [index for index, event in enumerate(events) if event["event"] == "start"]
    return events[starts[-1] :] if starts else events


def _event(events: Sequence[Event], name: str) -> Event:
    """Return the last event of that name, or an empty one."""
    return next((event for event in reversed(events) if event["event"] == name), {})


def _text(value: object) -> str:
    return visible(value) if isinstance(value, str) else ""


def _texts(value: object, only: Sequence[str] | None = None) -> dict[str, str]:
    """Convert a mapping to texts; of some keys only, where they are given."""
    if not isinstance(value, Mapping):
        return {}
    return {visible(str(key)): visible(str(item)) for key, item in value.items() if only is None or key in only}


def _legal(contract: type[Part], data: object) -> Part | None:
    try:
        return contract.from_dict(data)  # type: ignore[arg-type]
    except LabError:
        return None


def _last(contract: type[Part], events: Sequence[Event], name: str, key: str) -> Part | None:
    """Return the content of the last event of that name that is legal."""
    parts = (_legal(contract, event.get(key)) for event in reversed(events) if event["event"] == name)
    return next((part for part in parts if part is not None), None)


def _parts(contract: type[Part], events: Sequence[Event], name: str, key: str) -> list[Part]:
    """Return all legal parts that the events of that name list."""
    lists = (event.get(key) for event in events if event["event"] == name)
    parts = (_legal(contract, data) for entries in lists if isinstance(entries, list) for data in entries)
    return [part for part in parts if part is not None]


QUIET_S = 15.0
"""Seconds without a change in the folder after which a job that has ended writes no more, on a slow file system too."""
SUBMITTING_S = 120.0
"""Seconds after which a submission is over, whatever came of it: sbatch is given up after 60."""
SLURM_LOG = "logs/slurm.log"
_LOG_BYTES = 8192


def job_state(
    folder: Path, job: Job, owner: Owner | None, events: Mapping[int, list[dict[str, Any]]], world_size: int
) -> Literal["queued", "running"] | JobEnd:
    """Determine the state of a job's run without record: queued, running, or how the scheduler says it ended.

    Args:
        owner: who submits it; as long as that process lives, a job just sent that has no number is about to get one.
        events: of every rank that has written any.
    """
    # Of a job that the scheduler does not tell about: a rank that wrote anything has run.
    believed: Literal["queued", "running"] = "running" if any(events.values()) else "queued"
    if not job.job_id and owner is not None and owner.is_alive(folder) and _just_sent(job):
        return "queued"
    view = view_of(job)
    if view.standing == "running":
        return "running"
    ends = [end_of(rank_events) for rank_events in events.values()]
    completed = len(ends) == world_size and all(end is not None and end[0] == "completed" for end in ends)
    if view.standing != "ended" and not completed:
        return "queued" if view.standing == "pending" else believed
    # Files of other nodes may arrive late: until the folder is quiet the end is not settled.
    if quiet_s(folder) < QUIET_S and not _never_ran(view, events):
        return believed
    return JobEnd(
        number=job.number or view.number,
        state=view.state if view.standing == "ended" else "",
        reason=view.reason if view.standing == "ended" else "",
        exit_code=view.exit_code,
        log=read_tail(folder / SLURM_LOG, _LOG_BYTES),
        cancel_asked=(folder / "cancel").exists(),
    )


def _just_sent(job: Job) -> bool:
    """Return whether the submission may still be under way; its process may live on, though it was interrupted."""
    try:
        sent_s = datetime.fromisoformat(job.submitted_utc).timestamp()
    except ValueError:
        return True
    return abs(time.time() - sent_s) < SUBMITTING_S


def quiet_s(folder: Path) -> float:
    """Return the seconds since a rank, the launcher or the scheduler last wrote into the folder of a run."""
    # Folders too: a new file changes the time of its folder.
    written = [folder / "events", folder / "logs", *(folder / "events").glob("*.jsonl"), *(folder / "logs").glob("*")]
    times = []
    for path in written:
        try:
            times.append(path.lstat().st_mtime)
        except OSError:
            continue
    return max(0.0, time.time() - max(times, default=0.0))


def _never_ran(view: JobView, events: Mapping[int, list[dict[str, Any]]]) -> bool:
    """Return whether the job was cancelled while it waited: nobody will write anything."""
    # SLURM gives such a job its end as its start.
    return view.state == "CANCELLED" and view.start_utc in ("", view.end_utc) and not any(events.values())


State = Literal["queued", "running"] | Status
CONFIG, RECORD, EVENTS, LOGS, CANCEL = "config.json", "record.json", "events", "logs", "cancel"
QUARANTINE = "quarantine"
LAUNCHER_EVENTS = "launcher.jsonl"
UNHEARD_S = 120.0
"""Seconds after which a launcher on another machine that was asked to stop, and has not, is considered gone."""
_RANK_EVENTS = re.compile(r"rank-(\d{1,6})\.jsonl")
_STARTED_EVENTS = re.compile(r"child-(\d{1,6})\.jsonl")

Events = dict[int, list[dict[str, Any]]]


def read_config(folder: Path) -> RunConfig:
    """Read a run's configuration; its model's own file is not executed.

    Raises:
        LabError: if config.json is missing, damaged or illegal.
    """
    try:
        with executing_no_file():
            return RunConfig.from_json(read_regular(folder / CONFIG, MAX_FILE_BYTES))
    except OSError as error:
        raise phrase.refused("configuration not readable", folder=folder, config=CONFIG, error=error) from None
    except LabError as error:
        raise phrase.refused("configuration damaged", config=CONFIG, folder=folder, error=error) from None


def read_all_events(folder: Path) -> Events:
    """Read the events of every rank that wrote any; files that cannot be read have none.

    Processes that a script or its launcher has started are ranks too, once they train.
    """
    events_by_rank, started = _read_events_of(folder, _RANK_EVENTS), _read_events_of(folder, _STARTED_EVENTS)
    for rank, events in started.items():
        # The process that has started them is no rank where it trains nothing: its first child takes its place.
        target_rank = rank if not finished_steps(events_by_rank.get(rank, ())) else max(events_by_rank) + 1
        # The rank's own start and end frame what its child has measured.
        events_by_rank[target_rank] = [
            *_starts(events_by_rank.get(target_rank, ())),
            *events,
            *_ends(events_by_rank.get(target_rank, ())),
        ]
    return dict(sorted(events_by_rank.items()))


def _read_events_of(folder: Path, pattern: re.Pattern[str]) -> Events:
    """Read the event files whose names match, by the number in the name."""
    events_by_number: Events = {}
    for path in sorted((folder / EVENTS).glob("*.jsonl")):
        if name := pattern.fullmatch(path.name):
            with contextlib.suppress(OSError):
                events_by_number[int(name[1])] = read_events(path)
    return dict(sorted(events_by_number.items()))


def _starts(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] != "end"]


def _ends(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "end"]


def evidence_of(
    events: Mapping[int, list[dict[str, Any]]], folder: Path, config: RunConfig, **launcher_facts: Any
) -> EndEvidence:
    """Collect the evidence of a run's end from its folder and from what the launcher knows."""
    world_size = config.layout.world_size
    ends = {rank: end for rank, rank_events in events.items() if rank < world_size and (end := end_of(rank_events))}
    return EndEvidence(
        world_size=world_size,
        ends=ends,
        steps={rank: finished_steps(rank_events) for rank, rank_events in events.items()},
        log_tails={rank: read_tail(folder / LOGS / f"rank-{rank}.log", 8192) for rank in range(world_size)},
        disk_problem=disk_problem(folder),
        script=config.script.name if config.script else "",
        # -1 sorts before every rank: a process that failed before it trained is the cause.
        children=_children_ends({-1: _untrained_children(folder), **events}),
        untrained=_untrained(events),
        **launcher_facts,
    )


def _untrained_children(folder: Path) -> list[dict[str, Any]]:
    """Read the ends of processes that trained nothing, up to the first that failed, which is the cause."""
    ends: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        ends = read_events(folder / EVENTS / CHILDREN_EVENTS)
    failed = [event for event in ends if event.get("status") in ("failed", "oom")]
    return failed[:1]


def _children_ends(events: Mapping[int, Sequence[Event]]) -> dict[int, tuple[Status, str]]:
    """Read how the processes that a script has started say that they ended, by their rank."""
    ends: dict[int, tuple[Status, str]] = {}
    for rank, rank_events in events.items():
        for event in rank_events:
            for status in STATUSES:
                if event["event"] == "child_end" and event.get("status") == status:
                    ends[rank] = status, visible(str(event.get("reason") or ""))
    return ends


def _untrained(events: Mapping[int, Sequence[Event]]) -> str:
    """Read why nothing was measured of a script; empty where some process of it has trained."""
    if any(finished_steps(rank_events) for rank_events in events.values()):
        return ""
    reasons = [
        _text(event.get("reason"))
        for rank_events in events.values()
        for event in rank_events
        if event["event"] == UNTRAINED
    ]
    return reasons[0] if reasons else ""


_TRIED_BYTES = 64 * 1024
"""About the size of a record: a folder that does not take it is full."""


def disk_problem(folder: Path) -> str:
    """Return why a run's folder takes no more data, of a full disk or quota; empty where it does or is not known."""
    try:
        # Written through to the disk: a network file system reports a full quota no sooner.
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(_TRIED_BYTES))
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return os.strerror(error.errno)
    return ""


def record_end(folder: Path, config: RunConfig, events: Events, ending: Ending, elapsed_s: float | None) -> None:
    """Write the end of a run into its events, which outlive a damaged record, and its record.

    Args:
        elapsed_s: of all attempts; None where that is not known.

    Raises:
        OSError: if the record cannot be written.
    """
    end_fields = {"status": ending.status, "reason": ending.reason, "elapsed_s": elapsed_s}
    append_event(folder / EVENTS / LAUNCHER_EVENTS, "end", **end_fields)
    write_record(folder / RECORD, assemble(folder.name, config, events, ending, elapsed_s, time.time()))


def read_state(folder: Path) -> tuple[State, RunRecord | None]:
    """Determine the state of a run, and its record once it has ended.

    Raises:
        LabError: if neither its record nor its configuration can be read, or a newer dlojz wrote its record.
    """
    path = folder / RECORD
    # Before the record is looked for: a launcher that ends in between has written its record by then.
    standing = None if os.path.lexists(path) else _standing(folder)
    damage = ""
    if os.path.lexists(path):
        try:
            record = _own_record(path, folder.name)
            return record.status, record
        except DamagedRecordError as error:  # a record of a newer dlojz is not damaged, and raises another error
            damage = error.why
            _set_aside(path)
    else:
        standing = standing or _standing(folder)
        if standing == "queued" or standing == "running":  # noqa: PLR1714 - mypy narrows these
            return standing, None
    record = rebuild(folder, damage, standing if isinstance(standing, JobEnd) else None)
    with contextlib.suppress(OSError):  # a folder that is read-only or full can still be read
        write_record(path, record)
    return record.status, record


def _standing(folder: Path) -> Literal["queued", "running", "gone"] | JobEnd:
    """Determine the state of a run without a record, by its job, else by the process that drives it."""
    owner, job = read_owner(folder), read_job(folder)
    if job is not None:
        return job_state(folder, job, owner, read_all_events(folder), read_config(folder).layout.world_size)
    if owner is None or not owner.is_alive(folder) or _unheard(folder, owner):
        return "gone"
    # A rank that has written anything is running; until then the run only starts.
    has_events = any(file.stat().st_size for file in (folder / EVENTS).glob("rank-*.jsonl"))
    return "running" if has_events else "queued"


def _unheard(folder: Path, owner: Owner) -> bool:
    """Return whether a launcher on another machine was asked to stop and has written nothing for long.

    One that lives ends within seconds of the request. Without this, a run whose machine is gone for good would be
    running for ever.
    """
    if owner.host == socket.gethostname():
        return False
    try:
        asked_s = time.time() - (folder / CANCEL).lstat().st_mtime
    except OSError:
        return False
    return min(asked_s, quiet_s(folder)) > UNHEARD_S


def rebuild(folder: Path, damage: str = "", job: JobEnd | None = None) -> RunRecord:
    """Rebuild the record of a run from its events.

    Args:
        damage: what was wrong with its record, if it had one.
        job: end of its job by the scheduler, if it had one.

    Raises:
        LabError: if its configuration cannot be read.
    """
    config = read_config(folder)
    events = read_all_events(folder)
    launcher_events: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        launcher_events = read_events(folder / EVENTS / LAUNCHER_EVENTS)
    recorded_end = end_of(launcher_events) or (_logged_end(folder) if job is None else None)
    # It was asked to stop and is gone: cancelled. Of a job, the scheduler tells.
    stop_cause: Literal["cancelled"] | None = "cancelled" if job is None and (folder / CANCEL).exists() else None
    ending = (
        Ending(*recorded_end)
        if recorded_end
        else classify(evidence_of(events, folder, config, launcher="vanished", job=job, stopped_by=stop_cause))
    )
    if damage:
        note = phrase("record rebuilt", damage=damage)
        ending = Ending(ending.status, f"{ending.reason.rstrip('.')}; {note}." if ending.reason else f"{note}.")
    elapsed_s, ended_s = _told_length(events, launcher_events if end_of(launcher_events) else ())
    return assemble(folder.name, config, events, ending, elapsed_s, ended_s)


_LOGGED_END = re.compile(rf"dlojz\.launcher ({'|'.join(STATUSES)}) ?(.*)")
_NOT_RECORDED = re.compile(r"dlojz\.launcher the record cannot be written: (.*)")


def _logged_end(folder: Path) -> tuple[Status, str] | None:
    """Read status and sentence of the end from the log of a launcher that could not write its record."""
    lines = read_tail(folder / LOGS / "launcher.log", _LOG_BYTES).splitlines()
    ends = [match for line in lines if (match := _LOGGED_END.search(line))]
    problems = [match for line in lines if (match := _NOT_RECORDED.search(line))]
    # The log counts only where it says that no record could be written.
    if not ends or not problems:
        return None
    status = next(candidate for candidate in STATUSES if candidate == ends[-1][1])
    reason, problem = ends[-1][2].rstrip("."), problems[-1][1]
    return status, "; ".join(filter(None, (reason, f"its record could not be written: {problem}.")))


def _own_record(path: Path, run_id: str) -> RunRecord:
    if path.is_symlink() or not path.is_file():
        if path.is_symlink():
            raise DamagedRecordError(path, say(en="it is a symbolic link", fr="c’est un lien symbolique"))
        raise DamagedRecordError(path, say(en="it is no regular file", fr="ce n’est pas un fichier ordinaire"))
    record = read_record(path)
    if record.run_id != run_id:
        owner = record.run_id
        raise DamagedRecordError(path, say(en=f"it belongs to the run {owner}", fr=f"il est de l’exécution {owner}"))
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


_LONGEST_S = 366 * 24 * 3600.0
"""No attempt lasts a year: a time that says so is damaged."""


def _moment_s(event: Event) -> float | None:
    """Return when an event was written, as Unix time; None where it does not say."""
    time_s = event.get("time_s")
    if isinstance(time_s, int | float) and not isinstance(time_s, bool) and 0 < time_s <= MOST:
        return float(time_s)
    try:
        return datetime.fromisoformat(event["time_utc"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _utc(moment_s: float | None) -> str:
    """Write a Unix time as the events do; nothing where it is not known or no date."""
    with contextlib.suppress(ValueError, OverflowError, OSError, TypeError):
        return datetime.fromtimestamp(moment_s, UTC).isoformat(timespec="seconds")  # type: ignore[arg-type]
    return ""


def _attempts(events: Sequence[Event]) -> list[tuple[float, float]]:
    """List when each attempt of one rank began and when it last wrote; those of which that is not known are left out.

    An attempt goes from a `start` to the next. Neither the submission nor a file's time counts: a job waits in the
    queue, and a copied file is as old as its copy.
    """
    starts = [index for index, event in enumerate(events) if event["event"] == "start"]
    attempts = []
    for start_index, following in pairwise([*starts, len(events)]):
        begun_s, *later = [_moment_s(event) for event in events[start_index:following]]
        # With nothing but a start, it ended there; with events that tell no time, the end is not known.
        ended_s = next((moment_s for moment_s in reversed(later) if moment_s is not None), None if later else begun_s)
        if begun_s is not None and ended_s is not None and 0 <= ended_s - begun_s < _LONGEST_S:
            attempts.append((begun_s, ended_s))
    return attempts


def attempts_of(events: Mapping[int, Sequence[Event]]) -> list[tuple[float, float]]:
    """List begin and end of a run's attempts (Unix times), in order: its ranks', joined where they overlap."""
    merged: list[tuple[float, float]] = []
    for begun_s, ended_s in sorted(attempt for of_rank in events.values() for attempt in _attempts(of_rank)):
        # Ranks of one attempt overlap; attempts follow each other.
        if merged and begun_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], ended_s))
        else:
            merged.append((begun_s, ended_s))
    return merged


def lasted_s(attempts: Sequence[tuple[float, float]]) -> float | None:
    """Sum the seconds of the attempts, without the waiting between them; None where there is none."""
    return sum(ended_s - begun_s for begun_s, ended_s in attempts) if attempts else None


def _told_length(events: Events, launcher_events: Sequence[Event]) -> tuple[float | None, float | None]:
    """Return the seconds that a run lasted and the Unix time of its end, each None where no event says it.

    Args:
        launcher_events: events of the launcher, where they hold its end; it has measured the seconds.
    """
    attempts, end = attempts_of(events), _event(launcher_events, "end")
    measured_s, moment_s = end.get("elapsed_s"), _moment_s(end)
    # The launcher has measured it by a monotonic clock, which nobody sets.
    if type(measured_s) is float and 0 <= measured_s <= MOST:
        return measured_s, moment_s
    if not attempts:
        return None, moment_s
    # The launcher wrote last, after the ranks.
    if moment_s is not None and 0 <= moment_s - attempts[-1][1] < _LONGEST_S:
        attempts[-1] = (attempts[-1][0], moment_s)
    return lasted_s(attempts), attempts[-1][1]


def is_final(state: str) -> bool:
    """Return whether this state is an end."""
    return state in STATUSES


class RunFolder:
    """Run read from its folder: configuration, state, losses, record.

    Raises:
        LabError: if the folder holds neither a readable configuration nor a readable record.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._record: RunRecord | None = None
        try:
            self._config = read_config(folder)
        except LabError:
            self._record = read_state(folder)[1]
            if self._record is None:
                raise
            self._config = self._record.config

    @property
    def run_id(self) -> str:
        """Name of the run, which is the name of its folder."""
        return self.folder.name

    @property
    def config(self) -> RunConfig:
        """Configuration of the run; of a script that has ended, with the processes that it started itself."""
        return self._record.config if self._record and self._config.script else self._config

    @property
    def title(self) -> str:
        """Configuration in words, as tables name it; a replayed run says that it is one."""
        return self.record.title if self.record else self._config.title

    @property
    def state(self) -> State:
        """`queued`, `running`, or how it ended: completed, oom, timeout, cancelled, failed, diverged."""
        if self._record is not None:
            return self._record.status
        state, self._record = read_state(self.folder)
        return state

    @property
    def record(self) -> RunRecord | None:
        """Record of the measurements; None until the run has ended."""
        return self._record if is_final(self.state) else None

    @property
    def losses(self) -> tuple[float, ...]:
        """Loss of every finished step so far."""
        return self.record.losses if self.record else losses_of(read_all_events(self.folder))

    @property
    def num_steps(self) -> int:
        """Steps finished so far: more than losses where a script's step has none, or one that is no number."""
        if self.record:
            return max(len(self.record.losses), len(self.record.step_s))
        return len(_of_steps(read_all_events(self.folder), "step_s", float, minimum=0.0))

    @property
    def expert_loads(self) -> tuple[ExpertLoad, ...]:
        """Loads of each mixture of experts in every finished step so far; empty without experts."""
        return self.record.expert_loads if self.record else loads_of(read_all_events(self.folder))
