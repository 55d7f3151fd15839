"""Lab 02: questions put to the student's own functions, once these are written.

Layer 6 (labs). Invariant: what is still to do is said, never raised; nothing is answered in the student's place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlojz.labs.memory_state_exercises import OPTIMIZERS, PRECISIONS
from dlojz.labs.verdict import NotDone, Verdict


class Lines(str):
    """Some lines of text that a notebook shows as they are."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def asked(question: Callable[[], Any]) -> Any:
    """What a question gives that calls functions of the student, or which of these is still to do."""
    try:
        return question()
    except NotDone as error:
        return Verdict("todo", str(error))


def states_table(bytes_per_parameter: Callable[[str, str], float]) -> Lines | Verdict:
    """Bytes per parameter by precision and optimizer, by the student's function."""
    try:
        rows = [[bytes_per_parameter(precision, optimizer) for optimizer in OPTIMIZERS] for precision in PRECISIONS]
    except NotDone as error:
        return Verdict("todo", str(error))
    lines = [" " * 20 + "".join(f"{optimizer:>10}" for optimizer in OPTIMIZERS)]
    for precision, row in zip(PRECISIONS, rows, strict=True):
        lines.append(f"{precision:<20}" + "".join(f"{value!s:>10}" for value in row))
    return Lines("\n".join(lines))
