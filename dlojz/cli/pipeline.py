"""Commands `dlojz pipeline` and `dlojz partition`.

The schedule and the costs that the options of `dlojz pipeline` describe.

Numbers are read here, and judged by `Costs`.

`dlojz pipeline`: schedules of pipeline parallelism, drawn, simulated, compared, exported.

Nothing is run on processes; files that cannot be written are refused before anything is printed.

What `dlojz pipeline` answers: words, tables, JSON documents.

Every figure is asked of `dlojz.pipeline`; makespan and span, fraction and overhead stand under their own names.

`dlojz partition`: where to cut a model into pipeline stages, and how far other tools' cuts are from the best.

Every cut is computed from the model's own blocks; nothing is allocated unless blocks are timed.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dlojz.base.errors import LabError
from dlojz.base.language import say, spaced_percent
from dlojz.cli import main
from dlojz.cli.options import Flag, answering, config_flags, config_of, console, json_flag, number, parse, tell
from dlojz.config.run_config import RunConfig
from dlojz.display import pipeline_scene as sheet
from dlojz.pipeline.analysis import lower_bound
from dlojz.pipeline.exchange_formats import text_table, torch_refusal
from dlojz.pipeline.partition import Partition, check_stages, exact, total_time
from dlojz.pipeline.partition_baselines import MEASURES, PEERS, BlockWeights, block_weights, how_often, uniform
from dlojz.pipeline.schedule import SENDS, Costs, Schedule
from dlojz.pipeline.schedule_catalogue import SCHEDULES, build, entry
from dlojz.pipeline.simulator import UNIT_COSTS, Timeline, memory_curves, simulate

if TYPE_CHECKING:
    from dlojz.pipeline.partition_baselines import HowOften

DEFAULT_SCHEDULE, PIPELINE_COSTS_DEFAULT_STAGES, PIPELINE_COSTS_DEFAULT_MICRO_BATCHES = "1f1b", 4, 8
MOST_UNITS = 200_000
"""Stages times micro-batches that are simulated here: some seconds."""
_TIMES = ("forward", "backward_input", "backward_weight")


def size_of(given: dict[str, Any]) -> tuple[int, int]:
    """Ranks and micro-batches."""
    stages, micro_batches = number(given, "stages", least=1), number(given, "micro_batches", least=1)
    size = (stages or PIPELINE_COSTS_DEFAULT_STAGES, micro_batches or PIPELINE_COSTS_DEFAULT_MICRO_BATCHES)
    chunks = number(given, "chunks", least=1) or 1
    if size[0] * size[1] * chunks > MOST_UNITS:
        raise LabError(
            say(
                en=f"{size[0]} stages with {size[1]} micro-batches are more than is simulated here: give at most "
                f"{MOST_UNITS} stages times micro-batches, such as 64 and 512.",
                fr=f"{size[0]} étages avec {size[1]} micro-batches dépassent ce qui est simulé ici : donnez au plus "
                f"{MOST_UNITS} étages fois micro-batches, par exemple 64 et 512.",
            )
        )
    return size


def schedule_of(given: dict[str, Any]) -> tuple[Schedule, Costs]:
    """The schedule that was asked for, and its costs.

    Raises:
        LabError: if there is no such schedule, or the costs do not fit it.
    """
    limit = number(given, "memory_limit", float)
    if "from_csv" in given:
        from dlojz.pipeline.exchange_formats import load_csv
        from dlojz.pipeline.validity import check

        schedule = load_csv(given["from_csv"])
        costs = costs_of(given, schedule.stages)
        check(schedule, limit, costs)
        return schedule, costs
    name = given.get("schedule", DEFAULT_SCHEDULE)
    entry(name)
    chunks = number(given, "chunks", least=1)
    schedule = build(name, *size_of(given), chunks=chunks, memory_limit=limit, costs=times_of(given))
    costs = costs_of(given, schedule.stages)
    if given.get("stage_times"):  # some schedules search for their order, and then reckon with these times
        schedule = build(name, *size_of(given), chunks=chunks, memory_limit=limit, costs=costs)
    return schedule, costs


def times_of(given: dict[str, Any]) -> Costs:
    """Times of `--times`, `--latency` and `--sends`, the same for every stage.

    Raises:
        LabError: for anything but two or three numbers that are 0 or more, or another way to send.
    """
    values = numbers(given, "times") or [1.0, 1.0, 1.0]
    if len(values) not in (2, 3):
        raise LabError(
            say(
                en=f"--times takes F,I,W or F,B, but the number of values received is {len(values)}: write "
                "--times 1,1,1 or --times 1,2.",
                fr=f"--times prend F,I,W ou F,B, mais le nombre de valeurs reçues est {len(values)} : écrivez "
                "--times 1,1,1 ou --times 1,2.",
            )
        )
    if len(values) == 2:  # a whole backward, of which a split one would take half each
        values = [values[0], values[1] / 2, values[1] / 2]
    latency = number(given, "latency", float) or 0.0
    forward, for_input, for_weight = values
    return Costs(forward, for_input, for_weight, latency=latency, sends=given.get("sends", "buffered"))


def costs_of(given: dict[str, Any], stages: int) -> Costs:
    """The same, with the factors of `--stage-times` for each of the stages.

    Raises:
        LabError: as `times_of`, and if there are not as many factors as stages.
    """
    costs, factors = times_of(given), numbers(given, "stage_times")
    if not factors:
        return costs
    if len(factors) != stages:
        raise LabError(
            say(
                en=f"--stage-times holds {len(factors)} numbers, but the schedule has {stages} stages: give one "
                "number per stage.",
                fr=f"--stage-times contient {len(factors)} nombres, mais l’ordonnancement a {stages} étages : donnez "
                "un nombre par étage.",
            )
        )
    each = {name: tuple(getattr(costs, name) * factor for factor in factors) for name in _TIMES}
    return costs.with_(**each)


def numbers(given: dict[str, Any], name: str) -> list[float]:
    """The numbers of an option such as 1,2.5,1; empty if it was not given.

    Raises:
        LabError: if something between the commas is no number that is 0 or more.
    """
    words = [word for word in str(given.get(name, "")).replace(";", ",").split(",") if word.strip()]
    return [number({name: word.strip()}, name, float) for word in words]


PIPELINE_HELP = {
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
    given = parse("pipeline", say(**PIPELINE_HELP), _pipeline_flags(), words)
    _check(given)
    with answering(given.get("json", False)) as answer:
        if given.get("list"):
            answer(listing(given.get("json", False)))
        elif given.get("compare"):
            _compare(given, answer)
        else:
            _show(given, answer)
    return main.DONE


def _pipeline_flags() -> list[Flag]:
    picture = say(en="picture to write", fr="image à écrire")
    return [
        Flag(
            "words",
            say(en="schedules to compare, with --compare", fr="ordonnancements à comparer, avec --compare"),
            metavar="[NAME ...]",
            kind="words",
        ),
        Flag("schedule", ", ".join(SCHEDULES), "NAME", default=DEFAULT_SCHEDULE),
        Flag(
            "stages",
            say(en="pipeline ranks p", fr="rangs p du pipeline"),
            "INT",
            default=str(PIPELINE_COSTS_DEFAULT_STAGES),
        ),
        Flag(
            "micro_batches",
            say(en="micro-batches m of a step", fr="micro-batches m d’un pas"),
            "INT",
            default=str(PIPELINE_COSTS_DEFAULT_MICRO_BATCHES),
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
            from dlojz.display.figures.pipeline_figures import schedule_figure

            schedule_figure(timeline, given[option], color_by=given.get("color", "kind"), memory_limit=limit)
            tell(say(en=f"figure: {given[option]}", fr=f"figure : {given[option]}"))
    if "trace" in given:
        from dlojz.pipeline.exchange_formats import write_chrome_trace

        write_chrome_trace(timeline, given["trace"])
        tell(
            say(
                en=f"trace: {given['trace']}, for https://ui.perfetto.dev",
                fr=f"trace : {given['trace']}, pour https://ui.perfetto.dev",
            )
        )
    if "csv" in given:
        from dlojz.pipeline.exchange_formats import torch_refusal, write_csv

        write_csv(schedule, given["csv"])
        tell(say(en=f"order: {given['csv']}", fr=f"ordre : {given['csv']}"))
        if refusal := torch_refusal(schedule):
            tell(say(en=f"note: {refusal}", fr=f"remarque : {refusal}"))

    if given.get("json"):
        answer(document(timeline, limit))
    else:
        width = shutil.get_terminal_size((TEXT_WIDTH, 24)).columns if sys.stdout.isatty() else TEXT_WIDTH
        answer(words(timeline, limit, max(width, 40)))


def _compare(given: dict[str, Any], answer: Any) -> None:
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


class ScheduleRow(NamedTuple):
    """One schedule of a comparison."""

    name: str
    timeline: Timeline
    lower_bound: float
    over_limit: bool


def words(timeline: Timeline, memory_limit: float | None, width: int) -> str:
    """Drawing and figures of one schedule as text."""
    from dlojz.display.pipeline_scene import amount, figure_lines, known_optimum, title_of

    costs = timeline.costs or UNIT_COSTS
    bound = lower_bound(timeline.schedule, costs)
    lines = [*figure_lines(timeline, bound, known_optimum(timeline, memory_limit))]
    idle = {cause: share for cause, share in _idle(timeline).items() if share > 1e-12}
    if idle:
        from dlojz.pipeline.analysis import title_of as cause_title

        told = ", ".join(f"{cause_title(cause)} {amount(share)}" for cause, share in idle.items())
        lines.append((say(en="idle time", fr="inactivité"), told + say(en=" (all ranks)", fr=" (tous les rangs)")))
    refusal = torch_refusal(timeline.schedule)
    lines.append(("torch", refusal or say(en="executes it (--csv)", fr="sait l’exécuter (--csv)")))
    longest = max(len(name) for name, _ in lines)
    figures = "\n".join(f"{name.ljust(longest)}  {value}" for name, value in lines)
    return f"{title_of(timeline.schedule)}\n\n{text_table(timeline, width)}\n\n{figures}"


def document(timeline: Timeline, memory_limit: float | None = None) -> dict[str, Any]:
    """Everything about one schedule as plain JSON data; memory in stage-micro-batches, times in the costs' unit."""
    from dlojz.display.pipeline_scene import known_optimum
    from dlojz.pipeline.analysis import critical_path

    schedule, costs = timeline.schedule, timeline.costs or UNIT_COSTS
    return {
        "schedule": schedule.name,
        "stages": schedule.ranks,
        "chunks": schedule.chunks,
        "model_stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "ideal": timeline.ideal,
        "bubble_fraction": timeline.bubble_fraction,
        "bubble_overhead": timeline.bubble_overhead,
        "speedup": timeline.speedup,
        "peak_activations": [curve.peak for curve in memory_curves(timeline)],
        "lower_bound": lower_bound(schedule, costs),
        "optimum": known_optimum(timeline, memory_limit),
        "idle": _idle(timeline),
        "idle_per_rank": list(timeline.idle),
        "critical_path": [str(schedule.actions[index]) for index in critical_path(timeline)],
        "torch_refusal": torch_refusal(schedule),
    }


