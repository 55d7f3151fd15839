"""`dlojz labs build`: write the four notebooks of every lab, or check that they are up to date.

Layer 6 (labs). Invariant: building twice changes no byte, and a check writes nothing. Solutions are executed only where
their code has changed since their outputs were stored; whether those outputs still hold is nbval's to say.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dlojz
from dlojz.labs.execute import code_sha256, execute, with_stored_outputs, without_outputs
from dlojz.labs.instructors import PAGE, with_table
from dlojz.labs.links import entry_of_file, linked
from dlojz.labs.pages import pages
from dlojz.labs.source import LabSource, compose, read_source
from dlojz.record import write_atomic
from dlojz.schema import LabError, one_of
from dlojz.text import LANGUAGES, Language


@dataclass(frozen=True)
class Target:
    """One notebook to generate."""

    source: LabSource
    language: Language
    student: bool
    path: Path

    def composed(self) -> Any:
        """The notebook as the source says it, without outputs."""
        notebook = compose(self.source, self.language, student=self.student)
        return linked(notebook, self.source.path.stem, self.language, student=self.student)


def build(
    check: bool = False,
    labs: Iterable[str] | None = None,
    language: str | None = None,
    *,
    force: bool = False,
    root: Path | None = None,
) -> int:
    """Generate the notebooks of the labs from their sources; 0 when all is well, 1 when a check finds a difference.

    Args:
        check: Write nothing; say which files differ from what the sources give.
        labs: Numbers of the labs, e.g. `["01"]`; by default all.
        language: `en` or `fr`; by default both.
        force: Execute every solution again, also where its code has not changed.
        root: The checkout; by default the one this package lies in.

    Raises:
        LabError: if a source is not legal, a lab or language is unknown, or a solution does not run to its end.
    """
    root = root or Path(dlojz.__file__).parent.parent
    if language is not None and language not in LANGUAGES:
        raise LabError(one_of("language", language, LANGUAGES))
    chosen = [name for name in LANGUAGES if language in (None, name)]
    targets = list(_targets(root, _sources(root, labs), chosen))
    made = dict(_pages(root, targets, chosen)) if labs is None else {}
    if not check:
        # One folder of runs for all: what one notebook has trained, the same notebook in another language finds.
        with tempfile.TemporaryDirectory(prefix="dlojz-labs-") as runs_root:
            for target in targets:
                _write(target, Path(runs_root), force=force)
        for path, text in made.items():
            _write_text(path, text)
        return 0
    problems = [problem for target in targets if (problem := _difference(target))]
    problems += [problem for path, text in made.items() if (problem := _page_difference(path, text))]
    if labs is None:
        problems += _strays(root, targets, made)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print("run `dlojz labs build`", file=sys.stderr)
    return 1 if problems else 0


def _sources(root: Path, labs: Iterable[str] | None) -> list[LabSource]:
    folder = root / "solutions"
    sources = [read_source(path) for path in sorted(folder.glob("*.py"))]
    if not sources:
        raise LabError(f"{folder} holds no lab: the labs are built from a checkout of the course.")
    by_number = {source.number: source for source in sources}
    for number in labs or ():
        if number not in by_number:
            raise LabError(one_of("lab", number, by_number))
    return sources if labs is None else [by_number[number] for number in labs]


def _targets(root: Path, sources: Iterable[LabSource], languages: Iterable[Language]) -> Iterator[Target]:
    for source in sources:
        for language in languages:
            for folder in ("notebooks", "solutions"):
                path = root / folder / language / source.notebook_name
                yield Target(source, language, folder == "notebooks", path)


def _write(target: Target, runs_root: Path, *, force: bool) -> None:
    notebook = target.composed()
    if not target.student:
        stored = None if force else _stored(target.path)
        kept = with_stored_outputs(notebook, stored) if stored is not None else None
        if kept is None:
            print(f"executing {_short(target.path)}", file=sys.stderr)
        notebook = kept if kept is not None else execute(notebook, target.path, runs_root=runs_root)
    _write_text(target.path, _serialised(notebook))


def _write_text(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
        print(f"wrote {_short(path)}", file=sys.stderr)


def _pages(root: Path, targets: list[Target], languages: Iterable[Language]) -> Iterator[tuple[Path, str]]:
    """Contents, glossary and the instructor's table, where labs of the set are there to be listed."""
    if not any(entry_of_file(target.source.path.stem) for target in targets):
        return
    for language in languages:
        for path, notebook in pages(root, language):
            yield path, _serialised(notebook)
    instructors = root / PAGE
    if instructors.is_file():
        yield instructors, with_table(instructors.read_text(encoding="utf-8"))


def _page_difference(path: Path, text: str) -> str | None:
    same = path.is_file() and path.read_text(encoding="utf-8") == text
    return None if same else f"{_short(path)} differs from what the labs and the glossary give."


def _difference(target: Target) -> str | None:
    """What is wrong with one generated file, or None."""
    name = _short(target.path)
    stored = _stored(target.path)
    if stored is None:
        return f"{name} is missing or is no notebook."
    expected = target.composed()
    if target.student:
        same = target.path.read_text(encoding="utf-8") == _serialised(expected)
        return None if same else f"{name} differs from {target.source.path.name}."
    if _serialised(without_outputs(stored)) != _serialised(expected):
        return f"{name} differs from {target.source.path.name}."
    if stored.metadata["dlojz"].get("executed_sha256") != code_sha256(expected):
        return f"{name} holds outputs of an older {target.source.path.name}."
    if any(cell.cell_type == "code" and cell.execution_count is None for cell in stored.cells):
        return f"{name} has cells that were not executed."
    return None


def _strays(root: Path, targets: list[Target], made: Iterable[Path]) -> list[str]:
    expected = {*(target.path for target in targets), *made}
    found = {path for folder in ("notebooks", "solutions") for path in (root / folder).glob("*/*.ipynb")}
    languages = {target.language for target in targets}
    return [
        f"{_short(path)} has no source: remove it."
        for path in sorted(found - expected)
        if path.parent.name in languages
    ]


def _stored(path: Path) -> Any | None:
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.ValidationError):
        return None


def _serialised(notebook: Any) -> str:
    import nbformat

    return str(nbformat.writes(notebook)).rstrip("\n") + "\n"


def _short(path: Path) -> str:
    return "/".join(path.parts[-3:])
