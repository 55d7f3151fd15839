"""A schedule drawn: what each rank does when, what it keeps meanwhile, what its length hangs on; one, or two compared.

Layer 4. Invariant: figures under one another share one time axis, so that what is longer looks longer; a simulated and
a measured timeline of the same schedule are drawn by the same code.
"""

from __future__ import annotations

from pathlib import Path

from dlojz.pipeline.timeline import Timeline
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure
from dlojz.viz.pipeline_arrange import scene_of
from dlojz.viz.pipeline_draw import draw_scene, legend_of
from dlojz.viz.pipeline_facts import facts_of
from dlojz.viz.pipeline_scene import Scene
from dlojz.viz.pipeline_words import amount, in_seconds, share, unit_words

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
        path: picture to write (.png, .svg, .pdf), if any.
        color_by: what colours say: kind, micro_batch, chunk or version; hatches always say the kind.
        memory: draw the activations that each rank keeps, in stage-micro-batches.
        memory_limit: drawn as a line across them.
        critical: frame the critical path.
        idle: shade idle time by its cause.
        bounds: draw the lower bound, and the optimum where it is known.
        seconds: whether times are seconds; by default those of a measured timeline.

    Raises:
        LabError: for another `color_by`, too many actions to draw, or a picture that cannot be written.
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
    scenes = [
        scene_of(
            timeline,
            color_by=color_by,
            memory=memory,
            memory_limit=memory_limit,
            seconds=seconds,
            **facts_of(timeline, critical=critical, idle=False, bounds=False),
        )
        for timeline in (first, second)
    ]
    inside = in_seconds(first, seconds)
    longer = second.makespan - first.makespan
    difference = amount(abs(longer), inside) + unit_words(inside)
    relative = share(longer / first.makespan if first.makespan else 0.0, signed=True)
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
        panel.set_title(name, loc="left", fontsize=10)
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
