"""Where a student stands in the whole set: exercises done, predictions made and how good, what comes next.

Layer 6 (labs). Invariant: the files of progress are only read, and one that is damaged counts as empty; what is shown
as done is what a lab's own check has found right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlojz.labs.catalogue import NUMBERS, content_of
from dlojz.labs.contents import LABS, LabEntry
from dlojz.labs.notebook import notebook_language
from dlojz.labs.prediction import Prediction
from dlojz.labs.progress import Predicted, Progress
from dlojz.runs.store import runs_root
from dlojz.text import use_language
from dlojz.viz import progress_table


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One lab as a student has left it.

    Args:
        entry: The lab.
        exercises: Id and title of each, in the order of the notebook; empty where the lab is not installed.
        done: Exercise → when it was first done (UTC, ISO 8601).
        predictions: How many the lab asks for.
        made: How many were written down and revealed.
        good: How many of these were within their tolerance at the first try.
    """

    entry: LabEntry
    exercises: tuple[tuple[str, str], ...]
    done: dict[str, str]
    predictions: int
    made: int
    good: int

    @property
    def to_do(self) -> tuple[tuple[str, str], ...]:
        """Id and title of the exercises that are not done."""
        return tuple(exercise for exercise in self.exercises if exercise[0] not in self.done)

    @property
    def is_finished(self) -> bool:
        """Whether every exercise is done."""
        return bool(self.exercises) and not self.to_do

    def data(self) -> dict[str, Any]:
        """The standing as plain JSON data."""
        return {
            "lab": self.entry.number,
            "title": str(self.entry.title),
            "notebook": self.entry.notebook,
            "exercises": [name for name, _ in self.exercises],
            "done": self.done,
            "predictions": self.predictions,
            "predictions_made": self.made,
            "predictions_good": self.good,
            "finished": self.is_finished,
        }


@dataclass(frozen=True)
class Overview:
    """All labs as a student has left them; shows itself as a table, in a notebook and at a terminal."""

    standings: tuple[Standing, ...]

    @property
    def next_lab(self) -> Standing | None:
        """The lab to go on with: the one worked on last if something is left in it, else the first that is not done."""
        open_ones = [one for one in self.standings if one.exercises and not one.is_finished]
        begun = [one for one in open_ones if one.done]
        if begun:
            return max(begun, key=lambda one: max(one.done.values()))
        return open_ones[0] if open_ones else None

    def rows(self) -> list[progress_table.Row]:
        """One row of the table per lab."""
        return [
            progress_table.Row(
                number=one.entry.number,
                title=str(one.entry.title),
                notebook=one.entry.notebook,
                done=len(one.exercises) - len(one.to_do),
                exercises=len(one.exercises),
                predictions=one.predictions,
                made=one.made,
                good=one.good,
            )
            for one in self.standings
        ]

    def advice(self) -> progress_table.Advice | None:
        """What to do next; None where nothing is left."""
        following = self.next_lab
        if following is None:
            return None
        return progress_table.Advice(
            number=following.entry.number,
            title=str(following.entry.title),
            notebook=following.entry.notebook,
            exercise=following.to_do[0][1],
        )

    def page(self) -> str:
        """The overview as a page of its own, without links to notebooks, which may lie elsewhere."""
        advice = self.advice()
        rows = [replace(row, notebook="") for row in self.rows()]
        return progress_table.progress_page(rows, advice and replace(advice, notebook=""))

    def data(self) -> dict[str, Any]:
        """The overview as plain JSON data."""
        following = self.next_lab
        upcoming = None if following is None else {"lab": following.entry.number, "exercise": following.to_do[0][0]}
        return {"labs": [one.data() for one in self.standings], "next": upcoming}

    def __str__(self) -> str:
        return progress_table.progress_text(self.rows(), self.advice())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return progress_table.progress_html(self.rows(), self.advice())


def overview(*, root: Path | None = None) -> Overview:
    """Where you stand in all labs, in the language of the notebook that calls.

    Args:
        root: Folder of the runs, where the progress is kept; by default that of `dlojz.runs()`.
    """
    use_language(notebook_language())
    return read_overview(root or runs_root())


def read_overview(root: Path) -> Overview:
    """Where a student stands whose runs and progress are kept in a folder."""
    return Overview(tuple(_standing(entry, root) for entry in LABS))


def _standing(entry: LabEntry, root: Path) -> Standing:
    if entry.number not in NUMBERS:
        return Standing(entry=entry, exercises=(), done={}, predictions=0, made=0, good=0)
    content = content_of(entry.number)
    progress = Progress(root / f"progress-{entry.number}.json")
    known = [exercise.id for exercise in content.EXERCISES]
    asked = {prediction.id: prediction for prediction in content.PREDICTIONS}
    made = {name: told for name, told in progress.predictions().items() if name in asked}
    return Standing(
        entry=entry,
        exercises=tuple((exercise.id, str(exercise.title)) for exercise in content.EXERCISES),
        done={name: moment for name, moment in progress.read().items() if name in known},
        predictions=len(asked),
        made=len(made),
        good=sum(is_good(asked[name], told) for name, told in made.items()),
    )


def is_good(prediction: Prediction, told: Predicted) -> bool:
    """Whether a figure was predicted within the prediction's relative tolerance; one of nothing only exactly."""
    return abs(told.predicted - told.value) <= prediction.tolerance * abs(told.value)
