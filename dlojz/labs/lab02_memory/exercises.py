"""Exercises of lab 02: states and peak, one layer's activations, the largest batch, checkpointing, offloading.

The references are the closed forms of `dlojz.prediction.rules_of_thumb`, which the probe confirms to the byte. A
checkpointed answer is held to the outputs and gradients of the plain loop, and to what is still in memory after
forward: every block knows its own activations and counts how often it runs. Offloading hooks are entered around a real
forward pass, and what they send to the host and fetch back is counted.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174), §4.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from dlojz.base.table import Table
from dlojz.labs.kit.exercise import Exercise, Mistake, NotDone, Said, Verdict, Wrong
from dlojz.labs.kit.judges import Judge, reader, refuse_nothing
from dlojz.prediction.rules_of_thumb import Shape, layer_bytes
from dlojz.prediction.rules_of_thumb import bytes_per_parameter as form

if TYPE_CHECKING:
    from torch import Tensor, nn

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
        ),
        mistakes=(
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


PEAK = Exercise(
    id="peak",
    title=Said("the peak of a step", "le pic d’un pas"),
    judge=Judge(
        peak_bytes,
        cases=_steps,
        mistakes=(
            Mistake(
                lambda samples: sum(max(sample.get(name, 0) for sample in samples) for name in samples[0]),
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


_BATCH_MISTAKES = (
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


def asked(question: Callable[[], Any]) -> Any:
    """What a question gives that calls functions of the student, or which of these is still to do."""
    try:
        return question()
    except NotDone as error:
        return Verdict("todo", str(error))


def states_table(bytes_per_parameter: Callable[[str, str], float]) -> Table | Verdict:
    """Bytes per parameter by precision and optimizer, by the student's function."""

    def row(precision: str) -> tuple[str, ...]:
        return precision, *(str(bytes_per_parameter(precision, optimizer)) for optimizer in OPTIMIZERS)

    table: Table | Verdict = asked(lambda: Table(("", *OPTIMIZERS), tuple(map(row, PRECISIONS))))
    return table


_CHECKPOINT_SAMPLES, _CHECKPOINT_WIDTH = 4, 6
_CASES = ((6, 2), (7, 3), (5, 1), (8, 4))  # blocks, blocks per segment
_TOLERANCE = 1e-5


@dataclass
class _Trial:
    """What a forward pass leaves in memory, and what backward gives."""

    output: Tensor
    gradients: list[Tensor | None]
    hidden_alive: int
    outputs_alive: int
    runs: list[int]


def _probed_blocks(count: int, seed: int) -> tuple[list[nn.Module], list[Any], list[Any], list[int]]:
    """Blocks that note their hidden activations and outputs, without keeping them alive, and how often they run."""
    import torch
    from torch import nn

    hidden: list[Any] = []
    outputs: list[Any] = []
    runs = [0] * count

    class Probed(nn.Module):
        """A small MLP with dropout, added to its input."""

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number
            self.expand, self.shrink = (
                nn.Linear(_CHECKPOINT_WIDTH, 2 * _CHECKPOINT_WIDTH),
                nn.Linear(2 * _CHECKPOINT_WIDTH, _CHECKPOINT_WIDTH),
            )
            self.dropout = nn.Dropout(0.3)

        def forward(self, x: Tensor) -> Tensor:
            runs[self.number] += 1
            inner = torch.tanh(self.expand(x))
            output: Tensor = x + self.dropout(self.shrink(inner))
            hidden.append(weakref.ref(inner.untyped_storage()))
            outputs.append(weakref.ref(output.untyped_storage()))
            return output

    torch.manual_seed(seed)
    return [Probed(number) for number in range(count)], hidden, outputs, runs


def _tried(answer: Callable[..., Any], count: int, per_segment: int) -> _Trial:
    import torch

    blocks, hidden, outputs, runs = _probed_blocks(count, seed=count)
    x = torch.randn(_CHECKPOINT_SAMPLES, _CHECKPOINT_WIDTH, generator=torch.Generator().manual_seed(count))
    torch.manual_seed(100 + count)  # dropout's
    output = answer(blocks, x, per_segment)
    refuse_nothing(output)
    if not isinstance(output, torch.Tensor):
        raise Wrong(
            en=f"Your function returns a {type(output).__name__}, but the tensor that leaves the last block is "
            "expected.",
            fr=f"Votre fonction renvoie un objet de type {type(output).__name__}, mais on attend le tenseur qui "
            "sort du dernier bloc.",
        )
    hidden_alive = sum(each() is not None for each in hidden)
    outputs_alive = sum(each() is not None for each in outputs)
    result = output.detach().clone()
    if output.requires_grad:
        output.square().sum().backward()
    gradients = [parameter.grad for block in blocks for parameter in block.parameters()]
    return _Trial(result, gradients, hidden_alive, outputs_alive, runs)


