"""Diagnose a run that failed or hung: symptoms from its logs, events and record, and the rules that name the cause.

A finding names a cause with its evidence (rank, collective, module, step), never a consequence. Where no rule applies,
the first error of each rank is shown, and no guess.

A collective hangs because of the rank that did something else, not of those that waited for it. NCCL's watchdog numbers
the collectives of each rank (`SeqNum`), and so does torch's flight recorder, whose last entries each rank writes when
it fails, or no longer ends a step (`processes/hang_diagnosis.py`): the ranks of a group number their collectives
alike. So the rank with a smaller number, another operation or another size, or without a time-out at all, is the one
the others waited for.

Sources of the texts looked for: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp ("Watchdog caught collective operation
timeout"), ProcessGroupWrapper.cpp ("Detected mismatch between collectives on ranks"), ProcessGroupGloo.cpp ("failed to
pass monitoredBarrier"), gloo/transport/tcp ("Timed out waiting"), and the sentences of `dlojz.running.ending`.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, format_seconds, say
from dlojz.base.table import Table, facts, safe
from dlojz.base.table import visible as table_visible
from dlojz.display.style import BLUE, VERMILION
from dlojz.display.tables import status_label
from dlojz.processes.hang_diagnosis import call_words, deadlock, listed, mismatch, missing_ranks, waits_in, with_article
from dlojz.running.ending import PORT, FirstError, first_error, read_log
from dlojz.running.failures.out_of_memory import memory_lines
from dlojz.running.failures.signatures import Signature, recognise, signatures
from dlojz.running.folder import visible
from dlojz.running.run_view import PANEL
from dlojz.running.state import LOGS, RunFolder, quiet_s, read_all_events

if TYPE_CHECKING:
    from dlojz.running.failures.out_of_memory import PostMortem

phrase = Sentences(Path(__file__).parent / "data" / "diagnosis.md")

ALL_RANKS = "0"
"""Name that torch gives the group of all ranks."""
SAME_SHAPE = frozenset({"all_reduce", "reduce", "broadcast", "reduce_scatter", "all_to_all"})
"""Operations to which every rank brings a tensor of the same shape."""
_MOST_CHARACTERS = 80

Calls = Mapping[str, Mapping[int, tuple[str, ...]]]
"""Group → number of the collective → operation, type and shape."""


class Missing(NamedTuple):
    """Ranks for which others of their group waited, and in which collective."""

    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    call: str


class CallMismatch(NamedTuple):
    """Ranks that called different things as the same collective of a group, and the sentence that says so."""

    ranks: tuple[int, ...]
    sentence: str


def calls_of(events: Sequence[Mapping[str, Any]]) -> Calls:
    """Read the last collectives that a rank recorded in its last attempt; what is damaged is left out."""
    for event in reversed(events):
        # What comes before is of an earlier attempt, whose numbers began anew.
        if event["event"] == "start":
            break
        groups = event.get("groups")
        if event["event"] == "collectives" and isinstance(groups, Mapping):
            return {visible(str(name))[:40]: _legal(calls) for name, calls in groups.items()}
    return {}


def _legal(calls: object) -> dict[int, tuple[str, ...]]:
    legal_calls: dict[int, tuple[str, ...]] = {}
    for call in calls if isinstance(calls, list) else ():
        # As `hang_diagnosis.last_calls` writes it: [number, operation, type, shape].
        if isinstance(call, list) and len(call) == 4 and type(call[0]) is int:
            legal_calls[call[0]] = tuple(visible(str(word))[:_MOST_CHARACTERS] for word in call[1:])
    return legal_calls


def _described(number: int, call: tuple[str, ...]) -> dict[str, Any]:
    """Describe a recorded call as the guard of a notebook's ranks does: `all_reduce #2 [4, 3] float32`."""
    operation, types, shapes = call or ("?", "", "")
    # `[4,3],[2]`: all that has to agree is how many elements there are.
    sizes = tuple(prod(map(int, re.findall(r"\d+", shape))) for shape in re.findall(r"\[[\d,]*\]", shapes))
    dtype = ", ".join(dict.fromkeys(_TYPES.get(name, name.lower()) for name in types.split(",") if name))
    return {
        "op": operation, "shown": number, "shape": shapes.replace(",", ", "), "dtype": dtype, "numel": sizes, "how": "",
    }  # fmt: skip


_TYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Byte": "uint8"}


def call_mismatch(calls: Mapping[int, Calls]) -> CallMismatch | None:
    """Find the first collective that ranks of a group called differently; None where none is known."""
    for group in sorted({group for rank_calls in calls.values() for group in rank_calls}):
        members = {rank: rank_calls[group] for rank, rank_calls in sorted(calls.items()) if group in rank_calls}
        for number in sorted({number for group_calls in members.values() for number in group_calls}):
            # Only of ranks that still have this number: each keeps but its last calls (`hang_diagnosis.KEPT`).
            came = {
                rank: _described(number, group_calls[number])
                for rank, group_calls in members.items()
                if number in group_calls
            }
            operations = {call["op"] for call in came.values()}
            # Ranks may bring different shapes to a gather or a scatter; to the others they may not.
            fault = mismatch(came) if len(operations) > 1 or operations <= SAME_SHAPE else None
            if fault:
                return CallMismatch(tuple(came), fault.message)
    return None


def missing_in(calls: Mapping[int, Calls]) -> list[Missing]:
    """Find, for each group, the ranks behind the others and the first collective that they did not call."""
    missing = []
    for group in sorted({group for rank_calls in calls.values() for group in rank_calls}):
        # In a smaller group, a rank that never came looks like one that is no member.
        last_numbers = {
            rank: max(rank_calls[group], default=0) for rank, rank_calls in sorted(calls.items()) if group in rank_calls
        }
        if group == ALL_RANKS:
            last_numbers = dict.fromkeys(calls, 0) | last_numbers
        # The numbers count from 1 without a gap: the first call that some rank missed follows the smallest last one.
        missed_number = min(last_numbers.values(), default=0) + 1
        waiting = tuple(rank for rank, number in last_numbers.items() if number >= missed_number)
        if waiting:
            call = next(
                (calls[rank][group][missed_number] for rank in waiting if missed_number in calls[rank][group]), ()
            )
            words = call_words(_described(missed_number, call))
            missing.append(Missing(tuple(rank for rank in last_numbers if rank not in waiting), waiting, words))
    return missing


def first_missing(missing: Sequence[Missing]) -> Missing | None:
    """Find the ranks that others waited for and that waited for nobody; None if there are none."""
    stuck = {rank for absence in missing for rank in absence.waiting}
    for absence in missing:
        free = tuple(rank for rank in absence.ranks if rank not in stuck)
        if free:
            return absence._replace(ranks=free)
    return None


# `world` is the global rank in the prefix of the line; without it the owner of the log counts.
NCCL = re.compile(
    r"(?:\[rank(?P<world>\d+)\]:)?.*Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)(?:, NumelIn=(?P<numel>\d+))?.*?Timeout\(ms\)=(?P<ms>\d+)"
)
BARRIER = re.compile(r"Ranks? (?P<ranks>\d+(?:, ?\d+)*) failed to pass monitoredBarrier in (?P<ms>\d+) ?ms")
MISMATCH = re.compile(
    r"Detected mismatch between collectives on ranks\. Rank (?P<one>\d+) is running collective: "
    r"CollectiveFingerPrint\((?P<first>.*?)\), but Rank (?P<other>\d+) is running (?:inconsistent )?collective: "
    r"CollectiveFingerPrint\((?P<second>.*?)\)\."
)
GLOO = re.compile(r"Timed out waiting (?P<ms>\d+)ms for (?P<what>recv|send) operation to complete")
_DIVERGED = re.compile(r"the loss became (?P<loss>\S+) at step (?P<step>\d+)")
# The sentences of `ending._signalled` and `ending._out_of_memory`.
_SIGNAL = re.compile(r"rank (?P<rank>\d+) was killed by (?:signal (?P<number>\d+) \((?P<name>\w+)\)|the system)")


