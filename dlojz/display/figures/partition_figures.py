"""Figures of pipeline stages: a measured step under its simulation, bubbles by size, stages as stacks of blocks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from dlojz.base.errors import LabError
from dlojz.base.language import decimal, refusal, say, spaced_percent
from dlojz.base.table import visible
from dlojz.compare import overlay_of
from dlojz.display.canvas import LabFigure, caption, finish, key, new_figure, painted, phrase, plain, stack, swatch
from dlojz.display.pipeline_drawing import (
    LEFT_PT,
    RIGHT_PT,
    WIDTH_PT,
    BoundMark,
    Lanes,
    Scene,
    amount,
    scene_drawing,
    scene_of,
    title_of,
)
from dlojz.display.style import BLACK, BLUE, EDGE, FILLS, LINE_STYLES, SMALL, TITLE, VERMILION, Style
from dlojz.pipeline.partition import BlockWeights, Partition
from dlojz.pipeline.schedule import Costs
from dlojz.pipeline.schedule_catalogue import build, entry
from dlojz.pipeline.simulator import UNIT_COSTS, Timeline, simulate
from dlojz.results.record import RunRecord

MOST_LINES = 8
"""Ranks whose lateness is drawn: more lines than these are not told apart."""
LATENESS_PT = 190.0
"""Height of the panel that draws it."""


def overlay_figure(
    predicted: Timeline, measured: Timeline, path: str | Path | None = None, *, color_by: str = "kind", mark: str = ""
) -> LabFigure:
    """Draw a measured timeline under its simulation, on one time axis, and how late each action is.

    Both begin at zero; the simulation is never shifted or stretched to fit.

    Args:
        predicted: simulated with costs in seconds (measured means, say).
        measured: the same schedule, executed; times in seconds.
        color_by: kind, micro_batch or chunk.
        mark: what the title says besides: that the measurement is replayed.

    Raises:
        LabError: if the two are not of the same orders.
    """
    scene = overlay_scene(predicted, measured, color_by=color_by)
    drawing = scene_drawing(scene, mark)
    # LATENESS_PT more than the scene's own height: room for the panel below it.
    high_pt = drawing.height + LATENESS_PT
    figure = painted(replace(drawing, height=high_pt))
    sides = (WIDTH_PT - LEFT_PT - RIGHT_PT) / WIDTH_PT, (LATENESS_PT - 60) / high_pt
    lower = figure.add_axes((LEFT_PT / WIDTH_PT, 40 / high_pt, *sides))
    lower.set_xlim(0, scene.width)
    ranks = predicted.schedule.ranks
    # Seconds by which each action ends later than simulated; both timelines begin at 0.
    lateness = (measured.ends - measured.start) - (predicted.ends - predicted.start)
    for rank in range(min(ranks, MOST_LINES)):
        color, dashes, marker = LINE_STYLES[rank % len(LINE_STYLES)]
        part = predicted.of_rank(rank)
        points = 1e3 * (measured.ends[part] - measured.start), 1e3 * lateness[part]
        name = say(en=f"rank {rank}", fr=f"rang {rank}")
        lower.plot(*points, color=color, linestyle=dashes, marker=marker, markersize=3, linewidth=1.2, label=name)
    lower.axhline(0, color=EDGE, linewidth=0.8)
    caption(
        lower,
        x=say(en="time, ms", fr="temps (ms)"),
        y=say(en="measured − predicted\nend of action, ms", fr="fin d’action, ms\nmesurée − prédite"),
        title=phrase("title of delays"),
    )
    plain(lower)
    lower.legend(loc="best", ncols=4, frameon=False, fontsize=SMALL)
    return finish(figure, path)


def overlay_scene(predicted: Timeline, measured: Timeline, *, color_by: str = "kind") -> Scene:
    """Arrange both timelines in one scene with two rows per rank, the measured one below; times in milliseconds.

    Raises:
        LabError: if the two are not of the same orders.
    """
    if predicted.schedule.orders != measured.schedule.orders:
        raise phrase.refused(
            "measured is another schedule", simulated=predicted.schedule.name, measured=measured.schedule.name
        )
    # One scene each, in ms; their bars go into alternate rows below.
    above, below = (
        scene_of(timeline, color_by=color_by, memory=False, seconds=True) for timeline in (predicted, measured)
    )
    rows = tuple(
        f"{name} {side}"
        for name in above.rows
        for side in (say(en="predicted", fr="prédit"), say(en="measured", fr="mesuré"))
    )
    # Row r of a rank becomes 2r (predicted) and 2r + 1 (measured).
    bars = [bar._replace(row=2 * bar.row + lower) for lower, scene in enumerate((above, below)) for bar in scene.bars]
    title = f"{title_of(predicted.schedule)}. {step_sentence(predicted, measured)}"
    return replace(
        above,
        title=title,
        subtitle=bubble_sentence(predicted, measured),
        alt=f"{title}. {bubble_sentence(predicted, measured)}.",
        rows=rows,
        width=max(above.width, below.width),
        time_label=say(en="time, ms", fr="temps (ms)"),
        lanes=Lanes((0.1, 0.8), None, None),
        bars=tuple(bars),
        marks=(
            BoundMark(1e3 * predicted.makespan, say(en="end, predicted", fr="fin prédite"), "--"),
            BoundMark(1e3 * measured.makespan, say(en="end, measured", fr="fin mesurée"), "-"),
        ),
    )


def step_sentence(predicted: Timeline, measured: Timeline) -> str:
    """Say the length of a step, predicted and measured, and the difference."""
    part = measured.makespan / predicted.makespan - 1 if predicted.makespan else 0.0
    return phrase(
        "step beside its simulation",
        predicted=amount(predicted.makespan, True),
        measured=amount(measured.makespan, True),
        difference=spaced_percent(part, signed=True),
    )


def bubble_sentence(predicted: Timeline, measured: Timeline) -> str:
    """Say the bubble, predicted and measured, as fraction and as overhead."""
    fractions = [spaced_percent(timeline.bubble_fraction) for timeline in (predicted, measured)]
    overheads = [spaced_percent(timeline.bubble_overhead) for timeline in (predicted, measured)]
    return phrase(
        "bubbles",
        predicted=fractions[0],
        measured=fractions[1],
        predicted_overhead=overheads[0],
        measured_overhead=overheads[1],
    )


def overlay_figure_of(record: RunRecord, path: str | Path | None = None, step: int | None = None) -> LabFigure:
    """Draw a run's measured step under its simulation (see `dlojz.compare.overlay_of`).

    Raises:
        LabError: as `overlay_of`.
    """
    overlay = overlay_of(record, step)
    return overlay_figure(overlay.simulated, overlay.measured, path, mark=record.mark)


DEFAULT_NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "chimera", "dualpipe", "hanayo")
MICRO_BATCHES = (4, 8, 12, 16, 24, 32, 48, 64)
_COLUMNS = 4


def bubble_points(
    name: str, ranks: int, micro_batches: Sequence[int], costs: Costs = UNIT_COSTS
) -> list[tuple[int, float]]:
    """Simulate the bubble fraction of a schedule at several sizes; sizes that it does not allow are left out.

    Args:
        name: a schedule of the catalogue.
        micro_batches: sizes to try.
        costs: times, in any unit.

    Raises:
        LabError: for an unknown name.
    """
    catalogue_name = entry(name).name
    points = []
    for number in micro_batches:
        try:
            timeline = simulate(build(catalogue_name, ranks, number, costs=costs), costs)
        except LabError:  # the schedule's own rule (a multiple, an even number …) excludes this size
            continue
        points.append((number, timeline.bubble_fraction))
    return points


def bubble_figure(
    names: Sequence[str] = DEFAULT_NAMES,
    ranks: int = 4,
    micro_batches: Sequence[int] = MICRO_BATCHES,
    path: str | Path | None = None,
    costs: Costs = UNIT_COSTS,
) -> LabFigure:
    """Draw the bubble fraction against the number of micro-batches, one panel per schedule.

    Args:
        names: schedules of the catalogue.
        costs: times, in any unit.

    Raises:
        LabError: for an unknown name, or if no size is legal for any of them.
    """
    curves = {entry(name).name: bubble_points(name, ranks, micro_batches, costs) for name in names}
    drawn = {name: points for name, points in curves.items() if points}
    if not drawn:
        raise refusal(
            en=f"none of {', '.join(names) or '(no names)'} exists for {ranks} ranks and the micro-batches "
            f"{', '.join(map(str, micro_batches)) or '(none)'}: give other sizes, such as 4 ranks and 8, 16, 32.",
            fr=f"aucun de {', '.join(names) or '(aucun nom)'} n’existe pour {ranks} rangs et les micro-batches "
            f"{', '.join(map(str, micro_batches)) or '(aucun)'} : donnez d’autres tailles, comme 4 rangs et 8, 16, "
            "32.",
        )
    endpoints = {name: points[-1] for name, points in drawn.items()}
    words = "; ".join(
        f"{name}: {spaced_percent(bubble)} (m = {number})" for name, (number, bubble) in endpoints.items()
    )
    title = phrase("title of bubbles", ranks=ranks)
    columns = min(_COLUMNS, len(drawn))
    rows = -(-len(drawn) // columns)
    figure = new_figure(max(3.0 * columns, 5.0), 2.3 * rows + 1.0, alt=f"{title}. {words}.")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    flat = list(grid.flat)
    for axes in flat[len(drawn) :]:
        axes.remove()
    for number, (axes, (name, points)) in enumerate(zip(flat, drawn.items(), strict=False)):
        # Percent of the ranks' time.
        percents = [100 * bubble for _, bubble in points]
        axes.plot([size for size, _ in points], percents, color=BLUE, linewidth=1.6, marker="o", markersize=5)
        axes.set_ylim(bottom=0)
        caption(axes, title=name)
        if number + columns >= len(drawn):
            caption(axes, x="micro-batches")
            axes.xaxis.set_tick_params(labelbottom=True)
        if number % columns == 0:
            caption(axes, y=say(en="bubble, % of time", fr="bulle (% du temps)"))
        plain(axes)
    figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE)
    return finish(figure, path)


PANELS_IN_A_ROW = 4
MOST_NARROW_STAGES = 10
"""With more stages than this, two panels stand in a row and not four."""
PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def partition_figure(
    cuts: Mapping[str, Partition], weighed: BlockWeights, model: str, path: str | Path | None = None
) -> LabFigure:
    """Draw cuts of the same blocks side by side, stages as stacks of blocks on one scale.

    A block is as high as its weight; the dashed line is the bottleneck of the cut, the dotted one the mean.

    Args:
        cuts: title of each panel, in the reader's language, and its cut; at least one.
        weighed: the blocks, their classes and the unit of their weights.
        model: its name, for the heading.

    Raises:
        LabError: if there is no cut.
    """
    if not cuts:
        raise phrase.refused("no cut to draw")
    first_cut = next(iter(cuts.values()))
    # One unit for all panels, that of the largest bottleneck.
    unit, scale = _unit(weighed, max(cut.bottleneck for cut in cuts.values()))
    columns = min(len(cuts), PANELS_IN_A_ROW if first_cut.num_stages <= MOST_NARROW_STAGES else 2)
    rows = math.ceil(len(cuts) / columns)
    bottlenecks = "; ".join(f"{name} {weighed.text(cut.bottleneck)}" for name, cut in cuts.items())
    heading = phrase("title of a partition", model=model, blocks=len(weighed.kinds), cut=first_cut)
    wide = max(3.3 * columns, 5.0) if columns > 2 else 6.2 * columns
    figure = new_figure(wide, 3.6 * rows + 1.0, heading + say(en=". Bottlenecks: ", fr=". Goulots : ") + bottlenecks)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    styles = dict(zip(dict.fromkeys(weighed.kinds), FILLS * len(weighed.kinds), strict=False))
    for axes, (name, cut) in zip(panels.flat, cuts.items(), strict=False):
        _panel(axes, name, cut, weighed, styles, scale)
    for axes in list(panels.flat)[len(cuts) :]:
        axes.set_visible(False)
    for row in panels:
        row[0].set_ylabel(unit)
    if weighed.unit == "blocks":
        panels[0, 0].yaxis.set_major_locator(MaxNLocator(integer=True))
    # The lowest panel of each column that shows a cut.
    for number in range(max(0, len(cuts) - columns), len(cuts)):
        axes = panels.flat[number]
        axes.tick_params(labelbottom=True)
        caption(axes, x=say(en="stage", fr="étage"))
    # One panel alone is narrower than the heading on one line.
    between = "\n" if columns == 1 else ". "
    figure.suptitle(f"{visible(heading)}{between}{weighed.title()[0].upper()}{weighed.title()[1:]}", fontweight="bold")
    handles: list[Artist] = [
        *(swatch(style, visible(kind), 0.4) for kind, style in styles.items()),
        key(say(en="bottleneck", fr="goulot"), color=VERMILION, linestyle="--"),
        key(say(en="mean of the stages", fr="moyenne des étages"), color=BLACK, linestyle=":"),
    ]
    columns = min(len(handles), 6)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, handleheight=1.2)
    return finish(figure, path)


def _unit(weighed: BlockWeights, largest: float) -> tuple[str, float]:
    """The label of the axis, and how much of a weight one of its units is."""
    if weighed.unit == "s":
        return ("s", 1.0) if largest >= 1 else ("ms", 1e-3)
    # The largest prefix that is not above the largest weight.
    scale, prefix = next(((size, sign) for size, sign in PREFIXES if largest >= size), (1.0, ""))
    if weighed.unit == "FLOP":
        return f"{prefix}FLOP", scale
    if weighed.unit:
        return say(en="blocks", fr="blocs"), 1.0
    words = say(en="parameters", fr="paramètres")
    return (f"{words}, {prefix}" if prefix else words), scale


def _panel(
    axes: Axes, name: str, cut: Partition, weighed: BlockWeights, styles: Mapping[str, Style], scale: float
) -> None:
    """One cut: a bar per stage, its blocks in it from the first below to the last above."""
    for stage, block_range in enumerate(cut.stages):
        parts = [
            (cut.weights[block] / scale, styles[weighed.kinds[block]])
            for block in range(block_range.start, block_range.stop)
        ]
        stack(axes, stage, parts, 0.8, upright=True, linewidth=0.9)
    axes.axhline(cut.bottleneck / scale, color=VERMILION, linestyle="--", linewidth=1.4)
    # The mean is what a perfect balance would reach.
    axes.axhline(sum(cut.loads) / cut.num_stages / scale, color=BLACK, linestyle=":", linewidth=1.2)
    imbalance = say(en="imbalance ", fr="déséquilibre ") + decimal(cut.imbalance, 2)
    bottleneck = say(en="bottleneck ", fr="goulot ") + weighed.text(cut.bottleneck)
    caption(axes, title=f"{visible(name)}\n{bottleneck}, {imbalance}")
    axes.set_xticks(range(0, cut.num_stages, math.ceil(cut.num_stages / 16)))
    plain(axes, "y")
