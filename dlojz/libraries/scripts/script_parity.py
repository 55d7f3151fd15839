"""Compare processes of one script: what each rank read, averaged and holds, and where one process does otherwise.

`rank_observer.py` writes a report on each rank. The labs' judge asks for layouts by the options of its script; `parity`
takes any script: the ranks' batches, joined, are what one process of the same script then reads. A cause is named where
the reports show it; otherwise the sentence says what differs.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dlojz.base.language import Said, Wrong, integer, say, significant
from dlojz.base.table import Table
from dlojz.config.run_config import Observation
from dlojz.libraries.scripts.rank_report import COMPARED_STEPS, RankReport, Trial, title_of

SAME_LOSS = 1e-3
"""Relative distance of losses that differ by the order of additions alone."""
SAME_GRADIENTS = 0.02
"""The same of the norm of gradients."""
SAME_ON_ONE = 1e-5
"""The same, where a script runs twice on one process."""
SHARED_SAMPLES = 0.1
"""Share of a rank's samples that others read, from which on it is no chance: images may be there twice."""

DIVIDED = Said(
    "look at what each rank's loss is divided by, micro-batches included, and where gradients are averaged or only "
    "added up.",
    "regardez par quoi la perte de chaque rang est divisée, micro-batches compris, et où les gradients sont moyennés "
    "ou seulement additionnés.",
)
CLIPPED = Said(
    "their norm is 1, as clipping leaves it: DeepSpeed clips it at 1.0 unless its configuration says "
    '"gradient_clipping": 0.0.',
    "leur norme vaut 1, comme après un écrêtage : DeepSpeed l’écrête à 1,0, sauf si sa configuration dit "
    '"gradient_clipping": 0.0.',
)
NOT_DIVIDED = Said(
    "that is no whole factor, so not all of them are too large or too small by the number of ranks or micro-batches: "
    "some lack what other ranks contribute, or have it twice. Look at what backward sends, and to which layers.",
    "ce facteur n’est pas entier, ils ne sont donc pas tous trop grands ou trop petits du nombre de rangs ou de "
    "micro-batches : à certains, il manque la contribution d’autres rangs, ou elle y est deux fois. Regardez ce "
    "qu’envoie la passe arrière, et pour quelles couches.",
)


