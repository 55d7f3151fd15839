"""How much a layer's answer suffers from rounding: foreseen from the steps of its grids, and measured.

Layer 2. Invariant: what is foreseen needs the teacher's layer and its inputs only; no integer is computed for it.

Shape suffixes: M rows (samples × tokens), O outputs, I inputs.

Source: Bennett 1948, "Spectra of Quantized Signals", for errors of rounding that are uniform over a step Δ and
independent of each other, hence of variance Δ²/12; the sum over a layer's products is ours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dlojz.compress.int8_linear import ROW_SCHEME, QuantizedLinear
from dlojz.compress.method import LayerError
from dlojz.compress.quantizers import RangeChoice, Scheme, parameters_from_range, value_range, weight_grid


def sqnr_db(signal: Tensor, approximation: Tensor) -> float:
    """Signal to quantization noise in decibels: 10·log₁₀(mean square of the signal / mean square of the error)."""
    noise = (approximation - signal).double().square().mean()
    return decibels(float(signal.double().square().mean()), float(noise))


def decibels(signal_power: float, noise_power: float) -> float:
    """10·log₁₀ of a ratio of powers; infinite where there is no noise."""
    return math.inf if noise_power == 0 else 10 * math.log10(signal_power / noise_power)


@torch.no_grad()
def predicted_sqnr_db(
    linear: nn.Linear,
    inputs_MI: Tensor,
    scheme: Scheme,
    choice: RangeChoice = "min_max",
    input_step: Tensor | None = None,
) -> float:
    """Signal to noise of a quantized layer's outputs, before any of it is quantized.

    A weight's error has the variance Δ_o²/12 and meets an input; an input's error has Δ_x²/12 and meets a weight. With
    independent errors the noise of output o in row m is Δ_o²/12 · ‖x_m‖² + Δ_m²/12 · ‖w_o‖², averaged here over both.
    What is clamped is no part of it, nor is a grid so coarse that most values fall on one point.

    Args:
        linear: the teacher's layer.
        inputs_MI: what enters it.
        scheme: of its weights.
        choice: how their range is chosen.
        input_step: Δ of the inputs' grid, ``(M, 1)`` or ``(1, 1)``; None where they stay real.
    """
    weight_OI = linear.weight.double()
    step_O1, _ = weight_grid(linear.weight, scheme, choice)
    noise = step_O1.double().square().mean() / 12 * inputs_MI.double().square().sum(1).mean()
    if input_step is not None:
        noise = noise + input_step.double().square().mean() / 12 * weight_OI.square().sum(1).mean()
    return decibels(float(linear(inputs_MI).double().square().mean()), float(noise))


def input_step(inputs_MI: Tensor, layer: QuantizedLinear) -> Tensor | None:
    """The step of the grid that a layer's inputs are put on; None where they stay real."""
    if layer.activations == "float":
        return None
    if layer.activations == "static":
        return layer.input_scale
    return parameters_from_range(*value_range(inputs_MI, ROW_SCHEME), ROW_SCHEME)[0]


@torch.no_grad()
def layer_error(
    name: str,
    linear: nn.Linear,
    layer: QuantizedLinear,
    inputs_MI: Tensor,
    choice: RangeChoice = "min_max",
) -> LayerError:
    """One layer's signal to noise, foreseen and measured, both with the inputs that the teacher gives it."""
    return LayerError(
        name=name,
        predicted_sqnr_db=predicted_sqnr_db(linear, inputs_MI, layer.scheme, choice, input_step(inputs_MI, layer)),
        measured_sqnr_db=sqnr_db(linear(inputs_MI), layer(inputs_MI)),
        bits=layer.scheme.bits,
    )