def _plain(blocks: Sequence[nn.Module], x: Tensor, per_segment: int) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def _check_checkpointed(answer: Callable[..., Any], count: int, per_segment: int) -> None:
    given, right = _tried(answer, count, per_segment), _tried(_plain, count, per_segment)
    for refuse in (_judge_output, _judge_gradients, _judge_memory, _judge_runs):
        refuse(given, right, count, per_segment)


def _judge_output(given: _Trial, right: _Trial, count: int, per_segment: int) -> None:
    if given.output.shape != right.output.shape or not given.output.allclose(right.output, atol=_TOLERANCE):
        unrun = [str(number) for number, runs in enumerate(given.runs) if not runs]
        if unrun:
            raise Wrong(
                en=f"With {count} blocks, {per_segment} per segment, these never run: {', '.join(unrun)}. The last "
                "segment may be shorter than the others.",
                fr=f"Pour {count} blocs, à raison de {per_segment} par segment, ceux-ci ne s’exécutent jamais : "
                f"{', '.join(unrun)}. Le dernier segment peut être plus court que les autres.",
            )
        raise Wrong(
            en="The output is not that of the blocks run one after the other: each segment must begin with what "
            "the one before gives, and nothing may draw random numbers between them.",
            fr="La sortie n’est pas celle des blocs exécutés l’un après l’autre : chaque segment part de ce que "
            "donne le précédent, et rien ne doit tirer de nombres aléatoires entre les deux.",
        )


def _judge_gradients(given: _Trial, right: _Trial, count: int, per_segment: int) -> None:
    missing = [gradient is None for gradient in given.gradients]
    if all(missing):
        raise Wrong(
            en="The output is right, but no parameter gets a gradient: there is none under no_grad, and none with "
            "use_reentrant=True where the input asks for no gradient, as images do not. Take "
            "checkpoint(…, use_reentrant=False) alone.",
            fr="La sortie est juste, mais aucun paramètre ne reçoit de gradient : il n’y en a pas sous no_grad, ni "
            "avec use_reentrant=True quand l’entrée n’en demande pas, comme c’est le cas des images. Prenez "
            "checkpoint(…, use_reentrant=False), sans rien d’autre.",
        )
    if any(missing):
        raise Wrong(
            en="Some parameters get no gradient: a detach cuts all that comes before it. checkpoint() does by "
            "itself all that is needed.",
            fr="Certains paramètres ne reçoivent pas de gradient : un detach coupe tout ce qui le précède. "
            "checkpoint() fait de lui-même tout le nécessaire.",
        )
    for mine, its in zip(given.gradients, right.gradients, strict=True):
        assert mine is not None and its is not None
        if not mine.allclose(its, atol=_TOLERANCE):
            raise Wrong(
                en="The output is right but not the gradients: what backward runs again is not what forward ran. "
                "A function made in a loop sees the last value of the loop's variables, and dropout must draw the "
                "same mask twice (checkpoint does so by itself).",
                fr="La sortie est juste, mais pas les gradients : ce que la passe arrière recalcule n’est pas ce "
                "qu’avait fait la passe avant. Une fonction créée dans une boucle voit la dernière valeur des "
                "variables de la boucle ; et le dropout doit tirer deux fois le même masque (checkpoint s’en charge).",
            )


