"""Models whose head is the token embedding, under the engines: the losses of one process, and what is predicted."""

from pathlib import Path
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.runnable import check_runnable
from dlojz.train.checkpoint_files import listing, verify
from tests.train.counted import Job, check_as_predicted, check_goes_on, going_on_from, prepare_runs

TRAINED_AT_NIGHT = True  # see tests/conftest.py
SMALL: dict[str, Any] = {
    "sequence_length": 16, "micro_batch": 2, "device": "cpu", "steps": 3, "optimizer": "momentum",
    "learning_rate": 0.05,
}  # fmt: skip
GPT, QWEN = {**SMALL, "model": "gpt2_tiny"}, {**SMALL, "model": "qwen_tiny"}
HAND, DEEPSPEED = {"engine": "by_hand"}, {"engine": "deepspeed"}
TWO, FOUR = {"micro_batches": 2}, {"micro_batches": 4}
"""Micro-batches of two replicas, and of one: eight samples in a step."""
RUNS: dict[str, dict[str, Any]] = {
    "gpt": {**GPT, **FOUR, "engine": "single"},
    "gpt-in-forward": {**GPT, **FOUR, "engine": "single", "update": "in_forward"},
    "gpt-in-backward": {**GPT, "micro_batch": 8, "engine": "single", "update": "in_backward"},
    "gpt-ddp": {**GPT, **TWO, "dp": 2, "checkpointing": "full"},
    "gpt-fsdp2-zero2": {**GPT, **TWO, "dp": 2, "zero": 2},
    "gpt-fsdp2-zero3": {**GPT, **TWO, "dp": 2, "zero": 3},
    "gpt-hand": {**GPT, **TWO, **HAND, "dp": 2},
    **{f"gpt-hand-zero{stage}": {**GPT, **TWO, **HAND, "dp": 2, "zero": stage} for stage in (1, 2, 3)},
    **{f"gpt-deepspeed-zero{stage}": {**GPT, **TWO, **DEEPSPEED, "dp": 2, "zero": stage} for stage in range(4)},
    "gpt-hand-tp": {**GPT, **FOUR, **HAND, "tp": 2},
    "gpt-hand-tp-sp": {**GPT, **FOUR, **HAND, "tp": 2, "sequence_parallel": True},
    "gpt-torch-tp": {**GPT, **FOUR, "tp": 2},
    "gpt-torch-pp": {**GPT, **FOUR, "pp": 2},
    "gpt-hand-pp": {**GPT, **FOUR, **HAND, "pp": 2},
    "gpt-hand-pp-zb-h1": {**GPT, **FOUR, **HAND, "pp": 2, "schedule": "zb-h1"},
    "gpt-hand-pp-zb-v": {**GPT, **FOUR, **HAND, "pp": 2, "schedule": "zb-v"},
    "gpt-deepspeed-pp": {**GPT, **FOUR, **DEEPSPEED, "pp": 2},
    "gpt-hand-tp-pp": {**GPT, **FOUR, **HAND, "tp": 2, "pp": 2},
    "gpt-torch-tp-pp": {**GPT, **FOUR, "tp": 2, "pp": 2},
    "gpt-torch-tp-fsdp2": {**GPT, **TWO, "tp": 2, "dp": 2, "zero": 3},
    "gpt-torch-tp-ddp": {**GPT, **TWO, "tp": 2, "dp": 2},
    "gpt-torch-pp-fsdp2": {**GPT, **TWO, "pp": 2, "dp": 2, "zero": 2},
    "gpt-deepspeed-pp-dp": {**GPT, **TWO, **DEEPSPEED, "pp": 2, "dp": 2},
    "bf16": {**GPT, **TWO, "dp": 2, "zero": 3, "precision": "bf16"},
    "qwen": {**QWEN, **FOUR, "engine": "single"},
    "qwen-fsdp2": {**QWEN, **TWO, "dp": 2, "zero": 3},
    "qwen-hand-zero3": {**QWEN, **TWO, **HAND, "dp": 2, "zero": 3},
    "qwen-pp": {**QWEN, **FOUR, "pp": 2},
}


