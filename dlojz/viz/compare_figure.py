"""One figure that a reader takes in at once: memory, communication, throughput and losses of several runs.

Layer 4. Invariant: predicted stands above measured, paler and with a dashed edge, in every panel; the categories keep
their colour and hatch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from dlojz.footprint import CATEGORIES
from dlojz.text import say
from dlojz.units import byte_units
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.footprint_figure import far_limit
from dlojz.viz.grid import gap_text, status_label
from dlojz.viz.markup import visible
from dlojz.viz.palette import (
    BLACK,
    BLUE,
    CATEGORY_STYLES,
    COLLECTIVE_STYLES,
    LINE_STYLES,
    OTHER,
    PREDICTED_ALPHA,
    Style,
    category_label,
)

if TYPE_CHECKING:
    from dlojz.comparison import Comparison, Pair, Row

BAR = 0.36
PEAK_MARK: dict[str, Any] = {"linestyle": "none", "marker": "D", "color": BLACK, "markersize": 6}


def compare_figure(comparison: Comparison, path: str | Path | None = None) -> LabFigure:
    """Draw a comparison; save it too where a path is given.

    Raises:
        LabError: if the picture cannot be written.
    """
    rows = comparison.rows
    height_in = 8.0 + 0.5 * max(0, len(rows) - 5)
    figure = new_figure(
        13.0,
        height_in,
        alt=say(
            en="Bars of memory, communication and throughput, predicted above measured, and the loss curves, of: ",
            fr="Barres de mémoire, de communication et de débit, prédit au-dessus de mesuré, et pertes, de : ",
        )
        + ", ".join(row.title for row in rows),
    )
    cells = figure.add_gridspec(2, 3, height_ratios=(1.25, 1.0), width_ratios=(1.25, 1.1, 0.9), wspace=0.06)
    memory = figure.add_subplot(cells[0, 0])
    communication = figure.add_subplot(cells[0, 1], sharey=memory)
    throughput = figure.add_subplot(cells[0, 2], sharey=memory)
    losses = figure.add_subplot(cells[1, :2])  # its legend stands in the free cell on its right
    _memory(memory, rows)
    _communication(communication, rows)
    _throughput(throughput, rows)
    _losses(losses, rows)
    for panel in (communication, throughput):  # the names stand once, on the left
        panel.tick_params(labelleft=False)
    models = ", ".join(dict.fromkeys(visible(row.model) for row in rows))
    figure.suptitle(
        say(
            en=f"{models}: predicted (upper bar, pale, dashed edge) and measured (lower bar)",
            fr=f"{models} : prédit (barre du haut, pâle, bord pointillé) et mesuré (barre du bas)",
        ),
        fontweight="bold",
    )
    return finish(figure, path)


def _names(rows: Sequence[Row]) -> list[str]:
    return [
        visible(row.title)
        + (f" ×{row.world_size}" if row.world_size > 1 else "")
        + ("" if row.status in ("completed", "running") else f"\n({status_label(row.status)})")
        for row in rows
    ]


def _runs_down(axes: Axes, rows: Sequence[Row], title: str, label: str) -> None:
    axes.set_yticks(range(len(rows)), _names(rows))
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(label)
    axes.set_xlim(left=0)
    plain(axes)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def _bar(axes: Axes, row: int, start: float, value: float, style: Style, predicted: bool) -> None:
    """One piece of a bar; the predicted one lies above, paler."""
    axes.barh(
        row - BAR / 2 - 0.01 if predicted else row + BAR / 2 + 0.01,
        value,
        height=BAR,
        left=start,
        color=style.color,
        alpha=PREDICTED_ALPHA if predicted else 1.0,
        hatch=style.hatch,
        edgecolor="#333333",
        linewidth=0.7,
        linestyle="--" if predicted else "-",
    )


def _stacked(axes: Axes, stacks: Sequence[dict[str, Pair]], styles: dict[str, Style]) -> str:
    """Draw every stack twice, predicted and measured, in one unit; returns the unit."""
    totals = [
        sum(getattr(pair, side) or 0 for pair in stack.values())
        for stack in stacks
        for side in ("predicted", "measured")
    ]
    units = byte_units()
    power = max((n for n in range(len(units)) if max(totals, default=0) >= 1024**n), default=0)
    for number, stack in enumerate(stacks):
        for side in ("predicted", "measured"):
            start = 0.0
            for name, pair in stack.items():
                value = (getattr(pair, side) or 0) / 1024**power
                if value:
                    _bar(axes, number, start, value, styles.get(name, OTHER), side == "predicted")
                start += value
    return units[power]


def _legend(axes: Axes, handles: Sequence[Patch | Line2D]) -> None:
    """Legend below the panel, outside the bars."""
    axes.legend(
        handles=list(handles),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.14),
        ncols=2,
        frameon=False,
        fontsize=9,
        handlelength=1.8,
        handleheight=1.1,
        columnspacing=1.2,
    )


def _patch(style: Style, label: str) -> Patch:
    return Patch(facecolor=style.color, hatch=style.hatch, edgecolor="#333333", linewidth=0.7, label=label)


def _memory(axes: Axes, rows: Sequence[Row]) -> None:
    stacks = [{str(name): row.memory_bytes[name] for name in CATEGORIES} for row in rows]
    unit = _stacked(axes, stacks, {str(name): style for name, style in CATEGORY_STYLES.items()})
    scale = 1024 ** byte_units().index(unit)
    handles: list[Patch | Line2D] = []
    for side, place, face, label in (
        ("predicted", -BAR / 2, "#bbbbbb", say(en="predicted peak", fr="pic prédit")),
        ("measured", BAR / 2, "white", say(en="measured peak", fr="pic mesuré")),
    ):
        marks = [
            (peak / scale, number + place)
            for number, row in enumerate(rows)
            if (peak := row.memory_bytes["peak"].model_dump()[side])
        ]
        if marks:
            look: dict[str, Any] = {**PEAK_MARK, "markerfacecolor": face}
            axes.plot(*zip(*marks, strict=True), **look)
            handles.append(Line2D([], [], label=label, **look))
    far = _limits(axes, rows, scale, handles)
    shown = [name for name in CATEGORIES if any(stack[name].measured or stack[name].predicted for stack in stacks)]
    unpredicted = [category_label(name) for name in shown if all(stack[name].predicted is None for stack in stacks)]
    note = say(en="not predicted: ", fr="non prédit : ") + ", ".join(unpredicted) if unpredicted else far
    _runs_down(
        axes,
        rows,
        say(en="Memory of rank 0, largest of each", fr="Mémoire du rang 0, maximum de chacune")
        + (f"\n({note})" if note else ""),
        unit,
    )
    _legend(axes, [*(_patch(CATEGORY_STYLES[name], category_label(name)) for name in shown), *handles])


def _limits(axes: Axes, rows: Sequence[Row], scale: int, handles: list[Patch | Line2D]) -> str:
    """Mark what a rank of each run could take; where that is too far away to be drawn, say it in words instead."""
    longest = axes.get_xlim()[1] * scale
    known = [(number, row.limit_bytes) for number, row in enumerate(rows) if row.limit_bytes]
    if not known:
        return ""
    nearest = min(limit_bytes for _, limit_bytes in known)
    if far := far_limit(nearest, longest):
        return far
    look: dict[str, Any] = {"color": BLACK, "linestyle": "--", "linewidth": 1.6}
    for number, limit_bytes in known:
        if not far_limit(limit_bytes, longest):
            axes.plot([limit_bytes / scale] * 2, [number - 0.45, number + 0.45], **look)
    farthest = max(limit for _, limit in known if not far_limit(limit, longest))
    axes.set_xlim(right=max(longest, 1.03 * farthest) / scale)
    handles.append(Line2D([], [], label=say(en="limit of a rank", fr="limite d’un rang"), **look))
    return ""


def _communication(axes: Axes, rows: Sequence[Row]) -> None:
    stacks = [{str(traffic.collective): traffic.message_bytes for traffic in row.communication} for row in rows]
    unit = _stacked(axes, stacks, COLLECTIVE_STYLES)
    limit = axes.get_xlim()[1] * 1.06  # room for the verdict behind the longest bar
    axes.set_xlim(0, limit)
    for number, row in enumerate(rows):
        if row.exact is not None:
            end = max(
                sum(getattr(pair, side) or 0 for pair in stacks[number].values()) for side in ("predicted", "measured")
            )
            axes.text(
                end / 1024 ** byte_units().index(unit) + 0.015 * limit,
                number,
                "=" if row.exact else "≠",
                va="center",
                fontsize=15,
                fontweight="bold",
                color=BLACK,
            )
    _runs_down(
        axes,
        rows,
        say(
            en="Bytes handed to collectives per step\n(=: predicted and counted are equal)",
            fr="Octets confiés aux collectives par pas\n(= : prédit et compté sont égaux)",
        ),
        unit,
    )
    _legend(
        axes,
        [
            _patch(COLLECTIVE_STYLES.get(name, OTHER), name)
            for name in dict.fromkeys(name for stack in stacks for name in stack)
        ],
    )


def _throughput(axes: Axes, rows: Sequence[Row]) -> None:
    for number, row in enumerate(rows):
        for side in ("predicted", "measured"):
            value = getattr(row.samples_per_s, side)
            if value:
                _bar(axes, number, 0.0, value, Style(BLUE, ""), side == "predicted")
    _runs_down(
        axes,
        rows,
        say(en="Throughput\n(predicted: dp × one process)", fr="Débit\n(prédit : dp × un processus)"),
        say(en="samples/s", fr="échantillons/s"),
    )


def _losses(axes: Axes, rows: Sequence[Row]) -> None:
    """Curves that should lie on each other: wide ones below, markers of each at other steps."""
    drawn = [(row, name) for row, name in zip(rows, _names(rows), strict=True) if row.losses]
    every = max(1, len(drawn))
    for number, (row, name) in enumerate(drawn):
        color, dashes, marker = LINE_STYLES[number % len(LINE_STYLES)]
        last_step = len(row.losses)
        stride = every if last_step > 2 * every else 1
        axes.plot(
            range(1, last_step + 1),
            row.losses,
            color=color,
            linestyle=dashes,
            marker=marker,
            markersize=5.5,
            markevery=(number % stride, stride),
            linewidth=4.0 - 3.0 * number / max(1, len(drawn) - 1),
            label=textwrap.indent(textwrap.fill(name.replace("\n", " "), 30), " "),
        )
    gap = max((row.loss_gap for row in rows if row.loss_gap is not None), default=None)
    axes.set_title(
        say(en="Training loss", fr="Perte à l'entraînement")
        + (
            ""
            if gap is None
            else say(en=f" (largest gap to one process: {gap_text(gap)})", fr=f" (écart maximal : {gap_text(gap)})")
        ),
        loc="left",
        fontsize=11,
    )
    axes.set_xlabel(say(en="step", fr="pas"))
    axes.set_ylabel(say(en="loss", fr="perte"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    plain(axes)
    if drawn:
        legend = axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize=9, handlelength=3.5)
        legend.set_in_layout(False)
