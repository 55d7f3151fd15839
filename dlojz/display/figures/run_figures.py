"""Figures of runs: memory of a rank at its peak, comparison, timeline, loads of experts, two traces.

A category keeps its colour and hatch; predicted is paler than measured. A limit too far away to be drawn without
flattening the bars is said in words.
"""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from dlojz.base.errors import LabError
from dlojz.base.language import byte_scale, decimal, format_bytes, format_seconds, gap_text, percent, say
from dlojz.base.table import visible
from dlojz.compare import Comparison, PredictedMeasured, RunRow
from dlojz.config.fields import BLOCK_CHOICES
from dlojz.config.optimizers import OPTIMIZERS
from dlojz.display.canvas import (
    LabFigure,
    below,
    caption,
    finish,
    key,
    new_figure,
    note,
    paint,
    phrase,
    plain,
    stack,
    swatch,
)
from dlojz.display.drawing import LETTER, Drawing
from dlojz.display.figures.partition_figures import overlay_scene
from dlojz.display.memory_tables import choice_label, grouped_blocks, headline, peak_sentence
from dlojz.display.pipeline_drawing import schedule_drawing
from dlojz.display.style import (
    BLACK,
    BLUE,
    CATEGORY_STYLES,
    COLLECTIVE_STYLES,
    EDGE,
    FILLS,
    FRAME,
    GREY,
    HEADING,
    LIGHT_ORANGE,
    LINE_STYLES,
    NORMAL,
    ORANGE,
    OTHER,
    PREDICTED_ALPHA,
    SIGN,
    TITLE,
    VERMILION,
    WHITE,
    Style,
    category_label,
    phase_label,
    phase_style,
)
from dlojz.display.tables import DASH, status_label
from dlojz.display.trace_tables import MOST_FRAMES, frame_label, kernel_kind
from dlojz.pipeline.simulator import MeasuredOverlay
from dlojz.planner.activation_budget import BudgetPlan
from dlojz.prediction.forecast import Forecast
from dlojz.results.footprint import CATEGORIES
from dlojz.results.memory_snapshot import FrameBytes, FrameGrowth, MemorySnapshot
from dlojz.results.rank_profile import ProfileComparison
from dlojz.results.record import ExpertLoad, RunRecord, Span

MOST_BARS = 10
FARTHEST = 3.0
"""Times the longest bar: a limit beyond is said in words, as drawing it would leave bars too short to read."""
CACHED, OUTSIDE = Style(WHITE, "oo"), Style(WHITE, "xx")
DIAMOND: dict[str, Any] = {"linestyle": "none", "marker": "D", "color": BLACK}
LIMIT_LOOK: dict[str, Any] = {"color": BLACK, "linestyle": "--", "linewidth": 1.5}


def far_limit(limit_bytes: int, highest_bytes: float) -> str:
    """Say a limit that is not drawn; empty for one near enough."""
    times = limit_bytes / max(highest_bytes, 1)
    if times <= FARTHEST:
        return ""
    times_text = decimal(times, 1 if times < 10 else 0)
    return phrase("far limit", limit_bytes=limit_bytes, times_text=times_text)


def footprint_figure(forecast: Forecast, path: str | Path | None = None, limit_bytes: int | None = None) -> LabFigure:
    """Draw a forecast at its peak: stacked by category against the device's limit, and block by block.

    Args:
        limit_bytes: memory of the device, drawn as a line; by default that of the forecast's device, if any.
    """
    if limit_bytes is None and forecast.device is not None:
        limit_bytes = forecast.device.memory_bytes
    blocks = grouped_blocks(forecast, MOST_BARS)
    figure = new_figure(12.0, 2.4 + 0.32 * max(len(blocks), 8), alt=f"{headline(forecast)}. {peak_sentence(forecast)}")
    grid = figure.add_gridspec(1, 2, width_ratios=(1.0, 1.5), wspace=0.06)
    totals, by_block = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    handles = _totals(totals, forecast, limit_bytes)
    _blocks(by_block, blocks)
    figure.suptitle(headline(forecast), fontweight="bold", fontsize=TITLE)
    below(figure, handles, 5)
    return finish(figure, path)


def _categories(category_bytes: Mapping[Any, int], scale: int) -> list[tuple[float, Style]]:
    return [(category_bytes.get(name, 0) / scale, CATEGORY_STYLES[name]) for name in CATEGORIES]


