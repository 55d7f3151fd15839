"""Which collective each rank had come to, as the ranks told when the run failed (`dlojz.train.last_calls`). Pure.

Layer 5. Invariant: a rank is said to be missing from a collective only if its own recorder, or that of another rank of
the same group, shows it: the ranks of a group number their collectives alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dlojz.runs.logs import visible

ALL_RANKS = "0"
"""Name that torch gives the group of all ranks."""
SAME_SHAPE = frozenset({"all_reduce", "reduce", "broadcast", "reduce_scatter", "all_to_all"})
"""Operations to which every rank brings a tensor of the same shape."""
_MOST_CHARACTERS = 80

Calls = Mapping[str, Mapping[int, tuple[str, ...]]]
"""Group → number of the collective → operation, type and shape."""


class Missing(NamedTuple):
    """Ranks that others of their group waited for, and in which collective."""

    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    call: tuple[str, ...]


class Clash(NamedTuple):
    """Two ranks that called different things as the same collective of a group."""

    one: int
    first: tuple[str, ...]
    other: int
    second: tuple[str, ...]


def calls_of(events: Sequence[Mapping[str, Any]]) -> Calls:
    """The last collectives that a rank told of in its last attempt; what is damaged is left out."""
    for event in reversed(events):
        if event["event"] == "start":
            break
        groups = event.get("groups")
        if event["event"] == "collectives" and isinstance(groups, Mapping):
            return {visible(str(name))[:40]: _legal(calls) for name, calls in groups.items()}
    return {}


def _legal(calls: object) -> dict[int, tuple[str, ...]]:
    found: dict[int, tuple[str, ...]] = {}
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, list) and len(call) == 4 and type(call[0]) is int:
            found[call[0]] = tuple(visible(str(word))[:_MOST_CHARACTERS] for word in call[1:])
    return found


def worded(call: tuple[str, ...]) -> str:
    """`all_reduce Float [10]`."""
    return " ".join(word for word in call if word)


def clash_of(calls: Mapping[int, Calls]) -> Clash | None:
    """The first collective that two ranks of a group called differently; None where they agree as far as is known."""
    for group in sorted({group for told in calls.values() for group in told}):
        members = {rank: told[group] for rank, told in sorted(calls.items()) if group in told}
        for number in sorted({number for known in members.values() for number in known}):
            came = [(rank, known[number]) for rank, known in members.items() if number in known]
            for rank, call in came[1:]:
                if not _alike(came[0][1], call):
                    return Clash(*came[0], rank, call)
    return None


def _alike(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return one == other if one[0] in SAME_SHAPE else one[0] == other[0]


def missing_in(calls: Mapping[int, Calls]) -> list[Missing]:
    """For each group in which some ranks are behind the others: who, and the first collective they did not come to."""
    found = []
    for group in sorted({group for told in calls.values() for group in told}):
        # Of a smaller group, who never came cannot be told from who is no member.
        last = {rank: max(told[group], default=0) for rank, told in sorted(calls.items()) if group in told}
        if group == ALL_RANKS:
            last = dict.fromkeys(calls, 0) | last
        first = min(last.values(), default=0) + 1
        waiting = tuple(rank for rank, number in last.items() if number >= first)
        if waiting:
            call = next((calls[rank][group][first] for rank in waiting if first in calls[rank][group]), ())
            found.append(Missing(tuple(rank for rank in last if rank not in waiting), waiting, call))
    return found


def first_missing(missing: Sequence[Missing]) -> Missing | None:
    """What held all the others up: ranks that others waited for and that waited for nobody; None if there are none."""
    stuck = {rank for each in missing for rank in each.waiting}
    for each in missing:
        free = tuple(rank for rank in each.ranks if rank not in stuck)
        if free:
            return each._replace(ranks=free)
    return None
