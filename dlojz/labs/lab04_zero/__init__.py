"""Lab 04: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from pathlib import Path

from dlojz.labs.kit.exercise import read_predictions
from dlojz.labs.lab04_zero.challenge import FEWEST_MESSAGES
from dlojz.labs.lab04_zero.exercises_cost import DEEPSPEED_JSON, OFFLOAD_BYTES, OFFLOAD_TIME, ZERO_TIME, ZERO_VOLUME
from dlojz.labs.lab04_zero.exercises_stages import SHARD_GRADIENTS, SHARD_OPTIMIZER, SHARD_WEIGHTS, ZERO_STATES

EXERCISES = (
    ZERO_STATES,
    SHARD_OPTIMIZER,
    SHARD_GRADIENTS,
    SHARD_WEIGHTS,
    ZERO_VOLUME,
    DEEPSPEED_JSON,
    OFFLOAD_BYTES,
    OFFLOAD_TIME,
    ZERO_TIME,
    FEWEST_MESSAGES,
)

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.toml"))
