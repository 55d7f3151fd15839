"""Lab 00: its exercises in order, and what the student predicts.

Layer 6 (labs). Invariant: nothing is judged here; the exercises live beside their references.
"""

from __future__ import annotations

from dlojz.labs.layout_exercises import GLOBAL_BATCH, STEPS_PER_EPOCH
from dlojz.labs.prediction import Prediction
from dlojz.labs.training_exercises import RING_BYTES, SAME_TRAINING
from dlojz.labs.verdict import Said

TITLE = Said("Getting started", "Prise en main")

EXERCISES = (GLOBAL_BATCH, STEPS_PER_EPOCH, RING_BYTES, SAME_TRAINING)

PREDICTIONS = (
    Prediction(
        id="gradient-bytes",
        question=Said(
            "How many bytes does a replica hand to all-reduce in one step?",
            "Combien d’octets une réplique confie-t-elle à l’all-reduce en un pas ?",
        ),
        kind="bytes",
    ),
    Prediction(
        id="ddp-optimizer",
        question=Said(
            "How many bytes of optimizer states does each replica hold under DDP?",
            "Combien d’octets d’états de l’optimiseur chaque réplique détient-elle en DDP ?",
        ),
        kind="bytes",
    ),
    Prediction(
        id="zero-2-optimizer",
        question=Said("And under ZeRO-2 on two processes?", "Et en ZeRO-2 sur deux processus ?"),
        kind="bytes",
    ),
    Prediction(
        id="zero-2-64",
        question=Said("And under ZeRO-2 on 64 processes?", "Et en ZeRO-2 sur 64 processus ?"),
        kind="bytes",
    ),
)
