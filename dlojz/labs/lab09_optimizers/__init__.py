"""Lab 09: its exercises in order, and what the student predicts."""

from __future__ import annotations

from pathlib import Path

from dlojz.labs.kit.exercise import read_predictions
from dlojz.labs.lab09_optimizers.exercises_compression import (
    COMPRESS_SIGNS,
    COMPRESSED_ALL_REDUCE,
    COMPRESSED_BYTES,
    SIGN_BIAS,
)
from dlojz.labs.lab09_optimizers.exercises_feedback import ERROR_FEEDBACK, FEWER_BYTES
from dlojz.labs.lab09_optimizers.exercises_freeze import FREEZE_STEP
from dlojz.labs.lab09_optimizers.exercises_updates import FUSED_TRAFFIC, OUTER_STEP, UPDATE_IN_BACKWARD

EXERCISES = (
    COMPRESS_SIGNS,
    SIGN_BIAS,
    ERROR_FEEDBACK,
    COMPRESSED_ALL_REDUCE,
    COMPRESSED_BYTES,
    FREEZE_STEP,
    FUSED_TRAFFIC,
    UPDATE_IN_BACKWARD,
    OUTER_STEP,
    FEWER_BYTES,
)

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.toml"))
