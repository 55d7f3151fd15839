"""The layer: nothing dropped is the dense mixture, what is dropped is zero, its losses are in the gradient alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dlojz import models
from dlojz.models.checkpointing import run_checkpointed
from dlojz.models.experts.gate import with_auxiliary_loss
from dlojz.models.experts.layer import Experts, Flavour, MixtureOfExperts
from dlojz.models.experts.routing import Routing
from dlojz.prediction.trace import trace

WIDTH, MLP = 16, 40
SETTINGS = [(1, 1), (2, 1), (3, 1), (8, 1), (1, 4), (2, 2)]
"""Choices of a token and groups of experts, of 8."""


def mixture(flavour: Flavour = "gelu", seed: int = 0, **options: Any) -> MixtureOfExperts:
    """One with weights and biases large enough for every part of it to be seen in the outputs."""
    torch.manual_seed(seed)
    layer = MixtureOfExperts(WIDTH, MLP, Routing(**{"experts": 8, **options}), flavour)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def tokens(batch: int = 4, length: int = 12, seed: int = 1) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def one_expert(experts: Experts, index: int, x_ND: Tensor) -> Tensor:
    if experts.flavour == "swiglu":
        return (F.silu(x_ND @ experts.gate_EDF[index]) * (x_ND @ experts.up_EDF[index])) @ experts.down_EFD[index]
    hidden = F.gelu(x_ND @ experts.up_EDF[index] + experts.up_bias_EF[index], approximate="tanh")
    return hidden @ experts.down_EFD[index] + experts.down_bias_ED[index]


def dense_mixture(layer: MixtureOfExperts, x_BTD: Tensor) -> Tensor:
    """Every expert computes every token; each token takes what its gate says."""
    x_ND = x_BTD.flatten(end_dim=1)
    choice = layer.gate(x_ND)
    weight_NE = torch.zeros(x_ND.shape[0], 8).scatter(1, choice.expert_KN.t(), choice.weight_KN.t())
    outputs_END = torch.stack([one_expert(layer.experts, index, x_ND) for index in range(8)])
    return (weight_NE.t()[..., None] * outputs_END).sum(dim=0).view_as(x_BTD)


@pytest.mark.parametrize("flavour", ["gelu", "swiglu"])
@pytest.mark.parametrize(("top_k", "groups"), SETTINGS)
def test_where_nothing_is_dropped_it_is_the_dense_mixture(top_k: int, groups: int, flavour: Flavour) -> None:
    layer = mixture(flavour, top_k=top_k, groups=groups, capacity_factor=8 / top_k, balance_loss=0)
    inputs = [tokens().requires_grad_() for _ in range(2)]
    outputs = layer(inputs[0]), dense_mixture(layer, inputs[1])
    # Sums of 40 products of numbers near 1, in another order.
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)
    gradients = []
    for output, x in zip(outputs, inputs, strict=True):
        layer.zero_grad()
        output.square().sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    for one, other in zip(*gradients, strict=True):
        assert one is not None and one.abs().sum() > 0
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_is_dropped_gets_nothing_and_the_others_what_they_would_get_alone() -> None:
    layer, whole = mixture(capacity_factor=0.5, balance_loss=0), mixture(capacity_factor=8.0, balance_loss=0)
    x_BTD = tokens()
    kept_N = layer.gate(x_BTD.flatten(end_dim=1)).kept_KN[0]
    assert 0 < int(kept_N.sum()) < kept_N.numel()
    y_ND, full_ND = layer(x_BTD).flatten(end_dim=1), whole(x_BTD).flatten(end_dim=1)
    assert not y_ND[~kept_N].any()
    torch.testing.assert_close(y_ND[kept_N], full_ND[kept_N], rtol=1e-5, atol=1e-6)
    assert layer.last is not None and layer.last.dropped_share.item() == pytest.approx(1 - kept_N.float().mean().item())
    assert whole.last is not None and whole.last.dropped_share.item() == 0


def test_a_dropped_token_sends_no_gradient_to_any_expert() -> None:
    layer = mixture(capacity_factor=0.5, balance_loss=0)
    x_BTD = tokens()
    kept_N = layer.gate(x_BTD.flatten(end_dim=1)).kept_KN[0]
    dropped_ND = layer(x_BTD).flatten(end_dim=1) * ~kept_N[:, None]
    (dropped_ND.sum() + 0 * layer.gate.weight.sum()).backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in layer.parameters())


def test_the_record_of_the_last_pass_says_what_the_gate_has_done() -> None:
    layer = mixture(top_k=2)
    assert layer.last is None
    layer(tokens())
    load = layer.last
    assert load is not None
    assert load.tokens_E.sum() == 2 * 48 and load.capacity == 15
    too_many = int((load.tokens_E - 15).clamp(min=0).sum())
    assert load.dropped_share.item() == pytest.approx(too_many / 96)
    assert not any(tensor.requires_grad for tensor in (load.tokens_E, load.dropped_share, load.balance, load.z))


@pytest.mark.parametrize(("balance_weight", "z_weight"), [(0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
@pytest.mark.parametrize(("top_k", "groups"), [(1, 1), (2, 1), (1, 2)])
def test_auxiliary_losses_are_in_the_gradient_as_if_they_had_been_added(
    top_k: int, groups: int, balance_weight: float, z_weight: float
) -> None:
    options: dict[str, Any] = {"top_k": top_k, "groups": groups}
    layer = mixture(balance_loss=balance_weight, z_loss=z_weight, **options)
    plain = mixture(balance_loss=0, **options)
    x_BTD = tokens()
    layer.auxiliary_scale = 0.25
    loss = layer(x_BTD).square().mean()
    (0.25 * loss).backward()
    choice = plain.gate(x_BTD.flatten(end_dim=1))
    task = plain(x_BTD).square().mean()
    assert torch.equal(loss, task)  # what a run reports is the loss of its task
    (0.25 * (task + balance_weight * choice.balance + z_weight * choice.z)).backward()
    for (name, one), other in zip(layer.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: name + text)
    without = mixture(balance_loss=0, **options)
    (0.25 * without(x_BTD).square().mean()).backward()
    assert layer.gate.weight.grad is not None and without.gate.weight.grad is not None
    assert (layer.gate.weight.grad - without.gate.weight.grad).abs().max() > 1e-4


def test_with_auxiliary_loss_passes_an_activation_through_unchanged() -> None:
    x = torch.randn(3, requires_grad=True)
    loss = torch.randn((), requires_grad=True)
    passed = with_auxiliary_loss(x, loss, 0.5)
    assert torch.equal(passed, x)
    passed.sum().backward()
    assert torch.equal(x.grad, torch.ones(3)) and loss.grad is not None and loss.grad.item() == 0.5


@pytest.mark.parametrize("selective", [False, True])
def test_computed_again_for_the_backward_pass_it_gives_the_same_gradients(selective: bool) -> None:
    layer = mixture(top_k=2, capacity_factor=0.7, z_loss=0.1)
    x_BTD = tokens()
    layer(x_BTD).square().sum().backward()
    expected = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    run_checkpointed(layer, x_BTD.requires_grad_(), "selective" if selective else "full").square().sum().backward()
    for one, parameter in zip(expected, layer.parameters(), strict=True):
        assert one is not None and torch.equal(one, parameter.grad)


def test_mixture_of_experts_trains_in_bf16() -> None:
    layer, x_BTD = mixture(capacity_factor=8.0), tokens()
    whole = layer(x_BTD)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(x_BTD)
    assert mixed.dtype == torch.bfloat16
    assert F.cosine_similarity(mixed.flatten().float(), whole.flatten(), dim=0) > 0.999
    mixed.float().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in layer.parameters())
    cast = mixture(capacity_factor=8.0).bfloat16()(x_BTD.bfloat16())
    assert cast.dtype == torch.bfloat16
    assert F.cosine_similarity(cast.flatten().float(), whole.flatten(), dim=0) > 0.999


@pytest.mark.parametrize(("top_k", "groups"), SETTINGS)
def test_shapes_follow_from_shapes_alone(top_k: int, groups: int) -> None:
    """On the meta device, and in a forecast's trace, where no tensor has a value."""
    with torch.device("meta"):
        layer = MixtureOfExperts(WIDTH, MLP, Routing(experts=8, top_k=top_k, groups=groups), "gelu")
        x_BTD = torch.empty(4, 12, WIDTH, requires_grad=True)
        assert layer(x_BTD).shape == x_BTD.shape
    for compute in ("fp32", "autocast", "bf16"):
        assert trace(layer, x_BTD, compute=compute).events  # type: ignore[arg-type]
    assert layer.last is None


