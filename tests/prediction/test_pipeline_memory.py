"""Memory of a pipeline's rank: what each runtime keeps at each action, and peaks as measured on two processes."""

from typing import Any

import pytest

from dlojz.config.run_config import RunConfig
from dlojz.pipeline.messages import Item, RankOrder, Runner
from dlojz.pipeline.schedule_catalogue import build
from dlojz.prediction import predict
from dlojz.prediction.forecast import forecast
from dlojz.prediction.model_trace import cut_passes, trace_of
from dlojz.prediction.shapes import RankPart

GPT: dict[str, Any] = {"model": "gpt_tiny", "pp": 2, "micro_batch": 4, "optimizer": "sgd", "learning_rate": 0.05}
MEASURED = {
    ("torch", "gpipe", 4): (38_913_548, 42_793_004),
    ("torch", "1f1b", 16): (26_833_420, 18_808_912),
    ("torch", "interleaved", 4): (26_997_260, 23_445_536),
    ("torch", "interleaved", 16): (45_969_932, 42_418_256),
    ("torch", "looped-bfs", 4): (41_010_700, 44_890_156),
    ("torch", "interleaved-zb", 16): (50_688_012, 53_710_932),
    ("torch", "zb-v", 4): (15_963_172, 40_770_572),
    ("torch", "zb-v", 16): (28_742_740, 59_644_940),
    ("torch", "dualpipe-v", 4): (13_793_816, 39_738_892),
    ("torch", "dualpipe-v", 16): (25_597_008, 58_613_260),
    ("torch", "eager-1f1b", 16): (38_663_692, 22_478_928),
    ("torch", "zb-h1", 16): (30_241_292, 43_749_460),
    ("torch", "zb-h2", 4): (32_273_932, 52_600_868),
    ("by_hand", "naive", 4): (13_839_884, 13_975_588),
    ("by_hand", "1f1b", 16): (22_573_584, 14_286_936),
    ("by_hand", "eager-1f1b", 4): (31_208_972, 14_499_876),
    ("by_hand", "interleaved", 16): (23_361_036, 19_284_052),
    ("by_hand", "looped-bfs", 4): (39_159_308, 41_728_060),
    ("by_hand", "interleaved-zb", 4): (27_766_796, 30_527_528),
    ("by_hand", "zb-h1", 4): (22_524_428, 35_770_408),
    ("by_hand", "zb-v", 16): (12_884_052, 37_100_556),
    ("by_hand", "dualpipe-v", 4): (11_401_756, 36_855_308),
    ("by_hand", "chimera", 4): (26_242_076, 26_242_076),
    ("by_hand", "dualpipe", 16): (35_811_892, 35_811_892),
    ("by_hand", "hanayo", 4): (9_180_188, 29_741_068),
}
"""Bytes at the peak of both ranks in a step of gpt_tiny on two processes, by engine, schedule and micro-batches."""


@pytest.mark.parametrize(("engine", "schedule", "micro_batches"), MEASURED)
def test_the_peak_is_the_measured_one(engine: str, schedule: str, micro_batches: int) -> None:
    config = RunConfig.of(**GPT, engine=engine, schedule=schedule, micro_batches=micro_batches)
    peaks = [predict(config, rank).memory.peak_bytes for rank in range(2)]
    assert peaks == pytest.approx(MEASURED[engine, schedule, micro_batches], rel=1e-4)


def kept_at(schedule: str, micro_batches: int, rank: int, runner: Runner) -> dict[str, dict[Item, int]]:
    order = RankOrder(build(schedule, 2, micro_batches), rank, runner)
    return {str(moment.action): moment.others for moment in order.moments()}


BOUNDARY, ACTIVATIONS, LOGITS = Item("boundary", 1), Item("activations", 0), Item("logits", 1)


