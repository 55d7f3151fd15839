"""Exercises of lab 11 on quantization: affine activations, rows of weights, straight-through.

Answers are compared in the numbers that a file would keep, int8 and scales, with inputs on both sides of the range. No
weight lies within half a step outside of the range, where the two usual conventions of the estimator differ.

Shape suffixes: B rows, O outputs, I inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlojz.base.language import say
from dlojz.labs.kit.exercise import Mistake, Said
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import expect_int8, expect_several, expect_tensor, gradient_of, normal

TEXTS = Texts(__file__)

Affine = tuple[Tensor, float, int]
"""Whole numbers in int8, of the shape of x; scale; zero-point."""


def quantize_affine(x: Tensor, low: float, high: float, bits: int) -> Affine:
    """Quantize affinely: x ≈ scale × (q − zero_point), q from −2^(bits−1) to 2^(bits−1) − 1.

    Args:
        x: any shape; what lies outside of the range is clamped to it.
        low: lower end of the range, at most 0.
        high: upper end, at least 0.
        bits: from 2 to 8.

    Source: Jacob et al. 2018 (arXiv 1712.05877), section 2.1: r = S (q − Z), with Z a quantized value.
    """
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scale = (high - low) / (2**bits - 1)
    # low becomes the lowest number; rounded, since x = 0 must be exact.
    zero_point = lowest - round(low / scale)
    return ((x / scale).round() + zero_point).clamp(lowest, highest).to(torch.int8), scale, zero_point


def _affine_cases() -> Iterator[tuple[Any, ...]]:
    for seed, low, high, bits in ((1, -0.37, 2.9, 8), (2, -1.9, 0.61, 4), (3, -0.2, 4.3, 5)):
        # A standard deviation of 0.6 ranges about its middle: on both sides some values lie outside.
        yield (high - low) * 0.6 * normal(seed, 6, 7) + (high + low) / 2, low, high, bits


def _affine_trial(answer: Callable[..., Any], x: Tensor, low: float, high: float, bits: int) -> Tensor:
    """The whole numbers, the scale divided by the right one, the zero-point."""
    q, scale, zero_point = expect_several(answer(x.clone(), low, high, bits), "(q, scale, zero_point)", 3)
    q = expect_int8(q, "q", x.shape)
    try:
        pair = [float(scale) / quantize_affine(x, low, high, bits)[1], float(zero_point)]
    except (TypeError, ValueError, RuntimeError):
        raise TEXTS.wrong("affine", "not one number each") from None
    return torch.cat([q.flatten(), torch.tensor(pair, dtype=torch.float64)])


def _affine(
    zero: Callable[[int, float], float] = lambda lowest, shift: lowest - round(shift),
    rounding: Callable[[Tensor, float], Tensor] = lambda steps, zero_point: steps.round() + zero_point,
    ends: Callable[[int], tuple[int, int]] | None = lambda bits: (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1),
    step_offset: int = 1,
) -> Callable[..., tuple[Tensor, float, float]]:
    """A wrong way: zero-point, whole numbers, the ends they are clamped to, and steps = 2^bits − step_offset."""

    def way(x: Tensor, low: float, high: float, bits: int) -> tuple[Tensor, float, float]:
        scale = (high - low) / (2**bits - step_offset)
        zero_point = zero(-(2 ** (bits - 1)), low / scale)
        q = rounding(x / scale, zero_point)
        # By way of int64, which wraps around in int8; a float beyond int8 would give no defined number.
        return (q if ends is None else q.clamp(*ends(bits))).to(torch.int64).to(torch.int8), scale, zero_point

    return way


def _unsigned(lowest: int, shift: float) -> float:
    return -round(shift)


def _symmetric(x: Tensor, low: float, high: float, bits: int) -> Affine:
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scale = max(-low, high) / highest
    return (x / scale).round().clamp(lowest, highest).to(torch.int8), scale, 0


def _with_range(span: Callable[[float, float], float], fewer_steps: int = 0) -> Callable[..., Affine]:
    """Another length of the range; `fewer_steps`: divided by 2^bits − 1 − fewer_steps."""

    def way(x: Tensor, low: float, high: float, bits: int) -> Affine:
        lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        scale = span(low, high) / (2**bits - 1 - fewer_steps)
        zero_point = lowest - round(low / scale)
        return ((x / scale).round() + zero_point).clamp(lowest, highest).to(torch.int8), scale, zero_point

    return way


def _before_scaling(x: Tensor, low: float, high: float, bits: int) -> Affine:
    _, scale, zero_point = quantize_affine(x, low, high, bits)
    q = ((x - zero_point) / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return q.to(torch.int8), scale, zero_point


def _in_eight_bits(x: Tensor, low: float, high: float) -> Affine:
    return quantize_affine(x, low, high, 8)


def _third_second(x: Tensor, low: float, high: float, bits: int) -> tuple[Tensor, int, float]:
    q, scale, zero_point = quantize_affine(x, low, high, bits)
    return q, zero_point, scale


_OTHER_RANGE = TEXTS.sentence("affine", "a part of the range left out")
_UNSIGNED = TEXTS.sentence("affine", "whole numbers begin at 0")
_AFFINE_MISTAKES = (
    TEXTS.mistake("affine", "what lies outside of the range is not clamped", _affine(ends=None)),
    Mistake(_affine(zero=_unsigned, ends=lambda bits: (0, 2**bits - 1)), *_UNSIGNED),
    Mistake(_affine(zero=_unsigned), *_UNSIGNED),
    TEXTS.mistake(
        "affine", "the sign of the zero-point is wrong", _affine(zero=lambda lowest, shift: lowest + round(shift))
    ),
    TEXTS.mistake(
        "affine",
        "you subtract the zero-point from x / scale",
        _affine(rounding=lambda steps, zero_point: steps.round() - zero_point),
    ),
    TEXTS.mistake("affine", "you divide the range by 2^bits", _affine(step_offset=0)),
    TEXTS.mistake("affine", "that is the symmetric scheme", _symmetric),
    TEXTS.mistake(
        "affine",
        "you take the range from x itself",
        lambda x, low, high, bits: quantize_affine(x, min(float(x.min()), 0.0), max(float(x.max()), 0.0), bits),
    ),
    TEXTS.mistake(
        "affine",
        "the zero-point is not whole",
        _affine(lambda lowest, shift: lowest - shift, lambda steps, zero_point: (steps + zero_point).round()),
    ),
    TEXTS.mistake(
        "affine", "the whole numbers are truncated", _affine(rounding=lambda steps, zero_point: steps + zero_point)
    ),
    TEXTS.mistake("affine", "your zero-point is 0 whatever the range", _affine(zero=lambda lowest, shift: 0)),
    TEXTS.mistake(
        "affine", "you round the zero-point down", _affine(zero=lambda lowest, shift: lowest - math.floor(shift))
    ),
    TEXTS.mistake(
        "affine", "you truncate the zero-point", _affine(zero=lambda lowest, shift: lowest - math.ceil(shift))
    ),
    TEXTS.mistake("affine", "you take the zero-point away from x", _before_scaling),
    TEXTS.mistake(
        "affine",
        "the zero-point is never added to the whole numbers",
        _affine(rounding=lambda steps, zero_point: steps.round()),
    ),
    TEXTS.mistake(
        "affine",
        "you clamp from −2^(bits − 1) + 1",
        _affine(ends=lambda bits: (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1)),
    ),
    TEXTS.mistake("affine", "you clamp to −128 and 127 whatever bits is", _affine(ends=lambda bits: (-128, 127))),
    TEXTS.mistake(
        "affine", "you quantize to 8 bits whatever bits is", lambda x, low, high, bits: _in_eight_bits(x, low, high)
    ),
    *(
        Mistake(_with_range(span), *_OTHER_RANGE)
        for span in (lambda low, high: high, lambda low, high: max(-low, high), lambda low, high: -low)
    ),
    TEXTS.mistake(
        "affine",
        "you divide the range by 2^(bits − 1) − 1",
        _with_range(lambda low, high: (high - low) * 2, fewer_steps=1),
    ),
    TEXTS.mistake("affine", "scale and zero_point are swapped", _third_second),
)

AFFINE = TEXTS.exercise(
    "affine",
    quantize_affine,
    trial=_affine_trial,
    cases=_affine_cases,
    mistakes=_AFFINE_MISTAKES,
)


Quantized = tuple[Tensor, Tensor]
"""Whole numbers (O, I) in int8, scales (O, 1)."""


def quantize_rows(weight_OI: Tensor, bits: int) -> Quantized:
    """Quantize symmetrically per output: the largest magnitude of a row becomes 2^(bits − 1) − 1.

    Args:
        weight_OI: no row of which is zero.
        bits: from 2 to 8.

    Source: Gholami et al. 2021 (arXiv 2103.13630): symmetric quantization, restricted range, channelwise.
    """
    scale_O1 = weight_OI.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    # No clamp: by this scale no magnitude exceeds 2^(bits − 1) − 1.
    return (weight_OI / scale_O1).round().to(torch.int8), scale_O1


def _rows_cases() -> Iterator[tuple[Any, ...]]:
    """Rows of very different sizes, none of them centred."""
    for seed, outputs, inputs, bits in ((1, 4, 9, 8), (2, 7, 5, 4), (3, 5, 12, 3)):
        # From 0.01 to 10: with one scale for all, the smallest rows would be rounded to 0.
        sizes_O1 = 10 ** torch.linspace(-2, 1, outputs).unsqueeze(1)
        yield sizes_O1 * (normal(seed, outputs, inputs) - 0.4), bits


def _rows_trial(answer: Callable[..., Any], weight_OI: Tensor, bits: int) -> Tensor:
    """The whole numbers, then the scales, each divided by the right one."""
    q_OI, scale_O1 = expect_several(answer(weight_OI.clone(), bits), "(q, scale)", 2)
    q_OI = expect_int8(q_OI, "q", weight_OI.shape)
    wanted_O1 = quantize_rows(weight_OI, bits)[1]
    scale_O1 = expect_tensor(scale_O1, "scale", wanted_O1.shape).double()
    return torch.cat([q_OI.flatten(), (scale_O1 / wanted_O1).flatten()])


def _high(bits: int) -> int:
    return 2 ** (bits - 1) - 1


def _largest(weight: Tensor, bits: int) -> Tensor:
    return weight.abs().amax(1, keepdim=True) / _high(bits)


def _rows(
    scale: Callable[[Tensor, int], Tensor] = _largest,
    rounding: Callable[[Tensor], Tensor] = lambda steps: steps.round(),
    *,
    clamped: bool = False,
) -> Callable[[Tensor, int], Quantized]:
    """A wrong way: its scales, its whole numbers, and whether these are clamped."""

    def way(weight_OI: Tensor, bits: int) -> Quantized:
        scale_O1 = scale(weight_OI, bits)
        q_OI = rounding(weight_OI / scale_O1)
        q_OI = q_OI.clamp(-(2 ** (bits - 1)), _high(bits)) if clamped else q_OI
        return q_OI.to(torch.int64).to(torch.int8), scale_O1

    return way


def _scaled(key: str, scale: Callable[[Tensor, int], Tensor]) -> list[Mistake]:
    """A wrong scale, with whole numbers clamped or not."""
    return [TEXTS.mistake("rows", key, _rows(scale, clamped=clamped)) for clamped in (False, True)]


def _inverse(weight: Tensor, bits: int) -> Quantized:
    q, scale = quantize_rows(weight, bits)
    return q, 1 / scale


_NOT_LARGEST = TEXTS.sentence("rows", "your scale does not come from the largest magnitude")
_ROWS_MISTAKES = (
    TEXTS.mistake(
        "rows",
        "you use one scale for the whole matrix",
        _rows(lambda weight, bits: (weight.abs().max() / _high(bits)).expand(len(weight), 1)),
    ),
    *_scaled("you take the largest weight of a row", lambda weight, bits: weight.amax(1, keepdim=True) / _high(bits)),
    *_scaled("you divide by 2^(bits − 1)", lambda weight, bits: weight.abs().amax(1, keepdim=True) / 2 ** (bits - 1)),
    *_scaled(
        "you divide by 2^bits − 1, the number of steps",
        lambda weight, bits: weight.abs().amax(1, keepdim=True) / (2**bits - 1),
    ),
    *_scaled("you divide by 127 whatever bits is", lambda weight, bits: weight.abs().amax(1, keepdim=True) / 127),
    TEXTS.mistake(
        "rows", "you truncate towards zero, so every weight gets smaller", _rows(rounding=lambda steps: steps)
    ),
    TEXTS.mistake(
        "rows", "you round down, which shifts all weights the same way", _rows(rounding=lambda steps: steps.floor())
    ),
    TEXTS.mistake("rows", "scale is upside down", _inverse),
    *(
        Mistake(_rows(lambda weight, bits, size=size: size(weight) / _high(bits), clamped=clamped), *_NOT_LARGEST)  # type: ignore[misc]
        for size in (
            lambda weight: weight.abs().mean(1, keepdim=True),
            lambda weight: weight.abs().sum(1, keepdim=True),
            lambda weight: weight.amax(1, keepdim=True) - weight.amin(1, keepdim=True),
            lambda weight: weight.std(1, keepdim=True),
            lambda weight: weight.norm(dim=1, keepdim=True),
        )
        for clamped in (False, True)
    ),
    TEXTS.mistake(
        "rows", "you round up, which shifts all weights the same way", _rows(rounding=lambda steps: steps.ceil())
    ),
    *_scaled(
        "your scale comes from the smallest and the largest",
        lambda weight, bits: (weight.amax(1, keepdim=True) - weight.amin(1, keepdim=True)) / (2**bits - 1),
    ),
    *_scaled("you divide by 2^bits", lambda weight, bits: weight.abs().amax(1, keepdim=True) / 2**bits),
    *_scaled("you divide by the number of bits", lambda weight, bits: weight.abs().amax(1, keepdim=True) / bits),
)

ROWS = TEXTS.exercise(
    "rows",
    quantize_rows,
    trial=_rows_trial,
    cases=_rows_cases,
    mistakes=_ROWS_MISTAKES,
)


def fake_quantize(weight_OI: Tensor, scale_O1: Tensor, bits: int) -> Tensor:
    """Quantize weights and convert them back; the gradient passes except where they are clamped.

    Source: Bengio et al. 2013 (arXiv 1308.3432) for the estimator; Jacob et al. 2018 (arXiv 1712.05877) for training.
    """
    steps_OI = weight_OI / scale_O1
    # Forward this is steps_OI.round(); backward the difference is a constant, and the derivative 1.
    straight_OI = steps_OI + (steps_OI.round() - steps_OI).detach()
    return _clamped(straight_OI, bits) * scale_O1


def _clamped(q: Tensor, bits: int) -> Tensor:
    high = 2 ** (bits - 1) - 1
    return q.clamp(-high, high)


_VALUES, _GRADIENT = "values", "gradient"


def _straight_cases() -> Iterator[tuple[Any, ...]]:
    for seed, outputs, inputs, bits in ((1, 4, 10, 4), (2, 5, 8, 3)):
        scale_O1 = 0.1 + 0.5 * torch.rand(outputs, 1, generator=torch.Generator().manual_seed(seed))
        high = 2 ** (bits - 1) - 1
        steps_OI = high * 0.8 * normal(seed + 10, outputs, inputs)
        # These go one step outwards: so near the end, clamping before or after the rounding gives other gradients.
        between_OI = (steps_OI.abs() > high) & (steps_OI.abs() < high + 0.6)
        yield (steps_OI + steps_OI.sign() * between_OI) * scale_O1, scale_O1, bits, normal(seed + 20, outputs, inputs)


def _straight_trial(
    answer: Callable[..., Any], weight_OI: Tensor, scale_O1: Tensor, bits: int, weighting_OI: Tensor
) -> dict[str, Tensor]:
    """The values in steps, then the gradient of their weighted sum; what gets no gradient counts as zero."""
    leaf_OI = weight_OI.clone().requires_grad_()
    value = expect_tensor(answer(leaf_OI, scale_O1, bits), say(en="The result", fr="Le résultat"), weight_OI.shape)
    if not value.requires_grad:
        raise TEXTS.wrong("straight-through", "no link to the weights")
    # Weighted at random: by a gradient of ones, a wrong function of it may go unseen.
    gradient = gradient_of((value * weighting_OI).sum(), leaf_OI)
    gradient = torch.zeros_like(leaf_OI) if gradient is None else gradient
    return {_VALUES: (value.detach() / scale_O1).double(), _GRADIENT: gradient.double()}


def _plain(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    return _clamped((weight / scale).round(), bits) * scale


def _scaled_gradient(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    straight = fake_quantize(weight, scale, bits)
    # The value of straight, the gradient of straight / scale.
    return (straight / scale) + (straight - straight / scale).detach()


def _times_gradient(weight: Tensor, scale: Tensor, bits: int, factor: float) -> Tensor:
    straight = fake_quantize(weight, scale, bits)
    return factor * straight + ((1 - factor) * straight).detach()


def _rounded_gradient(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    straight = fake_quantize(weight, scale, bits)
    if straight.requires_grad:
        # What arrives at the rounding has been multiplied by the scale, and is divided by it afterwards.
        straight = (weight / scale).clone()
        straight.register_hook(lambda gradient: gradient.round())
        return _clamped(straight + (straight.round() - straight).detach(), bits) * scale
    return straight


def _times_rounded(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    steps = weight / scale
    if steps.requires_grad:
        rounded_steps = steps.detach().round()
        steps = steps * rounded_steps + (rounded_steps - steps * rounded_steps).detach()
    return _clamped(steps, bits) * scale


def _open_at_the_ends(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    high = float(_high(bits))
    steps = weight / scale
    # hardtanh has derivative 0 at the ends themselves, where clamp still has 1.
    return F.hardtanh(steps + (steps.round() - steps).detach(), -high, high) * scale


def _between(weight: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    steps = weight / scale
    return (steps + (steps.round() - steps).detach()).clamp(low, high) * scale


_OTHER_ENDS = TEXTS.sentence("straight-through", "other ends of the clamp")

STRAIGHT_THROUGH = TEXTS.exercise(
    "straight-through",
    fake_quantize,
    trial=_straight_trial,
    cases=_straight_cases,
    labels={
        _VALUES: Said("the values", "les valeurs"),
        _GRADIENT: Said("the gradient of the weights", "le gradient des poids"),
    },
    mistakes={
        "no gradient passes the rounding": _plain,
        "clamped weights get a gradient": lambda weight, scale, bits: (
            weight + (_plain(weight, scale, bits) - weight).detach()
        ),
        "nothing is clamped": lambda weight, scale, bits: weight + ((weight / scale).round() * scale - weight).detach(),
        "you return the whole numbers": lambda weight, scale, bits: fake_quantize(weight, scale, bits) / scale,
        "the gradient is divided by the scale": _scaled_gradient,
        "nothing is rounded": lambda weight, scale, bits: _clamped(weight / scale, bits) * scale,
        "backward doubles the gradient": lambda weight, scale, bits: _times_gradient(weight, scale, bits, 2.0),
        "backward rounds the gradient": _rounded_gradient,
        "you round down": lambda weight, scale, bits: _clamped((weight / scale).floor(), bits) * scale,
        "backward multiplies by the rounded value": _times_rounded,
        "no gradient at the largest number": _open_at_the_ends,
        "clamped at other ends": tuple(
            Mistake(
                lambda weight, scale, bits, ends=ends: _between(weight, scale, *ends(2 ** (bits - 1) - 1)),
                *_OTHER_ENDS,
            )
            for ends in (
                lambda high: (-high - 1, high),
                lambda high: (0, high),
                lambda high: (-2 * high - 1, 2 * high + 1),
                lambda high: (-high - 1, high + 1),
                lambda high: (-high, high + 1),
            )
        ),
        "you divide by the scale at the end": lambda weight, scale, bits: fake_quantize(weight, scale, bits) / scale**2,
        "you round the weights themselves": lambda weight, scale, bits: (
            fake_quantize(weight, scale * 0 + 1, bits) * scale
        ),
    },
)
