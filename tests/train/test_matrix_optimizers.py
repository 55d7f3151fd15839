"""Muon and Adafactor, whose states depend on a matrix's form: predicted as counted, and a cut leaves no trace."""

from pathlib import Path
from typing import Any

import pytest

from dlojz.config.run_config import RunConfig
from dlojz.prediction.compute import checkpoint_bytes, update_flops
from dlojz.prediction.engine_memory import EngineMemory
from dlojz.prediction.forecast import forecast
from dlojz.prediction.shapes import ModelShapes, ParameterShape, model_shapes
from dlojz.prediction.states import offload_states, optimizer_bytes_of, predict_states
from tests.train.counted import check_as_predicted, check_goes_on, check_refused, prepare_runs

SHORT: dict[str, Any] = {"weight_decay": 0.1, "device": "cpu", "micro_batch": 2, "steps": 4}
LLAMA = {**SHORT, "model": "llama_tiny", "sequence_length": 16}
RUNS: dict[str, dict[str, Any]] = {
    "muon": {**LLAMA, "optimizer": "muon"},
    "adafactor": {**SHORT, "model": "coatnet_tiny", "image_size": 32, "optimizer": "adafactor"},
    "adafactor-in-backward": {**LLAMA, "optimizer": "adafactor", "update": "in_backward"},
    "muon-bf16": {**LLAMA, "optimizer": "muon", "precision": "bf16-true"},
    "muon-fsdp2": {**LLAMA, "optimizer": "muon", "dp": 2, "zero": 3},
    "adafactor-by-hand": {**LLAMA, "optimizer": "adafactor", "dp": 2, "engine": "by_hand"},
}
STOP_AFTER = 2
MATRIX = ParameterShape("blocks.1.hidden", (6, 10), 1, "blocks.1", is_hidden_matrix=True)
EMBEDDING = ParameterShape("blocks.0.weight", (20, 10), 0, "blocks.0")
BIAS = ParameterShape("blocks.1.bias", (10,), 1, "blocks.1")
SHAPES = ModelShapes((EMBEDDING, MATRIX, BIAS), 0, 0)


def prepare(folder: Path) -> None:
    prepare_runs(folder, RUNS, dict.fromkeys(RUNS, STOP_AFTER))


@pytest.mark.parametrize("name", RUNS)
def test_predict_of_matrix_optimizers_is_what_is_counted_and_resume_goes_on(runs: Any, name: str) -> None:
    """States, messages (what Muon gathers under FSDP2 among them) exactly; the peak to 0.1 %, FLOPs to 1 %.

    Products of the convolutions' backward are what coatnet_tiny's FLOPs are off by.
    """
    check_as_predicted(runs, name, RunConfig.of(**RUNS[name]), peak=1e-3, step_flops=1e-2)
    check_goes_on(runs, name, STOP_AFTER + 1)


def test_optimizer_bytes_of_muon_and_adafactor_by_hand() -> None:
    """Muon: 60 of the matrix; twice 210 of the rest, two counts. Adafactor: 20 + 10, 6 + 10 and 10; three counts."""
    sizes = [(parameter, parameter.numel) for parameter in SHAPES.parameters]
    assert optimizer_bytes_of(RunConfig.of(optimizer="muon"), sizes) == 4 * (60 + 2 * 210) + 4 * 2
    assert optimizer_bytes_of(RunConfig.of(optimizer="adafactor"), sizes) == 4 * (30 + 16 + 10) + 4 * 3


def test_matrix_update_bytes_of_muon_and_adafactor_by_hand() -> None:
    """Muon's matrix: the update in fp32, 240; X, 120; two of A, 36 in bf16 each, and the next X.

    Adafactor: the estimates of the embedding and of the matrix after it, and the embedding's means.
    """
    muon = EngineMemory(RunConfig.of(optimizer="muon"), SHAPES)
    assert muon.matrix_update_bytes([MATRIX]) == 240 + 120 + 2 * 72 + 120
    adafactor = EngineMemory(RunConfig.of(optimizer="adafactor"), SHAPES)
    assert adafactor.matrix_update_bytes(SHAPES.parameters) == 4 * (200 + 60) + 4 * 30


def test_update_flops_and_checkpoint_bytes_of_matrix_optimizers() -> None:
    """gpt_tiny has hidden matrices d × 3d, d × d, d × 4d and 4d × d in each of its layers, d = 128 of 4 layers."""
    shapes = model_shapes(RunConfig.of(model="gpt_tiny"))
    matrices = [parameter.shape for parameter in shapes.parameters if parameter.is_hidden_matrix]
    width = min(matrices[0])
    layers = len(matrices) // 4
    products = [4 * width**2 * larger * width + 2 * width**3 for larger in (3, 1, 4, 4)]
    assert update_flops(RunConfig.of(model="gpt_tiny", optimizer="muon")) == 5 * layers * sum(products)
    config = RunConfig.of(model="gpt_tiny", optimizer="muon")
    moments = 4 * (2 * shapes.num_parameters - layers * 12 * width**2)
    assert checkpoint_bytes(config) - checkpoint_bytes(config.model_copy(update={"optimizer": "sgd"})) == moments + 8


def test_paged_states_are_of_the_host_and_in_backward_takes_no_temporaries() -> None:
    """vit_b_16 has matrices of 768 × 768 and more, which have pages, and vectors, which have none."""
    config = RunConfig.of(model="vit_b_16", data="synthetic", optimizer="paged_adamw_8bit", update="in_backward")
    shapes = model_shapes(config)
    paged = 2 * sum(parameter.numel for parameter in shapes.parameters if parameter.numel >= 100_000)
    memory = offload_states(config, shapes, predict_states(config, shapes))
    whole = predict_states(config.model_copy(update={"optimizer": "adamw_8bit"}), shapes)
    assert paged > 0 and memory.host_bytes == paged and memory.optimizer_bytes == (whole.optimizer_bytes or 0) - paged
    assert EngineMemory(config, shapes).update_bytes([10**6]) == 0
    notes = forecast(RunConfig.of(model="gpt_tiny", optimizer="paged_adamw_8bit"), 0).notes
    assert len(notes) == 1 and "0 B, are counted on the host" in notes[0]


@pytest.mark.parametrize(
    ("fields", "english", "french"),
    [
        ({"optimizer": "adafactor", "dp": 2, "zero": 3}, "updates a layer as a whole, but zero=3", "prenez zero=0"),
        ({"optimizer": "muon", "tp": 2}, "as a whole, but tp=2 was received: use tp=1", "prenez tp=1"),
        ({"optimizer": "muon", "engine": "deepspeed", "dp": 2}, "engine='deepspeed' was received", "engine='torch'"),
        ({"optimizer": "muon", "update": "in_backward"}, "is a form of sgd, momentum, adamw, ada", "une forme"),
    ],
)
def test_run_config_refuses_what_no_optimizer_of_layers_can(fields: dict[str, Any], english: str, french: str) -> None:
    check_refused(fields, english, french)
