"""Lab 12: its exercises in order, and what the student predicts."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.lab12_libraries.exercises_configuration import (
    COURSE_JSON,
    MEGATRON_ARGUMENTS,
    MEGATRON_QKV,
    READ_TRAFFIC,
)
from dlojz.labs.lab12_libraries.exercises_loops import ACCELERATE_LOOP, DEEPSPEED_LOOP, GATHER_METRICS

EXERCISES = (
    DEEPSPEED_LOOP,
    COURSE_JSON,
    ACCELERATE_LOOP,
    GATHER_METRICS,
    READ_TRAFFIC,
    MEGATRON_QKV,
    MEGATRON_ARGUMENTS,
)

PREDICTIONS = (
    Prediction(
        id="plain-sent",
        en="How many bytes does each of 2 ranks send per step, for gpt_tiny in fp32 with DDP?",
        fr="Combien d’octets chacun des 2 rangs envoie-t-il par pas, pour gpt_tiny en fp32 avec DDP ?",
        kind="bytes",
        tolerance=0.01,
    ),
    Prediction(
        id="deepspeed-sent",
        en="How many bytes does each of 2 ranks send per step, for gpt_tiny in fp32 with DeepSpeed's ZeRO-2?",
        fr="Combien d’octets chacun des 2 rangs envoie-t-il par pas, pour gpt_tiny en fp32 avec ZeRO-2 de DeepSpeed ?",
        kind="bytes",
        tolerance=0.01,
    ),
    Prediction(
        id="accelerate-updates",
        en="How many updates does Accelerate make of 10 micro-batches, with an accumulation of 4?",
        fr="Combien de mises à jour Accelerate fait-il avec 10 micro-batches, avec une accumulation de 4 ?",
        kind="count",
        tolerance=0.0,
    ),
    Prediction(
        id="gpt3-micro-batches",
        en="How many micro-batches does each replica of GPT-3 accumulate per step, on 1,024 GPUs?",
        fr="Combien de micro-batches chaque réplique de GPT-3 cumule-t-elle par pas, sur 1 024 GPU ?",
        kind="count",
        tolerance=0.0,
    ),
)
