"""AlexNet: eight blocks, the sizes of torchvision's."""

import pytest
import torch

from dlojz import models


def test_full_size_has_eight_blocks_and_torchvisions_parameters() -> None:
    summary = models.describe("alexnet")
    assert summary.blocks == 8
    assert summary.parameters == 61_100_840  # torchvision.models.alexnet
    assert summary.multiply_adds == pytest.approx(0.71e9, rel=0.01)  # torchvision's table: 0.71 GFLOPS


@pytest.mark.parametrize("image_size", [63, 64, 100, 224])
def test_alexnet_tiny_takes_any_size_from_63_pixels(image_size: int) -> None:
    model = models.build("alexnet_tiny", image_size=image_size, in_channels=1)
    assert model(torch.randn(2, 1, image_size, image_size)).shape == (2, 10)
