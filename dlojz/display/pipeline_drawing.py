"""Drawings of pipeline schedules: what each rank does when, what it keeps meanwhile; their sentences.

A timeline, simulated or measured, becomes a scene, and scenes become the drawing that the figure and the panel show. A
bar's hatch is its kind, whatever its colour says.
Makespan and span, bubble fraction and overhead are never called by another's name; a simulated time is in time units
unless its costs were seconds, a measured one is in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from dlojz.base.errors import LabError
from dlojz.base.language import format_seconds, one_of, say, significant, spaced_percent
from dlojz.base.table import visible
from dlojz.display.drawing import LETTER, Box, Dashes, Drawing, Line, Shape, Stroke, Words, legend_of
from dlojz.display.style import (
    BASELINE,
    BLACK,
    IDLE_STYLES,
    MIST,
    OTHER,
    QUIET,
    RULE,
    SCHEDULE_STYLES,
    SERIES,
    SMALL,
    VERMILION,
    WHITE,
    Style,
    action_label,
    legible,
)
from dlojz.display.tables import phrase
from dlojz.pipeline.analysis import critical_path, gaps, lower_bound
from dlojz.pipeline.analysis import title_of as cause_title
from dlojz.pipeline.exchange_formats import labels_of
from dlojz.pipeline.orders.asynchronous import version_audit
from dlojz.pipeline.schedule import KINDS, Action, Schedule
from dlojz.pipeline.shortest_schedule import optimum
from dlojz.pipeline.simulator import UNIT_COSTS, Timeline, memory_curves

if TYPE_CHECKING:
    from dlojz.display.canvas import LabFigure

MOST_TEXTS = 1500
"""Texts are drawn one by one; beyond these they cost more than they tell."""


class Bar(NamedTuple):
    """Action: where it lies, what is written in it, how it looks, and what a pointer over it is told."""

    row: int
    start: float
    end: float
    label: str
    short: str
    style: Style
    tip: str


class Steps(NamedTuple):
    """Memory of a rank: corners of its curve, and its peak."""

    times: list[float]
    units: list[float]
    peak: float


class Band(NamedTuple):
    """Stretch of one rank's time with a name: a cause of idleness, or a weight version."""

    row: int
    start: float
    end: float
    name: str


class BoundMark(NamedTuple):
    """Moment of a bound, for all ranks."""

    time: float
    words: str
    dashes: Dashes


class Lanes(NamedTuple):
    """Lanes of a rank of height 1, from its top: bars, version strip, memory; (top, height) each."""

    bars: tuple[float, float]
    strip: tuple[float, float] | None
    memory: tuple[float, float] | None


@dataclass(frozen=True)
class Scene:
    """Drawing without its medium.

    Attributes:
        title, subtitle, alt: texts, in the reader's language.
        rows: name of each row, from the top; one per rank, or two where a measured one lies below.
        width: length of the time axis, at least the makespan, in the unit of `time_label`.
        time_label: the axis, with its unit.
        lanes: of a row.
        bars, critical, idle, strip, memory, marks: what is drawn; `critical` are positions in `bars`.
        memory_top: the value at the top of a memory lane; `memory_limit` is drawn as a line if there is one.
        legend: what looks how.
    """

    title: str
    subtitle: str
    alt: str
    rows: tuple[str, ...]
    width: float
    time_label: str
    lanes: Lanes
    bars: tuple[Bar, ...]
    critical: tuple[int, ...]
    idle: tuple[Band, ...]
    strip: tuple[Band, ...]
    memory: tuple[Steps, ...]
    memory_top: float
    memory_limit: float | None
    marks: tuple[BoundMark, ...]
    legend: tuple[tuple[Style, str], ...]


