"""Lab 00: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from pathlib import Path

from dlojz.labs.kit.exercise import read_predictions
from dlojz.labs.lab00_getting_started.exercises import GLOBAL_BATCH, RING_BYTES, SAME_TRAINING, STEPS_PER_EPOCH

EXERCISES = (GLOBAL_BATCH, STEPS_PER_EPOCH, RING_BYTES, SAME_TRAINING)

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.toml"))
