"""Commands `dlojz pipeline` and `dlojz partition`.

`dlojz pipeline` draws, simulates, compares and exports schedules; `dlojz partition` cuts a model into stages, beside
the cuts of other tools. Nothing is run on processes, unless blocks are timed; a file that cannot be written is refused
before anything is printed.
"""

import json
import os
import shutil
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dlojz.base.errors import LabError
from dlojz.base.language import format_bytes, say, spaced_percent, yes_no
from dlojz.base.table import Table, facts, titles
from dlojz.cli.options import (
    WORDS,
    Answer,
    Given,
    check_needs,
    config_flags,
    config_of,
    fields_of,
    number,
    option_of,
    phrase,
    progress_bar,
    tell,
    tell_written,
    verb,
)
from dlojz.config.run_config import RunConfig
from dlojz.display import tables
from dlojz.models.foreign.names import is_elsewhere
from dlojz.pipeline.analysis import lower_bound
from dlojz.pipeline.exchange_formats import text_table, torch_refusal
from dlojz.pipeline.partition import (
    MEASURES,
    PEERS,
    BlockWeights,
    Partition,
    block_weights,
    check_stages,
    exact,
    total_time,
    uniform,
)
from dlojz.pipeline.schedule import SENDS, Costs, Schedule
from dlojz.pipeline.schedule_catalogue import SCHEDULES, build, entry
from dlojz.pipeline.simulator import UNIT_COSTS, Timeline, memory_curves, simulate

MOST_UNITS = 200_000
"""Stages times micro-batches that are simulated here: some seconds."""
_TIMES = ("forward", "backward_input", "backward_weight")


def size_of(args: Given) -> tuple[int, int]:
    """Number of ranks and of micro-batches.

    Raises:
        LabError: if they are more than is simulated here.
    """
    ranks, micro_batches = args["stages"], args["micro_batches"]
    # Chunks count too: a rank with two of them has twice the actions.
    if ranks * micro_batches * (args["chunks"] or 1) > MOST_UNITS:
        raise phrase.refused("too much to simulate", ranks=ranks, micro_batches=micro_batches, most_units=MOST_UNITS)
    return ranks, micro_batches


def schedule_of(args: Given) -> tuple[Schedule, Costs]:
    """Build the schedule that was asked for, with its costs.

    Raises:
        LabError: if there is no such schedule, or the costs do not fit it.
    """
    limit = args["memory_limit"]
    if "from_csv" in args:
        from dlojz.pipeline.exchange_formats import load_csv
        from dlojz.pipeline.validity import check

        schedule = load_csv(args["from_csv"])
        costs = costs_of(args, schedule.stages)
        check(schedule, limit, costs)
        return schedule, costs
    name, chunks = args["schedule"], args["chunks"]
    entry(name)
    # First with equal stages: only the schedule tells how many factors --stage-times needs.
    schedule = build(name, *size_of(args), chunks=chunks, memory_limit=limit, costs=times_of(args))
    costs = costs_of(args, schedule.stages)
    if "stage_times" in args:  # some schedules search for their order with these times
        schedule = build(name, *size_of(args), chunks=chunks, memory_limit=limit, costs=costs)
    return schedule, costs


def times_of(args: Given) -> Costs:
    """Parse `--times`, `--latency` and `--sends`, the same for every stage.

    Raises:
        LabError: for anything but two or three numbers that are 0 or more, or another way to send.
    """
    values = numbers("--times", args["times"]) or [1.0, 1.0, 1.0]
    if len(values) not in (2, 3):
        raise phrase.refused("number of times", count=len(values))
    if len(values) == 2:  # a whole backward, of which a split one would take half each
        values = [values[0], values[1] / 2, values[1] / 2]
    forward, for_input, for_weight = values
    return Costs(forward, for_input, for_weight, latency=args["latency"], sends=args["sends"])


def costs_of(args: Given, stages: int) -> Costs:
    """Parse the costs with the factors of `--stage-times` for each of the stages.

    Raises:
        LabError: as `times_of`, and if there are not as many factors as stages.
    """
    costs, factors = times_of(args), numbers("--stage-times", args.get("stage_times", ""))
    if not factors:
        return costs
    if len(factors) != stages:
        raise phrase.refused("number of stage times", count=len(factors), stages=stages)
    # A tuple each for forward, backward of the input and of the weights: one duration per stage.
    return costs.with_(**{name: tuple(getattr(costs, name) * factor for factor in factors) for name in _TIMES})


