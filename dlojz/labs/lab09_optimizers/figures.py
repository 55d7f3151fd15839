"""Figures of lab 09: bias of signs, bytes sent and kept, when the variance was frozen, gradients held in backward."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from matplotlib.axes import Axes

from dlojz.base.language import MEBIBYTE, decimal, minus, say
from dlojz.display.canvas import LabFigure, finish, new_figure, plain
from dlojz.display.figures.communication_figures import communication_figure
from dlojz.display.figures.run_figures import optimizer_label
from dlojz.display.style import (
    BLACK,
    BLUE,
    CATEGORY_STYLES,
    COLLECTIVE_STYLES,
    EDGE,
    GREEN,
    GREY,
    LINE_STYLES,
    NORMAL,
    OTHER,
    PREDICTED_ALPHA,
    SMALL,
    VERMILION,
    Style,
    category_label,
)
from dlojz.labs.kit.figures import (
    bar,
    labelled,
    legend_above,
    measured_footprint,
    open_figure,
    panel,
    pictured,
    plot_lines,
)
from dlojz.prediction import predict
from dlojz.prediction.link_traffic import Reduction, predicted_way
from dlojz.results.footprint import STATES, Footprint
from dlojz.running.run import Run

_MESSAGES = COLLECTIVE_STYLES | {"all_to_all": Style(GREEN, "xx")}


@pictured
def walk(exact: Sequence[float], signs: Sequence[float], fed_back: Sequence[float]) -> LabFigure:
    """Draw the first weight, step by step, under gradients sent whole, as signs, and with error feedback."""
    paths = {
        say(en="32 bits", fr="32 bits"): list(exact),
        say(en="1 bit", fr="1 bit"): list(signs),
        say(en="1 bit, error feedback", fr="1 bit, erreur compensée"): list(fed_back),
    }
    ends = ", ".join(f"{name} → {minus(decimal(path[-1], 1))}" for name, path in paths.items())
    axes = panel(7.5, 3.4, f"The first weight by step: {ends}", f"Le premier poids, à chaque pas : {ends}")
    plot_lines(axes, range(len(exact)), paths, marker="", linewidth=2)
    x, y = say(en="step", fr="pas"), say(en="first weight", fr="premier poids")
    return labelled(axes, x, y, loc="upper left")


@pictured
def sent_and_kept(runs: Sequence[Run]) -> LabFigure:
    """Draw what rank 0 of runs sends in a step and the states it keeps, predicted (pale) above measured."""
    figure = new_figure(
        12.0,
        1.3 + 0.55 * len(runs),
        alt=say(
            en="Bytes sent per step and states kept, predicted and measured, with ",
            fr="Octets envoyés par pas et états gardés, prédits et mesurés, avec ",
        )
        + ", ".join(optimizer_label(run.config.optimizer) for run in runs),
    )
    traffic_axes, state_axes = figure.subplots(1, 2, sharey=True)
    for position, run in enumerate(runs):
        for footprint, shift, alpha in (
            (predict(run.config), -0.2, PREDICTED_ALPHA),
            (measured_footprint(run), 0.2, 1.0),
        ):
            _traffic(traffic_axes, footprint, position + shift, alpha)
            _states(state_axes, footprint, position + shift, alpha)
    traffic_axes.set_yticks(range(len(runs)), [optimizer_label(run.config.optimizer) for run in runs])
    traffic_axes.invert_yaxis()
    traffic_axes.set_xlabel(
        say(en="sent by rank 0 in a step that sends (MiB)", fr="envoyé par le rang 0, lors d’un envoi (Mio)")
    )
    state_axes.set_xlabel(say(en="states kept by rank 0 (MiB)", fr="états gardés par le rang 0 (Mio)"))
    for axes in (traffic_axes, state_axes):
        axes.set_title(say(en="pale: predicted", fr="en clair : prédit"), loc="right", fontsize=NORMAL, color=EDGE)
        plain(axes)
        legend_above(axes, ncols=5, loc="lower left")
    return finish(figure)


def _traffic(axes: Axes, footprint: Footprint, position: float, alpha: float) -> None:
    offset_mib = 0.0
    for traffic in footprint.communication:
        if traffic.group != "dp":
            continue
        size = traffic.sent_bytes / MEBIBYTE
        # the predicted bar has the same colours: one entry in the legend for both
        label = traffic.collective.replace("_", "-") if footprint.source == "measured" else None
        bar(axes, position, size, offset_mib, _MESSAGES.get(traffic.collective, OTHER), alpha, label)
        offset_mib += size
    if footprint.source == "measured":
        axes.annotate(
            decimal(offset_mib, 2),
            (offset_mib, position),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
        )


def _states(axes: Axes, footprint: Footprint, position: float, alpha: float) -> None:
    offset_mib = 0.0
    for category in STATES:
        size = (footprint.memory.category(category) or 0) / MEBIBYTE
        if size:
            label = category_label(category) if footprint.source == "measured" else None
            bar(axes, position, size, offset_mib, CATEGORY_STYLES[category], alpha, label)
        offset_mib += size


@pictured
def freezing(
    norms: Sequence[Sequence[float]],
    ends: Mapping[int, Sequence[float]],
    freeze_step: Callable[[Sequence[float], float, float], int],
    beta2: float,
    threshold: float,
) -> LabFigure:
    """Draw when the variance came to rest, and the final losses of trainings that froze it at several steps.

    Args:
        norms: of the variance after every step, one row per seed, never frozen.
        ends: by the step in which the variance was frozen, the final loss of each seed, NaN where it diverged; the
            largest of these steps is that of the training which never froze it.
        beta2: decay of the variance.
        threshold: of the criterion.
    """
    chosen = [freeze_step(list(row), beta2, threshold) for row in norms]
    figure = open_figure(
        11.0,
        3.8,
        en=f"Norm of the variance by step, at rest at steps {chosen}; final losses by the step of freezing.",
        fr=f"Norme de la variance à chaque pas, au repos aux pas {chosen} ; pertes finales selon le pas du gel.",
    )
    norm_axes, loss_axes = figure.subplots(1, 2)
    for row, step in zip(norms, chosen, strict=True):
        norm_axes.plot(range(len(row)), row, color=GREY, linewidth=1)
        if step < len(row):
            norm_axes.plot(step, row[step], "o", color=VERMILION, markersize=6, zorder=3)
    norm_axes.plot([], [], "o", color=VERMILION, label=say(en="your criterion", fr="votre critère"))
    norm_axes.set_xlabel(say(en="step", fr="pas"))
    norm_axes.set_ylabel(say(en="norm of the variance, ‖v‖₁", fr="norme de la variance, ‖v‖₁"))
    norm_axes.legend(frameon=False)
    _ends(loss_axes, ends)
    for axes in (norm_axes, loss_axes):
        plain(axes)
    return finish(figure)


def _ends(axes: Axes, ends: Mapping[int, Sequence[float]]) -> None:
    never = max(ends)
    finite = [loss for losses in ends.values() for loss in losses if math.isfinite(loss)]
    top = 1.15 * max(finite)
    names = [say(en="never", fr="jamais") if step == never else str(step) for step in ends]
    for position, losses in enumerate(ends.values()):
        fine = [loss for loss in losses if math.isfinite(loss)]
        # one cross for all seeds that diverged, with their number
        lost = len(losses) - len(fine)
        axes.plot([position] * len(fine), fine, "o", color=BLUE, markersize=6, alpha=0.7)
        axes.plot([position] * min(lost, 1), [top] * min(lost, 1), "X", color=VERMILION, markersize=9)
        if lost:
            axes.annotate(
                f"× {lost}", (position, top), xytext=(8, 0), textcoords="offset points", va="center", fontsize=NORMAL
            )
    axes.plot([], [], "o", color=BLUE, label=say(en="one seed", fr="une graine"))
    axes.plot([], [], "X", color=VERMILION, label=say(en="diverged", fr="a divergé"))
    axes.axhline(
        statistics.median(ends[never]),
        color=BLACK,
        linestyle="--",
        linewidth=1,
        label=say(en="Adam, median", fr="Adam, médiane"),
    )
    axes.set_xticks(range(len(ends)), names)
    axes.set_xlabel(say(en="variance frozen at step", fr="variance gelée au pas"))
    axes.set_ylabel(say(en="final loss (nats)", fr="perte finale (nats)"))
    axes.margins(x=0.12)
    axes.legend(frameon=False, loc="upper right", fontsize=NORMAL)


@pictured
def gradients_at_once(plainly: Sequence[int], in_backward: Callable[[], Sequence[int]]) -> LabFigure:
    """Draw the bytes of gradients held in a backward pass, with updates at its end and within it.

    Args:
        plainly: after each gradient has come, and at the end.
        in_backward: gives the same with the student's function at work.
    """
    within = in_backward()
    axes = panel(
        8.0,
        3.4,
        f"Gradients held during backward: up to {max(plainly)} bytes, within backward up to {max(within)}.",
        f"Gradients détenus pendant la passe arrière : jusqu’à {max(plainly)} octets ; mis à jour au fil de la passe, "
        f"jusqu’à {max(within)}.",
    )
    rows = (
        (say(en="update after backward", fr="mise à jour après la passe arrière"), plainly),
        (say(en="update in backward", fr="mise à jour dans la passe arrière"), within),
    )
    for (name, gradient_bytes), (color, line, _) in zip(rows, LINE_STYLES, strict=False):
        sizes = [size / MEBIBYTE for size in gradient_bytes]
        axes.step(range(1, len(sizes) + 1), sizes, where="mid", color=color, linestyle=line, linewidth=2, label=name)
    x = say(en="gradients that have come", fr="gradients arrivés")
    return labelled(axes, x, say(en="gradients held (MiB)", fr="gradients détenus (Mio)"), loc="upper left")


def way_of(run: Run) -> Reduction:
    """Convert a run for the board: bytes predicted for the mean step, loss and step measured."""
    compression = run.config.layout.gradient_compression
    name = optimizer_label(run.config.optimizer) + ("" if compression == "none" else f", {compression}")
    # mean over the last tenth of the steps, at least one
    last_losses = run.losses[-max(1, len(run.losses) // 10) :]
    return replace(
        predicted_way(name, run.config),
        losses=(statistics.fmean(last_losses),),
        step_s=measured_footprint(run).phases.step_s,
    )


@pictured
def board(runs: Sequence[Run]) -> LabFigure:
    """Draw bytes against loss of the runs, and their step over slow and fast links; AdamW must be among them."""
    return communication_figure([way_of(run) for run in runs])
