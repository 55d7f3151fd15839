"""Which texts of a figure lie on one another, outside of it, or are too small to read in a notebook."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text

NOTEBOOK_PX, PX_PER_INCH, LEAST_PX = 950, 110, 9
"""Width of a notebook's output, what a figure is drawn with, and the least height of letters."""


def shown_texts(figure: Figure) -> list[Text]:
    """All texts that a reader sees; ticks beyond an axis are not drawn."""
    beyond = {
        label
        for panel in figure.axes
        for axis in (panel.xaxis, panel.yaxis)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for label in (tick.label1, tick.label2)
        if not panel.axison or not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    return [
        text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip() and text not in beyond
    ]


def too_small(figure: Figure) -> list[tuple[str, float]]:
    """Visible texts that a notebook shows with letters under 9 pixels, and how high they are."""
    width_px = figure.get_figwidth() * PX_PER_INCH
    px_per_pt = PX_PER_INCH / 72 * min(1.0, NOTEBOOK_PX / width_px)
    heights_px = [
        (text.get_text(), text.get_fontproperties().get_size_in_points() * px_per_pt) for text in shown_texts(figure)
    ]
    return [(text, round(height_px, 2)) for text, height_px in heights_px if height_px < LEAST_PX - 0.001]


def outside(figure: Figure) -> list[str]:
    """Visible texts that the edge of the figure cuts, by more than a pixel."""
    whole = figure.bbox.padded(1.0)
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown_texts(figure)]
    return [text for text, box in boxes if not (whole.contains(*box.min) and whole.contains(*box.max))]


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of visible texts whose boxes intersect."""
    figure.draw_without_rendering()  # arranges all as a draw does
    texts = shown_texts(figure)
    boxes = [text.get_window_extent().shrunk(0.95, 0.8) for text in texts]
    first = np.array([box.min for box in boxes]).reshape(-1, 1, 2)
    last = np.array([box.max for box in boxes]).reshape(1, -1, 2)
    begins_before_the_end = (first <= last).all(axis=-1)
    pairs = np.argwhere(np.triu(begins_before_the_end & begins_before_the_end.T, 1))
    return [(texts[one].get_text(), texts[other].get_text()) for one, other in pairs]
