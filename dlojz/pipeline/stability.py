"""How large a step stale gradients allow: delayed SGD on a parabola, where the answer is known exactly.

Layer 2. Invariant: `threshold` is the law, `measured_threshold` runs the iteration itself and knows nothing of the law.

The iteration is w(t+1) = w(t) − α λ w(t−τ), SGD on λ/2 w² with a gradient that is τ updates old; w(t) = 1 before t = 0.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dlojz.schema import LabError
from dlojz.text import say

Losses = NDArray[np.float64]

_PERIODS = 40
_HUGE = 1e100
"""Where a diverging run is stopped."""


def threshold(delay: int) -> float:
    """The largest stable α λ for gradients that are `delay` updates old: 2 sin(π / (4τ + 2)).

    2, 1, 0.618, 0.445 for τ = 0, 1, 2, 3; about π / (2τ) for large τ: twice the delay, half the step.

    Source: Yang et al. 2021, PipeMare (arXiv 1910.05124), Lemma 1.

    Raises:
        LabError: for a negative delay.
    """
    _refuse_negative(delay)
    return 2.0 * math.sin(math.pi / (4 * delay + 2))


def delayed_sgd(step: float, delay: int, *, steps: int = 100, curvature: float = 1.0) -> Losses:
    """The loss λ/2 w² before each of `steps` updates, and after the last: steps + 1 values, from w = 1.

    Args:
        step: α, the learning rate.
        delay: τ, by how many updates the gradient is old.
        steps: how many updates.
        curvature: λ.

    A run that diverges stays at the last finite value it had (above 1e199), so that it can be drawn.

    Raises:
        LabError: for a negative delay, or a step or curvature that is not finite.
    """
    _refuse_negative(delay)
    if not math.isfinite(step * curvature):
        raise LabError(
            say(
                en=f"the step and the curvature must be finite numbers, but {step!r} and {curvature!r} were received.",
                fr=f"le pas et la courbure doivent être des nombres finis, mais {step!r} et {curvature!r} ont été "
                "reçus.",
            )
        )
    weights = _run(step * curvature, delay, steps)
    losses: Losses = curvature / 2 * weights**2
    return losses


def measured_threshold(delay: int, *, tolerance: float = 1e-4) -> float:
    """The largest stable α λ, by bisection over runs: stable is what ends smaller than it was halfway.

    The runs are finite (40 periods of the slowest oscillation, 4τ + 2 updates), so that the last digits are not those
    of the law: it agrees to 0.1 % for τ ≤ 15.

    Raises:
        LabError: for a negative delay.
    """
    _refuse_negative(delay)
    period = 4 * delay + 2
    stable, unstable = 0.0, 2.5
    while unstable - stable > tolerance * unstable:
        middle = (stable + unstable) / 2
        sizes = np.abs(_run(middle, delay, _PERIODS * period))
        half = len(sizes) // 2
        if sizes[-period:].max() > sizes[half - period : half].max():
            unstable = middle
        else:
            stable = middle
    return (stable + unstable) / 2


def _run(step: float, delay: int, steps: int) -> Losses:
    weights = np.ones(steps + 1)
    for update in range(steps):
        stale = weights[update - delay] if update > delay else 1.0
        following = weights[update] - step * stale
        weights[update + 1] = following if abs(following) < _HUGE else weights[update]
    return weights


def _refuse_negative(delay: int) -> None:
    if delay < 0:
        raise LabError(
            say(
                en=f"a delay counts updates, 0 or more, but {delay} was received.",
                fr=f"un retard compte des mises à jour : 0 ou plus, mais {delay} a été reçu.",
            )
        )
