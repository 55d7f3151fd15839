"""Figures and tables of lab 11 on quantization: noise by bits, calibrated ranges, a whole model in few bits.

Layer 6 (labs), on `dlojz.viz`. Invariant: whole numbers come from the student's own functions; what is predicted of
their error is computed from scales alone.

Shape suffixes: O outputs, I inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dlojz.labs.compress_shown import answered
from dlojz.labs.pipeline_figures import Sheet, or_to_do, percent, pictured, plain_number
from dlojz.labs.quantize_affine_exercises import quantize_affine
from dlojz.labs.quantize_rows_exercises import quantize_rows
from dlojz.labs.verdict import Verdict
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import BLUE, ORANGE, PREDICTED_ALPHA

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dlojz.compress.quantizers import RangeChoice, Scheme
    from dlojz.compress.task import Task

Rows = Callable[["Tensor", int], tuple["Tensor", "Tensor"]]
Affine = Callable[["Tensor", float, float, int], tuple["Tensor", float, int]]
FakeQuantize = Callable[["Tensor", "Tensor", int], "Tensor"]
BITS = (8, 7, 6, 5, 4, 3, 2)
FEW_BITS, EPOCHS, LEARNING_RATE = 2, 2, 5e-4
SAMPLE = 200_000


def noise_ratio(weight_OI: Tensor, bits: int, fewer: int) -> float:
    """By how much the mean square error grows from some bits to fewer, measured."""
    errors = []
    for one in (fewer, bits):
        q_OI, scale_O1 = quantize_rows(weight_OI.detach(), one)
        errors.append(float((scale_O1 * q_OI - weight_OI.detach()).double().square().mean()))
    return errors[0] / errors[1]


def _snr_db(rows: Rows, weight_OI: Tensor, bits: int) -> tuple[float, float]:
    """Signal to noise in decibels, predicted by scale² / 12 and measured."""
    from dlojz.compress.quantization_error import decibels

    q_OI, scale_O1 = rows(weight_OI, bits)
    power = float(weight_OI.double().square().mean())
    noise = float((scale_O1 * q_OI - weight_OI).double().square().mean())
    return decibels(power, float(scale_O1.double().square().mean()) / 12), decibels(power, noise)


@pictured
def noise(rows: Rows, weight_OI: Tensor, bits: Sequence[int] = BITS) -> LabFigure:
    """Signal to noise by bits, one scale per row and one for the whole matrix, predicted and measured."""
    weight_OI = weight_OI.detach()
    whole = weight_OI.reshape(1, -1)
    found = {
        say(en="one scale per output", fr="une échelle par sortie"): [_snr_db(rows, weight_OI, one) for one in bits],
        say(en="one scale in all", fr="une seule échelle"): [_snr_db(rows, whole, one) for one in bits],
    }
    told = " ; ".join(
        say(en=f"{name}: ", fr=f"{name} : ")
        + ", ".join(f"{one} bits {plain_number(pair[1], 3)} dB" for one, pair in zip(bits, pairs, strict=True))
        for name, pairs in found.items()
    )
    figure = new_figure(
        8.0,
        3.8,
        alt=say(en=f"Signal to noise by bits. {told}.", fr=f"Rapport signal sur bruit selon les bits. {told}."),
    )
    axes = figure.subplots()
    for (name, pairs), color, marker in zip(found.items(), (BLUE, ORANGE), ("o", "s"), strict=True):
        axes.plot(
            bits,
            [pair[0] for pair in pairs],
            color=color,
            linewidth=5,
            alpha=PREDICTED_ALPHA,
            label=say(en=f"{name}, predicted (Δ²/12)", fr=f"{name}, prédit (Δ²/12)"),
        )
        axes.plot(
            bits,
            [pair[1] for pair in pairs],
            color=color,
            linestyle="",
            marker=marker,
            label=say(en=f"{name}, measured", fr=f"{name}, mesuré"),
        )
    axes.set_xlabel(say(en="bits per weight", fr="bits par poids"))
    axes.set_ylabel(say(en="signal to noise (dB)", fr="signal sur bruit (dB)"))
    axes.legend(frameon=False, fontsize=9)
    plain(axes)
    return finish(figure)  # fmt: skip


def _ends(seen: Tensor, scheme: Scheme, choice: RangeChoice) -> tuple[float, float]:
    from dlojz.compress.quantizers import value_range

    low, high = (float(end) for end in value_range(seen.reshape(1, -1), scheme, choice))
    return min(low, 0.0), max(high, 0.0)


def _least_error(seen: Tensor, bits: int) -> tuple[float, float]:
    """The range of least square error, each end tried on its own: on a sample, which changes a range little."""
    some = seen.flatten()[:: max(seen.numel() // SAMPLE, 1)]
    low, high = min(float(some.min()), 0.0), max(float(seen.max()), 0.0)

    def error(range_: tuple[float, float]) -> float:
        q, scale, zero_point = quantize_affine(some, *range_, bits)
        return float((scale * (q.float() - zero_point) - some).square().mean())

    tried = [(low * part / 4, high * share / 40) for part in range(5) for share in range(8, 41)]
    return min(tried, key=error)


def observed(seen: Tensor, images: int) -> Sheet:
    """What has been seen of a layer's inputs: how many there are, and on which sides of zero.

    Args:
        seen: (rows, inputs), the rows being the positions of all images.
        images: how many were run through.
    """
    rows, inputs = seen.shape
    head = (
        say(en="images × positions", fr="images × positions"),
        say(en="values per position", fr="valeurs par position"),
        say(en="below zero", fr="négatives"),
        say(en="above zero", fr="positives"),
    )
    some = [say(en="yes", fr="oui") if bool(side.any()) else say(en="no", fr="non") for side in (seen < 0, seen > 0)]
    return Sheet(head, ((f"{images} × {rows // images}", str(inputs), *some),))


@or_to_do
def calibrated(affine: Affine, seen: Tensor, bits: int) -> Sheet:
    """Three ways to choose a range for the same activations, and what each of them loses by the student's function."""
    from dlojz.compress.quantization_error import sqnr_db
    from dlojz.compress.quantizers import RANGES, Scheme

    names = {
        "min_max": say(en="minimum and maximum", fr="minimum et maximum"),
        "percentile": say(en="percentiles (0.1% left outside)", fr="centiles (0,1 % laissé dehors)"),
        "mse": say(en="least square error", fr="moindre erreur quadratique"),
    }
    scheme = Scheme(bits=bits, symmetric=False, per_channel=False)
    table = []
    for choice in RANGES:
        low, high = _least_error(seen, bits) if choice == "mse" else _ends(seen, scheme, choice)
        q, scale, zero_point = affine(seen, low, high, bits)
        outside = float(((seen < low) | (seen > high)).double().mean())
        back = scale * (q.float() - zero_point)
        table.append(
            (
                names[choice],
                f"[{plain_number(low, 3)} ; {plain_number(high, 3)}]",
                say(en=f"{outside:.2%}", fr=f"{100 * outside:.2f} %".replace(".", ",")),
                plain_number(scale, 3),
                f"{plain_number(sqnr_db(seen, back), 3)} dB",
            )
        )
    head = (
        say(en=f"calibration, {bits} bits", fr=f"calibrage, {bits} bits"),
        say(en="range", fr="intervalle"),
        say(en="clamped", fr="borné"),
        say(en="scale", fr="échelle"),
        say(en="signal to noise", fr="signal sur bruit"),
    )
    return Sheet(head, tuple(table))