class Finding(NamedTuple):
    """Cause of a failure: what happened, what to do about it, and on which ranks."""

    kind: str
    what: str
    advice: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Symptoms:
    """Evidence for the rules.

    Args:
        status, reason: how the run ended, and the sentence of its record.
        losses: of the finished steps.
        logs: printed text, by rank; None is the launcher and the scheduler's job.
        calls: by rank, the collectives that it recorded when it failed.
    """

    status: str
    reason: str
    world_size: int
    learning_rate: float
    steps: int
    losses: tuple[float, ...]
    logs: Mapping[int | None, str]
    calls: Mapping[int, Calls] = field(default_factory=dict)

    def matches(self, pattern: re.Pattern[str]) -> list[tuple[int | None, re.Match[str]]]:
        """Search each log, and the record's reason (as the job's), for the first match of a pattern."""
        matches = [(rank, match) for rank, text in self.logs.items() if (match := pattern.search(text))]
        reason_match = pattern.search(self.reason)
        return [*matches, (None, reason_match)] if reason_match else matches


def registered_finding(name: str, ranks: tuple[int, ...] = (), /, **words: str) -> Finding:
    """Make a finding of an entry of the registry; `words` fill the places of its sentences."""
    entry = signatures()[name]
    return Finding(entry.kind, *entry.texts(ranks[0] if ranks else None, **words), ranks)


def out_of_memory(symptoms: Symptoms) -> Finding | None:
    """Find that memory ran out."""
    return registered_finding("run-memory", after=_after(symptoms)) if symptoms.status == "oom" else None


def time_limit(symptoms: Symptoms) -> Finding | None:
    """Find that the time limit was reached."""
    return registered_finding("run-time-limit", after=_after(symptoms)) if symptoms.status == "timeout" else None


def diverged(symptoms: Symptoms) -> Finding | None:
    """Find that the loss became infinite or NaN."""
    if symptoms.status != "diverged":
        return None
    match = _DIVERGED.search(symptoms.reason)
    return registered_finding(
        "run-diverged",
        step=match["step"] if match else str(symptoms.steps),
        loss=f"{symptoms.losses[-1]:.4g}" if symptoms.losses else "—",
        rate=f"{symptoms.learning_rate:g}",
        tenth=f"{symptoms.learning_rate / 10:g}",
    )


def missing_module(symptoms: Symptoms) -> Finding | None:
    """Find that a module, a name of it, or a shared library is missing."""
    imports = [entry for entry in signatures().values() if entry.name.startswith("missing-") and entry.kind == "import"]
    matches = ((entry, *found) for entry in imports for found in symptoms.matches(re.compile(entry.pattern)))
    return next((_registered(entry, rank, match) for entry, rank, match in matches), None)


def _registered(entry: Signature, rank: int | None, match: re.Match[str]) -> Finding:
    return Finding(entry.kind, *entry.texts(rank, match), _ranks(rank))


def full_disk(symptoms: Symptoms) -> Finding | None:
    """Find that the file system of the run, or its owner's quota, was full."""
    words = "|".join(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))
    match = re.search(words, symptoms.reason)
    return registered_finding("run-disk", error=match[0]) if match else None


def killed(symptoms: Symptoms) -> Finding | None:
    """Find a rank that a signal ended."""
    match = _SIGNAL.search(symptoms.reason)
    if not match or symptoms.status == "oom":
        return None
    name = match["name"] or "SIGKILL"
    # `ending._signalled` rules memory out by the one, and blames the limit of processor time by the other.
    if "nothing for memory" in symptoms.reason or "ulimit" in symptoms.reason:
        entry = "run-killed-by-limit"
    else:
        entry = "run-killed" if name in ("SIGKILL", "SIGTERM") else "run-crashed"
    return registered_finding(entry, (int(match["rank"]),), signal=name, after=_after(symptoms))


def lost_node(symptoms: Symptoms) -> Finding | None:
    """Find that a node failed, or that the job was preempted."""
    match = re.search(signatures()["node"].pattern, symptoms.reason)
    return _registered(signatures()["node"], None, match) if match else None


def _after(symptoms: Symptoms) -> str:
    steps = symptoms.steps
    if not steps:
        return say(en="before the first step was finished", fr="avant la fin du premier pas")
    return say(en=f"after {steps} steps", fr=f"après {steps} pas")


def _ranks(rank: int | None) -> tuple[int, ...]:
    return () if rank is None else (rank,)


