"""Model of a file of one's own that returns no logits alone, for the tests: its file has a loss."""

from __future__ import annotations

from torch import Tensor, nn

from dlojz.models.blocks import mean_loss
from tests.models import own_models
from tests.models.own_models import example_inputs

__all__ = ["example_inputs"]


def build() -> nn.Module:
    return own_models.Pair()


def loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return mean_loss(output[0], targets) + 1
