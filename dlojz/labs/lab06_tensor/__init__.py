"""Lab 06: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.lab06_tensor.exercises_layers import ATTENTION_HEADS, COLUMN_LINEAR, ONE_ALL_REDUCE, ROW_LINEAR
from dlojz.labs.lab06_tensor.exercises_plan import LAYER_BYTES, MBCONV_CHANNELS, PARALLELIZE_PLAN
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
)

PREDICTIONS = (
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
        id="network-over-nvlink",
        en="How many times longer do the all-reduces of one layer of GPT-3 take on 8 GPUs over the network than over "
        "NVLink?",
        fr="Combien de fois plus longtemps durent les all-reduces d’une couche de GPT-3 sur 8 GPU par le réseau que "
        "par NVLink ?",
        kind="count",
        tolerance=0.05,
    ),
)
