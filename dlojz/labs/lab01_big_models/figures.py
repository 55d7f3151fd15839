"""Figures of lab 01: what the package counts or predicts, or what the student's own function gives.

Each figure tells in words (its `alt`) what it shows.
"""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from dlojz import models
from dlojz.base.display_hook import bar
from dlojz.base.language import decimal, percent, say, significant
from dlojz.base.table import Table, titles, visible
from dlojz.config.run_config import RunConfig
from dlojz.display.canvas import LabFigure, finish, new_figure, plain
from dlojz.display.style import (
    BLACK,
    BLUE,
    CATEGORY_STYLES,
    GREEN,
    GREY,
    NORMAL,
    ORANGE,
    SMALL,
    VERMILION,
    category_label,
)
from dlojz.labs.kit.exercise import Sentences, or_to_do
from dlojz.labs.kit.figures import answered, labelled, open_figure, panel
from dlojz.labs.lab01_big_models.exercises import attention_multiply_adds
from dlojz.prediction import predict
from dlojz.running.run import Run

TEXTS = Sentences(Path(__file__).with_suffix(".md"))

GIB = 2**30
# Memory that NVIDIA's data sheets give for the GPUs of Jean Zay's partitions, in GiB as the driver reports them.
GPU_MEMORY_GIB = {"V100 16": 16, "V100 32": 32, "A100, H100 80": 80}


@dataclass(frozen=True, kw_only=True)
class Published:
    """One model as its paper gives it; what the paper calls FLOPs are multiply-adds."""

    parameters: float
    multiply_adds: float
    image_size: int


_PAPERS = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))
COATNET = {name: Published(**row) for name, row in _PAPERS["coatnet"].items()}
VIT_PARAMETERS_M: dict[str, float] = _PAPERS["vit_parameters_m"]


@dataclass(frozen=True)
class Accuracy:
    """Top-1 accuracy on ImageNet, in percent, as its paper gives it; `multiply_adds_g` in 10⁹."""

    model: str
    pre_training: str
    multiply_adds_g: float
    top_1: float

    @property
    def parameters_m(self) -> float:
        """Published parameters of the model, in millions."""
        published = COATNET.get(self.model.lower().replace("-", "_"))
        return published.parameters / 1e6 if published else VIT_PARAMETERS_M[self.model]


ACCURACIES = tuple(Accuracy(*row) for row in _PAPERS["accuracies"]["rows"])
PRE_TRAININGS = {"ImageNet-1K": "-", "ImageNet-21K": "--", "JFT-300M": "-.", "JFT-3B": ":"}


@dataclass(frozen=True)
class PublishedLine:
    """One model, counted and published."""

    name: str
    counted: models.ModelSummary
    published: Published

    @property
    def parameters_gap(self) -> float:
        """Relative difference of the parameters."""
        return self.counted.parameters / self.published.parameters - 1

    @property
    def multiply_adds_gap(self) -> float:
        """Relative difference of the multiply-adds."""
        return self.counted.multiply_adds / self.published.multiply_adds - 1


@dataclass(frozen=True)
class CoatnetTable(Table):
    """CoAtNet-0…7: what the package counts beside what the paper prints."""

    lines: tuple[PublishedLine, ...] = ()


def coatnet_table() -> CoatnetTable:
    """Count CoAtNet-0…7 at the image sizes of the paper and lay them beside its figures."""
    lines = tuple(
        PublishedLine(name, models.describe(name, published.image_size), published)
        for name, published in COATNET.items()
    )
    heads = titles(*TEXTS.sentence("coatnet table", "heads"))
    rows = tuple(
        (
            line.name,
            f"{line.published.image_size}²",
            decimal(line.counted.parameters / 1e6, 1),
            decimal(line.published.parameters / 1e6, 0),
            percent(line.parameters_gap, signed=True),
            decimal(line.counted.multiply_adds / 1e9, 1),
            decimal(line.published.multiply_adds / 1e9, 1),
            percent(line.multiply_adds_gap, signed=True),
        )
        for line in lines
    )
    return CoatnetTable(heads, rows, lines=lines)


