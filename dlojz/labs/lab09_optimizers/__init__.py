"""Lab 09: its exercises in order, and what the student predicts."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.lab09_optimizers.exercises_compression import (
    COMPRESS_SIGNS,
    COMPRESSED_ALL_REDUCE,
    COMPRESSED_BYTES,
    SIGN_BIAS,
)
from dlojz.labs.lab09_optimizers.exercises_feedback import ERROR_FEEDBACK, FEWER_BYTES
from dlojz.labs.lab09_optimizers.exercises_freeze import FREEZE_STEP
from dlojz.labs.lab09_optimizers.exercises_updates import FUSED_TRAFFIC, OUTER_STEP, UPDATE_IN_BACKWARD

EXERCISES = (
    COMPRESS_SIGNS,
    SIGN_BIAS,
    ERROR_FEEDBACK,
    COMPRESSED_ALL_REDUCE,
    COMPRESSED_BYTES,
    FREEZE_STEP,
    FUSED_TRAFFIC,
    UPDATE_IN_BACKWARD,
    OUTER_STEP,
    FEWER_BYTES,
)

PREDICTIONS = (
    Prediction(
        id="what-arrives",
        en="What arrives on average of the first gradient, once compressed?",
        fr="Que reçoit-on en moyenne du premier gradient, une fois compressé ?",
        kind="ratio",
        tolerance=0.05,
    ),
    Prediction(
        id="times-fewer",
        en="How many times fewer bytes does the whole run send, its warm-up included?",
        fr="Combien de fois moins d’octets l’entraînement entier envoie-t-il, warm-up compris ?",
        kind="ratio",
        tolerance=0.05,
    ),
    Prediction(
        id="third-of-the-bytes",
        en="How many times as fast does a message of a million numbers pass, if it has a third of the bytes?",
        fr="Combien de fois plus vite un message d’un million de nombres passe-t-il, avec 3 fois moins d’octets ?",
        kind="ratio",
        tolerance=0.6,
    ),
    Prediction(
        id="32nd-of-the-bytes",
        en="How many times as fast does a message of a million numbers pass, if it has a 32nd of the bytes?",
        fr="Combien de fois plus vite un message d’un million de nombres passe-t-il, avec 32 fois moins d’octets ?",
        kind="ratio",
        tolerance=1.0,
    ),
    Prediction(
        id="share-saved",
        en="What share of the bytes of AdamW's all-reduce does a compressed step save, from 0 to 1?",
        fr="Quelle part des octets de l’all-reduce d’AdamW un pas compressé économise-t-il, entre 0 et 1 ?",
        kind="share",
        tolerance=0.005,
    ),
    Prediction(
        id="error-bytes",
        en="How many bytes does each of 2 ranks keep more than with AdamW, for the errors?",
        fr="Combien d’octets chacun des 2 rangs garde-t-il de plus qu’avec AdamW, pour les erreurs ?",
        kind="bytes",
        tolerance=0.01,
    ),
    Prediction(
        id="fused-gain",
        en="How many times faster can the fused update be at most, where memory sets the pace?",
        fr="Combien de fois plus vite la mise à jour fusionnée peut-elle aller au mieux, quand la mémoire fixe le "
        "rythme ?",
        kind="ratio",
        tolerance=0.4,
    ),
    Prediction(
        id="step-gain",
        en="How many times as fast is the whole step with the fused update?",
        fr="Combien de fois plus vite le pas entier va-t-il avec la mise à jour fusionnée ?",
        kind="ratio",
        tolerance=0.25,
    ),
    Prediction(
        id="gradients-at-once",
        en="How many bytes of gradients are there at once, at most, with the update in the backward pass?",
        fr="Combien d’octets de gradients sont présents en même temps, au plus, avec la mise à jour dans la passe "
        "arrière ?",
        kind="bytes",
        tolerance=0.01,
    ),
    Prediction(
        id="diloco-bytes",
        en="How many bytes does each of 2 ranks send per step, on average, with DiLoCo?",
        fr="Combien d’octets chacun des 2 rangs envoie-t-il par pas, en moyenne, avec DiLoCo ?",
        kind="bytes",
        tolerance=0.01,
    ),
)
