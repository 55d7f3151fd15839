"""Figures of trainings: convergence of optimizers, curriculum, forms of the update, loads of experts.

Every seed and every step is drawn as it was recorded; thick curves are medians over the seeds. An optimizer, a form or
a training has one colour and one marker in every panel of its figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator

from dlojz.base.errors import LabError
from dlojz.base.language import decimal, minus, one_of, percent, refusal, say, shortest, significant, spaced_percent
from dlojz.base.table import visible
from dlojz.by_hand.optimizers.convergence import TOLERANCE, Curves, curves_of, gap, reference_of
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
    Style,
)
from dlojz.results.record import RunRecord

if TYPE_CHECKING:
    from dlojz.models.experts.layer import StepLoad
    from dlojz.results.record import ExpertLoad, Trajectory
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
    """Write an optimizer's name as papers do."""
    return _LABELS.get(name, visible(name).replace("_", " "))


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
            f"{sum(not one for one in rows.values())} of them without.",
            fr=f"une figure de convergence demande au moins une tâche avec des entraînements, mais {len(rows)} "
            f"tâche(s) ont été reçues, dont {sum(not one for one in rows.values())} sans.",
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
    told = []
    for title, curves in rows.items():
        for one in curves:
            reference = reference_of(one, curves)
            if reference is not None:
                apart = _gap_words(gap(one, reference).medians)
                told.append(f"{visible(title)}, {optimizer_label(one.optimizer)} {apart}")
    seeds = max(len(one.losses) for curves in rows.values() for one in curves)
    return say(
        en=f"Losses by seed ({seeds} in all), and gaps of the final loss (median): ",
        fr=f"Pertes par graine ({seeds} en tout), et écarts de la perte finale (médiane) : ",
    ) + ("; ".join(told) or say(en="none", fr="aucun"))


def _convergence_curves(runs: Sequence[Curves | RunRecord]) -> list[Curves]:
    """Curves as they were given, and those of the records."""
    given = [one for one in runs if isinstance(one, Curves)]
    return [*given, *curves_of([one for one in runs if isinstance(one, RunRecord)])]


def _gap_words(relative: float) -> str:
    """With its sign, e.g. +0.7 %."""
    if not math.isfinite(relative):
        return say(en="diverged", fr="a divergé")
    return spaced_percent(relative, signed=True)


def _medians(columns: Sequence[Sequence[float]]) -> list[float]:
    """The median over the seeds, step by step; a seed that diverged counts as the largest."""
    return [
        median(value if math.isfinite(value) else math.inf for value in values) for values in zip(*columns, strict=True)
    ]


def _convergence_losses(axes: Axes, title: str, curves: Sequence[Curves]) -> None:
    """Each seed thin, their median thick; the step at which the variance is frozen."""
    for (color, dashes, _), one in zip(LINE_STYLES, curves, strict=False):
        seeds = one.smoothed()
        for seed in seeds:
            axes.plot(range(one.steps), seed, color=color, linewidth=0.6, alpha=0.45)
        label = f"{optimizer_label(one.optimizer)} ({_loss(one.median())})"
        axes.plot(range(one.steps), _medians(seeds), color=color, linestyle=dashes, linewidth=2.2, label=label)
    logarithmic(axes, "y", _loss, (1.0, 2.0, 3.0, 5.0))
    _freeze(axes, curves, said=True)
    plain(axes)
    window = curves[0].window
    caption(axes, y=say(en=f"loss, mean of {window} steps", fr=f"perte, moyenne de {window} pas"))
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
        look: dict[str, Any] = {"markersize": 4, "markerfacecolor": "none", "clip_on": False}
        axes.plot([one.steps * 1.02] * len(ends), ends, marker, color=color, **look)
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
    label = say(en="gap, % (band: ± ", fr="écart, % (bande : ± ") + f"{shortest(100 * tolerance)} %)"
    caption(axes, y=label, title="\n".join(said), size=9)


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
    if not trials or not all(ones and all(one.losses for one in ones) for ones in trials.values()):
        raise refusal(
            en="the figure needs one trial or more, each with a step: train first.",
            fr="la figure demande au moins un essai, avec un pas chacun : entraînez d’abord.",
        )
    watched = all(one.variance_max for ones in trials.values() for one in ones)
    rows = 2 if watched or predicted else 1
    figure = new_figure(11.5, 3.9 * rows, _curriculum_alt(trials))
    tokens, seconds, *rest = figure.subplots(rows, 2, squeeze=False).flat
    styles = dict(zip(trials, LINE_STYLES * len(trials), strict=False))
    _losses(tokens, trials, styles, "tokens")
    _losses(seconds, trials, styles, "seconds")
    if watched:
        _variance(rest.pop(0), trials, styles)
    if predicted:
        _costs(rest.pop(0), trials, predicted)
    for axes in rest:
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
        last = median([one.held_out[-1].loss if one.held_out else one.losses[-1] for one in ones])
        parts.append(f"{name} {decimal(last, 3)}")
    listed = ", ".join(parts)
    return say(
        en=f"Loss against tokens and against time; median of the last losses: {listed}.",
        fr=f"Perte selon les tokens et selon le temps ; médiane des dernières pertes : {listed}.",
    )


