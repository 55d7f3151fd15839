"""Figures of trainings: convergence of optimizers, curriculum, forms of the update, loads of experts.

Every seed and every step is drawn as it was recorded; thick curves are medians over the seeds. An optimizer, a form or
a training has one colour and one marker in every panel of its figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator

from dlojz.base.errors import LabError
from dlojz.base.language import decimal, minus, one_of, percent, refusal, say, shortest, significant, spaced_percent
from dlojz.base.table import visible
from dlojz.by_hand.optimizers.convergence import TOLERANCE, Curves, curves_of, gap, reference_of
from dlojz.config.optimizers import OPTIMIZERS
from dlojz.display.canvas import (
    LabFigure,
    caption,
    finish,
    key,
    logarithmic,
    new_figure,
    note,
    plain,
    stack,
)
from dlojz.display.drawing import LETTER
from dlojz.display.style import (
    BASELINE,
    BLACK,
    BLUE,
    EDGE,
    GREEN,
    GREY,
    HEADING,
    LIGHT_ORANGE,
    LINE_STYLES,
    NORMAL,
    ORANGE,
    PREDICTED_ALPHA,
    PURPLE,
    REMARK,
    SHADE,
    SKY,
    SMALL,
    TITLE,
    VERMILION,
    WHITE,
    Style,
)
from dlojz.results.record import RunRecord

if TYPE_CHECKING:
    from dlojz.models.experts.layer import StepLoad
    from dlojz.results.record import ExpertLoad, Trajectory
    from dlojz.train.trials import FormMeasure

MOST_PERCENT = 20.0
"""Gaps beyond this are not drawn: at first all optimizers are alike, and one that diverged would hide the others."""


def optimizer_label(name: str) -> str:
    """Write an optimizer's name as papers do."""
    return OPTIMIZERS[name].label if name in OPTIMIZERS else visible(name).replace("_", " ")


def convergence_figure(
    tasks: Mapping[str, Sequence[Curves | RunRecord]], path: str | Path | None = None, tolerance: float = TOLERANCE
) -> LabFigure:
    """Draw a row for each task: the losses, and beside them the gap of every compressed optimizer.

    A curve is the mean over the last tenth of the steps up to each step, so that its end is what is judged.

    Args:
        tasks: for each task, by its title, its runs' records, or curves: of an optimizer, and of those it is held
            against (`adamw` for `one_bit_adam` and `zero_one_adam`, `lamb` for `one_bit_lamb`).
        tolerance: half the height of the band, relative.

    Raises:
        LabError: without a task, or a task without runs; if two optimizers have not the same seeds.
    """
    rows = {title: _convergence_curves(runs) for title, runs in tasks.items()}
    if not rows or not all(rows.values()):
        raise refusal(
            en=f"a figure of convergence needs at least one task with runs, but {len(rows)} task(s) were received, "
            f"{sum(not curves for curves in rows.values())} of them without.",
            fr=f"une figure de convergence demande au moins une tâche avec des entraînements, mais {len(rows)} "
            f"tâche(s) ont été reçues, dont {sum(not curves for curves in rows.values())} sans.",
        )
    figure = new_figure(12.0, 0.8 + 3.0 * len(rows), alt=convergence_description(rows))
    panels = figure.subplots(len(rows), 2, squeeze=False, width_ratios=(1.25, 1.0))
    for (losses, gaps), (title, curves) in zip(panels, rows.items(), strict=True):
        _convergence_losses(losses, title, curves)
        _gaps(gaps, curves, tolerance)
    for axes in panels[-1]:
        caption(axes, x=say(en="step", fr="pas"))
    return finish(figure, path)


