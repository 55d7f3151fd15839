"""Lab 04: bytes that each rank sends per step, by ZeRO stage.

Layer 6 (labs). Invariant: the reference is what `dlojz.zero` hands to its collectives, run as rings.
"""

from __future__ import annotations

from collections.abc import Iterator

from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said


def sent_bytes(weight_bytes: float, ranks: int, stage: int, micro_batches: int) -> float:
    """Bytes that one rank sends per optimizer step; gradients take as many bytes as weights.

    Each reduce-scatter or all-gather of the whole model sends (N − 1) / N times its bytes. Stages 0 and 1: one of each
    per step. Stage 2: one reduce-scatter per micro-batch, one all-gather. Stage 3: per micro-batch two all-gathers
    and one reduce-scatter.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §7, for one micro-batch; a ring sends (N − 1) / N per pass.
    """
    return passes(stage, micro_batches) * (ranks - 1) / ranks * weight_bytes


def passes(stage: int, micro_batches: int = 1) -> int:
    """How many times the whole model goes through a reduce-scatter or an all-gather in one step."""
    return (2, 2, micro_batches + 1, 3 * micro_batches)[stage]


def _steps() -> Iterator[tuple[int, int, int, int]]:
    for weight_bytes, ranks, micro_batches in ((8_000, 4, 1), (36_000, 6, 4), (1_000, 2, 3), (500, 1, 2)):
        for stage in (3, 1, 0, 2):
            yield weight_bytes, ranks, stage, micro_batches


def _times(count: tuple[int, ...], w: float, n: int, stage: int) -> float:
    return count[stage] * (n - 1) / n * w


ZERO_VOLUME = Exercise(
    id="zero-volume",
    title=Said("bytes sent, by stage", "octets envoyés selon le stage"),
    judge=by_reference(
        sent_bytes,
        cases=_steps,
        mistakes=(
            Mistake(
                lambda w, n, stage, m: passes(stage, m) * w,
                Said(
                    "The number of passes is right, but a rank never sends the part that is its own: (N − 1) / N of "
                    "the bytes each time; try ranks = 1, where nothing is sent.",
                    "Le nombre de passages est juste, mais un rang n’envoie jamais la part qui est la sienne : "
                    "(N − 1) / N des octets à chaque fois ; essayez ranks = 1, où rien n’est envoyé.",
                ),
            ),
            Mistake(
                lambda w, n, stage, m: _times((2, 2, 2, 3), w, n, stage),
                Said(
                    "That is right for one micro-batch. Stages 2 and 3 keep no whole gradient to add to: they reduce "
                    "with every micro-batch, and stage 3 gathers the weights for each.",
                    "C’est juste pour un seul micro-batch. Les stages 2 et 3 ne gardent pas de gradient entier auquel "
                    "ajouter le suivant : ils réduisent à chaque micro-batch, et le stage 3 rassemble les poids pour "
                    "chacun.",
                ),
            ),
            Mistake(
                lambda w, n, stage, m: _times((2 * m, 2 * m, 2 * m, 3 * m), w, n, stage),
                Said(
                    "Not everything is repeated with every micro-batch: stages 0 and 1 accumulate whole gradients and "
                    "reduce once; and up to stage 2 the weights are gathered once, after the update.",
                    "Tout ne se répète pas à chaque micro-batch : les stages 0 et 1 cumulent des gradients entiers et "
                    "réduisent une seule fois ; et jusqu’au stage 2, les poids sont rassemblés une seule fois, après "
                    "la mise à jour.",
                ),
            ),
            Mistake(
                lambda w, n, stage, m: _times((2, 2, 2 * m, 3 * m), w, n, stage),
                Said(
                    "Almost: in stage 2 only the reduce-scatter is repeated with every micro-batch; the weights are "
                    "gathered once, after the update.",
                    "Presque : au stage 2, seul le reduce-scatter se répète à chaque micro-batch ; les poids sont "
                    "rassemblés une seule fois, après la mise à jour.",
                ),
            ),
            Mistake(
                lambda w, n, stage, m: _times((2, 2, m + 1, 2 * m), w, n, stage),
                Said(
                    "In stage 3 the weights are freed after the forward pass: each micro-batch gathers them twice, for "
                    "forward and for backward, and reduces its gradients besides.",
                    "Au stage 3, les poids sont libérés après la passe avant : chaque micro-batch les rassemble deux "
                    "fois, pour la passe avant et pour la passe arrière, et réduit en plus ses gradients.",
                ),
            ),
            Mistake(
                lambda w, n, stage, m: _times((2, 2, m + 1, 2 * m + 1), w, n, stage),
                Said(
                    "In stage 3 the gradients too are reduced with every micro-batch, since no rank keeps whole ones.",
                    "Au stage 3, les gradients aussi sont réduits à chaque micro-batch, puisqu’aucun rang n’en garde "
                    "d’entiers.",
                ),
            ),
            Mistake(
                lambda w, n, stage, m: _times((2, 3, m + 2, 3 * m), w, n, stage),
                Said(
                    "For stages 1 and 2 that is an all-reduce of the gradients plus an all-gather of the weights. "
                    "A rank needs its own share of the sum alone: a reduce-scatter is enough, half an all-reduce.",
                    "Aux stages 1 et 2, c’est là un all-reduce des gradients plus un all-gather des poids. Or un rang "
                    "n’a besoin que de sa part de la somme : un reduce-scatter suffit, soit la moitié d’un all-reduce.",
                ),
            ),
            Mistake(
                lambda w, n, stage, m: _times((1, 2, m + 1, 3 * m), w, n, stage),
                Said(
                    "An all-reduce counts twice: it is a reduce-scatter, then an all-gather.",
                    "Un all-reduce compte deux fois : c’est un reduce-scatter, suivi d’un all-gather.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: with one micro-batch 2Ψ, 2Ψ, 2Ψ and 3Ψ. Stage 3 costs half as much again; accumulation widens the gap.",
        "Exact : avec un seul micro-batch, 2Ψ, 2Ψ, 2Ψ et 3Ψ. Le stage 3 coûte moitié plus cher ; l’accumulation creuse "
        "l’écart.",
    ),
    hints=(
        Said(
            "Count, for each stage, how often the whole model goes through a reduce-scatter or an all-gather in one "
            "step. An all-reduce is one of each.",
            "Comptez, pour chaque stage, combien de fois le modèle entier passe par un reduce-scatter ou un all-gather "
            "au cours d’un pas. Un all-reduce, c’est l’un puis l’autre.",
        ),
        Said(
            "Stages 0 and 1: 2 passes. Stage 2: micro_batches + 1. Stage 3: 3 · micro_batches. Each pass sends "
            "weight_bytes · (ranks − 1) / ranks.",
            "Stages 0 et 1 : 2 passages. Stage 2 : micro_batches + 1. Stage 3 : 3 · micro_batches. Chaque passage "
            "envoie weight_bytes · (ranks − 1) / ranks.",
        ),
    ),
)
