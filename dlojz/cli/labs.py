"""`dlojz labs build`: the notebooks, made from their single source.

Layer 6. Invariant: `--check` writes nothing and fails where a generated file differs.
"""

from __future__ import annotations

from dlojz.cli.flags import Flag, parse
from dlojz.schema import LabError, one_of
from dlojz.text import say


def labs_command(words: list[str]) -> int:
    """Build or check the notebooks."""
    given = parse(
        "labs",
        say(
            en="""dlojz labs build [LAB…]: write the notebooks of the labs from solutions/NN_name.py,
student and solution, in French and English. Solutions are executed and keep their outputs.

Examples:
  dlojz labs build 01
  dlojz labs build --check        write nothing; exit code 1 if a notebook differs from its source""",
            fr="""dlojz labs build [TP…] : écrire les notebooks des TP à partir de solutions/NN_nom.py,
étudiant et solution, en français et en anglais. Les solutions sont exécutées et gardent leurs sorties.

Exemples :
  dlojz labs build 01
  dlojz labs build --check        ne rien écrire ; code de sortie 1 si un notebook diffère de sa source""",
        ),
        [
            Flag(
                "words",
                say(
                    en="build, then the numbers of the labs (default: all)",
                    fr="build, puis les numéros des TP (par défaut : tous)",
                ),
                metavar="build [LAB…]",
                kind="words",
            ),
            Flag("check", say(en="compare only", fr="comparer seulement"), kind="switch"),
            Flag("language", say(en="one language only", fr="une seule langue"), metavar="en|fr"),
            Flag("force", say(en="execute every solution again", fr="réexécuter chaque solution"), kind="switch"),
        ],
        words,
    )
    named = given.get("words", ())
    if not named or named[0] != "build":
        raise LabError(
            one_of("action of `dlojz labs`", named[0], ["build"])
            if named
            else "`dlojz labs` needs an action: write `dlojz labs build` or `dlojz labs build --check`."
        )
    from dlojz.labs.build import build

    return build(
        check=given.get("check", False),
        labs=list(named[1:]) or None,
        language=given.get("language"),
        force=given.get("force", False),
    )
