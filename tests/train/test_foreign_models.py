"""Models from elsewhere with replicas, whole or sharded: the losses of one process, and what is predicted."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from dlojz import predict
from dlojz.config.run_config import RunConfig
from dlojz.models.foreign.building import _spec
from dlojz.train.loop import build_model
from tests.models import own_mlp, own_models
from tests.train.counted import check_as_predicted, check_goes_on, footprint, prepare_runs

SMALL: dict[str, Any] = {
    "micro_batch": 2, "device": "cpu", "steps": 3, "optimizer": "momentum", "learning_rate": 0.01,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "own": {"model": f"{own_models.__file__}:build"},
    "loss": {"model": f"{Path(own_models.__file__).with_name('own_loss.py')}:build"},
    "inputs": {"model": f"{Path(own_models.__file__).with_name('own_inputs.py')}:build"},
    "shapes": {"model": f"{Path(own_models.__file__).with_name('own_shapes.py')}:build"},
    "resnet": {"model": "torchvision:resnet18", "image_size": 64, "learning_rate": 0.001},
}
MLP = {"model": f"{own_mlp.__file__}:build"}
# Selective before DeepSpeed's stage 3, which puts its own linear layer in torch's place for the rest of the process.
LAYOUTS: dict[str, dict[str, Any]] = {
    "": {"micro_batches": 4, "engine": "single"},
    "-ddp": {"micro_batches": 2, "dp": 2},
    "-ddp-selective": {"micro_batches": 2, "dp": 2, "checkpointing": "selective"},
    "-fsdp2-zero2": {"micro_batches": 2, "dp": 2, "zero": 2},
    "-fsdp2-zero3": {"micro_batches": 2, "dp": 2, "zero": 3},
    **{f"-deepspeed-{zero}": {"micro_batches": 2, "dp": 2, "zero": zero, "engine": "deepspeed"} for zero in range(4)},
    **{f"-by-hand-{zero}": {"micro_batches": 2, "dp": 2, "zero": zero, "engine": "by_hand"} for zero in range(4)},
}
RECOMPUTED = ("", "-ddp", "-fsdp2-zero3", "-by-hand-3", "-deepspeed-3")
LAYOUTS |= {f"{layout}-full": {**LAYOUTS[layout], "checkpointing": "full"} for layout in RECOMPUTED}
ALONE = ("", "-fsdp2-zero3", "-fsdp2-zero3-full", "-deepspeed-3", "-deepspeed-3-full", "-by-hand-3")
"""Layouts of the models that are not in one's own file."""
NO_CHAIN = ("loss", "inputs", "shapes")
"""Models that have a loss or read several tensors: none of their blocks is recomputed."""
RUNS = {
    f"{name}{layout}": {**SMALL, **model, **fields}
    for name, model in MODELS.items()
    for layout, fields in LAYOUTS.items()
    if name == "own" or (layout in ALONE and not (name in NO_CHAIN and layout.endswith("-full")))
}
RUNS |= {f"mlp{layout}": {**SMALL, **MLP, **LAYOUTS[layout]} for layout in ("", "-ddp", "-fsdp2-zero3")}
RUNS |= {
    f"{name}{layout}": {**SMALL, **MODELS[name], **LAYOUTS[layout]}
    for name in ("inputs", "shapes")
    for layout in ("-ddp", "-fsdp2-zero2")
}
ONCE = {"micro_batch": 4, "micro_batches": 1}
LARGE = {"resnet": MODELS["resnet"], "vit": {"model": "vit_ti_16", "image_size": 32}}
"""Models whose gradients take several of DeepSpeed's buckets: one from elsewhere, one of the catalogue.
They come before DeepSpeed's pipeline, whose process trains with no other engine of it afterwards."""
RUNS |= {
    f"{name}-deepspeed-{zero}": {**SMALL, **model, **LAYOUTS[f"-deepspeed-{zero}"]}
    for name, model in LARGE.items()
    for zero in (1, 2)
}
RUNS |= {f"vit-deepspeed-{zero}-once": {**RUNS[f"vit-deepspeed-{zero}"], **ONCE} for zero in (1, 2)}
RUNS["vit"] = {**SMALL, **LARGE["vit"], **LAYOUTS[""]}
PIPELINES: dict[str, dict[str, Any]] = {
    "": {"micro_batches": 4, "engine": "single"},
    "-torch": {"micro_batches": 4, "pp": 2},
    "-by-hand": {"micro_batches": 4, "pp": 2, "engine": "by_hand"},
    "-deepspeed": {"micro_batches": 4, "pp": 2, "engine": "deepspeed"},
    "-full": {"micro_batches": 4, "pp": 2, "checkpointing": "full"},
    "-zb-h1": {"micro_batches": 4, "pp": 2, "engine": "by_hand", "schedule": "zb-h1"},
}
"""Layouts of models that are chains."""
CHAINS: dict[str, dict[str, Any]] = {
    "chained": {"model": f"{own_models.__file__}:chained"},
    "resnet_chain": MODELS["resnet"],
    "vit_chain": {"model": "timm:vit_tiny_patch16_224", "image_size": 32},
}
RUNS |= {
    f"{name}{layout}": {**SMALL, **model, **fields}
    for name, model in CHAINS.items()
    for layout, fields in PIPELINES.items()
    if name == "chained" or layout in ("", "-torch")
}
RUNS |= {
    f"own_{number}": {**SMALL, **MODELS["own"], "optimizer": "adamw", **fields}
    for number, fields in enumerate(
        ({"update": "fused"}, {"update": "in_backward"}, {"offload": "activations"}, {"optimizer": "muon"})
    )
}
RUNS["own-bf16"] = {**RUNS["own-fsdp2-zero3"], "precision": "bf16"}
RUNS["own-bf16-by-hand"] = {**RUNS["own-by-hand-3"], "precision": "bf16"}
CUT = {"chained-torch": 1, "own-fsdp2-zero3": 1, "own": 1, "own-deepspeed-3": 1, "own-by-hand-3": 1}
"""Runs that are cut off after two steps, and gone on with."""
DAILY = {
    name
    for name in RUNS
    if name.partition("-")[0] in ("mlp", "chained")
    or name in (*CUT, "own-ddp", "own-ddp-selective", "own-fsdp2-zero3-full", "own-bf16")
}
"""Of each engine its stage that divides most; tests/train/test_truth.py trains all stages every day. All others at
night: their stages, a model from elsewhere, and what has a loss or reads several tensors."""


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in DAILY else pytest.mark.nightly) for name in names]


