"""SR-STE: its gradient proven by differences, and a training in which masks move and settle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress import two_to_four
from dlojz.compress.two_to_four import SparseRefined, mask_2_of_4

STEP = 1e-6


def current_masks(model: nn.Module) -> dict[str, Tensor]:
    """The masks that a model with SR-STE computes with now, by layer."""
    dense = ".parametrizations.weight.original"
    return {
        name.removesuffix(dense): mask_2_of_4(weight)
        for name, weight in model.named_parameters()
        if name.endswith(dense)
    }


def curved(weight_OI: Tensor) -> Tensor:
    """A loss that is no polynomial of low degree in any weight."""
    x_BI = torch.linspace(-1, 1, 3 * weight_OI.shape[1], dtype=weight_OI.dtype).reshape(3, -1)
    return torch.tanh(x_BI @ weight_OI.T).pow(2).sum() + torch.sin(weight_OI).sum()


def differences(function: object, at: Tensor) -> Tensor:
    """Central differences in every entry."""
    found = torch.zeros_like(at)
    for index in range(at.numel()):
        up, down = at.flatten().clone(), at.flatten().clone()
        up[index] += STEP
        down[index] -= STEP
        found.view(-1)[index] = (function(up.view_as(at)) - function(down.view_as(at))) / (2 * STEP)  # type: ignore[operator]
    return found


@pytest.mark.parametrize("decay", [0.0, 2e-4, 0.3])
def test_sparse_refined_gradient_is_of_the_masked_weight_and_the_hidden_pull(decay: float) -> None:
    """g(W̃) + λ (1 − E) ⊙ W, where both terms are differentiated numerically: the second is that of λ/2 ‖(1 − E) W‖²."""
    weight = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    curved(SparseRefined.apply(weight, decay)).backward()
    held, mask = weight.detach(), mask_2_of_4(weight)
    expected = differences(curved, held * mask) + differences(lambda w: decay / 2 * (w * ~mask).pow(2).sum(), held)
    # Central differences of step 1e-6 in float64: an error of about 1e-16 / 1e-6 by rounding, 1e-12 by curvature.
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=1e-8)
    assert weight.grad is not None and bool(weight.grad[~mask].any())  # hidden weights learn too


def test_a_step_of_gradient_descent_is_the_papers_update() -> None:
    weight = nn.Parameter(torch.tensor([[4.0, 1.0, -3.0, 0.5]]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    (SparseRefined.apply(weight, 0.2) * torch.tensor([[1.0, 2.0, 3.0, 4.0]])).sum().backward()
    optimizer.step()
    expected = [4 - 0.1 * 1, 1 - 0.1 * (2 + 0.2 * 1), -3 - 0.1 * 3, 0.5 - 0.1 * (4 + 0.2 * 0.5)]
    torch.testing.assert_close(weight.detach(), torch.tensor([expected]))


def trained(decay: float) -> list[int]:
    """How many places of the mask change in each of 100 steps of a regression."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16, bias=False))
    model[0].weight.data = torch.randn(16, 32, generator=generator) / 6
    target = torch.randn(16, 32, generator=generator) / 6
    two_to_four.attach(model, decay)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    changes = []
    for _ in range(100):
        before = current_masks(model)
        x = torch.randn(32, 32, generator=generator)
        optimizer.zero_grad()
        (model(x) - x @ target.T).pow(2).mean(dim=0).sum().mul(0.5).backward()
        optimizer.step()
        after = current_masks(model)
        changes.append(sum(int((before[name] ^ after[name]).sum()) for name in before))
    return changes


def test_hidden_weights_come_back_and_the_pull_makes_the_mask_settle() -> None:
    """Seeds 0 to 2 with 200 steps change 7,100 places without the pull and 900 with it: a fifth is far from both."""
    free, pulled = trained(0.0), trained(1.0)
    assert sum(pulled) < 0.35 * sum(free)
    assert sum(pulled[50:]) < 0.2 * sum(free[50:])


def test_bake_gives_a_plain_layer_half_zero_that_answers_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4))
    two_to_four.attach(model)
    x = torch.randn(5, 16)
    before = model(x)
    two_to_four.bake(model)
    assert torch.equal(model(x), before)
    assert [type(layer.weight) for layer in model[::2]] == [nn.Parameter] * 2
    assert all(int((layer.weight == 0).sum()) * 2 == layer.weight.numel() for layer in model[::2])
    assert current_masks(model) == {}


@pytest.mark.parametrize("decay", [-1e-9, math.nan, math.inf])
def test_attach_refuses_a_negative_pull(decay: float) -> None:
    for language, words in (("en", "must be at least 0"), ("fr", "doit être positif ou nul")):
        use_language(language)
        with pytest.raises(LabError, match=words):
            two_to_four.attach(nn.Sequential(nn.Linear(4, 4)), decay)


def test_attach_refuses_a_layer_that_does_not_divide_before_any_change() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
    with pytest.raises(LabError, match="but 1 is 3 × 6"):
        two_to_four.attach(model)
    assert current_masks(model) == {}
