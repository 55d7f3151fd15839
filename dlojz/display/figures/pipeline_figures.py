"""Figures of pipeline schedules: what each rank does when, what it keeps meanwhile, what its length hangs on.

A timeline, simulated or measured, becomes a scene, which matplotlib draws here and the panel as SVG. All bars of a
panel are one collection, so that thousands of actions draw as fast as ten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal, say, spaced_percent
from dlojz.display.canvas import LabFigure, caption, decimal_marks, finish, key, new_figure, plain
from dlojz.display.pipeline_scene import (
    Band,
    Bar,
    BoundMark,
    Lanes,
    Scene,
    Steps,
    amount,
    facts_of,
    figures_sentence,
    framed,
    in_seconds,
    readable,
    title_of,
    unit_words,
)
from dlojz.display.style import (
    BASELINE,
    BLACK,
    FRAME,
    IDLE_STYLES,
    OTHER,
    QUIET,
    RULE,
    SCHEDULE_STYLES,
    SERIES,
    SHADOW,
    VERMILION,
    WHITE,
    Style,
    action_label,
)
from dlojz.pipeline.analysis import title_of as analysis_title_of
from dlojz.pipeline.exchange_formats import labels_of
from dlojz.pipeline.simulator import Timeline, memory_curves

COLOURS = ("kind", "micro_batch", "chunk", "version")
MAX_BARS = 20_000
"""More actions than these are not told apart on any screen."""


def scene_of(  # noqa: PLR0913 - each is one more thing that can be drawn
    timeline: Timeline,
    *,
    color_by: str = "kind",
    memory: bool = True,
    memory_limit: float | None = None,
    critical: Sequence[int] = (),
    idle: Sequence[Band] = (),
    versions: Sequence[int | None] = (),
    lower_bound: float | None = None,
    optimum: float | None = None,
    seconds: bool | None = None,
) -> Scene:
    """Arrange a timeline for drawing.

    Args:
        timeline: simulated or measured.
        color_by: what the colour of a bar says: kind, micro_batch, chunk or version.
        memory: whether each rank's activations are drawn under its bars.
        memory_limit: drawn as a line, in stage-micro-batches.
        critical: numbers of the actions of the critical path, in order.
        idle: stretches of idle time with their causes, in the timeline's own times.
        versions: weight version of each action, for asynchronous schedules.
        lower_bound, optimum: makespans to compare with.
        seconds: whether the times are seconds; by default those of a measured timeline.

    Raises:
        LabError: for another `color_by`, versions where there are none, or too many actions to draw.
    """
    _check(timeline, color_by, versions)
    schedule, inside = timeline.schedule, in_seconds(timeline, seconds)
    scale = 1e3 if inside else 1.0
    starts = ((timeline.starts - timeline.start) * scale).tolist()
    ends = ((timeline.ends - timeline.start) * scale).tolist()
    labels = labels_of(schedule)
    chunks = _chunks(timeline)
    rank_of = [rank for rank, order in enumerate(schedule.orders) for _ in order]
    bars = []
    for number, action in enumerate(schedule.actions):
        style = SCHEDULE_STYLES.get(action.kind, OTHER)
        if color_by != "kind":
            version = (versions[number] if versions else None) or 0
            series = {"micro_batch": action.micro_batch, "chunk": chunks[number], "version": version}[color_by]
            style = Style(SERIES[series % len(SERIES)], style.hatch)
        short = "+".join(str(part.micro_batch) for part in action.parts or (action,))
        bars.append(Bar(number, rank_of[number], starts[number], ends[number], labels[number], short, style))
    curves = _arrange_memory(timeline, scale) if memory else ()
    strip = _arrange_strip(bars, versions)
    marks = _marks(lower_bound, optimum, scale, inside)
    width = max([timeline.makespan * scale, *(mark.time for mark in marks)])
    sentence = figures_sentence(timeline, seconds)
    return Scene(
        title=title_of(schedule),
        subtitle=sentence,
        alt=f"{title_of(schedule)}. {sentence}.",
        rows=tuple(say(en=f"rank {rank}", fr=f"rang {rank}") for rank in range(schedule.ranks)),
        width=width or 1.0,
        time_label=_time_label(timeline, inside),
        lanes=_lanes(bool(curves), bool(strip)),
        bars=tuple(bars),
        critical=tuple(critical),
        idle=tuple(
            band._replace(start=(band.start - timeline.start) * scale, end=(band.end - timeline.start) * scale)
            for band in idle
        ),
        strip=strip,
        memory=curves,
        memory_top=max([curve.peak for curve in curves] + [memory_limit or 0.0, 1.0]),
        memory_limit=memory_limit if memory else None,
        marks=marks,
        legend=_legend(timeline, color_by, chunks),
        actions=schedule.actions,
        versions=tuple(versions),
    )


def _check(timeline: Timeline, color_by: str, versions: Sequence[int | None]) -> None:
    if color_by not in COLOURS:
        raise LabError(one_of("color_by", color_by, COLOURS))
    if color_by == "version" and not versions:
        raise refusal(
            en="color_by 'version' is for asynchronous schedules, whose weights change under way: choose kind, "
            "micro_batch or chunk.",
            fr="color_by « version » est pour les ordonnancements asynchrones, dont les poids changent en cours de "
            "route : choisissez kind, micro_batch ou chunk.",
        )
    count = len(timeline.schedule.actions)
    if count > MAX_BARS:
        raise refusal(
            en=f"{count} actions could not be told apart in a drawing: draw at most {MAX_BARS}, with fewer "
            "micro-batches.",
            fr=f"{count} actions ne se distingueraient pas sur un dessin : dessinez-en au plus {MAX_BARS}, avec "
            "moins de micro-batches.",
        )


def _chunks(timeline: Timeline) -> list[int]:
    """Which of its rank's stages each action belongs to, counted over both directions."""
    schedule = timeline.schedule
    seen: dict[int, int] = {}
    chunk: dict[tuple[int, int], int] = {}
    for pipe, stages in enumerate(schedule.placement):
        for stage, rank in enumerate(stages):
            chunk[pipe, stage] = seen.get(rank, 0)
            seen[rank] = chunk[pipe, stage] + 1
    return [chunk[action.pipe, action.stage] for action in schedule.actions]


