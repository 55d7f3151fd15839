"""A measured timeline under the simulated one of the same schedule, on one time axis, and where they part.

Layer 4. Invariant: both are timelines of the same orders and both begin at zero; the simulation is drawn as it was
calibrated, never shifted or stretched to fit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dlojz.pipeline.timeline import Timeline
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import LINE_STYLES
from dlojz.viz.pipeline_arrange import scene_of
from dlojz.viz.pipeline_draw import decimal_marks, draw_scene, legend_of
from dlojz.viz.pipeline_figure import WIDTH_IN
from dlojz.viz.pipeline_scene import Lanes, Scene
from dlojz.viz.pipeline_words import amount, share, title_of

MOST_LINES = 8
"""Ranks whose lateness is drawn: more lines than these are not told apart."""


def overlay_figure(
    predicted: Timeline,
    measured: Timeline,
    path: str | Path | None = None,
    *,
    color_by: str = "kind",
    mark: str = "",
) -> LabFigure:
    """Draw a measured timeline under its simulation, and how late each action is.

    Args:
        predicted: simulated with costs in seconds (measured means, say).
        measured: the same schedule, executed; times in seconds.
        path: picture to write, if any.
        color_by: kind, micro_batch or chunk.
        mark: what the title says besides: that the measurement is replayed.

    Raises:
        LabError: if the two are not of the same orders, or the picture cannot be written.
    """
    scene = overlay_scene(predicted, measured, color_by=color_by)
    rows = len(scene.rows)
    row_in = max(min(0.36, 8.0 / rows), 0.12)
    figure = new_figure(WIDTH_IN, rows * row_in + 3.9, alt=scene.alt)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[rows * row_in, 1.7])
    draw_scene(upper, scene, WIDTH_IN - 2.2, row_in)
    ranks = predicted.schedule.ranks
    upper.hlines([2 * rank for rank in range(1, ranks)], 0, scene.width, color="#777777", linewidth=1.0)
    for end, style, name in (
        (predicted.makespan, "--", say(en="end, predicted", fr="fin prédite")),
        (measured.makespan, "-", say(en="end, measured", fr="fin mesurée")),
    ):
        upper.axvline(1e3 * end, color="#000000", linestyle=style, linewidth=1.4, label=name)
    upper.set_xlabel("")
    upper.set_title(scene.subtitle, loc="left", fontsize=10)
    lateness = (measured.ends - measured.start) - (predicted.ends - predicted.start)
    for rank in range(min(ranks, MOST_LINES)):
        color, dashes, marker = LINE_STYLES[rank % len(LINE_STYLES)]
        part = predicted.of_rank(rank)
        lower.plot(
            1e3 * (measured.ends[part] - measured.start),
            1e3 * lateness[part],
            color=color,
            linestyle=dashes,
            marker=marker,
            markersize=3,
            linewidth=1.2,
            label=say(en=f"rank {rank}", fr=f"rang {rank}"),
        )
    lower.axhline(0, color="#333333", linewidth=0.8)
    lower.set_xlabel(say(en="time, ms", fr="temps (ms)"))
    lower.set_ylabel(say(en="measured − predicted\nend of action, ms", fr="fin d’action, ms\nmesurée − prédite"))
    lower.set_title(
        say(en="Where they part: how late each action ends", fr="Où elles s’écartent : retard de chaque fin d’action"),
        loc="left",
        fontsize=10,
    )
    plain(lower)
    decimal_marks(lower.xaxis, lower.yaxis)
    lower.legend(loc="best", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(scene.title + mark, x=0.01, ha="left", fontsize=12)
    figure.legend(
        handles=[*legend_of(scene), *upper.get_legend_handles_labels()[0]],
        loc="outside lower left",
        ncols=6,
        frameon=False,
        fontsize=8.5,
    )
    return finish(figure, path)


def overlay_scene(predicted: Timeline, measured: Timeline, *, color_by: str = "kind") -> Scene:
    """Both timelines as one scene with two rows per rank, the measured one below; times in milliseconds.

    Raises:
        LabError: if the two are not of the same orders.
    """
    if predicted.schedule.orders != measured.schedule.orders:
        raise LabError(
            say(
                en=f"the simulation is of {predicted.schedule.name}, but what was measured is of "
                f"{measured.schedule.name} or of another size: simulate the schedule that was executed.",
                fr=f"la simulation est celle de {predicted.schedule.name}, mais la mesure est celle de "
                f"{measured.schedule.name} ou d’une autre taille : simulez l’ordonnancement exécuté.",
            )
        )
    above, below = (
        scene_of(timeline, color_by=color_by, memory=False, seconds=True) for timeline in (predicted, measured)
    )
    rows = tuple(
        f"{name} {what}"
        for name in above.rows
        for what in (say(en="predicted", fr="prédit"), say(en="measured", fr="mesuré"))
    )
    bars = [bar._replace(row=2 * bar.row + lower) for lower, scene in enumerate((above, below)) for bar in scene.bars]
    title = f"{title_of(predicted.schedule)}. {step_sentence(predicted, measured)}"
    return replace(
        above,
        title=title,
        subtitle=bubble_sentence(predicted, measured),
        alt=f"{title}. {bubble_sentence(predicted, measured)}.",
        rows=rows,
        width=max(above.width, below.width),
        time_label=say(en="time, ms", fr="temps (ms)"),
        lanes=Lanes((0.1, 0.8), None, None),
        bars=tuple(bars),
    )


def step_sentence(predicted: Timeline, measured: Timeline) -> str:
    """The length of a step, predicted and measured, and the difference."""
    part = measured.makespan / predicted.makespan - 1 if predicted.makespan else 0.0
    return say(
        en=f"Step: predicted {amount(predicted.makespan, True)}, measured {amount(measured.makespan, True)} "
        f"({share(part, signed=True)})",
        fr=f"Pas : prédit {amount(predicted.makespan, True)}, mesuré {amount(measured.makespan, True)} "
        f"({share(part, signed=True)})",
    )


def bubble_sentence(predicted: Timeline, measured: Timeline) -> str:
    """The bubble, predicted and measured, as fraction and as overhead."""
    fractions = [share(timeline.bubble_fraction) for timeline in (predicted, measured)]
    overheads = [share(timeline.bubble_overhead) for timeline in (predicted, measured)]
    return say(
        en=f"bubble fraction: predicted {fractions[0]}, measured {fractions[1]}; bubble overhead: predicted "
        f"{overheads[0]}, measured {overheads[1]}",
        fr=f"fraction de bulle : prédite {fractions[0]}, mesurée {fractions[1]} ; surcoût de bulle : prédit "
        f"{overheads[0]}, mesuré {overheads[1]}",
    )
