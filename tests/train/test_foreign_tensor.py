"""Models from elsewhere with tensor parallelism on two ranks: the losses of one process, and what is predicted."""

import json
from pathlib import Path
from typing import Any

import pytest

from dlojz.config.run_config import RunConfig
from tests.models import own_heads
from tests.models.test_tensor_plan import configuration
from tests.train.counted import check_as_predicted, check_goes_on, prepare_runs

TRAINED_AT_NIGHT = True  # see tests/conftest.py
SMALL: dict[str, Any] = {"micro_batch": 2, "device": "cpu", "steps": 3, "optimizer": "sgd", "learning_rate": 0.05}
NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "": {"micro_batches": 2, "engine": "single"},
    "-torch": {"micro_batches": 2, "tp": 2},
    "-by-hand": {"micro_batches": 2, "tp": 2, "engine": "by_hand"},
    "-full": {"micro_batches": 2, "tp": 2, "checkpointing": "full"},
    "-mlp": {"micro_batches": 2, "tp": 2, "tensor_parts": "mlp|up"},
    "-ddp": {"micro_batches": 1, "tp": 2, "dp": 2},
    "-fsdp2": {"micro_batches": 1, "tp": 2, "dp": 2, "zero": 3},
    "-zero1": {"micro_batches": 1, "tp": 2, "dp": 2, "zero": 1, "engine": "by_hand"},
}
RUNS = [f"own{layout}" for layout in LAYOUTS] + [
    f"{name}{layout}" for name in ("vit", "gpt2", "llama", "phi3") for layout in ("", "-torch", "-by-hand")
]
CUT = {"own-torch": 1, "own-fsdp2": 1}
"""Runs that are cut off after a step, and gone on with: a fused projection is gathered and cut again."""


def fields(folder: Path) -> dict[str, dict[str, Any]]:
    models: dict[str, dict[str, Any]] = {
        "own": {"model": f"{own_heads.__file__}:build"},
        "vit": {"model": "timm:vit_small_patch16_224", "image_size": 32},
        "gpt2": {"model": configuration(folder, "gpt2", **NO_DROPOUT), "sequence_length": 16},
        "llama": {"model": configuration(folder, "llama"), "sequence_length": 16},
        "phi3": {"model": configuration(folder, "phi3", **NO_DROPOUT), "sequence_length": 16},
    }
    split = {name: name.partition("-") for name in RUNS}
    return {name: {**SMALL, **models[model], **LAYOUTS[dash + rest]} for name, (model, dash, rest) in split.items()}


def prepare(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    runs = fields(folder)
    (folder / "fields.json").write_text(json.dumps(runs))
    prepare_runs(folder, runs, CUT)


@pytest.mark.parametrize("name", [name for name in RUNS if "-" in name])
def test_tensor_engines_give_foreign_models_the_losses_of_one_process(runs: Any, name: str) -> None:
    expected = runs.told(f"whole/{name.partition('-')[0]}", "step", "loss")
    assert len(expected) == 3 and runs.told(f"whole/{name}", "step", "loss") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", [name for name in RUNS if "-" in name])
def test_predict_of_every_foreign_tensor_config_equals_what_is_counted(runs: Any, name: str) -> None:
    """States and collectives exactly; the peak but for messages that gloo may hold: all gradients are one of them."""
    config = RunConfig.of(**json.loads((runs.root / "fields.json").read_text())[name])
    check_as_predicted(runs, name, config, step_flops=0.05, held_group="dp")


@pytest.mark.parametrize("name", CUT)
def test_checkpoint_of_a_foreign_model_in_tensor_parts_is_gone_on_from(runs: Any, name: str) -> None:
    check_goes_on(runs, name, 2)
