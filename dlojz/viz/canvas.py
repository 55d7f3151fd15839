"""An empty figure that shows itself in a notebook and writes itself to a file, without pyplot's global state.

Layer 4. Invariant: a text that comes from a user is drawn letter by letter, never read as mathematics.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from dlojz.schema import LabError
from dlojz.text import say

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
    axes.grid(axis="both", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
