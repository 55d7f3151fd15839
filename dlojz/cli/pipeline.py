"""`dlojz pipeline`: schedules of pipeline parallelism, drawn, simulated, compared, exported.

Layer 6. Invariant: nothing is run on processes; files that cannot be written are refused before anything is printed.
"""

from __future__ import annotations

import shutil
import sys
from typing import Any

from dlojz import cli
from dlojz.cli.answer import answering, tell
from dlojz.cli.flags import Flag, json_flag, number, parse
from dlojz.cli.pipeline_costs import (
    DEFAULT_MICRO_BATCHES,
    DEFAULT_SCHEDULE,
    DEFAULT_STAGES,
    schedule_of,
    size_of,
    times_of,
)
from dlojz.pipeline.catalogue import SCHEDULES, entry
from dlojz.pipeline.costs import SENDS
from dlojz.schema import LabError
from dlojz.text import say

HELP = {
    "en": """Pipeline schedules: what each rank does when, how much of the time nobody works, what memory that takes.

Without further options: the drawing of one schedule in text (F forward, B backward, I and W its two parts for the input
and for the weights, U update; the number is the micro-batch; one column is one unit of time) and its figures.
Times are units: by default a forward takes 1 and a backward 2. Two bubbles are told apart: the fraction is idle time
over all time, (p−1)/(m+p−1) for GPipe and 1F1B alike; the overhead is idle time over work, (p−1)/m.
--stages is the number of pipeline ranks p; with --chunks v, each of them holds v stages.

Examples:
  dlojz pipeline --schedule 1f1b --stages 4 --micro-batches 8
  dlojz pipeline --schedule interleaved --stages 4 --micro-batches 8 --chunks 2 --png interleaved.png
  dlojz pipeline --schedule zb-h1 --times 10,11,9 --latency 0.6 --trace zb.json     (open it at ui.perfetto.dev)
  dlojz pipeline --schedule 1f1b --stage-times 1,2,1,1 --json
  dlojz pipeline --schedule zb-v --csv zbv.csv              (for torch; --from-csv reads it back, edited or not)
  dlojz pipeline --compare gpipe 1f1b zb-h1 --latency 0.25  (without names: all that exist for this size)
  dlojz pipeline --list""",
    "fr": """Ordonnancements de pipeline : ce que fait chaque rang, à quel moment, la part d’inactivité, la mémoire.

Sans autre option : le dessin d’un ordonnancement en texte (F passe avant, B passe arrière, I et W ses deux parties,
pour l’entrée et pour les poids, U mise à jour ; le numéro est celui du micro-batch ; une colonne est une unité de
temps) et ses chiffres. Les temps sont des unités : par défaut, une passe avant dure 1 et une passe arrière 2. Deux
bulles sont distinguées : la fraction est l’inactivité sur le temps total, (p−1)/(m+p−1) pour GPipe comme pour 1F1B ;
le surcoût est l’inactivité sur le travail, (p−1)/m.
--stages est le nombre p de rangs du pipeline ; avec --chunks v, chacun porte v étages.

Exemples :
  dlojz pipeline --schedule 1f1b --stages 4 --micro-batches 8
  dlojz pipeline --schedule interleaved --stages 4 --micro-batches 8 --chunks 2 --png interleaved.png
  dlojz pipeline --schedule zb-h1 --times 10,11,9 --latency 0.6 --trace zb.json     (à ouvrir sur ui.perfetto.dev)
  dlojz pipeline --schedule 1f1b --stage-times 1,2,1,1 --json
  dlojz pipeline --schedule zb-v --csv zbv.csv              (pour torch ; --from-csv le relit, modifié ou non)
  dlojz pipeline --compare gpipe 1f1b zb-h1 --latency 0.25  (sans noms : tous ceux qui existent à cette taille)
  dlojz pipeline --list""",
}
TEXT_WIDTH = 110


def pipeline_command(words: list[str]) -> int:
    """Draw, compare or export schedules."""
    given = parse("pipeline", say(**HELP), _flags(), words)
    _check(given)
    with answering(given.get("json", False)) as answer:
        if given.get("list"):
            from dlojz.cli.pipeline_tables import listing

            answer(listing(given.get("json", False)))
        elif given.get("compare"):
            _compare(given, answer)
        else:
            _show(given, answer)
    return cli.DONE


