"""Lab 13: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.lab13_checkpoints.exercises import (
    CHECKPOINT_INTERVAL,
    RESUME_EXACTLY,
    SAVE_IN_BACKGROUND,
    SEALED_FOLDER,
)
from dlojz.labs.lab13_checkpoints.formats import SHARES_TO_READ

EXERCISES = (RESUME_EXACTLY, SHARES_TO_READ, SAVE_IN_BACKGROUND, CHECKPOINT_INTERVAL, SEALED_FOLDER)

PREDICTIONS = (
    Prediction(
        id="save-seconds",
        en="How many seconds does it take to save the weights and moments of 4 million parameters in fp32?",
        fr="Combien de secondes faut-il pour enregistrer poids et moments de 4 millions de paramètres en fp32 ?",
        kind="seconds",
        tolerance=0.5,
    ),
    Prediction(
        id="stall-seconds",
        en="How many seconds does the training wait for an asynchronous save of these tensors?",
        fr="Combien de secondes l’entraînement attend-il lors d’un enregistrement asynchrone de ces tenseurs ?",
        kind="seconds",
        tolerance=0.5,
    ),
    Prediction(
        id="lost-share",
        en="Which share of the time is lost at the best interval, with a save of 60 s and Llama 3's failures?",
        fr="Quelle part du temps est perdue au meilleur intervalle, avec un enregistrement de 60 s et les pannes de "
        "Llama 3 ?",
        kind="share",
        tolerance=0.1,
    ),
    Prediction(
        id="optimizer-file",
        en="How many bytes does each of 2 ranks write into its file of the optimizer, with DeepSpeed's ZeRO-2 and "
        "267,786 parameters in fp32?",
        fr="Combien d’octets chacun des 2 rangs écrit-il dans son fichier de l’optimiseur, avec le ZeRO-2 de "
        "DeepSpeed et 267 786 paramètres en fp32 ?",
        kind="bytes",
        tolerance=0.02,
    ),
)
