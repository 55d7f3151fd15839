"""What waits in host memory: each storage once, none of the weights, none that is too small; the same gradients."""

import pytest
import torch
from torch import Tensor, nn

from dlojz.by_hand.activation_offload import ActivationOffload

ROWS, WIDTH = 8, 64
BYTES = 4 * ROWS * WIDTH
"""Of an activation, 2 KiB: both tanh save theirs, and the linear layer saves the second again."""


def trained(minimum_bytes: int | None, rows: int = ROWS) -> tuple[list[Tensor], tuple[int, int, int]]:
    """Gradients, and what was in host memory after forward and after backward, and what has crossed."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Linear(WIDTH, 3)), torch.randn(rows, WIDTH, requires_grad=True)
    held = left = crossed = 0
    if minimum_bytes is None:
        model(x).sum().backward()
    else:
        offload = ActivationOffload(model, minimum_bytes)
        with offload:
            output = model(x)
        held = offload.offloaded_bytes
        assert held == offload.most_bytes == sum(copy.nbytes for copy in offload.host_copies())
        output.sum().backward()
        del output
        left, crossed = offload.offloaded_bytes, offload.moved_bytes
    gradients = [parameter.grad for parameter in (x, *model.parameters()) if parameter.grad is not None]
    return gradients, (held, left, crossed)


@pytest.mark.parametrize(
    ("minimum_bytes", "moved"),
    [(0, 2 * BYTES), (1, 2 * BYTES), (BYTES, 2 * BYTES), (BYTES + 1, 0)],
)
def test_activation_offload_moves_a_large_storage_once_each_way(minimum_bytes: int, moved: int) -> None:
    gradients, counted = trained(minimum_bytes)
    assert counted == (moved, 0, 2 * moved)
    for own, plain in zip(gradients, trained(None)[0], strict=True):
        assert torch.equal(own, plain)


@pytest.mark.parametrize(("elements", "moved"), [(255, 0), (256, 1024)])
def test_activation_offload_moves_a_kibibyte_by_default_and_no_less(elements: int, moved: int) -> None:
    model = nn.Tanh()
    with ActivationOffload(model) as offload:
        output = model(torch.ones(elements, requires_grad=True))
    assert (output.numel(), offload.offloaded_bytes) == (elements, moved)


def test_activation_offload_never_moves_what_is_empty() -> None:
    assert trained(0, rows=0)[1] == (0, 0, 0)
