"""ViT against its papers and against timm."""

import pytest
import torch

from dlojz import models

# Source: timm's vit_*_patch16_224, which carry the papers' weights; FLOPs in arXiv 2012.12877, table 5, and
# arXiv 2106.04803, table 4 (B/16 and L/16 at 384 pixels).
EXACT = {"vit_ti_16": 5_717_416, "vit_s_16": 22_050_664, "vit_b_16": 86_567_656, "vit_l_16": 304_326_632}


@pytest.mark.parametrize("name", EXACT)
def test_parameters_are_exact(name: str) -> None:
    assert models.describe(name).parameters == EXACT[name]


def test_vit_h_14_has_the_papers_size() -> None:
    assert models.describe("vit_h_14").parameters == pytest.approx(632e6, rel=0.005)


@pytest.mark.parametrize(
    ("name", "image_size", "expected"),
    [("vit_s_16", 224, 4.6e9), ("vit_b_16", 224, 17.6e9), ("vit_b_16", 384, 55.4e9), ("vit_l_16", 384, 190.7e9)],
)
def test_multiply_adds_are_the_papers(name: str, image_size: int, expected: float) -> None:
    assert models.describe(name, image_size).multiply_adds == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("image_size", "in_channels"), [(32, 1), (64, 1), (64, 3)])
def test_vit_tiny_takes_grey_and_colour_at_several_sizes(image_size: int, in_channels: int) -> None:
    model = models.build("vit_tiny", image_size=image_size, in_channels=in_channels)
    assert model(torch.randn(2, in_channels, image_size, image_size)).shape == (2, 10)
