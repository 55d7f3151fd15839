"""Lab 06: its exercises in order, and what the student predicts.

Layer 6 (labs). Invariant: nothing is judged here; the exercises live beside their references.
"""

from __future__ import annotations

from dlojz.labs.prediction import Prediction
from dlojz.labs.tensor_attention_exercises import ATTENTION_HEADS
from dlojz.labs.tensor_convolution_exercises import MBCONV_CHANNELS
from dlojz.labs.tensor_linear_exercises import COLUMN_LINEAR, ROW_LINEAR
from dlojz.labs.tensor_mlp_exercises import ONE_ALL_REDUCE
from dlojz.labs.tensor_plan_exercises import PARALLELIZE_PLAN
from dlojz.labs.tensor_sequence_exercises import SEQUENCE_PARALLEL
from dlojz.labs.tensor_vocabulary_exercises import VOCABULARY_EMBEDDING, VOCABULARY_LOSS
from dlojz.labs.tensor_volume_exercises import LAYER_BYTES
from dlojz.labs.verdict import Said

TITLE = Said("Tensor parallelism", "Le parallélisme de tenseur")

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
        question=Said(
            "How many all-reduces does each of 2 ranks make per step along the tensor axis, for llama_tiny with one "
            "micro-batch?",
            "Combien d’all-reduces chacun des 2 rangs fait-il par pas sur l’axe tensor, pour llama_tiny avec un "
            "micro-batch ?",
        ),
        kind="count",
        tolerance=0.001,
    ),
    Prediction(
        id="tensor-weights",
        question=Said(
            "How many bytes of weights does each of 2 ranks keep, for llama_tiny in fp32?",
            "Combien d’octets de poids chacun des 2 rangs garde-t-il, pour llama_tiny en fp32 ?",
        ),
        kind="bytes",
        tolerance=0.01,
    ),
    Prediction(
        id="network-over-nvlink",
        question=Said(
            "How many times longer do the all-reduces of one layer of GPT-3 take on 8 GPUs over the network than over "
            "NVLink?",
            "Combien de fois plus longtemps durent les all-reduces d’une couche de GPT-3 sur 8 GPU par le réseau que "
            "par NVLink ?",
        ),
        kind="count",
        tolerance=0.05,
    ),
)
