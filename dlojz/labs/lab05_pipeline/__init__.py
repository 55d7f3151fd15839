"""Lab 05: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.lab05_pipeline.exercises_orders import (
    FRUGAL,
    MEMORY_CAP,
    ONE_F_ONE_B,
    ORDER_KEPT,
    PIPELINE_BUBBLE,
    UNBLOCK,
    ZERO_BUBBLE,
)
from dlojz.labs.lab05_pipeline.exercises_runs import FIRST_FIT, PIPELINE_JSON, STAGE_BOUNDARY, STALE_SGD

EXERCISES = (
    PIPELINE_BUBBLE,
    ONE_F_ONE_B,
    ORDER_KEPT,
    UNBLOCK,
    MEMORY_CAP,
    STAGE_BOUNDARY,
    FIRST_FIT,
    ZERO_BUBBLE,
    STALE_SGD,
    PIPELINE_JSON,
    FRUGAL,
)

PREDICTIONS = (
    Prediction(
        id="speedup",
        en="How many times faster than one GPU is a pipeline of 4 stages with 9 micro-batches?",
        fr="Combien de fois plus vite qu’un seul GPU va un pipeline de 4 étages avec 9 micro-batches ?",
        kind="ratio",
        tolerance=0.15,
    ),
    Prediction(
        id="bubble-measured",
        en="Which bubble fraction is measured on 4 ranks with 16 micro-batches?",
        fr="Quelle fraction de bulle mesure-t-on sur 4 rangs avec 16 micro-batches ?",
        kind="share",
        tolerance=0.35,
    ),
    Prediction(
        id="step-seconds",
        en="How long does a step of 1F1B take on two ranks, from the times of one micro-batch?",
        fr="Combien dure un pas de 1F1B sur deux rangs, d’après les durées d’un micro-batch ?",
        kind="seconds",
        tolerance=0.5,
    ),
    Prediction(
        id="real-speedup",
        en="How many times faster than one process is 1F1B on two ranks with 8 micro-batches?",
        fr="Combien de fois plus vite qu’un processus seul va 1F1B sur deux rangs avec 8 micro-batches ?",
        kind="ratio",
        tolerance=0.5,
    ),
    Prediction(
        id="boundary-bytes",
        en="How many bytes does rank 0 send per step to the next stage?",
        fr="Combien d’octets le rang 0 envoie-t-il par pas à l’étage suivant ?",
        kind="bytes",
        tolerance=0.01,
    ),
    Prediction(
        id="activations",
        en="How many times as many bytes of activations does rank 0 keep under GPipe as under 1F1B?",
        fr="Combien de fois plus d’octets d’activations le rang 0 garde-t-il avec GPipe qu’avec 1F1B ?",
        kind="ratio",
        tolerance=0.05,
    ),
    Prediction(
        id="stable-step",
        en="By how much must the step be divided when the gradient is 7 updates old (8 stages), compared to 0?",
        fr="Par combien diviser le pas quand le gradient a 7 mises à jour de retard (8 étages), au lieu de 0 ?",
        kind="ratio",
        tolerance=0.1,
    ),
)
