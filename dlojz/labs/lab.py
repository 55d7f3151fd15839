"""The lab as the student holds it: check, hint, predict, reveal, progress.

Layer 6 (labs). Invariant: no method raises for a mistake of the student, nor changes anything in the notebook; each
answers at once, in the notebook's language.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from dlojz.labs.environment import environment
from dlojz.labs.exercise import Exercise, judge
from dlojz.labs.prediction import Prediction
from dlojz.labs.progress import Progress
from dlojz.labs.verdict import Said, Verdict, show
from dlojz.schema import one_of
from dlojz.text import say


class Lab:
    """One lab, open in a notebook.

    Args:
        number: Two digits, e.g. `01`.
        title: In both languages.
        exercises: In the order of the notebook.
        predictions: What the student writes down before it is computed or measured.
        root: Folder of the runs, beside which the progress is kept.
    """

    def __init__(
        self,
        number: str,
        title: Said,
        *,
        exercises: Iterable[Exercise],
        predictions: Iterable[Prediction],
        root: Path,
    ) -> None:
        self.number = number
        self.title = title
        self.exercises = {exercise.id: exercise for exercise in exercises}
        self.predictions = {prediction.id: prediction for prediction in predictions}
        self._predicted: dict[str, float] = {}
        self._hints_given: dict[str, int] = {}
        self._checked: list[tuple[datetime, str]] = []
        self._progress = Progress(root / f"progress-{number}.json")

    def environment(self) -> None:
        """Say what this machine offers: cores, memory, libraries, whether processes can talk to one another."""
        for line in environment():
            print(line)

    def check(self, exercise_id: str, answer: object) -> None:
        """Judge an answer and say at once what is wrong or that it is right."""
        exercise = self._exercise(exercise_id)
        if exercise is None:
            return
        self._checked.append((datetime.now(UTC), exercise_id))
        verdict = judge(exercise, answer)
        show(verdict)
        if verdict.state == "right":
            problem = self._progress.done(exercise_id, datetime.now(UTC))
            if problem:
                show(Verdict("note", problem))

    def hint(self, exercise_id: str) -> None:
        """Give a hint: the first, then the second; after that the second again."""
        exercise = self._exercise(exercise_id)
        if exercise is None:
            return
        index = min(self._hints_given.get(exercise_id, 0), len(exercise.hints) - 1)
        self._hints_given[exercise_id] = index + 1
        label = say(en="Hint", fr="Indice")
        show(Verdict("note", f"{label} {index + 1}/{len(exercise.hints)} — {exercise.hints[index]}"))

    def predict(self, prediction_id: str, value: object) -> None:
        """Write a figure down before it is computed or measured."""
        prediction = self._prediction(prediction_id)
        if prediction is None:
            return
        if value is ...:
            show(
                Verdict(
                    "todo",
                    say(
                        en=f"Write your figure in place of the dots: {prediction.question.en}",
                        fr=f"Écrivez votre valeur à la place des points : {prediction.question.fr}",
                    ),
                )
            )
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            show(
                Verdict(
                    "wrong",
                    say(
                        en=f"A prediction is one number ({prediction.unit}), but {value!r} was received.",
                        fr=f"Une prédiction est un nombre ({prediction.unit}), mais {value!r} a été reçu.",
                    ),
                )
            )
            return
        self._predicted[prediction_id] = float(value)
        show(
            Verdict(
                "note",
                say(
                    en=f"Noted: {prediction.format(value)}. Run on to see how close you are.",
                    fr=f"C’est noté : {prediction.format(value)}. Continuez pour voir si vous êtes proche.",
                ),
            )
        )

    def reveal(self, prediction_id: str, value: float | None) -> None:
        """Lay the figure computed or measured over the one the student wrote down."""
        prediction = self._prediction(prediction_id)
        if prediction is None:
            return
        if prediction_id not in self._predicted:
            show(
                Verdict(
                    "todo",
                    say(
                        en=f'Predict first, then look: fill in the cell lab.predict("{prediction_id}", …) and run it.',
                        fr=f'Prédisez d’abord, regardez ensuite : complétez la cellule lab.predict("{prediction_id}", '
                        "…) et exécutez-la.",
                    ),
                )
            )
            return
        if value is not None:
            self._progress.predicted(prediction_id, self._predicted[prediction_id], float(value))
        show(prediction.laid_over(self._predicted[prediction_id], value))

    def progress(self) -> None:
        """Show which exercises of this lab are done."""
        done = self._progress.read()
        print(say(en=f"Lab {self.number} — {self.title}", fr=f"TP {self.number} — {self.title}"))
        for exercise in self.exercises.values():
            print(f"  {'✓' if exercise.id in done else '·'} {exercise.id:<22} {exercise.title}")
        finished = sum(exercise_id in done for exercise_id in self.exercises)
        print(
            say(
                en=f"{finished} of {len(self.exercises)} exercises done.",
                fr=f"Exercices réussis : {finished} sur {len(self.exercises)}.",
            )
        )

    def checked_before(self, moment: datetime | None) -> str | None:
        """The exercise that was checked last before a moment, here or, if right, before the kernel was restarted.

        Args:
            moment: with its time zone; where None, or where nothing was checked before it, the last of all is meant.

        Returns:
            the exercise's id; None if none has been checked yet.
        """
        known = [*self._done_before(), *self._checked]
        before = [entry for entry in known if moment is not None and entry[0] <= moment]
        return max(before or known, key=lambda entry: entry[0])[1] if known else None

    def _done_before(self) -> Iterator[tuple[datetime, str]]:
        for exercise_id, told in self._progress.read().items():
            with suppress(ValueError):
                when = datetime.fromisoformat(told)
                if exercise_id in self.exercises and when.tzinfo is not None:
                    yield when, exercise_id

    def _exercise(self, exercise_id: str) -> Exercise | None:
        if exercise_id not in self.exercises:
            show(Verdict("wrong", one_of("exercise", exercise_id, self.exercises)))
        return self.exercises.get(exercise_id)

    def _prediction(self, prediction_id: str) -> Prediction | None:
        if prediction_id not in self.predictions:
            show(Verdict("wrong", one_of("prediction", prediction_id, self.predictions)))
        return self.predictions.get(prediction_id)