def _losses(axes: Axes, trials: Trials, styles: Mapping[str, tuple[str, str, str]], along: Along) -> None:
    """Losses on held-out text where they are known, else those of the training."""

    def series(one: Trajectory) -> Series:
        if one.held_out:
            reached = [held.tokens / THOUSAND if along == "tokens" else held.seconds for held in one.held_out]
            return reached, [held.loss for held in one.held_out]
        reached = [tokens / THOUSAND for tokens in one.tokens_read] if along == "tokens" else list(one.seconds_spent)
        return reached, one.losses

    _curriculum_curves(axes, trials, styles, series)
    label = say(en="training loss", fr="perte d’entraînement")
    if all(one.held_out for ones in trials.values() for one in ones):
        label = say(en="loss on other text, whole samples", fr="perte sur d’autre texte, échantillons entiers")
    caption(axes, x=_tokens_label() if along == "tokens" else say(en="time of the steps (s)", fr="temps des pas (s)"))
    caption(axes, y=label)


def _tokens_label() -> str:
    return say(en="tokens read (thousands)", fr="tokens lus (milliers)")


def _variance(axes: Axes, trials: Trials, styles: Mapping[str, tuple[str, str, str]]) -> None:
    def series(one: Trajectory) -> Series:
        return [tokens / THOUSAND for tokens in one.tokens_read], one.variance_max

    _curriculum_curves(axes, trials, styles, series, marked=False)
    cross: dict[str, Any] = {"color": VERMILION, "linestyle": "", "marker": "x"}
    for one in (one for ones in trials.values() for one in ones):
        tokens, variance = series(one)
        at = one.spikes()
        axes.plot([tokens[step] for step in at], [variance[step] for step in at], markersize=7, **cross)
    caption(axes, x=_tokens_label(), y=say(en="largest √v of Adam", fr="plus grand √v d’Adam"))
    axes.set_ylim(bottom=0)
    spike = key(say(en="spike of the loss", fr="pic de la perte"), **cross)
    axes.legend(handles=[spike], frameon=False, loc="best")


