"""Lab: the variable `lab` of a notebook, with check, hint, predict, reveal, progress, and what the machine offers.

The language comes from the notebook's own file, as the code of a lab is the same in both. Progress is remembered across
kernels; a damaged or unwritable file costs that memory, never the lab. No method raises for a mistake of the student.
`dlojz doctor` looks at the libraries in a separate process, so that the kernel stays light.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dlojz.base.contract import parse_json
from dlojz.base.errors import LabError
from dlojz.base.language import LANGUAGES, Language, language, one_of, say
from dlojz.labs.kit.exercise import Exercise, Prediction, Said, State, Verdict, judge, show
from dlojz.results.record import write_atomic


@dataclass(frozen=True)
class Predicted:
    """A figure that a student wrote down, and what it was.

    Args:
        predicted: As it was written down before it was first revealed.
        value: What was computed or measured.
    """

    predicted: float
    value: float


class LabProgress:
    """The exercises done and the predictions made in one lab, kept in one small JSON file.

    Args:
        path: The file; its folder is made when something is first written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, str]:
        """Exercise → when it was first done (UTC, ISO 8601); empty where there is no readable file."""
        return {str(exercise): str(moment) for exercise, moment in self._part("done").items()}

    def predictions(self) -> dict[str, Predicted]:
        """Prediction → the figure written down and what it was; what cannot be read is left out."""
        found = {}
        for prediction, told in self._part("predictions").items():
            pair = (told.get("predicted"), told.get("value")) if isinstance(told, dict) else (None, None)
            numbers = [float(one) for one in pair if isinstance(one, (int, float)) and math.isfinite(one)]
            if len(numbers) == 2:
                found[str(prediction)] = Predicted(*numbers)
        return found

    def done(self, exercise_id: str, moment: datetime) -> str | None:
        """Remember that an exercise is done; a sentence if that could not be written."""
        done = self.read()
        if exercise_id in done:
            return None
        return self._write({**done, exercise_id: moment.isoformat(timespec="seconds")}, self.predictions())

    def predicted(self, prediction_id: str, predicted: float, value: float) -> None:
        """Remember a prediction when it is first revealed; a second try, made in knowledge of the value, is not kept.

        What cannot be written is not told: the two figures have been shown, and nothing else was at stake.
        """
        known = self.predictions()
        if prediction_id not in known and math.isfinite(predicted) and math.isfinite(value):
            self._write(self.read(), {**known, prediction_id: Predicted(predicted, value)})

    def _part(self, name: str) -> dict[str, Any]:
        try:
            content = parse_json(self._path.read_bytes())
        except (OSError, LabError):
            return {}
        part = content.get(name) if isinstance(content, dict) else None
        return part if isinstance(part, dict) else {}

    def _write(self, done: dict[str, str], predictions: dict[str, Predicted]) -> str | None:
        """Replace the file; a sentence if that could not be done."""
        content: dict[str, Any] = {"schema_version": 1, "done": done}
        if predictions:
            content["predictions"] = {name: vars(one) for name, one in predictions.items()}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            return say(
                en=f"Your progress could not be saved in {self._path.parent} ({error.strerror}); the answer stands.",
                fr=f"Votre progression n’a pas pu être enregistrée dans {self._path.parent} ({error.strerror}) ; "
                "la réponse reste acquise.",
            )
        return None


MAX_NOTEBOOK_BYTES = 64 * 2**20


def notebook_language() -> Language:
    """The language of the open notebook.

    JupyterLab gives the kernel the path of the notebook (`$JPY_SESSION_NAME`); nbclient, nbval and most other tools
    start the kernel in the notebook's folder. In this order: the metadata of the file, the name of its folder, the
    name of the working folder, then the general choice (`$DLOJZ_LANG`, else English).
    """
    return next(_clues(), language())


def _clues() -> Iterator[Language]:
    session = os.environ.get("JPY_SESSION_NAME")
    names = []
    if session:
        path = Path(session)
        names += [_metadata_language(path), path.parent.name]
    for name in [*names, Path.cwd().name]:
        yield from (known for known in LANGUAGES if name == known)


def _metadata_language(path: Path) -> str | None:
    """What `dlojz labs build` wrote into the notebook; None where the file is no such notebook."""
    try:
        if path.stat().st_size > MAX_NOTEBOOK_BYTES:
            return None
        name = json.loads(path.read_bytes())["metadata"]["dlojz"]["language"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) else None


_SHOWN = ("torch", "deepspeed", "cores", "memory", "gloo", "slurm")
_MARKS = {"ok": "✓", "warning": "!", "problem": "✗"}
_TIMEOUT_S = 180


def environment() -> list[str]:
    """Ask `dlojz doctor` what the machine offers: a line for each check, then what to do about what is missing."""
    command = [
        sys.executable,
        "-c",
        "import sys; from dlojz.cli.main import main; sys.exit(main())",
        "doctor",
        "--json",
    ]
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env={**os.environ, "DLOJZ_LANG": language()},
        )
        checks = json.loads(answer.stdout)["checks"]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError) as error:
        return [
            say(
                en=f"`dlojz doctor` gave no answer ({type(error).__name__}): run it in a terminal.",
                fr=f"`dlojz doctor` n’a pas répondu ({type(error).__name__}) : lancez-le dans un terminal.",
            )
        ]
    lines = [f"✓ {'python':<10} {sys.version.split()[0]}"]
    for check in checks:
        if check["name"] in _SHOWN or check["state"] != "ok":
            found = check["found"].replace(sys.executable, "python").replace(str(Path.home()), "~")
            lines.append(f"{_MARKS[check['state']]} {_label(check['name']):<10} {found}")
            if check["advice"]:
                lines.append(f"  → {check['advice']}")
    return lines


def _label(name: str) -> str:
    return {"cores": say(en="cores", fr="cœurs"), "memory": say(en="memory", fr="mémoire")}.get(name, name)


def _tell(state: State, en: str, fr: str) -> None:
    show(Verdict(state, say(en=en, fr=fr)))


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
        self._progress = LabProgress(root / f"progress-{number}.json")

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
            _tell(
                "todo",
                en=f"Write your figure in place of the dots: {prediction.question.en}",
                fr=f"Écrivez votre valeur à la place des points : {prediction.question.fr}",
            )
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            _tell(
                "wrong",
                en=f"A prediction is one number ({prediction.unit}), but {value!r} was received.",
                fr=f"Une prédiction est un nombre ({prediction.unit}), mais {value!r} a été reçu.",
            )
            return
        self._predicted[prediction_id] = float(value)
        _tell(
            "note",
            en=f"Noted: {prediction.format(value)}. Run on to see how close you are.",
            fr=f"C’est noté : {prediction.format(value)}. Continuez pour voir si vous êtes proche.",
        )

    def reveal(self, prediction_id: str, value: float | None) -> None:
        """Compare the figure that was written down with the one computed or measured."""
        prediction = self._prediction(prediction_id)
        if prediction is None:
            return
        if prediction_id not in self._predicted:
            _tell(
                "todo",
                en=f'Predict first, then look: fill in the cell lab.predict("{prediction_id}", …) and run it.',
                fr=f'Prédisez d’abord, regardez ensuite : complétez la cellule lab.predict("{prediction_id}", '
                "…) et exécutez-la.",
            )
            return
        if value is not None:
            self._progress.predicted(prediction_id, self._predicted[prediction_id], float(value))
        show(prediction.compare(self._predicted[prediction_id], value))

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
