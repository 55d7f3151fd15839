"""Lab: open one (`start`), its variable `lab` with check, hint, predict, reveal and progress, and compare an answer.

The language comes from the notebook's own file, as the code of a lab is the same in both. Progress is remembered across
kernels; a damaged or unwritable file costs that memory, never the lab. No method raises for a mistake of the student.
`dlojz doctor` looks at the libraries in another process, so that the kernel stays light.

`diff` compares the part between the marks of an exercise with the solution, as text: nothing of either side is
executed, and every line is escaped. The cell is found by its line `lab.check("…", …)` or `lab.predict("…", …)`, else by
its id `EXERCISE-…` from `source.compose`. The list of the labs is in `dlojz.labs.kit.contents`.
"""

import ast
import difflib
import importlib
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeGuard

from dlojz.base.contract import parse_json
from dlojz.base.errors import LabError
from dlojz.base.files import COURSE, write_atomic
from dlojz.base.language import LANGUAGES, Language, language, one_of, say, use_language
from dlojz.base.table import safe, visible
from dlojz.display.style import BLUE, ORANGE, ORANGE_TINT, SKY_TINT
from dlojz.labs.kit.answer_numbers import is_number, single
from dlojz.labs.kit.contents import LABS, entry_of
from dlojz.labs.kit.exercise import (
    Challenge,
    Exercise,
    NotDone,
    Prediction,
    Said,
    Sentences,
    State,
    Verdict,
    judge,
    made_with_refused,
    refused,
    show,
)
from dlojz.labs.kit.source import (
    CALLED,
    Code,
    answer_cell,
    cell_text,
    in_language,
    open_notebook,
    read_notebook,
    source_of,
    split,
)
from dlojz.running.folder import launched_utc
from dlojz.running.run import Run, answer_with

TEXTS = Sentences(Path(__file__).with_name("data") / "lab.md")


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
        results = {}
        for prediction, entry in self._part("predictions").items():
            pair = (entry.get("predicted"), entry.get("value")) if isinstance(entry, dict) else (None, None)
            numbers = [float(number) for number in pair if _is_finite(number)]
            if len(numbers) == 2:
                results[str(prediction)] = Predicted(*numbers)
        return results

    def kept(self, prediction: Prediction) -> float | None:
        """Return what was written down for a prediction, first revealed or not revealed yet; None: nothing.

        Raises:
            LabError: the file cannot be read, or holds something else in this place.
        """
        noted, revealed = (self._part(name, strict=True).get(prediction.id) for name in ("noted", "predictions"))
        if noted is None and revealed is None:
            return None
        # Once revealed, the figure of the first try counts, and what was noted later does not.
        figure = noted if revealed is None else revealed.get("predicted") if isinstance(revealed, dict) else None
        if not _is_finite(figure) or not prediction.admits(float(figure)):
            raise self._damaged()
        return float(figure)

    def done(self, exercise_id: str, moment: datetime) -> str | None:
        """Remember that an exercise is done; a sentence if that could not be written."""
        moments = self.read()
        if exercise_id in moments:
            return None
        return self._write(exercises={**moments, exercise_id: moment.isoformat(timespec="seconds")})

    def noted(self, prediction_id: str, predicted: float) -> None:
        """Remember a prediction that is not revealed yet, for a kernel to come; what cannot be written is not told."""
        if prediction_id not in self.predictions():
            self._write(noted={**self._numbers("noted"), prediction_id: predicted})

    def predicted(self, prediction_id: str, predicted: float, value: float) -> None:
        """Remember a prediction when it is first revealed; a second try, made in knowledge of the value, is not kept.

        What cannot be written is not told: the two figures have been shown, and nothing else was at stake.
        """
        figures = self.predictions()
        if prediction_id not in figures and math.isfinite(predicted) and math.isfinite(value):
            # The first revelation counts; what waited to be revealed is removed.
            noted = {name: figure for name, figure in self._numbers("noted").items() if name != prediction_id}
            self._write(noted=noted, predictions={**figures, prediction_id: Predicted(predicted, value)})

    def scores(self) -> dict[str, float]:
        """Challenge → the best score so far; what cannot be read is left out."""
        return self._numbers("scores")

    def scored(self, challenge: Challenge, score: float) -> None:
        """Remember a score if it is the best so far; what cannot be written is not told, as of predictions."""
        scores = self.scores()
        if challenge.id not in scores or challenge.is_better(score, scores[challenge.id]):
            self._write(scores={**scores, challenge.id: score})

    def _numbers(self, part: str) -> dict[str, float]:
        return {str(name): float(number) for name, number in self._part(part).items() if _is_finite(number)}

    def _part(self, name: str, *, strict: bool = False) -> dict[str, Any]:
        """Read one part; empty where there is none, and, unless `strict`, where it is damaged."""
        try:
            content = parse_json(self._path.read_bytes())
            part = content.get(name, {}) if isinstance(content, dict) else None
        except FileNotFoundError:
            return {}
        except (OSError, LabError):
            part = None
        if strict and not isinstance(part, dict):
            raise self._damaged()
        return part if isinstance(part, dict) else {}

    def _damaged(self) -> LabError:
        return TEXTS.refusal("progress", "damaged", name=self._path.name)

    def _write(
        self,
        *,
        exercises: dict[str, str] | None = None,
        scores: dict[str, float] | None = None,
        predictions: dict[str, Predicted] | None = None,
        noted: dict[str, float] | None = None,
    ) -> str | None:
        """Replace the file, with these parts changed; a sentence if that could not be done."""
        content: dict[str, Any] = {"schema_version": 1, "done": self.read() if exercises is None else exercises}
        # A part that is not given is carried over from the file.
        if scores := self.scores() if scores is None else scores:
            content["scores"] = scores
        if predictions := self.predictions() if predictions is None else predictions:
            content["predictions"] = {name: vars(figure) for name, figure in predictions.items()}
        if noted := self._numbers("noted") if noted is None else noted:
            content["noted"] = noted
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            return TEXTS.say("progress", "not saved", folder=self._path.parent, reason=error.strerror)
        return None


