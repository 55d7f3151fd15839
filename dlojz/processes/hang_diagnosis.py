"""Why ranks wait for ever: from what every rank is doing to one sentence.

A fault is named only where no rank involved can go on any more, whatever the others do; a rank that still computes may
yet arrive.

A state is what a rank writes on the board (see `guard`): `state` is `running`, `waiting` or `ended`; `counts` are the
collectives entered per group; `sends` and `receives` the messages posted per channel, `group|source>target|tag`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from dlojz.base.language import say

Kind = Literal["missing", "order", "shape", "arguments", "deadlock", "timeout", "peer", "lost"]
State = Mapping[str, Any]


class RankFault(NamedTuple):
    """What went wrong between ranks: its kind and the sentence in both languages."""

    kind: Kind
    en: str
    fr: str

    def __str__(self) -> str:
        return say(en=self.en, fr=self.fr)


def listed(ranks: Iterable[int], *, french: bool) -> str:
    """Ranks in words, runs of them shortened: `rank 3`, `ranks 0–2 and 5`."""
    numbers = sorted(set(ranks))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = []
    for run in runs:
        parts += [f"{run[0]}–{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    last = f" {'et' if french else 'and'} ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]
    noun = ("rang" if french else "rank") + ("s" if len(numbers) > 1 else "")
    return f"{noun} {last}"


def call_words(call: Mapping[str, Any]) -> str:
    """A collective in words, as the ranks' columns show it: `all_reduce #2 [4, 3] float32`."""
    shape = f" {call['shape']} {call['dtype']}" if call.get("dtype") else ""
    return f"{call['op']} #{call['shown']}{shape}"


def mismatch(calls: Mapping[int, Mapping[str, Any]]) -> RankFault | None:
    """How the same call (the n-th of a group, or the two ends of a message) differs between ranks; None if it does not.

    Args:
        calls: what each rank calls, by rank.
    """
    if not any(map(_is_message, calls.values())):
        fault = _differing("order", calls, lambda call: call["op"])
        if fault is not None:
            return fault
    fault = _differing("shape", calls, lambda call: (call["numel"], call["dtype"]))
    if fault is not None or any(map(_is_message, calls.values())):
        return fault
    return _differing("arguments", calls, lambda call: call["how"])


_DIFFERENT: dict[str, tuple[str, str, str, str]] = {  # title and advice, in both languages
    "order": (
        "Different order",
        "Every rank must call the same collectives in the same order.",
        "Ordre différent",
        "Tous les rangs doivent appeler les mêmes communications collectives dans le même ordre.",
    ),
    "shape": (
        "Different shape",
        "All must hold the same number of elements of the same type.",
        "Forme différente",
        "Il faut partout le même nombre d’éléments, du même type.",
    ),
    "arguments": (
        "Different arguments",
        "Root and operation must be the same on every rank.",
        "Arguments différents",
        "La racine et l’opération doivent être les mêmes sur tous les rangs.",
    ),
}


def _differing(
    kind: Literal["order", "shape", "arguments"],
    calls: Mapping[int, Mapping[str, Any]],
    key: Callable[[Mapping[str, Any]], object],
) -> RankFault | None:
    """The fault if the calls are not alike under this key: the most numerous first, then those that differ from it."""
    alike: dict[object, list[int]] = {}
    for rank in sorted(calls):
        alike.setdefault(key(calls[rank]), []).append(rank)
    if len(alike) < 2:
        return None
    groups = sorted(alike.values(), key=lambda ranks: (-len(ranks), ranks))[:3]
    en, fr = [], []
    for ranks in groups:
        call = calls[ranks[0]]
        words = call_words(call) + (f" ({call['how']})" if kind == "arguments" else "")
        en.append(f"{listed(ranks, french=False)} {'call' if len(ranks) > 1 else 'calls'} {words}")
        fr.append(f"{with_article(listed(ranks, french=True))} {'appellent' if len(ranks) > 1 else 'appelle'} {words}")
    title_en, advice_en, title_fr, advice_fr = _DIFFERENT[kind]
    return RankFault(
        kind,
        f"{title_en}: {en[0]}, but {', '.join(en[1:])}. {advice_en}",
        f"{title_fr} : {fr[0]}, mais {', '.join(fr[1:])}. {advice_fr}",
    )


