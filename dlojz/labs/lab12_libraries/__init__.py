"""Lab 12: its exercises in order, and what the student predicts."""

from __future__ import annotations

from pathlib import Path

from dlojz.labs.kit.exercise import read_predictions
from dlojz.labs.lab12_libraries.exercises_configuration import (
    COURSE_JSON,
    MEGATRON_ARGUMENTS,
    MEGATRON_QKV,
    READ_TRAFFIC,
)
from dlojz.labs.lab12_libraries.exercises_loops import ACCELERATE_LOOP, DEEPSPEED_LOOP, GATHER_METRICS

EXERCISES = (
    DEEPSPEED_LOOP,
    COURSE_JSON,
    ACCELERATE_LOOP,
    GATHER_METRICS,
    READ_TRAFFIC,
    MEGATRON_QKV,
    MEGATRON_ARGUMENTS,
)

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.toml"))