def hung_collective(symptoms: Symptoms) -> Finding | None:
    """Find a collective that not all ranks called."""
    if symptoms.status not in ("failed", "timeout", "cancelled"):
        return None
    # The most certain source first: torch's own comparison names both calls, gloo's message only who waited.
    findings = (rule(symptoms) for rule in (_mismatch, _barrier, _watchdog, _recorded, _gloo))
    return next((finding for finding in findings if finding), None)


def _mismatch(symptoms: Symptoms) -> Finding | None:
    """Find ranks that TORCH_DISTRIBUTED_DEBUG=DETAIL compared before the call."""
    for _, match in symptoms.matches(MISMATCH):
        call_a, call_b = (_fingerprint(match[name]) for name in ("first", "second"))
        return _different(int(match["one"]), call_a, int(match["other"]), call_b)
    return None


def _different(rank_a: int, call_a: str, rank_b: int, call_b: str) -> Finding:
    sentence = phrase("different collectives", rank_a=rank_a, call_a=call_a, rank_b=rank_b, call_b=call_b)
    return Finding("collective", sentence, phrase("where to look"), (rank_a, rank_b))


def _fingerprint(text: str) -> str:
    """Shorten a finger print to `OpType=ALLREDUCE, TensorShape=[10]`."""
    parts = visible(text).split(", ")
    fields = [part.strip() for part in parts if part.strip().startswith(("OpType", "TensorShape", "TensorDtypes"))]
    return ", ".join(fields)[:120] or visible(text)[:120]


def _barrier(symptoms: Symptoms) -> Finding | None:
    """Find the ranks that `monitored_barrier` misses."""
    for _, match in symptoms.matches(BARRIER):
        ranks = tuple(int(rank) for rank in match["ranks"].split(","))
        return _absent(ranks, "monitored_barrier", int(match["ms"]))
    return None


def _watchdog(symptoms: Symptoms) -> Finding | None:
    """Compare the lines of NCCL's watchdog, one per rank that waited."""
    waited: dict[int, tuple[int, str, str]] = {}
    limit_ms = 0
    for owner, text in symptoms.logs.items():
        for match in NCCL.finditer(text):
            rank = int(match["world"]) if match["world"] else owner
            limit_ms = int(match["ms"])
            if rank is not None:
                waited.setdefault(rank, (int(match["seq"]), match["op"], match["numel"] or ""))
    if not waited:
        return None
    waited_calls = list(waited.values())
    # The call in which most ranks waited; among equals the latest.
    usual = max(waited_calls, key=lambda call: (waited_calls.count(call), call[0]))
    # A rank whose watchdog printed nothing waited for nobody.
    silent = tuple(rank for rank in range(symptoms.world_size) if rank not in waited)
    odd = tuple(rank for rank, call in sorted(waited.items()) if call != usual)
    usual_text, *odd_texts = (
        f"{op} (SeqNum={seq}{f', {numel} elements' if numel else ''})"
        for seq, op, numel in (usual, *(waited[rank] for rank in odd))
    )
    if not silent and 0 < len(odd) * 2 == len(waited) and {waited[rank][0] for rank in odd} == {usual[0]}:
        # As many in the one as in the other: neither is the one that is missing.
        return _different(min(waited.keys() - {*odd}), usual_text, odd[0], odd_texts[0])
    if silent:
        return _absent(silent, usual_text, limit_ms, sorted(waited))
    if odd:
        return _absent(odd, usual_text, limit_ms, sorted(waited.keys() - {*odd}), odd_texts[0])
    waited_s = format_seconds(limit_ms / 1e3)
    sentence = phrase("same collective", waited_s=waited_s, call=usual_text)
    return Finding("collective", sentence, phrase("look at the network"), tuple(sorted(waited)))


def _recorded(symptoms: Symptoms) -> Finding | None:
    """Compare the ranks' flight recorders: which call differs, or which rank was behind when time was up."""
    waited = next((match for pattern in (GLOO, NCCL) for _, match in symptoms.matches(pattern)), None)
    # A rank that ended for another reason is behind the others, too, and nobody waited for it.
    missed = _missed(symptoms.calls, int(waited["ms"])) if waited else None
    return _called_differently(symptoms.calls) or missed


