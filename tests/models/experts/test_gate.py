"""The gate on logits made by hand: who is chosen, with which weight, in which row, and what it costs."""

import math

import pytest
import torch
from torch import Tensor

from dlojz.models.experts.gate import Gate, balance_loss, choose, choose_in_group, rows, z_loss
from dlojz.models.experts.routing import Routing

LOGITS = [[0.0, 2.0, 1.0], [3.0, 1.0, 2.0], [0.0, 1.0, 2.0], [1.0, 2.0, 0.0]]


def gate_that_says(logits_NE: Tensor, routing: Routing) -> tuple[Gate, Tensor]:
    """A gate, and tokens for which its logits are these: its weights are the identity."""
    gate = Gate(routing.experts, routing)
    with torch.no_grad():
        gate.weight.copy_(torch.eye(routing.experts))
    return gate, logits_NE


def test_choose_top_1_weighs_by_the_probability_of_the_chosen() -> None:
    probability_NE = torch.tensor(LOGITS).softmax(dim=-1)
    expert_KN, weight_KN = choose(probability_NE, 1)
    assert expert_KN.tolist() == [[1, 0, 2, 1]]
    e = [math.exp(value) for value in (0, 1, 2, 3)]
    expected = [[e[2] / (e[0] + e[1] + e[2]), e[3] / (e[1] + e[2] + e[3]), *2 * [e[2] / (e[0] + e[1] + e[2])]]]
    torch.testing.assert_close(weight_KN, torch.tensor(expected))


def test_choose_top_2_weights_sum_to_one_in_the_order_of_preference() -> None:
    expert_KN, weight_KN = choose(torch.tensor(LOGITS).softmax(dim=-1), 2)
    assert expert_KN.tolist() == [[1, 0, 2, 1], [2, 2, 1, 0]]
    first = math.e / (1 + math.e)  # in each row the two best differ by 1
    torch.testing.assert_close(weight_KN, torch.tensor([[first] * 4, [1 - first] * 4]))


def test_top_k_is_the_softmax_over_the_chosen() -> None:
    """What Mixtral writes as Softmax(TopK(logits))."""
    logits_NE = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    for k in (2, 3, 8):
        expert_KN, weight_KN = choose(logits_NE.softmax(dim=-1), k)
        best_NK, index_NK = logits_NE.topk(k)
        assert torch.equal(expert_KN, index_NK.t())
        torch.testing.assert_close(weight_KN, best_NK.softmax(dim=-1).t())


def test_rows_are_given_in_the_order_of_the_tokens_first_choices_before_second_ones() -> None:
    expert_KN = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 2]])
    row_KN, tokens_E = rows(expert_KN, 3)
    assert row_KN.tolist() == [[0, 0, 1, 2], [1, 3, 2, 0]]  # token 1's second choice comes after all first ones
    assert tokens_E.tolist() == [3, 4, 1]


def test_beyond_its_capacity_an_expert_takes_nobody() -> None:
    """Four tokens, two experts, one choice: capacity 2, the third that wants expert 0 has no row and no weight."""
    gate, x_ND = gate_that_says(
        torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 0.0]]),
        Routing(experts=2, capacity_factor=1.0),
    )
    choice = gate(x_ND)
    assert choice.kept_KN.tolist() == [[True, True, True, False]]
    assert choice.weight_KN[0, 3] == 0
    assert (choice.weight_KN[0, :3] > 0.8).all()
    assert choice.tokens_E.tolist() == [3, 1]  # as they chose, not as they were kept


def test_gate_drops_the_second_choice_and_the_first_keeps_its_share() -> None:
    """GShard: weights are divided by their sum before anything is dropped."""
    gate, x_ND = gate_that_says(
        torch.tensor([[3.0, 2.0, 0.0], [3.0, 2.0, 0.0], [3.0, 2.0, 0.0]]),
        Routing(experts=3, top_k=2, capacity_factor=0.5),
    )
    choice = gate(x_ND)
    assert choice.kept_KN.tolist() == [[True, False, False], [True, False, False]]
    first = math.e / (1 + math.e)
    torch.testing.assert_close(choice.weight_KN, torch.tensor([[first, 0, 0], [1 - first, 0, 0]]))


