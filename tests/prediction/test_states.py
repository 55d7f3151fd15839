"""The closed forms against the ZeRO paper's own figures; against real processes they are tested in tests/train."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlojz import predict
from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.prediction.engine_memory_sharded import FSDP2
from dlojz.prediction.forecast import forecast
from dlojz.prediction.shapes import ModelShapes, ParameterShape, model_shapes
from dlojz.prediction.states import (
    optimizer_bytes,
    padded_parameters,
    predict_states,
    renewed_bytes,
    touching_elements,
    zero_3_sub_groups,
    zero_by_hand_shares,
)
from dlojz.results.footprint import STATES


def transformer_of(num_parameters: int, pieces: int) -> ModelShapes:
    """A model of equal parameters, so that shards cut none of them."""
    each = num_parameters // pieces
    return ModelShapes(
        tuple(ParameterShape(f"blocks.{i}.weight", (each,), i, f"blocks.{i}") for i in range(pieces)), 0, 0
    )


@pytest.mark.parametrize(
    ("ranks", "gigabytes"),
    [(4, (52.5, 41.3, 30)), (16, (35.6, 21.6, 7.5)), (64, (31.4, 16.6, 1.88)), (1024, (30.1, 15.1, 0.12))],
)
def test_the_paper_s_table_for_7_5_billion_parameters(ranks: int, gigabytes: tuple[float, ...]) -> None:
    """Rajbhandari et al. 2020, Table 1: mixed precision and Adam, stages 1, 2 and 3; tolerance: the digits printed."""
    shapes = transformer_of(7_500_000_000 // 1024 * 1024, 1024)
    for stage, expected in zip((1, 2, 3), gigabytes, strict=True):
        # Stage 1 keeps whole gradients in the paper, as DeepSpeed does while it accumulates.
        accumulate = 2 if stage == 1 else 1
        config = RunConfig.of(
            dp=ranks, engine="deepspeed", zero=stage, precision="bf16", optimizer="adamw", micro_batches=accumulate
        )
        states_bytes = predict_states(config, shapes).states_bytes
        assert states_bytes / 1e9 == pytest.approx(expected, rel=0.005, abs=0.05 if expected > 2 else 0.005)


@pytest.mark.parametrize(("precision", "per_parameter"), [("fp32", 16), ("bf16", 16)])
def test_sixteen_bytes_per_parameter(precision: str, per_parameter: int) -> None:
    """fp32: 4 + 4 + 8; bf16 with a master copy: 2 + 2 + 4 + 8 (arXiv 1910.02054, §3.1); plus step counts."""
    engine = "torch" if precision == "fp32" else "deepspeed"
    config = RunConfig.of(model="coatnet_0", engine=engine, precision=precision)
    shapes = model_shapes(config)
    memory = predict_states(config, shapes)
    steps_bytes = 4 * len(shapes.parameters)
    assert memory.states_bytes - (memory.buffers_bytes or 0) - steps_bytes == per_parameter * shapes.num_parameters


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12), dp=st.integers(1, 8))
@settings(max_examples=100)
def test_a_share_touches_the_parameters_whose_elements_it_holds(sizes: list[int], dp: int) -> None:
    shapes = ModelShapes(
        tuple(ParameterShape(f"blocks.{i}.w", (size,), i, f"blocks.{i}") for i, size in enumerate(sizes)), 0, 0
    )
    padded = padded_parameters(sum(sizes), dp)
    assert padded % dp == 0
    assert sum(sizes) <= padded < sum(sizes) + 2 * dp
    share = padded // dp
    owner = [(index, sum(sizes[:index])) for index in range(len(sizes))]
    for rank in range(dp):
        mine = set(range(rank * share, (rank + 1) * share))
        whole = sum(sizes[index] for index, first in owner if mine & set(range(first, first + sizes[index])))
        assert touching_elements(shapes, dp, rank) == whole + sum(element >= sum(sizes) for element in mine)


def test_a_parameter_that_ends_where_a_share_does_touches_no_other() -> None:
    shapes = ModelShapes(
        tuple(ParameterShape(f"blocks.{i}.w", (size,), i, f"blocks.{i}") for i, size in enumerate((4, 4, 3, 1))), 0, 0
    )
    assert [touching_elements(shapes, 3, rank) for rank in range(3)] == [4, 4, 4]
    assert [touching_elements(shapes, 2, rank) for rank in range(2)] == [4 + 4, 4 + 3 + 1]


@given(sizes=st.lists(st.integers(1, 300_000), min_size=1, max_size=12), dp=st.integers(1, 16), stage=st.integers(1, 3))
@settings(max_examples=200)
def test_shares_by_hand_make_the_whole(sizes: list[int], dp: int, stage: int) -> None:
    """All ranks' shares together are the weights and less than one element per rank and flat tensor of padding."""
    shapes = ModelShapes(
        tuple(
            ParameterShape(f"blocks.{i // 2}.w", (size,), i // 2, f"blocks.{i // 2}") for i, size in enumerate(sizes)
        ),
        0,
        0,
    )
    config = RunConfig.of(dp=dp, engine="by_hand", zero=stage, optimizer="sgd")
    shares = zero_by_hand_shares(config, shapes)
    assert sum(sizes) <= dp * sum(shares) <= sum(sizes) + (dp - 1) * len(shares)
    memory = predict_states(config, shapes)
    each = 4 * sum(shares)
    assert memory.weights_bytes == (each if stage == 3 else dp * each)
    assert memory.gradients_bytes == (dp * each if stage == 1 else each)


@given(rows=st.integers(1, 50), columns=st.integers(1, 50), dp=st.integers(1, 16))
@settings(max_examples=200)
def test_rows_are_shared_without_loss(rows: int, columns: int, dp: int) -> None:
    parameter = ParameterShape("blocks.0.w", (rows, columns), 0, "blocks.0")
    own = [parameter.rows_numel(dp, rank) for rank in range(dp)]
    assert sum(own) == parameter.numel
    assert all(one <= parameter.padded_rows_numel(dp) for one in own)
    assert dp * parameter.padded_numel(dp) >= parameter.numel


@pytest.mark.parametrize("engine", ["torch", "deepspeed", "by_hand"])
def test_predict_never_takes_more_states_in_a_higher_stage(engine: str) -> None:
    stages = (0, 2, 3) if engine == "torch" else (0, 1, 2, 3)
    totals = []
    for stage in stages:
        config = RunConfig.of(model="coatnet_0", dp=8, zero=stage, engine=engine, precision="bf16", micro_batches=2)
        totals.append(predict(config).memory.states_bytes)
    assert totals == sorted(totals, reverse=True)


def per_parameter(**fields: object) -> dict[str, float]:
    """Bytes of each category per parameter, of 2²⁰ parameters in one tensor on one of 64 ranks unless said."""
    config = RunConfig.of(**fields)
    memory = predict_states(config, transformer_of(2**20, 1))
    return {name: (memory.category(name) or 0) / 2**20 for name in STATES if name != "buffers"}


@pytest.mark.parametrize(
    ("fields", "total"),
    [
        ({"optimizer": "sgd"}, 8),
        ({"optimizer": "momentum"}, 12),
        ({"optimizer": "adamw"}, 16),
        ({"optimizer": "lamb"}, 16),
        ({"optimizer": "adamw_8bit"}, 8 + 2 + 2 * 4 / 256),
        ({"precision": "fp16"}, 16),  # autocast: weights and gradients in fp32
        ({"precision": "fp16", "engine": "deepspeed"}, 16),
        ({"precision": "bf16", "engine": "deepspeed"}, 16),
        ({"precision": "fp16", "engine": "deepspeed", "optimizer": "lamb"}, 16),
        ({"precision": "bf16", "engine": "deepspeed", "fp32_gradients": True}, 18),
        ({"precision": "fp16", "engine": "deepspeed", "fp32_gradients": True, "zero": 3}, 18),
        ({"precision": "bf16", "engine": "deepspeed", "optimizer": "adamw_8bit"}, 8 + 2 + 2 * 4 / 256),
        ({"precision": "bf16", "engine": "by_hand", "zero": 3}, 16),
    ],
)
def test_predict_states_gives_bytes_per_parameter(fields: dict[str, object], total: float) -> None:
    """Of one process; AdamW's one step count (4 bytes in all) is the tolerance."""
    assert sum(per_parameter(**fields).values()) == pytest.approx(total, abs=4.1 / 2**20)


def test_optimizer_bytes_have_a_scale_for_the_last_block_of_an_8_bit_moment_too() -> None:
    """4097 elements are 17 blocks of 256 at most: 2 moments × (4097 bytes + 17 scales of 4); 4095 are kept in fp32."""
    config = RunConfig.of(optimizer="adamw_8bit")
    assert optimizer_bytes(config, [4097]) == 2 * (4097 + 17 * 4)
    assert optimizer_bytes(config, [4096, 4095]) == 2 * (4096 + 16 * 4) + 2 * 4 * 4095


def test_a_compressing_optimizer_keeps_its_errors() -> None:
    """1-bit Adam on 10 elements over 2 ranks: two moments, one step count, and the errors of 3 chunks.

    Two chunks as a worker and one as a server, of 5 elements each, padded to a byte of signs.
    """
    config = RunConfig.of(dp=2, engine="by_hand", optimizer="one_bit_adam", warmup_steps=1)
    assert optimizer_bytes(config, [10]) == 4 * (2 * 10 + 1) + 4 * 3 * 8


def test_renewed_bytes_of_powersgd_are_the_errors_of_its_largest_bucket() -> None:
    """vit_tiny's 827,786 gradients: the first bucket closes after 265,482, at 1 MiB; the second holds the rest."""
    config = RunConfig.of(model="vit_tiny", dp=2, gradient_compression="powersgd", steps=20)
    assert renewed_bytes(config, model_shapes(config)) == 4 * (827_786 - 265_482)


def test_predict_states_with_fp32_gradients_changes_the_gradients_alone() -> None:
    """Stages 1 to 3 keep the share of what they shard; the paper's 2Ψ of gradients become 4Ψ."""
    for stage in range(4):
        given: dict[str, object] = {"engine": "deepspeed", "zero": stage, "precision": "bf16", "dp": 4}
        plain, kept = per_parameter(**given), per_parameter(**given, fp32_gradients=True)
        assert kept.pop("gradients") == 2 * plain.pop("gradients")
        assert kept == plain


def test_zero_3_closes_a_sub_group_with_the_parameter_that_fills_it() -> None:
    """DeepSpeed's loop over 5 shards of 4 elements: 8 are full with two, 9 with three; the last one is what is left."""
    shapes = transformer_of(40, 5)
    for size, expected in ((8, [2, 2, 1]), (9, [3, 2]), (1, [1] * 5), (20, [5]), (None, [5])):
        config = RunConfig.of(engine="deepspeed", zero=3, dp=2, sub_group_size=size)
        assert [len(sizes) for sizes in zero_3_sub_groups(config, shapes)] == expected
    assert zero_3_sub_groups(config, shapes) == [[4] * 5]


@pytest.mark.parametrize(
    ("size", "update", "per_element"),
    [(None, "auto", 8), (2 * 10**9, "auto", 8), (10**12, "auto", 8), (None, "fused", 6)],
)
def test_forecast_of_the_update_of_zero_3_takes_one_sub_group(size: int | None, update: str, per_element: int) -> None:
    """Llama 2 7B on 2 GPUs: 3.37e9 elements per rank.

    Of a sub-group, at most one shard (the embedding's) larger than its size, gradients in fp32 and AdamW's temporaries
    are held; with a fused kernel the flat gradients, and those in fp32 made of them.
    """
    config = RunConfig.of(
        **{"model": "llama_2_7b", "engine": "deepspeed", "zero": 3, "dp": 2, "precision": "bf16", "micro_batch": 1},
        **{"sequence_length": 512, "checkpointing": "full", "sub_group_size": size, "update": update},
    )
    told = forecast(config, 0, "a100-80").memory
    elements, shard = min(size or 10**9, 3_369_207_808), 32_000 * 4096 // 2
    assert told.at_peak_bytes and told.peak_moment == "optimizer"
    standing_bytes = 2 * 2_000_000 + 2 * 8_519_680  # the bucket of gradients, and cuBLAS twice
    update_bytes = told.at_peak_bytes["workspace"] - standing_bytes
    assert per_element * elements <= update_bytes <= per_element * (elements + shard)


def test_buffers_stay_fp32_under_autocast() -> None:
    for engine, zero, expected in (("by_hand", 2, 1), ("by_hand", 3, 2), ("torch", 0, 1), ("deepspeed", 1, 2)):
        full, half = (
            predict(RunConfig.of(dp=2, engine=engine, zero=zero, precision=precision)).memory.buffers_bytes or 0
            for precision in ("fp32", "fp16")
        )
        shapes = model_shapes(RunConfig.of())
        assert (shapes.float_buffer_elements, shapes.integer_buffer_bytes) == (1408, 10 * 8)
        assert (full, half) == (4 * 1408 + 80, 4 // expected * 1408 + 80)


def test_predict_refuses_what_it_does_not_know() -> None:
    with pytest.raises(LabError, match="what engine='deepspeed' sends along tp=2 is not predicted"):
        predict(RunConfig.of(tp=2, engine="deepspeed"))
    with pytest.raises(LabError, match="rank 2 does not exist.*ranks 0 to 1"):
        predict(RunConfig.of(dp=2), rank=2)


def test_fsdp2_keeps_the_gradient_of_a_unit_with_one_tied_matrix_until_the_end() -> None:
    """GPT-2's head has the matrix of the first block: both are one unit, with positions and the last norm in it too."""
    config = RunConfig.of(model="gpt2", dp=2, zero=3, sequence_length=16)
    memory = FSDP2(config, model_shapes(config))
    assert memory.until_the_end == {"blocks.13"}
    assert [parameter.tied for parameter in memory.units["blocks.13"]] == [True, False, False, False]


@pytest.mark.parametrize(("dp", "copies"), [(1, 0), (2, 1)])
def test_fsdp2_on_one_rank_gathers_nothing(dp: int, copies: int) -> None:
    """A block's weights lie whole on the only rank: no buffer is filled by an all-gather."""
    config = RunConfig.of(model="vit_tiny", dp=dp, zero=3)
    memory = FSDP2(config, model_shapes(config))
    held: list[int] = []
    ledger = SimpleNamespace(holds=lambda key: False, hold=lambda key, category, num_bytes, **_: held.append(num_bytes))
    unit = memory.order[1]
    memory.gather(SimpleNamespace(ledger=ledger), unit)  # type: ignore[arg-type]
    # h = 128: two norms, qkv 128·384, projection 128², MLP 2·128·512, with their biases
    assert held == [copies * 4 * (4 * 128 + 128 * 384 + 384 + 128 * 128 + 128 + 2 * 128 * 512 + 512 + 128)]
