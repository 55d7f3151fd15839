"""Lab 06: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.lab06_tensor.exercises_layers import ATTENTION_HEADS, COLUMN_LINEAR, ONE_ALL_REDUCE, ROW_LINEAR
from dlojz.labs.lab06_tensor.exercises_plan import (
    FEWEST_BYTES,
    LAYER_BYTES,
    MBCONV_CHANNELS,
    PARALLELIZE_PLAN,
)
from dlojz.labs.lab06_tensor.exercises_vocabulary import SEQUENCE_PARALLEL, VOCABULARY_EMBEDDING, VOCABULARY_LOSS

EXERCISES = (
    COLUMN_LINEAR,
    ROW_LINEAR,
    ONE_ALL_REDUCE,
    ATTENTION_HEADS,
    VOCABULARY_EMBEDDING,
    VOCABULARY_LOSS,
    SEQUENCE_PARALLEL,
    MBCONV_CHANNELS,
    PARALLELIZE_PLAN,
    LAYER_BYTES,
    FEWEST_BYTES,
)

PREDICTIONS = (
    Prediction(
        id="pair-bytes",
        en="How many times as many bytes does an MLP, four times as wide inside, send in forward and backward if both "
        "of its layers are cut by columns and each output is gathered, compared with a column-row pair?",
        fr="Combien de fois plus d’octets un MLP, quatre fois plus large au milieu, envoie-t-il en passes avant et "
        "arrière si ses deux couches sont coupées par colonne et chaque sortie rassemblée, plutôt qu’en une paire "
        "colonne-ligne ?",
        kind="ratio",
        tolerance=0.001,
    ),
    Prediction(
        id="tensor-messages",
        en="How many all-reduces does each of 2 ranks make per step along the tensor axis, for llama_tiny with one "
        "micro-batch?",
        fr="Combien d’all-reduces chacun des 2 rangs fait-il par pas sur l’axe tensor, pour llama_tiny avec un "
        "micro-batch ?",
        kind="count",
        tolerance=0.001,
    ),
    Prediction(
        id="tensor-weights",
        en="How many bytes of weights does each of 2 ranks keep, for llama_tiny in fp32?",
        fr="Combien d’octets de poids chacun des 2 rangs garde-t-il, pour llama_tiny en fp32 ?",
        kind="bytes",
        tolerance=0.01,
    ),
    Prediction(
        id="reduce-seconds",
        en="How many seconds per step do the eight all-reduces of four MLPs take, on 2 ranks?",
        fr="Combien de secondes par pas prennent les huit all-reduces de quatre MLP, sur 2 rangs ?",
        kind="seconds",
        tolerance=1.0,
    ),
    Prediction(
        id="tensor-speed-up",
        en="How many times as fast are four MLPs trained on 2 ranks as on one, alone on the machine?",
        fr="Combien de fois plus vite entraîne-t-on quatre MLP sur 2 rangs que sur un seul, seul sur la machine ?",
        kind="ratio",
        tolerance=0.3,
    ),
)