@pytest.mark.parametrize("experts", [2, 8])
def test_balance_is_one_for_a_uniform_gate_and_all_experts_for_a_collapsed_one(experts: int) -> None:
    uniform_NE = torch.full((experts * 4, experts), 1 / experts)
    assert balance_loss(uniform_NE, torch.full((experts,), 4)).item() == pytest.approx(1, rel=1e-6)
    collapsed_NE = torch.zeros(experts * 4, experts)
    collapsed_NE[:, 0] = 1
    tokens_E = torch.zeros(experts, dtype=torch.long)
    tokens_E[0] = experts * 4
    assert balance_loss(collapsed_NE, tokens_E).item() == pytest.approx(experts, rel=1e-6)


def test_balance_and_z_are_the_sums_they_are_written_as() -> None:
    routing = Routing(experts=3, top_k=2)
    gate, x_ND = gate_that_says(torch.tensor(LOGITS), routing)
    choice = gate(x_ND)
    probability = torch.tensor(LOGITS, dtype=torch.float64).softmax(dim=-1)
    share = [
        sum(row.index(expert) < 2 for row in ([1, 2, 0], [0, 2, 1], [2, 1, 0], [1, 0, 2])) / 8 for expert in range(3)
    ]
    explicit = 3 * sum(share[expert] * float(probability[:, expert].mean()) for expert in range(3))
    assert choice.balance.item() == pytest.approx(explicit, rel=1e-6)
    z = sum(math.log(sum(math.exp(value) for value in row)) ** 2 for row in LOGITS) / 4
    assert choice.z.item() == pytest.approx(z, rel=1e-6)


def test_two_levels_choose_a_group_and_then_within_it() -> None:
    group_logits_NG = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    logits_NE = torch.tensor([[0.0, 1.0, 9.0, 9.0], [9.0, 9.0, 3.0, 1.0]])
    probability_NE, expert_KN, weight_KN = choose_in_group(group_logits_NG, logits_NE, 1)
    assert expert_KN.tolist() == [[1, 2]]  # the best of the group chosen, though others' logits are larger
    sigmoid = [1 / (1 + math.exp(-difference)) for difference in (0, 1, 2)]
    torch.testing.assert_close(weight_KN, torch.tensor([[sigmoid[2] * sigmoid[1], sigmoid[1] * sigmoid[2]]]))
    torch.testing.assert_close(probability_NE.sum(dim=-1), torch.ones(2))
    assert probability_NE.shape == (2, 4)
    assert probability_NE[0, 1].item() == pytest.approx(sigmoid[2] * sigmoid[1], rel=1e-6)


def test_two_levels_with_all_experts_of_the_group_weigh_as_the_group() -> None:
    generator = torch.Generator().manual_seed(0)
    group_logits_NG, logits_NE = torch.randn(20, 4, generator=generator), torch.randn(20, 8, generator=generator)
    _, expert_KN, weight_KN = choose_in_group(group_logits_NG, logits_NE, 2)
    torch.testing.assert_close(weight_KN.sum(dim=0), group_logits_NG.softmax(dim=-1).amax(dim=-1))
    assert torch.equal(expert_KN[0] // 2, expert_KN[1] // 2)  # both of one group


def test_both_levels_of_a_gate_learn() -> None:
    torch.manual_seed(0)
    gate = Gate(16, Routing(experts=8, groups=4, top_k=2))
    choice = gate(torch.randn(32, 16))
    choice.weight_KN.square().sum().backward()
    assert gate.weight.grad is not None and gate.weight.grad.abs().sum() > 0
    assert gate.group_weight.grad is not None and gate.group_weight.grad.abs().sum() > 0


def test_a_uniform_two_level_gate_is_balanced_and_its_z_loss_is_that_of_both_levels() -> None:
    gate = Gate(16, Routing(experts=8, groups=4))
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.zero_()
    choice = gate(torch.randn(24, 16))
    assert choice.balance.item() == pytest.approx(1, rel=1e-6)  # whoever is chosen: P is uniform
    assert choice.z.item() == pytest.approx(math.log(4) ** 2 + math.log(2) ** 2, rel=1e-6)


def test_the_z_loss_pulls_large_logits_down() -> None:
    logits_NE = torch.tensor([[10.0, 0.0]], requires_grad=True)
    z_loss(logits_NE).backward()
    assert logits_NE.grad is not None and logits_NE.grad[0, 0] > 1


def test_the_gate_computes_in_fp32_within_a_model_in_bf16() -> None:
    torch.manual_seed(0)
    gate = Gate(16, Routing(experts=4))
    x_ND = torch.randn(8, 16).bfloat16()
    alone = gate(x_ND.float()).weight_KN
    with torch.autocast("cpu", torch.bfloat16):
        mixed = gate(x_ND).weight_KN
    assert mixed.dtype == torch.float32
    assert torch.equal(alone, mixed)
