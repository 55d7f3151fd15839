"""Figures and tables of lab 05: schedules, memory limits, cuts, measured steps under their simulation, stale weights.

What is drawn is what the student's own function gives, what the simulator finds, or what was measured; nothing is
fitted. An exercise that is still to do is answered by its sentence, not by an error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.ticker import NullFormatter

from dlojz.base.errors import LabError
from dlojz.base.language import format_bytes, percent, say, shortest, significant
from dlojz.base.table import Table, titles
from dlojz.config.run_config import RunConfig
from dlojz.display.canvas import LabFigure
from dlojz.display.figures.partition_figures import overlay_figure, partition_figure
from dlojz.display.pipeline_drawing import compare_figure, schedule_figure
from dlojz.display.style import BLACK, LINE_STYLES
from dlojz.labs.kit.exercise import Sentences, Verdict, Wrong, or_to_do
from dlojz.labs.kit.figures import labelled, panel, pictured, plot_lines, unmeasured
from dlojz.labs.lab05_pipeline.exercises_orders import read_schedule, refuse_invalid
from dlojz.labs.lab05_pipeline.exercises_runs import FirstFit, StaleSgd, largest_step, smallest_bottleneck
from dlojz.pipeline.exchange_formats import to_csv
from dlojz.pipeline.orders.asynchronous import threshold, version_audit
from dlojz.pipeline.partition import PEERS, Partition, block_weights
from dlojz.pipeline.schedule import Costs, Schedule
from dlojz.pipeline.schedule_catalogue import build, entry, schedule_of
from dlojz.pipeline.shortest_schedule import optimum
from dlojz.pipeline.simulator import MeasuredOverlay, overlay, peak_activations, simulate
from dlojz.pipeline.validity import check
from dlojz.running.run import Run

TEXTS = Sentences(Path(__file__).with_suffix(".md"))


def chunk_costs(schedule: Schedule, **changes: Any) -> Costs:
    """Costs with which a whole rank takes F = I = W = 1 for a micro-batch, over how many chunks its layers may be."""
    # One where each rank holds one stage; with more chunks per rank each is as much smaller.
    share = schedule.ranks * schedule.pipes / sum(len(pipe) for pipe in schedule.placement)
    times = {"forward": share, "backward_input": share, "backward_weight": share, "kept_for_input": share,
             "kept_for_weight": share}  # fmt: skip
    return Costs(**{**times, **changes})


@or_to_do
def bubbles(
    step: Callable[..., tuple[float, float, float]], names: Sequence[str], sizes: Sequence[tuple[int, int]]
) -> Table:
    """Length, fraction and overhead of the student's formulas, and those of the same schedules simulated."""
    rows = []
    for name in names:
        for ranks, micro_batches in sizes:
            timeline = simulate(build(name, ranks, micro_batches))
            simulated = timeline.makespan, timeline.bubble_fraction, timeline.bubble_overhead
            length, *shares = zip(step(ranks, micro_batches, 1, 2), simulated, strict=True)
            cells = (
                " | ".join(significant(time_units, 4) for time_units in length),
                *(" | ".join(map(percent, pair)) for pair in shares),
            )
            rows.append((name, str(ranks), str(micro_batches), *cells))
    head = titles(*TEXTS.sentence("bubbles", "heads"))
    return Table(head, tuple(rows))


@pictured
def beside_gpipe(order: Callable[[int, int, int], Any], ranks: int, micro_batches: int) -> LabFigure:
    """GPipe above the student's order: the same length, another memory."""
    schedule = _yours([order(rank, ranks, micro_batches) for rank in range(ranks)], ranks, micro_batches)
    return compare_figure(simulate(build("gpipe", ranks, micro_batches)), simulate(schedule))


def deadlock_of(orders: Sequence[Sequence[str]], micro_batches: int, sends: str = "buffered") -> str:
    """What happens to an order: the cycle of actions that wait for each other, or how long the step takes.

    Args:
        orders: one list of actions per rank, one stage each.
        micro_batches: of the step.
        sends: as in `Costs`.
    """
    schedule = read_schedule(orders, len(orders), micro_batches)
    try:
        check(schedule)
        timeline = simulate(schedule, Costs(sends=sends))  # type: ignore[arg-type]
    except LabError as error:
        return str(error)
    return say(
        en=f"runs to its end in {shortest(timeline.makespan)} time units; kept: ",
        fr=f"va jusqu’au bout en {significant(timeline.makespan, 4)} unités de temps ; gardés : ",
    ) + ", ".join(significant(peak, 4) for peak in peak_activations(schedule))


