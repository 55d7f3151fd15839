"""A linear layer whose weights are integers, and whose products are too where its inputs are.

Layer 2. Invariant: the sum of products of integers is exact in int32; reals appear only in the last line, where two
scales turn it into an output. Nothing else of the layer is real but its bias.

Written for CPUs and GPUs, but run and tested on CPUs only: what is said here of CUDA was read in torch's own checks of
`_int_mm`, and nothing of it has ever run on a GPU.

Shape suffixes: M rows (samples × tokens), O outputs, I inputs; 1 stands for a grid shared along that dimension.

Source: Jacob et al. 2018 (arXiv 1712.05877), for integer-arithmetic-only products and the terms of the zero points.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from dlojz.compress.calibration import refuse_no_data
from dlojz.compress.quantizers import RangeChoice, Scheme, parameters_from_range, quantize, value_range, weight_grid
from dlojz.schema import LabError, one_of
from dlojz.text import say

Activations = Literal["float", "dynamic", "static"]
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)
"""Inputs of a layer: real numbers; integers on a grid that each row finds for itself; integers on a grid fixed by
calibration."""
ROW_SCHEME = Scheme(bits=8, symmetric=True, per_channel=True)
"""Of inputs whose grid is found row by row."""
STATIC_SCHEME = Scheme(bits=8, symmetric=False, per_channel=False)
"""Of inputs whose grid was calibrated: affine, for what leaves a GELU lies mostly on one side of zero."""
_LEAST_CUDA_ROWS = 17
_CUDA_MULTIPLE = 8


@lru_cache(maxsize=1)
def kernel_is_exact() -> bool:
    """Whether torch's integer kernel for this CPU sums products of 8 bits without losing any.

    A CPU without VNNI sums pairs of products in 16 bits, after adding 128 to the left side: 127 becomes 255, and two
    products of 255 with 127 or −128 do not fit, while −128 becomes 0 and always does.
    """
    largest_MI = (
        torch.tensor([127, -128], dtype=torch.int8).repeat_interleave(8).unsqueeze(1).expand(16, 64).contiguous()
    )
    expected_MM = largest_MI.int() @ largest_MI.int().t()
    try:
        return torch.equal(torch._int_mm(largest_MI, largest_MI.t()), expected_MM)
    except RuntimeError:
        return False


def takes_integer_kernel(left_MI: Tensor, right_OI: Tensor) -> bool:
    """Whether `integer_product` multiplies integers as such: on a CPU if its kernel is exact, on a GPU if M > 16 and I
    and O are multiples of 8, as its kernel demands.
    """
    if left_MI.is_cuda:
        shape = (*left_MI.shape[1:], len(right_OI))
        return len(left_MI) >= _LEAST_CUDA_ROWS and not any(length % _CUDA_MULTIPLE for length in shape)
    return left_MI.device.type == "cpu" and kernel_is_exact()


def integer_product(left_MI: Tensor, right_OI: Tensor) -> Tensor:
    """``left @ right.T`` of int8 matrices, exact in int32 for up to 131,071 products a sum.

    By torch's integer kernel where `takes_integer_kernel` says so; else in float64, whose 53 bits hold all of them.
    """
    if takes_integer_kernel(left_MI, right_OI):
        return torch._int_mm(left_MI.contiguous(), right_OI.contiguous().t())
    return (left_MI.double() @ right_OI.double().t()).to(torch.int32)


class QuantizedLinear(nn.Module):
    """A linear layer that keeps integers for weights.

    Its scales and its bias are parameters and can be trained; its integers are buffers and cannot.

    Args:
        linear: the layer whose weights are quantized; it is not changed.
        scheme: of the weights.
        choice: how the range of the weights is chosen.
        activations: what its inputs become before the product.
        activation_range: lowest and highest input that calibration allows for; only for `static`.
        grid: scale and zero point of the weights where they are known already, in the place of `choice`.

    Raises:
        LabError: for another kind of activations, `static` without a range, or a range without `static`.

    Source: Jacob et al. 2018 (arXiv 1712.05877).
    """

    def __init__(
        self,
        linear: nn.Linear,
        scheme: Scheme,
        *,
        choice: RangeChoice = "min_max",
        activations: Activations = "float",
        activation_range: tuple[Tensor, Tensor] | None = None,
        grid: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__()
        if activations not in ACTIVATIONS:
            raise LabError(one_of("activations", activations, ACTIVATIONS))
        if activations == "static" and activation_range is None:
            refuse_no_data()
        if activations != "static" and activation_range is not None:
            raise LabError(
                say(
                    en="activation_range was given, but only static inputs have a grid fixed beforehand, and "
                    f"activations is {activations!r}: leave it out, or use activations='static'.",
                    fr="activation_range a été donné, or seules des entrées statiques ont une grille fixée d’avance, "
                    f"et activations vaut {activations!r} : retirez-le, ou prenez activations='static'.",
                )
            )
        self.scheme, self.activations = scheme, activations
        self.out_features, self.in_features = linear.weight.shape
        scale_O1, zero_O1 = grid or weight_grid(linear.weight, scheme, choice)
        self.scale_O1 = nn.Parameter(scale_O1)
        self.register_buffer("zero_O1", zero_O1)
        self.register_buffer("integers_OI", quantize(linear.weight.detach(), scale_O1, zero_O1, scheme))
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())
        if activation_range is not None:
            scale, zero = parameters_from_range(*activation_range, STATIC_SCHEME)
            self.register_buffer("input_scale", scale.reshape(1, 1))
            self.register_buffer("input_zero", zero.reshape(1, 1))

    integers_OI: Tensor
    zero_O1: Tensor
    input_scale: Tensor
    input_zero: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """``(…, in_features)`` to ``(…, out_features)``."""
        x_MI = x.reshape(-1, self.in_features)
        y_MO = self._real_inputs(x_MI) if self.activations == "float" else self._integer_inputs(x_MI)
        if self.bias is not None:
            y_MO = y_MO + self.bias
        return y_MO.reshape(*x.shape[:-1], self.out_features)

    def _real_inputs(self, x_MI: Tensor) -> Tensor:
        whole_OI = self.integers_OI.to(x_MI.dtype)
        if not self.scheme.symmetric:
            whole_OI = whole_OI - self.zero_O1
        return (x_MI @ whole_OI.t()) * self.scale_O1.flatten()

    def quantized_inputs(self, x_MI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Integers of the inputs ``(M, I)``, with their scales and zero points, ``(M, 1)`` or ``(1, 1)``."""
        if self.activations == "static":
            integers = quantize(x_MI, self.input_scale, self.input_zero, STATIC_SCHEME)
            return integers, self.input_scale, self.input_zero
        scale_M1, zero_M1 = parameters_from_range(*value_range(x_MI, ROW_SCHEME), ROW_SCHEME)
        return quantize(x_MI, scale_M1, zero_M1, ROW_SCHEME), scale_M1, zero_M1

    def _integer_inputs(self, x_MI: Tensor) -> Tensor:
        # Σ (a − z_a)(w − z_w) = Σ a·w − z_a Σ w − z_w Σ a + I·z_a·z_w: four sums of integers, each exact.
        inputs_MI, input_scale, input_zero = self.quantized_inputs(x_MI)
        sum_MO = integer_product(inputs_MI, self.integers_OI)
        if self.activations == "static":
            sum_MO = sum_MO - input_zero * self.integers_OI.sum(dim=1, dtype=torch.int32)
        if not self.scheme.symmetric:
            row_M1 = inputs_MI.sum(dim=1, keepdim=True, dtype=torch.int32) - self.in_features * input_zero
            sum_MO = sum_MO - row_M1 * self.zero_O1.flatten()
        return (sum_MO.to(torch.float32) * input_scale) * self.scale_O1.flatten()

    def dequantized(self) -> Tensor:
        """The weights as real numbers, ``(O, I)``."""
        return (self.integers_OI.to(torch.float32) - self.zero_O1) * self.scale_O1.detach()