def _judge_memory(given: _Trial, right: _Trial, count: int, per_segment: int) -> None:
    segments = -(-count // per_segment)
    if given.hidden_alive:
        raise Wrong(
            en=f"After forward, {given.hidden_alive} of the {count} hidden activations are still in memory, none "
            "is expected: run every segment through checkpoint(…), the last one too.",
            fr=f"Après la passe avant, {given.hidden_alive} des {count} activations internes sont encore en "
            "mémoire, aucune n’est attendue : faites passer chaque segment par checkpoint(…), le dernier compris.",
        )
    if given.outputs_alive > segments:
        raise Wrong(
            en=f"After forward, the outputs of {given.outputs_alive} blocks are in memory; with {count} blocks and "
            f"{per_segment} per segment, {segments} are expected: one checkpoint for each segment, not for each "
            "block, and no list of outputs.",
            fr=f"Après la passe avant, les sorties de {given.outputs_alive} blocs sont en mémoire ; pour {count} "
            f"blocs, à raison de {per_segment} par segment, on en attend {segments} : un checkpoint par segment, "
            "non par bloc, et pas de liste de sorties.",
        )
    if given.outputs_alive < segments:
        raise Wrong(
            en=f"After forward, the outputs of {given.outputs_alive} blocks are in memory, {segments} are expected: "
            "your segments are too long, and backward will have to hold all the activations of one at once.",
            fr=f"Après la passe avant, les sorties de {given.outputs_alive} blocs sont en mémoire, on en attend "
            f"{segments} : vos segments sont trop longs, et la passe arrière devra garder d’un coup toutes les "
            "activations de l’un d’eux.",
        )


def _judge_runs(given: _Trial, right: _Trial, count: int, per_segment: int) -> None:
    most = max(given.runs)
    if most > 2:
        raise Wrong(
            en=f"A block runs {most} times in one step; twice is enough: forward, and once more in backward. Do "
            "not put one checkpoint inside another.",
            fr=f"Un bloc s’exécute {most} fois en un pas ; deux suffisent : la passe avant, puis une fois dans la "
            "passe arrière. N’imbriquez pas les checkpoints.",
        )


CHECKPOINT = Exercise(
    id="checkpoint",
    title=Said("checkpointing by segments", "les points de contrôle par segments"),
    judge=Judge(cases=_CASES, trial=_check_checkpointed),
    praise_en="Right: the same gradients, and after forward only one tensor per segment is left in memory.",
    praise_fr="Exact : les mêmes gradients, et après la passe avant il ne reste en mémoire qu’un tenseur par segment.",
    hint_en="checkpoint(f, x, use_reentrant=False) returns f(x) and keeps x only. What must f be here, and how many "
    "times is checkpoint called?",
    hint_fr="checkpoint(f, x, use_reentrant=False) renvoie f(x) et ne garde que x. Que doit être f ici, et combien de "
    "fois appelle-t-on checkpoint ?",
    nearer_en="for start in range(0, len(blocks), per_segment): a segment is nn.Sequential(*blocks[start : start + "
    "per_segment]), which is a function of x.",
    nearer_fr="for start in range(0, len(blocks), per_segment) : un segment est nn.Sequential(*blocks[start : start + "
    "per_segment]), qui est une fonction de x.",
)


_OFFLOAD_SAMPLES, _OFFLOAD_WIDTH = 5, 8


class Host:
    """Host memory, as the lab has it: tensors are stored under a number, and fetched by it.

    `stored_bytes` counts what has been stored, `fetches` how often something was fetched.
    """

    def __init__(self) -> None:
        self.stored_bytes = 0
        self.fetches = 0
        self._kept: dict[int, Tensor] = {}

    def store(self, tensor: Tensor) -> int:
        """Copy a tensor to the host, whole; its number."""
        self.stored_bytes += tensor.nbytes
        self._kept[len(self._kept)] = tensor.detach().clone()
        return len(self._kept) - 1

    def fetch(self, number: int) -> Tensor:
        """A copy of the tensor stored under this number, back on the device."""
        self.fetches += 1
        return self._kept[number].clone()


Hooks = tuple["Callable[[Tensor], Any]", "Callable[[Any], Tensor]"]


def offload_hooks(model: nn.Module, host: Host) -> Hooks:
    """The pair (pack, unpack) that moves what autograd saves to the host, the model's own parameters excepted.

    Source: torch `autograd.graph.saved_tensors_hooks`; Rajbhandari et al. 2021, ZeRO-Infinity (arXiv 2104.07857),
    §5.1.2. The package's own version is `dlojz.by_hand.activation_offload`.
    """
    from torch import Tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Any:
        return tensor if tensor.untyped_storage().data_ptr() in weights else host.store(tensor)

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else host.fetch(packed)

    return pack, unpack


def _model() -> nn.Module:
    import torch
    from torch import nn

    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(_OFFLOAD_WIDTH, 2 * _OFFLOAD_WIDTH),
        nn.GELU(),
        nn.LayerNorm(2 * _OFFLOAD_WIDTH),
        nn.Linear(2 * _OFFLOAD_WIDTH, _OFFLOAD_WIDTH),
        nn.Tanh(),
    )


