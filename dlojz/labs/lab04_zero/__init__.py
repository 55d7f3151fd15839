"""Lab 04: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.lab04_zero.challenge import FEWEST_MESSAGES
from dlojz.labs.lab04_zero.exercises_cost import DEEPSPEED_JSON, OFFLOAD_BYTES, OFFLOAD_TIME, ZERO_TIME, ZERO_VOLUME
from dlojz.labs.lab04_zero.exercises_stages import SHARD_GRADIENTS, SHARD_OPTIMIZER, SHARD_WEIGHTS, ZERO_STATES

EXERCISES = (
    ZERO_STATES,
    SHARD_OPTIMIZER,
    SHARD_GRADIENTS,
    SHARD_WEIGHTS,
    ZERO_VOLUME,
    DEEPSPEED_JSON,
    OFFLOAD_BYTES,
    OFFLOAD_TIME,
    ZERO_TIME,
    FEWEST_MESSAGES,
)

PREDICTIONS = (
    Prediction(
        id="zero-3-gpus",
        en="How many H100 GPUs with 80 GB does it take at least for the states of 10¹² parameters under ZeRO-3?",
        fr="Combien de GPU H100 de 80 Go faut-il au moins pour les états de 10¹² paramètres, en ZeRO-3 ?",
        kind="count",
        tolerance=0.1,
    ),
    Prediction(
        id="share-of-moments",
        en="How many bytes of Adam's moments does each of 2 ranks keep for coatnet_tiny, from stage 1 on?",
        fr="Combien d’octets de moments d’Adam chacun des 2 rangs garde-t-il pour coatnet_tiny, à partir du niveau 1 ?",
        kind="bytes",
        tolerance=0.01,
    ),
    Prediction(
        id="stage-3-sends",
        en="How many bytes does each of 2 ranks send per step under ZeRO-3, for coatnet_tiny in fp32?",
        fr="Combien d’octets chacun des 2 rangs envoie-t-il par pas en ZeRO-3, pour coatnet_tiny en fp32 ?",
        kind="bytes",
        tolerance=0.01,
    ),
    Prediction(
        id="three-passes",
        en="How many seconds do the three passes of ZeRO-3 take over 1.6 million parameters in fp32, on 2 ranks?",
        fr="Combien de secondes durent les trois passages de ZeRO-3 sur 1,6 million de paramètres en fp32, sur "
        "2 rangs ?",
        kind="seconds",
        tolerance=0.5,
    ),
    Prediction(
        id="zero-1-samples",
        en="How many samples per second do 2 ranks read under ZeRO-1, 64 per rank and step?",
        fr="Combien d’échantillons par seconde 2 rangs lisent-ils en ZeRO-1, à raison de 64 par rang et par pas ?",
        kind="rate",
        tolerance=0.5,
    ),
    Prediction(
        id="fsdp2-over-ddp",
        en="By how much is the time of a step multiplied from DDP to FSDP2, if nothing is hidden?",
        fr="Par combien la durée d’un pas est-elle multipliée de DDP à FSDP2, si rien n’est recouvert ?",
        kind="ratio",
        tolerance=1.0,
    ),
    Prediction(
        id="host-bytes",
        en="How many bytes does each of 2 ranks keep in host memory, for coatnet_tiny in bf16 with its optimizer "
        "offloaded?",
        fr="Combien d’octets chacun des 2 rangs garde-t-il dans la mémoire de l’hôte, pour coatnet_tiny en bf16, "
        "optimiseur déchargé ?",
        kind="bytes",
        tolerance=0.15,
    ),
    Prediction(
        id="offload-tokens",
        en="How many tokens must a single GPU read per step for the transfers to take no longer than the computation?",
        fr="Combien de tokens un GPU seul doit-il lire par pas pour que les transferts ne durent pas plus que le "
        "calcul ?",
        kind="count",
        tolerance=0.05,
    ),
)