def _costs(axes: Axes, trials: Trials, predicted: Mapping[int, float]) -> None:
    lengths = sorted(predicted)
    label = say(en="predicted: FLOPs", fr="prévu : FLOPs")
    axes.plot(lengths, [predicted[length] for length in lengths], color=GREY, linewidth=5, alpha=0.6, label=label)
    color, dashes, marker = LINE_STYLES[1]
    look: dict[str, Any] = {"color": color, "linestyle": dashes, "marker": marker, "markersize": 4, "alpha": 0.8}
    grown = [one for ones in trials.values() for one in ones if len(set(one.lengths)) > 1]
    for number, one in enumerate(grown):
        taken = one.seconds_by_length()
        label = "" if number else say(en="measured: seconds", fr="mesuré : secondes")
        axes.plot(list(taken), [step_s / taken[max(taken)] for step_s in taken.values()], label=label, **look)
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
        all_series = [series_of(one) for one in ones]
        for along, up in all_series:
            axes.plot(along, up, color=color, linestyle=dashes, linewidth=0.9, alpha=0.35)
        points = min(len(along) for along, _ in all_series)
        middle = [
            [median(series[which][point] for series in all_series) for point in range(points)] for which in (0, 1)
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
    models = list(dict.fromkeys(one.model for one in measures))
    figure = new_figure(12.0, 0.9 + 2.4 * max(1, len(models)), alt=update_description(measures))
    axes = figure.subplots(max(1, len(models)), 2, squeeze=False)
    for number, model in enumerate(models):
        rows = [one for one in measures if one.model == model]
        _times(axes[number][0], rows)
        _peaks(axes[number][1], rows)
    first = measures[0].form if measures else ""
    step = say(
        en=f"time of a step over that of {first} (median, quartiles)",
        fr=f"durée d’un pas sur celle de {first} (médiane, quartiles)",
    )
    peak = say(en="peak of the step, MB: predicted (light), measured", fr="pic du pas, Mo : prédit (clair), mesuré")
    for panel, label in zip(axes[-1], (step, peak), strict=True):
        panel.set_xlabel(label, fontsize=9)
    return finish(figure, path)


def update_description(measures: Sequence[FormMeasure]) -> str:
    """Say each form's step and peak."""
    each = "; ".join(
        say(
            en=f"{visible(one.model)}, {one.form}: step {decimal(one.step_ratio, 2)} times the first form's, peak "
            f"{_megabytes(one.measured_peak_bytes)} MB",
            fr=f"{visible(one.model)}, {one.form} : pas {decimal(one.step_ratio, 2)} fois celui de la première "
            f"forme, pic {_megabytes(one.measured_peak_bytes)} Mo",
        )
        for one in measures
    )
    return say(en=f"Forms of an update beside each other. {each}.", fr=f"Formes d’une mise à jour, comparées. {each}.")


def _megabytes(num_bytes: float) -> str:
    return decimal(num_bytes / MEGABYTE)


def _times(axes: Axes, rows: Sequence[FormMeasure]) -> None:
    axes.axvline(1, color=BASELINE, linewidth=0.8)
    for place, one in enumerate(rows):
        style, marker = FORM_LOOKS.get(one.form, OTHER_FORM)
        quartiles = [one.step_ratio_low, one.step_ratio_high]
        axes.plot(quartiles, [place, place], color=style.color, linewidth=3, alpha=0.5)
        axes.plot([one.step_ratio], [place], color=style.color, marker=marker, markersize=8, linestyle="")
        note(axes, _update_words(one), (one.step_ratio_high, place), (8, 0), bbox={"color": "white", "pad": 0.5})
    left, right = min(1, *(one.step_ratio_low for one in rows)), max(1.1, *(one.step_ratio_high for one in rows))
    lowest = min(one.step_ratio_low for one in rows)
    axes.set_xlim(left - 0.05 * (right - lowest), right + 0.75 * (right - left))
    _forms(axes, rows)
    some = rows[0]
    title = say(
        en=f"{visible(some.model)}: {decimal(some.parameters / 1e6, 1)} M parameters in {some.tensors} tensors "
        f"({visible(some.device)}, {some.rounds} rounds)",
        fr=f"{visible(some.model)} : {decimal(some.parameters / 1e6, 1)} M de paramètres en {some.tensors} "
        f"tenseurs ({visible(some.device)}, {some.rounds} tours)",
    )
    caption(axes, title=title, size=9)


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
    first, most = rows[0], max(one.measured_peak_bytes for one in rows) / MEGABYTE
    look: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5}
    for place, one in enumerate(rows):
        style, _ = FORM_LOOKS.get(one.form, OTHER_FORM)
        predicted, measured = (one.predicted_peak_bytes or 0) / MEGABYTE, one.measured_peak_bytes / MEGABYTE
        stack(axes, place - 0.2, [(predicted, style)], 0.36, alpha=PREDICTED_ALPHA, **look)
        stack(axes, place + 0.2, [(measured, style)], 0.36, **look)
        more = round((one.measured_peak_bytes - first.measured_peak_bytes) / MEGABYTE, 1)
        words = f" ({minus(decimal(more, signed=True)) if more else decimal(0)})" if one != first else ""
        note(axes, _megabytes(one.measured_peak_bytes) + words, (most, place))
    axes.set_xlim(0, 1.3 * most)
    _forms(axes, rows)


