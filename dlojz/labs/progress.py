"""Which exercises are done and how good the predictions were, remembered across kernels.

Layer 6 (labs). Invariant: a damaged or unwritable file costs the memory of what was done, never the lab.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dlojz.record import write_atomic
from dlojz.schema import LabError, parse_json
from dlojz.text import say


@dataclass(frozen=True)
class Predicted:
    """A figure that a student wrote down, and what it was.

    Args:
        predicted: As it was written down before it was first revealed.
        value: What was computed or measured.
    """

    predicted: float
    value: float


class Progress:
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