def _is_finite(number: Any) -> TypeGuard[float]:
    return is_number(number) and abs(number) <= sys.float_info.max  # neither NaN nor a whole number too large for it


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
        yield from (code for code in LANGUAGES if name == code)


def _metadata_language(path: Path) -> str | None:
    """What `dlojz labs build` wrote into the notebook; None where the file is no such notebook."""
    try:
        name = read_notebook(path)["metadata"]["dlojz"]["language"]
    except (LabError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None


_SHOWN = ("torch", "deepspeed", "cores", "memory", "gloo", "slurm")
_MARKS = {"ok": "✓", "warning": "!", "problem": "✗"}
_TIMEOUT_S = 180


def environment() -> list[str]:
    """Ask `dlojz doctor` what the machine offers: a line for each check, then what to do about what is missing."""
    command = [
        # Through Python, not the command `dlojz`, which need not be on a kernel's PATH.
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
            # The child has no notebook from which it could tell the language.
            env={**os.environ, "DLOJZ_LANG": language()},
        )
        checks = json.loads(answer.stdout)["checks"]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError) as error:
        return [TEXTS.say("lab", "no answer of the doctor", error=type(error).__name__)]
    lines = [f"✓ {'python':<10} {sys.version.split()[0]}"]
    for check in checks:
        if check["name"] in _SHOWN or check["state"] != "ok":
            finding = check["found"].replace(sys.executable, "python").replace(str(Path.home()), "~")
            lines.append(f"{_MARKS[check['state']]} {_label(check['name']):<10} {finding}")
            if check["advice"]:
                lines.append(f"  → {check['advice']}")
    return lines


def _label(name: str) -> str:
    return {"cores": say(en="cores", fr="cœurs"), "memory": say(en="memory", fr="mémoire")}.get(name, name)


