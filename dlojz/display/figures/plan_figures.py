"""Figures of plans: the planner's front, a layout beside the best one, this machine's layouts.

Only what a plan holds is drawn; a hatch, a marker or a number says whatever a colour says.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from dlojz.base.language import decimal, say
from dlojz.display.canvas import LabFigure, caption, finish, key, logarithmic, new_figure, phrase, plain, stack, swatch
from dlojz.display.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    MEMORY_STYLES,
    ORANGE,
    PURPLE,
    SMALL,
    TIME_STYLES,
    TITLE,
    VERMILION,
    YELLOW,
    Style,
)
from dlojz.planner.answer import Choice, Plan, seconds
from dlojz.planner.space import COLUMN_VALUES, gigabytes, part_words, reason_words
from dlojz.planner.this_machine import Here

ENGINE_LOOKS = {
    "megatron-core": (BLUE, "o"),
    "megatron-deepspeed": (ORANGE, "s"),
    "deepspeed": (GREEN, "^"),
    "torch": (VERMILION, "D"),
    "by_hand": (PURPLE, "P"),
}
MOST_STAGES = 32
MOST_POINTS = 4000
MOST_LAYOUTS = 16
SLOWEST = 12.0
"""Times the fastest step, beyond which layouts are not drawn."""


def plan_figure(plan: Plan, path: str | Path | None = None) -> LabFigure:
    """Draw a plan: the front of compromises, the memory of every stage, the waterfall of the step, the refusals."""
    best, model = plan.best, plan.question.subject.name
    took = f"{best.time_words}, {gigabytes(best.memory_bytes)}"
    alt = phrase("alt of a plan", model=model, best=best, took=took)
    figure = new_figure(11.0, 9.4, alt)
    cells = figure.add_gridspec(2, 2, width_ratios=(1.15, 1.0), height_ratios=(1.1, 1.0))
    front = figure.add_subplot(cells[0, 0])
    _front(front, plan, _free_gb(plan), lambda choice: choice.margin_bytes / 1e9)
    free_label = say(en="memory that stays free (GB)", fr="mémoire restée libre (Go)")
    caption(front, y=free_label, title=say(en="layouts that fit", fr="configurations qui tiennent"))
    front.legend(fontsize=SMALL, loc="best", framealpha=0.9)
    _memory(figure.add_subplot(cells[0, 1]), best)
    _waterfall(figure.add_subplot(cells[1, 0]), best)
    _refusals(figure.add_subplot(cells[1, 1]), plan)
    figure.suptitle(f"{model}, {plan.question.cluster.title} — {best.title}", fontsize=TITLE)
    return finish(figure, path)


def _free_gb(plan: Plan) -> NDArray[np.float64]:
    # GB (1e9 bytes): the GPU's memory less what the layout takes.
    free: NDArray[np.float64] = (plan.question.device_bytes - plan.found.memory.total_bytes) / 1e9
    return free


def _front(axes: Axes, plan: Plan, heights: NDArray[np.float64], height_of: Callable[[Choice], float]) -> None:
    """Step time against another quantity: layouts by engine, the Pareto front, the best.

    Args:
        heights: the other quantity, of every layout.
        height_of: the same, of one layout.
    """
    layouts, best = plan.found, plan.best
    # Layouts are sorted by step time: [0] is the fastest, [-1] the slowest.
    slowest = min(SLOWEST * float(layouts.step_s[0]), 1.1 * float(layouts.step_s[-1]))
    candidate_indices = np.flatnonzero(layouts.step_s <= slowest)
    # At most MOST_POINTS, evenly from the fastest to the slowest, so that the picture is drawn at once.
    sampled_indices = candidate_indices[
        np.unique(np.linspace(0, candidate_indices.size - 1, min(candidate_indices.size, MOST_POINTS)).astype(int))
    ]
    engines = layouts.space.columns(layouts.admitted[sampled_indices])["engine"]
    hollow: dict[str, Any] = {"linestyle": "none", "markerfacecolor": "none", "alpha": 0.55}
    for name in plan.question.engines:
        engine_indices = sampled_indices[engines == COLUMN_VALUES["engine"].index(name)]
        color, marker = ENGINE_LOOKS[name]
        if engine_indices.size:
            axes.plot(
                layouts.step_s[engine_indices],
                heights[engine_indices],
                color=color,
                marker=marker,
                markersize=3.4,
                label=name,
                **hollow,
            )
    title = say(en="Pareto front", fr="front de Pareto")
    # One marker for each number of GPUs in the question.
    for number, marker in zip(plan.question.gpus, cycle(("x", "o", "v", "+", "<", ">")), strict=False):
        front = [choice for choice in plan.pareto if choice.candidate.world_size == number]
        label = title + (f", {number} GPU" if len(plan.question.gpus) > 1 else "")
        points = [choice.estimated_s for choice in front], [height_of(choice) for choice in front]
        axes.plot(*points, color=BLACK, linestyle="none", marker=marker, markersize=5, label=label)
    star: dict[str, Any] = {"marker": "*", "markersize": 16, "color": YELLOW, "markeredgecolor": BLACK}
    label = say(en="best", fr="la meilleure") + _simulated(best)
    axes.plot([best.estimated_s], [height_of(best)], linestyle="none", label=label, **star)
    _logarithmic(axes, (0.9 * float(layouts.step_s[0]), slowest))
    caption(
        axes,
        x=say(en="step in closed form (s), logarithmic", fr="itération, par la forme close (s), échelle logarithmique"),
    )
    plain(axes)


def _simulated(best: Choice) -> str:
    """Its simulated step where that is not the closed form's; empty otherwise."""
    if seconds(best.step_s) == seconds(best.estimated_s):
        return ""
    return say(en=f", simulated: {seconds(best.step_s)}", fr=f", simulée : {seconds(best.step_s)}")


