"""`dlojz labs repair`: a damaged notebook becomes the one that was handed out again, answers kept.

Layer 6 (labs). Invariant: what a student has written is never lost: answers stay where they are, cells that were added
stay behind the cell they followed, and the notebook as it was is kept beside it before anything is written.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dlojz
from dlojz.labs.notebook import MAX_NOTEBOOK_BYTES
from dlojz.record import write_atomic
from dlojz.schema import LabError, one_of, parse_json
from dlojz.text import LANGUAGES, Language, language, say

_STUB = re.compile(r'labs\.NotDone\("[a-z0-9-]+"\)|^\s*\.\.\.,  # TODO: ', re.MULTILINE)
"""What the builder leaves where the student has to write (`dlojz.labs.source`)."""
_CELL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Repaired:
    """What was done to a notebook.

    Args:
        path: the notebook.
        restored: ids of the cells whose text was not the one handed out.
        returned: ids of the cells that were missing.
        answers: how many answers were kept.
        added: how many cells of the student's own were kept.
        before: the notebook as it was; None where nothing had to be done.
    """

    path: Path
    restored: tuple[str, ...]
    returned: tuple[str, ...]
    answers: int
    added: int
    before: Path | None

    def __str__(self) -> str:
        if self.before is None:
            return say(
                en=f"{self.path.name} is as it was handed out, with {self.answers} answers: nothing to repair.",
                fr=f"{self.path.name} est tel qu’il a été distribué, avec vos réponses ({self.answers}) : rien à "
                "réparer.",
            )
        restored, returned = ", ".join(self.restored) or "—", ", ".join(self.returned) or "—"
        return say(
            en=f"{self.path.name} is repaired. Cells restored: {restored}. Cells that were missing: {returned}. Kept: "
            f"{self.answers} answers, {self.added} cells of your own. The notebook as it was: {self.before.name}. "
            "Reload it in JupyterLab (File, Reload Notebook from Disk).",
            fr=f"{self.path.name} est réparé. Cellules rétablies : {restored}. Cellules qui manquaient : {returned}. "
            f"Gardées : {self.answers} réponses, {self.added} cellules à vous. Le notebook d’avant : "
            f"{self.before.name}. Rechargez-le dans JupyterLab (File, Reload Notebook from Disk).",
        )


def repair(path: Path, handed_out: Path | None = None) -> Repaired:
    """Restore every cell of a notebook that is not an answer.

    Args:
        path: The student's notebook.
        handed_out: The notebook it was made from; by default the one of the same name in `notebooks/` of the course,
            in the language of the student's (its metadata, else the name of its folder, else the general choice).

    Raises:
        LabError: if there is no such notebook, or it cannot be read or written. A notebook that is no longer JSON has
            no cells one could tell apart: the sentence says how to begin anew.
    """
    given = _read(path)
    shipped = _read(handed_out or _handed_out(path, given))
    cells = given["cells"]
    ids = Counter(cell["id"] for cell in cells if isinstance(cell.get("id"), str))
    by_id = {cell["id"]: cell for cell in reversed(cells) if isinstance(cell.get("id"), str)}
    wanted = {cell["id"] for cell in shipped["cells"]}
    restored: list[str] = []
    returned: list[str] = []
    own = _own_cells(cells, wanted)
    result: list[dict[str, Any]] = list(own[None])
    answers = 0
    for original in shipped["cells"]:
        found = by_id.get(original["id"])
        if found is None:
            returned.append(original["id"])
            result.append(original)
        elif _STUB.search(_text(original)) and found["cell_type"] == "code":
            answers += _text(found) != _text(original)
            result.append(found)
        elif (_text(found), found["cell_type"]) == (_text(original), original["cell_type"]):
            result.append(found)
        else:
            restored.append(original["id"])
            result.append(original)
        result += own.get(original["id"], [])
    order = [cell["id"] for cell in cells if isinstance(cell.get("id"), str) and cell["id"] in wanted]
    sound = order == [cell["id"] for cell in shipped["cells"]] and max(ids.values(), default=1) == 1
    told = {name: shipped["metadata"][name] for name in ("dlojz", "kernelspec") if name in shipped["metadata"]}
    sound = sound and {**given["metadata"], **told} == given["metadata"]
    added = sum(map(len, own.values()))
    if sound and not restored and not returned:
        return Repaired(path, (), (), answers, added, None)
    made = {**shipped, "metadata": {**given["metadata"], **told}, "cells": [_sound(cell) for cell in result]}
    return Repaired(path, tuple(restored), tuple(returned), answers, added, _replace(path, made))


def _own_cells(cells: list[dict[str, Any]], wanted: set[str]) -> dict[str | None, list[dict[str, Any]]]:
    """Cells that the student has added (a second cell of one id is one too), by the cell they follow."""
    own: dict[str | None, list[dict[str, Any]]] = {None: []}
    last: str | None = None
    seen: set[str] = set()
    for number, cell in enumerate(cells):
        name = cell.get("id") if isinstance(cell.get("id"), str) else None
        if name in wanted and name not in seen:
            last = name
        else:
            good = isinstance(name, str) and _CELL_ID.fullmatch(name) and name not in seen | wanted
            fresh = str(name) if good else f"own-{number}"
            own.setdefault(last, []).append({**cell, "id": fresh})
            name = fresh
        seen.add(str(name))
    return own


def _sound(cell: dict[str, Any]) -> dict[str, Any]:
    """A cell that the format allows; of one that it does not, the text."""
    from nbformat.validator import isvalid

    if isvalid(cell, ref=f"{cell['cell_type']}_cell", version=4, version_minor=5):
        return cell
    code: dict[str, Any] = {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}
    return {"cell_type": cell["cell_type"], "id": cell["id"], "metadata": {}, "source": _text(cell), **code}


def _text(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    return "".join(map(str, source)) if isinstance(source, list) else str(source)


def _read(path: Path) -> dict[str, Any]:
    """A notebook as JSON, its parts of the right kinds."""
    try:
        if path.stat().st_size > MAX_NOTEBOOK_BYTES:
            raise LabError(
                say(
                    en=f"{path.name} is larger than {MAX_NOTEBOOK_BYTES // 2**20} MiB: clear its outputs first.",
                    fr=f"{path.name} dépasse {MAX_NOTEBOOK_BYTES // 2**20} Mio : effacez d’abord ses sorties.",
                )
            )
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise LabError(
            say(
                en=f"{path} cannot be read: {error.strerror}; name the notebook to repair.",
                fr=f"{path} ne peut pas être lu : {error.strerror} ; nommez le notebook à réparer.",
            )
        ) from None
    except LabError:
        content = None
    if not _is_notebook(content):
        raise LabError(
            say(
                en=f"{path.name} is no notebook any more: rename it, and copy the one that was handed out. What can "
                "still be read in it, copy by hand.",
                fr=f"{path.name} n’est plus un notebook : renommez-le, puis recopiez celui qui a été distribué. Ce "
                "qui s’y lit encore, recopiez-le à la main.",
            )
        )
    found: dict[str, Any] = content
    return found


def _is_notebook(content: Any) -> bool:
    if not isinstance(content, dict) or content.get("nbformat") != 4:
        return False
    cells, metadata = content.get("cells"), content.get("metadata")
    if not isinstance(cells, list) or not isinstance(metadata, dict):
        return False
    return all(isinstance(cell, dict) and cell.get("cell_type") in ("code", "markdown", "raw") for cell in cells)


def _handed_out(path: Path, given: dict[str, Any]) -> Path:
    """The notebook of the course that the student's was copied from."""
    told = given["metadata"].get("dlojz")
    told = told if isinstance(told, dict) else {}
    clues = (told.get("language"), path.absolute().parent.name, language())
    chosen: Language = next(known for clue in clues for known in LANGUAGES if clue == known)
    folder = Path(dlojz.__file__).resolve().parent.parent / "notebooks" / chosen
    known = {file.name: file for file in sorted(folder.glob("*.ipynb"))}
    source = told.get("source")
    if isinstance(source, str) and (named := source.removesuffix(".py") + ".ipynb") in known:
        return known[named]
    if path.name not in known:
        raise LabError(one_of("notebook", path.name, known))
    return known[path.name]


def _replace(path: Path, made: dict[str, Any]) -> Path:
    """Write the notebook, after keeping the one that was there; returns where that is."""
    import nbformat

    notebook = nbformat.from_dict(made)
    nbformat.validate(notebook)
    number = 1
    while (before := path.with_name(f"{path.stem}.before-repair-{number}.ipynb")).exists():
        number += 1
    try:
        shutil.copy2(path, before)
        write_atomic(path, str(nbformat.writes(notebook)).rstrip("\n") + "\n")
    except OSError as error:
        raise LabError(
            say(
                en=f"{path} cannot be written: {error.strerror}; nothing was changed in it.",
                fr=f"{path} ne peut pas être écrit : {error.strerror} ; rien n’y a été changé.",
            )
        ) from None
    return before
