"""What `dlojz labs` shows and makes for readers: the list of labs, a student's progress, the glossary, the book.

Layer 6. Invariant: only the book and a page that was asked for are written; no solution is executed.
"""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import Any

from dlojz import cli
from dlojz.cli.answer import answering, tell
from dlojz.record import write_atomic
from dlojz.schema import LabError
from dlojz.text import language, say

COLUMNS = 120


def show_list(named: list[str], given: dict[str, Any]) -> int:
    """The labs in their order."""
    _nothing_more("list", named)
    from rich.table import Table

    from dlojz.labs.contents import LABS, duration, total_minutes

    with answering(given.get("json", False)) as answer:
        if given.get("json"):
            answer(
                [
                    {
                        "lab": entry.number,
                        "title_en": entry.title.en,
                        "title_fr": entry.title.fr,
                        "teaches_en": entry.teaches.en,
                        "teaches_fr": entry.teaches.fr,
                        "notebook": entry.notebook,
                        "minutes": entry.minutes,
                        "after": list(entry.after),
                        "processes": entry.processes,
                        "campaigns": list(entry.campaigns),
                    }
                    for entry in LABS
                ]
            )
            return cli.DONE
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column(say(en="lab", fr="TP"), overflow="fold")
        table.add_column(say(en="time", fr="durée"), no_wrap=True)
        table.add_column(say(en="after", fr="après"))
        table.add_column(say(en="processes", fr="processus"), justify="right")
        for entry in LABS:
            table.add_row(
                entry.heading(language()),
                duration(entry.minutes),
                ", ".join(entry.after) or "—",
                str(entry.processes),
            )
        table.add_row(say(en="all", fr="tous"), duration(total_minutes()), "", "")
        answer(table)
    return cli.DONE


def show_progress(named: list[str], given: dict[str, Any]) -> int:
    """Where a student stands in all labs."""
    _nothing_more("progress", named)
    from dlojz.labs.progress_page import read_overview
    from dlojz.runs.store import runs_root

    with answering(given.get("json", False)) as answer:
        overview = read_overview(runs_root(given.get("root")))
        if "html" in given:
            path = Path(given["html"]).expanduser()
            write_atomic(path, overview.page())
            tell(say(en=f"page: {path}", fr=f"page : {path}"))
        answer(overview.data() if given.get("json") else str(overview))
    return cli.DONE


def show_glossary(named: list[str], given: dict[str, Any]) -> int:
    """One word of the glossary, or all."""
    from dlojz.labs.glossary import in_order, look_up

    with answering(given.get("json", False)) as answer:
        found = look_up(" ".join(named)) if named else in_order(language())
        if given.get("json"):
            answer([one.data() for one in found])
        else:
            width = min(COLUMNS, shutil.get_terminal_size((COLUMNS, 24)).columns)
            answer("\n".join(_told(one, width) for one in found))
    return cli.DONE


def _told(one: Any, width: int) -> str:
    from dlojz.labs.source import french_spaces

    name, other = (one.term.fr, one.term.en) if language() == "fr" else (one.term.en, one.term.fr)
    called = name if name == other else f"{name} ({other})"
    lab = say(en=f"lab {one.lab}", fr=f"TP {one.lab}")
    text = f"{called} — {one.meaning} [{lab}]".replace("*", "")
    text = french_spaces(text) if language() == "fr" else text
    return textwrap.fill(text, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def write_book(named: list[str], given: dict[str, Any]) -> int:
    """The book of all solutions."""
    from dlojz.labs.book import make_book
    from dlojz.units import format_bytes

    book = make_book(Path(given.get("out", "book")).expanduser(), named or None, given.get("language"))
    size = format_bytes(book.size_bytes)
    for entry in book.missing:
        title = entry.heading(language())
        tell(
            say(
                en=f"lab {title} has no executed solution yet: it is named, without a page.",
                fr=f"le TP {title} n’a pas encore de solution exécutée : il est nommé, sans page.",
            )
        )
    print(say(en=f"{book.pages} pages, {size}: {book.first}", fr=f"{book.pages} pages, {size} : {book.first}"))
    return cli.DONE


def _nothing_more(action: str, named: list[str]) -> None:
    if named:
        raise LabError(
            say(
                en=f"`dlojz labs {action}` takes no further word, but {named[0]!r} was received.",
                fr=f"`dlojz labs {action}` ne prend pas d’autre mot, mais {named[0]!r} a été reçu.",
            )
        )
