"""Model of one's own whose example inputs are random numbers: two linear layers."""

import torch
from torch import Tensor, nn

INPUTS, HIDDEN, CLASSES = 64, 128, 10


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def example_inputs() -> Tensor:
    return torch.randn(32, INPUTS)