def test_experts_compute_their_whole_buffers() -> None:
    layer, x_BTD = mixture(top_k=2, capacity_factor=1.25), tokens()
    with FlopCounterMode(display=False) as counter:
        layer(x_BTD)
    products = 2 * 8 * layer.routing.capacity(48) * WIDTH * MLP
    assert counter.get_total_flops() == 2 * (products + 48 * WIDTH * 8)


def test_routing_of_one_choice_takes_no_row_from_an_earlier_token() -> None:
    torch.manual_seed(0)
    model = models.build("moe_tiny", routing=Routing(experts=8, capacity_factor=0.5)).eval()
    tokens_BT = torch.randint(256, (1, 32))
    changed_BT = tokens_BT.clone()
    changed_BT[0, 20:] = (changed_BT[0, 20:] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens_BT), model(changed_BT)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_routing_of_two_choices_lets_a_later_token_push_a_second_choice_out() -> None:
    """Two tokens, capacity 1: token 1's first choice is token 0's second one, and first choices come first."""
    layer = mixture(top_k=2, capacity_factor=0.5, experts=2)
    assert layer.routing.capacity(2) == 1
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight[0, 0] = 1.0
    x_ND = torch.zeros(2, WIDTH)
    x_ND[0, 0], x_ND[1, 0] = 1.0, -1.0
    assert layer.gate(x_ND).kept_KN[:, 0].tolist() == [True, False]
    x_ND[1, 0] = 1.0
    assert layer.gate(x_ND).kept_KN[:, 0].tolist() == [True, True]
