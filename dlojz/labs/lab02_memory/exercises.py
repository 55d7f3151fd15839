"""Exercises of lab 02 on what memory holds: states and peak, one layer's activations, the largest batch, a replica.

The references are the closed forms of `dlojz.prediction.rules_of_thumb`, which the probe confirms to the byte.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import product
from random import Random
from typing import Any, NamedTuple

from dlojz.base.language import shortest
from dlojz.base.table import Table
from dlojz.labs.kit.answer_numbers import plain
from dlojz.labs.kit.exercise import Challenge, Exercise, Mistake, Said, Wrong, or_to_do
from dlojz.labs.kit.judges import Judge, shown
from dlojz.prediction.rules_of_thumb import Shape, layer_bytes
from dlojz.prediction.rules_of_thumb import bytes_per_parameter as form

PRECISIONS = ("fp32", "autocast", "bf16", "bf16_fp32_gradients")
OPTIMIZERS = ("sgd", "momentum", "adamw")


def bytes_per_parameter(precision: str, optimizer: str) -> int:
    """Bytes of all states per parameter on one device: weight, gradient, master copy and moments.

    Source: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), §3.1; see `dlojz.prediction.rules_of_thumb`.
    """
    return int(form(precision, optimizer).device_per_parameter)  # type: ignore[arg-type]


def _variant(weights: dict[str, tuple[int, int, int]], moments: Callable[[str, str], int]) -> Callable[[str, str], int]:
    return lambda precision, optimizer: sum(weights[precision]) + moments(precision, optimizer)


_RIGHT = {"fp32": (4, 4, 0), "autocast": (4, 4, 0), "bf16": (2, 2, 4), "bf16_fp32_gradients": (2, 4, 4)}
_MOMENTS = {"sgd": 0, "momentum": 1, "adamw": 2}


def _fp32_moments(precision: str, optimizer: str) -> int:
    return 4 * _MOMENTS[optimizer]


BYTES_PER_PARAMETER = Exercise(
    id="bytes-per-parameter",
    title=Said("bytes per parameter", "octets par paramètre"),
    judge=Judge(
        bytes_per_parameter,
        cases=lambda: product(PRECISIONS, OPTIMIZERS),
        mistakes=(
            Mistake(
                lambda precision, optimizer: (
                    bytes_per_parameter(precision, optimizer) - _RIGHT[precision][2] * (optimizer == "sgd")
                ),
                "With sgd the master copy is missing: it holds what an update adds, whatever the optimizer keeps "
                "besides.",
                "Avec sgd, il manque la copie maître : c’est elle qui retient ce qu’ajoute une mise à jour, quoi que "
                "garde par ailleurs l’optimiseur.",
            ),
            Mistake(
                _variant({name: (w, g, 0) for name, (w, g, _) in _RIGHT.items()}, _fp32_moments),
                "The master copy is missing: with weights in bf16 the optimizer updates a copy in fp32, without "
                "which small updates would be rounded away.",
                "Il manque la copie maître : quand les poids sont en bf16, l’optimiseur met à jour une copie "
                "en fp32, sans laquelle les petites mises à jour disparaîtraient à l’arrondi.",
            ),
            Mistake(
                _variant(_RIGHT, lambda precision, optimizer: _RIGHT[precision][0] * _MOMENTS[optimizer]),
                "You keep the moments in the precision of the weights; the optimizer keeps them in fp32, 4 bytes "
                "each, whatever the weights are in.",
                "Vous gardez les moments dans la précision des poids ; l’optimiseur les garde en fp32, 4 octets "
                "chacun, quelle que soit celle des poids.",
            ),
            Mistake(
                _variant(_RIGHT, lambda precision, optimizer: 4 * min(1, _MOMENTS[optimizer])),
                "AdamW keeps two moments per parameter: the mean of the gradients and that of their squares.",
                "AdamW garde deux moments par paramètre : la moyenne des gradients et celle de leurs carrés.",
            ),
            Mistake(
                _variant(_RIGHT, lambda precision, optimizer: 8),
                "You count AdamW's two moments for every optimizer: SGD keeps nothing, momentum one number.",
                "Vous comptez les deux moments d’AdamW pour tous les optimiseurs : SGD ne garde rien, momentum un "
                "seul nombre.",
            ),
            Mistake(
                _variant({name: (w, 0, m) for name, (w, _, m) in _RIGHT.items()}, _fp32_moments),
                "The gradients are missing: at the end of the backward pass there is one number per parameter.",
                "Les gradients manquent : à la fin de la passe arrière, il y a un nombre par paramètre.",
            ),
            Mistake(
                _variant({**_RIGHT, "bf16_fp32_gradients": (2, 6, 4)}, _fp32_moments),
                "For bf16_fp32_gradients you count the gradient twice, in bf16 and in fp32: that is the rule of "
                "20 bytes; here only the fp32 one is kept.",
                "Pour bf16_fp32_gradients, vous comptez le gradient deux fois, en bf16 et en fp32 : c’est la "
                "règle des 20 octets ; ici, seul celui en fp32 est gardé.",
            ),
            Mistake(
                _variant(_RIGHT, lambda precision, optimizer: 0),
                "The moments of the optimizer are missing: 4 bytes with momentum, 8 with AdamW.",
                "Il manque les moments de l’optimiseur : 4 octets avec momentum, 8 avec AdamW.",
            ),
            Mistake(
                _variant({**_RIGHT, "bf16": (2, 2, 2), "bf16_fp32_gradients": (2, 4, 2)}, _fp32_moments),
                "Your master copy takes 2 bytes; it is there because bf16 is too coarse for the update, so it is "
                "in fp32: 4 bytes.",
                "Votre copie maître prend 2 octets ; elle existe parce que bf16 est trop grossier pour la mise à "
                "jour, elle est donc en fp32 : 4 octets.",
            ),
            Mistake(
                _variant({**_RIGHT, "autocast": (4, 4, 4)}, _fp32_moments),
                "You count a master copy under autocast: the weights are in fp32 there, and need none.",
                "Vous comptez une copie maître sous autocast : les poids y sont en fp32, et n’en ont pas besoin.",
            ),
            Mistake(
                _variant(_RIGHT, lambda precision, optimizer: {"sgd": 4, "momentum": 8, "adamw": 8}[optimizer]),
                "One moment too many for SGD and for SGD with momentum: none for the first, one for the second.",
                "Un moment de trop pour SGD et pour SGD avec momentum : aucun pour le premier, un seul pour le "
                "second.",
            ),
            Mistake(
                _variant({**_RIGHT, "autocast": (6, 4, 0)}, _fp32_moments),
                "You count a bf16 copy of the weights under autocast: it lives for the passes only, weight by "
                "weight, and is no state.",
                "Sous autocast, vous comptez une copie des poids en bf16 : elle ne vit que pendant les passes, "
                "poids par poids, et ne fait pas partie des états.",
            ),
            Mistake(
                _variant(dict.fromkeys(_RIGHT, (2, 2, 0)) | {"fp32": (4, 4, 0)}, _fp32_moments),
                "Neither autocast nor mixed precision does without fp32: autocast keeps all states in fp32, bf16 "
                "keeps a master copy.",
                "Ni autocast ni la précision mixte ne se passent de fp32 : autocast y garde tous les états, bf16 "
                "y garde une copie maître.",
            ),
        ),
    ),
    praise_en="Right. And notice: with AdamW, fp32 and bf16 take the same 16 bytes; mixed precision saves activations "
    "and time, not states.",
    praise_fr="Exact. Et remarquez : avec AdamW, fp32 et bf16 prennent les mêmes 16 octets ; la précision mixte "
    "économise des activations et du temps, pas des états.",
    hint_en="Four things per parameter: the weight, its gradient, perhaps a master copy, and the optimizer's moments. "
    "Write the bytes of each in a table, precision by precision.",
    hint_fr="Quatre choses par paramètre : le poids, son gradient, parfois une copie maître, et les moments de "
    "l’optimiseur. Écrivez les octets de chacune dans un tableau, précision par précision.",
    nearer_en="Weight, gradient, master copy: 4 + 4 + 0 (fp32, autocast), 2 + 2 + 4 (bf16), 2 + 4 + 4 "
    "(bf16_fp32_gradients). Then 4 bytes per moment: none, one or two.",
    nearer_fr="Poids, gradient, copie maître : 4 + 4 + 0 (fp32, autocast), 2 + 2 + 4 (bf16), 2 + 4 + 4 "
    "(bf16_fp32_gradients). Puis 4 octets par moment : zéro, un ou deux.",
)


def data_parallel_bytes(parameters: int, sample_bytes: int, global_batch: int, dp: int) -> int:
    """Bytes of one of dp replicas in fp32 with AdamW: states, DDP's buckets, activations of its share of the batch.

    An upper bound: activations are released while gradients appear.

    Source: ZeRO (arXiv 1910.02054), §3: data parallelism replicates all states; torch's DDP keeps buckets as large as
    the gradients (Li et al. 2020, arXiv 2006.15704, §4.2).
    """
    buckets_bytes = 4 * parameters if dp > 1 else 0
    return 16 * parameters + buckets_bytes + sample_bytes * global_batch // dp


DATA_PARALLEL_BYTES = Exercise(
    id="data-parallel-bytes",
    title=Said("what a replica takes", "ce qu’occupe une réplique"),
    judge=Judge(
        data_parallel_bytes,
        cases=(
            (1_000_000, 3_000_000, 64, 1),
            (1_000_000, 3_000_000, 64, 2),
            (2_500_000_000, 12_000_000_000, 64, 64),
            (25_000_000, 240_000_000, 128, 8),
            (7_000_000, 1_000, 32, 4),
            (3_000_000, 2_000_000, 32, 1),
            (9_000_000, 5_000_000, 16, 2),
        ),
        mistakes=(
            Mistake(
                lambda parameters, sample, batch, dp: (
                    16 * parameters + (4 * parameters / dp if dp > 1 else 0) + sample * batch // dp
                ),
                "You divide the buckets by dp: each replica has its own, as large as all gradients; the batch alone "
                "is divided.",
                "Vous divisez les buckets par dp : chaque réplique a les siens, aussi grands que tous les gradients "
                "; seul le batch se partage.",
            ),
            Mistake(
                lambda psi, sample, batch, dp: (20 if dp > 1 else 16) * psi // dp + sample * batch // dp,
                "You divide the states by dp: that is what ZeRO-3 does. In data parallelism every replica keeps "
                "all of them.",
                "Vous divisez les états par dp : c’est ce que fait ZeRO-3. En Data Parallelism, chaque réplique "
                "les garde tous.",
            ),
            Mistake(
                lambda psi, sample, batch, dp: 16 * psi // dp + sample * batch // dp,
                "You divide the states by dp: that is what ZeRO-3 does. In data parallelism every replica keeps "
                "all of them, and DDP's buckets besides.",
                "Vous divisez les états par dp : c’est ce que fait ZeRO-3. En Data Parallelism, chaque réplique "
                "les garde tous, et les buckets de DDP en plus.",
            ),
            Mistake(
                lambda psi, sample, batch, dp: 16 * psi + sample * batch // dp,
                "DDP's buckets are missing: from two replicas on, they hold a second copy of the gradients, 4 "
                "bytes per parameter.",
                "Il manque les buckets de DDP : dès deux répliques, ils contiennent une seconde copie des "
                "gradients, 4 octets par paramètre.",
            ),
            Mistake(
                lambda psi, sample, batch, dp: (16 + 4 * dp) * psi + sample * batch // dp,
                "You count one copy of the gradients per replica; a GPU holds its own buckets alone, 4 bytes per "
                "parameter.",
                "Vous comptez une copie des gradients par réplique ; un GPU n’a que ses propres buckets, 4 octets "
                "par paramètre.",
            ),
            Mistake(
                lambda psi, sample, batch, dp: (16 + 4 * (dp > 2)) * psi + sample * batch // dp,
                "The buckets are there from dp = 2 on (dp > 1, not dp > 2).",
                "Les buckets existent dès dp = 2 (dp > 1, et non dp > 2).",
            ),
            Mistake(
                lambda psi, sample, batch, dp: (16 + 2 * (dp > 1)) * psi + sample * batch // dp,
                "The buckets are in fp32, as the gradients are: 4 bytes per parameter, not 2.",
                "Les buckets sont en fp32, comme les gradients : 4 octets par paramètre, et non 2.",
            ),
            Mistake(
                lambda psi, sample, batch, dp: (12 + 4 * (dp > 1)) * psi + sample * batch // dp,
                "A state is missing: weight, gradient and two moments take 16 bytes per parameter, not 12.",
                "Il manque un état : poids, gradient et deux moments prennent 16 octets par paramètre, et non 12.",
            ),
            Mistake(
                lambda psi, sample, batch, dp: (4 + 4 * (dp > 1)) * psi + sample * batch // dp,
                "You count the weights alone: gradients and moments are states too, 16 bytes per parameter in "
                "all.",
                "Vous ne comptez que les poids : gradients et moments sont aussi des états, 16 octets par "
                "paramètre en tout.",
            ),
            Mistake(
                lambda psi, sample, batch, dp: (16 + 4 * (dp > 1)) * psi,
                "The activations are missing: sample_bytes for each image that a replica reads.",
                "Il manque les activations : sample_bytes pour chaque image que lit une réplique.",
            ),
            Mistake(
                lambda psi, sample, batch, dp: 20 * psi + sample * batch // dp,
                "You count buckets on a single GPU too: with dp=1 there is nothing to communicate, so none.",
                "Vous comptez des buckets même sur un seul GPU : avec dp=1, il n’y a rien à communiquer, donc pas "
                "de bucket.",
            ),
            Mistake(
                lambda psi, sample, batch, dp: (20 if dp > 1 else 16) * psi + sample * batch,
                "You give the whole global batch to each replica; it reads its share alone, global_batch / dp.",
                "Vous donnez tout le batch global à chaque réplique ; elle n’en lit que sa part, global_batch / dp.",
            ),
            Mistake(
                lambda psi, sample, batch, dp: 16 * psi / dp + (4 * psi if dp > 1 else 0) + sample * batch / dp,
                "You divide the states by dp: data parallelism keeps them whole on each GPU; only the images are "
                "shared (ZeRO, lab 04, shards the states).",
                "Vous divisez les états par dp : en Data Parallelism, chaque GPU les garde entiers ; seules les images "
                "sont réparties (c’est ZeRO, au TP 04, qui répartit les états).",
            ),
            Mistake(
                lambda psi, sample, batch, dp: (20 if dp > 1 else 16) * psi + sample,
                "You count the activations of one single image; a replica reads global_batch / dp of them.",
                "Vous comptez les activations d’une seule image ; une réplique en lit global_batch / dp.",
            ),
        ),
    ),
    praise_en="Right: only the last term has dp below it. More GPUs make the activations smaller, never the states.",
    praise_fr="Exact : seul le dernier terme est divisé par dp. Plus de GPU, c’est moins d’activations, jamais moins "
    "d’états.",
    hint_en="Three terms: the states, DDP's buckets, the activations. Which of them depend on dp, and how?",
    hint_fr="Trois termes : les états, les buckets de DDP, les activations. Lesquels dépendent de dp, et comment ?",
    nearer_en="16 bytes per parameter, 4 more if dp > 1, and sample_bytes times global_batch // dp.",
    nearer_fr="16 octets par paramètre, 4 de plus si dp > 1, et sample_bytes fois global_batch // dp.",
)


Samples = Sequence[Mapping[str, int]]


def peak_bytes(samples: Samples) -> int:
    """Largest sum over the categories at one and the same moment."""
    return max(sum(sample.values()) for sample in samples)


def _steps() -> Iterator[tuple[list[dict[str, int]]]]:
    # Activations and gradients do not have their maxima together; the peak lies in the middle, early, late.
    states = {"weights": 40, "optimizer": 80}
    yield ([{**states, "activations": a, "gradients": g} for a, g in ((10, 0), (90, 0), (95, 4), (30, 30), (0, 40))],)
    yield ([{**states, "activations": a, "gradients": g} for a, g in ((5, 0), (20, 0), (8, 30), (0, 41), (0, 39))],)
    yield ([{"weights": 7, "workspace": w, "activations": a} for w, a in ((60, 0), (2, 50), (3, 55), (1, 12))],)
    yield ([{"weights": 7}, {"weights": 7, "activations": 20}, {"weights": 7, "gradients": 30}],)  # the last is largest
    yield ([{"weights": 5}, {"weights": 5, "activations": 8}, {"weights": 5, "activations": 2, "gradients": 44}],)
    yield ([{"weights": 9, "workspace": w, "activations": a} for w, a in ((80, 0), (1, 33), (0, 12))],)


def _maxima_added(samples: Samples) -> int:
    names = {name for sample in samples for name in sample}
    return sum(max(sample.get(name, 0) for sample in samples) for name in names)


PEAK = Exercise(
    id="peak",
    title=Said("the peak of a step", "le pic d’un pas"),
    judge=Judge(
        peak_bytes,
        cases=_steps,
        mistakes=(
            Mistake(
                _maxima_added,
                "You add the largest value of each category, but these do not occur at the same moment: "
                "activations are released while gradients appear. Sum first, then take the largest.",
                "Vous additionnez la plus grande valeur de chaque catégorie, or elles n’ont pas lieu au même "
                "moment : les activations sont libérées pendant que les gradients apparaissent. Faites d’abord "
                "la somme, puis prenez la plus grande.",
            ),
            Mistake(
                lambda samples: max(max(sample.values()) for sample in samples),
                "That is the largest single category; at one moment all categories are in memory together.",
                "C’est la plus grande des catégories ; à un instant donné, toutes sont ensemble en mémoire.",
            ),
            Mistake(
                lambda samples: sum(samples[-1].values()),
                "That is the end of the step, when the activations are gone already; the peak lies earlier.",
                "C’est la fin du pas, quand les activations ont déjà disparu ; le pic a lieu plus tôt.",
            ),
            Mistake(
                lambda samples: sum(samples[0].values()),
                "That is the beginning of the step; activations and gradients are still to come.",
                "C’est le début du pas ; activations et gradients sont encore à venir.",
            ),
            Mistake(
                lambda samples: max(sum(sample.get(name, 0) for name in samples[0]) for sample in samples),
                "You add the categories of the first moment only; others may appear later: add all that a moment "
                "has.",
                "Vous n’additionnez que les catégories du premier instant ; d’autres peuvent apparaître ensuite : "
                "additionnez toutes celles de chaque instant.",
            ),
            Mistake(
                lambda samples: max(sum(sample.values()) for sample in samples[:-1]),
                "You leave out the last moment; the peak may lie there.",
                "Vous laissez de côté le dernier instant ; le pic peut s’y trouver.",
            ),
            Mistake(
                lambda samples: max(sum(sample.values()) for sample in samples[1:]),
                "You leave out the first moment; the peak may lie there.",
                "Vous laissez de côté le premier instant ; le pic peut s’y trouver.",
            ),
            Mistake(
                lambda samples: max(range(len(samples)), key=lambda place: sum(samples[place].values())),
                "That is the moment of the peak, its place in the list; its bytes are asked for.",
                "C’est l’instant du pic, sa place dans la liste ; on en demande les octets.",
            ),
            Mistake(
                lambda samples: sum(sum(sample.values()) for sample in samples),
                "You add the moments up; memory is given back and used again from one to the next.",
                "Vous additionnez les instants ; d’un instant à l’autre, la mémoire est rendue puis réutilisée.",
            ),
            Mistake(
                lambda samples: sum(sum(sample.values()) for sample in samples) / len(samples),
                "That is the mean over the step; what does not fit for one instant does not fit.",
                "C’est la moyenne sur le pas ; ce qui ne tient pas un instant ne tient pas.",
            ),
        ),
    ),
    praise_en="Right: the largest of the sums, not the sum of the largest.",
    praise_fr="Exact : le maximum des sommes, et non la somme des maximums.",
    hint_en="How many bytes are held at one moment, all categories together?",
    hint_fr="Combien d’octets sont occupés à un instant donné, toutes catégories confondues ?",
    nearer_en="max over the samples of sum(sample.values()).",
    nearer_fr="Le max, sur les instants, de sum(sample.values()).",
)


def transformer_layer_bytes(s: int, b: int, h: int, a: int) -> int:
    """Bytes that one transformer layer keeps for backward in 16 bit, with dropout and attention written out.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), §4.1: s·b·h·(34 + 5·a·s/h).
    """
    return int(layer_bytes(Shape(sequence_length=s, micro_batch=b, hidden=h, heads=a)))


def _sbh(factor: float, score_factor: float = 5) -> Callable[[int, int, int, int], float]:
    return lambda s, b, h, a: factor * s * b * h + score_factor * a * s * s * b


BLOCK_ACTIVATIONS = Exercise(
    id="block-activations",
    title=Said("activations of a transformer layer", "les activations d’une couche de transformer"),
    judge=Judge(
        transformer_layer_bytes,
        cases=((128, 2, 64, 4), (1024, 1, 768, 12), (2048, 4, 12288, 96), (197, 8, 192, 3)),
        mistakes=(
            Mistake(
                _sbh(38),
                "You count the input of the projections to queries, keys and values three times: they read the same "
                "tensor, which is kept once.",
                "Vous comptez trois fois l’entrée des projections des requêtes, des clés et des valeurs : elles "
                "lisent le même tenseur, gardé une seule fois.",
            ),
            Mistake(
                _sbh(34, 7),
                "Of the scores you keep the input of the softmax as well: its backward needs its result alone.",
                "Des scores, vous gardez aussi l’entrée du softmax : sa passe arrière n’a besoin que de son résultat.",
            ),
            Mistake(
                _sbh(34, 3),
                "Of the scores one tensor of 2 bytes is missing: the result of the softmax, the mask of its dropout "
                "(1 byte), and what comes out of that dropout, which the product with the values keeps.",
                "Parmi les scores, il manque un tenseur de 2 octets : il y a le résultat du softmax, le masque de "
                "son dropout (1 octet), et ce qui sort de ce dropout, que garde le produit avec les valeurs.",
            ),
            Mistake(
                _sbh(34, 0),
                "The scores are missing: softmax, its dropout mask and its product with the values keep a·s²·b "
                "elements each.",
                "Il manque les scores : le softmax, le masque de son dropout et son produit avec les valeurs "
                "gardent chacun a·s²·b éléments.",
            ),
            Mistake(
                _sbh(34, 2),
                "Of the scores you count the result of the softmax alone; its dropout keeps a mask, and the "
                "product with the values keeps what comes out of that dropout.",
                "Des scores, vous ne comptez que le résultat du softmax ; or son dropout garde un masque, et le "
                "produit avec les valeurs garde ce qui sort de ce dropout.",
            ),
            Mistake(
                _sbh(36, 6),
                "A dropout mask takes 1 byte per element, not 2: one mask of a·s²·b and two of s·b·h.",
                "Un masque de dropout prend 1 octet par élément, et non 2 : un masque de a·s²·b, deux de s·b·h.",
            ),
            Mistake(
                _sbh(32, 4),
                "The dropout masks are missing, 1 byte per element: one of a·s²·b and two of s·b·h.",
                "Il manque les masques de dropout, 1 octet par élément : un de a·s²·b et deux de s·b·h.",
            ),
            Mistake(
                _sbh(30),
                "The layer norms are missing: each keeps its input.",
                "Il manque les LayerNorm : chacune garde son entrée.",
            ),
            Mistake(
                _sbh(26),
                "The MLP keeps two tensors of width 4 h: what goes into the GELU, and what comes out of it, which "
                "the second linear layer keeps.",
                "Le MLP garde deux tenseurs de largeur 4 h : ce qui entre dans la GELU, et ce qui en sort, que "
                "garde la seconde couche linéaire.",
            ),
            Mistake(
                _sbh(0),
                "The terms of width h are missing: the inputs of the linear layers, of the GELU and of the layer "
                "norms, the masks, 34·sbh in all.",
                "Il manque les termes de largeur h : les entrées des couches linéaires, de la GELU et des "
                "LayerNorm, les masques, soit 34·sbh.",
            ),
            Mistake(
                _sbh(33),
                "One of the two dropout masks of width h is missing: there is one after the attention and one "
                "after the MLP.",
                "Il manque un des deux masques de dropout de largeur h : il y en a un après l’attention et un "
                "après le MLP.",
            ),
            Mistake(
                _sbh(32),
                "A tensor of width h is missing: eight of them go into linear layers, products or layer norms "
                "besides the two of width 4 h.",
                "Il manque un tenseur de largeur h : outre les deux de largeur 4 h, huit entrent dans des couches "
                "linéaires, des produits ou des LayerNorm.",
            ),
            Mistake(
                _sbh(34, 4),
                "The mask of the dropout on the scores is missing: 1 byte for each of the a·s²·b.",
                "Il manque le masque du dropout des scores : 1 octet pour chacun des a·s²·b.",
            ),
            Mistake(
                lambda s, b, h, a: 34 * s * b * h + 5 * a * s * b,
                "The scores are a square: each token meets every token, a·s²·b elements and not a·s·b.",
                "Les scores forment un carré : chaque token rencontre tous les tokens, soit a·s²·b éléments et "
                "non a·s·b.",
            ),
            Mistake(
                lambda s, b, h, a: 34 * s * b * h + 5 * s * s * b * h,
                "The scores do not have width h: each head has one number for each pair of tokens, a·s²·b.",
                "Les scores ne sont pas de largeur h : chaque tête a un nombre par paire de tokens, soit a·s²·b.",
            ),
            Mistake(_sbh(11), "That is the attention alone: 11·sbh.", "C’est l’attention seule : 11·sbh."),
            Mistake(
                _sbh(15),
                "The MLP is missing: two linear layers, the GELU between them, the dropout after.",
                "Il manque le MLP : deux couches linéaires, la GELU entre elles, le dropout après.",
            ),
            Mistake(
                _sbh(17, 2.5),
                "You count elements; a number in bf16 takes 2 bytes (a mask, 1).",
                "Vous comptez des éléments ; un nombre en bf16 prend 2 octets (un masque, 1).",
            ),
            Mistake(
                lambda s, b, h, a: 34 * s * b * h + 5 * s * s * b,
                "Each head has its own scores: a·s²·b elements, not s²·b.",
                "Chaque tête a ses propres scores : a·s²·b éléments, et non s²·b.",
            ),
        ),
    ),
    praise_en="Right: sbh (34 + 5as/h). The first term grows with the tokens, the second with their square.",
    praise_fr="Exact : sbh (34 + 5as/h). Le premier terme croît comme le nombre de tokens, le second comme son carré.",
    hint_en="Go through forward line by line. A linear layer keeps its input; a product of two activations keeps both; "
    "softmax keeps its result; GELU and LayerNorm keep their input; a sum keeps nothing.",
    hint_fr="Suivez forward ligne à ligne. Une couche linéaire garde son entrée ; un produit de deux activations garde "
    "les deux ; le softmax garde son résultat ; GELU et LayerNorm gardent leur entrée ; une somme ne garde rien.",
    nearer_en="Attention: input 2, q and k 4, v 2, input of the output layer 2, mask 1, so 11·sbh, plus 5·as²b. MLP: 2 "
    "+ 8 + 8 + 1. Two norms: 2 each.",
    nearer_fr="Attention : entrée 2, q et k 4, v 2, entrée de la projection de sortie 2, masque 1, soit 11·sbh, plus "
    "5·as²b. MLP : 2 + 8 + 8 + 1. Deux LayerNorm : 2 chacune.",
)


_CALLS = 6
_NEAR, _FAR = 8, 16


def largest_batch(taken_bytes: Callable[[int], int], limit_bytes: int) -> int:
    """Largest batch that fits where memory is a line in the batch: two points give it."""
    slope_bytes = (taken_bytes(_FAR) - taken_bytes(_NEAR)) // (_FAR - _NEAR)
    fixed_bytes = taken_bytes(_NEAR) - _NEAR * slope_bytes
    return max(0, (limit_bytes - fixed_bytes) // slope_bytes)


class _Line:
    """Bytes taken by batch, a line but for small batches, whose peak is elsewhere; counts how often it is asked."""

    def __init__(self, fixed_bytes: int, sample_bytes: int, least_bytes: int = 0) -> None:
        self.fixed_bytes, self.sample_bytes, self.least_bytes = fixed_bytes, sample_bytes, least_bytes
        self.least_slope_bytes = sample_bytes // 10
        self.asked: list[float] = []

    def __repr__(self) -> str:
        line = f"{self.fixed_bytes} + {self.sample_bytes} × batch"
        return f"max({self.least_bytes} + {self.least_slope_bytes} × batch, {line})" if self.least_bytes else line

    def __call__(self, batch: int) -> int:
        self.asked.append(batch)
        least_bytes = self.least_bytes + batch * self.least_slope_bytes if self.least_bytes else 0
        return max(least_bytes, self.fixed_bytes + batch * self.sample_bytes)


def _devices() -> Iterator[tuple[_Line, int]]:
    yield _Line(1_000, 10), 2_005
    yield _Line(500, 7), 500 + 7 * 40  # full to the last byte
    yield _Line(16_000, 230), 32_000
    yield _Line(39_000, 12_000), 32_000  # not even one sample
    yield _Line(1_000, 100, least_bytes=1_450), 9_999  # up to a batch of 5 the peak is in the optimizer's update
    # Once more each, so that no number fits by chance.
    yield _Line(250, 9), 250 + 9 * 31
    yield _Line(50_000, 7_000), 41_000
    yield _Line(2_000, 300, least_bytes=3_350), 20_123


def _line_of(taken: Callable[[int], int]) -> tuple[int, float]:
    """The fixed part, and what each sample adds."""
    slope_bytes = (taken(_FAR) - taken(_NEAR)) / (_FAR - _NEAR)
    return int(taken(_NEAR) - _NEAR * slope_bytes), slope_bytes


def _quotient(taken: Callable[[int], int], limit_bytes: int) -> float:
    fixed_bytes, slope_bytes = _line_of(taken)
    return (limit_bytes - fixed_bytes) / slope_bytes


_BATCH_MISTAKES = (
    Mistake(
        lambda taken, limit: limit // (taken(_FAR) / _FAR),
        "You take the line through the origin: a part of the bytes is there whatever the batch, so the slope is a "
        "difference of two points, and the fixed part is paid first.",
        "Vous faites passer la droite par l’origine : une partie des octets est là quel que soit le batch ; la pente "
        "est donc une différence entre deux points, et la part fixe se paie d’abord.",
    ),
    Mistake(
        lambda taken, limit: max(0, (limit - taken(_NEAR)) // _line_of(taken)[1]),
        "What is left once the nearer point is paid holds so many more samples: add those of that point.",
        "Ce qui reste une fois le premier point payé contient autant d’échantillons de plus : ajoutez ceux de ce "
        "point.",
    ),
    Mistake(
        lambda taken, limit: max(0, _quotient(taken, limit)),
        "A batch is a whole number of samples: round down.",
        "Un batch est un nombre entier d’échantillons : arrondissez au-dessous.",
    ),
    Mistake(
        lambda taken, limit: round(max(0, _quotient(taken, limit))),
        "You round to the nearest: half of the time the last sample would no longer fit. Round down.",
        "Vous arrondissez au plus proche : une fois sur deux, le dernier échantillon ne tiendrait plus. "
        "Arrondissez au-dessous.",
    ),
    Mistake(
        lambda taken, limit: max(1, _quotient(taken, limit) // 1),
        "Where not even one sample fits, your function still gives 1: return 0.",
        "Là où pas même un échantillon ne tient, votre fonction donne encore 1 : renvoyez 0.",
    ),
    Mistake(
        lambda taken, limit: largest_batch(taken, limit - 1),
        "Where a batch takes exactly limit_bytes, it fits (≤, not <): your batch is one sample short.",
        "Quand un batch prend exactement limit_bytes, il tient (≤, et non <) : il manque un échantillon à "
        "votre batch.",
    ),
    Mistake(
        lambda taken, limit: (limit - taken(8)) / _line_of(taken)[1],
        "taken_bytes(8) is not the fixed part: the 8 samples are in it. Take off 8 times the slope.",
        "taken_bytes(8) n’est pas la part fixe : 8 échantillons y sont compris. Retranchez 8 fois la "
        "pente.",
    ),
    Mistake(
        lambda taken, limit: largest_batch(taken, limit) - (largest_batch(taken, limit) > 0),
        "Your batch is one sample short: the largest one that fits is asked for.",
        "Il manque un échantillon à votre batch : on demande le plus grand qui tienne.",
    ),
    Mistake(
        lambda taken, limit: limit // taken(1),
        "You divide the limit by what one sample takes with all states: these are there once, whatever the batch. "
        "Separate the fixed part from what each sample adds.",
        "Vous divisez la limite par ce que prend un seul échantillon, états compris : or ceux-ci sont là une seule "
        "fois, quel que soit le batch. Séparez la part fixe de ce qu’ajoute chaque échantillon.",
    ),
    Mistake(
        lambda taken, limit: limit // ((taken(16) - taken(8)) / 8) // 1,
        "You forget the fixed part (states, context): it must be taken off the limit before you divide.",
        "Vous oubliez la part fixe (états, contexte) : retirez-la de la limite avant de diviser.",
    ),
    Mistake(
        lambda taken, limit: max(0, -(-(limit - 2 * taken(8) + taken(16)) // ((taken(16) - taken(8)) // 8))),
        "You round up: the last sample would no longer fit. Round down.",
        "Vous arrondissez au-dessus : le dernier échantillon ne tiendrait plus. Arrondissez au-dessous.",
    ),
    Mistake(
        lambda taken, limit: (limit - 2 * taken(8) + taken(16)) // ((taken(16) - taken(8)) // 8),
        "Where not even one sample fits, your function gives a negative batch: return 0.",
        "Là où pas même un échantillon ne tient, votre fonction donne un batch négatif : renvoyez 0.",
    ),
    Mistake(
        lambda taken, limit: max(0, (limit - 2 * taken(1) + taken(2)) // (taken(2) - taken(1))),
        "Your two points are too small: there the peak is in the optimizer's update, which hardly depends on the "
        "batch, and the line looks too flat. Ask for 8 and 16.",
        "Vos deux points sont trop petits : le pic y est dans la mise à jour de l’optimiseur, qui ne dépend guère "
        "du batch, et la droite semble trop plate. Demandez 8 et 16.",
    ),
)


def _refuse_many_calls(answer: Callable[..., Any]) -> None:
    """A right batch; how often was the memory asked for?"""
    lines = [line for line, limit_bytes in _devices() if answer(line, limit_bytes) is not None]
    most = max(len(line.asked) for line in lines)
    if most > _CALLS:
        raise Wrong(
            en=f"The batch is right, but you asked {most} times how much is taken: each call traces a whole model. "
            "Two points are enough to know a line.",
            fr=f"Le batch est juste, mais vous avez demandé {most} fois la mémoire prise : chaque appel trace un "
            "modèle entier. Deux points suffisent à connaître une droite.",
        )


LARGEST_BATCH = Exercise(
    id="largest-batch",
    title=Said("the largest batch that fits", "le plus grand batch qui tienne"),
    judge=Judge(largest_batch, cases=_devices, mistakes=_BATCH_MISTAKES, then=_refuse_many_calls),
    praise_en="Right: what is left once the fixed part is paid, divided by what one sample costs.",
    praise_fr="Exact : ce qui reste une fois la part fixe payée, divisé par ce que coûte un échantillon.",
    hint_en="taken_bytes is a line: fixed + slope × batch. How do two of its points give slope and fixed?",
    hint_fr="taken_bytes est une droite : fixe + pente × batch. Comment deux points donnent-ils la pente, puis le fixe "
    "?",
    nearer_en="slope = (taken_bytes(16) − taken_bytes(8)) / 8, fixed = taken_bytes(8) − 8 × slope; then (limit − "
    "fixed) // slope, and 0 where that is negative.",
    nearer_fr="pente = (taken_bytes(16) − taken_bytes(8)) / 8, fixe = taken_bytes(8) − 8 × pente ; puis (limite − "
    "fixe) // pente, et 0 si c’est négatif.",
)


@or_to_do
def asked(question: Callable[[], Any]) -> Any:
    """What a question gives that calls functions of the student."""
    return question()


@or_to_do
def states_table(bytes_per_parameter: Callable[[str, str], float]) -> Table:
    """Bytes per parameter by precision and optimizer, by the student's function."""

    def row(precision: str) -> tuple[str, ...]:
        return precision, *(shortest(bytes_per_parameter(precision, optimizer)) for optimizer in OPTIMIZERS)

    return Table(("", *OPTIMIZERS), tuple(map(row, PRECISIONS)))


