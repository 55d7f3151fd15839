"""Lab 05: orders as students write them, read and held to the rules that every pipeline schedule obeys.

Layer 6 (labs). Invariant: an order is judged by what the simulator makes of it, never by comparing it with another
text; what cannot be read is refused by a sentence that names the first thing wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from dlojz.labs.exercise import Wrong
from dlojz.pipeline.action import Action, parse_action
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.validity import problems
from dlojz.schema import LabError
from dlojz.text import say

MAX_ACTIONS = 10_000
"""A list that grows beyond this is a loop gone wrong."""
_SHORT = re.compile(r"[FBIW]\d{1,9}")


def read_order(given: Any, stage: int) -> list[Action]:
    """One rank's order, from texts such as `F0` (or `2F0`, with the stage) or from actions.

    Args:
        given: what the student's function returned.
        stage: the stage that `F0` means where no stage is written.

    Raises:
        Wrong: for nothing, for something that is no list, or for an entry that is no action.
    """
    if given is None:
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return.",
                fr="Votre fonction ne renvoie rien : terminez-la par return.",
            )
        )
    if isinstance(given, str | Action) or not isinstance(given, Iterable):
        raise Wrong(
            say(
                en=f'A list of actions such as ["F0", "B0"] is expected, but a {type(given).__name__} was returned.',
                fr='On attend une liste d’actions comme ["F0", "B0"], mais un objet de type '
                f"{type(given).__name__} a été renvoyé.",
            )
        )
    order = []
    for entry in given:
        order.append(_action(entry, stage))
        if len(order) > MAX_ACTIONS:
            raise Wrong(
                say(
                    en=f"The order has more than {MAX_ACTIONS} actions: look for a loop that adds too many.",
                    fr=f"L’ordre compte plus de {MAX_ACTIONS} actions : cherchez une boucle qui en ajoute trop.",
                )
            )
    return order


def _action(entry: Any, stage: int) -> Action:
    if isinstance(entry, Action):
        return entry
    if isinstance(entry, str):
        text = entry.strip()
        try:
            return parse_action(f"{stage}{text}" if _SHORT.fullmatch(text) else text)
        except LabError as error:
            raise Wrong(str(error)) from None
    raise Wrong(
        say(
            en=f"An order holds texts such as 'F0', but one of its entries is a {type(entry).__name__}.",
            fr=f"Un ordre contient des textes comme 'F0', mais l’un de ses éléments est de type "
            f"{type(entry).__name__}.",
        )
    )


def read_schedule(given: Any, ranks: int, micro_batches: int) -> Schedule:
    """A whole schedule of one stage per rank: a `Schedule`, or one list of actions per rank.

    Raises:
        Wrong: as `read_order`, and for another number of ranks, stages or micro-batches than asked for.
    """
    if isinstance(given, Schedule):
        size, wanted = (given.ranks, given.stages, given.micro_batches), (ranks, ranks, micro_batches)
        if size != wanted:
            raise Wrong(
                say(
                    en=f"{ranks} ranks with one stage each and {micro_batches} micro-batches are asked for, but your "
                    f"schedule has {size[0]} ranks, {size[1]} stages and {size[2]} micro-batches.",
                    fr=f"On demande {ranks} rangs d’un étage chacun et {micro_batches} micro-batches, mais votre "
                    f"ordonnancement a {size[0]} rangs, {size[1]} étages et {size[2]} micro-batches.",
                )
            )
        return given
    if given is None or isinstance(given, str) or not isinstance(given, Iterable):
        read_order(given, 0)  # which refuses it
        raise Wrong(
            say(
                en=f"One list of actions per rank is expected, but a {type(given).__name__} was returned.",
                fr=f"On attend une liste d’actions par rang, mais un objet de type {type(given).__name__} a été "
                "renvoyé.",
            )
        )
    rows = list(given)
    if len(rows) != ranks:
        raise Wrong(
            say(
                en=f"{ranks} lists are expected, one per rank, but {len(rows)} were returned.",
                fr=f"On attend {ranks} listes, une par rang, mais {len(rows)} ont été renvoyées.",
            )
        )
    return schedule_from([read_order(row, rank) for rank, row in enumerate(rows)], micro_batches)


def schedule_from(orders: list[list[Action]], micro_batches: int) -> Schedule:
    """A schedule of one stage per rank, not checked yet."""
    return Schedule.of("custom", orders, list(range(len(orders))), micro_batches)


def refuse_invalid(schedule: Schedule, memory_limit: float | None = None) -> None:
    """Refuse a schedule that cannot be executed, or keeps too much.

    Raises:
        Wrong: with the size of the case and the first problem.
    """
    found = problems(schedule, memory_limit)
    if found:
        raise Wrong(f"{case_of(schedule)}{capital(found[0])}")


def case_of(schedule: Schedule) -> str:
    """What the schedule was asked for, as the beginning of a sentence."""
    return say(
        en=f"With {schedule.ranks} rank(s) and {schedule.micro_batches} micro-batch(es): ",
        fr=f"Avec {schedule.ranks} rang(s) et {schedule.micro_batches} micro-batch(es) : ",
    )


def capital(sentence: str) -> str:
    """A problem as the end of a sentence, closed by a full stop."""
    return sentence if sentence.endswith(".") else f"{sentence}."
