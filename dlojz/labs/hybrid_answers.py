"""Lab 07: what students' functions give back, read into plain numbers and groups, or refused by name.

Layer 6 (labs). Invariant: what cannot be read is refused by a sentence that says what is expected.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from dlojz.labs.exercise import Wrong
from dlojz.text import say

MAX_GROUPS = 4096
"""A list that grows beyond this is a loop gone wrong."""


def refuse_nothing(given: Any) -> None:
    """Refuse None, which is what a function without return gives.

    Raises:
        Wrong: for None.
    """
    if given is None:
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return.",
                fr="Votre fonction ne renvoie rien : terminez-la par return.",
            )
        )


def read_triple(given: Any, names: str) -> tuple[int, int, int]:
    """Three whole numbers.

    Args:
        given: what the student's function returned.
        names: what the three are, as a student reads it, e.g. `(pp, dp, tp)`.

    Raises:
        Wrong: for nothing, something that is no triple, or a number that is not whole.
    """
    refuse_nothing(given)
    three = tuple(given) if isinstance(given, tuple | list) else ()
    if len(three) != 3:
        raise Wrong(
            say(
                en=f"Three numbers are expected, {names}, but {_told(given)} was returned.",
                fr=f"On attend trois nombres, {names}, mais {_told(given)} a été renvoyé.",
            )
        )
    first, second, third = (_whole(number, names) for number in three)
    return first, second, third


def read_groups(given: Any, ranks: int) -> list[tuple[int, ...]]:
    """Groups of ranks, each sorted, in the order of their first ranks.

    Args:
        given: what the student's function returned.
        ranks: how many ranks there are.

    Raises:
        Wrong: for nothing, for something that is no list of lists of ranks, for a rank that does not exist, is in two
            groups or in none.
    """
    refuse_nothing(given)
    groups: list[tuple[int, ...]] = []
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise Wrong(_no_groups(given))
    for group in given:
        if isinstance(group, str) or not isinstance(group, Iterable):
            raise Wrong(_no_groups(given))
        groups.append(tuple(sorted(_whole(rank, say(en="ranks", fr="des rangs")) for rank in group)))
        if len(groups) > MAX_GROUPS:
            raise Wrong(
                say(
                    en=f"There are more than {MAX_GROUPS} groups: look for a loop that adds too many.",
                    fr=f"Il y a plus de {MAX_GROUPS} groupes : cherchez une boucle qui en ajoute trop.",
                )
            )
    _refuse_other_ranks(groups, ranks)
    return sorted(groups)


def _refuse_other_ranks(groups: list[tuple[int, ...]], ranks: int) -> None:
    """Each rank once."""
    listed = [rank for group in groups for rank in group]
    for rank in listed:
        if not 0 <= rank < ranks:
            raise Wrong(
                say(
                    en=f"There is no rank {rank} among {ranks}: they go from 0 to {ranks - 1}.",
                    fr=f"Il n’y a pas de rang {rank} parmi {ranks} : ils vont de 0 à {ranks - 1}.",
                )
            )
        if listed.count(rank) > 1:
            raise Wrong(
                say(
                    en=f"Rank {rank} stands in two groups of one axis (of {ranks} ranks); each rank has exactly one.",
                    fr=f"Le rang {rank} figure dans deux groupes d’un même axe (sur {ranks} rangs) ; chaque rang en a "
                    "un seul.",
                )
            )
    missing = sorted(set(range(ranks)) - set(listed))
    if missing:
        raise Wrong(
            say(
                en=f"Rank {missing[0]} stands in no group (of {ranks} ranks, {len(listed)} are listed): along each "
                "axis every rank has its group.",
                fr=f"Le rang {missing[0]} ne figure dans aucun groupe ({len(listed)} rangs sur {ranks} sont cités) : "
                "selon chaque axe, tout rang a le sien.",
            )
        )


def _no_groups(given: Any) -> str:
    return say(
        en=f"A list of groups such as [[0, 1], [2, 3]] is expected, but {_told(given)} was returned.",
        fr=f"On attend une liste de groupes comme [[0, 1], [2, 3]], mais {_told(given)} a été renvoyé.",
    )


def _told(given: Any) -> str:
    return repr(given)[:60]


def _whole(number: Any, names: str) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise Wrong(
            say(
                en=f"Whole numbers are expected ({names}), but {_told(number)} stands among them: divide with // and "
                "not with /.",
                fr=f"On attend des nombres entiers ({names}), mais {_told(number)} s’y trouve : divisez par //, et non "
                "par /.",
            )
        ) from None
