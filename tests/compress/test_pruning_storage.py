"""What a file keeps of a pruned model: the bytes that were predicted, and the weights to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dlojz.base.errors import LabError
from dlojz.compress import masks
from dlojz.compress.pruning import bitmask_bytes, bitmask_tensors, pack_bits, two_to_four_bytes, two_to_four_tensors
from dlojz.compress.task import payload_bytes, stored_weights
from dlojz.compress.two_to_four import masks_2_of_4

from .restoring import restore, unpack_bits


def small_model() -> nn.Module:
    """Sizes that fill no byte: 3 × 5 × 2, 12 × 7 and 8 × 3 places; biases, a norm and its statistics stay whole."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(5, 3, 2), nn.BatchNorm1d(3), nn.Linear(7, 12), nn.Linear(8, 3), nn.Embedding(4, 4))


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_bits_come_back_and_take_an_eighth(bits: list[bool]) -> None:
    packed = pack_bits(torch.tensor(bits))
    assert packed.dtype == torch.uint8 and packed.numel() == -(-len(bits) // 8)
    assert unpack_bits(packed, len(bits)).tolist() == bits


def test_pack_bits_puts_the_first_place_in_the_lowest_bit() -> None:
    assert pack_bits(torch.tensor([True, False, True] + [False] * 6 + [True])).tolist() == [0b101, 0b10]


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("sparsity", [0.0, 0.31, 0.5, 0.97])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_masked_model_takes_the_bytes_predicted_and_comes_back(
    per_layer: bool, sparsity: float, dtype: torch.dtype
) -> None:
    model = small_model().to(dtype)
    predicted = bitmask_bytes(model, sparsity, per_layer=per_layer)
    kept = masks.magnitude_masks(masks.weights(model), sparsity, per_layer=per_layer)
    masks.hold(model, kept)
    masks.release(model)
    with torch.no_grad():
        model[2].weight[kept["2"]] *= 0  # a weight that stays may be zero, and is stored as any other
    stored = bitmask_tensors(model, kept)
    assert payload_bytes(stored) == predicted
    other = small_model().to(dtype)
    restore(other, stored)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in other.state_dict().items())


def test_below_one_weight_in_32_a_mask_costs_more_than_it_saves() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    dense = payload_bytes(stored_weights(model))
    assert bitmask_bytes(model, 1 / 64) > dense == bitmask_bytes(model, 1 / 32) > bitmask_bytes(model, 1 / 16)


def test_a_2_of_4_model_takes_the_bytes_predicted_and_comes_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(5, 3, 2), nn.Linear(12, 7), nn.Linear(4, 1))
    predicted = two_to_four_bytes(model)
    masks.hold(model, masks_2_of_4(model))
    masks.release(model)
    stored = two_to_four_tensors(model)
    assert payload_bytes(stored) == predicted
    other = nn.Sequential(nn.Conv1d(5, 3, 2), nn.Linear(12, 7), nn.Linear(4, 1))
    restore(other, stored)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in other.state_dict().items())


def test_at_half_the_weights_a_bitmask_and_2_of_4_take_the_same() -> None:
    """A bit for each place, or two bits for each of the half that stays."""
    model = nn.Sequential(nn.Linear(64, 64))
    assert bitmask_bytes(model, 0.5) == two_to_four_bytes(model)


def test_bitmask_bytes_and_two_to_four_bytes_refuse_the_impossible() -> None:
    with pytest.raises(LabError, match="sparsity"):
        bitmask_bytes(small_model(), 1.0)
    with pytest.raises(LabError, match="2 is 12 × 7"):
        two_to_four_bytes(small_model())
