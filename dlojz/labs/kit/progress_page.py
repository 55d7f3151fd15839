"""Progress over all labs as a table, a page and text: exercises done, predictions and how good, what to do next.

Files of progress are only read, and a damaged one counts as empty.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlojz.base.language import language, say, use_language
from dlojz.base.table import Table, safe, tables_html, titles, visible
from dlojz.display.style import BLUE, INK, SKY, WHITE
from dlojz.labs.kit.contents import LABS, LabEntry
from dlojz.labs.kit.exercise import Challenge, Prediction
from dlojz.labs.kit.lab import NUMBERS, SCRIPT, LabProgress, Predicted, content_of, notebook_language
from dlojz.running.store import runs_root

PAGE_STYLE = f"body{{font-family:sans-serif;margin:2em;color:{INK};background:{WHITE}}}"


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One lab as a student has left it.

    Args:
        exercises: Id and title of each, in the order of the notebook; empty where the lab is not installed.
        done: Exercise → when it was first done (UTC, ISO 8601).
        predictions: How many the lab asks for.
        made: How many were written down and revealed.
        good: How many of these were within their tolerance at the first try.
        challenge: The best score in words; empty where there is no challenge, or none has been tried.
        score: The same as a number.
        script: Whether the student's own script was found right.
    """

    entry: LabEntry
    exercises: tuple[tuple[str, str], ...]
    done: dict[str, str]
    predictions: int
    made: int
    good: int
    challenge: str = ""
    score: float | None = None
    script: bool = False

    @property
    def to_do(self) -> tuple[tuple[str, str], ...]:
        """Id and title of the exercises that are not done."""
        return tuple(exercise for exercise in self.exercises if exercise[0] not in self.done)

    @property
    def is_finished(self) -> bool:
        """Whether every exercise is done."""
        return bool(self.exercises) and not self.to_do

    @property
    def told(self) -> tuple[str, ...]:
        """Lab, exercises, predictions, challenge and script in words: a row of the table."""
        count, mark = len(self.exercises) - len(self.to_do), "✓" if self.is_finished else "·"
        exercises = f"{count} / {len(self.exercises)}" if self.exercises else say(en="not installed", fr="non installé")
        predictions = say(
            en=f"{self.made} of {self.predictions} made, {self.good or 'none'} good",
            fr=f"{self.made} sur {self.predictions} faites, "
            f"{self.good or 'aucune'} bonne{'s' if self.good > 1 else ''}",
        )
        if not self.made:
            predictions = say(en=f"{self.predictions} to make", fr=f"{self.predictions} à faire")
        return (
            visible(f"{mark} {self.entry.number} {self.entry.title}"),
            exercises,
            predictions if self.predictions else "",
            self.challenge,
            "✓" if self.script else "",
        )

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
            "challenge": self.score,
            "script": self.script,
            "finished": self.is_finished,
        }