def _arrange_memory(timeline: Timeline, scale: float) -> tuple[Steps, ...]:
    """The corners of each rank's curve, from zero to the end."""
    steps = []
    for curve in memory_curves(timeline):
        times, units = [0.0], [0.0]
        for time, unit in zip(curve.times.tolist(), curve.units.tolist(), strict=True):
            moment = (time - timeline.start) * scale
            times += [moment, moment]
            units += [units[-1], unit]
        times.append(timeline.makespan * scale)
        units.append(units[-1])
        steps.append(Steps(times, units, curve.peak))
    return tuple(steps)


def _arrange_strip(bars: Sequence[Bar], versions: Sequence[int | None]) -> tuple[Band, ...]:
    """Stretches in which a rank uses one weight version, joined over neighbouring actions."""
    strip: list[Band] = []
    for bar, version in zip(bars, versions, strict=False):
        if version is None or bar.end <= bar.start:
            continue
        last = strip[-1] if strip else None
        if last and (last.row, last.name) == (bar.row, str(version)):
            strip[-1] = last._replace(end=bar.end)
        else:
            strip.append(Band(bar.row, bar.start, bar.end, str(version)))
    return tuple(strip)


def _marks(lower_bound: float | None, optimum: float | None, scale: float, inside: bool) -> tuple[BoundMark, ...]:
    marks = []
    if lower_bound is not None:
        name = say(en="lower bound", fr="borne inférieure")
        marks.append(BoundMark(lower_bound * scale, f"{name} {amount(lower_bound, inside)}", ":"))
    if optimum is not None:
        marks.append(BoundMark(optimum * scale, f"optimum {amount(optimum, inside)}", "--"))
    return tuple(marks)


