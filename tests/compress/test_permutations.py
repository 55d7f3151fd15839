"""Permutations: the model computes the same."""

import copy

import pytest
import torch
from torch import Tensor, nn

from dlojz import models
from dlojz.compress.permutations import permute_query_key
from dlojz.models.blocks import TransformerBlock

ROUNDED = 5e-6
"""Of the output's norm: float32 rounds to 6e-8, some twenty sums one after the other; how they are cut into vectors,
and with it the rounding, hangs on the processor (8e-7 seen with AVX-512, 1.1e-6 without)."""


def model_and_inputs(name: str) -> tuple[nn.Module, Tensor]:
    """With biases and norms that are not the 0 and 1 of the beginning, which hide a permutation that forgot them."""
    torch.manual_seed(0)
    if name == "vit_tiny":
        model, inputs = models.build(name, image_size=16, num_classes=10), torch.randn(8, 3, 16, 16)
    else:
        model, inputs = models.build(name, sequence_length=16), torch.randint(0, 256, (4, 16))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval(), inputs


@torch.no_grad()
def shuffled(model: nn.Module) -> nn.Module:
    """A copy under permutations drawn at random, another one in every block and head."""
    found, generator = copy.deepcopy(model), torch.Generator().manual_seed(7)
    for block in found.modules():
        if isinstance(block, TransformerBlock):
            for head in range(4):
                permute_query_key(block, head, torch.randperm(32, generator=generator))
    return found


@pytest.mark.parametrize("name", ["vit_tiny", "gpt_tiny"])
@torch.no_grad()
def test_permute_query_key_leaves_the_output_unchanged(name: str) -> None:
    """In float64 to 1e-12 of the output; in float32 to what sums in another order round differently."""
    model, inputs = model_and_inputs(name)
    found = shuffled(model)
    changed = [key for key, tensor in model.state_dict().items() if not torch.equal(tensor, found.state_dict()[key])]
    assert len(changed) >= 8
    before, after = model(inputs), found(inputs)
    assert (after - before).norm() < ROUNDED * before.norm()
    if inputs.is_floating_point():
        inputs = inputs.double()
    before, after = model.double()(inputs), found.double()(inputs)
    assert (after - before).abs().max() < 1e-12 * before.abs().max()