ESTIMATED = [name for name in RUNS if name.endswith(("zb-h1", "zb-v", "pp-fsdp2")) or "deepspeed-pp" in name]
"""Pipelines whose backwards are split, or of FSDP2 or DeepSpeed: their peak is said to be an estimate, and is not
compared, as in test_pipelines."""
HELD = ("gpt-hand-zero2", "gpt-torch-tp-ddp", *(f"gpt-deepspeed-zero{stage}" for stage in (1, 2, 3)))
"""Engines that may hold one more bucket of gradients, of gpt_tiny too: here a tenth of all.

By hand and with tensor parallelism always, with DeepSpeed where gloo's thread still holds a message when the next step
begins: now and then.
"""
UNPREDICTED = ("gpt-torch-tp-pp", "gpt-deepspeed-pp-dp")
"""Runs whose gradients, or sizes of groups, are predicted otherwise than they are counted, of gpt_tiny too: defects."""
CUT = {"gpt": 1, "gpt-hand-pp": 1, "gpt-fsdp2-zero3": 1, "gpt-hand-zero3": 1}
"""Runs that are cut off after two steps, and gone on with."""
OTHERWISE = {
    "gpt": "gpt-torch-pp", "gpt-hand-pp": "gpt-fsdp2-zero3", "gpt-fsdp2-zero3": "gpt-hand-tp", "gpt-hand-zero3": "gpt",
}  # fmt: skip
"""Cut off in one layout, gone on with in another."""


def prepare(folder: Path) -> None:
    made = prepare_runs(folder, RUNS, CUT)
    again: dict[int, list[Job]] = {}
    for origin, name in OTHERWISE.items():
        config = RunConfig.of(**RUNS[name])
        job = going_on_from(made, f"cut/{origin}", f"otherwise/{origin}", config)
        again.setdefault(config.layout.world_size, []).append(job)
    for processes, jobs in again.items():
        made.do(jobs, processes)


@pytest.mark.parametrize("name", [name for name in RUNS if "-" in name])
def test_engines_give_tied_models_the_losses_of_one_process_in_every_layout(runs: Any, name: str) -> None:
    expected = runs.told(f"whole/{name.partition('-')[0]}", "step", "loss")
    assert len(expected) == 3 and runs.told(f"whole/{name}", "step", "loss") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(strict=True, reason="predicted wrongly, untied too"))
        if name in UNPREDICTED
        else name
        for name in RUNS
    ],
)
def test_predict_of_every_tied_config_equals_what_is_counted(runs: Any, name: str) -> None:
    """States and collectives exactly; the peak but for a bucket or message that gloo may still hold."""
    peak = None if name in ESTIMATED else 0.15 if name in HELD else 0.05
    check_as_predicted(runs, name, RunConfig.of(**RUNS[name]), peak=peak)


@pytest.mark.parametrize("name", CUT)
def test_verify_finds_the_tied_matrix_once_in_a_checkpoint(runs: Any, name: str) -> None:
    """A run that was cut off goes on to the bit, in another layout to rounding."""
    check_goes_on(runs, name, 2)
    kept = verify(listing(runs.root / f"cut/{name}")[0].folder)
    assert [one for one in kept.tensors if one.endswith(("token.weight", "output.weight"))] == [
        "weights/blocks.0.token.weight", "momentum_buffer/blocks.0.token.weight",
    ]  # fmt: skip
    whole = runs.told("whole/gpt", "step", "loss")
    assert runs.told(f"otherwise/{name}", "step", "loss") == pytest.approx(whole[2:], rel=1e-5)


@pytest.mark.parametrize("engine", ["by_hand", "torch"])
@pytest.mark.parametrize("pattern", ["embedding", "head"])
def test_check_runnable_wants_embedding_and_tied_head_split_together(engine: str, pattern: str) -> None:
    config = RunConfig.of(**{**GPT, "tp": 2, "engine": engine, "tensor_parts": pattern})
    with pytest.raises(LabError, match="embedding and head share one matrix, but the pattern .* splits"):
        check_runnable(config)
    check_runnable(RunConfig.of(**{**GPT, "tp": 2, "engine": engine, "tensor_parts": "embedding|head"}))