@pictured
def repaired(unblocked: Callable[[], Any], ranks: int, micro_batches: int) -> LabFigure:
    """The student's repair with blocking sends, under 1F1B whose sends and receives are posted together."""
    schedule = _yours(unblocked(), ranks, micro_batches)
    try:
        blocking = simulate(schedule, Costs(sends="rendezvous"))
    except LabError as error:
        raise Wrong(str(error)) from None
    return compare_figure(simulate(build("1f1b", ranks, micro_batches), Costs(sends="paired")), blocking)


@pictured
def capped(
    under_cap: Callable[[int, int, int], Any], ranks: int, micro_batches: int, limits: Sequence[int]
) -> LabFigure:
    """Length of the step by memory limit: the student's schedule, 1F1B cut short, GPipe's priority, the optimum."""
    makespans = [simulate(_yours(under_cap(ranks, micro_batches, n), ranks, micro_batches)).makespan for n in limits]
    best = [optimum(ranks, micro_batches, memory_limit=n).value for n in limits]
    summary = ", ".join(f"{n}: {significant(length, 4)}" for n, length in zip(limits, makespans, strict=True))
    axes = panel(7.0, 3.4, *TEXTS.sentence("capped", "alt", summary=summary))
    series = {
        say(en="your schedule", fr="votre ordonnancement"): makespans,
        say(en="proven optimum", fr="optimum prouvé"): best,
    }
    plot_lines(axes, limits, series, markersize=6)
    ideal = 3 * micro_batches
    axes.axhline(ideal, color=BLACK, linestyle=":", linewidth=1.2, label=say(en="work alone", fr="travail seul"))
    axes.set_ylim(0, None)
    axes.set_xticks(list(limits))
    return labelled(
        axes,
        say(en="micro-batches that a rank may keep", fr="micro-batches qu’un rang peut garder"),
        say(en="step (time units)", fr="pas (unités de temps)"),
    )


def all_schedules(names: Sequence[str], ranks: int, micro_batches: int, **options: dict[str, Any]) -> Table:
    """Schedules in one table, in units of one rank's forward of a micro-batch, whatever its chunks.

    Args:
        names: of the catalogue.
        ranks, micro_batches: their size.
        options: further options of `catalogue.build`, by name of the schedule (hyphens as underscores).
    """
    rows = []
    for name in names:
        schedule = build(name, ranks, micro_batches, **options.get(name.replace("-", "_"), {}))
        costs = chunk_costs(schedule)
        timeline = simulate(schedule, costs)
        graph = schedule.graph
        # Messages: actions whose input comes from an action of another rank.
        hops = sum(n < graph.actions and graph.rank[n] != graph.rank[i] for i, n in enumerate(graph.needs))
        hops += sum(bool(graph.rank[n] != graph.rank[i]) for i, n in graph.also)
        peaks = peak_activations(schedule, costs)
        rows.append(
            (
                name,
                significant(timeline.makespan, 4),
                significant(timeline.span, 4),
                percent(timeline.bubble_fraction),
                f"{significant(min(peaks), 4)} – {significant(max(peaks), 4)}" if len(set(peaks)) > 1
                else significant(peaks[0], 4),
                f"× {schedule.pipes}",
                str(int(hops)),
                entry(name).limits(),
            )
        )  # fmt: skip
    head = titles(*TEXTS.sentence("all schedules", "heads"))
    return Table(head, tuple(rows))


def csv_of(orders: Callable[[], Any], ranks: int, micro_batches: int) -> str:
    """The student's schedule as torch's CSV; 1F1B's as long as the exercise is to do, or its order cannot run."""
    outcome = or_to_do(_yours_of)(orders, ranks, micro_batches)
    return to_csv(build("1f1b", ranks, micro_batches) if isinstance(outcome, Verdict) else outcome)


