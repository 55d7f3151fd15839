"""Lab 03: the learning rate of a larger batch.

Layer 6 (labs). Invariant: the reference is the rule that the lab's own training uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said


def scaled_rate(step: int, base_rate: float, scale: float, warmup_steps: int) -> float:
    """Learning rate of a batch `scale` times as large: from `base_rate` in a straight line to `scale · base_rate`.

    Source: Goyal et al. 2017 (arXiv 1706.02677), §2.1 (linear scaling) and §2.2 (gradual warm-up).
    """
    share = min(1.0, step / warmup_steps)
    return base_rate * (1 + (scale - 1) * share)


def _steps() -> Iterator[tuple[int, float, float, int]]:
    for base_rate, scale, warmup_steps in ((0.1, 8, 40), (0.02, 16, 10)):
        for step in (0, 1, 7, 10, 39, 40, 41, 500):
            yield step, base_rate, scale, warmup_steps


LEARNING_RATE = Exercise(
    id="learning-rate",
    title=Said("the learning rate of a large batch", "le taux d’apprentissage d’un grand batch"),
    judge=by_reference(
        scaled_rate,
        cases=_steps,
        mistakes=(
            Mistake(
                lambda step, base, scale, warm: base * scale,
                Said(
                    "The target is right from the first step on, without warm-up: start at base_rate and rise to "
                    "scale · base_rate over warmup_steps.",
                    "C’est le taux visé dès le premier pas, sans warm-up : partez de base_rate et montez jusqu’à "
                    "scale · base_rate en warmup_steps pas.",
                ),
            ),
            Mistake(
                lambda step, base, scale, warm: base * scale * min(1, step / warm),
                Said(
                    "You start from zero: the first step would train nothing. Gradual warm-up starts from base_rate, "
                    "which a small batch bears.",
                    "Vous partez de zéro : le premier pas n’apprendrait rien. Le warm-up part de base_rate, "
                    "qu’un petit batch supporte.",
                ),
            ),
            Mistake(
                lambda step, base, scale, warm: base * scale * min(1, (step + 1) / warm),
                Said(
                    "You start from nearly zero; gradual warm-up starts from base_rate at step 0, and reaches scale · "
                    "base_rate at step warmup_steps.",
                    "Vous partez de presque zéro ; le warm-up part de base_rate au pas 0, et atteint scale · base_rate "
                    "au pas warmup_steps.",
                ),
            ),
            Mistake(
                lambda step, base, scale, warm: base * (1 + (scale - 1) * step / warm),
                Said(
                    "The rate goes on rising after the warm-up; hold it at scale · base_rate from warmup_steps on.",
                    "Le taux continue de monter après le warm-up ; maintenez-le à scale · base_rate dès warmup_steps.",
                ),
            ),
            Mistake(
                lambda step, base, scale, warm: base * (1 + (math.sqrt(scale) - 1) * min(1, step / warm)),
                Said(
                    "You scale by the square root, a rule often used with Adam; for SGD, Goyal et al. scale by the "
                    "factor itself.",
                    "Vous augmentez selon la racine carrée, règle souvent suivie avec Adam ; pour SGD, Goyal et al. "
                    "augmentent du facteur lui-même.",
                ),
            ),
            Mistake(
                lambda step, base, scale, warm: base * (1 + scale * min(1, step / warm)),
                Said(
                    "You rise by scale times the base rate, and arrive at (scale + 1) times; the rise is scale − 1.",
                    "Vous montez de scale fois le taux de base, et arrivez à (scale + 1) fois ; la montée vaut "
                    "scale − 1.",
                ),
            ),
            Mistake(
                lambda step, base, scale, warm: base if step < warm else base * scale,
                Said(
                    "That is a jump at the end of the warm-up; gradual means a straight line, step after step.",
                    "C’est un saut à la fin du warm-up ; « graduel » veut dire en ligne droite, pas après pas.",
                ),
            ),
            Mistake(
                lambda step, base, scale, warm: base,
                Said(
                    "The rate never changes: with scale times fewer steps, the model would not go as far.",
                    "Le taux ne change jamais : avec scale fois moins de pas, le modèle n’irait pas aussi loin.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: as many samples, fewer steps, each so much the longer, once training has found its way.",
        "Exact : autant d’échantillons, moins de pas, d’autant plus longs, une fois l’entraînement bien engagé.",
    ),
    hints=(
        Said(
            "What is the rate at step 0, and what from step warmup_steps on? In between it is a straight line.",
            "Que vaut le taux au pas 0, et à partir du pas warmup_steps ? Entre les deux, c’est une droite.",
        ),
        Said(
            "With share = min(1, step / warmup_steps), the rate is base_rate · (1 + (scale − 1) · share).",
            "Avec share = min(1, step / warmup_steps), le taux vaut base_rate · (1 + (scale − 1) · share).",
        ),
    ),
)
