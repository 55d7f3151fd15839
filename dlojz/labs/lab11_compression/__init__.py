"""Lab 11: its exercises in order, and what the student predicts."""

from __future__ import annotations

from pathlib import Path

from dlojz.labs.kit.exercise import read_predictions
from dlojz.labs.lab11_compression.exercises_distill import MIXED_LOSS, SOFT_LOSS
from dlojz.labs.lab11_compression.exercises_integer import INTEGER_LINEAR
from dlojz.labs.lab11_compression.exercises_prune import GLOBAL_MASKS, PERMUTATION, SR_STE, TICKET, TWO_OF_FOUR
from dlojz.labs.lab11_compression.exercises_quantize import AFFINE, ROWS, STRAIGHT_THROUGH
from dlojz.labs.lab11_compression.exercises_serve import KV_CACHE, LORA
from dlojz.labs.lab11_compression.exercises_train import AWARE_TRAINING, PRUNED_TRAINING

EXERCISES = (
    SOFT_LOSS,
    MIXED_LOSS,
    ROWS,
    AFFINE,
    INTEGER_LINEAR,
    STRAIGHT_THROUGH,
    AWARE_TRAINING,
    GLOBAL_MASKS,
    PRUNED_TRAINING,
    TICKET,
    KV_CACHE,
    LORA,
    TWO_OF_FOUR,
    SR_STE,
    PERMUTATION,
)

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.toml"))
