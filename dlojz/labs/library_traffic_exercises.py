"""Lab 12: what a library keeps whole, read off the messages of one step.

Layer 6 (labs). Invariant: the messages are those that the package predicts, and counts, for real layouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from dlojz.config import RunConfig
from dlojz.footprint import Footprint
from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.verdict import Said
from dlojz.text import say

Messages = Mapping[str, int]

CASES: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("DDP", {"engine": "torch"}, 0),
    ("DeepSpeed, stage 2", {"engine": "deepspeed", "zero": 2}, 2),
    ("FSDP2", {"engine": "torch", "zero": 3}, 3),
    ("DeepSpeed, stage 0", {"engine": "deepspeed", "zero": 0, "micro_batches": 2}, 0),
    ("DeepSpeed, stage 3", {"engine": "deepspeed", "zero": 3, "micro_batches": 2}, 3),
    ("ZeRO-1", {"engine": "by_hand", "zero": 1}, 2),
    ("ZeRO-2", {"engine": "by_hand", "zero": 2, "micro_batches": 4}, 2),
    ("DeepSpeed, stage 1", {"engine": "deepspeed", "zero": 1, "dp": 3}, 2),
)
"""Names, layouts of gpt_tiny, and what is to be found: stage 0, 2 for 1 or 2, 3."""


def messages_of(footprint: Footprint) -> dict[str, int]:
    """Bytes of the messages of one step by collective, of all groups, as a probe would count them."""
    found: dict[str, int] = defaultdict(int)
    for one in footprint.communication:
        found[one.collective] += one.message_bytes
    return dict(found)


def stage(messages: Messages, weight_bytes: int) -> int:
    """0 where no weights travel, 2 where they are gathered once per step (stages 1 and 2), 3 where more often.

    Args:
        messages: bytes of one step by collective.
        weight_bytes: of the whole model.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §7: stages 1 and 2 gather the updated weights once; stage 3
    gathers them for forward and again for backward.
    """
    gathered = messages.get("all_gather", 0) / weight_bytes
    if gathered < 0.5:
        return 0
    return 2 if gathered < 1.5 else 3


def cases() -> list[tuple[str, dict[str, int], int, int]]:
    """Name, messages, bytes of the weights and stage of each layout."""
    from dlojz import models
    from dlojz.predict import predict

    weight_bytes = 4 * models.describe("gpt_tiny").parameters
    return [
        (
            name,
            messages_of(predict(RunConfig.of(**{"model": "gpt_tiny", "dp": 2, **layout}))),
            weight_bytes,
            right,
        )
        for name, layout, right in CASES
    ]


def _judge(answer: Callable[..., Any]) -> None:
    for _, messages, weight_bytes, right in cases():
        given = answer(dict(messages), weight_bytes)
        if given is None:
            raise Wrong(
                say(
                    en="Your function returns nothing for some of the steps: every way through it ends with return.",
                    fr="Votre fonction ne renvoie rien pour certains pas : chacun de ses chemins finit par return.",
                )
            )
        if isinstance(given, bool) or given not in (0, 2, 3):
            raise Wrong(
                say(
                    en=f"Your function returns {given!r}; 0, 2 (for stages 1 and 2) or 3 is expected.",
                    fr=f"Votre fonction renvoie {given!r} ; on attend 0, 2 (pour les stages 1 et 2) ou 3.",
                )
            )
        if given != right:
            raise Wrong(_told(messages, weight_bytes) + str(_why(given, right, messages)))


def _told(messages: Messages, weight_bytes: int) -> str:
    parts = ", ".join(f"{name} {size / weight_bytes:.3g} Ψ" for name, size in messages.items())
    return say(
        en=f"In a step with {parts} (Ψ: the bytes of the weights): ",
        fr=f"Pour un pas avec {parts.replace('.', ',')} (Ψ : les octets des poids) : ",
    )


def _why(given: int, right: int, messages: Messages) -> Said:
    if right == 0:
        return Said(
            "the weights never travel, since every rank has them all: nothing is sharded, whatever the number of bytes "
            "of the all-reduce.",
            "les poids ne voyagent jamais, car chaque rang les a tous : rien n’est réparti, quel que soit le nombre "
            "d’octets de l’all-reduce.",
        )
    if right == 2 and given == 3:
        return Said(
            "the weights are gathered once, after the update: between the steps every rank keeps them whole. Stage 3 "
            "gathers them for forward, and again for backward.",
            "les poids sont rassemblés une fois, après la mise à jour : entre les pas, chaque rang les garde entiers. "
            "Le stage 3 les rassemble pour la passe avant, puis pour la passe arrière.",
        )
    if right == 2 and "reduce_scatter" not in messages:
        return Said(
            "the gradients leave by all-reduce, but weights are gathered too, once: DeepSpeed updates shares although "
            "it reduces everything (lab 04). Look at the all-gather.",
            "les gradients partent par all-reduce, mais les poids sont aussi rassemblés, une fois : DeepSpeed met à "
            "jour des parts bien qu’il réduise tout (TP 04). Regardez l’all-gather.",
        )
    if right == 2:
        return Said(
            "the weights are gathered once per step: each rank has updated its share of them.",
            "les poids sont rassemblés une fois par pas : chaque rang en a mis à jour sa part.",
        )
    return Said(
        "the weights are gathered at least twice per step, for forward and for backward: no rank keeps them whole. "
        "(With several micro-batches, more often still; padding adds a little.)",
        "les poids sont rassemblés au moins deux fois par pas, pour la passe avant et pour la passe arrière : aucun "
        "rang ne les garde entiers. (Avec plusieurs micro-batches, davantage encore ; le remplissage ajoute un peu.)",
    )


READ_TRAFFIC = Exercise(
    id="read-traffic",
    title=Said("read the messages of a step", "lire les messages d’un pas"),
    judge=_judge,
    praise=Said(
        "Right: eight layouts of four programs, told apart by their messages alone.",
        "Exact : huit répartitions, reconnues à leurs seuls messages.",
    ),
    hints=(
        Said(
            "Gradients have to be reduced in any case. What tells the stages apart is how often the weights travel.",
            "Les gradients doivent être réduits dans tous les cas. Ce qui distingue les stages, c’est combien de fois "
            "les poids voyagent.",
        ),
        Said(
            "gathered = messages.get('all_gather', 0) / weight_bytes: about 0, about 1, or 2 and more. Leave room for "
            "padding and for small messages.",
            "gathered = messages.get('all_gather', 0) / weight_bytes : environ 0, environ 1, ou bien 2 et plus. "
            "Laissez de la marge pour le remplissage et les petits messages.",
        ),
    ),
)