def convergence_description(rows: Mapping[str, Sequence[Curves]]) -> str:
    """Say how far the median of the final loss of every compressed optimizer is from its reference."""
    sentences = []
    for title, curves in rows.items():
        for curve in curves:
            reference = reference_of(curve, curves)
            # None for a baseline, and where the baseline was not run.
            if reference is not None:
                gap_text = _gap_words(gap(curve, reference).medians)
                sentences.append(f"{visible(title)}, {optimizer_label(curve.optimizer)} {gap_text}")
    seeds = max(len(curve.losses) for curves in rows.values() for curve in curves)
    return say(
        en=f"Losses by seed ({seeds} in all), and gaps of the final loss (median): ",
        fr=f"Pertes par graine ({seeds} en tout), et écarts de la perte finale (médiane) : ",
    ) + ("; ".join(sentences) or say(en="none", fr="aucun"))


def _convergence_curves(runs: Sequence[Curves | RunRecord]) -> list[Curves]:
    """Curves as they were given, and those of the records."""
    curves = [run for run in runs if isinstance(run, Curves)]
    return [*curves, *curves_of([run for run in runs if isinstance(run, RunRecord)])]


def _gap_words(relative: float) -> str:
    """With its sign, e.g. +0.7 %."""
    if not math.isfinite(relative):
        return say(en="diverged", fr="a divergé")
    return spaced_percent(relative, signed=True)


def _medians(columns: Sequence[Sequence[float]]) -> list[float]:
    """The median over the seeds, step by step; a seed that diverged counts as the largest."""
    return [
        # inf sorts last: the median is inf once more than half of the seeds have diverged.
        median(value if math.isfinite(value) else math.inf for value in values)
        for values in zip(*columns, strict=True)
    ]


def _convergence_losses(axes: Axes, title: str, curves: Sequence[Curves]) -> None:
    """Each seed thin, their median thick; the step at which the variance is frozen."""
    for (color, dashes, _), curve in zip(LINE_STYLES, curves, strict=False):
        seeds = curve.smoothed()
        for seed in seeds:
            axes.plot(range(curve.steps), seed, color=color, linewidth=0.6, alpha=0.45)
        label = f"{optimizer_label(curve.optimizer)} ({_loss(curve.median())})"
        axes.plot(range(curve.steps), _medians(seeds), color=color, linestyle=dashes, linewidth=2.2, label=label)
    logarithmic(axes, "y", _loss, (1.0, 2.0, 3.0, 5.0))
    _freeze(axes, curves, with_label=True)
    plain(axes)
    window = curves[0].window
    caption(axes, y=say(en=f"loss, mean of {window} steps", fr=f"perte, moyenne de {window} pas"))
    axes.set_title(visible(title), loc="left", fontsize=HEADING, fontweight="bold")
    heading = say(en="median over the seeds (at the end)", fr="médiane sur les graines (à la fin)")
    axes.legend(frameon=False, fontsize=SMALL, title=heading, title_fontsize=SMALL, alignment="left", handlelength=3.5)


def _gaps(axes: Axes, curves: Sequence[Curves], tolerance: float) -> None:
    """How much more the loss of each compressed optimizer is, in percent, seed by seed and between the medians."""
    axes.axhspan(-100 * tolerance, 100 * tolerance, color=SHADE, zorder=0)
    axes.axhline(0, color=BASELINE, linewidth=0.8)
    # At least 2.5 times the band.
    y_limit, titles = 2.5 * 100 * tolerance, []
    for (color, dashes, marker), curve in zip(LINE_STYLES, curves, strict=False):
        reference = reference_of(curve, curves)
        if reference is None:
            continue
        final_gap, steps = gap(curve, reference), range(curve.steps)
        ours, theirs = curve.smoothed(), reference.smoothed()
        # Each seed against the same seed of the baseline.
        for our_losses, their_losses in zip(ours, theirs, strict=True):
            axes.plot(steps, _relative(our_losses, their_losses), color=color, linewidth=0.6, alpha=0.45)
        axes.plot(steps, _relative(_medians(ours), _medians(theirs)), color=color, linestyle=dashes, linewidth=2.2)
        ends = [100 * value for value in final_gap.seeds if math.isfinite(value)]
        marker_properties: dict[str, Any] = {"markersize": 4, "markerfacecolor": "none", "clip_on": False}
        # Markers right of the last step: the gap of each seed that is judged.
        axes.plot([curve.steps * 1.02] * len(ends), ends, marker, color=color, **marker_properties)
        ours_label, theirs_label = optimizer_label(curve.optimizer), optimizer_label(reference.optimizer)
        titles.append(
            say(en=f"{ours_label} beside {theirs_label}: ", fr=f"{ours_label} face à {theirs_label} : ")
            + _gap_words(final_gap.medians)
        )
        magnitudes = [abs(value) for value in (*ends, 100 * final_gap.medians) if math.isfinite(value)]
        # 30 % of room; MOST_PERCENT caps it below.
        y_limit = max(y_limit, *(1.3 * value for value in magnitudes)) if magnitudes else y_limit
    axes.set_ylim(-min(y_limit, MOST_PERCENT), min(y_limit, MOST_PERCENT))
    _freeze(axes, curves, with_label=False)
    plain(axes)
    label = say(en="gap, % (band: ± ", fr="écart, % (bande : ± ") + f"{shortest(100 * tolerance)} %)"
    caption(axes, y=label, title="\n".join(titles), size=NORMAL)


