"""Style of everything drawn: one colour and one hatch per category, the same in every figure.

Colour never carries a meaning alone; a hatch, a marker or a line style says the same. Source: Okabe & Ito 2008, "Color
Universal Design", whose eight colours are told apart by colour-blind readers.
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from dlojz.base.language import say
from dlojz.results.footprint import CATEGORIES, Category

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE, GREY = "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999"
"""The eight, and the grey of what belongs to none."""

WHITE = "#FFFFFF"
INK = "#222222"
"""Text of a page, and fine lines over a fill."""
EDGE = "#333333"
"""Outline of a filled shape."""
BASELINE = "#444444"
"""Line that values are compared with, such as zero, and the note beside it."""
QUIET = "#555555"
"""Text that explains signs, and outlines of many small shapes."""
REMARK = "#666666"
"""A comment in code, a note in an empty plot."""
NEUTRAL = "#777777"
"""Mark of what is neither right nor wrong, and leader lines."""
FRAME = "#BBBBBB"
"""Border of a cell or a box."""
RULE = "#DDDDDD"
"""Grid of a plot."""
SHADE = "#E8E8E8"
"""Ground of a band or of a bar that fills."""
PALE = "#F4F4F4"
"""Ground of a large box."""
SHADOW = "#00000038"
"""Translucent hatch over any fill."""
MIST = "#44444473"
"""Translucent area under a curve."""

ORANGE_TINT, SKY_TINT, GREEN_TINT = "#FFF3D6", "#CFE6F5", "#B5E3D3"
YELLOW_TINT, VERMILION_TINT = "#FBF3B5", "#F2C2A2"
"""Grounds on which black text stands out."""
LIGHT_SKY, LIGHT_ORANGE, LIGHT_PURPLE = "#A6CEE3", "#FDD9A0", "#E8B7D4"
FAINT_HATCH = "#C4B98A"
"""Hatch under the figures of a cell."""

PREDICTED_ALPHA = 0.45

SMALL, NORMAL, HEADING, TITLE, SIGN = 8.0, 9.0, 10.0, 11.0, 15.0
"""Sizes of text in points: of a value or a label, a legend, the title of a panel, that of a figure, a sign alone.

