"""Where the numbers of points stand so that none lies on another: a small greedy search.

Layer 4. Invariant: a point keeps its place, only its label moves, and a line leads back where it moved far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

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
            parts.insert(0, ("", {"arrowstyle": "-", "color": "#888888", "linewidth": 0.6, "shrinkA": 5, "shrinkB": 3}))
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