def _tell(state: State, key: str, **values: object) -> None:
    show(Verdict(state, TEXTS.say("lab", key, **values)))


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
        self, number: str, title: Said, *, exercises: Iterable[Exercise], predictions: Iterable[Prediction], root: Path
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
        print(say(en="Looking at this machine…", fr="Examen de cette machine…"), flush=True)
        for line in environment():
            print(line)

    def check(self, exercise_id: str, answer: object) -> None:
        """Judge an answer and say at once what is wrong or that it is right."""
        exercise = self._exercise(exercise_id)
        if exercise is None:
            return
        # Whatever the verdict will be: run.diff() belongs to the last exercise checked, right or not.
        self._checked.append((datetime.now(UTC), exercise_id))
        verdict = judge(exercise, answer)
        show(verdict)
        # A challenge has a score, and is never done.
        if isinstance(exercise, Challenge):
            if verdict.score is not None:
                self._progress.scored(exercise, verdict.score)
        elif verdict.state == "right":
            self.remember(exercise_id)

    def remember(self, exercise_id: str) -> None:
        """Note that an exercise, or the script of the lab, is done."""
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

    def predict(self, prediction_id: str, value: object, *extra: object) -> None:
        """Write a figure down before it is computed or measured."""
        prediction = self._prediction(prediction_id)
        if prediction is None:
            return
        # 3,75 in code is two arguments.
        if extra or (isinstance(value, str) and "," in value):
            _tell("wrong", "one number with a point")
            return
        if value is ...:
            _tell("todo", "still to predict", question=prediction.question)
            return
        number = single(value)
        bounded = prediction.kind in ("share", "place")
        # A share above 1, a place of 0 or of 1.5: the unit in the sentence says what is asked for.
        if not _is_finite(number) or (bounded and not prediction.admits(number)):
            _tell("wrong", "no number", unit=prediction.unit, value=value)
            return
        if not prediction.admits(number):
            _tell("wrong", "negative", unit=prediction.unit, value=value)
            return
        self._predicted[prediction_id] = float(number)
        self._progress.noted(prediction_id, float(number))
        _tell("note", "noted", figure=prediction.format(number))

    def reveal(self, prediction_id: str, value: float | Verdict | None) -> None:
        """Compare the figure written down, in this kernel or an earlier one, with the one computed or measured.

        A sentence, which a figure's function gives where an exercise is to do or wrong, is shown. After a restart of
        the kernel, a prediction that was revealed before is read from the progress.
        """
        prediction = self._prediction(prediction_id)
        if prediction is None:
            return
        # The kernel's own memory first: what was written down in this session.
        predicted, damage = self._predicted.get(prediction_id), ""
        is_earlier = predicted is None
        if is_earlier:
            try:
                predicted = self._progress.kept(prediction)
            except LabError as error:
                damage = f"\n{error}"
        if predicted is None:
            _tell("todo", "predict first", prediction_id=prediction_id, damage=damage)
            return
        if isinstance(value, Verdict):
            show(value)
            return
        # A run that failed reveals nothing: the prediction stays open.
        if value is not None:
            self._progress.predicted(prediction_id, predicted, float(value))
        verdict = prediction.compare(predicted, value)
        if is_earlier and value is not None:
            earlier = TEXTS.say("lab", "an earlier prediction")
            verdict = replace(verdict, message=f"{earlier}\n{verdict.message}")
        show(verdict)

    def progress(self) -> None:
        """Show which exercises of this lab are done."""
        moments, scores = self._progress.read(), self._progress.scores()
        print(say(en=f"Lab {self.number} — {self.title}", fr=f"TP {self.number} — {self.title}"))
        exercises = [exercise for exercise in self.exercises.values() if not isinstance(exercise, Challenge)]
        for exercise in self.exercises.values():
            best = scores.get(exercise.id) if isinstance(exercise, Challenge) else None
            mark, score_text = "✓" if exercise.id in moments else "·", ""
            if isinstance(exercise, Challenge) and best is not None:
                mark, score_text = "✓" if exercise.meets(best) else "·", f" — {exercise.told(best)}"
            print(f"  {mark} {exercise.id:<22} {exercise.title}{score_text}")
        # Challenges do not count.
        finished = sum(exercise.id in moments for exercise in exercises)
        print(TEXTS.say("progress", "exercises done", finished=finished, count=len(exercises)))

    def checked_before(self, moment: datetime | None) -> str | None:
        """The exercise that was checked last before a moment, here or, if right, before the kernel was restarted.

        Args:
            moment: with its time zone; where None, or where nothing was checked before it, the last of all is meant.

        Returns:
            the exercise's id; None if none has been checked yet.
        """
        entries = [*self._done_before(), *self._checked]
        # All that were checked are candidates where none was before the moment.
        before = [entry for entry in entries if moment is not None and entry[0] <= moment]
        return max(before or entries, key=lambda entry: entry[0])[1] if entries else None

    def _done_before(self) -> Iterator[tuple[datetime, str]]:
        for exercise_id, moment_text in self._progress.read().items():
            with suppress(ValueError):
                when = datetime.fromisoformat(moment_text)
                if exercise_id in self.exercises and when.tzinfo is not None:
                    yield when, exercise_id

    def _exercise(self, exercise_id: str) -> Exercise | None:
        if exercise_id not in self.exercises:
            show(Verdict("wrong", one_of(say(en="exercise", fr="exercice"), exercise_id, self.exercises)))
        return self.exercises.get(exercise_id)

    def _prediction(self, prediction_id: str) -> Prediction | None:
        if prediction_id not in self.predictions:
            show(Verdict("wrong", one_of(say(en="prediction", fr="prédiction"), prediction_id, self.predictions)))
        return self.predictions.get(prediction_id)