def numbers(option: str, text: str) -> list[float]:
    """Parse numbers such as 1,2.5,1; none for an empty text.

    Raises:
        LabError: if something between the commas is no number that is 0 or more.
    """
    words = [word.strip() for word in text.replace(";", ",").split(",")]
    return [number(option, word, float) for word in words if word]


TEXT_WIDTH = 110


@verb("pipeline", schedules=", ".join(SCHEDULES), sends="|".join(SENDS))
def pipeline_command(args: Given, answer: Answer) -> None:
    """Draw, compare or export schedules."""
    _check(args)
    if args["play"]:
        _play(args, answer)
    elif args["list"]:
        answer(listing(args["json"]))
    elif args["compare"]:
        _compare(args, answer)
    else:
        _show(args, answer)


def _check(args: Given) -> None:
    """Refuse options that would do nothing.

    Raises:
        LabError: naming what they need.
    """
    comparing, mode = args["compare"], ""
    excluded: tuple[str, ...] = ()
    if args["play"]:
        mode, excluded = "--play", tuple(name for name in args if name not in ("play", "no_browser", "words"))
    elif args["list"]:
        # Beside --list every other option is useless.
        mode, excluded = "--list", tuple(name for name in args if name not in ("list", "json", "words"))
    elif comparing:
        mode, excluded = "--compare", ("schedule", "chunks", "trace", "csv", "from_csv", "color")
    elif "from_csv" in args:
        mode, excluded = "--from-csv", ("schedule", "stages", "micro_batches", "chunks")
    useless = [name for name in excluded if name in args]
    if useless:
        option = option_of(useless[0])
        raise phrase.refused("option without effect", option=option, mode=mode)
    check_needs(args, "color", "png")
    check_needs(args, "no_browser", "play")
    if args[WORDS] and not (comparing or args["play"]):
        name = args[WORDS][0]
        raise phrase.refused("word that stands alone", name=name)


def _play(args: Given, answer: Answer) -> None:
    """Serve the page of the game until Ctrl-C.

    Raises:
        LabError: for a level that there is not.
    """
    from dlojz.display.widgets.schedule_game import GameServer
    from dlojz.pipeline.game.position import level_of

    if len(args[WORDS]) > 1:
        received = " ".join(args[WORDS])
        raise phrase.refused("one level to play", received=received)
    level = level_of(number("--play", args[WORDS][0] if args[WORDS] else "1", int))
    with GameServer(level.number) as server:
        answer(
            en=f"{server.url}\nOpen this address in a browser of this machine; Ctrl-C ends the game.",
            fr=f"{server.url}\nOuvrez cette adresse dans un navigateur de cette machine ; Ctrl-C termine le jeu.",
        )
        sys.stdout.flush()
        # A text browser would take the terminal: only where there are windows.
        if not args["no_browser"] and (sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()):
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            tell(
                en="the game has ended; its position stays in the address of the page.",
                fr="le jeu est terminé ; sa position reste dans l’adresse de la page.",
            )


def _show(args: Given, answer: Answer) -> None:
    schedule, costs = schedule_of(args)
    timeline = simulate(schedule, costs)
    limit = args["memory_limit"]
    if "png" in args:
        from dlojz.display.pipeline_drawing import schedule_figure

        schedule_figure(timeline, args["png"], color_by=args["color"], memory_limit=limit)
        tell_written(args["png"])
    if "trace" in args:
        from dlojz.pipeline.exchange_formats import write_chrome_trace

        write_chrome_trace(timeline, args["trace"])
        note = say(en=", for https://ui.perfetto.dev", fr=", pour https://ui.perfetto.dev")
        tell_written(args["trace"], "trace", "trace", note)
    if "csv" in args:
        from dlojz.pipeline.exchange_formats import write_csv

        write_csv(schedule, args["csv"])
        tell_written(args["csv"], "order", "ordre")
        if reason := torch_refusal(schedule):
            tell(en=f"note: {reason}", fr=f"remarque : {reason}")
    if args["json"]:
        answer(document(timeline, limit))
    else:
        width = shutil.get_terminal_size((TEXT_WIDTH, 24)).columns if sys.stdout.isatty() else TEXT_WIDTH
        answer(words(timeline, limit, max(width, 40)))


def _compare(args: Given, answer: Answer) -> None:
    size = size_of(args)
    names = [entry(name).name for word in args[WORDS] for name in word.split(",") if name]
    rows, excluded = compare_rows(names, size, args)
    if "png" in args:
        draw_comparison(rows, size, args["png"], times_of(args))
        tell_written(args["png"])
    if args["json"]:
        answer([{**document(row.timeline), "over_memory_limit": row.over_limit} for row in rows])
        return
    answer(phrase("units of a comparison", ranks=size[0], micro_batches=size[1]))
    answer(compare_table(rows))
    if excluded:
        left_out = ", ".join(excluded)
        answer(en=f"not for this size: {left_out}", fr=f"pas pour cette taille : {left_out}")


