"""Lab 00: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.lab00_getting_started.exercises import GLOBAL_BATCH, RING_BYTES, SAME_TRAINING, STEPS_PER_EPOCH

EXERCISES = (GLOBAL_BATCH, STEPS_PER_EPOCH, RING_BYTES, SAME_TRAINING)

PREDICTIONS = (
    Prediction(
        id="gradient-bytes",
        en="How many bytes does a replica hand to all-reduce in one step?",
        fr="Combien d’octets une réplique confie-t-elle à l’all-reduce en un pas ?",
        kind="bytes",
    ),
    Prediction(
        id="ddp-optimizer",
        en="How many bytes of optimizer states does each replica hold under DDP?",
        fr="Combien d’octets d’états de l’optimiseur chaque réplique détient-elle en DDP ?",
        kind="bytes",
    ),
    Prediction(
        id="zero-2-optimizer",
        en="And under ZeRO-2 on two processes?",
        fr="Et en ZeRO-2 sur deux processus ?",
        kind="bytes",
    ),
    Prediction(
        id="zero-2-64",
        en="And under ZeRO-2 on 64 processes?",
        fr="Et en ZeRO-2 sur 64 processus ?",
        kind="bytes",
    ),
)
