"""Canvas of the figures: size, spines, language, alternative text, labels that do not overlap.

An empty figure that shows itself in a notebook and writes itself to a file, without pyplot's global state.

A text that comes from a user is drawn letter by letter, never read as mathematics.

Where the numbers of points stand so that none lies on another: a small greedy search.

A point keeps its place, only its label moves, and a line leads back where it moved far.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from dlojz.base.errors import LabError
from dlojz.base.language import say, shortest
from dlojz.display.style import NEUTRAL, RULE

DPI = 110


class LabFigure(Figure):
    """A matplotlib figure with a description in words, for those who cannot see it."""

    alt: str = ""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=DPI)
        return {"image/png": picture.getvalue(), "text/plain": self.alt or "figure"}


def new_figure(width_in: float, height_in: float, alt: str) -> LabFigure:
    """A figure whose parts arrange themselves without overlap.

    Args:
        width_in: width in inches; a notebook shows about 12.
        height_in: height in inches.
        alt: what the figure shows, in words.
    """
    figure = LabFigure(figsize=(width_in, height_in), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.alt = alt
    return figure


def finish(figure: LabFigure, path: str | Path | None = None) -> LabFigure:
    """Make every text literal, then write the picture if a path is given.

    Raises:
        LabError: if the folder cannot be written or the ending names no picture format.
    """
    _make_literal(figure)
    with rc_context({"text.parse_math": False}):
        figure.draw_without_rendering()  # labels of ticks are only made when drawn
    _make_literal(figure)
    if path is None:
        return figure
    target = Path(path)
    legal = sorted(figure.canvas.get_supported_filetypes())
    if target.suffix[1:].lower() not in legal:
        raise LabError(
            say(
                en=f"the figure {target.name!r} needs an ending that names its format, such as .png or .svg "
                f"(legal: {', '.join(legal)}).",
                fr=f"le nom de la figure, {target.name!r}, doit se terminer par son format, comme .png ou .svg "
                f"(permis : {', '.join(legal)}).",
            )
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=DPI, metadata={"Title": figure.alt} if target.suffix.lower() == ".png" else None)
    except OSError as error:
        raise LabError(
            say(
                en=f"the figure cannot be written to {target}: {error.strerror}; give another path.",
                fr=f"la figure ne peut pas être écrite dans {target} : {error.strerror} ; donnez un autre chemin.",
            )
        ) from None
    return figure


def _make_literal(figure: LabFigure) -> None:
    for text in figure.findobj(Text):
        text.set_parse_math(False)


def plain(axes: Axes) -> None:
    """Frame and grid that leave the eye to the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)


def decimal_marks(*axes: Axis) -> None:
    """Write the numbers of axes with the decimal mark of the reader's language."""
    for axis in axes:
        axis.set_major_formatter(lambda value, position: shortest(value))


RADII = (11.0, 17.0, 24.0, 32.0, 41.0, 51.0)
"""Points (1/72 inch) from a marker to the middle of its label, the nearest first."""
DIRECTIONS = 12
HALF_WIDTH, HALF_HEIGHT = 6.5, 5.5
"""Of a label of two figures, in points."""
MARKER = 5.0
"""Half of a marker, in points."""


@dataclass(frozen=True)
class Spot:
    """A point of a panel, and what is written beside it."""

    x: float
    y: float
    text: str


def place_labels(axes: Axes, spots: Sequence[Spot], beside: Sequence[tuple[float, float]] = ()) -> None:
    """Write each spot's text beside it.

    Args:
        axes: drawn once already, with its limits set.
        spots: in data coordinates.
        beside: other points that a label should not lie on, in data coordinates.
    """
    scale = 72 / axes.figure.dpi
    at = [tuple(scale * value for value in axes.transData.transform((spot.x, spot.y))) for spot in spots]
    marks = [*at, *(tuple(scale * value for value in axes.transData.transform(point)) for point in beside)]
    box = axes.get_window_extent()
    inside = tuple(scale * value for value in (box.x0, box.y0, box.x1, box.y1))
    taken: list[tuple[float, float]] = []
    for spot, (x, y) in zip(spots, at, strict=True):
        right, up = min(_offsets(), key=lambda one: _cost((x + one[0], y + one[1]), one, marks, taken, inside))
        taken.append((x + right, y + up))
        parts: list[tuple[str, dict[str, object] | None]] = [(spot.text, None)]
        if math.hypot(right, up) > RADII[0] + 1:
            parts.insert(0, ("", {"arrowstyle": "-", "color": NEUTRAL, "linewidth": 0.6, "shrinkA": 5, "shrinkB": 3}))
        for text, leader in parts:
            label = axes.annotate(text, (spot.x, spot.y), xytext=(right, up), textcoords="offset points", ha="center",
                                  va="center", fontsize=8, arrowprops=leader)  # fmt: skip
            label.set_in_layout(False)


def _offsets() -> list[tuple[float, float]]:
    # To the right first, then round: labels read best there.
    angles = [2 * math.pi * turn / DIRECTIONS for turn in range(DIRECTIONS)]
    return [(radius * math.cos(angle), radius * math.sin(angle)) for radius in RADII for angle in angles]


def _cost(
    middle: tuple[float, float],
    offset: tuple[float, float],
    marks: Sequence[tuple[float, ...]],
    taken: Sequence[tuple[float, float]],
    inside: tuple[float, ...],
) -> float:
    """Nothing hidden comes first, then nearness."""
    x, y = middle
    hidden = sum(abs(x - a) < 2 * HALF_WIDTH and abs(y - b) < 2 * HALF_HEIGHT for a, b in taken)
    covered = sum(abs(x - a) < HALF_WIDTH + MARKER and abs(y - b) < HALF_HEIGHT + MARKER for a, b in marks)
    left, bottom, right, top = inside
    outside = not (left + HALF_WIDTH < x < right - HALF_WIDTH and bottom + HALF_HEIGHT < y < top - HALF_HEIGHT)
    return 1000 * hidden + 1000 * outside + 300 * covered + math.hypot(*offset)
