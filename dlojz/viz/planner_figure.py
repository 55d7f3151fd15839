"""The pictures of the planner's twin: the Pareto front against memory and energy; a layout beside the best one.

Layer 4. Invariant: draws what the plan holds and computes nothing; a hatch or a marker says whatever a colour says.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from dlojz.plan.choice import seconds
from dlojz.plan.reasons import decimal, gigabytes, part_words
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import BLACK, SKY, VERMILION, YELLOW
from dlojz.viz.plan_figure import EDGE, MEMORY_STYLES, MOST_DRAWN, SLOWEST, TIME_STYLES
from dlojz.viz.planner_parts import asked_memory, asked_times

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlojz.plan.answer import Plan
    from dlojz.plan.explain import Verdict
    from dlojz.viz.palette import Style


def front_figure(plan: Plan) -> LabFigure:
    """All layouts that fit: step time against the memory that stays free, and against the energy of 1000 steps."""
    found, name, title = plan.found, plan.question.subject.name, plan.best.candidate.title
    fit, number = decimal(found.admitted.size, 0), len(plan.pareto)
    figure = new_figure(
        11.0,
        4.4,
        alt=say(
            en=f"{fit} layouts of {name} that fit: step time against free memory and energy; {number} are on the "
            f"Pareto front; best: {title}.",
            fr=f"{fit} configurations de {name} qui tiennent : durée, mémoire libre et énergie ; {number} sont sur le "
            f"front de Pareto ; la meilleure : {title}.",
        ),
    )
    left, right = figure.subplots(1, 2)
    free = (plan.question.device_bytes - found.memory.total_bytes) / 1e9
    front, best = plan.pareto, plan.best
    _scatter(left, plan, free, [one.margin_bytes / 1e9 for one in front], best.margin_bytes / 1e9)
    left.set_ylabel(say(en="memory that stays free (GB)", fr="mémoire restée libre (Go)"))
    energy = found.energy_j / 3.6e3
    _scatter(right, plan, energy, [one.energy_j / 3.6e3 for one in front], best.energy_j / 3.6e3)
    right.set_ylabel(say(en="kWh of 1000 steps", fr="kWh de 1000 itérations"))
    figure.suptitle(f"{plan.question.subject.name}, {plan.question.cluster.title}", fontsize=10)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return finish(figure)


def _scatter(axes: Axes, plan: Plan, heights: np.ndarray, front: Sequence[float], best: float) -> None:
    found = plan.found
    slowest = min(SLOWEST * float(found.step_s[0]), 1.1 * float(found.step_s[-1]))
    near = np.flatnonzero(found.step_s <= slowest)
    some = near[np.unique(np.linspace(0, near.size - 1, min(near.size, MOST_DRAWN)).astype(int))]
    axes.plot(
        found.step_s[some], heights[some], linestyle="none", marker="o", markersize=3.4, markerfacecolor="none",
        markeredgecolor=SKY, markeredgewidth=0.7, label=say(en="fits", fr="tient"),
    )  # fmt: skip
    axes.plot(
        [one.estimated_s for one in plan.pareto], front, linestyle="none", marker="x", markersize=6, color=BLACK,
        label=say(en="Pareto front", fr="front de Pareto"),
    )  # fmt: skip
    axes.plot(
        [plan.best.estimated_s], [best], linestyle="none", marker="*", markersize=15, color=YELLOW,
        markeredgecolor=VERMILION, label=say(en="best, simulated", fr="la meilleure, simulée"),
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(0.9 * float(found.step_s[0]), slowest)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: decimal(value, 0 if value >= 1 else 2)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace(".", say(en=".", fr=","))))
    axes.set_xlabel(say(en="seconds of a step (log.)", fr="secondes d’une itération (log.)"))
    plain(axes)


def beside_figure(plan: Plan, verdict: Verdict) -> LabFigure | None:
    """A layout asked about over the best one: seconds of a step by part, bytes of the fullest GPU by category.

    Returns:
        The figure; None where the layout asked about means nothing (its degrees do not come to the GPUs).
    """
    if math.isnan(verdict.step_s):
        return None
    best = plan.best
    names = (say(en="this one", fr="celle-ci"), say(en="the best", fr="la meilleure"))
    times = [asked_times(plan, verdict), dict(best.parts)]
    held = [asked_memory(plan, verdict), dict(best.memory)]
    own = f"{seconds(verdict.step_s)}, {gigabytes(verdict.memory_bytes)}"
    other = f"{seconds(best.estimated_s)}, {gigabytes(best.memory_bytes)}"
    figure = new_figure(
        10.0,
        4.6,
        alt=say(
            en=f"{verdict.candidate.title}: {own}, beside the best, {best.candidate.title}: {other}.",
            fr=f"{verdict.candidate.title} : {own}, à côté de la meilleure, {best.candidate.title} : {other}.",
        ),
    )
    upper, lower = figure.subplots(2, 1)
    _stacked(upper, names, times, TIME_STYLES, 1.0)
    upper.set_xlabel(say(en="seconds of a step (closed form)", fr="secondes d’une itération (forme close)"))
    _stacked(lower, names, held, MEMORY_STYLES, 1e9)
    limit = plan.question.device_bytes / 1e9
    lower.axvline(limit, color=VERMILION, linestyle="--", linewidth=1.4, label=plan.question.cluster.gpu.title)
    lower.set_xlim(0, 1.05 * max(limit, *(sum(one.values()) / 1e9 for one in held)))
    lower.set_xlabel(say(en="memory of the fullest GPU (GB)", fr="mémoire du GPU le plus rempli (Go)"))
    for axes in (upper, lower):
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    return finish(figure)


def _stacked(
    axes: Axes, names: Sequence[str], bars: Sequence[Mapping[str, float]], styles: Mapping[str, Style], unit: float
) -> None:
    lefts = np.zeros(len(bars))
    for name, style in styles.items():
        widths = np.array([one.get(name, 0.0) for one in bars]) / unit
        if widths.max() <= 0:
            continue
        axes.barh(
            range(len(bars)), widths, left=lefts, color=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=0.5,
            height=0.6, label=part_words(name),
        )  # fmt: skip
        lefts += widths
    axes.set_yticks(range(len(bars)), names)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace(".", say(en=".", fr=","))))
    plain(axes)
