"""The look of everything drawn: one colour and one hatch per category, the same in every figure.

Layer 4. Invariant: colour never carries a meaning alone; a hatch, a marker or a line style says the same.
Source: Okabe & Ito 2008, "Color Universal Design", whose eight colours are told apart by colour-blind readers.
"""

from __future__ import annotations

from typing import NamedTuple

from dlojz.footprint import CATEGORIES, Category
from dlojz.text import say

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE, GREY = "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999"

PREDICTED_ALPHA = 0.45


class Style(NamedTuple):
    """Fill colour and hatch."""

    color: str
    hatch: str


CATEGORY_STYLES: dict[Category, Style] = {
    "weights": Style(BLUE, ""),
    "gradients": Style(ORANGE, "//"),
    "optimizer": Style(GREEN, "\\\\"),
    "master": Style(PURPLE, "xx"),
    "activations": Style(SKY, ".."),
    "buffers": Style(YELLOW, "++"),
    "workspace": Style(GREY, "--"),
}

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
    "wait": Style("#FFFFFF", "xx"),
    "data": Style(GREY, ".."),
    "bubble": Style("#FFFFFF", ""),
}
OTHER = Style(GREY, "oo")

SCHEDULE_STYLES: dict[str, Style] = {  # kinds of pipeline actions, see dlojz.pipeline.action
    "F": Style(SKY, ""),
    "B": Style(ORANGE, "//"),
    "I": Style(YELLOW, "\\\\"),
    "W": Style(GREEN, ".."),
    "O": Style(PURPLE, "xx"),
    "U": Style(VERMILION, "++"),
    "E": Style(GREY, "--"),
    "L": Style("#FFFFFF", "--"),
}
SERIES = (SKY, ORANGE, YELLOW, PURPLE, GREEN, "#A6CEE3", "#FDD9A0", "#E8B7D4")
"""Light colours, for as many micro-batches, chunks or weight versions; they recur, so a number always stands beside."""
IDLE_STYLES: dict[str, Style] = {
    "warm-up": Style("#DCEBF7", "//"),
    "latency": Style("#F6D5C3", "||"),
    "imbalance": Style("#F0E6F2", "xx"),
    "drain": Style("#E6F2DC", "\\\\"),
    "barrier": Style("#E5E5E5", ".."),
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


def category_label(name: str) -> str:
    """A memory category in the reader's language."""
    return {
        "weights": say(en="weights", fr="poids"),
        "gradients": say(en="gradients", fr="gradients"),
        "optimizer": say(en="optimizer", fr="optimiseur"),
        "master": say(en="master copy", fr="copie maître"),
        "activations": say(en="activations", fr="activations"),
        "buffers": say(en="buffers", fr="tampons"),
        "workspace": say(en="workspace", fr="temporaires"),
        "peak": say(en="peak", fr="pic"),
    }.get(name, name)


def phase_label(name: str) -> str:
    """A phase of a training step in the reader's language; one without translation as it is."""
    return {
        "forward": say(en="forward", fr="passe avant"),
        "backward": say(en="backward", fr="passe arrière"),
        "optimizer": say(en="optimizer", fr="optimiseur"),
        "communication": say(en="communication", fr="communication"),
        "wait": say(en="wait for communication", fr="attente de la communication"),
        "data": say(en="data", fr="données"),
        "bubble": say(en="bubble", fr="bulle"),
    }.get(name, name)


def action_label(kind: str) -> str:
    """A kind of pipeline action in the reader's language."""
    return {
        "F": say(en="forward", fr="passe avant"),
        "B": say(en="backward", fr="passe arrière"),
        "I": say(en="backward, input", fr="arrière, entrée"),
        "W": say(en="backward, weights", fr="arrière, poids"),
        "O": say(en="forward and backward", fr="avant et arrière"),
        "U": say(en="update", fr="mise à jour"),
        "E": say(en="evict", fr="éviction"),
        "L": say(en="load back", fr="rapatriement"),
    }.get(kind, kind)


def phase_style(name: str) -> Style:
    """Style of a phase; `forward 3` looks like `forward`."""
    return next((style for key, style in PHASE_STYLES.items() if name.startswith(key)), OTHER)


if set(CATEGORY_STYLES) != set(CATEGORIES):  # a category without a colour would be drawn as another one
    raise RuntimeError("every memory category needs a style in dlojz.viz.palette.")
