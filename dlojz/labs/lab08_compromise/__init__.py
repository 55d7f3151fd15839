"""Lab 08: its exercises in order, and what the student predicts."""

from __future__ import annotations

from pathlib import Path

from dlojz.labs.kit.exercise import read_predictions
from dlojz.labs.lab08_compromise.exercises_alpa import PROGRAMME, STAGES
from dlojz.labs.lab08_compromise.exercises_evidence import FEWEST_GPUS, PAIRED, SHARES
from dlojz.labs.lab08_compromise.exercises_layouts import BEST_SPLIT, CHOOSE, RANK_BYTES

EXERCISES = (SHARES, RANK_BYTES, BEST_SPLIT, CHOOSE, PAIRED, PROGRAMME, STAGES, FEWEST_GPUS)

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.toml"))
