"""Beside DeepSpeed's own layer, with the same weights: the same outputs where it drops nobody, and why not elsewhere.

What agrees: DeepSpeed's gates for one, two and more choices with `use_rts=False` (no tokens drawn by lot when an expert
is full), `top2_2nd_expert_sampling=False` (no noise on the second choice), `min_capacity=1` (its default gives each
expert four rows) and no `noisy_gate_policy`. What does not, where an expert is full, is shown in the tests below.
"""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

from dlojz.models.experts.layer import MixtureOfExperts
from dlojz.models.experts.routing import Routing

EXPERTS, WIDTH, MLP, TOKENS = 8, 16, 32, 48


class Expert(nn.Module):
    """One network, as DeepSpeed copies it for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, MLP), nn.Linear(MLP, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return output


def side_by_side(top_k: int, capacity_factor: float) -> tuple[MixtureOfExperts, MoE]:
    torch.manual_seed(0)
    routing = Routing(experts=EXPERTS, top_k=top_k, capacity_factor=capacity_factor, balance_loss=0)
    ours = MixtureOfExperts(WIDTH, MLP, routing)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.3)
    theirs = MoE(
        WIDTH,
        Expert(),
        num_experts=EXPERTS,
        k=top_k,
        capacity_factor=capacity_factor,
        min_capacity=1,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    )
    experts = ours.experts
    with torch.no_grad():
        theirs.deepspeed_moe.gate.wg.weight.copy_(ours.gate.weight)
        for index, expert in enumerate(theirs.deepspeed_moe.experts.deepspeed_experts):
            expert.up.weight.copy_(experts.up_EDF[index].t())
            expert.up.bias.copy_(experts.up_bias_EF[index])
            expert.down.weight.copy_(experts.down_EFD[index].t())
            expert.down.bias.copy_(experts.down_bias_ED[index])
    return ours, theirs


def tokens() -> Tensor:
    return torch.randn(4, TOKENS // 4, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_where_nobody_is_dropped_outputs_and_gradients_are_deepspeeds(top_k: int) -> None:
    ours, theirs = side_by_side(top_k, EXPERTS / top_k)
    y_BTD, (z_BTD, _, counts_E) = ours(tokens()), theirs(tokens())
    torch.testing.assert_close(y_BTD, z_BTD, rtol=0, atol=1e-5)
    assert ours.last is not None and torch.equal(ours.last.tokens_E, counts_E)
    y_BTD.square().sum().backward()
    z_BTD.square().sum().backward()
    gate = theirs.deepspeed_moe.gate.wg.weight
    assert ours.gate.weight.grad is not None and gate.grad is not None
    torch.testing.assert_close(ours.gate.weight.grad, gate.grad, rtol=1e-4, atol=1e-4)
    their_experts = theirs.deepspeed_moe.experts.deepspeed_experts
    up_EDF = torch.stack([expert.up.weight.grad.t() for expert in their_experts])
    torch.testing.assert_close(ours.experts.up_EDF.grad, up_EDF, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("top_k", [1, 3])
def test_the_balance_loss_is_deepspeeds(top_k: int) -> None:
    ours, theirs = side_by_side(top_k, 1.0)
    assert ours.gate(tokens().flatten(end_dim=1)).balance.item() == pytest.approx(theirs(tokens())[1].item(), rel=1e-6)


def test_for_two_choices_deepspeed_balances_the_first_ones_only() -> None:
    ours, theirs = side_by_side(2, 4.0)
    first = side_by_side(1, 8.0)[0]
    x_ND, loss = tokens().flatten(end_dim=1), theirs(tokens())[1].item()
    assert first.gate(x_ND).balance.item() == pytest.approx(loss, rel=1e-6)
    assert ours.gate(x_ND).balance.item() != pytest.approx(loss, rel=1e-3)


def test_deepspeed_drops_as_many_of_one_choice_but_not_the_last_ones() -> None:
    """It takes the capacity's worth of tokens by a top-k over zeros and ones, whose ties fall as they fall."""
    ours, theirs = side_by_side(1, 0.6)
    y_ND, z_ND = ours(tokens()).flatten(end_dim=1), theirs(tokens())[0].flatten(end_dim=1)
    assert int((y_ND == 0).all(dim=1).sum()) == int((z_ND == 0).all(dim=1).sum()) > 0
    both_N = (y_ND != 0).any(dim=1) & (z_ND != 0).any(dim=1)
    torch.testing.assert_close(y_ND[both_N], z_ND[both_N], rtol=0, atol=1e-5)


def test_deepspeed_gives_a_dropped_choices_weight_to_the_other_one() -> None:
    """Two choices: it divides by their sum after dropping, GShard before; the same choices are dropped."""
    ours, theirs = side_by_side(2, 0.6)
    choice = ours.gate(tokens().flatten(end_dim=1))
    y_ND, z_ND = ours(tokens()).flatten(end_dim=1), theirs(tokens())[0].flatten(end_dim=1)
    weight_N1 = choice.weight_KN.sum(dim=0)[:, None]
    assert ((weight_N1 > 0) & (weight_N1 < 0.99)).any()
    torch.testing.assert_close(torch.where(weight_N1 > 0, y_ND / weight_N1, 0), z_ND, rtol=1e-4, atol=1e-5)
