"""The single source of a lab, `solutions/NN_name.py`, and the notebooks it stands for.

Layer 6 (labs). Invariant: every sentence of the source exists in both languages, every line of code once; the student
notebook is the solution notebook with the solution regions cleared, and nothing else differs.

The source is jupytext py:percent. Prose cells carry `lang="fr"` or `lang="en"` and come in pairs. Code cells may carry
`name="…"` (stable; required where there is a solution region), `tags=[…]`, and `stub="value"` where the solution is an
expression rather than statements.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlojz.schema import LabError, one_of
from dlojz.text import LANGUAGES, Language

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
_FILE_NAME = re.compile(r"\d\d_[a-z0-9_]+\.py")
_CELL_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
_METADATA = {"code": ("name", "tags", "stub"), "markdown": ("lang",)}
_TAGS = ("nbval-ignore-output", "raises-exception")
_STUBS = {
    "code": '# TODO: write this part, then run the cell: lab.check("{id}", …) answers at once.\n'
    'raise labs.NotDone("{id}")',
    "value": "...,  # TODO: your figure in place of the dots",
}


@dataclass(frozen=True)
class Prose:
    """One pair of prose cells: Markdown by language."""

    text: dict[Language, str]


@dataclass(frozen=True)
class Code:
    """One code cell, the same in every language."""

    text: str
    name: str | None
    tags: tuple[str, ...]
    stub: str

    @property
    def has_solution(self) -> bool:
        """Whether the student has something to write here."""
        return BEGIN in self.text


@dataclass(frozen=True)
class LabSource:
    """One lab as it is written."""

    path: Path
    cells: tuple[Prose | Code, ...]

    @property
    def number(self) -> str:
        """Two digits, e.g. `01`."""
        return self.path.name[:2]

    @property
    def notebook_name(self) -> str:
        """File name of the notebooks made from it, in every language."""
        return f"{self.path.stem}.ipynb"


def read_source(path: Path) -> LabSource:
    """Read and validate the source of one lab.

    Raises:
        LabError: naming the cell, if prose is not paired, a solution region is not closed, or a cell carries metadata
            that the builder does not know.
    """
    import jupytext

    if not _FILE_NAME.fullmatch(path.name):
        raise LabError(f"a lab is named like 01_big_models.py, but {path.name} was found: rename it.")
    notebook = jupytext.read(path, fmt="py:percent")
    return LabSource(path, tuple(_cells(notebook.cells, path.name)))


def _cells(cells: list[Any], file: str) -> Iterator[Prose | Code]:
    half: tuple[str, str, str] | None = None
    names: set[str] = set()
    for number, cell in enumerate(cells, start=1):
        where = f"{file}, cell {number}"
        metadata = {key: value for key, value in cell.metadata.items() if key != "lines_to_next_cell"}
        for key in metadata:
            if key not in _METADATA.get(cell.cell_type, ()):
                raise LabError(f"{where}: {one_of('cell metadata', key, _METADATA.get(cell.cell_type, ()))}")
        if cell.cell_type == "code":
            if half:
                raise LabError(f"{half[2]}: this prose is in {half[0]!r} only: write its pair right after it.")
            code = _code(cell.source.rstrip(), metadata, where)
            if code.name in names:
                raise LabError(f"{where}: the name {code.name!r} is taken by an earlier cell: choose another.")
            names |= {code.name} if code.name else set()
            yield code
            continue
        language, text = metadata.get("lang"), cell.source.rstrip()
        if language not in LANGUAGES:
            raise LabError(f"{where}: {one_of('lang of a prose cell', language, LANGUAGES)}")
        if half is None:
            half = (language, text, where)
        elif half[0] == language:
            raise LabError(f"{half[2]}: this prose is in {language!r} only: write its pair right after it.")
        else:
            yield Prose({half[0]: half[1], language: text})  # type: ignore[dict-item]
            half = None
    if half:
        raise LabError(f"{half[2]}: this prose is in {half[0]!r} only: write its pair right after it.")


def _code(text: str, metadata: dict[str, Any], where: str) -> Code:
    name, stub, tags = metadata.get("name"), metadata.get("stub", "code"), tuple(metadata.get("tags", ()))
    if name is not None and not _CELL_NAME.fullmatch(name):
        raise LabError(f"{where}: a cell is named in lower case with dashes, but {name!r} was received.")
    if stub not in _STUBS:
        raise LabError(f"{where}: {one_of('stub', stub, _STUBS)}")
    for tag in tags:
        if tag not in _TAGS:
            raise LabError(f"{where}: {one_of('tag', tag, _TAGS)}")
    inside = False
    for line in text.split("\n"):
        if line.strip() in (BEGIN, END):
            if inside == (line.strip() == BEGIN):
                raise LabError(f"{where}: solution regions are opened and closed in turn; look at {line.strip()!r}.")
            inside = not inside
        elif "BEGIN SOLUTION" in line or "END SOLUTION" in line:
            raise LabError(f"{where}: a solution marker stands alone on its line, as {BEGIN!r} or {END!r}.")
    if inside:
        raise LabError(f"{where}: a solution region is not closed: add {END!r}.")
    if BEGIN in text and name is None:
        raise LabError(f'{where}: a cell with a solution region needs name="…", the id of its exercise.')
    return Code(text, name, tags, stub)


def compose(source: LabSource, language: Language, *, student: bool) -> Any:
    """The notebook of a lab in one language, without outputs.

    Args:
        student: Clear the solution regions, leaving a TODO that names the check to run.
    """
    import nbformat.v4

    notebook = nbformat.v4.new_notebook(
        metadata={
            "dlojz": {"lab": source.number, "language": language, "source": source.path.name},
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
        }
    )
    notebook.nbformat_minor = 5
    anchor, offset = "start", 0
    for cell in source.cells:
        if isinstance(cell, Code) and cell.name:
            anchor, offset = cell.name, 0
        cell_id = _cell_id(source.path.stem, anchor, offset)
        offset += 1
        if isinstance(cell, Prose):
            text = french_spaces(cell.text["fr"]) if language == "fr" else cell.text[language]
            notebook.cells.append(nbformat.v4.new_markdown_cell(text, id=cell_id))
        else:
            made = nbformat.v4.new_code_cell(cell.text, id=cell_id)
            if cell.tags:
                made.metadata["tags"] = list(cell.tags)
            notebook.cells.append(_cleared(made, cell) if student and cell.has_solution else made)
    return notebook


_VERBATIM = re.compile(r"(```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$)", re.DOTALL)


def french_spaces(markdown: str) -> str:
    """French prose with the spaces that must not break: before ; ! ? : » and after «; code and formulas stay.

    Source: Imprimerie nationale, "Lexique des règles typographiques": a thin space before ; ! ?, a full one for the
    others.
    """
    parts = _VERBATIM.split(markdown)
    for index in range(0, len(parts), 2):
        thin = re.sub(r"[ ](?=[;!?])", "\u202f", parts[index])
        parts[index] = re.sub(r"[ ](?=[:»])|(?<=«)[ ]", "\u00a0", thin)
    return "".join(parts)


def _cell_id(stem: str, anchor: str, offset: int) -> str:
    """Depends on the nearest named cell above, so that an insertion elsewhere changes no other id."""
    return f"{anchor}-{hashlib.sha256(f'{stem}/{anchor}/{offset}'.encode()).hexdigest()[:10]}"


def _cleared(made: Any, cell: Code) -> Any:
    from nbgrader.preprocessors import ClearSolutions

    stub = _STUBS[cell.stub].format(id=cell.name)
    clear = ClearSolutions(
        code_stub={"python": stub}, enforce_metadata=False, begin_solution_delimeter=BEGIN, end_solution_delimeter=END
    )
    return clear.preprocess_cell(made, {"language": "python"}, 0)[0]
