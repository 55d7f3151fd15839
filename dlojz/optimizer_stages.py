"""Optimizers that communicate themselves: their names, when they send what, and what cannot be asked of them.

Layer 1, loads no torch. Invariant: a run that exists has a first stage of at least one step, and a second of at least
one, or its replicas meet at least once; the optimizers themselves (`dlojz.optim`) refuse by the same sentences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dlojz.layout_gradients import powersgd_start
from dlojz.schema import LabError
from dlojz.text import say

if TYPE_CHECKING:
    from dlojz.config import RunConfig

COMPRESSED: Final = ("one_bit_adam", "one_bit_lamb", "zero_one_adam")
"""Optimizers that average over the ranks themselves: in full in the first stage, one bit per number in the second."""
LOCAL: Final = ("local_sgd", "diloco")
"""Optimizers whose replicas go several steps alone, then average their weights, or how far they have gone."""
COMMUNICATING: Final = (*COMPRESSED, *LOCAL)
"""All that average over the ranks themselves."""
LOCAL_STEPS: Final = 8
"""H where nothing is said, for short runs; DiLoCo's paper has 500 (Douillard et al. 2023, arXiv 2311.08105)."""
WARMUP_SHARE: Final = 4
"""One step in so many is of the first stage, where nothing is said: 15 to 25 % is the advice.

Source: DeepSpeed's tutorial on 1-bit Adam, `freeze_step`."""

SETTLING_STEPS: Final = 2
"""The first step makes the optimizer's states, the second lets DDP and DeepSpeed settle their buckets."""


def default_warmup_steps(steps: int) -> int:
    """Steps of the first stage, where nothing is said."""
    return max(1, steps // WARMUP_SHARE)


def default_local_steps(steps: int) -> int:
    """Steps that each replica takes alone, where nothing is said."""
    return min(LOCAL_STEPS, steps)


def fill_in_stages(filled: dict[str, Any], steps: int) -> None:
    """Put how long the stages last, or how far replicas go alone, where nothing was given."""
    if filled.get("optimizer") in COMPRESSED and filled.get("warmup_steps") is None:
        filled["warmup_steps"] = default_warmup_steps(steps)
    if filled.get("optimizer") in LOCAL and filled.get("local_steps") is None:
        filled["local_steps"] = default_local_steps(steps)


def meets(step: int, local_steps: int, warmup_steps: int = 0, total_steps: int | None = None) -> bool:
    """Whether the replicas meet after a step, numbered from 0: after every H-th one behind the warm-up, and at the end.

    Args:
        step: in question.
        local_steps: H, at least 1.
        warmup_steps: steps of the first stage, in which gradients are averaged; all replicas hold the same weights.
        total_steps: steps of the run, where they are known.

    Source: Stich 2018 (arXiv 1805.09767), algorithm 1, with synchronisation times H apart; Lin et al. 2018 (arXiv
    1808.07217) for the warm-up, "post-local SGD".
    """
    if step + 1 == total_steps:
        return True
    return step >= warmup_steps and (step + 1 - warmup_steps) % local_steps == 0


def sending_interval(config: RunConfig) -> int:
    """One step in so many sends something along the data axis: H where replicas go alone, else 1."""
    return config.local_steps or 1


def settled_step(config: RunConfig, first_step: int = 0, *, at_least: int = 0) -> int:
    """A step that sends what all later ones send, those aside in which replicas go alone; numbered from 0.

    It is the third of the run (of the attempt, where it goes on from a checkpoint), the second of the second stage, or
    one after which the replicas meet.

    Args:
        config: the run.
        first_step: of the attempt.
        at_least: the first step that counts for other reasons.
    """
    last, step = config.steps - 1, max(first_step + SETTLING_STEPS, at_least)
    if config.optimizer in LOCAL:
        warmup_steps = config.warmup_steps or 0
        step = max(step, warmup_steps)
        while step < last and not meets(step, config.local_steps or 1, warmup_steps, config.steps):
            step += 1
    elif config.layout.gradient_compression == "powersgd":
        step = max(step, first_step + powersgd_start(config.steps) + 1)
    else:
        step = max(step, (config.warmup_steps or 0) + 1)
    return min(step, last)


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
                f"pas : prenez au plus {most}, ou davantage de pas ; 15 à 25 % de l’entraînement est l’usage.",
            )
        )


