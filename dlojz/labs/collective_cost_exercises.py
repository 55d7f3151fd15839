"""Lab 03: how long a ring all-reduce takes, by the α–β model.

Layer 6 (labs). Invariant: the reference is the closed form that `dlojz.collectives` predicts with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said


def ring_seconds(message_bytes: float, size: int, alpha_s: float, beta_s_per_byte: float) -> float:
    """Time of a ring all-reduce: 2 (p − 1) steps, each α plus β times one chunk of n / p bytes.

    Source: Hockney 1994 (α–β); Thakur, Rabenseifner & Gropp 2005, "Optimization of Collective Communication Operations
    in MPICH", §4.5, without the term of the additions.
    """
    return 2 * (size - 1) * (alpha_s + message_bytes / size * beta_s_per_byte)


def _networks() -> Iterator[tuple[int, int, float, float]]:
    yield 4_000_000, 4, 1e-3, 1e-9
    yield 65_536, 8, 2e-3, 5e-8
    yield 1_000_000, 2, 5e-4, 3e-9
    yield 8_192, 64, 1e-3, 2e-7
    yield 4_096, 1, 1e-3, 1e-8


RING_TIME = Exercise(
    id="ring-time",
    title=Said("the time of a ring all-reduce", "la durée d’un all-reduce en anneau"),
    judge=by_reference(
        ring_seconds,
        cases=_networks,
        mistakes=(
            Mistake(
                lambda n, p, a, b: (p - 1) * (a + n / p * b),
                Said(
                    "That is half of it: the reduce-scatter takes p − 1 steps, and the all-gather as many again.",
                    "C’est la moitié : le reduce-scatter prend p − 1 étapes, et l’all-gather autant.",
                ),
            ),
            Mistake(
                lambda n, p, a, b: 2 * (p - 1) * (a + n * b),
                Said(
                    "Each step carries the whole message here; in a ring it carries one chunk, message_bytes / size.",
                    "Chaque étape transporte ici tout le message ; dans un anneau, elle n’en transporte qu’un "
                    "morceau, message_bytes / size.",
                ),
            ),
            Mistake(
                lambda n, p, a, b: 2 * (p - 1) / p * n * b,
                Said(
                    "The latency is missing: α is paid once per step, however small the chunk.",
                    "La latence manque : α est payée une fois par étape, si petit que soit le morceau.",
                ),
            ),
            Mistake(
                lambda n, p, a, b: a + 2 * (p - 1) / p * n * b,
                Said(
                    "α is paid once only; yet every one of the 2 (p − 1) steps begins with a latency.",
                    "α n’est payée qu’une fois ; or chacune des 2 (p − 1) étapes commence par une latence.",
                ),
            ),
            Mistake(
                lambda n, p, a, b: 2 * a + 2 * (p - 1) / p * n * b,
                Said(
                    "α is paid once per half; yet every one of the 2 (p − 1) steps begins with a latency.",
                    "α n’est payée qu’une fois par moitié ; or chacune des 2 (p − 1) étapes commence par une latence.",
                ),
            ),
            Mistake(
                lambda n, p, a, b: 2 * p * (a + n / p * b),
                Said(
                    "One step too many in each half: a chunk that goes round a ring of p ranks is passed on p − 1 "
                    "times; try size = 1, where nothing is sent.",
                    "Une étape de trop dans chaque moitié : un morceau qui fait le tour d’un anneau de p rangs est "
                    "transmis p − 1 fois ; essayez size = 1, où rien n’est envoyé.",
                ),
            ),
            Mistake(
                lambda n, p, a, b: a + n * b,
                Said(
                    "That is the time of one message from one rank to another; the ring takes 2 (p − 1) steps of one "
                    "chunk each.",
                    "C’est la durée d’un seul message d’un rang à un autre ; l’anneau fait 2 (p − 1) étapes, d’un "
                    "morceau chacune.",
                ),
            ),
            Mistake(
                lambda n, p, a, b: 2 * math.log2(p) * (a + n * b),
                Said(
                    "That is a tree: few steps, each with the whole message. The ring takes 2 (p − 1) steps, each "
                    "with one chunk.",
                    "C’est un arbre : peu d’étapes, chacune avec tout le message. L’anneau fait 2 (p − 1) étapes, "
                    "chacune avec un seul morceau.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: latency grows with the number of ranks, 2 (p − 1) α; the bytes hardly do, 2 (p − 1) / p · n.",
        "Exact : la latence croît avec le nombre de rangs, 2 (p − 1) α ; les octets, presque pas : 2 (p − 1) / p · n.",
    ),
    hints=(
        Said(
            "How many steps has the ring, and how many bytes does each step carry?",
            "Combien d’étapes compte l’anneau, et combien d’octets chaque étape transporte-t-elle ?",
        ),
        Said(
            "2 (size − 1) steps; one step takes alpha_s plus beta_s_per_byte times message_bytes / size.",
            "2 (size − 1) étapes ; une étape dure alpha_s plus beta_s_per_byte fois message_bytes / size.",
        ),
    ),
)