def _flags() -> list[Flag]:
    picture = say(en="picture to write", fr="image à écrire")
    return [
        Flag(
            "words",
            say(en="schedules to compare, with --compare", fr="ordonnancements à comparer, avec --compare"),
            metavar="[NAME ...]",
            kind="words",
        ),
        Flag("schedule", ", ".join(SCHEDULES), "NAME", default=DEFAULT_SCHEDULE),
        Flag("stages", say(en="pipeline ranks p", fr="rangs p du pipeline"), "INT", default=str(DEFAULT_STAGES)),
        Flag(
            "micro_batches",
            say(en="micro-batches m of a step", fr="micro-batches m d’un pas"),
            "INT",
            default=str(DEFAULT_MICRO_BATCHES),
        ),
        Flag(
            "chunks",
            say(en="stages v that each rank holds", fr="étages v que porte chaque rang"),
            "INT",
            default=say(en="the schedule's own", fr="ceux de l’ordonnancement"),
        ),
        Flag(
            "times",
            say(
                en="time of F,I,W (forward, backward for input, for weights) or of F,B, of one stage",
                fr="durée de F,I,W (passe avant, arrière pour l’entrée, pour les poids) ou de F,B, d’un étage",
            ),
            "F,I,W",
            default="1,1,1",
        ),
        Flag(
            "stage_times",
            say(
                en="how many times as long each stage takes, one number per stage (of all chunks)",
                fr="combien de fois plus longtemps dure chaque étage, un nombre par étage (tous les chunks)",
            ),
            "T,T,…",
        ),
        Flag(
            "latency",
            say(en="time of a message between ranks", fr="durée d’un message entre rangs"),
            "FLOAT",
            default="0",
        ),
        Flag(
            "sends",
            say(
                en="buffered: the sender goes on; paired, rendezvous: it waits for the receiver",
                fr="buffered : l’émetteur continue ; paired, rendezvous : il attend le récepteur",
            ),
            "|".join(SENDS),
            default="buffered",
        ),
        Flag(
            "memory_limit",
            say(
                en="activations that a rank may keep, in stage-micro-batches",
                fr="activations qu’un rang peut garder, en micro-batches d’étage",
            ),
            "FLOAT",
        ),
        Flag(
            "color",
            say(en="what colours say in a picture", fr="ce que disent les couleurs d’une image"),
            "kind|micro_batch|chunk|version",
            default="kind",
        ),
        Flag("png", f"{picture} (.png, .pdf)", "FILE"),
        Flag("svg", f"{picture} (.svg)", "FILE"),
        Flag("trace", say(en="Chrome/Perfetto trace to write", fr="trace Chrome/Perfetto à écrire"), "FILE"),
        Flag("csv", say(en="order to write, as torch reads it", fr="ordre à écrire, au format de torch"), "FILE"),
        Flag(
            "from_csv",
            say(en="take the order from a CSV instead of a name", fr="prendre l’ordre d’un CSV au lieu d’un nom"),
            "FILE",
        ),
        Flag("compare", say(en="a table of schedules", fr="un tableau d’ordonnancements"), kind="switch"),
        Flag("list", say(en="what schedules there are", fr="les ordonnancements qui existent"), kind="switch"),
        json_flag(),
    ]


