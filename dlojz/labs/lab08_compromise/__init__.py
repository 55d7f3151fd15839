"""Lab 08: its exercises in order, and what the student predicts."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.lab08_compromise.exercises_alpa import PROGRAMME, STAGES
from dlojz.labs.lab08_compromise.exercises_evidence import FEWEST_GPUS, PAIRED, SHARES
from dlojz.labs.lab08_compromise.exercises_layouts import BEST_SPLIT, CHOOSE, RANK_BYTES

EXERCISES = (SHARES, RANK_BYTES, BEST_SPLIT, CHOOSE, PAIRED, PROGRAMME, STAGES, FEWEST_GPUS)

PREDICTIONS = (
    Prediction(
        id="training-days",
        en="How many days does it take to train 175 billion parameters on 300 billion tokens, with 1,024 A100s at 140 "
        "TFLOP/s each?",
        fr="Combien de jours faut-il pour entraîner 175 milliards de paramètres sur 300 milliards de tokens, avec 1 "
        "024 A100 à 140 TFLOP/s chacun ?",
        kind="count",
        tolerance=0.03,
    ),
    Prediction(
        id="slowest-here",
        en="On this machine, how many times longer is a step of the slowest of the eight layouts than one of the "
        "fastest?",
        fr="Sur cette machine, combien de fois plus long est le pas de la plus lente des huit configurations que celui "
        "de la plus rapide ?",
        kind="ratio",
        tolerance=0.5,
    ),
    Prediction(
        id="ddp-place",
        en="In which place of the eight, the fastest first, does DDP come once they are measured?",
        fr="À quelle place sur huit, la plus rapide d’abord, DDP arrive-t-il une fois mesuré ?",
        kind="place",
    ),
    Prediction(
        id="four-processes",
        en="How many times as many tokens per second do four processes of this machine train as one, with the same "
        "batch for each process?",
        fr="Combien de fois plus de tokens par seconde quatre processus de cette machine entraînent-ils qu’un seul, à "
        "batch égal par processus ?",
        kind="ratio",
        tolerance=0.5,
    ),
    Prediction(
        id="perceptron-cost",
        en="What does the cheapest sharding of six dense layers cost, in the unit of the mesh?",
        fr="Combien coûte la découpe la moins chère de six couches denses, dans l’unité du maillage ?",
        kind="count",
        tolerance=0.001,
    ),
    Prediction(
        id="many-micro-batches",
        en="How long is the shortest step of eight equal layers on 4 GPUs with 64 micro-batches?",
        fr="Combien dure le plus court pas de huit couches égales sur 4 GPU, avec 64 micro-batches ?",
        kind="count",
        tolerance=0.001,
    ),
)
