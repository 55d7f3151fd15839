"""Judge a training script by what it does on real processes; its text is never read.

The script runs under the watch of `dlojz.run` (`script_trials.py`), and `rank_observer.py` notes what each rank read,
held and saved. Layouts are compared with one process of the same script: the same losses, of the same
samples.
"""

from __future__ import annotations

import itertools
import math
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlojz.base.errors import LabError
from dlojz.base.language import format_bytes, integer, percent, refusal, say, significant
from dlojz.compare import compare
from dlojz.labs.kit.exercise import Said, Verdict, Wrong, show
from dlojz.labs.kit.lab import SCRIPT, Lab
from dlojz.labs.script.growing_script import LAYOUTS, number_of_lab
from dlojz.labs.script.script_trials import BATCH, LibraryMissing, ScriptTrials
from dlojz.libraries.scripts.rank_report import Trial
from dlojz.libraries.scripts.script_parity import (
    SAME_LOSS,
    SAME_ON_ONE,
    SHARED_SAMPLES,
    check_averaged,
    check_gradients,
    check_group,
    check_losses,
    check_orders,
    check_saves,
    check_shares,
    check_trained_alike,
    differing_step,
)
from dlojz.running.store import runs_root

ROUNDED_LOSS = 0.01
"""Relative distance of losses, where gradients are rounded to bf16."""
SAME_RATE = 1.4
"""Factor by which a script's own throughput may differ from the one that is measured from outside."""
STILL = 3
"""Parameters that may have no gradient without being told."""
SAME_PRINTED = 1.3
"""Factor by which the loss that a rank prints, of the samples it reads, may differ from the mean of all ranks."""
LEVELS = 3
"""Folders above the notebook's in which its script is looked for."""


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


def _plain(trials: ScriptTrials) -> None:
    check_learns(trials(1), 0.9)


def _transformer(trials: ScriptTrials) -> None:
    trial = trials(1)
    check_learns(trial, 1.1)
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
    check_losses(
        plain,
        checkpointed,
        SAME_ON_ONE,
        en="checkpointing computes the same again, so no loss may change.",
        fr="le checkpointing recalcule la même chose : aucune perte ne doit changer.",
    )
    sizes = [trial.activations_bytes for trial in (plain, checkpointed)]
    if sizes[1] > 0.9 * sizes[0]:
        raise Wrong(
            en=f"--checkpointing keeps {format_bytes(sizes[1])} of activations, {format_bytes(sizes[0])} without it: "
            "wrap the call of each block in torch.utils.checkpoint.checkpoint, and use what it returns.",
            fr=f"--checkpointing garde {format_bytes(sizes[1])} d’activations, contre {format_bytes(sizes[0])} sans : "
            "enveloppez l’appel de chaque bloc dans torch.utils.checkpoint.checkpoint, et utilisez ce qu’il renvoie.",
        )
    _check_rounded(plain, trials(1, "--bf16"))


def _check_rounded(plain: Trial, rounded: Trial) -> None:
    """Refuse a run with --bf16 whose losses are those of the run without it, or far from them."""
    if differing_step(plain.record.losses, rounded.record.losses, 0.0) is None:
        raise Wrong(
            en=f"With {rounded.title}, no loss changes, not in its last digit: the forward pass must run inside "
            "torch.autocast.",
            fr=f"Avec {rounded.title}, aucune perte ne change, pas même au dernier chiffre : la passe avant doit "
            "s’exécuter dans torch.autocast.",
        )
    check_losses(
        plain,
        rounded,
        0.05,
        en="products in bf16 change a loss by a percent, not by more: keep weights and optimizer in fp32.",
        fr="des produits en bf16 changent une perte d’un pour cent, pas plus : gardez poids et optimiseur en fp32.",
    )


