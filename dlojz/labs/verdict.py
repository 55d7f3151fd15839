"""What a lab answers: right, wrong, or still to do, in the reader's language, as text and as a small box.

Layer 6 (labs). Invariant: every value is escaped before it is shown, and the box and the text say the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from dlojz.text import say
from dlojz.viz.markup import safe

State = Literal["right", "wrong", "todo", "note"]

# Blue and orange rather than green and red, and a mark besides: told apart without seeing colours.
_LOOK: dict[State, tuple[str, str]] = {
    "right": ("✓", "#0072B2"),
    "wrong": ("✗", "#D55E00"),
    "todo": ("…", "#777777"),
    "note": ("→", "#777777"),
}


class Said(NamedTuple):
    """A sentence in both languages; as a string, it is the reader's one."""

    en: str
    fr: str

    def __str__(self) -> str:
        return say(en=self.en, fr=self.fr)


class NotDone(NotImplementedError):  # noqa: N818 - a state of the work, not a fault
    """Raised by the stub of an exercise that the student has not written yet.

    Args:
        exercise_id: The exercise, as in `lab.check("…", …)`.
    """

    def __init__(self, exercise_id: str) -> None:
        self.exercise_id = exercise_id
        super().__init__(not_done(exercise_id))

    def _render_traceback_(self) -> list[str]:
        # IPython shows this in place of a stack of frames, which says nothing about work still to do.
        return [str(self)]


def not_done(exercise_id: str) -> str:
    """The sentence for an exercise that is still to do."""
    return say(
        en=f"Exercise “{exercise_id}” is still to do: write the part marked TODO, then run this cell again.",
        fr=f"L’exercice « {exercise_id} » reste à faire : écrivez la partie marquée TODO, puis relancez cette cellule.",
    )


@dataclass(frozen=True)
class Verdict:
    """One answer of a lab.

    Args:
        state: `right`, `wrong`, `todo`, or `note` (a hint, a figure laid beside another).
        message: Sentences a student can act on.
        printed: What the student's code printed while it was judged, already cut to a readable length.
    """

    state: State
    message: str
    printed: str = ""

    def __str__(self) -> str:
        text = f"{_LOOK[self.state][0]} {self.message}"
        return f"{text}\n{self._heading()}\n{self.printed}" if self.printed else text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        mark, colour = _LOOK[self.state]
        style = f"border-left: 4px solid {colour}; padding: 0.3em 0.8em; margin: 0.3em 0"
        message = "<br>".join(safe(line) for line in self.message.split("\n"))
        lines = "\n".join(safe(line.expandtabs(8)) for line in self.printed.split("\n"))
        printed = f"<br>{safe(self._heading())}<pre>{lines}</pre>" if self.printed else ""
        return f'<div style="{style}"><b style="color: {colour}">{mark}</b> {message}{printed}</div>'

    @staticmethod
    def _heading() -> str:
        return say(en="Your code printed:", fr="Votre code a affiché :")


def show(verdict: Verdict) -> None:
    """Show a verdict in the notebook, or print it where there is none."""
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        print(verdict)
    else:
        display(verdict)
