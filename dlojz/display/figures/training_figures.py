"""Figures of trainings: convergence, curriculum, forms of the update, loads of experts.

Losses of optimizers over several seeds, and how far the compressed ones are from those that send everything.

Every seed is drawn; what a curve shows at a step is the mean over the last tenth of the steps up to it, so that its end
is what is judged, and the band is the tolerance.

What a curriculum changes: losses against tokens and time, Adam's √v, and what a step costs at each length.

Every curve is drawn from the entries of a trajectory; a thin line is one seed, the thick one the median of the seeds.

Forms of one update beside each other: what a step takes, and the peak that was predicted and measured.

Nothing is computed here but ratios of what was measured; a form has one colour and one marker in every panel.

The load of each expert over the steps of a training, what its capacity cuts, and how two trainings differ.

Each step is drawn as it was recorded; nothing is smoothed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from dlojz.base.errors import LabError
from dlojz.base.language import decimal, one_of, percent, say, shortest, significant, spaced_percent
from dlojz.base.table import visible
from dlojz.by_hand.optimizers.convergence import TOLERANCE, Curves, curves_of, gap, reference_of
from dlojz.config.schedules import stretches
from dlojz.display.canvas import LabFigure, decimal_marks, finish, new_figure, plain
from dlojz.display.style import (
    BASELINE,
    BLACK,
    BLUE,
    EDGE,
    GREEN,
    GREY,
    LIGHT_ORANGE,
    LINE_STYLES,
    ORANGE,
    PREDICTED_ALPHA,
    PURPLE,
    REMARK,
    SHADE,
    SKY,
    VERMILION,
    WHITE,
)
from dlojz.results.record import RunRecord

if TYPE_CHECKING:
    from dlojz.config.run_config import RunConfig
    from dlojz.results.record import Trajectory
    from dlojz.train.trials import FormMeasure

_LABELS = {
    "adamw": "AdamW",
    "lamb": "LAMB",
    "one_bit_adam": "1-bit Adam",
    "one_bit_lamb": "1-bit LAMB",
    "zero_one_adam": "0/1 Adam",
    "sgd": "SGD",
    "local_sgd": "local SGD",
    "diloco": "DiLoCo",
}
MOST_PERCENT = 20.0
"""Gaps beyond this are not drawn: at first all optimizers are alike, and one that diverged would hide the others."""


def optimizer_label(name: str) -> str:
    """An optimizer's name as papers write it."""
    return _LABELS.get(name, visible(name).replace("_", " "))


def convergence_figure(
    tasks: Mapping[str, Sequence[Curves | RunRecord]], path: str | Path | None = None, tolerance: float = TOLERANCE
) -> LabFigure:
    """Draw a row for each task: the losses, and beside them the gap of every compressed optimizer.

    Args:
        tasks: for each task, by its title, its runs' records, or curves: of an optimizer, and of those it is held
            against (`adamw` for `one_bit_adam` and `zero_one_adam`, `lamb` for `one_bit_lamb`).
        path: picture to write, if any.
        tolerance: half the height of the band, relative.

    Raises:
        LabError: without a task, or a task without runs; if two optimizers have not the same seeds; if the picture
            cannot be written.
    """
    rows = {title: _convergence_curves(runs) for title, runs in tasks.items()}
    if not rows or not all(rows.values()):
        raise LabError(
            say(
                en=f"a figure of convergence needs at least one task with runs, but {len(rows)} task(s) were received, "
                f"{sum(not one for one in rows.values())} of them without.",
                fr=f"une figure de convergence demande au moins une tâche avec des entraînements, mais {len(rows)} "
                f"tâche(s) ont été reçues, dont {sum(not one for one in rows.values())} sans.",
            )
        )
    figure = new_figure(12.0, 0.8 + 3.0 * len(rows), alt=convergence_description(rows))
    panels = figure.subplots(len(rows), 2, squeeze=False, width_ratios=(1.25, 1.0))
    for (losses, gaps), (title, curves) in zip(panels, rows.items(), strict=True):
        _convergence_losses(losses, title, curves)
        _gaps(gaps, curves, tolerance)
    for axes in panels[-1]:
        axes.set_xlabel(say(en="step", fr="pas"))
    return finish(figure, path)


