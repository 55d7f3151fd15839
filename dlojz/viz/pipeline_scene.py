"""What a drawing of a schedule shows, before anybody draws it: bars, memory steps, version strips, marks, legend.

Layer 4. Invariant: the matplotlib figure and the SVG of the panel draw the same scene, so that they cannot differ; the
hatch of a bar is its kind, whatever its colour says, and its number stands in it while it can be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from dlojz.pipeline.action import Action
from dlojz.viz.palette import Style

MOST_TEXTS = 1500
"""Texts are drawn one by one; beyond these they cost more than they tell."""


class Bar(NamedTuple):
    """One action: its number in `schedule.actions`, where it lies, what is written in it, how it looks."""

    number: int
    row: int
    start: float
    end: float
    label: str
    short: str
    style: Style


class Steps(NamedTuple):
    """A rank's memory: corners of its curve, and its peak."""

    times: list[float]
    units: list[float]
    peak: float


class Band(NamedTuple):
    """A stretch of one rank's time with a name: a cause of idleness, or a weight version."""

    row: int
    start: float
    end: float
    name: str


class Mark(NamedTuple):
    """A moment that concerns all ranks: a bound."""

    time: float
    words: str
    dashes: Literal[":", "--"]


class Lanes(NamedTuple):
    """How the height 1 of a rank is shared out, from its top: bars, version strip, memory; (top, height) each."""

    bars: tuple[float, float]
    strip: tuple[float, float] | None
    memory: tuple[float, float] | None


@dataclass(frozen=True)
class Scene:
    """A drawing, without its medium.

    Attributes:
        title, subtitle, alt: texts, in the reader's language.
        rows: name of each row, from the top; one per rank, or two where a measured one lies below.
        width: length of the time axis, at least the makespan, in the unit of `time_label`.
        time_label: the axis, with its unit.
        lanes: how a row is shared out.
        bars, critical, idle, strip, memory, marks: what is drawn; `critical` are positions in `bars`.
        memory_top: the value at the top of a memory lane; `memory_limit` is drawn as a line if there is one.
        legend: what looks how.
        actions, versions: what the bars' numbers stand for: the schedule's actions, and their weight versions if any.
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
    marks: tuple[Mark, ...]
    legend: tuple[tuple[Style, str], ...]
    actions: tuple[Action, ...]
    versions: tuple[int | None, ...]


def readable(scene: Scene, letters: float) -> list[tuple[Bar, str]]:
    """What is written into the bars: labels, or micro-batches alone, or nothing, the same for all where it can be.

    Args:
        scene: what is drawn.
        letters: how many fit into the whole time axis.
    """
    if not scene.bars or len(scene.bars) > MOST_TEXTS:
        return []
    per_unit = letters / scene.width
    written = []
    for bar in scene.bars:
        room = (bar.end - bar.start) * per_unit
        text = next((text for text in (bar.label, bar.short) if text and len(text) + 0.3 <= room), "")
        if text:
            written.append((bar, text))
    return written if len(written) * 2 > len(scene.bars) else []  # a few numbers here and there only confuse


def framed(scene: Scene) -> list[Band]:
    """The critical path as frames: neighbouring actions of a rank share one, in order of time."""
    frames: list[Band] = []
    for bar in (scene.bars[number] for number in scene.critical):
        last = frames[-1] if frames else None
        if last and last.row == bar.row and bar.start - last.end <= 1e-9 * scene.width:
            frames[-1] = last._replace(end=bar.end)
        else:
            frames.append(Band(bar.row, bar.start, bar.end, ""))
    return frames