def readable(scene: Scene, letters: float) -> list[tuple[Bar, str]]:
    """Choose what is written into the bars: labels, or micro-batches alone, or nothing.

    Args:
        letters: how many fit into the whole time axis.
    """
    if not scene.bars or len(scene.bars) > MOST_TEXTS:
        return []
    per_unit = letters / scene.width
    written = []
    for bar in scene.bars:
        # In letters; 0.3 of one stays free.
        room = (bar.end - bar.start) * per_unit
        text = next((text for text in (bar.label, bar.short) if text and len(text) + 0.3 <= room), "")
        if text:
            written.append((bar, text))
    return written if len(written) * 2 > len(scene.bars) else []  # a few numbers here and there only confuse


def framed(scene: Scene) -> list[Band]:
    """Frame the critical path: neighbouring actions of a rank share a frame, in order of time."""
    frames: list[Band] = []
    for bar in (scene.bars[number] for number in scene.critical):
        previous = frames[-1] if frames else None
        # Neighbours up to rounding: the next action begins where the last one ended.
        if previous and previous.row == bar.row and bar.start - previous.end <= 1e-9 * scene.width:
            frames[-1] = previous._replace(end=bar.end)
        else:
            frames.append(Band(bar.row, bar.start, bar.end, ""))
    return frames


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
    # Seconds are drawn as milliseconds.
    scale = 1e3 if inside else 1.0
    starts = ((timeline.starts - timeline.start) * scale).tolist()
    ends = ((timeline.ends - timeline.start) * scale).tolist()
    labels = labels_of(schedule)
    chunks = _chunks(timeline)
    # `schedule.actions` go through the ranks' orders one after the other.
    rank_of = [rank for rank, order in enumerate(schedule.orders) for _ in order]
    bars, descriptions = [], action_words(schedule.actions)
    for number, action in enumerate(schedule.actions):
        version = versions[number] if versions else None
        style = SCHEDULE_STYLES.get(action.kind, OTHER)
        if color_by != "kind":
            series = {"micro_batch": action.micro_batch, "chunk": chunks[number], "version": version or 0}[color_by]
            style = Style(SERIES[series % len(SERIES)], style.hatch)
        # An action of two parts shows the micro-batches of both, such as 3+1.
        short = "+".join(str(part.micro_batch) for part in action.parts or (action,))
        begin, end = starts[number], ends[number]
        tip = f"{descriptions[number]}: {significant(begin, 4)} – {significant(end, 4)}"
        tip += "" if version is None else say(en=f", weight version {version}", fr=f", version des poids {version}")
        bars.append(Bar(rank_of[number], begin, end, labels[number], short, style, tip))
    curves = _arrange_memory(timeline, scale) if memory else ()
    strip = _arrange_strip(bars, versions)
    marks = _marks(lower_bound, optimum, scale, inside)
    # A bound beyond the makespan still lies on the axis.
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
        # At least 1, which keeps the scale finite where nothing is kept.
        memory_top=max([curve.peak for curve in curves] + [memory_limit or 0.0, 1.0]),
        memory_limit=memory_limit if memory else None,
        marks=marks,
        legend=_legend(timeline, color_by, chunks),
    )


def _check(timeline: Timeline, color_by: str, versions: Sequence[int | None]) -> None:
    if color_by not in COLOURS:
        raise LabError(one_of("color_by", color_by, COLOURS))
    if color_by == "version" and not versions:
        raise phrase.refused("colours of versions")
    count = len(timeline.schedule.actions)
    if count > MAX_BARS:
        raise phrase.refused("too many actions to draw", count=count, max_bars=MAX_BARS)


def _chunks(timeline: Timeline) -> list[int]:
    """Which of its rank's stages each action belongs to, counted over both directions."""
    schedule = timeline.schedule
    next_chunk: dict[int, int] = {}
    chunk: dict[tuple[int, int], int] = {}
    for pipe, stages in enumerate(schedule.placement):
        for stage, rank in enumerate(stages):
            chunk[pipe, stage] = next_chunk.get(rank, 0)
            next_chunk[rank] = chunk[pipe, stage] + 1
    return [chunk[action.pipe, action.stage] for action in schedule.actions]