class ScheduleRow(NamedTuple):
    """One schedule of a comparison."""

    name: str
    timeline: Timeline
    lower_bound: float
    over_limit: bool


def words(timeline: Timeline, memory_limit: float | None, width: int) -> str:
    """Draw one schedule as text, with its figures."""
    from dlojz.display.pipeline_drawing import amount, figure_lines, known_optimum, title_of

    costs = timeline.costs or UNIT_COSTS
    bound = lower_bound(timeline.schedule, costs)
    lines = [*figure_lines(timeline, bound, known_optimum(timeline, memory_limit))]
    # Shares below this are rounding, not idle time.
    idle = {cause: share for cause, share in _idle(timeline).items() if share > 1e-12}
    if idle:
        from dlojz.pipeline.analysis import title_of as cause_title

        idle_text = ", ".join(f"{cause_title(cause)} {amount(share)}" for cause, share in idle.items())
        lines.append((say(en="idle time", fr="inactivité"), idle_text + say(en=" (all ranks)", fr=" (tous les rangs)")))
    executes = say(en="executes it (--csv)", fr="sait l’exécuter (--csv)")
    lines.append(("torch", torch_refusal(timeline.schedule) or executes))
    return f"{title_of(timeline.schedule)}\n\n{text_table(timeline, width)}\n\n{facts(*lines)}"


def document(timeline: Timeline, memory_limit: float | None = None) -> dict[str, Any]:
    """Write one schedule as plain JSON data; memory in stage-micro-batches, times in the costs' unit."""
    from dlojz.display.pipeline_drawing import known_optimum
    from dlojz.pipeline.analysis import critical_path

    schedule, costs = timeline.schedule, timeline.costs or UNIT_COSTS
    return {
        "schedule": schedule.name,
        "stages": schedule.ranks,
        "chunks": schedule.chunks,
        "model_stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        **fields_of(timeline, "makespan", "span", "ideal", "bubble_fraction", "bubble_overhead", "speedup"),
        "peak_activations": [curve.peak for curve in memory_curves(timeline)],
        "lower_bound": lower_bound(schedule, costs),
        "optimum": known_optimum(timeline, memory_limit),
        "idle": _idle(timeline),
        "idle_per_rank": list(timeline.idle),
        "critical_path": [str(schedule.actions[index]) for index in critical_path(timeline)],
        "torch_refusal": torch_refusal(schedule),
    }


def _idle(timeline: Timeline) -> dict[str, float]:
    """Sum the idle time by cause, over all ranks."""
    from dlojz.pipeline.analysis import CAUSES, idle_by_cause

    of_rank = idle_by_cause(timeline)
    return {cause: sum(causes[cause] for causes in of_rank) for cause in CAUSES}


def compare_rows(names: Sequence[str], size: tuple[int, int], args: Given) -> tuple[list[ScheduleRow], list[str]]:
    """Simulate schedules at one size, in the order named.

    Args:
        names: schedules; none for all of the catalogue, the smallest bubble first, but those that the size excludes.
        args: options that tell the costs.

    Returns:
        The rows, and the names left out.

    Raises:
        LabError: if a schedule that was named does not exist for this size.
    """
    limit = args["memory_limit"]
    rows, excluded = [], []
    for name in names or SCHEDULES:
        try:
            rows.append(_row(name, size, args, limit))
        # Of the whole catalogue, schedules that do not exist for a size are counted as excluded.
        except LabError:
            if names:
                raise
            excluded.append(name)
    if not rows:
        raise phrase.refused("no schedule of this size", stages=size[0], micro_batches=size[1])
    return rows if names else sorted(rows, key=lambda row: row.timeline.bubble_fraction), excluded


def _row(name: str, size: tuple[int, int], args: Given, limit: float | None) -> ScheduleRow:
    schedule = build(name, *size, costs=times_of(args))
    costs = costs_of(args, schedule.stages)
    timeline = simulate(schedule, costs)
    peak = max(curve.peak for curve in memory_curves(timeline))
    # 1e-9: a peak is a sum of fractions.
    return ScheduleRow(name, timeline, lower_bound(schedule, costs), limit is not None and peak > limit + 1e-9)


