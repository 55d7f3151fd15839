"""Figures and tables that several labs share: published figures, bars of measured runs, pictures of few colours.

What a paper prints, and what was measured, only ever stands beside what the package computes. An exercise that is still
to do is answered by its sentence, not by an error.
"""

import io
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, ParamSpec, cast

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from dlojz.base.errors import LabError
from dlojz.base.language import MEBIBYTE, minus, refusal, rounded, say, yes_no
from dlojz.base.table import Table
from dlojz.display.canvas import LabFigure, MimeBundle, described, finish, new_figure, plain
from dlojz.display.style import (
    CATEGORY_STYLES,
    COLLECTIVE_STYLES,
    EDGE,
    LINE_STYLES,
    ORANGE,
    OTHER,
    PREDICTED_ALPHA,
    PURPLE,
    SKY,
    SMALL,
    YELLOW,
    Style,
    category_label,
)
from dlojz.labs.kit.exercise import Verdict, or_to_do
from dlojz.prediction import predict
from dlojz.results.footprint import CATEGORIES, Footprint, Traffic
from dlojz.running.run import Run

Corner = Literal["lower center", "lower left"]
Part = tuple[float, Style, str]
"""A piece of a bar: bytes, look, name in the legend."""


def open_figure(width_in: float, height_in: float, en: str, fr: str) -> LabFigure:
    """Open a figure, described in words in both languages.

    Args:
        width_in, height_in: size in inches.
    """
    return new_figure(width_in, height_in, alt=say(en=en, fr=fr))


def panel(width_in: float, height_in: float, en: str, fr: str) -> Axes:
    """Open a figure of one panel, as `open_figure` does."""
    return open_figure(width_in, height_in, en, fr).subplots()


def figure_of(axes: Axes) -> LabFigure:
    """Finish the figure of one panel."""
    return finish(cast(LabFigure, axes.figure))


def done(axes: Axes) -> LabFigure:
    """Finish a figure of one panel in the plain look."""
    plain(axes)
    return figure_of(axes)


def labelled(axes: Axes, x: str, y: str, **legend: Any) -> LabFigure:
    """Finish a figure of one panel, with titles of both axes and a legend without frame.

    Args:
        legend: further options of its legend.
    """
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(frameon=False, **legend)
    return done(axes)


def plot_lines(axes: Axes, x: Sequence[Any], series: Mapping[str, Sequence[float]], **style: Any) -> None:
    """Draw one line per series, each with another colour, dashes and marker.

    Args:
        x: of all points.
        series: label to values.
    """
    for (label, values), (color, line, marker) in zip(series.items(), itertools.cycle(LINE_STYLES), strict=False):
        # Options of the caller win over the series' own look.
        axes.plot(x, values, **{"color": color, "linestyle": line, "marker": marker, "label": label, **style})


def unmeasured(run: Run) -> LabError:
    """The refusal of a run that has not come to its end."""
    return refusal(
        en=f"the run {run.config.title} was not measured to its end: look at its logs, then run it again.",
        fr=f"l’exécution {run.config.title} n’a pas été mesurée jusqu’au bout : consultez ses journaux, puis "
        "relancez-la.",
    )


def measured_footprint(run: Run, rank: int = 0) -> Footprint:
    """What one rank of a run was measured to hold and send.

    Raises:
        LabError: if the run has not come so far.
    """
    footprint = run.record.footprint(rank) if run.record is not None else None
    if footprint is None:
        raise unmeasured(run)
    return footprint


def bar(axes: Axes, position: float, size: float, offset: float, style: Style, alpha: float, label: str | None) -> None:
    """One piece of a horizontal bar."""
    axes.barh(
        position,
        size,
        left=offset,
        height=0.36,
        color=style.color,
        hatch=style.hatch,
        alpha=alpha,
        edgecolor=EDGE,
        linewidth=0.4,
        label=label,
    )


def legend_above(axes: Axes, *, ncols: int, height: float = 1.0, loc: Corner = "lower center") -> None:
    """A legend above the axes in which each name stands once.

    Args:
        ncols: columns.
        height: its lower edge, in heights of the axes.
        loc: its corner that is put there.
    """
    handles: dict[str, Any] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        handles.setdefault(label, handle)
    middle = 0.5 if loc == "lower center" else 0.0
    axes.legend(
        handles.values(),
        handles.keys(),
        frameon=False,
        loc=loc,
        bbox_to_anchor=(middle, height),
        ncols=ncols,
        fontsize=SMALL,
    )


