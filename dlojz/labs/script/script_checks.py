"""Checks that the scripts of several labs share: they learn, read the right samples, and train as one process does.

A layout is compared with one process of the same script: the same losses, of the same samples. A cause is told where
what the ranks report shows it; otherwise the sentence says what differs.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dlojz.base.language import integer, percent, significant
from dlojz.labs.kit.exercise import Said, Sentences, Wrong
from dlojz.labs.script.script_trials import BATCH, RankReport, Trial

TEXTS = Sentences(Path(__file__).with_suffix(".md"))

SAME_LOSS = 1e-3
"""Relative distance of losses that differ by the order of additions alone."""
SAME_GRADIENTS = 0.02
"""The same of the norm of gradients."""
SAME_ON_ONE = 1e-5
"""The same, where a script runs twice on one process."""
SAME_PRINTED = 1.3
"""Factor by which the loss that a rank prints, of the samples it reads, may differ from the mean of all ranks."""
SHARED_SAMPLES = 0.1
"""Share of a rank's samples that others read, from which on it is no chance: images may be there twice."""


DIVIDED = TEXTS.sentence("checks", "divided wrongly")
CLIPPED = TEXTS.sentence("checks", "clipped by DeepSpeed")
NOT_DIVIDED = TEXTS.sentence("checks", "no whole factor")


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


def differing_step(reference: Sequence[float], second: Sequence[float], tolerance: float) -> int | None:
    """Find the first step whose losses differ; None where all are the same."""
    # strict=False: of runs of different length, the steps that both have.
    pairs = zip(reference, second, strict=False)
    return next((step for step, (a, b) in enumerate(pairs) if not math.isclose(a, b, rel_tol=tolerance)), None)


def check_losses(base: Trial, peer: Trial, tolerance: float, cause: Said, *, steps: int | None = None) -> None:
    """Refuse a run whose losses are not those of another one; the sentence ends with a likely cause."""
    step = differing_step(base.record.losses[:steps], peer.record.losses[:steps], tolerance)
    if step is not None:
        pair = [significant(trial.record.losses[step], 5) for trial in (base, peer)]
        raise TEXTS.wrong(
            "checks",
            "losses differ between runs",
            step=step + 1,
            first=pair[0],
            base_title=base.title,
            second=pair[1],
            peer_title=peer.title,
            cause=cause,
        )


def check_group(trial: Trial) -> None:
    """Refuse processes of which each trains alone."""
    if any(rank.group_size != len(trial.ranks) for rank in trial.ranks):
        raise TEXTS.wrong("checks", "no process group", title=trial.title)


def check_samples(base: Trial, many: Trial, replicas: int) -> None:
    """Refuse replicas that read the same samples, too many of them, or each epoch in one order."""
    # Ranks that share a replica read the same samples, so there is one set for each replica.
    shares = {frozenset(rank.epochs[0]) for rank in many.ranks if rank.epochs and rank.epochs[0]}
    if len(shares) > replicas:
        raise Wrong(
            en=f"With {many.title}, the ranks read {len(shares)} different shares of the samples, but the model has "
            f"{replicas} replica{'s' if replicas > 1 else ''}. Ranks that share one model read the same samples: give "
            "DistributedSampler the number of replicas, and the index of this one.",
            fr=f"Avec {many.title}, les rangs lisent {len(shares)} parts différentes des échantillons, mais le modèle "
            f"a {'une seule réplique' if replicas == 1 else f'{replicas} répliques'}. Des rangs qui se partagent un "
            "modèle lisent les mêmes échantillons : donnez à DistributedSampler le nombre de répliques, et l’indice de "
            "celle-ci.",
        )
    pairs = itertools.combinations(shares, 2)
    if 0 < len(shares) < replicas or any(len(a & b) > SHARED_SAMPLES * len(a) for a, b in pairs):
        raise TEXTS.wrong("checks", "replicas read the same samples", title=many.title)
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
        for rank, report in enumerate(trial.ranks):
            if len(report.epochs) > 1 and report.epochs[0] and report.epochs[0] == report.epochs[1]:
                cause = _same_order(report)
                raise TEXTS.wrong(
                    "checks",
                    "the same order in both epochs",
                    title=trial.title,
                    rank=rank,
                    cause=cause,
                )


def _same_order(report: RankReport) -> Said:
    """Why a rank reads its samples in one order, as far as it was seen."""
    if report.unshuffled and report.set_epochs:
        return TEXTS.sentence("checks", "no shuffle, set_epoch is called")
    if report.unshuffled:
        return TEXTS.sentence("checks", "no shuffle")
    if report.set_epochs:
        return TEXTS.sentence("checks", "set_epoch without effect")
    return TEXTS.sentence("checks", "no set_epoch")


def check_saves(trial: Trial) -> None:
    """Refuse ranks that write the same file."""
    # Real paths: links and relative names of one file are the same here.
    writers = Counter(path for report in trial.ranks for path in set(report.saved))
    for path, count in writers.items():
        if count > 1:
            raise TEXTS.wrong("checks", "several ranks write one file", name=Path(path).name)