def hung_calls(calls: Mapping[int, Calls]) -> Finding | None:
    """Find for which ranks the others wait, by what the ranks of a run that stands still have called."""
    return _called_differently(calls) or _missed(calls)


def _called_differently(calls: Mapping[int, Calls]) -> Finding | None:
    different = call_mismatch(calls)
    return Finding("collective", different.sentence, phrase("where to look"), different.ranks) if different else None


def _missed(calls: Mapping[int, Calls], limit_ms: int | None = None) -> Finding | None:
    missing = missing_in(calls)
    cause = first_missing(missing)
    if cause:
        return _absent(cause.ranks, cause.call, limit_ms, cause.waiting)
    if not missing:
        return None
    # A cycle: each waits for another, in the collective of another group.
    waits = {rank: waits_in(rank, absence.call, absence.ranks) for absence in missing for rank in absence.waiting}
    fault = deadlock(waits, [waits[rank] for rank in sorted(waits)])
    return Finding("collective", fault.message, phrase("where to look"), tuple(sorted(waits)))


def _gloo(symptoms: Symptoms) -> Finding | None:
    """Find who waited and how long, by gloo's message, and for what, by the traceback."""
    waited = {rank: match for rank, match in symptoms.matches(GLOO) if rank is not None}
    if not waited:
        return None
    # Of the ranks that waited, the lowest.
    rank, match = next(iter(sorted(waited.items())))
    error = first_error(symptoms.logs.get(rank, ""), rank)
    call = error.call if error and error.call else match["what"]
    # gloo prints its message only on the ranks that waited.
    absent = tuple(rank for rank in range(symptoms.world_size) if rank not in waited)
    return _absent(absent, call, int(match["ms"]), sorted(waited))


def _absent(
    ranks: tuple[int, ...], call: str, limit_ms: int | None, waiting: Iterable[int] = (), instead: str = ""
) -> Finding:
    """Say for which ranks the others waited until time was up, or, without a limit, are waiting."""
    waited = format_seconds(None if limit_ms is None else limit_ms / 1e3)
    if not ranks:
        return Finding("collective", phrase("for one another", waited=waited, call=call), phrase("where to look"))
    detail = "" if limit_ms is None else f" {waited}"
    if instead:
        key = "rank was elsewhere" if len(ranks) == 1 else "ranks were elsewhere"
        en, fr = listed(ranks, french=False), with_article(listed(ranks, french=True))
        detail += phrase(key, en=en, fr=fr, instead=instead)
    fault = missing_ranks(ranks, call, waiting, "live" if limit_ms is None else "past", detail)
    return Finding("collective", fault.message, phrase("where to look"), ranks)


def recognised_error(symptoms: Symptoms) -> Finding | None:
    """Find a first error that the registry of signatures knows as a cause: what a rank raised before others waited."""
    # Only the first error of a log counts: the port of a peer that has gone is no cause.
    for rank, text in symptoms.logs.items():
        error = first_error(text, rank)
        recognised = recognise(error.text) if error and not error.lost_peer else None
        if recognised and recognised[0].role == "cause":
            return _registered(recognised[0], rank, recognised[1])
    match = PORT.search(symptoms.reason)
    return _registered(signatures()["port"], None, match) if match else None