def _totals(axes: Axes, forecast: Forecast, limit_bytes: int | None) -> list[Artist]:
    memory = forecast.memory
    at_peak, allocated = memory.at_peak_bytes or {}, memory.peak_bytes or 0
    bars = [(say(en="allocated", fr="alloué"), allocated)]
    if memory.reserved_bytes is not None:
        bars.append((say(en="reserved", fr="réservé"), memory.reserved_bytes))
        if memory.device_bytes is not None:
            bars.append((say(en="as nvidia-smi\nshows it", fr="vu par\nnvidia-smi"), memory.device_bytes))
    highest = max(total for _, total in bars)
    unit, scale = byte_scale(highest)
    # What each bar has more than the one before: the allocator's cache, then CUDA's context and NCCL.
    extras = [
        ((total - before) / scale, style)
        for (_, before), (_, total), style in zip(bars, bars[1:], (CACHED, OUTSIDE), strict=False)
    ]
    plate = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    for number, (_, total) in enumerate(bars):
        # Bar n has the categories and the first n extras on top.
        top = stack(axes, number, [*_categories(at_peak, scale), *extras[:number]], 0.55, upright=True)
        looks = {"ha": "center", "va": "bottom", "fontweight": "bold", "fontsize": None, "bbox": plate}
        note(axes, format_bytes(total), (number, top), (0, 3), **looks)
    title = textwrap.fill(say(en="At the peak: ", fr="Au pic : ") + visible(forecast.moment), 54)
    handles: list[Artist] = [
        swatch(CATEGORY_STYLES[name], category_label(name)) for name in CATEGORIES if at_peak.get(name)
    ]
    if len(bars) > 1:
        handles.append(swatch(CACHED, say(en="cached, fragmented", fr="caché, fragmenté")))
    if len(bars) > 2:
        handles.append(swatch(OUTSIDE, say(en="CUDA context, NCCL", fr="contexte CUDA, NCCL")))
    ceiling = highest / scale * 1.14
    if limit_bytes is not None:
        # Too far away to be drawn: said in the title.
        if far := far_limit(limit_bytes, highest):
            title += f"\n({far})"
        else:
            axes.axhline(limit_bytes / scale, **LIMIT_LOOK)
            ceiling = max(ceiling, limit_bytes / scale * 1.1)
            handles.append(key(say(en="limit: ", fr="limite : ") + format_bytes(limit_bytes), **LIMIT_LOOK))
    axes.set_xticks(range(len(bars)), [label for label, _ in bars])
    axes.set(xlim=(-0.65, len(bars) - 0.35), ylim=(0, ceiling))
    caption(axes, y=unit, title=title)
    plain(axes, "y")
    return handles


def _blocks(axes: Axes, blocks: list[tuple[str, dict[str, int]]]) -> None:
    longest = max((sum(category_bytes.values()) for _, category_bytes in blocks), default=1)
    unit, scale = byte_scale(longest)
    for number, (_, category_bytes) in enumerate(blocks):
        end = stack(axes, number, _categories(category_bytes, scale), 0.7)
        note(axes, format_bytes(sum(category_bytes.values())), (end, number), (4, 0), fontsize=NORMAL)
    axes.set_yticks(range(len(blocks)), [label for label, _ in blocks])
    axes.set(ylim=(len(blocks) - 0.45, -0.55), xlim=(0, longest / scale * 1.17))
    caption(axes, x=unit, title=say(en="What fills it, by block", fr="Ce qui le remplit, par bloc"))
    plain(axes, "x")
    axes.tick_params(axis="y", length=0)


def activation_curve_figure(plan: BudgetPlan, path: str | Path | None = None) -> LabFigure:
    """Draw memory against time under all budgets, with the plan among them, and each block's choice.

    Args:
        plan: of one budget; its tables give the curve.
    """
    curve = plan.curve()
    unit, scale = byte_scale(curve[-1].peak_bytes)
    seconds = [point.seconds for point in curve]
    # Seconds or milliseconds, by the longest.
    time_unit, per_second = ("s", 1.0) if max(seconds) >= 1 else ("ms", 1e3)
    title, extra = visible(plan.config.title), format_seconds(max(seconds))
    ends = [format_bytes(point.peak_bytes) for point in (curve[0], curve[-1])]
    alt = phrase("alt of budgets", title=title, least=ends[0], extra=extra, most=ends[1])
    figure = new_figure(12.0, 4.6, alt)
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.3))
    left.plot(
        [point.peak_bytes / scale for point in curve],
        [duration_s * per_second for duration_s in seconds],
        BLUE,
        marker="o",
    )
    plan_point = plan.peak_bytes / scale, plan.tables.costs(plan.choices)[0] * per_second
    left.plot(*plan_point, color=BLACK, marker="D", markersize=9, markerfacecolor="none", linestyle="")
    left.axvline(plan.budget_bytes / scale, **LIMIT_LOOK)
    caption(left, x=say(en=f"peak of a rank, {unit}", fr=f"pic d’un rang, {unit}"))
    caption(left, y=say(en=f"time added to a step, {time_unit}", fr=f"temps ajouté à un pas, {time_unit}"))
    plain(left)
    styles = FILLS[: len(BLOCK_CHOICES)]
    for row, point in enumerate(curve):
        # groupby: neighbours with one choice are one piece, as long as they are many.
        stack(right, row, [(float(len(list(run))), styles[choice]) for choice, run in groupby(point.choices)], 0.8)
    right.set_yticks(range(len(curve)), [format_bytes(point.peak_bytes) for point in curve])
    right.set(xlim=(0, len(plan.choices)), ylim=(-0.6, len(curve) - 0.4))
    caption(right, x=say(en="block", fr="bloc"), y=say(en="peak", fr="pic"))
    figure.suptitle(title, fontsize=TITLE)
    handles: list[Artist] = [swatch(*pair) for pair in zip(styles, map(choice_label, BLOCK_CHOICES), strict=True)]
    handles.append(key(say(en="budget: ", fr="budget : ") + format_bytes(plan.budget_bytes), **LIMIT_LOOK))
    below(figure, handles, 4)
    return finish(figure, path)


