"""Figures of lab 05 that need a model, a run or a training: cuts, memory kept, steps laid over, stale weights.

Layer 6 (labs), on `dlojz.viz`. Invariant: what was measured stands beside what the student's function or the simulator
says; nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.ticker import NullFormatter

from dlojz.config import RunConfig
from dlojz.labs.pipeline_figures import Sheet, or_to_do, percent, pictured, plain_number
from dlojz.labs.pipeline_partition_exercises import FirstFit, smallest_bottleneck
from dlojz.labs.pipeline_stale_exercises import StaleSgd, largest_step
from dlojz.labs.zero_published import decimal
from dlojz.pipeline.block_weights import block_weights
from dlojz.pipeline.catalogue import build
from dlojz.pipeline.cuts import schedule_of
from dlojz.pipeline.delayed import Delays, SmallProblem, train
from dlojz.pipeline.measured import Overlay, overlay
from dlojz.pipeline.partition import Partition
from dlojz.pipeline.partition_peers import PEERS
from dlojz.pipeline.stability import threshold
from dlojz.pipeline.versions import version_audit
from dlojz.runs import Run
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import format_bytes, format_seconds
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import LINE_STYLES
from dlojz.viz.partition_figure import partition_figure
from dlojz.viz.pipeline_overlay import overlay_figure


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


def overlay_of(run: Run) -> Overlay:
    """The step of median length of a run as measured, and as simulated with the means of its own actions.

    Raises:
        LabError: if the run was not measured to its end.
    """
    if run.record is None:
        raise LabError(
            say(
                en=f"the run {run.config.title} was not measured to its end: look at its logs, then run it again.",
                fr=f"l’exécution {run.config.title} n’a pas été mesurée jusqu’au bout : consultez ses journaux, puis "
                "relancez-la.",
            )
        )
    return overlay(schedule_of(run.config.layout), run.record.spans)


@pictured
def laid_over(run: Run) -> LabFigure:
    """The measured step under its simulation."""
    both = overlay_of(run)
    return overlay_figure(both.simulated, both.measured)


def steps(runs: Sequence[Run]) -> Sheet:
    """Length of the step and bubble of runs, measured and simulated with what their actions took."""
    rows = []
    for run in runs:
        both = overlay_of(run)
        rows.append(
            (
                str(run.config.layout.schedule),
                format_seconds(both.simulated.makespan),
                format_seconds(both.measured.makespan),
                percent(both.simulated.bubble_fraction),
                percent(both.measured.bubble_fraction),
            )
        )
    head = (
        say(en="schedule", fr="ordonnancement"),
        say(en="step, predicted", fr="pas prédit"),
        say(en="measured", fr="mesuré"),
        say(en="bubble, predicted", fr="bulle prédite"),
        say(en="measured", fr="mesurée"),
    )
    return Sheet(head, tuple(rows))


def activation_bytes(run: Run, rank: int) -> int:
    """Bytes of activations that a rank of a run kept at most."""
    footprint = run.record.footprint(rank) if run.record is not None else None
    if footprint is None or footprint.memory.activations_bytes is None:
        raise LabError(_unmeasured(run, rank))
    return int(footprint.memory.activations_bytes)


def _unmeasured(run: Run, rank: int) -> str:
    return say(
        en=f"the run {run.config.title} has no measured memory of rank {rank}: run it again.",
        fr=f"l’exécution {run.config.title} n’a pas de mémoire mesurée pour le rang {rank} : relancez-la.",
    )


@or_to_do
def memory(kept: Callable[[str, int, int, int], int], runs: Sequence[Run]) -> Sheet:
    """Activations of each rank, measured, and per micro-batch that the student's function says it keeps."""
    rows = []
    for run in runs:
        layout = run.config.layout
        for rank in range(layout.pp):
            count = kept(str(layout.schedule), rank, layout.pp, layout.micro_batches)
            measured = activation_bytes(run, rank)
            rows.append(
                (str(layout.schedule), str(rank), str(count), format_bytes(measured), format_bytes(measured / count))
            )
    head = (
        say(en="schedule", fr="ordonnancement"),
        say(en="rank", fr="rang"),
        say(en="kept", fr="gardés"),
        say(en="activations", fr="activations"),
        say(en="per micro-batch", fr="par micro-batch"),
    )
    return Sheet(head, tuple(rows))


