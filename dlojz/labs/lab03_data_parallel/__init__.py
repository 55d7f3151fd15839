"""Lab 03: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
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
        tolerance=1.0,
    ),
    Prediction(
        id="latency-ranks",
        en="From how many GPUs on does the latency of the ring take more time than the bytes?",
        fr="À partir de combien de GPU la latence de l’anneau prend-elle plus de temps que les octets ?",
        kind="count",
        tolerance=0.05,
    ),
    Prediction(
        id="weak-efficiency",
        en="What is the efficiency of four processes on this machine, each with 256 images per step?",
        fr="Quelle est l’efficacité de quatre processus sur cette machine, avec 256 images par pas chacun ?",
        kind="share",
        tolerance=0.5,
    ),
    Prediction(
        id="speed-up",
        en="How many times faster do two processes go through a batch of 256 images than one?",
        fr="Combien de fois plus vite deux processus traitent-ils un batch de 256 images qu’un seul ?",
        kind="ratio",
        tolerance=0.5,
    ),
    Prediction(
        id="megatron-mfu",
        en="What is the MFU of Megatron's training of 1 trillion parameters, published at 52 % of the peak?",
        fr="Quelle est la MFU du modèle Megatron à 1 000 milliards de paramètres, publié à 52 % de la crête ?",
        kind="share",
        tolerance=0.02,
    ),
    Prediction(
        id="bucket-calls",
        en="How many all-reduces per step has the network of wide layers with buckets of 1 MiB?",
        fr="Combien d’all-reduce par pas pour le réseau aux couches larges, avec des buckets de 1 Mio ?",
        kind="count",
        tolerance=0.0,
    ),
    Prediction(
        id="exposed",
        en="How many seconds of a step are exposed if all gradients travel after the backward pass?",
        fr="Combien de secondes d’un pas sont exposées si tous les gradients voyagent après la passe arrière ?",
        kind="seconds",
        tolerance=1.0,
    ),
    Prediction(
        id="accumulation-rate",
        en="How many times more images per second does one read with four micro-batches per step?",
        fr="Combien de fois plus d’images par seconde lit-on avec quatre micro-batches par pas ?",
        kind="ratio",
        tolerance=0.4,
    ),
    Prediction(
        id="distinct-samples",
        en="How many different images do 4 ranks read in 20 steps of 16 images each, if the sampler forgets rank?",
        fr="Combien d’images différentes lisent 4 rangs en 20 pas de 16 images, si l’échantillonneur oublie rank ?",
        kind="count",
        tolerance=0.0,
    ),
    Prediction(
        id="first-bucket",
        en="How many bytes leave first from PyTorch's DDP, around the network of wide layers?",
        fr="Combien d’octets quittent en premier le DDP de PyTorch, autour du réseau aux couches larges ?",
        kind="bytes",
        tolerance=0.0,
    ),
)
