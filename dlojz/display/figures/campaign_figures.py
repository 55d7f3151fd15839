"""Figures of a campaign: memory and throughput against the batch, one against the other, prediction, scaling.

A series has one colour, one dash and one marker in every figure. What did not fit is drawn where it was predicted,
crossed out; a machine's limit is a line with its name.
"""

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from dlojz.base.language import byte_scale, format_bytes, say
from dlojz.base.table import visible
from dlojz.display.canvas import LabFigure, caption, finish, key, new_figure, note, phrase, plain
from dlojz.display.figures.run_figures import far_limit
from dlojz.display.style import BLACK, GREY, LINE_STYLES, NORMAL, REMARK, VERMILION

MOST_IN_LEGEND = 24
Dash = Literal["-", "--", ":"]
DASHES: tuple[Dash, ...] = get_args(Dash)


@dataclass(frozen=True)
class CampaignMark:
    """Point of a campaign, as it is drawn.

    Args:
        series: what the point shares with those of other batches, to which it is joined.
        family: what it shares with those on other numbers of ranks.
        batch: its place on the axis of the batch.
        predicted_bytes: memory of the heaviest rank; None where not known, as every figure below.
        measured_bytes: the same.
        limit_bytes: what a rank may take.
        limit_name: whose limit that is.
        samples_per_s: measured.
        predicted_samples_per_s: from one process.
        predicted_message_bytes: per step.
        measured_message_bytes: the same.
        strong_efficiency: of the scaling at the same global batch, 1 = perfect; None without a base.
        weak_efficiency: of the scaling at as many samples per rank.
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
    strong_efficiency: float | None = None
    weak_efficiency: float | None = None

    @property
    def taken_bytes(self) -> int | None:
        """Measured, else predicted."""
        return self.predicted_bytes if self.measured_bytes is None else self.measured_bytes


def series_of(
    marks: Sequence[CampaignMark], group_of: Callable[[CampaignMark], str] = attrgetter("series")
) -> dict[str, list[CampaignMark]]:
    """Group marks by series, or by what `group_of` returns, in order."""
    groups: dict[str, list[CampaignMark]] = {}
    for mark in marks:
        groups.setdefault(group_of(mark), []).append(mark)
    return groups


def style_of(number: int) -> tuple[str, Dash, str]:
    """Choose colour, dashes and marker of the n-th series; no two of 24 are alike."""
    color, _, marker = LINE_STYLES[number % len(LINE_STYLES)]
    return color, DASHES[number // len(LINE_STYLES) % len(DASHES)], marker


def pareto_front(marks: Sequence[CampaignMark]) -> list[CampaignMark]:
    """Find the marks that no other beats in both throughput and memory, from little memory to much."""
    # By growing memory: a mark is on the front if it is faster than all before it.
    front: list[CampaignMark] = []
    for mark in sorted(marks, key=lambda mark: (mark.measured_bytes or 0, -(mark.samples_per_s or 0))):
        if not front or (mark.samples_per_s or 0) > (front[-1].samples_per_s or 0):
            front.append(mark)
    return front


def campaign_canvas(opening: str, series: Sequence[str], width_in: float = 9.0) -> LabFigure:
    """Make an empty figure, as high as its legend needs."""
    rows = -(-min(len(series), MOST_IN_LEGEND) // _columns(series, width_in))
    return new_figure(width_in, 5.0 + 0.22 * rows, alt=opening + ", ".join(map(visible, series)))


def _columns(series: Sequence[str], width_in: float) -> int:
    longest = max((len(name) for name in series), default=1)
    # About 11 letters an inch at this size, and 8 for the line and the marker of an entry.
    return max(1, min(4, int(width_in * 11 / (longest + 8))))


def legend(figure: LabFigure, series: Sequence[str], extra_handles: Sequence[Line2D]) -> None:
    """Write the series by name below the figure, and the keys that a figure has besides."""
    handles = []
    for number, name in enumerate(series[:MOST_IN_LEGEND]):
        color, dashes, marker = style_of(number)
        text = textwrap.shorten(visible(name), 70, placeholder="…")
        text = f" {text}" if text.startswith("_") else text  # a legend leaves out what begins so
        handles.append(key(text, color=color, linestyle=dashes, marker=marker))
    if len(series) > MOST_IN_LEGEND:
        num_unnamed = len(series) - MOST_IN_LEGEND
        handles.append(
            key(say(en=f"and {num_unnamed} more series", fr=f"et {num_unnamed} autres séries"), linestyle="none")
        )
    columns = _columns(series, float(figure.get_figwidth()))
    labels = [str(handle.get_label()) for handle in (*handles, *extra_handles)]
    figure.legend(
        [*handles, *extra_handles], labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=NORMAL
    )


def hidden_marks(marks: Sequence[CampaignMark]) -> dict[CampaignMark, int]:
    """Count the marks that would hide each one: those of later series at the same batch and memory."""
    drawn = [
        mark for series_marks in series_of(marks).values() for mark in series_marks if mark.taken_bytes is not None
    ]
    # 0.4 % of the largest: closer than that, one mark lies on the other.
    tolerance_bytes = 0.004 * max((mark.taken_bytes or 0 for mark in drawn), default=0)
    return {
        mark: sum(
            later_mark.batch == mark.batch
            and abs((later_mark.taken_bytes or 0) - (mark.taken_bytes or 0)) <= tolerance_bytes
            # Later series are drawn over this one.
            for later_mark in drawn[number + 1 :]
        )
        for number, mark in enumerate(drawn)
    }


CROSS: dict[str, Any] = {"marker": "x", "linestyle": "none", "color": VERMILION, "markeredgewidth": 2.2}


def memory_mark(
    axes: Axes, point: tuple[float, float], mark: CampaignMark, style: tuple[str, Dash, str], hidden_by: int = 0
) -> None:
    """Draw a mark: full where measured, hollow where only predicted, crossed out where it did not fit.

    It is larger where `hidden_by` others would hide it.
    """
    color, _, marker = style
    face = "white" if mark.measured_bytes is None else color
    size = 7 + 4 * min(hidden_by, 3)
    axes.plot(*point, marker=marker, linestyle="none", color=color, markerfacecolor=face, markersize=size)
    if does_not_fit(mark):
        axes.plot(*point, markersize=13, **CROSS)


def does_not_fit(mark: CampaignMark) -> bool:
    """Tell whether a point ran out of memory, or, where it was not run, is predicted to."""
    if mark.state == "oom":
        return True
    # Only a prediction above the limit; what was measured has fitted.
    over = mark.predicted_bytes is not None and mark.limit_bytes is not None and mark.predicted_bytes > mark.limit_bytes
    return over and mark.measured_bytes is None


def memory_keys(marks: Sequence[CampaignMark]) -> list[Line2D]:
    """Say in the legend what the marks of memory mean."""
    dot: dict[str, Any] = {"marker": "o", "color": GREY, "linestyle": "none"}
    keys = [
        key(say(en="measured", fr="mesuré"), **dot),
        key(say(en="only predicted", fr="seulement prédit"), markerfacecolor="white", **dot),
    ]
    if any(does_not_fit(mark) for mark in marks):
        keys.append(key(say(en="does not fit", fr="ne tient pas"), markersize=9, **CROSS))
    return keys


def limits(axes: Axes, marks: Sequence[CampaignMark], scale: float, *, vertical: bool = False) -> str:
    """Draw a line for each device's limit; those too far away are returned, in words."""
    limit_names = {
        mark.limit_bytes: mark.limit_name
        for mark in marks
        if mark.limit_bytes is not None and mark.taken_bytes is not None
    }
    highest = max((mark.taken_bytes or 0 for mark in marks), default=0)
    far = []
    for limit_bytes, name in sorted(limit_names.items()):
        # A limit far above all marks would press them flat: it is said in words instead.
        if words := far_limit(limit_bytes, highest):
            far.append(words)
            continue
        value = limit_bytes / scale
        label = visible(name) + ", " + format_bytes(limit_bytes)
        (axes.axvline if vertical else axes.axhline)(value, color=BLACK, linestyle="--", linewidth=1.4)
        if vertical:
            note(axes, label, (value, 0.02), (-3, 0), xycoords=("data", "axes fraction"), rotation=90, ha="right",
                 va="bottom")  # fmt: skip
        else:
            note(axes, label, (0.01, value), (0, 3), xycoords=("axes fraction", "data"), va="bottom")
    return say(en="; ", fr=" ; ").join(far)


