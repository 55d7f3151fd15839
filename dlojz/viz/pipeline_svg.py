"""A scene as SVG, for a panel that redraws at every move of a slider: text, not pixels, and every bar says what it is.

Layer 4. Invariant: the same scene, colours and hatches as in the matplotlib figure; texts that may come from a
user go through `safe`, numbers and the lab's own words are escaped too; writing it is string concatenation, a few
milliseconds for hundreds of actions.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import count

from dlojz.pipeline.idle import title_of
from dlojz.text import say
from dlojz.viz.markup import safe
from dlojz.viz.palette import IDLE_STYLES, OTHER, SERIES, Style
from dlojz.viz.pipeline_draw import CRITICAL, EDGE, LETTER, LIMIT, MEMORY, path_lines
from dlojz.viz.pipeline_scene import Band, Bar, Scene, framed, readable
from dlojz.viz.pipeline_words import action_words, amount

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
    """The drawing of a scene as one `<svg>` element, with its description for screen readers.

    Each bar carries a tooltip that says what it is; the width follows the page's.
    """
    row_px = 58.0 if scene.lanes.memory else 34.0
    if len(scene.rows) > 12:
        row_px *= 0.7
    high = row_px * len(scene.rows)
    key = f"s{next(_numbers)}"
    drawing = _Drawing(scene, row_px, key)
    parts = [
        f'<svg role="img" aria-label="{safe(scene.alt)}" viewBox="0 0 {WIDTH_PX:g} {high + AXIS_PX:g}" '
        f'style="width:100%;max-width:{WIDTH_PX * 1.25:g}px;background:#fff" xmlns="http://www.w3.org/2000/svg" '
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
    """What looks how, as a line of swatches."""
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
        f'<path d="{path}" transform="translate({x},{y})" stroke="#000" stroke-opacity=".45" fill="none"/>'
        for x in range(0, 22, 6)
        for y in (0, 6)
        if path
    )
    box = f'<rect width="22" height="12" fill="{style.color}" stroke="{EDGE}"/>'
    return f'<svg width="22" height="12" aria-hidden="true">{box}{lines}</svg>'


def tooltips(scene: Scene) -> list[str]:
    """What each bar says when it is pointed at: the action, its times, its weight version."""
    version = say(en="weight version", fr="version des poids")
    mark = say(en=".", fr=",")
    words = action_words(scene.actions)
    told = []
    for bar in scene.bars:
        times = f"{bar.start:.4g} – {bar.end:.4g}".replace(".", mark)
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
            f'<path d="{path}" stroke="#000" stroke-opacity=".3" stroke-width="1" fill="none"/></pattern>'
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
                yield (f'<path d="M{LEFT_PX:g},{row * self.row_px:.1f} H{WIDTH_PX - RIGHT_PX:g}" stroke="#ddd"/>')

    def axis(self, high: float) -> Iterator[str]:
        step = _round_step(self.scene.width / _TICKS)
        yield f'<path d="M{LEFT_PX:g},{high:g} H{WIDTH_PX - RIGHT_PX:g}" stroke="#333"/>'
        for number in range(int(self.scene.width / step + 1e-9) + 1):
            x = self.x(number * step)
            yield f'<path d="M{x:.1f},0 V{high + 4:g}" stroke="#e5e5e5"/>'
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
