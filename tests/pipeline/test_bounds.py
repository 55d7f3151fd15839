"""The lower bounds: closed forms where there are some, and nothing ever beats them."""

from __future__ import annotations

import random

import pytest

from dlojz.pipeline.bounds import lower_bound, lower_bound_of, span_bound, span_bound_of
from dlojz.pipeline.catalogue import SCHEDULES, build
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.list_scheduler import list_schedule
from dlojz.pipeline.orders.flush import gpipe, one_f_one_b
from dlojz.pipeline.orders.writing import looped, zigzag
from dlojz.pipeline.orders.zero_bubble import zb_h1, zb_h2
from dlojz.pipeline.simulator import simulate


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (1, 5), (2, 4), (4, 2), (4, 8), (8, 16)])
def test_equal_stages_have_a_closed_form(ranks: int, micro_batches: int) -> None:
    """(m + p − 1)(F + B), and, split, (m + p − 1)(F + I) + W for m ≤ p, m (F + I + W) + (p − 1) F else."""
    assert lower_bound_of(ranks, micro_batches) == 3 * (micro_batches + ranks - 1)
    split = lower_bound_of(ranks, micro_batches, split=True)
    if micro_batches <= ranks:
        assert split == 2 * (micro_batches + ranks - 1) + 1
    else:
        assert split == 3 * micro_batches + ranks - 1
    assert span_bound_of(ranks, micro_batches) == lower_bound_of(ranks, micro_batches)


def test_the_research_values() -> None:
    """p = 4, m = 8: 33 whole, 27 split, 51 for two chunks in a V; span 24; GPipe and 1F1B meet the first."""
    assert lower_bound(one_f_one_b(4, 8)) == lower_bound(gpipe(4, 8)) == 33 == simulate(gpipe(4, 8)).makespan
    assert lower_bound(zb_h1(4, 8)) == 27 == simulate(zb_h1(4, 8)).makespan
    assert span_bound(zb_h2(4, 8)) == 24 == simulate(zb_h2(4, 8)).span
    assert lower_bound_of(4, 8, placement=zigzag(4, 2), split=True) == 51
    assert span_bound_of(4, 8, placement=zigzag(4, 2), split=True) == 48


def test_latency_lengthens_heads_and_tails() -> None:
    costs = Costs(latency=0.25)
    assert lower_bound(gpipe(4, 8), costs) == 33 + 2 * 3 * 0.25 == simulate(gpipe(4, 8), costs).makespan
    # A turn of the V is on one rank: one hop less there, so the first three only.
    assert lower_bound_of(4, 1, costs, placement=zigzag(4, 2)) == 8 * 3 + 2 * 6 * 0.25
    assert lower_bound_of(4, 1, costs, placement=looped(4, 2)) == 8 * 3 + 2 * 7 * 0.25


def test_unbalanced_stages() -> None:
    """(1, 2, 1, 1) × F 2, I 2, W 2: the optimum is 102 whole, 98 split, both equal to the bound."""
    times = (2.0, 4.0, 2.0, 2.0)
    costs = Costs(forward=times, backward_input=times, backward_weight=times)
    assert lower_bound_of(4, 8, costs) == 102
    assert lower_bound_of(4, 8, costs, split=True) == 98


def costs_of(draw: random.Random, stages: int, *, whole: bool, together: bool) -> Costs:
    """Quarters of a unit: sums of them are exact."""

    def per_stage(most: int) -> tuple[float, ...]:
        return tuple(draw.randint(1, most) / 4 for _ in range(stages))

    return Costs(
        forward=per_stage(20),
        backward_input=per_stage(20),
        backward_weight=per_stage(20),
        backward=per_stage(40) if whole else None,
        overlapped=per_stage(60) if together else None,
        latency=draw.choice((0.0, 0.25, 2.0)),
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_of_the_catalogue_beats_them(name: str) -> None:
    draw = random.Random(name)
    for ranks, micro_batches in ((2, 4), (4, 8), (4, 12)):
        schedule = build(name, ranks, micro_batches)
        for number in range(8):
            costs = costs_of(draw, schedule.stages, whole=number % 3 == 1, together=number % 2 == 1)
            timeline = simulate(schedule, costs)
            assert lower_bound(schedule, costs) <= timeline.makespan
            assert span_bound(schedule, costs) <= timeline.span


@pytest.mark.parametrize("split", [False, True])
def test_no_list_schedule_beats_them(split: bool) -> None:
    """Random priorities on random placements: orders that nobody would write."""
    draw = random.Random(3)
    for _ in range(60):
        ranks, chunks = draw.randint(1, 4), draw.randint(1, 3)
        placement = draw.choice((looped, zigzag))(ranks, chunks)
        costs = costs_of(draw, len(placement), whole=False, together=False)
        micro_batches = draw.randint(1, 8)
        made = list_schedule(
            ranks,
            micro_batches,
            placement=placement,
            priority=lambda action, state: draw.random(),
            split=split,
            costs=costs,
        )
        timeline = simulate(made, costs)
        assert lower_bound(made, costs) <= timeline.makespan
        assert span_bound(made, costs) <= timeline.span
        same = {"placement": placement, "split": split}
        assert lower_bound_of(ranks, micro_batches, costs, **same) == lower_bound(made, costs)  # type: ignore[arg-type]
        assert span_bound_of(ranks, micro_batches, costs, **same) == span_bound(made, costs)  # type: ignore[arg-type]