def memory_and_messages(
    runs: Sequence[Run],
    titles: Sequence[str],
    *,
    opening: str,
    is_drawn: Callable[[Traffic], bool],
    ncols: int,
    at_peak: bool = False,
) -> LabFigure:
    """Rank 0 of runs: memory by category, and bytes sent by collective; predicted in pale above.

    Args:
        opening: how the figure told in words begins.
        is_drawn: which traffic is drawn.
        at_peak: what each category holds at the moment of the peak, so that a bar is as long as the peak is high;
            by default the largest that each one takes, which need not be at one moment.

    Raises:
        LabError: if a run was not measured.
    """
    pairs = [(predict(run.config), measured_footprint(run)) for run in runs]
    figure = new_figure(10.0, 1.5 + 0.62 * len(runs), alt=opening + ", ".join(titles))
    memory, traffic_axes = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for row, footprints in enumerate(pairs):
        # The axis is turned round below: −0.2 puts the prediction above the measurement.
        for footprint, shift, alpha in zip(footprints, (-0.2, 0.2), (PREDICTED_ALPHA, 1.0), strict=True):
            _stack(memory, _categories(footprint, at_peak), row + shift, alpha)
            _stack(traffic_axes, _messages(footprint, is_drawn), row + shift, alpha)
    memory.set_yticks(range(len(runs)), [title.replace(" (", "\n(") for title in titles])
    memory.invert_yaxis()
    if at_peak:
        memory.set_xlabel(say(en="rank 0, at its peak (MiB)", fr="rang 0, au moment du pic (Mio)"))
    else:
        memory.set_xlabel(say(en="rank 0 (MiB)", fr="rang 0 (Mio)"))
    traffic_axes.set_xlabel(say(en="sent per step (MiB)", fr="envoyé par pas (Mio)"))
    for axes in (memory, traffic_axes):
        plain(axes)
        legend_above(axes, ncols=ncols)
    return finish(figure)


def _categories(footprint: Footprint, at_peak: bool) -> list[Part]:
    memory = footprint.memory
    category_bytes = (
        (memory.at_peak_bytes or {}) if at_peak else {name: memory.category(name) or 0 for name in CATEGORIES}
    )
    return [(category_bytes.get(name, 0), CATEGORY_STYLES[name], category_label(name)) for name in CATEGORIES]


def _messages(footprint: Footprint, is_drawn: Callable[[Traffic], bool]) -> list[Part]:
    return [
        (traffic.sent_bytes, COLLECTIVE_STYLES.get(traffic.collective, OTHER), traffic.collective.replace("_", "-"))
        for traffic in footprint.communication
        if is_drawn(traffic)
    ]


def _stack(axes: Axes, parts: Sequence[Part], position: float, alpha: float) -> None:
    offset = 0.0
    for num_bytes, style, label in parts:
        size = num_bytes / MEBIBYTE
        if size:
            # The opaque bar alone has a name, so that the legend shows each part once.
            bar(axes, position, size, offset, style, alpha, label if alpha == 1.0 else None)
        offset += size


COLOURS = 255
"""So many that no difference is seen, and a third of the bytes of true colours."""
SHEET_RANKS = (Style(SKY, ""), Style(ORANGE, "//"), Style(YELLOW, ".."), Style(PURPLE, "\\\\"))
"""How the ranks of a figure are told apart."""

_P = ParamSpec("_P")


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure in a notebook, in few colours: this lab shows many, and its file must stay small."""

    figure: LabFigure

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> MimeBundle:
        from PIL import Image

        full, small = Image.open(io.BytesIO(self.figure.png())).convert("RGB"), io.BytesIO()
        # Maximum coverage keeps colours that are rare, such as those of a small patch in a legend.
        # No dithering: its scattered pixels compress badly.
        few = full.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(small, "png", optimize=True)
        return described(small.getvalue(), self.figure.alt)


def pictured(draw: Callable[_P, LabFigure]) -> Callable[_P, Picture | Verdict]:
    """`or_to_do` of a function that draws."""

    @wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> Picture:
        return Picture(draw(*args, **kwargs))

    return or_to_do(drawn)


def answered(questions: Iterable[tuple[str, bool | str]]) -> Table:
    """Tabulate questions with yes, no, or what is written."""
    rows = tuple((question, reply if isinstance(reply, str) else yes_no(reply)) for question, reply in questions)
    return Table((say(en="question", fr="question"), say(en="answer", fr="réponse")), rows)


PLATE = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
"""A number stays legible where a line or a hatch lies under it."""
HEAT = "Blues"


@dataclass(frozen=True, eq=False)
class Illustrated:
    """A picture and, beneath it, a table: two outputs of one cell, so that either is shown wherever notebooks are.

    Attributes:
        picture: in few colours.
        sheet: the figures, row by row.
    """

    picture: Picture
    sheet: Table

    @property
    def figure(self) -> LabFigure:
        """The picture's figure."""
        return self.picture.figure

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.picture)
        display(self.sheet)

    def __repr__(self) -> str:
        return f"{self.figure.alt}\n{self.sheet}"


def illustrated(draw: Callable[_P, tuple[LabFigure, Table]]) -> Callable[_P, Illustrated | Verdict]:
    """`or_to_do` of a function that gives a figure and its table."""

    @wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> Illustrated:
        figure, sheet = draw(*args, **kwargs)
        return Illustrated(Picture(figure), sheet)

    return or_to_do(drawn)


def short(value: float) -> str:
    """Format a number of an axis with three digits, or its whole part, and a minus sign."""
    return minus(rounded(value))


def logarithmic(axis: Axis, marks: tuple[float, ...] = (1.0,)) -> None:
    """Plain numbers at some marks of every decade of an axis that is logarithmic already."""
    axis.set_major_locator(LogLocator(subs=marks, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axis.set_minor_formatter(NullFormatter())


def thousands(axis: Axis) -> None:
    """Plain numbers on a linear axis, with the marks of the reader's language."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def given(value: Any, *arguments: Any) -> Any:
    """A value, or what a student's function gives for it."""
    return value(*arguments) if callable(value) else value
