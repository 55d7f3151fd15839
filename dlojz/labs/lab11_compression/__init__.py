"""Lab 11: its exercises in order, and what the student predicts."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.lab11_compression.exercises_distill import MIXED_LOSS, SOFT_LOSS
from dlojz.labs.lab11_compression.exercises_integer import INTEGER_LINEAR
from dlojz.labs.lab11_compression.exercises_prune import GLOBAL_MASKS, PERMUTATION, SR_STE, TICKET, TWO_OF_FOUR
from dlojz.labs.lab11_compression.exercises_quantize import AFFINE, ROWS, STRAIGHT_THROUGH
from dlojz.labs.lab11_compression.exercises_serve import KV_CACHE, LORA
from dlojz.labs.lab11_compression.exercises_train import AWARE_TRAINING, PRUNED_TRAINING

EXERCISES = (
    SOFT_LOSS,
    MIXED_LOSS,
    ROWS,
    AFFINE,
    INTEGER_LINEAR,
    STRAIGHT_THROUGH,
    AWARE_TRAINING,
    GLOBAL_MASKS,
    PRUNED_TRAINING,
    TICKET,
    KV_CACHE,
    LORA,
    TWO_OF_FOUR,
    SR_STE,
    PERMUTATION,
)

PREDICTIONS = (
    Prediction(
        id="student-time",
        en="What is the time of an answer of a model with 2 of the teacher’s 4 blocks, that of the teacher being 1?",
        fr="Combien de temps prend une réponse d’un modèle à 2 des 4 blocs du professeur, si celui-ci prend 1 ?",
        kind="ratio",
        tolerance=0.3,
    ),
    Prediction(
        id="int8-bytes",
        en="How many bytes do a matrix of 512 × 128 in INT8 and its scales in fp32, one per row, take?",
        fr="Combien d’octets prennent une matrice 512 × 128 en INT8 et ses échelles en fp32, une par ligne ?",
        kind="bytes",
        tolerance=0.001,
    ),
    Prediction(
        id="noise-gained",
        en="By how much is the mean square error of rounding multiplied when one bit is taken away, about?",
        fr="Retirer un bit multiplie à peu près par combien l’erreur quadratique moyenne de l’arrondi ?",
        kind="ratio",
        tolerance=0.1,
    ),
    Prediction(
        id="fp8-error",
        en="What is the largest relative error of a normal number in E4M3, from 0 to 1?",
        fr="Quelle est la plus grande erreur relative d’un nombre normal en E4M3, de 0 à 1 ?",
        kind="share",
        tolerance=0.1,
    ),
    Prediction(
        id="equal-bytes",
        en="From which share of zeros on is the teacher, sparse, as small as the dense model of half its width?",
        fr="À partir de quelle part de zéros le professeur creux est-il aussi petit que le modèle dense deux fois "
        "moins large ?",
        kind="share",
        tolerance=0.05,
    ),
    Prediction(
        id="masked-time",
        en="What is the time of a layer nine tenths of whose weights are zero, that of the full layer being 1?",
        fr="Combien de temps prend une couche dont neuf poids sur dix sont nuls, si la couche pleine prend 1 ?",
        kind="ratio",
        tolerance=0.3,
    ),
    Prediction(
        id="kv-bytes",
        en="How many bytes does the cache of keys and values of 256 tokens take?",
        fr="Combien d’octets prend le cache des clés et des valeurs de 256 tokens ?",
        kind="bytes",
        tolerance=0.001,
    ),
    Prediction(
        id="prefill-rate",
        en="How many tokens per second does the prefill of a prompt of 256 tokens compute here?",
        fr="Combien de tokens par seconde le prefill d’une invite de 256 tokens calcule-t-il ici ?",
        kind="rate",
        tolerance=0.7,
    ),
    Prediction(
        id="decode-rate",
        en="How many tokens per second does the decode of a single sequence give here?",
        fr="Combien de tokens par seconde le decode d’une seule séquence donne-t-il ici ?",
        kind="rate",
        tolerance=0.7,
    ),
    Prediction(
        id="cache-gain",
        en="How many times as long does a new token take without a cache, after 256 tokens?",
        fr="Sans cache, un nouveau token prend combien de fois plus de temps, après 256 tokens ?",
        kind="ratio",
        tolerance=0.7,
    ),
    Prediction(
        id="lora-bytes",
        en="How many bytes do weights, gradients and AdamW’s moments take when LoRA alone is trained in fp32?",
        fr="Combien d’octets prennent poids, gradients et moments d’AdamW quand seuls des adaptateurs LoRA sont "
        "entraînés en fp32 ?",
        kind="bytes",
        tolerance=0.01,
    ),
    Prediction(
        id="lora-time",
        en="What is the time of forward and backward with LoRA, that of a full fine-tuning being 1?",
        fr="Combien de temps prennent passe avant et passe arrière avec LoRA, si le fine-tuning complet prend 1 ?",
        kind="ratio",
        tolerance=0.3,
    ),
    Prediction(
        id="two-of-four-bytes",
        en="How many bytes does a matrix of 512 × 128 in fp16 take, packed as 2:4, two bits per number kept?",
        fr="Combien d’octets prend une matrice 512 × 128 en fp16 au format 2:4, avec deux bits par nombre gardé ?",
        kind="bytes",
        tolerance=0.001,
    ),
)
