"""The cubic schedule: the paper's equation, and a measured sparsity that is the predicted one."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress import masks
from dlojz.compress.masks import CubicSchedule, GradualPruning
from dlojz.compress.task import Settings, digits, fit, new_model


def test_cubic_schedule_is_the_papers_equation() -> None:
    """In fractions, with the terms multiplied out rather than as a power."""
    every, renewals = 4, 9
    schedule = CubicSchedule(final=0.9, every=every, renewals=renewals)
    for turn in range(renewals + 1):
        left = 1 - Fraction(turn, renewals)
        expected = Fraction(9, 10) - Fraction(9, 10) * left * left * left
        assert schedule.sparsity(turn * every) == pytest.approx(float(expected), abs=1e-12)


def test_cubic_schedule_rises_ever_more_slowly_and_is_constant_after() -> None:
    schedule = CubicSchedule(final=0.8, every=5, renewals=6)
    values = [schedule.sparsity(step) for step in range(60)]
    assert values[0] == 0.0 and values[30:] == [0.8] * 30
    rises = [after - before for before, after in pairwise(values[:31])]
    assert all(one > other > 0 for one, other in pairwise(rises))


@pytest.mark.parametrize("per_layer", [False, True])
def test_the_sparsity_that_is_counted_is_the_one_that_was_predicted(per_layer: bool) -> None:
    task = digits().few(128)
    model, settings = new_model("vit_mini", task, 0), Settings(epochs=4)
    schedule = CubicSchedule(final=0.9, every=2, renewals=3)
    pruning = GradualPruning(model, schedule, per_layer)
    masks.hold(model)
    before: list[dict[str, torch.Tensor]] = []

    def after_step(step: int) -> None:
        before.append({name: weight == 0 for name, weight in masks.weights(model).items()})
        pruning(step)
        now = masks.weights(model)
        assert all(bool((now[name][gone] == 0).all()) for name, gone in before[-1].items())  # masks only grow

    pruning(0)
    fit(model, task, settings, after_step=after_step)
    masks.release(model)
    assert [step for step, _ in pruning.measured] == [0, 2, 4, 6]
    layers, total = len(masks.prunable(model)), masks.removed_and_all(model)[1]
    rounding = (layers if per_layer else 1) / (2 * total)
    for step, share in pruning.measured:
        assert share == pytest.approx(schedule.sparsity(step), abs=rounding)
    assert masks.removed_and_all(model)[0] / total == pytest.approx(0.9, abs=rounding)


@pytest.mark.parametrize(("steps", "every"), [(1, 10), (5, 3), (100, 10), (264, 7)])
def test_a_schedule_for_a_training_ends_in_time(steps: int, every: int) -> None:
    schedule = CubicSchedule.over(steps, 0.7, every)
    assert 0 < schedule.end <= max(steps * 0.35, 1) and schedule.every <= every
    assert schedule.renews(schedule.end) and schedule.sparsity(schedule.end) == 0.7
    assert not schedule.renews(schedule.end + schedule.every)


@pytest.mark.parametrize(
    ("fields", "english", "french"),
    [
        ({"final": 1.0}, "sparsity is the share", "la part des poids retirés"),
        ({"final": 0.5, "every": 0}, "every must be at least 1, but 0", "every doit être au moins égal à 1"),
        ({"final": 0.5, "renewals": 0}, "renewals must be at least 1", "renewals doit être au moins égal à 1"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(fields: dict[str, float], english: str, french: str) -> None:
    for language, words in (("en", english), ("fr", french)):
        use_language(language)
        with pytest.raises(LabError, match=words):
            CubicSchedule(**fields)  # type: ignore[arg-type]