def _arrange_memory(timeline: Timeline, scale: float) -> tuple[Steps, ...]:
    """The corners of each rank's curve, from zero to the end."""
    steps = []
    for curve in memory_curves(timeline):
        times, units = [0.0], [0.0]
        for time, unit in zip(curve.times.tolist(), curve.units.tolist(), strict=True):
            moment = (time - timeline.start) * scale
            # A step: the former amount up to this moment, the new one from it on.
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
        previous = strip[-1] if strip else None
        if previous and (previous.row, previous.name) == (bar.row, str(version)):
            strip[-1] = previous._replace(end=bar.end)
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
        return Lanes((0.04, 0.38), (0.46, 0.19), (0.69, 0.25))
    if memory:
        return Lanes((0.04, 0.50), None, (0.59, 0.35))
    if strip:
        return Lanes((0.06, 0.56), (0.66, 0.28), None)
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
        letters = ", ".join("abcdefgh"[chunk % 8] for chunk in sorted(set(chunks))[:8])
        stages = (Style(WHITE, ""), say(en=f"{letters}: stages of a rank", fr=f"{letters} : étages d’un rang"))
        written = (stages,) if len(set(chunks)) > 1 else ()
        return (*((SCHEDULE_STYLES[kind], _kind_words(kind)) for kind in kinds), *written)
    legend = [(Style(WHITE, SCHEDULE_STYLES[kind].hatch), _kind_words(kind)) for kind in kinds]
    if color_by == "chunk":
        for chunk in sorted(set(chunks)):
            name = say(en=f"stage {'abcdefgh'[chunk % 8]} of its rank", fr=f"étage {'abcdefgh'[chunk % 8]} de son rang")
            legend.append((Style(SERIES[chunk % len(SERIES)], ""), name))
    else:
        colour_meaning = {
            "micro_batch": say(en="colour: micro-batch (number in the bar)", fr="couleur : micro-batch (numéro)"),
            "version": say(en="colour: weight version (in the strip)", fr="couleur : version des poids (bandeau)"),
        }[color_by]
        legend.append((Style(SERIES[0], ""), colour_meaning))
    return tuple(legend)


def _kind_words(kind: str) -> str:
    return say(en=f"{kind}: {action_label(kind)}", fr=f"{kind} : {action_label(kind)}")


WIDTH_PT = 864.0
"""Of a drawing: 12 inches."""
LEFT_PT, RIGHT_PT = 92.0, 34.0
"""Names of ranks at the left, peaks at the right of the time axis."""
FONT_PT = legible(SMALL, WIDTH_PT)
TICKS = 10
LIMIT, CRITICAL = VERMILION, BLACK


def schedule_drawing(scenes: Sequence[Scene], title: str, captions: Sequence[str], alt: str) -> Drawing:
    """Draw scenes one above the other on one time axis, their legend below.

    Args:
        scenes: with times of the same unit.
        captions: one or several lines above each.
        alt: what is shown, in words.
    """
    width = max(scene.width for scene in scenes)
    # Points of the sheet per unit of time: one scale for all scenes.
    per_time = (WIDTH_PT - LEFT_PT - RIGHT_PT) / width
    # Enough for text in few rows, less in many.
    preferred_pt, rows = 45.0 if scenes[0].lanes.memory else 30.0, sum(len(scene.rows) for scene in scenes)
    # All rows together are 648 points (9 inches) high at most, but none is lower than 8.6.
    row_pt = max(min(preferred_pt, 648.0 / rows), 8.6)
    shapes: list[Shape] = [Words(6.0, 12.0, title, 12.0)]
    top = 30.0
    for scene, lines in zip(scenes, captions, strict=True):
        for line in lines.splitlines():
            shapes.append(Words(LEFT_PT, top, line, 10.0))
            top += 15.0
        shapes += _Sheet(scene, top - 5, per_time, row_pt).shapes()
        top += row_pt * len(scene.rows) + 24.0
    shapes.append(Words((LEFT_PT + WIDTH_PT - RIGHT_PT) / 2, top - 2, scenes[-1].time_label, 9.0, "middle"))
    entries = {label: style for scene in scenes for label, style in _entries(scene).items()}
    shapes += legend_of(entries, WIDTH_PT, top + 16)
    below = max(shape.y for shape in shapes if isinstance(shape, Words))
    return Drawing(WIDTH_PT, below + 12, alt, tuple(shapes))


