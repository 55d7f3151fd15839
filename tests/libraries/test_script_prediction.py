"""The prediction of a user's script, made in its first step, beside what its processes then measure."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dlojz
from dlojz.libraries.first_step import plain_copy
from dlojz.libraries.script_prediction import use_of
from dlojz.results.footprint import STATES
from dlojz.results.record import RunRecord, ScriptPrediction

SCRIPT = Path(__file__).with_name("wrapped_script.py")
PEAK = 0.05
"""Relative error of the predicted peak, at most."""


def recorded(root: Path, *words: str, processes: int = 2) -> RunRecord:
    """Run the script, and return its record."""
    run = dlojz.run(SCRIPT, processes=processes, args=words, device="cpu", root=root, progress=False)
    assert run.record is not None
    assert run.record.status == "completed", run.logs()
    assert "forward passes: " in run.logs(0)
    return run.record


def predicted(record: RunRecord) -> ScriptPrediction:
    assert record.script_prediction is not None
    return record.script_prediction


@pytest.mark.parametrize(
    "words",
    [
        "--wrap none",
        "--wrap ddp",
        "--wrap ddp --late --accumulation 2 --autocast",
        "--wrap fsdp2",
        "--wrap fsdp2 --keep --optimizer Adagrad --late",
    ],
)
def test_states_and_messages_are_exact_and_the_peak_is_near(words: str, tmp_path: Path) -> None:
    record = recorded(tmp_path, *words.split(), processes=1 if "none" in words else 2)
    found, measured = predicted(record).footprint, record.footprint()
    assert predicted(record).note == ""
    assert found is not None and measured is not None
    assert found.parameters == measured.parameters
    for category in STATES:
        assert (category, found.memory.category(category)) == (category, measured.memory.category(category))
    assert found.memory.peak_bytes == pytest.approx(measured.memory.peak_bytes, rel=PEAK)
    assert found.communication == measured.communication


def test_the_script_trains_the_same_though_it_is_predicted(tmp_path: Path) -> None:
    run = dlojz.run(SCRIPT, processes=1, device="cpu", root=tmp_path, progress=False)
    alone = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True, timeout=120)
    shown = re.compile(r"step \d: \d\.\d{4}|random \S+|forward passes: \d+")
    assert shown.findall(run.logs(0)) == shown.findall(alone.stdout)


def test_the_modules_at_the_peak_are_the_scripts(tmp_path: Path) -> None:
    told = predicted(recorded(tmp_path, "--wrap", "fsdp2"))
    assert told.recognised["wrapper"] == "FSDP2"
    assert told.recognised["units"] == "(root), layers.0, layers.1, layers.2, layers.3"
    assert told.recognised["kept after forward"] == "(root)"
    assert told.recognised["batch"] == "8×32 int64"
    assert {"layers.0", "layers.1", "layers.2", "layers.3"} <= {one.module for one in told.at_peak}
    assert told.footprint is not None and told.footprint.memory.peak_bytes == pytest.approx(
        sum(sum(one.bytes_by_category.values()) for one in told.at_peak), rel=1e-5
    )


def test_what_is_not_predicted_is_said(tmp_path: Path) -> None:
    told = predicted(recorded(tmp_path, "--wrap", "fsdp1"))
    assert told.footprint is None and "FSDP1" in told.note
    assert (told.recognised["wrapper"], told.recognised["sharding"]) == ("FSDP1", "FULL_SHARD")


def test_a_copy_shares_what_the_model_shares_and_changes_nothing_of_it() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["words"].weight
    model.seen = [1]
    model.others = [model["head"]]
    made = plain_copy(model)
    assert made["head"].weight is made["words"].weight and made["head"].weight.is_meta
    made.seen.append(2)
    assert model.seen == [1] and made.others[0] is made["head"] and not model["head"].weight.is_meta


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad", "RMSprop", "NAdam"])
def test_what_an_optimizer_keeps_is_traced(kind: str) -> None:
    model = nn.Linear(64, 32)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    found = use_of([optimizer], on_gpu=False)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    held = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
    assert found.states_bytes == sum(one.numel() * one.element_size() for one in held)
