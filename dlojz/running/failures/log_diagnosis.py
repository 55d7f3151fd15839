"""Diagnose anybody's logs: the first cause by rank and time, what followed from it, and what to do.

An error goes before a signal without a reason, that before a time-out or a stop from outside, that before a lost peer,
and that before what a launcher reports; among equals the first counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dlojz.base.language import colon, language, say
from dlojz.processes.hang_diagnosis import listed
from dlojz.running.failures.diagnosis import Finding, Symptoms, hung_calls, hung_collective, registered_finding
from dlojz.running.failures.log_reader import LogEvent, LogEvidence, Watch, read_logs
from dlojz.running.failures.signatures import memory_account
from dlojz.running.folder import visible

_ORDER = {"cause": 0.0, "killed": 1.0, "wait": 2.0, "lost": 3.0, "report": 4.0}
_WEAK = 3.5
# What comes after one of these in the same file follows from it, whatever it is; after the others, only an exception
# that no entry of the registry knows.
_STOPS = ("time-limit", "node", "interrupted")
_LATER_FOLLOW = (*_STOPS, "collective-timeout", "nan")
# Of srun: the tasks whose memory ran out, and of slurmstepd: the step, `4711.0` or `4711.batch`.
_TASKS = re.compile(r"\btasks? (\d[\d,-]*): Out Of Memory")
_STEP = re.compile(r"\bStepId=(\d+(?:[.+]\w+)*)")
_OF_TRAINING = re.compile(
    r"(?i)\b(?:steps?|iter\w*|epochs?|loss|ranks?|train\w*|torch\w*|nccl|cuda|gpus?|deepspeed|époque)\b|it/s"
)
_SHOWN_CHARACTERS, _SHOWN_EVENTS, _SHOWN_TAILS = 200, 8, 8


class Following(NamedTuple):
    """Consequence of a cause, or what is mentioned where there is none: the ranks that show it, and where first."""

    ranks: tuple[int, ...]
    event: LogEvent


@dataclass(frozen=True)
class LogDiagnosis:
    """Diagnosis of the logs of one job: its cause, None where nothing says that it failed, and what followed."""

    job: str
    finding: Finding | None
    event: LogEvent | None
    following: tuple[Following, ...]
    evidence: LogEvidence

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        finding = self.finding
        return {
            "job": self.job,
            "files": self.evidence.files,
            "cause": finding._asdict() | {"ranks": list(finding.ranks)} | {"name": self.name} if finding else None,
            "seen": _event_dict(self.event) if self.event else None,
            "followed": [{"ranks": list(item.ranks), **_event_dict(item.event)} for item in self.following],
            "last_times": {str(rank): time for rank, time in self.evidence.last_times.items() if rank is not None},
            "notes": self.evidence.notes,
        }

    @property
    def shown_by(self) -> list[int]:
        """The ranks whose logs show the cause alike."""
        name = self.event.name if self.event else ""
        return sorted({event.rank for event in self.evidence.events if event.name == name and event.rank is not None})

    @property
    def name(self) -> str:
        """Name of the cause: of its signature, of its exception, or `collective`."""
        if self.finding is None:
            return ""
        return self.event.name if self.event and self.finding.kind != "collective" else self.finding.kind

    def lines(self) -> Iterator[str]:
        """Write it: the cause, what to do, where it is seen, and what followed."""
        yield from self.head()
        yield from self.evidence.notes
        if self.finding is None:
            yield from self._last_lines()
        if self.following:
            yield ""
            yield (
                say(en="What followed from it:", fr="Ce qui s’ensuivit :")
                if self.finding
                else say(en="What it mentions, and went on:", fr="Ce qu’il mentionne, avant de continuer :")
            )
        for item in self.following:
            yield f"  {_owners(item.ranks)}, {_place(item.event)}{colon()}{_short(item.event.text)}"

    def head(self) -> Iterator[str]:
        """Write the cause, what to do, and where it is seen."""
        title = f"{self.job}{colon()}" if self.job else ""
        if self.finding is None and self.evidence.tails:
            yield title + say(en="Nothing in it says that it failed.", fr="Rien n’y signale un échec.")
            lines = [line for tail in self.evidence.tails.values() for line in tail]
            if not self.evidence.ranks and not any(map(_OF_TRAINING.search, lines)):
                yield say(
                    en="Its last lines are no training’s, and only failures of trainings are known here.",
                    fr="Ses dernières lignes ne sont pas d’un entraînement, et seuls les échecs d’entraînements sont "
                    "connus ici.",
                )
        elif self.finding is None:
            yield title + say(en="It is empty.", fr="Il est vide.")
        if self.finding is None:
            return
        yield f"✗ {title}{self.finding.what}"
        if self.finding.advice:
            yield f"  → {self.finding.advice}"
        if self.event:
            yield f"  {_owners(self.shown_by)}, {_place(self.event)}{colon()}{_short(self.event.text)}"
            yield from [f"  ↳ {self.event.place}"] if self.event.place else []

    def _last_lines(self) -> Iterator[str]:
        for rank, tail in list(self.evidence.tails.items())[:_SHOWN_TAILS]:
            label = say(en="last line", fr="dernière ligne")
            words = (_owners(() if rank is None else (rank,)), self.evidence.last_times.get(rank, ""), label)
            yield f"  {', '.join(filter(None, words))}{colon()}{_short(tail[-1])}"


def _event_dict(event: LogEvent) -> dict[str, Any]:
    fields = {name: getattr(event, name) for name in ("rank", "name", "file", "time", "place", "count")}
    return fields | {"text": _short(event.text), "line": event.order[1]}


def _owners(ranks: Sequence[int]) -> str:
    if not ranks:
        return say(en="job or launcher", fr="travail ou lanceur")
    return listed(ranks, french=language() == "fr")


def _place(event: LogEvent) -> str:
    line = say(en=f"{event.file} line {event.order[1]}", fr=f"{event.file} ligne {event.order[1]}")
    return visible(f"{line}, {event.time}" if event.time else line)


def _short(text: str) -> str:
    line = visible(" ".join(text.split()))
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…"


def diagnose_logs(word: str, watch: Watch | None = None) -> list[LogDiagnosis]:
    """Diagnose a file, a folder or `-`, one job after the other; `watch` as for `read_logs`.

    Raises:
        LabError: if there is nothing to read.
    """
    return [diagnose_log(evidence, job) for job, evidence in read_logs(word, watch).items()]


def diagnose_log(evidence: LogEvidence, job: str = "") -> LogDiagnosis:
    """Choose the cause among the events of one job, and say what followed from it."""
    event = _first_cause(evidence)
    size = max(evidence.world_size, max(evidence.ranks, default=-1) + 1)
    symptoms = Symptoms("failed", "", size, 0.0, 0, (), evidence.texts, evidence.calls)
    if event is None or (all(entry.weak for entry in evidence.events) and not _swallowed(event, evidence)):
        for rank, line_of_user in evidence.cut_tracebacks.items():
            whose, line = _owners(() if rank is None else (rank,)), f" ({line_of_user})" if line_of_user else ""
            evidence.notes.append(
                say(
                    en=f"It ends in a traceback{line}, {whose}, without its exception: the log was cut there.",
                    fr=f"Il finit dans une trace d’appels{line}, {whose}, sans son exception : le journal y est coupé.",
                )
            )
        return LogDiagnosis(job, hung_calls(evidence.calls), None, _by_name(evidence.events), evidence)
    finding = _finding(event, symptoms, evidence)
    if _went_on(event, evidence):
        evidence.notes.append(
            say(
                en="The log goes on after it, and nothing else says that the program ended: it may have been caught.",
                fr="Le journal continue ensuite, et rien d’autre ne dit que le programme s’est arrêté : l’erreur a pu "
                "être rattrapée.",
            )
        )
    other_events = [entry for entry in evidence.events if entry.name != event.name and not entry.weak]
    return LogDiagnosis(job, finding, event, _by_name(other_events), evidence)


def _by_name(events: Iterable[LogEvent]) -> tuple[Following, ...]:
    """Put events of one name together, with the ranks that show them."""
    groups: dict[str, list[LogEvent]] = {}
    for event in sorted(events, key=lambda event: event.order):
        groups.setdefault(event.name, []).append(event)
    return tuple(
        Following(tuple(sorted({event.rank for event in group if event.rank is not None})), group[0])
        for group in groups.values()
    )


def _first_cause(evidence: LogEvidence) -> LogEvent | None:
    events = evidence.events
    # Of each file, where the first stop or time-out stands.
    first_stop: dict[str, tuple[int, int]] = {}
    first_wait: dict[str, tuple[int, int]] = {}
    for event in events:
        if event.name in _STOPS:
            first_stop[event.file] = min(event.order, first_stop.get(event.file, event.order))
        if event.name in _LATER_FOLLOW:
            first_wait[event.file] = min(event.order, first_wait.get(event.file, event.order))
    # Compared from the month on: glog writes no year.
    has_times = all(event.time for event in events)

    def key(event: LogEvent) -> tuple[float, str, tuple[int, int]]:
        role = event.signature.role if event.signature else "cause"
        order = _ORDER["killed"] if _swallowed(event, evidence) else _WEAK if event.weak else _ORDER[role]
        stop = (first_stop if event.signature else first_wait).get(event.file)
        if order < _ORDER["wait"] and stop is not None and stop < event.order and event.name != "host-memory":
            order = _WEAK
        return order, event.time[-14:] if has_times else "", event.order

    cause = min(events, key=key, default=None)
    if cause is not None and cause.name == "rendezvous":
        # Why it met nobody: a warning before it says that a name is not known.
        return next((event for event in events if event.name == "unreachable" and event.rank == cause.rank), cause)
    return cause


def _went_on(event: LogEvent, evidence: LogEvidence) -> bool:
    """Return whether a rank printed ordinary lines after an error, and nothing tells of an end."""
    ends = any(later.signature and later.signature.role != "cause" for later in evidence.events)
    return not ends and evidence.ordinary_lines[event.rank] > event.ordinary_before


def _finding(event: LogEvent, symptoms: Symptoms, evidence: LogEvidence) -> Finding:
    """Say the cause of an event, by the rules of a run where they know more than its signature."""
    signature = event.signature
    first_rank, exit_code = evidence.failed_first or (None, "")
    rank = event.rank
    if rank is None and not (signature and signature.role == "wait"):
        rank = first_rank if first_rank is not None else _only_rank(event, evidence)
    ranks: tuple[int, ...] = () if rank is None else (rank,)
    if event.name == "collective-timeout":
        finding = hung_collective(symptoms)
        if finding:
            return finding
    if signature is None:
        return registered_finding("exception", ranks, error=_short(event.text))
    silent_exit = first_rank is not None and all(
        later.rank != first_rank or _reports(later) for later in evidence.events
    )
    if signature.role in ("lost", "report") and silent_exit:
        return registered_finding("exited-first", (first_rank or 0,), code=exit_code)
    if signature.name == "peer-lost":
        # The ranks that the others lost are those that printed no error themselves.
        losers = {later.rank for later in evidence.events if not _reports(later)} - {None}
        silent = tuple(rank for rank in range(symptoms.world_size) if rank not in losers)
        if losers and 0 < len(silent) <= _SHOWN_EVENTS:
            return registered_finding("ended-earlier", silent, ranks=_owners(silent))
    sentence, advice = signature.texts(rank, event.match)
    if signature.name == "host-memory":
        ranks, words = _tasks_without_memory(evidence, ranks)
        sentence = f"{sentence[:-1]} ({words})."
    if event.name == "cuda-memory" and (account := memory_account(event.text, event.phase)):
        sentence = f"{sentence[:-1]} ({account})."
    return Finding(signature.kind, sentence, advice, ranks)


def _swallowed(event: LogEvent, evidence: LogEvidence) -> bool:
    """Return whether a rank caught a full memory and made no step since, and others waited until time was up."""
    waits = any(another.name == "collective-timeout" and another.rank != event.rank for another in evidence.events)
    return event.name == "cuda-memory" and event.weak and waits and evidence.steps[event.rank] == event.steps_before


def _only_rank(event: LogEvent, evidence: LogEvidence) -> int | None:
    """Find the rank of an error printed without one: the only rank of the same error, or the only one that exited."""
    ranked_events = [another for another in evidence.events if another is not event and another.rank is not None]
    ranks = {another.rank for another in ranked_events if another.name == event.name}
    if not ranks and event.raised and event.count == 1:
        ranks = {another.rank for another in ranked_events if "failed (exitcode: " in another.text}
    return ranks.pop() if len(ranks) == 1 else None


def _tasks_without_memory(evidence: LogEvidence, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """Find the ranks whose memory SLURM says ran out, and words for them and the step; tasks of torchrun are nodes."""
    events = [event for event in evidence.events if event.name == "host-memory"]
    spans = [match[1] for event in events if event.rank is not None for match in _TASKS.finditer(event.text)]
    tasks: set[int] = set()
    for span in ",".join(spans).split(",") if spans else ():
        first, _, last = span.partition("-")
        tasks |= set(range(int(first), min(int(last or first), int(first) + 2**16) + 1))
    ranks = tuple(sorted(tasks)) or ranks
    words = _owners(ranks) if ranks else say(en="which rank is not said", fr="le rang n’est pas dit")
    step = next((match[1] for event in events if (match := _STEP.search(event.text))), "")
    return ranks, words + (say(en=f"; step {step}", fr=f" ; étape {step}") if step else "")


def _reports(event: LogEvent) -> bool:
    return event.signature is not None and event.signature.role == "report"


def log_answer(word: str, watch: Watch | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """Diagnose logs for a command: its JSON data, and its lines; `watch` as for `read_logs`.

    Raises:
        LabError: if there is nothing to read.
    """
    diagnoses = diagnose_logs(word, watch)
    # Of several jobs only the cause of each, in a line or two.
    lines = [
        line for diagnosis in diagnoses for line in (diagnosis.lines() if len(diagnoses) == 1 else diagnosis.head())
    ]
    return [diagnosis.to_dict() for diagnosis in diagnoses], lines
