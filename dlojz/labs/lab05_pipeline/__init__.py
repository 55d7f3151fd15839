"""Lab 05: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from pathlib import Path

from dlojz.labs.kit.exercise import read_predictions
from dlojz.labs.lab05_pipeline.exercises_orders import (
    FRUGAL,
    MEMORY_CAP,
    ONE_F_ONE_B,
    ORDER_KEPT,
    PIPELINE_BUBBLE,
    UNBLOCK,
    ZERO_BUBBLE,
)
from dlojz.labs.lab05_pipeline.exercises_runs import FIRST_FIT, PIPELINE_JSON, STAGE_BOUNDARY, STALE_SGD

EXERCISES = (
    PIPELINE_BUBBLE,
    ONE_F_ONE_B,
    ORDER_KEPT,
    UNBLOCK,
    MEMORY_CAP,
    STAGE_BOUNDARY,
    FIRST_FIT,
    ZERO_BUBBLE,
    STALE_SGD,
    PIPELINE_JSON,
    FRUGAL,
)

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.toml"))