def _lanes(memory: bool, strip: bool) -> Lanes:
    if memory and strip:
        return Lanes((0.04, 0.42), (0.48, 0.13), (0.64, 0.30))
    if memory:
        return Lanes((0.04, 0.50), None, (0.59, 0.35))
    if strip:
        return Lanes((0.06, 0.66), (0.75, 0.18), None)
    return Lanes((0.08, 0.84), None, None)


def _time_label(timeline: Timeline, inside: bool) -> str:
    how = say(en="measured", fr="mesuré") if timeline.origin == "measured" else say(en="simulated", fr="simulé")
    if inside:
        return say(en=f"time, ms ({how})", fr=f"temps (ms, {how})")
    return say(en=f"time, in time units ({how})", fr=f"temps (unités de temps, {how})")


def _legend(timeline: Timeline, color_by: str, chunks: Sequence[int]) -> tuple[tuple[Style, str], ...]:
    """What the hatches say, and beside them what the colours say where that is something else."""
    present = {action.kind for action in timeline.schedule.actions}
    kinds = [kind for kind in SCHEDULE_STYLES if kind in present]
    if color_by == "kind":
        return tuple((SCHEDULE_STYLES[kind], _kind_words(kind)) for kind in kinds)
    legend = [(Style(WHITE, SCHEDULE_STYLES[kind].hatch), _kind_words(kind)) for kind in kinds]
    if color_by == "chunk":
        for chunk in sorted(set(chunks)):
            name = say(en=f"stage {'abcdefgh'[chunk % 8]} of its rank", fr=f"étage {'abcdefgh'[chunk % 8]} de son rang")
            legend.append((Style(SERIES[chunk % len(SERIES)], ""), name))
    else:
        what = {
            "micro_batch": say(en="colour: micro-batch (number in the bar)", fr="couleur : micro-batch (numéro)"),
            "version": say(en="colour: weight version (in the strip)", fr="couleur : version des poids (bandeau)"),
        }[color_by]
        legend.append((Style(SERIES[0], ""), what))
    return tuple(legend)


def _kind_words(kind: str) -> str:
    return say(en=f"{kind}: {action_label(kind)}", fr=f"{kind} : {action_label(kind)}")


EDGE, MEMORY, LIMIT, CRITICAL = QUIET, BASELINE, VERMILION, BLACK
FONT_PT = 7.0
LETTER = 0.62
"""Width of a letter, in parts of its height."""


def draw_scene(axes: Axes, scene: Scene, width_in: float, row_in: float) -> None:
    """Draw a scene into axes.

    Args:
        axes: empty axes; rows go from rank 0 at the top down.
        scene: what to draw.
        width_in, row_in: inches of the time axis and of one row, which tell what can be read.
    """
    _idle(axes, scene)
    _bars(axes, scene)
    _texts(axes, scene, width_in, row_in)
    _draw_strip(axes, scene, width_in)
    _draw_memory(axes, scene)
    _critical(axes, scene)
    for mark in scene.marks:
        axes.axvline(mark.time, color=CRITICAL, linestyle=mark.dashes, linewidth=1.4, zorder=5)
    middle = scene.lanes.bars[0] + scene.lanes.bars[1] / 2
    axes.set_yticks([row + middle for row in range(len(scene.rows))], scene.rows)
    axes.set(xlim=(0, scene.width * 1.002), ylim=(len(scene.rows), 0))
    caption(axes, x=scene.time_label)
    plain(axes, "x")
    decimal_marks(axes.xaxis)
    axes.hlines(range(1, len(scene.rows)), 0, scene.width, color=RULE, linewidth=0.6, zorder=0)


