"""Quantizers: affine and symmetric, per tensor and per channel, and the ranges that they are calibrated with.

Zero is one of the values that the integers can say, so that padding and pruned weights stay zero. Rounding is to the
nearest, halves to the even one, and then the zero point is added, equal to `torch.fake_quantize_*` to the last bit.
(`torch.quantize_per_tensor` and `torch.quantize_per_channel` add the zero point first on an affine grid: exactly
between two integers, with an odd zero point, they take the other one.) The held-out images never calibrate.

Shape suffixes: C channels that have a grid each (1: one grid for all), V values of a channel, O and I outputs and
inputs of a layer; N images, C, H, W; M rows (samples × tokens).

Source: Jacob et al. 2018 (arXiv 1712.05877) for the affine grid; Nagel et al. 2021 (arXiv 2106.08295) and Gholami et
al. 2021 (arXiv 2103.13630) for symmetric and affine, per tensor and per channel, calibration and how a range is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal, say

LOWEST_BITS, HIGHEST_BITS = 2, 8
RangeChoice = Literal["min_max", "percentile", "mse"]
RANGES: tuple[RangeChoice, ...] = get_args(RangeChoice)
"""How the two ends of a grid are chosen: the extremes, a quantile of each side, or the least mean square error."""
PERCENTILE = 99.9
"""Per cent of the values that `percentile` keeps between the two ends."""
_CANDIDATES = 40
_LEAST_SCALE = torch.finfo(torch.float32).eps
_QUANTILE_VALUES = 2**20
_SAMPLE_SEED = 20260


@dataclass(frozen=True)
class Scheme:
    """Scheme of a grid of integers.

    Args:
        bits: of an integer, from 2 to 8; the integers are signed.
        symmetric: zero is the integer 0 (a scale is all there is to keep); else a zero point shifts the grid onto the
            values.
        per_channel: each output of a layer has its own grid; else the whole tensor shares one.

    Raises:
        LabError: for other numbers of bits.
    """

    bits: int = 8
    symmetric: bool = True
    per_channel: bool = True

    def __post_init__(self) -> None:
        is_integer = isinstance(self.bits, int) and not isinstance(self.bits, bool)
        if not is_integer or not LOWEST_BITS <= self.bits <= HIGHEST_BITS:
            raise refusal(
                en=f"bits must be a whole number from {LOWEST_BITS} to {HIGHEST_BITS}, but {self.bits!r} was "
                "received: 8 is INT8, and 2 is the least that has a sign and a zero.",
                fr=f"bits doit être un entier de {LOWEST_BITS} à {HIGHEST_BITS}, mais {self.bits!r} a été reçu : "
                "8 est INT8, et 2 le moins qui ait un signe et un zéro.",
            )

    @property
    def quant_min(self) -> int:
        """The smallest integer."""
        return -(2 ** (self.bits - 1))

    @property
    def quant_max(self) -> int:
        """The largest integer."""
        return 2 ** (self.bits - 1) - 1


def parameters_from_range(minimum: Tensor, maximum: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Compute scale and zero point of the grid that covers a range.

    Symmetric: scale = max(|minimum|, |maximum|) / ((quant_max − quant_min) / 2), zero point 0; in INT8 it is a division
    by 127.5, so that the largest weight is rounded to 127 or 128 and clamped, where many papers divide by 127. Affine:
    the range is widened to contain 0, then scale = (maximum − minimum) / (quant_max − quant_min).

    Args:
        minimum: of the values, any shape.
        maximum: of the values, the same shape.

    Returns:
        The scale (float32, at least 2⁻²³) and the zero point (int32, from quant_min to quant_max), of that shape.

    Source: Jacob et al. 2018 (arXiv 1712.05877); the conventions are those of torch's observers.
    """
    low, high = minimum.clamp(max=0.0), maximum.clamp(min=0.0)  # so that 0 is on the grid
    steps = scheme.quant_max - scheme.quant_min
    if scheme.symmetric:
        # The least scale is for a channel of zeros, which would be divided by 0.
        scale = (torch.maximum(-low, high) / (steps / 2)).clamp(min=_LEAST_SCALE)
        return scale, torch.zeros_like(scale, dtype=torch.int32)
    scale = ((high - low) / steps).clamp(min=_LEAST_SCALE)
    # The integer that stands for 0, on the grid however low / scale is rounded.
    zero_point = (scheme.quant_min - torch.round(low / scale)).clamp(scheme.quant_min, scheme.quant_max)
    return scale, zero_point.to(torch.int32)


def quantize(values: Tensor, scale: Tensor, zero_point: Tensor, scheme: Scheme) -> Tensor:
    """Quantize real numbers: clamp(round(values / scale) + zero point), kept in int8 whatever the bits.

    The division is a product by 1 / scale, as in torch: a last bit of it may decide about a half.
    """
    integers = torch.round(values * (1.0 / scale)) + zero_point
    return integers.clamp(scheme.quant_min, scheme.quant_max).to(torch.int8)


