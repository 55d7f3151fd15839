"""Judge a training script by what it does on real processes; its text is never read.

The script runs under the watch of `dlojz.run` (`script_trials.py`), started by `script_observer.py`, which notes what
each rank read, held and saved. Layouts are compared with one process of the same script: the same losses, of the same
samples.
"""

from __future__ import annotations

import itertools
import math
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dlojz.base.errors import LabError
from dlojz.base.language import format_bytes, percent, refusal, say, significant
from dlojz.compare import compare
from dlojz.labs.kit.exercise import Said, Verdict, Wrong, show
from dlojz.labs.kit.lab import SCRIPT, Lab
from dlojz.labs.script.growing_script import LAYOUTS, number_of_lab
from dlojz.labs.script.script_trials import BATCH, ScriptTrials, Trial
from dlojz.running.store import runs_root

SAME_LOSS = 1e-3
"""Relative distance of losses that differ by the order of additions alone."""
SAME_GRADIENTS = 0.02
"""The same of the norm of gradients."""
SAME_ON_ONE = 1e-5
"""The same, where a script runs twice on one process."""
ROUNDED_LOSS = 0.01
"""The same, where gradients are rounded to bf16."""
SAME_PRINTED = 1.3
"""Factor by which the loss that a rank prints, of the samples it reads, may differ from the mean of all ranks."""
SAME_RATE = 1.4
"""Factor by which a script's own throughput may differ from the one that is measured from outside."""
STILL = 3
"""Parameters that may have no gradient without being told."""
LEVELS = 3
"""Folders above the notebook's in which its script is looked for."""
SHARED_SAMPLES = 0.1
"""Share of a rank's samples that others read, from which on it is no chance: images may be there twice."""


DIVIDED = Said(
    "look at what each rank's loss is divided by, micro-batches included.",
    "regardez par quoi la perte de chaque rang est divisée, micro-batches compris.",
)


def _check_learns(trial: Trial, factor: float) -> None:
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


def _check_printed(trial: Trial) -> None:
    """Refuse a script that prints a loss of each step which is not that of the step."""
    for printed in trial.printed:
        if len(printed) != len(trial.record.losses):
            continue
        for step, (told, loss) in enumerate(zip(printed, trial.record.losses, strict=True), start=1):
            if not loss / SAME_PRINTED < told < loss * SAME_PRINTED:
                pair = significant(told, 4), significant(loss, 4)
                raise Wrong(
                    en=f"With {trial.title}, your script prints the loss {pair[0]} at step {step}, and {pair[1]} was "
                    "measured: add up the losses of a step's micro-batches, each divided by their number, and begin at "
                    "zero for the next step.",
                    fr=f"Avec {trial.title}, votre script affiche la perte {pair[0]} au pas {step}, alors que la perte "
                    f"mesurée est {pair[1]} : additionnez les pertes des micro-batches d’un pas, chacune divisée par "
                    "leur nombre, et repartez de zéro au pas suivant.",
                )


def _differing_step(first: Sequence[float], second: Sequence[float], tolerance: float) -> int | None:
    """Find the first step whose losses differ; None where all are the same."""
    pairs = zip(first, second, strict=False)
    return next((step for step, (a, b) in enumerate(pairs) if not math.isclose(a, b, rel_tol=tolerance)), None)


def _check_losses(one: Trial, other: Trial, tolerance: float, *, en: str, fr: str, steps: int | None = None) -> None:
    """Refuse a run whose losses are not those of another one; the sentence ends with a likely cause."""
    step = _differing_step(one.record.losses[:steps], other.record.losses[:steps], tolerance)
    if step is not None:
        pair = [significant(trial.record.losses[step], 5) for trial in (one, other)]
        raise Wrong(
            en=f"The loss of step {step + 1} is {pair[0]} with {one.title} and {pair[1]} with {other.title}: {en}",
            fr=f"La perte du pas {step + 1} vaut {pair[0]} avec {one.title} et {pair[1]} avec {other.title} : {fr}",
        )


def _check_group(trial: Trial) -> None:
    if any(one.group_size != len(trial.ranks) for one in trial.ranks):
        raise Wrong(
            en=f"On {trial.title}, each process trains a model without the others: no process group is there at the "
            "first step. Call init_process_group before the model is wrapped.",
            fr=f"Sur {trial.title}, chaque processus entraîne un modèle sans les autres : aucun groupe de processus "
            "n’existe au premier pas. Appelez init_process_group avant d’envelopper le modèle.",
        )


