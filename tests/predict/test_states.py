"""The closed forms against the ZeRO paper's own figures; against real processes they are tested in tests/train."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlojz import predict
from dlojz.config import RunConfig
from dlojz.footprint import STATES
from dlojz.predict.shapes import ModelShapes, ParameterShape, model_shapes
from dlojz.predict.states import padded_parameters, predict_states, touching_elements
from dlojz.schema import LabError


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


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=30), dp=st.integers(1, 16))
@settings(max_examples=200)
def test_shares_make_the_whole(sizes: list[int], dp: int) -> None:
    shapes = ModelShapes(
        tuple(ParameterShape(f"blocks.{i}.w", (size,), i, f"blocks.{i}") for i, size in enumerate(sizes)), 0, 0
    )
    padded = padded_parameters(sum(sizes), dp)
    assert padded % dp == 0
    assert sum(sizes) <= padded < sum(sizes) + 2 * dp
    held = [touching_elements(shapes, dp, rank) for rank in range(dp)]
    assert sum(held) >= padded
    assert all(one >= padded // dp for one in held)


@given(rows=st.integers(1, 50), columns=st.integers(1, 50), dp=st.integers(1, 16))
@settings(max_examples=200)
def test_rows_are_shared_without_loss(rows: int, columns: int, dp: int) -> None:
    parameter = ParameterShape("blocks.0.w", (rows, columns), 0, "blocks.0")
    own = [parameter.rows_numel(dp, rank) for rank in range(dp)]
    assert sum(own) == parameter.numel
    assert all(one <= parameter.padded_rows_numel(dp) for one in own)
    assert dp * parameter.padded_numel(dp) >= parameter.numel


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_a_higher_stage_never_takes_more(engine: str) -> None:
    stages = (0, 2, 3) if engine == "torch" else (0, 1, 2, 3)
    totals = []
    for stage in stages:
        config = RunConfig.of(model="coatnet_7", dp=8, zero=stage, engine=engine, precision="bf16", micro_batches=2)
        totals.append(predict(config).memory.states_bytes)
    assert totals == sorted(totals, reverse=True)


def test_activations_are_not_predicted_yet_and_not_zero() -> None:
    memory = predict(RunConfig.of(dp=2)).memory
    assert memory.activations_bytes is None
    assert memory.peak_bytes is None
    assert all(memory.category(name) is not None for name in STATES)


def test_what_is_not_predicted_is_refused() -> None:
    with pytest.raises(LabError, match="tp=2 is not predicted yet"):
        predict(RunConfig.of(tp=2))
    with pytest.raises(LabError, match="rank 2 does not exist.*ranks 0 to 1"):
        predict(RunConfig.of(dp=2), rank=2)