def row_document(row: ScheduleRow) -> dict[str, Any]:
    """One row of a comparison as plain JSON data."""
    return {**document(row.timeline), "over_memory_limit": row.over_limit}


def _idle(timeline: Timeline) -> dict[str, float]:
    """Idle time by cause, over all ranks."""
    from dlojz.pipeline.analysis import CAUSES, idle_by_cause

    of_rank = idle_by_cause(timeline)
    return {cause: sum(causes[cause] for causes in of_rank) for cause in CAUSES}


def compare_rows(
    names: Sequence[str], size: tuple[int, int], given: dict[str, Any]
) -> tuple[list[ScheduleRow], list[str]]:
    """Simulate schedules at one size, in the order named.

    Args:
        names: schedules; none for all of the catalogue, the smallest bubble first, but those that the size excludes.
        size: ranks, micro-batches.
        given: options that tell the costs.

    Returns:
        The rows, and the names left out.

    Raises:
        LabError: if a schedule that was named does not exist for this size.
    """
    limit = number(given, "memory_limit", float)
    rows, excluded = [], []
    for name in names or SCHEDULES:
        try:
            rows.append(_row(name, size, given, limit))
        except LabError:
            if names:
                raise
            excluded.append(name)
    if not rows:
        raise LabError(
            say(
                en=f"no schedule exists for {size[0]} stages, {size[1]} micro-batches and these times: try 4 and 8.",
                fr=f"aucun ordonnancement n’existe pour {size[0]} étages, {size[1]} micro-batches et ces durées : "
                "essayez 4 et 8.",
            )
        )
    return rows if names else sorted(rows, key=lambda row: row.timeline.bubble_fraction), excluded


