"""Adapters beside the frozen layers of a model of transformers, quantized or not: predicted as a run counts them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dlojz import predict
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.models.foreign.hugging_face.low_rank import NORMAL_FLOAT, QuantizedBase, dequantize
from dlojz.prediction.forecast import forecast
from tests.train.counted import check_as_predicted, check_refused, prepare_runs

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


@pytest.mark.parametrize("name", RUNS)
def test_predict_of_adapters_equals_what_is_counted(runs: Any, name: str) -> None:
    """States and collectives exactly; the peak of one process but for scalars, of two but for what gloo holds."""
    check_as_predicted(runs, name, RunConfig.of(**RUNS[name]), peak=0.1 if RUNS[name].get("dp", 1) > 1 else 0.001)


def test_quantized_linear_keeps_the_16_values_and_computes_with_them() -> None:
    """A block of 64 of NF4's values is exact: its scale is the mean of all scales, and needs no 8 bits."""
    layer = nn.Linear(64, 1, bias=False)
    layer.weight.data = 2.5 * torch.tensor(NORMAL_FLOAT).repeat(1, 4)
    quantized = QuantizedBase(layer, "4bit")
    weight = dequantize(quantized.codes, quantized.scales, quantized.constants, 1, 64, torch.float32)
    assert torch.equal(weight, layer.weight)
    x = torch.randn(3, 64, requires_grad=True)
    quantized(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, layer.weight.expand(3, 64))


@pytest.mark.parametrize(("base", "loss", "num_bytes"), [("4bit", 0.1, 833), ("8bit", 0.005, 1683)])
def test_quantized_linear_takes_the_bytes_of_its_bits_and_scales(base: Any, loss: float, num_bytes: int) -> None:
    """Of 33 × 47 weights: 25 blocks, so 800 bytes of codes, 25 scales, 2 constants; or 1551 codes, 33 constants."""
    torch.manual_seed(0)
    layer = nn.Linear(47, 33, bias=False)
    quantized = QuantizedBase(layer, base)
    assert sum(one.nbytes for one in quantized.parameters()) == num_bytes
    weight = dequantize(quantized.codes, quantized.scales, quantized.constants, 33, 47, torch.float32)
    assert (weight - layer.weight).norm() < loss * layer.weight.norm()


def test_predict_trains_the_adapters_alone() -> None:
    """Of each of 3 layers q is 64 × 64 and v 32 × 64: r (64 + 64) + r (64 + 32) numbers of rank r = 4, in 4 tensors."""
    trained = 3 * 4 * (64 + 64 + 64 + 32)
    told = forecast(RunConfig.of(**SMALL))
    assert told.memory.gradients_bytes == 4 * trained
    assert told.memory.optimizer_bytes == 8 * trained + 4 * 3 * 4
    use_language("en")
    assert told.notes[-1].startswith("2.69 k of its ")
    # Embedding and head 320 × 64, 7 norms of 64, and of a layer q, k, v, o and the three of 64 × 96.
    layer = 64 * (64 + 32 + 32 + 64 + 3 * 96)
    assert told.memory.weights_bytes == 4 * (trained + 2 * 320 * 64 + 7 * 64 + 3 * layer)
    small = predict(RunConfig.of(**SMALL, lora_base="4bit", precision="bf16-true"))
    blocks = layer // 64  # of each of the seven matrices 4 bytes per 256 blocks, rounded up to 1, and the mean
    others = 2 * (2 * 320 * 64 + 7 * 64)  # in bf16; the adapters stay in fp32
    assert small.memory.weights_bytes == 4 * trained + others + 3 * (layer // 2 + blocks + 7 * 8)


@pytest.mark.parametrize(
    ("fields", "english", "french"),
    [
        ({"model": "gpt_tiny", "lora": 4}, "use hf:FOLDER with its config.json", "prenez hf:DOSSIER"),
        (
            {"lora": None, "lora_base": "4bit"},
            "lora_base='4bit' was received",
            "il faut aux adaptateurs",
        ),
        ({"lora_targets": "q_proj v_proj"}, "names with commas between them", "des noms séparés par des virgules"),
        ({"lora_targets": "c_attn"}, "q_proj, k_proj, v_proj, o_proj, gate_proj", "mais 'c_attn' a été reçu"),
        ({"dp": 2, "zero": 3, "engine": "deepspeed", "lora_base": "4bit"}, "types: float32, uint8", "float32, uint8"),
        ({"pp": 2}, "30 frozen parameters of 42", "gelés sur"),
    ],
)
def test_adapters_are_refused_where_they_are_not_predicted(fields: dict[str, Any], english: str, french: str) -> None:
    check_refused({**SMALL, **fields}, english, french, to_run=True)
