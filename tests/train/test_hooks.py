"""torch's hooks on DDP's buckets: as predicted, near plain DDP, and gone on with."""

from pathlib import Path
from typing import Any

import pytest

from dlojz.config.run_config import RunConfig
from dlojz.config.schedules import powersgd_start, settled_step
from dlojz.prediction.shapes import ParameterShape, model_shapes
from dlojz.prediction.states import compressed
from dlojz.runnable import check_runnable
from tests.train.counted import check_as_predicted, check_refused, footprint, prepare_runs

LLAMA: dict[str, Any] = {
    **{"model": "llama_tiny", "sequence_length": 16, "learning_rate": 1e-3, "steps": 6},
    **{"device": "cpu", "micro_batch": 2, "dp": 2},
}
COATNET = {**LLAMA, "model": "coatnet_tiny", "image_size": 32, "sequence_length": None}
MANY = {"bucket_mib": 0.2}
"""So many buckets that those of torch's own hook would wait for each other."""
POWERSGD: dict[str, Any] = {"gradient_compression": "powersgd"}
RUNS: dict[str, dict[str, Any]] = {
    "plain": LLAMA,
    "fp16": {**LLAMA, "gradient_compression": "fp16"},
    "bf16-3": {**LLAMA, "gradient_compression": "bf16", "dp": 3, **MANY},
    "powersgd-1": {**LLAMA, **POWERSGD},
    "powersgd-4": {**LLAMA, **POWERSGD, "powersgd_rank": 4, **MANY},
    "powersgd-coatnet": {**COATNET, **POWERSGD, "powersgd_rank": 2, "micro_batches": 2, "precision": "bf16"},
    "powersgd-3": {**LLAMA, **POWERSGD, "dp": 3, "optimizer": "sgd", "gradient_as_bucket_view": True},
    "late": {**LLAMA, **POWERSGD, "steps": 40},
}
CUT = {"powersgd-1": 3, "fp16": 2}
TRAINED_AT_NIGHT = True  # see tests/conftest.py


def prepare(folder: Path) -> None:
    prepare_runs(folder, RUNS, CUT)


@pytest.mark.parametrize("name", RUNS)
def test_predict_of_every_gradient_compression_equals_what_is_counted(runs: Any, name: str) -> None:
    """States by category, bytes and calls of every collective, on every rank: exact; the peak to 3 %.

    Half-precision buckets leave while backward computes, and when one is given back is the affair of gloo's threads: at
    most all of them are under way, 2Ψ bytes, a tenth of so small a model's peak.
    """
    config = RunConfig.of(**RUNS[name])
    halves = config.layout.gradient_compression in ("fp16", "bf16")
    check_as_predicted(runs, name, config, peak=0.1 if halves else 0.03)


def sent(runs: Any, name: str) -> int:
    return sum(one.message_bytes for one in footprint(runs, name, 0).communication if one.group == "dp")


def test_half_precision_halves_the_bytes_and_two_thin_matrices_send_a_few_percent(runs: Any) -> None:
    whole = sent(runs, "plain")
    assert whole == 4 * model_shapes(RunConfig.of(**LLAMA)).num_parameters
    assert sent(runs, "fp16") * 2 == sent(runs, "bf16-3") * 2 == whole
    assert sent(runs, "powersgd-1") < 0.03 * whole < sent(runs, "powersgd-4") < 0.1 * whole


def test_the_first_steps_of_powersgd_are_in_full(runs: Any) -> None:
    """Loss for loss, up to the first update with what was compressed; with 40 steps they are four."""
    plain, early, late = (runs.told(f"whole/{name}", "step", "loss") for name in ("plain", "powersgd-1", "late"))
    assert (powersgd_start(6), powersgd_start(40)) == (2, 4)
    assert early[:3] == plain[:3]
    assert early[3:] != plain[3:]
    assert late[:5] == plain[:5]
    assert late[5] != plain[5]
    assert settled_step(RunConfig.of(**RUNS["late"])) == 5


def test_gradient_compression_to_fp16_has_losses_of_plain_ddp_to_what_is_rounded(runs: Any) -> None:
    """fp16 keeps 11 bits of each gradient: 2**-11 of it, an order of magnitude less of a loss after five steps."""
    plain, half = (runs.told(f"whole/{name}", "step", "loss") for name in ("plain", "fp16"))
    assert half[0] == plain[0]
    assert half == pytest.approx(plain, rel=1e-3)
    assert half != plain


def test_gradient_compression_goes_on_with_powersgd_anew_and_fp16_to_the_same_end(runs: Any) -> None:
    assert runs.told("cut/powersgd-1", "resumed", "step") == [4]
    [left_out] = runs.told("cut/powersgd-1", "resumed", "left_out")
    assert "the next 2 steps send their gradients in full, and compression then begins anew" in left_out
    assert runs.told("cut/powersgd-1", "step", "step") == list(range(6))
    whole, cut = (runs.told(f"{kind}/fp16", "weights", "sha256") for kind in ("whole", "cut"))
    assert cut == whole
    whole, cut = (runs.told(f"{kind}/powersgd-1", "step", "loss") for kind in ("whole", "cut"))
    assert cut[:5] == whole[:5]
    assert cut[5] != whole[5]


def test_compressed_sends_as_it_is_what_is_too_small() -> None:
    """By hand: (64 + 32) · 4 · 2 < 64 · 32; a bias and a matrix of 8 × 8 would not be half as small."""
    shapes = [ParameterShape(name, shape, 0, name) for name, shape in (("w", (64, 32)), ("b", (64,)), ("s", (8, 8)))]
    found = compressed(tuple(shapes), 4)
    assert (found.whole, found.plain, found.p, found.q) == (2048 + 64 + 64, 64 + 64, 64 * 4, 32 * 4)
    assert compressed(tuple(shapes), 32).p == 0


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"engine": "by_hand"}, "but DDP by hand was received: use engine='torch'", "mais DDP à la main a été reçu"),
    ({"zero": 3}, "but FSDP2 was received: use engine='torch', zero=0", "mais FSDP2 a été reçu : prenez engine='torch"),
    ({"tp": 2}, "is a hook of torch's DDP", "est un « hook » du DDP de torch"),
    ({"pp": 2}, "is a hook of torch's DDP", "est un « hook » du DDP de torch"),
    ({"dp": 1}, "dp=1 sends nothing: use dp=2 or more", "dp=1 n’envoie rien : prenez dp=2 ou plus"),
    (
        {"gradient_compression": "fp16", "powersgd_rank": 4},
        "powersgd_rank=4 was received, but gradient_compression='fp16' has no such matrices",
        "powersgd_rank=4 a été reçu, mais gradient_compression='fp16' n’a pas de telles matrices",
    ),
]


@pytest.mark.parametrize(("fields", "english", "french"), REFUSED)
def test_run_config_refuses_in_one_sentence_what_gradient_compression_cannot(
    fields: dict[str, Any], english: str, french: str
) -> None:
    check_refused({"dp": 2, **POWERSGD, **fields}, english, french)


def test_check_runnable_passes_all_ways_of_gradient_compression() -> None:
    for compression in ("none", "fp16", "bf16", "powersgd"):
        check_runnable(RunConfig.of(dp=2, gradient_compression=compression))
