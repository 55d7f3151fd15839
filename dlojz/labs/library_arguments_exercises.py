"""Lab 12: the layout that a command line of Megatron asks for.

Layer 6 (labs). Invariant: four whole numbers, by Megatron's own rules; what is left out has Megatron's defaults.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.verdict import Said
from dlojz.text import say

Numbers = tuple[int, int, int, int]

GPT3 = (
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers 96 --hidden-size 12288 "
    "--num-attention-heads 96 --seq-length 2048 --micro-batch-size 1 --global-batch-size 1536 --lr 6.0e-5 "
    "--clip-grad 1.0 --fp16"
)
"""GPT-3, as in an example of Megatron-LM (pretrain_gpt3_175B.sh), which asks for 128 nodes of 8 GPUs."""
GPT3_GPUS = 128 * 8
CASES = (
    (GPT3, GPT3_GPUS),
    ("--num-layers 24 --tensor-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 64 --bf16", 16),
    ("--micro-batch-size 8 --pipeline-model-parallel-size 4 --global-batch-size 96", 12),
    ("--lr 1e-4 --micro-batch-size 2 --tensor-model-parallel-size 4", 8),
    ("--fp16 --global-batch-size 120 --micro-batch-size 5 --clip-grad 1.0", 6),
)
"""Command lines, and numbers of GPUs; in the fourth, no global batch is given."""


def megatron_layout(words: Sequence[str], gpus: int) -> Numbers:
    """Tensor and pipeline degrees, replicas, and micro-batches of a replica per step.

    Args:
        words: what follows the program's name.
        gpus: processes in all.

    Source: Narayanan et al. 2021 (arXiv 2104.04473): p · t · d = n, and m = B / (b · d); defaults as Megatron-LM's
    `arguments.py` sets them: degrees of 1, a global batch of one micro-batch per replica.
    """
    given = dict(pairwise(words))
    tp = int(given.get("--tensor-model-parallel-size", 1))
    pp = int(given.get("--pipeline-model-parallel-size", 1))
    dp = gpus // (tp * pp)
    micro = int(given["--micro-batch-size"])
    return tp, pp, dp, int(given.get("--global-batch-size", micro * dp)) // (micro * dp)


def _ways(words: Sequence[str], gpus: int) -> dict[str, tuple[Numbers, Said]]:
    """What the usual mistakes would give, and what to say of each."""
    tp, pp, dp, m = megatron_layout(words, gpus)
    given = dict(pairwise(words))
    micro = int(given["--micro-batch-size"])
    batch = int(given.get("--global-batch-size", micro * dp))
    return {
        "no default": (
            (tp, pp, dp, 0),
            Said(
                "No global batch is given here: Megatron then takes one micro-batch per replica, not none.",
                "Ici, aucun batch global n’est donné : Megatron prend alors un micro-batch par réplique, et non zéro.",
            ),
        ),
        "all gpus": (
            (tp, pp, gpus, batch // (micro * gpus)),
            Said(
                f"dp={gpus} counts every GPU: a replica of the model takes tp × pp = {tp * pp} of them.",
                f"dp={gpus} compte chaque GPU : une réplique du modèle en occupe tp × pp = {tp * pp}.",
            ),
        ),
        "without pp": (
            (tp, pp, gpus // tp, batch // (micro * (gpus // tp))),
            Said(
                f"dp={gpus // tp} forgets the pipeline: a replica takes tp × pp = {tp * pp} GPUs.",
                f"dp={gpus // tp} oublie le pipeline : une réplique occupe tp × pp = {tp * pp} GPU.",
            ),
        ),
        "without tp": (
            (tp, pp, gpus // pp, batch // (micro * (gpus // pp))),
            Said(
                f"dp={gpus // pp} forgets the tensor degree: a replica takes tp × pp = {tp * pp} GPUs.",
                f"dp={gpus // pp} oublie le degré tensor : une réplique occupe tp × pp = {tp * pp} GPU.",
            ),
        ),
        "batch of all": (
            (tp, pp, dp, batch // micro),
            Said(
                f"{batch // micro} micro-batches are those of all {dp} replicas together: each has its share.",
                f"{batch // micro} micro-batches, c’est le compte des {dp} répliques ensemble : chacune en a sa part.",
            ),
        ),
        "batch by gpus": (
            (tp, pp, dp, batch // (micro * gpus)),
            Said(
                "You share the batch out among all GPUs, but those of one replica work on the same samples: divide by "
                f"the replicas, dp={dp}.",
                "Vous partagez le batch entre tous les GPU, or ceux d’une même réplique traitent les mêmes "
                f"échantillons : divisez par le nombre de répliques, dp={dp}.",
            ),
        ),
        "samples": (
            (tp, pp, dp, batch // dp),
            Said(
                f"{batch // dp} are the samples of a replica per step; divide by --micro-batch-size.",
                f"{batch // dp}, c’est le nombre d’échantillons d’une réplique par pas ; divisez par "
                "--micro-batch-size.",
            ),
        ),
        "swapped": (
            (pp, tp, dp, m),
            Said(
                "The tensor and pipeline degrees are swapped: (tp, pp, dp, micro-batches).",
                "Les degrés tensor et pipeline sont intervertis : (tp, pp, dp, micro-batches).",
            ),
        ),
    }


def _judge(answer: Callable[..., Any]) -> None:
    for line, gpus in CASES:
        words = shlex.split(line)
        given, right = _numbers(answer(list(words), gpus)), megatron_layout(words, gpus)
        if given == right:
            continue
        for numbers, says in _ways(words, gpus).values():
            if given == numbers:
                raise Wrong(_asked(line, gpus) + str(says))
        for name, mine, wanted in zip(("tp", "pp", "dp", "micro-batches"), given, right, strict=True):
            if mine != wanted:
                raise Wrong(
                    _asked(line, gpus)
                    + say(
                        en=f"Megatron would take {name}={wanted}, but your function returns {mine}.",
                        fr=f"Megatron prendrait {name}={wanted}, mais votre fonction renvoie {mine}.",
                    )
                )


def _asked(line: str, gpus: int) -> str:
    return say(en=f"On {gpus} GPUs, with {line}: ", fr=f"Sur {gpus} GPU, avec {line} : ")


def _numbers(given: Any) -> Numbers:
    if given is None:
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return.",
                fr="Votre fonction ne renvoie rien : terminez-la par return.",
            )
        )
    if not isinstance(given, tuple | list) or len(given) != 4:
        raise Wrong(
            say(
                en="Four numbers are expected: tp, pp, dp and the micro-batches of a replica.",
                fr="On attend quatre nombres : tp, pp, dp et le nombre de micro-batches d’une réplique.",
            )
        )
    if any(isinstance(one, str) for one in given):
        raise Wrong(
            say(
                en="Some of the four are texts: what a command line gives must be turned into numbers, int(…).",
                fr="Certains des quatre sont des textes : ce que donne une ligne de commande doit devenir un nombre, "
                "int(…).",
            )
        )
    if any(one != int(one) for one in given):
        raise Wrong(
            say(
                en=f"{tuple(given)}: degrees and counts are whole numbers.",
                fr=f"{tuple(given)} : degrés et comptes sont des nombres entiers.",
            )
        )
    tp, pp, dp, micro_batches = (int(one) for one in given)
    return tp, pp, dp, micro_batches


MEGATRON_ARGUMENTS = Exercise(
    id="megatron-arguments",
    title=Said("the layout that a command line tells", "la répartition qu’indique une ligne de commande"),
    judge=_judge,
    praise=Said(
        "Right: nobody gives dp on the line; it is what is left of the GPUs.",
        "Exact : personne n’écrit dp sur la ligne ; c’est ce qui reste des GPU.",
    ),
    hints=(
        Said(
            "Which options are there always? Degrees that are left out are 1. dp is left over: gpus over what one "
            "replica takes.",
            "Quelles options sont toujours là ? Un degré absent vaut 1. dp est ce qui reste : gpus divisé par ce "
            "qu’occupe une réplique.",
        ),
        Said(
            "dict(zip(words, words[1:])) gives each option its value; .get(option, default). The default global batch "
            "is micro × dp, so that there is one micro-batch.",
            "dict(zip(words, words[1:])) associe à chaque option sa valeur ; .get(option, défaut). Le batch global par "
            "défaut est micro × dp, soit un seul micro-batch.",
        ),
    ),
)