def legend_of(scene: Scene) -> list[Artist]:
    """Make the entries of a drawing's legend."""
    handles: list[Artist] = [
        Patch(facecolor=style.color, hatch=style.hatch * 2, edgecolor=EDGE, linewidth=0.5, label=label)
        for style, label in scene.legend
    ]
    for cause in IDLE_STYLES:
        if any(band.name == cause for band in scene.idle):
            style = IDLE_STYLES[cause]
            label = say(en="idle: ", fr="inactif : ") + analysis_title_of(cause)
            handles.append(Patch(facecolor=style.color, hatch=style.hatch, edgecolor=FRAME, label=label))
    if scene.critical:
        handles.append(key(say(en="critical path", fr="chemin critique"), color=CRITICAL, linewidth=2.2))
    if scene.memory:
        label = say(en="activations kept (peak at the right)", fr="activations gardées (pic à droite)")
        handles.append(Patch(facecolor=MEMORY, alpha=0.45, label=label))
    if scene.memory_limit is not None:
        label = say(en=f"memory limit {amount(scene.memory_limit)}", fr=f"limite mémoire {amount(scene.memory_limit)}")
        handles.append(key(label, color=LIMIT, linestyle="--", linewidth=1.2))
    if scene.strip:
        label = say(en="strip: weight version used", fr="bandeau : version des poids utilisée")
        handles.append(Patch(facecolor=SERIES[1], edgecolor=EDGE, linewidth=0.5, label=label))
    handles += [key(mark.words, color=CRITICAL, linestyle=mark.dashes, linewidth=1.4) for mark in scene.marks]
    return handles


def boxes(places: Iterable[Bar | Band], lane: tuple[float, float]) -> list[NDArray[np.float64]]:
    """Compute the corners of bars or bands within a lane, as a collection takes them."""
    rows = np.array([(place.row, place.start, place.end) for place in places], float).reshape(-1, 3)
    top = rows[:, 0] + lane[0]
    bottom = top + lane[1]
    corners = [(rows[:, 1], top), (rows[:, 2], top), (rows[:, 2], bottom), (rows[:, 1], bottom)]
    return list(np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1))


def _fill(axes: Axes, corners: Sequence[NDArray[np.float64]], **look: Any) -> None:
    axes.add_collection(PolyCollection(corners, **look), autolim=False)


def _bars(axes: Axes, scene: Scene) -> None:
    corners = boxes(scene.bars, scene.lanes.bars)
    colors = [bar.style.color for bar in scene.bars]
    _fill(axes, corners, facecolors=colors, edgecolors=EDGE, linewidths=0.5, zorder=2)
    for hatch in sorted({bar.style.hatch for bar in scene.bars} - {""}):
        chosen = [corners[number] for number, bar in enumerate(scene.bars) if bar.style.hatch == hatch]
        _fill(axes, chosen, facecolors="none", edgecolors=SHADOW, linewidths=0, hatch=hatch, zorder=2.1)


def _texts(axes: Axes, scene: Scene, width_in: float, row_in: float) -> None:
    """What a bar is, while it can be read."""
    top, height = scene.lanes.bars
    if row_in * height * 72 < FONT_PT:
        return
    for bar, text in readable(scene, width_in * 72 / (FONT_PT * LETTER)):
        middle = ((bar.start + bar.end) / 2, bar.row + top + height / 2)
        drawn = axes.text(*middle, text, ha="center", va="center_baseline", fontsize=FONT_PT, zorder=4)
        drawn.set_in_layout(False)  # it lies within its bar: hundreds of texts need not be measured to place the axes
        if bar.style.hatch:  # which would strike the letters through
            drawn.set_path_effects([withStroke(linewidth=2.2, foreground=bar.style.color)])


