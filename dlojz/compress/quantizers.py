"""A few integers in the place of real numbers: scale, zero point, rounding, and the way back.

Layer 2. Invariant: zero is one of the values that the integers can say, so that padding and pruned weights stay zero;
rounding is to the nearest, halves to the even one, and then the zero point is added, as `torch.fake_quantize_*` and
torchao do it, and equal to theirs to the last bit. `torch.quantize_per_tensor` and `torch.quantize_per_channel` add the
zero point first on an affine grid: exactly between two integers, with an odd zero point, they take the other one.

Shape suffixes: C channels that have a grid each (1: one grid for all), V values of a channel, O and I outputs and
inputs of a layer.

Source: Jacob et al. 2018 (arXiv 1712.05877) for the affine grid; Nagel et al. 2021 (arXiv 2106.08295) and Gholami et
al. 2021 (arXiv 2103.13630) for symmetric and affine, per tensor and per channel, and how a range is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dlojz.schema import LabError, one_of
from dlojz.text import say

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
    """What a grid of integers looks like.

    Args:
        bits: of an integer, from 2 to 8; the integers are signed.
        symmetric: zero is the integer 0 (a scale is all there is to keep); else a zero point shifts the grid onto the
            values.
        per_channel: each output of a layer has a grid of its own; else the whole tensor shares one.

    Raises:
        LabError: for other numbers of bits.
    """

    bits: int = 8
    symmetric: bool = True
    per_channel: bool = True

    def __post_init__(self) -> None:
        whole = isinstance(self.bits, int) and not isinstance(self.bits, bool)
        if not whole or not LOWEST_BITS <= self.bits <= HIGHEST_BITS:
            raise LabError(
                say(
                    en=f"bits must be a whole number from {LOWEST_BITS} to {HIGHEST_BITS}, but {self.bits!r} was "
                    "received: 8 is INT8, and 2 is the least that has a sign and a zero.",
                    fr=f"bits doit être un entier de {LOWEST_BITS} à {HIGHEST_BITS}, mais {self.bits!r} a été reçu : "
                    "8 est INT8, et 2 le moins qui ait un signe et un zéro.",
                )
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
    """Scale and zero point of the grid that covers a range.

    Symmetric: scale = max(|minimum|, |maximum|) / ((quant_max − quant_min) / 2), zero point 0; in INT8 it is a division
    by 127.5, so that the largest weight is rounded to 127 or 128 and clamped, where many papers divide by 127. Affine:
    the range is widened to contain 0, then scale = (maximum − minimum) / (quant_max − quant_min).

    Args:
        minimum: of the values, any shape.
        maximum: of the values, the same shape.
        scheme: of the grid.

    Returns:
        The scale (float32, at least 2⁻²³) and the zero point (int32, from quant_min to quant_max), of that shape.

    Source: Jacob et al. 2018 (arXiv 1712.05877); the conventions are those of torch's observers and of torchao.
    """
    low, high = minimum.clamp(max=0.0), maximum.clamp(min=0.0)
    steps = scheme.quant_max - scheme.quant_min
    if scheme.symmetric:
        scale = (torch.maximum(-low, high) / (steps / 2)).clamp(min=_LEAST_SCALE)
        return scale, torch.zeros_like(scale, dtype=torch.int32)
    scale = ((high - low) / steps).clamp(min=_LEAST_SCALE)
    zero_point = (scheme.quant_min - torch.round(low / scale)).clamp(scheme.quant_min, scheme.quant_max)
    return scale, zero_point.to(torch.int32)


def quantize(values: Tensor, scale: Tensor, zero_point: Tensor, scheme: Scheme) -> Tensor:
    """Integers of real numbers: clamp(round(values / scale) + zero point), kept in int8 whatever the bits.

    The division is a product by 1 / scale, as in torch: a last bit of it may decide about a half.
    """
    integers = torch.round(values * (1.0 / scale)) + zero_point
    return integers.clamp(scheme.quant_min, scheme.quant_max).to(torch.int8)


def dequantize(integers: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Real numbers that integers stand for: (integers − zero point) × scale, in float32."""
    return (integers.to(torch.float32) - zero_point) * scale


