"""Adapters beside the frozen layers of a model of transformers, quantized or not: predicted as a run counts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlojz import predict
from dlojz.config.run_config import RunConfig
from tests.train.counted import Runs, check_as_predicted, footprint, prepare_runs

LLAMA = f"hf:{Path(__file__).parents[1] / 'models' / 'tiny_llama'}"
SMALL: dict[str, Any] = {
    **{"model": LLAMA, "lora": 4, "micro_batch": 2, "sequence_length": 32, "device": "cpu", "steps": 3},
}
DDP, FSDP2, ALL = {"dp": 2}, {"dp": 2, "zero": 3}, {"lora_targets": "all-linear"}
NF4, ROWS = {"lora_base": "4bit"}, {"lora_base": "8bit", "precision": "bf16-true"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"micro_batches": 2},
    "ddp": DDP,
    "by-hand": {**DDP, "engine": "by_hand", "micro_batches": 2},
    "zero-2": {"dp": 2, "zero": 2, "micro_batches": 2},
    "zero-3": FSDP2,
    "full": {**ALL, "checkpointing": "full"},
    **{f"deepspeed-{zero}": {"dp": 2, "engine": "deepspeed", "zero": zero} for zero in range(4)},
    "deepspeed-2-bf16": {"dp": 2, "engine": "deepspeed", "zero": 2, "precision": "bf16", "micro_batches": 2},
    "deepspeed-3-bf16": {"dp": 2, "engine": "deepspeed", "zero": 3, "precision": "bf16", "checkpointing": "full"},
    "nf4": {**NF4, **ALL},
    "nf4-bf16": {**NF4, "precision": "bf16", "checkpointing": "full"},
    "nf4-ddp": {**NF4, **DDP, "precision": "bf16-true"},
    "nf4-zero-3": {**NF4, **FSDP2, "precision": "bf16"},
    "rows": ROWS,
    "rows-ddp": {**ROWS, **DDP},
    "true-zero-3": {**FSDP2, "precision": "bf16-true", **ALL},
}
RUNS = {name: {**SMALL, **fields} for name, fields in LAYOUTS.items()}
TRAINED_AT_NIGHT = True  # see tests/conftest.py


def prepare(folder: Path) -> None:
    prepare_runs(folder, RUNS, {})


@pytest.fixture(scope="module")
def runs(prepared: Path) -> Any:
    return Runs(prepared)


@pytest.mark.parametrize("name", RUNS)
def test_predict_of_adapters_equals_what_is_counted(runs: Any, name: str) -> None:
    """States and collectives exactly; the peak of one process but for scalars, of two but for what gloo holds."""
    check_as_predicted(runs, name, RunConfig.of(**RUNS[name]), peak=0.1 if RUNS[name].get("dp", 1) > 1 else 0.001)
