"""Weights in other types than fp32, and frozen ones: states, messages and peak are predicted as a run counts them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dlojz import predict
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.prediction.forecast import forecast
from tests.models import own_dtypes
from tests.train.counted import check_as_predicted, check_refused, footprint, prepare_runs

OWN = own_dtypes.__file__
SMALL: dict[str, Any] = {"micro_batch": 2, "device": "cpu", "steps": 3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "": {"micro_batches": 2},
    "-ddp": {"dp": 2},
    "-by-hand": {"dp": 2, "engine": "by_hand", "micro_batches": 2},
    "-fsdp2-zero2": {"dp": 2, "zero": 2, "micro_batches": 2},
    "-fsdp2-zero3": {"dp": 2, "zero": 3},
}
FROZEN = ("lora", "biases", "embedding", "tied", "head")
MODELS = ("bf16", "float64", *FROZEN)
RUNS = {
    f"{name}{layout}": {**SMALL, "model": f"{OWN}:{name}", **fields}
    for name in MODELS
    for layout, fields in LAYOUTS.items()
}
RUNS |= {f"{name}{layout}": {**SMALL, "model": f"{OWN}:{name}", **LAYOUTS[layout]} for name, layout in (
    ("mixed", ""), ("mixed", "-ddp"), ("qlora", ""), ("qlora", "-ddp"), ("qlora", "-fsdp2-zero3"),
)}  # fmt: skip
RUNS |= {
    f"lora-bf16{layout}": {**RUNS[f"lora{layout}"], "precision": "bf16"} for layout in ("", "-ddp", "-fsdp2-zero3")
}
RUNS |= {f"unused{layout}": {**SMALL, "model": f"{OWN}:unused", **LAYOUTS[layout]} for layout in (
    "", "-fsdp2-zero2", "-fsdp2-zero3",
)}  # fmt: skip
RUNS |= {
    f"unreached-deepspeed-{zero}": {**SMALL, **fields, "model": f"{OWN}:Unreached", "dp": 2, "engine": "deepspeed"}
    for zero, fields in enumerate(({}, {"zero": 1}, {"zero": 2, "micro_batches": 2}, {"zero": 3}))
}
RUNS |= {
    f"{name}-deepspeed-{zero}": {**SMALL, "model": f"{OWN}:{name}", "dp": 2, "engine": "deepspeed", "zero": zero}
    for name, zero in (("lora", 1), ("biases", 2))
}
RUNS["lora-full"] = {**RUNS["lora"], "checkpointing": "full"}
RUNS["bf16-momentum"] = {**RUNS["bf16-ddp"], "optimizer": "momentum", "weight_decay": 0.1}
TRUE: dict[str, dict[str, Any]] = {
    "gpt": {"model": "gpt_tiny", "sequence_length": 32},
    "llama": {"model": "llama_tiny", "sequence_length": 32, "checkpointing": "full"},
    "coatnet": {"model": "coatnet_tiny", "image_size": 32},
    "resnet": {"model": "torchvision:resnet18", "image_size": 64},
    "fp32": {"model": f"{OWN}:lora"},
}
RUNS |= {
    f"true-{name}{layout}": {**SMALL, **model, **LAYOUTS[layout], "precision": "bf16-true"}
    for name, model in TRUE.items()
    for layout in ("", "-ddp", "-fsdp2-zero3")
}
RUNS["true-gpt-by-hand"] = {**RUNS["true-gpt"], **LAYOUTS["-by-hand"]}
RUNS["true-gpt-in-backward"] = {**RUNS["true-gpt"], "micro_batches": 1, "engine": "single", "update": "in_backward"}
LAST: dict[str, Any] = {**SMALL, "channels_last": True, "image_size": 64}
RUNS |= {
    "last-coatnet": {**LAST, "model": "coatnet_tiny", "micro_batches": 2},
    "last-coatnet-ddp": {**LAST, "model": "coatnet_tiny", "dp": 2},
    "last-convnext": {**LAST, "model": "timm:convnext_atto"},
    "last-resnet-bf16": {**LAST, "model": "torchvision:resnet18", "precision": "bf16"},
}
TRAINED_AT_NIGHT = True  # see tests/conftest.py


def prepare(folder: Path) -> None:
    prepare_runs(folder, RUNS, {})


@pytest.mark.parametrize("name", RUNS)
def test_predict_of_every_weight_type_config_equals_what_is_counted(runs: Any, name: str) -> None:
    """States and collectives exactly; the peak but for a bucket or message that gloo may still hold."""
    check_as_predicted(runs, name, RunConfig.of(**RUNS[name]), peak=0.001 if RUNS[name].get("dp", 1) == 1 else 0.1)


@pytest.mark.parametrize("name", [name for name in RUNS if RUNS[name].get("dp", 1) == 1])
def test_the_peak_of_one_process_is_exact(runs: Any, name: str) -> None:
    """But for scalars of the loss, which its engine divides."""
    counted, predicted = footprint(runs, name).memory, predict(RunConfig.of(**RUNS[name])).memory
    assert counted.peak_bytes is not None and predicted.peak_bytes is not None
    assert 0 <= counted.peak_bytes - predicted.peak_bytes <= 16


@pytest.mark.parametrize("name", [*MODELS, "mixed", "qlora", "unused"])
def test_states_equal_those_of_plain_torch(name: str) -> None:
    """Two steps of torch's AdamW, without the lab: bytes of weights, gradients, states; the module itself likewise."""
    torch.manual_seed(0)
    model = getattr(own_dtypes, name)()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, own_dtypes.WORDS, (2, own_dtypes.TOKENS))
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    states = [one for state in optimizer.state.values() for one in state.values()]
    counted = tuple(sum(one.nbytes for one in tensors) for tensors in (model.parameters(), gradients, states))
    fresh = getattr(own_dtypes, name)()
    for told in (predict(f"{OWN}:{name}", micro_batch=2), predict(fresh, tokens)):
        memory = told.memory
        assert (memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes) == counted


