"""Lab 06: the bytes that a layer sends under tensor parallelism, and the time they take.

Layer 6 (labs). Invariant: pure arithmetic; the volumes are those that a run counts, the times those of the α–β model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dlojz.collectives.cost import cost_s
from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said

LayerBytes = Callable[[int, int, int, int, int], float]
CASES = ((1, 2048, 12288, 8, 2), (4, 128, 128, 2, 4), (2, 1024, 4096, 4, 2))


class Link(NamedTuple):
    """A link: latency of a message, and bytes per second in each direction."""

    alpha_s: float
    bytes_per_s: float


NVLINK = Link(5e-6, 300e9)
"""A100: 600 GB/s in both directions together (NVIDIA A100 datasheet), so 300 each way; the latency is an assumption."""
NETWORK = Link(10e-6, 25e9)
"""The network of labs 03 and 04: 200 Gbit/s, shared by the GPUs of a node or not; here each has it to itself."""


def layer_bytes(samples: int, tokens: int, width: int, ranks: int, number_bytes: int) -> float:
    """Bytes that each rank sends for one transformer layer and one micro-batch, forward and backward.

    Four all-reduces of (B, T, D), each of which sends 2(n − 1)/n of its message.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §3.2, eq. for 8·b·s·h·(t − 1)/t elements.
    """
    return 4 * samples * tokens * width * number_bytes * 2 * (ranks - 1) / ranks


def layer_seconds(samples: int, tokens: int, width: int, ranks: int, number_bytes: int, link: Link) -> float:
    """Time of the same four ring all-reduces over links of one kind; nothing hides them, as each is waited for."""
    message_bytes = samples * tokens * width * number_bytes
    one_s = cost_s("ring_all_reduce", message_bytes, ranks, alpha_s=link.alpha_s, beta_s_per_byte=1 / link.bytes_per_s)
    return 4 * one_s


def compute_seconds(samples: int, tokens: int, width: int, ranks: int, flops_per_s: float) -> float:
    """Time of the layer's matrix products on each rank, forward and backward.

    72·B·T·D²·(1 + T/(6D)) operations over the ranks, without recomputation.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), appendix: 24·b·s·h²(1 + s/(6h)) in forward, twice that backward.
    """
    return 72 * samples * tokens * width**2 * (1 + tokens / (6 * width)) / ranks / flops_per_s


def _spoilt(factor: Callable[[int], float]) -> LayerBytes:
    return lambda b, t, d, n, size: layer_bytes(b, t, d, n, size) * factor(n)


LAYER_BYTES = Exercise(
    id="layer-bytes",
    title=Said("the bytes of a layer", "les octets d’une couche"),
    judge=by_reference(
        layer_bytes,
        cases=lambda: CASES,
        mistakes=(
            Mistake(
                _spoilt(lambda n: 1 / 2),
                Said(
                    "Half is missing: the layer has two regions, attention and MLP, each with one all-reduce in "
                    "forward and one in backward, four in all; and an all-reduce is a reduce-scatter and an "
                    "all-gather.",
                    "Il en manque la moitié : la couche a deux régions, attention et MLP, chacune avec un all-reduce "
                    "en passe avant et un en passe arrière, soit quatre ; et un all-reduce est un reduce-scatter suivi "
                    "d’un all-gather.",
                ),
            ),
            Mistake(
                _spoilt(lambda n: n / (2 * (n - 1))),
                Said(
                    "That is the size of the messages; on a ring each rank sends 2(N − 1)/N of each (lab 03).",
                    "C’est la taille des messages ; sur un anneau, chaque rang en envoie 2(N − 1)/N (TP 03).",
                ),
            ),
            Mistake(
                _spoilt(lambda n: n / (n - 1)),
                Said(
                    "You count each message twice; on a ring each rank sends 2(N − 1)/N of it, a little less.",
                    "Vous comptez chaque message deux fois ; sur un anneau, chaque rang en envoie 2(N − 1)/N, un peu "
                    "moins.",
                ),
            ),
            Mistake(
                _spoilt(lambda n: 1 / n),
                Said(
                    "You divide by the number of ranks once more; but what is added up, (B, T, D), is whole on every "
                    "rank: tensor parallelism shares out weights, not this tensor.",
                    "Vous divisez une fois de trop par le nombre de rangs ; or ce que l’on additionne, (B, T, D), est "
                    "entier sur chaque rang : le parallélisme de tenseur répartit les poids, pas ce tenseur.",
                ),
            ),
            Mistake(
                lambda b, t, d, n, size: layer_bytes(b, t, d, n, 1),
                Said("That is a number of elements: times number_bytes.", "C’est un nombre d’éléments : multipliez par "
                     "number_bytes."),
            ),
            Mistake(
                lambda b, t, d, n, size: layer_bytes(b, 1, d, n, size) * d,
                Said(
                    "You send the weights (D × D); tensor parallelism leaves them where they are, and sends "
                    "activations: B × T × D.",
                    "Vous envoyez les poids (D × D) ; le parallélisme de tenseur les laisse où ils sont, et envoie des "
                    "activations : B × T × D.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: four all-reduces of (B, T, D) for each layer and each micro-batch.",
        "Exact : quatre all-reduces de (B, T, D) par couche et par micro-batch.",
    ),
    hints=(
        Said(
            "How many regions has a transformer layer, and how many all-reduces each, forward and backward? What is "
            "the shape of what is added up?",
            "Combien de régions une couche de transformer a-t-elle, et combien d’all-reduces chacune, en passes avant "
            "et arrière ? Quelle est la forme de ce qui est additionné ?",
        ),
        Said(
            "4 messages of samples · tokens · width · number_bytes, of which a ring sends 2 (ranks − 1) / ranks.",
            "4 messages de samples · tokens · width · number_bytes, dont un anneau envoie 2 (ranks − 1) / ranks.",
        ),
    ),
)  # fmt: skip
