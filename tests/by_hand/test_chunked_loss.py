"""Loss by parts of a text's tokens: equal to the whole one, and predicted as a run counts it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dlojz import models, predict
from dlojz.by_hand.chunked_loss import chunk_loss, knowing_targets
from dlojz.config.run_config import RunConfig
from dlojz.models.blocks import loss_of
from dlojz.prediction.model_trace import trace_of
from dlojz.prediction.shapes import RankPart
from tests.train.counted import Runs, check_as_predicted, check_refused, footprint, prepare_runs

LLAMA = f"hf:{Path(__file__).parents[1] / 'models' / 'tiny_llama'}"
SMALL: dict[str, Any] = {"micro_batch": 2, "device": "cpu", "steps": 3, "loss_chunks": 4, "sequence_length": 64}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"model": "gpt_tiny", "micro_batches": 2},
    "tied": {"model": "gpt2_tiny", "loss_chunks": 3},
    "full": {"model": "llama_tiny", "checkpointing": "full", "precision": "bf16"},
    "hub": {"model": LLAMA},
    "hub-full": {"model": LLAMA, "checkpointing": "full"},
    "ddp": {"model": "gpt_tiny", "dp": 2},
    "zero-3": {"model": "llama_tiny", "dp": 2, "zero": 3},
}
RUNS = {name: {**SMALL, **fields} for name, fields in LAYOUTS.items()}
TRAINED_AT_NIGHT = True  # see tests/conftest.py


def prepare(folder: Path) -> None:
    prepare_runs(folder, RUNS, {})


@pytest.fixture(scope="module")
def runs(prepared: Path) -> Any:
    return Runs(prepared)


@pytest.mark.parametrize("name", RUNS)
def test_predict_of_a_loss_in_parts_equals_what_is_counted(runs: Any, name: str) -> None:
    """States and messages exactly, the peak of one process but for scalars; FLOPs but for recomputed scores."""
    alone = RUNS[name].get("dp", 1) == 1
    check_as_predicted(runs, name, RunConfig.of(**RUNS[name]), peak=0.1, step_flops=0.03)
    counted, predicted = footprint(runs, name).memory.peak_bytes, predict(RunConfig.of(**RUNS[name])).memory.peak_bytes
    assert counted is not None and predicted is not None
    assert not alone or 0 <= counted - predicted <= 16


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_chunk_loss_gives_the_loss_and_the_gradients_of_the_whole(parts: int) -> None:
    tokens, targets = torch.randint(256, (2, 2, 32))
    results = []
    for chunks in (1, parts):
        torch.manual_seed(0)
        model = models.build("gpt2_tiny", sequence_length=32)
        if chunks > 1:
            chunk_loss(model, chunks)
        with knowing_targets(model, targets):
            output = model(tokens)
        loss = loss_of(model)(output, targets)
        loss.backward()
        results.append([loss.detach(), *(weight.grad for weight in model.parameters())])
    for whole, in_parts in zip(*results, strict=True):
        assert whole is not None
        torch.testing.assert_close(in_parts, whole)


def test_trace_of_a_loss_in_parts_never_holds_all_logits() -> None:
    """The loss of 16 · 256 tokens and 50,257 words takes their softmax and its gradient, each 4 bytes a number; in 16
    parts a sixteenth of that, and the gradient of the head’s weight twice while those of parts are added.
    """
    run = {"model": "gpt2", "sequence_length": 256, "micro_batch": 16}
    whole, parts = (trace_of(RankPart(RunConfig.of(**run, loss_chunks=chunks))).peak_bytes for chunks in (1, 16))
    assert whole - parts > 8 * 16 * 256 * 50_257 * 15 / 16 - 2 * 4 * 768 * 50_257


@pytest.mark.parametrize(
    ("fields", "english", "french"),
    [
        ({"model": "coatnet_tiny", "sequence_length": None}, "model='coatnet_tiny' was received", "prenez model="),
        ({"model": "gpt_tiny", "tp": 2}, "tp=2 was received: use tp=1", "prenez tp=1"),
        ({"model": "gpt_tiny", "engine": "deepspeed"}, "use engine='torch'", "prenez engine='torch'"),
    ],
)
def test_loss_chunks_are_refused_where_logits_are_not_whole(fields: dict[str, Any], english: str, french: str) -> None:
    check_refused({**SMALL, **fields}, english, french, to_run=True)