BAR = 0.36
SIDES = ("predicted", "measured")


def compare_figure(comparison: Comparison, path: str | Path | None = None) -> LabFigure:
    """Draw memory, communication, throughput and losses of several runs, predicted above measured.

    Of the first pipeline among them, the measured step is drawn under its simulation.
    """
    rows = comparison.rows
    alt = phrase("alt of runs") + ", ".join(row.title for row in rows)
    step = next((_step_drawing(row.title, row.overlay) for row in rows if row.overlay), None)
    heights_in = [4.6 + 0.28 * max(0, len(rows) - 5), 2.9 + 0.22 * max(0, len(rows) - 5)]
    if step:
        # Inches: a drawing has 72 points to the inch.
        heights_in.insert(1, step.height / 72)
    figure = new_figure(13.0, sum(heights_in), f"{alt}. {step.alt}" if step else alt)
    # Rows of the figure: panels, the pipeline's step if there is one, losses.
    grid = figure.add_gridspec(len(heights_in), 1, height_ratios=heights_in)
    parts = [figure.add_subfigure(grid[number, 0]) for number in range(len(heights_in))]
    upper, lower = parts[0], parts[-1]
    shape: dict[str, Any] = {"width_ratios": (1.25, 1.1, 0.9), "gridspec_kw": {"wspace": 0.06}}
    memory, communication, throughput = upper.subplots(1, 3, sharey=True, **shape)
    # The legend of the losses stands in a free cell on their right.
    losses = lower.add_subplot(lower.add_gridspec(1, 2, width_ratios=(2.35, 0.9))[0, 0])
    _memory(memory, rows)
    _communication(communication, rows)
    _throughput(throughput, rows)
    _losses(losses, rows)
    if step:
        across = step.width / 72 / 13.0
        paint(parts[1].add_axes((0.5 - across / 2, 0.0, across, 1.0)), step)
    for panel in (communication, throughput):  # the names stand once, on the left
        panel.tick_params(labelleft=False)
    models = ", ".join(dict.fromkeys(visible(row.model) for row in rows))
    title = phrase("title of runs", models=models)
    figure.suptitle(title, fontweight="bold")
    return finish(figure, path)


def _step_drawing(name: str, overlay: MeasuredOverlay) -> Drawing:
    """Draw a pipeline's measured step under its simulation."""
    scene = overlay_scene(overlay.simulated, overlay.measured)
    title = say(en="A measured step under its simulation: ", fr="Un pas mesuré, sous sa simulation : ")
    return schedule_drawing([scene], title + visible(name), [f"{scene.title}\n{scene.subtitle}"], scene.alt)


def _names(rows: Sequence[RunRow]) -> list[str]:
    return [
        textwrap.fill(visible(row.title), 24)
        + (f" ×{row.world_size}" if row.world_size > 1 and "×" not in row.title else "")
        + ("" if row.status in ("completed", "running") else f"\n({status_label(row.status)})")
        for row in rows
    ]


def _runs_down(axes: Axes, rows: Sequence[RunRow], title: str, label: str) -> None:
    axes.set_yticks(range(len(rows)), _names(rows))
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(4))  # numbers of four digits side by side
    caption(axes, x=label, title=title, size=TITLE)
    plain(axes, "x")
    axes.tick_params(axis="y", length=0)


def _bar(axes: Axes, row: int, parts: Sequence[tuple[float, Style]], side: str) -> None:
    """One bar; the predicted one lies above, paler, with a dashed edge."""
    if side == "predicted":
        stack(axes, row - BAR / 2 - 0.01, parts, BAR, linewidth=0.7, alpha=PREDICTED_ALPHA, linestyle="--")
    else:
        stack(axes, row + BAR / 2 + 0.01, parts, BAR, linewidth=0.7)


def _total(stacked: Mapping[str, PredictedMeasured], side: str) -> float:
    return sum(getattr(pair, side) or 0 for pair in stacked.values())


