"""Figures and tables that several labs share: published figures, bars of measured runs, pictures of few colours.

What a paper prints, and what was measured, only ever stands beside what the package computes. An exercise that is still
to do is answered by its sentence, not by an error.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from dlojz import models
from dlojz.base.language import MEBIBYTE, decimal, format_count, localized, minus, percent, refusal, rounded, say
from dlojz.base.table import Table
from dlojz.cost_model import Calibration, calibration
from dlojz.display.canvas import LabFigure, decimal_marks, finish, new_figure, plain
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
    YELLOW,
    Style,
    category_label,
)
from dlojz.hardware import Cluster
from dlojz.labs.kit.exercise import NotDone, Verdict
from dlojz.planner.ask import PROFILE_OF_GPU
from dlojz.prediction import predict
from dlojz.results.footprint import CATEGORIES, Footprint, Traffic

if TYPE_CHECKING:
    from dlojz.running.run import Run


@dataclass(frozen=True, kw_only=True)
class Published:
    """One model as its paper gives it; what the paper calls FLOPs are multiply-adds."""

    parameters: float
    multiply_adds: float
    image_size: int


# Dai et al. 2021 (arXiv 2106.04803v2), tables 4, 5 and 12. CoAtNet-0 to 2: the rows "strided DConv", which is the
# variant of `dlojz.models`; for the others the paper gives no such row.
COATNET = {
    "coatnet_0": Published(parameters=25e6, multiply_adds=4.6e9, image_size=224),
    "coatnet_1": Published(parameters=42e6, multiply_adds=8.8e9, image_size=224),
    "coatnet_2": Published(parameters=75e6, multiply_adds=16.6e9, image_size=224),
    "coatnet_3": Published(parameters=168e6, multiply_adds=34.7e9, image_size=224),
    "coatnet_4": Published(parameters=275e6, multiply_adds=189.5e9, image_size=384),
    "coatnet_5": Published(parameters=688e6, multiply_adds=812e9, image_size=512),
    "coatnet_6": Published(parameters=1.47e9, multiply_adds=1521e9, image_size=512),
    "coatnet_7": Published(parameters=2.44e9, multiply_adds=2586e9, image_size=512),
}


@dataclass(frozen=True)
class PublishedLine:
    """One model, counted and published."""

    name: str
    counted: models.ModelSummary
    published: Published

    @property
    def parameters_gap(self) -> float:
        """Relative difference of the parameters."""
        return self.counted.parameters / self.published.parameters - 1

    @property
    def multiply_adds_gap(self) -> float:
        """Relative difference of the multiply-adds."""
        return self.counted.multiply_adds / self.published.multiply_adds - 1


class CoatnetTable:
    """CoAtNet-0…7: what the package counts beside what the paper prints."""

    def __init__(self, lines: Iterable[PublishedLine]) -> None:
        self.lines = tuple(lines)

    def __repr__(self) -> str:
        heads = (
            say(en="model", fr="modèle"),
            say(en="image", fr="image"),
            say(en="parameters (M)", fr="paramètres (M)"),
            say(en="paper", fr="article"),
            say(en="gap", fr="écart"),
            say(en="multiply-adds (G)", fr="mult.-additions (G)"),
            say(en="paper", fr="article"),
            say(en="gap", fr="écart"),
        )
        rows = tuple(
            (
                line.name,
                f"{line.published.image_size}²",
                decimal(line.counted.parameters / 1e6, 1),
                decimal(line.published.parameters / 1e6, 0),
                percent(line.parameters_gap, signed=True),
                decimal(line.counted.multiply_adds / 1e9, 1),
                decimal(line.published.multiply_adds / 1e9, 1),
                percent(line.multiply_adds_gap, signed=True),
            )
            for line in self.lines
        )
        return str(Table(heads, rows))


def coatnet_table() -> CoatnetTable:
    """Count CoAtNet-0…7 at the image sizes of the paper and lay them beside its figures."""
    return CoatnetTable(
        PublishedLine(name, models.describe(name, published.image_size), published)
        for name, published in COATNET.items()
    )


Corner = Literal["lower center", "lower left"]
Part = tuple[float, Style, str]
"""A piece of a bar: bytes, look, name in the legend."""


def panel(width_in: float, height_in: float, en: str, fr: str) -> Axes:
    """Open a figure of one panel, described in words in both languages.

    Args:
        width_in, height_in: size in inches.
        en, fr: what the figure shows.
    """
    return new_figure(width_in, height_in, alt=say(en=en, fr=fr)).subplots()


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
        axes: the panel, drawn.
        x, y: titles.
        legend: further options of its legend.
    """
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(frameon=False, **legend)
    return done(axes)