def _check_samples(one: Trial, many: Trial, replicas: int) -> None:
    """Refuse replicas that read the same samples, too many of them, or each epoch in one order."""
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
    steps = [len(trial.record.losses) for trial in (one, many)]
    if steps[0] != steps[1]:
        raise Wrong(
            en=f"Two epochs are {steps[0]} steps with {one.title}, and {steps[1]} with {many.title}: a step is to read "
            "--batch samples, of all replicas and micro-batches together; those left over are dropped, by the sampler "
            "and by the DataLoader (drop_last=True).",
            fr=f"Deux époques font {steps[0]} pas avec {one.title}, et {steps[1]} avec {many.title} : un pas doit lire "
            "--batch échantillons, toutes répliques et tous micro-batches réunis ; ceux qui restent sont écartés, par "
            "l’échantillonneur et par le DataLoader (drop_last=True).",
        )
    for trial in (one, many):
        for rank, report in enumerate(trial.ranks):
            if len(report.epochs) > 1 and report.epochs[0] and report.epochs[0] == report.epochs[1]:
                raise Wrong(
                    en=f"With {trial.title}, rank {rank} reads its samples in the same order in both epochs: call "
                    "sampler.set_epoch(epoch) at the start of each one.",
                    fr=f"Avec {trial.title}, le rang {rank} lit ses échantillons dans le même ordre aux deux époques : "
                    "appelez sampler.set_epoch(epoch) au début de chacune.",
                )


def _check_saves(trial: Trial) -> None:
    for path in trial.ranks[0].saved:
        if any(path in other.saved for other in trial.ranks[1:]):
            raise Wrong(
                en=f"Several ranks write {Path(path).name} with torch.save: let rank 0 write it alone, or use "
                "torch.distributed.checkpoint.",
                fr=f"Plusieurs rangs écrivent {Path(path).name} par torch.save : laissez le rang 0 l’écrire seul, ou "
                "utilisez torch.distributed.checkpoint.",
            )


def _check_parity(one: Trial, many: Trial, replicas: int) -> None:
    """Refuse a layout that does not train as one process does, with the cause where it is seen."""
    _check_group(many)
    _check_samples(one, many, replicas)
    if replicas == len(many.ranks):
        _check_averaged(many)
    seed = Said(
        "nothing has been averaged yet, so the weights differ: give all ranks the same seed before the model is made.",
        "rien n’a encore été moyenné, ce sont donc les poids qui diffèrent : donnez la même graine à tous les rangs "
        "avant de créer le modèle.",
    )
    first = [abs(loss) for trial in (one, many) for loss in trial.record.losses[:1]]
    times = max(first) / min(first) if first and min(first) > 0 else 1.0
    cause = DIVIDED if round(times) > 1 and math.isclose(times, round(times), rel_tol=SAME_LOSS) else seed
    _check_losses(one, many, SAME_LOSS, steps=1, en=cause.en, fr=cause.fr)
    _check_gradients(one, many)
    _check_losses(
        one,
        many,
        SAME_LOSS,
        en="both read the same samples, so look at how gradients are averaged, and at what each rank's loss is "
        "divided by.",
        fr="les deux lisent les mêmes échantillons : regardez comment les gradients sont moyennés, et par quoi la "
        "perte de chaque rang est divisée.",
    )
    _check_saves(many)


def _check_gradients(one: Trial, many: Trial, cause: Said = DIVIDED) -> None:
    """Refuse gradients of the first step that are not as large; Adam would hide it.

    On a mesh of two axes, some ranks hold the same parts and others do not: they are not compared.
    """
    if any(rank.mesh_axes > 1 for rank in many.ranks):
        return
    found, first = _gradients(many), _gradients(one)
    ratio = math.sqrt(found / first) if first else 1.0
    if not math.isclose(ratio, 1.0, rel_tol=SAME_GRADIENTS):
        times = significant(ratio, 3)
        raise Wrong(
            en=f"The gradients of the first step are {times} times as large with {many.title} as with {one.title}: "
            f"{cause.en}",
            fr=f"Les gradients du premier pas sont {times} fois ceux de {one.title} avec {many.title} : {cause.fr}",
        )


