"""Open a lab, and compare a student's answer with the solution.

Only the part between the marks of an exercise is compared, as text: nothing of either side is executed, and every line
is escaped. The cell is found by its line `lab.check("…", …)` or `lab.predict("…", …)`, else by its id `EXERCISE-…` from
`source.compose`. The list of the labs is in `dlojz.labs.kit.contents`.
"""

from __future__ import annotations

import difflib
import importlib
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlojz.base.errors import LabError
from dlojz.base.files import COURSE
from dlojz.base.language import one_of, refusal, say, use_language
from dlojz.base.table import safe, visible
from dlojz.display.style import BLUE, ORANGE, ORANGE_TINT, SKY_TINT
from dlojz.labs.kit.contents import LABS, entry_of
from dlojz.labs.kit.lab import Lab, notebook_language
from dlojz.labs.kit.source import CALLED, Code, answer_cell, cell_text, open_notebook, read_notebook, source_of, split
from dlojz.running.folder import launched_utc
from dlojz.running.run import answer_with

if TYPE_CHECKING:
    from dlojz.running.run import Run

MOST_LINES = 400
WIDE = 110
_MARKS: dict[str, tuple[str, str, str]] = {  # sign, colour, and how the text is set off besides
    "same": (" ", "transparent", ""),
    "left": ("-", ORANGE_TINT, f"border-left:3px solid {ORANGE}"),
    "right": ("+", SKY_TINT, f"border-left:3px dashed {BLUE}"),
}


@dataclass(frozen=True)
class DifferencePair:
    """One line of the comparison; a side that has none is None."""

    left: str | None
    right: str | None

    @property
    def same(self) -> bool:
        """Whether both sides say the same."""
        return self.left == self.right


