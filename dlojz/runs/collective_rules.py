"""Collectives that hung: which rank did not come, to which collective. Pure.

Layer 5. Invariant: the rank that is named is the one that did something else, not those that waited for it.

Who waits is known from the time-outs: NCCL's watchdog numbers the collectives of each rank (`SeqNum`), so a rank with a
smaller number, another operation or another size, or without a time-out at all, is the one the others waited for.
torch's flight recorder numbers them too: each rank tells its last ones when it fails (`recorded_calls`).
"""

from __future__ import annotations

from dlojz.runs.diagnosis_rules import BARRIER, GLOO, MISMATCH, NCCL, Finding, Symptoms
from dlojz.runs.first_errors import first_error
from dlojz.runs.logs import visible
from dlojz.runs.recorded_calls import clash_of, first_missing, missing_in, worded
from dlojz.text import say
from dlojz.units import format_seconds


def hung_collective(symptoms: Symptoms) -> Finding | None:
    """A collective that not all ranks came to, by whatever told of it."""
    if symptoms.status not in ("failed", "timeout", "cancelled"):
        return None
    for rule in (_mismatch, _barrier, _watchdog, _recorded, _gloo):
        found = rule(symptoms)
        if found:
            return found
    return None


def _mismatch(symptoms: Symptoms) -> Finding | None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL compares what the ranks ask for before they do it."""
    for _, found in symptoms.matches(MISMATCH):
        first, second = (_fingerprint(found[name]) for name in ("first", "second"))
        return _different(int(found["one"]), first, int(found["other"]), second)
    return None


def _different(one: int, first: str, other: int, second: str) -> Finding:
    return Finding(
        "collective",
        say(
            en=f"The ranks asked for different collectives: rank {one} {first}, rank {other} {second}.",
            fr=f"Les rangs ont demandé des collectives différentes : le rang {one} {first}, le rang {other} {second}.",
        ),
        _same_order(),
        (one, other),
    )


def _fingerprint(text: str) -> str:
    """`OpType=ALLREDUCE, TensorShape=[10]` out of a finger print."""
    parts = visible(text).split(", ")
    kept = [part.strip() for part in parts if part.strip().startswith(("OpType", "TensorShape", "TensorDtypes"))]
    return ", ".join(kept)[:120] or visible(text)[:120]


def _barrier(symptoms: Symptoms) -> Finding | None:
    """`monitored_barrier` names who is missing."""
    for _, found in symptoms.matches(BARRIER):
        ranks = tuple(int(rank) for rank in found["ranks"].split(","))
        return _absent(ranks, "monitored_barrier", int(found["ms"]), "")
    return None


def _watchdog(symptoms: Symptoms) -> Finding | None:
    """NCCL's watchdog, one line per rank that waited."""
    waited: dict[int, tuple[int, str, str]] = {}
    limit_ms = 0
    for owner, text in symptoms.logs.items():
        for found in NCCL.finditer(text):
            rank = int(found["world"]) if found["world"] else owner
            limit_ms = int(found["ms"])
            if rank is not None:
                waited.setdefault(rank, (int(found["seq"]), found["op"], found["numel"] or ""))
    if not waited:
        return None
    asked = list(waited.values())
    usual = max(asked, key=lambda each: (asked.count(each), each[0]))
    silent = tuple(rank for rank in range(symptoms.world_size) if rank not in waited)
    odd = tuple(rank for rank, each in sorted(waited.items()) if each != usual)
    what = f"{usual[1]} (SeqNum={usual[0]}{f', {usual[2]} elements' if usual[2] else ''})"
    if silent:
        return _absent(silent, what, limit_ms, "")
    if odd:
        seq, op, numel = waited[odd[0]]
        other = f"{op} (SeqNum={seq}{f', {numel} elements' if numel else ''})"
        return _absent(odd, what, limit_ms, other)
    waited_s = format_seconds(limit_ms / 1e3)
    return Finding(
        "collective",
        say(
            en=f"All ranks waited {waited_s} for the same collective, {what}: the network between "
            "them, or the rank that was slowest to come, is at fault.",
            fr=f"Tous les rangs ont attendu {waited_s} la même collective, {what} : le réseau qui "
            "les relie, ou le rang arrivé le dernier, est en cause.",
        ),
        say(
            en="Run again with NCCL_DEBUG=INFO and look for the interface that NCCL chose; ask for fewer nodes.",
            fr="Relancez avec NCCL_DEBUG=INFO et cherchez l’interface que NCCL a choisie ; demandez moins de nœuds.",
        ),
        tuple(sorted(waited)),
    )