def _gradients(trial: Trial) -> float:
    """Add up the squares of the gradients: once where all ranks hold the same, of each rank where they hold parts."""
    by_rank = [rank.gradients for rank in trial.ranks]
    if len({len(one) for one in by_rank}) > 1:
        return math.fsum(itertools.chain.from_iterable(by_rank))
    same = (math.isclose(min(squares), max(squares), rel_tol=SAME_ON_ONE) for squares in zip(*by_rank, strict=True))
    return math.fsum(
        squares[0] if alike else math.fsum(squares)
        for alike, squares in zip(same, zip(*by_rank, strict=True), strict=True)
    )


def _check_averaged(many: Trial) -> None:
    """Refuse replicas that average no gradients."""
    if not many.sent_bytes or (many.ranks[0].ddp and len({rank.weights for rank in many.ranks}) > 1):
        raise Wrong(
            en=f"With {many.title}, the ranks do not end with the same weights, or never send a gradient: wrap the "
            "model in DistributedDataParallel, and call the wrapped model, not the one inside.",
            fr=f"Avec {many.title}, les rangs ne finissent pas avec les mêmes poids, ou n’envoient aucun gradient : "
            "enveloppez le modèle dans DistributedDataParallel, et appelez le modèle enveloppé, non celui qui est à "
            "l’intérieur.",
        )


def _check_shards(one: Trial, many: Trial, most: float, en: str, fr: str) -> None:
    """Refuse ranks that hold more than a share of the parameters, or that have lost some of them."""
    whole = one.ranks[0].held
    held = [rank.held for rank in many.ranks]
    if max(held) > most * whole:
        raise Wrong(
            en=f"With {many.title}, a rank holds {percent(max(held) / whole)} of the parameters: {en}",
            fr=f"Avec {many.title}, un rang détient {percent(max(held) / whole)} des paramètres : {fr}",
        )
    if sum(held) < whole:
        raise Wrong(
            en=f"With {many.title}, the ranks hold {percent(sum(held) / whole)} of the parameters together: a part of "
            "the model is lost.",
            fr=f"Avec {many.title}, les rangs détiennent ensemble {percent(sum(held) / whole)} des paramètres : une "
            "partie du modèle est perdue.",
        )


def _plain(trials: ScriptTrials) -> None:
    _check_learns(trials(1), 0.9)


def _transformer(trials: ScriptTrials) -> None:
    trial = trials(1)
    _check_learns(trial, 1.1)
    if trial.ranks[0].blocks < 2:
        raise Wrong(
            en="No block with at least four parameters occurs twice in the model: a transformer is a list of equal "
            "blocks, in an nn.ModuleList or an nn.Sequential.",
            fr="Aucun bloc d’au moins quatre paramètres n’apparaît deux fois dans le modèle : un Transformer est une "
            "liste de blocs identiques, dans une nn.ModuleList ou un nn.Sequential.",
        )


def _memory(trials: ScriptTrials) -> None:
    plain, checkpointed = trials(1), trials(1, "--checkpointing")
    if (uses := plain.ranks[0].uses) > 1:
        raise Wrong(
            en=f"Without --checkpointing, the first step runs a layer {uses} times: each block is called once, through "
            "checkpoint or directly. Does the call that was there before still stand beside yours?",
            fr=f"Sans --checkpointing, le premier pas exécute une même couche {uses} fois : chaque bloc s’appelle une "
            "fois, par checkpoint ou directement. L’appel d’avant est-il resté à côté du vôtre ?",
        )
    _check_losses(
        plain,
        checkpointed,
        SAME_ON_ONE,
        en="checkpointing computes the same again, so no loss may change.",
        fr="le checkpointing recalcule la même chose : aucune perte ne doit changer.",
    )
    kept = [trial.activations_bytes for trial in (plain, checkpointed)]
    if kept[1] > 0.9 * kept[0]:
        raise Wrong(
            en=f"--checkpointing keeps {format_bytes(kept[1])} of activations, {format_bytes(kept[0])} without it: "
            "wrap the call of each block in torch.utils.checkpoint.checkpoint, and use what it returns.",
            fr=f"--checkpointing garde {format_bytes(kept[1])} d’activations, contre {format_bytes(kept[0])} sans : "
            "enveloppez l’appel de chaque bloc dans torch.utils.checkpoint.checkpoint, et utilisez ce qu’il renvoie.",
        )
    _check_rounded(plain, trials(1, "--bf16"))


