"""Figures of lab 02: rules of thumb, one layer, the batch, the limit of data parallelism, checkpointing, measured runs.

What is drawn is computed by the package or by the student's own function, traced, or measured; each figure tells in
words (its `alt`) what it shows.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, Protocol

from matplotlib.axes import Axes

from dlojz import models
from dlojz.base.language import format_bytes, say
from dlojz.base.table import Table
from dlojz.config.run_config import RunConfig
from dlojz.display.canvas import LabFigure, finish, new_figure, plain
from dlojz.display.style import (
    BLACK,
    BLUE,
    CATEGORY_STYLES,
    GREY,
    LINE_STYLES,
    NORMAL,
    ORANGE,
    SKY,
    SMALL,
    VERMILION,
    category_label,
)
from dlojz.hardware import Device
from dlojz.labs.kit.exercise import Sentences, or_to_do
from dlojz.labs.kit.figures import answered, done, figure_of, labelled, open_figure, panel, plot_lines
from dlojz.planner.activation_budget import BudgetPlan
from dlojz.prediction.forecast import forecast
from dlojz.prediction.rules_of_thumb import RULES, Shape
from dlojz.prediction.trace import MemoryTrace
from dlojz.results.record import RunRecord

TEXTS = Sentences(Path(__file__).with_suffix(".md"))

GIB = 2**30


def _gib() -> str:
    return say(en="GiB", fr="Gio")


def rules_of_thumb() -> LabFigure:
    """Each rule of thumb of the field as a stack of what it counts."""
    axes = panel(
        9.5,
        4.6,
        en="Bytes per parameter by rule: "
        + ", ".join(f"{rule.name} ({rule.bytes_per_parameter})" for rule in RULES.values()),
        fr="Octets par paramètre selon la règle : "
        + ", ".join(f"{rule.name} ({rule.bytes_per_parameter})" for rule in RULES.values()),
    )
    labelled_categories: set[str] = set()
    for row, rule in enumerate(reversed(RULES.values())):
        start_bytes = 0
        for part in rule.parts:
            style = CATEGORY_STYLES[part.category]
            axes.barh(
                row,
                part.bytes_per_parameter,
                left=start_bytes,
                color=style.color,
                hatch=style.hatch,
                edgecolor="white",
                label=category_label(part.category) if part.category not in labelled_categories else None,
            )
            labelled_categories.add(part.category)
            start_bytes += part.bytes_per_parameter
        axes.annotate(f"{start_bytes}", (start_bytes, row), xytext=(5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(RULES)), [fill(rule.about(), 44) for rule in reversed(RULES.values())], fontsize=SMALL)
    axes.set_xlabel(say(en="bytes per parameter", fr="octets par paramètre"))
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    plain(axes, "x")
    return figure_of(axes)


SCORES = ("softmax", "drop_scores")
"""Modules of the lab's layer that make tensors of the size of the scores, a·s²·b."""


