"""Drawing in points, without its medium: boxes, lines and words, written as SVG here and painted by `canvas.figure_of`.

One point is 1/72 inch; x goes right, y goes down. No matplotlib is needed to arrange a drawing or to write its SVG,
which takes a few milliseconds for hundreds of boxes, so that a panel follows its sliders at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple, TypeAlias

from dlojz.base.table import safe
from dlojz.display.style import BLACK, EDGE, MAGNIFIED, SHADOW, WHITE, Style, legible

Dashes: TypeAlias = Literal["-", "--", ":"]
_DASHES = {"-": "", "--": "6 4", ":": "2 3"}
_HATCHES = {
    "//": "M0,6 L6,0",
    "\\\\": "M0,0 L6,6",
    "..": "M2,3 h1.4",
    "xx": "M0,6 L6,0 M0,0 L6,6",
    "++": "M0,3 H6 M3,0 V6",
    "--": "M0,3 H6",
    "||": "M3,0 V6",
}
_pages = count()
LETTER = 0.62
"""Width of a letter at most, on the mean of a word, in parts of its height."""


class Box(NamedTuple):
    """Rectangle: its upper left corner, its size, its look; `tip` is what a pointer over it is told."""

    x: float
    y: float
    width: float
    height: float
    color: str = "none"
    hatch: str = ""
    edge: str = "none"
    line: float = 0.5
    tip: str = ""


class Line(NamedTuple):
    """Line through points; filled it is a polygon, curved a quadratic Bézier through start, bend and end."""

    points: Sequence[tuple[float, float]]
    edge: str = BLACK
    line: float = 1.0
    dashes: Dashes = "-"
    color: str = "none"
    curved: bool = False
    tip: str = ""


class Words(NamedTuple):
    """Text of one line; y is its middle, `size` its height, `halo` the colour that keeps it clear of a hatch."""

    x: float
    y: float
    text: str
    size: float = 8.0
    anchor: Literal["start", "middle", "end"] = "start"
    color: str = BLACK
    bold: bool = False
    halo: str = ""


Shape: TypeAlias = Box | Line | Words


@dataclass(frozen=True)
class Drawing:
    """Shapes on a sheet, the later ones above the earlier ones; words that a notebook would make too small are raised.

    Attributes:
        width, height: of the sheet, in points.
        alt: what it shows, in words.
    """

    width: float
    height: float
    alt: str
    shapes: tuple[Shape, ...]

    def __post_init__(self) -> None:
        raised = (
            shape._replace(size=legible(shape.size, self.width)) if isinstance(shape, Words) else shape
            for shape in self.shapes
        )
        object.__setattr__(self, "shapes", tuple(raised))

    def svg(self) -> str:
        """Write an `<svg>` element with its description for screen readers and a tooltip for each box with a tip."""
        # Ids of patterns are of the whole page: each drawing on it needs its own.
        page = f"h{next(_pages)}-"
        hatches = sorted({shape.hatch for shape in self.shapes if isinstance(shape, Box) and shape.hatch in _HATCHES})
        ids = {hatch: f"{page}{number}" for number, hatch in enumerate(hatches)}
        patterns = (
            _element(
                "pattern",
                _element("path", d=_HATCHES[hatch], stroke=SHADOW, fill="none"),
                id=name, width="6", height="6", patternUnits="userSpaceOnUse",
            )
            for hatch, name in ids.items()
        )  # fmt: skip
        return _element(
            "svg",
            _element("defs", "".join(patterns)) + "".join(part for shape in self.shapes for part in _svg(shape, ids)),
            role="img",
            aria_label=self.alt,
            viewBox=f"0 0 {self.width:.1f} {self.height:.1f}",
            style=f"width:100%;max-width:{MAGNIFIED * self.width:.0f}px;background:{WHITE}",
            xmlns="http://www.w3.org/2000/svg",
            font_family="sans-serif",
        )


def _element(tag: str, inner: str = "", tip: str = "", /, **attributes: str | float) -> str:
    """Write an element; every text is escaped but `inner`, which is made of elements or escaped already."""
    title = f"<title>{safe(tip)}</title>" if tip else ""
    looks = "".join(
        f' {name.replace("_", "-")}="' + (f"{value:.1f}" if isinstance(value, float) else safe(value)) + '"'
        for name, value in attributes.items()
        if value != ""
    )
    return f"<{tag}{looks}>{title}{inner}</{tag}>"


def _svg(shape: Shape, ids: Mapping[str, str]) -> Iterator[str]:
    properties: dict[str, str | float]
    match shape:
        case Box(x, y, width, height, color, hatch, edge, line, tip):
            geometry = {"x": x, "y": y, "width": width, "height": height}
            over = hatch in ids  # the upper of the two is what a pointer meets
            yield _element("rect", "", "" if over else tip, **geometry, fill=color, stroke=edge, stroke_width=line)
            if over:
                # A hatch is a second rectangle over the filled one.
                yield _element("rect", "", tip, **geometry, fill=f"url(#{ids[hatch]})")
        case Line(points, edge, line, dashes, color, curved, tip):
            steps = [f"{x:.1f},{y:.1f}" for x, y in points]
            path_data = f"M{steps[0]} Q{steps[1]} {steps[2]}" if curved else "M" + " L".join(steps)
            properties = {"stroke": edge, "stroke_width": line, "stroke_dasharray": _DASHES[dashes], "fill": color}
            yield _element("path", "", tip, **properties, d=path_data)
        case Words(x, y, text, size, anchor, color, bold, halo):
            # Stroke first, then fill: the halo does not eat into the letters.
            properties = {"stroke": halo, "stroke_width": size / 4, "paint_order": "stroke"} if halo else {}
            properties.update(font_size=size, text_anchor=anchor, font_weight="bold" if bold else "", fill=color)
            # SVG's y is the baseline of a text; 0.36 of the height lifts its middle to y.
            yield _element("text", safe(text), x=x, y=y + 0.36 * size, pointer_events="none", **properties)


class Stroke(NamedTuple):
    """Look of a line in a legend."""

    color: str
    dashes: Dashes = "-"
    line: float = 1.4


def legend_of(entries: Mapping[str, Style | Stroke], width: float, top: float, size: float = 8.5) -> list[Shape]:
    """Arrange a legend in lines: a swatch or a stroke before each label.

    Args:
        width: of the sheet, in points.
        top: middle of its first line.
    """
    shapes: list[Shape] = []
    x = left = 10.0
    for label, style in entries.items():
        # Swatch and gaps are 38 points; a letter is 0.56 of the height wide, in the mean.
        room = 38 + 0.56 * size * len(label)
        if x > left and x + room > width:
            x, top = left, top + 1.8 * size
        if isinstance(style, Style):
            shapes.append(Box(x, top - 5, 22, 10, style.color, style.hatch, EDGE))
        else:
            shapes.append(Line([(x, top), (x + 22, top)], style.color, style.line, style.dashes))
        shapes.append(Words(x + 27, top, label, size))
        x += room
    return shapes