def _logarithmic(axes: Axes, limits: tuple[float, float], marks: tuple[float, ...] = (1.0, 2.0, 5.0)) -> None:
    axes.set_xlim(*limits)
    logarithmic(axes, "x", lambda value: decimal(value, 0 if value >= 1 else 2), marks)


def _bars(
    axes: Axes,
    bars: Sequence[Mapping[str, float]],
    styles: Mapping[str, Style],
    unit: float,
    *,
    width: float = 0.72,
    upright: bool = False,
) -> tuple[list[float], list[Artist]]:
    """Draw bars stacked by part; return their lengths in `unit`, and the legend's entries."""
    names = [name for name in styles if any(bar.get(name, 0.0) > 0 for bar in bars)]
    ends = [
        stack(axes, position, [(bar.get(name, 0.0) / unit, styles[name]) for name in names], width, upright=upright)
        for position, bar in enumerate(bars)
    ]
    return ends, [swatch(styles[name], part_words(name)) for name in names]


def _memory(axes: Axes, best: Choice) -> None:
    """A bar of every stage, stacked by category, under the memory of a GPU."""
    ranks = best.ranks
    # The last stage holds the head and the loss: it is shown, whatever lies between.
    drawn_ranks = ranks if len(ranks) <= MOST_STAGES else [*ranks[: MOST_STAGES - 1], ranks[-1]]
    _, handles = _bars(axes, [rank.parts for rank in drawn_ranks], MEMORY_STYLES, 1e9, width=0.8, upright=True)
    limit = best.question.device_bytes / 1e9
    axes.axhline(limit, color=BLACK, linestyle="--", linewidth=1)
    axes.text(-0.45, limit, best.question.cluster.gpu.title, fontsize=SMALL, va="bottom")
    axes.set(ylim=(0, 1.4 * limit), xlim=(-0.6, max(len(drawn_ranks) - 0.4, 1.6)))
    # At most about 12 labels.
    step = max(1, len(drawn_ranks) // 12)
    axes.set_xticks(range(0, len(drawn_ranks), step), [str(rank.stage) for rank in drawn_ranks][::step])
    caption(
        axes,
        x=say(en="pipeline stage", fr="étage du pipeline"),
        y=say(en="memory of a GPU (GB)", fr="mémoire d’un GPU (Go)"),
        title=say(en="memory of each stage’s GPU", fr="mémoire du GPU de chaque étage"),
    )
    legend_options: dict[str, Any] = {"framealpha": 0.9, "columnspacing": 1.0, "handlelength": 1.6}
    axes.legend(handles=handles, fontsize=SMALL, ncols=2, loc="upper right", **legend_options)
    plain(axes)


def _waterfall(axes: Axes, best: Choice) -> None:
    """The parts of the step, each beginning where the one before ends."""
    names = [name for name in TIME_STYLES if best.parts[name] > 0]
    start = 0.0
    for position, name in enumerate(names):
        value = best.parts[name]
        # Each bar starts where the one before ended.
        start = stack(axes, position, [(value, TIME_STYLES[name])], 0.72, start=start)
        axes.text(start, position, f" {decimal(100 * value / best.estimated_s, 1)} %", va="center", fontsize=SMALL)
    axes.set_yticks(range(len(names)), [fill(part_words(name), 24) for name in names], fontsize=SMALL)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * start)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    took = best.time_words
    if simulated := _simulated(best):
        took = f"{seconds(best.estimated_s)}{simulated}{took.removeprefix(seconds(best.step_s))}"
    caption(
        axes,
        x=say(en=f"seconds of a step: {took}", fr=f"secondes d’une itération : {took}"),
        title=say(en="where the step goes (closed form)", fr="où va l’itération (forme close)"),
    )
    plain(axes, "x")