def check_steps(title: str, ranks: Sequence[RankReport]) -> None:
    """Refuse steps that not all ranks make, or that use gradients of a step before."""
    idle = [report.rank for report in ranks if report.steps == 0]
    if idle and len(idle) < len(ranks):
        raise Wrong(
            en=f"On {title}, rank {idle[0]} makes no optimizer step and others do: every rank "
            "must train, on its own samples.",
            fr=f"Sur {title}, le rang {idle[0]} ne fait aucun pas d’optimiseur alors que "
            "d’autres en font : chaque rang doit entraîner le modèle, sur ses propres échantillons.",
        )
    if any(report.repeated for report in ranks):
        raise Wrong(
            en=f"On {title}, optimizer.step is called again with the same gradients: once "
            "after the backward passes of a step.",
            fr=f"Sur {title}, optimizer.step est appelé de nouveau avec les mêmes gradients : "
            "une seule fois, après les passes arrière d’un pas.",
        )
    if any(report.kept for report in ranks):
        raise Wrong(
            en=f"On {title}, the gradients of a step are added to those of the step before: "
            "call optimizer.zero_grad() once in each step, before its first backward.",
            fr=f"Sur {title}, les gradients d’un pas s’ajoutent à ceux du pas d’avant : "
            "appelez optimizer.zero_grad() une fois par pas, avant sa première passe arrière.",
        )
    if any(report.stale for report in ranks):
        raise Wrong(
            en="The optimizer holds parameters that the model has no more: fully_shard and parallelize_module "
            "replace them, so make the optimizer after these calls.",
            fr="L’optimiseur détient des paramètres que le modèle n’a plus : fully_shard et parallelize_module les "
            "remplacent ; créez l’optimiseur après ces appels.",
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
        raise Wrong(
            en=f"The loss of step {step + 1} is {pair[0]} with {base.title} and {pair[1]} with {peer.title}: "
            f"{cause.en}",
            fr=f"La perte du pas {step + 1} vaut {pair[0]} avec {base.title} et {pair[1]} avec {peer.title} : "
            f"{cause.fr}",
        )


def check_group(trial: Trial) -> None:
    """Refuse processes of which each trains alone."""
    if any(rank.group_size != len(trial.ranks) for rank in trial.ranks):
        raise Wrong(
            en=f"On {trial.title}, each process trains a model without the others: no process group is there at the "
            "first step. Call init_process_group before the model is wrapped.",
            fr=f"Sur {trial.title}, chaque processus entraîne un modèle sans les autres : aucun groupe de processus "
            "n’existe au premier pas. Appelez init_process_group avant d’envelopper le modèle.",
        )


def check_shares(many: Trial, replicas: int) -> None:
    """Refuse replicas that read the same samples, or ranks of one replica that do not."""
    # Ranks that share a replica read the same samples, so there is one set for each replica.
    shares = {frozenset(rank.passes[0]) for rank in many.ranks if rank.passes and rank.passes[0]}
    if len(shares) > replicas:
        raise Wrong(
            en=f"With {many.title}, the ranks read {len(shares)} different shares of the samples, but the model has "
            f"{replicas} replica{'s' if replicas > 1 else ''}. Ranks that share one model must read the same "
            "samples: give "
            "DistributedSampler the number of replicas, and the index of this one.",
            fr=f"Avec {many.title}, les rangs lisent {len(shares)} parts différentes des échantillons, mais le modèle "
            f"a {'une seule réplique' if replicas == 1 else f'{replicas} répliques'}. Des rangs qui se partagent un "
            "modèle doivent lire les mêmes échantillons : donnez à DistributedSampler le nombre de répliques, et "
            "l’indice de "
            "celle-ci.",
        )
    # What a script draws from a small data set by itself may be the same by chance.
    pairs = itertools.combinations(shares if any(rank.epochs for rank in many.ranks) else (), 2)
    if 0 < len(shares) < replicas or any(len(a & b) > SHARED_SAMPLES * len(a) for a, b in pairs):
        remedy = Said(
            "give the DataLoader a DistributedSampler, with the number of replicas and the index of this one.",
            "donnez au DataLoader un DistributedSampler, avec le nombre de répliques et l’indice de celle-ci.",
        )
        if not any(rank.batches for rank in many.ranks):  # made by the script itself
            remedy = Said(
                "once the model is made, seed each rank by its number, or let each take its slice.",
                "une fois le modèle créé, donnez à chaque rang une graine selon son numéro, ou sa propre tranche.",
            )
        raise Wrong(
            en=f"With {many.title}, several replicas read the same samples: {remedy.en}",
            fr=f"Avec {many.title}, plusieurs répliques lisent les mêmes échantillons : {remedy.fr}",
        )


def check_orders(trial: Trial) -> None:
    """Refuse ranks that read each epoch in one order."""
    for rank, report in enumerate(trial.ranks):
        passes = report.passes
        # The second pass may have been cut off.
        if len(passes) > 1 and passes[1] and passes[0][: len(passes[1])] == passes[1]:
            cause = _same_order(report)
            raise Wrong(
                en=f"With {trial.title}, rank {rank} reads its samples in the same order in both epochs: {cause.en}",
                fr=f"Avec {trial.title}, le rang {rank} lit ses échantillons dans le même ordre aux deux époques : "
                f"{cause.fr}",
            )


def _same_order(report: RankReport) -> Said:
    """Why a rank reads its samples in one order, as far as it was seen."""
    if report.unshuffled and report.set_epochs:
        return Said(
            "its sampler does not shuffle, so that set_epoch changes nothing: shuffle=True.",
            "son échantillonneur ne mélange pas, et set_epoch n’y change rien : shuffle=True.",
        )
    if report.unshuffled:
        return Said(
            "its sampler does not shuffle: shuffle=True, and call sampler.set_epoch(epoch) at the start of each one.",
            "son échantillonneur ne mélange pas : shuffle=True, et appelez sampler.set_epoch(epoch) au début de "
            "chacune.",
        )
    if report.set_epochs:
        return Said(
            "set_epoch is called, but perhaps with the same number, after the pass over the loader has begun, or on "
            "another sampler than the loader's.",
            "set_epoch est appelé, mais peut-être avec le même numéro, une fois le parcours du chargeur commencé, ou "
            "sur un autre échantillonneur que celui du chargeur.",
        )
    return Said(
        "call sampler.set_epoch(epoch) at the start of each one, or what shuffles anew in your own sampler.",
        "appelez sampler.set_epoch(epoch) au début de chacune, ou ce qui mélange de nouveau dans votre propre "
        "échantillonneur.",
    )


def check_saves(trial: Trial) -> None:
    """Refuse ranks that write the same file."""
    # Real paths: links and relative names of one file are the same here.
    writers = Counter(path for report in trial.ranks for path in set(report.saved))
    for path, count in writers.items():
        if count > 1:
            raise Wrong(
                en=f"Several ranks write {Path(path).name} with torch.save: let rank 0 write it alone, or use "
                "torch.distributed.checkpoint.",
                fr=f"Plusieurs rangs écrivent {Path(path).name} par torch.save : laissez le rang 0 l’écrire seul, ou "
                "utilisez torch.distributed.checkpoint.",
            )


def check_trained_alike(base: Trial, many: Trial, *, are_same: bool, cause: Said = DIVIDED) -> None:
    """Refuse other losses and gradients than those of one process, with the cause where it is seen.

    Args:
        are_same: whether both read the same samples in the first step.
        cause: said of gradients that are too large or too small.
    """
    first_losses = [abs(loss) for trial in (base, many) for loss in trial.record.losses[:1]]
    times = max(first_losses) / min(first_losses) if first_losses and min(first_losses) > 0 else 1.0
    # A whole factor: a loss that is summed over ranks or micro-batches, or divided once too often.
    is_whole = round(times) > 1 and math.isclose(times, round(times), rel_tol=SAME_LOSS)
    first = DIVIDED if is_whole else _first_loss(base, many)
    check_losses(base, many, SAME_LOSS, first, steps=1)
    check_gradients(base, many, cause)
    together = Said(
        "both read the same samples in the first step, so look at how gradients are averaged.",
        "les deux lisent les mêmes échantillons au premier pas : regardez comment les gradients sont moyennés.",
    )
    apart = Said(
        "look at the samples that each rank reads, and at how gradients are averaged.",
        "regardez quels échantillons lit chaque rang, et comment les gradients sont moyennés.",
    )
    check_losses(base, many, SAME_LOSS, together if are_same else apart)


def _first_loss(base: Trial, many: Trial) -> Said:
    """Why the first loss differs, as far as the weights before the first step tell."""
    begun = [rank.begun_with for rank in many.ranks]
    if any(rank.plain < rank.held for rank in many.ranks):  # shards: their squares say nothing of whole parameters
        return Said(
            "nothing has been averaged yet, so the weights differ, or what is computed with them, or the samples.",
            "rien n’a encore été moyenné : ce sont les poids qui diffèrent, ou le calcul, ou les échantillons.",
        )
    baseline_squares = base.ranks[0].begun_with
    # As many parameters on each rank as on one process: copies; else parts, joined in the order of the ranks.
    copies = all(len(squares) == len(baseline_squares) for squares in begun)
    rank_squares = begun[0] if copies else tuple(itertools.chain.from_iterable(begun))
    if _close(rank_squares, baseline_squares) and (
        not copies or all(_close(squares, baseline_squares) for squares in begun)
    ):
        return Said(
            "nothing has been averaged yet, and the weights are the same, so the forward pass computes something else, "
            "or with other samples.",
            "rien n’a encore été moyenné, et les poids sont les mêmes : c’est donc la passe avant qui calcule autre "
            "chose, ou avec d’autres échantillons.",
        )
    if not copies and _close(sorted(rank_squares), sorted(baseline_squares)):
        return Said(
            "the weights are those of one process, but the ranks hold them in another order: the first stage takes the "
            "first blocks, the last stage the last ones.",
            "les poids sont ceux d’un seul processus, mais les rangs les détiennent dans un autre ordre : le premier "
            "étage prend les premiers blocs, le dernier les derniers.",
        )
    return Said(
        "nothing has been averaged yet, and the weights before the first step are not the same: give all ranks the "
        "same seed before the model is made.",
        "rien n’a encore été moyenné, et les poids d’avant le premier pas ne sont pas les mêmes : donnez la même "
        "graine à tous les rangs avant de créer le modèle.",
    )


def _close(values: Sequence[float], references: Sequence[float]) -> bool:
    return len(values) == len(references) and all(
        math.isclose(a, b, rel_tol=SAME_ON_ONE, abs_tol=1e-12) for a, b in zip(values, references, strict=True)
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
        raise Wrong(
            en=f"The gradients of the first step are {times} times as large with {many.title} as with {base.title}: "
            f"{cause.en}",
            fr=f"Avec {many.title}, les gradients du premier pas valent {times} fois ceux de {base.title} : {cause.fr}",
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
    with_en, with_fr = f"With {many.title}, ", f"Avec {many.title}, "
    report = many.ranks[0]
    if not many.sent_bytes:
        if report.ddp and not report.ddp_calls:
            raise Wrong(
                en=f"{with_en}no gradient is sent: DistributedDataParallel wraps the model, but the model inside is "
                "called; call the wrapped one.",
                fr=f"{with_fr}aucun gradient n’est envoyé : DistributedDataParallel enveloppe le modèle, mais c’est "
                "celui de l’intérieur qui est appelé ; appelez le modèle enveloppé.",
            )
        if report.ddp and not report.ddp_synced:
            raise Wrong(
                en=f"{with_en}no gradient is sent: every forward pass runs under no_sync(). The last micro-batch of a "
                "step must be outside.",
                fr=f"{with_fr}aucun gradient n’est envoyé : chaque passe avant s’exécute sous no_sync(). Le dernier "
                "micro-batch d’un pas doit rester en dehors.",
            )
        if report.ddp:
            raise Wrong(
                en=f"{with_en}no gradient is sent, although DistributedDataParallel is called: does backward go "
                "through its output?",
                fr=f"{with_fr}aucun gradient n’est envoyé, alors que DistributedDataParallel est appelé : la passe "
                "arrière part-elle de sa sortie ?",
            )
        raise Wrong(
            en=f"{with_en}no rank sends a gradient, so each trains alone: wrap the model in DistributedDataParallel, "
            "and call the wrapped model.",
            fr=f"{with_fr}aucun rang n’envoie de gradient, chacun s’entraîne donc seul : enveloppez le modèle dans "
            "DistributedDataParallel, et appelez le modèle enveloppé.",
        )
    if report.ddp and len({rank.weights for rank in many.ranks}) > 1:
        raise Wrong(
            en=f"{with_en}the ranks do not end with the same weights, although gradients are sent: each micro-batch "
            "that is the last of a step must be outside of no_sync(), and no rank may change weights by itself.",
            fr=f"{with_fr}les rangs ne finissent pas avec les mêmes poids, bien que des gradients soient envoyés : le "
            "dernier micro-batch de chaque pas doit rester hors de no_sync(), et aucun rang ne doit changer les poids "
            "de lui-même.",
        )


@dataclass(frozen=True)
class Averaged:
    """How the gradients that optimizers use at the first step come from those of the ranks' own samples.

    Attributes:
        is_local: whether each rank uses those of its own samples.
        times: factor between what is used and the mean of all ranks; None where it is no multiple of the mean.
        norms: at which each rank has clipped, where they differ: each has clipped its own.
    """

    is_local: bool
    times: float | None
    norms: tuple[float, ...] = ()


def averaged(many: Trial) -> Averaged | None:
    """Compare what optimizers use with the mean of the ranks' gradients; None where ranks hold parts.

    A projection of a mean is the mean of the projections, so no rank needs another's gradient.
    """
    local_vectors, used_vectors = (
        [list(itertools.chain.from_iterable(vectors)) for vectors in by_rank]
        for by_rank in ([rank.local_gradients for rank in many.ranks], [rank.used_gradients for rank in many.ranks])
    )
    if len({len(vector) for vector in local_vectors}) != 1 or not local_vectors[0]:
        return None
    mean = [math.fsum(values) / len(values) for values in zip(*local_vectors, strict=True)]
    square = math.fsum(value * value for value in mean)
    if not square or not math.isfinite(square):
        return None
    clipped = tuple(rank.clipped[0] for rank in many.ranks if rank.clipped)
    norms = clipped if clipped and max(clipped) > (1 + SAME_LOSS) * min(clipped) else ()
    is_local = all(map(_near, used_vectors, local_vectors)) and not all(_near(mean, part) for part in local_vectors)
    # The factor of least squares; the rest must be small.
    times = math.fsum(map(math.prod, zip(used_vectors[0], mean, strict=True))) / square
    is_multiple = all(_near([times * value for value in mean], used) for used in used_vectors)
    return Averaged(is_local, times if is_multiple else None, norms)


def _near(values: Sequence[float], references: Sequence[float]) -> bool:
    """Whether two vectors are the same up to the rounding of messages in bf16."""
    return math.dist(values, references) <= SAME_GRADIENTS * math.hypot(*references)


def _cause_of(mean: Averaged | None, processes: int) -> Said | None:
    """Name why gradients are not the mean of the ranks; None where they are, or where that was not seen."""
    if mean is None:
        return None
    if mean.norms:
        norms = ", ".join(significant(norm) for norm in mean.norms)
        return Said(
            f"each rank clips its gradients (norms {norms}) before they are averaged: average first, then clip.",
            f"chaque rang écrête les gradients de ses propres échantillons (normes {norms}) avant qu’ils soient "
            "moyennés : moyennez d’abord, puis écrêtez.",
        )
    if mean.times is not None and math.isclose(mean.times, processes, rel_tol=SAME_GRADIENTS):
        return Said(
            f"the optimizer gets the sum of the ranks’ gradients, {processes} times their mean: divide by the number "
            "of ranks, or average (ReduceOp.AVG).",
            f"l’optimiseur reçoit la somme des gradients des rangs, {processes} fois leur moyenne : divisez par le "
            "nombre de rangs, ou moyennez (ReduceOp.AVG).",
        )
    if mean.times is not None and math.isclose(mean.times, 1 / processes, rel_tol=SAME_GRADIENTS):
        return _divided_again(processes)
    if mean.times is None:
        return Said(
            "all ranks use the same gradients, but no multiple of the mean: a communication hook compresses them, or "
            "some micro-batches are not averaged.",
            "tous les rangs utilisent les mêmes gradients, mais pas un multiple de leur moyenne : un hook de "
            "communication les compresse, ou certains micro-batches ne sont pas moyennés.",
        )
    return None


def _divided_again(processes: int) -> Said:
    return Said(
        f"the mean of the ranks’ gradients is divided by {processes} once more: they are averaged twice, or the loss "
        "is divided by the number of ranks although the gradients are averaged.",
        f"la moyenne des gradients des rangs est encore divisée par {processes} : ils sont moyennés deux fois, ou la "
        "perte est divisée par le nombre de rangs alors que les gradients sont moyennés.",
    )


def replicas_of(many: Trial, base: Trial | None) -> int | None:
    """Count the replicas of the model, as far as its wrappers and parameters show them; None where they do not."""
    ranks, first, processes = many.ranks, many.ranks[0], len(many.ranks)
    if first.pipeline_ranks:
        return processes // first.pipeline_ranks
    if first.mesh_axes > 1:  # replicas and shards, or shards and parts of layers
        return None
    if first.fsdp_units or first.library == "DeepSpeedEngine" or first.ddp_ranks == processes:
        return processes
    if any(rank.plain < rank.held for rank in ranks):  # DTensors that FSDP has not made: parts of layers
        return 1
    # As many parameters on each rank as on one process are copies; without that process, if they begin equal.
    if base is not None:
        return processes if all(rank.held == base.ranks[0].held for rank in ranks) else None
    return processes if all(_close(rank.begun_with, first.begun_with) for rank in ranks) else None


def check_begun(many: Trial) -> None:
    """Refuse copies of a model that begin with other weights on each rank."""
    if not all(_close(rank.begun_with, many.ranks[0].begun_with) for rank in many.ranks):
        raise Wrong(
            en=f"With {many.title}, the ranks begin with different weights: give all of them the same seed before the "
            "model is made, and another one, if you like, after it; or broadcast those of rank 0, as DDP does.",
            fr=f"Avec {many.title}, les rangs commencent avec des poids différents : donnez-leur la même graine avant "
            "de créer le modèle, et une autre, si vous voulez, après ; ou diffusez ceux du rang 0, comme le fait DDP.",
        )


def _check_means(many: Trial, mean: Averaged | None) -> None:
    """Refuse replicas that step by gradients of their own samples, or that drift apart."""
    if mean is None or mean.is_local:
        check_averaged(many)
    if mean is not None and mean.is_local:
        raise Wrong(
            en=f"With {many.title}, each rank steps by the gradients of its samples alone: they are not averaged "
            "before optimizer.step.",
            fr=f"Avec {many.title}, chaque rang fait son pas avec les gradients de ses propres échantillons : ils ne "
            "sont pas moyennés avant optimizer.step.",
        )
    if len({rank.weights for rank in many.ranks}) > 1 and many.ranks[0].plain == many.ranks[0].held:
        raise Wrong(
            en=f"With {many.title}, the copies of the model do not end with the same weights: every step must use the "
            "mean of all ranks, and no rank may change weights by itself.",
            fr=f"Avec {many.title}, les copies du modèle ne finissent pas avec les mêmes poids : chaque pas doit "
            "utiliser la moyenne de tous les rangs, et aucun rang ne doit changer les poids de lui-même.",
        )


def _step_samples(trial: Trial, step: int = 0) -> list[str]:
    """Digests of all samples of a step, sorted; ranks that read the same are one replica."""
    shares = dict.fromkeys(tuple(rank.samples[step]) for rank in trial.ranks if step < len(rank.samples))
    return sorted(itertools.chain.from_iterable(shares))


def _per_pass(trial: Trial, replicas: int) -> int | None:
    """Samples that all replicas draw in one pass over the training's loader, by its own sampler."""
    loaders = [rank.trained_loader for rank in trial.ranks]
    sizes = [loader["length"] * loader["batch"] for loader in loaders if loader is not None]
    return sum(sizes) * replicas // len(sizes) if len(sizes) == len(loaders) and all(sizes) else None


def _check_coverage(base: Trial | None, many: Trial, replicas: int) -> None:
    """Refuse a pass over the data that reads samples on several replicas, or leaves some out."""
    loader = many.ranks[0].trained_loader
    if loader is not None and loader["replicas"] not in (0, replicas):
        raise Wrong(
            en=f"With {many.title}, the sampler shares the samples out among {loader['replicas']} replicas, and the "
            f"model has {replicas}: samples are missing, or read twice. Give DistributedSampler "
            f"num_replicas={replicas}.",
            fr=f"Avec {many.title}, l’échantillonneur répartit les échantillons entre {loader['replicas']} répliques, "
            f"et le modèle en a {replicas} : il en manque, ou certains sont lus deux fois. Donnez "
            f"num_replicas={replicas} à DistributedSampler.",
        )
    alone, together = _per_pass(base, 1) if base is not None else None, _per_pass(many, replicas)
    if not alone or not together or loader is None or base is None:
        return
    # A last batch that is not full, of each replica, and of the one process.
    slack = replicas * loader["batch"] + (base.ranks[0].trained_loader or loader)["batch"]
    figures = integer(together), integer(alone)
    if together > alone + slack:
        raise Wrong(
            en=f"With {many.title}, a pass over the loader reads {figures[0]} samples, and {figures[1]} on one "
            "process: several replicas read the same samples. Give the DataLoader a DistributedSampler.",
            fr=f"Avec {many.title}, un parcours du chargeur lit {figures[0]} échantillons, contre {figures[1]} sur "
            "un processus : plusieurs répliques lisent les mêmes échantillons. Donnez au DataLoader un "
            "DistributedSampler.",
        )
    if together < alone - slack:
        raise Wrong(
            en=f"With {many.title}, a pass over the loader reads {figures[0]} samples, and {figures[1]} on one "
            "process: samples are missing. Look at the number of replicas that the sampler is given.",
            fr=f"Avec {many.title}, un parcours du chargeur lit {figures[0]} échantillons, contre {figures[1]} sur "
            "un processus : il en manque. Regardez le nombre de répliques donné à l’échantillonneur.",
        )


State = Literal["right", "wrong", "note"]


@dataclass(frozen=True)
class Parity:
    """One process beside several of a script: `right`, `wrong`, or `note` where that cannot be said, and a sentence.

    Attributes:
        base: the run on one process; None where there was none to compare with.
        are_same: whether both read the same samples in the first step.
        remarks: what is no mistake, and good to know.
    """

    state: State
    message: str
    many: Trial
    base: Trial | None
    are_same: bool
    remarks: tuple[str, ...] = ()

    def figures(self) -> dict[str, list[Any]]:
        """Figures that are compared, of one process and of several; None where there is none."""
        rows: dict[str, list[Any]] = {}
        for trial in (self.base, self.many):
            losses = trial.record.losses if trial is not None else ()
            rows.setdefault("samples", []).append(len(_step_samples(trial)) or None if trial else None)
            for step in range(min(3, len(self.many.record.losses))):
                rows.setdefault(f"loss {step + 1}", []).append(losses[step] if step < len(losses) else None)
            squares = _gradients(trial) if trial is not None and trial.ranks[0].gradients else None
            rows.setdefault("gradient norm", []).append(None if squares is None else math.sqrt(squares))
            rates = trial.ranks[0].learning_rates if trial is not None else ()
            rows.setdefault("learning rate", []).append(rates[0] if rates else None)
        rows["weights"] = [None, self.weights_apart()]
        return rows

    def weights_apart(self) -> float | None:
        """Distance of the weights after the steps that are compared, as a share of those of one process."""
        if self.base is None or not self.are_same:
            return None
        weights = [list(itertools.chain.from_iterable(trial.ranks[0].after)) for trial in (self.base, self.many)]
        is_whole = self.many.ranks[0].plain == self.base.ranks[0].held
        counts = {min(COMPARED_STEPS, len(trial.record.losses)) for trial in (self.base, self.many)}
        if len(counts) > 1 or not is_whole or not weights[0] or len(weights[0]) != len(weights[1]):
            return None
        return math.dist(*weights) / math.hypot(*weights[0])

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        runs = [trial.record.run_id if trial is not None else None for trial in (self.base, self.many)]
        answer = {"state": self.state, "message": self.message, "remarks": list(self.remarks), "runs": runs}
        return answer | {"same_samples": self.are_same, "figures": self.figures()}

    def table(self) -> Table:
        """Figures of both, with the verdict and the remarks below."""
        count = min(COMPARED_STEPS, len(self.many.record.losses))
        names = {
            "samples": say(en="samples, step 1", fr="échantillons, pas 1"),
            "gradient norm": say(en="norm of gradients, step 1", fr="norme des gradients, pas 1"),
            "learning rate": say(en="learning rate", fr="taux d’apprentissage"),
            "weights": say(en=f"weights after {count} steps, apart", fr=f"écart des poids après {count} pas"),
        }
        rows = []
        for name, pair in self.figures().items():
            title = names.get(name) or say(en=f"loss, step {name[5:]}", fr=f"perte, pas {name[5:]}")
            rows.append((title, *("—" if value is None else significant(value, 4) for value in pair)))
        head = ("", title_of(1, ()), title_of(len(self.many.ranks), ()))
        return Table(head, tuple(rows), notes=("", self.message, *self.remarks))


def parity(begin: Callable[[int, Observation], Trial], processes: int, most_steps: int) -> Parity:
    """Run a script on several processes and on one, on the same samples, and compare them.

    Args:
        begin: runs the script on so many processes, observed so, and raises `Wrong` where it does not come to its end.
        processes: at least 2.
        most_steps: optimizer steps after which both are ended.

    Raises:
        Wrong: if the script does not come to its end on these processes.
    """
    many = begin(processes, Observation(most_steps=most_steps))
    base, reason = None, ""
    try:
        _check_processes(many)
        batches_of = str(many.folder) if many.folder and any(rank.batches for rank in many.ranks) else ""
        try:
            base = begin(1, Observation(most_steps=most_steps, batches_of=batches_of))
            # One process makes a step of fewer samples: it accumulates as many more micro-batches.
            count, target = len(_step_samples(base)), len(_step_samples(many))
            if batches_of and count and count != target:
                observation = Observation(most_steps=most_steps, batches_of=batches_of, is_apart=True)
                base = begin(1, observation)
        except Wrong as wrong:
            reason = str(wrong)
        are_same = base is not None and _step_samples(base) == _step_samples(many) != []
        flaw, mean = _check_means_and_samples(many, base)
        excuse = _excuse(many, base, are_same, reason)
        state, message, remarks = _beside_one_process(many, base, excuse, flaw, mean)
    except Wrong as wrong:
        are_same = base is not None and _step_samples(base) == _step_samples(many) != []
        return Parity("wrong", str(wrong), many, base, are_same, tuple(map(str, _remarks(many, base))))
    remarks = [*remarks, *_remarks(many, base)]
    return Parity(state, message, many, base, are_same, tuple(map(str, remarks)))


def _check_processes(many: Trial) -> None:
    """Refuse what shows without a run on one process."""
    ranks = [
        # Another optimizer's backward pass may add to gradients; what is no parameter of a module may be trained.
        replace(rank, kept=rank.kept * (rank.optimizers == 1), stale=rank.stale * (rank.fsdp_units > 0))
        for rank in many.ranks
    ]
    check_steps(many.title, ranks)
    check_group(many)


def _check_means_and_samples(many: Trial, base: Trial | None) -> tuple[Said | None, Averaged | None]:
    """Refuse replicas that read the wrong samples or do not average; returns why gradients seem to be no mean.

    Beside it stands what is known of their mean: of ranks that hold parts of the parameters, nothing.
    """
    replicas, processes = replicas_of(many, base), len(many.ranks)
    is_partitioned = any(rank.library == "DeepSpeedEngine" or rank.plain < rank.held for rank in many.ranks)
    is_copied = replicas == processes and not is_partitioned
    if is_copied:
        check_begun(many)
    if replicas is not None:
        _check_coverage(base, many, replicas)
        # Ranks that share a replica may read its activations alone.
        if replicas == processes or all(rank.batches for rank in many.ranks):
            check_shares(many, replicas)
    if any(rank.shuffled and not rank.set_epochs for rank in many.ranks):
        check_orders(many)
    mean = averaged(many) if is_copied else None
    if is_copied:
        _check_means(many, mean)
    flaw = _cause_of(mean, processes)
    if flaw is not None and mean is not None and mean.norms:
        raise Wrong(f"{many.title}: {flaw.en}", f"{many.title} : {flaw.fr}")
    check_saves(many)
    return flaw, mean


def _beside_one_process(
    many: Trial, base: Trial | None, excuse: Said | None, flaw: Said | None, mean: Averaged | None
) -> tuple[State, str, list[Said | str]]:
    """Compare losses and gradients with those of one process, or say why that cannot be done."""
    if excuse is not None or base is None:
        losses = [trial.record.losses[:1] for trial in (base, many) if trial is not None]
        # Losses as large are divided by nothing more on several processes, so their gradients must be averaged.
        is_certain = base is not None and all(losses) and 2 / 3 < abs(losses[0][0] / (losses[-1][0] or 1.0)) < 3 / 2
        if flaw is not None and is_certain and mean is not None and mean.times is not None:
            raise Wrong(flaw.en, flaw.fr)
        seen = flaw or Said(
            "What shows without that comparison is right: the ranks’ samples, the mean of their gradients, the same "
            "weights on all.",
            "Ce qui se voit sans cette comparaison est juste : les échantillons des rangs, la moyenne de leurs "
            "gradients, les mêmes "
            "poids sur tous.",
        )
        if mean is None:
            seen = Said(
                "Whether gradients are averaged does not show without that comparison either, as ranks may hold "
                "parts of them.",
                "Sans elle, la moyenne des gradients ne se voit pas non plus, car les rangs peuvent en détenir des "
                "parts.",
            )
        sentence = excuse or Said("", "")
        return "note", say(en=f"{sentence.en} {seen.en}", fr=f"{sentence.fr} {seen.fr}"), []
    rates = [trial.ranks[0].learning_rates for trial in (base, many)]
    first_losses = [trial.record.losses[0] for trial in (base, many) if trial.record.losses]
    times = first_losses[0] / first_losses[-1] if first_losses and first_losses[-1] else 1.0
    remarks: list[Said | str] = []
    if round(times) > 1 and math.isclose(times, round(times), rel_tol=SAME_LOSS):
        check_gradients(base, many, flaw or _divided_again(round(times)))
        remarks.append(
            Said(
                f"The loss of a rank is 1/{round(times)} of that of one process, and gradients are added up: the same "
                "training, but a logged loss has to be added up too.",
                f"La perte d’un rang vaut 1/{round(times)} de celle d’un processus, et les gradients sont additionnés "
                ": c’est le même entraînement, mais une perte affichée doit être additionnée aussi.",
            )
        )
    elif not _close(*rates):
        check_gradients(base, many, flaw or DIVIDED)
        pair = [significant(by_group[0]) for by_group in rates]
        return (
            "note",
            say(
                en=f"The first step is that of one process; then the learning rates differ ({pair[0]} on one process, "
                f"{pair[1]} on {len(many.ranks)}), and so do losses and weights: give both the same to compare more.",
                fr=f"Le premier pas est celui d’un processus ; ensuite les taux d’apprentissage diffèrent ({pair[0]} "
                f"sur un processus, {pair[1]} sur {len(many.ranks)}), et donc pertes et poids : donnez-leur le même "
                "pour comparer la suite.",
            ),
            [],
        )
    else:
        heads = [
            replace(trial, record=trial.record.model_copy(update={"losses": trial.record.losses[:COMPARED_STEPS]}))
            for trial in (base, many)
        ]
        check_trained_alike(*heads, are_same=True, cause=flaw or DIVIDED)
    count = min(COMPARED_STEPS, len(many.record.losses))
    joined = any(rank.batches for rank in many.ranks)
    way = Said(
        "that process read the batches of all ranks, joined" if joined else "both have drawn them by themselves",
        "celui-ci a lu les batches de tous les rangs, réunis" if joined else "chacun les a tirés de lui-même",
    )
    return (
        "right",
        say(
            en=f"{many.title} train as one process does on the same samples ({way.en}): weights at the start, first "
            f"gradients, losses of {count} steps.",
            fr=f"{many.title} s’entraînent comme un seul sur les mêmes échantillons ({way.fr}) : poids de départ, "
            f"premiers gradients, pertes de {count} pas.",
        ),
        remarks,
    )


def _excuse(many: Trial, base: Trial | None, are_same: bool, reason: str) -> Said | None:
    """Say what keeps losses from being compared with those of one process, and what to do; None where nothing does."""
    if base is None:
        return Said(
            f"Not compared with one process. {reason}",
            f"Pas de comparaison avec un seul processus. {reason}",
        )
    if not are_same:
        if any(rank.trained_loader for rank in many.ranks):
            return Said(
                "Losses and gradients are not compared with one process, which reads other samples at the first step: "
                "a random transform, or batches that are cut elsewhere; take the transform out to compare.",
                "Pertes et gradients ne sont pas comparés à ceux d’un processus, qui lit d’autres échantillons au "
                "premier pas : une transformation aléatoire, ou des batches découpés ailleurs ; retirez-la pour "
                "comparer.",
            )
        return Said(
            "Losses and gradients are not compared with one process, which draws other samples: the script makes its "
            "data on each rank; read them from a data set by a DataLoader with a DistributedSampler to compare.",
            "Pertes et gradients ne sont pas comparés à ceux d’un processus, qui tire d’autres échantillons : le "
            "script fabrique ses données sur chaque rang ; lisez-les dans un jeu de données par un DataLoader muni "
            "d’un DistributedSampler pour comparer.",
        )
    if many.ranks[0].dropouts:
        return Said(
            "Losses and gradients are not compared with one process: dropout draws other numbers there; set its "
            "probability to 0 to compare.",
            "Pertes et gradients ne sont pas comparés à ceux d’un processus : le dropout y tire d’autres nombres ; "
            "mettez sa probabilité à 0 pour comparer.",
        )
    if many.ranks[0].batch_norms:
        return Said(
            "Losses and gradients are not those of one process, since BatchNorm averages over the samples of its rank "
            "alone: SyncBatchNorm.convert_sync_batchnorm(model) makes them comparable.",
            "Pertes et gradients ne sont pas ceux d’un processus, car BatchNorm moyenne sur les seuls échantillons de "
            "son rang : SyncBatchNorm.convert_sync_batchnorm(model) les rend comparables.",
        )
    return None


def _remarks(many: Trial, base: Trial | None) -> list[Said]:
    """List what is no mistake of the processes, and good to know."""
    remarks, first, processes = [], many.ranks[0], len(many.ranks)
    loader, alone = first.trained_loader, base.ranks[0].trained_loader if base is not None else None
    if loader and alone and loader["batch"] and loader["batch"] == alone["batch"]:
        batches = integer(loader["batch"]), integer(processes * loader["batch"])
        remarks.append(
            Said(
                f"By itself, one process reads {batches[0]} samples at a time, and {processes} processes read "
                f"{batches[1]}: the batch grows with the number of processes, so the learning rate may have to.",
                f"De lui-même, un processus lit {batches[0]} échantillons à la fois, et {processes} processus en "
                f"lisent {batches[1]} : le batch grandit avec le nombre de processus, et le taux d’apprentissage doit "
                "peut-être suivre.",
            )
        )
    if first.ddp_nested:
        remarks.append(
            Said(
                "DistributedDataParallel wraps a model that it has wrapped already: each gradient is sent twice.",
                "DistributedDataParallel enveloppe un modèle qu’il enveloppait déjà : chaque gradient est envoyé deux "
                "fois.",
            )
        )
    if first.ddp and first.backwards > 1 and first.synced == first.calls:
        remarks.append(
            Said(
                f"DDP averages after each of the {first.backwards} backward passes of a step: under model.no_sync(), "
                "forward and backward, all but the last one send nothing.",
                f"DDP moyenne après chacune des {first.backwards} passes arrière d’un pas : sous model.no_sync(), "
                "passes avant et arrière, toutes sauf la dernière n’envoient rien.",
            )
        )
    passes = first.passes
    if first.unshuffled and len(passes) > 1 and passes[1] and passes[0][: len(passes[1])] == passes[1]:
        cause = _same_order(first)
        remarks.append(
            Said(f"All epochs have one order: {cause.en}", f"Toutes les époques ont le même ordre : {cause.fr}")
        )
    return remarks
