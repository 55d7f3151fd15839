"""Llama: exact sizes, rotary positions, grouped queries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dlojz import models
from dlojz.models.llama import LlamaBlock, rotate
from dlojz.models.sizes import LLAMA_SIZES

# Source: the released weights.
EXACT = {
    "llama_2_7b": 6_738_415_616,
    "llama_2_13b": 13_015_864_320,
    "llama_2_70b": 68_976_648_192,
    "llama_3_8b": 8_030_261_248,
    "llama_3_70b": 70_553_706_496,
    "llama_3_1_405b": 405_853_388_800,
}


@pytest.mark.parametrize("name", EXACT)
def test_parameters_are_exact(name: str) -> None:
    assert models.describe(name).parameters == EXACT[name]


def test_rotation_keeps_lengths_and_leaves_the_first_position() -> None:
    x_BNTH = torch.randn(2, 3, 5, 8)
    turned = rotate(x_BNTH, 10_000.0)
    torch.testing.assert_close(turned.norm(dim=-1), x_BNTH.norm(dim=-1))
    assert torch.equal(turned[:, :, 0], x_BNTH[:, :, 0])


def test_scores_of_rotated_vectors_depend_on_distance_alone() -> None:
    q, k = torch.randn(8), torch.randn(8)
    scores_TT = rotate(q.expand(1, 1, 10, 8), 10_000.0) @ rotate(k.expand(1, 1, 10, 8), 10_000.0).transpose(-1, -2)
    for distance in range(-9, 10):
        diagonal = scores_TT[0, 0].diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)


def test_rotation_computes_in_float32_whatever_the_precision() -> None:
    x = torch.randn(1, 1, 1000, 8)
    assert rotate(x.bfloat16(), 10_000.0).dtype == torch.bfloat16
    difference = rotate(x.bfloat16(), 10_000.0).float() - rotate(x.bfloat16().float(), 10_000.0)
    assert difference.abs().max() < 0.02


def test_grouped_queries_are_full_heads_with_shared_keys_and_values() -> None:
    torch.manual_seed(0)
    size = replace(LLAMA_SIZES["llama_tiny"], width=32, num_heads=4, num_kv_heads=2, mlp_width=48)
    grouped, full = LlamaBlock(size), LlamaBlock(replace(size, num_kv_heads=4))
    state = grouped.state_dict()
    for projection in ("key.weight", "value.weight"):
        state[projection] = state[projection].unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    x_BTD = torch.randn(2, 6, 32)
    torch.testing.assert_close(grouped(x_BTD), full(x_BTD))
