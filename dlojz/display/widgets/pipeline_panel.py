"""Panel of a pipeline schedule: choose a schedule and its costs, or write the order by hand, and see what follows.

The SVG draws the same scene as the matplotlib figure. A schedule that breaks the memory limit is drawn, with what it
breaks; one that cannot be executed is answered in sentences alone. Nothing typed is executed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from itertools import count
from typing import Any

from dlojz.base.errors import LabError
from dlojz.base.language import refusal, say, significant
from dlojz.base.table import Table, safe
from dlojz.display.canvas import LabFigure
from dlojz.display.figures.pipeline_figures import (
    COLOURS,
    CRITICAL,
    EDGE,
    LETTER,
    LIMIT,
    MEMORY,
    path_lines,
    scene_of,
    schedule_figure,
)
from dlojz.display.pipeline_scene import (
    Band,
    Bar,
    Facts,
    Scene,
    action_words,
    amount,
    facts_of,
    figure_lines,
    figures_sentence,
    framed,
    readable,
)
from dlojz.display.pipeline_scene import title_of as schedule_title
from dlojz.display.style import BASELINE, BLACK, IDLE_STYLES, OTHER, RULE, SERIES, SHADE, WHITE, Style
from dlojz.display.widgets.panel import Panel, import_widgets, with_defaults
from dlojz.pipeline.analysis import title_of
from dlojz.pipeline.exchange_formats import read_csv, to_csv, torch_refusal
from dlojz.pipeline.schedule import Costs, Schedule
from dlojz.pipeline.schedule_catalogue import SCHEDULES, build, entry
from dlojz.pipeline.simulator import Timeline, simulate
from dlojz.pipeline.validity import problems

WIDTH_PX, LEFT_PX, RIGHT_PX, AXIS_PX = 1000.0, 110.0, 34.0, 38.0
FONT_PX = 10.0
_TICKS = 10
_numbers = count()

_DASHES = {":": "2 3", "--": "6 4"}
_HATCHES: dict[str, str] = {
    "//": "M0,6 L6,0",
    "\\\\": "M0,0 L6,6",
    "..": "M2,3 h1.4",
    "xx": "M0,6 L6,0 M0,0 L6,6",
    "++": "M0,3 H6 M3,0 V6",
    "--": "M0,3 H6",
    "||": "M3,0 V6",
}


def scene_svg(scene: Scene) -> str:
    """Draw a scene as an `<svg>` element with a description for screen readers and a tooltip for each bar.

    Strings are joined and nothing is rendered: hundreds of actions take a few milliseconds, and sliders move at once.
    """
    row_px = 58.0 if scene.lanes.memory else 34.0
    if len(scene.rows) > 12:
        row_px *= 0.7
    high = row_px * len(scene.rows)
    key = f"s{next(_numbers)}"
    drawing = _Drawing(scene, row_px, key)
    parts = [
        f'<svg role="img" aria-label="{safe(scene.alt)}" viewBox="0 0 {WIDTH_PX:g} {high + AXIS_PX:g}" '
        f'style="width:100%;max-width:{WIDTH_PX * 1.25:g}px;background:{WHITE}" xmlns="http://www.w3.org/2000/svg" '
        f'font-family="sans-serif" font-size="{FONT_PX:g}">',
        drawing.patterns(),
        *drawing.rows(),
        *drawing.axis(high),
        *drawing.idle(),
        *drawing.bars(),
        *drawing.strip(),
        *drawing.memory(),
        *drawing.critical(),
        *drawing.marks(high),
        "</svg>",
    ]
    return "".join(parts)


def legend_html(scene: Scene) -> str:
    """Write the legend as a line of swatches."""
    looks = [*scene.legend]
    for cause in IDLE_STYLES:
        if any(band.name == cause for band in scene.idle):
            looks.append((IDLE_STYLES[cause], say(en="idle: ", fr="inactif : ") + title_of(cause)))
    parts = [f"{_swatch(style)} {safe(label)}" for style, label in looks]
    if scene.critical:
        parts.append(safe(say(en="black frames: critical path", fr="cadres noirs : chemin critique")))
    if scene.memory:
        parts.append(safe(say(en="grey: activations, peak at the right", fr="gris : activations, pic à droite")))
    if scene.memory_limit is not None:
        limit = amount(scene.memory_limit)
        parts.append(safe(say(en=f"dashes: memory limit {limit}", fr=f"tirets : limite mémoire {limit}")))
    parts += [f"{_dashes(mark.dashes)} {safe(mark.words)}" for mark in scene.marks]
    return "<div>" + "".join(f'<span style="margin-right:1.2em">{part}</span>' for part in parts) + "</div>"


def _dashes(dashes: str) -> str:
    line = f'<path d="M1,6 H25" stroke="{CRITICAL}" stroke-width="1.6" stroke-dasharray="{_DASHES[dashes]}"/>'
    return f'<svg width="26" height="12" aria-hidden="true">{line}</svg>'


def _swatch(style: Style) -> str:
    path = _HATCHES.get(style.hatch, "")
    lines = "".join(
        f'<path d="{path}" transform="translate({x},{y})" stroke="{BLACK}" stroke-opacity=".45" fill="none"/>'
        for x in range(0, 22, 6)
        for y in (0, 6)
        if path
    )
    box = f'<rect width="22" height="12" fill="{style.color}" stroke="{EDGE}"/>'
    return f'<svg width="22" height="12" aria-hidden="true">{box}{lines}</svg>'


def tooltips(scene: Scene) -> list[str]:
    """Say of each bar its action, its times and its weight version."""
    version = say(en="weight version", fr="version des poids")
    words = action_words(scene.actions)
    told = []
    for bar in scene.bars:
        times = f"{significant(bar.start, 4)} – {significant(bar.end, 4)}"
        number = scene.versions[bar.number] if scene.versions else None
        told.append(f"{words[bar.number]}: {times}" + ("" if number is None else f", {version} {number}"))
    return told


class _Drawing:
    """Where things lie on the sheet: x from time, y from row and lane."""

    def __init__(self, scene: Scene, row_px: float, key: str) -> None:
        self.scene, self.row_px, self.key = scene, row_px, key
        self.per_time = (WIDTH_PX - LEFT_PX - RIGHT_PX) / scene.width

    def x(self, time: float) -> float:
        return LEFT_PX + time * self.per_time

    def _place(self, band: Bar | Band, lane: tuple[float, float]) -> str:
        return (
            f'x="{self.x(band.start):.1f}" y="{(band.row + lane[0]) * self.row_px:.1f}" '
            f'width="{(band.end - band.start) * self.per_time:.1f}" height="{lane[1] * self.row_px:.1f}"'
        )

    def patterns(self) -> str:
        hatches = "".join(
            f'<pattern id="{self.key}{number}" width="6" height="6" patternUnits="userSpaceOnUse">'
            f'<path d="{path}" stroke="{BLACK}" stroke-opacity=".3" stroke-width="1" fill="none"/></pattern>'
            for number, path in enumerate(_HATCHES.values())
        )
        return f"<defs>{hatches}</defs>"

    def _hatch(self, hatch: str) -> str:
        return f"url(#{self.key}{list(_HATCHES).index(hatch)})" if hatch in _HATCHES else "none"

    def rows(self) -> Iterator[str]:
        middle = self.scene.lanes.bars[0] + self.scene.lanes.bars[1] / 2
        for row, name in enumerate(self.scene.rows):
            y = (row + middle) * self.row_px
            yield f'<text x="{LEFT_PX - 8:g}" y="{y + 4:.1f}" text-anchor="end" font-size="12">{safe(name)}</text>'
            if row:
                yield f'<path d="M{LEFT_PX:g},{row * self.row_px:.1f} H{WIDTH_PX - RIGHT_PX:g}" stroke="{RULE}"/>'

    def axis(self, high: float) -> Iterator[str]:
        step = _round_step(self.scene.width / _TICKS)
        yield f'<path d="M{LEFT_PX:g},{high:g} H{WIDTH_PX - RIGHT_PX:g}" stroke="{BASELINE}"/>'
        for number in range(int(self.scene.width / step + 1e-9) + 1):
            x = self.x(number * step)
            yield f'<path d="M{x:.1f},0 V{high + 4:g}" stroke="{SHADE}"/>'
            yield f'<text x="{x:.1f}" y="{high + 16:g}" text-anchor="middle">{amount(number * step)}</text>'
        label = safe(self.scene.time_label)
        yield f'<text x="{(LEFT_PX + WIDTH_PX) / 2:g}" y="{high + 32:g}" text-anchor="middle">{label}</text>'

    def idle(self) -> Iterator[str]:
        for band in self.scene.idle:
            style = IDLE_STYLES.get(band.name, OTHER)
            place = self._place(band, self.scene.lanes.bars)
            yield f'<g><title>{safe(title_of(band.name))}</title><rect {place} fill="{style.color}"/>'
            yield f'<rect {place} fill="{self._hatch(style.hatch)}"/></g>'

    def bars(self) -> Iterator[str]:
        lane = self.scene.lanes.bars
        for bar, words in zip(self.scene.bars, tooltips(self.scene), strict=True):
            place = self._place(bar, lane)
            yield f'<g><title>{escape(words)}</title><rect {place} fill="{bar.style.color}" stroke="{EDGE}"'
            yield ' stroke-width=".5"/>'
            if bar.style.hatch:
                yield f'<rect {place} fill="{self._hatch(bar.style.hatch)}"/>'
            yield "</g>"
        letters = (WIDTH_PX - LEFT_PX - RIGHT_PX) / (FONT_PX * LETTER)
        yield '<g text-anchor="middle" pointer-events="none">'
        y = (lane[0] + lane[1] / 2) * self.row_px + FONT_PX * 0.36
        for bar, text in readable(self.scene, letters):
            x = self.x((bar.start + bar.end) / 2)
            # a hatch would strike the letters through
            halo = f' stroke="{bar.style.color}" stroke-width="2.5" paint-order="stroke"' if bar.style.hatch else ""
            yield f'<text x="{x:.1f}" y="{bar.row * self.row_px + y:.1f}"{halo}>{escape(text)}</text>'
        yield "</g>"

    def strip(self) -> Iterator[str]:
        lane = self.scene.lanes.strip
        for band in self.scene.strip if lane else ():
            assert lane is not None
            color = SERIES[int(band.name) % len(SERIES)]
            yield f'<rect {self._place(band, lane)} fill="{color}" stroke="{EDGE}" stroke-width=".4"/>'
            if (band.end - band.start) * self.per_time > len(band.name) * 5 + 2:
                x, y = self.x((band.start + band.end) / 2), (band.row + lane[0] + lane[1]) * self.row_px - 1
                yield f'<text x="{x:.1f}" y="{y:.1f}" font-size="7" text-anchor="middle">{safe(band.name)}</text>'

    def memory(self) -> Iterator[str]:
        lane, scene = self.scene.lanes.memory, self.scene
        for row, steps in enumerate(scene.memory if lane else ()):
            assert lane is not None
            base, high = (row + lane[0] + lane[1]) * self.row_px, lane[1] * self.row_px / scene.memory_top
            corners = " ".join(
                f"{self.x(time):.1f},{base - units * high:.1f}"
                for time, units in zip(steps.times, steps.units, strict=True)
            )
            end = f"{self.x(steps.times[-1]):.1f},{base:.1f}"
            yield f'<polygon points="{LEFT_PX:g},{base:.1f} {corners} {end}" fill="{MEMORY}" fill-opacity=".45"/>'
            over = scene.memory_limit is not None and steps.peak > scene.memory_limit + 1e-9
            y = base - lane[1] * self.row_px / 2 + 4
            look = f'fill="{LIMIT}" font-weight="bold"' if over else f'fill="{MEMORY}"'
            yield f'<text x="{WIDTH_PX - RIGHT_PX + 4:g}" y="{y:.1f}" {look}>{amount(steps.peak)}</text>'
            if scene.memory_limit is not None:
                level = base - scene.memory_limit * high
                yield (
                    f'<path d="M{LEFT_PX:g},{level:.1f} H{WIDTH_PX - RIGHT_PX:g}" stroke="{LIMIT}" '
                    'stroke-dasharray="5 3"/>'
                )

    def critical(self) -> Iterator[str]:
        frames, lane = framed(self.scene), self.scene.lanes.bars
        style = f'fill="none" stroke="{CRITICAL}" stroke-width="2" pointer-events="none"'
        for frame in frames:
            yield f"<rect {self._place(frame, lane)} {style}/>"
        for (start, top), (end, bottom) in path_lines(frames, lane):
            yield (
                f'<path d="M{self.x(start):.1f},{top * self.row_px:.1f} L{self.x(end):.1f},{bottom * self.row_px:.1f}" '
                f"{style}/>"
            )

    def marks(self, high: float) -> Iterator[str]:
        for mark in self.scene.marks:
            yield (
                f'<g><title>{safe(mark.words)}</title><path d="M{self.x(mark.time):.1f},0 V{high:g}" '
                f'stroke="{CRITICAL}" stroke-width="1.6" stroke-dasharray="{_DASHES[mark.dashes]}"/></g>'
            )


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10 … times a power of ten that is not below `least`."""
    power = 1.0
    while power > least:
        power /= 10
    while power * 10 <= least:
        power *= 10
    return next((power * times for times in (1, 2, 5) if power * times >= least * (1 - 1e-9)), power * 10)