def _step(hooks_of: Callable[..., Any] | None) -> tuple[Host, list[Tensor]]:
    """One forward and backward pass under an answer's hooks, or without any: the host, and the gradients."""
    import torch

    model, host = _model(), Host()
    x = torch.randn(_OFFLOAD_SAMPLES, _OFFLOAD_WIDTH, generator=torch.Generator().manual_seed(7))
    if hooks_of is None:
        model(x).square().sum().backward()
    else:
        pack, unpack = _as_hooks(hooks_of(model, host))
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = model(x)
        output.square().sum().backward()
    return host, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _pair(value: Any) -> Hooks:
    pack, unpack = value
    if not (isinstance(value, tuple) and callable(pack) and callable(unpack)):
        raise TypeError
    return pack, unpack


_as_hooks = reader(
    _pair,
    "Two functions are expected, (pack, unpack), in this order, without calling them",
    "On attend deux fonctions, (pack, unpack), dans cet ordre, sans les appeler",
    names="pack, unpack",
)


def _judge_hooks(answer: Callable[..., Any]) -> None:
    _, right = _step(None)
    expected, _ = _step(offload_hooks)
    weights_bytes = sum(parameter.nbytes for parameter in _model().parameters() if parameter.dim() > 1)
    host, gradients = _step(answer)
    if len(gradients) != len(right) or not all(a.allclose(b) for a, b in zip(gradients, right, strict=True)):
        raise Wrong(
            en="The gradients are no longer those of the model without hooks: unpack must give back exactly the "
            "tensor that pack was given, with its shape, type and values.",
            fr="Les gradients ne sont plus ceux du modèle sans hooks : unpack doit rendre exactement le tenseur "
            "que pack a reçu, avec sa forme, son type et ses valeurs.",
        )
    if not host.stored_bytes:
        raise Wrong(
            en="The gradients are right, but nothing has gone to the host: pack must return host.store(tensor), a "
            "number, which autograd keeps in place of the tensor.",
            fr="Les gradients sont justes, mais rien n’est parti vers l’hôte : pack doit renvoyer "
            "host.store(tensor), un numéro, qu’autograd garde à la place du tenseur.",
        )
    if not host.fetches:
        raise Wrong(
            en="Tensors are stored, but never fetched: pack also gives back the tensor itself, so autograd keeps "
            "it and no memory is saved. Keep the number alone.",
            fr="Des tenseurs sont stockés, mais jamais relus : pack rend aussi le tenseur lui-même, autograd le "
            "garde donc, et aucune mémoire n’est économisée. Ne gardez que le numéro.",
        )
    extra = host.stored_bytes - expected.stored_bytes
    if 0 < extra <= weights_bytes:
        raise Wrong(
            en=f"Your hooks also move {extra} bytes of weights, which stay on the device anyway: that saves "
            "nothing. Autograd may hand over a transposed view of a weight, which is neither `in` "
            "model.parameters() nor an nn.Parameter; compare storages: tensor.untyped_storage().data_ptr().",
            fr=f"Vos hooks déplacent aussi {extra} octets de poids, qui restent de toute façon sur le GPU : cela "
            "n’économise rien. Autograd peut présenter une vue transposée d’un poids, qui n’est ni `in` "
            "model.parameters() ni un nn.Parameter ; comparez les zones de mémoire : "
            "tensor.untyped_storage().data_ptr().",
        )
    if extra:
        raise Wrong(
            en=f"{host.stored_bytes} bytes have gone to the host, {expected.stored_bytes} are expected: all that "
            "is saved but the weights, each time it is saved, and nothing else.",
            fr=f"{host.stored_bytes} octets sont partis vers l’hôte, on en attend {expected.stored_bytes} : tout "
            "ce qui est gardé sauf les poids, chaque fois, et rien d’autre.",
        )