def compare_table(rows: Sequence[ScheduleRow]) -> Table:
    """Compare schedules in a table; times of different numbers of chunks are not comparable, shares are."""
    from dlojz.display.pipeline_drawing import amount

    cells = []
    for name, timeline, bound, over in rows:
        schedule = timeline.schedule
        stages_per_rank = max(
            schedule.stages / schedule.ranks, 1.0
        )  # a micro-batch of a rank is that many stage-micro-batches
        peak = max(curve.peak for curve in memory_curves(timeline)) / stages_per_rank
        times = (amount(duration) for duration in (timeline.makespan, timeline.span, bound))
        shares = map(spaced_percent, (timeline.bubble_fraction, timeline.bubble_overhead))
        torch = "—" if torch_refusal(schedule) else yes_no(True)
        cells.append((name, str(schedule.chunks), *times, *shares, amount(peak) + (" !" if over else ""), torch))
    head = phrase.titles("columns of schedules")
    return Table(head, tuple(cells), whole=1)


def draw_comparison(rows: Sequence[ScheduleRow], size: tuple[int, int], path: str, costs: Costs) -> None:
    """Draw two schedules under one another, or the bubble of several against the number of micro-batches."""
    if len(rows) == 2:
        from dlojz.display.pipeline_drawing import compare_figure

        compare_figure(rows[0].timeline, rows[1].timeline, path)
        return
    from dlojz.display.figures.partition_figures import bubble_figure

    # Multiples of the number of ranks, which interleaved schedules ask for, and the number that was given.
    counts = sorted({size[0] * factor for factor in (1, 2, 3, 4, 6, 8)} | {size[1]})
    bubble_figure([row.name for row in rows], size[0], counts, path, costs)


def listing(as_json: bool) -> Any:
    """List all schedules: name, title, what limits them, source."""
    if as_json:
        return [
            {
                "name": name,
                "title": spec.title(),
                "family": spec.family,
                "chunks": spec.chunks,
                "limits": spec.limits(),
                "torch": spec.torch_class,
                "source": spec.source,
            }
            for name, spec in SCHEDULES.items()
        ]
    rows = tuple((name, spec.title(), spec.limits(), spec.source) for name, spec in SCHEDULES.items())
    head = titles(en="name; ; what limits it; source", fr="nom; ; ce qui le limite; source")
    return Table(head, rows, align="l", whole=1)


@verb(
    "partition",
    measures="|".join(MEASURES),
    config=config_flags(
        *("model", "data", "image_size", "sequence_length", "micro_batch", "micro_batches", "device"),
        *("tp", "tensor_parts"),
        micro_batches=8,
    ),
)
def partition_command(args: Given, answer: Answer) -> None:
    """Cut a model into stages, and show how even they are."""
    from dlojz.prediction.shapes import model_shapes

    stages, pattern = args["stages"], args["pattern"]
    config = config_of(args, micro_batches=args["micro_batches"])
    if config.layout.tp > 1:
        _answer_tensor_plan(config, args, answer)
        return
    config = _in_stages(config, stages)
    measure = args["by"] or ("regex" if pattern else "parameters")
    check_stages(len(block_weights(config).kinds), stages)  # before blocks are timed for nothing
    weighed = _weighed(config, measure, pattern)
    cuts = {"exact": exact(weighed.weights, stages)}
    # PEERS cut the same weights: as DeepSpeed, as torchgpipe, and into equal numbers of blocks.
    cuts |= {name: cut(weighed.weights, stages) for name, cut in PEERS.items()}
    imbalances = _in_other_units(config, weighed, stages) if args["compare"] else {}
    if "png" in args:
        from dlojz.display.figures.partition_figures import partition_figure

        titled_cuts = {tables.cut_label(name): cut for name, cut in cuts.items()}
        partition_figure(titled_cuts, weighed, model=config.model_name, path=args["png"])
        tell_written(args["png"])
    if args["json"]:
        answer(_document(config, weighed, cuts, imbalances) | ({"pattern": pattern} if pattern else {}))
        return
    answer(tables.cut_headline(config.model_name, weighed, stages) + "\n")
    answer(tables.stages_table(cuts["exact"], weighed))
    answer("")
    answer(tables.methods_table(cuts, weighed, config.layout.micro_batches))
    answer(tables.cuts_legend(config.layout.micro_batches))
    if model_shapes(config).enclosing is not None:
        answer(phrase("outside of the blocks", kind=weighed.kinds[-1]))
    if imbalances:
        answer("")
        answer(tables.units_table(imbalances))


