"""Lab 01: its exercises in the order of the notebook, and its predictions."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.lab01_big_models.exercises import (
    ATTENTION,
    ATTENTION_COST,
    BLOCK_PARAMETERS,
    MULTI_HEAD,
    PATCHES,
    RELATIVE_BIAS,
    TOKENS,
)

EXERCISES = (ATTENTION, MULTI_HEAD, PATCHES, TOKENS, BLOCK_PARAMETERS, ATTENTION_COST, RELATIVE_BIAS)

PREDICTIONS = (
    Prediction(
        id="vit-tokens",
        en="How many tokens does ViT-B/16 make of an image of 224 × 224 pixels?",
        fr="Combien de tokens ViT-B/16 tire-t-il d’une image de 224 × 224 pixels ?",
        kind="count",
        tolerance=0.0,
    ),
    Prediction(
        id="vit-b-encoder",
        en="How many parameters do the 12 blocks of ViT-B/16 (width 768) have?",
        fr="Combien de paramètres ont les 12 blocs de ViT-B/16 (largeur 768) ?",
        kind="count",
        tolerance=0.01,
    ),
    Prediction(
        id="pixel-attention",
        en="How many times more expensive is attention on 112² positions than on 14², both 96 wide?",
        fr="Combien de fois l’attention sur 112² positions est-elle plus chère que sur 14², à largeur 96 ?",
        kind="ratio",
        tolerance=0.1,
    ),
    Prediction(
        id="coatnet-7-states",
        en="How many bytes of model states does CoAtNet-7 need with AdamW in fp32?",
        fr="Combien d’octets occupent les états du modèle, pour CoAtNet-7 avec AdamW en fp32 ?",
        kind="bytes",
        tolerance=0.05,
    ),
    Prediction(
        id="tiny-states",
        en="How many bytes of weights, gradients and AdamW states does each replica hold?",
        fr="Combien d’octets de poids, de gradients et d’états d’AdamW chaque réplique détient-elle ?",
        kind="bytes",
        tolerance=0.01,
    ),
)
