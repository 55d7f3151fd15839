"""Stale gradients: the stability law against the iteration itself."""

import pytest

from dlojz.base.errors import LabError
from dlojz.pipeline.orders.asynchronous import threshold

KNOWN = {0: 2.0, 1: 1.0, 2: 0.6180, 3: 0.4450, 7: 0.2091, 15: 0.1013}


@pytest.mark.parametrize("delay", KNOWN)
def test_threshold_is_the_published_law_and_the_iteration_obeys_it(delay: int) -> None:
    assert threshold(delay) == pytest.approx(KNOWN[delay], abs=5e-5)  # published to 4 decimals
    # 5 % below, the iteration itself dies out, and 5 % above it explodes.
    assert abs(last_weight(0.95 * threshold(delay), delay)) < 1e-3
    assert abs(last_weight(1.05 * threshold(delay), delay)) > 1e3


def last_weight(step: float, delay: int) -> float:
    """The largest of the last period of w(t+1) = w(t) − α λ w(t−τ), from w = 1, after 100 slowest periods."""
    weights = [1.0] * (delay + 1)
    for _ in range(100 * (4 * delay + 2)):
        weights.append(weights[-1] - step * weights[-1 - delay])
    return max(weights[-(4 * delay + 2) :], key=abs)


def test_threshold_refuses_a_negative_delay() -> None:
    with pytest.raises(LabError, match="a delay counts updates, 0 or more, but -1 was received"):
        threshold(-1)
