"""What ways to send less send over a run: step by step as their stages say, in the mean as the sum."""

from typing import Any

import pytest

from dlojz.by_hand.optimizers.sent_bytes import message_bytes
from dlojz.config.run_config import RunConfig
from dlojz.prediction.link_traffic import WAYS, predicted_way, rounds_of, traffic_of_step, ways
from dlojz.prediction.shapes import model_shapes

FIELDS: dict[str, Any] = {"model": "gpt_tiny", "sequence_length": 16, "micro_batch": 2, "device": "cpu"}
STEPS = 40
PARAMETERS = model_shapes(RunConfig.of(**FIELDS)).num_parameters
WHOLE = 4 * PARAMETERS
"""Bytes that one of two ranks sends in an all-reduce of all gradients in fp32: 2 · (2 − 1)/2 of 4Ψ."""


def runs(dp: int = 2) -> dict[str, RunConfig]:
    return ways(STEPS, **FIELDS, dp=dp)


def test_every_way_is_there_and_held_against_one_that_sends_everything() -> None:
    board = {name: predicted_way(name, config) for name, config in runs().items()}
    assert list(board) == list(WAYS)
    assert {way.against for way in board.values()} == {"AdamW", "LAMB", "SGD"}
    for way in board.values():
        assert board[way.against].sent_bytes == board[way.against].steady_bytes == WHOLE
        assert board[way.against].plain
        assert way.plain is (way.name in ("AdamW", "LAMB", "SGD"))
        assert way.plain or way.sent_bytes <= WHOLE / 2


@pytest.mark.parametrize("name", WAYS)
def test_the_mean_is_the_sum_over_the_steps(name: str) -> None:
    config = runs()[name]
    told = [traffic_of_step(config, step) for step in range(STEPS)]
    way = predicted_way(name, config)
    assert way.sent_bytes == sum(one.sent_bytes for step in told for one in step) / STEPS
    assert way.rounds == sum(rounds_of(one) for step in told for one in step) / STEPS


def test_what_is_sent_by_hand() -> None:
    """Ten of 40 steps in full, then signs both ways, of which a rank sends half; H = 8: five meetings in 40 steps."""
    board = {name: predicted_way(name, config) for name, config in runs().items()}
    signs = message_bytes(PARAMETERS, 2)
    assert board["1-bit Adam"].steady_bytes == signs
    assert board["1-bit Adam"].sent_bytes == (10 * WHOLE + 30 * signs) / 40
    assert board["DiLoCo"].sent_bytes == board["local SGD"].sent_bytes == WHOLE / 8
    assert board["DiLoCo"].rounds == 2 / 8
    assert board["AdamW, fp16"].sent_bytes == WHOLE / 2
    powersgd = board["AdamW, PowerSGD-1"]
    assert powersgd.sent_bytes == (4 * WHOLE + 36 * powersgd.steady_bytes) / 40


def test_one_rank_sends_nothing_and_a_link_takes_latency_and_bytes() -> None:
    config = RunConfig.of(**FIELDS, optimizer="diloco", engine="by_hand", dp=1, steps=STEPS)
    alone = predicted_way("DiLoCo", config)
    assert (alone.sent_bytes, alone.rounds) == (0, 0)
    way = predicted_way("AdamW", runs()["AdamW"])
    assert way.link_s(1e-3, 1e6) == way.rounds * 1e-3 + WHOLE / 1e6