def check_parity(base: Trial, many: Trial, replicas: int) -> None:
    """Refuse a layout that does not train as one process does, with the cause where it is seen."""
    check_group(many)
    check_samples(base, many, replicas)
    # Each rank is a replica: then all of them must average with all.
    if replicas == len(many.ranks):
        check_averaged(many)
    first_losses = [abs(loss) for trial in (base, many) for loss in trial.record.losses[:1]]
    times = max(first_losses) / min(first_losses) if first_losses and min(first_losses) > 0 else 1.0
    # A whole factor: a loss that is summed over ranks or micro-batches, or divided once too often.
    is_whole = round(times) > 1 and math.isclose(times, round(times), rel_tol=SAME_LOSS)
    cause = DIVIDED if is_whole else _first_loss(base, many)
    check_losses(base, many, SAME_LOSS, cause, steps=1)
    check_gradients(base, many)
    together = _same_samples(base, many, replicas)
    key = "the same samples, averaged otherwise" if together else "samples or averages differ"
    check_losses(base, many, SAME_LOSS, TEXTS.sentence("checks", key))
    check_saves(many)


def _first_loss(base: Trial, many: Trial) -> Said:
    """Why the first loss differs, as far as the weights before the first step tell."""
    begun = [rank.begun_with for rank in many.ranks]
    if any(rank.plain < rank.held for rank in many.ranks):  # shards: their squares say nothing of whole parameters
        return TEXTS.sentence("checks", "weights, computation or samples differ")
    baseline_squares = base.ranks[0].begun_with
    # As many parameters on each rank as on one process: copies; else parts, joined in the order of the ranks.
    copies = all(len(squares) == len(baseline_squares) for squares in begun)
    rank_squares = begun[0] if copies else tuple(itertools.chain.from_iterable(begun))
    if _close(rank_squares, baseline_squares) and (
        not copies or all(_close(squares, baseline_squares) for squares in begun)
    ):
        return TEXTS.sentence("checks", "forward computes something else")
    if not copies and _close(sorted(rank_squares), sorted(baseline_squares)):
        return TEXTS.sentence("checks", "ranks in another order")
    return TEXTS.sentence("checks", "weights differ before the first step")


def _close(values: Sequence[float], references: Sequence[float]) -> bool:
    return len(values) == len(references) and all(
        math.isclose(a, b, rel_tol=SAME_ON_ONE, abs_tol=1e-12) for a, b in zip(values, references, strict=True)
    )


def _same_samples(base: Trial, many: Trial, replicas: int) -> bool:
    """Whether the first step of both reads the same samples."""
    # A tuple for each replica: the samples of its first step; ranks of one replica give the same tuple.
    shares = {rank.epochs[0][: BATCH // replicas] for rank in many.ranks if rank.epochs}
    return bool(base.ranks[0].epochs) and sorted(itertools.chain.from_iterable(shares)) == sorted(
        base.ranks[0].epochs[0][:BATCH]
    )


def check_gradients(base: Trial, many: Trial, cause: Said = DIVIDED) -> None:
    """Refuse gradients of the first step that are not as large; Adam would hide it.

    On a mesh of two axes, some ranks hold the same parts and others do not: they are not compared.
    """
    if any(rank.mesh_axes > 1 for rank in many.ranks):
        return
    squares, baseline_squares = _gradients(many), _gradients(base)
    # Squares add up over parameters and parts; the ratio of the norms is the root of theirs.
    ratio = math.sqrt(squares / baseline_squares) if baseline_squares else 1.0
    if not math.isclose(ratio, 1.0, rel_tol=SAME_GRADIENTS):
        times = significant(ratio, 3)
        factor = max(ratio, 1 / ratio) if ratio else 0.0
        if cause is DIVIDED and math.isclose(squares, 1.0, rel_tol=SAME_GRADIENTS) and ratio < 1:
            cause = CLIPPED  # no other mistake leaves a norm of just 1
        elif cause is DIVIDED and not math.isclose(factor, round(factor), rel_tol=SAME_GRADIENTS):
            cause = NOT_DIVIDED
        raise TEXTS.wrong(
            "checks",
            "gradients of the first step differ",
            times=times,
            title=many.title,
            base_title=base.title,
            cause=cause,
        )


def _gradients(trial: Trial) -> float:
    """Add up the squares of the gradients: once where all ranks hold the same, of each rank where they hold parts."""
    by_rank = [rank.gradients for rank in trial.ranks]
    # Other parameters on each rank: stages, whose squares are added.
    if len({len(rank_squares) for rank_squares in by_rank}) > 1:
        return math.fsum(itertools.chain.from_iterable(by_rank))
    # The same parameters: copies where the squares of all ranks agree, else parts.
    agreement = (
        math.isclose(min(squares), max(squares), rel_tol=SAME_ON_ONE) for squares in zip(*by_rank, strict=True)
    )
    return math.fsum(
        squares[0] if agrees else math.fsum(squares)
        for agrees, squares in zip(agreement, zip(*by_rank, strict=True), strict=True)
    )


def check_averaged(many: Trial) -> None:
    """Refuse replicas that average no gradients."""
    report = many.ranks[0]
    if not many.sent_bytes:
        if report.ddp and not report.ddp_calls:
            raise TEXTS.wrong("checks", "the model inside is called", title=many.title)
        if report.ddp and not report.ddp_synced:
            raise TEXTS.wrong("checks", "every pass under no_sync", title=many.title)
        if report.ddp:
            raise TEXTS.wrong("checks", "backward past DistributedDataParallel", title=many.title)
        raise TEXTS.wrong("checks", "no rank sends a gradient", title=many.title)
    if report.ddp and len({rank.weights for rank in many.ranks}) > 1:
        raise TEXTS.wrong("checks", "different weights at the end", title=many.title)


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
