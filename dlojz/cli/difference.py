"""`dlojz diff`: a student's answer to an exercise beside the solution.

Layer 6. Invariant: nothing of a notebook is executed.
"""

from __future__ import annotations

from pathlib import Path

from dlojz import cli
from dlojz.cli.answer import answering
from dlojz.cli.flags import Flag, json_flag, parse
from dlojz.schema import LabError
from dlojz.text import say


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
    from dlojz.labs.difference import diff

    with answering(given.get("json", False)) as answer:
        found = diff(names[1], Path(names[0]))
        answer(found.to_dict() if given.get("json") else repr(found))
    return cli.DONE
