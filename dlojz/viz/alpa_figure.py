"""Plans of the two levels drawn: what each device holds of each tensor; stages over layers and devices; a placement.

Layer 4. Invariant: only draws what the plans hold; a hatch or a text says whatever a colour says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from dlojz.text import say
from dlojz.units import format_seconds
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.markup import visible
from dlojz.viz.palette import BLACK, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW, Style
from dlojz.viz.pipeline_draw import decimal_marks

if TYPE_CHECKING:
    from dlojz.plan.alpa.pipeline_plan import PipelinePlan
    from dlojz.plan.alpa.placement import Placement
    from dlojz.plan.alpa.sharding_plan import ShardingPlan
    from dlojz.plan.alpa.sharding_spec import ShardingSpec

KIND_STYLES = {
    "input": Style(GREY, ""),
    "weight": Style(SKY, ""),
    "forward": Style(GREEN, "//"),
    "backward": Style(ORANGE, "\\\\"),
    "gradient": Style(YELLOW, ".."),
}
STAGE_STYLES = (
    Style(SKY, ""),
    Style(ORANGE, "//"),
    Style(GREEN, "\\\\"),
    Style(YELLOW, ".."),
    Style(PURPLE, "xx"),
    Style(GREY, "--"),
)
MOST_TENSORS = 40
MOST_DEVICES = 16
EDGE = "#333333"


def kind_label(kind: str) -> str:
    """A kind of tensor in the reader's language."""
    return {
        "input": say(en="input", fr="entrée"),
        "weight": say(en="weight", fr="poids"),
        "forward": say(en="activation", fr="activation"),
        "backward": say(en="gradient of an activation", fr="gradient d’une activation"),
        "gradient": say(en="gradient of a weight", fr="gradient d’un poids"),
    }[kind]