def check_local_steps(local_steps: int, total_steps: int | None) -> None:
    """Refuse replicas that would not meet before the end of the run.

    Raises:
        LabError: in one sentence.
    """
    if local_steps < 1:
        raise LabError(
            say(
                en=f"local_steps must be at least 1, but {local_steps} was received: it is the steps from one meeting "
                "of the replicas to the next.",
                fr=f"local_steps doit valoir au moins 1, mais {local_steps} a été reçu : ce sont les pas d’une "
                "rencontre des répliques à la suivante.",
            )
        )
    if total_steps is not None and local_steps > total_steps:
        raise LabError(
            say(
                en=f"local_steps={local_steps} is longer than the run of {total_steps} steps: use at most "
                f"{total_steps}, or more steps.",
                fr=f"local_steps={local_steps} dépasse l’entraînement de {total_steps} pas : prenez au plus "
                f"{total_steps}, ou davantage de pas.",
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


def goes_alone(name: str) -> str:
    """What is said where a replica has no other to meet."""
    outer = name.lower() == "diloco"
    return say(
        en=f"{name} has one process: it sends nothing, so averaging does nothing"
        + (", and the outer step alone remains" if outer else "")
        + "; use two processes or more.",
        fr=f"{name} n’a qu’un processus : il n’envoie rien, donc moyenner ne fait rien"
        + (", et seul le pas extérieur reste" if outer else "")
        + " ; prenez deux processus ou plus.",
    )


def left_behind(name: str, kept: int, ranks: int) -> str:
    """What is said where a run goes on with another number of ranks than the checkpoint is of."""
    if name in LOCAL:
        en = f"with dp={ranks} every replica goes on from what the first of {kept} had, as if they had just met"
        fr = f"avec dp={ranks}, chaque réplique repart de l’état de la première de {kept}, comme si toutes venaient de "
        fr += "se rencontrer"
    else:
        en = f"the errors held back by {kept} ranks are dropped, and with dp={ranks} compression begins with none"
        fr = f"les erreurs retenues par {kept} rangs sont abandonnées, et avec dp={ranks} la compression repart sans"
    return say(en=f"{name}: {en}.", fr=f"{name} : {fr}.")


def optimizer_misfit(config: RunConfig) -> str | None:
    """Why a run's optimizer does not go with the rest of it and what would work; None where it does.

    Raises:
        LabError: if its stages cannot be.
    """
    layout, name = config.layout, config.optimizer
    if config.warmup_steps is not None and name not in (staged := (*COMPRESSED, "local_sgd")):
        return say(
            en=f"warmup_steps={config.warmup_steps} was received, but {name} has no first stage: use it with "
            f"{', '.join(staged)}, or leave it out.",
            fr=f"warmup_steps={config.warmup_steps} a été reçu, mais {name} n’a pas de première phase : prenez-le avec "
            f"{', '.join(staged)}, ou retirez-le.",
        )
    if config.local_steps is not None and name not in LOCAL:
        return say(
            en=f"local_steps={config.local_steps} was received, but the replicas of {name} meet in every step: use it "
            f"with {', '.join(LOCAL)}, or leave it out.",
            fr=f"local_steps={config.local_steps} a été reçu, mais les répliques de {name} se rencontrent à chaque "
            f"pas : prenez-le avec {', '.join(LOCAL)}, ou retirez-le.",
        )
    if name not in COMMUNICATING:
        return None
    if layout.strategy != "by_hand" or max(layout.tp, layout.pp, layout.ep) > 1:
        return say(
            en=f"optimizer={name!r} averages over the ranks itself, so that nothing else may, but {layout.title} was "
            "received: use engine='by_hand', zero=0, tp=1, pp=1, ep=1.",
            fr=f"optimizer={name!r} moyenne lui-même entre les rangs, donc rien d’autre ne doit le faire, mais "
            f"{layout.title} a été reçu : prenez engine='by_hand', zero=0, tp=1, pp=1, ep=1.",
        )
    if name in LOCAL:
        check_local_steps(config.local_steps or 0, config.steps)
        if config.warmup_steps:
            check_stages(config.warmup_steps, config.steps)
    else:
        check_stages(config.warmup_steps or 0, config.steps)
    return None
