"""Lab 08: what a rank of a layout holds, by hand.

Layer 6 (labs). Invariant: the reference is the planner's closed form for Megatron-LM's states (16-bit weights, fp32
gradients, Adam with its master copy); the tests hold the two against each other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from dlojz.labs.compromise_answers import Case, Numbers, PartMistake, by_parts
from dlojz.labs.exercise import Exercise
from dlojz.labs.verdict import Said
from dlojz.text import say

WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Per parameter: bf16; fp32, in which gradients are accumulated; fp32 master copy and Adam's two moments."""


class Degrees(NamedTuple):
    """A layout as the check makes it up; `dlojz.plan`'s own has the same fields, and more."""

    dp: int
    tp: int
    pp: int
    zero: int
    micro_batches: int


def rank_bytes(layout: Any, stage: int, parameters: float, micro_batch_bytes: float) -> Numbers:
    """(weights, gradients, optimizer, activations) of a rank of one stage, in bytes, under 1F1B.

    Args:
        layout: its degrees, ZeRO stage and micro-batches.
        stage: from 0.
        parameters: of the whole stage, all its slices together.
        micro_batch_bytes: activations that a rank of this stage keeps of one micro-batch.

    Sources: Rajbhandari et al. 2020 (arXiv 1910.02054), §5, for what each ZeRO stage shares out; Narayanan et al. 2021
    (arXiv 2104.04473), §2.2, for the micro-batches in flight.
    """
    own = parameters / layout.tp
    weights, gradients, optimizer = (
        own * size / (layout.dp if layout.zero >= least else 1)
        for size, least in ((WEIGHT_BYTES, 3), (GRADIENT_BYTES, 2), (OPTIMIZER_BYTES, 1))
    )
    return weights, gradients, optimizer, micro_batch_bytes * min(layout.pp - stage, layout.micro_batches)