def _plain_numbers(axes: Axes) -> None:
    """Powers of ten in full on the vertical axis: a figure of the lab interprets no mathematics."""
    axes.yaxis.set_minor_formatter(NullFormatter())


def losses(curves: dict[str, Sequence[float]]) -> LabFigure:
    """Loss by step, a curve per run."""
    figure = new_figure(7.0, 3.2, alt=say(en="Loss by step of: ", fr="Perte à chaque pas de : ") + ", ".join(curves))
    axes = figure.subplots()
    looks = ((BLUE, "-", "o"), (ORANGE, "--", "s"), (GREEN, "-.", "^"), (BLACK, ":", "D"))
    for (name, values), (colour, line, marker) in zip(curves.items(), looks, strict=False):
        steps = range(1, len(values) + 1)
        label = visible(f" {name}" if name.startswith("_") else name)  # matplotlib leaves out what begins with _
        axes.plot(steps, values, color=colour, linestyle=line, marker=marker, markersize=4, label=label)
    return labelled(axes, say(en="step", fr="pas"), say(en="loss (nats)", fr="perte (nats)"))


@or_to_do
def patches(cut: Callable[[Any, int], Any], image_CHW: Any, patch: int) -> LabFigure:
    """An image, and the patches that the student's function makes of it, in its order."""
    patches_PE = cut(image_CHW, patch)
    channels, height, width = image_CHW.shape
    rows, columns = height // patch, width // patch
    figure = open_figure(8.0, 3.6, *TEXTS.sentence("patches", "alt", height=height, width=width, count=len(patches_PE)))
    halves = figure.add_gridspec(1, 2)
    image_half, cuts = figure.add_subfigure(halves[0]), figure.add_subfigure(halves[1])
    axes = image_half.subplots()
    axes.imshow(image_CHW[0], cmap="gray")
    axes.set_axis_off()
    image_half.suptitle(say(en="the image", fr="l’image"))
    limits = {"vmin": float(image_CHW.min()), "vmax": float(image_CHW.max())}
    for index, axes in enumerate(cuts.subplots(rows, columns).flat):
        if index < len(patches_PE):
            axes.imshow(patches_PE[index].reshape(channels, patch, patch)[0], cmap="gray", **limits)
            axes.set_title(f"{index}", fontsize=SMALL, pad=2)
        axes.set_axis_off()
    cuts.suptitle(say(en="the sequence of patches", fr="la séquence de patches"))
    return finish(figure)


def attention_by_stage(width: int = 96, sides: Sequence[int] = (7, 14, 28, 56, 112)) -> LabFigure:
    """Multiply-adds of attention and of a 3 × 3 depthwise-separable convolution, by side of the feature map."""
    axes = panel(7.0, 3.4, *TEXTS.sentence("attention by stage", "alt"))
    attention = [attention_multiply_adds(side**2, width) / 1e9 for side in sides]
    # Per pixel: 3 × 3 = 9 products per channel in depth, then a D × D product between channels.
    convolution = [side**2 * (9 * width + width**2) / 1e9 for side in sides]
    axes.loglog(sides, attention, color=VERMILION, marker="o", label=say(en="self-attention", fr="auto-attention"))
    axes.loglog(
        sides,
        convolution,
        color=BLUE,
        marker="s",
        linestyle="--",
        label=say(en="3 × 3 depthwise + 1 × 1 convolution", fr="convolution 3 × 3 en profondeur + 1 × 1"),
    )
    axes.set_xticks(sides, [str(side) for side in sides])
    axes.minorticks_off()
    _plain_numbers(axes)
    return labelled(
        axes,
        say(en="side of the feature map (positions)", fr="côté de la carte (positions)"),
        say(en="multiply-adds (G)", fr="multiplications-\nadditions (G)"),
    )


def attention_ratio(side: int, other_side: int, *, width: int) -> float:
    """How many times more expensive attention is on one feature map than on another, in multiply-adds."""
    return attention_multiply_adds(side**2, width) / attention_multiply_adds(other_side**2, width)