@dataclass(frozen=True)
class ScheduleAnswer:
    """Simulated schedule that a choice leads to; shows itself in a notebook.

    Attributes:
        timeline: the simulation; None where the schedule cannot be executed.
        problems: what is wrong, in sentences; empty if nothing is.
        scene: the drawing.
        facts: what is known of it besides its times.
        look: how it is drawn, as `schedule_figure` takes it.
    """

    timeline: Timeline | None
    problems: tuple[str, ...]
    scene: Scene | None = None
    facts: Facts = field(default_factory=Facts)
    look: dict[str, object] = field(default_factory=dict)

    @property
    def figure(self) -> LabFigure | None:
        """The same drawing as a matplotlib figure, which can be saved."""
        return schedule_figure(self.timeline, **self.look) if self.timeline else None  # type: ignore[arg-type]

    def html(self) -> str:
        """Write the answer for the panel: sentences, an SVG drawing, the figures by name."""
        if self.timeline is None or self.scene is None:
            return self._problems_html()
        title, colon = safe(schedule_title(self.timeline.schedule)), say(en=":", fr=" :")
        heading = f"<p><b>{title}</b>{colon} {safe(self.scene.subtitle)}</p>"
        drawing = scene_svg(self.scene) + legend_html(self.scene)
        return self._problems_html() + heading + drawing + self._figures_html(self.timeline)

    def _repr_html_(self) -> str:
        figure = self.figure
        if figure is None or self.timeline is None:
            return self._problems_html()
        return self._problems_html() + figure.html() + self._figures_html(self.timeline)

    def __repr__(self) -> str:
        told = [*self.problems]
        if self.timeline:
            colon = say(en=":", fr=" :")
            told.append(f"{schedule_title(self.timeline.schedule)}{colon} {figures_sentence(self.timeline)}")
        return " ".join(told)

    def _problems_html(self) -> str:
        if not self.problems:
            return ""
        listed = "".join(f"<li>{safe(problem)}</li>" for problem in self.problems)
        return f'<ul role="status" aria-live="polite" style="font-weight:bold">{listed}</ul>'

    def _figures_html(self, timeline: Timeline) -> str:
        executable = say(en="executes it (export: CSV)", fr="possible (export : CSV)")
        lines = (
            *figure_lines(timeline, self.facts.get("lower_bound"), self.facts.get("optimum")),
            (say(en="torch’s runtime", fr="exécution par torch"), torch_refusal(timeline.schedule) or executable),
        )
        return Table(("", ""), lines, align="l")._repr_html_()


