"""How many ranks a machine bears: what is refused, and what it would cost.

Layer 5. Invariant: a number that would stop the machine is refused before anything starts, with the figures.
"""

from __future__ import annotations

import psutil

from dlojz.launch.workers import cores_available
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import format_bytes

MOST_RANKS = 256
RANK_BYTES = 64 * 2**20
"""What one more rank takes: 40 MiB of its own once it has run an all-reduce (`%ranks status`), and some variables."""
_RANKS_PER_CORE = 8


class Refused(LabError):  # noqa: N818 - a sentence for the student, not a fault
    """A request about ranks that is refused; a notebook shows the sentence alone."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def number_of_ranks(text: object) -> int:
    """A number of ranks, as written after `%%ranks`.

    Raises:
        Refused: if it is no whole number from 1 to `MOST_RANKS`.
    """
    try:
        number = int(str(text)) if not isinstance(text, bool) else 0
    except ValueError:
        number = 0
    if 1 <= number <= MOST_RANKS:
        return number
    raise Refused(
        say(
            en=f"a number of ranks is a whole number from 1 to {MOST_RANKS}, e.g. %%ranks 4, but {str(text)!r} was "
            "received.",
            fr=f"un nombre de rangs est un entier de 1 à {MOST_RANKS}, par exemple %%ranks 4, mais {str(text)!r} a été "
            "reçu.",
        )
    )


def refuse_too_many(size: int, *, cores: int | None = None, available_bytes: int | None = None) -> None:
    """Refuse more ranks than the machine bears.

    Args:
        size: number of ranks.
        cores: of this process; by default those it has.
        available_bytes: memory that is free; by default what the system says.

    Raises:
        Refused: with the memory they would take, and how to insist.
    """
    cores = cores or cores_available()
    available_bytes = psutil.virtual_memory().available if available_bytes is None else available_bytes
    if size <= _RANKS_PER_CORE * cores and size * RANK_BYTES <= available_bytes:
        return
    needed, free = format_bytes(size * RANK_BYTES), format_bytes(available_bytes)
    raise Refused(
        say(
            en=f"{size} ranks would take about {needed} of memory ({free} free) and share {cores} "
            f"core{'s' if cores > 1 else ''}: take fewer, or insist with --force.",
            fr=f"{size} rangs prendraient environ {needed} de mémoire ({free} libres) et se partageraient {cores} "
            f"cœur{'s' if cores > 1 else ''} : prenez-en moins, ou insistez avec --force.",
        )
    )
