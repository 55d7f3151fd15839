"""Source of a lab, `solutions/NN_name.py`: parse its cells, write its notebooks, find a student's answer in one.

The source is jupytext py:percent. Prose cells carry `lang="fr"` or `lang="en"` and come in pairs. Code cells may carry
`name="…"` (stable; required where there is a solution region), `tags=[…]`, and `stub="value"` where the solution is an
expression rather than statements. A comment in code is written `# English // français`, and so is a text that a cell
shows: `"English // français"`. The student notebook is the solution notebook with the solution regions cleared.

A student's notebook is read as text, of bounded size; nothing of it is executed. A student's folder of notebooks is a
copy of those of the checkout or of the installed package.
"""

import hashlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dlojz.base.contract import parse_json
from dlojz.base.errors import LabError
from dlojz.base.files import COURSE
from dlojz.base.language import LANGUAGES, Language, Sentences, one_of

TEXTS = Sentences(Path(__file__).with_name("data") / "source.md")

PACKAGE = Path(sys.modules["dlojz"].__file__ or "").resolve().parent
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
_FILE_NAME = re.compile(r"\d\d_[a-z0-9_]+\.py")
_CELL_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
_METADATA = {"code": ("name", "tags", "stub"), "markdown": ("lang",)}
_TAGS = ("nbval-ignore-output", "raises-exception")
_STUBS = {
    "code": "# TODO: write this part, then run the cell. // TODO : écrivez cette partie, puis exécutez la cellule.\n"
    'raise labs.NotDone("{id}")',
    "value": "...,  # TODO: your figure in place of the dots // TODO : votre nombre à la place des points",
}
_BEFORE_A_FIGURE = "# Room for what leads to your figure. // De la place pour ce qui mène à votre nombre."
_TEXT = re.compile(r'([fF]?)"((?:[^"\\\n]|\\.)*)"')
_TWO_COMMENTS = re.compile(r"(?<![^\s])# (.+?) // (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class ProseCells:
    """One pair of prose cells: Markdown by language."""

    text: dict[Language, str]


@dataclass(frozen=True)
class Code:
    """One code cell, the same in every language but for its comments."""

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
    cells: tuple[ProseCells | Code, ...]

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


def _cells(cells: list[Any], file: str) -> Iterator[ProseCells | Code]:
    half: tuple[str, str, str] | None = None  # the prose cell that waits for its pair: language, text, where it stands
    names: set[str] = set()
    for number, cell in enumerate(cells, start=1):
        location = f"{file}, cell {number}"
        # `lines_to_next_cell` is jupytext's own.
        metadata = {key: value for key, value in cell.metadata.items() if key != "lines_to_next_cell"}
        for key in metadata:
            if key not in _METADATA.get(cell.cell_type, ()):
                raise LabError(f"{location}: {one_of('cell metadata', key, _METADATA.get(cell.cell_type, ()))}")
        if cell.cell_type == "code":
            if half:
                raise LabError(f"{half[2]}: this prose is in {half[0]!r} only: write its pair right after it.")
            code = _code(cell.source.rstrip(), metadata, location)
            if code.name in names:
                raise LabError(f"{location}: the name {code.name!r} is taken by an earlier cell: choose another.")
            names |= {code.name} if code.name else set()
            yield code
            continue
        language, text = metadata.get("lang"), cell.source.rstrip()
        if language not in LANGUAGES:
            raise LabError(f"{location}: {one_of('lang of a prose cell', language, LANGUAGES)}")
        if half is None:
            half = (language, text, location)
        elif half[0] == language:
            raise LabError(f"{half[2]}: this prose is in {language!r} only: write its pair right after it.")
        else:
            # The pair may begin with either language.
            yield ProseCells({half[0]: half[1], language: text})  # type: ignore[dict-item]
            half = None
    if half:
        raise LabError(f"{half[2]}: this prose is in {half[0]!r} only: write its pair right after it.")


def _code(text: str, metadata: dict[str, Any], location: str) -> Code:
    name, stub, tags = metadata.get("name"), metadata.get("stub", "code"), tuple(metadata.get("tags", ()))
    if name is not None and not _CELL_NAME.fullmatch(name):
        raise LabError(f"{location}: a cell is named in lower case with dashes, but {name!r} was received.")
    if stub not in _STUBS:
        raise LabError(f"{location}: {one_of('stub', stub, _STUBS)}")
    for tag in tags:
        if tag not in _TAGS:
            raise LabError(f"{location}: {one_of('tag', tag, _TAGS)}")
    inside = False
    for line in text.split("\n"):
        if line.strip() in (BEGIN, END):
            # A mark must change the state: BEGIN outside of a region, END inside.
            if inside == (line.strip() == BEGIN):
                raise LabError(f"{location}: solution regions are opened and closed in turn; look at {line.strip()!r}.")
            inside = not inside
        elif "BEGIN SOLUTION" in line or "END SOLUTION" in line:
            raise LabError(f"{location}: a solution marker stands alone on its line, as {BEGIN!r} or {END!r}.")
    if inside:
        raise LabError(f"{location}: a solution region is not closed: add {END!r}.")
    if BEGIN in text and name is None:
        raise LabError(f'{location}: a cell with a solution region needs name="…", the id of its exercise.')
    return Code(text, name, tags, stub)


def empty_notebook(**description: str) -> Any:
    """A notebook without cells; what describes it stands in its metadata, under `dlojz`."""
    import nbformat.v4

    notebook = nbformat.v4.new_notebook(
        metadata={
            "dlojz": description,
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
        }
    )
    notebook.nbformat_minor = 5
    return notebook


def compose(source: LabSource, language: Language, *, student: bool) -> Any:
    """The notebook of a lab in one language, without outputs.

    Args:
        student: Clear the solution regions, leaving a TODO that names the check to run.
    """
    import nbformat.v4

    notebook = empty_notebook(lab=source.number, language=language, source=source.path.name)
    anchor, offset = "start", 0
    for cell in source.cells:
        if isinstance(cell, Code) and cell.name:
            anchor, offset = cell.name, 0
        cell_id = _cell_id(source.path.stem, anchor, offset)
        # Cells behind a named one are numbered from it, those at the beginning from `start`.
        offset += 1
        if isinstance(cell, ProseCells):
            text = french_spaces(cell.text["fr"]) if language == "fr" else cell.text[language]
            notebook.cells.append(nbformat.v4.new_markdown_cell(text, id=cell_id))
        else:
            text = in_language(_cleared(cell) if student and cell.has_solution else cell.text, language)
            code_cell = nbformat.v4.new_code_cell(text, id=cell_id)
            if cell.tags:
                code_cell.metadata["tags"] = list(cell.tags)
            notebook.cells.append(code_cell)
    return notebook


def in_language(code: str, language: Language) -> str:
    """Code whose comments `# English // français` and texts `"English // français"` are in one language."""
    commented = _TWO_COMMENTS.sub(r"# \2" if language == "fr" else r"# \1", code)
    return _TEXT.sub(lambda text: _text_in_language(text[1], text[2], language), commented)


def _text_in_language(prefix: str, text: str, language: Language) -> str:
    """One language of a literal; a ` // ` inside the braces of an f-string divides numbers."""
    depth = 0
    for index, sign in enumerate(text):
        depth += {"{": 1, "}": -1}.get(sign, 0) if prefix in ("f", "F") else 0
        if depth == 0 and text.startswith(" // ", index):
            chosen = text[:index] if language == "en" else text[index + 4 :]
            # Spaces at the ends of the literal are of both languages.
            margins = text[: len(text) - len(text.lstrip(" "))], text[len(text.rstrip(" ")) :]
            text = chosen.strip(" ").join(margins)
            break
    return f'{prefix}"{text}"'


_VERBATIM = re.compile(r"(```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$)", re.DOTALL)


_THOUSANDS = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(?:[ ]\d{3})+(?!\d)")
_UNIT = re.compile(r"(?<=\d)[ ](?=(?:%|[kKMGTP]i?o(?:/s)?|o|[kMGT]?bit/s|[mµn]?s|h|[GTP]?FLOPs?(?:/s)?|dB|W)(?!\w))")


def french_spaces(markdown: str) -> str:
    """French prose with the spaces that must not break; code and formulas stay.

    They stand before ; ! ? : » and after «, between thousands, and between a number and its unit.

    Source: Imprimerie nationale, "Lexique des règles typographiques": a full space before : », after «; a thin one
    elsewhere.
    """
    parts = _VERBATIM.split(markdown)
    # Split by a group: prose at even places, code and formulas between.
    for index in range(0, len(parts), 2):
        thin = re.sub(r"[ ](?=[;!?])", "\u202f", parts[index])
        thin = _UNIT.sub("\u202f", _THOUSANDS.sub(lambda number: number[0].replace(" ", "\u202f"), thin))
        parts[index] = re.sub(r"[ ](?=[:»])|(?<=«)[ ]", "\u00a0", thin)
    return "".join(parts)


def _cell_id(stem: str, anchor: str, offset: int) -> str:
    """Depends on the nearest named cell above, so that an insertion elsewhere changes no other id."""
    return f"{anchor}-{hashlib.sha256(f'{stem}/{anchor}/{offset}'.encode()).hexdigest()[:10]}"


def _cleared(cell: Code) -> str:
    """Replace each solution region of a cell by its stub, indented as the region is; everything else stays.

    A figure is asked for within a call; what its solution computes before has no figure to fill in.
    """
    lines: list[str] = []
    inside = False
    for line in cell.text.split("\n"):
        if line.strip() == BEGIN:
            inside = True
            indent = line[: line.index(BEGIN)]
            stub = _BEFORE_A_FIGURE if cell.stub == "value" and not indent else _STUBS[cell.stub].format(id=cell.name)
            lines += [indent + part for part in stub.split("\n")]
        elif line.strip() == END:
            inside = False
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


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
    answer_lines = [line for line in answer.rstrip().split("\n") if line.strip() not in (BEGIN, END)]
    start = _shared(before, answer_lines)
    end = len(answer_lines) - _shared(after[::-1], answer_lines[start:][::-1])
    inside = [line for line in lines[marks[0] : marks[-1] + 1] if line.strip() not in (BEGIN, END)]
    return answer_lines[start:end], inside


def _shared(expected: Sequence[str], lines: Sequence[str]) -> int:
    """How many lines at the beginning are the notebook's own; 0 if the student has changed one of them."""
    return (
        len(expected)
        if len(lines) >= len(expected)
        and all(expected_line.rstrip() == line.rstrip() for expected_line, line in zip(expected, lines, strict=False))
        else 0
    )


def answer_cell(exercise: str, called: str, cells: Sequence[tuple[str, str]]) -> str | None:
    """The cell that asks for the answer to be judged; else the one whose id says so."""
    # A cell may hold another exercise's text; what counts is the id in the call.
    judged = [text for _, text in cells if (call := CALLED.search(text)) and call[1] == called]
    by_id = [text for cell_id, text in cells if re.fullmatch(re.escape(exercise) + r"-[0-9a-f]{10}", cell_id)]
    return next(iter([*judged, *by_id]), None)


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
        raise TEXTS.refusal("notebook", "none open")
    path = Path(session)
    # The path may be relative to the server's folder; the kernel works in the notebook's.
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
        raise TEXTS.refusal("notebook", "cannot be read", path=path, strerror=error.strerror) from None
    except LabError as error:
        raise LabError(f"{path.name} is no notebook: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise TEXTS.refusal("notebook", "without cells", name=path.name)
    return content


def source_of(path: Path, content: dict[str, Any], root: Path) -> LabSource:
    """The lab that a notebook was built from: by its metadata, else by its name.

    Raises:
        LabError: if the checkout has no such lab.
    """
    metadata = content.get("metadata")
    lab_metadata = metadata.get("dlojz") if isinstance(metadata, dict) else None
    number = lab_metadata.get("lab") if isinstance(lab_metadata, dict) else None
    match = _LAB.fullmatch(path.name)
    number = number if isinstance(number, str) else match[1] if match else ""
    sources = {file.name[:2]: file for file in sorted((root / "solutions").glob("[0-9][0-9]_*.py"))}
    if not sources:
        raise TEXTS.refusal("notebook", "no solutions", root=root)
    if number not in sources:
        raise LabError(one_of("lab", number, sources))
    return read_source(sources[number])


class Copied(NamedTuple):
    """Notebooks that were copied into a folder, and those that were there already and are as they were."""

    folder: Path
    copied: tuple[str, ...]
    kept: tuple[str, ...]


def copy_notebooks(target: Path, chosen: Language) -> Copied:
    """Copy the notebooks of one language to `target/notebooks/LANGUAGE`, where they are missing.

    The notebooks link to code that they explain, as `../../dlojz/…`: `target/dlojz` is a link to the package.

    Raises:
        LabError: if the folder cannot be written.
    """
    folder = target / "notebooks" / chosen
    copied, existing = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in sorted((COURSE / "notebooks" / chosen).glob("*.ipynb")):
            try:
                # x: fails where the file is there, so that no answer is overwritten.
                with open(folder / source.name, "xb") as file:
                    file.write(source.read_bytes())
                copied.append(source.name)
            except FileExistsError:
                existing.append(source.name)
        # Notebooks link to code and to tests as `../../dlojz` and `../../tests`; an installed package has no tests.
        for linked in (PACKAGE, COURSE / "tests"):
            if linked.is_dir():
                with suppress(FileExistsError):
                    (target / linked.name).symlink_to(linked)
    except OSError as error:
        raise TEXTS.refusal("notebook", "cannot be copied", target=target, strerror=error.strerror) from None
    return Copied(folder, tuple(copied), tuple(existing))
