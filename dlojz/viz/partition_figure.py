"""Stages as stacks of their blocks, one panel per way to cut, all on one scale.

Layer 4. Invariant: a block is as high as it weighs; the dashed line is the bottleneck of the panel's own cut, the
dotted one the mean, which no cut changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from dlojz.pipeline.partition import Partition
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.markup import visible
from dlojz.viz.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW, Style
from dlojz.viz.partition_sheet import ratio_text
from dlojz.viz.pipeline_draw import decimal_marks

if TYPE_CHECKING:
    from dlojz.pipeline.block_weights import BlockWeights

KIND_STYLES = (
    Style(BLUE, ""),
    Style(ORANGE, "//"),
    Style(GREEN, "\\\\"),
    Style(PURPLE, "xx"),
    Style(SKY, ".."),
    Style(YELLOW, "++"),
    Style(GREY, "--"),
)
PANELS_IN_A_ROW = 4
MOST_NARROW_STAGES = 10
"""With more stages than this, two panels stand in a row and not four."""
PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def partition_figure(
    cuts: Mapping[str, Partition], weighed: BlockWeights, model: str, path: str | Path | None = None
) -> LabFigure:
    """Draw cuts of the same blocks side by side.

    Args:
        cuts: title of each panel, in the reader's language, and its cut; at least one.
        weighed: the blocks, their classes and the unit of their weights.
        model: its name, for the heading.
        path: picture to write, if any.

    Raises:
        LabError: if there is no cut, or the picture cannot be written.
    """
    if not cuts:
        raise LabError(
            say(
                en="there is nothing to draw: give at least one cut.",
                fr="il n’y a rien à dessiner : donnez au moins un découpage.",
            )
        )
    first = next(iter(cuts.values()))
    unit, scale = _unit(weighed, max(cut.bottleneck for cut in cuts.values()))
    columns = min(len(cuts), PANELS_IN_A_ROW if first.num_stages <= MOST_NARROW_STAGES else 2)
    rows = math.ceil(len(cuts) / columns)
    told = "; ".join(f"{name} {weighed.text(cut.bottleneck)}" for name, cut in cuts.items())
    heading = say(
        en=f"{model}: {len(weighed.kinds)} blocks, stages: {first.num_stages}",
        fr=f"{model} : {len(weighed.kinds)} blocs, étages : {first.num_stages}",
    )
    figure = new_figure(
        max(3.3 * columns, 5.0) if columns > 2 else 6.2 * columns,
        3.6 * rows + 1.0,
        alt=say(en=f"{heading}. Bottlenecks: {told}", fr=f"{heading}. Goulots : {told}"),
    )
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    styles = dict(zip(dict.fromkeys(weighed.kinds), KIND_STYLES * len(weighed.kinds), strict=False))
    for axes, (name, cut) in zip(panels.flat, cuts.items(), strict=False):
        _panel(axes, name, cut, weighed, styles, scale)
    for axes in list(panels.flat)[len(cuts) :]:
        axes.set_visible(False)
    for row in panels:
        row[0].set_ylabel(unit)
    decimal_marks(panels[0, 0].yaxis)
    if weighed.unit == "blocks":
        panels[0, 0].yaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in panels[-1]:
        axes.set_xlabel(say(en="stage", fr="étage"))
    figure.suptitle(f"{visible(heading)}. {weighed.title()[0].upper()}{weighed.title()[1:]}", fontweight="bold")
    handles: list[Patch | Line2D] = [
        Patch(facecolor=style.color, hatch=style.hatch, edgecolor="#333333", linewidth=0.4, label=visible(kind))
        for kind, style in styles.items()
    ]
    handles.append(Line2D([], [], color=VERMILION, linestyle="--", label=say(en="bottleneck", fr="goulot")))
    handles.append(
        Line2D([], [], color=BLACK, linestyle=":", label=say(en="mean of the stages", fr="moyenne des étages"))
    )
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 6), frameon=False, handleheight=1.2
    )
    return finish(figure, path)


def _unit(weighed: BlockWeights, largest: float) -> tuple[str, float]:
    """The label of the axis, and how much of a weight one of its units is."""
    if weighed.unit == "s":
        return ("s", 1.0) if largest >= 1 else ("ms", 1e-3)
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
    """One cut: a bar per stage, its blocks in it from the first below to the last above, then its extra."""
    for stage, own in enumerate(cut.stages):
        bottom = 0.0
        for block in range(own.start, own.stop):
            style, height = styles[weighed.kinds[block]], cut.weights[block] / scale
            axes.bar(
                stage,
                height,
                0.8,
                bottom=bottom,
                color=style.color,
                hatch=style.hatch,
                edgecolor="#333333",
                linewidth=0.9,
            )
            bottom += height
        if cut.extras and cut.extras[stage]:
            axes.bar(
                stage,
                cut.extras[stage] / scale,
                0.8,
                bottom=bottom,
                color="white",
                hatch="oo",
                edgecolor="#333333",
                linewidth=0.9,
            )
    axes.axhline(cut.bottleneck / scale, color=VERMILION, linestyle="--", linewidth=1.4)
    axes.axhline(sum(cut.loads) / cut.num_stages / scale, color=BLACK, linestyle=":", linewidth=1.2)
    imbalance = say(en="imbalance ", fr="déséquilibre ") + ratio_text(cut.imbalance)
    bottleneck = say(en="bottleneck ", fr="goulot ") + weighed.text(cut.bottleneck)
    axes.set_title(f"{visible(name)}\n{bottleneck}, {imbalance}", loc="left", fontsize=10)
    step = math.ceil(cut.num_stages / 16)
    axes.set_xticks(range(0, cut.num_stages, step))
    plain(axes)
    axes.grid(visible=False, axis="x")
