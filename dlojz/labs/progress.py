"""Which exercises are done, remembered across kernels.

Layer 6 (labs). Invariant: a damaged or unwritable file costs the memory of what was done, never the lab.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

from dlojz.record import write_atomic
from dlojz.schema import LabError, parse_json
from dlojz.text import say


class Progress:
    """The exercises done in one lab, kept in one small JSON file.

    Args:
        path: The file; its folder is made when something is first written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, str]:
        """Exercise → when it was first done (UTC, ISO 8601); empty where there is no readable file."""
        try:
            content = parse_json(self._path.read_bytes())
        except (OSError, LabError):
            return {}
        done = content.get("done") if isinstance(content, dict) else None
        if not isinstance(done, dict):
            return {}
        return {str(exercise): str(moment) for exercise, moment in done.items()}

    def done(self, exercise_id: str, moment: datetime) -> str | None:
        """Remember that an exercise is done; a sentence if that could not be written."""
        done = self.read()
        if exercise_id in done:
            return None
        done[exercise_id] = moment.isoformat(timespec="seconds")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps({"schema_version": 1, "done": done}, indent=1) + "\n")
        except OSError as error:
            return say(
                en=f"Your progress could not be saved in {self._path.parent} ({error.strerror}); the answer stands.",
                fr=f"Votre progression n’a pas pu être enregistrée dans {self._path.parent} ({error.strerror}) ; "
                "la réponse reste acquise.",
            )
        return None
