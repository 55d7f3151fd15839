"""Lab 02: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from pathlib import Path

from dlojz.labs.kit.exercise import read_predictions
from dlojz.labs.lab02_memory.exercises import (
    BLOCK_ACTIVATIONS,
    BYTES_PER_PARAMETER,
    DATA_PARALLEL_BYTES,
    FEWEST_OPERATIONS,
    LARGEST_BATCH,
    PEAK,
)
from dlojz.labs.lab02_memory.exercises_recompute import ACTIVATION_PLAN, CHECKPOINT, EXPOSED_SECONDS, OFFLOAD

EXERCISES = (
    BYTES_PER_PARAMETER,
    PEAK,
    BLOCK_ACTIVATIONS,
    LARGEST_BATCH,
    DATA_PARALLEL_BYTES,
    CHECKPOINT,
    OFFLOAD,
    EXPOSED_SECONDS,
    ACTIVATION_PLAN,
    FEWEST_OPERATIONS,
)

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.toml"))
