"""The critical path: a chain without slack over the whole makespan, and slack that is exactly what there is."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from dlojz.pipeline.catalogue import SCHEDULES, build
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.critical_path import critical_path, slack
from dlojz.pipeline.orders.flush import gpipe, one_f_one_b
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.simulator import simulate
from dlojz.pipeline.timeline import Timeline


def costs_of(draw: random.Random, schedule: Schedule, latency: float) -> Costs:
    """Quarters of a unit: sums of them are exact."""
    drawn = [tuple(draw.randint(1, 20) / 4 for _ in range(schedule.stages)) for _ in range(3)]
    return Costs(forward=drawn[0], backward_input=drawn[1], backward_weight=drawn[2], latency=latency)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_path_leads_from_the_first_start_to_the_last_end_without_a_wait(name: str) -> None:
    draw = random.Random(name)
    schedule = build(name, 4, 8)
    for latency in (0.0, 0.25, 2.0):
        costs = costs_of(draw, schedule, latency)
        timeline = simulate(schedule, costs)
        path, rank = critical_path(timeline), schedule.graph.rank
        assert timeline.starts[path[0]] == timeline.start
        assert timeline.ends[path[-1]] == timeline.start + timeline.makespan
        for before, after in pairwise(path):
            delay = costs.delay(int(rank[before]), int(rank[after]))
            assert timeline.starts[after] == timeline.ends[before] + delay
        left = slack(timeline)
        assert left[list(path)].tolist() == [0.0] * len(path)
        assert left.min() == 0


def test_slack_is_how_much_longer_an_action_may_take() -> None:
    """Each action of a schedule is made longer, alone, by its slack (nothing changes) and by a little more."""
    schedule = one_f_one_b(3, 4)
    costs = Costs(forward=(2.0, 1.0, 3.0), latency=0.5)
    timeline = simulate(schedule, costs)
    graph, durations = schedule.graph, timeline.durations.tolist()
    rank = graph.rank.tolist()

    def makespan(longer: int, by: float) -> float:
        ends = [0.0] * (graph.actions + 1)
        for index in graph.order:
            needed = graph.needs[index]
            delay = costs.delay(rank[needed], rank[index]) if needed < graph.actions else 0.0
            start = max(ends[graph.previous[index]], ends[needed] + delay)
            ends[index] = start + durations[index] + (by if index == longer else 0.0)
        return max(ends)

    for index, left in enumerate(slack(timeline).tolist()):
        assert makespan(index, left) == timeline.makespan
        assert makespan(index, left + 0.25) == timeline.makespan + 0.25


def test_it_changes_rank_only_where_it_must() -> None:
    """GPipe with equal stages has many critical paths; looking back, the one that stays on its rank is taken."""
    timeline = simulate(gpipe(3, 4))
    path = [str(timeline.schedule.actions[number]) for number in critical_path(timeline)]
    assert path == ["0F0", "1F0", "2F0", "2F1", "2F2", "2F3", "2B0", "1B0", "0B0", "0B1", "0B2", "0B3"]


def test_1f1b_with_latency_goes_back_and_forth() -> None:
    """Why 1F1B is slower than GPipe as soon as messages take time: its path crosses more links."""

    def crossed(schedule: Schedule) -> int:
        path = critical_path(simulate(schedule, Costs(latency=0.25)))
        return int(np.count_nonzero(np.diff(schedule.graph.rank[list(path)])))

    # Latency laws: GPipe 2 (p − 1) c; 1F1B [2 (p − 1) m / p + 2 (p − 2)] c.
    assert crossed(gpipe(4, 8)) == 6
    assert crossed(one_f_one_b(4, 8)) == 16


@pytest.mark.parametrize("sends", ["paired", "rendezvous"])
def test_where_sends_block_the_path_still_spans_the_makespan(sends: str) -> None:
    timeline = simulate(gpipe(3, 5), Costs(forward=(1.0, 2.0, 1.0), latency=0.5, sends=sends))  # type: ignore[arg-type]
    path = critical_path(timeline)
    assert timeline.starts[path[0]] == timeline.start
    assert timeline.ends[path[-1]] == timeline.makespan
    assert slack(timeline).min() >= 0


def test_measured_timelines_and_empty_ones() -> None:
    simulated = simulate(gpipe(3, 4))
    draw = np.random.default_rng(0)
    starts = simulated.starts * 1.1 + 7  # every action begins a little late
    measured = Timeline(simulated.schedule, starts, starts + simulated.durations + 0.01 * draw.random(len(starts)))
    path = critical_path(measured)
    assert measured.ends[path[-1]] == measured.ends.max()
    assert all(measured.ends[before] <= measured.starts[after] for before, after in pairwise(path))
    nothing = Timeline(Schedule.of("custom", [()], [0], 0), np.zeros(0), np.zeros(0))
    assert critical_path(nothing) == ()
