"""Llama: exact sizes, rotary positions, grouped queries."""

from dataclasses import replace

import pytest
import torch

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.models.llama import LlamaBlock, rotate
from dlojz.models.qwen_deepseek import DecoderBlock, LatentAttention
from dlojz.models.sizes import DEEPSEEK_SIZES, LLAMA_SIZES, QWEN_SIZES

# Source: the released weights.
EXACT = {
    "tinyllama_1b": 1_100_048_384,
    "llama_2_7b": 6_738_415_616,
    "llama_2_13b": 13_015_864_320,
    "llama_2_70b": 68_976_648_192,
    "llama_3_8b": 8_030_261_248,
    "llama_3_70b": 70_553_706_496,
    "llama_3_1_405b": 405_853_388_800,
    "qwen_3_8b": 8_190_735_360,
    "qwen_3_32b": 32_762_123_264,
    "qwen_3_30b_a3b": 30_532_122_624,
    "qwen_3_235b_a22b": 235_093_634_560,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_419_200 - 58 * 256,  # without the bias of its gates, which balances them
}


@pytest.mark.parametrize("name", EXACT)
def test_parameters_are_exact(name: str) -> None:
    assert models.describe(name).parameters == EXACT[name]


def test_rotate_keeps_lengths_and_leaves_the_first_position() -> None:
    x_BNTH = torch.randn(2, 3, 5, 8)
    turned = rotate(x_BNTH, 10_000.0)
    torch.testing.assert_close(turned.norm(dim=-1), x_BNTH.norm(dim=-1))
    assert torch.equal(turned[:, :, 0], x_BNTH[:, :, 0])


def test_rotate_makes_scores_depend_on_distance_alone() -> None:
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


def test_llama_block_grouped_queries_are_full_heads_with_shared_keys_and_values() -> None:
    torch.manual_seed(0)
    size = replace(LLAMA_SIZES["llama_tiny"], width=32, num_heads=4, num_kv_heads=2, mlp_width=48)
    grouped, full = LlamaBlock(size), LlamaBlock(replace(size, num_kv_heads=4))
    state = grouped.state_dict()
    for projection in ("key.weight", "value.weight"):
        state[projection] = state[projection].unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    x_BTD = torch.randn(2, 6, 32)
    torch.testing.assert_close(grouped(x_BTD), full(x_BTD))


def test_latent_attention_is_the_written_out_sum_over_its_heads() -> None:
    """Equations 37 to 47 of DeepSeek-V2, head by head: the rotated key is one for all, values have no rotated part."""
    torch.manual_seed(0)
    size = DEEPSEEK_SIZES["deepseek_tiny"]
    module, x_TD = LatentAttention(size), torch.randn(6, size.width)
    queries = module.query(module.query_norm(module.query_down(x_TD))).unflatten(-1, (size.num_heads, -1))
    latent, shared = module.latent_down(x_TD).split((size.latent, size.rotated_dim), dim=-1)
    both = module.latent_up(module.latent_norm(latent)).unflatten(-1, (size.num_heads, -1))
    heads = []
    for head in range(size.num_heads):
        plain, turned = queries[:, head].split((size.head_dim, size.rotated_dim), dim=-1)
        key, value = both[:, head].chunk(2, dim=-1)
        turned, once = (rotate(one[None, None], size.rope_theta)[0, 0] for one in (turned, shared))
        scores = (plain @ key.T + turned @ once.T) / (size.head_dim + size.rotated_dim) ** 0.5
        heads.append(scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).softmax(dim=-1) @ value)
    torch.testing.assert_close(module(x_TD[None])[0], module.project(torch.cat(heads, dim=-1)))


def test_shared_experts_see_every_token_and_the_first_blocks_have_none() -> None:
    model = models.build("deepseek_tiny")
    blocks = [block for block in model.blocks if isinstance(block, DecoderBlock)]
    assert [block.mixture is not None for block in blocks] == [False, True, True, True]
    assert [block.mlp.gate.out_features for block in blocks if block.mlp] == [352, 64, 64, 64]
    block, x_BTD = blocks[1], torch.randn(1, 5, 128)
    assert block.mixture is not None and block.mlp is not None
    for parameter in block.mixture.parameters():
        torch.nn.init.zeros_(parameter)
    inner_BTD = x_BTD + block.attention(block.norm1(x_BTD))
    torch.testing.assert_close(block(x_BTD), inner_BTD + block.mlp(block.norm2(inner_BTD)))


@pytest.mark.parametrize("name", ["qwen_tiny", "deepseek_tiny"])
def test_qwen_and_deepseek_refuse_tensor_parallelism_where_no_layer_is_split(name: str) -> None:
    with pytest.raises(LabError, match=f"tp=2 was received, but {name} has no tensor-parallel form: use a model of"):
        RunConfig.of(model=name, tp=2, engine="by_hand")


def test_qwen_s_heads_have_a_width_of_their_own() -> None:
    size = QWEN_SIZES["qwen_tiny"]
    model = models.build("qwen_tiny")
    attention = model.blocks[1].attention  # type: ignore[union-attr]
    assert attention.query.weight.shape == (4 * size.head_dim, size.width)  # type: ignore[union-attr]
    assert attention.query_norm.weight.shape == (size.head_dim,)  # type: ignore[union-attr]
