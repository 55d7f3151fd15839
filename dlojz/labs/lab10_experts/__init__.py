"""Lab 10: its exercises in order, and what the student predicts."""

from __future__ import annotations

from pathlib import Path

from dlojz.labs.kit.exercise import read_predictions
from dlojz.labs.lab10_experts.exercises_exchange import EXCHANGE
from dlojz.labs.lab10_experts.exercises_pacing import PACING
from dlojz.labs.lab10_experts.exercises_ranks import EXCHANGE_BYTES, MIXTURE, PARITY, PLACEMENT
from dlojz.labs.lab10_experts.exercises_routing import BALANCE, GATE, PLACES, TWO_LEVEL

EXERCISES = (GATE, PLACES, MIXTURE, BALANCE, TWO_LEVEL, EXCHANGE, PARITY, EXCHANGE_BYTES, PACING, PLACEMENT)

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.toml"))
