"""Lab 08: the layouts that nothing beats in every respect at once.

Layer 6 (labs). Invariant: every criterion is to be small; equal points do not beat one another.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dlojz.labs.compromise_answers import refuse_nothing, shown
from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.verdict import Said
from dlojz.text import say

Point = tuple[float, ...]


def pareto(points: Sequence[Point]) -> list[int]:
    """Places of the points that no other dominates: none is at least as small in all, and smaller in one."""
    return [place for place, one in enumerate(points) if not any(dominates(other, one) for other in points)]


def dominates(one: Point, other: Point) -> bool:
    """Whether the first is nowhere larger than the second, and somewhere smaller."""
    pairs = list(zip(one, other, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _clouds() -> Iterator[list[Point]]:
    dice = random.Random(5)
    for axes, count, levels in ((2, 12, 9), (3, 25, 6), (3, 40, 30), (4, 30, 12)):
        cloud = [tuple(float(dice.randrange(1, levels)) for _ in range(axes)) for _ in range(count)]
        # Twins that nothing beats, and one that is beaten along a single axis alone.
        best = cloud[pareto(cloud)[0]]
        cloud += [best, (best[0] + 1.0, *best[1:])]
        dice.shuffle(cloud)
        yield cloud


_FRONT_WAYS: tuple[tuple[Callable[[Sequence[Point]], list[int]], Said], ...] = (
    (
        lambda points: [
            i for i, one in enumerate(points) if not any(all(map(operator.lt, other, one)) for other in points)
        ],
        Said(
            "You keep a point unless another is smaller in everything; it is enough that the other is nowhere larger "
            "and smaller once.",
            "Vous gardez un point tant qu’aucun autre n’est plus petit en tout ; il suffit que l’autre ne soit jamais "
            "plus grand, et une fois plus petit.",
        ),
    ),
    (
        lambda points: [
            i
            for i, one in enumerate(points)
            if not any(all(map(operator.le, other, one)) for j, other in enumerate(points) if j != i)
        ],
        Said(
            "Twins shut each other out: two equal points do not beat one another; the other must be smaller somewhere.",
            "Les jumeaux s’éliminent l’un l’autre : deux points égaux ne se battent pas ; l’autre doit être plus petit "
            "quelque part.",
        ),
    ),
    (
        lambda points: [i for i, one in enumerate(points) if not any(dominates(one, other) for other in points)],
        Said(
            "Your front is turned over: these are the points that beat nobody. Everything here is to be small.",
            "Votre front est retourné : ce sont les points qui n’en battent aucun. Ici, tout doit être petit.",
        ),
    ),
    (
        lambda points: [
            i for i, one in enumerate(points) if any(all(one[k] <= o[k] for o in points) for k in range(len(one)))
        ],
        Said(
            "You keep only what is best in one criterion alone; a compromise need not be best in any.",
            "Vous ne gardez que les meilleurs selon un seul critère ; un compromis peut ne l’être selon aucun.",
        ),
    ),
    (
        lambda points: [
            i
            for i, one in enumerate(points)
            if not any(other[0] <= one[0] and other[1] <= one[1] and other[:2] != one[:2] for other in points)
        ],
        Said(
            "You look at the first two criteria alone; there may be more.",
            "Vous ne regardez que les deux premiers critères ; il peut y en avoir davantage.",
        ),
    ),
)


def _judge_front(answer: Callable[..., Any]) -> None:
    clouds = list(_clouds())
    given = [_places(answer(list(cloud)), cloud) for cloud in clouds]
    if given == [pareto(cloud) for cloud in clouds]:
        return
    for way, says in _FRONT_WAYS:
        if given == [way(cloud) for cloud in clouds]:
            raise Wrong(str(says))
    for own, cloud in zip(given, clouds, strict=True):
        right = pareto(cloud)
        for place in sorted(set(own) - set(right)):
            other = next(point for point in cloud if dominates(point, cloud[place]))
            raise Wrong(
                say(
                    en=f"You keep {_told(cloud[place])}, but {_told(other)} is nowhere larger, and smaller somewhere.",
                    fr=f"Vous gardez {_told(cloud[place])}, mais {_told(other)} n’est jamais plus grand, et plus petit "
                    "quelque part.",
                )
            )
        for place in sorted(set(right) - set(own)):
            raise Wrong(
                say(
                    en=f"You drop {_told(cloud[place])}, but no other point is as small in everything and smaller "
                    "somewhere.",
                    fr=f"Vous écartez {_told(cloud[place])}, mais aucun autre point n’est aussi petit en tout et plus "
                    "petit quelque part.",
                )
            )


def _told(point: Point) -> str:
    return "(" + ", ".join(f"{value:g}" for value in point) + ")"


def _places(given: Any, points: Sequence[Point]) -> list[int]:
    refuse_nothing(given)
    parts: list[Any] = (
        [given] if isinstance(given, str) else list(given.tolist() if hasattr(given, "tolist") else given)
    )
    places = []
    for part in parts:
        try:
            place = operator.index(part)
        except TypeError:
            raise Wrong(_no_places(part)) from None
        if not 0 <= place < len(points):
            raise Wrong(_no_places(part))
        places.append(place)
    return sorted(set(places))


def _no_places(part: Any) -> str:
    return say(
        en=f"Return the places of the points, whole numbers from 0; {shown(part)} stands among them.",
        fr=f"Renvoyez les places des points, des entiers à partir de 0 ; {shown(part)} s’y trouve.",
    )


PARETO = Exercise(
    id="pareto-front",
    title=Said("the Pareto front", "le front de Pareto"),
    judge=_judge_front,
    praise=Said(
        "Right: what is left are the compromises; which of them is for you to say.",
        "Exact : il reste les compromis ; lequel, c’est à vous de le dire.",
    ),
    hints=(
        Said(
            "When does one point beat another? In what may they be equal, and in what must they differ?",
            "Quand un point en bat-il un autre ? Sur quoi peuvent-ils être égaux, sur quoi doivent-ils différer ?",
        ),
        Said(
            "q beats p if all(a <= b for a, b in zip(q, p)) and q != p; keep the places of the points that nobody "
            "beats.",
            "q bat p si all(a <= b for a, b in zip(q, p)) et q != p ; gardez les places des points que personne ne "
            "bat.",
        ),
    ),
)
