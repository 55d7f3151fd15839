"""The period of the steady state: closed forms, and what further micro-batches really add to the makespan."""

from __future__ import annotations

import pytest

from dlojz.pipeline.catalogue import build
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.orders.flush import eager_one_f_one_b, gpipe, one_f_one_b
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.simulator import simulate
from dlojz.pipeline.steady_state import steady_period


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_1f1b_cannot_hide_latency_and_eager_1f1b_can(ranks: int) -> None:
    """F + B + 2 (p − 1) c / p against F + B: the cycle through all ranks and back leads p micro-batches on."""
    costs = Costs(latency=0.25)
    expected = 3 + 2 * (ranks - 1) * 0.25 / ranks
    assert steady_period(one_f_one_b(ranks, 5 * ranks), costs) == pytest.approx(expected, abs=1e-12)
    assert steady_period(eager_one_f_one_b(ranks, 5 * ranks), costs) == 3
    assert steady_period(one_f_one_b(ranks, 5 * ranks)) == 3


def test_the_slowest_stage_sets_the_pace() -> None:
    costs = Costs(forward=(1.0, 2.0, 1.5), backward=(2.0, 3.5, 4.0))
    assert steady_period(one_f_one_b(3, 20), costs) == 5.5


@pytest.mark.parametrize(
    "name",
    ["naive", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "chimera", "dualpipe", "dualpipe-v"],
)
@pytest.mark.parametrize("latency", [0.0, 0.5, 3.0])
def test_it_is_what_further_micro_batches_add(name: str, latency: float) -> None:
    """From 32 micro-batches on, 840 more: a multiple of what the cycles of 4 ranks lead on (1 to 8)."""
    stages = build(name, 4, 32).stages
    costs = Costs(
        forward=tuple(1 + 0.25 * (stage % 3) for stage in range(stages)),
        backward=tuple(2 + 0.5 * (stage % 2) for stage in range(stages)),
        latency=latency,
    )
    fewer, more = (build(name, 4, micro_batches) for micro_batches in (32, 872))
    added = simulate(more, costs).makespan - simulate(fewer, costs).makespan
    assert steady_period(fewer, costs) == pytest.approx(added / 840, abs=1e-9)


def test_there_is_none_without_repetition() -> None:
    assert steady_period(gpipe(4, 32)) is None
    assert steady_period(build("looped-bfs", 4, 16)) is None
    assert steady_period(one_f_one_b(4, 3)) is None
    assert steady_period(Schedule.of("custom", [()], [0], 0)) is None