def answer_of(
    schedule: Schedule,
    costs: Costs,
    memory_limit: float | None = None,
    *,
    color_by: str = "kind",
    critical: bool = True,
    idle: bool = False,
) -> ScheduleAnswer:
    """Simulate and arrange a schedule.

    Raises:
        LabError: if costs or colours do not fit it.
    """
    unsound = problems(schedule, costs=costs)
    if unsound:
        return ScheduleAnswer(None, tuple(unsound))
    broken = problems(schedule, memory_limit, costs) if memory_limit is not None else []
    timeline = simulate(schedule, costs)
    facts = facts_of(timeline, critical=critical, idle=idle, memory_limit=memory_limit)
    scene = scene_of(timeline, color_by=color_by, memory_limit=memory_limit, **facts)
    look = {"color_by": color_by, "critical": critical, "idle": idle, "memory_limit": memory_limit}
    return ScheduleAnswer(timeline, tuple(broken), scene, facts, look)


def answer_of_csv(
    text: str, costs_for: Callable[[int], Costs], memory_limit: float | None = None, **look: bool | str
) -> ScheduleAnswer:
    """Simulate and arrange an order written by hand; `costs_for` gives the costs for its number of stages."""
    try:
        schedule = read_csv(text)
    except LabError as error:
        return ScheduleAnswer(None, (str(error),))
    return answer_of(schedule, costs_for(schedule.stages), memory_limit, **look)  # type: ignore[arg-type]