def convergence_description(rows: Mapping[str, Sequence[Curves]]) -> str:
    """The figure in words: of every compressed optimizer, how far the median of its final loss is."""
    told = []
    for title, curves in rows.items():
        for one in curves:
            reference = reference_of(one, curves)
            if reference is not None:
                told.append(
                    f"{visible(title)}, {optimizer_label(one.optimizer)} {_gap_words(gap(one, reference).medians)}"
                )
    return say(
        en=f"Losses by seed ({_seeds(rows)} in all), and gaps of the final loss (median): ",
        fr=f"Pertes par graine ({_seeds(rows)} en tout), et écarts de la perte finale (médiane) : ",
    ) + ("; ".join(told) or say(en="none", fr="aucun"))


def _seeds(rows: Mapping[str, Sequence[Curves]]) -> int:
    return max(len(one.losses) for curves in rows.values() for one in curves)


def _convergence_curves(runs: Sequence[Curves | RunRecord]) -> list[Curves]:
    """Curves as they were given, and those of the records."""
    return [
        *(one for one in runs if isinstance(one, Curves)),
        *curves_of([one for one in runs if isinstance(one, RunRecord)]),
    ]


def _gap_words(relative: float) -> str:
    """With its sign, e.g. +0.7 %."""
    if not math.isfinite(relative):
        return say(en="diverged", fr="a divergé")
    return spaced_percent(relative, signed=True)


def _medians(columns: Sequence[Sequence[float]]) -> list[float]:
    """The median over the seeds, step by step; a seed that diverged counts as the largest."""
    return [
        statistics.median(value if math.isfinite(value) else math.inf for value in values)
        for values in zip(*columns, strict=True)
    ]


def _convergence_losses(axes: Axes, title: str, curves: Sequence[Curves]) -> None:
    """Each seed thin, their median thick; the step at which the variance is frozen."""
    for (color, dashes, _), one in zip(LINE_STYLES, curves, strict=False):
        seeds = one.smoothed()
        for seed in seeds:
            axes.plot(range(one.steps), seed, color=color, linewidth=0.6, alpha=0.45)
        axes.plot(range(one.steps), _medians(seeds), color=color, linestyle=dashes, linewidth=2.2,
                  label=f"{optimizer_label(one.optimizer)} ({_loss(one.median())})")  # fmt: skip
    axes.set_yscale("log")
    _plain_ticks(axes)
    _freeze(axes, curves, said=True)
    plain(axes)
    window = curves[0].window
    axes.set_ylabel(say(en=f"loss, mean of {window} steps", fr=f"perte, moyenne de {window} pas"))
    axes.set_title(visible(title), loc="left", fontsize=10, fontweight="bold")
    heading = say(en="median over the seeds (at the end)", fr="médiane sur les graines (à la fin)")
    axes.legend(frameon=False, fontsize=8, title=heading, title_fontsize=8, alignment="left", handlelength=3.5)


def _gaps(axes: Axes, curves: Sequence[Curves], tolerance: float) -> None:
    """How much more the loss of each compressed optimizer is, in percent, seed by seed and between the medians."""
    axes.axhspan(-100 * tolerance, 100 * tolerance, color=SHADE, zorder=0)
    axes.axhline(0, color=BASELINE, linewidth=0.8)
    most, said = 2.5 * 100 * tolerance, []
    for (color, dashes, marker), one in zip(LINE_STYLES, curves, strict=False):
        reference = reference_of(one, curves)
        if reference is None:
            continue
        found, steps = gap(one, reference), range(one.steps)
        ours, theirs = one.smoothed(), reference.smoothed()
        for own, other in zip(ours, theirs, strict=True):
            axes.plot(steps, _relative(own, other), color=color, linewidth=0.6, alpha=0.45)
        axes.plot(steps, _relative(_medians(ours), _medians(theirs)), color=color, linestyle=dashes, linewidth=2.2)
        ends = [100 * value for value in found.seeds if math.isfinite(value)]
        axes.plot([one.steps * 1.02] * len(ends), ends, color=color, marker=marker, linestyle="", markersize=4,
                  markerfacecolor="none", clip_on=False)  # fmt: skip
        ours_label, theirs_label = optimizer_label(one.optimizer), optimizer_label(reference.optimizer)
        said.append(
            say(en=f"{ours_label} beside {theirs_label}: ", fr=f"{ours_label} face à {theirs_label} : ")
            + _gap_words(found.medians)
        )
        shown = [abs(value) for value in (*ends, 100 * found.medians) if math.isfinite(value)]
        most = max(most, *(1.3 * value for value in shown)) if shown else most
    axes.set_ylim(-min(most, MOST_PERCENT), min(most, MOST_PERCENT))
    _freeze(axes, curves, said=False)
    plain(axes)
    axes.set_ylabel(say(en="gap, % (band: ± ", fr="écart, % (bande : ± ") + f"{shortest(100 * tolerance)} %)")
    axes.set_title("\n".join(said), loc="left", fontsize=9)