def test_rank_order_by_hand_keeps_a_message_until_it_is_seen_to_be_taken() -> None:
    """Rank 0 of 1F1B does F0 F1 B0 F2 B1 F3 B2 B3, rank 1 F0 B0 F1 B1 F2 B2 F3 B3.

    In B0 both outputs and the gradient that has come; in F2 the output of micro-batch 1; in B3 its own output and the
    gradient.
    """
    kept = kept_at("1f1b", 4, 0, "by_hand")
    assert {item: count for item, count in kept["0B0"].items() if count} == {ACTIVATIONS: 1, BOUNDARY: 3}
    assert kept["0F2"] == {ACTIVATIONS: 1, BOUNDARY: 1}
    assert {item: count for item, count in kept["0B3"].items() if count} == {BOUNDARY: 2}


def test_rank_order_of_torchs_1f1b_keeps_the_last_gradient_and_first_output_sent() -> None:
    first, last = kept_at("1f1b", 4, 0, "1f1b"), kept_at("1f1b", 4, 1, "1f1b")
    assert {item: count for item, count in last["1B1"].items() if count} == {BOUNDARY: 1, LOGITS: 1}
    assert last["1F2"] == {BOUNDARY: 1}
    assert {item: count for item, count in first["0B2"].items() if count} == {ACTIVATIONS: 1, BOUNDARY: 3}
    assert {item: count for item, count in first["0B3"].items() if count} == {BOUNDARY: 1}


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-v"])
def test_rank_order_of_torchs_table_keeps_all_that_a_step_has_sent(schedule: str) -> None:
    """As a rank's last action ends, it has sent a gradient of each micro-batch for each stage behind another rank."""
    placement = build(schedule, 2, 6).placement[0]
    for rank in range(2):
        *_, final = RankOrder(build(schedule, 2, 6), rank, "table").moments()
        sent = [
            sum(placement[stage] == rank != placement[stage + step] for stage in stages)
            for step, stages in ((1, range(len(placement) - 1)), (-1, range(1, len(placement))))
        ]
        counted = sum(count for item, count in final.others.items() if item.kind == "boundary")
        last_gradient = final.action.kind == "B" and final.action.stage > 0
        assert counted == 6 * sum(sent) - last_gradient
        assert not any(count for item, count in final.others.items() if item.kind != "boundary")


def test_what_a_v_hands_over_on_its_own_rank_is_the_buffer_of_the_next_stage() -> None:
    """Rank 1 of a V of four stages has stages 1 and 2: nothing that passes between them is kept besides."""
    for moment in RankOrder(build("zb-v", 2, 6), 1, "table").moments():
        assert not moment.others.get(Item("boundary", 2))


def test_between_the_halves_a_stage_keeps_its_activations_and_the_gradients_of_its_layers() -> None:
    """In a block of gpt_tiny, with D = 128 numbers of width and 4·D in the MLP, per token in fp32: the gradients of the
    outputs of its four products, of 3·D (keys, queries and values together), D, 4·D and D numbers; those of its two
    norms, of D each; nothing of what forward has kept for these is free before.
    """
    config = RunConfig.of(**GPT, schedule="zb-h1", micro_batches=4)
    passes = cut_passes(trace_of(RankPart(config), in_halves=True), (0, 2, 3, 6), [1])[1]
    tokens = 4 * (config.sequence_length or 0)
    more = passes.bytes_of(set(passes.between) - set(passes.kept))
    # The residual stream's gradient is the one of the MLP's last product, and has been received.
    assert more == tokens * 4 * 128 * (3 + 1 + 4 + 1 + 1 + 1 - 1) and passes.retains


@pytest.mark.parametrize(
    ("fields", "words"), [({"engine": "deepspeed"}, "estimate"), ({"dp": 2, "zero": 2}, "at least")]
)
def test_forecast_says_what_is_not_predicted_of_a_pipeline(fields: dict[str, Any], words: str) -> None:
    (note,) = forecast(RunConfig.of(**{**GPT, "micro_batches": 4, **fields})).notes
    assert words in note
    assert not forecast(RunConfig.of(**GPT, micro_batches=4)).notes