def _data_parallel(trials: ScriptTrials) -> None:
    two = trials(2)
    check_group(two)
    if two.ranks[0].ddp > 1:
        raise Wrong(
            en=f"DistributedDataParallel wraps {two.ranks[0].ddp} modules: wrap the whole model, once.",
            fr=f"DistributedDataParallel enveloppe {two.ranks[0].ddp} modules : enveloppez le modèle entier, une fois.",
        )
    check_saves(two)
    check_samples(two, two, replicas=2)
    check_averaged(two)
    accumulated = trials(2, "--accumulation", "2")
    check_samples(two, accumulated, replicas=2)
    # As much as without accumulation under no_sync, twice as much without: 1.5 lies between.
    if accumulated.sent_bytes > 1.5 * two.sent_bytes:
        raise Wrong(
            en=f"With --accumulation 2 a step sends {format_bytes(accumulated.sent_bytes)}, without it "
            f"{format_bytes(two.sent_bytes)}: run all micro-batches but the last one, forward and backward, "
            "under model.no_sync().",
            fr=f"Avec --accumulation 2, un pas envoie {format_bytes(accumulated.sent_bytes)}, contre "
            f"{format_bytes(two.sent_bytes)} sans : exécutez sous model.no_sync() les passes avant et "
            "arrière de tous les micro-batches sauf le dernier.",
        )
    check_gradients(two, accumulated)
    base = trials(1)
    for many in (two, accumulated):
        check_parity(base, many, replicas=2)


def _sharded(trials: ScriptTrials) -> None:
    folder = trials.checkpoint
    two, base = trials.layout(4, "--accumulation", "2", "--save", folder), trials(1)
    check_group(two)
    check_shards(
        base,
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
            en=f"{percent(two.ranks[0].plain / base.ranks[0].held)} of the parameters are on every rank: call "
            "fully_shard on the whole model too, after its blocks.",
            fr=f"{percent(two.ranks[0].plain / base.ranks[0].held)} des paramètres sont sur chaque rang : appelez "
            "aussi fully_shard sur le modèle entier, après ses blocs.",
        )
    check_parity(base, two, replicas=2)
    resumed_run = trials.layout(4, "--load", folder)
    if differing_step(two.record.losses[:1], resumed_run.record.losses[:1], SAME_ON_ONE) is None:
        raise Wrong(
            en="--load changes nothing: the first loss is that of a model that was never trained. Load before the "
            "first step, and put what was loaded into model and optimizer.",
            fr="--load ne change rien : la première perte est celle d’un modèle jamais entraîné. Chargez avant le "
            "premier pas, et remettez ce qui a été lu dans le modèle et l’optimiseur.",
        )
    if not resumed_run.ranks[0].moments:
        raise Wrong(
            en="With --load, weights are read and the optimizer’s moments are not: they are zero before the first "
            "step.",
            fr="Avec --load, les poids sont lus, mais pas les moments de l’optimiseur : ils sont nuls avant le premier "
            "pas.",
        )
    single_run = trials(1, "--load", folder)
    check_losses(
        single_run,
        resumed_run,
        SAME_LOSS,
        en="one process must read all that two ranks wrote.",
        fr="un processus doit lire tout ce que deux rangs ont écrit.",
    )