def count_axis(axes: Axes, values: Sequence[int], label: str) -> None:
    """Mark the counts that occur on the x axis, by powers of two where they grow so."""
    # At least 8 times as large: powers of two, else a linear axis.
    if values and values[-1] >= 8 * max(values[0], 1):
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(values)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(value) for value in values])
    axes.set_xlabel(label)
    plain(axes)


def from_zero(axes: Axes, label: str, title: str) -> None:
    """Begin the y axis at 0, with room above all that is drawn, in axes that share this scale too."""
    # Panels that share the y axis are scaled together.
    drawn = [sibling.dataLim.ymax for sibling in axes.get_shared_y_axes().get_siblings(axes)]
    highest = max((top for top in drawn if math.isfinite(top) and top > 0), default=0.9)
    axes.set_ylim(0, highest * 1.11)
    caption(axes, y=label, title=title, size=11)
    plain(axes)


def or_nothing(axes: Axes, has_points: bool, missing: str = "") -> None:
    """Say that there is nothing to draw where nothing is known; `missing` says why."""
    if not has_points:
        words = missing or say(en="nothing measured yet", fr="rien n’est encore mesuré")
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=REMARK)


FAMILY = attrgetter("family")


def highest_of(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep the highest of several points at one place: a line through all of them would go up and down there."""
    highest_y: dict[float, float] = {}
    for x, y in points:
        highest_y[x] = max(highest_y.get(x, y), y)
    return sorted(highest_y.items())


def _columns_of(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def batch_figure(marks: Sequence[CampaignMark], batch_label: str, path: str | Path | None = None) -> LabFigure:
    """Draw throughput and memory against the batch, with the limit of the device.

    Args:
        batch_label: what the axis counts, in words.
    """
    figure = campaign_canvas(phrase("alt of batches"), list(series_of(marks)), width_in=12.5)
    speed, memory = figure.subplots(1, 2)
    unit, scale = byte_scale(max((mark.taken_bytes or 0 for mark in marks), default=0))
    hidden = hidden_marks(marks)
    for number, series_marks in enumerate(series_of(marks).values()):
        color, dashes, marker = style_of(number)
        ordered = sorted(series_marks, key=lambda mark: mark.batch)
        timed_marks = [mark for mark in ordered if mark.samples_per_s is not None]
        speeds = [(mark.batch, mark.samples_per_s or 0) for mark in timed_marks]
        # The line goes through the highest mark of a batch; the marks themselves are all drawn.
        speed.plot(*_columns_of(highest_of(speeds)), dashes, color=color)
        speed.plot(*_columns_of(speeds), color=color, marker=marker, linestyle="none")
        memory_marks = [mark for mark in ordered if mark.taken_bytes is not None]
        values = [(mark.taken_bytes or 0) / scale for mark in memory_marks]
        batches = [mark.batch for mark in memory_marks]
        memory.plot(*_columns_of(highest_of(zip(batches, values, strict=True))), dashes, color=color, linewidth=1.2)
        for mark, value in zip(memory_marks, values, strict=True):
            memory_mark(memory, (mark.batch, value), mark, style_of(number), hidden[mark])
    far = limits(memory, marks, scale)
    for axes in (speed, memory):
        count_axis(axes, sorted({mark.batch for mark in marks}), batch_label)
    or_nothing(speed, any(mark.samples_per_s is not None for mark in marks))
    from_zero(speed, say(en="samples/s", fr="échantillons/s"), say(en="Throughput, measured", fr="Débit mesuré"))
    title = say(en="Memory of the heaviest rank", fr="Mémoire du rang le plus chargé")
    from_zero(memory, unit, title + (f"\n({far})" if far else ""))
    legend(figure, list(series_of(marks)), memory_keys(marks))
    return finish(figure, path)


def pareto_figure(marks: Sequence[CampaignMark], path: str | Path | None = None) -> LabFigure:
    """Draw memory against throughput, and join the points that no other beats in both."""
    figure = campaign_canvas(phrase("alt of compromises"), list(series_of(marks)))
    axes = figure.subplots()
    measured_marks = [mark for mark in marks if mark.samples_per_s is not None and mark.measured_bytes is not None]
    unit, scale = byte_scale(max((mark.measured_bytes or 0 for mark in measured_marks), default=0))
    for number, series_marks in enumerate(series_of(marks).values()):
        color, _, marker = style_of(number)
        for mark in series_marks:
            if mark in measured_marks:
                x, y = (mark.measured_bytes or 0) / scale, mark.samples_per_s or 0
                axes.plot(x, y, marker=marker, color=color, markersize=8, linestyle="none")
                note(axes, str(mark.batch), (x, y), (6, 4), va="baseline")
    front = [((mark.measured_bytes or 0) / scale, mark.samples_per_s or 0) for mark in pareto_front(measured_marks)]
    joined: dict[str, Any] = {"linestyle": "--", "color": BLACK}
    axes.plot([x for x, _ in front], [y for _, y in front], linewidth=1.2, zorder=1, **joined)
    far = limits(axes, measured_marks, scale, vertical=True)
    or_nothing(axes, bool(measured_marks))
    axes.set_xlabel(say(en=f"memory of the heaviest rank, {unit}", fr=f"mémoire du rang le plus chargé, {unit}"))
    axes.set_xlim(left=0)
    title = phrase("title of compromises")
    from_zero(axes, say(en="samples/s", fr="échantillons/s"), title + (f"\n({far})" if far else ""))
    legend(figure, list(series_of(marks)), [key(say(en="not beaten in both", fr="non dominés"), **joined)])
    return finish(figure, path)


def truth_figure(marks: Sequence[CampaignMark], path: str | Path | None = None) -> LabFigure:
    """Draw predicted against measured memory, messages and throughput; on the diagonal they are equal."""
    figure = campaign_canvas(phrase("alt of predictions"), list(series_of(marks)), width_in=13.0)
    memory, messages, speed = figure.subplots(1, 3)
    title = say(en="Memory of the heaviest rank", fr="Mémoire du rang le plus chargé")
    _truth(memory, marks, attrgetter("predicted_bytes", "measured_bytes"), title)
    title = say(en="Messages of rank 0, per step", fr="Messages du rang 0, par pas")
    _truth(messages, marks, attrgetter("predicted_message_bytes", "measured_message_bytes"), title)
    title = say(en="Throughput (predicted: replicas × one process)", fr="Débit (prédit : répliques × un processus)")
    _truth(speed, marks, attrgetter("predicted_samples_per_s", "samples_per_s"), title, in_bytes=False)
    legend(figure, list(series_of(marks)), [key(say(en="equal", fr="égaux"), color=BLACK, linestyle="--")])
    return finish(figure, path)


def _truth(
    axes: Axes,
    marks: Sequence[CampaignMark],
    pair: Callable[[CampaignMark], tuple[float | None, float | None]],
    title: str,
    in_bytes: bool = True,
) -> None:
    # (number of the series, predicted, measured) of each mark.
    numbered_pairs = [
        (number, *pair(mark)) for number, series_marks in enumerate(series_of(marks).values()) for mark in series_marks
    ]
    drawn = [(number, x, y) for number, x, y in numbered_pairs if x is not None and y is not None]
    largest = max((max(x, y) for _, x, y in drawn), default=1.0) or 1.0
    unit, scale = byte_scale(largest) if in_bytes else (say(en="samples/s", fr="échantillons/s"), 1)
    for number, x, y in drawn:
        color, _, marker = style_of(number)
        axes.plot(x / scale, y / scale, marker=marker, color=color, linestyle="none", markersize=7, clip_on=False)
    # 8 % of room above the largest of both.
    end = largest / scale * 1.08
    if drawn:
        axes.plot([0, end], [0, end], linestyle="--", color=BLACK, linewidth=1.0, zorder=1)
    axes.set(xlim=(0, end), ylim=(0, end), aspect="equal")
    predicted, measured = say(en="predicted, ", fr="prédit, "), say(en="measured, ", fr="mesuré, ")
    caption(axes, x=predicted + unit, y=measured + unit, title=title)
    plain(axes)
    if not drawn:
        axes.set(xticks=[], yticks=[])
    half = any(y is not None for _, _, y in numbered_pairs)
    unforeseen = say(en="measured, but nothing predicts it here", fr="mesuré, mais rien ne le prédit ici")
    or_nothing(axes, bool(drawn), unforeseen if half else "")


def scaling_figure(marks: Sequence[CampaignMark], path: str | Path | None = None) -> LabFigure:
    """Draw the efficiency of strong and of weak scaling against the number of ranks."""
    figure = campaign_canvas(phrase("alt of scaling"), list(series_of(marks, FAMILY)))
    strong, weak = figure.subplots(1, 2, sharey=True)
    _draw_scaling(
        strong,
        marks,
        attrgetter("strong_efficiency"),
        say(en="Strong scaling: same global batch", fr="Scalabilité forte : même batch global"),
    )
    _draw_scaling(
        weak,
        marks,
        attrgetter("weak_efficiency"),
        say(en="Weak scaling: same samples per rank", fr="Scalabilité faible : mêmes échantillons par rang"),
    )
    strong.set_ylabel(say(en="throughput per rank over the base’s, %", fr="débit par rang / celui de la base, %"))
    perfect = key(say(en="perfect", fr="parfaite"), color=BLACK, linestyle="--")
    legend(figure, list(series_of(marks, FAMILY)), [perfect])
    return finish(figure, path)


def _draw_scaling(
    axes: Axes, marks: Sequence[CampaignMark], efficiency: Callable[[CampaignMark], float | None], title: str
) -> None:
    """Draw one kind of efficiency; the base, of the fewest ranks, is at 100 %."""
    for number, series_marks in enumerate(series_of(marks, FAMILY).values()):
        color, dashes, marker = style_of(number)
        # Shares of the base's throughput per rank, in percent.
        drawn = sorted((mark.ranks, 100 * share) for mark in series_marks if (share := efficiency(mark)) is not None)
        axes.plot([ranks for ranks, _ in drawn], [share for _, share in drawn], dashes, color=color, marker=marker)
    axes.axhline(100, linestyle="--", color=BLACK, linewidth=1.0)
    count_axis(axes, sorted({mark.ranks for mark in marks}), say(en="ranks", fr="rangs"))
    missing = say(en="no point has such a base", fr="aucun point n’a une telle base")
    has_base = any(efficiency(mark) is not None for mark in marks)
    or_nothing(axes, has_base, missing if any(mark.samples_per_s for mark in marks) else "")
    from_zero(axes, "", title)