OFFLOAD = Exercise(
    id="offload",
    title=Said("offloading activations", "le déchargement des activations"),
    judge=Judge(cases=((),), trial=_judge_hooks),
    praise_en="Right: autograd keeps numbers, the host keeps the activations, and the gradients have not noticed.",
    praise_fr="Exact : autograd garde des numéros, l’hôte garde les activations, et les gradients n’en savent rien.",
    hint_en="pack returns whatever unpack will need: host.store(tensor), or the tensor itself where it is a weight. "
    "How does unpack tell the two apart?",
    hint_fr="pack renvoie ce dont unpack aura besoin : host.store(tensor), ou le tenseur lui-même s’il s’agit d’un "
    "poids. Comment unpack distingue-t-il les deux ?",
    nearer_en="weights = {p.untyped_storage().data_ptr() for p in model.parameters()}; pack looks there; unpack asks "
    "isinstance(packed, torch.Tensor).",
    nearer_fr="weights = {p.untyped_storage().data_ptr() for p in model.parameters()} ; pack y regarde ; unpack teste "
    "isinstance(packed, torch.Tensor).",
)


def exposed_seconds(moved_bytes: float, link_bytes_per_s: float, forward_s: float) -> float:
    """Seconds that offloading adds to a step: what does not hide behind the forward, then the backward pass.

    The bytes leave during forward and come back during backward, which takes twice as long.

    Source: ZeRO-Infinity (arXiv 2104.07857), §5.1.2, for the overlap; Korthikanti et al. 2022 (arXiv 2205.05198),
    appendix A, for the factor 2.
    """
    one_way_s = moved_bytes / link_bytes_per_s
    return max(0.0, one_way_s - forward_s) + max(0.0, one_way_s - 2 * forward_s)


EXPOSED_SECONDS = Exercise(
    id="exposed-seconds",
    title=Said("what offloading costs", "ce que coûte le déchargement"),
    judge=Judge(
        exposed_seconds,
        cases=((25e9, 25e9, 0.4), (25e9, 25e9, 0.7), (5e9, 25e9, 0.5), (64e9, 16e9, 0.1), (12e9, 50e9, 0.2)),
        mistakes=(
            Mistake(
                lambda moved, link, forward: 2 * moved / link,
                "That is all the time the bytes travel; they travel while the GPU computes, and only what is "
                "longer than the computation is waited for.",
                "C’est tout le temps de transport ; or les octets voyagent pendant que le GPU calcule, et l’on "
                "n’attend que ce qui dépasse le calcul.",
            ),
            Mistake(
                lambda moved, link, forward: max(0.0, moved / link - forward),
                "That is the way out; the bytes must come back, during the backward pass.",
                "C’est l’aller ; les octets doivent aussi revenir, pendant la passe arrière.",
            ),
            Mistake(
                lambda moved, link, forward: max(0.0, 2 * moved / link - 3 * forward),
                "You hide both ways behind the whole step, but what is left over in forward cannot wait for "
                "backward's spare time: compare each way with its own pass.",
                "Vous cachez les deux trajets derrière le pas entier ; or ce qui dépasse de la passe avant ne peut "
                "pas profiter du temps libre de la passe arrière : comparez chaque trajet à sa propre passe.",
            ),
            Mistake(
                lambda moved, link, forward: 2 * max(0.0, moved / link - forward),
                "Backward takes twice as long as forward: more is hidden on the way back.",
                "La passe arrière dure deux fois plus que la passe avant : le retour se cache mieux.",
            ),
            Mistake(
                lambda moved, link, forward: moved / link - forward + moved / link - 2 * forward,
                "Where the transfer is shorter than the computation your function wins time; it costs nothing, "
                "but gives nothing back: max(0, …) for each way.",
                "Quand le transfert est plus court que le calcul, votre fonction gagne du temps ; il ne coûte "
                "rien, mais ne rend rien non plus : max(0, …) pour chaque trajet.",
            ),
        ),
    ),
    praise_en="Right: as long as the link keeps up with the computation, memory costs no time at all.",
    praise_fr="Exact : tant que le lien suit le calcul, la mémoire gagnée ne coûte aucun temps.",
    hint_en="How long does one way take? It has forward_s to hide on the way out; and how much on the way back?",
    hint_fr="Combien de temps dure un trajet ? Il a forward_s pour se cacher à l’aller ; et combien au retour ?",
    nearer_en="max(0, way − forward_s) + max(0, way − 2 · forward_s), where way = moved_bytes / link_bytes_per_s.",
    nearer_fr="max(0, trajet − forward_s) + max(0, trajet − 2 · forward_s), où trajet = moved_bytes / "
    "link_bytes_per_s.",
)