DEFAULTS: dict[str, Any] = {
    "schedule": "1f1b",
    "ranks": 4,
    "micro_batches": 8,
    "chunks": 0,
    "forward": 1.0,
    "backward_input": 1.0,
    "backward_weight": 1.0,
    "latency": 0.0,
    "stage_times": "",
    "memory_limit": "",
    "color_by": "kind",
    "critical": True,
    "idle": False,
}
MOST_RANKS, MOST_MICRO_BATCHES = 32, 128


def still_panel(**fields: Any) -> ScheduleAnswer:
    """Answer one choice of the panel: a picture and its figures, or the sentence that refuses.

    Args:
        fields: those of the panel: schedule, ranks, micro_batches, chunks (0: the schedule's own), forward,
            backward_input, backward_weight, latency, stage_times (relative times of the stages, "1, 2, 1, 1"),
            memory_limit (stage-micro-batches, "" for none), color_by, critical, idle; or csv, an order written by hand.
    """
    try:
        chosen = with_defaults(fields, DEFAULTS, ("csv",))
        return _answer(chosen, chosen.pop("csv", None))
    except LabError as error:
        return ScheduleAnswer(None, (str(error),))


def pipeline_panel(**fields: Any) -> Any:
    """Show a widget: choose a schedule, its size and its costs, or edit its order, and see what follows.

    Args:
        fields: what is shown first, as `still_panel` takes them.

    Returns:
        An ipywidgets box.

    Raises:
        LabError: for an unknown field, or if ipywidgets is not installed; `still_panel` needs none.
    """
    return PipelinePanel(**fields).box