def _bars(
    axes: Axes, stacks: Sequence[Mapping[str, PredictedMeasured]], styles: Mapping[str, Style]
) -> tuple[str, int]:
    """Draw every stack twice, predicted and measured, in one unit; returns the unit and its bytes."""
    unit, scale = byte_scale(max((_total(stacked, side) for stacked in stacks for side in SIDES), default=0))
    for number, stacked in enumerate(stacks):
        for side in SIDES:
            parts = [((getattr(pair, side) or 0) / scale, styles.get(name, OTHER)) for name, pair in stacked.items()]
            _bar(axes, number, parts, side)
    return unit, scale


def _legend(axes: Axes, handles: Sequence[Artist]) -> None:
    """Legend below the panel, outside the bars."""
    handle_options: dict[str, Any] = {"handlelength": 1.8, "handleheight": 1.1, "columnspacing": 1.2}
    legend_position: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14)}
    axes.legend(handles=list(handles), ncols=2, frameon=False, fontsize=NORMAL, **legend_position, **handle_options)


def _memory(axes: Axes, rows: Sequence[RunRow]) -> None:
    stacks = [{str(name): row.memory_bytes[name] for name in CATEGORIES} for row in rows]
    unit, scale = _bars(axes, stacks, {str(name): style for name, style in CATEGORY_STYLES.items()})
    categories = [name for name in CATEGORIES if any(stack[name].measured or stack[name].predicted for stack in stacks)]
    handles: list[Artist] = [swatch(CATEGORY_STYLES[name], category_label(name), 0.7) for name in categories]
    for side, offset, face, label in (
        ("predicted", -BAR / 2, FRAME, say(en="predicted peak", fr="pic prédit")),
        ("measured", BAR / 2, "white", say(en="measured peak", fr="pic mesuré")),
    ):
        peaks = [(getattr(row.memory_bytes["peak"], side), number + offset) for number, row in enumerate(rows)]
        # 0 and None are no mark: nothing was measured or predicted.
        marks = [(peak / scale, height) for peak, height in peaks if peak]
        marker_properties: dict[str, Any] = {**DIAMOND, "markerfacecolor": face}
        if marks:
            axes.plot(*zip(*marks, strict=True), **marker_properties)
            handles.append(key(label, **marker_properties))
    far = _limits(axes, rows, scale, handles)
    unpredicted = [
        category_label(name) for name in categories if all(stack[name].predicted is None for stack in stacks)
    ]
    remark = say(en="not predicted: ", fr="non prédit : ") + ", ".join(unpredicted) if unpredicted else far
    title = say(en="Memory of rank 0, largest of each", fr="Mémoire du rang 0, maximum de chacune")
    _runs_down(axes, rows, title + (f"\n({remark})" if remark else ""), unit)
    _legend(axes, handles)


def _limits(axes: Axes, rows: Sequence[RunRow], scale: int, handles: list[Artist]) -> str:
    """Mark what a rank of each run could take; where that is too far away to be drawn, say it in words instead."""
    # In bytes: the axis counts units of `scale` bytes.
    longest = axes.get_xlim()[1] * scale
    rank_limits = [(number, row.limit_bytes) for number, row in enumerate(rows) if row.limit_bytes]
    if not rank_limits:
        return ""
    if far := far_limit(min(limit_bytes for _, limit_bytes in rank_limits), longest):
        return far
    drawable_limits = [
        (number, limit_bytes) for number, limit_bytes in rank_limits if not far_limit(limit_bytes, longest)
    ]
    for number, limit_bytes in drawable_limits:
        axes.plot([limit_bytes / scale] * 2, [number - 0.45, number + 0.45], **LIMIT_LOOK)
    axes.set_xlim(right=max(longest, 1.03 * max(limit_bytes for _, limit_bytes in drawable_limits)) / scale)
    handles.append(key(say(en="limit of a rank", fr="limite d’un rang"), **LIMIT_LOOK))
    return ""


def _communication(axes: Axes, rows: Sequence[RunRow]) -> None:
    # Of a script what is predicted, and compared: what wraps its model sends, without the script's own calls.
    stacks = [
        {str(pair.collective): pair.message_bytes for pair in row.communication if pair.origin == "wrapper"}
        for row in rows
    ]
    unit, scale = _bars(axes, stacks, COLLECTIVE_STYLES)
    right = axes.get_xlim()[1] * 1.06  # room for the verdict behind the longest bar
    axes.set_xlim(0, right)
    for number, row in enumerate(rows):
        if row.exact is not None:
            end = max(_total(stacks[number], side) for side in SIDES) / scale + 0.015 * right
            axes.text(end, number, "=" if row.exact else "≠", va="center", fontsize=SIGN, fontweight="bold")
    title = phrase("title of communication")
    _runs_down(axes, rows, title, unit)
    if not any(_total(stacked, side) for stacked in stacks for side in SIDES):
        axes.set(xticks=[], xlabel="")
        nothing = say(en="none", fr="aucun") if all(row.world_size == 1 for row in rows) else DASH
        axes.text(0.5, 0.5, nothing, transform=axes.transAxes, ha="center", va="center", color=GREY)
    names = dict.fromkeys(name for stacked in stacks for name in stacked)
    _legend(axes, [swatch(COLLECTIVE_STYLES.get(name, OTHER), name, 0.7) for name in names])