def traffic(run: Run) -> Sheet:
    """What each rank of a pipeline with replicas holds, and what it sends per step, as measured."""
    rows = []
    layout = run.config.layout
    for rank in range(layout.world_size):
        stage, replica = divmod(rank, layout.dp)
        footprint = run.record.footprint(rank) if run.record is not None else None
        if footprint is None:
            raise LabError(_unmeasured(run, rank))
        sums = {
            (one.group, one.collective): f"{one.count} × {format_bytes(one.message_bytes / one.count)}"
            for one in footprint.communication
            if one.count
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
    head = (
        say(en="rank", fr="rang"),
        say(en="stage", fr="étage"),
        say(en="replica", fr="réplique"),
        say(en="weights", fr="poids"),
        say(en="sent", fr="envoyé"),
        say(en="received", fr="reçu"),
        "all-reduce",
    )
    return Sheet(head, tuple(rows))


@pictured
def swings(stale_sgd: StaleSgd, step: float, delays: Sequence[int], updates: int = 40) -> LabFigure:
    """The weight of the parabola, update after update, for several delays and one step."""
    figure = new_figure(
        8.0,
        3.2,
        alt=say(
            en=f"Weight by update for the step {step:g} and several delays: the staler the gradient, the more it "
            "swings.",
            fr=f"Poids selon la mise à jour pour le pas {plain_number(step)} et plusieurs retards : plus le gradient "
            "est en retard, plus il oscille.",
        ),
    )
    axes = figure.subplots()
    for delay, (color, line, marker) in zip(delays, LINE_STYLES, strict=False):
        weights = stale_sgd(step, delay, updates)
        axes.plot(weights, color=color, linestyle=line, marker=marker, markersize=3, label=f"τ = {delay}")
    axes.set_ylim(-2.5, 2.5)
    axes.set_xlabel(say(en="update", fr="mise à jour"))
    axes.set_ylabel(say(en="weight", fr="poids"))
    axes.legend(frameon=False, loc="lower left", ncols=len(delays))
    plain(axes)
    return finish(figure)


@or_to_do
def thresholds(stale_sgd: StaleSgd, delays: Sequence[int]) -> Sheet:
    """The largest stable step of the student's own iteration, beside the law."""
    rows = tuple(
        (str(delay), plain_number(largest_step(stale_sgd, delay), 3), plain_number(threshold(delay), 3))
        for delay in delays
    )
    return Sheet(("τ", say(en="found", fr="trouvé"), "2 sin(π/(4τ+2))"), rows)


ASYNCHRONOUS = ("pipedream", "pipedream-vertical", "pipedream-no-stashing", "pipedream-2bw", "pipemare")


def staleness(ranks: int, micro_batches: int, names: Sequence[str] = ASYNCHRONOUS) -> Sheet:
    """What each method makes of the weights: delay of the forward and of the backward per stage, versions kept."""
    rows = []
    for name in names:
        schedule = _asynchronous(name, ranks, micro_batches)
        audit = version_audit(schedule)
        rows.append(
            (
                name,
                " ".join(plain_number(tau) for tau in audit.settled_staleness),
                " ".join(plain_number(tau) for tau in audit.settled_backward_staleness),
                " ".join(str(count) for count in audit.versions_kept),
                say(en="no", fr="non") if audit.mixed else say(en="yes", fr="oui"),
            )
        )
    head = (
        say(en="method", fr="méthode"),
        say(en="delay, forward", fr="retard, passe avant"),
        say(en="backward", fr="passe arrière"),
        say(en="versions kept", fr="versions gardées"),
        say(en="a true gradient?", fr="un vrai gradient ?"),
    )
    return Sheet(head, tuple(rows))


def _asynchronous(name: str, ranks: int, micro_batches: int) -> Any:
    stashing = {"pipedream-vertical": "vertical", "pipedream-no-stashing": "none"}.get(name)
    if stashing is None:
        return build(name, ranks, micro_batches)
    from dlojz.pipeline.orders.asynchronous import pipedream

    return pipedream(ranks, micro_batches, stashing=stashing)  # type: ignore[arg-type]


@pictured
def trainings(stages: int, learning_rate: float, updates: int = 300) -> LabFigure:
    """The loss of one small network, trained with the delays of several pipelines."""
    problem = SmallProblem(stages)
    without = Delays.none(stages)
    stashed = Delays.of(version_audit(_asynchronous("pipedream", stages, 40)))
    mixed = Delays.of(version_audit(_asynchronous("pipemare", stages, 60)))
    ways: tuple[tuple[str, Delays, dict[str, Any]], ...] = (
        (say(en="synchronous (GPipe, 1F1B)", fr="synchrone (GPipe, 1F1B)"), without, {}),
        ("PipeDream", stashed, {}),
        (say(en="PipeMare without remedies", fr="PipeMare sans correctifs"), mixed, {}),
        ("PipeMare (T1, T2)", mixed, {"reschedule_over": 2 * updates // 3, "correct": True}),
    )
    figure = new_figure(
        8.0,
        3.4,
        alt=say(
            en=f"Loss of a network of {stages} stages by update, learning rate {learning_rate:g}, with the delays of "
            "several pipelines.",
            fr=f"Perte d’un réseau de {stages} étages selon la mise à jour, taux d’apprentissage "
            f"{plain_number(learning_rate)}, avec les retards de plusieurs pipelines.",
        ),
    )
    axes = figure.subplots()
    for (label, delays, options), (color, line, _) in zip(ways, LINE_STYLES, strict=False):
        run = train(problem, delays, learning_rate=learning_rate, updates=updates, **options)
        smooth = [sum(run.losses[max(n - 9, 0) : n + 1]) / min(n + 1, 10) for n in range(len(run.losses))]
        end = say(en=" (diverges)", fr=" (diverge)") if run.diverged else ""
        axes.plot(smooth, color=color, linestyle=line, linewidth=1.6, label=label + end)
    axes.set_yscale("log")
    axes.set_ylim(1e-3, 10)
    axes.yaxis.set_major_formatter(lambda value, position: decimal(f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(say(en="update", fr="mise à jour"))
    axes.set_ylabel(say(en="loss (mean of 10 updates)", fr="perte (moyenne de 10 mises à jour)"))
    axes.legend(frameon=False)
    plain(axes)
    return finish(figure)
