"""Optimizers that send one bit per number, under the lab's engine: as predicted, as the plain ones, and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.by_hand.optimizers.sent_bytes import saved_share
from dlojz.config.run_config import RunConfig
from dlojz.prediction.shapes import model_shapes
from dlojz.prediction.states import predict_states
from dlojz.runnable import check_runnable
from dlojz.train import loop
from dlojz.train.checkpoint_files import listing, verify
from dlojz.train.checkpoint_tensors import CheckpointTensors
from dlojz.train.engines import base
from tests.train.counted import (
    Runs,
    check_as_predicted,
    check_checkpoint_bytes,
    check_goes_on,
    check_refused,
    deal,
    footprint,
    going_on_from,
)

TRAINED_AT_NIGHT = True  # see tests/conftest.py
SHORT: dict[str, Any] = {"learning_rate": 1e-3, "device": "cpu", "micro_batch": 2, "engine": "by_hand", "steps": 5}
LLAMA = {**SHORT, "model": "llama_tiny", "sequence_length": 16, "dp": 2}
ACCUMULATED = {"micro_batches": 2, "precision": "bf16"}
COATNET = {**SHORT, "model": "coatnet_tiny", "image_size": 32, "dp": 2}
RUNS: dict[str, dict[str, Any]] = {
    "one-bit-adam": {**LLAMA, "optimizer": "one_bit_adam", "warmup_steps": 2, "weight_decay": 0.1},
    "one-bit-lamb-3": {**LLAMA, "optimizer": "one_bit_lamb", "warmup_steps": 2, "dp": 3},
    "zero-one-adam": {**COATNET, "optimizer": "zero_one_adam", "warmup_steps": 3, **ACCUMULATED},
    # So long a first stage that the steps between the first and the second are not traced.
    "late": {**LLAMA, "optimizer": "one_bit_lamb", "warmup_steps": 7, "steps": 10},
    "alone": {**LLAMA, "optimizer": "one_bit_adam", "warmup_steps": 2, "dp": 1},
    "lamb": {**LLAMA, "optimizer": "lamb"},
    "adamw": {**LLAMA, "optimizer": "adamw", "weight_decay": 0.1},
}
PREDICTED = [name for name in RUNS if name != "adamw"]
CUT = {"one-bit-adam": 0, "one-bit-lamb-3": 3, "zero-one-adam": 3, "lamb": 2}
"""Cut off after a step of this number: in the first stage, or in the second."""
OTHERWISE = {1: 12, 3: 4}
"""The micro-batch of each other number of ranks that goes on with what two ranks of 6 have kept."""
ELASTIC = {**LLAMA, "optimizer": "one_bit_adam", "warmup_steps": 2, "micro_batch": 6}


def prepare(folder: Path) -> None:
    made = Runs(folder)
    jobs = deal(made, {**RUNS, "elastic": ELASTIC}, CUT, left={"elastic": 3})
    for processes, listed in sorted(jobs.items(), key=lambda job: job[0] != 2):
        if (micro_batch := OTHERWISE.get(processes)) is not None:
            config = RunConfig.of(**{**ELASTIC, "dp": processes, "micro_batch": micro_batch})
            listed.append(going_on_from(made, "cut/elastic", f"otherwise/{processes}", config))
        made.do(listed, processes)


@pytest.mark.parametrize("name", PREDICTED)
def test_predict_of_every_compressed_config_equals_what_is_counted(runs: Any, name: str) -> None:
    """States by category, bytes and calls of every collective, on every rank: exact; the peak to 2 %."""
    check_as_predicted(runs, name, RunConfig.of(**RUNS[name]))


def test_97_percent_of_the_bytes_are_saved_in_the_second_stage(runs: Any) -> None:
    """Counted: what replaces an all-reduce of 4Ψ (on the wire a reduce-scatter and an all-gather of as much)."""
    plain, compressed = (
        {one.collective: one.message_bytes for one in footprint(runs, name, 0).communication if one.group == "dp"}
        for name in ("adamw", "one-bit-adam")
    )
    saved = 1 - (compressed["all_to_all"] + compressed["all_gather"]) / (2 * plain["all_reduce"])
    assert round(100 * saved) == 97
    assert saved == pytest.approx(saved_share(plain["all_reduce"] // 4, 2), abs=1e-12)


def test_one_bit_adam_is_adamw_to_the_bit_in_its_first_stage(runs: Any) -> None:
    """Losses of the first two steps, and of the third, which both begin with the same weights; then they part."""
    plain, compressed = (runs.told(f"whole/{name}", "step", "loss") for name in ("adamw", "one-bit-adam"))
    assert compressed[:3] == plain[:3]
    assert compressed[3:] != plain[3:]


@pytest.mark.parametrize("name", CUT)
def test_compressed_optimizers_go_on_from_a_checkpoint_as_if_not_cut_off(runs: Any, name: str) -> None:
    """In either stage, bit for bit: the losses after the cut, and the checksum of the final weights."""
    check_goes_on(runs, name, CUT[name] + 1)


@pytest.mark.parametrize("name", ["one-bit-lamb-3", "zero-one-adam", "lamb"])
def test_checkpoint_bytes_of_compressed_optimizers_are_predicted(runs: Any, name: str) -> None:
    """In the second stage, the errors of every rank among them."""
    check_checkpoint_bytes(runs, name)


@pytest.mark.parametrize("ranks", OTHERWISE)
def test_one_bit_adam_goes_on_with_another_number_of_ranks_without_its_errors(runs: Any, ranks: int) -> None:
    """The same weights and the same global batch: the first loss is equal to rounding."""
    told, whole = runs.told(f"otherwise/{ranks}", "step", "loss"), runs.told("whole/elastic", "step", "loss")
    assert runs.told(f"otherwise/{ranks}", "resumed", "step") == [4]
    [said] = runs.told(f"otherwise/{ranks}", "resumed", "left_out")
    assert said.startswith("one_bit_adam: the errors held back by 2 ranks are dropped")
    assert runs.told(f"otherwise/{ranks}", "end", "status") == ["completed"]
    # fp32 has 24 bits, and the 12 samples' losses are added up in another order.
    assert told[0] == pytest.approx(whole[4], rel=1e-6)
    assert runs.told(f"otherwise/{ranks}", "weights", "sha256") != runs.told("whole/elastic", "weights", "sha256")


@pytest.mark.parametrize(("language", "said"), [("en", "the errors held back by 2"), ("fr", "retenues par 2 rangs")])
def test_what_is_left_behind_is_said(runs: Any, language: str, said: str) -> None:
    use_language(language)
    config = RunConfig.of(**{**ELASTIC, "dp": 1, "micro_batch": 12})
    with pytest.warns(UserWarning):  # one process: it says that it does nothing
        engine = base.build(config, loop.build_model(config), torch.device("cpu"))
    [one] = listing(runs.root / "cut" / "elastic")
    with CheckpointTensors(one.folder, verify(one.folder)) as source:
        engine.restore_buffers(source)
    assert said in engine.left_out
    assert engine.optimizer.own_states() == {}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"warmup_steps": 20, "steps": 20}, "leaves nothing to compress in a run of 20 steps", "ne laisse rien à compress"),
    ({"warmup_steps": 0}, "warmup_steps must be at least 1", "warmup_steps doit valoir au moins 1"),
    ({"steps": 1}, "warmup_steps=1 leaves nothing to compress", "warmup_steps=1 ne laisse rien"),
    ({"engine": "torch"}, "but DDP was received: use engine='by_hand'", "mais DDP a été reçu : prenez engine='by_hand"),
    ({"zero": 2}, "averages over the ranks itself", "moyenne lui-même entre les rangs"),
    ({"optimizer": "adamw", "warmup_steps": 3}, "adamw has no first stage", "adamw n’a pas de première phase"),
]


@pytest.mark.parametrize(("fields", "english", "french"), REFUSED)
def test_run_config_refuses_in_one_sentence_what_one_bit_adam_cannot(
    fields: dict[str, Any], english: str, french: str
) -> None:
    check_refused({"optimizer": "one_bit_adam", "engine": "by_hand", "dp": 2, **fields}, english, french)


def test_warmup_steps_are_a_quarter_where_nothing_is_said() -> None:
    config = RunConfig.of(optimizer="one_bit_adam", engine="by_hand", dp=2, steps=100)
    assert config.warmup_steps == 25
    assert config.hash == RunConfig.of(**{**config.to_dict(), "layout": config.layout}).hash


def test_check_runnable_wants_whole_layers_for_lamb() -> None:
    check_runnable(RunConfig.of(optimizer="lamb", dp=2))
    for fields in ({"zero": 3}, {"engine": "deepspeed", "zero": 1}, {"tp": 2, "engine": "by_hand"}):
        with pytest.raises(LabError, match="each rank has whole layers, but .* was received"):
            check_runnable(RunConfig.of(optimizer="lamb", **{"dp": 2, **fields}))


def test_predict_states_holds_errors_of_workers_and_servers() -> None:
    """4Ψ + 4Ψ/N beside AdamW's 8Ψ, and nothing with one process; 1-bit LAMB has a fresh variance besides."""

    def held(optimizer: str, dp: int) -> int:
        engine = "by_hand" if optimizer != "adamw" else "torch"
        config = RunConfig.of(**{**LLAMA, "optimizer": optimizer, "dp": dp, "engine": engine})
        return predict_states(config, model_shapes(config)).optimizer_bytes or 0

    parameters = model_shapes(RunConfig.of(**LLAMA)).num_parameters
    for dp in (2, 4):
        more = held("one_bit_adam", dp) - held("adamw", dp)
        assert more == pytest.approx(4 * parameters * (1 + 1 / dp), abs=4 * 8 * (dp + 1))
        assert held("zero_one_adam", dp) == held("one_bit_adam", dp)
        assert held("one_bit_lamb", dp) - held("one_bit_adam", dp) == pytest.approx(4 * parameters, rel=1e-2)
    assert held("one_bit_adam", 1) == held("adamw", 1)