class LayerCost(NamedTuple):
    """One layer of the challenge.

    Attributes:
        kept_mib: activations that it keeps for its backward pass (MiB).
        input_mib: its input, all that it keeps if it is checkpointed (MiB).
        gflop: operations of its forward pass, done again if it is checkpointed (GFLOP).
    """

    kept_mib: int
    input_mib: int
    gflop: int


LAYERS, SEEDS = 24, (1, 2, 3)


def challenge_case(seed: int) -> tuple[list[LayerCost], int]:
    """24 layers of several sizes, and the limit for their activations (MiB)."""
    random = Random(seed)
    layers = []
    for _ in range(LAYERS):
        width = random.choice((4, 6, 9, 14))
        layers.append(LayerCost(width * random.randint(6, 18), width, random.randint(20, 90)))
    return layers, sum(layer.kept_mib for layer in layers) * 45 // 100


def challenge_peak_mib(layers: Sequence[LayerCost], chosen: Collection[int]) -> int:
    """Most activations at one moment: a layer's own, during its backward pass, with what the layers before it keep."""
    most = held = 0
    for place, layer in enumerate(layers):
        most = max(most, held + layer.kept_mib)
        held += layer.input_mib if place in chosen else layer.kept_mib
    return most


def fewest_gflop(layers: Sequence[LayerCost], limit_mib: int) -> int:
    """Fewest operations done again within the limit, by dynamic programming over what is held so far.

    Source: Bellman 1957; Beaumont et al. 2019 (arXiv 1911.13214) for chains of layers.
    """
    least = {0: 0}
    for layer in layers:
        grown: dict[int, int] = {}
        for held, gflop in least.items():
            if held + layer.kept_mib > limit_mib:
                continue
            for more_mib, more in ((layer.kept_mib, 0), (layer.input_mib, layer.gflop)):
                grown[held + more_mib] = min(grown.get(held + more_mib, gflop + more), gflop + more)
        least = grown
    return min(least.values())


