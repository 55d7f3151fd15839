"""What each mixture of a model did with its tokens, step by step, for a loop written by hand.

Layer 0, loads torch when it is called. Invariant: plain numbers, under the names that a run's record has them
(`dlojz.record.ExpertLoad`), so that one figure draws both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlojz.schema import LabError
from dlojz.text import say

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class StepLoad:
    """What one mixture did with the tokens of one forward pass, on this rank.

    Args:
        step: from 0.
        layer: name of the mixture in its model.
        tokens: choices that each expert has got, before its capacity cuts them.
        capacity: choices that each expert could take.
        dropped: share of all choices that found their expert full, from 0 to 1.
        balance: the balance loss without its weight, from about 1 (balanced) to the number of experts (collapsed).
    """

    step: int
    layer: str
    tokens: tuple[int, ...]
    capacity: int
    dropped: float
    balance: float


def watch_loads(model: nn.Module, step: int) -> list[StepLoad]:
    """What the last forward pass of each mixture did, in the order of the model; to be called once a step.

    Example:
        history += watch_loads(model, step)

    Raises:
        LabError: if the model has no mixture, or has not been run since it was built.
    """
    from dlojz.moe.parallel import mixtures

    found = [(name, layer.last) for name, layer in mixtures(model)]
    loads = [
        StepLoad(
            step=step,
            layer=name,
            tokens=tuple(last.tokens_E.tolist()),
            capacity=last.capacity,
            dropped=float(last.dropped_share),
            balance=float(last.balance),
        )
        for name, last in found
        if last is not None
    ]
    if not loads or len(loads) < len(found):
        raise LabError(
            say(
                en="the model has no mixture of experts that has been run: watch a model such as moe_tiny, after its "
                "forward pass.",
                fr="le modèle n’a pas de mélange d’experts qui ait été exécuté : observez un modèle comme moe_tiny, "
                "après sa passe avant.",
            )
        )
    return loads