def layer_parts(shape: Shape, plain_trace: MemoryTrace, fused_trace: MemoryTrace) -> LabFigure:
    """What one layer keeps: the formula's two terms, then what each trace finds, by the module that made it."""
    bars: dict[str, dict[str, float]] = {
        say(en="formula", fr="formule"): {"5·a·s²·b": 5.0 * shape.scores, "34·s·b·h": 34.0 * shape.sbh},
        say(en="trace", fr="trace"): _by_part(plain_trace),
        say(en="trace,\nfused attention", fr="trace,\nattention fusionnée"): _by_part(fused_trace),
    }
    figure = new_figure(
        9.5,
        2.9,
        alt=say(
            en="Bytes that a layer keeps for backward: ", fr="Octets gardés par une couche pour la passe arrière : "
        )
        + ", ".join(f"{' '.join(name.split())} {format_bytes(sum(parts.values()))}" for name, parts in bars.items()),
    )
    axes = figure.subplots()
    for row, parts in enumerate(reversed(bars.values())):
        start_mib = 0.0
        for part, part_bytes in parts.items():
            mib = part_bytes / 2**20
            is_scores = part in SCORES or "s²" in part
            axes.barh(
                row,
                mib,
                left=start_mib,
                color=ORANGE if is_scores else SKY,
                hatch="//" if is_scores else "..",
                edgecolor="white",
            )
            if mib > 11:
                box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
                axes.annotate(part, (start_mib + mib / 2, row), ha="center", va="center", fontsize=SMALL, bbox=box)
            start_mib += mib
        axes.annotate(
            f"{start_mib:.0f}",
            (start_mib, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=NORMAL,
        )
    axes.set_yticks(range(len(bars)), list(reversed(bars)))
    axes.set_xlabel(say(en="kept for backward (MiB)", fr="gardé pour la passe arrière (Mio)"))
    axes.set_xlim(right=axes.get_xlim()[1] * 1.05)
    plain(axes)
    return finish(figure)


def _by_part(traced: MemoryTrace) -> dict[str, float]:
    """Kept bytes by module, scores first; what no submodule made under the name of the method that did."""
    bytes_by_module = {module or "forward": float(module_bytes) for module, module_bytes in traced.by_module.items()}
    return dict(sorted(bytes_by_module.items(), key=lambda item: (item[0] not in SCORES, -item[1])))


def along_the_model(config: RunConfig, device: str | None = None) -> LabFigure:
    """Block by block: states per block, and activations that it keeps for one micro-batch."""
    import torch

    with torch.device("meta"):
        built = models.build(config.model, image_size=config.image_size, num_classes=config.num_classes)
    # 16 bytes per parameter: fp32 weight, gradient and two moments of AdamW.
    states = [16 * sum(weight.numel() for weight in block.parameters()) / GIB for block in built.blocks]
    activations_gib = [0.0] * len(states)
    for module, num_bytes in forecast(config, device=device).activations_by_module.items():
        if module.startswith("blocks."):
            activations_gib[int(module.split(".")[1])] += num_bytes / GIB
    figure = open_figure(9.5, 4.2, *TEXTS.sentence("along the model", "alt", config=config))
    above, below = figure.subplots(2, 1, sharex=True)
    optimizer, activations = CATEGORY_STYLES["optimizer"], CATEGORY_STYLES["activations"]
    above.bar(range(len(states)), states, color=optimizer.color, width=1.0, edgecolor="white", linewidth=0.3)
    above.set_ylabel(say(en="states", fr="états") + f" ({_gib()})")
    below.bar(
        range(len(activations_gib)),
        activations_gib,
        color=activations.color,
        width=1.0,
        edgecolor="white",
        linewidth=0.3,
    )
    below.set_ylabel("activations" + f" ({_gib()})")
    below.set_xlabel(say(en="block, from the image to the classes", fr="bloc, de l’image aux classes"))
    for axes in (above, below):
        plain(axes)
    return finish(figure)


def _device_line(axes: Axes, device: Device) -> None:
    """The limit of a GPU, named beside the axes so that no bar hides it."""
    axes.axhline(device.memory_bytes / GIB, color=BLACK, linestyle="--", linewidth=1)
    axes.annotate(
        device.title,
        (1.0, device.memory_bytes / GIB),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=SMALL,
    )


def memory_by_batch(
    configs: Mapping[str, RunConfig], batches: Sequence[int], on: Device, others: Sequence[Device] = ()
) -> LabFigure:
    """Bytes taken of a device by micro-batch, a line per configuration, with the limits of devices.

    Args:
        configs: by the name that their line bears; their own micro-batch does not matter.
        batches: micro-batches to forecast.
        on: device for which the forecasts are made.
        others: devices whose limits are drawn besides.
    """
    from dlojz.planner.levers import taken_bytes, with_micro_batch

    figure = new_figure(
        8.5,
        3.8,
        alt=say(
            en="Memory by micro-batch, nearly straight lines from the states up: ",
            fr="Mémoire selon le micro-batch, presque des droites qui partent des états : ",
        )
        + ", ".join(configs),
    )
    axes = figure.subplots()
    lines_gib = {
        name: [taken_bytes(forecast(with_micro_batch(config, batch), device=on)) / GIB for batch in batches]
        for name, config in configs.items()
    }
    plot_lines(axes, batches, lines_gib)
    for device in (on, *others):
        _device_line(axes, device)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    return labelled(
        axes,
        "micro-batch (" + say(en="images", fr="images") + ")",
        say(en="taken of the GPU", fr="occupé sur le GPU") + f" ({_gib()})",
        loc="upper left",
        bbox_to_anchor=(0.0, 0.95),
    )


@or_to_do
def limit_of_data_parallelism(
    replica_bytes: Callable[[int, int, int, int], float],
    parameters: int,
    sample_bytes: int,
    global_batch: int,
    devices: Sequence[Device],
) -> LabFigure:
    """What a replica takes by the number of GPUs, by the student's function: states and buckets, then activations."""
    degrees = [2**power for power in range(global_batch.bit_length())]
    # With samples of 0 bytes the student's function gives states and buckets alone.
    fixed = [replica_bytes(parameters, 0, global_batch, dp) / GIB for dp in degrees]
    total = [replica_bytes(parameters, sample_bytes, global_batch, dp) / GIB for dp in degrees]
    axes = panel(
        9.0,
        4.2,
        en=f"A replica by the number of GPUs: activations fall from {total[0] - fixed[0]:.0f} to "
        f"{total[-1] - fixed[-1]:.0f} GiB, states and buckets stay at {fixed[-1]:.0f} GiB.",
        fr=f"Une réplique selon le nombre de GPU : les activations passent de {total[0] - fixed[0]:.0f} à "
        f"{total[-1] - fixed[-1]:.0f} Gio, états et buckets restent à {fixed[-1]:.0f} Gio.",
    )
    labels = [str(dp) for dp in degrees]
    states, activations = CATEGORY_STYLES["optimizer"], CATEGORY_STYLES["activations"]
    axes.bar(
        labels,
        fixed,
        color=states.color,
        hatch=states.hatch,
        edgecolor="white",
        label=say(en="states and buckets", fr="états et buckets"),
    )
    axes.bar(
        labels,
        [replica_gib - part for replica_gib, part in zip(total, fixed, strict=True)],
        bottom=fixed,
        color=activations.color,
        hatch=activations.hatch,
        edgecolor="white",
        label=category_label("activations"),
    )
    for device in devices:
        _device_line(axes, device)
    top = max(device.memory_bytes for device in devices) / GIB * 1.25
    axes.set_ylim(0, top)
    for index, replica_gib in enumerate(total):
        if replica_gib > top:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            axes.annotate(
                f"↑ {replica_gib:.0f} {_gib()}", (index, 0.98 * top), ha="center", va="top", fontsize=SMALL, bbox=box
            )
    axes.set_xlabel(
        say(en=f"GPUs, for a global batch of {global_batch}", fr=f"GPU, pour un batch global de {global_batch}")
    )
    axes.set_ylabel(say(en="per GPU", fr="par GPU") + f" ({_gib()})")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
    return done(axes)


MIB = 2**20


class _Measured(Protocol):
    @property
    def record(self) -> RunRecord | None: ...


def _mib() -> str:
    return say(en="MiB", fr="Mio")


@or_to_do
def segments(
    checkpointed: Callable[[Sequence[Any], Any, int], Any], blocks: Sequence[Any], x: Any, lengths: Sequence[int]
) -> LabFigure:
    """What the student's forward keeps for backward, and its peak, by the length of the segments; traced.

    Args:
        blocks: modules, of one length of input and output.
        x: what the first reads.
        lengths: blocks per segment, each to be traced.
    """
    from torch import nn

    from dlojz.prediction.trace import trace

    class Whole(nn.Module):
        """The blocks, run by the student's function."""

        def __init__(self, per_segment: int) -> None:
            super().__init__()
            self.blocks, self.per_segment = nn.ModuleList(blocks), per_segment

        def forward(self, x: Any) -> Any:
            return checkpointed(list(self.blocks), x, self.per_segment)

    checkpointed(blocks, x, len(blocks))
    traces = [trace(Whole(length), x) for length in lengths]
    saved_mib = [memory_trace.saved_bytes / MIB for memory_trace in traces]
    peaks = [memory_trace.peak_bytes / MIB for memory_trace in traces]
    best = lengths[peaks.index(min(peaks))]
    axes = panel(8.0, 3.6, *TEXTS.sentence("segments", "alt", blocks_count=len(blocks), best=best))
    axes.plot(
        lengths, peaks, color=VERMILION, marker="s", label=say(en="peak of both passes", fr="pic des deux passes")
    )
    axes.plot(
        lengths,
        saved_mib,
        color=BLUE,
        marker="o",
        linestyle="--",
        label=say(en="kept between the two", fr="gardé entre les deux"),
    )
    axes.axvline(best, color=GREY, linestyle=":", linewidth=1)
    axes.set_xticks(list(lengths))
    axes.set_ylim(bottom=0)
    return labelled(axes, say(en="blocks per segment", fr="blocs par segment"), _mib())


def operations_for_memory(runs: Mapping[str, _Measured]) -> LabFigure:
    """Measured runs: operations of a step, relative to the first run's, against the peak of memory, one point each.

    Operations and not seconds: on a machine that does other things at the same time, seconds tell little.
    """
    figure = new_figure(
        8.5,
        3.4,
        alt=say(en="Peak memory and operations of a step of: ", fr="Pic de mémoire et opérations d’un pas de : ")
        + ", ".join(runs),
    )
    axes = figure.subplots()
    first_flops: float | None = None
    max_ratio = 1.0
    for (name, run), (colour, _, marker) in zip(runs.items(), LINE_STYLES, strict=False):
        footprint = run.record.footprint() if run.record else None
        if footprint is None or not footprint.step_flops or footprint.memory.peak_bytes is None:
            continue
        # The first run that was measured is the unit, whichever it is.
        first_flops = first_flops or footprint.step_flops
        max_ratio = max(max_ratio, footprint.step_flops / first_flops)
        moved_bytes = footprint.memory.host_bytes
        host_label = (
            say(en=f" ({format_bytes(moved_bytes)} out and back)", fr=f" ({format_bytes(moved_bytes)} aller et retour)")
            if moved_bytes
            else ""
        )
        axes.plot(
            footprint.memory.peak_bytes / MIB,
            footprint.step_flops / first_flops,
            color=colour,
            marker=marker,
            markersize=10,
            linestyle="none",
            label=name + host_label,
        )
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.15 * max_ratio)
    return labelled(
        axes,
        say(en="measured peak", fr="pic mesuré") + f" ({_mib()})",
        say(en="operations of a step\n(times the first)", fr="opérations d’un pas\n(fois le premier)"),
        loc="lower left",
    )


