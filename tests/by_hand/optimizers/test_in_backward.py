"""An optimizer inside the passes: the same weights to the bit, and the gradients of one module at a time."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.by_hand.optimizers.in_backward import InBackward, gradient_bytes_at_most
from dlojz.train.dispatch_trace import StorageTrace

WIDTH, LAYERS = 64, 8


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def adamw(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))
    return model(inputs).square().mean()


def trained(when: str, steps: int = 4) -> dict[str, Tensor]:
    model: Any = layers()
    model[3].weight = model[5].weight  # tied
    model[6].bias.requires_grad_(False)
    if when == "after":
        optimizer = adamw([one for one in model.parameters() if one.requires_grad])
    else:
        fused = InBackward(model, adamw, when)  # type: ignore[arg-type]
    for step in range(steps):
        loss_of(model, step).backward()
        if when == "after":
            optimizer.step()
            optimizer.zero_grad()
    if when == "forward":
        fused.finish()
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_the_weights_are_those_of_an_optimizer_after_backward_to_the_bit(when: str) -> None:
    expected = trained("after")
    for name, weight in trained(when).items():
        assert torch.equal(weight, expected[name]), name


def test_in_backward_adds_up_gradients_of_micro_batches_until_they_are_whole() -> None:
    """With `accumulates`: as an optimizer after two backward passes; and what was never called whole is never used."""
    expected, model = layers(), layers()
    optimizer, fused = adamw(list(expected.parameters())), InBackward(model, adamw, "forward", accumulates=True)
    for step in range(3):
        for micro_batch in range(2):
            loss_of(expected, 2 * step + micro_batch).backward()
            loss_of(model, 2 * step + micro_batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        fused.step()
    fused.finish()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    loss_of(model, 9).backward()
    fused.finish()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def most_bytes(fuse: bool) -> int:
    """The largest sum of all storages in a backward pass and its update, measured; the states are there before."""
    model = layers()
    fused = InBackward(model, adamw) if fuse else None
    optimizer = None if fuse else adamw(list(model.parameters()))
    for step in range(2):
        with StorageTrace({}) as trace:
            loss_of(model, step).backward()
            if optimizer is not None:
                optimizer.step()
        if optimizer is not None:
            optimizer.zero_grad()
    assert fused is None or all(parameter.grad is None for parameter in model.parameters())
    held = most = 0
    for event in trace.trace.storages:
        held += event.delta_bytes
        most = max(most, held)
    return most


def test_the_gradients_of_all_modules_but_one_are_saved() -> None:
    """As predicted, but for a bias and the activations of two samples: 1 % of the gradients."""
    sizes = [[parameter.numel() for parameter in layer.parameters()] for layer in layers()]
    whole_bytes = 4 * sum(map(sum, sizes))
    saved_bytes = most_bytes(fuse=False) - most_bytes(fuse=True)
    assert saved_bytes == pytest.approx(whole_bytes - gradient_bytes_at_most(sizes), rel=0.01)


def test_in_backward_is_called_in_one_of_two_passes() -> None:
    with pytest.raises(LabError, match="did you mean 'backward'"):
        InBackward(layers(), adamw, "backwards")  # type: ignore[arg-type]