def scene_drawing(scene: Scene, mark: str = "") -> Drawing:
    """Draw one scene under its own title; `mark` is what the title says besides."""
    return schedule_drawing([scene], scene.title + mark, [scene.subtitle], scene.alt)


class _Sheet:
    """Where a scene lies on its sheet: x from time, y from row and lane."""

    def __init__(self, scene: Scene, top: float, per_time: float, row_pt: float) -> None:
        self.scene, self.top, self.per_time, self.row_pt = scene, top, per_time, row_pt
        self.right, self.bottom = self.x(scene.width), self.y(len(scene.rows))

    def x(self, time: float) -> float:
        return LEFT_PT + time * self.per_time

    def y(self, rows: float) -> float:
        return self.top + rows * self.row_pt

    def box(
        self, band: Bar | Band, lane: tuple[float, float], style: Style, edge: str = "none", **properties: Any
    ) -> Box:
        length, height = (band.end - band.start) * self.per_time, lane[1] * self.row_pt
        return Box(self.x(band.start), self.y(band.row + lane[0]), length, height, *style, edge, **properties)

    def shapes(self) -> Iterator[Shape]:
        scene, lane = self.scene, self.scene.lanes.bars
        yield from self.frame()
        for band in scene.idle:
            yield self.box(band, lane, IDLE_STYLES.get(band.name, OTHER), tip=cause_title(band.name))
        yield from (self.box(bar, lane, bar.style, QUIET, tip=bar.tip) for bar in scene.bars)
        room = scene.width * self.per_time / (FONT_PT * LETTER)
        # Nothing is written into bars lower than a letter.
        for bar, text in readable(scene, room) if lane[1] * self.row_pt >= FONT_PT else ():
            # a hatch would strike the letters through
            yield self.inside(bar, lane, text, FONT_PT, bar.style.color if bar.style.hatch else "")
        if scene.lanes.strip:
            yield from self.strip(scene.lanes.strip)
        if scene.lanes.memory:
            yield from self.memory(scene.lanes.memory)
        frames, middle = framed(scene), lane[0] + lane[1] / 2
        yield from (self.box(frame, lane, Style("none", ""), CRITICAL, line=2.0) for frame in frames)
        # From the end of each frame to the start of the next: the critical path goes on there, on this rank or another.
        for before, after in pairwise(frames):
            ends = ((before.end, before.row), (after.start, after.row))
            yield Line([(self.x(time), self.y(row + middle)) for time, row in ends], CRITICAL, 2.0)
        for mark in scene.marks:
            x = self.x(mark.time)
            yield Line([(x, self.top), (x, self.bottom)], CRITICAL, 1.4, mark.dashes, tip=mark.words)

    def frame(self) -> Iterator[Shape]:
        """Names of the rows, and the time axis below them."""
        scene, step = self.scene, _round_step(self.scene.width / TICKS)
        middle = scene.lanes.bars[0] + scene.lanes.bars[1] / 2
        for row, name in enumerate(scene.rows):
            yield Words(LEFT_PT - 7, self.y(row + middle), name, 8.5, "end")
            if row:
                yield Line([(LEFT_PT, self.y(row)), (self.right, self.y(row))], RULE, 0.6)
        yield Line([(LEFT_PT, self.bottom), (self.right, self.bottom)], BASELINE, 0.8)
        for number in range(int(scene.width / step + 1e-9) + 1):
            x = self.x(number * step)
            yield Line([(x, self.top), (x, self.bottom + 3)], RULE, 0.6)
            yield Words(x, self.bottom + 10, amount(number * step), 8.5, "middle")

    def inside(self, band: Bar | Band, lane: tuple[float, float], text: str, size: float, halo: str = "") -> Words:
        middle = self.x((band.start + band.end) / 2), self.y(band.row + lane[0] + lane[1] / 2)
        return Words(*middle, text, size, "middle", halo=halo)

    def strip(self, lane: tuple[float, float]) -> Iterator[Shape]:
        for band in self.scene.strip:
            version = say(en=f"weight version {band.name}", fr=f"version des poids {band.name}")
            yield self.box(band, lane, Style(SERIES[int(band.name) % len(SERIES)], ""), QUIET, tip=version)
        for band in self.scene.strip if lane[1] * self.row_pt >= FONT_PT else ():
            if (band.end - band.start) * self.per_time >= FONT_PT * LETTER * (len(band.name) + 0.3):
                yield self.inside(band, lane, band.name, FONT_PT)

    def memory(self, lane: tuple[float, float]) -> Iterator[Shape]:
        scene, limit = self.scene, self.scene.memory_limit
        for row, steps in enumerate(scene.memory):
            base, high = self.y(row + lane[0] + lane[1]), lane[1] * self.row_pt / scene.memory_top
            points = zip(steps.times, steps.units, strict=True)
            corners = [(self.x(time), base - units * high) for time, units in points]
            # Closed along the base line: filled, it is the area under the curve.
            yield Line([(LEFT_PT, base), *corners, (corners[-1][0], base)], BASELINE, 0.6, color=MIST)
            over = limit is not None and steps.peak > limit + 1e-9
            peak = WIDTH_PT - RIGHT_PT + 4, base - lane[1] * self.row_pt / 2
            yield Words(*peak, amount(steps.peak), 8.0, color=LIMIT if over else BASELINE, bold=over)
            if limit is not None:
                yield Line([(LEFT_PT, base - limit * high), (self.right, base - limit * high)], LIMIT, 1.2, "--")