class PipelinePanel(Panel):
    """Panel of a schedule.

    Args:
        fields: what is shown first.
    """

    def __init__(self, **fields: Any) -> None:
        chosen = with_defaults(fields, DEFAULTS, ("csv",))
        widgets = import_widgets(en="the panel", fr="le panneau", instead="still_panel")
        written = chosen.pop("csv", None)

        def number(name: str, label: str, most: int, least: int = 1) -> Any:
            return widgets.IntSlider(value=chosen[name], min=least, max=most, description=label)

        def time(name: str, label: str, most: float = 5.0, step: float = 0.25) -> Any:
            return widgets.FloatSlider(value=chosen[name], min=0.0, max=most, step=step, description=label)

        def text(name: str, label: str, example: str) -> Any:
            return widgets.Text(value=str(chosen[name]), placeholder=example, description=label)

        def choice(label: str, options: Any, value: Any) -> Any:
            return widgets.Dropdown(options=options, value=value, description=label)

        def tick(name: str, label: str) -> Any:
            return widgets.Checkbox(value=chosen[name], description=label)

        schedules = [(one.title(), name) for name, one in SCHEDULES.items()]
        colours = list(zip(_colour_names(), COLOURS, strict=True))
        chunks = say(en="chunks v (0: its own)", fr="étages/rang v (0 : auto)")
        none = say(en="none", fr="aucune")
        controls = {
            "schedule": choice(say(en="schedule", fr="ordonnancement"), schedules, entry(chosen["schedule"]).name),
            "ranks": number("ranks", say(en="ranks p", fr="rangs p"), MOST_RANKS),
            "micro_batches": number("micro_batches", "micro-batches m", MOST_MICRO_BATCHES),
            "chunks": number("chunks", chunks, 8, least=0),
            "forward": time("forward", say(en="forward F", fr="passe avant F")),
            "backward_input": time("backward_input", say(en="backward, input I", fr="arrière, entrée I")),
            "backward_weight": time("backward_weight", say(en="backward, weights W", fr="arrière, poids W")),
            "latency": time("latency", say(en="latency c", fr="latence c"), 2.0, 0.05),
            "stage_times": text("stage_times", say(en="stages ×", fr="étages ×"), "1, 2, 1, 1"),
            "memory_limit": text("memory_limit", say(en="memory limit", fr="limite mémoire"), none),
            "color_by": choice(say(en="colour", fr="couleur"), colours, chosen["color_by"]),
            "critical": tick("critical", say(en="critical path", fr="chemin critique")),
            "idle": tick("idle", say(en="causes of idle time", fr="causes d’inactivité")),
        }
        super().__init__(widgets, controls, in_column=5, label_width="12.5em", control_width="27em")
        self.by_hand = widgets.Checkbox(
            value=written is not None, description=say(en="edit the order", fr="modifier l’ordre"), indent=False
        )
        self.order = widgets.Textarea(
            value=written or "", layout=widgets.Layout(width="98%", height="8em"), disabled=written is None
        )
        hint = say(
            en="One row per rank, cells such as 0F3 (stage 0, forward, micro-batch 3), 0B3, 0I3, 0W3.",
            fr="Une ligne par rang, des cases comme 0F3 (étage 0, passe avant, micro-batch 3), 0B3, 0I3, 0W3.",
        )
        self.box.children += (widgets.HBox([self.by_hand, widgets.Label(hint)]), self.order)
        self.follow((*controls.values(), self.order))
        self.by_hand.observe(self._edit, names="value")
        self._quiet = False
        self.compute()

    def answered(self) -> ScheduleAnswer:
        """Answer what is chosen, or the order written by hand."""
        try:
            return _answer(self.fields, self.order.value if self.by_hand.value else None)
        except LabError as error:
            return ScheduleAnswer(None, (str(error),))

    def _changed(self, change: Any = None) -> None:
        """Answer what is chosen; the order by hand follows the choice until it is edited."""
        if not self._quiet:
            self.compute()

    def compute(self) -> None:
        """Show the answer, and its order where none is written by hand."""
        super().compute()
        if not self.by_hand.value and self.answer.timeline is not None:
            self._quiet = True
            self.order.value = to_csv(self.answer.timeline.schedule)
            self._quiet = False

    def _edit(self, change: Any = None) -> None:
        """From now on the order is what is written in the field; or again what the schedule's name says."""
        self.order.disabled = not self.by_hand.value
        for name in ("schedule", "ranks", "micro_batches", "chunks"):
            self.controls[name].disabled = self.by_hand.value
        self.compute()


