"""Lab 09: when the variance may be frozen.

Layer 6 (labs). Invariant: the criterion looks back over the memory of the variance, and both ways: a variance that
still falls is as little at rest as one that still grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said

Norms = Sequence[float]


def freeze_step(norms: Norms, beta2: float, threshold: float) -> int:
    """The first step at which the norm of the variance is that of Δ = 1/(1 − β2) steps before, up to a threshold.

    Args:
        norms: of the variance after each step, counted from 0.
        beta2: its decay.
        threshold: least ratio of the smaller of the two norms to the larger, from 0 to 1.

    Returns:
        a step; the number of steps where there is none.

    Source: after Tang et al. 2021, "1-bit Adam" (arXiv 2102.02888), where the variance is frozen once its norm has
    become stable; that both directions count is ours.
    """
    delta = round(1 / (1 - beta2))
    return _first(norms, delta, lambda before, now: min(before, now) / max(before, now) >= threshold)


def _first(norms: Norms, delta: int, still: Callable[[float, float], bool]) -> int:
    found = (step for step in range(delta, len(norms)) if still(norms[step - delta], norms[step]))
    return next(found, len(norms))


def _cases() -> Iterator[tuple[list[float], float, float]]:
    rising = [1 - math.exp(-step / 20) + 0.01 for step in range(200)]
    falling = [1 + 6 * math.exp(-step / 25) for step in range(200)]
    hill = [(step + 1) * math.exp(-step / 15) + 0.5 for step in range(200)]
    yield from ((rising, 0.9, 0.9), (falling, 0.95, 0.96), (hill, 0.9, 0.95), (falling[:40], 0.95, 0.96))


def _delta(beta2: float) -> int:
    return round(1 / (1 - beta2))


FREEZE_STEP = Exercise(
    id="freeze-step",
    title=Said("when the variance may be frozen", "quand geler la variance"),
    judge=by_reference(
        freeze_step,
        cases=_cases,
        mistakes=(
            Mistake(
                lambda norms, beta2, threshold: _first(
                    norms, 1, lambda before, now: min(before, now) / max(before, now) >= threshold
                ),
                Said(
                    "You compare neighbouring steps: a moving average never changes much in one step, so that proves "
                    "nothing. Look Δ = 1/(1 − beta2) steps back.",
                    "Vous comparez deux pas voisins : une moyenne glissante ne change jamais beaucoup d’un pas à "
                    "l’autre, cela ne prouve rien. Remontez de Δ = 1/(1 − beta2) pas.",
                ),
            ),
            Mistake(
                lambda norms, beta2, threshold: _first(
                    norms, _delta(beta2), lambda before, now: before / now >= threshold
                ),
                Said(
                    "Where the norm falls, before / now is larger than 1 and your test passes at once: divide the "
                    "smaller of the two by the larger.",
                    "Quand la norme décroît, avant / maintenant dépasse 1 et votre test passe aussitôt : divisez la "
                    "plus petite des deux par la plus grande.",
                ),
            ),
            Mistake(
                lambda norms, beta2, threshold: _first(
                    norms, _delta(beta2), lambda before, now: now / before >= threshold
                ),
                Said(
                    "Where the norm rises, now / before is larger than 1 and your test passes at once: divide the "
                    "smaller of the two by the larger.",
                    "Quand la norme croît, maintenant / avant dépasse 1 et votre test passe aussitôt : divisez la plus "
                    "petite des deux par la plus grande.",
                ),
            ),
            Mistake(
                lambda norms, beta2, threshold: _first(
                    norms, _delta(beta2), lambda before, now: min(before, now) / max(before, now) <= threshold
                ),
                Said(
                    "You stop where the norm still moves: the ratio must be at least the threshold, not at most.",
                    "Vous vous arrêtez là où la norme bouge encore : le rapport doit être au moins égal au seuil, et "
                    "non au plus.",
                ),
            ),
            Mistake(
                lambda norms, beta2, threshold: freeze_step(norms, beta2, threshold) - _delta(beta2),
                Said(
                    "That is the step you look back to; at that time nothing is known yet: return the later one.",
                    "C’est le pas jusqu’où l’on remonte ; à ce moment-là, on ne sait encore rien : renvoyez le plus "
                    "tardif des deux.",
                ),
            ),
            Mistake(
                lambda norms, beta2, threshold: _first(
                    norms, 0, lambda before, now: min(before, now) / max(before, now) >= threshold
                ),
                Said(
                    "That is the first step of all: a norm is compared with itself. Look Δ = 1/(1 − beta2) steps back.",
                    "C’est le tout premier pas : une norme y est comparée à elle-même. Remontez de "
                    "Δ = 1/(1 − beta2) pas.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: at rest over as many steps as it remembers, and not before.",
        "Exact : au repos sur toute la durée dont elle se souvient, et pas avant.",
    ),
    hints=(
        Said(
            "How far back does a moving average with decay β2 remember? Compare the norm now with the one then, the "
            "smaller over the larger.",
            "Jusqu’où remonte la mémoire d’une moyenne glissante de facteur β2 ? Comparez la norme d’alors et celle de "
            "maintenant, la plus petite sur la plus grande.",
        ),
        Said(
            "delta = round(1 / (1 - beta2)); the first step from delta on where min(a, b) / max(a, b) >= threshold, "
            "with a = norms[step - delta] and b = norms[step]; else len(norms).",
            "delta = round(1 / (1 - beta2)) ; le premier pas, à partir de delta, où min(a, b) / max(a, b) >= "
            "threshold, avec a = norms[step - delta] et b = norms[step] ; sinon len(norms).",
        ),
    ),
)
