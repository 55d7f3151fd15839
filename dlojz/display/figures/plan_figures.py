"""Figures of plans: the planner's front, this machine's layouts.

A plan drawn: the front of compromises, the memory of every stage, the waterfall of the step, the refusals.

Draws what the plan holds and computes nothing; a hatch, a marker or a number says whatever a colour says.

A plan for this machine, drawn and as a table: predicted parts of each step, the measured step beside them.

Draws what it is given and computes nothing but ratios; hatches say what colours say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from dlojz.base.language import decimal, say
from dlojz.display.canvas import LabFigure, decimal_marks, finish, new_figure, plain
from dlojz.display.plan_tables import list_html, pairs_html
from dlojz.display.style import BLACK, BLUE, EDGE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, WHITE, YELLOW, Style
from dlojz.planner.answer import seconds
from dlojz.planner.space import gigabytes, part_words, reason_words

if TYPE_CHECKING:
    from dlojz.planner.answer import Choice, Plan
    from dlojz.planner.this_machine import Here, LocalChoice

MEMORY_STYLES = {
    "weights": Style(BLUE, ""),
    "gradients": Style(ORANGE, "//"),
    "optimizer": Style(GREEN, "\\\\"),
    "activations": Style(SKY, ".."),
    "edges": Style(PURPLE, "xx"),
    "live": Style(YELLOW, "++"),
    "reserve": Style(GREY, "--"),
}
TIME_STYLES = {
    "forward": Style(BLUE, ""),
    "backward": Style(ORANGE, "//"),
    "recompute": Style(YELLOW, "++"),
    "tensor": Style(VERMILION, "xx"),
    "pipeline": Style(PURPLE, ".."),
    "bubble": Style(WHITE, "||"),
    "data": Style(SKY, "oo"),
    "optimizer": Style(GREEN, "\\\\"),
    "constant": Style(GREY, "--"),
}
ENGINE_MARKERS = {"megatron-core": "o", "megatron-deepspeed": "s", "deepspeed": "^", "torch": "D", "by_hand": "P"}
ENGINE_COLORS = {
    "megatron-core": BLUE, "megatron-deepspeed": ORANGE, "deepspeed": GREEN, "torch": VERMILION, "by_hand": PURPLE,
}  # fmt: skip
MOST_STAGES = 32
PLAN_MOST_DRAWN = 4000
SLOWEST = 12.0
"""Times the fastest step, beyond which layouts are not drawn."""


def plan_figure(plan: Plan, path: str | Path | None = None) -> LabFigure:
    """Draw a plan; save the picture too where a path is given.

    Args:
        plan: the answer.
        path: picture to write, if any.

    Raises:
        LabError: if the picture cannot be written.
    """
    best = plan.best
    figure = new_figure(
        13.5,
        9.4,
        alt=say(
            en=f"Plan of {plan.question.subject.name}: best layout {best.candidate.title}, step {best.time_words}, "
            f"{gigabytes(best.memory_bytes)} on the fullest GPU.",
            fr=f"Plan de {plan.question.subject.name} : meilleure configuration {best.candidate.title}, itération "
            f"{best.time_words}, {gigabytes(best.memory_bytes)} sur le GPU le plus rempli.",
        ),
    )
    cells = figure.add_gridspec(2, 2, width_ratios=(1.15, 1.0), height_ratios=(1.1, 1.0))
    _front(figure.add_subplot(cells[0, 0]), plan)
    _memory(figure.add_subplot(cells[0, 1]), best)
    _waterfall(figure.add_subplot(cells[1, 0]), best)
    _refusals(figure.add_subplot(cells[1, 1]), plan)
    figure.suptitle(
        f"{plan.question.subject.name}, {plan.question.cluster.title} — {best.candidate.title}", fontsize=11
    )
    return finish(figure, path)


def _logarithmic(axes: Axes, limits: tuple[float, float], marks: tuple[float, ...] = (1.0, 2.0, 5.0)) -> None:
    """A logarithmic axis with plain numbers at some marks of every decade."""
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    axes.xaxis.set_major_locator(LogLocator(subs=marks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: decimal(value, 0 if value >= 1 else 2)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _front(axes: Axes, plan: Plan) -> None:
    """Step time against free memory: all admitted layouts, the front, the best."""
    found = plan.found
    some = np.unique(np.linspace(0, found.admitted.size - 1, min(found.admitted.size, PLAN_MOST_DRAWN)).astype(int))
    engines = found.space.columns(found.admitted[some])["engine"]
    free = (plan.question.device_bytes - found.memory.total_bytes[some]) / 1e9
    for place, name in enumerate(found.space.names):
        own = engines == place
        if own.any():
            axes.scatter(
                found.step_s[some][own], free[own], s=11, marker=ENGINE_MARKERS[name], facecolors="none",
                edgecolors=ENGINE_COLORS[name], linewidths=0.6, alpha=0.55, label=name,
            )  # fmt: skip
    title = say(en="Pareto front", fr="front de Pareto")
    for number, marker in zip(plan.question.gpus, ("o", "x", "v", "+", "<", ">"), strict=False):
        front = [one for one in plan.pareto if one.candidate.gpus == number]
        axes.plot(
            [one.estimated_s for one in front], [one.margin_bytes / 1e9 for one in front],
            color=BLACK, linestyle="none", marker=marker, markersize=4,
            label=title + (f", {number} GPU" if len(plan.question.gpus) > 1 else ""),
        )  # fmt: skip
    axes.plot(
        [plan.best.estimated_s], [plan.best.margin_bytes / 1e9], marker="*", markersize=16, color=YELLOW,
        markeredgecolor=BLACK, linestyle="none", label=say(en="best, simulated", fr="meilleure, simulée"),
    )  # fmt: skip
    fastest = float(found.step_s[0])
    _logarithmic(axes, (0.9 * fastest, min(SLOWEST * fastest, 1.1 * float(found.step_s[-1]))))
    axes.set_xlabel(say(en="step (s), logarithmic", fr="itération (s), échelle logarithmique"))
    axes.set_ylabel(say(en="memory that stays free (GB)", fr="mémoire restée libre (Go)"))
    axes.set_title(say(en="layouts that fit", fr="configurations qui tiennent"), fontsize=10)
    axes.legend(fontsize=8, loc="best", framealpha=0.9)
    plain(axes)


def _memory(axes: Axes, best: Choice) -> None:
    """A bar of every stage, stacked by category, under the memory of a GPU."""
    ranks = best.ranks
    shown = ranks if len(ranks) <= MOST_STAGES else [*ranks[: MOST_STAGES - 1], ranks[-1]]
    bottoms = np.zeros(len(shown))
    places = np.arange(len(shown))
    for name, style in MEMORY_STYLES.items():
        heights = np.array([one.parts[name] for one in shown]) / 1e9
        if heights.max(initial=0) <= 0:
            continue
        axes.bar(
            places, heights, bottom=bottoms, color=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=0.4,
            width=0.8, label=part_words(name),
        )  # fmt: skip
        bottoms += heights
    limit = best.question.device_bytes / 1e9
    axes.axhline(limit, color=BLACK, linestyle="--", linewidth=1)
    axes.text(-0.45, limit, best.question.cluster.gpu.title, fontsize=8, va="bottom")
    axes.set_ylim(0, 1.4 * limit)
    axes.set_xlim(-0.6, max(len(shown) - 0.4, 1.6))
    step = max(1, len(shown) // 12)
    axes.set_xticks(places[::step], [str(one.stage) for one in shown][::step])
    axes.set_xlabel(say(en="pipeline stage", fr="étage du pipeline"))
    axes.set_ylabel(say(en="memory of a GPU (GB)", fr="mémoire d’un GPU (Go)"))
    axes.set_title(say(en="memory of each stage’s GPU", fr="mémoire du GPU de chaque étage"), fontsize=10)
    axes.legend(fontsize=7.5, ncols=3, loc="upper right", framealpha=0.9, columnspacing=1.0, handlelength=1.6)
    plain(axes)


def _waterfall(axes: Axes, best: Choice) -> None:
    """The parts of the step, each beginning where the one before ends."""
    names = [name for name in TIME_STYLES if best.parts[name] > 0]
    start = 0.0
    for place, name in enumerate(names):
        style, value = TIME_STYLES[name], best.parts[name]
        axes.barh(
            place, value, left=start, color=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=0.6, height=0.72
        )
        share = decimal(100 * value / best.estimated_s, 1)
        axes.text(start + value, place, f" {share} %", va="center", fontsize=8)
        start += value
    axes.set_yticks(range(len(names)), [fill(part_words(name), 24) for name in names], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * start)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    decimal_marks(axes.xaxis)
    axes.set_xlabel(say(en=f"seconds of a step: {best.time_words}", fr=f"secondes d’une itération : {best.time_words}"))
    axes.set_title(say(en="where the step goes (closed form)", fr="où va l’itération (forme close)"), fontsize=10)
    plain(axes)


def _refusals(axes: Axes, plan: Plan) -> None:
    """How many layouts each reason refuses."""
    counts = plan.refused.counts | {"": int(plan.found.admitted.size)}
    names = sorted(counts, key=lambda name: counts[name])
    for place, name in enumerate(names):
        style = Style(GREEN, "") if not name else Style(GREY, "//")
        axes.barh(place, counts[name], color=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=0.6, height=0.7)
        axes.text(counts[name], place, f" {decimal(counts[name], 0)}", va="center", fontsize=8)
    labels = [fill(reason_words(name), 24) if name else say(en="fit", fr="tiennent") for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize=8)
    _logarithmic(axes, (0.8, 8 * max(counts.values())), (1.0,))
    axes.set_xlabel(say(en="layouts, logarithmic", fr="configurations, échelle logarithmique"))
    axes.set_title(
        say(
            en=f"{decimal(plan.found.num_layouts, 0)} layouts: why they are out",
            fr=f"{decimal(plan.found.num_layouts, 0)} configurations : raisons des refus",
        ),
        fontsize=10,
    )
    plain(axes)


HERE_MOST_DRAWN = 16


def here_figure(
    rows: Sequence[LocalChoice], measured_s: Mapping[str, float], path: str | Path | None = None
) -> LabFigure:
    """A bar of each layout, stacked by part, with the measured step as a diamond; the planner's choice is the top one.

    Args:
        rows: layouts, fastest first.
        measured_s: measured seconds of a step by title; may be empty.
        path: picture to write, if any.

    Raises:
        LabError: if the picture cannot be written.
    """
    shown = list(rows[:HERE_MOST_DRAWN])
    figure = new_figure(
        10.5, 1.6 + 0.42 * len(shown),
        alt="; ".join(f"{one.title}: {seconds(one.step_s)}" for one in shown),
    )  # fmt: skip
    axes = figure.subplots()
    starts = [0.0] * len(shown)
    for name, style in TIME_STYLES.items():
        widths = [1e3 * one.parts[name] for one in shown]
        if max(widths) <= 0:
            continue
        axes.barh(
            range(len(shown)), widths, left=starts, color=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=0.4,
            height=0.72, label=part_words(name),
        )  # fmt: skip
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    largest = max([*starts, *(1e3 * measured_s[one.title] for one in shown if one.title in measured_s)])
    for place, one in enumerate(shown):
        taken = measured_s.get(one.title)
        text = f" {seconds(one.step_s)}"
        if taken is not None:
            axes.plot([1e3 * taken], [place], marker="D", color=BLACK, markersize=6, linestyle="none",
                      label=say(en="measured", fr="mesuré") if one is shown[0] else None)  # fmt: skip
            text += say(en=f" predicted, {seconds(taken)} measured", fr=f" prédite, {seconds(taken)} mesurée")
        axes.text(max(starts[place], 1e3 * (taken or 0.0) + 0.008 * largest), place, text, va="center", fontsize=8)
    axes.set_yticks(range(len(shown)), [one.title for one in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, (1.45 if measured_s else 1.15) * largest)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: decimal(value, 0)))
    axes.set_xlabel(say(en="milliseconds of a step", fr="millisecondes d’une itération"))
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0.0, -0.6 / len(shown) - 0.08), ncols=4, frameon=False)
    plain(axes)
    return finish(figure, path)


def here_html(here: Here) -> str:
    """What there is to say, and the best layout of each kind."""
    columns = (
        say(en="layout", fr="configuration"),
        say(en="predicted step", fr="itération prédite"),
        say(en="to the best", fr="au meilleur"),
    )
    title = say(en="best layout of each kind", fr="la meilleure configuration de chaque sorte")
    return pairs_html(here.lines()) + list_html(title, columns, here.table())
