"""`dlojz validate`: the cost model held against published measurements.

Layer 6. Invariant: it only shows what `dlojz.plan.validation` finds; nothing is fitted here.
"""

from __future__ import annotations

from typing import Any

from dlojz.cli.answer import answering
from dlojz.cli.flags import Flag, json_flag, parse
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.footprint_words import percent

HELP = {
    "en": """How far the planner's cost model is from published measurements.

Without a table: the error of every table on the rows that nothing was fitted on, beside that of a constant rate per
GPU, of fits that saw no row of the model, and of the best published tool; then memory. With a table: every row.

Examples:
  dlojz validate
  dlojz validate jean-zay-a100
  dlojz validate --json
  dlojz validate --figure validation.png""",
    "fr": """À quelle distance des mesures publiées se trouve le modèle de coût du planificateur.

Sans tableau : l’erreur de chaque tableau sur les lignes que l’ajustement n’a pas vues, à côté de celle d’un débit
constant par GPU, d’ajustements sans aucune ligne du modèle, et du meilleur outil publié ; puis la mémoire. Avec un
tableau : chaque ligne.

Exemples :
  dlojz validate
  dlojz validate jean-zay-a100
  dlojz validate --json
  dlojz validate --figure validation.png""",
}


def validate_command(words: list[str]) -> int:
    """Show the errors; exits with 1 if a goal is missed."""
    flags = [
        Flag("tables", say(en="tables to show row by row", fr="tableaux à montrer ligne par ligne"), kind="words"),
        Flag("figure", say(en="picture to write (.png, .svg)", fr="image à écrire (.png, .svg)"), metavar="FILE"),
        json_flag(),
    ]
    given = parse("validate", say(**HELP), flags, words)
    names = tuple(given.get("tables") or ())
    with answering(given.get("json", False)) as answer:
        return _answer(names, given, answer)


def _answer(names: tuple[str, ...], given: dict[str, Any], answer: Any) -> int:
    from dlojz.plan.validation import validate, validated

    if len(names) != len(set(names)):
        raise LabError(
            say(
                en=f"a table was named twice: {', '.join(names)}; name each once.",
                fr=f"un tableau est nommé deux fois : {', '.join(names)} ; nommez chacun une fois.",
            )
        )
    results = [validate(name) for name in names or validated()]
    memory = None
    if not names:
        from dlojz.plan.validation_memory import validate_memory

        memory = validate_memory()
    if given.get("figure"):
        from dlojz.viz.validation_figure import validation_figure

        validation_figure(results, given["figure"])
    missed = [one.name for one in results if one.reached is False]
    if given.get("json"):
        document: dict[str, Any] = {"tables": [one.as_dict() for one in results]}
        if memory is not None:
            document["memory"] = memory.as_dict()
        if names:
            for made, one in zip(document["tables"], results, strict=True):
                made["each"] = [
                    {
                        "row": row.row.row,
                        "measured_s": row.measured_s,
                        "predicted_s": row.predicted_s,
                        "error": row.error,
                        "held_out": row.held_out,
                    }
                    for row in one.rows
                ]
        answer(document)
        return int(bool(missed))
    from dlojz.viz.validation_figure import rows_table, validation_table

    for one in results if names else ():
        answer(rows_table(one))
    answer(validation_table(results))
    if memory is not None:
        answer(_memory_words(memory))
    return int(bool(missed))


def _memory_words(memory: Any) -> str:
    missed = ", ".join(memory.missed)
    return say(
        en=f"Memory: {percent(memory.mean)} on the held-out Jean Zay readings, "
        f"{percent(memory.activation_mean)} on Korthikanti's activations; {len(memory.found)} of "
        f"{len(memory.ran_out)} out-of-memory rows found, {len(memory.false_alarms)} false alarms."
        + (f" Not found: {missed}." if missed else ""),
        fr=f"Mémoire : {percent(memory.mean)} sur les relevés de Jean Zay mis de côté, "
        f"{percent(memory.activation_mean)} sur les activations de Korthikanti ; {len(memory.found)} lignes à court "
        f"de mémoire trouvées sur {len(memory.ran_out)}, {len(memory.false_alarms)} fausses alertes."
        + (f" Non trouvées : {missed}." if missed else ""),
    )