def _relative(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Percent more, step by step; NaN where either diverged."""
    return [
        100 * (our_loss / their_loss - 1)
        if math.isfinite(our_loss) and math.isfinite(their_loss) and their_loss
        else math.nan
        for our_loss, their_loss in zip(ours, theirs, strict=True)
    ]


def _freeze(axes: Axes, curves: Sequence[Curves], *, with_label: bool) -> None:
    """A line where the second stage begins."""
    for step in sorted({curve.frozen_at for curve in curves if curve.frozen_at is not None}):
        axes.axvline(step, color=REMARK, linewidth=1, linestyle=":")
        if with_label:
            text = say(en=f" variance frozen\n from step {step}", fr=f" variance gelée\n dès le pas {step}")
            axes.text(step, 0.03, text, transform=axes.get_xaxis_transform(), fontsize=SMALL, color=BASELINE)


def _loss(value: float) -> str:
    return significant(value) if math.isfinite(value) else "∞"


Series = tuple[Sequence[float], Sequence[float]]
Along = Literal["tokens", "seconds"]
Trials = Mapping[str, Sequence["Trajectory"]]
"""By name, the trajectories of several seeds."""
THOUSAND = 1e3


def curriculum_figure(
    trials: Trials,
    *,
    predicted: Mapping[int, float] | None = None,
    path: str | Path | None = None,
) -> LabFigure:
    """Draw trials: loss against tokens, loss against seconds, and, where known, √v and the cost of a length.

    Args:
        trials: by the name the legend shows, the trajectories of several seeds, at least one.
        predicted: FLOPs of a step over those of a whole one, by length (`CurriculumCost.relative_cost`); beside them
            the measured seconds of the first trial with several lengths are drawn.

    Raises:
        LabError: if there is no trial, or one without a step.
    """
    if not trials or not all(ones and all(trajectory.losses for trajectory in ones) for ones in trials.values()):
        raise refusal(
            en="the figure needs one trial or more, each with a step: train first.",
            fr="la figure demande au moins un essai, avec un pas chacun : entraînez d’abord.",
        )
    # √v is drawn only if it was recorded for every seed.
    watched = all(trajectory.variance_max for ones in trials.values() for trajectory in ones)
    rows = 2 if watched or predicted else 1
    figure = new_figure(11.5, 3.9 * rows, _curriculum_alt(trials))
    tokens, seconds, *free_panels = figure.subplots(rows, 2, squeeze=False).flat
    styles = dict(zip(trials, LINE_STYLES * len(trials), strict=False))
    _losses(tokens, trials, styles, "tokens")
    _losses(seconds, trials, styles, "seconds")
    if watched:
        _variance(free_panels.pop(0), trials, styles)
    if predicted:
        _costs(free_panels.pop(0), trials, predicted)
    for axes in free_panels:
        axes.set_visible(False)
    handles = [
        key(visible(name), color=color, linestyle=dashes, marker=marker)
        for name, (color, dashes, marker) in styles.items()
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 4), frameon=False)
    return finish(figure, path)


def _curriculum_alt(trials: Trials) -> str:
    parts = []
    for name, ones in trials.items():
        last_loss = median(
            [trajectory.held_out[-1].loss if trajectory.held_out else trajectory.losses[-1] for trajectory in ones]
        )
        parts.append(f"{name} {decimal(last_loss, 3)}")
    losses_text = ", ".join(parts)
    return say(
        en=f"Loss against tokens and against time; median of the last losses: {losses_text}.",
        fr=f"Perte selon les tokens et selon le temps ; médiane des dernières pertes : {losses_text}.",
    )


def _losses(axes: Axes, trials: Trials, styles: Mapping[str, tuple[str, str, str]], along: Along) -> None:
    """Losses on held-out text where they are known, else those of the training."""

    def series(trajectory: Trajectory) -> Series:
        if trajectory.held_out:
            reached = [
                evaluation.tokens / THOUSAND if along == "tokens" else evaluation.seconds
                for evaluation in trajectory.held_out
            ]
            return reached, [evaluation.loss for evaluation in trajectory.held_out]
        # Without held-out text: the loss of each training step, at the tokens or seconds reached by then.
        reached = (
            [tokens / THOUSAND for tokens in trajectory.tokens_read]
            if along == "tokens"
            else list(trajectory.seconds_spent)
        )
        return reached, trajectory.losses

    _curriculum_curves(axes, trials, styles, series)
    label = say(en="training loss", fr="perte d’entraînement")
    if all(trajectory.held_out for ones in trials.values() for trajectory in ones):
        label = say(en="loss on other text, whole samples", fr="perte sur d’autre texte, échantillons entiers")
    caption(axes, x=_tokens_label() if along == "tokens" else say(en="time of the steps (s)", fr="temps des pas (s)"))
    caption(axes, y=label)


def _tokens_label() -> str:
    return say(en="tokens read (thousands)", fr="tokens lus (milliers)")


def _variance(axes: Axes, trials: Trials, styles: Mapping[str, tuple[str, str, str]]) -> None:
    def series(trajectory: Trajectory) -> Series:
        return [tokens / THOUSAND for tokens in trajectory.tokens_read], trajectory.variance_max

    _curriculum_curves(axes, trials, styles, series, marked=False)
    cross: dict[str, Any] = {"color": VERMILION, "linestyle": "", "marker": "x"}
    for trajectory in (trajectory for ones in trials.values() for trajectory in ones):
        tokens, variance = series(trajectory)
        spikes = trajectory.spikes()
        axes.plot([tokens[step] for step in spikes], [variance[step] for step in spikes], markersize=7, **cross)
    caption(axes, x=_tokens_label(), y=say(en="largest √v of Adam", fr="plus grand √v d’Adam"))
    axes.set_ylim(bottom=0)
    spike = key(say(en="spike of the loss", fr="pic de la perte"), **cross)
    axes.legend(handles=[spike], frameon=False, loc="best")


def _costs(axes: Axes, trials: Trials, predicted: Mapping[int, float]) -> None:
    lengths = sorted(predicted)
    label = say(en="predicted: FLOPs", fr="prévu : FLOPs")
    axes.plot(lengths, [predicted[length] for length in lengths], color=GREY, linewidth=5, alpha=0.6, label=label)
    color, dashes, marker = LINE_STYLES[1]
    line_properties: dict[str, Any] = {
        "color": color,
        "linestyle": dashes,
        "marker": marker,
        "markersize": 4,
        "alpha": 0.8,
    }
    # Trajectories whose sequence length changed: only these give a ratio of lengths.
    grown = [trajectory for ones in trials.values() for trajectory in ones if len(set(trajectory.lengths)) > 1]
    for number, trajectory in enumerate(grown):
        step_seconds = trajectory.seconds_by_length()
        label = "" if number else say(en="measured: seconds", fr="mesuré : secondes")
        # Over the seconds of the longest sequence.
        axes.plot(
            list(step_seconds),
            [step_s / step_seconds[max(step_seconds)] for step_s in step_seconds.values()],
            label=label,
            **line_properties,
        )
    plain(axes)
    ratio = say(en="a step, over a whole one", fr="un pas, sur un pas entier")
    caption(axes, x=say(en="tokens per sample", fr="tokens par échantillon"), y=ratio)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _curriculum_curves(
    axes: Axes,
    trials: Trials,
    styles: Mapping[str, tuple[str, str, str]],
    series_of: Callable[[Trajectory], Series],
    *,
    marked: bool = True,
) -> None:
    """Each seed thin, the median of the seeds thick."""
    for name, ones in trials.items():
        color, dashes, marker = styles[name]
        all_series = [series_of(trajectory) for trajectory in ones]
        for along, up in all_series:
            axes.plot(along, up, color=color, linestyle=dashes, linewidth=0.9, alpha=0.35)
        # Seeds may have recorded different numbers of points: the shortest counts.
        points = min(len(along) for along, _ in all_series)
        middle = [
            # 0: along the x axis, 1: along the y axis; of each the median over the seeds, point by point.
            [median(series[coordinate][point] for series in all_series) for point in range(points)]
            for coordinate in (0, 1)
        ]
        marks: dict[str, Any] = {"marker": marker if marked else "", "markersize": 5}
        axes.plot(*middle, color=color, linestyle=dashes, linewidth=2.2, markevery=max(1, points // 10), **marks)
    plain(axes)


FORM_LOOKS = {
    "auto": (Style(GREY, ""), "*"),
    "for_loop": (Style(BLUE, ""), "o"),
    "foreach": (Style(ORANGE, "//"), "s"),
    "fused": (Style(GREEN, "\\\\"), "^"),
    "in_backward": (Style(VERMILION, ".."), "D"),
    "in_forward": (Style(PURPLE, "xx"), "v"),
}
"""Colour, hatch and marker of a form."""
OTHER_FORM = (Style(SKY, "++"), "P")
MEGABYTE = 1e6


def update_figure(measures: Sequence[FormMeasure], path: str | Path | None = None) -> LabFigure:
    """Draw what each form takes of each model: one row of two panels per model.

    Left, the seconds of a whole step over those of the model's first form: a dot for the median of the ratios within a
    round, a bar for their quartiles; beside it in words the update alone. Right, the peak of the step, in MB: predicted
    (light) above measured, and in words what is more or less than with the first form.

    Args:
        measures: forms of one model or of several; the first form of each model is what the others are compared with.
    """
    models = list(dict.fromkeys(measure.model for measure in measures))
    figure = new_figure(12.0, 0.9 + 2.4 * max(1, len(models)), alt=update_description(measures))
    axes = figure.subplots(max(1, len(models)), 2, squeeze=False)
    for number, model in enumerate(models):
        rows = [measure for measure in measures if measure.model == model]
        _times(axes[number][0], rows)
        _peaks(axes[number][1], rows)
    first_form = measures[0].form if measures else ""
    step = say(
        en=f"time of a step over that of {first_form} (median, quartiles)",
        fr=f"durée d’un pas sur celle de {first_form} (médiane, quartiles)",
    )
    peak = say(en="peak of the step, MB: predicted (light), measured", fr="pic du pas, Mo : prédit (clair), mesuré")
    for panel, label in zip(axes[-1], (step, peak), strict=True):
        panel.set_xlabel(label, fontsize=NORMAL)
    return finish(figure, path)


def update_description(measures: Sequence[FormMeasure]) -> str:
    """Say each form's step and peak."""
    form_sentences = "; ".join(
        say(
            en=f"{visible(row.model)}, {row.form}: step {decimal(row.step_ratio, 2)} times the first form's, peak "
            f"{_megabytes(row.measured_peak_bytes)} MB",
            fr=f"{visible(row.model)}, {row.form} : pas {decimal(row.step_ratio, 2)} fois celui de la première "
            f"forme, pic {_megabytes(row.measured_peak_bytes)} Mo",
        )
        for row in measures
    )
    return say(
        en=f"Forms of an update beside each other. {form_sentences}.",
        fr=f"Formes d’une mise à jour, comparées. {form_sentences}.",
    )


def _megabytes(num_bytes: float) -> str:
    return decimal(num_bytes / MEGABYTE)


def _times(axes: Axes, rows: Sequence[FormMeasure]) -> None:
    axes.axvline(1, color=BASELINE, linewidth=0.8)
    for row_index, measure in enumerate(rows):
        style, marker = FORM_LOOKS.get(measure.form, OTHER_FORM)
        quartiles = [measure.step_ratio_low, measure.step_ratio_high]
        axes.plot(quartiles, [row_index, row_index], color=style.color, linewidth=3, alpha=0.5)
        axes.plot([measure.step_ratio], [row_index], color=style.color, marker=marker, markersize=8, linestyle="")
        note(
            axes,
            _update_words(measure),
            (measure.step_ratio_high, row_index),
            (8, 0),
            bbox={"color": "white", "pad": 0.5},
        )
    left, right = (
        min(1, *(measure.step_ratio_low for measure in rows)),
        max(1.1, *(measure.step_ratio_high for measure in rows)),
    )
    lowest = min(measure.step_ratio_low for measure in rows)
    # Room on the left for the bars, on the right for the words beside them.
    axes.set_xlim(left - 0.05 * (right - lowest), right + 0.75 * (right - left))
    _forms(axes, rows)
    row = rows[0]
    title = say(
        en=f"{visible(row.model)}: {decimal(row.parameters / 1e6, 1)} M parameters in {row.tensors} tensors "
        f"({visible(row.device)}, {row.rounds} rounds)",
        fr=f"{visible(row.model)} : {decimal(row.parameters / 1e6, 1)} M de paramètres en {row.tensors} "
        f"tenseurs ({visible(row.device)}, {row.rounds} tours)",
    )
    caption(axes, title=title, size=NORMAL)


def _update_words(measure: FormMeasure) -> str:
    """The step's ratio, and the update alone where it is alone."""
    step = f"×{decimal(measure.step_ratio, 2)}"
    if measure.update_ratio is None:
        return step + say(en=" (updated within the pass)", fr=" (mise à jour dans la passe)")
    return step + say(
        en=f" (the update alone ×{decimal(measure.update_ratio, 2)})",
        fr=f" (la mise à jour seule ×{decimal(measure.update_ratio, 2)})",
    )


def _peaks(axes: Axes, rows: Sequence[FormMeasure]) -> None:
    reference, largest_mb = rows[0], max(measure.measured_peak_bytes for measure in rows) / MEGABYTE
    bar_properties: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5}
    for row_index, measure in enumerate(rows):
        style, _ = FORM_LOOKS.get(measure.form, OTHER_FORM)
        # MB (1e6 bytes); a GPU's peak is not predicted, so its light bar is missing.
        predicted, measured = (measure.predicted_peak_bytes or 0) / MEGABYTE, measure.measured_peak_bytes / MEGABYTE
        stack(axes, row_index - 0.2, [(predicted, style)], 0.36, alpha=PREDICTED_ALPHA, **bar_properties)
        stack(axes, row_index + 0.2, [(measured, style)], 0.36, **bar_properties)
        extra_mb = round((measure.measured_peak_bytes - reference.measured_peak_bytes) / MEGABYTE, 1)
        words = (
            f" ({minus(decimal(extra_mb, signed=True)) if extra_mb else decimal(0)})" if measure != reference else ""
        )
        note(axes, _megabytes(measure.measured_peak_bytes) + words, (largest_mb, row_index))
    axes.set_xlim(0, 1.3 * largest_mb)
    _forms(axes, rows)