@pictured
def own(orders: Callable[[], Any], ranks: int, micro_batches: int) -> LabFigure:
    """1F1B above the student's schedule."""
    schedule = _yours(orders(), ranks, micro_batches)
    return compare_figure(simulate(build("1f1b", ranks, micro_batches)), simulate(schedule))


def _yours_of(orders: Callable[[], Any], ranks: int, micro_batches: int) -> Schedule:
    return _yours(orders(), ranks, micro_batches)


def _yours(orders: Any, ranks: int, micro_batches: int) -> Schedule:
    """The student's schedule; one that is not whole or cannot run is refused, not drawn."""
    schedule = read_schedule(orders, ranks, micro_batches)
    refuse_invalid(schedule)
    return replace(schedule, name=say(en="your schedule", fr="votre ordonnancement"))


@pictured
def drawn(name: str, ranks: int, micro_batches: int, **options: Any) -> LabFigure:
    """One schedule of the catalogue, a rank taking F = I = W = 1 for a micro-batch."""
    schedule = build(name, ranks, micro_batches)
    return schedule_figure(simulate(schedule, chunk_costs(schedule)), **options)


@pictured
def cuts(first_fit: FirstFit, config: RunConfig, stages: int, by: Any = "parameters") -> LabFigure:
    """The student's cut of a model beside those of DeepSpeed, torchgpipe and equal numbers of blocks."""
    weighed = block_weights(config, by)
    weights = [int(weight) for weight in weighed.weights]
    limit = smallest_bottleneck(first_fit, weights, stages)
    panels = {say(en="yours", fr="le vôtre"): Partition(tuple(first_fit(weights, limit)), tuple(weights))}
    names = {
        "deepspeed": "DeepSpeed",
        "torchgpipe": "torchgpipe",
        "uniform": say(en="equal numbers", fr="à nombre égal"),
    }
    panels |= {names[peer]: cut(weights, stages) for peer, cut in PEERS.items()}
    return partition_figure(panels, weighed, config.model)


def overlay_of(run: Run) -> MeasuredOverlay:
    """The step of median length of a run as measured, and as simulated with the mean times of its actions.

    Raises:
        LabError: if the run was not measured to its end.
    """
    if run.record is None:
        raise unmeasured(run)
    return overlay(schedule_of(run.config.layout), run.record.spans)


@pictured
def laid_over(run: Run) -> LabFigure:
    """The measured step under its simulation."""
    timelines = overlay_of(run)
    return overlay_figure(timelines.simulated, timelines.measured)


def activation_bytes(run: Run, rank: int) -> int:
    """Bytes of activations that a rank of a run kept at most."""
    footprint = run.record.footprint(rank) if run.record is not None else None
    if footprint is None or footprint.memory.activations_bytes is None:
        raise LabError(_unmeasured(run, rank))
    return int(footprint.memory.activations_bytes)


def _unmeasured(run: Run, rank: int) -> str:
    return TEXTS.say("memory of ranks", "not measured", title=run.config.title, rank=rank)


@or_to_do
def memory(count_of: Callable[[str, int, int, int], int], runs: Sequence[Run]) -> Table:
    """Activations of each rank, measured, and per micro-batch that the student's function says it keeps."""
    rows = []
    for run in runs:
        layout = run.config.layout
        for rank in range(layout.pp):
            count = count_of(str(layout.schedule), rank, layout.pp, layout.micro_batches)
            measured = activation_bytes(run, rank)
            rows.append(
                (str(layout.schedule), str(rank), str(count), format_bytes(measured), format_bytes(measured / count))
            )
    head = titles(*TEXTS.sentence("memory", "heads"))
    return Table(head, tuple(rows))


