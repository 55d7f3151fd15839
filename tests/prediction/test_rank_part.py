"""Part of the model, the data and the pipeline that a rank has, by hand on small layouts."""

import pytest

from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.prediction.communication import samples_bytes
from dlojz.prediction.model_trace import micro_batches_in_flight
from dlojz.prediction.shapes import RankPart, model_shapes

# gpt_tiny: an embedding, four layers, a head; D = 128 numbers of width, T = 128 tokens, V = 256 words.
LAYER = 2 * 2 * 128 + (128 * 192 + 192) + (64 * 128 + 128) + (128 * 256 + 256) + (256 * 128 + 128)
"""Numbers in a tensor-parallel half of a layer: two norms, queries with keys and values, their product, the MLP."""
EMBEDDING, HEAD = 128 * 128 + 128 * 128, 2 * 128 + 128 * 128
"""Half of the vocabulary with all positions; the last norm with half of the vocabulary."""


def test_rank_part_of_an_interleaved_pipeline_with_data_and_tensor_axes() -> None:
    """Four stages of blocks 0 | 1 2 | 3 4 | 5 on two ranks of the pipeline, the first with stages 0 and 2."""
    layout = {"pp": 2, "chunks": 2, "schedule": "interleaved", "partition": "at:1,3,5", "dp": 2, "tp": 2}
    config = RunConfig.of(model="gpt_tiny", engine="by_hand", micro_batch=3, micro_batches=4, **layout)
    parts = [RankPart(config, rank) for rank in range(8)]
    # Tensor innermost, pipeline outermost.
    ranks = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
    assert [(part.pp_rank, part.dp_rank, part.tp_rank) for part in parts] == ranks
    sample_bytes = 3 * 128 * 8  # int64 of a micro-batch
    for part in parts:
        assert part.bounds == (0, 1, 3, 5, 6) and part.pipes == 1
        assert part.stages == ((0, 2) if part.pp_rank == 0 else (1, 3))
        assert part.stage_blocks == ((range(1), range(3, 5)) if part.pp_rank == 0 else (range(1, 3), range(5, 6)))
        assert part.blocks == ((0, 3, 4) if part.pp_rank == 0 else (1, 2, 5))
        assert part.reads_inputs == (part.pp_rank == 0) and part.computes_loss == (part.pp_rank == 1)
        assert part.shapes.num_parameters == 2 * LAYER + (EMBEDDING if part.pp_rank == 0 else HEAD)
        assert samples_bytes(part) == 4 * sample_bytes  # inputs on the first stage, targets on the last


def test_rank_part_of_a_bidirectional_pipeline_has_both_ends() -> None:
    config = RunConfig.of(model="gpt_tiny", engine="by_hand", pp=2, schedule="chimera", micro_batches=2)
    for rank in range(2):
        part = RankPart(config, rank)
        assert part.stages == (0, 1) and part.blocks == tuple(range(6)) and part.pipes == 2
        assert part.reads_inputs and part.computes_loss
        assert part.shapes.num_parameters == model_shapes(config).num_parameters


def test_rank_part_of_a_context_axis_lies_between_tensor_and_data_axis() -> None:
    config = RunConfig.of(model="llama_tiny", dp=2, cp=2)
    parts = [RankPart(config, rank) for rank in range(4)]
    assert [(part.dp_rank, part.context) for part in parts] == [(0, (2, 0)), (0, (2, 1)), (1, (2, 0)), (1, (2, 1))]


def test_rank_part_of_one_process_is_the_whole_model() -> None:
    part = RankPart(RunConfig.of(model="gpt_tiny"))
    assert part.stages == (0,) and part.bounds == (0, 6) and part.blocks == tuple(range(6)) and part.pipes == 1
    assert part.reads_inputs and part.computes_loss and part.shapes == model_shapes(part.config)


def test_rank_part_shares_out_the_experts() -> None:
    """moe_tiny has two mixtures of eight experts, each with D × 4·D, 4·D, 4·D × D and D numbers, D = 128."""
    expert = 128 * 512 + 512 + 512 * 128 + 128
    whole, part = (RankPart(RunConfig.of(model="moe_tiny", dp=4, ep=ep, engine="by_hand")).shapes for ep in (1, 4))
    assert whole.num_parameters - part.num_parameters == 2 * (8 - 2) * expert


def test_micro_batches_in_flight_of_1f1b_fall_from_rank_to_rank() -> None:
    config = RunConfig.of(model="gpt_tiny", pp=4, micro_batches=8)
    assert [micro_batches_in_flight(RankPart(config, rank)) for rank in range(4)] == [4, 3, 2, 1]


def test_rank_part_of_too_many_stages_is_refused() -> None:
    with pytest.raises(LabError, match="the model has 6"):
        _ = RankPart(RunConfig.of(model="gpt_tiny", pp=8, micro_batches=8)).shapes
