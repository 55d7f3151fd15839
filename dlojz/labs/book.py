"""`dlojz labs book`: every executed solution as a static page, with contents and glossary, in both languages.

Layer 6 (labs). Invariant: nothing is executed: a page shows the outputs that are stored beside the code. The book needs
no server, no script and no network; a lab whose solution is not there is named in the contents, without a page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dlojz
from dlojz.labs.book_pages import HOME, WORDS, Shelf, front_page, markdown_page, notebook_page
from dlojz.labs.contents import LABS, LabEntry, duration, entry_of, total_minutes
from dlojz.labs.glossary import glossary_markdown
from dlojz.labs.notebook import MAX_NOTEBOOK_BYTES
from dlojz.labs.pages import labs_table
from dlojz.labs.source import french_spaces
from dlojz.record import write_atomic
from dlojz.schema import LabError, one_of
from dlojz.text import LANGUAGES, Language, say


@dataclass(frozen=True)
class Book:
    """What was written.

    Args:
        folder: Of the book; its first page is `index.html`.
        pages: How many there are.
        size_bytes: Of all pages.
        missing: Labs without a solution to show.
    """

    folder: Path
    pages: int
    size_bytes: int
    missing: tuple[LabEntry, ...]

    @property
    def first(self) -> Path:
        """The page to open."""
        return self.folder / HOME


def make_book(
    out: Path, labs: Iterable[str] | None = None, language: str | None = None, *, root: Path | None = None
) -> Book:
    """Write the book.

    Args:
        out: Folder to write into; pages of an earlier book are replaced, nothing else is touched.
        labs: Numbers of the labs that get a page; by default all.
        language: `en` or `fr`; by default both.
        root: The checkout; by default the one this package lies in.

    Raises:
        LabError: if a lab or language is unknown, no solution is there, or `out` is no folder.
    """
    from tqdm.auto import tqdm

    root = root or Path(dlojz.__file__).parent.parent
    if language is not None and language not in LANGUAGES:
        raise LabError(one_of("language", language, LANGUAGES))
    if out.exists() and not out.is_dir():
        raise LabError(
            say(
                en=f"{out} is no folder: name one for the book with --out.",
                fr=f"{out} n’est pas un dossier : nommez-en un pour le livre avec --out.",
            )
        )
    chosen = [name for name in LANGUAGES if language in (None, name)]
    wanted = LABS if labs is None else tuple(entry_of(number) for number in labs)
    there = [one for one in wanted if all(_solution(root, one, name).is_file() for name in chosen)]
    if not there:
        raise LabError(
            say(
                en=f"{root / 'solutions'} holds no executed solution: the book is made from a checkout of the course.",
                fr=f"{root / 'solutions'} ne contient aucune solution exécutée : le livre se fait à partir d’une copie "
                "du cours.",
            )
        )
    total = len(chosen) * (len(there) + 2)
    size_bytes = 0
    # disable=None: a bar where somebody looks, nothing in a log.
    with tqdm(total=total, unit="page", file=sys.stderr, disable=None, dynamic_ncols=True) as bar:
        for path, text in _pages(root, out, chosen, there):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text)
            size_bytes += len(text.encode())
            bar.update()
    first = front_page(chosen)
    write_atomic(out / HOME, first)
    return Book(out, total + 1, size_bytes + len(first.encode()), tuple(one for one in wanted if one not in there))


def _pages(root: Path, out: Path, languages: list[Language], there: list[LabEntry]) -> Iterator[tuple[Path, str]]:
    for name in languages:
        shelf = Shelf(name, frozenset(one.notebook for one in there), both=len(languages) > 1)
        glossary = "\n\n".join(glossary_markdown(name))
        titles = ("Sommaire", "Glossaire") if name == "fr" else ("Contents", "Glossary")
        yield out / name / HOME, markdown_page(_contents(name), HOME, titles[0], shelf)
        yield out / name / WORDS, markdown_page(glossary, WORDS, titles[1], shelf)
        for entry in there:
            file = f"{entry.file}.html"
            notebook = _read(_solution(root, entry, name))
            yield out / name / file, notebook_page(notebook, file, entry.heading(name), shelf)


def _solution(root: Path, entry: LabEntry, language: Language) -> Path:
    return root / "solutions" / language / entry.notebook


def _read(path: Path) -> Any:
    import nbformat

    try:
        if path.stat().st_size > MAX_NOTEBOOK_BYTES:
            raise ValueError("too large")
        return nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.ValidationError):
        raise LabError(
            say(
                en=f"{path} cannot be read as a notebook: run `dlojz labs build` first.",
                fr=f"{path} est illisible comme notebook : lancez d’abord `dlojz labs build`.",
            )
        ) from None


def _contents(language: Language) -> str:
    """The first page of a language, as Markdown."""
    time = duration(total_minutes())
    if language == "fr":
        return french_spaces(
            f"# Sommaire\n\nLes solutions des {len(LABS)} TP, telles qu’elles ont été exécutées : l’énoncé, le code "
            "(une barre bleue signale ce que l’étudiant écrit), ce qu’il affiche, et les figures. La durée est celle "
            f"du TP pour un étudiant, {time} en tout.\n\n{labs_table(language)}\n"
        )
    return (
        f"# Contents\n\nThe solutions of the {len(LABS)} labs as they were executed: the text, the code (a blue bar "
        "marks what students write), what it shows, and the figures. The time is that of the lab for a student, "
        f"{time} in all.\n\n{labs_table(language)}\n"
    )
