"""Quantization of a model after its training, or while it trains; ours, which can be read, and the libraries', fast.

A layer of quantization-aware training gives, after every update, the very output that its integers will give; only its
gradient pretends that rounding is not there. Calibration and fine-tuning see training images only.

Source: Jacob et al. 2018 (arXiv 1712.05877) for simulated quantization; Nagel et al. 2021 (arXiv 2106.08295); Bengio
et al. 2013 (arXiv 1308.3432) for the straight-through estimator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.base.language import say
from dlojz.compress.method import LayerError, Shrunk, Start
from dlojz.compress.quantized_model import (
    Activations,
    QuantizedLinear,
    kernel_is_exact,
    layer_error,
    predicted_quantized_bytes,
    quantize_model,
    quantized_layers,
    replace_layers,
    speed_forecast,
    sqnr_db,
    stored_integers,
)
from dlojz.compress.quantizers import (
    RangeChoice,
    Scheme,
    channels,
    fake_quantize,
    linear_layers,
    observe,
    parameters_from_range,
    refuse_no_data,
    value_range,
)
from dlojz.compress.task import Settings, fit, parameters
from dlojz.compress.torchao import (
    Form,
    Narrow,
    fits_int4,
    predicted_torchao_bytes,
    stored_torch_dynamic,
    stored_torchao,
    torch_dynamic_model,
    torchao_model,
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


_ERROR_SAMPLES = 64


def _shrunk(
    start: Start,
    model: nn.Module,
    scheme: Scheme,
    layer_errors: tuple[LayerError, ...],
    activations: Activations = "float",
) -> Shrunk:
    return Shrunk(
        model=model,
        stored=stored_integers(model),
        predicted_bytes=predicted_quantized_bytes(start.teacher, scheme, activations),
        parameters=parameters(start.teacher),
        layer_errors=layer_errors,
        notes=(_note(activations),),
        predicted_latency_ratio=_latency_ratio(start, model),
    )


def _latency_ratio(start: Start, model: nn.Module) -> float:
    return speed_forecast(start.teacher, model, start.timed_batch).latency_ratio


def _note(activations: Activations) -> str:
    if activations == "float":
        return say(
            en="integers become real numbers again at every call: bytes are saved, no time.",
            fr="les entiers redeviennent des réels à chaque appel : on gagne des octets, pas de temps.",
        )
    if not kernel_is_exact():
        return say(
            en="torch's integer kernel loses sums on this processor, which has no VNNI instructions: the products are "
            "taken in float64, exact and slower, and no time is saved.",
            fr="sur ce processeur sans instructions VNNI, le noyau entier de torch perd des sommes : les produits se "
            "font en float64, exacts mais plus lents, et on ne gagne pas de temps.",
        )
    return say(
        en="written to be read: the product is torch's integer kernel, but rounding its inputs takes several plain "
        "operations, so that only wide layers gain time.",
        fr="écrit pour être lu : le produit est le noyau entier de torch, mais arrondir ses entrées demande plusieurs "
        "opérations ordinaires, si bien que seules les couches larges gagnent du temps.",
    )


def post_training(
    start: Start,
    *,
    bits: int,
    symmetric: bool,
    per_channel: bool,
    weight_range: RangeChoice,
    activations: Activations,
    activation_range: RangeChoice = "min_max",
    samples: int = _ERROR_SAMPLES,
) -> Shrunk:
    """Quantize a trained model as it is, without any training.

    Args:
        bits: of a weight, from 2 to 8.
        symmetric: without zero points.
        per_channel: a scale for each output of a layer.
        weight_range: how the range of the weights is chosen.
        activations: `float`, `dynamic` or `static`.
        activation_range: how the range of static inputs is chosen.
        samples: training images that calibrate, and that the errors of the layers are measured on.

    Raises:
        LabError: for static inputs with 0 samples, or illegal settings.
    """
    scheme = Scheme(bits, symmetric, per_channel)
    if samples == 0:
        refuse_no_data()
    # What enters each layer of the teacher, on training images.
    observations = observe(start.teacher, start.task.few(samples).inputs_NCHW)
    model = quantize_model(
        start.teacher,
        scheme,
        choice=weight_range,
        activations=activations,
        activation_choice=activation_range,
        observed=observations,
    )
    originals = linear_layers(start.teacher)
    # Each layer is fed by the teacher: the error of one does not reach the next.
    errors = (
        layer_error(name, originals[name], layer, observations[name].inputs_MI, weight_range)
        for name, layer in quantized_layers(model).items()
    )
    return _shrunk(start, model, scheme, tuple(errors), activations)


def post_training_tuned(
    start: Start, *, bits: int, per_channel: bool, weight_range: RangeChoice, epochs: int, learning_rate: float
) -> Shrunk:
    """Quantize, then train what is still real: scales, biases, norms, positions; the integers stay what they are.

    Args:
        bits: of a weight, from 2 to 8.
        per_channel: a scale for each output of a layer.
        weight_range: how the range of the weights is chosen.
        epochs, learning_rate: of the training.
    """
    scheme = Scheme(bits, True, per_channel)
    model = quantize_model(start.teacher, scheme, choice=weight_range)
    fit(model, start.task, Settings(epochs, learning_rate, seed=start.seed), progress=start.progress)
    return _shrunk(start, model, scheme, _measured_errors(start, model, lambda linear: bits))


def aware_training(
    start: Start, *, bits: int, per_channel: bool, weight_range: RangeChoice, epochs: int, learning_rate: float
) -> Shrunk:
    """Train on with rounded weights and straight-through gradients, then keep the integers.

    Args:
        start: the teacher, where the weights start, and its task.
        bits, per_channel, weight_range, epochs, learning_rate: as in `post_training_tuned`.
    """
    scheme = Scheme(bits, True, per_channel)
    learning = prepare(start.teacher, scheme, weight_range)
    fit(learning, start.task, Settings(epochs, learning_rate, seed=start.seed), progress=start.progress)
    model = convert(learning)
    return _shrunk(start, model, scheme, _measured_errors(start, model, lambda linear: bits))


def torch_dynamic(start: Start) -> Shrunk:
    """INT8 with torch's own kernels for CPUs."""
    model = torch_dynamic_model(start.teacher)
    return Shrunk(
        model=model,
        stored=stored_torch_dynamic(model),
        # torch keeps one scale a layer.
        predicted_bytes=predicted_quantized_bytes(start.teacher, Scheme(8, True, per_channel=False)),
        parameters=parameters(start.teacher),
        layer_errors=_measured_errors(start, model, lambda linear: 8.0),
        notes=(
            say(
                en="torch's kernels put the inputs on 7 bits, one grid for the whole batch: an image's answer depends, "
                "in its last digits, on its neighbours.",
                fr="les noyaux de torch mettent les entrées sur 7 bits, une grille pour tout le lot : la réponse à une "
                "image dépend, dans ses dernières décimales, de ses voisines.",
            ),
        ),
        predicted_latency_ratio=_latency_ratio(start, model),
    )


