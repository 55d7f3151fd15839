"""Lab 10: its exercises in order, and what the student predicts."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.lab10_experts.exercises_exchange import EXCHANGE
from dlojz.labs.lab10_experts.exercises_pacing import PACING
from dlojz.labs.lab10_experts.exercises_ranks import EXCHANGE_BYTES, MIXTURE, PARITY, PLACEMENT
from dlojz.labs.lab10_experts.exercises_routing import BALANCE, GATE, PLACES, TWO_LEVEL

EXERCISES = (GATE, PLACES, MIXTURE, BALANCE, TWO_LEVEL, EXCHANGE, PARITY, EXCHANGE_BYTES, PACING, PLACEMENT)

PREDICTIONS = (
    Prediction(
        id="active-parameters",
        en="How many parameters of Mixtral 8x7B does one token meet?",
        fr="Combien de paramètres de Mixtral 8x7B un token rencontre-t-il ?",
        kind="count",
        tolerance=0.02,
    ),
    Prediction(
        id="dropped-share",
        en="Which share of the tokens is dropped, from 0 to 1, if all of them choose the same one of 8 experts, with "
        "a capacity factor of 1.25?",
        fr="Quelle part des tokens est abandonnée, de 0 à 1, si tous choisissent le même des 8 experts, avec un "
        "facteur de capacité de 1,25 ?",
        kind="share",
        tolerance=0.01,
    ),
    Prediction(
        id="rate-same-computation",
        en="How many times the tokens/s of a dense MLP of one expert’s size does the mixture make?",
        fr="Combien de fois le débit, en tokens/s, d’un MLP dense de la taille d’un expert le mélange atteint-il ?",
        kind="ratio",
        tolerance=0.6,
    ),
    Prediction(
        id="rate-same-weights",
        en="How many times the tokens/s of a dense MLP with as many weights does the mixture make?",
        fr="Combien de fois le débit, en tokens/s, d’un MLP dense d’autant de poids le mélange atteint-il ?",
        kind="ratio",
        tolerance=0.45,
    ),
    Prediction(
        id="exchange-sent",
        en="How many bytes does each of 2 ranks send per step by all-to-all, for moe_tiny with ep=2?",
        fr="Combien d’octets chacun des 2 rangs envoie-t-il par pas en all-to-all, pour moe_tiny avec ep=2 ?",
        kind="bytes",
        tolerance=0.01,
    ),
    Prediction(
        id="expert-weights",
        en="How many bytes of weights does each of 2 ranks keep, for moe_tiny in fp32 with ep=2?",
        fr="Combien d’octets de poids chacun des 2 rangs garde-t-il, pour moe_tiny en fp32 avec ep=2 ?",
        kind="bytes",
        tolerance=0.01,
    ),
    Prediction(
        id="exchange-share",
        en="Which share of the time do two ranks spend in all-to-all, from 0 to 1?",
        fr="Quelle part du temps deux rangs passent-ils en all-to-all, de 0 à 1 ?",
        kind="share",
        tolerance=0.7,
    ),
    Prediction(
        id="unequal-step",
        en="How many times as long does a pass take, if one of two ranks receives three quarters of the tokens?",
        fr="Combien de fois plus longue est une passe, si l’un des deux rangs reçoit les trois quarts des tokens ?",
        kind="ratio",
        tolerance=0.5,
    ),
    Prediction(
        id="curriculum-tokens",
        en="How many tokens do the 40 steps read during which samples grow from 16 to 128 tokens, 4 samples a step?",
        fr="Combien de tokens lisent les 40 pas pendant lesquels les échantillons passent de 16 à 128 tokens, à 4 "
        "échantillons par pas ?",
        kind="count",
        tolerance=0.1,
    ),
    Prediction(
        id="short-step",
        en="Which share of the time of a step of 128 tokens does a step of 16 tokens take, from 0 to 1?",
        fr="Quelle part du temps d’un pas de 128 tokens un pas de 16 tokens prend-il, de 0 à 1 ?",
        kind="share",
        tolerance=0.4,
    ),
)