`legible` raises them where a notebook shrinks the figure.
"""
DPI = 110
"""Pixels per inch of a figure."""
NOTEBOOK_PX = 950.0
"""Width of the output area of a notebook, CSS pixels; what is wider is shrunk to it."""
LEAST_PX = 9.0
"""Smallest text in a notebook, CSS pixels."""
MAGNIFIED = 1.4
"""CSS pixels per point at most: an SVG grows so far, a PNG by DPI / 72."""


def legible(size: float, width_pt: float) -> float:
    """Raise a size of text, in points, to the smallest that a notebook shows legibly in a drawing of this width."""
    return max(size, LEAST_PX / min(MAGNIFIED, NOTEBOOK_PX / width_pt))


class Style(NamedTuple):
    """Fill colour and hatch."""

    color: str
    hatch: str


FILLS = (
    Style(BLUE, ""),
    Style(ORANGE, "//"),
    Style(GREEN, "\\\\"),
    Style(PURPLE, "xx"),
    Style(SKY, ".."),
    Style(YELLOW, "++"),
    Style(GREY, "--"),
)
"""Fills of neighbouring parts of a bar, told apart by their hatches too."""
CATEGORY_STYLES: dict[Category, Style] = dict(zip(CATEGORIES, (*FILLS, Style(VERMILION, "oo")), strict=True))

MEMORY_PARTS = ("weights", "gradients", "optimizer", "edges", "activations", "live", "reserve")
MEMORY_STYLES = dict(zip(MEMORY_PARTS, FILLS, strict=True))
"""Of the categories that the planner tells apart."""
TIME_STYLES = {
    "forward": Style(BLUE, ""),
    "backward": Style(ORANGE, "//"),
    "recompute": Style(YELLOW, "++"),
    "tensor": Style(VERMILION, "xx"),
    "pipeline": Style(PURPLE, ".."),
    "bubble": Style(WHITE, "||"),
    "data": Style(SKY, "oo"),
    "optimizer": Style(GREEN, "\\\\"),
    "constant": Style(GREY, "--"),
}
"""Of the parts of a planned step."""

COLLECTIVE_STYLES: dict[str, Style] = {
    "all_reduce": Style(VERMILION, ""),
    "all_gather": Style(BLUE, "//"),
    "reduce_scatter": Style(GREEN, "\\\\"),
    "broadcast": Style(YELLOW, "xx"),
    "reduce": Style(PURPLE, ".."),
    "all_to_all": Style(SKY, "||"),
}

PHASE_STYLES: dict[str, Style] = {
    "forward": Style(BLUE, ""),
    "backward": Style(ORANGE, "//"),
    "optimizer": Style(GREEN, "\\\\"),
    "communication": Style(VERMILION, "xx"),
    "wait": Style(WHITE, "xx"),
    "data": Style(GREY, ".."),
    "bubble": Style(WHITE, ""),
    "compute": Style(SKY, ""),
}
OTHER = Style(GREY, "oo")

SCHEDULE_STYLES: dict[str, Style] = {  # kinds of pipeline actions, see dlojz.pipeline.schedule
    "F": Style(SKY, ""),
    "B": Style(ORANGE, "//"),
    "I": Style(YELLOW, "\\\\"),
    "W": Style(GREEN, ".."),
    "O": Style(PURPLE, "xx"),
    "U": Style(VERMILION, "++"),
    "E": Style(GREY, "--"),
    "L": Style(WHITE, "--"),
}
SERIES = (SKY, ORANGE, YELLOW, PURPLE, GREEN, LIGHT_SKY, LIGHT_ORANGE, LIGHT_PURPLE)
"""Light colours, for as many micro-batches, chunks or weight versions; they recur, so a number always stands beside."""
IDLE_STYLES: dict[str, Style] = {
    "warm-up": Style("#DCEBF7", "//"),
    "latency": Style("#F6D5C3", "||"),
    "imbalance": Style("#F0E6F2", "xx"),
    "drain": Style("#E6F2DC", "\\\\"),
    "barrier": Style(SHADE, ".."),
}

LINE_STYLES: tuple[tuple[str, str, str], ...] = (  # colour, dashes, marker
    (BLACK, "-", "o"),
    (ORANGE, "--", "s"),
    (SKY, "-.", "^"),
    (GREEN, ":", "D"),
    (VERMILION, "--", "v"),
    (BLUE, "-.", "P"),
    (PURPLE, ":", "X"),
    (GREY, "-", "*"),
)


@cache
def _labels() -> dict[str, dict[str, dict[str, str]]]:
    return tomllib.loads((Path(__file__).parent / "data" / "labels.toml").read_text(encoding="utf-8"))


def label(table: str, name: str) -> str:
    """Translate a name of one of the tables of `data/labels.toml`; one without translation stays."""
    pair = _labels()[table].get(name)
    return say(**pair) if pair else name


def category_label(name: str) -> str:
    """Translate a memory category."""
    return label("category", name)


def needed_label() -> str:
    """Say what `Memory.needed_bytes` is."""
    return say(en="needed: peak, CUDA context, NCCL", fr="nécessaire : pic, contexte CUDA, NCCL")


def phase_label(name: str) -> str:
    """Translate a phase of a training step; one without translation stays."""
    return label("phase", name)


def action_label(kind: str) -> str:
    """Translate a kind of pipeline action."""
    return label("action", kind)


def phase_style(name: str) -> Style:
    """Choose the style of a phase; `forward 3` looks like `forward`."""
    return next((style for key, style in PHASE_STYLES.items() if name.startswith(key)), OTHER)
