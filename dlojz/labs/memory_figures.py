"""Figures of lab 02 that come before any run: rules of thumb, the layer, the batch, the limit of data parallelism.

Layer 6 (labs), on `dlojz.viz`. Invariant: what is drawn is what the package computes or what the student's own function
gives; each figure tells in words (its `alt`) what it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dlojz import models
from dlojz.config import RunConfig
from dlojz.hardware import Device
from dlojz.labs.verdict import NotDone, Verdict
from dlojz.predict.forecast import forecast
from dlojz.predict.rules import RULES
from dlojz.text import say
from dlojz.units import format_bytes
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import BLACK, CATEGORY_STYLES, LINE_STYLES, ORANGE, SKY, category_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dlojz.predict.activation_forms import Shape
    from dlojz.predict.tracing import Trace

GIB = 2**30


def _gib() -> str:
    return say(en="GiB", fr="Gio")


def rules_of_thumb() -> LabFigure:
    """Each rule of thumb of the field as a stack of what it counts."""
    figure = new_figure(
        9.5,
        3.4,
        alt=say(
            en="Bytes per parameter by rule: "
            + ", ".join(f"{rule.name} ({rule.bytes_per_parameter})" for rule in RULES.values()),
            fr="Octets par paramètre selon la règle : "
            + ", ".join(f"{rule.name} ({rule.bytes_per_parameter})" for rule in RULES.values()),
        ),
    )
    axes = figure.subplots()
    seen: set[str] = set()
    for row, rule in enumerate(reversed(RULES.values())):
        left = 0
        for part in rule.parts:
            style = CATEGORY_STYLES[part.category]
            axes.barh(
                row,
                part.bytes_per_parameter,
                left=left,
                color=style.color,
                hatch=style.hatch,
                edgecolor="white",
                label=category_label(part.category) if part.category not in seen else None,
            )
            seen.add(part.category)
            left += part.bytes_per_parameter
        axes.annotate(f"{left}", (left, row), xytext=(5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(RULES)), [rule.name for rule in reversed(RULES.values())])
    axes.set_xlabel(say(en="bytes per parameter", fr="octets par paramètre"))
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    plain(axes)
    return finish(figure)


SCORES = ("softmax", "drop_scores")
"""Modules of the lab's layer that make tensors of the size of the scores, a·s²·b."""


def layer_parts(shape: Shape, plain_trace: Trace, fused_trace: Trace) -> LabFigure:
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
        left = 0.0
        for part, kept in parts.items():
            mib = kept / 2**20
            is_scores = part in SCORES or "s²" in part
            axes.barh(
                row,
                mib,
                left=left,
                color=ORANGE if is_scores else SKY,
                hatch="//" if is_scores else "..",
                edgecolor="white",
            )
            if mib > 11:
                box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
                axes.annotate(part, (left + mib / 2, row), ha="center", va="center", fontsize=8, bbox=box)
            left += mib
        axes.annotate(f"{left:.0f}", (left, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), list(reversed(bars)))
    axes.set_xlabel(say(en="kept for backward (MiB)", fr="gardé pour la passe arrière (Mio)"))
    axes.set_xlim(right=axes.get_xlim()[1] * 1.05)
    plain(axes)
    return finish(figure)


def _by_part(traced: Trace) -> dict[str, float]:
    """Kept bytes by module, scores first; what no submodule made under the name of the method that did."""
    named = {module or "forward": float(kept) for module, kept in traced.by_module.items()}
    return dict(sorted(named.items(), key=lambda item: (item[0] not in SCORES, -item[1])))