def _answer(chosen: Mapping[str, Any], written: str | None) -> ScheduleAnswer:
    limit = _limit(chosen["memory_limit"])
    look = {key: chosen[key] for key in ("color_by", "critical", "idle")}
    if written is not None:
        return answer_of_csv(written, lambda stages: _costs(chosen, stages), limit, **look)
    name = entry(chosen["schedule"]).name
    free = "chunks" in SCHEDULES[name].options or "waves" in SCHEDULES[name].options
    costs = _costs(chosen, None)
    schedule = build(
        name,
        chosen["ranks"],
        chosen["micro_batches"],
        chunks=(chosen["chunks"] or None) if free else None,
        costs=costs,
        memory_limit=limit if "memory_limit" in SCHEDULES[name].options else None,
    )
    return answer_of(schedule, _costs(chosen, schedule.stages), limit, **look)


def _costs(chosen: Mapping[str, Any], stages: int | None) -> Costs:
    """Times of every stage; `stages` says how many there are, None that they are taken for equal."""
    forward, for_input, for_weight = (float(chosen[key]) for key in ("forward", "backward_input", "backward_weight"))
    factors = [_number(word) for word in str(chosen["stage_times"]).replace(";", ",").split(",") if word.strip()]
    if not factors or stages is None:
        return Costs(forward, for_input, for_weight, latency=float(chosen["latency"]))
    if len(factors) != stages:
        raise refusal(
            en=f"{len(factors)} stage times are given, but the schedule has {stages} stages: give {stages} "
            "numbers, or none.",
            fr=f"{len(factors)} temps d’étage sont donnés, mais l’ordonnancement a {stages} étages : donnez "
            f"{stages} nombres, ou aucun.",
        )
    each = (tuple(value * factor for factor in factors) for value in (forward, for_input, for_weight))
    forwards, for_inputs, for_weights = each
    return Costs(forwards, for_inputs, for_weights, latency=float(chosen["latency"]))


def _number(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise refusal(
            en=f"{word.strip()[:40]!r} is no number that is 0 or more: write numbers such as 1, 2.5, separated by "
            "commas.",
            fr=f"{word.strip()[:40]!r} n’est pas un nombre positif ou nul : écrivez des nombres comme 1, 2.5, "
            "séparés par des virgules.",
        )
    return value


def _limit(text: Any) -> float | None:
    return _number(str(text)) if str(text).strip() else None


def _colour_names() -> tuple[str, ...]:
    return (
        say(en="kind", fr="genre"),
        "micro-batch",
        say(en="chunk", fr="étage du rang"),
        say(en="weight version", fr="version des poids"),
    )