def traffic(run: Run) -> Table:
    """What each rank of a pipeline with replicas holds, and what it sends per step, as measured."""
    rows = []
    layout = run.config.layout
    for rank in range(layout.world_size):
        stage, replica = divmod(rank, layout.dp)
        footprint = run.record.footprint(rank) if run.record is not None else None
        if footprint is None:
            raise LabError(_unmeasured(run, rank))
        sums = {
            (flow.group, flow.collective): f"{flow.count} × {format_bytes(flow.message_bytes / flow.count)}"
            for flow in footprint.communication
            if flow.count
        }
        rows.append(
            (
                str(rank),
                str(stage),
                str(replica),
                format_bytes(footprint.memory.weights_bytes or 0),
                sums.get(("pp", "send"), "0"),
                sums.get(("pp", "recv"), "0"),
                sums.get(("dp", "all_reduce"), "0"),
            )
        )
    head = titles(*TEXTS.sentence("traffic", "heads"))
    return Table(head, tuple(rows))


@pictured
def swings(stale_sgd: StaleSgd, step: float, delays: Sequence[int], updates: int = 40) -> LabFigure:
    """The weight of the parabola, update after update, for several delays and one step."""
    axes = panel(
        8.0,
        3.2,
        en=f"Weight by update for the step {shortest(step)} and several delays: the staler the gradient, the more "
        "it swings.",
        fr=f"Poids selon la mise à jour pour le pas {significant(step, 4)} et plusieurs retards : plus le gradient "
        "est en retard, plus il oscille.",
    )
    weights = {f"τ = {delay}": stale_sgd(step, delay, updates) for delay in delays}
    plot_lines(axes, range(updates + 1), weights, markersize=3)
    axes.set_ylim(-2.5, 2.5)
    return labelled(
        axes, say(en="update", fr="mise à jour"), say(en="weight", fr="poids"), loc="lower left", ncols=len(delays)
    )


@or_to_do
def thresholds(stale_sgd: StaleSgd, delays: Sequence[int]) -> Table:
    """The largest stable step of the student's own iteration, beside the law."""
    rows = tuple(
        (str(delay), significant(largest_step(stale_sgd, delay)), significant(threshold(delay))) for delay in delays
    )
    return Table(("τ", say(en="found", fr="trouvé"), "2 sin(π/(4τ+2))"), rows)


ASYNCHRONOUS = ("pipedream", "pipedream-vertical", "pipedream-no-stashing", "pipedream-2bw", "pipemare")


def staleness(ranks: int, micro_batches: int, names: Sequence[str] = ASYNCHRONOUS) -> Table:
    """What each method makes of the weights: delay of the forward and of the backward per stage, versions kept."""
    rows = []
    for name in names:
        schedule = _asynchronous(name, ranks, micro_batches)
        audit = version_audit(schedule)
        rows.append(
            (
                name,
                " ".join(significant(tau, 4) for tau in audit.settled_staleness),
                " ".join(significant(tau, 4) for tau in audit.settled_backward_staleness),
                " ".join(str(count) for count in audit.versions_kept),
                say(en="no", fr="non") if audit.mixed else say(en="yes", fr="oui"),
            )
        )
    head = titles(*TEXTS.sentence("staleness", "heads"))
    return Table(head, tuple(rows))


def _asynchronous(name: str, ranks: int, micro_batches: int) -> Any:
    stashing = {"pipedream-vertical": "vertical", "pipedream-no-stashing": "none"}.get(name)
    if stashing is None:
        return build(name, ranks, micro_batches)
    from dlojz.pipeline.orders.asynchronous import pipedream

    return pipedream(ranks, micro_batches, stashing=stashing)  # type: ignore[arg-type]


@pictured
def losses(runs: Mapping[str, Sequence[float]]) -> LabFigure:
    """The loss of several trainings by update."""
    axes = panel(
        8.0, 3.4, en=f"Loss by update: {', '.join(runs)}.", fr=f"Perte selon la mise à jour : {', '.join(runs)}."
    )
    for (label, run_losses), (color, line, _) in zip(runs.items(), LINE_STYLES, strict=False):
        smooth = [sum(run_losses[max(n - 9, 0) : n + 1]) / min(n + 1, 10) for n in range(len(run_losses))]
        axes.plot(smooth, color=color, linestyle=line, linewidth=1.6, label=label)
    axes.set_yscale("log")
    axes.set_ylim(1e-3, 10)
    axes.yaxis.set_minor_formatter(NullFormatter())
    return labelled(
        axes,
        say(en="update", fr="mise à jour"),
        say(en="loss (mean of 10 updates)", fr="perte (moyenne de 10 mises à jour)"),
    )
