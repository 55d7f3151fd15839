"""Lab 13: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from pathlib import Path

from dlojz.labs.kit.exercise import read_predictions
from dlojz.labs.lab13_checkpoints.exercises import (
    CHECKPOINT_INTERVAL,
    RESUME_EXACTLY,
    SAVE_IN_BACKGROUND,
    SEALED_FOLDER,
)
from dlojz.labs.lab13_checkpoints.formats import SHARES_TO_READ

EXERCISES = (RESUME_EXACTLY, SHARES_TO_READ, SAVE_IN_BACKGROUND, CHECKPOINT_INTERVAL, SEALED_FOLDER)

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.toml"))
