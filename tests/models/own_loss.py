"""Model of a file of one's own that returns no logits alone, for the tests: its file has a loss."""

from own_models import Pair, example_inputs
from torch import Tensor, nn

from dlojz.models.blocks import mean_loss

__all__ = ["example_inputs"]


def build() -> nn.Module:
    return Pair()


def loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return mean_loss(output[0], targets) + 1