def peak_and_maxima(samples: Sequence[Mapping[str, int]]) -> LabFigure:
    """One step's peak beside the largest value that each category takes: the sum of these is more."""
    at_peak: Mapping[str, int] = max(samples, key=lambda sample: sum(sample.values()))
    largest: dict[str, int] = {name: max(sample.get(name, 0) for sample in samples) for name in CATEGORY_STYLES}
    peak, sum_of_largest = format_bytes(sum(at_peak.values())), format_bytes(sum(largest.values()))
    axes = panel(8.5, 2.4, *TEXTS.sentence("peak and maxima", "alt", peak=peak, sum_of_largest=sum_of_largest))
    rows: dict[str, Mapping[str, int]] = {
        say(en="at the peak", fr="au moment du pic"): at_peak,
        say(en="largest of each", fr="maximum de chacune"): largest,
    }
    for row, (title, sample) in enumerate(reversed(rows.items())):
        start_mib = 0.0
        for name, style in CATEGORY_STYLES.items():
            mib = sample.get(name, 0) / MIB
            # Only categories that appear at some moment get a place in the legend.
            if not largest[name]:
                continue
            axes.barh(
                row,
                mib,
                left=start_mib,
                color=style.color,
                hatch=style.hatch,
                edgecolor="white",
                label=category_label(name) if title == next(iter(rows)) else None,
            )
            start_mib += mib
    axes.set_yticks(range(len(rows)), list(reversed(rows)))
    axes.set_xlabel(_mib())
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.05))
    return done(axes)


def plan_measured(plan: BudgetPlan, measured_bytes: int) -> Table:
    """Tabulate what a plan promises, and the peak that its run has measured."""
    return answered(
        [
            (say(en="peak if all is kept", fr="pic si tout est gardé"), format_bytes(plan.kept_peak_bytes)),
            (say(en="peak of the plan, predicted", fr="pic du plan, prédit"), format_bytes(plan.peak_bytes)),
            (say(en="peak of its run, measured", fr="pic de son exécution, mesuré"), format_bytes(measured_bytes)),
            (say(en="within 1% of each other", fr="à 1 % près"), abs(measured_bytes / plan.peak_bytes - 1) < 0.01),
            (say(en="within the budget", fr="dans le budget"), measured_bytes <= plan.budget_bytes),
        ]
    )