def dequantize(integers: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Dequantize integers: (integers − zero point) × scale, in float32."""
    return (integers.to(torch.float32) - zero_point) * scale


def fake_quantize(values: Tensor, scale: Tensor, zero_point: Tensor, scheme: Scheme) -> Tensor:
    """Quantize and dequantize values: what rounding does, in real numbers.

    Source: Jacob et al. 2018 (arXiv 1712.05877), where a training sees it; `dlojz.compress.quantization` gives it a
    gradient.
    """
    return dequantize(quantize(values, scale, zero_point, scheme), scale, zero_point)


def channels(tensor: Tensor, scheme: Scheme) -> Tensor:
    """Reshape a tensor to ``(C, V)``: its first dimension where every channel has its grid, else one row."""
    return tensor.flatten(1) if scheme.per_channel else tensor.reshape(1, -1)


def value_range(values_CV: Tensor, scheme: Scheme, choice: RangeChoice = "min_max") -> tuple[Tensor, Tensor]:
    """Choose the two ends of each channel's grid, ``(C, 1)`` each.

    `min_max` loses nothing to clamping and lets one outlier widen every step; `percentile` leaves 0.1 % of the values
    outside (of a channel of more than 2²⁰ values, so many are drawn, and tell the ends); `mse` tries 40 fractions of
    the extremes, the same for both ends, and keeps the one with the least mean square error. Both ends are narrowed
    together; torch's HistogramObserver narrows each on its own, which is better where the values lie to one side, as
    after a GELU.

    Args:
        values_CV: what the grid is to hold.
        choice: one of `RANGES`.

    Raises:
        LabError: for another choice.

    Source: Nagel et al. 2021 (arXiv 2106.08295) for min-max and mean square error.
    """
    low_C1, high_C1 = values_CV.amin(1, keepdim=True), values_CV.amax(1, keepdim=True)
    if choice == "min_max":
        return low_C1, high_C1
    if choice == "percentile":
        outside = (1 - PERCENTILE / 100) / 2  # 0.0005 on each side
        kept_CV = _drawn(values_CV, _QUANTILE_VALUES)
        return (
            torch.quantile(kept_CV, outside, dim=1, keepdim=True),
            torch.quantile(kept_CV, 1 - outside, dim=1, keepdim=True),
        )
    if choice != "mse":
        raise LabError(one_of(say(en="choice of a range", fr="choix de plage"), choice, RANGES))
    best_C1 = torch.full_like(low_C1, torch.inf)
    fraction_C1 = torch.ones_like(low_C1)
    # From the whole range down: of equal errors the wider range stays.
    for candidate in range(_CANDIDATES, 0, -1):
        fraction = candidate / _CANDIDATES
        scale_C1, zero_C1 = parameters_from_range(low_C1 * fraction, high_C1 * fraction, scheme)
        error_C1 = (fake_quantize(values_CV, scale_C1, zero_C1, scheme) - values_CV).square().mean(1, keepdim=True)
        fraction_C1 = torch.where(error_C1 < best_C1, fraction, fraction_C1)
        best_C1 = torch.minimum(error_C1, best_C1)
    return low_C1 * fraction_C1, high_C1 * fraction_C1


def _drawn(values_CV: Tensor, max_values: int) -> Tensor:
    """So many values of each channel, drawn with a fixed seed: every n-th would see some inputs of a layer never
    and others always, where n and their number have a divisor in common.
    """
    count = values_CV.shape[1]
    if count <= max_values:
        return values_CV
    indices = torch.randint(count, (max_values,), generator=torch.Generator().manual_seed(_SAMPLE_SEED))
    return values_CV[:, indices.to(values_CV.device)]


def weight_grid(weight_OI: Tensor, scheme: Scheme, choice: RangeChoice = "min_max") -> tuple[Tensor, Tensor]:
    """Compute scale and zero point of a layer's weights, ``(O, 1)`` per channel or ``(1, 1)`` per tensor."""
    return parameters_from_range(*value_range(channels(weight_OI.detach(), scheme), scheme, choice), scheme)


SAMPLES = 256
"""Images that calibrate where nothing else is said."""
_BATCH = 64


def refuse_no_data() -> None:
    """Refuse to fix a static grid without data.

    Raises:
        LabError: always.
    """
    raise refusal(
        en="calibration was given 0 images, but a static grid is fixed by what the layers' inputs are seen to be: "
        "give it at least one image, or use activations='dynamic', whose grid is found anew for each row.",
        fr="le calibrage a reçu 0 image, or une grille statique se fixe d’après les entrées observées dans chaque "
        "couche : donnez-lui au moins une image, ou prenez activations='dynamic', dont la grille est retrouvée "
        "à chaque ligne.",
    )


@dataclass(frozen=True)
class Observed:
    """Inputs of one layer during calibration.

    Args:
        inputs_MI: all of them, a row per sample and token.
    """

    inputs_MI: Tensor

    def range(self, scheme: Scheme, choice: RangeChoice = "min_max") -> tuple[Tensor, Tensor]:
        """Choose the two ends of a grid shared by all inputs, ``(1, 1)`` each."""
        return value_range(self.inputs_MI.reshape(1, -1), scheme, choice)  # all tokens and features as one row


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Find the linear layers of a model, by the path of their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


@torch.no_grad()
def observe(model: nn.Module, images_NCHW: Tensor | None, names: Iterable[str] | None = None) -> dict[str, Observed]:
    """Run images through a model and keep what enters its layers, by hooks that are taken off again.

    Args:
        model: watched in evaluation mode, whatever the mode that it comes in and is left in.
        images_NCHW: what it is shown; all inputs are kept in memory, so a few hundred images are plenty.
        names: of the layers to watch; all linear ones without it.

    Raises:
        LabError: without images.
    """
    if images_NCHW is None or len(images_NCHW) == 0:
        refuse_no_data()
    input_rows: dict[str, list[Tensor]] = {}

    def watch(name: str, module: nn.Module) -> Any:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            input_rows.setdefault(name, []).append(inputs[0].detach().flatten(0, -2))  # (…, I) → (M, I)

        return module.register_forward_pre_hook(keep)

    watched = linear_layers(model) if names is None else {name: model.get_submodule(name) for name in names}
    hooks = [watch(name, module) for name, module in watched.items()]
    # Module by module: the caller may have frozen some in evaluation mode.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for batch_BCHW in images_NCHW.split(_BATCH):  # type: ignore[union-attr]
            model(batch_BCHW)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
    return {name: Observed(torch.cat(rows)) for name, rows in input_rows.items()}
