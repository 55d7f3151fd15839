"""Progress page over all labs, as HTML and as text: exercises done, predictions and how good, what to do next.

Files of progress are only read, and a damaged one counts as empty. Every text goes through `safe`, and each bar holds
its two numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlojz.base.language import language, say, use_language
from dlojz.base.table import safe, visible
from dlojz.display.style import BLACK, BLUE, FRAME, INK, SHADE, SKY, WHITE
from dlojz.labs.kit.contents import LABS, LabEntry
from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.kit.lab import NUMBERS, LabProgress, Predicted, content_of, notebook_language
from dlojz.running.store import runs_root

STYLE = (
    ".dlojz-progress{border-collapse:collapse;margin:.5em 0}"
    # JupyterLab aligns the cells of its tables to the right: one more class outweighs it.
    "table.dlojz-progress.dlojz-progress th,table.dlojz-progress.dlojz-progress td{padding:.3em .9em;text-align:left;"
    f"border-bottom:1px solid {FRAME}}}"
    f".dlojz-progress .track{{position:relative;width:11em;height:1.35em;background:{SHADE};border-radius:3px}}"
    ".dlojz-progress .fill{height:100%;border-radius:3px}"
    f".dlojz-progress .told{{position:absolute;inset:0;text-align:center;line-height:1.35em;color:{BLACK}}}"
)

PAGE_STYLE = f"body{{font-family:sans-serif;margin:2em;color:{INK};background:{WHITE}}}"


@dataclass(frozen=True, kw_only=True)
class LabRow:
    """One lab of the table.

    Args:
        number, title: Of the lab.
        notebook: File name, for the link; empty where there is nothing beside the page to lead to.
        done, exercises: How many exercises are done, of how many; no exercise where the lab is not installed.
        predictions, made, good: How many predictions there are, were made, and were good.
    """

    number: str
    title: str
    notebook: str
    done: int
    exercises: int
    predictions: int
    made: int
    good: int


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do next.

    Args:
        number, title, notebook: Of the lab.
        exercise: Title of the first exercise that is not done.
    """

    number: str
    title: str
    notebook: str
    exercise: str


def progress_html(rows: Sequence[LabRow], advice: Advice | None) -> str:
    """The table and the advice, for a notebook."""
    titles = (say(en="lab", fr="TP"), say(en="exercises", fr="exercices"), say(en="predictions", fr="prédictions"))
    head = "".join(f'<th scope="col">{safe(title)}</th>' for title in titles)
    body = "".join(
        f"<tr><td>{_link(row.notebook, f'{row.number} {row.title}')}</td>"
        f"<td>{_bar(row)}</td><td>{safe(told_predictions(row))}</td></tr>"
        for row in rows
    )
    return (
        f"<style>{STYLE}</style>"
        f'<table class="dlojz-progress"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        f"<p>{safe(total(rows))}</p>{_advice_html(advice)}"
    )


def progress_page(rows: Sequence[LabRow], advice: Advice | None) -> str:
    """The same as one page that refers to nothing outside itself."""
    heading = say(en="Where I stand in the labs", fr="Où j’en suis dans les TP")
    return (
        f'<!DOCTYPE html><html lang="{language()}"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(heading)}</title><style>{PAGE_STYLE}</style></head><body><h1>{safe(heading)}</h1>"
        f"{progress_html(rows, advice)}</body></html>\n"
    )


def _advice_html(advice: Advice | None) -> str:
    if advice is None:
        return f"<p><b>{safe(all_done())}</b></p>"
    before, after = sentence(advice)
    return f"<p>{safe(before)} {_link(advice.notebook, named(advice))}{safe(after)}</p>"


def _link(target: str, text: str) -> str:
    return f'<a href="{safe(target)}">{safe(text)}</a>' if target else safe(text)


