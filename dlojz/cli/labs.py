"""`dlojz labs build`: the notebooks, made from their single source; `dlojz labs repair`: one put right again.

Layer 6. Invariant: `--check` writes nothing and fails where a generated file differs; a repair loses no answer.
"""

from __future__ import annotations

from pathlib import Path

from dlojz.cli.flags import Flag, parse
from dlojz.schema import LabError, one_of
from dlojz.text import say


def labs_command(words: list[str]) -> int:
    """Build or check the notebooks, or repair a student's."""
    given = parse(
        "labs",
        say(
            en="""dlojz labs build [LAB…]: write the notebooks of the labs from solutions/NN_name.py,
student and solution, in French and English. Solutions are executed and keep their outputs.
dlojz labs repair NOTEBOOK: restore every cell that is not an answer as it was handed out; answers and added cells are
kept, and so is a copy of the notebook as it was.

Examples:
  dlojz labs build 01
  dlojz labs repair notebooks/en/00_getting_started.ipynb
  dlojz labs build --check        write nothing; exit code 1 if a notebook differs from its source""",
            fr="""dlojz labs build [TP…] : écrire les notebooks des TP à partir de solutions/NN_nom.py,
étudiant et solution, en français et en anglais. Les solutions sont exécutées et gardent leurs sorties.
dlojz labs repair NOTEBOOK : rétablir, telle qu’elle a été distribuée, chaque cellule qui n’est pas une réponse ; les
réponses et les cellules ajoutées sont gardées, ainsi qu’une copie du notebook d’avant.

Exemples :
  dlojz labs build 01
  dlojz labs repair notebooks/fr/00_getting_started.ipynb
  dlojz labs build --check        ne rien écrire ; code de sortie 1 si un notebook diffère de sa source""",
        ),
        [
            Flag(
                "words",
                say(
                    en="build, then the numbers of the labs (default: all); or repair, then a notebook",
                    fr="build, puis les numéros des TP (par défaut : tous) ; ou repair, puis un notebook",
                ),
                metavar="build [LAB…] | repair NOTEBOOK",
                kind="words",
            ),
            Flag("check", say(en="compare only", fr="comparer seulement"), kind="switch"),
            Flag("language", say(en="one language only", fr="une seule langue"), metavar="en|fr"),
            Flag("force", say(en="execute every solution again", fr="réexécuter chaque solution"), kind="switch"),
        ],
        words,
    )
    named = given.get("words", ())
    if not named or named[0] not in ("build", "repair"):
        raise LabError(
            one_of("action of `dlojz labs`", named[0], ["build", "repair"])
            if named
            else "`dlojz labs` needs an action: write `dlojz labs build`, `dlojz labs build --check`, or `dlojz labs "
            "repair NOTEBOOK`."
        )
    if named[0] == "repair":
        return _repair(list(named[1:]), [name for name in ("check", "language", "force") if given.get(name)])
    from dlojz.labs.build import build

    return build(
        check=given.get("check", False),
        labs=list(named[1:]) or None,
        language=given.get("language"),
        force=given.get("force", False),
    )


def _repair(named: list[str], others: list[str]) -> int:
    if len(named) != 1:
        raise LabError(
            say(
                en=f"`dlojz labs repair` repairs one notebook, but {len(named)} were named: name one.",
                fr=f"`dlojz labs repair` répare un notebook, mais {len(named)} ont été nommés : nommez-en un.",
            )
        )
    if others:
        raise LabError(
            say(
                en=f"--{others[0]} belongs to `dlojz labs build`: leave it out.",
                fr=f"--{others[0]} va avec `dlojz labs build` : retirez-le.",
            )
        )
    from dlojz.labs.repair import repair

    print(repair(Path(named[0])))
    return 0