def scaling(table: CoatnetTable) -> LabFigure:
    """Parameters and multiply-adds of CoAtNet-0…7, counted and published."""
    figure = open_figure(10.0, 3.6, *TEXTS.sentence("scaling", "alt"))
    size_axes, cost_axes = figure.subplots(1, 2)
    names = [line.name.removeprefix("coatnet_") for line in table.lines]
    counted = say(en="counted here", fr="compté ici")
    published = say(en="published", fr="publié")
    for axes, ours, theirs, label in (
        (
            size_axes,
            [line.counted.parameters / 1e6 for line in table.lines],
            [line.published.parameters / 1e6 for line in table.lines],
            say(en="parameters (M)", fr="paramètres (M)"),
        ),
        (
            cost_axes,
            [line.counted.multiply_adds / 1e9 for line in table.lines],
            [line.published.multiply_adds / 1e9 for line in table.lines],
            say(en="multiply-adds per image (G)", fr="multiplications-additions par image (G)"),
        ),
    ):
        axes.plot(
            names, theirs, color=BLACK, linestyle="none", marker="D", markersize=9, fillstyle="none", label=published
        )
        axes.plot(names, ours, color=BLUE, linestyle=":", marker="o", markersize=4, label=counted)
        axes.set_yscale("log")
        _plain_numbers(axes)
        axes.set_xlabel("CoAtNet-")
        axes.set_ylabel(label)
        axes.legend(frameon=False)
        plain(axes)
    return finish(figure)


def accuracy() -> LabFigure:
    """Published accuracy of CoAtNet and ViT, by multiply-adds and by parameters, with what they were pre-trained on."""
    figure = open_figure(10.0, 4.2, *TEXTS.sentence("accuracy", "alt"))
    panels = figure.subplots(1, 2, sharey=True)
    for family, colour, marker in (("CoAtNet", BLUE, "o"), ("ViT", VERMILION, "s")):
        for pre_training, line in PRE_TRAININGS.items():
            points = [row for row in ACCURACIES if row.model.startswith(family) and row.pre_training == pre_training]
            for axes, values in zip(
                panels, ([row.multiply_adds_g for row in points], [row.parameters_m for row in points]), strict=True
            ):
                axes.plot(
                    values,
                    [row.top_1 for row in points],
                    color=colour,
                    linestyle=line,
                    marker=marker,
                    markersize=4,
                    label=f"{family}, {pre_training}",
                )
    for axes, label in zip(
        panels,
        (say(en="multiply-adds per image (G)", fr="multiplications-additions par image (G)"),
         say(en="parameters (M)", fr="paramètres (M)")),
        strict=True,
    ):  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(label)
        plain(axes)
    panels[0].set_ylabel(say(en="top-1 accuracy (%)", fr="exactitude top-1 (%)"))
    panels[1].legend(frameon=False, fontsize=SMALL, loc="lower right")
    return finish(figure)


def families(tokens: int = 5) -> LabFigure:
    """Which token sees which in an encoder, a decoder and both together: a row per query, a column per key."""
    everything = np.ones((tokens, tokens))
    past = np.tril(everything)
    joint_mask = np.block(
        [[everything, 0 * everything], [everything, past]]
    )  # rows and columns: the source, then the target
    masks = (
        (say(en="encoder: BERT, ViT\n(what is it?)", fr="encodeur : BERT, ViT\n(qu’est-ce ?)"), everything),
        (say(en="decoder: GPT, LLaMA\n(what comes next?)", fr="décodeur : GPT, LLaMA\n(quelle suite ?)"), past),
        (
            say(
                en="encoder and decoder: T5\n(how is it put there?)",
                fr="encodeur et décodeur : T5\n(comment le dire ?)",
            ),
            joint_mask,
        ),
    )
    figure = open_figure(9.0, 3.6, *TEXTS.sentence("families", "alt"))
    for axes, (title, mask) in zip(figure.subplots(1, 3), masks, strict=True):
        axes.imshow(mask, cmap="Greys", vmin=0, vmax=1.3)
        axes.set_title(title, fontsize=NORMAL)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel(say(en="key", fr="clé"))
        axes.set_ylabel(say(en="query", fr="requête"))
        for edge in range(1, len(mask)):
            axes.axhline(edge - 0.5, color=GREY, linewidth=0.5)
            axes.axvline(edge - 0.5, color=GREY, linewidth=0.5)
        if len(mask) > tokens:
            for draw in (axes.axhline, axes.axvline):
                draw(tokens - 0.5, color=VERMILION, linewidth=1.5)
            axes.set_xlabel(say(en="key: source, target", fr="clé : source, cible"))
            axes.set_ylabel(say(en="query: target, source", fr="requête : cible, source"))
    return finish(figure)


