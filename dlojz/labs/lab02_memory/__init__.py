"""Lab 02: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.lab02_memory.exercises import (
    BLOCK_ACTIVATIONS,
    BYTES_PER_PARAMETER,
    DATA_PARALLEL_BYTES,
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
        id="four-times-the-batch",
        en="How many bytes are the activations of vit_tiny with a micro-batch of 64?",
        fr="Combien d’octets occupent les activations de vit_tiny avec un micro-batch de 64 ?",
        kind="bytes",
        tolerance=0.02,
    ),
    Prediction(
        id="layer-kept",
        en="How many bytes does this layer keep for backward, s = 1024, b = 4, h = 768, a = 12?",
        fr="Combien d’octets cette couche garde-t-elle pour la passe arrière (s = 1024, b = 4, h = 768, a = 12) ?",
        kind="bytes",
        tolerance=0.01,
    ),
    Prediction(
        id="fused-kept",
        en="And how many with fused attention, which keeps no scores?",
        fr="Et combien avec une attention fusionnée, qui ne garde aucun score ?",
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
        tolerance=0.05,
    ),
    Prediction(
        id="offloaded-bytes",
        en="How many bytes does vit_tiny keep in host memory when its activations are offloaded (micro-batch of 64)?",
        fr="Combien d’octets vit_tiny garde-t-il en mémoire hôte si l’on décharge ses activations (micro-batch de "
        "64) ?",
        kind="bytes",
        tolerance=0.05,
    ),
)
