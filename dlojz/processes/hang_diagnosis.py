"""Diagnose ranks that hang: from what every rank is doing, or called last, to one sentence.

A fault is named only where no rank involved can go on any more, whatever the others do; a rank that still computes may
yet arrive.

A state is what a rank writes on the board (see `guard`): `state` is `running`, `waiting` or `ended`; `counts` are the
collectives entered per group; `sends` and `receives` the messages posted per channel, `group|source>target|tag`.

Of a run that hung, the collectives that each rank called last tell who did not come. They are read on the rank from
torch's flight recorder, in its JSON and never its dump file, which is a pickle; reading them raises nothing, since it
is done while a rank fails.

Source: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp (`dump_json`, keys of an entry) and init.cpp
(`_dump_fr_trace_json` for gloo, `_dump_nccl_trace_json` for NCCL). The recorder is on where `TORCH_FR_BUFFER_SIZE` is
set, which every launcher does.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, Protocol

from dlojz.base.language import Sentences, rounded, say

phrase = Sentences(Path(__file__).parent / "data" / "hang_diagnosis.md")

Kind = Literal["missing", "order", "shape", "arguments", "deadlock", "timeout", "peer", "lost"]
State = Mapping[str, Any]


class RankFault(NamedTuple):
    """Fault between ranks: its kind and the sentence that explains it."""

    kind: Kind
    message: str


def listed(ranks: Iterable[int], *, french: bool) -> str:
    """Write ranks in words, runs of them shortened: `rank 3`, `ranks 0–2 and 5`."""
    numbers = sorted(set(ranks))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = []
    for run in runs:
        # Two neighbours are written apart: `1 and 2`, but `0–2`.
        parts += [f"{run[0]}–{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    rank_text = (
        f" {'et' if french else 'and'} ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]
    )
    noun = ("rang" if french else "rank") + ("s" if len(numbers) > 1 else "")
    return f"{noun} {rank_text}"


def with_article(french: str) -> str:
    """Put the French article before ranks in words: `le rang 3`, `les rangs 0–2`."""
    return ("les " if french.startswith("rangs") else "le ") + french


def _both(ranks: Iterable[int]) -> tuple[str, str]:
    """Ranks in English, and in French with the article."""
    numbers = list(ranks)
    return listed(numbers, french=False), with_article(listed(numbers, french=True))


def call_words(call: Mapping[str, Any]) -> str:
    """Write a collective in words, as the ranks' columns show it: `all_reduce #2 [4, 3] float32`."""
    shape = f" {call['shape']} {call['dtype']}" if call.get("dtype") else ""
    return f"{call['op']} #{call['shown']}{shape}"


def mismatch(calls: Mapping[int, Mapping[str, Any]]) -> RankFault | None:
    """Compare the same call (the n-th of a group, or the two ends of a message) between ranks; None if all agree."""
    message = any(map(_is_message, calls.values()))
    return (
        (None if message else _differing("order", calls, lambda call: call["op"]))
        or _differing("shape", calls, lambda call: (call["numel"], call["dtype"]))
        or (None if message else _differing("arguments", calls, lambda call: call["how"]))
    )


def _differing(
    kind: Literal["order", "shape", "arguments"],
    calls: Mapping[int, Mapping[str, Any]],
    key: Callable[[Mapping[str, Any]], object],
) -> RankFault | None:
    """Return the fault if the calls differ under this key: the most numerous first, then those that differ from it."""
    ranks_by_key: dict[object, list[int]] = {}
    for rank in sorted(calls):
        ranks_by_key.setdefault(key(calls[rank]), []).append(rank)
    if len(ranks_by_key) < 2:
        return None
    called = []
    # Three kinds of calls at most; of equally frequent ones the one of the lowest rank comes first.
    for ranks in sorted(ranks_by_key.values(), key=lambda ranks: (-len(ranks), ranks))[:3]:
        call, (en, fr) = calls[ranks[0]], _both(ranks)
        words = call_words(call) + (f" ({call['how']})" if kind == "arguments" else "")
        called.append(phrase("several call" if len(ranks) > 1 else "one calls", en=en, fr=fr, words=words))
    but = say(en="but", fr="mais")
    return RankFault(kind, phrase(kind, calls=f"{called[0]}, {but} {', '.join(called[1:])}"))