def torchao(start: Start, form: Form) -> Shrunk:
    """Quantize with torchao.

    Args:
        form: one of `dlojz.compress.torchao.FORMS`.

    Raises:
        LabError: if torchao is not installed.
    """
    model = torchao_model(start.teacher, form)

    def bits(linear: nn.Linear) -> float:
        # A layer that the INT4 kernel does not take stays in bfloat16.
        return 8.0 if form != "int4_weight_only" else 4.0 if fits_int4(*linear.weight.shape) else 16.0

    notes = {
        "fp8_weight_only": say(
            en="FP8 saves bytes here, no time: this processor has no FP8 product, so weights become real numbers again "
            "at every call.",
            fr="FP8 économise ici des octets, pas du temps : ce processeur ne multiplie pas en FP8, les poids "
            "redeviennent donc des réels à chaque appel.",
        ),
        "int4_weight_only": say(
            en="torchao's public INT4 needs a GPU; this is its prototype for CPUs, with the rest of the model in "
            "bfloat16, and the layers that its kernel does not take as well.",
            fr="l’INT4 public de torchao demande un GPU ; voici son prototype pour CPU, le reste du modèle étant en "
            "bfloat16, comme les couches que son noyau n’accepte pas.",
        ),
    }
    return Shrunk(
        model=model,
        stored=stored_torchao(model),
        predicted_bytes=predicted_torchao_bytes(start.teacher, form),
        parameters=parameters(start.teacher),
        layer_errors=_measured_errors(start, model, bits),
        notes=(notes[form],) if form in notes else (),
        # The forecast times layers in float32, which INT4's do not take.
        predicted_latency_ratio=None if form == "int4_weight_only" else _latency_ratio(start, model),
    )


@torch.inference_mode()
def _measured_errors(start: Start, model: nn.Module, bits: Callable[[nn.Linear], float]) -> tuple[LayerError, ...]:
    """Each layer fed by the teacher; nothing foresees what a library rounds, nor what training moves away."""
    observations = observe(start.teacher, start.task.inputs_NCHW[:_ERROR_SAMPLES])
    # A bfloat16 model is asked within its wrapper, and gets bfloat16 inputs.
    inner, dtype = (model.model, torch.bfloat16) if isinstance(model, Narrow) else (model, torch.float32)
    return tuple(
        LayerError(
            name=name,
            predicted_sqnr_db=None,
            measured_sqnr_db=sqnr_db(
                linear(observations[name].inputs_MI),
                inner.get_submodule(name)(observations[name].inputs_MI.to(dtype)).float(),
            ),
            bits=bits(linear),
        )
        for name, linear in linear_layers(start.teacher).items()
    )


torchao_int8_weight_only = partial(torchao, form="int8_weight_only")
torchao_int8_dynamic = partial(torchao, form="int8_dynamic")
torchao_fp8_weight_only = partial(torchao, form="fp8_weight_only")
torchao_int4_weight_only = partial(torchao, form="int4_weight_only")
