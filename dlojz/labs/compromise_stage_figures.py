"""Stages of a pipeline: the table of their times, those that are chosen in it, and the pipeline they make.

Layer 6 (labs), on `dlojz.viz`. Invariant: the times drawn are those given; the length of the step is summed again from
the stages chosen.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §5.2, equation 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from dlojz.labs.compromise_shown import EDGE, HEAT, figure_of, given, short
from dlojz.labs.pipeline_figures import pictured
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure
from dlojz.viz.footprint_words import percent
from dlojz.viz.markup import visible
from dlojz.viz.palette import BLACK, SERIES, VERMILION
from dlojz.viz.pipeline_draw import decimal_marks

MOST_NUMBERED = 10
"""Layers up to which every cell of a stage table has its number."""
MOST_DRAWN = 600
"""Micro-batches × stages up to which a pipeline is drawn whole."""
Stage = tuple[int, int, int]
"""First layer, last layer (included), devices."""


@pictured
def stages(table: Mapping[Stage, float], chosen: Any, num_micro_batches: int, *, unit: str = "s") -> LabFigure:
    """The table t(first … last, devices) as heat maps, the stages that were chosen in it, and the pipeline they make.

    Args:
        table: (first layer, last layer included, devices) → time of one micro-batch; what is absent cannot be.
        chosen: the stages, as such triples in the order of the layers, or a `PipelinePlan`, or a function without
            arguments that gives either.
        num_micro_batches: B, at least 1.
        unit: of the times; empty if they have none.

    Raises:
        LabError: for stages that the table does not have, that leave a layer out, or without a micro-batch.
    """
    picked = _stages(given(chosen), table, num_micro_batches)
    times = [float(table[stage]) for stage in picked]
    total = sum(times) + (num_micro_batches - 1) * max(times)
    sizes = sorted({devices for _, _, devices in table})
    layers = 1 + max(last for _, last, _ in table)
    figure = new_figure(
        max(3.1 * len(sizes), 8.6), 3.4 + 0.42 * len(picked) + 1.5, alt=_stages_alt(picked, times, total)
    )
    halves = figure.add_gridspec(2, 1, height_ratios=(3.3, 0.42 * len(picked) + 1.7))
    upper, lower = figure.add_subfigure(halves[0]), figure.add_subfigure(halves[1])
    panels = upper.subplots(1, len(sizes), squeeze=False)[0]
    for place, (axes, devices) in enumerate(zip(panels, sizes, strict=True)):
        _stage_table(axes, table, picked, layers, devices, first=place == 0)
    _pipeline(lower.subplots(), picked, times, num_micro_batches, unit)
    return finish(figure)


def _stages(chosen: Any, table: Mapping[Stage, float], num_micro_batches: int) -> list[Stage]:
    if hasattr(chosen, "stages"):
        chosen = [(one.first, one.last, one.submesh.num_devices) for one in chosen.stages]
    try:
        picked = [(int(first), int(last), int(devices)) for first, last, devices in chosen]
    except (TypeError, ValueError):
        picked = []
    layers = 1 + max((last for _, last, _ in table), default=-1)
    covered = [layer for first, last, _ in picked for layer in range(first, last + 1)]
    if not picked or covered != list(range(layers)) or any(stage not in table for stage in picked):
        raise LabError(
            say(
                en=f"stages are triples (first layer, last layer, devices) of the table that hold each of the {layers} "
                f"layers once, in order, but {visible(repr(chosen)[:80])} was received.",
                fr=f"les étages sont des triplets (première couche, dernière couche, périphériques) de la table, qui "
                f"contiennent chacune des {layers} couches une fois, dans l’ordre ; reçu : "
                f"{visible(repr(chosen)[:80])}.",
            )
        )
    if num_micro_batches < 1:
        raise LabError(
            say(
                en=f"a step has at least one micro-batch, but {num_micro_batches} was received: use 1 or more.",
                fr=f"un pas a au moins un micro-batch, mais {num_micro_batches} a été reçu : prenez 1 ou plus.",
            )
        )
    return picked


def _stage_table(
    axes: Axes, table: Mapping[Stage, float], picked: Sequence[Stage], layers: int, devices: int, *, first: bool
) -> None:
    """t for one number of devices: first layer down, last layer across; chosen stages framed, with their number."""
    values = np.full((layers, layers), np.nan)
    for (start, last, own), time in table.items():
        if own == devices and math.isfinite(time):
            values[start, last] = time
    longest = max(time for time in table.values() if math.isfinite(time))
    axes.imshow(values, cmap=HEAT, vmin=0, vmax=1.9 * longest, aspect="auto")
    if layers <= MOST_NUMBERED:
        for start, last in np.argwhere(np.isfinite(values)):
            size = 7.5 if layers <= 7 else 6
            axes.text(last, start, short(values[start, last]), ha="center", va="center", fontsize=size)
    for place, (start, last, own) in enumerate(picked):
        if own == devices:
            axes.add_patch(
                Rectangle((last - 0.5, start - 0.5), 1, 1, fill=False, edgecolor=VERMILION, linewidth=2.4, zorder=4)
            )
            axes.text(
                last - 0.5, start - 0.5, str(place), ha="center", va="center", fontsize=7.5, color="white", zorder=5,
                fontweight="bold", bbox={"boxstyle": "circle,pad=0.18", "facecolor": VERMILION, "edgecolor": "none"},
            )  # fmt: skip
    axes.set_xticks(range(layers))
    axes.set_yticks(range(layers))
    axes.tick_params(labelsize=7, length=0)
    axes.set_xlabel(say(en="last layer", fr="dernière couche"), fontsize=8.5)
    if first:
        axes.set_ylabel(say(en="first layer", fr="première couche"), fontsize=8.5)
    axes.set_title(say(en=f"{devices} GPU" + "s" * (devices > 1), fr=f"{devices} GPU"), fontsize=9)
    axes.spines[:].set_visible(False)


def _pipeline(axes: Axes, picked: Sequence[Stage], times: Sequence[float], number_of: int, unit: str) -> None:
    """Micro-batch after micro-batch through the stages; each begins when its stage is free and its input is there."""
    drawn = min(number_of, max(1, MOST_DRAWN // len(picked)))
    total = sum(times) + (number_of - 1) * max(times)
    ends = np.zeros(len(picked))
    for micro_batch in range(drawn):
        ready = 0.0
        for stage, time in enumerate(times):
            start = max(ready, ends[stage])
            ready = ends[stage] = start + time
            axes.add_patch(
                Rectangle(
                    (start, stage - 0.4), time, 0.8, facecolor=SERIES[micro_batch % len(SERIES)], edgecolor=EDGE,
                    linewidth=0.4,
                )
            )  # fmt: skip
            if time > total / 45:
                axes.text(start + time / 2, stage, str(micro_batch), ha="center", va="center", fontsize=7)
    axes.axvline(total, color=BLACK, linestyle="--", linewidth=1)
    axes.set_xlim(0, 1.02 * total)
    axes.set_ylim(len(picked) - 0.45, -0.55)
    labels = [
        say(
            en=f"{place}: layer{'s' * (last > first)} {_span(first, last)} on {devices} GPU",
            fr=f"{place} : couche{'s' * (last > first)} {_span(first, last)} sur {devices} GPU",
        )
        for place, (first, last, devices) in enumerate(picked)
    ]
    axes.set_yticks(range(len(picked)), labels, fontsize=8)
    axes.set_xlabel(say(en="time", fr="temps") + (f" ({unit})" if unit else ""))
    decimal_marks(axes.xaxis)
    waits = 1 - number_of * max(times) / total
    axes.set_title(
        f"T = Σt + (B − 1)·max t = {short(sum(times))} + {number_of - 1} × {short(max(times))} = {figure_of(total)}"
        + (f" {unit}" if unit else "")
        + say(en=f"; filling and draining {percent(waits)}", fr=f" ; remplissage et vidage {percent(waits)}"),
        fontsize=9, loc="left",
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def _stages_alt(picked: Sequence[Stage], times: Sequence[float], total: float) -> str:
    each = ", ".join(
        f"{_span(first, last)} × {devices} GPU: {figure_of(time)}"
        for (first, last, devices), time in zip(picked, times, strict=True)
    )
    return say(
        en=f"Stages chosen in a table of times, and the pipeline they make, {figure_of(total)} long: {each}.",
        fr=f"Étages choisis dans une table de durées, et leur pipeline, long de {figure_of(total)} : {each}.",
    )