@contextmanager
def _quantized(model: nn.Module, replaced: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A model whose linear layers compute with other weights, for a while; gradients reach their own."""
    from torch import nn
    from torch.nn.utils import parametrize

    class Replaced(nn.Module):
        def forward(self, weight_OI: Tensor) -> Tensor:
            return replaced(weight_OI)

    layers = [one for one in model.modules() if isinstance(one, nn.Linear)]
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", Replaced())
    try:
        yield
    finally:
        for layer in layers:
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)


def _rounded(rows: Rows, bits: int) -> Callable[[Tensor], Tensor]:
    def replaced(weight_OI: Tensor) -> Tensor:
        q_OI, scale_O1 = rows(weight_OI, bits)
        return scale_O1 * q_OI

    return replaced


@or_to_do
def post_training(rows: Rows, teacher: nn.Module, task: Task, bits: Sequence[int] = (8, 4, 3, 2)) -> Accuracies:
    """Accuracy with all linear weights in few bits, without any training, by the student's function."""
    from dlojz.compress.fitting import accuracy

    found = {32: accuracy(teacher, task)}
    for one in bits:
        model = copy.deepcopy(teacher)
        with _quantized(model, _rounded(rows, one)):
            found[one] = accuracy(model, task)
    return Accuracies(found)


@or_to_do
def aware_training(
    rows: Rows, fake_quantize: FakeQuantize, teacher: nn.Module, task: Task, *, bits: int = FEW_BITS
) -> tuple[float, float, float]:
    """Accuracy of the teacher, of its weights in few bits, and after two epochs that see the rounding.

    Every weight is trained as it is; what is computed with is what the student's `fake_quantize` makes of it, on a
    scale that follows the largest weight of each row.
    """
    import torch

    from dlojz.compress.fitting import Settings, accuracy, fit

    high = 2 ** (bits - 1) - 1

    def replaced(weight_OI: Tensor) -> Tensor:
        return fake_quantize(weight_OI, weight_OI.detach().abs().amax(1, keepdim=True) / high, bits)

    fake_quantize(torch.ones(1, 2), torch.ones(1, 1), bits)  # still to do? then nothing is trained
    model = copy.deepcopy(teacher)
    with _quantized(model, _rounded(rows, bits)):
        before = accuracy(model, task)
    with _quantized(model, replaced):
        fit(model, task, Settings(epochs=EPOCHS, learning_rate=LEARNING_RATE))
    with _quantized(model, _rounded(rows, bits)):
        after = accuracy(model, task)
    return accuracy(teacher, task), before, after


class Accuracies(dict[int, float]):
    """Accuracy by bits; shows itself as a table."""

    def sheet(self) -> Sheet:
        """One column per number of bits."""
        head = (say(en="bits per weight", fr="bits par poids"), *map(str, self))
        return Sheet(head, ((say(en="accuracy", fr="exactitude"), *map(percent, self.values())),))

    def __repr__(self) -> str:
        return str(self.sheet())

    def _repr_html_(self) -> str:
        return self.sheet()._repr_html_()


def post_training_seen(found: Accuracies | Verdict) -> Sheet | Verdict:
    """Yes or no: nothing is lost in 8 bits, nearly nothing in 4, and much in 2."""
    if isinstance(found, Verdict):
        return found
    questions = [
        (say(en=f"in {bits} bits, less than 2 points are lost", fr=f"en {bits} bits, on perd moins de 2 points"),
         found[32] - found[bits] < 0.02)
        for bits in (8, 4, 2)
    ]  # fmt: skip
    return answered(questions)


def aware_training_table(found: tuple[float, float, float] | Verdict) -> Sheet | Verdict:
    """The three accuracies of a training that sees the rounding."""
    if isinstance(found, Verdict):
        return found
    head = (
        say(en="32 bits", fr="32 bits"),
        say(en=f"{FEW_BITS} bits, no training", fr=f"{FEW_BITS} bits, sans entraînement"),
        say(en=f"{FEW_BITS} bits, trained", fr=f"{FEW_BITS} bits, entraîné"),
    )
    return Sheet(head, (tuple(percent(one) for one in found),))


def aware_training_seen(found: tuple[float, float, float] | Verdict) -> Sheet | Verdict:
    """Yes or no: two epochs bring back at least nine tenths of the teacher's accuracy."""
    if isinstance(found, Verdict):
        return found
    teacher, before, after = found
    return answered(
        [
            (say(en="without training, nine tenths of the accuracy are kept",
                 fr="sans entraînement, on garde neuf dixièmes de l’exactitude"),
             before > 0.9 * teacher),
            (say(en="after training, nine tenths of the accuracy are kept",
                 fr="après entraînement, on garde neuf dixièmes de l’exactitude"),
             after > 0.9 * teacher),
        ]
    )  # fmt: skip