def _in_stages(config: RunConfig, stages: int) -> RunConfig:
    """Take the blocks of a model from elsewhere as a pipeline takes them: a chain, whose stages share no weight.

    Raises:
        LabError: if the model has no such blocks, so that no pipeline could run the cut.
    """
    from dlojz.prediction.shapes import check_stages_share_no_weight, model_shapes

    if stages == 1 or not is_elsewhere(config.model):
        return config
    try:
        # The same run with as many pipeline stages, for the checks only.
        staged = RunConfig.of(**{**config.to_dict(), "layout": {**config.layout.to_dict(), "pp": stages}})
        check_stages_share_no_weight(staged, model_shapes(staged))
    except LabError as error:
        raise phrase.refused("no pipeline runs this cut", model_name=config.model_name, error=error) from None
    return staged


def _answer_tensor_plan(config: RunConfig, args: Given, answer: Answer) -> None:
    """Show how the ranks of the tensor axis share a model from elsewhere."""
    from dlojz.prediction.model_trace import pretended_sums
    from dlojz.prediction.shapes import tensor_share_rows

    rows, tp = tensor_share_rows(config), config.layout.tp
    sums = pretended_sums(config)
    # What a user's file would say as `tp_plan`: layers that are kept whole need no entry.
    plan = {row.layers: row.style for row in rows if row.style in ("colwise", "rowwise")}
    if args["json"]:
        document = {"model": config.model, "tp": tp, "tp_plan": plan, "rows": [row._asdict() for row in rows]}
        answer(document | {"all_reduces": len(sums), "all_reduce_bytes": sum(sums)})
        return
    forward = say(en="all-reduce, forward", fr="all-reduce, passe avant")
    backward = say(en="all-reduce, backward", fr="all-reduce, passe arrière")
    hows = {
        "colwise": say(en="column-parallel", fr="par colonnes"),
        "rowwise": say(en="row-parallel", fr="par lignes"),
        "inner": say(en="whole, within heads", fr="entier, dans les têtes"),
        "whole": say(en="whole", fr="entier"),
    }
    # A layer split by columns sums the gradient of its input in backward, one by rows its output in forward.
    collectives = {"colwise": backward, "rowwise": forward, "inner": backward, "whole": "-"}
    cells = tuple(
        (
            row.layers or say(en="all else", fr="tout le reste"),
            str(row.number),
            hows[row.style]
            + (say(en=f", {len(row.parts)} fused", fr=f", {len(row.parts)} fusionnées") if len(row.parts) > 1 else ""),
            f"{row.heads} / {tp}" if row.heads else "-",
            format_bytes(row.rank_bytes),
            collectives[row.style],
        )
        for row in rows
    )
    head = phrase.titles("columns of layers")
    answer(Table(head, cells, f"{config.model_name}, tp={tp}", align="l", whole=3))
    answer(phrase("all-reduces of a micro-batch", config=config, count=len(sums), sent=sum(sums)))
    answer(f"tp_plan = {json.dumps(plan, indent=4)}")


def _weighed(config: RunConfig, measure: str, pattern: str | None) -> BlockWeights:
    if measure != "time":
        return block_weights(config, measure, pattern)  # type: ignore[arg-type]  # another word is refused there
    with progress_bar(say(en="blocks timed", fr="blocs chronométrés")) as update:
        return block_weights(config, "time", pattern, tell=update)


def _in_other_units(config: RunConfig, weighed: BlockWeights, stages: int) -> dict[str, dict[str, float]]:
    """Compute the imbalance of the best cut by each unit, in each unit that is a cost."""
    costs = {"parameters": block_weights(config, "parameters"), "flops": block_weights(config, "flops")}
    if weighed.by == "time":
        costs["time"] = weighed
    cuts = {unit: exact(cost.weights, stages) for unit, cost in costs.items()}
    cuts["uniform"] = uniform(len(weighed.kinds), stages)
    if weighed.by == "regex":
        cuts["regex"] = exact(weighed.weights, stages)
    return {
        measure: {unit: cut.weighed(cost.weights).imbalance for unit, cost in costs.items()}
        for measure, cut in cuts.items()
    }


def _document(
    config: RunConfig,
    weighed: BlockWeights,
    cuts: Mapping[str, Partition],
    imbalances: Mapping[str, Mapping[str, float]],
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
                **fields_of(cut, "bottleneck", "imbalance", "spread"),
                "total_time": total_time(cut.loads, m),
                "optimal": cut.bottleneck == best.bottleneck,
            }
            for name, cut in cuts.items()
        },
    }
    if imbalances:
        document["imbalance_of_cut_by"] = imbalances
    return document
