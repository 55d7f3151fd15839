"""Lab 02: bytes per parameter, and why data parallelism does not divide them.

Layer 6 (labs). Invariant: the references are the closed forms of `dlojz.predict`, which the probe confirms to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said
from dlojz.predict.state_forms import bytes_per_parameter as form

PRECISIONS = ("fp32", "autocast", "bf16", "bf16_fp32_gradients")
OPTIMIZERS = ("sgd", "momentum", "adamw")


def bytes_per_parameter(precision: str, optimizer: str) -> int:
    """Bytes of all states per parameter on one device: weight, gradient, master copy and moments.

    Source: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), §3.1; see `dlojz.predict.state_forms`.
    """
    return int(form(precision, optimizer).device_per_parameter)  # type: ignore[arg-type]


def _variant(weights: dict[str, tuple[int, int, int]], moments: Callable[[str, str], int]) -> Callable[[str, str], int]:
    return lambda precision, optimizer: sum(weights[precision]) + moments(precision, optimizer)


_RIGHT = {"fp32": (4, 4, 0), "autocast": (4, 4, 0), "bf16": (2, 2, 4), "bf16_fp32_gradients": (2, 4, 4)}
_MOMENTS = {"sgd": 0, "momentum": 1, "adamw": 2}


def _fp32_moments(precision: str, optimizer: str) -> int:
    return 4 * _MOMENTS[optimizer]


def _moments_as_weights(precision: str, optimizer: str) -> int:
    return _RIGHT[precision][0] * _MOMENTS[optimizer]


BYTES_PER_PARAMETER = Exercise(
    id="bytes-per-parameter",
    title=Said("bytes per parameter", "octets par paramètre"),
    judge=by_reference(
        bytes_per_parameter,
        cases=lambda: product(PRECISIONS, OPTIMIZERS),
        mistakes=(
            Mistake(
                _variant({name: (w, g, 0) for name, (w, g, _) in _RIGHT.items()}, _fp32_moments),
                Said(
                    "The master copy is missing: with weights in bf16 the optimizer updates a copy in fp32, without "
                    "which small updates would be rounded away.",
                    "Il manque la copie maître : quand les poids sont en bf16, l’optimiseur met à jour une copie "
                    "en fp32, sans laquelle les petites mises à jour disparaîtraient à l’arrondi.",
                ),
            ),
            Mistake(
                _variant(_RIGHT, _moments_as_weights),
                Said(
                    "You keep the moments in the precision of the weights; the optimizer keeps them in fp32, 4 bytes "
                    "each, whatever the weights are in.",
                    "Vous gardez les moments dans la précision des poids ; l’optimiseur les garde en fp32, 4 octets "
                    "chacun, quelle que soit celle des poids.",
                ),
            ),
            Mistake(
                _variant(_RIGHT, lambda precision, optimizer: 4 * min(1, _MOMENTS[optimizer])),
                Said(
                    "AdamW keeps two moments per parameter: the mean of the gradients and that of their squares.",
                    "AdamW garde deux moments par paramètre : la moyenne des gradients et celle de leurs carrés.",
                ),
            ),
            Mistake(
                _variant(_RIGHT, lambda precision, optimizer: 8),
                Said(
                    "You count AdamW's two moments for every optimizer: SGD keeps nothing, momentum one number.",
                    "Vous comptez les deux moments d’AdamW pour tous les optimiseurs : SGD ne garde rien, momentum un "
                    "seul nombre.",
                ),
            ),
            Mistake(
                _variant({name: (w, 0, m) for name, (w, _, m) in _RIGHT.items()}, _fp32_moments),
                Said(
                    "The gradients are missing: at the end of the backward pass there is one number per parameter.",
                    "Les gradients manquent : à la fin de la passe arrière, il y a un nombre par paramètre.",
                ),
            ),
            Mistake(
                _variant({**_RIGHT, "bf16_fp32_gradients": (2, 6, 4)}, _fp32_moments),
                Said(
                    "For bf16_fp32_gradients you count the gradient twice, in bf16 and in fp32: that is the rule of "
                    "20 bytes; here only the fp32 one is kept.",
                    "Pour bf16_fp32_gradients, vous comptez le gradient deux fois, en bf16 et en fp32 : c’est la "
                    "règle des 20 octets ; ici, seul celui en fp32 est gardé.",
                ),
            ),
            Mistake(
                _variant({**_RIGHT, "autocast": (6, 4, 0)}, _fp32_moments),
                Said(
                    "You count a bf16 copy of the weights under autocast: it lives for the passes only, weight by "
                    "weight, and is no state.",
                    "Sous autocast, vous comptez une copie des poids en bf16 : elle ne vit que pendant les passes, "
                    "poids par poids, et ne fait pas partie des états.",
                ),
            ),
            Mistake(
                _variant(dict.fromkeys(_RIGHT, (2, 2, 0)) | {"fp32": (4, 4, 0)}, _fp32_moments),
                Said(
                    "Neither autocast nor mixed precision does without fp32: autocast keeps all states in fp32, bf16 "
                    "keeps a master copy.",
                    "Ni autocast ni la précision mixte ne se passent de fp32 : autocast y garde tous les états, bf16 "
                    "y garde une copie maître.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right. And notice: with AdamW, fp32 and bf16 take the same 16 bytes; mixed precision saves activations and "
        "time, not states.",
        "Exact. Et remarquez : avec AdamW, fp32 et bf16 prennent les mêmes 16 octets ; la précision mixte économise "
        "des activations et du temps, pas des états.",
    ),
    hints=(
        Said(
            "Four things per parameter: the weight, its gradient, perhaps a master copy, and the optimizer's moments. "
            "Write the bytes of each in a table, precision by precision.",
            "Quatre choses par paramètre : le poids, son gradient, parfois une copie maître, et les moments de "
            "l’optimiseur. Écrivez les octets de chacune dans un tableau, précision par précision.",
        ),
        Said(
            "Weight, gradient, master copy: 4 + 4 + 0 (fp32, autocast), 2 + 2 + 4 (bf16), 2 + 4 + 4 "
            "(bf16_fp32_gradients). Then 4 bytes per moment: none, one or two.",
            "Poids, gradient, copie maître : 4 + 4 + 0 (fp32, autocast), 2 + 2 + 4 (bf16), 2 + 4 + 4 "
            "(bf16_fp32_gradients). Puis 4 octets par moment : zéro, un ou deux.",
        ),
    ),
)


def data_parallel_bytes(parameters: int, sample_bytes: int, global_batch: int, dp: int) -> int:
    """Bytes of one of dp replicas in fp32 with AdamW: states, DDP's buckets, activations of its share of the batch.

    An upper bound: activations are released while gradients appear.

    Source: ZeRO (arXiv 1910.02054), §3: data parallelism replicates all states; torch's DDP keeps buckets as large as
    the gradients (Li et al. 2020, arXiv 2006.15704, §4.2).
    """
    buckets_bytes = 4 * parameters if dp > 1 else 0
    return 16 * parameters + buckets_bytes + sample_bytes * global_batch // dp


def _clusters() -> Iterator[tuple[int, int, int, int]]:
    yield from (
        (1_000_000, 3_000_000, 64, 1),
        (1_000_000, 3_000_000, 64, 2),
        (2_500_000_000, 12_000_000_000, 64, 64),
        (25_000_000, 240_000_000, 128, 8),
        (7_000_000, 1_000, 32, 4),
    )


DATA_PARALLEL_BYTES = Exercise(
    id="data-parallel-bytes",
    title=Said("what a replica takes", "ce qu’occupe une réplique"),
    judge=by_reference(
        data_parallel_bytes,
        cases=_clusters,
        mistakes=(
            Mistake(
                lambda psi, sample, batch, dp: (20 if dp > 1 else 16) * psi // dp + sample * batch // dp,
                Said(
                    "You divide the states by dp: that is what ZeRO-3 does. In data parallelism every replica keeps "
                    "all of them.",
                    "Vous divisez les états par dp : c’est ce que fait ZeRO-3. En Data Parallelism, chaque réplique "
                    "les garde tous.",
                ),
            ),
            Mistake(
                lambda psi, sample, batch, dp: 16 * psi // dp + sample * batch // dp,
                Said(
                    "You divide the states by dp: that is what ZeRO-3 does. In data parallelism every replica keeps "
                    "all of them, and DDP's buckets besides.",
                    "Vous divisez les états par dp : c’est ce que fait ZeRO-3. En Data Parallelism, chaque réplique "
                    "les garde tous, et les buckets de DDP en plus.",
                ),
            ),
            Mistake(
                lambda psi, sample, batch, dp: 16 * psi + sample * batch // dp,
                Said(
                    "DDP's buckets are missing: from two replicas on, they hold a second copy of the gradients, 4 "
                    "bytes per parameter.",
                    "Il manque les buckets de DDP : dès deux répliques, ils contiennent une seconde copie des "
                    "gradients, 4 octets par paramètre.",
                ),
            ),
            Mistake(
                lambda psi, sample, batch, dp: 20 * psi + sample * batch // dp,
                Said(
                    "You count buckets on a single GPU too: with dp=1 there is nothing to communicate, so none.",
                    "Vous comptez des buckets même sur un seul GPU : avec dp=1, il n’y a rien à communiquer, donc pas "
                    "de bucket.",
                ),
            ),
            Mistake(
                lambda psi, sample, batch, dp: (20 if dp > 1 else 16) * psi + sample * batch,
                Said(
                    "You give the whole global batch to each replica; it reads its share alone, global_batch / dp.",
                    "Vous donnez tout le batch global à chaque réplique ; elle n’en lit que sa part, "
                    "global_batch / dp.",
                ),
            ),
            Mistake(
                lambda psi, sample, batch, dp: (20 if dp > 1 else 16) * psi + sample,
                Said(
                    "You count the activations of one single image; a replica reads global_batch / dp of them.",
                    "Vous comptez les activations d’une seule image ; une réplique en lit global_batch / dp.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: only the last term has dp below it. More GPUs make the activations smaller, never the states.",
        "Exact : seul le dernier terme est divisé par dp. Plus de GPU, c’est moins d’activations, jamais moins "
        "d’états.",
    ),
    hints=(
        Said(
            "Three terms: the states, DDP's buckets, the activations. Which of them depend on dp, and how?",
            "Trois termes : les états, les buckets de DDP, les activations. Lesquels dépendent de dp, et comment ?",
        ),
        Said(
            "16 bytes per parameter, 4 more if dp > 1, and sample_bytes times global_batch // dp.",
            "16 octets par paramètre, 4 de plus si dp > 1, et sample_bytes fois global_batch // dp.",
        ),
    ),
)
