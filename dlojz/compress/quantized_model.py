"""Quantized model: packed weights, integer products and their speed.

The sum of products of integers is exact in int32; reals appear only where two scales turn it into an output. Seconds
are predicted from the teacher's layers and each pair of layers on its own. What is no linear layer (norms, positions,
convolutions) stays in float32.

Shape suffixes: M rows (samples × tokens), O outputs, I inputs; 1 stands for a grid shared along that dimension.

Source: Jacob et al. 2018 (arXiv 1712.05877), for integer-arithmetic-only products and the terms of the zero points;
Amdahl 1967, "Validity of the single processor approach to achieving large scale computing capabilities", for the speed.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal
from dlojz.compress.quantizers import (
    Observed,
    RangeChoice,
    Scheme,
    linear_layers,
    parameters_from_range,
    quantize,
    refuse_no_data,
    value_range,
    weight_grid,
)
from dlojz.compress.task import latencies


def pack(integers: Tensor, bits: int) -> Tensor:
    """Pack signed integers bit by bit into bytes, the lowest bit first; int8 itself where 8 bits are kept.

    Args:
        integers: int8, any shape, each from −2^(bits−1) to 2^(bits−1) − 1.
        bits: from 2 to 8.

    Returns:
        int8 of the same shape for 8 bits, else uint8 of ⌈n·bits / 8⌉ bytes.
    """
    if bits == 8:
        return integers
    unsigned = integers.flatten().to(torch.int32) + 2 ** (bits - 1)  # shifted to begin at 0
    # (n, 1) >> (bits,) → (n, bits), a bit each, the lowest first.
    stream = ((unsigned.unsqueeze(1) >> torch.arange(bits, device=integers.device)) & 1).flatten()
    stream = torch.nn.functional.pad(stream, (0, -len(stream) % 8)).reshape(-1, 8)  # up to 7 zeros, to whole bytes
    return (stream << torch.arange(8, device=integers.device)).sum(dim=1).to(torch.uint8)


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
    """Test whether torch's integer kernel for this CPU sums products of 8 bits exactly.

    A CPU without VNNI sums pairs of products in 16 bits, after adding 128 to the left side: 127 becomes 255, and two
    products of 255 with 127 or −128 do not fit, while −128 becomes 0 and always does.
    """
    # (16, 64): eight rows of 127, then eight of −128.
    largest_MI = (
        torch.tensor([127, -128], dtype=torch.int8).repeat_interleave(8).unsqueeze(1).expand(16, 64).contiguous()
    )
    expected_MM = largest_MI.int() @ largest_MI.int().t()
    try:
        return torch.equal(torch._int_mm(largest_MI, largest_MI.t()), expected_MM)
    except RuntimeError:  # torch has no such kernel here
        return False


def takes_integer_kernel(left_MI: Tensor, right_OI: Tensor) -> bool:
    """Tell whether `integer_product` multiplies integers as such.

    On a CPU if its kernel is exact, on a GPU if M > 16 and I and O are multiples of 8, as its kernel demands.
    """
    if left_MI.is_cuda:
        shape = (*left_MI.shape[1:], len(right_OI))  # I and O
        return len(left_MI) >= _LEAST_CUDA_ROWS and not any(length % _CUDA_MULTIPLE for length in shape)
    return left_MI.device.type == "cpu" and kernel_is_exact()


def integer_product(left_MI: Tensor, right_OI: Tensor) -> Tensor:
    """Multiply int8 matrices, ``left @ right.T``, exact in int32 for up to 131,071 products a sum.

    By torch's integer kernel where `takes_integer_kernel` says so; else in float64, whose 53 bits hold all of them.
    """
    if takes_integer_kernel(left_MI, right_OI):
        return torch._int_mm(left_MI.contiguous(), right_OI.contiguous().t())
    return (left_MI.double() @ right_OI.double().t()).to(torch.int32)


class QuantizedLinear(nn.Module):
    """Linear layer that keeps integers for weights.

    Its scales and its bias are parameters and can be trained; its integers are buffers and cannot.

    Args:
        linear: the layer whose weights are quantized; it is not changed.
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
            raise refusal(
                en="activation_range was given, but only static inputs have a grid fixed beforehand, and "
                f"activations is {activations!r}: leave it out, or use activations='static'.",
                fr="activation_range a été donné, or seules des entrées statiques ont une grille fixée d’avance, "
                f"et activations vaut {activations!r} : retirez-le, ou prenez activations='static'.",
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
        # The scale after the product: a number for each output, and not for each weight.
        return (x_MI @ whole_OI.t()) * self.scale_O1.flatten()

    def quantized_inputs(self, x_MI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantize inputs ``(M, I)``; with scales and zero points, ``(M, 1)`` or ``(1, 1)``."""
        if self.activations == "static":
            integers = quantize(x_MI, self.input_scale, self.input_zero, STATIC_SCHEME)
            return integers, self.input_scale, self.input_zero
        scale_M1, zero_M1 = parameters_from_range(*value_range(x_MI, ROW_SCHEME), ROW_SCHEME)
        return quantize(x_MI, scale_M1, zero_M1, ROW_SCHEME), scale_M1, zero_M1

    def _integer_inputs(self, x_MI: Tensor) -> Tensor:
        # Σ (a − z_a)(w − z_w) = Σ a·w − z_a Σ w − z_w Σ a + I·z_a·z_w: four sums of integers, each exact.
        inputs_MI, input_scale, input_zero = self.quantized_inputs(x_MI)
        sum_MO = integer_product(inputs_MI, self.integers_OI)
        # Dynamic inputs are symmetric: their zero point is 0.
        if self.activations == "static":
            sum_MO = sum_MO - input_zero * self.integers_OI.sum(dim=1, dtype=torch.int32)
        if not self.scheme.symmetric:
            # Σ a − I·z_a of each row, (M, 1): what z_w is multiplied by.
            row_M1 = inputs_MI.sum(dim=1, keepdim=True, dtype=torch.int32) - self.in_features * input_zero
            sum_MO = sum_MO - row_M1 * self.zero_O1.flatten()
        # Reals from here on: (M, O) × (M, 1) × (O,).
        return (sum_MO.to(torch.float32) * input_scale) * self.scale_O1.flatten()


def replace_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> nn.Module:
    """Copy a model with some modules replaced, in evaluation mode.

    Args:
        model: not changed.
        layers: by the path of the name that they take.
    """
    changed = copy.deepcopy(model)
    for name, layer in layers.items():
        parent, _, attribute = name.rpartition(".")
        setattr(changed.get_submodule(parent), attribute, layer)
    return changed.eval()


def quantize_model(
    model: nn.Module,
    scheme: Scheme,
    *,
    choice: RangeChoice = "min_max",
    activations: Activations = "float",
    activation_choice: RangeChoice = "min_max",
    observed: Mapping[str, Observed] | None = None,
) -> nn.Module:
    """Copy a model with its linear layers replaced by `QuantizedLinear`.

    Args:
        model: not changed.
        choice: how the range of the weights is chosen.
        activations: what the inputs of these layers become.
        activation_choice: how the range of static inputs is chosen.
        observed: what calibration has seen; needed for static inputs.

    Raises:
        LabError: for static inputs without calibration, or with one that has not seen all layers.
    """
    if activations == "static":
        _check_seen(linear_layers(model), observed)
    return replace_layers(
        model,
        {
            name: QuantizedLinear(
                linear,
                scheme,
                choice=choice,
                activations=activations,
                activation_range=observed[name].range(STATIC_SCHEME, activation_choice)
                if activations == "static" and observed is not None
                else None,
            )
            for name, linear in linear_layers(model).items()
        },
    )


def _check_seen(layers: Iterable[str], observed: Mapping[str, Observed] | None) -> None:
    if not observed:
        refuse_no_data()
    unseen = [name for name in layers if name not in (observed or {})]
    if unseen:
        raise refusal(
            en=f"calibration has not seen {len(unseen)} of the linear layers, {unseen[0]} first, and their static "
            "grid is fixed by what it sees: observe(model, images) without names watches all of them.",
            fr=f"le calibrage n’a pas observé {len(unseen)} des couches linéaires, à commencer par {unseen[0]}, or "
            "leur grille statique se fixe d’après lui : observe(model, images) sans noms les observe toutes.",
        )


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Find the layers of a model that keep integers, by the path of their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def stored_integers(model: nn.Module) -> dict[str, Tensor]:
    """List what a file keeps: packed integers, scales, zero points that are not 0, and the rest as it is."""
    layers = quantized_layers(model)
    # The tensors of quantized layers follow below, in the form of a file.
    tensors = {
        name: tensor.detach().contiguous()
        for name, tensor in model.state_dict().items()
        if name.rpartition(".")[0] not in layers
    }
    for name, layer in layers.items():
        tensors[f"{name}.weight"] = pack(layer.integers_OI, layer.scheme.bits)
        tensors[f"{name}.scale"] = layer.scale_O1.detach()
        if not layer.scheme.symmetric:
            tensors[f"{name}.zero_point"] = layer.zero_O1.to(torch.int8)
        if layer.bias is not None:
            tensors[f"{name}.bias"] = layer.bias.detach()
        if layer.activations == "static":
            tensors[f"{name}.input_scale"] = layer.input_scale
            tensors[f"{name}.input_zero_point"] = layer.input_zero.to(torch.int8)
    return tensors


ROUNDS = 5
Shares = tuple[dict[str, float], dict[str, torch.Size]]
"""By the name of a linear layer: its share of an answer's time, and the shape of its input."""
_KNOWN: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], Shares]] = WeakKeyDictionary()