@dataclass(frozen=True)
class Overview:
    """All labs as a student has left them; shows itself as a table, in a notebook and at a terminal."""

    standings: tuple[Standing, ...]

    @property
    def next_lab(self) -> Standing | None:
        """The lab to go on with: the one worked on last if something is left in it, else the first that is not done."""
        open_ones = [standing for standing in self.standings if standing.exercises and not standing.is_finished]
        begun = [standing for standing in open_ones if standing.done]
        if begun:
            # ISO 8601 in UTC: texts sort as the moments do.
            return max(begun, key=lambda standing: max(standing.done.values()))
        return open_ones[0] if open_ones else None

    def table(self, *, linked: bool = True) -> Table:
        """One row per lab, and the sums.

        Args:
            linked: whether the labs lead to their notebooks, which are in the folder of the one that shows the table.
        """
        right, count = (
            sum(len(standing.done) for standing in self.standings),
            sum(len(standing.exercises) for standing in self.standings),
        )
        tries, good = (
            sum(standing.made for standing in self.standings),
            sum(standing.good for standing in self.standings),
        )
        total = say(
            en=f"Exercises done: {right} of {count}; predictions made: {tries}, good at the first try: {good}.",
            fr=f"Exercices réussis : {right} sur {count} ; prédictions faites : {tries}, dont bonnes du premier coup : "
            f"{good}.",
        )
        return Table(
            titles(
                en="lab; exercises; predictions; challenge; own script",
                fr="TP; exercices; prédictions; défi; script personnel",
            ),
            tuple(standing.told for standing in self.standings),
            align="l",
            shares=tuple(
                1 - len(standing.to_do) / len(standing.exercises) if standing.exercises else 0.0
                for standing in self.standings
            ),
            colors=tuple(BLUE if standing.is_finished else SKY for standing in self.standings),
            notes=(total,),
            links=tuple(standing.entry.notebook for standing in self.standings) if linked else (),
        )

    def _advice(self) -> tuple[str, str, str]:
        """What stands before the name of the lab to go on with, that name, and what stands after."""
        following = self.next_lab
        if following is None:
            text = say(en="Every exercise of every lab is done.", fr="Tous les exercices de tous les TP sont réussis.")
            return text, "", ""
        lab_text = f"{following.entry.number}, {following.entry.title}"
        return say(en="Next: ", fr="La suite : "), say(en="lab ", fr="TP ") + lab_text, f" — {following.to_do[0][1]}."

    def _html(self, linked: bool) -> str:
        advice = self._advice()
        lab = safe(advice[1])
        if linked and self.next_lab is not None:
            lab = f'<a href="{safe(self.next_lab.entry.notebook)}">{lab}</a>'
        return tables_html([self.table(linked=linked)]) + f"<p><b>{safe(advice[0])}{lab}{safe(advice[2])}</b></p>"

    def page(self) -> str:
        """The overview as one page that refers to nothing outside itself, without links to notebooks."""
        heading = say(en="Where I stand in the labs", fr="Où j’en suis dans les TP")
        return (
            f'<!DOCTYPE html><html lang="{language()}"><head><meta charset="utf-8">'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{safe(heading)}</title><style>{PAGE_STYLE}</style></head><body><h1>{safe(heading)}</h1>"
            f"{self._html(linked=False)}</body></html>\n"
        )

    def data(self) -> dict[str, Any]:
        """The overview as plain JSON data."""
        following = self.next_lab
        # The first exercise that is to do in the lab to go on with.
        upcoming = None if following is None else {"lab": following.entry.number, "exercise": following.to_do[0][0]}
        return {"labs": [standing.data() for standing in self.standings], "next": upcoming}

    def __str__(self) -> str:
        return f"{self.table()}\n{visible(''.join(self._advice()))}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._html(linked=True)


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
    exercises = [exercise for exercise in content.EXERCISES if not isinstance(exercise, Challenge)]
    exercise_ids = [exercise.id for exercise in exercises]
    scores = progress.scores()
    tried = [exercise for exercise in content.EXERCISES if isinstance(exercise, Challenge) and exercise.id in scores]
    predictions = {prediction.id: prediction for prediction in content.PREDICTIONS}
    # Figures of predictions that the lab no longer has do not count, nor do exercises, below.
    figures = {name: figure for name, figure in progress.predictions().items() if name in predictions}
    return Standing(
        entry=entry,
        exercises=tuple((exercise.id, str(exercise.title)) for exercise in exercises),
        done={name: moment for name, moment in progress.read().items() if name in exercise_ids},
        predictions=len(predictions),
        made=len(figures),
        good=sum(is_good(predictions[name], figure) for name, figure in figures.items()),
        challenge=", ".join(
            f"{'✓ ' if challenge.meets(scores[challenge.id]) else ''}{challenge.told(scores[challenge.id])}"
            for challenge in tried
        ),
        score=scores[tried[0].id] if tried else None,
        script=SCRIPT in progress.read(),
    )


def is_good(prediction: Prediction, figure: Predicted) -> bool:
    """Whether a figure was predicted within the prediction's tolerance; one of nothing only exactly."""
    return prediction.is_within(figure.predicted, figure.value)
