"""Quantization-aware training: layers that see their weights rounded while these learn.

Such a layer gives, after every update, the very output that its integers will give; only its gradient pretends that
rounding is not there.

Source: Jacob et al. 2018 (arXiv 1712.05877) for simulated quantization; Bengio et al. 2013 (arXiv 1308.3432) for the
straight-through estimator.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.compress.quantized_model import QuantizedLinear, replace_layers
from dlojz.compress.quantizers import (
    RangeChoice,
    Scheme,
    channels,
    fake_quantize,
    linear_layers,
    parameters_from_range,
    value_range,
)


class StraightThrough(torch.autograd.Function):
    """Round forward; backward, pass the gradient of what was not clamped.

    Rounding is flat almost everywhere: its true derivative is 0, and nothing would be learnt. Its place is taken by 1
    where round(x / scale) + zero point is one of the integers, by 0 where it was clamped.

    Source: Bengio et al. 2013 (arXiv 1308.3432).
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: Tensor, zero_point: Tensor, scheme: Scheme) -> Tensor:
        # Where a value was not clamped: these booleans are all that backward reads.
        integers = torch.round(values * (1.0 / scale)) + zero_point
        ctx.save_for_backward((integers >= scheme.quant_min) & (integers <= scheme.quant_max))
        return fake_quantize(values, scale, zero_point, scheme)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inside,) = ctx.saved_tensors
        return gradient * inside, None, None, None  # none for scale, zero point and scheme


def straight_through(values: Tensor, scale: Tensor, zero_point: Tensor, scheme: Scheme) -> Tensor:
    """Apply `fake_quantize` with the gradient of `StraightThrough`."""
    quantized: Tensor = StraightThrough.apply(values, scale, zero_point, scheme)
    return quantized


class QuantizationAwareLinear(nn.Module):
    """Linear layer whose weights are real and whose products see them rounded.

    The grid follows the weights: its range is the fraction of their extremes that was best for the teacher's weights
    (1 for `min_max`, and for an end that was 0), taken anew at every step.

    Args:
        linear: where its weights start; not changed.
        choice: how their range is chosen.
    """

    def __init__(self, linear: nn.Linear, scheme: Scheme, choice: RangeChoice = "min_max") -> None:
        super().__init__()
        self.scheme = scheme
        self.weight = nn.Parameter(linear.weight.detach().clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())
        values_CV = channels(linear.weight.detach(), scheme)
        full_range, chosen = value_range(values_CV, scheme), value_range(values_CV, scheme, choice)
        # An end at 0 has no fraction: 1 lets a channel that is nothing yet become something.
        fractions = [
            torch.where(all_of_it == 0, 1.0, part / all_of_it)
            for part, all_of_it in zip(chosen, full_range, strict=True)
        ]
        self.register_buffer("fractions_2C1", torch.stack(fractions), persistent=False)  # not in a file

    fractions_2C1: Tensor

    def grid(self) -> tuple[Tensor, Tensor]:
        """Compute scale and zero point for the weights as they are now."""
        # No gradient: the grid follows the weights and is not learnt.
        low_C1, high_C1 = value_range(channels(self.weight.detach(), self.scheme), self.scheme)
        return parameters_from_range(low_C1 * self.fractions_2C1[0], high_C1 * self.fractions_2C1[1], self.scheme)

    def forward(self, x: Tensor) -> Tensor:
        """``(…, in_features)`` to ``(…, out_features)``."""
        return F.linear(x, straight_through(self.weight, *self.grid(), self.scheme), self.bias)

    def frozen(self) -> QuantizedLinear:
        """Convert to the layer of integers that it has become."""
        linear = nn.Linear(self.weight.shape[1], self.weight.shape[0], bias=self.bias is not None)
        linear.weight, linear.bias = self.weight, self.bias
        return QuantizedLinear(linear, self.scheme, grid=self.grid())


def prepare(model: nn.Module, scheme: Scheme, choice: RangeChoice = "min_max") -> nn.Module:
    """Copy a model with its linear layers replaced by `QuantizationAwareLinear`, to be trained."""
    return replace_layers(
        model,
        {name: QuantizationAwareLinear(linear, scheme, choice) for name, linear in linear_layers(model).items()},
    )


def convert(model: nn.Module) -> nn.Module:
    """Copy a model so trained, with the integers that its weights have become."""
    return replace_layers(
        model,
        {name: layer.frozen() for name, layer in model.named_modules() if isinstance(layer, QuantizationAwareLinear)},
    )