def along_the_model(config: RunConfig, device: str | None = None) -> LabFigure:
    """Block by block: states per block, and activations that it keeps for one micro-batch."""
    import torch

    with torch.device("meta"):
        built = models.build(config.model, image_size=config.image_size, num_classes=config.num_classes)
    states = [16 * sum(weight.numel() for weight in block.parameters()) / GIB for block in built.blocks]
    kept = [0.0] * len(states)
    for module, num_bytes in forecast(config, device=device).activations_by_module.items():
        if module.startswith("blocks."):
            kept[int(module.split(".")[1])] += num_bytes / GIB
    figure = new_figure(
        9.5,
        4.2,
        alt=say(
            en=f"{config.model}, block by block: states grow towards the end, activations lie near the beginning.",
            fr=f"{config.model}, bloc par bloc : les états se trouvent vers la fin, les activations vers le début.",
        ),
    )
    above, below = figure.subplots(2, 1, sharex=True)
    optimizer, activations = CATEGORY_STYLES["optimizer"], CATEGORY_STYLES["activations"]
    above.bar(range(len(states)), states, color=optimizer.color, width=1.0, edgecolor="white", linewidth=0.3)
    above.set_ylabel(say(en="states", fr="états") + f" ({_gib()})")
    below.bar(range(len(kept)), kept, color=activations.color, width=1.0, edgecolor="white", linewidth=0.3)
    below.set_ylabel("activations" + f" ({_gib()})")
    below.set_xlabel(say(en="block, from the image to the classes", fr="bloc, de l’image aux classes"))
    for axes in (above, below):
        plain(axes)
        _numbers(axes)
    return finish(figure)


def _device_line(axes: Axes, device: Device) -> None:
    """The limit of a GPU, named beside the axes so that no bar hides it."""
    axes.axhline(device.memory_bytes / GIB, color=BLACK, linestyle="--", linewidth=1)
    axes.annotate(
        say(en=device.title, fr=device.title.replace("GB", "Go")),
        (1.0, device.memory_bytes / GIB),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )


def _numbers(axes: Axes) -> None:
    """Numbers of both axes with the decimal mark of the reader's language."""
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, position: say(en=f"{value:g}", fr=f"{value:g}".replace(".", ",")))


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
    from dlojz.predict.advice import taken_bytes, with_micro_batch

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
    for (name, config), (colour, line, marker) in zip(configs.items(), LINE_STYLES, strict=False):
        taken = [taken_bytes(forecast(with_micro_batch(config, batch), device=on)) / GIB for batch in batches]
        axes.plot(batches, taken, color=colour, linestyle=line, marker=marker, label=name)
    for device in (on, *others):
        _device_line(axes, device)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("micro-batch (" + say(en="images", fr="images") + ")")
    axes.set_ylabel(say(en="taken of the GPU", fr="occupé sur le GPU") + f" ({_gib()})")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.0, 0.95))
    plain(axes)
    return finish(figure)


def limit_of_data_parallelism(
    replica_bytes: Callable[[int, int, int, int], float],
    parameters: int,
    sample_bytes: int,
    global_batch: int,
    devices: Sequence[Device],
) -> LabFigure | Verdict:
    """What a replica takes by the number of GPUs, by the student's function: states and buckets, then activations."""
    degrees = [2**power for power in range(global_batch.bit_length())]
    try:
        fixed = [replica_bytes(parameters, 0, global_batch, dp) / GIB for dp in degrees]
        total = [replica_bytes(parameters, sample_bytes, global_batch, dp) / GIB for dp in degrees]
    except NotDone as error:
        return Verdict("todo", str(error))
    figure = new_figure(
        9.0,
        4.2,
        alt=say(
            en=f"A replica by the number of GPUs: activations fall from {total[0] - fixed[0]:.0f} to "
            f"{total[-1] - fixed[-1]:.0f} GiB, states and buckets stay at {fixed[-1]:.0f} GiB.",
            fr=f"Une réplique selon le nombre de GPU : les activations passent de {total[0] - fixed[0]:.0f} à "
            f"{total[-1] - fixed[-1]:.0f} Gio, états et buckets restent à {fixed[-1]:.0f} Gio.",
        ),
    )
    axes = figure.subplots()
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
        [whole - part for whole, part in zip(total, fixed, strict=True)],
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
    for place, whole in enumerate(total):
        if whole > top:
            axes.annotate(f"↑ {whole:.0f} {_gib()}", (place, top), ha="center", va="top", fontsize=8, color=BLACK)
    axes.set_xlabel(
        say(en=f"GPUs, for a global batch of {global_batch}", fr=f"GPU, pour un batch global de {global_batch}")
    )
    axes.set_ylabel(say(en="per GPU", fr="par GPU") + f" ({_gib()})")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
    plain(axes)
    return finish(figure)
