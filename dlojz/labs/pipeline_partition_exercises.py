"""Lab 05: cutting a model into stages; the student writes the test, the search around it is given.

Layer 6 (labs). Invariant: a cut is judged by its loads, on random blocks, against the fewest stages that exist; the
search that uses it is held to `dlojz.pipeline.partition.exact`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.verdict import Said
from dlojz.text import say

FirstFit = Callable[[Sequence[int], int], Sequence[int]]


def first_fit(weights: Sequence[int], limit: int) -> list[int]:
    """Bounds of the fewest stages whose loads do not exceed a limit: each takes blocks as long as they fit.

    Args:
        weights: one per block, none above the limit.
        limit: what a stage may weigh.

    Source: Pinar & Aykanat 2004 (J. Parallel Distrib. Comput. 64), §4, the probe.
    """
    bounds, load = [0], 0
    for block, weight in enumerate(weights):
        if load + weight > limit:
            bounds.append(block)
            load = 0
        load += weight
    return [*bounds, len(weights)]


def smallest_bottleneck(first_fit: FirstFit, weights: Sequence[int], stages: int) -> int:
    """The smallest limit for which `first_fit` needs no more than so many stages, by bisection."""
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if len(first_fit(weights, middle)) - 1 <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _cases() -> Iterator[tuple[list[int], int]]:
    generator = random.Random(5)
    yield [4, 3, 2, 1], 5
    for _ in range(12):
        weights = [generator.randint(1, 9) for _ in range(generator.randint(4, 12))]
        yield weights, generator.randint(max(weights), 20)


def _judge(answer: Callable[..., Any]) -> None:
    for weights, limit in _cases():
        bounds = _bounds(answer(list(weights), limit), weights, limit)
        loads = [sum(weights[start:stop]) for start, stop in pairwise(bounds)]
        here = say(en=f"For {weights} and the limit {limit}: ", fr=f"Pour {weights} et la limite {limit} : ")
        if max(loads) > limit:
            raise Wrong(
                here
                + say(
                    en=f"a stage of your cut {bounds} weighs {max(loads)}. Look before you add a block: if it would "
                    "exceed the limit, it begins the next stage.",
                    fr=f"un étage de votre découpage {bounds} pèse {max(loads)}. Regardez avant d’ajouter un bloc : "
                    "s’il fait dépasser la limite, c’est lui qui commence l’étage suivant.",
                )
            )
        if 0 in loads:
            raise Wrong(
                here
                + say(
                    en=f"a stage of your cut {bounds} has no block.",
                    fr=f"un étage de votre découpage {bounds} n’a aucun bloc.",
                )
            )
        fewest = len(first_fit(weights, limit)) - 1
        if len(loads) > fewest:
            raise Wrong(
                here
                + say(
                    en=f"your cut {bounds} has {len(loads)} stages of loads {loads}, but {fewest} are enough: a stage "
                    "may weigh exactly the limit, and a new one begins empty.",
                    fr=f"votre découpage {bounds} a {len(loads)} étages de charges {loads}, alors que {fewest} "
                    "suffisent : un étage peut peser exactement la limite, et le suivant commence vide.",
                )
            )


def _bounds(given: Any, weights: Sequence[int], limit: int) -> list[int]:
    here = say(en=f"For {weights} and the limit {limit}: ", fr=f"Pour {weights} et la limite {limit} : ")
    if given is None:
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return.",
                fr="Votre fonction ne renvoie rien : terminez-la par return.",
            )
        )
    try:
        bounds = [int(bound) for bound in given]
    except (TypeError, ValueError):
        raise Wrong(
            say(
                en="A list of whole numbers is expected, such as [0, 2, 4].",
                fr="On attend une liste d’entiers, comme [0, 2, 4].",
            )
        ) from None
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != len(weights) or bounds != sorted(bounds):
        raise Wrong(
            here
            + say(
                en=f"your function returns {bounds}, but bounds rise from 0 to {len(weights)}, the number of blocks.",
                fr=f"votre fonction renvoie {bounds}, mais des bornes croissent de 0 à {len(weights)}, le nombre de "
                "blocs.",
            )
        )
    return bounds


FIRST_FIT = Exercise(
    id="first-fit",
    title=Said("cut the model into stages", "découper le modèle en étages"),
    judge=_judge,
    praise=Said(
        "Right: the fewest stages, so whether k stages suffice for a limit is answered in one pass over the blocks.",
        "Exact : le moins d’étages possible ; on sait donc en un seul parcours des blocs si k étages suffisent pour "
        "une limite.",
    ),
    hints=(
        Said(
            "Keep the load of the current stage. Before you add a block, ask whether it still fits; if not, note its "
            "number as a bound and begin a new stage with it.",
            "Tenez à jour la charge de l’étage en cours. Avant d’ajouter un bloc, demandez s’il tient encore ; sinon, "
            "notez son numéro comme borne et commencez avec lui un nouvel étage.",
        ),
        Said(
            "bounds, load = [0], 0; for each block: if load + weight > limit, then bounds.append(block) and load = 0; "
            "then load += weight. At the end, add len(weights).",
            "bounds, load = [0], 0 ; pour chaque bloc : si load + weight > limit, alors bounds.append(block) et "
            "load = 0 ; ensuite load += weight. À la fin, ajoutez len(weights).",
        ),
    ),
)
