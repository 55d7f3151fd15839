"""Context parallelism under the engines: the losses of one process, bytes counted as predicted, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from dlojz import predict
from dlojz.config.run_config import RunConfig
from tests.train.counted import (
    check_as_predicted,
    check_checkpoint_bytes,
    check_goes_on,
    check_refused,
    footprint,
    prepare_runs,
)

SGD: dict[str, Any] = {
    "sequence_length": 32, "micro_batch": 2, "device": "cpu", "steps": 3, "optimizer": "sgd", "learning_rate": 0.05,
}  # fmt: skip
LLAMA, GPT, QWEN = ({**SGD, "model": name} for name in ("llama_tiny", "gpt_tiny", "qwen_tiny"))
ONE = {"engine": "single", "micro_batches": 2}
ADAM = {"steps": 5, "optimizer": "adamw", "learning_rate": 1e-3}
GROWING = {"curriculum": "discrete", "curriculum_lengths": "16:2", "curriculum_multiple": 8, "steps": 6}
RUNS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, **ONE},
    "llama-2x2": {**LLAMA, "dp": 2, "cp": 2},
    "llama-by-hand": {**LLAMA, "cp": 4, "micro_batches": 2, "engine": "by_hand", "bucket_mib": 0.25},
    "llama-full": {**LLAMA, "cp": 2, "micro_batches": 2, "checkpointing": "full"},
    "llama-selective": {**LLAMA, "cp": 2, "micro_batches": 2, "checkpointing": "selective"},
    "llama-offloaded": {**LLAMA, "cp": 2, "micro_batches": 2, "offload": "activations"},
    "llama-planned": {**LLAMA, "cp": 2, "micro_batches": 2, "activation_plan": "keep:2,recompute:2,offload:2"},
    "gpt": {**GPT, **ONE, **ADAM},
    "gpt-cp": {**GPT, "cp": 2, "micro_batches": 2, **ADAM},
    "growing": {**GPT, **ONE, **GROWING},
    "growing-cp": {**GPT, "cp": 2, "micro_batches": 2, **GROWING},
    "qwen": {**QWEN, **ONE},
    "qwen-cp": {**QWEN, "dp": 2, "cp": 2, "engine": "by_hand", "update": "in_backward"},
    "bf16": {**LLAMA, **ONE, "precision": "bf16"},
    "bf16-cp": {**LLAMA, "cp": 2, "micro_batches": 2, "precision": "bf16"},
}
PARALLEL = [name for name in RUNS if "-" in name]
TRAINED_AT_NIGHT = True  # see tests/conftest.py


def prepare(folder: Path) -> None:
    prepare_runs(folder, RUNS, cut={"gpt-cp": 3})


@pytest.mark.parametrize("name", PARALLEL)
def test_every_context_parallel_layout_has_the_losses_of_one_process(runs: Any, name: str) -> None:
    expected = runs.told(f"whole/{name.partition('-')[0]}", "step", "loss")
    found = runs.told(f"whole/{name}", "step", "loss", RunConfig.of(**RUNS[name]).layout.world_size - 1)
    assert len(expected) == RUNS[name]["steps"]
    assert found == pytest.approx(expected, rel=2e-3 if "bf16" in name else 1e-5)


@pytest.mark.parametrize("name", PARALLEL)
def test_predict_of_every_context_parallel_config_equals_what_is_counted(runs: Any, name: str) -> None:
    """States, messages of the ring and of the gradients exactly, on every rank; FLOPs exactly, and the peak nearly."""
    check_as_predicted(runs, name, RunConfig.of(**RUNS[name]), peak=1e-3, step_flops=1e-6)


def test_a_rank_keeps_the_activations_of_its_tokens(runs: Any) -> None:
    """Half the tokens: half the activations, but for the row statistics of the softmax, one number per head."""
    whole, half = (footprint(runs, name).memory.activations_bytes for name in ("gpt", "gpt-cp"))
    assert 2 * half == pytest.approx(whole, rel=0.1)


def test_predict_counts_the_messages_of_the_ring_by_hand() -> None:
    """llama_tiny, 4 layers, 2 key-value heads of 32, 2 samples of 32 tokens over 4 ranks: 3 messages per pass."""
    traffic = {(one.collective, one.group): one for one in predict(RunConfig.of(**LLAMA, dp=2, cp=4)).communication}
    message = 2 * 2 * 2 * 8 * 32 * 4  # keys and values, samples, heads, tokens, width, bytes
    for way in ("send", "recv"):
        assert (traffic[way, "cp"].count, traffic[way, "cp"].message_bytes) == (4 * 3 * 3, 4 * 3 * 3 * message)
    assert traffic["all_reduce", "dp"].group_size == 8


def test_checkpoint_of_a_context_parallel_run_goes_on_after_a_cut(runs: Any) -> None:
    check_goes_on(runs, "gpt-cp", 4)
    check_checkpoint_bytes(runs, "gpt-cp")


@pytest.mark.parametrize(
    ("fields", "english", "french"),
    [
        ({"cp": 3}, r"cp=3 does not divide sequence_length=32 into 2 × cp = 6 .*: use cp=2 or cp=4,", "ne divise pas"),
        ({"cp": 32}, "32 into 2 × cp = 64 .*: use cp=16, or a sequence_length that 64 divides", "prenez cp=16, ou"),
        ({"cp": 2, "sequence_length": 31}, "sequence_length=31 into 2 × cp = 4 equal chunks: use cp=1,", "31 en 2"),
        ({"cp": 2, "tp": 2}, "cp=2 was received with tp=2, pp=1, ep=1: use", "cp=2 a été reçu avec tp=2"),
        ({"cp": 2, "pp": 2, "micro_batches": 2}, "with tp=1, pp=2, ep=1: use", "avec tp=1, pp=2"),
        ({"cp": 2, "dp": 2, "zero": 3}, "with engine='torch', zero=3: use", "avec engine='torch', zero=3"),
        ({"cp": 2, "engine": "by_hand", "zero": 1}, "with engine='by_hand', zero=1: use", "zero=1 : prenez"),
        ({"cp": 2, "engine": "deepspeed"}, "with engine='deepspeed', zero=0: use", "engine='deepspeed'"),
        ({"cp": 2, "engine": "single"}, "engine 'single' is one process .* cp=2, zero=0", "un seul processus"),
        ({"cp": 2, "model": "vit_tiny", "sequence_length": None}, "vit_tiny reads images", "lit des images"),
        ({"cp": 2, "model": "moe_tiny"}, "moe_tiny, whose experts", "moe_tiny, dont les experts"),
        ({"cp": 2, "model": "deepseek_tiny"}, "deepseek_tiny, whose experts", "deepseek_tiny, dont les experts"),
        ({"cp": 2, "engine": "by_hand", "optimizer": "local_sgd"}, "averages over the ranks itself", "moyenne lui"),
        (
            {"cp": 2, "library": "torch", "optimizer": "adamw"},
            "cp=2 is none of what the program of library='torch' does",
            "cp=2 n’est pas dans ce que fait le programme",
        ),
        (
            {"cp": 2, **GROWING, "curriculum_multiple": 2},
            "cp=2 divides each length into 2 × cp = 4 chunks, .* use curriculum_multiple=4",
            "prenez curriculum_multiple=4",
        ),
    ],
)
def test_run_config_refuses_what_context_parallel_cannot(fields: dict[str, Any], english: str, french: str) -> None:
    check_refused({**LLAMA, **fields}, english, french)
