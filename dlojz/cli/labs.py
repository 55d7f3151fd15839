"""Commands of the labs: `dlojz labs`, `dlojz diff`.

What `dlojz labs` shows and makes for readers: the list of labs, a student's progress, the glossary, the book.

Only the book and a page that was asked for are written; no solution is executed.

`dlojz labs`: the labs and where one stands in them, their glossary and book; for authors, their notebooks.

Invariant: `--check` writes nothing and fails where a generated file differs; a repair loses no answer; what is only
shown changes nothing.

`dlojz diff`: a student's answer to an exercise beside the solution.

Nothing of a notebook is executed.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dlojz.base.errors import LabError
from dlojz.base.language import language, one_of, say
from dlojz.base.table import Table
from dlojz.cli import main
from dlojz.cli.options import Flag, answering, json_flag, parse, root_flag, tell
from dlojz.results.record import write_atomic

COLUMNS = 120


def show_list(named: list[str], given: dict[str, Any]) -> int:
    """The labs in their order."""
    _nothing_more("list", named)

    from dlojz.labs.kit.contents import LABS, duration, total_minutes

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
            return main.DONE
        titles = (
            say(en="lab", fr="TP"),
            say(en="time", fr="durée"),
            say(en="after", fr="après"),
            say(en="processes", fr="processus"),
        )
        rows = [
            (entry.heading(language()), duration(entry.minutes), ", ".join(entry.after) or "—", str(entry.processes))
            for entry in LABS
        ]
        rows.append((say(en="all", fr="tous"), duration(total_minutes()), "", ""))
        answer(Table(titles, tuple(rows), align="lllr"))
    return main.DONE


def show_progress(named: list[str], given: dict[str, Any]) -> int:
    """Where a student stands in all labs."""
    _nothing_more("progress", named)
    from dlojz.labs.kit.progress_page import read_overview
    from dlojz.running.store import runs_root

    with answering(given.get("json", False)) as answer:
        overview = read_overview(runs_root(given.get("root")))
        if "html" in given:
            path = Path(given["html"]).expanduser()
            write_atomic(path, overview.page())
            tell(say(en=f"page: {path}", fr=f"page : {path}"))
        answer(overview.data() if given.get("json") else str(overview))
    return main.DONE


def show_glossary(named: list[str], given: dict[str, Any]) -> int:
    """One word of the glossary, or all."""
    from dlojz.labs.kit.contents import in_order, look_up

    with answering(given.get("json", False)) as answer:
        found = look_up(" ".join(named)) if named else in_order(language())
        if given.get("json"):
            answer([one.data() for one in found])
        else:
            width = min(COLUMNS, shutil.get_terminal_size((COLUMNS, 24)).columns)
            answer("\n".join(_told(one, width) for one in found))
    return main.DONE


def _told(one: Any, width: int) -> str:
    from dlojz.labs.kit.source import french_spaces

    name, other = (one.term.fr, one.term.en) if language() == "fr" else (one.term.en, one.term.fr)
    called = name if name == other else f"{name} ({other})"
    lab = say(en=f"lab {one.lab}", fr=f"TP {one.lab}")
    text = f"{called} — {one.meaning} [{lab}]".replace("*", "")
    text = french_spaces(text) if language() == "fr" else text
    return textwrap.fill(text, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def write_book(named: list[str], given: dict[str, Any]) -> int:
    """The book of all solutions."""
    from dlojz.base.language import format_bytes
    from dlojz.labs.kit.book import make_book

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
    return main.DONE


def _nothing_more(action: str, named: list[str]) -> None:
    if named:
        raise LabError(
            say(
                en=f"`dlojz labs {action}` takes no further word, but {named[0]!r} was received.",
                fr=f"`dlojz labs {action}` ne prend pas d’autre mot, mais {named[0]!r} a été reçu.",
            )
        )


HELP = {
    "en": """dlojz labs: the labs in their order, with their duration and what comes before each.