def _relative(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Percent more, step by step; NaN where either diverged."""
    return [
        100 * (own / other - 1) if math.isfinite(own) and math.isfinite(other) and other else math.nan
        for own, other in zip(ours, theirs, strict=True)
    ]


def _freeze(axes: Axes, curves: Sequence[Curves], *, said: bool) -> None:
    """A line where the second stage begins."""
    for step in sorted({one.frozen_at for one in curves if one.frozen_at is not None}):
        axes.axvline(step, color=REMARK, linewidth=1, linestyle=":")
        if said:
            text = say(en=f" variance frozen\n from step {step}", fr=f" variance gelée\n dès le pas {step}")
            axes.text(step, 0.03, text, transform=axes.get_xaxis_transform(), fontsize=8, color=BASELINE)


def _loss(value: float) -> str:
    return significant(value) if math.isfinite(value) else "∞"


def _plain_ticks(axes: Axes) -> None:
    """0.5, 1, 2 rather than powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 3.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _loss(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


Series = tuple[Sequence[float], Sequence[float]]
Style = tuple[str, Any, str]
THOUSAND = 1e3


def curriculum_figure(
    trials: Mapping[str, Sequence[Trajectory]],
    *,
    predicted: Mapping[int, float] | None = None,
    path: str | Path | None = None,
) -> LabFigure:
    """Trials side by side: loss against tokens, loss against seconds, and, where known, √v and the cost of a length.

    Args:
        trials: by the name the legend shows, the trajectories of several seeds, at least one.
        predicted: FLOPs of a step over those of a whole one, by length (`CurriculumCost.relative_cost`); beside them
            the measured seconds of the first trial with several lengths are drawn.
        path: file for the picture.

    Raises:
        LabError: if there is no trial, or one without a step.
    """
    if not trials or not all(ones and all(one.losses for one in ones) for ones in trials.values()):
        raise LabError(
            say(
                en="the figure needs one trial or more, each with a step: train first.",
                fr="la figure demande au moins un essai, avec un pas chacun : entraînez d’abord.",
            )
        )
    watched = all(one.variance_max for ones in trials.values() for one in ones)
    panels = [_loss_against_tokens, _loss_against_time]
    panels += [_variance] if watched else []
    rows = 2 if watched or predicted else 1
    figure = new_figure(11.5, 3.9 * rows, _curriculum_alt(trials))
    grid = list(figure.subplots(rows, 2, squeeze=False).flat)
    styles = dict(zip(trials, LINE_STYLES * len(trials), strict=False))
    for draw, axes in zip(panels, grid, strict=False):
        draw(axes, trials, styles)
    rest = grid[len(panels) :]
    if predicted:
        _costs(rest[0], trials, predicted)
        rest = rest[1:]
    for axes in rest:
        axes.set_visible(False)
    looks: dict[str, dict[str, Any]] = {
        name: {"color": color, "linestyle": dashes, "marker": marker}
        for name, (color, dashes, marker) in styles.items()
    }
    handles = [Line2D([], [], label=visible(name), **look) for name, look in looks.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 4), frameon=False)
    return finish(figure, path)


def pacing_figure(runs: Mapping[str, RunConfig], path: str | Path | None = None) -> LabFigure:
    """How the samples grow: tokens per sample against the step, and the tokens read so far.

    Args:
        runs: by the name the legend shows, runs on text.
        path: file for the picture.

    Raises:
        LabError: if there is none, or one reads images.
    """
    if not runs:
        raise LabError(say(en="the figure needs one run or more.", fr="la figure demande au moins une exécution."))
    named = ", ".join(runs)
    alt = say(
        en=f"Tokens per sample and tokens read against the step, for {named}.",
        fr=f"Tokens par échantillon et tokens lus selon le pas, pour {named}.",
    )
    figure = new_figure(11.5, 3.8, alt)
    lengths, totals = figure.subplots(1, 2)
    for (name, config), (color, dashes, _) in zip(runs.items(), LINE_STYLES * len(runs), strict=False):
        steps, heights, read = [0.0], [], [0.0]
        for stretch in stretches(config):
            steps.append(float(stretch.first_step + stretch.num_steps))
            heights.append(float(stretch.length))
            read.append(read[-1] + config.layout.global_batch * stretch.length * stretch.num_steps / THOUSAND)
        drawn = {"color": color, "linestyle": dashes, "linewidth": 2}
        lengths.step(steps, [*heights, heights[-1]], where="post", label=visible(name), **drawn)
        totals.plot(steps, read, label=visible(name), **drawn)
    for axes, label in (
        (lengths, say(en="tokens per sample", fr="tokens par échantillon")),
        (totals, say(en="tokens read (thousands)", fr="tokens lus (milliers)")),
    ):
        plain(axes)
        axes.set_xlabel(say(en="step", fr="pas"))
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        decimal_marks(axes.yaxis)
    lengths.legend(frameon=False)
    return finish(figure, path)


def _curriculum_alt(trials: Mapping[str, Sequence[Trajectory]]) -> str:
    parts = []
    for name, ones in trials.items():
        last = median([one.held_out[-1].loss if one.held_out else one.losses[-1] for one in ones])
        parts.append(f"{name} {decimal(last, 3)}")
    listed = ", ".join(parts)
    return say(
        en=f"Loss against tokens and against time; median of the last losses: {listed}.",
        fr=f"Perte selon les tokens et selon le temps ; médiane des dernières pertes : {listed}.",
    )


def _curriculum_losses(one: Trajectory) -> list[float]:
    return [held.loss for held in one.held_out] if one.held_out else list(one.losses)


def _tokens(one: Trajectory) -> list[float]:
    read = [held.tokens for held in one.held_out] if one.held_out else one.tokens_read
    return [tokens / THOUSAND for tokens in read]


def _seconds(one: Trajectory) -> list[float]:
    return [held.seconds for held in one.held_out] if one.held_out else list(one.seconds_spent)


def _loss_label(trials: Mapping[str, Sequence[Trajectory]]) -> str:
    if all(one.held_out for ones in trials.values() for one in ones):
        return say(en="loss on other text, whole samples", fr="perte sur d’autre texte, échantillons entiers")
    return say(en="training loss", fr="perte d’entraînement")


def _loss_against_tokens(axes: Axes, trials: Mapping[str, Sequence[Trajectory]], styles: Mapping[str, Style]) -> None:
    _curriculum_curves(axes, trials, styles, lambda one: (_tokens(one), _curriculum_losses(one)))
    axes.set_xlabel(say(en="tokens read (thousands)", fr="tokens lus (milliers)"))
    axes.set_ylabel(_loss_label(trials))


def _loss_against_time(axes: Axes, trials: Mapping[str, Sequence[Trajectory]], styles: Mapping[str, Style]) -> None:
    _curriculum_curves(axes, trials, styles, lambda one: (_seconds(one), _curriculum_losses(one)))
    axes.set_xlabel(say(en="time of the steps (s)", fr="temps des pas (s)"))
    axes.set_ylabel(_loss_label(trials))


def _variance(axes: Axes, trials: Mapping[str, Sequence[Trajectory]], styles: Mapping[str, Style]) -> None:
    _curriculum_curves(
        axes,
        trials,
        styles,
        lambda one: ([tokens / THOUSAND for tokens in one.tokens_read], list(one.variance_max)),
        marked=False,
    )
    for ones in trials.values():
        for one in ones:
            at = one.spikes()
            axes.plot(
                [one.tokens_read[step] / THOUSAND for step in at],
                [one.variance_max[step] for step in at],
                color=VERMILION,
                linestyle="",
                marker="x",
                markersize=7,
            )
    axes.set_xlabel(say(en="tokens read (thousands)", fr="tokens lus (milliers)"))
    axes.set_ylabel(say(en="largest √v of Adam", fr="plus grand √v d’Adam"))
    axes.set_ylim(bottom=0)
    spike = say(en="spike of the loss", fr="pic de la perte")
    crossed = Line2D([], [], color=VERMILION, linestyle="", marker="x", label=spike)
    axes.legend(handles=[crossed], frameon=False, loc="best")


def _costs(axes: Axes, trials: Mapping[str, Sequence[Trajectory]], predicted: Mapping[int, float]) -> None:
    lengths = sorted(predicted)
    axes.plot(
        lengths,
        [predicted[length] for length in lengths],
        color=GREY,
        linewidth=5,
        alpha=0.6,
        label=say(en="predicted: FLOPs", fr="prévu : FLOPs"),
    )
    grown = [one for ones in trials.values() for one in ones if len(set(one.lengths)) > 1]
    (color, dashes, marker) = LINE_STYLES[1]
    for number, one in enumerate(grown):
        taken = one.seconds_by_length()
        whole = taken[max(taken)]
        axes.plot(
            list(taken),
            [step_s / whole for step_s in taken.values()],
            color=color,
            linestyle=dashes,
            marker=marker,
            markersize=4,
            alpha=0.8,
            label=say(en="measured: seconds", fr="mesuré : secondes") if number == 0 else None,
        )
    plain(axes)
    axes.set_xlabel(say(en="tokens per sample", fr="tokens par échantillon"))
    axes.set_ylabel(say(en="a step, over a whole one", fr="un pas, sur un pas entier"))
    axes.set_ylim(bottom=0)
    decimal_marks(axes.yaxis)
    axes.legend(frameon=False)


def _curriculum_curves(
    axes: Axes,
    trials: Mapping[str, Sequence[Trajectory]],
    styles: Mapping[str, Style],
    series_of: Callable[[Trajectory], Series],
    *,
    marked: bool = True,
) -> None:
    for name, ones in trials.items():
        color, dashes, marker = styles[name]
        all_series = [series_of(one) for one in ones]
        for along, up in all_series:
            axes.plot(along, up, color=color, linestyle=dashes, linewidth=0.9, alpha=0.35)
        points = min(len(along) for along, _ in all_series)
        middle = [
            [median(series[which][point] for series in all_series) for point in range(points)] for which in (0, 1)
        ]
        axes.plot(
            *middle,
            color=color,
            linestyle=dashes,
            linewidth=2.2,
            marker=marker if marked else "",
            markersize=5,
            markevery=max(1, points // 10),
        )
    plain(axes)
    decimal_marks(axes.xaxis)
    decimal_marks(axes.yaxis)


LOOKS = {
    "auto": (GREY, "*", ""),
    "for_loop": (BLUE, "o", ""),
    "foreach": (ORANGE, "s", "//"),
    "fused": (GREEN, "^", "\\\\"),
    "in_backward": (VERMILION, "D", ".."),
    "in_forward": (PURPLE, "v", "xx"),
}
"""Colour, marker and hatch of a form."""
OTHER = (SKY, "P", "++")
MEGABYTE = 1e6


def update_figure(measures: Sequence[FormMeasure], path: str | Path | None = None) -> LabFigure:
    """Draw what each form takes of each model: one row of two panels per model.

    Left, the seconds of a whole step over those of the model's first form: a dot for the median of the ratios within a
    round, a bar for their quartiles; beside it in words the update alone. Right, the peak of the step, in MB: predicted
    (light) above measured, and in words what is more or less than with the first form.

    Args:
        measures: forms of one model or of several; the first form of each model is what the others are compared with.
        path: picture to write, if any.

    Raises:
        LabError: if the picture cannot be written.
    """
    models = list(dict.fromkeys(one.model for one in measures))
    figure = new_figure(12.0, 0.9 + 2.4 * max(1, len(models)), alt=update_description(measures))
    axes = figure.subplots(max(1, len(models)), 2, squeeze=False)
    for number, model in enumerate(models):
        rows = [one for one in measures if one.model == model]
        _times(axes[number][0], rows)
        _peaks(axes[number][1], rows)
    for panel, label in zip(axes[-1], (_step_label(measures), _peak_label()), strict=True):
        panel.set_xlabel(label, fontsize=9)
    return finish(figure, path)


def update_description(measures: Sequence[FormMeasure]) -> str:
    """The figure in words: each form's step and peak."""
    each = "; ".join(
        say(
            en=f"{visible(one.model)}, {one.form}: step {decimal(one.step_ratio, 2)} times the first form's, peak "
            f"{decimal(one.measured_peak_bytes / MEGABYTE, 1)} MB",
            fr=f"{visible(one.model)}, {one.form} : pas {decimal(one.step_ratio, 2)} fois celui de la première "
            f"forme, pic {decimal(one.measured_peak_bytes / MEGABYTE, 1)} Mo",
        )
        for one in measures
    )
    return say(en=f"Forms of an update beside each other. {each}.", fr=f"Formes d’une mise à jour, comparées. {each}.")


def _step_label(measures: Sequence[FormMeasure]) -> str:
    first = measures[0].form if measures else ""
    return say(
        en=f"seconds of a whole step, in those of {first} in the same round (median and quartiles)",
        fr=f"durée d’un pas entier, rapportée à celle de {first} au même tour (médiane et quartiles)",
    )


def _peak_label() -> str:
    return say(en="peak of the step, MB: predicted (light), measured", fr="pic du pas, Mo : prédit (clair), mesuré")


def _times(axes: Axes, rows: Sequence[FormMeasure]) -> None:
    axes.axvline(1, color=BASELINE, linewidth=0.8)
    right = max(1.1, *(one.step_ratio_high for one in rows))
    for place, one in enumerate(rows):
        color, marker, _ = LOOKS.get(one.form, OTHER)
        axes.plot([one.step_ratio_low, one.step_ratio_high], [place, place], color=color, linewidth=3, alpha=0.5)
        axes.plot([one.step_ratio], [place], color=color, marker=marker, markersize=8, linestyle="")
        axes.annotate(_update_words(one), (one.step_ratio_high, place), xytext=(8, 0), textcoords="offset points",
                      va="center", fontsize=8, bbox={"color": "white", "pad": 0.5})  # fmt: skip
    low = min(one.step_ratio_low for one in rows)
    axes.set_xlim(min(low, 1) - 0.05 * (right - low), right + 0.75 * (right - min(low, 1)))
    _forms(axes, rows)
    some = rows[0]
    axes.set_title(
        say(
            en=f"{visible(some.model)}: {decimal(some.parameters / 1e6, 1)} M parameters in {some.tensors} tensors "
            f"({visible(some.device)}, {some.rounds} rounds)",
            fr=f"{visible(some.model)} : {decimal(some.parameters / 1e6, 1)} M de paramètres en {some.tensors} "
            f"tenseurs ({visible(some.device)}, {some.rounds} tours)",
        ),
        loc="left",
        fontsize=9,
    )


def _update_words(one: FormMeasure) -> str:
    """The step's ratio, and the update alone where it is alone."""
    step = f"×{decimal(one.step_ratio, 2)}"
    if one.update_ratio is None:
        return step + say(en=" (updated within the pass)", fr=" (mise à jour dans la passe)")
    return step + say(
        en=f" (the update alone ×{decimal(one.update_ratio, 2)})",
        fr=f" (la mise à jour seule ×{decimal(one.update_ratio, 2)})",
    )


def _peaks(axes: Axes, rows: Sequence[FormMeasure]) -> None:
    first = rows[0]
    most = max(one.measured_peak_bytes for one in rows)
    for place, one in enumerate(rows):
        color, _, hatch = LOOKS.get(one.form, OTHER)
        looks: dict[str, Any] = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
        if one.predicted_peak_bytes is not None:
            axes.barh(place - 0.2, one.predicted_peak_bytes / MEGABYTE, 0.36, alpha=PREDICTED_ALPHA, **looks)
        axes.barh(place + 0.2, one.measured_peak_bytes / MEGABYTE, 0.36, **looks)
        saved = first.measured_peak_bytes - one.measured_peak_bytes
        words = f"{decimal(one.measured_peak_bytes / MEGABYTE, 1)}" + (f" ({_signed(-saved)})" if one != first else "")
        axes.annotate(words, (most / MEGABYTE, place), xytext=(6, 0), textcoords="offset points", va="center",
                      fontsize=8)  # fmt: skip
    axes.set_xlim(0, 1.3 * most / MEGABYTE)
    _forms(axes, rows)


def _forms(axes: Axes, rows: Sequence[FormMeasure]) -> None:
    axes.set_yticks(range(len(rows)), [visible(one.form) for one in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    plain(axes)
    axes.grid(axis="y", visible=False)
    decimal_marks(axes.xaxis)


def _signed(num_bytes: float) -> str:
    """MB that are more or less, with their sign; one that rounds to nothing has none."""
    value = round(num_bytes / MEGABYTE, 1)
    return ("+" if value > 0 else "−" if value < 0 else "") + decimal(abs(value), 1)


LAST_STEPS = 20
"""Steps over which the words under a title take their mean."""


class DrawnLoad(Protocol):
    """One mixture in one step: of a run's record (`dlojz.results.record.ExpertLoad`), or of
    `dlojz.models.experts.layer.watch_loads`."""

    @property
    def step(self) -> int:
        """From 0."""

    @property
    def layer(self) -> str:
        """Name of the mixture."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Choices that each expert has got, before its capacity cuts them."""

    @property
    def capacity(self) -> int:
        """Choices that each expert could take."""

    @property
    def dropped(self) -> float:
        """Share of all choices that found their expert full."""


def expert_load_figure(
    trainings: Mapping[str, Sequence[DrawnLoad]], path: str | Path | None = None, layer: str | None = None
) -> LabFigure:
    """Draw what the experts of one mixture were given, step by step, one column for each training.

    Args:
        trainings: loads of each, under the words above its column.
        path: picture to write, if any.
        layer: which mixture; by default the last one.

    Raises:
        LabError: if a training has no loads, no mixture has this name, or the picture cannot be written.
    """
    columns = {name: _of_layer(name, loads, layer) for name, loads in trainings.items()}
    if not columns:
        raise LabError(say(en="give the loads of at least one training.", fr="donnez les charges d’un entraînement."))
    figure = new_figure(1.6 + 5.2 * len(columns), 7.4, alt=_expert_load_alt(columns))
    rows = figure.subplots(3, len(columns), sharex="col", sharey="row", squeeze=False, height_ratios=(3, 2, 1.2))
    most = max(max(_shares(load)) for loads in columns.values() for load in loads)
    for column, (name, loads) in enumerate(columns.items()):
        top, middle, bottom = (rows[row][column] for row in range(3))
        mesh = _heat_map(top, loads, most)
        top.set_title(visible(name), loc="left", fontweight="bold")
        bar = figure.colorbar(mesh, ax=top, pad=0.02)
        bar.ax.axhline(_capacity(loads[-1]), color=BLACK, linestyle="--", linewidth=1.4)
        _extremes(middle, loads)
        _dropped(bottom, loads)
        if column == len(columns) - 1:
            bar.set_label(say(en="load, in fair shares", fr="charge, en justes parts"))
            figure.legend(handles=middle.get_lines(), loc="outside lower center", ncols=3, frameon=False)
    rows[0][0].set_ylabel("expert")
    rows[1][0].set_ylabel(say(en="load, in fair shares", fr="charge, en justes parts"))
    rows[2][0].set_ylabel(say(en="dropped", fr="abandonnés"))
    mixture = next(iter(columns.values()))[0].layer
    figure.suptitle(
        say(en="Load of the experts of ", fr="Charge des experts de ")
        + visible(mixture)
        + say(
            en=": beyond the capacity (dashed), tokens are dropped",
            fr=" : au-delà de la capacité (tirets), les tokens sont abandonnés",
        ),
        fontsize=12,
    )
    return finish(figure, path)


def _of_layer(name: str, loads: Sequence[DrawnLoad], layer: str | None) -> list[DrawnLoad]:
    layers = list(dict.fromkeys(load.layer for load in loads))
    if not layers:
        raise LabError(
            say(
                en=f"{name} has no load of experts: train a model with a mixture of experts such as moe_tiny.",
                fr=f"{name} n’a aucune charge d’experts : entraînez un modèle à mélange d’experts comme moe_tiny.",
            )
        )
    if layer is not None and layer not in layers:
        raise LabError(one_of("layer", layer, layers))
    return [load for load in loads if load.layer == (layer or layers[-1])]


def _shares(load: DrawnLoad) -> list[float]:
    """Each expert's choices in units of the fair share, the mean over the experts."""
    fair = sum(load.tokens) / len(load.tokens)
    return [tokens / fair for tokens in load.tokens]


def _capacity(load: DrawnLoad) -> float:
    return load.capacity * len(load.tokens) / sum(load.tokens)


def _heat_map(axes: Axes, loads: list[DrawnLoad], most: float) -> QuadMesh:
    """An expert a line, a step a column: white idle, blue up to the capacity, orange to red beyond."""
    turn = min(_capacity(loads[-1]) / most, 0.999)
    colours = LinearSegmentedColormap.from_list(
        "load", [(0, WHITE), (turn, BLUE), (min(turn + 0.001, 1), LIGHT_ORANGE), (1, VERMILION)], N=1024
    )
    experts = len(loads[0].tokens)
    mesh = axes.pcolormesh(
        [load.step - 0.5 for load in loads] + [loads[-1].step + 0.5],
        [expert - 0.5 for expert in range(experts + 1)],
        [list(column) for column in zip(*(_shares(load) for load in loads), strict=True)],
        cmap=colours,
        vmin=0,
        vmax=most,
        rasterized=True,
    )
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.invert_yaxis()
    return mesh


def _extremes(axes: Axes, loads: list[DrawnLoad]) -> None:
    steps = [load.step for load in loads]
    busiest, idlest = ([pick(_shares(load)) for load in loads] for pick in (max, min))
    axes.plot(steps, busiest, color=VERMILION, linestyle="-", label=say(en="busiest expert", fr="le plus chargé"))
    axes.plot(steps, idlest, color=BLUE, linestyle=":", label=say(en="idlest expert", fr="le moins chargé"))
    axes.plot(
        steps,
        [_capacity(load) for load in loads],
        color=BLACK,
        linestyle="--",
        linewidth=1.4,
        label=say(en="capacity", fr="capacité"),
    )
    axes.set_ylim(bottom=0)
    plain(axes)


def _dropped(axes: Axes, loads: list[DrawnLoad]) -> None:
    steps, dropped = [load.step for load in loads], [load.dropped for load in loads]
    axes.fill_between(steps, dropped, color=ORANGE, alpha=0.6, hatch="//", edgecolor=EDGE, linewidth=0.4)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, position: percent(value, None))
    axes.set_xlabel(say(en="step", fr="pas"))
    axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    plain(axes)
    mean = sum(dropped[-LAST_STEPS:]) / len(dropped[-LAST_STEPS:])
    axes.set_title(
        say(
            en=f"{100 * mean:.0f}% over the last {len(dropped[-LAST_STEPS:])} steps",
            fr=f"{100 * mean:.0f} % sur les {len(dropped[-LAST_STEPS:])} derniers pas",
        ),
        loc="right",
        fontsize=10,
    )


def _expert_load_alt(columns: Mapping[str, list[DrawnLoad]]) -> str:
    """What the figure shows, in words: of each training, the busiest expert and the dropped share at the end."""
    words = []
    for name, loads in columns.items():
        last = loads[-LAST_STEPS:]
        totals = [sum(tokens) for tokens in zip(*(load.tokens for load in last), strict=True)]
        share, dropped = 100 * max(totals) / sum(totals), 100 * sum(load.dropped for load in last) / len(last)
        idle = sum(total < 0.1 * sum(totals) / len(totals) for total in totals)
        words.append(
            say(
                en=f"{visible(name)}: the busiest of {len(totals)} experts takes {share:.0f}% of the choices, {idle} "
                f"are all but idle, {dropped:.0f}% of the choices are dropped",
                fr=f"{visible(name)} : le plus chargé des {len(totals)} experts prend {share:.0f} % des choix, {idle} "
                f"ne font presque rien, {dropped:.0f} % des choix sont abandonnés",
            )
        )
    opening = say(en="Load of the experts over the last steps. ", fr="Charge des experts sur les derniers pas. ")
    return opening + say(en="; ", fr=" ; ").join(words)
