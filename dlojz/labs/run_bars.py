"""Runs side by side as bars, predicted in pale above measured: what several labs draw of memory and of messages.

Layer 6 (labs), on `dlojz.viz`. Invariant: what was measured stands beside what the package predicts; nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from matplotlib.axes import Axes

from dlojz.footprint import CATEGORIES, Footprint, Traffic
from dlojz.labs.zero_published import decimal
from dlojz.predict import predict
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import MEBIBYTE
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import CATEGORY_STYLES, COLLECTIVE_STYLES, OTHER, PREDICTED_ALPHA, Style, category_label

if TYPE_CHECKING:
    from dlojz.runs import Run

EDGE = "#333333"
Corner = Literal["lower center", "lower left"]
Part = tuple[float, Style, str]
"""A piece of a bar: bytes, look, name in the legend."""


def measured_footprint(run: Run, rank: int = 0) -> Footprint:
    """What one rank of a run was measured to hold and send.

    Raises:
        LabError: if the run has not come so far.
    """
    footprint = run.record.footprint(rank) if run.record is not None else None
    if footprint is None:
        raise LabError(
            say(
                en=f"the run {run.config.title} was not measured to its end: look at its logs, then run it again.",
                fr=f"l’exécution {run.config.title} n’a pas été mesurée jusqu’au bout : consultez ses journaux, puis "
                "relancez-la.",
            )
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
        axes.xaxis.set_major_formatter(lambda value, position: decimal(f"{value:g}"))
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