def _forms(axes: Axes, rows: Sequence[FormMeasure]) -> None:
    axes.set_yticks(range(len(rows)), [visible(measure.form) for measure in rows], fontsize=NORMAL)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    plain(axes, "x")


Load: TypeAlias = "StepLoad | ExpertLoad"
"""Load of one mixture in one step: of a model that is watched, or of a run's record."""
LAST_STEPS = 20
"""Steps over which the words under a title take their mean."""


WIDEST_IN = 13.0
"""Beyond, a notebook would shrink the figure to illegible curves: columns become narrower instead."""


def expert_load_figure(
    trainings: Mapping[str, Sequence[Load]], path: str | Path | None = None, layer: str | None = None
) -> LabFigure:
    """Draw what the experts of one mixture were given, step by step, one column for each training.

    Args:
        trainings: loads of each, under the words above its column.
        layer: which mixture; by default the last one.

    Raises:
        LabError: if a training has no loads, or no mixture has this name.
    """
    columns = {name: _of_layer(name, loads, layer) for name, loads in trainings.items()}
    if not columns:
        raise LabError(say(en="give the loads of at least one training.", fr="donnez les charges d’un entraînement."))
    column_in = min(5.2, (WIDEST_IN - 1.6) / len(columns))
    figure = new_figure(1.6 + column_in * len(columns), 7.4, alt=_expert_load_alt(columns))
    rows = figure.subplots(3, len(columns), sharex="col", sharey="row", squeeze=False, height_ratios=(3, 2, 1.2))
    largest_share = max(max(_shares(load)) for loads in columns.values() for load in loads)
    for column, (name, loads) in enumerate(columns.items()):
        # Three panels of a column: heat map, extremes, dropped share.
        top, middle, bottom = (rows[row][column] for row in range(3))
        mesh = _heat_map(top, loads, largest_share)
        letters = max(8, int(72 * column_in / (HEADING * LETTER)))
        top.set_title(fill(visible(name), letters), loc="left", fontweight="bold", fontsize=HEADING)
        bar = figure.colorbar(mesh, ax=top, pad=0.02)
        bar.ax.axhline(_capacity(loads[-1]), color=BLACK, linestyle="--", linewidth=1.4)
        _extremes(middle, loads)
        _dropped(bottom, loads)
        if column == len(columns) - 1:
            bar.set_label(say(en="load, relative to the fair share", fr="charge, rapportée à la part équitable"))
            figure.legend(handles=middle.get_lines(), loc="outside lower center", ncols=3, frameon=False)
    capacities = (_capacity(load) for loads in columns.values() for load in loads)
    rows[1][0].set_ylim(0, 1.05 * max(largest_share, *capacities))
    caption(rows[0][0], y="expert")
    # Two lines: the panel is too low for one.
    caption(rows[1][0], y=say(en="load, relative\nto the fair share", fr="charge, rapportée\nà la part équitable"))
    caption(rows[2][0], y=say(en="dropped", fr="abandonnés"))
    mixture = visible(next(iter(columns.values()))[0].layer)
    title = say(
        en=f"Load of the experts of {mixture}: beyond the capacity (dashed), tokens are dropped",
        fr=f"Charge des experts, {mixture} : au-delà de la capacité (tirets), les tokens sont abandonnés",
    )
    figure.suptitle(fill(title, int(72 * figure.get_figwidth() / (TITLE * LETTER))), fontsize=TITLE)
    return finish(figure, path)