MOST_LINES = 400
WIDE = 110
_SIDES: dict[str, tuple[str, str, str]] = {  # sign, colour, and how the text is set off besides
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
        rows: list[DifferencePair] = []
        # autojunk would treat lines that occur often as noise, and pair the others badly.
        matcher = difflib.SequenceMatcher(None, self.answer, self.solution, autojunk=False)
        for _, start, end, solution_start, until in matcher.get_opcodes():
            answer_lines, right = self.answer[start:end], self.solution[solution_start:until]
            # Blocks of different length are filled up with None on the shorter side.
            for number in range(max(len(answer_lines), len(right))):
                rows.append(DifferencePair(_at(answer_lines, number), _at(right, number)))
        return rows

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
        # Two columns where they fit beside one another, else one under the other.
        if sum(widths) > WIDE:
            return "\n".join([*lines, f"- {titles[0]}", f"+ {titles[1]}", "", *self._stacked()])
        width = widths[0]
        lines.append(f"  {titles[0]:<{width}} │ {titles[1]}")
        for pair in self.pairs:
            answer_text, right = (visible(line) if line is not None else "" for line in (pair.left, pair.right))
            signs = " " if pair.same else "≠"
            lines.append(f"{signs} {answer_text:<{width}} │ {right}".rstrip())
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
        return TEXTS.say("difference", "heading", exercise=self.exercise, notebook=visible(self.notebook))

    @staticmethod
    def _titles() -> tuple[str, str]:
        return say(en="your answer", fr="votre réponse"), say(en="the solution", fr="la solution")

    @staticmethod
    def _still_to_do() -> str:
        return TEXTS.say("difference", "still to do")


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
        raise LabError(one_of(say(en="exercise", fr="exercice"), exercise, codes))
    cells = [cell for cell in content["cells"] if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    call = CALLED.search(codes[exercise].text)
    text = answer_cell(
        exercise, call[1] if call else exercise, [(str(cell.get("id") or ""), cell_text(cell)) for cell in cells]
    )
    if text is None:
        raise TEXTS.refusal("difference", "no cell", name=path.name, exercise=exercise)
    metadata = content.get("metadata")
    lab_metadata = metadata.get("dlojz") if isinstance(metadata, dict) else None
    written = lab_metadata.get("language") if isinstance(lab_metadata, dict) else None
    solution_text = in_language(codes[exercise].text, written if written in LANGUAGES else language())
    answer, solution = split(text, solution_text)
    # The two stubs that `source` leaves where something is to be written.
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
    exercise_id = exercise or lab.checked_before(launched_utc(run.run_id))
    if exercise_id is None:
        raise TEXTS.refusal(
            "difference",
            "nothing checked",
            first_exercise=next(iter(lab.exercises)),
            exercises=", ".join(lab.exercises),
        )
    return diff(exercise_id)


def _trimmed(lines: Sequence[str]) -> tuple[str, ...]:
    text = textwrap.dedent("\n".join(lines)).strip("\n")
    rows = text.split("\n") if text else []
    return tuple(line.rstrip() for line in rows[:MOST_LINES])


def _at(lines: Sequence[str], number: int) -> str | None:
    return lines[number] if number < len(lines) else None


def _cell(line: str | None, kind: str) -> str:
    sign, color, edge = _SIDES[kind if line is not None else "same"]
    text = "&nbsp;" if line is None else f"{sign} {safe(line)}"
    return (
        f'<td style="text-align:left;font-family:monospace;white-space:pre-wrap;vertical-align:top;'
        f'background:{color};color:inherit;{edge}">{text}</td>'
    )


SCRIPT = "script"
"""The student's own training script among what is done."""
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
    _prepare_notebook()
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


class UnfinishedCells:
    """Cells of an open notebook that need an exercise still to do: they say so, instead of failing.

    A cell that meets `NotDone` shows one sentence and ends well, so that "Run all" goes on. So does a later cell that
    needs a variable which the first one would have defined, or filled, in the notebook or on the ranks. Any other error
    is shown as ever; where the cell uses a function that was judged and not found right, a sentence names it.

    Args:
        shell: of the notebook.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._missing: dict[str, str] = {}  # a variable, and the sentence of the exercise that it waits for
        self._cell = self._stopped = ""
        # Called by IPython for each exception of a cell, in the place of its traceback.
        shell.set_custom_exc((Exception,), lambda _, kind, error, trace, tb_offset=None: self._meet(kind, error, trace))
        shell.events.register("pre_run_cell", self._begin)
        shell.events.register("post_run_cell", self._end)

    def _begin(self, info: Any) -> None:
        self._cell = info.raw_cell or ""

    def _meet(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """Show what a cell raised."""
        missing, self._stopped = self._waits_for(error)
        if self._stopped:
            prefix = say(en=f"{missing} is not there yet. ", fr=f"{missing} n’existe pas encore. ") if missing else ""
            show(Verdict("todo", prefix + self._stopped))
            return
        self._shell.showtraceback((kind, error, trace))
        sentence = refused(self._shell.user_ns.get(name) for name in _names_of(self._code(), ast.Load))
        if sentence and sentence not in str(error):
            show(Verdict("wrong", sentence))

    def _end(self, result: Any) -> None:
        """Note which variables a cell defined, or would have defined; mark what it made with a refused answer."""
        if getattr(result, "success", False) and not self._stopped:
            self._mark()
        # What would have been defined waits for the exercise; what is defined now waits no longer.
        for name in _names_of(self._code(), ast.Store):
            if self._stopped:
                self._missing[name] = self._stopped
            else:
                self._missing.pop(name, None)
        if self._stopped:
            # Without an error in the result, `Run all` goes on.
            result.error_in_exec = None
            self._stopped = ""

    def _mark(self) -> None:
        """Say below a cell that a function it calls was judged, and refused; a cell with a check has its verdict."""
        code = self._code()
        if re.search(r"\blab\.(?:check|hint)\(", code):
            return
        # Functions that the cell defines are looked into where it calls them; those of the ranks are not here.
        read_names = _names_of(code, ast.Load, inside=self._cell.startswith("%%ranks"))
        sentence = made_with_refused(self._shell.user_ns.get(name) for name in sorted(read_names))
        if sentence:
            show(Verdict("note", sentence))

    def _waits_for(self, error: BaseException | None) -> tuple[str, str]:
        """The variable that an error names, if any, and the sentence of the exercise behind it; else nothing."""
        from dlojz.ranks import RanksError, RanksRefused, RanksToDo
        from dlojz.ranks.show import unknown_names

        if error is None:
            return "", ""
        if isinstance(error, NotDone | RanksToDo):
            return "", str(error)
        names: Iterable[str] = ()
        if isinstance(error, NameError):
            names = [error.name or ""]
        # The error of the ranks tells names that are unknown on any of them.
        elif isinstance(error, RanksError):
            names = sorted(unknown_names(error.answers))
        elif isinstance(error, RanksRefused):
            # The name stands in quotes in the sentence.
            names = str(error).split("'")[1:2]
        waiting = [(name, self._missing[name]) for name in names if name in self._missing]
        if waiting or error.__cause__:
            return waiting[0] if waiting else self._waits_for(error.__cause__)
        # What a cell that stopped has begun to fill: an empty list of seconds, say.
        read_names = _names_of(self._code(), ast.Load) | set(re.findall(r"""ranks\[["'](\w+)""", self._code()))
        return "", next((self._missing[name] for name in sorted(read_names) if name in self._missing), "")

    def _code(self) -> str:
        """The cell as Python reads it, or the body of one for the ranks."""
        first_line, _, body = self._cell.partition("\n")
        return body if first_line.startswith("%%ranks") else str(self._shell.transform_cell(self._cell))


def _names_of(code: str, use: type[ast.expr_context], *, inside: bool = True) -> set[str]:
    """Names that a cell reads (`ast.Load`; `inside` of functions, too), or defines outside of them (`ast.Store`)."""
    try:
        pending: list[ast.AST] = [ast.parse(code)]
    except SyntaxError:
        return set()
    names = set()
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, use):
            names.add(node.id)
        inner = isinstance(node, ast.FunctionDef | ast.ClassDef | (ast.Lambda if use is ast.Store else ast.FunctionDef))
        if use is ast.Store and isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        # Else the body of a function stays closed: it defines, and reads, nothing of the notebook before it is called.
        if (use is ast.Load and inside) or not inner:
            pending += ast.iter_child_nodes(node)
    return names


def _prepare_notebook() -> None:
    """`%%ranks`, `ranks` and cells that wait for exercises, where there is a notebook to have them; starts no rank."""
    from IPython.core.getipython import get_ipython

    from dlojz.ranks import load_ipython_extension

    shell: Any = get_ipython()
    if shell is None:
        return
    load_ipython_extension(shell)
    shell.user_ns["ranks"].advice = refused
    # Once for a kernel: a second `start` would register its events twice.
    if not hasattr(shell, "dlojz_unfinished"):
        shell.dlojz_unfinished = UnfinishedCells(shell)


def _runs_root() -> Path:
    from dlojz.running.store import runs_root

    return runs_root()
