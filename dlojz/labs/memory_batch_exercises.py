"""Lab 02: the largest batch that fits.

Layer 6 (labs). Invariant: the answer is given a function to ask, as `dlojz.predict.advice` asks a forecast, and is told
when it asks too often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said
from dlojz.text import say

_CALLS = 6
_NEAR, _FAR = 8, 16


def largest_batch(taken_bytes: Callable[[int], int], limit_bytes: int) -> int:
    """Largest batch that fits where memory is a line in the batch: two points give it."""
    slope_bytes = (taken_bytes(_FAR) - taken_bytes(_NEAR)) // (_FAR - _NEAR)
    fixed_bytes = taken_bytes(_NEAR) - _NEAR * slope_bytes
    return max(0, (limit_bytes - fixed_bytes) // slope_bytes)


class _Line:
    """Bytes taken by batch, a line but for small batches, whose peak is elsewhere; counts how often it is asked."""

    def __init__(self, fixed_bytes: int, sample_bytes: int, least_bytes: int = 0) -> None:
        self.fixed_bytes, self.sample_bytes, self.least_bytes = fixed_bytes, sample_bytes, least_bytes
        self.least_slope_bytes = sample_bytes // 10
        self.asked: list[float] = []

    def __repr__(self) -> str:
        line = f"{self.fixed_bytes} + {self.sample_bytes} × batch"
        return f"max({self.least_bytes} + {self.least_slope_bytes} × batch, {line})" if self.least_bytes else line

    def __call__(self, batch: int) -> int:
        self.asked.append(batch)
        least_bytes = self.least_bytes + batch * self.least_slope_bytes if self.least_bytes else 0
        return max(least_bytes, self.fixed_bytes + batch * self.sample_bytes)


def _devices() -> Iterator[tuple[_Line, int]]:
    yield _Line(1_000, 10), 2_005
    yield _Line(500, 7), 500 + 7 * 40  # full to the last byte
    yield _Line(16_000, 230), 32_000
    yield _Line(39_000, 12_000), 32_000  # not even one sample
    yield _Line(1_000, 100, least_bytes=1_450), 9_999  # up to a batch of 5 the peak is in the optimizer's update


_BATCH_MISTAKES = (
    Mistake(
        lambda taken, limit: limit // taken(1),
        Said(
            "You divide the limit by what one sample takes with all states: these are there once, whatever the batch. "
            "Separate the fixed part from what each sample adds.",
            "Vous divisez la limite par ce que prend un seul échantillon, états compris : or ceux-ci sont là une seule "
            "fois, quel que soit le batch. Séparez la part fixe de ce qu’ajoute chaque échantillon.",
        ),
    ),
    Mistake(
        lambda taken, limit: limit // ((taken(16) - taken(8)) / 8) // 1,
        Said(
            "You forget the fixed part (states, context): it must be taken off the limit before you divide.",
            "Vous oubliez la part fixe (états, contexte) : retirez-la de la limite avant de diviser.",
        ),
    ),
    Mistake(
        lambda taken, limit: max(0, -(-(limit - 2 * taken(8) + taken(16)) // ((taken(16) - taken(8)) // 8))),
        Said(
            "You round up: the last sample would no longer fit. Round down.",
            "Vous arrondissez au-dessus : le dernier échantillon ne tiendrait plus. Arrondissez au-dessous.",
        ),
    ),
    Mistake(
        lambda taken, limit: (limit - 2 * taken(8) + taken(16)) // ((taken(16) - taken(8)) // 8),
        Said(
            "Where not even one sample fits, your function gives a negative batch: return 0.",
            "Là où pas même un échantillon ne tient, votre fonction donne un batch négatif : renvoyez 0.",
        ),
    ),
    Mistake(
        lambda taken, limit: max(0, (limit - 2 * taken(1) + taken(2)) // (taken(2) - taken(1))),
        Said(
            "Your two points are too small: there the peak is in the optimizer's update, which hardly depends on the "
            "batch, and the line looks too flat. Ask for 8 and 16.",
            "Vos deux points sont trop petits : le pic y est dans la mise à jour de l’optimiseur, qui ne dépend guère "
            "du batch, et la droite semble trop plate. Demandez 8 et 16.",
        ),
    ),
)


def _judge_batch(answer: Callable[..., Any]) -> None:
    asked: list[_Line] = []

    def watched(taken: _Line, limit_bytes: int) -> Any:
        asked.append(taken)
        return answer(taken, limit_bytes)

    by_reference(largest_batch, cases=_devices, mistakes=_BATCH_MISTAKES)(watched)
    most = max(len(line.asked) for line in asked)
    if most > _CALLS:
        raise Wrong(
            say(
                en=f"The batch is right, but you asked {most} times how much is taken: each call traces a whole model. "
                "Two points are enough to know a line.",
                fr=f"Le batch est juste, mais vous avez demandé {most} fois la mémoire prise : chaque appel trace un "
                "modèle entier. Deux points suffisent à connaître une droite.",
            )
        )


LARGEST_BATCH = Exercise(
    id="largest-batch",
    title=Said("the largest batch that fits", "le plus grand batch qui tienne"),
    judge=_judge_batch,
    praise=Said(
        "Right: what is left once the fixed part is paid, divided by what one sample costs.",
        "Exact : ce qui reste une fois la part fixe payée, divisé par ce que coûte un échantillon.",
    ),
    hints=(
        Said(
            "taken_bytes is a line: fixed + slope × batch. How do two of its points give slope and fixed?",
            "taken_bytes est une droite : fixe + pente × batch. Comment deux points donnent-ils la pente, puis le "
            "fixe ?",
        ),
        Said(
            "slope = (taken_bytes(16) − taken_bytes(8)) / 8, fixed = taken_bytes(8) − 8 × slope; then (limit − fixed) "
            "// slope, and 0 where that is negative.",
            "pente = (taken_bytes(16) − taken_bytes(8)) / 8, fixe = taken_bytes(8) − 8 × pente ; puis (limite − fixe) "
            "// pente, et 0 si c’est négatif.",
        ),
    ),
)
