"""Where a student's answer stands in a saved notebook, and the lab that the notebook was built from.

Layer 6 (labs). Invariant: a notebook is read as text, of bounded size; nothing of it is executed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlojz.labs.source import BEGIN, END, LabSource, read_source
from dlojz.schema import LabError, one_of, parse_json
from dlojz.text import say

MAX_NOTEBOOK_BYTES = 64 * 2**20
CALLED = re.compile(r'lab\.(?:check|predict)\(\s*["\']([a-z0-9-]+)["\']')
_LAB = re.compile(r"(\d\d)_[a-z0-9_]+\.ipynb")


def split(answer: str, solution: str) -> tuple[list[str], list[str]]:
    """The part of an answer that stands where the solution's marks are, and the solution's own lines.

    What stands before the first mark and after the last one is the notebook's; it is left out of both sides where the
    student has left it as it was.
    """
    lines = solution.split("\n")
    marks = [number for number, line in enumerate(lines) if line.strip() in (BEGIN, END)]
    before, after = lines[: marks[0]], lines[marks[-1] + 1 :]
    own = [line for line in answer.rstrip().split("\n") if line.strip() not in (BEGIN, END)]
    start = _shared(before, own)
    end = len(own) - _shared(after[::-1], own[start:][::-1])
    inside = [line for line in lines[marks[0] : marks[-1] + 1] if line.strip() not in (BEGIN, END)]
    return own[start:end], inside


def _shared(expected: Sequence[str], found: Sequence[str]) -> int:
    """How many lines at the beginning are the notebook's own; 0 if the student has changed one of them."""
    return (
        len(expected)
        if len(found) >= len(expected)
        and all(one.rstrip() == other.rstrip() for one, other in zip(expected, found, strict=False))
        else 0
    )


def answer_cell(exercise: str, called: str, cells: Sequence[tuple[str, str]]) -> str | None:
    """The cell that asks for the answer to be judged; else the one whose id says so."""
    judged = [text for _, text in cells if (call := CALLED.search(text)) and call[1] == called]
    named = [text for cell_id, text in cells if re.fullmatch(re.escape(exercise) + r"-[0-9a-f]{10}", cell_id)]
    return next(iter([*judged, *named]), None)


def cell_text(cell: dict[str, Any]) -> str:
    """The text of a cell, which a notebook keeps whole or by lines."""
    text = cell.get("source", "")
    return "".join(map(str, text)) if isinstance(text, list) else str(text)


def open_notebook() -> Path:
    """The notebook whose kernel this is, as JupyterLab tells it.

    Raises:
        LabError: if none is open.
    """
    session = os.environ.get("JPY_SESSION_NAME", "")
    if not session:
        raise LabError(
            say(
                en='no notebook is open here: name the file, as in labs.diff("attention", "01_big_models.ipynb").',
                fr="aucun notebook n’est ouvert ici : donnez le fichier, par exemple "
                'labs.diff("attention", "01_big_models.ipynb").',
            )
        )
    path = Path(session)
    return path if path.is_file() else Path.cwd() / path.name


def read_notebook(path: Path) -> dict[str, Any]:
    """The content of a notebook.

    Raises:
        LabError: if it cannot be read, is too large, or is none.
    """
    try:
        if path.stat().st_size > MAX_NOTEBOOK_BYTES:
            raise LabError(f"{path.name} is larger than a notebook of the labs can be: save it without its outputs.")
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise LabError(
            say(
                en=f"the notebook {path} cannot be read: {error.strerror}. Save it first, and give its path.",
                fr=f"le notebook {path} est illisible : {error.strerror}. Enregistrez-le, puis donnez son chemin.",
            )
        ) from None
    except LabError as error:
        raise LabError(f"{path.name} is no notebook: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise LabError(
            say(
                en=f"{path.name} is no notebook: it has no cells. Give the .ipynb file of a lab.",
                fr=f"{path.name} n’est pas un notebook : il n’a pas de cellules. Donnez le fichier .ipynb d’un TP.",
            )
        )
    return content


def source_of(path: Path, content: dict[str, Any], root: Path) -> LabSource:
    """The lab that a notebook was built from: by its metadata, else by its name.

    Raises:
        LabError: if the checkout has no such lab.
    """
    metadata = content.get("metadata")
    own = metadata.get("dlojz") if isinstance(metadata, dict) else None
    number = own.get("lab") if isinstance(own, dict) else None
    named = _LAB.fullmatch(path.name)
    number = number if isinstance(number, str) else named[1] if named else ""
    sources = {file.name[:2]: file for file in sorted((root / "solutions").glob("[0-9][0-9]_*.py"))}
    if not sources:
        raise LabError(
            say(
                en=f"{root} holds no solutions: they come with a checkout of the course.",
                fr=f"{root} ne contient pas les solutions : elles viennent avec le dépôt du cours.",
            )
        )
    if number not in sources:
        raise LabError(one_of("lab", number, sources))
    return read_source(sources[number])
