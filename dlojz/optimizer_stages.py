"""Optimizers that communicate themselves, in two stages: their names, and what cannot be asked of them.

Layer 1, loads no torch. Invariant: a run that exists has a first stage of at least one step, and a second of at least
one; the optimizers themselves (`dlojz.optim`) refuse by the same sentences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dlojz.schema import LabError
from dlojz.text import say

if TYPE_CHECKING:
    from dlojz.config import RunConfig

COMPRESSED: Final = ("one_bit_adam", "one_bit_lamb", "zero_one_adam")
"""Optimizers that average over the ranks themselves: in full in the first stage, one bit per number in the second."""
WARMUP_SHARE: Final = 4
"""One step in so many is of the first stage, where nothing is said: 15 to 25 % in the papers' trainings.

Source: Tang et al. 2021 (arXiv 2102.02888), §7: 23,000 of 152,000 steps of BERT-Large; DeepSpeed's tutorial on 1-bit
Adam, `freeze_step`."""


def default_warmup_steps(steps: int) -> int:
    """Steps of the first stage, where nothing is said."""
    return max(1, steps // WARMUP_SHARE)


def check_stages(warmup_steps: int, total_steps: int | None) -> None:
    """Refuse a first stage that is none, or that leaves no step to the second.

    Raises:
        LabError: in one sentence.
    """
    if warmup_steps < 1:
        raise LabError(
            say(
                en=f"warmup_steps must be at least 1, but {warmup_steps} was received: the variance by which the "
                "second stage divides is that of the first.",
                fr=f"warmup_steps doit valoir au moins 1, mais {warmup_steps} a été reçu : la variance par laquelle "
                "divise la seconde phase est celle de la première.",
            )
        )
    if total_steps is not None and warmup_steps >= total_steps:
        most = max(1, total_steps - 1)
        raise LabError(
            say(
                en=f"warmup_steps={warmup_steps} leaves nothing to compress in a run of {total_steps} steps: use at "
                f"most {most}, or more steps; 15 to 25 % of the run is usual.",
                fr=f"warmup_steps={warmup_steps} ne laisse rien à compresser dans un entraînement de {total_steps} "
                f"étapes : prenez au plus {most}, ou davantage d’étapes ; 15 à 25 % de l’entraînement est l’usage.",
            )
        )


def does_nothing(name: str) -> str:
    """What is said where there is nobody to send to."""
    return say(
        en=f"{name} has one process: it sends nothing, so compression does nothing but freeze the variance; use two "
        "processes or more.",
        fr=f"{name} n’a qu’un processus : il n’envoie rien, donc la compression ne fait rien d’autre que geler la "
        "variance ; prenez deux processus ou plus.",
    )


def optimizer_misfit(config: RunConfig) -> str | None:
    """Why a run's optimizer does not go with the rest of it and what would work; None where it does.

    Raises:
        LabError: if its stages cannot be.
    """
    layout, name = config.layout, config.optimizer
    if name not in COMPRESSED:
        if config.warmup_steps is None:
            return None
        return say(
            en=f"warmup_steps={config.warmup_steps} was received, but {name} has no first stage: use it with "
            f"{', '.join(COMPRESSED)}, or leave it out.",
            fr=f"warmup_steps={config.warmup_steps} a été reçu, mais {name} n’a pas de première phase : prenez-le avec "
            f"{', '.join(COMPRESSED)}, ou retirez-le.",
        )
    if layout.strategy != "by_hand" or layout.tp > 1 or layout.pp > 1:
        return say(
            en=f"optimizer={name!r} averages over the ranks itself, so that nothing else may, but {layout.title} was "
            "received: use engine='by_hand', zero=0, tp=1, pp=1.",
            fr=f"optimizer={name!r} moyenne lui-même entre les rangs, donc rien d’autre ne doit le faire, mais "
            f"{layout.title} a été reçu : prenez engine='by_hand', zero=0, tp=1, pp=1.",
        )
    check_stages(config.warmup_steps or 0, config.steps)
    return None
