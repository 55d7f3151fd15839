"""Lab 02: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.lab02_memory.exercises import (
    BLOCK_ACTIVATIONS,
    BYTES_PER_PARAMETER,
    DATA_PARALLEL_BYTES,
    FEWEST_OPERATIONS,
    LARGEST_BATCH,
    PEAK,
)
from dlojz.labs.lab02_memory.exercises_recompute import ACTIVATION_PLAN, CHECKPOINT, EXPOSED_SECONDS, OFFLOAD

EXERCISES = (
    BYTES_PER_PARAMETER,
    PEAK,
    BLOCK_ACTIVATIONS,
    LARGEST_BATCH,
    DATA_PARALLEL_BYTES,
    CHECKPOINT,
    OFFLOAD,
    EXPOSED_SECONDS,
    ACTIVATION_PLAN,
    FEWEST_OPERATIONS,
)

PREDICTIONS = (
    Prediction(
        id="coatnet-7-states",
        en="How many bytes of states has CoAtNet-7 with weights and gradients in bf16, and AdamW?",
        fr="Combien d’octets occupent les états de CoAtNet-7, poids et gradients en bf16, avec AdamW ?",
        kind="bytes",
        tolerance=0.01,
    ),
    Prediction(
        id="loss-scale",
        en="At which loss scale does this training in fp16 start, from 2³⁰ downwards?",
        fr="À quelle échelle de la perte cet entraînement en fp16 commence-t-il, en partant de 2³⁰ ?",
        kind="count",
        tolerance=0.0,
    ),
    Prediction(
        id="layer-kept",
        en="How many bytes does this layer keep for backward, s = 1024, b = 4, h = 768, a = 12?",
        fr="Combien d’octets cette couche garde-t-elle pour la passe arrière (s = 1024, b = 4, h = 768, a = 12) ?",
        kind="bytes",
        tolerance=0.01,
    ),
    Prediction(
        id="v100-batch",
        en="Which is the largest micro-batch of CoAtNet-0 that fits on a V100 with 32 GB?",
        fr="Avec quel micro-batch maximal CoAtNet-0 tient-il sur un V100 de 32 Go ?",
        kind="count",
        tolerance=0.02,
    ),
    Prediction(
        id="coatnet-7-replica",
        en="How many bytes does a replica of CoAtNet-7 take at its peak, on 64 GPUs with one image each?",
        fr="Combien d’octets occupe, à son pic, une réplique de CoAtNet-7 sur 64 GPU, avec une image chacun ?",
        kind="bytes",
        tolerance=0.1,
    ),
    Prediction(
        id="recomputed-flops",
        en="By what factor does full checkpointing multiply the operations of a step?",
        fr="Par combien les points de contrôle complets multiplient-ils les opérations d’un pas ?",
        kind="ratio",
        tolerance=0.1,
    ),
    Prediction(
        id="recomputed-time",
        en="By what factor does recomputation multiply the time of a step?",
        fr="Par combien le recalcul multiplie-t-il la durée d’un pas ?",
        kind="ratio",
        tolerance=0.2,
    ),
    Prediction(
        id="batch-rate",
        en="How many times more tokens per second does this CPU read with a batch of 8 instead of 2?",
        fr="Combien de fois plus de tokens par seconde ce processeur lit-il avec un batch de 8 et non de 2 ?",
        kind="ratio",
        tolerance=0.3,
    ),
    Prediction(
        id="offload-seconds",
        en="How many seconds do your offloading hooks add to a step of four layers?",
        fr="Combien de secondes vos hooks de déchargement ajoutent-ils à un pas de quatre couches ?",
        kind="seconds",
        tolerance=0.5,
    ),
)
