"""Canvas of the figures: a figure that describes itself in words, and the parts that all figures share.

A text that comes from a user is drawn letter by letter, never read as mathematics; pyplot's global state is not used.
"""

import base64
import io
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Curve
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter, ScalarFormatter

from dlojz.base.language import Sentences, shortest
from dlojz.base.table import safe, visible
from dlojz.display.drawing import Box, Drawing, Line, Words
from dlojz.display.style import DPI, EDGE, HEADING, NORMAL, RULE, SHADOW, SMALL, Style, legible

phrase = Sentences(Path(__file__).parent / "figures" / "data" / "figures.md", visible=visible)
"""Writes the sentences of all figures: titles, and what they show in words."""

MimeBundle = tuple[dict[str, Any], dict[str, Any]]


class LabFigure(Figure):
    """A matplotlib figure with a description in words, for those who cannot see it."""

    alt: str = ""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> MimeBundle:
        return described(self.png(), self.alt)

    def png(self) -> bytes:
        """Draw the figure as a PNG."""
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=DPI)
        return picture.getvalue()

    def html(self) -> str:
        """Write the figure as an HTML image with its description."""
        return image_html(self.png(), self.alt)


def image_html(png: bytes, alt: str) -> str:
    """Write a picture as an HTML image with its description."""
    picture = base64.b64encode(png).decode()
    return f'<img alt="{safe(alt)}" style="max-width:100%" src="data:image/png;base64,{picture}">'


def described(png: bytes, alt: str) -> MimeBundle:
    """Give a notebook a picture with its description: data by MIME type, and their metadata.

    nbconvert and others read the description of a PNG in its metadata. JupyterLab (4.6) shows a PNG without any, but an
    HTML image with its own, and prefers HTML: it gets that, too, where it runs the kernel.
    """
    # In one line, as an attribute of an image needs it.
    words = " ".join(alt.split()) or "figure"
    data: dict[str, Any] = {"image/png": png, "text/plain": alt or "figure"}
    if os.environ.get("JPY_SESSION_NAME"):
        data["text/html"] = image_html(png, words)
    return data, {"image/png": {"alt": words}}


