"""`dlojz labs`: the labs and where one stands in them, their glossary and book; for authors, their notebooks.

Layer 6. Invariant: `--check` writes nothing and fails where a generated file differs; a repair loses no answer; what is
only shown changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dlojz.cli import labs_shown
from dlojz.cli.flags import Flag, json_flag, parse, root_flag
from dlojz.schema import LabError, one_of
from dlojz.text import say

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


class Action(NamedTuple):
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
    from dlojz.labs.build import build

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
    from dlojz.labs.repair import repair

    print(repair(Path(named[0])))
    return 0


ACTIONS = {
    "list": Action(labs_shown.show_list, ("json",)),
    "progress": Action(labs_shown.show_progress, ("html", "root", "json")),
    "glossary": Action(labs_shown.show_glossary, ("json",)),
    "book": Action(labs_shown.write_book, ("out", "language")),
    "repair": Action(_repair, ()),
    "build": Action(_build, ("check", "language", "force")),
}