def fake_quantize(values: Tensor, scale: Tensor, zero_point: Tensor, scheme: Scheme) -> Tensor:
    """The values after a way to the integers and back: what rounding does, in real numbers.

    Source: Jacob et al. 2018 (arXiv 1712.05877), where a training sees it; `dlojz.compress.qat` gives it a gradient.
    """
    return dequantize(quantize(values, scale, zero_point, scheme), scale, zero_point)


def channels(tensor: Tensor, scheme: Scheme) -> Tensor:
    """The values of a tensor as ``(C, V)``: its first dimension where every channel has its grid, else one row."""
    return tensor.flatten(1) if scheme.per_channel else tensor.reshape(1, -1)


def value_range(values_CV: Tensor, scheme: Scheme, choice: RangeChoice = "min_max") -> tuple[Tensor, Tensor]:
    """The two ends of each channel's grid, ``(C, 1)`` each.

    `min_max` loses nothing to clamping and lets one outlier widen every step; `percentile` leaves 0.1 % of the values
    outside (of a channel of more than 2²⁰ values, so many are drawn, and tell the ends); `mse` tries 40 fractions of
    the extremes, the same for both ends, and keeps the one with the least mean square error. Both ends are narrowed
    together; torch's HistogramObserver narrows each on its own, which is better where the values lie to one side, as
    after a GELU.

    Args:
        values_CV: what the grid is to hold.
        scheme: of the grid.
        choice: one of `RANGES`.

    Raises:
        LabError: for another choice.

    Source: Nagel et al. 2021 (arXiv 2106.08295) for min-max and mean square error.
    """
    low_C1, high_C1 = values_CV.amin(1, keepdim=True), values_CV.amax(1, keepdim=True)
    if choice == "min_max":
        return low_C1, high_C1
    if choice == "percentile":
        outside = (1 - PERCENTILE / 100) / 2
        kept_CV = _drawn(values_CV, _QUANTILE_VALUES)
        return (
            torch.quantile(kept_CV, outside, dim=1, keepdim=True),
            torch.quantile(kept_CV, 1 - outside, dim=1, keepdim=True),
        )
    if choice != "mse":
        raise LabError(one_of(say(en="choice of a range", fr="choix de plage"), choice, RANGES))
    best_C1 = torch.full_like(low_C1, torch.inf)
    fraction_C1 = torch.ones_like(low_C1)
    for candidate in range(_CANDIDATES, 0, -1):
        fraction = candidate / _CANDIDATES
        scale_C1, zero_C1 = parameters_from_range(low_C1 * fraction, high_C1 * fraction, scheme)
        error_C1 = (fake_quantize(values_CV, scale_C1, zero_C1, scheme) - values_CV).square().mean(1, keepdim=True)
        fraction_C1 = torch.where(error_C1 < best_C1, fraction, fraction_C1)
        best_C1 = torch.minimum(error_C1, best_C1)
    return low_C1 * fraction_C1, high_C1 * fraction_C1


def _drawn(values_CV: Tensor, most: int) -> Tensor:
    """So many values of each channel, drawn with a seed of its own: every n-th would see some inputs of a layer never
    and others always, where n and their number have a divisor in common.
    """
    count = values_CV.shape[1]
    if count <= most:
        return values_CV
    places = torch.randint(count, (most,), generator=torch.Generator().manual_seed(_SAMPLE_SEED))
    return values_CV[:, places.to(values_CV.device)]


def weight_grid(weight_OI: Tensor, scheme: Scheme, choice: RangeChoice = "min_max") -> tuple[Tensor, Tensor]:
    """Scale and zero point of a layer's weights, ``(O, 1)`` per channel or ``(1, 1)`` per tensor."""
    return parameters_from_range(*value_range(channels(weight_OI.detach(), scheme), scheme, choice), scheme)