def _fewest_operations(answer: Callable[..., Any]) -> float:
    """Hold plans to the rules; give their operations as a share of the fewest possible."""
    done = best = 0
    for seed in SEEDS:
        layers, limit_mib = challenge_case(seed)
        given = answer(list(layers), limit_mib)
        try:
            chosen = [operator.index(index) for index in plain(given)]
        except (TypeError, ValueError):
            raise Wrong(
                en=f"The numbers of the layers to checkpoint are expected, but your function returns {shown(given)}.",
                fr=f"On attend les numéros des couches à recalculer, mais votre fonction renvoie {shown(given)}.",
            ) from None
        if sorted(set(chosen)) != sorted(chosen) or not set(chosen) <= set(range(LAYERS)):
            raise Wrong(
                en=f"Each layer is named once at most, by its number from 0 to {LAYERS - 1}; your plan has {chosen}.",
                fr=f"Chaque couche est nommée au plus une fois, par son numéro de 0 à {LAYERS - 1} ; votre plan "
                f"contient {chosen}.",
            )
        peak = challenge_peak_mib(layers, set(chosen))
        if peak > limit_mib:
            raise Wrong(
                en=f"The plan does not fit: its peak is {peak} MiB, the limit {limit_mib} MiB. During a layer's "
                "backward pass all its activations are there, and what the layers before it keep.",
                fr=f"Le plan ne tient pas : son pic est de {peak} Mio, la limite de {limit_mib} Mio. Pendant la passe "
                "arrière d’une couche, toutes ses activations sont là, et ce que gardent les couches précédentes.",
            )
        done += sum(layers[index].gflop for index in chosen)
        best += fewest_gflop(layers, limit_mib)
    return round(100 * done / best, 1)


FEWEST_OPERATIONS = Challenge(
    id="fewest-operations",
    title=Said("challenge: fewest operations under a limit", "défi : le moins d’opérations sous une limite"),
    judge=_fewest_operations,
    praise_en="No plan within the limit computes less again.",
    praise_fr="Aucun plan sous la limite ne recalcule moins.",
    hint_en="2²⁴ plans are too many. Which part of a plan of the first layers matters to the layers after them?",
    hint_fr="2²⁴ plans, c’est trop. Qu’est-ce qui, dans un plan des premières couches, compte pour les suivantes ?",
    nearer_en="Only the MiB held so far: of all plans that hold as many, keep the one with the fewest operations, "
    "layer after layer.",
    nearer_fr="Seulement les Mio détenus jusque-là : de tous les plans qui en détiennent autant, gardez le moins "
    "coûteux, couche après couche.",
    target=100,
    unit_en="% of the fewest operations",
    unit_fr="% du minimum d’opérations",
)
