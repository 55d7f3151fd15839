"""Lab 00: what a ring all-reduce sends, and whether two trainings are the same.

Layer 6 (labs). Invariant: each reference is what the package itself computes with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dlojz.footprint import Traffic
from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said
from dlojz.text import say


def _ring_sent_bytes(message_bytes: int, dp: int) -> float:
    traffic = Traffic(collective="all_reduce", group="dp", group_size=dp, count=1, message_bytes=message_bytes)
    return traffic.sent_bytes


def _messages() -> Iterator[tuple[int, int]]:
    yield from ((1_000_000, 2), (6_000, 3), (4_096, 8), (640, 64), (2_000, 1))


RING_BYTES = Exercise(
    id="ring-bytes",
    title=Said("bytes sent by a ring all-reduce", "octets envoyés par un all-reduce en anneau"),
    judge=by_reference(
        _ring_sent_bytes,
        cases=_messages,
        mistakes=(
            Mistake(
                lambda message, dp: message * (dp - 1) / dp,
                Said(
                    "That is half of it: after the reduce-scatter each rank holds one reduced share, and an "
                    "all-gather of the same length brings it to the others.",
                    "C’est la moitié : après le reduce-scatter chaque rang détient une part réduite, et un "
                    "all-gather de même longueur l’apporte aux autres.",
                ),
            ),
            Mistake(
                lambda message, dp: 2 * message,
                Said(
                    "Nearly, for many ranks: but a rank never sends all dp shares, it sends dp − 1 of them in each "
                    "half; try dp = 1, where nothing needs sending.",
                    "Presque, quand il y a beaucoup de rangs : mais un rang n’envoie jamais les dp parts, il en "
                    "envoie dp − 1 dans chaque moitié ; essayez dp = 1, où rien n’est à envoyer.",
                ),
            ),
            Mistake(
                lambda message, dp: 2 * message * (dp - 1),
                Said(
                    "You send the whole message at every stage of the ring; each stage sends one share of it, "
                    "message_bytes / dp.",
                    "Vous envoyez tout le message à chaque étape de l’anneau ; une étape n’en envoie qu’une part, "
                    "message_bytes / dp.",
                ),
            ),
            Mistake(
                lambda message, dp: message * (dp - 1),
                Said(
                    "That is the naive way, everything to everyone: in a ring each stage sends one share, "
                    "message_bytes / dp, to one neighbour.",
                    "C’est la façon naïve, tout à tout le monde : dans un anneau, chaque étape envoie une part, "
                    "message_bytes / dp, à un seul voisin.",
                ),
            ),
            Mistake(
                lambda message, dp: message,
                Said(
                    "That is the message itself; count what one rank sends: two halves of dp − 1 stages, one share "
                    "each.",
                    "C’est le message lui-même ; comptez ce qu’envoie un rang : deux moitiés de dp − 1 étapes, une "
                    "part à chacune.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: 2 (dp − 1) / dp times the message, so never more than twice, however many replicas there are.",
        "Exact : 2 (dp − 1) / dp fois le message, donc jamais plus du double, quel que soit le nombre de répliques.",
    ),
    hints=(
        Said(
            "The message is cut in dp shares. How many stages has the ring in the reduce-scatter, and how many in the "
            "all-gather?",
            "Le message est coupé en dp parts. Combien d’étapes compte l’anneau pour le reduce-scatter, et combien "
            "pour l’all-gather ?",
        ),
        Said(
            "dp − 1 stages in each of the two halves; at each stage a rank sends message_bytes / dp.",
            "dp − 1 étapes dans chacune des deux moitiés ; à chaque étape, un rang envoie message_bytes / dp.",
        ),
    ),
)


def _largest_gap(losses: Sequence[float], reference: Sequence[float]) -> float:
    return max(abs(loss - right) / abs(right) for loss, right in zip(losses, reference, strict=True))


def _loss_curves() -> Iterator[tuple[list[float], list[float]]]:
    # The largest gap lies in the middle, at the start, at the end; above the reference, and below it.
    yield [2.0, 1.5, 0.5], [2.0, 1.2, 0.5]
    yield [1.0, 3.0, 2.0, 2.0], [2.0, 2.5, 2.0, 2.5]
    yield [0.9, 0.8], [1.2, 0.5]
    yield [2.3, 2.2], [2.3, 2.2]


def _judge_gap(answer: Callable[..., Any]) -> None:
    """The usual judge, then a question that only a careful answer survives: a loss below its reference."""
    by_reference(
        _largest_gap,
        cases=_loss_curves,
        mistakes=(
            Mistake(
                lambda losses, reference: abs(losses[-1] - reference[-1]) / abs(reference[-1]),
                Said(
                    "You look at the last step only; two trainings may part in the middle: compare every step.",
                    "Vous ne regardez que le dernier pas ; deux entraînements peuvent s’écarter au milieu : comparez "
                    "chaque pas.",
                ),
            ),
            Mistake(
                lambda losses, reference: max(abs(a - b) for a, b in zip(losses, reference, strict=True)),
                Said(
                    "That is the absolute gap: the same 0.1 is small beside 2.3 and large beside 0.2; divide by the "
                    "reference.",
                    "C’est l’écart absolu : le même 0,1 est petit devant 2,3 et grand devant 0,2 ; divisez par la "
                    "référence.",
                ),
            ),
            Mistake(
                lambda losses, reference: max((a - b) / b for a, b in zip(losses, reference, strict=True)),
                Said(
                    "Without an absolute value, losses below the reference count as no gap at all.",
                    "Sans valeur absolue, des pertes inférieures à la référence ne comptent pas comme un écart.",
                ),
            ),
            Mistake(
                lambda losses, reference: _largest_gap(reference, losses),
                Said(
                    "You divide by your own loss; divide by the reference, the one that is trusted.",
                    "Vous divisez par votre propre perte ; divisez par la référence, celle à laquelle on se fie.",
                ),
            ),
            Mistake(
                lambda losses, reference: (
                    sum(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)) / len(losses)
                ),
                Said(
                    "You average: one bad step among many good ones disappears. Take the largest.",
                    "Vous faites la moyenne : un mauvais pas parmi beaucoup de bons disparaît. Prenez le plus grand "
                    "écart.",
                ),
            ),
        ),
    )(answer)
    try:
        value = answer([2.0, 1.0], [2.0])
    except Exception:
        return
    raise Wrong(
        say(
            en=f"For two losses against one your function returns {value}: curves of different lengths are not the "
            "same training; zip with strict=True refuses them.",
            fr=f"Pour deux pertes face à une seule, votre fonction renvoie {value} : des courbes de longueurs "
            "différentes ne sont pas le même entraînement ; zip avec strict=True les refuse.",
        )
    )


SAME_TRAINING = Exercise(
    id="same-training",
    title=Said("are two trainings the same?", "deux entraînements sont-ils les mêmes ?"),
    judge=_judge_gap,
    praise=Said(
        "Right. Every parallel layout of this course will be held to this measure.",
        "Exact. Chaque parallélisme de ce cours sera jugé à cette aune.",
    ),
    hints=(
        Said(
            "Go through both curves together, step by step; what is the relative gap at one step?",
            "Parcourez les deux courbes ensemble, pas à pas ; quel est l’écart relatif à un pas donné ?",
        ),
        Said(
            "The largest of |loss − reference| / |reference| over zip(losses, reference, strict=True).",
            "Le plus grand des |loss − reference| / |reference| sur zip(losses, reference, strict=True).",
        ),
    ),
)
