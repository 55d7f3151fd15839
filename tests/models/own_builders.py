"""Builders of a file of one's own that compute with tensors, in a file that imports torchvision, for the tests."""

from itertools import pairwise

import torch
import torchvision  # noqa: F401
from torch import Tensor, nn

WIDTHS = (4, 8, 12)


class Computed(nn.Module):
    """Its widths are computed with tensors, which are filled in place; its head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        widths = torch.empty(len(WIDTHS)).fill_(WIDTHS[0]).cumsum(0).int().tolist()
        self.token = nn.Embedding(10, widths[0])
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.back = nn.Linear(widths[-1], widths[0])
        self.head = nn.Linear(widths[0], 10, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.back(x))
        return logits


class Read(Computed):
    """Reads the values of a parameter while it is built, too."""

    def __init__(self) -> None:
        super().__init__()
        ones = nn.Parameter(torch.ones(5))
        self.gain = ones
        self.last = nn.Linear(int(self.gain.sum()), 2)


computed, read = Computed, Read


def example_inputs() -> Tensor:
    return torch.zeros(2, 8, dtype=torch.long)
