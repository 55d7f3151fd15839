"""Exercise of lab 10 on the curriculum: the length of the sequences, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dlojz.labs.kit.exercise import Exercise, Mistake, Said
from dlojz.labs.kit.judges import Judge

if TYPE_CHECKING:
    pass

SETTINGS = ((16, 128, 37, 1, 8), (16, 128, 37, 2, 8), (64, 1024, 53, 3, 16), (8, 48, 23, 1, 1))
"""Start, end, steps, degree, multiple. The numbers of steps are prime: no length but the last is a whole number by
chance, so no order of the operations rounds otherwise than another."""


def pacing(t: int, start: int, end: int, steps: int, degree: int, multiple: int) -> int:
    """Compute the tokens per sample of the t-th step, from 1: a degree-th root, rounded down to a multiple.

    Source: Li et al. 2021 (arXiv 2108.06084), the pacing function; DeepSpeed's `CurriculumScheduler`, fixed_root.
    """
    length = math.floor(start + (end - start) * min(t / steps, 1) ** (1 / degree))
    return min(length - length % multiple, end)


def _curriculum_pacing_cases() -> Iterator[tuple[int, ...]]:
    for start, end, steps, degree, multiple in SETTINGS:
        for t in (1, 2, 5, 11, 17, 22, steps - 1, steps, steps + 9):
            yield t, start, end, steps, degree, multiple


def _way(length: Callable[..., float], *, rounded: Callable[[float, int], float] | None = None) -> Callable[..., float]:
    """A pacing function under a fault: its length before rounding, and how that is rounded."""

    def way(t: int, start: int, end: int, steps: int, degree: int, multiple: int) -> float:
        raw = length(t, start, end, steps, degree)
        return min((rounded or _down)(raw, multiple), end)

    return way


def _down(length: float, multiple: int) -> float:
    return math.floor(length) // multiple * multiple


def _right(t: int, start: int, end: int, steps: int, degree: int) -> float:
    return start + (end - start) * min(t / steps, 1) ** (1 / degree)


PACING = Exercise(
    id="pacing",
    title=Said("the pacing function", "la fonction de cadence"),
    judge=Judge(
        pacing,
        cases=_curriculum_pacing_cases,
        counts=True,
        mistakes=(
            Mistake(
                lambda t, start, end, steps, degree, multiple: _down(
                    start + (end - start) * (t / steps) ** (1 / degree), multiple
                ),
                "After `steps` steps the sequences go on growing: a length never exceeds end.",
                "Après `steps` pas, les séquences continuent de croître : une longueur ne dépasse jamais end.",
            ),
            Mistake(
                _way(_right, rounded=lambda length, multiple: math.floor(length)),
                "The growth is right, but a length must be a multiple of `multiple`: tensor cores compute by 8 or 16. "
                "Round down.",
                "La croissance est juste, mais une longueur doit être un multiple de `multiple` : les tensor cores "
                "calculent par 8 ou par 16. Arrondissez vers le bas.",
            ),
            Mistake(
                _way(_right, rounded=lambda length, multiple: length),
                "The growth is right, but a length must be a whole number, a multiple of `multiple`: round down.",
                "La croissance est juste, mais une longueur doit être un entier, multiple de `multiple` : arrondissez "
                "vers le bas.",
            ),
            Mistake(
                _way(_right, rounded=lambda length, multiple: math.ceil(length / multiple) * multiple),
                "You round up: lengths are rounded down to a multiple, so that the whole length comes at the end only.",
                "Vous arrondissez vers le haut : on arrondit au multiple inférieur, pour n’atteindre la longueur "
                "entière qu’à la fin.",
            ),
            Mistake(
                _way(_right, rounded=lambda length, multiple: round(length / multiple) * multiple),
                "You round to the nearest multiple: lengths are rounded down.",
                "Vous arrondissez au multiple le plus proche : on arrondit vers le bas.",
            ),
            Mistake(
                _way(lambda t, start, end, steps, degree: start + (end - start) * min(t / steps, 1) ** degree),
                "You take a power where a root is due: the sequences should grow fast at first, then slowly (** (1 / "
                "degree)).",
                "Vous prenez une puissance au lieu d’une racine : les séquences doivent croître vite d’abord, puis "
                "lentement (** (1 / degree)).",
            ),
            Mistake(
                _way(lambda t, start, end, steps, degree: _right(t, start, end, steps, 1)),
                "The degree is left out: with degree 2 the share is the square root of t / steps.",
                "Le degré est oublié : avec degree 2, la part est la racine carrée de t / steps.",
            ),
            Mistake(
                _way(lambda t, start, end, steps, degree: end * min(t / steps, 1) ** (1 / degree)),
                "The growth begins at 0: it begins at start, and end - start is what is gained.",
                "La croissance part de 0 : elle part de start, et c’est end - start que l’on gagne.",
            ),
            Mistake(
                _way(lambda t, start, end, steps, degree: start + end * min(t / steps, 1) ** (1 / degree)),
                "You add a share of end to start: what is gained is a share of end - start.",
                "Vous ajoutez à start une part de end : ce que l’on gagne est une part de end - start.",
            ),
            Mistake(
                _way(lambda t, start, end, steps, degree: _right(t - 1, start, end, steps, degree)),
                "You are one step late: t is counted from 1, and the whole length is reached at t = steps.",
                "Vous avez un pas de retard : t est compté à partir de 1, et la longueur entière est atteinte à t = "
                "steps.",
            ),
            Mistake(
                _way(lambda t, start, end, steps, degree: start + (end - start) * min(t / steps, 1) / degree),
                "You divide the share by the degree: its root is due, ** (1 / degree).",
                "Vous divisez la part par le degré : il faut sa racine, ** (1 / degree).",
            ),
            Mistake(
                _way(lambda t, start, end, steps, degree: _right(t // steps * steps, start, end, steps, degree)),
                "Your share is a whole number (//): the length jumps from start to end at the last step. Divide with "
                "/.",
                "Votre part est un entier (//) : la longueur saute de start à end au dernier pas. Divisez par /.",
            ),
            Mistake(
                _way(lambda t, start, end, steps, degree: _right(t + 1, start, end, steps, degree)),
                "You are one step ahead: t is counted from 1 already.",
                "Vous avez un pas d’avance : t est déjà compté à partir de 1.",
            ),
            Mistake(
                lambda t, start, end, steps, degree, multiple: _down(
                    start + (end - start) * max(t / steps, 1) ** (1 / degree), multiple
                ),
                "You take the larger of t / steps and 1: the share never exceeds 1, so min.",
                "Vous prenez le plus grand de t / steps et 1 : la part ne dépasse jamais 1, donc min.",
            ),
            Mistake(
                _way(lambda t, start, end, steps, degree: start + (end - start) * min(t / steps, 1) ** (1 // degree)),
                "1 // degree is 0 from degree 2 on: divide with /, ** (1 / degree).",
                "1 // degree vaut 0 dès le degré 2 : divisez par /, ** (1 / degree).",
            ),
            Mistake(
                _way(lambda t, start, end, steps, degree: end - (end - start) * min(t / steps, 1) ** (1 / degree)),
                "Your sequences become shorter: they grow from start to end.",
                "Vos séquences raccourcissent : elles croissent de start à end.",
            ),
            Mistake(
                lambda t, start, end, steps, degree, multiple: _down(
                    _right(t, start, end, steps, degree) - start, multiple
                ),
                "You give what is gained alone: add start.",
                "Vous donnez seulement ce qui est gagné : ajoutez start.",
            ),
            Mistake(
                _way(_right, rounded=lambda length, multiple: math.floor(length) % multiple),
                "You return the remainder: take it away from the length, length - length % multiple.",
                "Vous renvoyez le reste : retranchez-le de la longueur, length - length % multiple.",
            ),
            Mistake(
                _way(_right, rounded=lambda length, multiple: math.floor(length) // multiple),
                "You return how many multiples there are: multiply by multiple again.",
                "Vous renvoyez le nombre de multiples : remultipliez par multiple.",
            ),
            Mistake(
                _way(_right, rounded=lambda length, multiple: math.floor(length) // 8 * 8),
                "You round to a multiple of 8, whatever multiple is.",
                "Vous arrondissez à un multiple de 8, quel que soit multiple.",
            ),
        ),
    ),
    praise_en="Right: these are the lengths of DeepSpeed's scheduler.",
    praise_fr="Exact : ce sont les longueurs de l’ordonnanceur de DeepSpeed.",
    hint_en="Which share of the way has been gone at step t, between 0 and 1? Its root, then a length between start "
    "and end, then the multiple below.",
    hint_fr="Quelle part du chemin est parcourue au pas t, entre 0 et 1 ? Sa racine, puis une longueur entre start et "
    "end, puis le multiple inférieur.",
    nearer_en="length = math.floor(start + (end - start) * min(t / steps, 1) ** (1 / degree)); then length - length % "
    "multiple.",
    nearer_fr="length = math.floor(start + (end - start) * min(t / steps, 1) ** (1 / degree)) ; puis length - length % "
    "multiple.",
)