def _check_rounded(plain: Trial, rounded: Trial) -> None:
    """Refuse a run with --bf16 whose losses are those of the run without it, or far from them."""
    if _differing_step(plain.record.losses, rounded.record.losses, 0.0) is None:
        raise Wrong(
            en=f"With {rounded.title}, no loss changes, not in its last digit: the forward pass must run inside "
            "torch.autocast.",
            fr=f"Avec {rounded.title}, aucune perte ne change, pas même au dernier chiffre : la passe avant doit "
            "s’exécuter dans torch.autocast.",
        )
    _check_losses(
        plain,
        rounded,
        0.05,
        en="products in bf16 change a loss by a percent, not by more: keep weights and optimizer in fp32.",
        fr="des produits en bf16 changent une perte d’un pour cent, pas plus : gardez poids et optimiseur en fp32.",
    )


def _data_parallel(trials: ScriptTrials) -> None:
    two = trials(2)
    _check_group(two)
    if two.ranks[0].ddp > 1:
        raise Wrong(
            en=f"DistributedDataParallel wraps {two.ranks[0].ddp} modules: wrap the whole model, once.",
            fr=f"DistributedDataParallel enveloppe {two.ranks[0].ddp} modules : enveloppez le modèle entier, une fois.",
        )
    _check_saves(two)
    _check_samples(two, two, replicas=2)
    _check_averaged(two)
    accumulated = trials(2, "--accumulation", "2")
    _check_samples(two, accumulated, replicas=2)
    if accumulated.sent_bytes > 1.5 * two.sent_bytes:
        raise Wrong(
            en=f"With --accumulation 2 a step sends {format_bytes(accumulated.sent_bytes)}, without it "
            f"{format_bytes(two.sent_bytes)}: run all micro-batches but the last one, forward and backward, "
            "under model.no_sync().",
            fr=f"Avec --accumulation 2, un pas envoie {format_bytes(accumulated.sent_bytes)}, contre "
            f"{format_bytes(two.sent_bytes)} sans : exécutez sous model.no_sync() les passes avant et "
            "arrière de tous les micro-batches sauf le dernier.",
        )
    _check_gradients(two, accumulated)
    one = trials(1)
    for many in (two, accumulated):
        _check_parity(one, many, replicas=2)


def _sharded(trials: ScriptTrials) -> None:
    folder = trials.checkpoint
    two, one = trials.layout(4, "--accumulation", "2", "--save", folder), trials(1)
    _check_group(two)
    _check_shards(
        one,
        two,
        0.6,
        en="call fully_shard on each block and on the model, before the optimizer is made.",
        fr="appelez fully_shard sur chaque bloc et sur le modèle, avant de créer l’optimiseur.",
    )
    if two.ranks[0].fsdp_units < 2:
        raise Wrong(
            en="fully_shard was called on the whole model alone, which gathers all of it at once: call it on each "
            "block first.",
            fr="fully_shard n’a été appelé que sur le modèle entier, qui est alors rassemblé d’un coup : appelez-le "
            "d’abord sur chaque bloc.",
        )
    if two.ranks[0].plain:
        raise Wrong(
            en=f"{percent(two.ranks[0].plain / one.ranks[0].held)} of the parameters are on every rank: call "
            "fully_shard on the whole model too, after its blocks.",
            fr=f"{percent(two.ranks[0].plain / one.ranks[0].held)} des paramètres sont sur chaque rang : appelez "
            "aussi fully_shard sur le modèle entier, après ses blocs.",
        )
    _check_parity(one, two, replicas=2)
    again = trials.layout(4, "--load", folder)
    if _differing_step(two.record.losses[:1], again.record.losses[:1], SAME_ON_ONE) is None:
        raise Wrong(
            en="--load changes nothing: the first loss is that of a model that was never trained. Load before the "
            "first step, and put what was loaded into model and optimizer.",
            fr="--load ne change rien : la première perte est celle d’un modèle jamais entraîné. Chargez avant le "
            "premier pas, et remettez ce qui a été lu dans le modèle et l’optimiseur.",
        )
    if not again.ranks[0].moments:
        raise Wrong(
            en="With --load, weights are read and the optimizer’s moments are not: they are zero before the first "
            "step.",
            fr="Avec --load, les poids sont lus, mais pas les moments de l’optimiseur : ils sont nuls avant le premier "
            "pas.",
        )
    alone = trials(1, "--load", folder)
    _check_losses(
        alone,
        again,
        SAME_LOSS,
        en="one process must read all that two ranks wrote.",
        fr="un processus doit lire tout ce que deux rangs ont écrit.",
    )


