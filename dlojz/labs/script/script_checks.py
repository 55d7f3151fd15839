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
from dlojz.labs.kit.exercise import Said, Wrong
from dlojz.labs.script.script_trials import BATCH, RankReport, Trial

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


def differing_step(reference: Sequence[float], second: Sequence[float], tolerance: float) -> int | None:
    """Find the first step whose losses differ; None where all are the same."""
    # strict=False: of runs of different length, the steps that both have.
    pairs = zip(reference, second, strict=False)
    return next((step for step, (a, b) in enumerate(pairs) if not math.isclose(a, b, rel_tol=tolerance)), None)


def check_losses(base: Trial, peer: Trial, tolerance: float, *, en: str, fr: str, steps: int | None = None) -> None:
    """Refuse a run whose losses are not those of another one; the sentence ends with a likely cause."""
    step = differing_step(base.record.losses[:steps], peer.record.losses[:steps], tolerance)
    if step is not None:
        pair = [significant(trial.record.losses[step], 5) for trial in (base, peer)]
        raise Wrong(
            en=f"The loss of step {step + 1} is {pair[0]} with {base.title} and {pair[1]} with {peer.title}: {en}",
            fr=f"La perte du pas {step + 1} vaut {pair[0]} avec {base.title} et {pair[1]} avec {peer.title} : {fr}",
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
        raise Wrong(
            en=f"With {many.title}, several replicas read the same samples: give the DataLoader a DistributedSampler, "
            "with the number of replicas and the index of this one.",
            fr=f"Avec {many.title}, plusieurs répliques lisent les mêmes échantillons : donnez au DataLoader un "
            "DistributedSampler, avec le nombre de répliques et l’indice de celle-ci.",
        )
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
        for rank, report in enumerate(trial.ranks):
            if len(report.epochs) > 1 and report.epochs[0] and report.epochs[0] == report.epochs[1]:
                cause = _same_order(report)
                raise Wrong(
                    en=f"With {trial.title}, rank {rank} reads its samples in the same order in both epochs: "
                    f"{cause.en}",
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
    check_losses(base, many, SAME_LOSS, steps=1, en=cause.en, fr=cause.fr)
    check_gradients(base, many)
    together = _same_samples(base, many, replicas)
    check_losses(
        base,
        many,
        SAME_LOSS,
        en=("both read the same samples in the first step, so look at how gradients are averaged." if together else "")
        or "look at the samples that each rank reads, and at how gradients are averaged.",
        fr=(
            "les deux lisent les mêmes échantillons au premier pas : regardez comment les gradients sont moyennés."
            if together
            else ""
        )
        or "regardez quels échantillons lit chaque rang, et comment les gradients sont moyennés.",
    )
    check_saves(many)


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
        raise Wrong(
            en=f"The gradients of the first step are {times} times as large with {many.title} as with {base.title}: "
            f"{cause.en}",
            fr=f"Les gradients du premier pas sont {times} fois ceux de {base.title} avec {many.title} : {cause.fr}",
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
