"""Lab 06: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from pathlib import Path

from dlojz.labs.kit.exercise import read_predictions
from dlojz.labs.lab06_tensor.exercises_layers import ATTENTION_HEADS, COLUMN_LINEAR, ONE_ALL_REDUCE, ROW_LINEAR
from dlojz.labs.lab06_tensor.exercises_plan import (
    FEWEST_BYTES,
    LAYER_BYTES,
    MBCONV_CHANNELS,
    PARALLELIZE_PLAN,
)
from dlojz.labs.lab06_tensor.exercises_vocabulary import SEQUENCE_PARALLEL, VOCABULARY_EMBEDDING, VOCABULARY_LOSS

EXERCISES = (
    COLUMN_LINEAR,
    ROW_LINEAR,
    ONE_ALL_REDUCE,
    ATTENTION_HEADS,
    VOCABULARY_EMBEDDING,
    VOCABULARY_LOSS,
    SEQUENCE_PARALLEL,
    MBCONV_CHANNELS,
    PARALLELIZE_PLAN,
    LAYER_BYTES,
    FEWEST_BYTES,
)

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.toml"))
