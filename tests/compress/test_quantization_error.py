"""The noise of rounding: foreseen from the steps alone, within the bounds in which its assumptions hold."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from dlojz.compress.quantized_model import (
    Activations,
    QuantizedLinear,
    decibels,
    layer_error,
    predicted_sqnr_db,
    sqnr_db,
)
from dlojz.compress.quantizers import Scheme


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(256, 128)


def inputs() -> torch.Tensor:
    return torch.randn(400, 256, generator=torch.Generator().manual_seed(1))


def test_decibels() -> None:
    signal = torch.tensor([3.0, -4.0])
    assert sqnr_db(signal, signal + torch.tensor([0.05, 0.0])) == pytest.approx(10 * math.log10(25 / 0.0025))
    assert sqnr_db(signal, signal) == math.inf
    assert decibels(2.0, 1.0) == pytest.approx(3.0103, abs=1e-4)


@pytest.mark.parametrize("bits", [3, 4, 6, 8])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("activations", ["float", "dynamic", "static"])
def test_layer_error_noise_is_a_twelfth_of_a_squared_step(
    bits: int, per_channel: bool, activations: Activations
) -> None:
    linear, x = layer(), inputs()
    allowed = (x.min().reshape(1, 1), x.max().reshape(1, 1)) if activations == "static" else None
    quantized = QuantizedLinear(
        linear, Scheme(bits, True, per_channel), activations=activations, activation_range=allowed
    )
    found = layer_error("one", linear, quantized, x)
    assert found.predicted_sqnr_db is not None and found.bits == bits
    # 128 × 256 errors are averaged: 0.4 dB is 10 % of a power, at 3 bits the errors are no longer quite uniform.
    assert found.measured_sqnr_db == pytest.approx(found.predicted_sqnr_db, abs=0.4)


def test_predicted_sqnr_db_gains_six_decibels_by_a_bit() -> None:
    linear, x = layer(), inputs()
    found = [predicted_sqnr_db(linear, x, Scheme(bits)) for bits in (4, 5, 6, 7)]
    # Steps are (2^bits − 1)-ths of the range: a bit divides them by a little more than 2.
    assert all(6.0 < later - earlier < 6.6 for earlier, later in itertools.pairwise(found))


def test_layer_error_does_not_foresee_what_is_clamped() -> None:
    linear, x = layer(), inputs()
    linear.weight.data[0, :8] *= 40  # outliers, fewer than one weight in a thousand
    scheme = Scheme(8, True, per_channel=False)
    quantized = QuantizedLinear(linear, scheme, choice="percentile")
    found = layer_error("one", linear, quantized, x, "percentile")
    assert found.predicted_sqnr_db is not None
    assert found.measured_sqnr_db < found.predicted_sqnr_db - 1