def _row(name: str, size: tuple[int, int], given: dict[str, Any], limit: float | None) -> ScheduleRow:
    schedule = build(name, *size, costs=times_of(given))
    costs = costs_of(given, schedule.stages)
    timeline = simulate(schedule, costs)
    peak = max(curve.peak for curve in memory_curves(timeline))
    return ScheduleRow(name, timeline, lower_bound(schedule, costs), limit is not None and peak > limit + 1e-9)


def compare_table(rows: Sequence[ScheduleRow]) -> Table:
    """Schedules side by side; times of different numbers of chunks are not comparable, shares are."""
    from dlojz.display.pipeline_scene import amount

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(say(en="schedule", fr="ordonnancement"), no_wrap=True)
    for title in (
        say(en="chunks", fr="étages/rang"),
        "makespan",
        "span",
        say(en="bound", fr="borne"),
        "fraction",
        say(en="overhead", fr="surcoût"),
        say(en="peak", fr="pic"),
        "torch",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for name, timeline, bound, over in rows:
        schedule = timeline.schedule
        held = max(schedule.stages / schedule.ranks, 1.0)  # a micro-batch of a rank is that many stage-micro-batches
        peak = max(curve.peak for curve in memory_curves(timeline)) / held
        table.add_row(
            name,
            str(schedule.chunks),
            amount(timeline.makespan),
            amount(timeline.span),
            amount(bound),
            spaced_percent(timeline.bubble_fraction),
            spaced_percent(timeline.bubble_overhead),
            Text(amount(peak) + (" !" if over else ""), style="red" if over else ""),
            "—" if torch_refusal(schedule) else say(en="yes", fr="oui"),
        )
    return table


def draw_comparison(rows: Sequence[ScheduleRow], size: tuple[int, int], path: str, costs: Costs) -> None:
    """Two schedules under one another, or the bubble of several against the number of micro-batches."""
    if len(rows) == 2:
        from dlojz.display.figures.pipeline_figures import compare_figure

        compare_figure(rows[0].timeline, rows[1].timeline, path)
        return
    from dlojz.display.figures.partition_figures import bubble_figure

    counts = sorted({size[0] * factor for factor in (1, 2, 3, 4, 6, 8)} | {size[1]})
    bubble_figure([row.name for row in rows], size[0], counts, path, costs)


def listing(as_json: bool) -> Any:
    """All schedules: name, title, what limits them, source."""
    if as_json:
        return [
            {
                "name": name,
                "title": one.title(),
                "family": one.family,
                "chunks": one.chunks,
                "limits": one.limits(),
                "torch": one.torch_class,
                "source": one.source,
            }
            for name, one in SCHEDULES.items()
        ]
    from dlojz.base.table import Table as Listing

    titles = (say(en="name", fr="nom"), "", say(en="what limits it", fr="ce qui le limite"), "source")
    rows = tuple((name, one.title(), one.limits(), one.source) for name, one in SCHEDULES.items())
    return Listing(titles, rows, align="l", whole=1)


PARTITION_HELP = {
    "en": """Cut a model into pipeline stages: which blocks go where, and how evenly.

A pipeline runs at the pace of its heaviest stage: a step of m micro-batches takes Σ tᵢ + (m − 1) max tᵢ, so the best
cut is the one whose heaviest stage (the bottleneck) is lightest. Stages are runs of neighbouring blocks. The exact
optimum stands beside what DeepSpeed and torchgpipe would choose, and beside equal numbers of blocks. Imbalance is
bottleneck ÷ mean: 1.00 is perfect.

--by says what a block weighs: its parameters, its FLOPs, its time (each kind of block really runs, forward and
backward), 1 each (uniform), or 1 if --pattern is found in its class (regex, DeepSpeed's 'type:PATTERN').
--compare also weighs each cut in the other units (equal parameters are not equal work), and counts over 4,000 random
lists of blocks how often each tool misses the optimum.

Examples:
  dlojz partition --model coatnet_7 --stages 8
  dlojz partition --model coatnet_7 --stages 8 --by flops --compare --png cut.png
  dlojz partition --model coatnet_tiny --stages 4 --by time --micro-batch 8
  dlojz partition --model coatnet_7 --stages 4 --by regex --pattern Attention --json""",
    "fr": """Découper un modèle en étages de pipeline : quels blocs vont où, et avec quel équilibre.

Un pipeline avance au rythme de son étage le plus chargé : un pas de m micro-batches dure Σ tᵢ + (m − 1) max tᵢ ; le
meilleur découpage est donc celui dont l’étage le plus chargé (le goulot) l’est le moins. Un étage est une suite de
blocs voisins. L’optimum exact est montré à côté de ce que choisiraient DeepSpeed et torchgpipe, et du découpage en
nombres de blocs égaux. Déséquilibre = goulot ÷ moyenne : 1,00 est parfait.

--by dit ce que pèse un bloc : ses paramètres, ses FLOPs, son temps (chaque sorte de bloc est vraiment exécutée, passes
avant et arrière), 1 chacun (uniform), ou 1 si --pattern se trouve dans le nom de sa classe (regex, le 'type:MOTIF' de
DeepSpeed). --compare pèse aussi chaque découpage dans les autres unités (à paramètres égaux, le travail ne l’est pas),
et compte sur 4 000 listes de blocs aléatoires combien de fois chaque outil manque l’optimum.

Exemples :
  dlojz partition --model coatnet_7 --stages 8
  dlojz partition --model coatnet_7 --stages 8 --by flops --compare --png decoupage.png
  dlojz partition --model coatnet_tiny --stages 4 --by time --micro-batch 8
  dlojz partition --model coatnet_7 --stages 4 --by regex --pattern Attention --json""",
}
PARTITION_DEFAULT_STAGES, PARTITION_DEFAULT_MICRO_BATCHES = 4, 8
OF_THE_MODEL = ("model", "data", "image_size", "sequence_length", "micro_batch", "micro_batches", "device")
CASES, SEED = 4000, 0


def partition_command(words: list[str]) -> int:
    """Cut a model into stages and tell how evenly."""
    given = parse("partition", say(**PARTITION_HELP), _partition_flags(), words)
    stages = number(given, "stages", least=1) or PARTITION_DEFAULT_STAGES
    config = config_of({"micro_batches": PARTITION_DEFAULT_MICRO_BATCHES, **given})
    by, pattern = given.get("by", "regex" if "pattern" in given else "parameters"), given.get("pattern")
    as_json = given.get("json", False)
    with answering(as_json) as answer:
        check_stages(len(block_weights(config).kinds), stages)  # before blocks are timed for nothing
        weighed = _weighed(config, by, pattern)
        cuts = {"exact": exact(weighed.weights, stages)}
        cuts |= {name: cut(weighed.weights, stages) for name, cut in PEERS.items()}
        others = _in_other_units(config, weighed, stages) if given.get("compare") else {}
        counts = [how_often(peer, CASES, SEED) for peer in PEERS] if given.get("compare") else []
        if "png" in given:
            from dlojz.display.figures.partition_figures import partition_figure

            titles = {sheet.title(name): cut for name, cut in cuts.items()}
            partition_figure(titles, weighed, model=config.model, path=given["png"])
            tell(say(en=f"figure: {given['png']}", fr=f"figure : {given['png']}"))
        if as_json:
            answer(_document(config, weighed, cuts, others, counts) | ({"pattern": pattern} if pattern else {}))
            return main.DONE
        answer(sheet.headline(config.model, weighed, stages) + "\n")
        answer(sheet.stages_table(cuts["exact"], weighed))
        answer("")
        answer(sheet.methods_table(cuts, weighed, config.layout.micro_batches))
        answer(sheet.legend(config.layout.micro_batches))
        if given.get("compare"):
            answer("")
            answer(sheet.units_table(others))
            answer("")
            answer(sheet.counts_table(counts))
    return main.DONE


def _partition_flags() -> list[Flag]:
    by_name = {flag.name: flag for flag in config_flags()}
    micro_batches = by_name["micro_batches"]
    by_name["micro_batches"] = Flag(
        micro_batches.name, micro_batches.help, micro_batches.metavar, default=str(PARTITION_DEFAULT_MICRO_BATCHES)
    )
    return [
        Flag(
            "stages", say(en="pipeline stages", fr="étages du pipeline"), "INT", default=str(PARTITION_DEFAULT_STAGES)
        ),
        Flag("by", say(en="what a block weighs", fr="ce que pèse un bloc"), "|".join(MEASURES), default="parameters"),
        Flag(
            "pattern",
            say(
                en="regular expression found in the class of the blocks that count (--by regex)",
                fr="expression régulière cherchée dans la classe des blocs qui comptent (--by regex)",
            ),
            "REGEX",
        ),
        *(by_name[name] for name in OF_THE_MODEL),
        Flag(
            "compare",
            say(
                en="the cuts in other units, and how often each tool misses the optimum",
                fr="les découpages dans d’autres unités, et combien de fois chaque outil manque l’optimum",
            ),
            kind="switch",
        ),
        Flag("png", say(en="picture to write (.png, .svg, .pdf)", fr="image à écrire (.png, .svg, .pdf)"), "FILE"),
        json_flag(),
    ]


def _weighed(config: RunConfig, by: str, pattern: str | None) -> BlockWeights:
    if by != "time":
        return block_weights(config, by, pattern)  # type: ignore[arg-type]  # another word is refused there
    shown = console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=shown, disable=not shown.is_terminal, transient=True) as progress:
        task = progress.add_task(say(en="blocks timed", fr="blocs chronométrés"), total=None)
        return block_weights(
            config, "time", pattern, tell=lambda done, of: progress.update(task, completed=done, total=of)
        )


