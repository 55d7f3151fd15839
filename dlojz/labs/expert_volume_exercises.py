"""Lab 10: the bytes that a mixture sends.

Layer 6 (labs). Invariant: pure arithmetic; the volumes are those that a run counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said

CASES = ((2048, 4096, 8, 2, 1.25, 8, 2), (100, 64, 8, 1, 1.0, 4, 4), (512, 128, 16, 1, 2.0, 2, 4))
"""Tokens of a rank, width, experts, choices of a token, capacity factor, ranks, bytes of a number."""


def exchange_bytes(
    tokens: int, width: int, experts: int, k: int, factor: float, ranks: int, number_bytes: int
) -> float:
    """Bytes that each rank sends for one mixture and one micro-batch, forward and backward.

    Four all-to-all of (E, C, D), of which the share for a rank's own experts, 1/n, stays.

    Source: Lepikhin et al. 2020 (arXiv 2006.16668), dispatch and combine, each the other's backward pass.
    """
    room = math.ceil(factor * k * tokens / experts)
    return 4 * experts * room * width * number_bytes * (ranks - 1) / ranks


def _times(factor: Callable[[int], float]) -> Callable[..., float]:
    """A volume under a fault that depends on the number of ranks."""
    return lambda *case: exchange_bytes(*case) * factor(case[5])


def _exact(tokens: int, width: int, experts: int, k: int, factor: float, ranks: int, number_bytes: int) -> float:
    return 4 * factor * k * tokens * width * number_bytes * (ranks - 1) / ranks


EXCHANGE_BYTES = Exercise(
    id="exchange-bytes",
    title=Said("the bytes of the all-to-all", "les octets de l’all-to-all"),
    judge=by_reference(
        exchange_bytes,
        cases=lambda: CASES,
        mistakes=(
            Mistake(
                _times(lambda n: 1 / 2),
                Said(
                    "Half is missing: there and back in forward, and again in backward, four all-to-all.",
                    "Il en manque la moitié : aller et retour en passe avant, puis de nouveau en passe arrière, soit "
                    "quatre all-to-all.",
                ),
            ),
            Mistake(
                _times(lambda n: 1 / 4),
                Said(
                    "That is one all-to-all: there and back, in forward and in backward, make four.",
                    "C’est un seul all-to-all : aller et retour, en passe avant et en passe arrière, en font quatre.",
                ),
            ),
            Mistake(
                _times(lambda n: n / (n - 1)),
                Said(
                    "That is the size of the tensors; the rows of a rank's own experts, 1/ranks of them, do not leave.",
                    "C’est la taille des tenseurs ; les lignes destinées aux experts du rang, soit 1/ranks, ne partent "
                    "pas.",
                ),
            ),
            Mistake(
                _times(float),
                Said(
                    "That is an all-gather, which sends everything to everyone: an all-to-all sends each row to one "
                    "rank only.",
                    "C’est un all-gather, qui envoie tout à tous : un all-to-all n’envoie chaque ligne qu’à un rang.",
                ),
            ),
            Mistake(
                _exact,
                Said(
                    "Nearly: the capacity of an expert is rounded up to a whole number of places (math.ceil), and "
                    "empty places travel too.",
                    "Presque : la capacité d’un expert est arrondie vers le haut à un nombre entier de places "
                    "(math.ceil), et les places vides voyagent aussi.",
                ),
            ),
            Mistake(
                lambda t, d, e, k, f, n, size: exchange_bytes(t, d, e, k, 1.0, n, size),
                Said(
                    "The capacity factor is left out: what travels are places, filled or not, and there are factor "
                    "times as many as choices.",
                    "Le facteur de capacité est oublié : ce sont des places qui voyagent, remplies ou non, et il y en "
                    "a factor fois plus que de choix.",
                ),
            ),
            Mistake(
                lambda t, d, e, k, f, n, size: exchange_bytes(t, d, e, 1, f, n, size),
                Said(
                    "k is left out: a token goes to k experts, so it travels k times.",
                    "k est oublié : un token va chez k experts, il voyage donc k fois.",
                ),
            ),
            Mistake(
                lambda t, d, e, k, f, n, size: exchange_bytes(t, d, e, k, f, n, 1),
                Said(
                    "That is a number of elements: times number_bytes.",
                    "C’est un nombre d’éléments : multipliez par number_bytes.",
                ),
            ),
            Mistake(
                lambda t, d, e, k, f, n, size: exchange_bytes(t, d, e, k, f, n, size) / n,
                Said(
                    "You divide by the number of ranks once more; but a rank has places for all E experts, wherever "
                    "they are.",
                    "Vous divisez une fois de trop par le nombre de rangs ; or un rang a des places pour les E "
                    "experts, où qu’ils soient.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: the number of experts does not matter, only k, the factor and the tokens.",
        "Exact : le nombre d’experts ne compte pas, seulement k, le facteur et les tokens.",
    ),
    hints=(
        Said(
            "How large is the tensor (E, C, D) of a rank? How many times does it travel, forward and backward? Which "
            "share of it stays?",
            "Quelle est la taille du tenseur (E, C, D) d’un rang ? Combien de fois voyage-t-il, en passes avant et "
            "arrière ? Quelle part en reste sur place ?",
        ),
        Said(
            "room = math.ceil(factor * k * tokens / experts); 4 * experts * room * width * number_bytes * (ranks - 1) "
            "/ ranks.",
            "room = math.ceil(factor * k * tokens / experts) ; 4 * experts * room * width * number_bytes * (ranks - 1) "
            "/ ranks.",
        ),
    ),
)