def _cases() -> Iterator[Case]:
    dice = random.Random(8)
    for dp, tp, pp, zero, micro_batches in (
        (8, 4, 12, 1, 128), (4, 2, 8, 0, 16), (16, 8, 4, 2, 6), (3, 1, 6, 3, 4), (2, 4, 5, 3, 40), (6, 2, 3, 2, 9),
        (5, 8, 7, 1, 3),
    ):  # fmt: skip
        for stage in {0, 1, pp // 2, pp - 1}:
            own = dice.randrange(10**8, 10**10)
            yield Degrees(dp, tp, pp, zero, micro_batches), stage, own, dice.randrange(10**8, 10**9)


def _told(case: Case) -> str:
    layout, stage, parameters, kept = case
    degrees = (
        f"dp={layout.dp}, tp={layout.tp}, pp={layout.pp}, zero={layout.zero}, micro_batches={layout.micro_batches}"
    )
    return say(
        en=f"{degrees}, stage {stage}, {parameters} parameters, {kept} bytes per micro-batch",
        fr=f"{degrees}, étage {stage}, {parameters} paramètres, {kept} octets par micro-batch",
    )


def _states(part: int) -> list[PartMistake]:
    """The usual mistakes about one kind of state."""
    size, least = ((WEIGHT_BYTES, 3), (GRADIENT_BYTES, 2), (OPTIMIZER_BYTES, 1))[part]
    name_en = ("weights", "gradients", "optimizer")[part]
    name_fr = ("poids", "gradients", "états de l’optimiseur")[part]

    def shared(layout: Any, from_stage: int) -> int:
        return int(layout.dp) if layout.zero >= from_stage else 1

    return [
        PartMistake(
            part,
            lambda layout, stage, parameters, kept: parameters * size / shared(layout, least),
            Said(
                f"Your {name_en} are those of a whole stage: each of its tp ranks holds one slice of it.",
                f"Vos {name_fr} sont ceux d’un étage entier : chacun de ses tp rangs n’en détient qu’une tranche.",
            ),
        ),
        PartMistake(
            part,
            lambda layout, stage, parameters, kept: parameters / layout.tp * size,
            Said(
                f"You never share the {name_en} out over the replicas: from ZeRO-{least} on each holds 1/dp of them.",
                f"Vous ne répartissez jamais les {name_fr} entre les répliques : à partir de ZeRO-{least}, chacune en "
                "détient 1/dp.",
            ),
        ),
        PartMistake(
            part,
            lambda layout, stage, parameters, kept: parameters / layout.tp * size / layout.dp,
            Said(
                f"You share the {name_en} out over the replicas in every case; without ZeRO each replica holds all of "
                f"them, and ZeRO does so from stage {least} on.",
                f"Vous répartissez toujours les {name_fr} entre les répliques ; sans ZeRO, chacune les détient en "
                f"entier, et ZeRO ne le fait qu’à partir du niveau {least}.",
            ),
        ),
        *(
            PartMistake(
                part,
                lambda layout, stage, parameters, kept, other=other: (
                    parameters / layout.tp * size / shared(layout, other)
                ),
                Said(
                    f"You share the {name_en} out from ZeRO-{other} on; it is from ZeRO-{least} on (1: optimizer, 2: "
                    "gradients too, 3: weights too).",
                    f"Vous répartissez les {name_fr} à partir de ZeRO-{other} ; c’est à partir de ZeRO-{least} (1 : "
                    "l’optimiseur, 2 : les gradients aussi, 3 : les poids aussi).",
                ),
            )
            for other in (1, 2, 3)
            if other != least
        ),
        *(
            PartMistake(
                part,
                lambda layout, stage, parameters, kept, bytes_each=bytes_each: (
                    parameters / layout.tp * bytes_each / shared(layout, least)
                ),
                Said(
                    f"You count {bytes_each} bytes per parameter for the {name_en}, where there are {size}: weights in "
                    "bf16 (2), gradients accumulated in fp32 (4), and in fp32 Adam's two moments and the master copy "
                    "(12).",
                    f"Vous comptez {bytes_each} octets par paramètre pour les {name_fr}, alors qu’il y en a {size} : "
                    "poids en bf16 (2), gradients accumulés en fp32 (4), et en fp32 les deux moments d’Adam et la "
                    "copie maîtresse (12).",
                ),
            )
            for bytes_each in (2, 4, 8, 12, 16)
            if bytes_each != size
        ),
    ]


def _flight(count: Any, english: str, french: str) -> PartMistake:
    return PartMistake(3, lambda layout, stage, parameters, kept: kept * count(layout, stage), Said(english, french))


RANK_BYTES = Exercise(
    id="rank-bytes",
    title=Said("the bytes of a rank", "les octets d’un rang"),
    judge=by_parts(
        rank_bytes,
        cases=_cases,
        names=(
            Said("weights", "les poids"),
            Said("gradients", "les gradients"),
            Said("optimizer", "l’optimiseur"),
            Said("activations", "les activations"),
        ),
        told=_told,
        mistakes=(
            *(mistake for part in range(3) for mistake in _states(part)),
            _flight(
                lambda layout, stage: layout.micro_batches,
                "You keep all micro-batches of a step, as GPipe does; with 1F1B a stage gives them back one by one, "
                "and keeps as many as there are stages from itself to the end.",
                "Vous gardez tous les micro-batches du pas, comme GPipe ; avec 1F1B, un étage les rend un à un et n’en "
                "garde pas plus qu’il n’y a d’étages de lui-même à la fin.",
            ),
            _flight(
                lambda layout, stage: min(layout.pp, layout.micro_batches),
                "You let every stage keep as much as the first: the nearer to the end, the sooner the gradient comes "
                "back.",
                "Vous faites garder à chaque étage autant qu’au premier : plus on est près de la fin, plus vite "
                "revient le gradient.",
            ),
            _flight(
                lambda layout, stage: min(stage + 1, layout.micro_batches),
                "You count from the wrong end: the first stage waits longest for its gradients, and keeps most.",
                "Vous comptez depuis le mauvais bout : c’est le premier étage qui attend le plus longtemps ses "
                "gradients, et qui garde le plus.",
            ),
            _flight(
                lambda layout, stage: min(layout.pp - stage - 1, layout.micro_batches),
                "One micro-batch too few: the last stage, too, keeps the one that it is computing.",
                "Il manque un micro-batch : même le dernier étage garde celui qu’il est en train de calculer.",
            ),
            _flight(
                lambda layout, stage: layout.pp - stage,
                "Right as long as there are enough micro-batches; a step that has fewer than pp − stage cannot keep "
                "more than it has.",
                "C’est juste tant qu’il y a assez de micro-batches ; un pas qui en a moins de pp − stage ne peut pas "
                "en garder plus qu’il n’en a.",
            ),
            _flight(
                lambda layout, stage: 1,
                "You keep a single micro-batch; under 1F1B several are under way at once.",
                "Vous ne gardez qu’un micro-batch ; avec 1F1B, plusieurs sont en cours à la fois.",
            ),
            _flight(
                lambda layout, stage: min(layout.pp - stage, layout.micro_batches) / layout.tp,
                "micro_batch_bytes is already what one rank keeps: do not divide it by tp again.",
                "micro_batch_bytes est déjà ce que garde un seul rang : ne le divisez pas encore par tp.",
            ),
        ),
    ),
    praise=Said(
        "Right: states by ZeRO's stage, activations by the place in the pipeline. The first stage decides whether a "
        "layout fits.",
        "Exact : les états d’après le niveau de ZeRO, les activations d’après la place dans le pipeline. C’est le "
        "premier étage qui décide si une configuration tient.",
    ),
    hints=(
        Said(
            "Four products. Which of 2, 4 and 12 bytes per parameter does each ZeRO stage divide by dp? And how many "
            "micro-batches has stage `stage` begun when its first gradient comes back?",
            "Quatre produits. Lesquels des 2, 4 et 12 octets par paramètre chaque niveau de ZeRO divise-t-il par dp ? "
            "Et combien de micro-batches l’étage `stage` a-t-il commencés quand lui revient son premier gradient ?",
        ),
        Said(
            "With own = parameters / layout.tp: 2·own (÷ dp if zero ≥ 3), 4·own (÷ dp if zero ≥ 2), 12·own (÷ dp if "
            "zero ≥ 1), and micro_batch_bytes · min(pp − stage, micro_batches).",
            "Avec own = parameters / layout.tp : 2·own (÷ dp si zero ≥ 3), 4·own (÷ dp si zero ≥ 2), 12·own (÷ dp si "
            "zero ≥ 1), et micro_batch_bytes · min(pp − stage, micro_batches).",
        ),
    ),
)
