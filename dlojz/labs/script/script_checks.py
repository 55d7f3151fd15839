"""Checks that the scripts of several labs share: they learn, read the right samples, and train as one process does.

A layout is compared with one process of the same script: the same losses, of the same samples. A cause is told where
what the ranks report shows it; otherwise the sentence says what differs.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

from dlojz.base.language import integer, percent, significant
from dlojz.labs.kit.exercise import Said, Sentences
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

TEXTS = Sentences(Path(__file__).with_suffix(".md"))

SAME_PRINTED = 1.3
"""Factor by which the loss that a rank prints, of the samples it reads, may differ from the mean of all ranks."""


def check_learns(trial: Trial, factor: float) -> None:
    """Refuse a run whose last loss is more than so many times the first."""
    losses = trial.record.losses
    if not losses or not all(map(math.isfinite, losses)):
        raise TEXTS.wrong("checks", "no finite loss")
    if losses[-1] > factor * losses[0]:
        raise TEXTS.wrong(
            "checks",
            "the loss does not fall",
            first_loss=significant(losses[0], 4),
            last_loss=significant(losses[-1], 4),
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
                raise TEXTS.wrong(
                    "checks", "another loss is printed", title=trial.title, first=pair[0], step=step, second=pair[1]
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
            raise TEXTS.wrong("checks", "samples are left out", en=en, fr=fr)
        on_average = TEXTS.sentence("checks", "mean samples of a step", samples_per_step=integer(samples_per_step))
        reads = on_average if samples_per_step else Said("", "")  # a script may read without a DataLoader
        raise TEXTS.wrong(
            "checks",
            "another number of samples per step",
            en=en,
            BATCH=BATCH,
            reads=reads,
            fr=fr,
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


def check_shards(base: Trial, many: Trial, max_share: float, cause: Said) -> None:
    """Refuse ranks that hold more than a share of the parameters, or that have lost some of them."""
    total = base.ranks[0].held
    sizes = [rank.held for rank in many.ranks]
    if max(sizes) > max_share * total:
        raise TEXTS.wrong(
            "checks",
            "another share of the parameters",
            title=many.title,
            share=percent(max(sizes) / total),
            cause=cause,
        )
    if sum(sizes) < total:
        raise TEXTS.wrong("checks", "a part of the model is lost", title=many.title, share=percent(sum(sizes) / total))