def _is_message(call: Mapping[str, Any]) -> bool:
    return call["op"] in ("send", "recv")


def awaited(states: Sequence[State], rank: int) -> set[int]:
    """Return the ranks that a waiting rank needs in order to go on; none if all it needs has been posted."""
    call = states[rank]["waiting"]
    if not _is_message(call):
        return {
            member
            for member in call["members"]
            # These have not entered the call yet.
            if member != rank and states[member].get("counts", {}).get(call["group"], 0) < call["number"]
        }
    side = "sends" if call["op"] == "recv" else "receives"
    # The peer's counter tells whether it has posted its end.
    posted = states[call["peer"]].get(side, {}).get(call["channel"], 0)
    return {call["peer"]} if posted < call["number"] else set()


def stuck_ranks(states: Sequence[State]) -> set[int]:
    """Return the ranks that can never go on: all they wait for ends in an ended rank or in a cycle."""
    free = {rank for rank, state in enumerate(states) if state.get("state") not in ("waiting", "ended")}
    needs = {rank: awaited(states, rank) for rank, state in enumerate(states) if state.get("state") == "waiting"}
    # Whoever waits for free ranks only will be free: the set grows until nothing is added.
    while True:
        freed = {rank for rank, awaited_ranks in needs.items() if rank not in free and awaited_ranks <= free}
        if not freed:
            return set(needs) - free
        free |= freed


def explain_stuck(states: Sequence[State], rank: int) -> RankFault:
    """Explain why a rank is stuck: who is missing, or which ranks wait for one another."""
    chain = [rank]
    while True:
        awaited_ranks = awaited(states, chain[-1])
        ended_ranks = sorted(peer for peer in awaited_ranks if states[peer].get("state") == "ended")
        if ended_ranks:
            return _missing(states, chain[-1], ended_ranks)
        # Nobody it waits for has ended, so that one of them is stuck itself, or this rank would be free.
        following = min(peer for peer in awaited_ranks if peer in stuck_ranks(states))
        if following in chain:
            # The cycle without the ranks that lead into it.
            return _deadlock(states, chain[chain.index(following) :])
        chain.append(following)


def _waits(states: Sequence[State], rank: int) -> str:
    """Write what a waiting rank waits for, in words."""
    call = states[rank]["waiting"]
    if _is_message(call):
        key = "waits to receive" if call["op"] == "recv" else "waits to be received"
        return phrase(key, rank=rank, peer=call.get("peer"))
    awaited_ranks, words = awaited(states, rank), call_words(call)
    if not awaited_ranks:
        return phrase("waits", rank=rank, words=words)
    return waits_in(rank, words, awaited_ranks)


def waits_in(rank: int, words: str, awaited_ranks: Iterable[int]) -> str:
    """Write for whom a rank waits in a collective, `words`."""
    en, fr = _both(awaited_ranks)
    return phrase("waits for ranks", rank=rank, words=words, en=en, fr=fr)


def _last(states: Sequence[State], rank: int) -> str:
    error, last_call = states[rank].get("error"), states[rank].get("last")
    if error:
        return phrase("stopped", rank=rank, error=error)
    if last_call:
        return phrase("last call", rank=rank, last_call=last_call)
    return phrase("no call", rank=rank)


def _missing(states: Sequence[State], rank: int, ended_ranks: list[int]) -> RankFault:
    call, peer = states[rank]["waiting"], ended_ranks[0]
    kind: Kind = "peer" if states[peer].get("error") else "missing"
    if _is_message(call):
        key = "missing message" if call["op"] == "recv" else "missing receiver"
        return RankFault(kind, phrase(key, rank=rank, peer=peer))
    waiting = [
        member
        for member, state in enumerate(states)
        if state.get("state") == "waiting" and _same_call(state["waiting"], call)
    ]
    reason = "" if len(ended_ranks) > 1 else f" ({_last(states, peer)})"
    return missing_ranks(ended_ranks, call_words(call), waiting, "ended", reason, kind=kind)


