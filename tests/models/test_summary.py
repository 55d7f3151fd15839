"""Counting: attention included, block by block as in one pass, and without a side effect."""

import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dlojz import models
from dlojz.models.meta import on_meta
from dlojz.models.summary import count, usual_sizes


@pytest.mark.parametrize("name", models.names())
def test_the_kept_counts_are_those_of_the_built_model(name: str) -> None:
    usual = [sizes for sizes in usual_sizes() if sizes.name == name]
    assert models.spec(name).num_classes in [sizes.num_classes for sizes in usual]
    for sizes in usual:
        kept = models.describe(name, num_classes=sizes.num_classes)
        assert kept == count(sizes) and kept.flops > 0, "run benchmarks/count_models.py again"


def test_models_command_keeps_counts_that_load_no_torch() -> None:
    asked = (
        "import sys; from dlojz.cli.main import main; assert main(['models']) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", asked], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("name", ["coatnet_tiny", "vit_tiny", "alexnet_tiny", "gpt_tiny", "llama_tiny", "moe_tiny"])
def test_without_initial_values_a_model_has_the_same_shapes(name: str) -> None:
    with on_meta():
        bare = models.build(name)
    with torch.device("meta"):
        whole = models.build(name)
    assert [(key, one.shape, one.dtype, one.device) for key, one in bare.state_dict().items()] == [
        (key, one.shape, one.dtype, one.device) for key, one in whole.state_dict().items()
    ]
    assert repr(bare) == repr(whole)


def test_model_shapes_load_no_compiler() -> None:
    asked = """
import sys
from dlojz.config.run_config import RunConfig
from dlojz.prediction.shapes import model_shapes
for name in ("coatnet_tiny", "vit_tiny", "alexnet_tiny", "gpt_tiny", "llama_tiny", "moe_tiny"):
    model_shapes(RunConfig.of(model=name))
assert "torch" in sys.modules and "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", asked], check=True)


@pytest.mark.parametrize("name", ["coatnet_tiny", "vit_tiny", "alexnet_tiny", "gpt_tiny", "llama_tiny"])
def test_counting_each_kind_of_block_once_is_counting_the_whole_pass(name: str) -> None:
    entry = models.spec(name)
    if entry.family == "image":
        x = torch.randn(1, 3, entry.image_size or 1, entry.image_size or 1)
    else:
        x = torch.zeros(1, entry.sequence_length or 1, dtype=torch.long)
    model = models.build(name).eval()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x)
    summary = models.describe(name)
    assert summary.flops == counter.get_total_flops() == 2 * summary.multiply_adds
    assert summary.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert summary.blocks == len(model.blocks)


def test_multiply_adds_count_attention() -> None:
    width, depth, tokens, vocabulary = 128, 4, 128, 256
    dense = depth * 12 * width**2 + width * vocabulary
    attention = depth * 2 * tokens * width
    assert models.describe("gpt_tiny").multiply_adds == tokens * (dense + attention)


def test_multiply_adds_of_attention_grow_with_the_square_of_the_tokens() -> None:
    short, long = (models.describe("gpt_tiny", sequence_length=length).multiply_adds for length in (128, 256))
    assert long - 2 * short == 4 * 2 * 128 * (256**2 - 2 * 128**2)


def test_count_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    count(usual_sizes()[0])
    assert torch.equal(before, torch.get_rng_state())


def test_sizes_asked_for_are_those_described() -> None:
    summary = models.describe("coatnet_tiny", 96, num_classes=5, in_channels=1)
    assert (summary.image_size, summary.sequence_length) == (96, None)
    model = models.build("coatnet_tiny", image_size=96, num_classes=5, in_channels=1)
    assert summary.parameters == sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(ValueError, match="use 96 or 128"):
        models.describe("coatnet_tiny", 100)
