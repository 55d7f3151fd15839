"""Lab 04: bytes of the model states on one rank, by ZeRO stage.

Layer 6 (labs). Invariant: the reference is the paper's closed form, which `dlojz.predict.state_forms` gives too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said

WEIGHTS_BYTES, GRADIENTS_BYTES, OPTIMIZER_BYTES = 2, 2, 12
"""Per parameter, in mixed precision with Adam: the last one is a master copy and two moments, in fp32."""


def state_bytes(parameters: float, ranks: int, stage: int) -> float:
    """Bytes of weights, gradients and optimizer on one rank: each part is shared out from a stage on.

    2Ψ + 2Ψ + 12Ψ without ZeRO, 4Ψ + 12Ψ/N for stage 1, 2Ψ + 14Ψ/N for stage 2, 16Ψ/N for stage 3.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §5 and Fig. 1, with K = 12.
    """
    return _shared(parameters, ranks, stage, (3, 2, 1))


def _shared(
    parameters: float,
    ranks: int,
    stage: int,
    first_stages: Sequence[int],
    parts: Sequence[float] = (WEIGHTS_BYTES, GRADIENTS_BYTES, OPTIMIZER_BYTES),
) -> float:
    """Weights, gradients, optimizer, each shared out from its first stage on."""
    pairs = zip(parts, first_stages, strict=True)
    return sum(part * parameters / (ranks if stage >= first else 1) for part, first in pairs)


def _models() -> Iterator[tuple[int, int, int]]:
    for parameters, ranks in ((12_000, 4), (750_000, 64), (5_040, 3)):
        for stage in (1, 3, 2, 0):
            yield parameters, ranks, stage


def _only_its_own(parameters: float, ranks: int, stage: int) -> float:
    """Stage 2 shards gradients alone, stage 3 weights alone."""
    parts = {0: (), 1: (OPTIMIZER_BYTES,), 2: (GRADIENTS_BYTES,), 3: (WEIGHTS_BYTES,)}[stage]
    return (16 - sum(parts) * (1 - 1 / ranks)) * parameters


ZERO_STATES = Exercise(
    id="zero-states",
    title=Said("bytes per rank, by stage", "octets par rang selon le stage"),
    judge=by_reference(
        state_bytes,
        cases=_models,
        mistakes=(
            Mistake(
                _only_its_own,
                Said(
                    "Each stage shards one more part, but you stop sharding those of the stages before: stage 2 "
                    "shards the optimizer and the gradients, stage 3 all three.",
                    "Chaque stage répartit une part de plus, mais vous cessez de répartir celles des stages "
                    "précédents : le stage 2 répartit l’optimiseur et les gradients, le stage 3 les trois.",
                ),
            ),
            Mistake(
                lambda p, n, stage: _shared(p, n, stage, (1, 2, 3)),
                Said(
                    "The order is the other way round: what is largest and needed least often is shared out first, the "
                    "optimizer's 12 bytes, then the gradients, then the weights.",
                    "L’ordre est inversé : on répartit d’abord le plus gros et le moins souvent utile, les 12 octets "
                    "de l’optimiseur, puis les gradients, puis les poids.",
                ),
            ),
            Mistake(
                lambda p, n, stage: _shared(p, n, stage, (2, 3, 1)),
                Said(
                    "You shard the weights before the gradients: stage 2 shards the gradients, stage 3 the weights.",
                    "Vous répartissez les poids avant les gradients : le stage 2 répartit les gradients, le stage 3 "
                    "les poids.",
                ),
            ),
            Mistake(
                lambda p, n, stage: _shared(p, n, stage, (3, 2, 1), (2, 2, 8)),
                Said(
                    "The fp32 master copy is missing: Adam updates it, so it belongs to the optimizer, 4 + 4 + 4 = 12 "
                    "bytes per parameter.",
                    "La copie maître en fp32 manque : c’est elle qu’Adam met à jour ; elle compte donc avec "
                    "l’optimiseur, 4 + 4 + 4 = 12 octets par paramètre.",
                ),
            ),
            Mistake(
                lambda p, n, stage: _shared(p, n, stage, (3, 2, 1), (4, 4, 8)),
                Said(
                    "That is fp32 throughout. In mixed precision weights and gradients take 2 bytes, and the optimizer "
                    "12, with its master copy: 16 as well, but shared out otherwise.",
                    "C’est du fp32 partout. En précision mixte, poids et gradients prennent 2 octets, et l’optimiseur "
                    "12, copie maître comprise : 16 aussi, mais répartis autrement.",
                ),
            ),
            Mistake(
                lambda p, n, stage: 16 * p / (n if stage else 1),
                Said(
                    "You share out everything from stage 1 on; only stage 3 does that.",
                    "Vous répartissez tout dès le stage 1 ; seul le stage 3 le fait.",
                ),
            ),
            Mistake(
                lambda p, n, stage: 16 * p / n,
                Said(
                    "You share out everything in every stage, even without ZeRO (stage 0), where each rank keeps all.",
                    "Vous répartissez tout à tous les stages, même sans ZeRO (stage 0), où chaque rang garde tout.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right. Stages 1 and 2 end at a floor, 4Ψ and 2Ψ; only stage 3 falls as 1/N.",
        "Exact. Les stages 1 et 2 butent sur un plancher, 4Ψ et 2Ψ ; seul le stage 3 décroît en 1/N.",
    ),
    hints=(
        Said(
            "Write the three parts apart, 2Ψ, 2Ψ and 12Ψ. From which stage on is each divided by the number of ranks?",
            "Écrivez les trois parts séparément : 2Ψ, 2Ψ et 12Ψ. À partir de quel stage chacune est-elle divisée par "
            "le nombre de rangs ?",
        ),
        Said(
            "Optimizer: divided if stage >= 1; gradients: if stage >= 2; weights: if stage >= 3. Then add the three.",
            "Optimiseur : divisé si stage >= 1 ; gradients : si stage >= 2 ; poids : si stage >= 3. Additionnez "
            "ensuite les trois.",
        ),
    ),
)