def _check(given: dict[str, Any]) -> None:
    """Refuse flags that would do nothing, and sizes beyond reason.

    Raises:
        LabError: naming what they need.
    """
    comparing, mode = given.get("compare", False), ""
    excluded: tuple[str, ...] = ()
    if given.get("list"):
        mode, excluded = "--list", tuple(name for name in given if name not in ("list", "json", "words"))
    elif comparing:
        mode, excluded = "--compare", ("schedule", "chunks", "trace", "csv", "from_csv", "color")
    elif "from_csv" in given:
        mode, excluded = "--from-csv", ("schedule", "stages", "micro_batches", "chunks")
    useless = [name for name in excluded if name in given]
    if useless:
        option = "--" + useless[0].replace("_", "-")
        raise LabError(
            say(
                en=f"{option} does nothing beside {mode}: leave one of them out.",
                fr=f"{option} ne sert à rien à côté de {mode} : retirez l’un des deux.",
            )
        )
    if "color" in given and not {"png", "svg"} & given.keys():
        raise LabError(
            say(
                en="--color does nothing without a picture: add --png FILE or --svg FILE.",
                fr="--color ne sert à rien sans image : ajoutez --png FICHIER ou --svg FICHIER.",
            )
        )
    if "svg" in given and not given["svg"].lower().endswith(".svg"):
        raise LabError(
            say(
                en=f"--svg writes a file that ends in .svg, but {given['svg']!r} was received: change the ending, or "
                "use --png.",
                fr=f"--svg écrit un fichier en .svg, mais {given['svg']!r} a été reçu : changez l’extension, ou "
                "utilisez --png.",
            )
        )
    if given.get("words") and not comparing:
        name = given["words"][0]
        raise LabError(
            say(
                en=f"the word {name!r} stands alone: write --schedule {name} to draw one schedule, or --compare to "
                "compare several.",
                fr=f"le mot {name!r} est seul : écrivez --schedule {name} pour dessiner un ordonnancement, ou "
                "--compare pour en comparer.",
            )
        )


def _show(given: dict[str, Any], answer: Any) -> None:
    from dlojz.pipeline.simulator import simulate

    schedule, costs = schedule_of(given)
    timeline = simulate(schedule, costs)
    limit = number(given, "memory_limit", float)
    for option in ("png", "svg"):
        if option in given:
            from dlojz.viz.pipeline_figure import schedule_figure

            schedule_figure(timeline, given[option], color_by=given.get("color", "kind"), memory_limit=limit)
            tell(say(en=f"figure: {given[option]}", fr=f"figure : {given[option]}"))
    if "trace" in given:
        from dlojz.pipeline.chrome_trace import write_chrome_trace

        write_chrome_trace(timeline, given["trace"])
        tell(
            say(
                en=f"trace: {given['trace']}, for https://ui.perfetto.dev",
                fr=f"trace : {given['trace']}, pour https://ui.perfetto.dev",
            )
        )
    if "csv" in given:
        from dlojz.pipeline.torch_csv import torch_refusal, write_csv

        write_csv(schedule, given["csv"])
        tell(say(en=f"order: {given['csv']}", fr=f"ordre : {given['csv']}"))
        if refusal := torch_refusal(schedule):
            tell(say(en=f"note: {refusal}", fr=f"remarque : {refusal}"))
    from dlojz.cli.pipeline_tables import document, words

    if given.get("json"):
        answer(document(timeline, limit))
    else:
        width = shutil.get_terminal_size((TEXT_WIDTH, 24)).columns if sys.stdout.isatty() else TEXT_WIDTH
        answer(words(timeline, limit, max(width, 40)))


def _compare(given: dict[str, Any], answer: Any) -> None:
    from dlojz.cli.pipeline_tables import compare_rows, compare_table, draw_comparison, row_document

    size = size_of(given)
    names = [entry(name).name for word in given.get("words", ()) for name in word.split(",") if name]
    rows, excluded = compare_rows(names, size, given)
    for option in ("png", "svg"):
        if option in given:
            draw_comparison(rows, size, given[option], times_of(given))
            tell(say(en=f"figure: {given[option]}", fr=f"figure : {given[option]}"))
    if given.get("json"):
        answer([row_document(row) for row in rows])
        return
    answer(
        say(
            en=f"{size[0]} ranks, {size[1]} micro-batches; times in units of one stage (chunk); peak in micro-batches "
            "of a rank",
            fr=f"{size[0]} rangs, {size[1]} micro-batches ; temps en unités d’un étage (chunk) ; pic en micro-batches "
            "d’un rang",
        )
    )
    answer(compare_table(rows))
    if excluded:
        answer(say(en="not for this size: ", fr="pas pour cette taille : ") + ", ".join(excluded))
