"""Lab 03: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.lab03_data_parallel.exercises_ddp import ACCUMULATION, AVERAGE_GRADIENTS, BUCKETS, OVERLAP
from dlojz.labs.lab03_data_parallel.exercises_ring import ALPHA_BETA, LEARNING_RATE, RING_ALL_REDUCE, RING_TIME, SAMPLER

EXERCISES = (
    RING_ALL_REDUCE,
    RING_TIME,
    ALPHA_BETA,
    AVERAGE_GRADIENTS,
    BUCKETS,
    OVERLAP,
    ACCUMULATION,
    SAMPLER,
    LEARNING_RATE,
)

PREDICTIONS = (
    Prediction(
        id="sum-of-ranks",
        en="What does rank 3's tensor hold after all-reduce, when each of 4 ranks has filled its own with rank + 1?",
        fr="Que contient le tenseur du rang 3 après l’all-reduce si chacun des 4 rangs a mis rank + 1 dans le sien ?",
        kind="count",
        tolerance=0.0,
    ),
    Prediction(
        id="ring-seconds",
        en="How many seconds does an all-reduce of 12 MiB take on our four ranks?",
        fr="Combien de secondes prend un all-reduce de 12 Mio sur nos quatre rangs ?",
        kind="seconds",
        tolerance=0.3,
    ),
    Prediction(
        id="latency-ranks",
        en="From how many GPUs on does the latency of the ring take more time than the bytes?",
        fr="À partir de combien de GPU la latence de l’anneau prend-elle plus de temps que les octets ?",
        kind="count",
        tolerance=0.05,
    ),
    Prediction(
        id="bucket-calls",
        en="How many all-reduces per step has coatnet_tiny with buckets of 0.25 MiB?",
        fr="Combien d’all-reduce par pas pour coatnet_tiny, avec des buckets de 0,25 Mio ?",
        kind="count",
        tolerance=0.0,
    ),
    Prediction(
        id="accumulation-saving",
        en="How many times fewer bytes per image are communicated with micro_batches=4?",
        fr="Combien de fois moins d’octets par image communique-t-on avec micro_batches=4 ?",
        kind="ratio",
        tolerance=0.0,
    ),
    Prediction(
        id="distinct-samples",
        en="How many different images do 4 ranks read in 20 steps of 16 images each, if the sampler forgets rank?",
        fr="Combien d’images différentes lisent 4 rangs en 20 pas de 16 images, si l’échantillonneur oublie rank ?",
        kind="count",
        tolerance=0.0,
    ),
    Prediction(
        id="bucket-view",
        en="How many bytes per rank does gradient_as_bucket_view=True save, for coatnet_tiny in fp32?",
        fr="Combien d’octets par rang gradient_as_bucket_view=True économise-t-il, pour coatnet_tiny en fp32 ?",
        kind="bytes",
        tolerance=0.05,
    ),
)