@dataclass(frozen=True)
class SpeedForecast:
    """Forecast of a quantized model's speed from its parts.

    Args:
        share: of the teacher's time that its linear layers take, from 0 to 1.
        kernel_ratio: seconds of all quantized layers over those of the teacher's.
        latency_ratio: seconds of the quantized model over the teacher's, 1 − share + share × kernel_ratio.
    """

    share: float
    kernel_ratio: float
    latency_ratio: float


@torch.inference_mode()
def layer_shares(teacher: nn.Module, images_NCHW: Tensor, rounds: int = ROUNDS) -> Shares:
    """Measure the share of an answer's time that each linear layer takes, and the shape of its input; on a CPU.

    All shares are those of one answer, and so add up: of all rounds the one whose linear layers together took the
    middle share, since an interruption makes the share of a round too large or too small, and seldom that of most.

    Args:
        teacher: in evaluation mode.
        rounds: answers, after one that is not timed.
    """
    started_s: dict[str, float] = {}
    seconds: dict[str, float] = {}
    shapes: dict[str, torch.Size] = {}

    def begin(name: str) -> Any:
        return lambda module, inputs: started_s.__setitem__(name, time.perf_counter())

    def end(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started_s[name]
            shapes[name] = inputs[0].shape

        return hook

    teacher(images_NCHW)  # not timed: the first answer is slower
    round_shares: list[dict[str, float]] = []
    hooks = []
    for name, linear in linear_layers(teacher).items():
        hooks += [linear.register_forward_pre_hook(begin(name)), linear.register_forward_hook(end(name))]
    try:
        for _ in range(rounds):
            seconds.clear()
            start_s = time.perf_counter()
            teacher(images_NCHW)
            whole_s = time.perf_counter() - start_s
            round_shares.append({name: own_s / whole_s for name, own_s in seconds.items()})
    finally:
        for hook in hooks:
            hook.remove()
    return sorted(round_shares, key=lambda shares: sum(shares.values()))[len(round_shares) // 2], shapes


def known_shares(teacher: nn.Module, images_NCHW: Tensor, rounds: int = ROUNDS) -> Shares:
    """Cache `layer_shares` by teacher, shape of batch, threads and rounds; forgotten with the teacher."""
    key = (images_NCHW.shape, images_NCHW.dtype, torch.get_num_threads(), rounds)
    shares_by_key = _KNOWN.setdefault(teacher, {})
    if key not in shares_by_key:
        shares_by_key[key] = layer_shares(teacher, images_NCHW, rounds)
    return shares_by_key[key]


def speed_forecast(
    teacher: nn.Module, quantized: nn.Module, images_NCHW: Tensor, rounds: int = ROUNDS
) -> SpeedForecast:
    """Apply Amdahl's law with measured kernels.

    Args:
        teacher: in evaluation mode, on a CPU.
        quantized: its layers bear the teacher's names and work in float32; those of the same shape are timed once.
        images_NCHW: the batch that will be timed.
    """
    shares, shapes = known_shares(teacher, images_NCHW, rounds)
    layers = linear_layers(teacher)
    ratios: dict[tuple[torch.Size, torch.Size], float] = {}
    before = after = 0.0
    for name, part in shares.items():
        key = (shapes[name], layers[name].weight.shape)
        if key not in ratios:
            pair = [layers[name], quantized.get_submodule(name)]
            ratios[key] = latencies(pair, torch.randn(shapes[name], device=images_NCHW.device), rounds)[1].ratio
        before += part
        after += part * ratios[key]
    kernel_ratio = after / before if before else 1.0
    return SpeedForecast(before, kernel_ratio, 1 - before + after)


def decibels(signal_power: float, noise_power: float) -> float:
    """Compute 10·log₁₀ of a ratio of powers; infinite where there is no noise."""
    return math.inf if noise_power == 0 else 10 * math.log10(signal_power / noise_power)
