"""Stale gradients: the stability law against the iteration itself, and a small network with the delays of schedules."""

from __future__ import annotations

import numpy as np
import pytest

from dlojz.base.errors import LabError
from dlojz.pipeline.orders.asynchronous import pipedream, pipedream_2bw, pipemare
from dlojz.pipeline.orders.synchronous import gpipe
from dlojz.pipeline.stale_weights import Delays, SmallProblem, backward, forward, threshold, train, version_audit

KNOWN = {0: 2.0, 1: 1.0, 2: 0.6180, 3: 0.4450, 7: 0.2091, 15: 0.1013}
PROBLEM = SmallProblem(stages=4, width=5, samples=6)


@pytest.mark.parametrize("delay", KNOWN)
def test_the_law_is_the_published_one_and_the_iteration_obeys_it(delay: int) -> None:
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


def test_a_negative_delay_is_refused() -> None:
    with pytest.raises(LabError, match="a delay counts updates, 0 or more, but -1 was received"):
        threshold(-1)


def test_the_gradient_is_that_of_the_loss() -> None:
    weights, (x, target) = PROBLEM.start(), PROBLEM.micro_batch(0)
    gradients = backward(weights, forward(weights, x), target)

    def loss() -> float:
        return float(np.mean((forward(weights, x)[-1] - target) ** 2))

    for stage in range(4):
        for place in ((0, 0), (2, 3)):
            at = weights[stage][place]
            weights[stage][place] = at + 1e-6
            above = loss()
            weights[stage][place] = at - 1e-6
            below = loss()
            weights[stage][place] = at
            # Central differences: error of the order of 1e-12 / 1e-6 by rounding.
            assert gradients[stage][place] == pytest.approx((above - below) / 2e-6, abs=1e-8)


def test_without_delays_it_is_plain_sgd() -> None:
    weights = PROBLEM.start()
    for update in range(20):
        x, target = PROBLEM.micro_batch(update)
        gradients = backward(weights, forward(weights, x), target)
        weights = [weight - 0.3 * gradient for weight, gradient in zip(weights, gradients, strict=True)]
    run = train(PROBLEM, Delays.of(version_audit(gpipe(4, 8))), learning_rate=0.3, updates=20)
    for ours, plain in zip(run.weights, weights, strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_2bw_obeys_its_update_rule() -> None:
    """W(t+1) = W(t) − ν ∇f(W(t−1))."""
    history = [PROBLEM.start(), PROBLEM.start()]  # W(−1) = W(0)
    for update in range(20):
        x, target = PROBLEM.micro_batch(update)
        old, new = history[-2:]
        gradients = backward(old, forward(old, x), target)
        history.append([weight - 0.3 * gradient for weight, gradient in zip(new, gradients, strict=True)])
    delays = Delays.of(version_audit(pipedream_2bw(4, 16)))
    assert delays == Delays((1,) * 4, (1,) * 4)
    for ours, by_rule in zip(train(PROBLEM, delays, learning_rate=0.3, updates=20).weights, history[-1], strict=True):
        np.testing.assert_array_equal(ours, by_rule)


def test_pipedream_obeys_its_update_rule() -> None:
    """w(t+1) = w(t) − ν ∇f(w1(t−n+1), w2(t−n+2), …, wn(t))."""
    history = [PROBLEM.start()]
    for update in range(20):
        x, target = PROBLEM.micro_batch(update)
        seen = [history[max(update - 3 + stage, 0)][stage] for stage in range(4)]
        gradients = backward(seen, forward(seen, x), target)
        history.append([weight - 0.3 * gradient for weight, gradient in zip(history[-1], gradients, strict=True)])
    delays = Delays.of(version_audit(pipedream(4, 16)))
    for ours, by_rule in zip(train(PROBLEM, delays, learning_rate=0.3, updates=20).weights, history[-1], strict=True):
        np.testing.assert_array_equal(ours, by_rule)


def test_the_remedies_are_those_of_the_paper() -> None:
    """T1: α / τ^(1 − k/K). T2: the backward reads w − (τ_fwd − τ_bkwd) δ, δ the moving average with D^(1/gap)."""
    delays, rate, decay = Delays((3, 2, 1, 0), (0, 0, 0, 0)), 0.3, 0.135
    history, drift = [PROBLEM.start()], [np.zeros((5, 5))] * 4
    for update in range(6):
        x, target = PROBLEM.micro_batch(update)
        read = forward([history[max(update - 3 + stage, 0)][stage] for stage in range(4)], x)
        seen = [history[-1][stage] - (3 - stage) * drift[stage] for stage in range(4)]
        gradients = backward(seen, read, target)
        steps = [rate / tau ** (1 - min(update / 4, 1)) for tau in (3, 2, 1, 1)]
        history.append([w - step * g for w, step, g in zip(history[-1], steps, gradients, strict=True)])
        keeps = [decay ** (1 / 3), decay ** (1 / 2), decay, 0.0]
        changes = [new - old for old, new in zip(*history[-2:], strict=True)]
        drift = [keep * old + (1 - keep) * new for keep, old, new in zip(keeps, drift, changes, strict=True)]
    run = train(PROBLEM, delays, learning_rate=rate, updates=6, reschedule_over=4, correct=True)
    for ours, by_rule in zip(run.weights, history[-1], strict=True):
        np.testing.assert_allclose(ours, by_rule, rtol=1e-12, atol=1e-13)  # another order of roundings


def test_staleness_diverges_at_a_step_that_fresh_gradients_bear_and_the_remedies_help() -> None:
    """Six stages at a large step: mixed versions diverge; stashing, T1 or T2 converge."""
    problem, large = SmallProblem(6), 4.0
    mixed = Delays.of(version_audit(pipedream(6, 24, stashing="none")))
    assert train(problem, mixed, learning_rate=large).diverged
    for run in (
        train(problem, Delays.none(6), learning_rate=large),
        train(problem, Delays.of(version_audit(pipedream(6, 24))), learning_rate=large),
        train(problem, mixed, learning_rate=large, reschedule_over=150),
        train(problem, mixed, learning_rate=large, correct=True),
    ):
        assert not run.diverged
        assert run.losses[-50:].mean() < 0.1 * run.losses[:5].mean()


def test_delays_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LabError, match=r"not equally stale here.*batch=1"):
        Delays.of(version_audit(pipemare(4, 40, batch=2)))
    with pytest.raises(LabError, match="each of the 4 stages has two delays"):
        train(PROBLEM, Delays.none(3), learning_rate=0.1)