dlojz labs progress: exercises done, predictions made, and what comes next.
dlojz labs glossary [WORD]: a word of the labs in English and French; without a word, all of them.
dlojz labs book [LAB…]: every executed solution as a static page, with contents and glossary; no network is needed.
dlojz labs repair NOTEBOOK: restore every cell that is not an answer as it was handed out; answers and added cells are
kept, and so is a copy of the notebook as it was.
dlojz labs build [LAB…]: for authors. Write the notebooks of the labs from solutions/NN_name.py, student and solution,
in French and English. Solutions are executed where their code has changed, and keep their outputs.

Examples:
  dlojz labs
  dlojz labs progress --html progress.html
  dlojz labs glossary bubble
  dlojz labs book --out book
  dlojz labs repair notebooks/en/00_getting_started.ipynb
  dlojz labs build 01
  dlojz labs build --check        write nothing; exit code 1 if a notebook differs from its source""",
    "fr": """dlojz labs : les TP dans leur ordre, avec leur durée et ce qui précède chacun.
dlojz labs progress : exercices réussis, prédictions faites, et la suite.
dlojz labs glossary [MOT] : un mot des TP, en français et en anglais ; sans mot, tous.
dlojz labs book [TP…] : chaque solution exécutée en page statique, avec sommaire et glossaire, sans réseau.
dlojz labs repair NOTEBOOK : rétablir, telle qu’elle a été distribuée, chaque cellule qui n’est pas une réponse ; les
réponses et les cellules ajoutées sont gardées, ainsi qu’une copie du notebook d’avant.
dlojz labs build [TP…] : pour les auteurs. Écrire les notebooks des TP à partir de solutions/NN_nom.py, étudiant et
solution, en français et en anglais. Les solutions dont le code a changé sont exécutées et gardent leurs sorties.

Exemples :
  dlojz labs
  dlojz labs progress --html progression.html
  dlojz labs glossary bulle
  dlojz labs book --out livre
  dlojz labs repair notebooks/fr/00_getting_started.ipynb
  dlojz labs build 01
  dlojz labs build --check        ne rien écrire ; code de sortie 1 si un notebook diffère de sa source""",
}
Given = dict[str, Any]


class LabsAction(NamedTuple):
    """What `dlojz labs ACTION` does, and the options that belong to it."""

    call: Callable[[list[str], Given], int]
    options: tuple[str, ...]


def labs_command(words: list[str]) -> int:
    """Show the labs, a student's progress, the glossary; make the book; build, check or repair notebooks."""
    flags = _flags()
    given = parse("labs", say(**HELP), flags, _words_first(flags, words))
    named = list(given.pop("words", ()))
    name = named.pop(0) if named else "list"
    if name not in ACTIONS:
        raise LabError(one_of("action of `dlojz labs`", name, ACTIONS))
    action = ACTIONS[name]
    for option in given:
        if option not in action.options:
            owners = ", ".join(f"`dlojz labs {other}`" for other, one in ACTIONS.items() if option in one.options)
            raise LabError(
                say(
                    en=f"--{option} belongs to {owners}: leave it out.",
                    fr=f"--{option} va avec {owners} : retirez-le.",
                )
            )
    return action.call(named, given)


def _words_first(flags: list[Flag], words: list[str]) -> list[str]:
    """The words that stand alone before the options, since the parser takes them in one piece only."""
    takes_value = {flag.option for flag in flags if flag.kind == "value"}
    alone: list[str] = []
    options: list[str] = []
    before = ""
    for word in words:
        (options if word.startswith("-") or before in takes_value else alone).append(word)
        before = word
    return alone + options