def _in_other_units(config: RunConfig, weighed: BlockWeights, stages: int) -> dict[str, dict[str, float]]:
    """Imbalance of the best cut by each unit, in each unit that is a cost."""
    costs = {"parameters": block_weights(config, "parameters"), "flops": block_weights(config, "flops")}
    if weighed.by == "time":
        costs["time"] = weighed
    cuts = {unit: exact(cost.weights, stages) for unit, cost in costs.items()}
    cuts["uniform"] = uniform(len(weighed.kinds), stages)
    if weighed.by == "regex":
        cuts["regex"] = exact(weighed.weights, stages)
    return {by: {unit: cut.weighed(cost.weights).imbalance for unit, cost in costs.items()} for by, cut in cuts.items()}


def _document(
    config: RunConfig,
    weighed: BlockWeights,
    cuts: Mapping[str, Partition],
    others: Mapping[str, Mapping[str, float]],
    counts: list[HowOften],
) -> dict[str, Any]:
    """Everything as plain JSON data."""
    best, m = cuts["exact"], config.layout.micro_batches
    document: dict[str, Any] = {
        "model": config.model,
        "by": weighed.by,
        "unit": weighed.unit or "parameters",
        "stages": best.num_stages,
        "micro_batches": m,
        "blocks": [
            {"block": block, "kind": kind, "weight": weight}
            for block, (kind, weight) in enumerate(zip(weighed.kinds, weighed.weights, strict=True))
        ],
        "methods": {
            name: {
                "bounds": list(cut.bounds),
                "loads": list(cut.loads),
                "bottleneck": cut.bottleneck,
                "imbalance": cut.imbalance,
                "spread": cut.spread,
                "total_time": total_time(cut.loads, m),
                "optimal": cut.bottleneck == best.bottleneck,
            }
            for name, cut in cuts.items()
        },
    }
    if others:
        document["imbalance_of_cut_by"] = others
        document["random_cases"] = {
            each.peer: {
                "cases": each.cases,
                "seed": each.seed,
                "not_optimal": each.missed,
                "worst_ratio": each.worst_ratio,
                "worst_weights": list(each.worst_weights),
                "worst_stages": each.worst_stages,
            }
            for each in counts
        }
    return document