def missing_ranks(
    ranks: Iterable[int],
    words: str,
    waiting: Iterable[int],
    when: Literal["ended", "live", "past"],
    detail: str = "",
    *,
    kind: Kind = "missing",
) -> RankFault:
    """Say which ranks did not call a collective, `words`, in which others wait.

    Args:
        waiting: ranks in it; where none is known, they are "the others".
        when: the missing ranks have ended, may still come, or the others waited until time was up.
    """
    absent, waiters = list(ranks), list(waiting)
    several, plural = len(absent) > 1, len(waiters) != 1
    en, fr = _both(absent)
    waiting_en, waiting_fr = _both(waiters) if waiters else ("the others", "les autres")
    begin_en, begin_fr = {
        "ended": ("ended without calling", f"{'ont' if several else 'a'} terminé sans appeler"),
        "live": (f"{'have' if several else 'has'} not called", f"n’{'ont' if several else 'a'} pas appelé"),
        "past": ("did not call", f"n’{'ont' if several else 'a'} pas appelé"),
    }[when]
    waits_en, waits_fr = ("waited", "ont attendu" if plural else "a attendu")
    if when != "past":
        waits_en, waits_fr = ("wait", "attendent") if plural else ("waits", "attend")
    message = phrase(
        "missing rank",
        **{"en": en, "fr": fr, "words": words, "detail": detail},
        **{"begin_en": begin_en, "waiting_en": waiting_en, "waits_en": waits_en},
        **{"begin_fr": begin_fr, "waiting_fr": waiting_fr, "waits_fr": waits_fr},
    )
    return RankFault(kind, message)


def _same_call(call_a: Mapping[str, Any], call_b: Mapping[str, Any]) -> bool:
    return (call_a["op"], call_a.get("group"), call_a["number"]) == (
        call_b["op"],
        call_b.get("group"),
        call_b["number"],
    )


def _deadlock(states: Sequence[State], cycle: list[int]) -> RankFault:
    advice = ""
    messages = {states[rank]["waiting"]["op"] for rank in cycle}
    if messages in ({"send"}, {"recv"}):
        advice = phrase("all send" if messages == {"send"} else "all receive")
    return deadlock(cycle, [_waits(states, rank) for rank in sorted(cycle)], advice)


def deadlock(cycle: Iterable[int], waits: Sequence[str], advice: str = "") -> RankFault:
    """Say that ranks wait for one another, each in its words."""
    en, fr = _both(cycle)
    waits_text, hidden_count = ", ".join(waits[:4]), len(waits) - 4
    more = phrase("and so on", number=hidden_count) if hidden_count > 0 else ""
    return RankFault("deadlock", phrase("deadlock", en=en, fr=fr, waits=waits_text, more=more, advice=advice))


def explain_timeout(states: Sequence[State], rank: int, limit_s: float) -> RankFault:
    """Explain that a rank has waited too long for ranks that still compute."""
    waits = _waits(states, rank)
    busy = sorted(peer for peer in awaited(states, rank) if states[peer].get("state") != "ended")
    limit, call = rounded(limit_s, 2), states[rank]["waiting"]
    # The sender has posted it and dropped its Work object, and with it the message.
    if not busy and call["op"] == "recv" and call["channel"] in states[call["peer"]].get("lost", {}):
        return RankFault("timeout", phrase("message lost", waits=waits, limit=limit, peer=call["peer"]))
    if not busy:
        return RankFault("timeout", phrase("all have called", waits=waits, limit=limit))
    (en, fr), plural = _both(busy), len(busy) > 1
    last_text = "." if plural else f" ({_last(states, busy[0])})."
    key = "several compute" if plural else "one computes"
    return RankFault("timeout", phrase(key, waits=waits, limit=limit, en=en, fr=fr, last=last_text))


def explain_lost(ranks: Iterable[int]) -> RankFault:
    """Explain that the processes of ranks are gone."""
    lost_ranks = sorted(ranks)
    key = "several processes lost" if len(lost_ranks) > 1 else "process lost"
    en, fr = listed(lost_ranks, french=False), listed(lost_ranks, french=True)
    return RankFault("lost", phrase(key, en=en, fr=fr))


def explain_stopped(rank: int, error: str) -> RankFault:
    """Explain that an exception stopped a rank while others communicated with it."""
    return RankFault("peer", phrase("stopped by an error", rank=rank, error=error))


KEPT = 32
"""Last calls kept of each group: a rank may be so many behind the others, and its missing call is still found."""
_BINDINGS = "torch._C._distributed_c10d"
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")

