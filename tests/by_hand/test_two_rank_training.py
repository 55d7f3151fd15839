"""The one file that trains, counts and compares without the machinery: what it prints is right."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from dlojz.by_hand.two_rank_training import build_model, predict

ROOT = Path(__file__).resolve().parents[2]


def test_predict_has_the_bytes_of_the_models_tensors() -> None:
    """By hand: 17 × 64 + 65 × 4 = 1348 parameters of 4 bytes; a ring of two ranks sends one message's length."""
    assert predict() == {"weights": 5392, "gradients": 5392, "optimizer": 10_800, "sent in a step": 5392}
    assert sum(parameter.numel() for parameter in build_model().parameters()) == 1348
    first, second = (torch.cat([p.flatten() for p in build_model().parameters()]) for _ in range(2))
    assert torch.equal(first, second), "every rank begins with the same weights"


def test_two_rank_training_measures_what_it_predicts_and_trains_as_one_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dlojz.by_hand.two_rank_training"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    *rows, losses, gap = done.stdout.splitlines()
    assert [row.split()[-3:] for row in rows[1:]] == [[str(value)] * 3 for value in predict().values()]
    assert len(losses.rpartition(": ")[2].split()) == 5
    assert float(gap.rpartition(" ")[2]) < 1e-6