def _pipeline(trials: ScriptTrials) -> None:
    two, one = trials.layout(5), trials(1)
    _check_group(two)
    _check_shards(
        one,
        two,
        0.7,
        en="keep only the blocks of this rank's stage, before the optimizer is made.",
        fr="ne gardez que les blocs de l’étage de ce rang, avant de créer l’optimiseur.",
    )
    if (together := sum(rank.held for rank in two.ranks) / one.ranks[0].held) > 1:
        raise Wrong(
            en=f"Together the ranks hold {percent(together)} of the parameters: only the first one needs the patches "
            "and the position, and only the last one the norm and the head.",
            fr=f"Ensemble, les rangs détiennent {percent(together)} des paramètres : seul le premier a besoin des "
            "patches et de la position, et seul le dernier de la norme et de la tête.",
        )
    _check_parity(one, two, replicas=1)
    if two.ranks[0].schedule != "Schedule1F1B":
        found = two.ranks[0].schedule
        raise Wrong(
            en=f"The schedule is {found or 'none of torch.distributed.pipelining'}: Schedule1F1B is asked for.",
            fr=f"L’ordonnancement est {found or 'étranger à torch.distributed.pipelining'} : Schedule1F1B est demandé.",
        )
    if (cut := two.ranks[0].micro_batches) != 4:
        raise Wrong(
            en=f"With --accumulation 4, the schedule cuts the batch into {cut} micro-batches: give it the number that "
            "is asked for.",
            fr=f"Avec --accumulation 4, l’ordonnancement découpe le batch en {cut} micro-batches : donnez-lui le "
            "nombre demandé.",
        )
    _check_rounded(two, trials.layout(5, "--bf16"))


def _tensor_parallel(trials: ScriptTrials) -> None:
    two, one = trials.layout(6), trials(1)
    _check_group(two)
    if two.ranks[0].plain == one.ranks[0].held:
        raise Wrong(
            en=f"With {two.title}, no parameter is divided: call parallelize_module, with a plan whose names are those "
            "of both layers of each MLP.",
            fr=f"Avec {two.title}, aucun paramètre n’est découpé : appelez parallelize_module, avec un plan dont les "
            "noms sont ceux des deux couches de chaque MLP.",
        )
    _check_shards(
        one,
        two,
        0.8,
        en="give parallelize_module a plan whose names are those of both layers of each MLP.",
        fr="donnez à parallelize_module un plan dont les noms sont ceux des deux couches de chaque MLP.",
    )
    _check_parity(one, two, replicas=1)


def _two_axes(trials: ScriptTrials) -> None:
    four, one = trials.layout(7), trials(1)
    _check_group(four)
    if four.ranks[0].mesh_axes < 2:
        raise Wrong(
            en="No parameter lies on a mesh of two axes: call parallelize_module with the axis tp of the mesh first, "
            "then fully_shard with its axis dp.",
            fr="Aucun paramètre n’est réparti sur un maillage à deux axes : appelez d’abord parallelize_module avec "
            "l’axe tp du maillage, puis fully_shard avec son axe dp.",
        )
    _check_shards(
        one,
        four,
        0.45,
        en="the MLPs are to be split along tp, and all parameters along dp.",
        fr="les MLP doivent être découpés selon tp, et tous les paramètres selon dp.",
    )
    _check_parity(one, four, replicas=2)
    _check_parity(one, trials.layout(6), replicas=1)  # on a mesh of two axes, tp takes its own


def _measured(trials: ScriptTrials) -> None:
    for trial in (trials(1), trials(2, "--accumulation", "2")):
        _check_group(trial)
        _check_rate(trial)