def plot_lines(axes: Axes, x: Sequence[Any], series: Mapping[str, Sequence[float]], **look: Any) -> None:
    """Draw one line per series, each with its own colour, dashes and marker.

    Args:
        axes: where.
        x: of all points.
        series: label to values.
        look: further options of each line.
    """
    for (label, values), (color, line, marker) in zip(series.items(), LINE_STYLES, strict=False):
        axes.plot(x, values, **{"color": color, "linestyle": line, "marker": marker, "label": label, **look})


def measured_footprint(run: Run, rank: int = 0) -> Footprint:
    """What one rank of a run was measured to hold and send.

    Raises:
        LabError: if the run has not come so far.
    """
    footprint = run.record.footprint(rank) if run.record is not None else None
    if footprint is None:
        raise refusal(
            en=f"the run {run.config.title} was not measured to its end: look at its logs, then run it again.",
            fr=f"l’exécution {run.config.title} n’a pas été mesurée jusqu’au bout : consultez ses journaux, puis "
            "relancez-la.",
        )
    return footprint


def bar(axes: Axes, place: float, size: float, left: float, style: Style, alpha: float, label: str | None) -> None:
    """One piece of a horizontal bar."""
    axes.barh(
        place,
        size,
        left=left,
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
        axes: what it is of.
        ncols: columns.
        height: its lower edge, in heights of the axes.
        loc: its corner that is put there.
    """
    found: dict[str, Any] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        found.setdefault(label, handle)
    middle = 0.5 if loc == "lower center" else 0.0
    axes.legend(
        found.values(),
        found.keys(),
        frameon=False,
        loc=loc,
        bbox_to_anchor=(middle, height),
        ncols=ncols,
        fontsize=8,
    )


def memory_and_messages(
    runs: Sequence[Run],
    titles: Sequence[str],
    *,
    opening: str,
    shown: Callable[[Traffic], bool],
    ncols: int,
    at_peak: bool = False,
) -> LabFigure:
    """Rank 0 of runs: memory by category, and bytes sent by collective; predicted in pale above.

    Args:
        runs: measured ones.
        titles: a name for each.
        opening: how the figure told in words begins.
        shown: which traffic is drawn.
        ncols: columns of the legends.
        at_peak: what each category holds at the moment of the peak, so that a bar is as long as the peak is high;
            by default the largest that each one takes, which need not be at one moment.

    Raises:
        LabError: if a run was not measured.
    """
    pairs = [(predict(run.config), measured_footprint(run)) for run in runs]
    figure = new_figure(10.0, 1.5 + 0.62 * len(runs), alt=opening + ", ".join(titles))
    memory, sent = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for place, both in enumerate(pairs):
        for footprint, shift, alpha in zip(both, (-0.2, 0.2), (PREDICTED_ALPHA, 1.0), strict=True):
            _stack(memory, _categories(footprint, at_peak), place + shift, alpha)
            _stack(sent, _messages(footprint, shown), place + shift, alpha)
    memory.set_yticks(range(len(runs)), [title.replace(" (", "\n(") for title in titles])
    memory.invert_yaxis()
    if at_peak:
        memory.set_xlabel(say(en="rank 0, at its peak (MiB)", fr="rang 0, au moment du pic (Mio)"))
    else:
        memory.set_xlabel(say(en="rank 0 (MiB)", fr="rang 0 (Mio)"))
    sent.set_xlabel(say(en="sent per step (MiB)", fr="envoyé par pas (Mio)"))
    for axes in (memory, sent):
        decimal_marks(axes.xaxis)
        plain(axes)
        legend_above(axes, ncols=ncols)
    return finish(figure)


def _categories(footprint: Footprint, at_peak: bool) -> list[Part]:
    memory = footprint.memory
    held = (memory.at_peak_bytes or {}) if at_peak else {name: memory.category(name) or 0 for name in CATEGORIES}
    return [(held.get(name, 0), CATEGORY_STYLES[name], category_label(name)) for name in CATEGORIES]


def _messages(footprint: Footprint, shown: Callable[[Traffic], bool]) -> list[Part]:
    return [
        (one.sent_bytes, COLLECTIVE_STYLES.get(one.collective, OTHER), one.collective.replace("_", "-"))
        for one in footprint.communication
        if shown(one)
    ]


def _stack(axes: Axes, parts: Sequence[Part], place: float, alpha: float) -> None:
    left = 0.0
    for num_bytes, style, label in parts:
        size = num_bytes / MEBIBYTE
        if size:
            bar(axes, place, size, left, style, alpha, label if alpha == 1.0 else None)
        left += size


ZERO_PUBLISHED_RANKS = (1, 4, 16, 64, 256, 1024)
# Rajbhandari et al. 2020 (arXiv 1910.02054), table 1: gigabytes (10⁹) per GPU by number of GPUs, for stages 1, 2 and 3.
TABLE_1: dict[float, tuple[str, ...]] = {
    7.5e9: ("120 120 120", "52.5 41.3 30", "35.6 21.6 7.5", "31.4 16.6 1.88", "30.4 15.4 0.47", "30.1 15.1 0.12"),
    128e9: ("2048 2048 2048", "896 704 512", "608 368 128", "536 284 32", "518 263 8", "513 257 2"),
    1e12: (
        "16000 16000 16000",
        "7000 5500 4000",
        "4750 2875 1000",
        "4187 2218 250",
        "4046 2054 62.5",
        "4011 2013 15.6",
    ),
}


class PublishedTable:
    """ZeRO's table 1, beside what a function of the bytes per rank gives.

    Args:
        state_bytes: called with parameters, ranks and stage.
    """

    def __init__(self, state_bytes: Callable[[float, int, int], float]) -> None:
        self.cells = [
            (parameters, ranks, stage, printed, state_bytes(parameters, ranks, stage) / 1e9)
            for parameters, rows in TABLE_1.items()
            for ranks, row in zip(ZERO_PUBLISHED_RANKS, rows, strict=True)
            for stage, printed in enumerate(row.split(), start=1)
        ]

    @property
    def agreeing(self) -> int:
        """Cells that agree to the last digit printed; the paper rounds some and cuts others off."""
        return sum(abs(float(printed) - ours) < _last_digit(printed) for *_, printed, ours in self.cells)

    def __repr__(self) -> str:
        head = say(en="GB per GPU", fr="Go par GPU")
        stages = "".join(f"{f'stage {stage}':>19}" for stage in (1, 2, 3))
        lines = [f"{head:<12}{'N':>6}{stages}   " + say(en="(paper)", fr="(article)")]
        for start in range(0, len(self.cells), 3):
            parameters, ranks, *_ = self.cells[start]
            cells = "".join(
                f"{decimal(ours, 2):>10} {f'({localized(printed)})':>8}"
                for *_, printed, ours in self.cells[start : start + 3]
            )
            lines.append(f"{format_count(parameters):<12}{ranks:>6}{cells}")
        agree = say(
            en=f"{self.agreeing} of {len(self.cells)} cells agree to the last digit printed.",
            fr=f"Cases égales au dernier chiffre imprimé près : {self.agreeing} sur {len(self.cells)}.",
        )
        return "\n".join([*lines, agree])


def _last_digit(printed: str) -> float:
    return float(10.0 ** -len(printed.partition(".")[2]))


COLOURS = 255
"""So many that no difference is seen, and a third of the bytes of true colours."""
SHEET_RANKS = (Style(SKY, ""), Style(ORANGE, "//"), Style(YELLOW, ".."), Style(PURPLE, "\\\\"))
"""How the ranks of a figure are told apart."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


def or_to_do(make: Callable[_P, _T]) -> Callable[_P, _T | Verdict]:
    """What a student's function gives, or the sentence of the exercise, as long as that is to do."""

    @wraps(make)
    def made(*args: _P.args, **kwargs: _P.kwargs) -> _T | Verdict:
        try:
            return make(*args, **kwargs)
        except NotDone as error:
            return Verdict("todo", str(error))

    return made


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure in a notebook, in few colours: this lab shows many, and its file must stay small."""

    figure: LabFigure

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from PIL import Image

        shown = self.figure._repr_mimebundle_()
        full, small = Image.open(io.BytesIO(shown["image/png"])).convert("RGB"), io.BytesIO()
        # Maximum coverage keeps colours that are rare, such as those of a small patch in a legend.
        few = full.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(small, "png", optimize=True)
        return {**shown, "image/png": small.getvalue()}


def pictured(draw: Callable[_P, LabFigure]) -> Callable[_P, Picture | Verdict]:
    """`or_to_do` of a function that draws."""

    @wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> Picture:
        return Picture(draw(*args, **kwargs))

    return or_to_do(drawn)


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


def calibration_of(site: Cluster) -> Calibration:
    """The calibration of a cluster's GPUs, as the planner takes it."""
    profile = PROFILE_OF_GPU.get(site.gpu.name.split("-")[0])
    return Calibration(site.gpu.name) if profile is None else calibration(profile)


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


def columns(en: str, fr: str) -> tuple[str, ...]:
    """Titles of a table's columns in the reader's language, separated by semicolons."""
    return tuple(say(en=en, fr=fr).split("; "))


def given(value: Any, *arguments: Any) -> Any:
    """A value, or what a student's function gives for it."""
    return value(*arguments) if callable(value) else value