def _flags() -> list[Flag]:
    return [
        Flag(
            "words",
            say(
                en="what to do (default: list), then labs, a word or a notebook",
                fr="que faire (par défaut : list), puis des TP, un mot ou un notebook",
            ),
            metavar="list | progress | glossary [WORD] | book [LAB…] | repair NOTEBOOK | build [LAB…]",
            kind="words",
        ),
        Flag("check", say(en="build: compare only", fr="build : comparer seulement"), kind="switch"),
        Flag(
            "language", say(en="build, book: one language only", fr="build, book : une seule langue"), metavar="en|fr"
        ),
        Flag(
            "force",
            say(en="build: execute every solution again", fr="build : réexécuter chaque solution"),
            kind="switch",
        ),
        Flag("out", say(en="book: folder to write", fr="book : dossier à écrire"), metavar="FOLDER", default="book"),
        Flag("html", say(en="progress: page to write", fr="progress : page à écrire"), metavar="FILE"),
        root_flag(),
        json_flag(),
    ]


def _build(named: list[str], given: Given) -> int:
    from dlojz.labs.kit.build import build

    return build(
        check=given.get("check", False),
        labs=named or None,
        language=given.get("language"),
        force=given.get("force", False),
    )


def _repair(named: list[str], given: Given) -> int:
    if len(named) != 1:
        raise LabError(
            say(
                en=f"`dlojz labs repair` repairs one notebook, but {len(named)} were named: name one.",
                fr=f"`dlojz labs repair` répare un notebook, mais {len(named)} ont été nommés : nommez-en un.",
            )
        )
    from dlojz.labs.kit.build import repair

    print(repair(Path(named[0])))
    return 0


ACTIONS = {
    "list": LabsAction(show_list, ("json",)),
    "progress": LabsAction(show_progress, ("html", "root", "json")),
    "glossary": LabsAction(show_glossary, ("json",)),
    "book": LabsAction(write_book, ("out", "language")),
    "repair": LabsAction(_repair, ()),
    "build": LabsAction(_build, ("check", "language", "force")),
}


def diff_command(words: list[str]) -> int:
    """Lay an answer beside the solution."""
    given = parse(
        "diff",
        say(
            en="""Lay a student's answer to an exercise beside the solution, for the exercise's part of its cell only.

The notebook is read as it was saved; nothing of it is executed. In a notebook:
labs.diff("attention"), or run.diff() for the exercise that a run belongs to.

Examples:
  dlojz diff notebooks/en/01_big_models.ipynb attention
  dlojz diff notebooks/en/01_big_models.ipynb attention --json""",
            fr="""Mettre la réponse d’un étudiant à un exercice à côté de la solution, pour la seule partie à écrire.

Le notebook est lu tel qu’il a été enregistré ; rien n’en est exécuté. Dans un notebook :
labs.diff("attention"), ou run.diff() pour l’exercice auquel se rattache une exécution.

Exemples :
  dlojz diff notebooks/fr/01_big_models.ipynb attention
  dlojz diff notebooks/fr/01_big_models.ipynb attention --json""",
        ),
        [
            Flag(
                "words",
                say(
                    en="file of the notebook, then id of the exercise", fr="fichier du notebook, puis nom de l’exercice"
                ),
                metavar="NOTEBOOK EXERCISE",
                kind="words",
            ),
            json_flag(),
        ],
        words,
    )
    names = given.get("words", ())
    if len(names) != 2:
        raise LabError(
            say(
                en=f"`dlojz diff` takes a notebook and an exercise, but {len(names)} word(s) were received: write "
                "`dlojz diff notebooks/en/01_big_models.ipynb attention`.",
                fr=f"`dlojz diff` prend un notebook et un exercice, mais {len(names)} mot(s) ont été reçus : écrivez "
                "`dlojz diff notebooks/fr/01_big_models.ipynb attention`.",
            )
        )
    from dlojz.labs.kit.lab_catalogue import diff

    with answering(given.get("json", False)) as answer:
        found = diff(names[1], Path(names[0]))
        answer(found.to_dict() if given.get("json") else repr(found))
    return main.DONE
