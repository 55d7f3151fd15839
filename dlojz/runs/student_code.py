"""Who shows a student's code beside the solution: the labs, which say so when one is opened.

Layer 5. Invariant: what stands above the runs is not imported here; it registers what answers.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dlojz.schema import LabError
from dlojz.text import say

if TYPE_CHECKING:
    from dlojz.runs.handle import Run

Answer = Callable[["Run", str | None], object]
_ANSWERS: list[Answer] = []


def answer_with(answer: Answer | None) -> None:
    """Let this answer from now on; with None, nobody.

    Args:
        answer: given a run and the id of an exercise, or None for the one that the run belongs to, what shows both.
    """
    _ANSWERS[:] = [answer] if answer is not None else []


def beside_the_solution(run: Run, exercise: str | None) -> object:
    """The student's code beside the solution.

    Raises:
        LabError: if no lab is open, or the one that is cannot tell.
    """
    if not _ANSWERS:
        raise LabError(
            say(
                en='no lab is open here, so that there is no code of yours to show: open one with labs.start("01"), or '
                "write `dlojz diff NOTEBOOK EXERCISE` in a terminal.",
                fr="aucun TP n’est ouvert ici, il n’y a donc pas de code à montrer : ouvrez-en un avec "
                'labs.start("01"), ou écrivez `dlojz diff NOTEBOOK EXERCICE` dans un terminal.',
            )
        )
    return _ANSWERS[0](run, exercise)


def launched_utc(run_id: str) -> datetime | None:
    """When a run was asked for first, as its name tells it; None where it tells none."""
    try:
        return datetime.strptime(run_id[:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return None