def _throughput(axes: Axes, rows: Sequence[RunRow]) -> None:
    for number, row in enumerate(rows):
        for side in SIDES:
            _bar(axes, number, [(getattr(row.samples_per_s, side) or 0, Style(BLUE, ""))], side)
    title = say(en="Throughput\n(predicted: dp × one process)", fr="Débit\n(prédit : dp × un processus)")
    if any(row.model_ranks > 1 for row in rows):
        title = phrase("throughput of ranks")
    if any(row.calibration for row in rows):
        title = phrase("throughput of a calibration")
    if all(row.samples_per_s.predicted is None for row in rows):
        title = say(en="Throughput\n(measured)", fr="Débit\n(mesuré)")
    _runs_down(axes, rows, title, say(en="samples/s", fr="échantillons/s"))


def _losses(axes: Axes, rows: Sequence[RunRow]) -> None:
    """Curves that should lie on each other: wide ones below, markers of each at other steps."""
    drawn = [(row, name) for row, name in zip(rows, _names(rows), strict=True) if row.losses]
    num_curves = max(1, len(drawn))
    for number, (row, name) in enumerate(drawn):
        color, dashes, marker = LINE_STYLES[number % len(LINE_STYLES)]
        last_step = len(row.losses)
        # On long curves a marker every num_curves steps, one step later on each curve: none hides another.
        stride = num_curves if last_step > 2 * num_curves else 1
        axes.plot(
            range(1, last_step + 1),
            row.losses,
            color=color,
            linestyle=dashes,
            marker=marker,
            markersize=5.5,
            markevery=(number % stride, stride),
            # The first curve 4 points wide, the last 1: what lies below stays visible.
            linewidth=4.0 - 3.0 * number / max(1, len(drawn) - 1),
            label=textwrap.indent(textwrap.fill(name.replace("\n", " "), 30), " "),
        )
    gap = max((row.loss_gap for row in rows if row.loss_gap is not None), default=None)
    title = say(en="Training loss", fr="Perte à l'entraînement")
    if gap is not None:
        title += say(en=f" (largest gap to one process: {gap_text(gap)})", fr=f" (écart maximal : {gap_text(gap)})")
    caption(axes, x=say(en="step", fr="pas"), y=say(en="loss", fr="perte"), title=title, size=TITLE)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    plain(axes)
    if drawn:
        legend = axes.legend(
            loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize=NORMAL, handlelength=3.5
        )
        legend.set_in_layout(False)


COMPUTE_LANE = (-0.4, 0.8)
"""Top and height, in ranks, without communication; otherwise the two lanes share the room."""
UPPER_LANE, LOWER_LANE = (-0.4, 0.48), (0.12, 0.28)
WITHIN = "communication"
DRAWN_STEPS = 3


def timeline_figure(record: RunRecord) -> LabFigure:
    """Draw the spans of the last steps of a run: a line per rank, a bar per phase, below it what is between the ranks.

    What lies under a compute phase is hidden behind it, what lies under a wait is exposed. Each phase is one
    collection, so that thousands of spans draw as fast as ten.

    Args:
        record: a run whose phases were kept.

    Raises:
        LabError: if the run kept no spans.
    """
    recorded_steps = sorted({span.step for span in record.spans})
    if not recorded_steps:
        raise LabError(f"the run {record.run_id} kept no timeline (it ended before its first step): run it again.")
    chosen = set(recorded_steps[-DRAWN_STEPS:])
    spans = [span for span in record.spans if span.step in chosen]
    title = visible(record.title)
    alt = phrase("alt of a timeline", steps=len(chosen), ranks=len({span.rank for span in spans}), title=title)
    return spans_figure(spans, title + _overlap_words(record), alt)