def _of_layer(name: str, loads: Sequence[Load], layer: str | None) -> list[Load]:
    layers = list(dict.fromkeys(load.layer for load in loads))
    if not layers:
        raise refusal(
            en=f"{name} has no load of experts: train a model with a mixture of experts such as moe_tiny.",
            fr=f"{name} n’a aucune charge d’experts : entraînez un modèle à mélange d’experts comme moe_tiny.",
        )
    if layer is not None and layer not in layers:
        raise LabError(one_of("layer", layer, layers))
    return [load for load in loads if load.layer == (layer or layers[-1])]


def _shares(load: Load) -> list[float]:
    """Each expert's choices in units of the fair share, the mean over the experts."""
    # Mean choices per expert.
    fair = sum(load.tokens) / len(load.tokens)
    return [tokens / fair for tokens in load.tokens]


def _capacity(load: Load) -> float:
    # Capacity in units of the fair share: choices an expert may take over the mean choices.
    return load.capacity * len(load.tokens) / sum(load.tokens)


def _heat_map(axes: Axes, loads: list[Load], largest_share: float) -> QuadMesh:
    """An expert a line, a step a column: white idle, blue up to the capacity, orange to red beyond."""
    # Where on the colour scale the capacity lies: blue below, orange to red above.
    turn = min(_capacity(loads[-1]) / largest_share, 0.999)
    colours = LinearSegmentedColormap.from_list(
        "load", [(0, WHITE), (turn, BLUE), (min(turn + 0.001, 1), LIGHT_ORANGE), (1, VERMILION)], N=1024
    )
    # Edges of the cells, one more than there are steps or experts.
    steps = [load.step - 0.5 for load in loads] + [loads[-1].step + 0.5]
    experts = [expert - 0.5 for expert in range(len(loads[0].tokens) + 1)]
    # (experts, steps)
    shares = [list(column) for column in zip(*(_shares(load) for load in loads), strict=True)]
    mesh = axes.pcolormesh(steps, experts, shares, cmap=colours, vmin=0, vmax=largest_share, rasterized=True)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.invert_yaxis()
    return mesh