def _is_message(call: Mapping[str, Any]) -> bool:
    return call["op"] in ("send", "recv")


def awaited(states: Sequence[State], rank: int) -> set[int]:
    """The ranks without which a waiting rank cannot go on; empty if all it needs has been posted."""
    call = states[rank]["waiting"]
    if not _is_message(call):
        return {
            member
            for member in call["members"]
            if member != rank and states[member].get("counts", {}).get(call["group"], 0) < call["number"]
        }
    side = "sends" if call["op"] == "recv" else "receives"
    posted = states[call["peer"]].get(side, {}).get(call["channel"], 0)
    return {call["peer"]} if posted < call["number"] else set()


def stuck_ranks(states: Sequence[State]) -> set[int]:
    """The ranks that wait and can never go on, because all they wait for ends in an ended rank or in a cycle."""
    free = {rank for rank, state in enumerate(states) if state.get("state") not in ("waiting", "ended")}
    needs = {rank: awaited(states, rank) for rank, state in enumerate(states) if state.get("state") == "waiting"}
    while True:
        freed = {rank for rank, needed in needs.items() if rank not in free and needed <= free}
        if not freed:
            return set(needs) - free
        free |= freed


def explain_stuck(states: Sequence[State], rank: int) -> RankFault:
    """The sentence for a rank that is stuck: who is missing, or which ranks wait for one another."""
    chain = [rank]
    while True:
        needed = awaited(states, chain[-1])
        gone = sorted(other for other in needed if states[other].get("state") == "ended")
        if gone:
            return _missing(states, chain[-1], gone)
        following = min(other for other in needed if other in stuck_ranks(states))
        if following in chain:
            return _deadlock(states, chain[chain.index(following) :])
        chain.append(following)


def _waits(states: Sequence[State], rank: int) -> tuple[str, str]:
    """What a waiting rank does, in both languages."""
    call = states[rank]["waiting"]
    peer = call.get("peer")
    if call["op"] == "recv":
        return f"rank {rank} waits to receive from rank {peer}", f"le rang {rank} attend un message du rang {peer}"
    if call["op"] == "send":
        return (
            f"rank {rank} waits for rank {peer} to receive its message",
            f"le rang {rank} attend que le rang {peer} reçoive son message",
        )
    needed, words = awaited(states, rank), call_words(call)
    if not needed:
        return f"rank {rank} waits in {words}", f"le rang {rank} attend dans {words}"
    en, fr = listed(needed, french=False), listed(needed, french=True)
    return f"rank {rank} waits in {words} for {en}", f"le rang {rank} attend, dans {words}, {with_article(fr)}"


def with_article(french: str) -> str:
    """Ranks in French words, with their article: `le rang 3`, `les rangs 0–2`."""
    return ("les " if french.startswith("rangs") else "le ") + french


def _last(states: Sequence[State], rank: int) -> tuple[str, str]:
    error, last = states[rank].get("error"), states[rank].get("last")
    if error:
        return f"it was stopped by {error}", f"le rang {rank} a été arrêté par {error}"
    if last:
        return f"its last one was {last}", f"dernier appel du rang {rank} : {last}"
    return "it has called none", f"le rang {rank} n’en a appelé aucune"


def _missing(states: Sequence[State], rank: int, gone: list[int]) -> RankFault:
    call = states[rank]["waiting"]
    why_en, why_fr = _last(states, gone[0])
    kind: Kind = "peer" if states[gone[0]].get("error") else "missing"
    if call["op"] == "recv":
        return RankFault(
            kind,
            f"Missing message: rank {rank} waits to receive from rank {gone[0]}, but rank {gone[0]} has ended without "
            "sending it.",
            f"Message manquant : le rang {rank} attend un message du rang {gone[0]}, mais le rang {gone[0]} a terminé "
            "sans l’envoyer.",
        )
    if call["op"] == "send":
        return RankFault(
            kind,
            f"Missing receiver: rank {rank} sends to rank {gone[0]}, but rank {gone[0]} has ended without receiving.",
            f"Destinataire manquant : le rang {rank} envoie au rang {gone[0]}, mais le rang {gone[0]} a terminé sans "
            "recevoir.",
        )
    waiting = [
        other
        for other, state in enumerate(states)
        if state.get("state") == "waiting" and _same_call(state["waiting"], call)
    ]
    en, fr = listed(gone, french=False), listed(gone, french=True)
    plural = len(gone) > 1
    words = call_words(call)
    return RankFault(
        kind,
        f"Missing rank: {en} ended without calling {words}, in which {listed(waiting, french=False)} "
        f"{'wait' if len(waiting) > 1 else 'waits'}"
        + ("." if plural else f" ({why_en}).")
        + " A collective needs every rank of its group.",
        f"Rang manquant : {with_article(fr)} {'ont' if plural else 'a'} terminé sans appeler {words}, où "
        f"{with_article(listed(waiting, french=True))} {'attendent' if len(waiting) > 1 else 'attend'}"
        + ("." if plural else f" ({why_fr}).")
        + " Une communication collective a besoin de tous les rangs de son groupe.",
    )


