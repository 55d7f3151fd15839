"""CoAtNet against its paper: parameters, multiply-adds, and what the attention computes."""

import pytest
import torch
import torch.nn.functional as F

from dlojz import models
from dlojz.models.coatnet import AttentionBlock, CoAtNet, MBConvBlock, RelativeAttention
from dlojz.models.sizes import COATNET_SIZES

# Source: arXiv 2106.04803v2, tables 4, 5 and 9.
PAPER_PARAMETERS = {
    "coatnet_0": (25e6, 0.015),
    "coatnet_1": (42e6, 0.015),
    "coatnet_2": (75e6, 0.015),
    "coatnet_3": (168e6, 0.015),
    "coatnet_4": (275e6, 0.015),
    "coatnet_5": (688e6, 0.015),
    "coatnet_6": (1.47e9, 0.03),
    "coatnet_7": (2.44e9, 0.03),
}
# Of the variant with the stride in the depthwise convolution (table 9, and the rows marked with a dagger in table 5)
# where the paper tells them apart, which it does up to CoAtNet-3.
PAPER_MULTIPLY_ADDS = [
    ("coatnet_0", 224, 4.6e9),
    ("coatnet_1", 224, 8.8e9),
    ("coatnet_2", 224, 16.6e9),
    ("coatnet_3", 384, 114e9),
    ("coatnet_3", 512, 214e9),
    ("coatnet_4", 384, 189.5e9),
    ("coatnet_4", 512, 361e9),
    ("coatnet_5", 512, 812e9),
    ("coatnet_6", 512, 1521e9),
    ("coatnet_7", 512, 2586e9),
]


@pytest.mark.parametrize("name", PAPER_PARAMETERS)
def test_parameters_are_the_papers(name: str) -> None:
    expected, tolerance = PAPER_PARAMETERS[name]
    assert models.describe(name).parameters == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize(("name", "image_size", "expected"), PAPER_MULTIPLY_ADDS)
def test_multiply_adds_are_the_papers(name: str, image_size: int, expected: float) -> None:
    assert models.describe(name, image_size).multiply_adds == pytest.approx(expected, rel=0.05)


def test_relative_bias_is_the_table_at_the_difference_of_positions() -> None:
    side = 3
    attention = RelativeAttention(8, 8, side, 4)
    torch.nn.init.normal_(attention.position_bias)
    bias_NTT = attention.relative_bias()
    for query in range(side**2):
        for key in range(side**2):
            d_row, d_column = query // side - key // side, query % side - key % side
            expected_N = attention.position_bias[:, d_row + side - 1, d_column + side - 1]
            assert torch.equal(bias_NTT[:, query, key], expected_N)


def test_attention_is_softmax_of_scores_plus_bias() -> None:
    torch.manual_seed(0)
    attention = RelativeAttention(12, 16, 2, 8)
    torch.nn.init.normal_(attention.position_bias)
    x_BTD = torch.randn(3, 4, 12)
    q, k, v = attention.qkv(x_BTD).view(3, 4, 2, 3, 8).permute(3, 0, 2, 1, 4)
    weights = F.softmax(q @ k.transpose(-1, -2) / 8**0.5 + attention.relative_bias(), dim=-1)
    expected = attention.project((weights @ v).transpose(1, 2).reshape(3, 4, 16))
    torch.testing.assert_close(attention(x_BTD), expected)


@pytest.mark.parametrize(("in_width", "width", "stride"), [(16, 16, 1), (16, 32, 1), (16, 16, 2), (16, 32, 2)])
def test_blocks_take_any_change_of_width_and_side(in_width: int, width: int, stride: int) -> None:
    x_BCHW = torch.randn(2, in_width, 8, 8)
    expected = (2, width, 8 // stride, 8 // stride)
    assert MBConvBlock(in_width, width, stride)(x_BCHW).shape == expected
    attention = AttentionBlock(in_width, width, stride, 8 // stride, head_dim=8)
    torch.nn.init.zeros_(attention.attention.position_bias)
    assert attention(x_BCHW).shape == expected


def test_coatnet_7_mixes_convolution_and_attention_at_one_resolution_in_stage_3() -> None:
    with torch.device("meta"):
        blocks = CoAtNet(COATNET_SIZES["coatnet_7"], image_size=512, num_classes=10).blocks
        x = torch.empty(1, 3, 512, 512)
    shapes = [x.shape]
    for block in blocks:
        x = block(x)
        shapes.append(x.shape)
    kinds = [type(block).__name__ for block in blocks]
    first = kinds.index("AttentionBlock")
    assert kinds[first - 8 : first] == ["MBConvBlock"] * 8
    assert shapes[first] == (1, 1024, 32, 32)
    assert shapes[first + 1] == shapes[first + 42] == (1, 2048, 32, 32)
    assert shapes[first + 43] == (1, 3072, 16, 16)


@pytest.mark.parametrize("in_channels", [1, 3])
def test_coatnet_tiny_takes_grey_and_colour_at_several_sizes(in_channels: int) -> None:
    for image_size in (32, 64, 96):
        model = models.build("coatnet_tiny", image_size=image_size, in_channels=in_channels)
        assert model(torch.randn(2, in_channels, image_size, image_size)).shape == (2, 10)


def test_coatnet_tiny_is_small_enough_for_a_laptop() -> None:
    assert 500_000 <= models.describe("coatnet_tiny").parameters <= 1_000_000


def test_coatnet_tiny_learns_digits() -> None:
    from sklearn.datasets import load_digits

    digits = load_digits(n_class=2)
    x_BCHW = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1, size=64)
    target_B = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = models.build("coatnet_tiny", in_channels=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(20):
        batch = slice(16 * step, 16 * step + 16)
        loss = F.cross_entropy(model(x_BCHW[batch]), target_B[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < 0.2