def new_figure(width_in: float, height_in: float, alt: str) -> LabFigure:
    """Make a figure whose parts arrange themselves without overlap.

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
    """Make every text literal and every number the reader's language, then write the picture if a path is given.

    Raises:
        LabError: if the folder cannot be written or the ending names no picture format.
    """
    # First: the labels made below already carry the decimal mark.
    _write_marks(figure)
    _make_literal(figure)
    _make_legible(figure)
    with rc_context({"text.parse_math": False}):
        figure.draw_without_rendering()  # labels of ticks are only made when drawn
    # Once more: drawing has made new texts.
    _make_literal(figure)
    if path is None:
        return figure
    target = Path(path)
    legal = sorted(figure.canvas.get_supported_filetypes())
    if target.suffix[1:].lower() not in legal:
        raise phrase.refused("ending of a figure", path=str(path), legal=", ".join(legal))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=DPI, metadata={"Title": figure.alt} if target.suffix.lower() == ".png" else None)
    except OSError as error:
        raise phrase.refused("figure not written", target=target, strerror=error.strerror) from None
    return figure


def _make_literal(figure: LabFigure) -> None:
    for text in figure.findobj(Text):
        text.set_parse_math(False)


def text_pt(artist: Axes | Figure, size: float = SMALL) -> float:
    """Size of text in points on this figure: as wished, or the smallest that a notebook shows legibly."""
    figure = artist if isinstance(artist, Figure) else artist.get_figure(root=True)
    assert figure is not None
    return legible(size, 72 * figure.get_figwidth())


def _make_legible(figure: LabFigure) -> None:
    """Raise each text that a notebook would make too small; ticks by their axis, which makes them anew when drawn."""
    smallest_pt = text_pt(figure, 0.0)
    tick_kinds: tuple[Literal["major", "minor"], ...] = ("major", "minor")
    for axes in figure.axes:
        for axis, tick_kind in product((axes.xaxis, axes.yaxis), tick_kinds):
            wished = axis.get_tick_params(tick_kind).get("labelsize", mpl.rcParams["xtick.labelsize"])
            if FontProperties(size=wished).get_size_in_points() < smallest_pt:
                axis.set_tick_params(tick_kind, labelsize=smallest_pt)
    for text in figure.findobj(Text):
        if text.get_fontproperties().get_size_in_points() < smallest_pt:
            text.set_fontsize(smallest_pt)


def painted(drawing: Drawing) -> LabFigure:
    """Paint a drawing as a figure of its size."""
    figure = new_figure(drawing.width / 72, drawing.height / 72, drawing.alt)
    figure.set_layout_engine("none")
    paint(figure.add_axes((0, 0, 1, 1)), drawing)
    return figure


def paint(axes: Axes, drawing: Drawing) -> None:
    """Paint a drawing on axes of its size; neighbouring boxes are one collection, which draws as fast as one."""
    axes.set(xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.axis("off")
    # groupby keeps the order, in which later shapes lie over earlier ones.
    for are_boxes, shapes in groupby(drawing.shapes, lambda shape: isinstance(shape, Box)):
        if are_boxes:
            _boxes(axes, [shape for shape in shapes if isinstance(shape, Box)])
            continue
        for shape in shapes:
            if isinstance(shape, Line):
                # A quadratic Bézier: start, bend, end; without codes the points are joined by straight lines.
                codes = [Curve.MOVETO, Curve.CURVE3, Curve.CURVE3] if shape.curved else None
                properties: dict[str, Any] = {"edgecolor": shape.edge, "facecolor": shape.color, "capstyle": "butt"}
                curve = Curve(shape.points, codes)
                axes.add_patch(PathPatch(curve, linewidth=shape.line, linestyle=shape.dashes, zorder=1, **properties))
            elif isinstance(shape, Words):
                properties = {"color": shape.color, "fontweight": "bold" if shape.bold else "normal", "zorder": 1}
                if shape.halo:
                    # The halo is a stroke in the ground's colour around each letter, in points.
                    properties["path_effects"] = [withStroke(linewidth=shape.size / 4, foreground=shape.halo)]
                side = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
                axes.text(
                    shape.x, shape.y, shape.text, fontsize=shape.size, ha=side, va="center_baseline", **properties
                )


def _boxes(axes: Axes, boxes: Sequence[Box]) -> None:
    """Fill boxes, then lay their hatches over them."""
    # Clockwise from the upper left corner: in a drawing y goes down.
    corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h, *_ in boxes]
    properties: dict[str, Any] = {"facecolors": [box.color for box in boxes], "edgecolors": [box.edge for box in boxes]}
    axes.add_collection(PolyCollection(corners, linewidths=[box.line for box in boxes], zorder=1, **properties))
    for hatch in sorted({box.hatch for box in boxes} - {""}):
        chosen = [corner for corner, box in zip(corners, boxes, strict=True) if box.hatch == hatch]
        # SHADOW is translucent: each box keeps the colour it was filled with.
        properties = {"facecolors": "none", "edgecolors": SHADOW, "linewidths": 0, "hatch": hatch}
        axes.add_collection(PolyCollection(chosen, zorder=1, **properties))


def figure_of(drawing: Drawing, path: str | Path | None = None) -> LabFigure:
    """Paint a drawing, and write the picture if a path is given.

    Raises:
        LabError: as `finish`.
    """
    return finish(painted(drawing), path)


def plain(axes: Axes, grid: str = "both") -> None:
    """Draw frame and grid so that they leave the eye to the data.

    Args:
        grid: along which axis its lines are drawn: x, y or both.
    """
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color=RULE, linewidth=0.6)
    if grid != "both":
        axes.grid(visible=False, axis="y" if grid == "x" else "x")
    axes.set_axisbelow(True)


def caption(axes: Axes, *, x: str = "", y: str = "", title: str = "", size: float = HEADING) -> None:
    """Write what the axes of a panel are, and its title on the left."""
    if x:
        axes.set_xlabel(x)
    if y:
        axes.set_ylabel(y)
    if title:
        axes.set_title(title, loc="left", fontsize=size)


def below(figure: Figure, handles: Sequence[Artist], columns: int, side: str = "center", height: float = 1.2) -> None:
    """Draw the legend of a whole figure below it, in the middle or on one side; `height` is that of its signs."""
    options: dict[str, Any] = {"loc": f"outside lower {side}", "ncols": columns}
    figure.legend(handles=list(handles), frameon=False, fontsize=NORMAL, handleheight=height, **options)


def swatch(style: Style, label: str, linewidth: float = 0.6) -> Patch:
    """Make the entry of a legend for a colour and its hatch."""
    return Patch(facecolor=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=linewidth, label=label)


def key(label: str, **properties: Any) -> Line2D:
    """Make the entry of a legend for a line or a marker."""
    return Line2D([], [], label=label, **properties)


def note(
    axes: Axes, text: str, point: tuple[float, float], shift: tuple[float, float] = (6, 0), **properties: Any
) -> None:
    """Write a small text beside a point, shifted by points (1/72 inch)."""
    properties = {"va": "center", "fontsize": SMALL, **properties}
    axes.annotate(text, point, xytext=shift, textcoords="offset points", **properties)


def stack(
    axes: Axes,
    position: float,
    parts: Iterable[tuple[float, Style]],
    width: float,
    *,
    start: float = 0.0,
    upright: bool = False,
    **properties: Any,
) -> float:
    """Draw one bar piece by piece, each with its colour and hatch; empty pieces are left out.

    Args:
        position: of the bar, on the other axis.
        parts: length and look of each piece.
        start: where the first piece begins.
        upright: whether the bar stands.

    Returns:
        Where the last piece ends.
    """
    for length, style in parts:
        # The caller's properties come last: they may replace any of these.
        drawn = {"color": style.color, "hatch": style.hatch, "edgecolor": EDGE, "linewidth": 0.6, **properties}
        if length > 0 and upright:
            axes.bar(position, length, width, bottom=start, **drawn)
        elif length > 0:
            axes.barh(position, length, width, left=start, **drawn)
        start += length
    return start


def logarithmic(
    axes: Axes, axis_name: str, write: Callable[[float], str] = shortest, marks: tuple[float, ...] = (1.0, 2.0, 5.0)
) -> None:
    """Make the x or y axis logarithmic, with plain numbers at some marks of every decade instead of powers of ten."""
    axes.set(**{f"{axis_name}scale": "log"})
    axis: Axis = axes.xaxis if axis_name == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=marks))
    axis.set_major_formatter(lambda value, position: write(value))
    axis.set_minor_formatter(NullFormatter())


def _write_marks(figure: Figure) -> None:
    """Write the numbers of plain axes with the decimal mark of the reader's language."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            # Where a figure has set a formatter of its own, it stays.
            if type(axis.get_major_formatter()) in (ScalarFormatter, LogFormatterSciNotation):
                axis.set_major_formatter(lambda value, position: shortest(value))