def _entries(scene: Scene) -> dict[str, Style | Stroke]:
    """The entries of a scene's legend."""
    entries: dict[str, Style | Stroke] = {label: style for style, label in scene.legend}
    causes = {band.name for band in scene.idle}
    idle = say(en="idle: ", fr="inactif : ")
    entries |= {idle + cause_title(cause): style for cause, style in IDLE_STYLES.items() if cause in causes}
    if scene.critical:
        entries[say(en="critical path", fr="chemin critique")] = Stroke(CRITICAL, line=2.2)
    if scene.memory:
        memory_label = say(en="activations kept (peak at the right)", fr="activations gardées (pic à droite)")
        entries[memory_label] = Style(MIST, "")
    if scene.memory_limit is not None:
        limit = amount(scene.memory_limit)
        entries[say(en=f"memory limit {limit}", fr=f"limite mémoire {limit}")] = Stroke(LIMIT, "--", 1.2)
    if scene.strip:
        entries[say(en="strip: weight version used", fr="bandeau : version des poids utilisée")] = Style(SERIES[1], "")
    return entries | {mark.words: Stroke(CRITICAL, mark.dashes) for mark in scene.marks}


def _round_step(minimum: float) -> float:
    """The smallest of 1, 2, 5, 10 … times a power of ten that is not below `minimum`."""
    power = 10.0 ** math.floor(math.log10(minimum))
    return next(power * times for times in (1, 2, 5, 10) if power * times >= minimum * (1 - 1e-9))


class Facts(TypedDict, total=False):
    """Keyword arguments of `scene_of`; what is left out is not drawn."""

    critical: tuple[int, ...]
    idle: tuple[Band, ...]
    versions: tuple[int | None, ...]
    lower_bound: float | None
    optimum: float | None


MOST_RANKS, MOST_MICRO_BATCHES = 4, 8
"""Up to here the table holds the proven optimum."""