def _recorded(symptoms: Symptoms) -> Finding | None:
    """The ranks' own flight recorders: who called what as the same collective, and who was behind when time was up."""
    clash = clash_of(symptoms.calls)
    if clash:
        return _different(clash.one, worded(clash.first), clash.other, worded(clash.second))
    waited = next((match for pattern in (GLOO, NCCL) for _, match in symptoms.matches(pattern)), None)
    missing = missing_in(symptoms.calls) if waited else []
    if not missing or waited is None:
        return None
    cause = first_missing(missing)
    if cause:
        return _absent(cause.ranks, worded(cause.call), int(waited["ms"]), "")
    one = missing[0]  # a circle: whom it waited for waits itself, in the collective of another group
    other = next((each for each in missing if one.ranks[0] in each.waiting), one)
    return _different(one.waiting[0], worded(one.call), one.ranks[0], worded(other.call))


def _gloo(symptoms: Symptoms) -> Finding | None:
    """gloo tells who waited and how long; the traceback tells for what."""
    waited = {rank: found for rank, found in symptoms.matches(GLOO) if rank is not None}
    if not waited:
        return None
    rank, found = next(iter(sorted(waited.items())))
    error = first_error(symptoms.logs.get(rank, ""), rank)
    what = error.call if error and error.call else found["what"]
    absent = tuple(other for other in range(symptoms.world_size) if other not in waited)
    return _absent(absent, what, int(found["ms"]), "")


def _absent(ranks: tuple[int, ...], what: str, limit_ms: int, instead: str) -> Finding:
    waited = format_seconds(limit_ms / 1e3)
    if not ranks:
        return Finding(
            "collective",
            say(
                en=f"The ranks waited {waited} for one another in {what}, each in another collective.",
                fr=f"Les rangs se sont attendus {waited} dans {what}, chacun dans une autre collective.",
            ),
            _same_order(),
        )
    listed = ", ".join(map(str, ranks[:8])) + ("…" if len(ranks) > 8 else "")
    one = len(ranks) == 1
    doing = say(en=f" (it was in {instead})", fr=f" (il était dans {instead})") if instead else ""
    return Finding(
        "collective",
        say(
            en=f"Rank{'' if one else 's'} {listed} did not come to the collective {what}{doing}: the others waited "
            f"{waited} for {'it' if one else 'them'}.",
            fr=f"{'Le rang' if one else 'Les rangs'} {listed} {'n’est' if one else 'ne sont'} pas "
            f"{'venu' if one else 'venus'} à la collective {what}{doing} : les autres {'l’' if one else 'les '}ont "
            f"attendu{'' if one else 's'} {waited}.",
        ),
        _same_order(),
        ranks,
    )


def _same_order() -> str:
    return say(
        en="Every rank of a group must call the same collectives in the same order with the same shapes: look for an "
        "`if rank …` around one of them, an exception on that rank, or data that ran out earlier there.",
        fr="Tous les rangs d’un groupe doivent appeler les mêmes collectives, dans le même ordre, avec les mêmes "
        "formes : cherchez un `if rank …` autour de l’une d’elles, une exception sur ce rang, ou des données épuisées "
        "plus tôt.",
    )