@pytest.mark.parametrize(
    ("fields", "english", "french"),
    [
        (
            {"model": f"{OWN}:lora", "engine": "by_hand", "zero": 3, "dp": 2},
            "27 frozen parameters of 43",
            "gelés sur",
        ),
        (
            {"model": f"{OWN}:bf16", "engine": "by_hand", "zero": 1, "dp": 2},
            "weights in bfloat16",
            "des poids en bfloat16",
        ),
        ({"model": f"{OWN}:bf16", "zero": 3, "dp": 2, "precision": "bf16"}, "precision='fp32'", "precision='fp32'"),
        ({"model": f"{OWN}:mixed", "zero": 3, "dp": 2}, "bfloat16, float32", "bfloat16, float32"),
        (
            {"model": "gpt_tiny", "precision": "bf16-true", "engine": "deepspeed", "dp": 2},
            "engine='deepspeed' was received: use engine='torch'",
            "prenez engine='torch'",
        ),
        ({"model": "gpt_tiny", "precision": "bf16-true", "tp": 2}, "tp=2 was received: use tp=1", "prenez tp=1"),
        ({"model": "gpt_tiny", "channels_last": True}, "model='gpt_tiny' was received", "prenez model="),
        ({"model": "coatnet_tiny", "channels_last": True, "dp": 2, "zero": 3}, "use zero=0", "prenez zero=0"),
        ({"model": "gpt_tiny", "precision": "bf16-true", "optimizer": "lamb"}, "use optimizer='adamw'", "'adamw'"),
    ],
)
def test_check_runnable_refuses_weight_types_where_they_are_not_kept(
    fields: dict[str, Any], english: str, french: str
) -> None:
    check_refused({**SMALL, **fields}, english, french, to_run=True)


def test_predict_refuses_weight_types_that_are_not_kept() -> None:
    with pytest.raises(LabError, match="frozen parameters of"):
        predict(RunConfig.of(**SMALL, model=f"{OWN}:lora", engine="by_hand", zero=1, dp=2))


@pytest.mark.parametrize(
    ("fields", "english", "french"),
    [
        ({}, "31 parameters 4 get no gradient from this loss (the first is layers.1.spare_norm.weight): they have no",
         "31 paramètres, 4 n’ont aucun gradient de cette loss (le premier : layers.1.spare_norm.weight)"),
        ({"dp": 2}, "DDP waits for every gradient and would stop", "DDP attend tous les gradients et s’arrêterait"),
        ({"dp": 2, "zero": 2, "engine": "deepspeed"}, "ZeRO-2 keeps optimizer states for them", "garde des états"),
        ({"dp": 2, "zero": 1, "engine": "by_hand"}, "by hand fills in zeros", "complète par des zéros"),
    ],
)  # fmt: skip
def test_forecast_tells_parameters_without_a_gradient(fields: dict[str, Any], english: str, french: str) -> None:
    told = forecast(RunConfig.of(**SMALL, model=f"{OWN}:unused", **fields))
    use_language("en")
    assert english in told.notes[0]
    use_language("fr")
    assert french in told.notes[0]


def test_forecast_says_that_what_a_recurrent_layer_keeps_is_unknown() -> None:
    (note,) = forecast(RunConfig.of(**SMALL, model=f"{OWN}:Recurrent")).notes
    assert "(the first is layers.0)" in note and "the peak is at least" in note
    assert forecast(RunConfig.of(**SMALL, model=f"{OWN}:bf16")).notes == ()


def test_predict_halves_the_states_with_true_bf16() -> None:
    """Weights, gradients and two moments of GPT-2 (124,439,808 parameters, 148 of them tensors, tied head once)."""
    parameters, tensors = 124_439_808, 148
    memory = predict(RunConfig.of(model="gpt2", precision="bf16-true", micro_batch=1)).memory
    assert (memory.weights_bytes, memory.gradients_bytes) == (2 * parameters, 2 * parameters)
    assert memory.optimizer_bytes == 4 * parameters + 4 * tensors


def test_predict_with_channels_last_holds_a_copy_of_the_images() -> None:
    """A micro-batch of 4 · 3 · 64² numbers is read with channels first, and copied; all of CoAtNet keeps the order."""
    first, last = (
        predict(RunConfig.of(model="coatnet_tiny", micro_batch=4, channels_last=channels_last)).memory.peak_bytes or 0
        for channels_last in (False, True)
    )
    assert last - first == 4 * 4 * 3 * 64 * 64