def _refusals(axes: Axes, plan: Plan) -> None:
    """How many layouts each reason refuses."""
    # The reason "" stands for the layouts that fit.
    counts = plan.refused.counts | {"": int(plan.found.admitted.size)}
    names = sorted(counts, key=lambda name: counts[name])
    for position, name in enumerate(names):
        stack(axes, position, [(counts[name], Style(GREY, "//") if name else Style(GREEN, ""))], 0.7)
        axes.text(counts[name], position, f" {decimal(counts[name], 0)}", va="center", fontsize=SMALL)
    labels = [fill(reason_words(name), 30) if name else say(en="fit", fr="tiennent") for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize=SMALL)
    _logarithmic(axes, (0.8, 8 * max(counts.values())), (1.0,))
    number = decimal(plan.found.num_layouts, 0)
    caption(
        axes,
        x=say(en="layouts, logarithmic", fr="configurations, échelle logarithmique"),
        title=say(en=f"{number} layouts: why they are out", fr=f"{number} configurations : raisons des refus"),
    )
    plain(axes, "x")


def here_figure(layouts: Here, measured_s: Mapping[str, float], path: str | Path | None = None) -> LabFigure:
    """Draw the best layout of each kind on this machine, stacked by part, the measured step as a diamond.

    Args:
        measured_s: measured seconds of a step by title; may be empty.
    """
    best_layouts = layouts.kinds()[:MOST_LAYOUTS]
    alt = "; ".join(f"{layout.title}: {seconds(layout.step_s)}" for layout in best_layouts)
    figure = new_figure(10.5, 1.6 + 0.42 * len(best_layouts), alt)
    axes = figure.subplots()
    ends, handles = _bars(axes, [layout.parts for layout in best_layouts], TIME_STYLES, 1e-3)
    diamond: dict[str, Any] = {"marker": "D", "color": BLACK, "linestyle": "none"}
    # ms: the largest of all predictions and measurements.
    largest = max([*ends, *(1e3 * measured_s[layout.title] for layout in best_layouts if layout.title in measured_s)])
    for position, layout in enumerate(best_layouts):
        measured_step_s, text = measured_s.get(layout.title), f" {seconds(layout.step_s)}"
        if measured_step_s is not None:
            axes.plot([1e3 * measured_step_s], [position], **diamond)
            text += phrase("measured layout", measured=seconds(measured_step_s))
        axes.text(
            max(ends[position], 1e3 * (measured_step_s or 0.0) + 0.008 * largest),
            position,
            text,
            va="center",
            fontsize=SMALL,
        )
    axes.set_yticks(range(len(best_layouts)), [layout.title for layout in best_layouts], fontsize=SMALL)
    axes.set_ylim(len(best_layouts) - 0.5, -0.5)
    axes.set_xlim(0, (1.45 if measured_s else 1.15) * largest)
    axes.xaxis.set_major_formatter(lambda value, position: decimal(value, 0))
    caption(axes, x=say(en="milliseconds of a step", fr="millisecondes d’une itération"))
    if measured_s:
        handles.append(key(say(en="measured", fr="mesuré"), **diamond))
    below = (0.0, -0.6 / len(best_layouts) - 0.08)
    axes.legend(handles=handles, fontsize=SMALL, loc="upper left", bbox_to_anchor=below, ncols=4, frameon=False)
    plain(axes)
    return finish(figure, path)