def _check_rate(trial: Trial) -> None:
    """Refuse a script that prints no throughput of its epochs, or another one than was measured from outside."""
    first, *others = trial.rates
    if any(others):
        raise Wrong(
            en=f"With {trial.title}, several ranks print `samples/s`: let rank 0 print it, for all replicas.",
            fr=f"Avec {trial.title}, plusieurs rangs affichent `samples/s` : laissez le rang 0 l’afficher, pour toutes "
            "les répliques.",
        )
    if len(first) != 2:
        raise Wrong(
            en=f"With {trial.title}, rank 0 prints {len(first)} lines `samples/s NUMBER`, and one for each of the two "
            "epochs is asked for.",
            fr=f"Avec {trial.title}, le rang 0 affiche un nombre de lignes `samples/s NOMBRE` égal à {len(first)} : il "
            "en faut une pour chacune des deux époques.",
        )
    seconds = trial.record.step_s
    rate = BATCH * (len(seconds) // 2) / math.fsum(seconds[len(seconds) // 2 :])
    times = first[1] / rate
    if not 1 / SAME_RATE < times < SAME_RATE:
        told = f"{significant(first[1], 3)} samples/s", f"{significant(rate, 3)}"
        raise Wrong(
            en=f"With {trial.title}, the second epoch has {told[0]} by your script, and {told[1]} as measured from "
            "outside: count --batch samples for each step of the optimizer, and the seconds of this epoch alone.",
            fr=f"Avec {trial.title}, la deuxième époque a {told[0]} selon votre script, et {told[1]} mesurés de "
            "l’extérieur : comptez --batch échantillons par pas de l’optimiseur, et les secondes de cette seule "
            "époque.",
        )


def _compressed(trials: ScriptTrials) -> None:
    small, plain = trials.layout(9), trials(2)
    _check_group(small)
    _check_averaged(small)
    if small.sent_bytes > 0.6 * plain.sent_bytes:
        raise Wrong(
            en=f"With --compress a step sends {format_bytes(small.sent_bytes)}, without it "
            f"{format_bytes(plain.sent_bytes)}: give DDP a hook (register_comm_hook) that all-reduces the bucket in "
            "bf16.",
            fr=f"Avec --compress, un pas envoie {format_bytes(small.sent_bytes)}, contre "
            f"{format_bytes(plain.sent_bytes)} sans : donnez à DDP un hook (register_comm_hook) qui fait l’all-reduce "
            "du bucket en bf16.",
        )
    mean = Said(
        "the hook must return the mean of the ranks, in the bucket’s own precision.",
        "le hook doit renvoyer la moyenne des rangs, dans la précision du bucket.",
    )
    _check_gradients(plain, small, mean)
    if not small.ranks[0].fused:
        raise Wrong(
            en="--fused changes nothing: pass fused=args.fused to the optimizer.",
            fr="--fused ne change rien : passez fused=args.fused à l’optimiseur.",
        )
    _check_losses(
        plain,
        small,
        ROUNDED_LOSS,
        en="gradients in bf16 change a loss by less than a percent.",
        fr="des gradients en bf16 changent une perte de moins d’un pour cent.",
    )


def _experts(trials: ScriptTrials) -> None:
    two, one = trials.layout(10), trials(1, "--experts", "4")
    _check_group(two)
    footprint = two.record.footprint()
    if footprint is None or all(traffic.collective != "all_to_all" for traffic in footprint.communication):
        raise Wrong(
            en="With --experts 4 on two ranks, no all-to-all is seen: tokens must travel to the rank of their expert.",
            fr="Avec --experts 4 sur deux rangs, aucun all-to-all n’est vu : les tokens doivent aller au rang de leur "
            "expert.",
        )
    _check_shards(
        one,
        two,
        0.7,
        en="each rank keeps its share of the experts alone.",
        fr="chaque rang ne garde que sa part des experts.",
    )
    _check_samples(one, two, replicas=2)
    _check_losses(
        one,
        two,
        SAME_LOSS,
        steps=1,
        en="tokens must come back to the places that they left, with the weight of the gate; and DDP must not give all "
        "ranks the experts of rank 0.",
        fr="les tokens doivent revenir à la place qu’ils ont quittée, avec le poids de la porte ; et DDP ne doit pas "
        "donner à tous les rangs les experts du rang 0.",
    )
    mean = Said(
        "those of an expert come from the tokens of all ranks, so divide them by the number of ranks; DDP averages the "
        "others.",
        "ceux d’un expert viennent des tokens de tous les rangs : divisez-les par le nombre de rangs ; DDP moyenne les "
        "autres.",
    )
    _check_gradients(one, two, mean)
    _check_losses(
        one,
        two,
        SAME_LOSS,
        en="tokens must come back in the order in which they left, and so must gradients, in the backward pass of the "
        "all-to-all.",
        fr="les tokens doivent revenir dans l’ordre où ils sont partis, et les gradients aussi, dans la passe arrière "
        "de l’all-to-all.",
    )


def _compressed_model(trials: ScriptTrials) -> None:
    (_, *words), two = LAYOUTS[11][1], trials.layout(11)
    one = trials(1, "--quantize", *words)
    if (most := max(one.ranks[0].levels, default=0)) > 255:
        raise Wrong(
            en=f"With --quantize, a matrix has {most} different values in a product: round all weights of nn.Linear "
            "to whole numbers from −127 to 127, times one scale.",
            fr=f"Avec --quantize, une matrice a {most} valeurs différentes dans un produit : arrondissez tous les "
            "poids des nn.Linear à des entiers de −127 à 127, fois une échelle.",
        )
    if (still := one.ranks[0].gradients.count(0.0)) > STILL:
        raise Wrong(
            en=f"With --quantize, the gradients of {still} parameters are zero: a rounding has no slope, so let the "
            "gradient go through it unchanged, as a straight-through estimator does.",
            fr=f"Avec --quantize, les gradients de {still} paramètres sont nuls : un arrondi n’a pas de pente ; "
            "laissez le gradient le traverser inchangé, comme le fait un straight-through estimator.",
        )
    _check_learns(one, 1.0)
    for trial in (one, two):
        share = trial.ranks[0].zeros / trial.ranks[0].matrices
        if not 0.45 < share < 0.55:
            raise Wrong(
                en=f"With {trial.title}, {percent(share)} of the weights are zero at the end, and --prune asks for "
                "50%: mask the smallest ones of each matrix after the first epoch, and again after each step, which "
                "moves them.",
                fr=f"Avec {trial.title}, {percent(share)} des poids sont nuls à la fin, alors que --prune demande "
                "50 % : masquez les plus petits de chaque matrice après la première époque, et à nouveau après chaque "
                "pas, qui les déplace.",
            )
    _check_parity(one, two, replicas=2)


def _libraries(trials: ScriptTrials) -> None:
    one: Trial | None = None
    for way, name in (("deepspeed", "DeepSpeedEngine"), ("accelerate", "Accelerator")):
        two = trials(2, "--parallel", way, "--accumulation", "2")
        one = one or trials(1)
        if (found := two.ranks[0].library) != name:
            raise Wrong(
                en=f"With {two.title}, {found or 'PyTorch alone'} trains the model: {name} is asked for.",
                fr=f"Avec {two.title}, l’entraînement passe par {found or 'PyTorch seul'} : {name} est demandé.",
            )
        if name == "DeepSpeedEngine":
            _check_shards(
                one,
                two,
                0.6,
                en="give DeepSpeed’s configuration zero_optimization, with stage 1 or more.",
                fr="donnez zero_optimization à la configuration de DeepSpeed, avec un niveau (stage) d’au moins 1.",
            )
            _check_group(two)
            _check_samples(one, two, replicas=2)
            _check_losses(
                one,
                two,
                ROUNDED_LOSS,
                steps=3,
                en="DeepSpeed divides the loss by the micro-batches itself, and must know how many there are.",
                fr="DeepSpeed divise lui-même la perte par les micro-batches, et doit en connaître le nombre.",
            )
            _check_losses(
                one,
                two,
                SAME_LOSS,
                en="DeepSpeed clips the norm of the gradients at 1.0 unless its configuration says "
                '"gradient_clipping": 0.0.',
                fr="DeepSpeed écrête la norme des gradients à 1,0, sauf si sa configuration dit "
                '"gradient_clipping": 0.0.',
            )
        else:
            if not two.sent_bytes:
                raise Wrong(
                    en=f"With {two.title}, no rank sends a gradient: each trains alone. Without a GPU, Accelerator "
                    "needs cpu=True; and call the model that prepare gives back.",
                    fr=f"Avec {two.title}, aucun rang n’envoie de gradient : chacun s’entraîne seul. Sans GPU, "
                    "Accelerator a besoin de cpu=True ; et appelez le modèle que prepare renvoie.",
                )
            _check_parity(one, two, replicas=2)


CHECKS: tuple[Callable[[ScriptTrials], None], ...] = (
    _plain,
    _transformer,
    _memory,
    _data_parallel,
    _sharded,
    _pipeline,
    _tensor_parallel,
    _two_axes,
    _measured,
    _compressed,
    _experts,
    _compressed_model,
    _libraries,
)
"""One for each lab, in their order. Those with runs to compare begin with what the lab adds, in which a missing option
shows; lab 02 with the plain run."""


def judge_script(
    lab: str,
    path: Path,
    begin: Callable[[str], object] = lambda title: None,
    *,
    on: str = "local",
    machine: str | None = None,
    device: str = "cpu",
) -> Verdict:
    """Run a script as a lab asks for, and say what is right or wrong about it.

    Args:
        lab: two digits.
        begin: told the title of each run before it starts.
        on, machine, device: as for `dlojz.run`; jobs of a cluster write beside the runs, where every node reads.

    Raises:
        LabError: if the lab adds nothing to the script, there is no such file, or the runs are refused.
    """
    check = CHECKS[number_of_lab(lab)]
    if not path.is_file():
        raise refusal(
            en=f"{path} is no file: give the path of the script, or write one with `dlojz labs script {lab}`.",
            fr=f"{path} n’est pas un fichier : donnez le chemin du script, ou écrivez-en un par "
            f"`dlojz labs script {lab}`.",
        )
    shared = runs_root() if on == "slurm" else None
    if shared is not None:
        shared.mkdir(parents=True, exist_ok=True)
    where = {"on": on, "machine": machine, "device": device}
    with tempfile.TemporaryDirectory(prefix=".dlojz-script-", dir=shared) as folder:
        trials = ScriptTrials(path.absolute(), Path(folder), begin, where)
        try:
            check(trials)
            for trial in trials.done:
                _check_printed(trial)
        except Wrong as wrong:
            return Verdict("wrong", str(wrong))
        whole = max(rank.held for trial in trials.done for rank in trial.ranks)
        return Verdict("right", "\n".join([_praise(lab), *(_row(trial, whole) for trial in trials.done)]))


def judge_in_notebook(lab: Lab, script: str | Path, **where: Any) -> None:
    """Judge a student's script as the open lab asks for, show the verdict, and remember a right one.

    A script never costs the notebook its kernel: it runs in separate processes.

    Args:
        lab: the one that is open.
        script: path of the script, from the notebook's folder or from one above it, where a terminal starts.
        where: `on`, `machine` and `device`, as for `dlojz.run`.
    """
    given, here = Path(script).expanduser(), Path.cwd()
    path = next((one for folder in (here, *here.parents[:LEVELS]) if (one := folder / given).exists()), given)
    if not path.exists():
        folder = shlex.quote(str(path.parent))
        show(
            Verdict(
                "todo",
                say(
                    en=f"{path} is not there yet: `dlojz labs script {lab.number} {folder}` in a terminal, or with a "
                    "`!` before it in a cell here, writes what this lab begins with. Fill it in, then run this cell "
                    "again.",
                    fr=f"{path} n’existe pas encore : `dlojz labs script {lab.number} {folder}` dans un terminal, ou "
                    "précédé de `!` dans une cellule ici, écrit ce par quoi ce TP commence. Complétez-le, puis "
                    "relancez cette cellule.",
                ),
            )
        )
        return
    try:
        print(path.resolve(), flush=True)
        verdict = judge_script(lab.number, path, lambda title: print(f"… {title}", flush=True), **where)
    except LabError as error:
        verdict = Verdict("wrong", str(error))
    show(verdict)
    if verdict.state == "right":
        lab.remember(SCRIPT)


def _praise(lab: str) -> str:
    return say(
        en=f"Right: your script does on real processes what lab {lab} asks for.",
        fr=f"Juste : votre script fait, sur de vrais processus, ce que demande le TP {lab}.",
    )


def _row(trial: Trial, whole: int) -> str:
    """One run in a line: its losses, what a rank holds and sends, and whether that was predicted."""
    losses, rank = trial.record.losses, trial.ranks[0]
    exact = compare(trial.record).rows[0].exact if trial.sent_bytes else None
    predicted = {
        True: Said(", as predicted", ", comme prédit"),
        False: Said(", other than predicted for such a model", ", autrement que prédit pour un tel modèle"),
        None: "",
    }[exact]
    sent = say(
        en=f"; {format_bytes(trial.sent_bytes)} sent per step{predicted}",
        fr=f" ; {format_bytes(trial.sent_bytes)} envoyés par pas{predicted}",
    )
    return say(
        en=f"{trial.title}: loss {significant(losses[0], 4)} → {significant(losses[-1], 4)} in {len(losses)} steps; "
        f"{percent(rank.held / whole)} of the parameters on rank 0{sent if trial.sent_bytes else ''}",
        fr=f"{trial.title} : perte {significant(losses[0], 4)} → {significant(losses[-1], 4)} en {len(losses)} pas ; "
        f"{percent(rank.held / whole)} des paramètres sur le rang 0{sent if trial.sent_bytes else ''}",
    )
