"""Lab 09: the bytes of a compressed all-reduce, by hand.

Layer 6 (labs). Invariant: the reference counts what `dlojz.optim.messages` counts, as a ring sends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said

BLOCK = 2048
"""Numbers that share a scale of 4 bytes."""


def compressed_bytes(parameters: int, ranks: int) -> float:
    """Bytes that each rank sends in one compressed all-reduce: its messages to the other servers, then to all others.

    Args:
        parameters: numbers that are averaged.
        ranks: that average them.

    Source: Tang et al. 2021, "1-bit Adam" (arXiv 2102.02888); the count is ours.
    """
    return 2 * (ranks - 1) * _message(_chunk(parameters, ranks))


def _chunk(parameters: int, ranks: int) -> int:
    return 8 * math.ceil(math.ceil(parameters / ranks) / 8)


def _message(chunk: float) -> float:
    return chunk / 8 + 4 * math.ceil(chunk / BLOCK)


def _cases() -> Iterator[tuple[int, int]]:
    yield from ((1_000_003, 4), (12_345, 3), (99_999, 8), (2_049, 2))


def _ways(message: Callable[[int, int], float], collectives: int = 2) -> Callable[[int, int], float]:
    return lambda parameters, ranks: collectives * (ranks - 1) * message(parameters, ranks)


COMPRESSED_BYTES = Exercise(
    id="compressed-bytes",
    title=Said("the bytes of a compressed all-reduce", "les octets d’un all-reduce compressé"),
    judge=by_reference(
        compressed_bytes,
        cases=_cases,
        mistakes=(
            Mistake(
                _ways(lambda parameters, ranks: _chunk(parameters, ranks) / 8),
                Said(
                    "The scales are missing: 4 bytes for every 2048 numbers begun.",
                    "Il manque les échelles : 4 octets pour 2048 nombres, tout bloc commencé comptant.",
                ),
            ),
            Mistake(
                _ways(lambda parameters, ranks: _chunk(parameters, ranks) / 8 + 4),
                Said(
                    "You count one scale per message; there is one for every 2048 numbers begun.",
                    "Vous comptez une échelle par message ; il y en a une pour 2048 nombres, tout bloc commencé "
                    "comptant.",
                ),
            ),
            Mistake(
                _ways(lambda parameters, ranks: _message(_chunk(parameters, ranks)), collectives=1),
                Said(
                    "That is one of the two exchanges: chunks go to the servers (all-to-all), then their means come "
                    "back (all-gather).",
                    "C’est un seul des deux échanges : les morceaux vont aux serveurs (all-to-all), puis leurs "
                    "moyennes reviennent (all-gather).",
                ),
            ),
            Mistake(
                lambda parameters, ranks: 2 * ranks * _message(_chunk(parameters, ranks)),
                Said(
                    "A rank does not send the message that is for itself: of its messages N − 1 leave.",
                    "Un rang ne s’envoie rien à lui-même : sur ses N messages, N − 1 partent.",
                ),
            ),
            Mistake(
                _ways(lambda parameters, ranks: _message(8 * math.ceil(parameters / 8))),
                Said(
                    "You send the whole vector to every server; each gets its chunk only, one N-th of the numbers.",
                    "Vous envoyez le vecteur entier à chaque serveur ; chacun ne reçoit que son morceau, un N-ième des "
                    "nombres.",
                ),
            ),
            Mistake(
                _ways(lambda parameters, ranks: _chunk(parameters, ranks) + 32 * math.ceil(parameters / ranks / BLOCK)),
                Said(
                    "That is in bits: eight signs make a byte.",
                    "C’est en bits : huit signes font un octet.",
                ),
            ),
            Mistake(
                _ways(lambda parameters, ranks: parameters / ranks / 8 + 4 * parameters / ranks / BLOCK),
                Said(
                    "Bytes and scales come whole: round the chunk up to a multiple of 8 numbers (math.ceil), and the "
                    "number of scales too.",
                    "Octets et échelles sont entiers : arrondissez le morceau au multiple de 8 supérieur (math.ceil), "
                    "et de même le nombre d’échelles.",
                ),
            ),
            Mistake(
                _ways(lambda parameters, ranks: 4 * _chunk(parameters, ranks)),
                Said(
                    "That is the all-reduce in fp32: 4 bytes per number. Here a number takes one bit.",
                    "C’est l’all-reduce en fp32 : 4 octets par nombre. Ici, un nombre prend un bit.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: Ψ/8 bytes take the place of 4Ψ, and the scales add one part in 64.",
        "Exact : Ψ/8 octets remplacent 4Ψ, et les échelles y ajoutent un soixante-quatrième.",
    ),
    hints=(
        Said(
            "How many numbers does a server serve, how many bytes is its message, how many messages leave a rank, and "
            "how many times?",
            "Combien de nombres un serveur sert-il, combien d’octets fait son message, combien de messages quittent un "
            "rang, et combien de fois ?",
        ),
        Said(
            "chunk = 8 · ⌈⌈parameters / ranks⌉ / 8⌉; message = chunk / 8 + 4 · ⌈chunk / 2048⌉; ranks − 1 messages, "
            "twice.",
            "chunk = 8 · ⌈⌈parameters / ranks⌉ / 8⌉ ; message = chunk / 8 + 4 · ⌈chunk / 2048⌉ ; ranks − 1 messages, "
            "deux fois.",
        ),
    ),
)
