"""Lab 11: its exercises in order, and what the student predicts."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.lab11_compression.exercises_distill import MIXED_LOSS, SOFT_LOSS
from dlojz.labs.lab11_compression.exercises_prune import GLOBAL_MASKS, PERMUTATION, SR_STE, TICKET, TWO_OF_FOUR
from dlojz.labs.lab11_compression.exercises_quantize import AFFINE, INTEGER_LINEAR, ROWS, STRAIGHT_THROUGH

EXERCISES = (
    SOFT_LOSS,
    MIXED_LOSS,
    ROWS,
    AFFINE,
    INTEGER_LINEAR,
    STRAIGHT_THROUGH,
    GLOBAL_MASKS,
    TICKET,
    TWO_OF_FOUR,
    SR_STE,
    PERMUTATION,
)

PREDICTIONS = (
    Prediction(
        id="student-share",
        en="Which share of vit_tiny's parameters does a student have that keeps 2 of its 4 blocks, from 0 to 1?",
        fr="Quelle part des paramètres de vit_tiny garde un étudiant qui n’a que 2 de ses 4 blocs, de 0 à 1 ?",
        kind="share",
        tolerance=0.02,
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
        id="masked-time",
        en="What is the time of a layer nine tenths of whose weights are zero, that of the full layer being 1?",
        fr="Combien de temps prend une couche dont neuf poids sur dix sont nuls, si la couche pleine prend 1 ?",
        kind="ratio",
        tolerance=0.2,
    ),
    Prediction(
        id="two-of-four-bytes",
        en="How many bytes does a matrix of 512 × 128 in fp16 take, packed as 2:4, two bits per number kept?",
        fr="Combien d’octets prend une matrice 512 × 128 en fp16 au format 2:4, avec deux bits par nombre gardé ?",
        kind="bytes",
        tolerance=0.001,
    ),
)
