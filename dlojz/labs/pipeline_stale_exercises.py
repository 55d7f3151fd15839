"""Lab 05: SGD with a stale gradient, on a parabola.

Layer 6 (labs). Invariant: the reference is the iteration of `dlojz.pipeline.stability`, whose threshold is a law; the
student's own iteration, bisected, must find that law.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said
from dlojz.text import say

HUGE = 1e9
"""A weight that began at 1 and is larger halfway has diverged."""
StaleSgd = Callable[[float, int, int], Sequence[float]]


def stale_sgd(step: float, delay: int, updates: int) -> list[float]:
    """w(0) … w(updates) of w(t+1) = w(t) − α w(t−τ), with w(t) = 1 up to t = 0.

    Source: Yang et al. 2021, PipeMare (arXiv 1910.05124), §2.2, on λ/2 w² with λ = 1.
    """
    return _iterate(step, delay, updates)


def _iterate(step: float, delay: int, updates: int, way: str = "right") -> list[float]:
    weights = [1.0]
    for number in range(updates):
        if way == "short":  # stale only where there is a past
            old = weights[number - delay] if number >= delay else 0.0
        else:
            old = weights[max(number - delay, 0)]
        base = old if way == "from the old weights" else weights[number]
        weights.append(base - step * old)
    return weights


def largest_step(stale_sgd: StaleSgd, delay: int) -> float:
    """The largest stable step of an iteration, by bisection: stable is what ends smaller than it was halfway."""
    period = 4 * delay + 2
    stable, unstable = 0.0, 2.5
    while unstable - stable > 1e-3 * unstable:
        middle = (stable + unstable) / 2
        sizes = [abs(weight) for weight in stale_sgd(middle, delay, 40 * period)]
        # A run that diverges far ends with infinities and NaN, of which no comparison holds.
        if not max(sizes[-period:]) <= max(sizes[19 * period : 20 * period]) < HUGE:
            unstable = middle
        else:
            stable = middle
    return (stable + unstable) / 2


def _cases() -> Iterator[tuple[float, int, int]]:
    for step, delay in ((0.5, 0), (0.3, 1), (0.4, 3), (0.1, 7), (1.5, 2)):
        for updates in (9, 1, 4):
            yield step, delay, updates


_judge_last = by_reference(
    lambda step, delay, updates: _iterate(step, delay, updates)[-1],
    cases=_cases,
    mistakes=(
        Mistake(
            lambda step, delay, updates: _iterate(step, 0, updates)[-1],
            Said(
                "Your gradient is fresh: it must be that of the weights `delay` updates ago, w(t − delay).",
                "Votre gradient est frais : il doit être celui des poids d’il y a `delay` mises à jour, w(t − delay).",
            ),
        ),
        Mistake(
            lambda step, delay, updates: _iterate(step, delay + 1, updates)[-1],
            Said(
                "Your gradient is one update too old: the last entry of the list is w(t), so w(t − delay) is the one "
                "`delay` places before it.",
                "Votre gradient a une mise à jour de trop : le dernier élément de la liste est w(t), donc w(t − delay) "
                "se trouve `delay` places avant.",
            ),
        ),
        Mistake(
            lambda step, delay, updates: _iterate(step, delay, updates, "from the old weights")[-1],
            Said(
                "The gradient is old, but it is applied to the newest weights: w(t) − step · w(t − delay).",
                "Le gradient est ancien, mais il s’applique aux poids les plus récents : w(t) − pas · w(t − delay).",
            ),
        ),
        Mistake(
            lambda step, delay, updates: _iterate(step, delay, updates, "short")[-1],
            Said(
                "Before there are `delay` updates, the gradient is that of the first weights, w = 1, and not zero.",
                "Tant qu’il n’y a pas eu `delay` mises à jour, le gradient est celui des premiers poids, w = 1, et non "
                "zéro.",
            ),
        ),
    ),
)


def _judge(answer: Callable[..., Any]) -> None:
    def last(step: float, delay: int, updates: int) -> Any:
        weights = answer(step, delay, updates)
        if weights is None:
            return None
        count = len(weights)
        if count != updates + 1:
            raise Wrong(
                say(
                    en=f"For {updates} update(s) the list holds w(0) to w({updates}), {updates + 1} values, but yours "
                    f"has {count}.",
                    fr=f"Pour {updates} mise(s) à jour, la liste va de w(0) à w({updates}), soit {updates + 1} "
                    f"valeurs, mais la vôtre en a {count}.",
                )
            )
        if float(weights[0]) != 1.0:
            raise Wrong(
                say(
                    en=f"The list begins with w(0) = 1, but yours with {float(weights[0]):g}.",
                    fr="La liste commence par w(0) = 1, mais la vôtre par "
                    + f"{float(weights[0]):g}".replace(".", ",")
                    + ".",
                )
            )
        return weights[-1]

    _judge_last(last)


STALE_SGD = Exercise(
    id="stale-sgd",
    title=Said("SGD with a stale gradient", "SGD avec un gradient en retard"),
    judge=_judge,
    praise=Said(
        "Right. The same parabola, the same step: with a delay, the weights begin to swing.",
        "Exact. La même parabole, le même pas : avec un retard, les poids se mettent à osciller.",
    ),
    hints=(
        Said(
            "The gradient of w²/2 is w. Keep all weights in a list; each update reads two of them, the newest and the "
            "one `delay` places before it.",
            "Le gradient de w²/2 est w. Gardez tous les poids dans une liste ; chaque mise à jour en lit deux, le plus "
            "récent et celui qui se trouve `delay` places avant.",
        ),
        Said(
            "weights = [1.0]; for t in range(updates): old = weights[max(t - delay, 0)]; then append weights[t] - step "
            "* old.",
            "weights = [1.0] ; for t in range(updates) : old = weights[max(t - delay, 0)] ; puis ajoutez weights[t] - "
            "step * old.",
        ),
    ),
)