STALL_S = 30.0
STALL_STEPS = 20
"""A rank stands still where no step has ended for so many seconds, and for the time of so many of its steps."""
_LOOK_EVERY_S = 5.0
_PACKAGE = Path(__file__).resolve().parents[1]
# Code of libraries: a line there does not say where a training stands.
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))

Calls = dict[str, list[list[Any]]]


def last_calls() -> Calls:
    """Read the last collectives of this rank, by the name of their group, each as `[number, operation, type, shape]`.

    The number counts the collectives of the group from 1: ranks that agree have the same ones. Sends and receives are
    left out. Empty where there was none, or torch has no recorder.
    """
    entries: list[Any] = []
    for name in _DUMPS:
        dump = getattr(sys.modules.get(_BINDINGS), name, None)
        try:
            trace = json.loads(dump(includeCollectives=True, onlyActive=False)) if dump else {}
            entries += trace.get("entries") or ()
        except Exception:  # an unknown format tells nothing, and must not hide why the rank failed
            continue
    return calls_in({"entries": entries})


def calls_in(trace: Any) -> Calls:
    """Read the last collectives of each group from a recorder's JSON, as far as its format is the known one."""
    calls_by_group: dict[str, dict[int, list[Any]]] = {}
    try:
        for entry in trace.get("entries") or ():
            if not entry["is_p2p"]:
                group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
                calls_by_group.setdefault(group, {})[number] = [number, *_described(entry)]
    except Exception:  # an unknown format tells nothing, and must not hide why a rank failed
        pass
    return {group: [calls[number] for number in sorted(calls)[-KEPT:]] for group, calls in calls_by_group.items()}


def _described(entry: dict[str, Any]) -> tuple[str, str, str]:
    """Describe an entry by operation, type and shape: `all_reduce`, `Float`, `[10]`."""
    # `gloo:all_reduce` or `nccl:all_reduce`.
    operation = str(entry["profiling_name"]).rpartition(":")[2]
    types = ",".join(map(str, entry["input_dtypes"]))
    shapes = ",".join("[" + ",".join(map(str, size)) + "]" for size in entry["input_sizes"])
    return operation[:80], types[:80], shapes[:80]


class StepLog(Protocol):
    """Log of a rank's events, which also tells when steps have ended."""

    @property
    def step_ends_s(self) -> Sequence[float]:
        """Times of its start and of the last ends of steps, on the monotonic clock."""

    def write(self, event: str, **fields: Any) -> None:
        """Append one event."""


def line_of_main_thread() -> str:
    """Return where the main thread stands: `train.py:23 in main`, or, where no script is, `dlojz/…` of this package.

    Empty where in neither.
    """
    engine_line = ""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        line = f"{frame.f_lineno} in {frame.f_code.co_name}"
        if path.is_relative_to(_PACKAGE):
            engine_line = engine_line or f"{path.relative_to(_PACKAGE.parent)}:{line}"
        elif not str(path).startswith((*_LIBRARIES, "<")):
            return f"{path.name}:{line}"
        frame = frame.f_back
    return engine_line


class StallWatch(threading.Thread):
    """Thread of a rank that notes where the rank stands when no step ends, and again when that changes.

    The event is `stalled`: `groups` as in `collectives`, empty where none was called, and `line` of the user's code.
    """

    def __init__(self, log: StepLog) -> None:
        super().__init__(name="dlojz-stall-watch", daemon=True)
        self._log = log
        self._closed = threading.Event()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def run(self) -> None:
        """Look every few seconds until the rank ends."""
        noted: tuple[Calls, str] | None = None
        while not self._closed.wait(_LOOK_EVERY_S):
            ends_s = list(self._log.step_ends_s)
            # The first of them also loads and compiles.
            durations_s = [end - begin for begin, end in pairwise(ends_s)][1:]
            limit_s = max(STALL_S, STALL_STEPS * median(durations_s or [0.0]))
            if time.monotonic() - ends_s[-1] < limit_s:
                continue
            standing = last_calls(), line_of_main_thread()
            if standing == noted:
                continue
            noted = standing
            try:
                self._log.write("stalled", groups=standing[0], line=standing[1])
            except (OSError, ValueError):  # a full disk, a log that was closed: the training goes on
                return