def facts_of(
    timeline: Timeline,
    *,
    critical: bool = True,
    idle: bool = False,
    bounds: bool = True,
    memory_limit: float | None = None,
) -> Facts:
    """Ask `dlojz.pipeline` for all that `scene_of` can draw besides the times.

    Args:
        timeline: simulated or measured.
        bounds: the lower bound, and the optimum where it is stored; both need costs, so a measured timeline has none.
        memory_limit: that of the optimum, in stage-micro-batches.
    """
    facts = Facts()
    if critical:
        facts["critical"] = critical_path(timeline)
    if idle:
        facts["idle"] = tuple(Band(gap.rank, gap.start, gap.end, gap.cause) for gap in gaps(timeline))
    if timeline.schedule.asynchronous:
        facts["versions"] = version_audit(timeline.schedule).versions
    if bounds and timeline.costs is not None:
        facts["lower_bound"] = lower_bound(timeline.schedule, timeline.costs)
        facts["optimum"] = known_optimum(timeline, memory_limit)
    return facts


def known_optimum(timeline: Timeline, memory_limit: float | None = None) -> float | None:
    """Look up the proven shortest makespan of the same stages and micro-batches in the stored table.

    Args:
        timeline: simulated; other costs than F = I = W = 1 have no entry.
        memory_limit: activations that a rank may keep, in stage-micro-batches.
    """
    schedule = timeline.schedule
    ordinary = (
        schedule.placement == (tuple(range(schedule.ranks)),)
        and schedule.token_slices == 1
        and not (schedule.asynchronous or schedule.overlaps)
    )
    small = schedule.ranks <= MOST_RANKS and schedule.micro_batches <= MOST_MICRO_BATCHES
    # Only for such schedules, with unit costs, has the table an entry.
    if not (ordinary and small and timeline.costs == UNIT_COSTS):
        return None
    try:
        solution = optimum(
            schedule.ranks, schedule.micro_batches, split=schedule.splits_backward, memory_limit=memory_limit
        )
    except LabError:  # no schedule within the limit, or none stored: there is nothing to draw
        return None
    return solution.value if solution.proven else None


def in_seconds(timeline: Timeline, seconds: bool | None = None) -> bool:
    """Tell whether times are seconds: a measured timeline's are, a simulation's only on request."""
    return timeline.origin == "measured" if seconds is None else seconds


def amount(value: float, seconds: bool = False) -> str:
    """Write a time or a number of units with at most four digits."""
    if seconds:
        return format_seconds(value)
    return significant(value, 4) if abs(value) < 1e4 else f"{value:.0f}"


def title_of(schedule: Schedule) -> str:
    """Name a schedule and its size."""
    chunks = schedule.stages // schedule.ranks if schedule.pipes == 1 else 1
    chunk_words = say(en=f", {chunks} chunks per rank", fr=f", {chunks} étages par rang") if chunks > 1 else ""
    ranks, micro_batches = schedule.ranks, schedule.micro_batches
    many = f"micro-batch{'es' if micro_batches > 1 else ''}{chunk_words}"
    return say(
        en=f"{visible(schedule.name)}: {ranks} rank{'s' if ranks > 1 else ''}, {micro_batches} {many}",
        fr=f"{visible(schedule.name)} : {ranks} rang{'s' if ranks > 1 else ''}, {micro_batches} {many}",
    )


def unit_words(seconds: bool = False) -> str:
    """Write the unit of a simulated time; nothing where `amount` has written seconds."""
    return "" if seconds else say(en=" time units", fr=" unités de temps")


def figures_sentence(timeline: Timeline, seconds: bool | None = None) -> str:
    """Say makespan, bubble fraction and overhead; the span too where it differs."""
    inside = in_seconds(timeline, seconds)
    span = ""
    if timeline.span < timeline.makespan * (1 - 1e-9):
        span = say(en=f", span {amount(timeline.span, inside)}", fr=f", portée {amount(timeline.span, inside)}")
    return phrase("figures of a schedule", makespan=amount(timeline.makespan, inside), span=span, timeline=timeline)