def _pipeline(trials: ScriptTrials) -> None:
    two, base = trials.layout(5), trials(1)
    check_group(two)
    check_shards(
        base,
        two,
        0.7,
        en="keep only the blocks of this rank's stage, before the optimizer is made.",
        fr="ne gardez que les blocs de l’étage de ce rang, avant de créer l’optimiseur.",
    )
    # More than 1: something outside of the blocks is held by both stages.
    if (together := sum(rank.held for rank in two.ranks) / base.ranks[0].held) > 1:
        raise Wrong(
            en=f"Together the ranks hold {percent(together)} of the parameters: only the first one needs the patches "
            "and the position, and only the last one the norm and the head.",
            fr=f"Ensemble, les rangs détiennent {percent(together)} des paramètres : seul le premier a besoin des "
            "patches et de la position, et seul le dernier de la norme et de la tête.",
        )
    check_parity(base, two, replicas=1)
    if two.ranks[0].schedule != "Schedule1F1B":
        name = two.ranks[0].schedule
        raise Wrong(
            en=f"The schedule is {name or 'none of torch.distributed.pipelining'}: Schedule1F1B is asked for.",
            fr=f"L’ordonnancement est {name or 'étranger à torch.distributed.pipelining'} : Schedule1F1B est demandé.",
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
    two, base = trials.layout(6), trials(1)
    check_group(two)
    if two.ranks[0].plain == base.ranks[0].held:
        raise Wrong(
            en=f"With {two.title}, no parameter is divided: call parallelize_module, with a plan whose names are those "
            "of both layers of each MLP.",
            fr=f"Avec {two.title}, aucun paramètre n’est découpé : appelez parallelize_module, avec un plan dont les "
            "noms sont ceux des deux couches de chaque MLP.",
        )
    check_shards(
        base,
        two,
        0.8,
        en="give parallelize_module a plan whose names are those of both layers of each MLP.",
        fr="donnez à parallelize_module un plan dont les noms sont ceux des deux couches de chaque MLP.",
    )
    rank0 = two.ranks[0]
    if rank0.plain < rank0.held and not rank0.by_rows:
        raise Wrong(
            en=f"With {two.title}, {rank0.by_columns} matrices are split by columns, and none by rows: then the hidden "
            "features are brought together between the two layers of an MLP. The second one goes by rows "
            "(RowwiseParallel), and takes those of its rank as they are.",
            fr=f"Avec {two.title}, {rank0.by_columns} matrices sont découpées par colonne, et aucune par ligne : les "
            "neurones cachés sont alors rassemblés entre les deux couches d’un MLP. La seconde se découpe par ligne "
            "(RowwiseParallel), et prend ceux de son rang tels quels.",
        )
    check_parity(base, two, replicas=1)


def _two_axes(trials: ScriptTrials) -> None:
    four, base = trials.layout(7), trials(1)
    check_group(four)
    if four.ranks[0].mesh_axes < 2:
        raise Wrong(
            en="No parameter lies on a mesh of two axes: call parallelize_module with the axis tp of the mesh first, "
            "then fully_shard with its axis dp.",
            fr="Aucun paramètre n’est réparti sur un maillage à deux axes : appelez d’abord parallelize_module avec "
            "l’axe tp du maillage, puis fully_shard avec son axe dp.",
        )
    check_shards(
        base,
        four,
        0.45,
        en="the MLPs are to be split along tp, and all parameters along dp.",
        fr="les MLP doivent être découpés selon tp, et tous les paramètres selon dp.",
    )
    for row in {rank.mesh_row for rank in four.ranks}:
        samples = {rank.epochs for rank in four.ranks if rank.mesh_row == row}
        if len(samples) > 1:
            raise Wrong(
                en=f"With {four.title}, ranks that hold parts of one model (along tp) read different samples: the "
                "index of the replica is the rank's place along dp, mesh['dp'].get_local_rank().",
                fr=f"Avec {four.title}, des rangs qui détiennent les parts d’un même modèle (selon tp) lisent des "
                "échantillons différents : l’indice de la réplique est la place du rang selon dp, "
                "mesh['dp'].get_local_rank().",
            )
    check_parity(base, four, replicas=2)
    check_parity(base, trials.layout(6), replicas=1)  # on a mesh of two axes, tp takes its own


def _measured(trials: ScriptTrials) -> None:
    for trial in (trials(1), trials(2, "--accumulation", "2")):
        check_group(trial)
        _check_rate(trial)


def _check_rate(trial: Trial) -> None:
    """Refuse a script that prints no throughput of its epochs, or another one than was measured from outside."""
    rates, *other_rates = trial.rates
    if any(other_rates):
        raise Wrong(
            en=f"With {trial.title}, several ranks print `samples/s`: let rank 0 print it, for all replicas.",
            fr=f"Avec {trial.title}, plusieurs rangs affichent `samples/s` : laissez le rang 0 l’afficher, pour toutes "
            "les répliques.",
        )
    if len(rates) != 2:
        raise Wrong(
            en=f"With {trial.title}, rank 0 prints {len(rates)} lines `samples/s NUMBER`, and one for each of the two "
            "epochs is asked for.",
            fr=f"Avec {trial.title}, le rang 0 affiche un nombre de lignes `samples/s NOMBRE` égal à {len(rates)} : il "
            "en faut une pour chacune des deux époques.",
        )
    seconds = trial.record.step_s
    # In s: the second half of the steps is the second epoch.
    rate = BATCH * (len(seconds) // 2) / math.fsum(seconds[len(seconds) // 2 :])
    times = rates[1] / rate
    if not 1 / SAME_RATE < times < SAME_RATE:
        texts = f"{significant(rates[1], 3)} samples/s", f"{significant(rate, 3)}"
        raise Wrong(
            en=f"With {trial.title}, the second epoch has {texts[0]} by your script, and {texts[1]} as measured from "
            "outside: count --batch samples for each step of the optimizer, and the seconds of this epoch alone.",
            fr=f"Avec {trial.title}, la deuxième époque a {texts[0]} selon votre script, et {texts[1]} mesurés de "
            "l’extérieur : comptez --batch échantillons par pas de l’optimiseur, et les secondes de cette seule "
            "époque.",
        )


def _compressed(trials: ScriptTrials) -> None:
    small, plain = trials.layout(9), trials(2)
    check_group(small)
    check_averaged(small)
    # bf16 halves the bytes of the gradients; 0.6 leaves room for what else is sent.
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
    check_gradients(plain, small, mean)
    if not small.ranks[0].fused:
        raise Wrong(
            en="--fused changes nothing: pass fused=args.fused to the optimizer.",
            fr="--fused ne change rien : passez fused=args.fused à l’optimiseur.",
        )
    check_losses(
        plain,
        small,
        ROUNDED_LOSS,
        en="gradients in bf16 change a loss by less than a percent.",
        fr="des gradients en bf16 changent une perte de moins d’un pour cent.",
    )


def _experts(trials: ScriptTrials) -> None:
    two, base = trials.layout(10), trials(1, "--experts", "4")
    check_group(two)
    footprint = two.record.footprint()
    if footprint is None or all(traffic.collective != "all_to_all" for traffic in footprint.communication):
        raise Wrong(
            en="With --experts 4 on two ranks, no all-to-all is seen: tokens must travel to the rank of their expert.",
            fr="Avec --experts 4 sur deux rangs, aucun all-to-all n’est vu : les tokens doivent aller au rang de leur "
            "expert.",
        )
    check_shards(
        base,
        two,
        0.7,
        en="each rank keeps its share of the experts alone.",
        fr="chaque rang ne garde que sa part des experts.",
    )
    check_samples(base, two, replicas=2)
    check_losses(
        base,
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
    check_gradients(base, two, mean)
    check_losses(
        base,
        two,
        SAME_LOSS,
        en="tokens must come back in the order in which they left, and so must gradients, in the backward pass of the "
        "all-to-all.",
        fr="les tokens doivent revenir dans l’ordre où ils sont partis, et les gradients aussi, dans la passe arrière "
        "de l’all-to-all.",
    )


def _compressed_model(trials: ScriptTrials) -> None:
    (_, *words), two = LAYOUTS[11][1], trials.layout(11)
    base = trials(1, "--quantize", *words)
    if (levels := max(base.ranks[0].levels, default=0)) > 255:
        raise Wrong(
            en=f"With --quantize, a matrix has {levels} different values in a product: round all weights of nn.Linear "
            "to whole numbers from −127 to 127, times one scale.",
            fr=f"Avec --quantize, une matrice a {levels} valeurs différentes dans un produit : arrondissez tous les "
            "poids des nn.Linear à des entiers de −127 à 127, fois une échelle.",
        )
    if (still := base.ranks[0].gradients.count(0.0)) > STILL:
        raise Wrong(
            en=f"With --quantize, the gradients of {still} parameters are zero: a rounding has no slope, so let the "
            "gradient go through it unchanged, as a straight-through estimator does.",
            fr=f"Avec --quantize, les gradients de {still} paramètres sont nuls : un arrondi n’a pas de pente ; "
            "laissez le gradient le traverser inchangé, comme le fait un straight-through estimator.",
        )
    check_learns(base, 1.0)
    for trial in (base, two):
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
    check_parity(base, two, replicas=2)


def _libraries(trials: ScriptTrials) -> None:
    base: Trial | None = None
    for library, name in (("deepspeed", "DeepSpeedEngine"), ("accelerate", "Accelerator")):
        try:
            two = trials(2, "--parallel", library, "--accumulation", "2")
        except LibraryMissing as missing:
            if library != "accelerate":
                raise
            trials.not_judged.append(str(missing))  # Accelerate is optional
            continue
        base = base or trials(1)
        if (engine := two.ranks[0].library) != name:
            raise Wrong(
                en=f"With {two.title}, {engine or 'PyTorch alone'} trains the model: {name} is asked for.",
                fr=f"Avec {two.title}, l’entraînement passe par {engine or 'PyTorch seul'} : {name} est demandé.",
            )
        if name == "DeepSpeedEngine":
            check_shards(
                base,
                two,
                0.6,
                en="give DeepSpeed’s configuration zero_optimization, with stage 1 or more.",
                fr="donnez zero_optimization à la configuration de DeepSpeed, avec un niveau (stage) d’au moins 1.",
            )
            check_group(two)
            check_samples(base, two, replicas=2)
            check_gradients(base, two)
            check_losses(
                base,
                two,
                ROUNDED_LOSS,
                steps=3,
                en="DeepSpeed divides the loss by the micro-batches itself, and must know how many there are.",
                fr="DeepSpeed divise lui-même la perte par les micro-batches, et doit en connaître le nombre.",
            )
            check_losses(
                base,
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
            check_parity(base, two, replicas=2)


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
    placement = {"on": on, "machine": machine, "device": device}
    with tempfile.TemporaryDirectory(prefix=".dlojz-script-", dir=shared) as folder:
        trials = ScriptTrials(path.absolute(), Path(folder), begin, placement)
        try:
            check(trials)
            for trial in trials.done:
                check_printed(trial)
        except Wrong as wrong:
            return Verdict("wrong", str(wrong))
        except LibraryMissing as missing:
            return Verdict("note", str(missing))
        # The most that a rank held in any run: all parameters, as some run of each lab shares none.
        total_elements = max(rank.held for trial in trials.done for rank in trial.ranks)
        rows = [_row(trial, total_elements) for trial in trials.done]
        return Verdict("right", "\n".join([_praise(lab), *rows, *trials.not_judged]))


def judge_in_notebook(lab: Lab, script: str | Path, **placement: Any) -> None:
    """Judge a student's script as the open lab asks for, show the verdict, and remember a right one.

    A script never costs the notebook its kernel: it runs in separate processes.

    Args:
        lab: the one that is open.
        script: path of the script, from the notebook's folder or from one above it, where a terminal starts.
        placement: `on`, `machine` and `device`, as for `dlojz.run`.
    """
    script_path, cwd = Path(script).expanduser(), Path.cwd()
    path = next(
        (candidate for folder in (cwd, *cwd.parents[:LEVELS]) if (candidate := folder / script_path).exists()),
        script_path,
    )
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
        verdict = judge_script(lab.number, path, lambda title: print(f"… {title}", flush=True), **placement)
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


def _beside_prediction(trial: Trial) -> Said | str:
    """How the bytes of a run compare with those predicted for such a model; nothing where one side is not known."""
    row = compare(trial.record).rows[0] if trial.sent_bytes else None
    if row is None or row.exact is None:
        return ""
    if row.exact:
        return Said(", as predicted", ", comme prédit")
    predicted_bytes = sum(pair.message_bytes.predicted or 0 for pair in row.communication)
    if predicted_bytes == trial.sent_bytes:
        return Said(
            ", as many as predicted for such a model, by other messages",
            ", autant que prédit pour un tel modèle, par d’autres messages",
        )
    told = format_bytes(predicted_bytes)
    return Said(f" ({told} predicted for such a model)", f" (prédit pour un tel modèle : {told})")


def _row(trial: Trial, total_elements: int) -> str:
    """One run in a line: its losses, what a rank holds and sends, and whether that was predicted."""
    losses, rank = trial.record.losses, trial.ranks[0]
    predicted = _beside_prediction(trial)
    sent_text = say(
        en=f"; {format_bytes(trial.sent_bytes)} sent per step{predicted}",
        fr=f" ; {format_bytes(trial.sent_bytes)} envoyés par pas{predicted}",
    )
    return say(
        en=f"{trial.title}: loss {significant(losses[0], 4)} → {significant(losses[-1], 4)} in {len(losses)} steps; "
        f"{percent(rank.held / total_elements)} of the parameters on rank 0{sent_text if trial.sent_bytes else ''}",
        fr=f"{trial.title} : perte {significant(losses[0], 4)} → {significant(losses[-1], 4)} en {len(losses)} pas ; "
        f"{percent(rank.held / total_elements)} des paramètres sur le rang 0{sent_text if trial.sent_bytes else ''}",
    )
