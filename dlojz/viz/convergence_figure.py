"""Losses of optimizers over several seeds, and how far the compressed ones are from those that send everything.

Layer 4. Invariant: every seed is drawn; what a curve shows at a step is the mean over the last tenth of the steps up to
it, so that its end is what is judged, and the band is the tolerance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from dlojz.optim.convergence import TOLERANCE, Curves, curves_of, gap, reference_of
from dlojz.record import RunRecord
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.markup import visible
from dlojz.viz.palette import LINE_STYLES

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
    rows = {title: _curves(runs) for title, runs in tasks.items()}
    if not rows or not all(rows.values()):
        raise LabError(
            say(
                en=f"a figure of convergence needs at least one task with runs, but {len(rows)} task(s) were received, "
                f"{sum(not one for one in rows.values())} of them without.",
                fr=f"une figure de convergence demande au moins une tâche avec des entraînements, mais {len(rows)} "
                f"tâche(s) ont été reçues, dont {sum(not one for one in rows.values())} sans.",
            )
        )
    figure = new_figure(12.0, 0.8 + 3.0 * len(rows), alt=description(rows))
    panels = figure.subplots(len(rows), 2, squeeze=False, width_ratios=(1.25, 1.0))
    for (losses, gaps), (title, curves) in zip(panels, rows.items(), strict=True):
        _losses(losses, title, curves)
        _gaps(gaps, curves, tolerance)
    for axes in panels[-1]:
        axes.set_xlabel(say(en="step", fr="pas"))
    return finish(figure, path)


def description(rows: Mapping[str, Sequence[Curves]]) -> str:
    """The figure in words: of every compressed optimizer, how far the median of its final loss is."""
    told = []
    for title, curves in rows.items():
        for one in curves:
            reference = reference_of(one, curves)
            if reference is not None:
                told.append(
                    f"{visible(title)}, {optimizer_label(one.optimizer)} {_percent(gap(one, reference).medians)}"
                )
    return say(
        en=f"Losses by seed ({_seeds(rows)} in all), and gaps of the final loss (median): ",
        fr=f"Pertes par graine ({_seeds(rows)} en tout), et écarts de la perte finale (médiane) : ",
    ) + ("; ".join(told) or say(en="none", fr="aucun"))


def _seeds(rows: Mapping[str, Sequence[Curves]]) -> int:
    return max(len(one.losses) for curves in rows.values() for one in curves)


def _curves(runs: Sequence[Curves | RunRecord]) -> list[Curves]:
    """Curves as they were given, and those of the records."""
    return [
        *(one for one in runs if isinstance(one, Curves)),
        *curves_of([one for one in runs if isinstance(one, RunRecord)]),
    ]


def _percent(relative: float) -> str:
    """With its sign, e.g. +0.7 %."""
    if not math.isfinite(relative):
        return say(en="diverged", fr="a divergé")
    number = f"{100 * relative:+.1f}".replace("-", "−")
    return say(en=f"{number} %", fr=f"{number.replace('.', ',')} %")


def _medians(columns: Sequence[Sequence[float]]) -> list[float]:
    """The median over the seeds, step by step; a seed that diverged counts as the largest."""
    return [
        statistics.median(value if math.isfinite(value) else math.inf for value in values)
        for values in zip(*columns, strict=True)
    ]


def _losses(axes: Axes, title: str, curves: Sequence[Curves]) -> None:
    """Each seed thin, their median thick; the step at which the variance is frozen."""
    for (color, dashes, _), one in zip(LINE_STYLES, curves, strict=False):
        seeds = one.smoothed()
        for seed in seeds:
            axes.plot(range(one.steps), seed, color=color, linewidth=0.6, alpha=0.45)
        axes.plot(range(one.steps), _medians(seeds), color=color, linestyle=dashes, linewidth=2.2,
                  label=f"{optimizer_label(one.optimizer)} ({_number(one.median())})")  # fmt: skip
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
    axes.axhspan(-100 * tolerance, 100 * tolerance, color="#e8e8e8", zorder=0)
    axes.axhline(0, color="#444444", linewidth=0.8)
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
            + _percent(found.medians)
        )
        shown = [abs(value) for value in (*ends, 100 * found.medians) if math.isfinite(value)]
        most = max(most, *(1.3 * value for value in shown)) if shown else most
    axes.set_ylim(-min(most, MOST_PERCENT), min(most, MOST_PERCENT))
    _freeze(axes, curves, said=False)
    plain(axes)
    axes.set_ylabel(say(en=f"gap, % (band: ± {100 * tolerance:g} %)", fr=f"écart, % (bande : ± {100 * tolerance:g} %)"))
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
        axes.axvline(step, color="#666666", linewidth=1, linestyle=":")
        if said:
            text = say(en=f" variance frozen\n from step {step}", fr=f" variance gelée\n dès le pas {step}")
            axes.text(step, 0.03, text, transform=axes.get_xaxis_transform(), fontsize=8, color="#444444")


def _number(value: float) -> str:
    text = f"{value:.3g}" if math.isfinite(value) else "∞"
    return say(en=text, fr=text.replace(".", ","))


def _plain_ticks(axes: Axes) -> None:
    """0.5, 1, 2 rather than powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 3.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
