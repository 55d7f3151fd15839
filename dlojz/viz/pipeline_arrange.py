"""A timeline arranged for drawing: every bar's place, label and look, memory steps, version strips, bounds.

Layer 4. Invariant: nothing is computed that `dlojz.pipeline` has not computed; times are counted from the first start,
in milliseconds where they are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dlojz.pipeline.memory import memory_curves
from dlojz.pipeline.text_table import labels_of
from dlojz.pipeline.timeline import Timeline
from dlojz.schema import LabError, one_of
from dlojz.text import say
from dlojz.viz.palette import OTHER, SCHEDULE_STYLES, SERIES, Style, action_label
from dlojz.viz.pipeline_scene import Band, Bar, Lanes, Mark, Scene, Steps
from dlojz.viz.pipeline_words import amount, figures_sentence, in_seconds, title_of

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
        told = {"micro_batch": action.micro_batch, "chunk": chunks[number], "version": 0, "kind": 0}
        version = versions[number] if versions else None
        told["version"] = version or 0
        if color_by != "kind":
            style = Style(SERIES[told[color_by] % len(SERIES)], style.hatch)
        short = "+".join(str(part.micro_batch) for part in action.parts or (action,))
        bars.append(Bar(number, rank_of[number], starts[number], ends[number], labels[number], short, style))
    curves = _memory(timeline, scale) if memory else ()
    strip = _strip(bars, versions)
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
        raise LabError(
            say(
                en="color_by 'version' is for asynchronous schedules, whose weights change under way: choose kind, "
                "micro_batch or chunk.",
                fr="color_by « version » est pour les ordonnancements asynchrones, dont les poids changent en cours de "
                "route : choisissez kind, micro_batch ou chunk.",
            )
        )
    count = len(timeline.schedule.actions)
    if count > MAX_BARS:
        raise LabError(
            say(
                en=f"{count} actions could not be told apart in a drawing: draw at most {MAX_BARS}, with fewer "
                "micro-batches.",
                fr=f"{count} actions ne se distingueraient pas sur un dessin : dessinez-en au plus {MAX_BARS}, avec "
                "moins de micro-batches.",
            )
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


def _memory(timeline: Timeline, scale: float) -> tuple[Steps, ...]:
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


def _strip(bars: Sequence[Bar], versions: Sequence[int | None]) -> tuple[Band, ...]:
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


def _marks(lower_bound: float | None, optimum: float | None, scale: float, inside: bool) -> tuple[Mark, ...]:
    names: tuple[tuple[float | None, str, Literal[":", "--"]], ...] = (
        (lower_bound, say(en="lower bound", fr="borne inférieure"), ":"),
        (optimum, say(en="optimum", fr="optimum"), "--"),
    )
    return tuple(
        Mark(time * scale, f"{name} {amount(time, inside)}", dashes) for time, name, dashes in names if time is not None
    )


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
    legend = [(Style("#FFFFFF", SCHEDULE_STYLES[kind].hatch), _kind_words(kind)) for kind in kinds]
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