def prepare(folder: Path) -> None:
    names = RUNS if os.environ.get("DLOJZ_NIGHTLY") else DAILY
    prepare_runs(folder, {name: RUNS[name] for name in RUNS if name in names}, CUT)


@pytest.mark.parametrize("name", marked(name for name in RUNS if "-" in name and "bf16" not in name))
def test_foreign_models_have_the_losses_of_one_process_in_every_layout(runs: Any, name: str) -> None:
    expected = runs.told(f"whole/{name.partition('-')[0]}", "step", "loss")
    assert len(expected) == 3 and runs.told(f"whole/{name}", "step", "loss") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", marked(RUNS))
def test_predict_of_every_foreign_config_equals_what_is_counted(runs: Any, name: str) -> None:
    """States and collectives exactly; the peak but for a bucket or message that gloo may still hold.

    In a pipeline it is not compared where backwards are split, nor DeepSpeed's, whose buffers are not forecast.
    """
    peak: float | None = 0.05
    if name == "mlp":  # nothing of the example inputs is counted; 20 bytes are those of the losses
        peak = 0.001
    elif name == "own-by-hand-2":  # of one bucket, an eighth of all
        peak = 0.15
    elif name.startswith("inputs-") or ("deepspeed" in name and name.partition("-")[0] in LARGE):
        peak = 0.1  # a block's message, or a bucket, is a tenth
    elif name.startswith("chained-"):  # of a stage with 400 kB, whose messages torch keeps
        peak = None if name in ("chained-zb-h1", "chained-deepspeed") else 0.1
    check_as_predicted(runs, name, RunConfig.of(**RUNS[name]), peak=peak)


def test_operations_of_a_model_from_elsewhere_leave_out_the_gradient_of_its_inputs(runs: Any) -> None:
    """Two operations per product: the first layer forward and for its weight, the second for its input, too."""
    first, second = 2 * own_mlp.INPUTS * own_mlp.HIDDEN, 2 * own_mlp.HIDDEN * own_mlp.CLASSES
    for name, samples in (("mlp", 8), ("mlp-ddp", 4), ("mlp-fsdp2-zero3", 4)):
        config = RunConfig.of(**RUNS[name])
        counted = footprint(runs, name).step_flops
        assert predict(config).step_flops == counted == samples * (2 * first + 3 * second)


def test_weights_do_not_depend_on_when_the_file_of_a_model_was_read() -> None:
    config = RunConfig.of(**RUNS["mlp"])
    _spec.cache_clear()
    read_by_build, read_before = build_model(config), build_model(config)
    for first, second in zip(read_by_build.parameters(), read_before.parameters(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", CUT)
def test_checkpoint_of_a_foreign_model_is_gone_on_from(runs: Any, name: str) -> None:
    check_goes_on(runs, name, 2)