def spans_figure(
    spans: Sequence[Span], title: str, alt: str, path: str | Path | None = None, *, steps: bool = True
) -> LabFigure:
    """Draw spans of any steps and ranks, at least one.

    Args:
        title: of what they are, ready to show.
        steps: whether the beginning of each step is marked.
    """
    ranks = sorted({span.rank for span in spans})
    origin_s = min(span.start_s for span in spans)
    figure = new_figure(12.0, 1.9 + 0.55 * len(ranks), alt)
    axes = figure.subplots()
    names = list(dict.fromkeys(span.phase for span in sorted(spans, key=_drawing_order)))
    # Two lanes where messages are drawn, one where there are none.
    compute_lane = UPPER_LANE if any(name.startswith(WITHIN) for name in names) else COMPUTE_LANE
    for name in names:
        style = phase_style(name)
        top, height = LOWER_LANE if name.startswith(WITHIN) else compute_lane
        for rank in ranks:
            # ms since the first span: (start, length).
            bars = [
                ((span.start_s - origin_s) * 1e3, (span.end_s - span.start_s) * 1e3)
                for span in spans
                if (span.phase, span.rank) == (name, rank)
            ]
            lane = rank + top, height
            axes.broken_barh(bars, lane, facecolor=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=0.5)
    for step in sorted({span.step for span in spans}) if steps else ():
        start_ms = (min(span.start_s for span in spans if span.step == step) - origin_s) * 1e3
        axes.axvline(start_ms, color=EDGE, linewidth=1.0, linestyle="--")
        name = say(en=f"step {step + 1}", fr=f"pas {step + 1}")
        note(axes, name, (start_ms, ranks[0] - 0.5), (4, 2), va="bottom", fontsize=NORMAL)
    # A trace that does not name its rank has −1.
    names_down = [say(en=f"rank {rank}", fr=f"rang {rank}") if rank >= 0 else "" for rank in ranks]
    axes.set_yticks(ranks, names_down)
    axes.set_ylim(ranks[-1] + 0.6, ranks[0] - 0.85)
    axes.set_xlim(left=0)
    headline_words = say(en="What each rank does: ", fr="Ce que fait chaque rang : ") + title
    caption(axes, x=say(en="time, ms", fr="temps (ms)"), title=headline_words, size=TITLE)
    plain(axes, "x")
    handles = [swatch(phase_style(name), " " + phase_label(visible(name)), 1.0) for name in names]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, handleheight=1.2)
    return finish(figure, path)


def _overlap_words(record: RunRecord) -> str:
    """How much of rank 0's communication is exposed and how much is hidden, where it was measured."""
    measured = record.footprint()
    phases = measured.phases if measured else None
    if phases is None or phases.communication_exposed_s is None or phases.communication_hidden_s is None:
        return ""
    exposed = format_seconds(phases.communication_exposed_s)
    hidden = format_seconds(phases.communication_hidden_s)
    backward, compute = say(en="backward", fr="la passe arrière"), say(en="compute", fr="le calcul")
    hiding_work = compute if record.config.script else backward
    return phrase("overlap", exposed=exposed, hidden=hidden, hiding_work=hiding_work)


def _drawing_order(span: Span) -> tuple[bool, bool, float]:
    """The wait is drawn over the backward phase that it is the end of; communication comes last in the legend."""
    return span.phase.startswith(WITHIN), span.phase == "wait", span.start_s


def optimizer_label(name: str) -> str:
    """Write an optimizer's name as papers do."""
    return OPTIMIZERS[name].label if name in OPTIMIZERS else visible(name).replace("_", " ")


LAST_STEPS = 20
"""Steps over which the words under a title take their mean."""


WIDEST_IN = 13.0
"""Beyond, a notebook would shrink the figure to illegible curves: columns become narrower instead."""


def expert_load_figure(trainings: Mapping[str, Sequence[ExpertLoad]]) -> LabFigure:
    """Draw what the experts of the last mixture were given, step by step, one column for each training.

    Args:
        trainings: loads of each, under the words above its column.

    Raises:
        LabError: if a training has no loads.
    """
    columns = {name: _of_last_layer(name, loads) for name, loads in trainings.items()}
    if not columns:
        raise LabError(say(en="give the loads of at least one training.", fr="donnez les charges d’un entraînement."))
    column_in = min(5.2, (WIDEST_IN - 1.6) / len(columns))
    figure = new_figure(1.6 + column_in * len(columns), 7.4, alt=_expert_load_alt(columns))
    rows = figure.subplots(3, len(columns), sharex="col", sharey="row", squeeze=False, height_ratios=(3, 2, 1.2))
    largest_share = max(max(_shares(load)) for loads in columns.values() for load in loads)
    for column, (name, loads) in enumerate(columns.items()):
        # Three panels of a column: heat map, extremes, dropped share.
        top, middle, bottom = (rows[row][column] for row in range(3))
        mesh = _heat_map(top, loads, largest_share)
        letters = max(8, int(72 * column_in / (HEADING * LETTER)))
        top.set_title(textwrap.fill(visible(name), letters), loc="left", fontweight="bold", fontsize=HEADING)
        bar = figure.colorbar(mesh, ax=top, pad=0.02)
        bar.ax.axhline(_capacity(loads[-1]), color=BLACK, linestyle="--", linewidth=1.4)
        _extremes(middle, loads)
        _dropped(bottom, loads)
        if column == len(columns) - 1:
            bar.set_label(say(en="load, relative to the fair share", fr="charge, rapportée à la part équitable"))
            figure.legend(handles=middle.get_lines(), loc="outside lower center", ncols=3, frameon=False)
    capacities = (_capacity(load) for loads in columns.values() for load in loads)
    rows[1][0].set_ylim(0, 1.05 * max(largest_share, *capacities))
    caption(rows[0][0], y="expert")
    # Two lines: the panel is too low for one.
    caption(rows[1][0], y=say(en="load, relative\nto the fair share", fr="charge, rapportée\nà la part équitable"))
    caption(rows[2][0], y=say(en="dropped", fr="abandonnés"))
    mixture = visible(next(iter(columns.values()))[0].layer)
    title = phrase("title of experts", mixture=mixture)
    figure.suptitle(textwrap.fill(title, int(72 * figure.get_figwidth() / (TITLE * LETTER))), fontsize=TITLE)
    return finish(figure)


