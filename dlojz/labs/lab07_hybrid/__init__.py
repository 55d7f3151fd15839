"""Lab 07: its exercises in order, and what the student predicts."""

from __future__ import annotations

from pathlib import Path

from dlojz.labs.kit.exercise import read_predictions
from dlojz.labs.lab07_hybrid.exercises import BETWEEN_NODES, DEGREES, GROUPS, LAYOUT_3D, PLACE, PLACEMENT
from dlojz.labs.lab07_hybrid.exercises_step import RING_ATTENTION, STEP_2D

EXERCISES = (PLACE, DEGREES, GROUPS, BETWEEN_NODES, STEP_2D, LAYOUT_3D, RING_ATTENTION, PLACEMENT)

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.toml"))