def _draw_strip(axes: Axes, scene: Scene, width_in: float) -> None:
    if not scene.strip or not scene.lanes.strip:
        return
    lane = scene.lanes.strip
    colors = [SERIES[int(band.name) % len(SERIES)] for band in scene.strip]
    _fill(axes, boxes(scene.strip, lane), facecolors=colors, edgecolors=EDGE, linewidths=0.4, zorder=2)
    letters_per_unit = width_in * 72 / (6 * LETTER) / scene.width
    for band in scene.strip:
        if (band.end - band.start) * letters_per_unit >= len(band.name) + 0.3:
            middle = ((band.start + band.end) / 2, band.row + lane[0] + lane[1] / 2)
            drawn = axes.text(*middle, band.name, ha="center", va="center_baseline", fontsize=6, zorder=4)
            drawn.set_in_layout(False)


def _draw_memory(axes: Axes, scene: Scene) -> None:
    if not scene.memory or not scene.lanes.memory:
        return
    top, height = scene.lanes.memory
    polygons, limits = [], []
    for rank, steps in enumerate(scene.memory):
        base = rank + top + height
        y = base - height * np.array([0.0, *steps.units, 0.0]) / scene.memory_top
        polygons.append(np.column_stack([[0.0, *steps.times, steps.times[-1]], y]))
        if scene.memory_limit is not None:
            level = base - height * scene.memory_limit / scene.memory_top
            limits.append([(0.0, level), (scene.width, level)])
        over = scene.memory_limit is not None and steps.peak > scene.memory_limit + 1e-9
        look: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8}
        axes.text(1.004, base - height / 2, amount(steps.peak), color=LIMIT if over else MEMORY, **look)
    _fill(axes, polygons, facecolors=MEMORY, alpha=0.45, edgecolors=MEMORY, linewidths=0.6, zorder=2)
    lines = LineCollection(limits, colors=LIMIT, linestyles="--", linewidths=1.2, zorder=3)
    axes.add_collection(lines, autolim=False)


def _critical(axes: Axes, scene: Scene) -> None:
    """Frames around the actions of the path, and lines where it goes to another rank."""
    frames = framed(scene)
    if not frames:
        return
    lane = scene.lanes.bars
    _fill(axes, boxes(frames, lane), facecolors="none", edgecolors=CRITICAL, linewidths=2.0, zorder=3)
    lines = LineCollection(path_lines(frames, lane), colors=CRITICAL, linewidths=2.0, zorder=3)
    axes.add_collection(lines, autolim=False)


def path_lines(frames: Sequence[Band], lane: tuple[float, float]) -> list[list[tuple[float, float]]]:
    """Compute the lines of the critical path from the end of one frame to the start of the next."""
    middle = lane[0] + lane[1] / 2
    return [
        [(before.end, before.row + middle), (after.start, after.row + middle)] for before, after in pairwise(frames)
    ]


def _idle(axes: Axes, scene: Scene) -> None:
    for cause in sorted({band.name for band in scene.idle}):
        style = IDLE_STYLES.get(cause, OTHER)
        places = [band for band in scene.idle if band.name == cause]
        look: dict[str, Any] = {"facecolors": style.color, "edgecolors": FRAME, "hatch": style.hatch}
        _fill(axes, boxes(places, scene.lanes.bars), linewidths=0, zorder=1, **look)


WIDTH_IN = 12.0
_MARGINS_IN = 1.2
"""Of the width: names of ranks at the left, peaks at the right."""


def schedule_figure(  # noqa: PLR0913 - each is one more thing that can be drawn
    timeline: Timeline,
    path: str | Path | None = None,
    *,
    color_by: str = "kind",
    memory: bool = True,
    memory_limit: float | None = None,
    critical: bool = True,
    idle: bool = False,
    bounds: bool = True,
    seconds: bool | None = None,
) -> LabFigure:
    """Draw one timeline: bars, memory of each rank, weight versions where they differ.

    Args:
        timeline: simulated or measured.
        color_by: what colours say: kind, micro_batch, chunk or version; hatches always say the kind.
        memory: draw the activations that each rank keeps, in stage-micro-batches.
        memory_limit: drawn as a line across them.
        critical: frame the critical path.
        idle: shade idle time by its cause.
        bounds: draw the lower bound, and the optimum where it is known.
        seconds: whether times are seconds; by default those of a measured timeline.

    Raises:
        LabError: for another `color_by`, or too many actions to draw.
    """
    facts = facts_of(timeline, critical=critical, idle=idle, bounds=bounds, memory_limit=memory_limit)
    scene = scene_of(timeline, color_by=color_by, memory=memory, memory_limit=memory_limit, seconds=seconds, **facts)
    return finish(_stacked([scene], scene.title, [scene.subtitle], scene.alt), path)