RULES = (
    *(out_of_memory, time_limit, diverged, full_disk, missing_module, lost_node, killed),
    *(recognised_error, hung_collective),
)
"""The most certain first; the first that applies counts, since what the later ones see may follow from it."""


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of a run, for a notebook or a terminal.

    Args:
        findings: the cause; empty if nothing is wrong, or no rule applies.
        errors: the first error of each rank that printed one, then of the launcher and of the job.
        memory: of a run out of memory; None otherwise.
    """

    run_id: str
    title: str
    state: str
    reason: str
    findings: tuple[Finding, ...]
    errors: tuple[FirstError, ...]
    memory: PostMortem | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "run_id": self.run_id,
            "state": self.state,
            "reason": self.reason,
            "findings": [finding._asdict() | {"ranks": list(finding.ranks)} for finding in self.findings],
            "errors": [vars(error) for error in self.errors],
            "memory": self.memory.to_dict() if self.memory else None,
        }

    def __repr__(self) -> str:
        lines = [f"{self.run_id} · {table_visible(self.title)} · {status_label(self.state)}"]
        if self.reason:
            lines.append(table_visible(self.reason))
        lines += ["", *(self.cause_lines() or [self._nothing()])]
        if self.memory:
            lines += ["", *memory_lines(self.memory)]
        if self.errors:
            lines += ["", str(self._first_errors())]
        return "\n".join(lines)

    def cause_lines(self) -> list[str]:
        """Write the cause and what to do; empty where no rule applies."""
        lines = []
        for finding in self.findings:
            lines.append(f"✗ {table_visible(finding.what)}")
            lines += [f"  → {table_visible(finding.advice)}"] if finding.advice else []
        return lines

    def _repr_html_(self) -> str:
        state = safe(status_label(self.state))
        parts = [f"<div><b>{state}</b> · {safe(self.title)} · <code>{safe(self.run_id)}</code></div>"]
        parts += [f"<p>{safe(self.reason)}</p>"] if self.reason else []
        for finding in self.findings:
            advice = f"<br>→ {safe(finding.advice)}" if finding.advice else ""
            parts.append(f'<p><b style="color:{VERMILION}">✗ {safe(finding.what)}</b>{advice}</p>')
        parts += [] if self.findings else [f"<p>{safe(self._nothing())}</p>"]
        if self.memory:
            memory_html = "<br>".join(safe(line) for line in memory_lines(self.memory))
            parts.append(f'<div style="font-family:monospace;white-space:pre-wrap">{memory_html}</div>')
        if self.errors:
            parts.append(self._first_errors()._repr_html_())
        return f'<div {PANEL}{VERMILION if self.findings else BLUE}">{"".join(parts)}</div>'

    def _nothing(self) -> str:
        if self.state in ("running", "queued") and self.errors:
            return phrase("errors of a run that goes on")
        if self.state in ("completed", "running", "queued"):
            return say(en="Nothing is wrong with it.", fr="Rien d’anormal.")
        return phrase("no known cause")

    def _first_errors(self) -> Table:
        heading = say(en="The first error of each log:", fr="La première erreur de chaque journal :")
        return facts(*((where(error), error.text) for error in self.errors), caption=heading)


def where(error: FirstError) -> str:
    """Write the log and the line of an error."""
    if error.rank is None:
        return say(en=f"job or launcher, line {error.line}", fr=f"travail ou lanceur, ligne {error.line}")
    return say(en=f"rank {error.rank}, line {error.line}", fr=f"rang {error.rank}, ligne {error.line}")


class Standstill(NamedTuple):
    """Ranks of a run of which none has ended a step for a while: since when, what is missing, and where each stands."""

    since_s: float
    missing: Finding | None
    lines: Mapping[int, str]

    def sentences(self, now_s: float) -> str:
        """Say it, at a time of the Unix clock: one sentence, what to do, and a line for each place in the script."""
        quiet = format_seconds(max(now_s - self.since_s, 0.0))
        begin = say(en=f"No step has ended for {quiet}.", fr=f"Aucun pas ne s’est terminé depuis {quiet}.")
        ranks_of: dict[str, list[int]] = {}
        for rank, line in self.lines.items():
            ranks_of.setdefault(line, []).append(rank)
        where = [
            phrase("ranks at a line", en=listed(ranks, french=False), line=line, fr=listed(ranks, french=True))
            for line, ranks in ranks_of.items()
        ]
        cause = f" {self.missing.what} {self.missing.advice}" if self.missing else ""
        return "\n".join([begin + cause, *where])


def standstill(events_by_rank: Mapping[int, Sequence[Mapping[str, Any]]], now_s: float) -> Standstill | None:
    """Read from the events of a run that goes on why it does not; None where a rank still makes steps.

    Before the first step it is told only where ranks wait for one: what comes before a training may take its time. A
    rank that notes nothing for longer than the others took to note that they stand still is silent: stopped, or lost.
    """
    newest: dict[int, Mapping[str, Any]] = {}
    for rank, events in events_by_rank.items():
        event = next((event for event in reversed(events) if event["event"] in _OF_A_STANDSTILL), None)
        if event is None:
            return None
        newest[rank] = event
    stalled = {rank: event for rank, event in newest.items() if event["event"] == "stalled"}
    begun = [event for events in events_by_rank.values() for event in events if event["event"] in ("start", "step")]
    if not stalled or not begun:
        return None
    since_s = max(float(event["time_s"]) for event in begun)
    noted_s = min(float(event["time_s"]) for event in stalled.values())
    silent = [rank for rank, event in newest.items() if event["event"] in ("start", "step")]
    if (silent and now_s < noted_s + _SILENT_S) or any(float(newest[rank]["time_s"]) > noted_s for rank in silent):
        return None
    calls = {
        rank: {visible(str(name))[:40]: _legal(called) for name, called in dict(event.get("groups") or {}).items()}
        for rank, event in stalled.items()
    }
    missing = hung_calls(calls)
    if missing is None and all(event["event"] == "start" for event in begun):
        return None
    ended = say(en="ended", fr="terminé")
    lines = {rank: visible(str(event.get("line") or ""))[:200] for rank, event in stalled.items()}
    lines |= {rank: ended for rank in newest if rank not in stalled}
    silence = phrase("silent")
    lines |= dict.fromkeys(silent, silence)
    return Standstill(since_s, missing, {rank: line for rank, line in sorted(lines.items()) if line})


_OF_A_STANDSTILL = ("start", "step", "stalled", "end")
_SILENT_S = 20.0


class StandstillReport:
    """Reader of a run that goes on, which tells once what it stands still for, and again when that changes."""

    def __init__(self, folder: Path, tell: Callable[[str], object]) -> None:
        self._folder, self._tell = folder, tell
        self._looked_s = time.monotonic()
        self._told: tuple[Finding | None, Mapping[int, str]] | None = None

    def look(self, state: str) -> None:
        """Look at the run, every few seconds."""
        if state != "running" or time.monotonic() - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = time.monotonic()
        if quiet_s(self._folder) <= _LOOK_EVERY_S:
            return
        standing = standstill(read_all_events(self._folder), time.time())
        if standing and standing[1:] != self._told:
            self._told = standing[1:]
            self._tell(standing.sentences(time.time()))


_LOOK_EVERY_S = 3.0


def find_causes(symptoms: Symptoms) -> tuple[Finding, ...]:
    """Return the finding of the first rule that applies; none where no rule does."""
    findings = (rule(symptoms) for rule in RULES)
    return tuple(finding for finding in findings if finding is not None)[:1]


def symptoms_of(run: RunFolder) -> Symptoms:
    """Collect the evidence of a run's folder.

    Raises:
        LabError: if the folder cannot be read.
    """
    config, record = run.config, run.record
    texts: Mapping[int | None, str] = {
        rank: read_log(run.folder / LOGS / f"rank-{rank}.log") for rank in range(config.layout.world_size)
    }
    job = "\n".join(read_log(run.folder / LOGS / f"{name}.log") for name in ("launcher", "slurm"))
    events_by_rank = read_all_events(run.folder)
    return Symptoms(
        status=run.state,
        reason=record.reason if record else "",
        world_size=config.layout.world_size,
        learning_rate=config.learning_rate,
        steps=len(run.losses),
        losses=run.losses,
        logs={**texts, None: job},
        calls={rank: calls for rank, events in events_by_rank.items() if (calls := calls_of(events))},
    )


def diagnose(run: RunFolder) -> Diagnosis:
    """Diagnose a run: what went wrong, and what to do about it.

    Raises:
        LabError: if the folder of the run cannot be read.
    """
    symptoms = symptoms_of(run)
    errors = tuple(error for rank, text in symptoms.logs.items() if (error := first_error(text, rank)) is not None)
    return Diagnosis(
        run_id=run.run_id,
        title=run.config.title,
        state=symptoms.status,
        reason=symptoms.reason,
        findings=find_causes(symptoms) if symptoms.status not in ("completed", "running", "queued") else (),
        errors=errors if symptoms.status != "completed" else (),
        memory=_memory(run) if symptoms.status == "oom" else None,
    )


def _memory(run: RunFolder) -> PostMortem | None:
    from dlojz.running.failures.out_of_memory import post_mortem

    try:
        return post_mortem(run)
    except LabError:  # this layout is not predicted, and nothing was measured
        return None
