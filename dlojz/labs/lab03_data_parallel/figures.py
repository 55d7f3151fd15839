"""Figures of lab 03: what the student's own function gives, or what a training measured.

Each figure tells in words (its `alt`) what it shows.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlojz.base.language import format_bytes, say, shortest
from dlojz.base.table import Table
from dlojz.display.canvas import LabFigure, finish, new_figure, plain
from dlojz.display.style import BLUE, GREEN, GREY, LINE_STYLES, ORANGE, PURPLE, SKY, SMALL, VERMILION
from dlojz.labs.kit.exercise import Sentences, or_to_do
from dlojz.labs.kit.figures import answered, done, labelled, open_figure, panel, plot_lines

TEXTS = Sentences(Path(__file__).with_suffix(".md"))

RANKS = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (PURPLE, "D"), (SKY, "v"), (VERMILION, "P"))
SMOOTHED = 0.1
"""Share of all steps over which a loss curve is averaged: the noise of a batch of 16 would hide everything else."""


@or_to_do
def buckets(
    fill: Callable[[Sequence[int], int], Sequence[Sequence[int]]], gradient_bytes: Sequence[int], limit_bytes: int
) -> LabFigure:
    """How the student's function cuts gradients into buckets, in the order in which they leave."""
    cut = [[gradient_bytes[index] for index in bucket] for bucket in fill(gradient_bytes, limit_bytes)]
    axes = panel(
        9.0,
        3.2,
        en=f"{len(cut)} buckets in the order in which they leave, each a stack of gradients; the line is the limit "
        f"of {format_bytes(limit_bytes)}.",
        fr=f"{len(cut)} buckets dans l’ordre de leur départ, chacun étant une pile de gradients ; la ligne est la "
        f"limite de {format_bytes(limit_bytes)}.",
    )
    for number, sizes in enumerate(cut, start=1):
        bottom = 0.0
        for size in sizes:
            height = size / 2**10
            axes.bar(number, height, bottom=bottom, color=BLUE, edgecolor="white", linewidth=0.6)
            bottom += height
        count_label = f"{len(sizes)} gradient" + ("s" if len(sizes) > 1 else "")
        axes.annotate(count_label, (number, bottom), ha="center", va="bottom", fontsize=SMALL)
    axes.axhline(limit_bytes / 2**10, color=GREY, linestyle="--", linewidth=1)
    axes.set_xticks(range(1, len(cut) + 1))
    axes.set_xlabel(say(en="bucket, in the order of departure", fr="bucket, dans l’ordre de départ"))
    axes.set_ylabel(say(en="gradients (KiB)", fr="gradients (Kio)"))
    axes.margins(y=0.12)
    return done(axes)


@or_to_do
def shares(
    shard: Callable[..., Any], num_samples: int = 24, size: int = 4, epochs: int = 2, seed: int = 0
) -> LabFigure:
    """Which rank reads which sample in the first epochs, by the student's function."""
    figure = open_figure(11.0, 0.7 + 0.42 * size * epochs, *TEXTS.sentence("shares", "alt", size=size, epochs=epochs))
    for epoch, axes in enumerate(figure.subplots(epochs, 1, sharex=True)):
        for rank in range(size):
            indices = [int(index) for index in shard(num_samples, rank, size, epoch, seed)]
            color, marker = RANKS[rank % len(RANKS)]
            # Ranks stand one beside the other, with a gap of one place between them.
            positions = [position + rank * (len(indices) + 1) for position in range(len(indices))]
            axes.scatter(positions, indices, color=color, marker=marker, s=36, label=f"{rank}")
        axes.set_ylabel(say(en=f"epoch {epoch}\nsample", fr=f"époque {epoch}\néchantillon"))
        axes.set_xticks([])
        plain(axes)
    axes.set_xlabel(say(en="order of reading, rank by rank", fr="ordre de lecture, rang par rang"))
    figure.axes[0].legend(
        title=say(en="rank", fr="rang"), frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=SMALL
    )
    return finish(figure)


@or_to_do
def rates(
    rate: Callable[[int, float, float, int], float],
    *,
    base_rate: float,
    scales: Sequence[float],
    warmup_steps: int,
    steps: int,
) -> LabFigure:
    """The student's learning rate by step, for several sizes of batch."""
    figure = new_figure(
        7.0,
        2.8,
        alt=say(en="Learning rate by step for batches ", fr="Taux d’apprentissage à chaque pas pour des batches ")
        + ", ".join(f"×{shortest(scale)}" for scale in scales),
    )
    axes = figure.subplots()
    values = {
        f"batch ×{shortest(scale)}": [float(rate(step, base_rate, scale, warmup_steps)) for step in range(steps)]
        for scale in scales
    }
    plot_lines(axes, range(steps), values, marker="")
    axes.axvline(warmup_steps, color=GREY, linewidth=1, linestyle=":")
    return labelled(axes, say(en="step", fr="pas"), say(en="learning rate", fr="taux d’apprentissage"))


Curves = Mapping[str, tuple[int, Sequence[float]]]
"""By name of a training, the size of its batch and the loss of each step."""


@or_to_do
def large_batches_seen(curves: Curves) -> Table:
    """Answer, on the mean loss of the last steps, what larger batches, larger rates and the warm-up do."""
    final = {name: smoothed(losses)[-1] for name, (_, losses) in curves.items()}
    return answered(
        [
            (TEXTS.say("large batches seen", "rate left alone"),
             final["256"] > 5 * final["16"]),
            (TEXTS.say("large batches seen", "batch of 64"),
             final["64, × 4"] < final["64"] / 2),
            (TEXTS.say("large batches seen", "no warm-up"),
             final["256, × 16"] > 3 * final["256, × 16, warm-up"]),
            (say(en="with the warm-up, 256 does as well as 16", fr="avec le warm-up, 256 fait aussi bien que 16"),
             final["256, × 16, warm-up"] <= final["16"]),
        ]
    )  # fmt: skip


@or_to_do
def large_batches(curves: Curves) -> LabFigure:
    """Loss by samples read, so that trainings with batches of several sizes can be compared.

    Args:
        curves: by name, the size of the batch and the loss of each step; drawn as a running mean.
    """
    figure = new_figure(
        9.0,
        3.6,
        alt=say(en="Loss by samples read: ", fr="Perte selon le nombre d’échantillons lus : ") + ", ".join(curves),
    )
    axes = figure.subplots()
    for (name, (batch, losses)), (color, line, marker) in zip(curves.items(), LINE_STYLES, strict=False):
        values = smoothed(losses)
        samples = [batch * (step + 1) for step in range(len(values))]
        marker_stride = max(1, len(values) // 12)
        axes.plot(
            samples,
            values,
            color=color,
            linestyle=line,
            marker=marker,
            markevery=marker_stride,
            markersize=4,
            label=name,
        )
    axes.set_yscale("log")
    axes.set_xlabel(say(en="samples read", fr="échantillons lus"))
    axes.set_ylabel(say(en="loss (nats)", fr="perte (nats)"))
    axes.legend(
        title=say(en="batch, learning rate", fr="batch, taux"),
        frameon=False,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )
    plain(axes)
    return finish(figure)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Running mean of the last tenth of all steps, at least one."""
    width = max(1, round(SMOOTHED * len(losses)))
    windows = (losses[max(0, step + 1 - width) : step + 1] for step in range(len(losses)))
    return [sum(window) / len(window) for window in windows]