def _forms(axes: Axes, rows: Sequence[FormMeasure]) -> None:
    axes.set_yticks(range(len(rows)), [visible(one.form) for one in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    plain(axes, "x")


Load: TypeAlias = "StepLoad | ExpertLoad"
"""Load of one mixture in one step: of a model that is watched, or of a run's record."""
LAST_STEPS = 20
"""Steps over which the words under a title take their mean."""


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
            bar.set_label(say(en="load, relative to the fair share", fr="charge, rapportée à la part équitable"))
            figure.legend(handles=middle.get_lines(), loc="outside lower center", ncols=3, frameon=False)
    capacities = (_capacity(load) for loads in columns.values() for load in loads)
    rows[1][0].set_ylim(0, 1.05 * max(most, *capacities))
    caption(rows[0][0], y="expert")
    # Two lines: the panel is too low for one.
    caption(rows[1][0], y=say(en="load, relative\nto the fair share", fr="charge, rapportée\nà la part équitable"))
    caption(rows[2][0], y=say(en="dropped", fr="abandonnés"))
    mixture = visible(next(iter(columns.values()))[0].layer)
    title = say(
        en=f"Load of the experts of {mixture}: beyond the capacity (dashed), tokens are dropped",
        fr=f"Charge des experts, {mixture} : au-delà de la capacité (tirets), les tokens sont abandonnés",
    )
    figure.suptitle(title, fontsize=12)
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
    fair = sum(load.tokens) / len(load.tokens)
    return [tokens / fair for tokens in load.tokens]


def _capacity(load: Load) -> float:
    return load.capacity * len(load.tokens) / sum(load.tokens)


def _heat_map(axes: Axes, loads: list[Load], most: float) -> QuadMesh:
    """An expert a line, a step a column: white idle, blue up to the capacity, orange to red beyond."""
    turn = min(_capacity(loads[-1]) / most, 0.999)
    colours = LinearSegmentedColormap.from_list(
        "load", [(0, WHITE), (turn, BLUE), (min(turn + 0.001, 1), LIGHT_ORANGE), (1, VERMILION)], N=1024
    )
    steps = [load.step - 0.5 for load in loads] + [loads[-1].step + 0.5]
    experts = [expert - 0.5 for expert in range(len(loads[0].tokens) + 1)]
    shares = [list(column) for column in zip(*(_shares(load) for load in loads), strict=True)]
    mesh = axes.pcolormesh(steps, experts, shares, cmap=colours, vmin=0, vmax=most, rasterized=True)
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
    last = dropped[-LAST_STEPS:]
    mean = percent(sum(last) / len(last), 0)
    words = say(en=f"{mean} over the last {len(last)} steps", fr=f"{mean} sur les {len(last)} derniers pas")
    axes.set_title(words, loc="right", fontsize=10)


def _expert_load_alt(columns: Mapping[str, list[Load]]) -> str:
    """What the figure shows, in words: of each training, the busiest expert and the dropped share at the end."""
    words = []
    for name, loads in columns.items():
        last = loads[-LAST_STEPS:]
        totals = [sum(tokens) for tokens in zip(*(load.tokens for load in last), strict=True)]
        share = percent(max(totals) / sum(totals), 0)
        dropped = percent(sum(load.dropped for load in last) / len(last), 0)
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
