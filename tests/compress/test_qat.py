"""The straight-through estimator: its gradient, and that what was trained is what the integers answer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dlojz import models
from dlojz.compress.quantization import QuantizationAwareLinear, convert, prepare, straight_through
from dlojz.compress.quantized_model import QuantizedLinear
from dlojz.compress.quantizers import RangeChoice, Scheme, dequantize, fake_quantize, parameters_from_range, weight_grid


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_straight_through_value_and_gradient_are_torchs_to_the_last_bit(bits: int, symmetric: bool) -> None:
    scheme = Scheme(bits, symmetric, per_channel=True)
    generator = torch.Generator().manual_seed(bits)
    ours = torch.randn(16, 24, generator=generator).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    scale, zero = weight_grid(ours.detach() * 0.6, scheme)  # a grid too narrow, so that something is clamped
    given = torch.randn(16, 24, generator=generator)
    first = straight_through(ours, scale, zero, scheme)
    second = torch.fake_quantize_per_channel_affine(
        theirs, scale.flatten(), zero.flatten(), 0, scheme.quant_min, scheme.quant_max
    )
    (first * given).sum().backward()
    (second * given).sum().backward()
    assert torch.equal(first, second)
    assert ours.grad is not None and torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    assert 0 < int((ours.grad == 0).sum()) < ours.numel()


def test_straight_through_teaches_where_rounding_alone_would_not() -> None:
    weight = torch.linspace(-1, 1, 9).requires_grad_()
    scheme = Scheme(4, True, per_channel=False)
    scale, zero = parameters_from_range(torch.tensor(-0.9), torch.tensor(0.9), scheme)
    (torch.round(weight * (1 / scale)) * scale).sum().backward()
    assert weight.grad is not None and not weight.grad.any()
    weight.grad = None
    straight_through(weight, scale, zero, scheme).sum().backward()
    # 1 everywhere but at +1, whose integer would be 8 where 7 is the last; −1 is −8, which is one.
    assert weight.grad is not None and weight.grad.tolist() == [1.0] * 8 + [0.0]


@pytest.mark.parametrize("choice", ["min_max", "mse"])
@pytest.mark.parametrize("per_channel", [True, False])
def test_a_layer_answers_as_its_integers_will(choice: RangeChoice, per_channel: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(24, 16)
    scheme = Scheme(3, True, per_channel)
    layer = QuantizationAwareLinear(linear, scheme, choice)
    x = torch.randn(5, 24)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
    assert not torch.equal(layer.weight, linear.weight)
    frozen = layer.frozen()
    weight = dequantize(frozen.integers_OI, frozen.scale_O1, frozen.zero_O1)
    assert torch.equal(weight, fake_quantize(layer.weight.detach(), *layer.grid(), scheme))
    # The same products in another order: a scale is taken out of the sum.
    torch.testing.assert_close(frozen(x), layer(x), rtol=1e-5, atol=1e-5)


def test_a_whole_model_is_prepared_trained_and_converted() -> None:
    torch.manual_seed(0)
    model = models.build("vit_tiny", image_size=16, num_classes=10).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scheme = Scheme(4)
    learning = prepare(model, scheme)
    x = torch.randn(4, 3, 16, 16)
    learning(x).square().mean().backward()
    gradients = [layer.weight.grad for layer in learning.modules() if isinstance(layer, QuantizationAwareLinear)]
    assert len(gradients) == 17 and all(one is not None and bool(one.any()) for one in gradients)
    integers = convert(learning)
    assert sum(isinstance(layer, QuantizedLinear) for layer in integers.modules()) == 17
    with torch.no_grad():
        torch.testing.assert_close(integers(x), learning(x), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("choice", ["min_max", "mse"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_channel_of_zeros_learns(choice: RangeChoice, symmetric: bool) -> None:
    torch.manual_seed(0)
    linear, target = nn.Linear(8, 4), torch.randn(4, 8)
    with torch.no_grad():
        linear.weight[1:].zero_()
    layer = QuantizationAwareLinear(linear, Scheme(8, symmetric), choice)
    x = torch.randn(64, 8)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=2e-2)
    began = (layer(x) - x @ target.t()).square().mean(0).detach()
    for _ in range(200):
        optimizer.zero_grad()
        (layer(x) - x @ target.t()).square().mean().backward()
        optimizer.step()
    ended = (layer(x) - x @ target.t()).square().mean(0).detach()
    assert bool((ended < 0.1 * began).all())


def test_prepare_gives_a_model_that_moves_whole_and_keeps_nothing_more() -> None:
    torch.manual_seed(0)
    model = models.build("vit_tiny", image_size=16, num_classes=10)
    learning = prepare(model, Scheme(2), "mse")
    assert list(learning.state_dict()) == list(model.state_dict())
    moved = learning.to("meta")
    answer = moved(torch.empty(2, 3, 16, 16, device="meta"))
    answer.sum().backward()
    assert answer.shape == (2, 10)
