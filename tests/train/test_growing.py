"""Sequences that grow: every engine cuts alike, counts what was predicted, and goes on as if it had not stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.curriculum import Trajectory, train_trial, variance_of
from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.config.schedules import length_at
from dlojz.prediction import predict
from dlojz.results.footprint import Footprint
from dlojz.results.record import RunRecord, read_events
from dlojz.running.ending import Ending
from dlojz.running.state import assemble
from tests.train.counted import Runs, check_goes_on, deal

PLAIN: dict[str, Any] = {"model": "gpt_tiny", "sequence_length": 32, "learning_rate": 0.01, "steps": 6, "device": "cpu"}
GROWING = {**PLAIN, "curriculum": "linear", "curriculum_start": 8, "curriculum_steps": 4}
TWO = {"micro_batch": 2, "dp": 2}
HAND: dict[str, Any] = {**TWO, "engine": "by_hand"}
RUNS: dict[str, dict[str, Any]] = {
    "one": {**GROWING, "micro_batch": 2, "micro_batches": 2},
    "ddp": {**GROWING, **TWO},
    "by-hand": {**GROWING, **HAND},
    "zero2": {**GROWING, **HAND, "zero": 2},
    "zero3": {**GROWING, **HAND, "zero": 3},
    "fsdp2": {**GROWING, **TWO, "zero": 3},
    "deepspeed-zero2": {**GROWING, **TWO, "engine": "deepspeed", "zero": 2},
    "tp-sequence": {**GROWING, "micro_batch": 2, "micro_batches": 2, "tp": 2, "sequence_parallel": True}
    | {"engine": "by_hand"},
    "tp-torch": {**GROWING, "micro_batch": 2, "micro_batches": 2, "tp": 2},
}
"""Each is run whole, and cut off after two of its steps, in the middle of the pacing, and gone on with."""
WHOLE = {"micro_batch": 2, "micro_batches": 2}
TRAINED_AT_NIGHT = True  # see tests/conftest.py


def prepare(folder: Path) -> None:
    made = Runs(folder)
    jobs = deal(made, RUNS, dict.fromkeys(RUNS, 1))
    jobs[1].append({"train": made.prepare("plain", RunConfig.of(**PLAIN, **WHOLE))})
    # A curriculum that is whole from its first step on changes nothing.
    at_once = {"curriculum": "linear", "curriculum_start": 8, "curriculum_steps": 1}
    jobs[1].append({"train": made.prepare("at-once", RunConfig.of(**PLAIN, **WHOLE, **at_once))})
    for processes, listed in jobs.items():
        made.do(listed, processes)


def record_of(runs: Any, name: str, config: RunConfig) -> RunRecord:
    ranks = range(config.layout.world_size)
    events = {rank: read_events(runs.root / name / "events" / f"rank-{rank}.jsonl") for rank in ranks}
    return assemble("a-run", config, events, Ending("completed"), 1.0)


@pytest.mark.parametrize("name", RUNS)
def test_tokens_counted_are_those_predicted(runs: Any, name: str) -> None:
    """Exactly, on every rank."""
    for rank in range(RunConfig.of(**RUNS[name]).layout.world_size):
        told = runs.told(f"whole/{name}", "step", "tokens", rank)
        assert told == [4 * 8, 4 * 16, 4 * 24, 4 * 32, 4 * 32, 4 * 32]


@pytest.mark.parametrize("name", RUNS)
def test_curriculum_trains_in_every_engine_as_in_one_process(runs: Any, name: str) -> None:
    """Relative 1e-3 with AdamW, which amplifies rounding from step to step; the first step to 1e-6."""
    expected, found = (runs.told(f"whole/{one}", "step", "loss") for one in ("one", name))
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", RUNS)
def test_checkpoint_amid_the_pacing_of_a_curriculum_goes_on_bit_for_bit(runs: Any, name: str) -> None:
    check_goes_on(runs, name, 2)
    assert runs.told(f"cut/{name}", "step", "tokens") == runs.told(f"whole/{name}", "step", "tokens")
    assert len(runs.told(f"whole/{name}", "weights", "sha256")) == 1


def test_a_curriculum_that_is_whole_at_once_is_bit_for_bit_the_run_without(runs: Any) -> None:
    assert runs.told("at-once", "step", "loss") == runs.told("plain", "step", "loss")
    assert runs.told("at-once", "weights", "sha256") == runs.told("plain", "weights", "sha256")
    assert runs.told("plain", "step", "tokens") == [4 * 32] * 6
    assert runs.told("whole/one", "step", "loss") != runs.told("plain", "step", "loss")


def test_memory_and_flops_are_those_of_whole_samples(runs: Any) -> None:
    """Traced where samples are whole, hence as of the run without curriculum, to 16 bytes: a loss or two in fp32."""
    plain, growing = (
        Footprint.from_dict(runs.told(name, "footprint", "footprint")[-1]) for name in ("plain", "whole/one")
    )
    assert plain.memory is not None
    assert growing.memory is not None
    assert growing.memory.peak_bytes == pytest.approx(plain.memory.peak_bytes, abs=16)
    assert growing.memory.activations_bytes == pytest.approx(plain.memory.activations_bytes, abs=16)
    assert growing.step_flops == plain.step_flops
    predicted = predict(RunConfig.of(**RUNS["one"]))
    assert predicted.memory is not None
    assert growing.memory.peak_bytes == pytest.approx(predicted.memory.peak_bytes, rel=1e-4)


@pytest.mark.parametrize("name", ["ddp", "zero3", "fsdp2", "deepspeed-zero2", "tp-sequence"])
def test_predict_tells_the_communication_of_a_curriculum_that_is_counted(runs: Any, name: str) -> None:
    predicted = predict(RunConfig.of(**RUNS[name])).to_dict()["communication"]
    assert runs.told(f"whole/{name}", "footprint", "footprint")[-1]["communication"] == predicted


def test_a_record_lays_losses_against_tokens_and_time(runs: Any) -> None:
    config = RunConfig.of(**RUNS["ddp"])
    record = record_of(runs, "whole/ddp", config)
    lengths = tuple(length_at(config, step) for step in range(config.steps))
    assert record.step_tokens == tuple(4 * length for length in lengths)
    slowest = [
        max(both) for both in zip(*(runs.told("whole/ddp", "step", "step_s", rank) for rank in (0, 1)), strict=True)
    ]
    assert record.step_s == tuple(slowest)


def test_a_record_of_before_is_read_without_tokens(runs: Any) -> None:
    config = RunConfig.of(**RUNS["ddp"])
    content = record_of(runs, "whole/ddp", config).to_dict()
    for name in ("step_tokens", "step_s"):
        del content[name]
    before = RunRecord.from_dict(content)
    assert (before.step_tokens, before.step_s) == ((), ())


def trial(**fields: Any) -> RunConfig:
    return RunConfig.of(**{**PLAIN, "micro_batch": 4, "steps": 6, **fields})


def test_a_trial_reads_as_many_tokens_as_another() -> None:
    plain = train_trial(trial(), tokens=1000, evaluations=2)
    growing = train_trial(trial(curriculum="linear", curriculum_steps=5), tokens=1000, evaluations=2)
    assert plain.lengths == (32,) * 8  # 4 samples of 32 tokens a step, until 1000 are read
    assert growing.lengths[:5] == (8, 16, 16, 24, 32)
    for one in (plain, growing):
        assert one.tokens == tuple(4 * length for length in one.lengths)
        assert 1000 <= one.tokens_read[-1] < 1000 + 4 * 32
        assert len(one.variance_max) == len(one.variance_norm) == len(one.losses)
        assert all(0 < largest < norm for largest, norm in zip(one.variance_max, one.variance_norm, strict=True))
        assert one.held_out[0].tokens == 0
        assert one.held_out[-1].loss < one.held_out[0].loss
    assert plain.held_out[0].loss == growing.held_out[0].loss  # the same weights, asked at the same length
    assert Trajectory.from_json(plain.to_json()) == plain
    assert json.loads(plain.to_json())["schema_version"] == 1


def test_a_trial_is_one_process_with_adam() -> None:
    with pytest.raises(LabError, match="one process with optimizer='adamw'"):
        train_trial(trial(optimizer="sgd"))


def test_root_mean_squares_of_adam() -> None:
    """After one step v is (1 − β₂) g², so √v is √0.001 |g|."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([weight])
    assert variance_of(optimizer) == (0.0, 0.0)
    weight.grad = torch.tensor([3.0, -4.0, 0.0])
    optimizer.step()
    norm, largest = variance_of(optimizer)
    assert norm == pytest.approx(7 * 0.001**0.5, rel=1e-5)
    assert largest == pytest.approx(4 * 0.001**0.5, rel=1e-5)


def test_spikes_are_losses_far_above_the_smallest_before() -> None:
    losses = (4.0, 2.0, 2.5, 1.0, 1.19, 1.21)
    made = Trajectory(config=trial(), lengths=(32,) * 6, tokens=(128,) * 6, step_s=(0.1,) * 6, losses=losses)
    assert made.loss_ratios == pytest.approx((1.0, 0.5, 1.25, 0.5, 1.19, 1.21))
    assert made.spikes() == (2, 5)
    assert made.spikes(1.18) == (2, 4, 5)
    assert made.seconds_by_length() == {32: 0.1}
    with pytest.raises(LabError, match="a trajectory of 6 losses has 5 tokens"):
        Trajectory(config=trial(), lengths=(32,) * 6, tokens=(128,) * 5, step_s=(0.1,) * 6, losses=losses)
