"""Lab 01: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from pathlib import Path

from dlojz.labs.kit.exercise import read_predictions
from dlojz.labs.lab01_big_models.exercises import (
    ATTENTION,
    ATTENTION_COST,
    BLOCK_PARAMETERS,
    MULTI_HEAD,
    PATCHES,
    RELATIVE_BIAS,
    TOKENS,
)

EXERCISES = (ATTENTION, MULTI_HEAD, PATCHES, TOKENS, BLOCK_PARAMETERS, ATTENTION_COST, RELATIVE_BIAS)

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.toml"))