def compare_figure(
    first: Timeline,
    second: Timeline,
    path: str | Path | None = None,
    *,
    color_by: str = "kind",
    memory: bool = True,
    memory_limit: float | None = None,
    critical: bool = False,
    seconds: bool | None = None,
) -> LabFigure:
    """Draw two schedules under one another on one time axis, with the difference of their makespans.

    Args:
        first, second: timelines with times of the same unit.
        path, color_by, memory, memory_limit, critical, seconds: as in `schedule_figure`.
    """
    scenes = []
    for timeline in (first, second):
        facts = facts_of(timeline, critical=critical, bounds=False)
        look: dict[str, Any] = {"color_by": color_by, "memory": memory, "memory_limit": memory_limit}
        scenes.append(scene_of(timeline, seconds=seconds, **look, **facts))
    inside = in_seconds(first, seconds)
    longer = second.makespan - first.makespan
    difference = amount(abs(longer), inside) + unit_words(inside)
    relative = spaced_percent(longer / first.makespan if first.makespan else 0.0, signed=True)
    title = say(
        en=f"{second.schedule.name} takes {difference} {'more' if longer >= 0 else 'less'} than "
        f"{first.schedule.name} ({relative})",
        fr=f"{first.schedule.name} → {second.schedule.name} : {difference} de "
        f"{'plus' if longer >= 0 else 'moins'} ({relative})",
    )
    if abs(longer) <= 1e-9 * max(first.makespan, second.makespan):
        title = say(
            en=f"{first.schedule.name} and {second.schedule.name} take the same time",
            fr=f"{first.schedule.name} et {second.schedule.name} durent aussi longtemps",
        )
    names = [f"{'AB'[number]}. {scene.title}\n{scene.subtitle}" for number, scene in enumerate(scenes)]
    return finish(_stacked(scenes, title, names, f"{title}. {scenes[0].alt} {scenes[1].alt}"), path)


def _stacked(scenes: list[Scene], title: str, names: list[str], alt: str) -> LabFigure:
    """Panels one above the other, the same time axis, one legend below."""
    row_in = _row_in(scenes)
    rows = sum(len(scene.rows) for scene in scenes)
    figure = new_figure(WIDTH_IN, rows * row_in + 0.75 * len(scenes) + 1.0, alt=alt)
    panels = figure.subplots(len(scenes), 1, sharex=True, squeeze=False, height_ratios=[len(s.rows) for s in scenes])
    width = max(scene.width for scene in scenes)
    for panel, scene, name in zip(panels[:, 0], scenes, names, strict=True):
        shown = (WIDTH_IN - _MARGINS_IN) * scene.width / width
        draw_scene(panel, scene, shown, row_in)
        caption(panel, title=name)
        panel.set_xlim(0, width * 1.002)
        if panel is not panels[-1, 0]:
            panel.set_xlabel("")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    handles = {handle.get_label(): handle for scene in scenes for handle in legend_of(scene)}
    figure.legend(handles=list(handles.values()), loc="outside lower left", ncols=5, frameon=False, fontsize=8.5)
    return figure


def _row_in(scenes: list[Scene]) -> float:
    """Inches of a rank's row: enough for text in few rows, less in many."""
    rows = sum(len(scene.rows) for scene in scenes)
    wanted = 0.62 if scenes[0].lanes.memory else 0.42
    return max(min(wanted, 9.0 / rows), 0.12)