def states_beside_gpus(optimizer: str = "adamw", names: Sequence[str] = tuple(COATNET)) -> LabFigure:
    """Predicted model states by category, model by model, and the memory of GPUs."""
    axes = panel(9.0, 4.0, *TEXTS.sentence("states beside gpus", "alt"))
    labels = [name.removeprefix("coatnet_") for name in names]
    memories, show = [], bar(len(names))
    for name in names:
        memories.append(predict(RunConfig.of(model=name, optimizer=optimizer, data="synthetic")).memory)
        show(len(memories))
    bottoms = [0.0] * len(names)
    for category in ("weights", "gradients", "optimizer"):
        heights = [(memory.category(category) or 0) / GIB for memory in memories]
        style = CATEGORY_STYLES[category]
        axes.bar(
            labels,
            heights,
            bottom=bottoms,
            color=style.color,
            hatch=style.hatch,
            edgecolor="white",
            label=category_label(category),
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for name, memory_gib in GPU_MEMORY_GIB.items():
        axes.axhline(memory_gib, color=GREY, linestyle="--", linewidth=1)
        axes.annotate(f"{name} {say(en='GiB', fr='Gio')}", (-0.45, memory_gib), va="bottom", fontsize=SMALL)
    return labelled(
        axes,
        "CoAtNet-",
        say(en=f"states with {optimizer}, fp32 (GiB)", fr=f"états avec {optimizer}, fp32 (Gio)"),
        loc="upper left",
        bbox_to_anchor=(0.0, 0.85),
    )


@or_to_do
def bias_seen_by(bias: Callable[[Any, int], Any], table: Any, side: int) -> LabFigure:
    """What three queries see of one table of relative positions, by the student's function."""
    bias_TT = bias(table, side)
    queries = (0, side * side // 2, side * side - 1)
    figure = open_figure(9.0, 2.8, *TEXTS.sentence("bias seen by", "alt"))
    for axes, query in zip(figure.subplots(1, len(queries)), queries, strict=True):
        # One row of (side², side²): the bias of every key for this query, as a map.
        bias_map = bias_TT[query].reshape(side, side)
        axes.imshow(bias_map, cmap="cividis", vmin=float(table.min()), vmax=float(table.max()))
        axes.plot(query % side, query // side, color="white", marker="*", markersize=12, markeredgecolor="black")
        axes.set_title(say(en=f"query {query}", fr=f"requête {query}"), fontsize=NORMAL)
        axes.set_xlabel(say(en="column of the key", fr="colonne de la clé"))
        axes.set_ylabel(say(en="row of the key", fr="ligne de la clé"))
    return finish(figure)


def learning_seen(coatnet: Run, vit: Run) -> Table:
    """Answer which of two small models learns faster, and how they differ in size and operations."""
    tiny, small = models.describe("coatnet_tiny"), models.describe("vit_tiny", num_classes=10)
    return answered(
        [
            (TEXTS.say("learning seen", "lower loss"),
             sum(coatnet.losses[-5:]) < sum(vit.losses[-5:])),
            (say(en="parameters, ViT / CoAtNet", fr="paramètres, ViT / CoAtNet"),
             significant(small.parameters / tiny.parameters)),
            (say(en="operations per image, ViT / CoAtNet", fr="opérations par image, ViT / CoAtNet"),
             significant(small.flops / tiny.flops, 2)),
        ]
    )  # fmt: skip
