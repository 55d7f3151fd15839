"""Layers and models of integers: exact sums, what a file keeps, and a way back from it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress import quantized_model
from dlojz.compress.quantized_model import (
    STATIC_SCHEME,
    Activations,
    QuantizedLinear,
    integer_product,
    quantize_model,
    quantized_layers,
    stored_integers,
    takes_integer_kernel,
)
from dlojz.compress.quantizers import Scheme, dequantize, linear_layers, observe

from .restoring import load_integers


def built(name: str = "vit_tiny", image_size: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return models.build(name, image_size=image_size, num_classes=10).eval()


def images(samples: int, side: int = 16) -> torch.Tensor:
    return torch.randn(samples, 3, side, side, generator=torch.Generator().manual_seed(1))


def test_products_of_the_largest_integers_are_exact() -> None:
    """127 on the left saturates kernels that sum pairs of products in 16 bits; −128 alone never does."""
    left = torch.full((20, 1024), -128, dtype=torch.int8)
    left[1::2] = 127
    right = torch.full((16, 1024), -128, dtype=torch.int8)
    right[1::2] = 127
    expected = left.to(torch.int64) @ right.to(torch.int64).t()
    assert torch.equal(integer_product(left, right), expected.to(torch.int32))


def integers(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)


@pytest.mark.parametrize("shape", [(9, 33, 7), (64, 128, 32), (1, 1024, 10)])
def test_products_are_exact_whatever_the_kernel(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, inputs, outputs = shape
    left, right = integers(rows, inputs, 0), integers(outputs, inputs, 1)
    expected = (left.to(torch.int64) @ right.to(torch.int64).t()).to(torch.int32)
    assert torch.equal(integer_product(left, right), expected)
    monkeypatch.setattr(quantized_model, "kernel_is_exact", lambda: False)
    assert not takes_integer_kernel(left, right)
    assert torch.equal(integer_product(left, right), expected)


@pytest.mark.parametrize(("left", "right"), [(127, 127), (127, -128)])
def test_a_kernel_that_saturates_is_found_out(left: int, right: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without VNNI: right for every pair of integers but one."""

    def saturating(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        sums = first.int() @ second.int()
        pairs = ((first == left).int() @ (second == right).int()) > 1
        return torch.where(pairs, sums - 1, sums)

    quantized_model.kernel_is_exact.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert not quantized_model.kernel_is_exact()
    monkeypatch.undo()
    quantized_model.kernel_is_exact.cache_clear()


def test_a_gpus_kernel_is_taken_where_its_shapes_allow() -> None:
    """Without a GPU: only the decision. Source: the checks of `_int_mm_out_cuda` in torch."""

    class OnGpu:
        is_cuda = True

        def __init__(self, *shape: int) -> None:
            self.shape = shape

        def __len__(self) -> int:
            return self.shape[0]

    def taken(rows: int, inputs: int, outputs: int) -> bool:
        return takes_integer_kernel(OnGpu(rows, inputs), OnGpu(outputs, inputs))  # type: ignore[arg-type]

    assert taken(17, 128, 384)
    assert not taken(16, 128, 384) and not taken(64, 33, 384) and not taken(64, 128, 10)


@pytest.mark.parametrize("activations", ["float", "dynamic", "static"])
def test_a_model_of_integers_moves_to_another_device_whole(activations: Activations) -> None:
    """The meta device refuses any product with a tensor that stayed behind."""
    model = built()
    moved = quantize_model(model, Scheme(8, False), activations=activations, observed=observe(model, images(2))).to(
        "meta"
    )
    assert moved(torch.empty(2, 3, 16, 16, device="meta")).shape == (2, 10)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("activations", ["float", "dynamic", "static"])
@pytest.mark.parametrize("bits", [8, 3])
def test_a_layer_of_integers_computes_what_its_integers_stand_for(
    symmetric: bool, per_channel: bool, activations: Activations, bits: int
) -> None:
    torch.manual_seed(bits)
    linear = nn.Linear(40, 24)
    x = torch.randn(2, 6, 40) + 0.5
    allowed = (x.min().reshape(1, 1), x.max().reshape(1, 1)) if activations == "static" else None
    scheme = Scheme(bits, symmetric, per_channel)
    layer = QuantizedLinear(linear, scheme, activations=activations, activation_range=allowed)
    inputs = x.reshape(-1, 40)
    if activations != "float":
        inputs = dequantize(*layer.quantized_inputs(inputs))
    weight = dequantize(layer.integers_OI, layer.scale_O1, layer.zero_O1)
    expected = inputs.double() @ weight.double().t() + linear.bias.double()
    # float64 against float32: the sum of integers is exact, so that a few roundings at the end are all there is.
    torch.testing.assert_close(layer(x).double().reshape(-1, 24), expected, rtol=2e-5, atol=2e-5)


def test_int8_takes_a_quarter_of_the_weights_and_the_teacher_is_left_alone() -> None:
    model = built()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantized = quantize_model(model, Scheme())
    layers = linear_layers(model)
    weights = sum(layer.weight.numel() for layer in layers.values())
    kept = stored_integers(quantized)
    assert sum(kept[f"{name}.weight"].numel() for name in layers) == weights
    assert all(kept[f"{name}.weight"].dtype == torch.int8 for name in layers)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not linear_layers(quantized) and len(quantized_layers(quantized)) == len(layers)


@pytest.mark.parametrize(("bits", "symmetric"), [(8, True), (5, False), (2, True)])
def test_load_integers_gives_back_the_same_answers_to_the_last_bit(
    bits: int, symmetric: bool, tmp_path: object
) -> None:
    model, scheme = built(), Scheme(bits, symmetric)
    seen = observe(model, images(4))
    quantized = quantize_model(model, scheme, activations="static", observed=seen)
    save_file(stored_integers(quantized), f"{tmp_path}/model.safetensors")
    torch.manual_seed(9)
    other = models.build("vit_tiny", image_size=16, num_classes=10).eval()
    again = quantize_model(other, scheme, activations="static", observed=observe(other, images(4)))
    load_integers(again, load_file(f"{tmp_path}/model.safetensors"))
    with torch.no_grad():
        assert torch.equal(again(images(5)), quantized(images(5)))


def test_quantize_model_refuses_static_inputs_without_calibration() -> None:
    use_language("en")
    for observed in (None, {}):
        with pytest.raises(LabError, match="calibration was given 0 images"):
            quantize_model(built(), Scheme(), activations="static", observed=observed)
    name = next(iter(linear_layers(built())))
    with pytest.raises(LabError, match="calibration has not seen 16 of the linear layers, .* first"):
        quantize_model(built(), Scheme(), activations="static", observed=observe(built(), images(2), [name]))
    allowed = (torch.zeros(1, 1), torch.ones(1, 1))
    with pytest.raises(
        LabError, match="activation_range was given, but only static inputs .* is 'float': leave it out"
    ):
        QuantizedLinear(nn.Linear(4, 4), Scheme(), activation_range=allowed)
    with pytest.raises(LabError, match="did you mean 'dynamic'"):
        QuantizedLinear(nn.Linear(4, 4), Scheme(), activations="dynamics")  # type: ignore[arg-type]


def test_the_grid_of_static_inputs_is_affine_and_holds_what_was_seen() -> None:
    model = built()
    seen = observe(model, images(8))
    quantized = quantize_model(model, Scheme(), activations="static", observed=seen)
    for name, layer in quantized_layers(quantized).items():
        inputs = seen[name].inputs_MI
        back = dequantize(*layer.quantized_inputs(inputs))
        # Half a step for rounding, and the zero point was itself rounded by at most half a step.
        assert float((back - inputs).abs().max()) <= float(layer.input_scale) * 1.01
        assert STATIC_SCHEME.quant_min <= int(layer.input_zero) <= STATIC_SCHEME.quant_max
