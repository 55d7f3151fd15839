"""Which texts of a figure lie on one another."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of visible texts whose boxes intersect; ticks beyond an axis are not drawn."""
    figure.draw_without_rendering()  # arranges all as a draw does
    beyond = {
        label
        for panel in figure.axes
        for axis in (panel.xaxis, panel.yaxis)
        for tick in axis.get_major_ticks()
        for label in (tick.label1, tick.label2)
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    texts = [
        text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip() and text not in beyond
    ]
    boxes = [text.get_window_extent().shrunk(0.95, 0.8) for text in texts]
    first = np.array([box.min for box in boxes]).reshape(-1, 1, 2)
    last = np.array([box.max for box in boxes]).reshape(1, -1, 2)
    begins_before_the_end = (first <= last).all(axis=-1)
    pairs = np.argwhere(np.triu(begins_before_the_end & begins_before_the_end.T, 1))
    return [(texts[one].get_text(), texts[other].get_text()) for one, other in pairs]
