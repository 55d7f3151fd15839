"""What a curriculum changes: losses against tokens and time, Adam's √v, and what a step costs at each length.

Layer 4. Invariant: every curve is drawn from the entries of a trajectory; a thin line is one seed, the thick one the
median of the seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from dlojz.curriculum import stretches
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.markup import visible
from dlojz.viz.palette import GREY, LINE_STYLES, VERMILION
from dlojz.viz.pipeline_draw import decimal_marks

if TYPE_CHECKING:
    from dlojz.config import RunConfig
    from dlojz.trajectory import Trajectory

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
    figure = new_figure(11.5, 3.9 * rows, _alt(trials))
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


def _alt(trials: Mapping[str, Sequence[Trajectory]]) -> str:
    parts = []
    for name, ones in trials.items():
        last = median([one.held_out[-1].loss if one.held_out else one.losses[-1] for one in ones])
        parts.append(f"{name} {last:.3f}".replace(".", say(en=".", fr=",")))
    listed = ", ".join(parts)
    return say(
        en=f"Loss against tokens and against time; median of the last losses: {listed}.",
        fr=f"Perte selon les tokens et selon le temps ; médiane des dernières pertes : {listed}.",
    )


def _losses(one: Trajectory) -> list[float]:
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
    _curves(axes, trials, styles, lambda one: (_tokens(one), _losses(one)))
    axes.set_xlabel(say(en="tokens read (thousands)", fr="tokens lus (milliers)"))
    axes.set_ylabel(_loss_label(trials))


def _loss_against_time(axes: Axes, trials: Mapping[str, Sequence[Trajectory]], styles: Mapping[str, Style]) -> None:
    _curves(axes, trials, styles, lambda one: (_seconds(one), _losses(one)))
    axes.set_xlabel(say(en="time of the steps (s)", fr="temps des pas (s)"))
    axes.set_ylabel(_loss_label(trials))


def _variance(axes: Axes, trials: Mapping[str, Sequence[Trajectory]], styles: Mapping[str, Style]) -> None:
    _curves(
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


def _curves(
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
