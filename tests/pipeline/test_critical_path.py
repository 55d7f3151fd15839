"""The critical path: a chain without gaps over the whole makespan."""

import random
from itertools import pairwise

import numpy as np
import pytest

from dlojz.pipeline.analysis import critical_path
from dlojz.pipeline.orders.synchronous import gpipe, one_f_one_b
from dlojz.pipeline.schedule import Costs, Schedule, Sends
from dlojz.pipeline.schedule_catalogue import SCHEDULES, build
from dlojz.pipeline.simulator import Timeline, simulate, simulate_blocking


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


def test_critical_path_changes_rank_only_where_it_must() -> None:
    """GPipe with equal stages has many critical paths; looking back, the one that stays on its rank is taken."""
    timeline = simulate(gpipe(3, 4))
    path = [str(timeline.schedule.actions[number]) for number in critical_path(timeline)]
    assert path == ["0F0", "1F0", "2F0", "2F1", "2F2", "2F3", "2B0", "1B0", "0B0", "0B1", "0B2", "0B3"]


def test_critical_path_of_1f1b_with_latency_goes_back_and_forth() -> None:
    """Why 1F1B is slower than GPipe as soon as messages take time: its path crosses more links."""

    def crossed(schedule: Schedule) -> int:
        path = critical_path(simulate(schedule, Costs(latency=0.25)))
        return int(np.count_nonzero(np.diff(schedule.graph.rank[list(path)])))

    # Latency laws: GPipe 2 (p − 1) c; 1F1B [2 (p − 1) m / p + 2 (p − 2)] c.
    assert crossed(gpipe(4, 8)) == 6
    assert crossed(one_f_one_b(4, 8)) == 16


@pytest.mark.parametrize(
    ("sends", "schedule"),
    [("paired", gpipe(3, 5)), ("paired", one_f_one_b(4, 6)), ("rendezvous", gpipe(3, 5)), ("rendezvous", gpipe(2, 2))],
    ids=["paired gpipe", "paired 1f1b", "rendezvous gpipe", "rendezvous small"],
)
def test_where_sends_block_a_longer_action_of_the_path_makes_the_step_longer(sends: Sends, schedule: Schedule) -> None:
    """Each action of the path alone is made a quarter longer."""
    first = range(schedule.ranks)
    latency = tuple(tuple(0.5 * (one < other) + 0.25 * (one > other) for other in first) for one in first)
    costs = Costs(forward=tuple(1.0 + rank % 2 for rank in first), latency=latency, sends=sends)
    timeline = simulate(schedule, costs)

    def makespan(longer: int, by: float) -> float:
        durations = timeline.durations.tolist()
        durations[longer] += by
        return simulate_blocking(schedule, costs, durations).makespan

    path = list(critical_path(timeline))
    for action in path:
        assert makespan(action, 0.25) == timeline.makespan + 0.25
    assert timeline.starts[path[0]] == timeline.start
    assert timeline.ends[path[-1]] == timeline.makespan


def test_where_sends_block_the_path_goes_through_the_receiver_that_is_late() -> None:
    """GPipe, F = 1 and 3, c = 0.5: rank 0 may send its third activation once rank 1 has run its second forward."""
    timeline = simulate(gpipe(2, 3), Costs(forward=(1.0, 3.0), backward=1.0, latency=0.5, sends="paired"))
    path = [str(timeline.schedule.actions[number]) for number in critical_path(timeline)]
    assert path == ["0F0", "1F0", "1F1", "1F2", "1B0", "1B1", "1B2", "0B2"]


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
