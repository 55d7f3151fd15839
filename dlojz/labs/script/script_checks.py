"""Checks that the scripts of several labs share: they learn, read the right samples, and train as one process does.

A layout is compared with one process of the same script: the same losses, of the same samples. A cause is told where
what the ranks report shows it; otherwise the sentence says what differs.
"""

from __future__ import annotations

import itertools
import math

from dlojz.base.language import integer, percent, significant
from dlojz.labs.kit.exercise import Said, Wrong
from dlojz.labs.script.script_trials import BATCH
from dlojz.libraries.scripts.rank_report import Trial
from dlojz.libraries.scripts.script_parity import (
    SHARED_SAMPLES,
    check_averaged,
    check_group,
    check_orders,
    check_saves,
    check_shares,
    check_trained_alike,
)

SAME_PRINTED = 1.3
"""Factor by which the loss that a rank prints, of the samples it reads, may differ from the mean of all ranks."""


def check_learns(trial: Trial, factor: float) -> None:
    """Refuse a run whose last loss is more than so many times the first."""
    losses = trial.record.losses
    if not losses or not all(map(math.isfinite, losses)):
        raise Wrong(
            en="No loss could be seen, or it is not finite: call backward() on a loss that is one number.",
            fr="Aucune perte n’a été vue, ou elle n’est pas finie : appelez backward() sur une perte qui soit un seul "
            "nombre.",
        )
    if losses[-1] > factor * losses[0]:
        raise Wrong(
            en=f"The loss does not fall ({significant(losses[0], 4)} at the first step, {significant(losses[-1], 4)} "
            "at the last one): look at zero_grad, the learning rate, and whether optimizer.step is called after "
            "backward.",
            fr=f"La perte ne baisse pas ({significant(losses[0], 4)} au premier pas, {significant(losses[-1], 4)} au "
            "dernier) : regardez zero_grad, le taux d’apprentissage, et si optimizer.step est appelé après backward.",
        )


def check_printed(trial: Trial) -> None:
    """Refuse a script that prints a loss of each step which is not that of the step."""
    for printed in trial.printed:
        # Only a script that prints one loss per step can be compared.
        if len(printed) != len(trial.record.losses):
            continue
        for step, (printed_loss, loss) in enumerate(zip(printed, trial.record.losses, strict=True), start=1):
            if not loss / SAME_PRINTED < printed_loss < loss * SAME_PRINTED:
                pair = significant(printed_loss, 4), significant(loss, 4)
                raise Wrong(
                    en=f"With {trial.title}, your script prints the loss {pair[0]} at step {step}, and {pair[1]} was "
                    "measured: add up the losses of a step's micro-batches, each divided by their number, and begin at "
                    "zero for the next step.",
                    fr=f"Avec {trial.title}, votre script affiche la perte {pair[0]} au pas {step}, alors que la perte "
                    f"mesurée est {pair[1]} : additionnez les pertes des micro-batches d’un pas, chacune divisée par "
                    "leur nombre, et repartez de zéro au pas suivant.",
                )


def check_samples(base: Trial, many: Trial, replicas: int) -> None:
    """Refuse replicas that read the same samples, too many of them, or each epoch in one order."""
    check_shares(many, replicas)
    steps = [len(trial.record.losses) for trial in (base, many)]
    if steps[0] != steps[1]:
        en = f"Two epochs are {steps[0]} steps with {base.title}, and {steps[1]} with {many.title}: "
        fr = f"Deux époques font {steps[0]} pas avec {base.title}, et {steps[1]} avec {many.title} : "
        # Samples of a step, if every replica reads as many as rank 0.
        samples_per_step = replicas * sum(map(len, many.ranks[0].epochs)) / max(steps[1], 1)
        if math.isclose(samples_per_step, BATCH, rel_tol=SHARED_SAMPLES) and steps[1] < steps[0]:
            raise Wrong(
                en=f"{en}each reads --batch samples, so samples are left out: only those that fill no whole step are.",
                fr=f"{fr}chacun lit bien --batch échantillons, c’est donc que des échantillons sont laissés de côté : "
                "seuls le sont ceux qui ne remplissent pas un pas.",
            )
        on_average = Said(
            f", and reads {integer(samples_per_step)} on average", f", et en lit {integer(samples_per_step)} en moyenne"
        )
        reads = on_average if samples_per_step else Said("", "")  # a script may read without a DataLoader
        raise Wrong(
            en=f"{en}a step is to read --batch samples, {BATCH} here, of all replicas and micro-batches "
            f"together{reads.en}; those left over are dropped, by the sampler and by the DataLoader "
            "(drop_last=True).",
            fr=f"{fr}un pas doit lire --batch échantillons, ici {BATCH}, toutes répliques et tous micro-batches "
            f"réunis{reads.fr} ; ceux qui restent sont écartés, par l’échantillonneur et "
            "par le DataLoader (drop_last=True).",
        )
    for trial in (base, many):
        check_orders(trial)


def check_parity(base: Trial, many: Trial, replicas: int) -> None:
    """Refuse a layout that does not train as one process does, with the cause where it is seen."""
    check_group(many)
    check_samples(base, many, replicas)
    # Each rank is a replica: then all of them must average with all.
    if replicas == len(many.ranks):
        check_averaged(many)
    check_trained_alike(base, many, are_same=_same_samples(base, many, replicas))
    check_saves(many)


def _same_samples(base: Trial, many: Trial, replicas: int) -> bool:
    """Whether the first step of both reads the same samples."""
    # A tuple for each replica: the samples of its first step; ranks of one replica give the same tuple.
    shares = {rank.epochs[0][: BATCH // replicas] for rank in many.ranks if rank.epochs}
    return bool(base.ranks[0].epochs) and sorted(itertools.chain.from_iterable(shares)) == sorted(
        base.ranks[0].epochs[0][:BATCH]
    )


def check_shards(base: Trial, many: Trial, max_share: float, en: str, fr: str) -> None:
    """Refuse ranks that hold more than a share of the parameters, or that have lost some of them."""
    total = base.ranks[0].held
    sizes = [rank.held for rank in many.ranks]
    if max(sizes) > max_share * total:
        raise Wrong(
            en=f"With {many.title}, a rank holds {percent(max(sizes) / total)} of the parameters: {en}",
            fr=f"Avec {many.title}, un rang détient {percent(max(sizes) / total)} des paramètres : {fr}",
        )
    if sum(sizes) < total:
        raise Wrong(
            en=f"With {many.title}, the ranks hold {percent(sum(sizes) / total)} of the parameters together: a part of "
            "the model is lost.",
            fr=f"Avec {many.title}, les rangs détiennent ensemble {percent(sum(sizes) / total)} des paramètres : une "
            "partie du modèle est perdue.",
        )
