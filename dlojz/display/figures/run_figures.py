"""Figures of runs: memory, comparison, timeline.

What one rank holds at its peak: stacked by category, against the device's limit, and block by block.

The stacks are what the forecast holds; a limit too far away to be drawn without flattening the bars is said in words.

One figure that a reader takes in at once: memory, communication, throughput and losses of several runs.

Predicted stands above measured, paler and with a dashed edge, in every panel; the categories keep their colour and
hatch.

What every rank does when: one line per rank, one bar per phase; below it, what is under way between the ranks.

One collection per phase, so that thousands of spans draw as fast as ten. Communication has a lane of its own: what lies
under a compute phase is hidden behind it, what lies under a wait is exposed.
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

from dlojz.base.errors import LabError
from dlojz.base.language import byte_units, decimal, format_bytes, format_seconds, gap_text, say
from dlojz.base.table import visible
from dlojz.display.canvas import LabFigure, finish, new_figure, plain
from dlojz.display.memory_tables import grouped_blocks, headline, peak_sentence
from dlojz.display.style import (
    BLACK,
    BLUE,
    CATEGORY_STYLES,
    COLLECTIVE_STYLES,
    EDGE,
    FRAME,
    LINE_STYLES,
    OTHER,
    PREDICTED_ALPHA,
    WHITE,
    Style,
    category_label,
    phase_label,
    phase_style,
)
from dlojz.display.tables import status_label
from dlojz.results.footprint import CATEGORIES
from dlojz.results.record import RunRecord, Span

if TYPE_CHECKING:
    from dlojz.compare import Comparison, PredictedMeasured, RunRow
    from dlojz.prediction.forecast import Forecast

MOST_BARS = 10
FARTHEST = 3.0
"""Times the longest bar: a limit beyond is told in words, as drawing it would leave bars too short to read."""
CACHED, OUTSIDE = Style(WHITE, "oo"), Style(WHITE, "xx")


def scale_of(num_bytes: float) -> tuple[str, int]:
    """The unit in which a figure of this size reads well, and how many bytes it has."""
    units = byte_units()
    power = max(n for n in range(len(units)) if max(num_bytes, 1) >= 1024**n)
    return units[power], 1024**power


def far_limit(limit_bytes: int, highest_bytes: float) -> str:
    """A limit that is not drawn, in words; empty for one near enough."""
    times = limit_bytes / max(highest_bytes, 1)
    if times <= FARTHEST:
        return ""
    times_text = decimal(times, 1 if times < 10 else 0)
    return say(
        en=f"limit: {format_bytes(limit_bytes)}, {times_text} times as much",
        fr=f"limite : {format_bytes(limit_bytes)}, {times_text} fois plus",
    )


def footprint_figure(
    forecast: Forecast,
    path: str | Path | None = None,
    limit_bytes: int | None = None,
) -> LabFigure:
    """Draw a forecast at its peak.

    Args:
        forecast: of one rank.
        path: picture to write, if any.
        limit_bytes: memory of the device, drawn as a line; by default that of the forecast's device, if any.

    Raises:
        LabError: if the picture cannot be written.
    """
    if limit_bytes is None and forecast.device is not None:
        limit_bytes = forecast.device.memory_bytes
    blocks = grouped_blocks(forecast, MOST_BARS)
    figure = new_figure(12.0, 2.4 + 0.32 * max(len(blocks), 8), alt=f"{headline(forecast)}. {peak_sentence(forecast)}")
    grid = figure.add_gridspec(1, 2, width_ratios=(1.0, 1.5), wspace=0.06)
    totals, by_block = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    handles = _totals(totals, forecast, limit_bytes)
    _blocks(by_block, blocks)
    figure.suptitle(headline(forecast), fontweight="bold", fontsize=11)
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9, handleheight=1.2)
    return finish(figure, path)


def _totals(axes: Axes, forecast: Forecast, limit_bytes: int | None) -> list[Patch | Line2D]:
    memory = forecast.memory
    at_peak = memory.at_peak_bytes or {}
    allocated = memory.peak_bytes or 0
    bars = [(say(en="allocated", fr="alloué"), allocated, 0, 0)]
    if memory.reserved_bytes is not None:
        cached = memory.reserved_bytes - allocated
        bars.append((say(en="reserved", fr="réservé"), memory.reserved_bytes, cached, 0))
        if memory.device_bytes is not None:
            outside = memory.device_bytes - memory.reserved_bytes
            bars.append(
                (say(en="as nvidia-smi\nshows it", fr="vu par\nnvidia-smi"), memory.device_bytes, cached, outside)
            )
    highest = max(total for _, total, _, _ in bars)
    unit, scale = scale_of(highest)
    shown = [name for name in CATEGORIES if at_peak.get(name)]
    for number, (_, total, cached, outside) in enumerate(bars):
        bottom = 0.0
        for name in shown:
            _piece(axes, number, bottom, at_peak[name] / scale, CATEGORY_STYLES[name])
            bottom += at_peak[name] / scale
        for extra, style in ((cached, CACHED), (outside, OUTSIDE)):
            if extra > 0:
                _piece(axes, number, bottom, extra / scale, style)
                bottom += extra / scale
        axes.annotate(
            format_bytes(total),
            (number, bottom),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontweight="bold",
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
        )
    title = textwrap.fill(say(en="At the peak: ", fr="Au pic : ") + visible(forecast.moment), 54)
    ceiling = highest / scale * 1.14
    if limit_bytes is not None:
        far = far_limit(limit_bytes, highest)
        if far:
            title += f"\n({far})"
        else:
            axes.axhline(limit_bytes / scale, color=BLACK, linestyle="--", linewidth=1.5)
            ceiling = max(ceiling, limit_bytes / scale * 1.1)
    axes.set_xticks(range(len(bars)), [label for label, *_ in bars])
    axes.set(xlim=(-0.65, len(bars) - 0.35), ylim=(0, ceiling), ylabel=unit)
    axes.set_title(title, loc="left", fontsize=10)
    plain(axes)
    axes.grid(visible=False, axis="x")
    handles: list[Patch | Line2D] = [_footprint_patch(CATEGORY_STYLES[name], category_label(name)) for name in shown]
    if len(bars) > 1:
        handles.append(_footprint_patch(CACHED, say(en="cached, fragmented", fr="caché, fragmenté")))
    if len(bars) > 2:
        handles.append(_footprint_patch(OUTSIDE, say(en="CUDA context, NCCL", fr="contexte CUDA, NCCL")))
    if axes.lines:
        label = say(en="limit: ", fr="limite : ") + format_bytes(limit_bytes)
        handles.append(Line2D([], [], color=BLACK, linestyle="--", linewidth=1.5, label=label))
    return handles


def _piece(axes: Axes, number: int, bottom: float, height: float, style: Style) -> None:
    axes.bar(
        number,
        height,
        bottom=bottom,
        width=0.55,
        color=style.color,
        hatch=style.hatch,
        edgecolor=EDGE,
        linewidth=0.6,
    )


def _footprint_patch(style: Style, label: str) -> Patch:
    return Patch(facecolor=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=0.6, label=label)


def _blocks(axes: Axes, blocks: list[tuple[str, dict[str, int]]]) -> None:
    longest = max((sum(held.values()) for _, held in blocks), default=1)
    unit, scale = scale_of(longest)
    for number, (_, held) in enumerate(blocks):
        start = 0.0
        for name in CATEGORIES:
            if length := held.get(name, 0) / scale:
                style = CATEGORY_STYLES[name]
                axes.barh(
                    number,
                    length,
                    left=start,
                    height=0.7,
                    color=style.color,
                    hatch=style.hatch,
                    edgecolor=EDGE,
                    linewidth=0.6,
                )
                start += length
        axes.annotate(
            format_bytes(sum(held.values())),
            (start, number),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set_yticks(range(len(blocks)), [label for label, _ in blocks])
    axes.set(ylim=(len(blocks) - 0.45, -0.55), xlim=(0, longest / scale * 1.17), xlabel=unit)
    axes.set_title(say(en="What fills it, by block", fr="Ce qui le remplit, par bloc"), loc="left", fontsize=10)
    plain(axes)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


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


def _names(rows: Sequence[RunRow]) -> list[str]:
    return [
        visible(row.title)
        + (f" ×{row.world_size}" if row.world_size > 1 else "")
        + ("" if row.status in ("completed", "running") else f"\n({status_label(row.status)})")
        for row in rows
    ]


def _runs_down(axes: Axes, rows: Sequence[RunRow], title: str, label: str) -> None:
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
        edgecolor=EDGE,
        linewidth=0.7,
        linestyle="--" if predicted else "-",
    )


def _stacked(axes: Axes, stacks: Sequence[dict[str, PredictedMeasured]], styles: dict[str, Style]) -> str:
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


def _compare_patch(style: Style, label: str) -> Patch:
    return Patch(facecolor=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=0.7, label=label)


def _memory(axes: Axes, rows: Sequence[RunRow]) -> None:
    stacks = [{str(name): row.memory_bytes[name] for name in CATEGORIES} for row in rows]
    unit = _stacked(axes, stacks, {str(name): style for name, style in CATEGORY_STYLES.items()})
    scale = 1024 ** byte_units().index(unit)
    handles: list[Patch | Line2D] = []
    for side, place, face, label in (
        ("predicted", -BAR / 2, FRAME, say(en="predicted peak", fr="pic prédit")),
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
    _legend(axes, [*(_compare_patch(CATEGORY_STYLES[name], category_label(name)) for name in shown), *handles])


def _limits(axes: Axes, rows: Sequence[RunRow], scale: int, handles: list[Patch | Line2D]) -> str:
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


def _communication(axes: Axes, rows: Sequence[RunRow]) -> None:
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
            _compare_patch(COLLECTIVE_STYLES.get(name, OTHER), name)
            for name in dict.fromkeys(name for stack in stacks for name in stack)
        ],
    )


def _throughput(axes: Axes, rows: Sequence[RunRow]) -> None:
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


def _losses(axes: Axes, rows: Sequence[RunRow]) -> None:
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


COMPUTE_LANE = (-0.4, 0.8)
"""Top and height, in ranks, where there is no communication to show; the two lanes share the same room otherwise."""
UPPER_LANE, LOWER_LANE = (-0.4, 0.48), (0.12, 0.28)
WITHIN = "communication"


def timeline_figure(record: RunRecord, path: str | Path | None = None, steps: int | None = 3) -> LabFigure:
    """Draw the spans of a run.

    Args:
        record: a run whose phases were kept.
        path: picture to write, if any.
        steps: how many of the last steps kept are drawn; None for all.

    Raises:
        LabError: if the run kept no spans, or the picture cannot be written.
    """
    kept = sorted({span.step for span in record.spans})
    if not kept:
        raise LabError(f"the run {record.run_id} kept no timeline (it ended before its first step): run it again.")
    chosen = set(kept if steps is None else kept[-steps:])
    spans = [span for span in record.spans if span.step in chosen]
    ranks = sorted({span.rank for span in spans})
    origin_s = min(span.start_s for span in spans)
    figure = new_figure(
        12.0,
        1.9 + 0.55 * len(ranks),
        alt=say(
            en=f"Phases of {len(chosen)} steps on {len(ranks)} ranks of {record.title}",
            fr=f"Phases de {len(chosen)} pas sur {len(ranks)} rangs de {record.title}",
        ),
    )
    axes = figure.subplots()
    names = list(dict.fromkeys(span.phase for span in sorted(spans, key=_drawing_order)))
    compute_lane = UPPER_LANE if any(name.startswith(WITHIN) for name in names) else COMPUTE_LANE
    for name in names:
        style = phase_style(name)
        top, height = LOWER_LANE if name.startswith(WITHIN) else compute_lane
        for rank in ranks:
            bars = [
                ((span.start_s - origin_s) * 1e3, (span.end_s - span.start_s) * 1e3)
                for span in spans
                if (span.phase, span.rank) == (name, rank)
            ]
            axes.broken_barh(
                bars,
                (rank + top, height),
                facecolor=style.color,
                hatch=style.hatch,
                edgecolor=EDGE,
                linewidth=0.5,
            )
    for step in sorted(chosen):
        start_ms = (min(span.start_s for span in spans if span.step == step) - origin_s) * 1e3
        axes.axvline(start_ms, color=EDGE, linewidth=1.0, linestyle="--")
        axes.annotate(
            say(en=f"step {step + 1}", fr=f"pas {step + 1}"),
            (start_ms, ranks[0] - 0.5),
            xytext=(4, 2),
            textcoords="offset points",
            va="bottom",
            fontsize=9,
        )
    axes.set_yticks(ranks, [say(en=f"rank {rank}", fr=f"rang {rank}") for rank in ranks])
    axes.set_ylim(ranks[-1] + 0.6, ranks[0] - 0.85)
    axes.set_xlim(left=0)
    axes.set_xlabel(say(en="time, ms", fr="temps (ms)"))
    axes.set_title(
        say(en="What each rank does: ", fr="Ce que fait chaque rang : ")
        + visible(record.title)
        + _overlap_words(record),
        loc="left",
    )
    plain(axes)
    axes.grid(visible=False, axis="y")
    axes.legend(
        handles=[
            Patch(
                facecolor=phase_style(name).color,
                hatch=phase_style(name).hatch,
                edgecolor=EDGE,
                label=" " + phase_label(visible(name)),
            )
            for name in names
        ],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        handleheight=1.2,
    )
    return finish(figure, path)


def _overlap_words(record: RunRecord) -> str:
    """How much of rank 0's communication is exposed and how much is hidden, where it was measured."""
    measured = record.footprint()
    exposed_s, hidden_s = (
        (measured.phases.communication_exposed_s, measured.phases.communication_hidden_s) if measured else (None, None)
    )
    if exposed_s is None or hidden_s is None:
        return ""
    exposed, hidden = format_seconds(exposed_s), format_seconds(hidden_s)
    return say(
        en=f"\ncommunication of rank 0 per step (median): {exposed} exposed, {hidden} hidden behind backward",
        fr=f"\ncommunication du rang 0 par pas (médiane) : {exposed} exposée, {hidden} cachée par la passe arrière",
    )


def _drawing_order(span: Span) -> tuple[bool, bool, float]:
    """The wait is drawn over the backward phase that it is the end of; communication comes last in the legend."""
    return span.phase.startswith(WITHIN), span.phase == "wait", span.start_s