def _of_last_layer(name: str, loads: Sequence[ExpertLoad]) -> list[ExpertLoad]:
    layers = list(dict.fromkeys(load.layer for load in loads))
    if not layers:
        raise phrase.refused("no load of experts", name=name)
    return [load for load in loads if load.layer == layers[-1]]


def _shares(load: ExpertLoad) -> list[float]:
    """Each expert's choices in units of the fair share, the mean over the experts."""
    # Mean choices per expert.
    fair = sum(load.tokens) / len(load.tokens)
    return [tokens / fair for tokens in load.tokens]


def _capacity(load: ExpertLoad) -> float:
    # Capacity in units of the fair share: choices an expert may take over the mean choices.
    return load.capacity * len(load.tokens) / sum(load.tokens)


def _heat_map(axes: Axes, loads: list[ExpertLoad], largest_share: float) -> QuadMesh:
    """An expert a line, a step a column: white idle, blue up to the capacity, orange to red beyond."""
    # Where on the colour scale the capacity lies: blue below, orange to red above.
    turn = min(_capacity(loads[-1]) / largest_share, 0.999)
    colours = LinearSegmentedColormap.from_list(
        "load", [(0, WHITE), (turn, BLUE), (min(turn + 0.001, 1), LIGHT_ORANGE), (1, VERMILION)], N=1024
    )
    # Edges of the cells, one more than there are steps or experts.
    steps = [load.step - 0.5 for load in loads] + [loads[-1].step + 0.5]
    experts = [expert - 0.5 for expert in range(len(loads[0].tokens) + 1)]
    # (experts, steps)
    shares = [list(column) for column in zip(*(_shares(load) for load in loads), strict=True)]
    mesh = axes.pcolormesh(steps, experts, shares, cmap=colours, vmin=0, vmax=largest_share, rasterized=True)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.invert_yaxis()
    return mesh


def _extremes(axes: Axes, loads: list[ExpertLoad]) -> None:
    steps = [load.step for load in loads]
    busiest, idlest = ([pick(_shares(load)) for load in loads] for pick in (max, min))
    axes.plot(steps, busiest, color=VERMILION, linestyle="-", label=say(en="busiest expert", fr="le plus chargé"))
    axes.plot(steps, idlest, color=BLUE, linestyle=":", label=say(en="idlest expert", fr="le moins chargé"))
    capacities, label = [_capacity(load) for load in loads], say(en="capacity", fr="capacité")
    axes.plot(steps, capacities, color=BLACK, linestyle="--", linewidth=1.4, label=label)
    plain(axes)


def _dropped(axes: Axes, loads: list[ExpertLoad]) -> None:
    steps, dropped = [load.step for load in loads], [load.dropped for load in loads]
    axes.fill_between(steps, dropped, color=ORANGE, alpha=0.6, hatch="//", edgecolor=EDGE, linewidth=0.4)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, position: percent(value, None))
    caption(axes, x=say(en="step", fr="pas"))
    axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    plain(axes)
    recent_shares = dropped[-LAST_STEPS:]
    mean = percent(sum(recent_shares) / len(recent_shares), 0)
    words = phrase("mean of the last steps", mean=mean, steps=len(recent_shares))
    axes.set_title(words, loc="right", fontsize=HEADING)


def _expert_load_alt(columns: Mapping[str, list[ExpertLoad]]) -> str:
    """What the figure shows, in words: of each training, the busiest expert and the dropped share at the end."""
    words = []
    for name, loads in columns.items():
        recent_loads = loads[-LAST_STEPS:]
        # Choices of each expert, summed over the last steps.
        totals = [sum(tokens) for tokens in zip(*(load.tokens for load in recent_loads), strict=True)]
        share = percent(max(totals) / sum(totals), 0)
        dropped = percent(sum(load.dropped for load in recent_loads) / len(recent_loads), 0)
        # Below a tenth of the fair share.
        idle = sum(total < 0.1 * sum(totals) / len(totals) for total in totals)
        words.append(phrase("alt of experts", name=name, experts=len(totals), share=share, idle=idle, dropped=dropped))
    opening = say(en="Load of the experts over the last steps. ", fr="Charge des experts sur les derniers pas. ")
    return opening + say(en="; ", fr=" ; ").join(words)


MOST_POINTS = 2000
"""Points of a curve that a drawing can tell apart."""
BEFORE_AFTER = (Style(BLUE, ""), Style(ORANGE, "//"))
PAIR_BAR = 0.36


