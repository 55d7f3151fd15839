"""Lab 03: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from pathlib import Path

from dlojz.labs.kit.exercise import read_predictions
from dlojz.labs.lab03_data_parallel.exercises_ddp import ACCUMULATION, AVERAGE_GRADIENTS, BUCKETS, OVERLAP
from dlojz.labs.lab03_data_parallel.exercises_ring import ALPHA_BETA, LEARNING_RATE, RING_ALL_REDUCE, RING_TIME, SAMPLER
from dlojz.labs.lab03_data_parallel.exercises_scaling import EFFICIENCY, FEW_MESSAGES, MFU

EXERCISES = (
    RING_ALL_REDUCE,
    RING_TIME,
    ALPHA_BETA,
    AVERAGE_GRADIENTS,
    EFFICIENCY,
    MFU,
    BUCKETS,
    OVERLAP,
    ACCUMULATION,
    SAMPLER,
    LEARNING_RATE,
    FEW_MESSAGES,
)

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.toml"))