def _same_call(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (one["op"], one.get("group"), one["number"]) == (other["op"], other.get("group"), other["number"])


def _deadlock(states: Sequence[State], cycle: list[int]) -> RankFault:
    waits = [_waits(states, rank) for rank in sorted(cycle)]
    shown = waits[:4]
    more = len(waits) - len(shown)
    advice_en, advice_fr = "", ""
    messages = [states[rank]["waiting"]["op"] for rank in cycle]
    if all(op == "send" for op in messages) or all(op == "recv" for op in messages):
        verb = ("send", "envoient") if messages[0] == "send" else ("receive", "reçoivent")
        advice_en = f" All of them {verb[0]} first: use isend and irecv, then wait for both."
        advice_fr = f" Tous {verb[1]} d’abord : utilisez isend et irecv, puis attendez la fin des deux."
    return RankFault(
        "deadlock",
        f"Deadlock between {listed(cycle, french=False)}: "
        + ", ".join(en for en, _ in shown)
        + (f", and so on ({more} more)." if more else ".")
        + advice_en,
        f"Interblocage entre {with_article(listed(cycle, french=True))} : "
        + ", ".join(fr for _, fr in shown)
        + (f", et ainsi de suite (encore {more})." if more else ".")
        + advice_fr,
    )


def explain_timeout(states: Sequence[State], rank: int, limit_s: float) -> RankFault:
    """The sentence for a rank that has waited too long for ranks that still compute."""
    en, fr = _waits(states, rank)
    busy = sorted(other for other in awaited(states, rank) if states[other].get("state") != "ended")
    if not busy:
        return RankFault(
            "timeout",
            f"Time limit: {en} for more than {limit_s:g} s, although every rank has called it.",
            f"Temps écoulé : {fr} depuis plus de {limit_s:g} s, alors que tous les rangs l’ont appelée.",
        )
    last_en, last_fr = _last(states, busy[0])
    return RankFault(
        "timeout",
        f"Time limit: after {limit_s:g} s {en}; {listed(busy, french=False)} "
        f"{'are' if len(busy) > 1 else 'is'} still computing" + (f" ({last_en})." if len(busy) == 1 else "."),
        f"Temps écoulé : au bout de {limit_s:g} s, {fr} ; {with_article(listed(busy, french=True))} "
        f"{'calculent' if len(busy) > 1 else 'calcule'} encore" + (f" ({last_fr})." if len(busy) == 1 else "."),
    )


def explain_lost(ranks: Iterable[int]) -> RankFault:
    """The sentence for ranks whose process is gone."""
    gone = sorted(ranks)
    return RankFault(
        "lost",
        f"Lost: the process of {listed(gone, french=False)} ended while others were waiting for it.",
        f"Perdu : {'les processus des' if len(gone) > 1 else 'le processus du'} {listed(gone, french=True)} "
        f"{'se sont arrêtés' if len(gone) > 1 else 's’est arrêté'} en pleine attente des autres rangs.",
    )


def explain_stopped(rank: int, error: str) -> RankFault:
    """The sentence for a rank that an exception stopped while others were talking to it."""
    return RankFault(
        "peer",
        f"Missing rank: rank {rank} was stopped by {error} while others were talking to it.",
        f"Rang manquant : le rang {rank} a été arrêté par {error} alors que d’autres communiquaient avec lui.",
    )
