"""One update in six forms: the same training, as much memory as predicted, and a cut that leaves no trace."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.update_forms import measure_forms, write_measures
from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.runnable import check_runnable
from tests.train.counted import check_as_predicted, check_goes_on, check_refused, footprint, prepare_runs

TRAINED_AT_NIGHT = True  # see tests/conftest.py
SHORT: dict[str, Any] = {"learning_rate": 1e-3, "weight_decay": 0.1, "device": "cpu", "micro_batch": 2, "steps": 5}
LLAMA = {**SHORT, "model": "llama_tiny", "sequence_length": 16}
GPT = {**SHORT, "model": "gpt_tiny", "sequence_length": 16}
COATNET = {**SHORT, "model": "coatnet_tiny", "image_size": 32}
HAND: dict[str, Any] = {"engine": "by_hand", "dp": 2, "bucket_mib": 0.25}
BASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "coatnet": {**COATNET, "precision": "bf16"},
    "sgd": {**GPT, "optimizer": "sgd", "learning_rate": 0.1},
    "momentum": {**COATNET, "optimizer": "momentum", "checkpointing": "full"},
    "two": {**LLAMA, **HAND},
    "two-coatnet": {**COATNET, **HAND},
    "accumulated": {**LLAMA, "micro_batches": 3},
    "ddp": {**LLAMA, "dp": 2},
    "alone": {**GPT, "engine": "by_hand"},
    "fsdp2": {**LLAMA, "dp": 2, "zero": 3},
    "tp": {**LLAMA, "tp": 2},
}
SPLIT = ("fsdp2", "tp")
"""Here a form updates DTensors; what these layouts hold is tested elsewhere."""
FORMS = {
    **dict.fromkeys(("llama", "coatnet"), ("for_loop", "foreach", "fused", "in_backward", "in_forward")),
    **dict.fromkeys(("sgd", "momentum"), ("for_loop", "foreach", "fused", "in_backward", "in_forward")),
    **dict.fromkeys(("two", "two-coatnet"), ("in_backward", "in_forward")),
    **dict.fromkeys(("accumulated", "ddp"), ("in_forward", "foreach")),
    "alone": ("in_backward",),
    **dict.fromkeys(SPLIT, ("foreach", "fused")),
}
NAMES = [f"{base}-{form}" for base, forms in FORMS.items() for form in forms]
EXACT = [name for name in NAMES if not name.endswith("fused")]
CUT = ("llama-in_forward", "coatnet-in_backward", "two-in_backward", "accumulated-in_forward", "llama-fused")
STOP_AFTER = 2


def fields_of(name: str) -> dict[str, Any]:
    base, form = name.rsplit("-", 1)
    return {**BASES[base], "update": form}


def config_of(name: str) -> RunConfig:
    return RunConfig.of(**fields_of(name))


def prepare(folder: Path) -> None:
    names = [*(f"{base}-auto" for base in BASES), *NAMES]
    prepare_runs(folder, {name: fields_of(name) for name in names}, dict.fromkeys(CUT, STOP_AFTER))


@pytest.mark.parametrize("name", EXACT)
def test_update_forms_train_alike_bit_for_bit(runs: Any, name: str) -> None:
    """All losses, and the checksum of the final weights: with `in_forward` the last update too."""
    auto = name.rsplit("-", 1)[0] + "-auto"
    assert runs.told(f"whole/{name}", "step", "loss") == runs.told(f"whole/{auto}", "step", "loss")
    assert runs.told(f"whole/{name}", "weights", "sha256") == runs.told(f"whole/{auto}", "weights", "sha256")


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("fused")])
def test_update_by_a_fused_kernel_trains_alike_but_for_rounding(runs: Any, name: str) -> None:
    """It rounds otherwise by a few units of 2⁻²⁴ per update, which five steps amplify; bf16 rounds at 2⁻⁹."""
    auto = runs.told(f"whole/{name.removesuffix('fused')}auto", "step", "loss")
    assert runs.told(f"whole/{name}", "step", "loss")[0] == auto[0]
    tolerance = 1e-2 if config_of(name).precision == "bf16" else 1e-4
    assert runs.told(f"whole/{name}", "step", "loss") == pytest.approx(auto, rel=tolerance)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(SPLIT)])
def test_predict_of_every_update_config_tells_its_memory(runs: Any, name: str) -> None:
    """States by category, on every rank: exact; the peak to 2 %."""
    check_as_predicted(runs, name, config_of(name))


def test_footprint_of_an_update_in_backward_saves_memory_of_gradients_freed(runs: Any) -> None:
    """With AdamW and a short sequence, where the peak is that of the states and their update."""
    peaks = {}
    for form in ("for_loop", "foreach", "fused", "in_backward"):
        peaks[form] = footprint(runs, f"llama-{form}").memory.peak_bytes or 0
    assert peaks["in_backward"] < peaks["fused"] < peaks["for_loop"] < peaks["foreach"]


@pytest.mark.parametrize("name", CUT)
def test_checkpoint_of_every_update_form_goes_on_as_if_not_cut_off(runs: Any, name: str) -> None:
    check_goes_on(runs, name, STOP_AFTER + 1)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"update": "fused", "optimizer": "lamb"}, "is a form of sgd, momentum, adamw", "est une forme de sgd, momentum"),
    ({"update": "in_forward", "engine": "deepspeed"}, "an option of the engines torch", "une option des moteurs torch"),
    ({"update": "in_backward", "dp": 2, "zero": 3}, "must hold it and its gradient whole", "doit le détenir entier"),
    ({"update": "in_forward", "tp": 2, "engine": "by_hand"}, "use zero=0, tp=1", "prenez zero=0, tp=1"),
    ({"update": "in_backward", "micro_batches": 2}, "before other micro-batches could", "avant que d’autres micro-b"),
    ({"update": "in_forward", "dp": 2, "gradient_compression": "fp16"}, "that are sent in full", "envoyés en entier"),
    ({"update": "in_backward", "dp": 2}, "torch's DDP keeps them all", "le DDP de torch les garde tous"),
    (
        {"update": "in_forward", "dp": 2, "gradient_as_bucket_view": True},
        "part of a bucket that stays",
        "partie d’un bucket qui reste",
    ),
]


@pytest.mark.parametrize(("fields", "english", "french"), REFUSED)
def test_run_config_refuses_in_one_sentence_what_no_update_form_can(
    fields: dict[str, Any], english: str, french: str
) -> None:
    check_refused(fields, english, french)


def test_forms_are_measured_in_turns_and_kept(tmp_path: Path) -> None:
    config = RunConfig.of(model="alexnet_tiny", micro_batch=1, device="cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # it trains in this very process, beside others
    try:
        measures = measure_forms(config, ("for_loop", "in_backward"), rounds=2)
    finally:
        torch.set_num_threads(threads)
    assert [one.form for one in measures] == ["for_loop", "in_backward"]
    for one in measures:
        assert one.rounds == 2 and one.tensors == 16 and one.device == "CPU"
        assert one.predicted_peak_bytes == pytest.approx(one.measured_peak_bytes, rel=1e-3)
    assert measures[0].step_ratio == measures[0].update_ratio == 1
    assert measures[1].update_s is None and measures[1].predicted_gradient_bytes < 4 * measures[1].parameters
    write_measures(tmp_path / "forms.json", measures)
    assert json.loads((tmp_path / "forms.json").read_text("utf-8")) == [asdict(one) for one in measures]
    with pytest.raises(LabError, match="on one process in at least one round, but dp=2"):
        measure_forms(RunConfig.of(dp=2))


def test_check_runnable_passes_every_legal_update_form() -> None:
    for name in NAMES:
        check_runnable(config_of(name))
    for form in ("for_loop", "foreach", "fused"):
        check_runnable(RunConfig.of(update=form, dp=2, zero=3))
        check_runnable(RunConfig.of(update=form, dp=2, zero=2, engine="by_hand"))