def sharding_figure(plan: ShardingPlan, path: str | Path | None = None) -> LabFigure:
    """Draw for each tensor (rows) which part of it each device (columns) holds, and what is communicated.

    Tensors with more than two dimensions are drawn by the two that are cut. At most 40 tensors and 16 devices are
    drawn.

    Args:
        plan: a sharding of a graph.
        path: picture to write, if any.

    Raises:
        LabError: if the picture cannot be written.
    """
    names = list(plan.algorithms)[:MOST_TENSORS]
    rows, columns = plan.mesh.shape
    devices = [(row, column) for row in range(rows) for column in range(columns)][:MOST_DEVICES]
    figure = new_figure(4.6 + 0.62 * len(devices) + 3.4, 0.34 * len(names) + 1.6, alt=plan.title())
    axes = figure.add_subplot()
    for line, name in enumerate(names):
        style, spec = KIND_STYLES[plan.graph.nodes[name].kind], plan.specs[name]
        for place, device in enumerate(devices):
            axes.add_patch(Rectangle((place + 0.12, line + 0.14), 0.76, 0.72, facecolor="#ffffff", edgecolor="#bbbbbb"))
            (left, right), (top, bottom) = _drawn_part(spec, device, plan)
            box = (place + 0.12 + 0.76 * left, line + 0.14 + 0.72 * top)
            axes.add_patch(
                Rectangle(
                    box,
                    0.76 * (right - left),
                    0.72 * (bottom - top),
                    facecolor=style.color,
                    hatch=style.hatch,
                    edgecolor=EDGE,
                    linewidth=0.4,
                )
            )
        told = "; ".join(
            f"{one.collective} ({say(en='axis', fr='axe')} {'+'.join(map(str, one.axes))})"
            + (f" → {one.reader}" if one.reader else "")
            for one in plan.communications
            if one.tensor == name
        )
        axes.text(len(devices) + 0.15, line + 0.5, visible(told), va="center", fontsize=7.5, color="#a03a00")
    axes.set_xlim(0, len(devices) + 2.6)
    axes.set_ylim(len(names), 0)
    axes.set_yticks([line + 0.5 for line in range(len(names))])
    axes.set_yticklabels([visible(f"{name}  {plan.specs[name]}") for name in names], fontsize=8)
    axes.set_xticks([place + 0.5 for place in range(len(devices))])
    axes.set_xticklabels([f"{row},{column}" for row, column in devices], fontsize=8)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.suptitle(
        say(
            en="What each device (row, column of the mesh) holds of each tensor",
            fr="Ce que chaque périphérique (ligne, colonne du maillage) détient de chaque tenseur",
        ),
        fontweight="bold",
    )
    present = dict.fromkeys(plan.graph.nodes[name].kind for name in names)
    handles = [
        Patch(facecolor=style.color, hatch=style.hatch, edgecolor=EDGE, label=kind_label(kind))
        for kind, style in KIND_STYLES.items()
        if kind in present
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return finish(figure, path)


def _drawn_part(
    spec: ShardingSpec, device: tuple[int, int], plan: ShardingPlan
) -> tuple[tuple[float, float], tuple[float, float]]:
    """From where to where a device's part goes, across (a column of a matrix) and down (a row of it)."""
    part = spec.part_of(device, plan.mesh)
    if len(part) == 1:
        return part[0], (0.0, 1.0)
    cut = [dim for dim, axes in enumerate(spec.cuts) if axes]
    # Rows of a matrix go down. Of more dimensions the last that is cut goes across, unless it is the first.
    down = 0 if 0 in cut or len(cut) < 2 else cut[0]
    across = next((dim for dim in reversed(cut) if dim != down), len(part) - 1)
    return part[across], part[down]


def stages_figure(plan: PipelinePlan, path: str | Path | None = None) -> LabFigure:
    """Draw the stages of a pipeline: layers across, devices down; beside them the time of each for one micro-batch.

    In a stage stand how its submesh is used and, layer by layer, how its weights lie, if that is known.

    Args:
        plan: stages and submeshes.
        path: picture to write, if any.

    Raises:
        LabError: if the picture cannot be written.
    """
    layers, devices = plan.stages[-1].last + 1, plan.nodes * plan.gpus_per_node
    width = min(max(0.62 * layers + 5.0, 9.0), 16.0)
    height = min(max(0.3 * devices, 0.42 * len(plan.stages)) + 2.4, 12.0)
    figure = new_figure(width, height, alt=plan.title())
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    for number, (stage, own) in enumerate(zip(plan.stages, plan.devices, strict=True)):
        style = STAGE_STYLES[number % len(STAGE_STYLES)]
        _stage(left, plan, number, own, style)
        right.barh(number, stage.time_s, color=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=0.4)
    _layer_axis(left, plan, layers)
    left.set_ylim(devices, 0)
    for node in range(1, plan.nodes):
        left.axhline(node * plan.gpus_per_node, color=BLACK, linestyle=":", linewidth=1)
    left.set_ylabel(say(en="GPU (dotted: from node to node)", fr="GPU (pointillés : d’un nœud à l’autre)"))
    left.yaxis.set_major_locator(MaxNLocator(integer=True))
    slowest = max(stage.time_s for stage in plan.stages)
    right.axvline(slowest, color=VERMILION, linestyle="--")
    right.set_ylim(len(plan.stages) - 0.4, -0.6)
    right.set_yticks(range(len(plan.stages)))
    right.set_ylabel(say(en="stage", fr="étage"))
    right.set_xlabel(
        say(en="time of a micro-batch", fr="temps d’un micro-batch") + (f" ({plan.unit})" if plan.unit else "")
    )
    right.xaxis.set_major_locator(MaxNLocator(4))
    decimal_marks(right.xaxis)
    plain(right)
    figure.suptitle(visible(plan.title().partition(" (t_max")[0]), fontweight="bold", fontsize=11)
    return finish(figure, path)


def _layer_axis(axes: Axes, plan: PipelinePlan, layers: int) -> None:
    axes.set_xlim(0, layers)
    axes.set_xticks([layer + 0.5 for layer in range(layers)])
    names = plan.layer_names or tuple(str(layer) for layer in range(layers))
    long = max(map(len, names)) > 3
    labels = [visible(name) for name in names]
    axes.set_xticklabels(labels, rotation=60 if long else 0, ha="right" if long else "center", fontsize=7.5)
    axes.set_xlabel(say(en="layer", fr="couche"))
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _stage(axes: Axes, plan: PipelinePlan, number: int, own: tuple[int, ...], style: Style) -> None:
    """One stage: its rectangle, how it is used, and below that how the weights of its layers lie."""
    stage = plan.stages[number]
    span, tall = stage.last + 1 - stage.first, len(own)
    box = Rectangle(
        (stage.first, own[0]), span, tall, facecolor=style.color, hatch=style.hatch, alpha=0.45, edgecolor=EDGE
    )
    axes.add_patch(box)
    head = min(0.45 * tall, 1.6)
    ground = {"facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.75, "pad": 1.0}
    words = visible(f"{number}: {stage.label}" if stage.label else f"{number}")
    middle = head / 2 if plan.layer_specs and tall > 1 else tall / 2
    across = stage.first + span / 2
    axes.text(across, own[0] + middle, words, ha="center", va="center", fontsize=8, fontweight="bold", bbox=ground)
    if tall < 2:
        return
    told = [(layer, _specs_told(plan.layer_specs.get(layer, {}))) for layer in range(stage.first, stage.last + 1)]
    for text, run in groupby(told, key=itemgetter(1)):
        layers = [layer for layer, _ in run]
        if text:
            centre = (layers[0] + layers[-1] + 1) / 2
            down = own[0] + (head + tall) / 2
            axes.text(centre, down, text, ha="center", va="center", fontsize=6.5, bbox=ground)


def _specs_told(specs: Mapping[str, str]) -> str:
    """How the weights of a layer lie: each way once, with how many weights lie so."""
    counts = Counter(specs.values())
    whole = sum(count for spec, count in counts.items() if set(spec) <= {"R"})
    told = [say(en="weights:", fr="poids :")] if counts else []
    told += [visible(f"{count} × {spec}") for spec, count in counts.most_common() if not set(spec) <= {"R"}]
    if whole:
        told.append(say(en=f"{whole} whole", fr=f"{whole} entiers"))
    return "\n".join(told)


def placement_figure(placement: Placement, path: str | Path | None = None) -> LabFigure:
    """Draw when each operator runs on its device.

    Args:
        placement: a simulated one.
        path: picture to write, if any.

    Raises:
        LabError: if the picture cannot be written.
    """
    devices = max(slot.device for slot in placement.slots) + 1
    figure = new_figure(10.0, 0.7 * devices + 1.6, alt=placement.title())
    axes = figure.add_subplot()
    for slot in placement.slots:
        style = STAGE_STYLES[slot.device % len(STAGE_STYLES)]
        axes.barh(
            slot.device,
            slot.end_s - slot.start_s,
            left=slot.start_s,
            height=0.7,
            color=style.color,
            edgecolor=EDGE,
            linewidth=0.6,
        )
        if slot.end_s - slot.start_s > placement.step_s / 60:
            middle = (slot.start_s + slot.end_s) / 2
            axes.text(middle, slot.device, visible(slot.name), ha="center", va="center", fontsize=8)
    axes.set_yticks(range(devices))
    axes.set_ylim(devices - 0.5, -0.5)
    axes.set_ylabel(say(en="device", fr="périphérique"))
    axes.set_xlabel(say(en="time (s)", fr="temps (s)"))
    axes.axvline(placement.step_s, color=VERMILION, linestyle="--")
    plain(axes)
    decimal_marks(axes.xaxis)
    step = format_seconds(placement.step_s)
    figure.suptitle(say(en=f"Placement: a step of {step}", fr=f"Placement : un pas de {step}"), fontweight="bold")
    return finish(figure, path)