def _pairs(axes: Axes, names: Sequence[str], pairs: Sequence[tuple[float, float]], labels: Sequence[str]) -> None:
    """Draw a bar before and one after for each name, the largest on top."""
    for side, style in enumerate(BEFORE_AFTER):
        rows = [number + (side - 0.5) * PAIR_BAR for number in range(len(names))]
        widths = [pair[side] for pair in pairs]
        axes.barh(rows, widths, PAIR_BAR, color=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=0.5)
    axes.set_yticks(range(len(names)), list(names))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(left=0)
    plain(axes, "x")
    handles = [swatch(style, " " + label) for style, label in zip(BEFORE_AFTER, labels, strict=True)]
    # Below the axis, where no bar lies under it.
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)


def profiles_figure(comparison: ProfileComparison, path: str | Path | None = None) -> LabFigure:
    """Draw parts of the time and kinds of kernels of two traces, before above after, in ms per step."""
    panels = (comparison.parts, comparison.kinds)
    names = (comparison.before.name, comparison.after.name)
    alt = phrase("alt of profiles", before=names[0], after=names[1])
    figure = new_figure(11.0, 1.6 + 0.5 * max(map(len, panels)), alt)
    unit = say(en="ms per step", fr="ms par pas") if comparison.per_step else say(en="ms", fr="ms")
    heads = say(en="Parts of the time", fr="Parts du temps"), say(en="By kind of kernel", fr="Par sorte de noyau")
    for axes, changes, head in zip(figure.subplots(1, 2), panels, heads, strict=True):
        pairs = [(change.before_s * 1e3, change.after_s * 1e3) for change in changes]
        _pairs(axes, [kernel_kind(change.name) for change in changes], pairs, names)
        caption(axes, x=unit, title=head, size=TITLE)
    return finish(figure, path)


def snapshots_figure(
    snapshots: Sequence[MemorySnapshot], growth: Sequence[FrameGrowth] = (), path: str | Path | None = None
) -> LabFigure:
    """Draw bytes in use of one snapshot or two over their records, on one axis, and what holds them at the peak.

    Args:
        growth: of two snapshots, their lines side by side.
    """
    names = ", ".join(snapshot.name for snapshot in snapshots)
    alt = phrase("alt of snapshots", names=names)
    unit, scale = byte_scale(max(snapshot.peak_bytes for snapshot in snapshots))
    figure = new_figure(13.0, 4.8, alt)
    over_time, by_line = figure.subplots(1, 2, width_ratios=(1.3, 1.0))
    handles = []
    for snapshot, (color, dashes, _) in zip(snapshots, LINE_STYLES, strict=False):
        positions, heights = _thinned(snapshot.in_use_bytes, scale)
        over_time.step(positions, heights, where="post", color=color, linestyle=dashes)
        handles.append(key(snapshot.name, color=color, linestyle=dashes))
        if len(snapshots) == 1 and snapshot.recorded:
            over_time.step(*_thinned(snapshot.reserved_bytes, scale), where="post", color=GREY, linestyle=":")
            handles.append(key(say(en="reserved", fr="réservé"), color=GREY, linestyle=":"))
        point = float(snapshot.peak), snapshot.peak_bytes / scale
        over_time.plot(*point, marker="o", color=color)
        note(over_time, format_bytes(snapshot.peak_bytes), point, (0, 8), ha="center", va="bottom")
    over_time.margins(y=0.15)
    over_time.set_ylim(bottom=0)
    plain(over_time)
    over_time.legend(handles=handles, loc="lower right", frameon=False)
    entries = say(en="entries of the record", fr="entrées de l’enregistrement")
    caption(over_time, x=entries, y=unit, title=say(en="In use", fr="Utilisé"), size=TITLE)
    title = say(en="At the peak, by line", fr="Au pic, par ligne")
    if growth:
        pairs = [(row.before_bytes / scale, row.after_bytes / scale) for row in growth[:MOST_FRAMES]]
        _pairs(by_line, [frame_label(row.frame) for row in growth[:MOST_FRAMES]], pairs, [s.name for s in snapshots])
    else:
        rows: Sequence[FrameBytes] = snapshots[0].at_peak[:MOST_FRAMES]
        by_line.barh(range(len(rows)), [row.size_bytes / scale for row in rows], 0.6, color=BLUE, edgecolor=EDGE)
        by_line.set_yticks(range(len(rows)), [frame_label(row.frame) for row in rows])
        by_line.invert_yaxis()
        plain(by_line, "x")
    caption(by_line, x=unit, title=title, size=TITLE)
    return finish(figure, path)


def _thinned(curve: NDArray[np.float64], scale: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Take at most so many points of a curve: of each stretch the highest, so that no peak is lost."""
    starts = np.unique(np.linspace(0, len(curve) - 1, MOST_POINTS).astype(np.int64))
    return starts, np.maximum.reduceat(curve, starts) / scale
