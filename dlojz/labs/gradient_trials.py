"""Lab 03: the small model on which gradients are averaged, the data of each rank, and the true gradients.

Layer 6 (labs). Invariant: the true gradients are those of one process on all the data; nothing here communicates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlojz.labs.verdict import Said

if TYPE_CHECKING:
    from torch import Tensor, nn

SAMPLES, WIDTH, CLASSES = 4, 6, 3
MICRO_BATCHES = 3
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
LABELS = {f"gradient of {name}": Said(f"the gradient of {name}", f"le gradient de {name}") for name in NAMES}

Batch = tuple["Tensor", "Tensor"]


def make_model(seed: int) -> nn.Module:
    """Two linear layers, the same on every rank."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def batch_of(rank: int, seed: int, number: int = 0) -> Batch:
    """A rank's micro-batch: inputs of some size, so that gradients are of order one, and classes."""
    import torch

    generator = torch.Generator().manual_seed(10_000 * seed + 100 * rank + number)
    inputs = 5 * torch.randn((SAMPLES, WIDTH), generator=generator)
    return inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over a batch."""
    import torch.nn.functional as F

    return F.cross_entropy(model(batch[0]), batch[1])


def gradients(model: nn.Module) -> dict[str, Any]:
    """The gradients that a model holds, by the names under which they are judged."""
    return {
        f"gradient of {name}": None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }


def true_gradients(seed: int, batches: list[Batch]) -> dict[str, Tensor]:
    """Gradients of the mean loss over batches of equal size, on one process."""
    import torch

    model = make_model(seed)
    torch.stack([loss_of(model, batch) for batch in batches]).mean().backward()
    return gradients(model)
