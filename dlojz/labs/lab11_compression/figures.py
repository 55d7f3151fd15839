"""Pictures of lab 11: softened answers of a teacher, and the noise of a rounding by bits.

Shape suffixes: N images, K classes, O outputs, I inputs.
"""

import math
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from dlojz.base.language import say, significant
from dlojz.compress.task import Task
from dlojz.display.canvas import LabFigure, finish, plain
from dlojz.display.style import BLUE, NORMAL, ORANGE, PREDICTED_ALPHA, SKY
from dlojz.labs.kit.figures import labelled, open_figure, panel, pictured

Rows = Callable[["Tensor", int], tuple["Tensor", "Tensor"]]
BITS = (8, 7, 6, 5, 4, 3, 2)


@pictured
def softened(teacher: nn.Module, task: Task, temperatures: Sequence[float]) -> LabFigure:
    """Draw a held-out image on which the teacher hesitates, and its probabilities at several temperatures."""
    from dlojz.compress.task import logits

    answers_NK = logits(teacher, task.held_out_NCHW)
    # Where the teacher is right and hesitates most: the largest second probability.
    second_N = answers_NK.softmax(1).topk(2).values[:, 1]
    right_N = answers_NK.argmax(1) == task.held_out_labels_N
    chosen = int((second_N * right_N).argmax())
    label = int(task.held_out_labels_N[chosen])
    temperature_text = ", ".join(f"T = {significant(temperature, 4)}" for temperature in temperatures)
    figure = open_figure(
        2.0 + 2.6 * len(temperatures),
        2.6,
        en=f"A handwritten {label}, and the teacher's probabilities for it at {temperature_text}: "
        "the higher T, the flatter. The dark bar is the true class.",
        fr=f"Un {label} manuscrit, et les probabilités du professeur à {temperature_text} : "
        "plus T est haut, plus elles s’aplatissent. La barre foncée est la vraie classe.",
    )
    image_axes, *bar_axes = figure.subplots(1, 1 + len(temperatures), width_ratios=[0.7, *[1] * len(temperatures)])
    image_axes.imshow(task.held_out_NCHW[chosen].mean(0).tolist(), cmap="gray_r")
    image_axes.set_axis_off()
    image_axes.set_title(say(en=f"a {label}", fr=f"un {label}"))
    for axes, temperature in zip(bar_axes, temperatures, strict=True):
        shares_K = (answers_NK[chosen] / temperature).softmax(0)
        classes = range(len(shares_K))
        axes.bar(
            classes, (100 * shares_K).tolist(), color=[BLUE if class_index == label else SKY for class_index in classes]
        )
        axes.set_title(f"T = {significant(temperature, 4)}")
        axes.set_ylim(0, 100)
        axes.set_xticks(list(classes))
        axes.set_xlabel(say(en="class (dark: the true one)", fr="classe (foncé : la vraie)"))
        plain(axes)
    bar_axes[0].set_ylabel(say(en="probability (%)", fr="probabilité (%)"))
    return finish(figure)


def _decibels(signal_power: float, noise_power: float) -> float:
    """Infinite where there is no noise."""
    return math.inf if noise_power == 0 else 10 * math.log10(signal_power / noise_power)


def _snr_db(rows: Rows, weight_OI: Tensor, bits: int) -> tuple[float, float]:
    """Signal to noise in decibels, predicted by scale² / 12 and measured."""
    q_OI, scale_O1 = rows(weight_OI, bits)
    power = float(weight_OI.double().square().mean())
    noise = float((scale_O1 * q_OI - weight_OI).double().square().mean())
    # An error that is uniform over a step Δ has the mean square Δ² / 12.
    return _decibels(power, float(scale_O1.double().square().mean()) / 12), _decibels(power, noise)


@pictured
def noise(rows: Rows, weight_OI: Tensor, bits: Sequence[int] = BITS) -> LabFigure:
    """Draw signal to noise by bits, one scale per row and one for the whole matrix, predicted and measured."""
    weight_OI = weight_OI.detach()
    # All weights as one row: `rows` then gives them one scale.
    single_row = weight_OI.reshape(1, -1)
    snr_by_name = {
        say(en="one scale per output", fr="une échelle par sortie"): [
            _snr_db(rows, weight_OI, bit_width) for bit_width in bits
        ],
        say(en="one scale in all", fr="une seule échelle"): [
            _snr_db(rows, single_row, bit_width) for bit_width in bits
        ],
    }
    summary = " ; ".join(
        say(en=f"{name}: ", fr=f"{name} : ")
        + ", ".join(f"{bit_width} bits {significant(pair[1])} dB" for bit_width, pair in zip(bits, pairs, strict=True))
        for name, pairs in snr_by_name.items()
    )
    axes = panel(
        8.0, 3.8, f"Signal to noise by bits. {summary}.", f"Rapport signal sur bruit selon les bits. {summary}."
    )
    for (name, pairs), color, marker in zip(snr_by_name.items(), (BLUE, ORANGE), ("o", "s"), strict=True):
        predicted, measured = zip(*pairs, strict=True)
        label = say(en=f"{name}, predicted (Δ²/12)", fr=f"{name}, prédit (Δ²/12)")
        axes.plot(bits, predicted, color=color, linewidth=5, alpha=PREDICTED_ALPHA, label=label)
        label = say(en=f"{name}, measured", fr=f"{name}, mesuré")
        axes.plot(bits, measured, color=color, linestyle="", marker=marker, label=label)
    x, y = say(en="bits per weight", fr="bits par poids"), say(en="signal to noise (dB)", fr="signal sur bruit (dB)")
    return labelled(axes, x, y, fontsize=NORMAL)