def _extremes(axes: Axes, loads: list[Load]) -> None:
    steps = [load.step for load in loads]
    busiest, idlest = ([pick(_shares(load)) for load in loads] for pick in (max, min))
    axes.plot(steps, busiest, color=VERMILION, linestyle="-", label=say(en="busiest expert", fr="le plus chargé"))
    axes.plot(steps, idlest, color=BLUE, linestyle=":", label=say(en="idlest expert", fr="le moins chargé"))
    capacities, label = [_capacity(load) for load in loads], say(en="capacity", fr="capacité")
    axes.plot(steps, capacities, color=BLACK, linestyle="--", linewidth=1.4, label=label)
    plain(axes)


def _dropped(axes: Axes, loads: list[Load]) -> None:
    steps, dropped = [load.step for load in loads], [load.dropped for load in loads]
    axes.fill_between(steps, dropped, color=ORANGE, alpha=0.6, hatch="//", edgecolor=EDGE, linewidth=0.4)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, position: percent(value, None))
    caption(axes, x=say(en="step", fr="pas"))
    axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    plain(axes)
    recent_shares = dropped[-LAST_STEPS:]
    mean = percent(sum(recent_shares) / len(recent_shares), 0)
    words = say(
        en=f"{mean} over the last {len(recent_shares)} steps", fr=f"{mean} sur les {len(recent_shares)} derniers pas"
    )
    axes.set_title(words, loc="right", fontsize=HEADING)


def _expert_load_alt(columns: Mapping[str, list[Load]]) -> str:
    """What the figure shows, in words: of each training, the busiest expert and the dropped share at the end."""
    words = []
    for name, loads in columns.items():
        recent_loads = loads[-LAST_STEPS:]
        # Choices of each expert, summed over the last steps.
        totals = [sum(tokens) for tokens in zip(*(load.tokens for load in recent_loads), strict=True)]
        share = percent(max(totals) / sum(totals), 0)
        dropped = percent(sum(load.dropped for load in recent_loads) / len(recent_loads), 0)
        # Below a tenth of the fair share.
        idle = sum(total < 0.1 * sum(totals) / len(totals) for total in totals)
        words.append(
            say(
                en=f"{visible(name)}: the busiest of {len(totals)} experts takes {share} of the choices, {idle} "
                f"are all but idle, {dropped} of the choices are dropped",
                fr=f"{visible(name)} : le plus chargé des {len(totals)} experts prend {share} des choix, {idle} "
                f"ne font presque rien, {dropped} des choix sont abandonnés",
            )
        )
    opening = say(en="Load of the experts over the last steps. ", fr="Charge des experts sur les derniers pas. ")
    return opening + say(en="; ", fr=" ; ").join(words)