@dataclass(frozen=True)
class Difference:
    """An answer beside the solution; shows itself in a notebook and in a terminal.

    Args:
        exercise: its id.
        notebook: name of the student's file.
        answer, solution: the lines of either side.
        todo: the answer is still the stub.
    """

    exercise: str
    notebook: str
    answer: tuple[str, ...]
    solution: tuple[str, ...]
    todo: bool = False

    @property
    def pairs(self) -> list[DifferencePair]:
        """The lines of both sides, those that are the same beside one another."""
        found: list[DifferencePair] = []
        matcher = difflib.SequenceMatcher(None, self.answer, self.solution, autojunk=False)
        for _, start, end, other, until in matcher.get_opcodes():
            left, right = self.answer[start:end], self.solution[other:until]
            for number in range(max(len(left), len(right))):
                found.append(DifferencePair(_at(left, number), _at(right, number)))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "exercise": self.exercise,
            "notebook": self.notebook,
            "todo": self.todo,
            "answer": list(self.answer),
            "solution": list(self.solution),
        }

    def __repr__(self) -> str:
        titles = self._titles()
        lines = [self._title(), *([self._still_to_do()] if self.todo else [])]
        widths = [
            max([len(titles[0]), *(len(visible(line)) for line in side)]) for side in (self.answer, self.solution)
        ]
        if sum(widths) > WIDE:
            return "\n".join([*lines, f"- {titles[0]}", f"+ {titles[1]}", "", *self._stacked()])
        width = widths[0]
        lines.append(f"  {titles[0]:<{width}} │ {titles[1]}")
        for pair in self.pairs:
            left, right = (visible(line) if line is not None else "" for line in (pair.left, pair.right))
            signs = " " if pair.same else "≠"
            lines.append(f"{signs} {left:<{width}} │ {right}".rstrip())
        return "\n".join(lines)

    def _stacked(self) -> list[str]:
        """Both sides in one column, where they are too wide for two."""
        lines = []
        for pair in self.pairs:
            if pair.same:
                lines.append(f"  {visible(pair.left or '')}")
            else:
                lines += [f"- {visible(pair.left)}"] if pair.left is not None else []
                lines += [f"+ {visible(pair.right)}"] if pair.right is not None else []
        return lines

    def _repr_html_(self) -> str:
        rows = "".join(
            "<tr>"
            + _cell(pair.left, "same" if pair.same else "left")
            + _cell(pair.right, "same" if pair.same else "right")
            + "</tr>"
            for pair in self.pairs
        )
        heads = "".join(f'<th scope="col" style="text-align:left">{safe(title)}</th>' for title in self._titles())
        note = f"<p><b>{safe(self._still_to_do())}</b></p>" if self.todo else ""
        return (
            f'{note}<table style="border-collapse:collapse;table-layout:fixed;width:100%;max-width:70em">'
            f'<caption style="text-align:left;font-weight:bold">'
            f"{safe(self._title())}</caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        )

    def _title(self) -> str:
        return say(
            en=f"Exercise “{self.exercise}” of {visible(self.notebook)}",
            fr=f"Exercice « {self.exercise} » de {visible(self.notebook)}",
        )

    @staticmethod
    def _titles() -> tuple[str, str]:
        return say(en="your answer", fr="votre réponse"), say(en="the solution", fr="la solution")

    @staticmethod
    def _still_to_do() -> str:
        return say(
            en="This exercise is still to do: the solution is more useful after a try of your own.",
            fr="Cet exercice reste à faire : la solution sert davantage après un essai de votre part.",
        )


def diff(exercise: str, notebook: str | Path | None = None, *, root: Path | None = None) -> Difference:
    """The student's answer to an exercise beside the solution.

    Several solutions are right; `lab.check` judges what an answer does, this only shows how it is written.

    Args:
        exercise: id, as in `lab.check("attention", …)`.
        notebook: the student's file, saved; by default the one that calls.
        root: the checkout that holds the solutions; by default the one this package lies in.

    Raises:
        LabError: if the notebook or the solutions are not there or not readable, or the exercise is not in them.
    """
    path = Path(notebook) if notebook is not None else open_notebook()
    content = read_notebook(path)
    source = source_of(path, content, root or COURSE)
    codes = {cell.name: cell for cell in source.cells if isinstance(cell, Code) and cell.name and cell.has_solution}
    if exercise not in codes:
        raise LabError(one_of("exercise", exercise, codes))
    cells = [cell for cell in content["cells"] if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    told = CALLED.search(codes[exercise].text)
    text = answer_cell(
        exercise, told[1] if told else exercise, [(str(cell.get("id") or ""), cell_text(cell)) for cell in cells]
    )
    if text is None:
        raise refusal(
            en=f"the notebook {path.name} has no cell for the exercise {exercise!r}: it was removed; get a fresh "
            "copy of the notebook and paste your answers into it.",
            fr=f"le notebook {path.name} n’a plus de cellule pour l’exercice {exercise!r} : elle a été supprimée ; "
            "reprenez une copie neuve du notebook et recollez-y vos réponses.",
        )
    answer, solution = split(text, codes[exercise].text)
    todo = any("labs.NotDone(" in line or line.strip().startswith("...,") for line in answer)
    return Difference(exercise, path.name, _trimmed(answer), _trimmed(solution), todo)


def diff_of_run(lab: Lab, run: Run, exercise: str | None = None) -> Difference:
    """The student's answer beside the solution, for the exercise that a run belongs to: `run.diff()`.

    Args:
        lab: the one that is open.
        run: which; the exercise is the last one checked before it was asked for, else the last one checked.
        exercise: id of another one.

    Raises:
        LabError: if none is named and none has been checked yet, or `diff` refuses it.
    """
    wanted = exercise or lab.checked_before(launched_utc(run.run_id))
    if wanted is None:
        raise refusal(
            en="no exercise of this lab has been checked yet: run the cell of one, or name it, as in "
            f'run.diff("{next(iter(lab.exercises))}"); there are {", ".join(lab.exercises)}.',
            fr="aucun exercice de ce TP n’a encore été vérifié : exécutez la cellule de l’un d’eux, ou nommez-le, "
            f'par exemple run.diff("{next(iter(lab.exercises))}") ; il y a {", ".join(lab.exercises)}.',
        )
    return diff(wanted)


def _trimmed(lines: Sequence[str]) -> tuple[str, ...]:
    text = textwrap.dedent("\n".join(lines)).strip("\n")
    kept = text.split("\n") if text else []
    return tuple(line.rstrip() for line in kept[:MOST_LINES])


def _at(lines: Sequence[str], number: int) -> str | None:
    return lines[number] if number < len(lines) else None


def _cell(line: str | None, kind: str) -> str:
    sign, color, edge = _MARKS[kind if line is not None else "same"]
    text = "&nbsp;" if line is None else f"{sign} {safe(line)}"
    return (
        f'<td style="text-align:left;font-family:monospace;white-space:pre-wrap;vertical-align:top;'
        f'background:{color};color:inherit;{edge}">{text}</td>'
    )


NUMBERS = tuple(entry.number for entry in LABS)


def start(number: str, *, root: Path | None = None) -> Lab:
    """Open a lab in the language of the notebook that calls.

    Args:
        number: Two digits, e.g. `01`.
        root: Folder of the runs, where the progress is kept; by default that of `dlojz.runs()`.

    Raises:
        LabError: if there is no such lab; the sentence lists those that exist.
    """
    entry = entry_of(number)
    use_language(notebook_language())
    _give_ranks()
    content = content_of(number)
    lab = Lab(
        number, entry.title, exercises=content.EXERCISES, predictions=content.PREDICTIONS, root=root or _runs_root()
    )
    answer_with(lambda run, exercise: diff_of_run(lab, run, exercise))
    return lab


def content_of(number: str) -> Any:
    """The module of a lab: its `EXERCISES` and its `PREDICTIONS`, in the order of the notebook.

    Raises:
        LabError: if there is no such lab; the sentence lists those that exist.
    """
    return importlib.import_module(f"dlojz.labs.{entry_of(number).folder}")


def _give_ranks() -> None:
    """`%%ranks` and `ranks`, where there is a notebook to have them; no rank is started yet."""
    from IPython.core.getipython import get_ipython

    from dlojz.ranks import load_ipython_extension

    shell = get_ipython()
    if shell is not None:
        load_ipython_extension(shell)


def _runs_root() -> Path:
    from dlojz.running.store import runs_root

    return runs_root()