def action_words(actions: Sequence[Action]) -> list[str]:
    """Say what each action does."""
    stage, slice_word = say(en="stage", fr="étage"), say(en="slice", fr="tranche")
    upward = say(en=", second direction", fr=", second sens")
    kinds = {kind: action_label(kind) for kind in KINDS}

    def words(action: Action) -> str:
        if action.parts:
            return " + ".join(map(words, action.parts))
        part = f", {slice_word} {action.token_slice}" if action.token_slice else ""
        pipe = upward if action.pipe else ""
        return f"{kinds[action.kind]}, {stage} {action.stage}, micro-batch {action.micro_batch}{part}{pipe}"

    return [words(action) for action in actions]


def figure_lines(
    timeline: Timeline, lower_bound: float | None = None, optimum: float | None = None, seconds: bool | None = None
) -> Iterator[tuple[str, str]]:
    """List the figures of a schedule as (name, value and meaning)."""
    inside = in_seconds(timeline, seconds)
    unit = unit_words(inside)
    makespan_meaning = say(en=", first start to last end", fr=", du début à la fin")
    yield say(en="makespan", fr="durée totale (makespan)"), amount(timeline.makespan, inside) + unit + makespan_meaning
    longest = phrase("meaning of the span")
    yield say(en="span", fr="portée (span)"), amount(timeline.span, inside) + unit + longest
    spread = say(en=", work spread evenly, no idle time", fr=", sans inactivité")
    yield say(en="ideal", fr="durée idéale"), amount(timeline.ideal, inside) + unit + spread
    of_time = say(en=" (idle / all time)", fr=" (inactivité / temps total)")
    yield say(en="bubble fraction", fr="fraction de bulle"), spaced_percent(timeline.bubble_fraction) + of_time
    of_work = say(en=" (idle / work)", fr=" (inactivité / travail)")
    yield say(en="bubble overhead", fr="surcoût de bulle"), spaced_percent(timeline.bubble_overhead) + of_work
    peaks = ", ".join(amount(curve.peak) for curve in memory_curves(timeline))
    per_rank = say(en=" (per rank, in stage-micro-batches)", fr=" (par rang, en micro-batches d’étage)")
    yield say(en="peak activations", fr="pic d’activations"), peaks + per_rank
    bound_meaning = phrase("meaning of the optimum")
    proven = say(en="the fastest there is, proven", fr="le plus rapide possible, prouvé")
    bounds = ((say(en="lower bound", fr="borne inférieure"), lower_bound, bound_meaning), ("optimum", optimum, proven))
    for name, value, meaning in bounds:
        if value is not None:
            # How far the makespan lies above the bound, relative to it.
            gap = timeline.makespan / value - 1 if value else 0.0
            excess = say(en="reached", fr="atteint") if abs(gap) < 1e-9 else spaced_percent(gap, signed=True)
            if gap <= -1e-9:  # only what breaks the limit can be faster
                excess = say(en="for the memory limit, broken here", fr="pour la limite mémoire, dépassée ici")
            yield name, f"{amount(value, inside)}{unit}, {meaning} ({excess})"


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
    return _figure(scene_drawing(scene), path)


def compare_figure(first: Timeline, second: Timeline, path: str | Path | None = None) -> LabFigure:
    """Draw two schedules under one another on one time axis, with the difference of their makespans.

    Args:
        first, second: timelines with times of the same unit.
    """
    scenes = [scene_of(timeline, **facts_of(timeline, critical=False, bounds=False)) for timeline in (first, second)]
    inside = in_seconds(first)
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
        title = phrase("same time", first=first, second=second)
    names = [f"{'AB'[number]}. {scene.title}\n{scene.subtitle}" for number, scene in enumerate(scenes)]
    return _figure(schedule_drawing(scenes, title, names, f"{title}. {scenes[0].alt} {scenes[1].alt}"), path)


def _figure(drawing: Drawing, path: str | Path | None) -> LabFigure:
    from dlojz.display.canvas import figure_of  # matplotlib, which sentences and tables do without

    return figure_of(drawing, path)