def _bar(row: LabRow) -> str:
    if not row.exercises:
        return safe(not_there())
    percent = 100 * row.done / row.exercises
    color = BLUE if row.done == row.exercises else SKY
    # Light under black text; the full bar is told by its mark too.
    mark = "✓ " if row.done == row.exercises else ""
    told = safe(f"{mark}{row.done} / {row.exercises}")
    text = WHITE if row.done == row.exercises else BLACK
    return (
        f'<div class="track"><div class="fill" style="width:{percent:.0f}%;background:{safe(color)}"></div>'
        f'<div class="told" style="color:{safe(text)}">{told}</div></div>'
    )


def progress_text(rows: Sequence[LabRow], advice: Advice | None) -> str:
    """The same at a terminal."""
    width = max((len(visible(row.title)) for row in rows), default=0)
    lines = []
    for row in rows:
        told = f"{row.done:>2}/{row.exercises:<2}" if row.exercises else not_there()
        mark = "✓" if row.exercises and row.done == row.exercises else "·"
        lines.append(
            f"{mark} {visible(row.number)} {visible(row.title):<{width}}  {told}  {told_predictions(row)}".rstrip()
        )
    if advice is None:
        closing = all_done()
    else:
        before, after = sentence(advice)
        closing = f"{before} {visible(named(advice))}{visible(after)}"
    return "\n".join([*lines, total(rows), closing])


def total(rows: Sequence[LabRow]) -> str:
    """All exercises and predictions in one sentence."""
    done, exercises = sum(row.done for row in rows), sum(row.exercises for row in rows)
    made, good = sum(row.made for row in rows), sum(row.good for row in rows)
    return say(
        en=f"Exercises done: {done} of {exercises}; predictions made: {made}, good at the first try: {good}.",
        fr=f"Exercices réussis : {done} sur {exercises} ; prédictions faites : {made}, dont bonnes du premier coup : "
        f"{good}.",
    )


def told_predictions(row: LabRow) -> str:
    """The predictions of a lab in a few words; empty where there are none."""
    if not row.predictions:
        return ""
    if not row.made:
        return say(en=f"{row.predictions} to make", fr=f"{row.predictions} à faire")
    return say(
        en=f"{row.made} of {row.predictions} made, {row.good} good",
        fr=f"{row.made} sur {row.predictions} faites, {row.good} bonnes",
    )


def named(advice: Advice) -> str:
    """The lab of the advice."""
    return say(en=f"lab {advice.number}, {advice.title}", fr=f"TP {advice.number}, {advice.title}")


def sentence(advice: Advice) -> tuple[str, str]:
    """What stands before and after the lab's name."""
    return say(en="Next:", fr="La suite :"), f" — {advice.exercise}."


def not_there() -> str:
    """Said of a lab that this installation does not have."""
    return say(en="not installed", fr="non installé")


def all_done() -> str:
    """Said when nothing is left."""
    return say(en="Every exercise of every lab is done.", fr="Tous les exercices de tous les TP sont réussis.")


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

    def rows(self) -> list[LabRow]:
        """One row of the table per lab."""
        return [
            LabRow(
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

    def advice(self) -> Advice | None:
        """What to do next; None where nothing is left."""
        following = self.next_lab
        if following is None:
            return None
        return Advice(
            number=following.entry.number,
            title=str(following.entry.title),
            notebook=following.entry.notebook,
            exercise=following.to_do[0][1],
        )

    def page(self) -> str:
        """The overview as a page of its own, without links to notebooks, which may lie elsewhere."""
        advice = self.advice()
        rows = [replace(row, notebook="") for row in self.rows()]
        return progress_page(rows, advice and replace(advice, notebook=""))

    def data(self) -> dict[str, Any]:
        """The overview as plain JSON data."""
        following = self.next_lab
        upcoming = None if following is None else {"lab": following.entry.number, "exercise": following.to_do[0][0]}
        return {"labs": [one.data() for one in self.standings], "next": upcoming}

    def __str__(self) -> str:
        return progress_text(self.rows(), self.advice())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return progress_html(self.rows(), self.advice())


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
    progress = LabProgress(root / f"progress-{entry.number}.json")
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
