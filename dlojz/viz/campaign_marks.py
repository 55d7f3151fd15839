"""What the figures of a campaign are made of: its points as marks, and the parts that all figures share.

Layer 4. Invariant: a series has one colour, one dash and one marker in every figure; colour never tells anything alone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, get_args

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dlojz.text import say
from dlojz.units import format_bytes
from dlojz.viz.canvas import LabFigure, new_figure, plain
from dlojz.viz.footprint_figure import far_limit
from dlojz.viz.markup import visible
from dlojz.viz.palette import BLACK, GREY, LINE_STYLES, VERMILION

MOST_IN_LEGEND = 24
Dash = Literal["-", "--", ":"]
DASHES: tuple[Dash, ...] = get_args(Dash)


@dataclass(frozen=True)
class Mark:
    """One point of a campaign, as it is drawn.

    Args:
        series: what the point shares with those of other batches, to which it is joined.
        family: what it shares with those on other numbers of ranks.
        batch: its place on the axis of the batch.
        ranks: number of processes.
        state: of the run.
        predicted_bytes: memory of the heaviest rank; None where not known, as every figure below.
        measured_bytes: the same.
        limit_bytes: what a rank may take.
        limit_name: whose limit that is.
        samples_per_s: measured.
        predicted_samples_per_s: from one process.
        predicted_message_bytes: per step.
        measured_message_bytes: the same.
        efficiency: of the scaling, 1 = perfect.
    """

    series: str
    family: str
    batch: int
    ranks: int
    state: str
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    limit_bytes: int | None = None
    limit_name: str = ""
    samples_per_s: float | None = None
    predicted_samples_per_s: float | None = None
    predicted_message_bytes: int | None = None
    measured_message_bytes: int | None = None
    efficiency: float | None = None

    @property
    def taken_bytes(self) -> int | None:
        """Measured, else predicted."""
        return self.predicted_bytes if self.measured_bytes is None else self.measured_bytes


def series_of(marks: Sequence[Mark], by: Callable[[Mark], str] = attrgetter("series")) -> dict[str, list[Mark]]:
    """The marks by series, or by what `by` tells of each; in order."""
    found: dict[str, list[Mark]] = {}
    for mark in marks:
        found.setdefault(by(mark), []).append(mark)
    return found


def style_of(number: int) -> tuple[str, Dash, str]:
    """Colour, dashes and marker of the n-th series; they recur with other dashes, so that no two of 24 are alike."""
    color, _, marker = LINE_STYLES[number % len(LINE_STYLES)]
    return color, DASHES[number // len(LINE_STYLES) % len(DASHES)], marker


def pareto_front(marks: Sequence[Mark]) -> list[Mark]:
    """The marks than which none has both as much throughput and as little memory, from little memory to much."""
    front: list[Mark] = []
    for mark in sorted(marks, key=lambda mark: (mark.measured_bytes or 0, -(mark.samples_per_s or 0))):
        if not front or (mark.samples_per_s or 0) > (front[-1].samples_per_s or 0):
            front.append(mark)
    return front


def campaign_canvas(what: str, series: Sequence[str], width_in: float = 9.0) -> LabFigure:
    """An empty figure with a description in words, as high as its legend needs."""
    rows = -(-min(len(series), MOST_IN_LEGEND) // _columns(series, width_in))
    return new_figure(width_in, 5.0 + 0.22 * rows, alt=what + ", ".join(map(visible, series)))


def _columns(series: Sequence[str], width_in: float) -> int:
    longest = max((len(name) for name in series), default=1)
    return max(1, min(4, int(width_in * 11 / (longest + 8))))


def legend(figure: LabFigure, series: Sequence[str], more: Sequence[Line2D]) -> None:
    """The series by name below the figure, and the keys that a figure has besides."""
    handles = []
    for number, name in enumerate(series[:MOST_IN_LEGEND]):
        color, dashes, marker = style_of(number)
        text = textwrap.shorten(visible(name), 70, placeholder="…")
        text = f" {text}" if text.startswith("_") else text  # a legend leaves out what begins so
        handles.append(Line2D([], [], color=color, linestyle=dashes, marker=marker, label=text))
    if len(series) > MOST_IN_LEGEND:
        left = len(series) - MOST_IN_LEGEND
        label = say(en=f"and {left} more series", fr=f"et {left} autres séries")
        handles.append(Line2D([], [], linestyle="none", label=label))
    columns = _columns(series, float(figure.get_figwidth()))
    labels = [str(handle.get_label()) for handle in (*handles, *more)]
    figure.legend([*handles, *more], labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def hidden_marks(marks: Sequence[Mark]) -> dict[Mark, int]:
    """How many marks lie on each one and would hide it: those of series drawn later, at the same batch and memory."""
    drawn = [mark for own in series_of(marks).values() for mark in own if mark.taken_bytes is not None]
    near = 0.004 * max((mark.taken_bytes or 0 for mark in drawn), default=0)
    return {
        mark: sum(
            other.batch == mark.batch and abs((other.taken_bytes or 0) - (mark.taken_bytes or 0)) <= near
            for other in drawn[number + 1 :]
        )
        for number, mark in enumerate(drawn)
    }


def memory_mark(
    axes: Axes, at: tuple[float, float], mark: Mark, style: tuple[str, Dash, str], hidden_by: int = 0
) -> None:
    """Full where measured, hollow where only predicted, crossed out where it did not fit; larger where it is hidden."""
    color, _, marker = style
    measured = mark.measured_bytes is not None
    axes.plot(
        *at,
        marker=marker,
        linestyle="none",
        color=color,
        markerfacecolor=color if measured else "white",
        markersize=7 + 4 * min(hidden_by, 3),
    )
    if does_not_fit(mark):
        axes.plot(*at, marker="x", linestyle="none", color=VERMILION, markersize=13, markeredgewidth=2.2)


def does_not_fit(mark: Mark) -> bool:
    """Whether the point ran out of memory, or, where it was not run, is predicted to."""
    if mark.state == "oom":
        return True
    over = mark.predicted_bytes is not None and mark.limit_bytes is not None and mark.predicted_bytes > mark.limit_bytes
    return over and mark.measured_bytes is None


def memory_keys(marks: Sequence[Mark]) -> list[Line2D]:
    """What the marks of memory say, for the legend."""
    keys = [
        Line2D([], [], marker="o", color=GREY, linestyle="none", label=say(en="measured", fr="mesuré")),
        Line2D(
            [],
            [],
            marker="o",
            color=GREY,
            linestyle="none",
            markerfacecolor="white",
            label=say(en="only predicted", fr="seulement prédit"),
        ),
    ]
    if any(does_not_fit(mark) for mark in marks):
        keys.append(
            Line2D(
                [],
                [],
                marker="x",
                color=VERMILION,
                linestyle="none",
                markersize=9,
                markeredgewidth=2.2,
                label=say(en="does not fit", fr="ne tient pas"),
            )
        )
    return keys


def limits(axes: Axes, marks: Sequence[Mark], scale: float, *, vertical: bool = False) -> str:
    """A line for each device's limit; those too far away are returned, in words."""
    known = {
        mark.limit_bytes: mark.limit_name
        for mark in marks
        if mark.limit_bytes is not None and mark.taken_bytes is not None
    }
    highest = max((mark.taken_bytes or 0 for mark in marks), default=0)
    far = []
    for limit_bytes, name in sorted(known.items()):
        words = far_limit(limit_bytes, highest)
        if words:
            far.append(words)
            continue
        value = limit_bytes / scale
        label = visible(name) + ", " + format_bytes(limit_bytes)
        if vertical:
            axes.axvline(value, color=BLACK, linestyle="--", linewidth=1.4)
            axes.annotate(
                label,
                (value, 0.02),
                xycoords=("data", "axes fraction"),
                rotation=90,
                fontsize=8,
                xytext=(-3, 0),
                textcoords="offset points",
                ha="right",
                va="bottom",
            )
        else:
            axes.axhline(value, color=BLACK, linestyle="--", linewidth=1.4)
            axes.annotate(
                label,
                (0.01, value),
                xycoords=("axes fraction", "data"),
                fontsize=8,
                xytext=(0, 3),
                textcoords="offset points",
                ha="left",
                va="bottom",
            )
    return say(en="; ", fr=" ; ").join(far)


def count_axis(axes: Axes, values: Sequence[int], label: str) -> None:
    """An axis of counts: a tick at each that occurs, by powers of two where they grow so."""
    if values and values[-1] >= 8 * max(values[0], 1):
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(values)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(value) for value in values])
    axes.set_xlabel(label)
    plain(axes)


def decimals(axes: Axes) -> None:
    """The numbers of both axes as the reader's language writes them."""
    comma = say(en=".", fr=",")
    for axis in (axes.xaxis, axes.yaxis):
        if not isinstance(axis.get_major_locator(), FixedLocator):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace(".", comma)))


def from_zero(axes: Axes, label: str, title: str) -> None:
    """A vertical axis that begins at nothing, with room above."""
    axes.set_ylim(bottom=0)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.06)
    axes.set_ylabel(label)
    axes.set_title(title, loc="left", fontsize=11)
    decimals(axes)
    plain(axes)


def or_nothing(axes: Axes, known: bool, missing: str = "") -> None:
    """Say that there is nothing to draw yet, where that is so; `missing` says what it would take."""
    if not known:
        words = missing or say(en="nothing measured yet", fr="rien n’est encore mesuré")
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color="#666666")
