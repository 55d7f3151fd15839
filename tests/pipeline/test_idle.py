"""Idle time by cause: it adds up, whatever the schedule and the costs, and small cases are as counted by hand."""

import random
from dataclasses import replace

import numpy as np
import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.pipeline.analysis import BARRIER, CAUSES, DRAIN, IMBALANCE, LATENCY, WARM_UP, gaps, idle_by_cause, title_of
from dlojz.pipeline.orders.synchronous import gpipe, one_f_one_b
from dlojz.pipeline.orders.zero_bubble import zb_h2
from dlojz.pipeline.schedule import Costs, Schedule
from dlojz.pipeline.schedule_catalogue import SCHEDULES, build
from dlojz.pipeline.simulator import Timeline, simulate


def random_costs(draw: random.Random, schedule: Schedule) -> Costs:
    """Quarters of a unit: sums of them are exact."""

    def per_stage() -> tuple[float, ...]:
        return tuple(draw.randint(1, 20) / 4 for _ in range(schedule.stages))

    return Costs(
        forward=per_stage(),
        backward_input=per_stage(),
        backward_weight=per_stage(),
        latency=draw.choice((0.0, 0.25, 2.0)),
        eviction_transfer=draw.choice((0.0, 1.5)),
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_causes_sum_to_the_idle_time_of_every_rank(name: str) -> None:
    draw = random.Random(name)
    schedule = build(name, 4, 8)
    if schedule.token_slices > 1:
        schedule = build(name, 4, 8, token_slices=4)
    for _ in range(6):
        timeline = simulate(schedule, random_costs(draw, schedule))
        by_cause = idle_by_cause(timeline)
        assert [sum(causes.values()) for causes in by_cause] == list(timeline.idle)
        assert all(set(causes) == set(CAUSES) for causes in by_cause)
        starts, ends = timeline.starts.tolist(), timeline.ends.tolist()
        for gap in gaps(timeline):
            assert gap.duration > 0
            number = gap.before
            assert (number is None) == (gap.cause == BARRIER)
            if number is not None:  # nothing runs on the rank in the gap
                part = timeline.of_rank(gap.rank)
                assert gap.end <= starts[number]
                assert number == part.start or gap.start >= ends[number - 1]


def test_gpipe_by_hand() -> None:
    """Three stages, four micro-batches: rank r waits r F to begin, 3 (2 − r) for its first gradient, 2 r at the end."""
    timeline = simulate(gpipe(3, 4))
    by_cause = idle_by_cause(timeline)
    assert [causes[WARM_UP] for causes in by_cause] == [6, 1 + 3, 2]
    assert [causes[BARRIER] for causes in by_cause] == [0, 2, 4]
    assert all(causes[DRAIN] == causes[LATENCY] == causes[IMBALANCE] == 0 for causes in by_cause)


def test_1f1b_drains_one_backward_after_the_other() -> None:
    """p = 4, m = 8: rank 0 waits 9 for its first gradient of which none is left, then once per drained backward."""
    by_cause = idle_by_cause(simulate(one_f_one_b(4, 8)))
    assert [sum(causes.values()) for causes in by_cause] == [9, 9, 9, 9]
    assert [causes[BARRIER] for causes in by_cause] == [0, 2, 4, 6]
    assert by_cause[0][WARM_UP] + by_cause[0][DRAIN] + by_cause[0][IMBALANCE] == 9
    assert by_cause[0][DRAIN] == 3  # a forward less in each of the last three rounds
    assert by_cause[3] == {WARM_UP: 3, LATENCY: 0, IMBALANCE: 0, DRAIN: 0, BARRIER: 6}


def test_latency_is_what_the_message_that_ends_a_wait_takes() -> None:
    """One micro-batch through two stages: rank 1 waits F, then c; rank 0 waits F + B, then c twice less one."""
    timeline = simulate(one_f_one_b(2, 1), Costs(latency=0.5))
    assert gaps(timeline) == (
        (0, 1.0, 4.5, WARM_UP, 1),
        (0, 4.5, 5.0, LATENCY, 1),
        (1, 0.0, 1.0, WARM_UP, 2),
        (1, 1.0, 1.5, LATENCY, 2),
        (1, 4.5, 7.0, BARRIER, None),
    )


def test_idle_by_cause_tells_the_wait_for_an_early_stage_that_is_slow() -> None:
    by_cause = idle_by_cause(simulate(one_f_one_b(2, 6), Costs(forward=(3.0, 1.0), backward=(4.0, 2.0))))
    assert by_cause[0][IMBALANCE] == 0
    # In five rounds rank 1 is done after 3, and the next micro-batch comes every 7.
    assert by_cause[1][IMBALANCE] > by_cause[1][DRAIN] == 0


def test_without_a_barrier_the_wait_at_the_end_still_is_one() -> None:
    """ZB-H2 has no other idle time on rank 0 than what an optimizer that waits for all would make of it."""
    by_cause = idle_by_cause(simulate(zb_h2(4, 8)))
    assert [causes[BARRIER] for causes in by_cause] == [3, 2, 1, 0]
    assert [causes[WARM_UP] for causes in by_cause] == [0, 1, 2, 3]


def test_gaps_for_messages_that_are_exchanged_are_as_long_as_the_slower_one() -> None:
    """1F1B, activations take 1 and gradients 0.25, by hand: what is exchanged at 5 and at 9 is there 1 later."""
    timeline = simulate(one_f_one_b(2, 3), Costs(latency=((0.0, 1.0), (0.25, 0.0)), sends="paired"))
    assert gaps(timeline) == (
        (0, 1.0, 2.0, LATENCY, 1),
        (0, 3.0, 5.0, WARM_UP, 2),
        (0, 5.0, 6.0, LATENCY, 2),
        (0, 9.0, 10.0, LATENCY, 4),
        (0, 12.0, 13.0, DRAIN, 5),
        (0, 13.0, 13.25, LATENCY, 5),
        (1, 0.0, 1.0, WARM_UP, 6),
        (1, 1.0, 2.0, LATENCY, 6),
        (1, 5.0, 6.0, LATENCY, 8),
        (1, 9.0, 10.0, LATENCY, 10),
        (1, 13.0, 15.25, BARRIER, None),
    )


def test_gaps_for_messages_that_are_passed_one_after_the_other_add_up() -> None:
    """GPipe, F = 1 and 2, c = 0.5, by hand: before its first backward, rank 0 sends and then receives."""
    timeline = simulate(gpipe(2, 2), Costs(forward=(1.0, 2.0), latency=0.5, sends="rendezvous"))
    assert gaps(timeline) == (
        (0, 1.0, 1.5, LATENCY, 1),
        (0, 2.5, 7.5, WARM_UP, 2),
        (0, 7.5, 8.5, LATENCY, 2),
        (0, 10.5, 11.0, LATENCY, 3),
        (1, 0.0, 1.0, WARM_UP, 4),
        (1, 1.0, 1.5, LATENCY, 4),
        (1, 3.5, 4.0, LATENCY, 5),
        (1, 8.0, 8.5, LATENCY, 7),
        (1, 10.5, 13.0, BARRIER, None),
    )


def test_a_measured_timeline_has_latency_only_if_told_how_long_messages_take() -> None:
    simulated = simulate(one_f_one_b(2, 4), Costs(latency=0.5))
    measured = Timeline(simulated.schedule, simulated.starts + 100, simulated.ends + 100, origin="measured")
    assert all(causes[LATENCY] == 0 for causes in idle_by_cause(measured))
    told = idle_by_cause(measured, Costs(latency=0.5))
    for mine, other in zip(told, idle_by_cause(simulated), strict=True):
        assert mine == pytest.approx(other, abs=1e-9)


def test_idle_by_cause_lets_ranks_without_work_wait_for_the_others() -> None:
    schedule = Schedule.of("custom", [gpipe(1, 2).orders[0], ()], [0], 2)
    timeline = Timeline(schedule, np.array([0.0, 1, 2, 4]), np.array([1.0, 2, 4, 6]))
    assert idle_by_cause(timeline)[1][BARRIER] == 6
    assert gaps(replace(timeline, schedule=schedule)) == ((1, 0.0, 6.0, BARRIER, None),)


def test_every_cause_has_a_title_and_a_meaning_in_both_languages() -> None:
    said = {}
    for language in ("en", "fr"):
        use_language(language)
        said[language] = [title_of(cause) for cause in CAUSES]
    use_language("en")
    assert all(english != french for english, french in zip(said["en"], said["fr"], strict=True))
    with pytest.raises(LabError, match="boredom"):
        title_of("boredom")


def test_simulate_blocking_leaves_the_overhead_between_two_actions_of_a_rank() -> None:
    """GPipe, 2 ranks, 1 micro-batch, by hand: from 0.5 on; rank 1 ends its forward at 2.5, begins its backward at 3."""
    for sends in ("buffered", "paired"):
        timeline = simulate(gpipe(2, 1), Costs(forward=1.0, backward=2.0, overhead=0.5, sends=sends))  # type: ignore[arg-type]
        assert timeline.starts.tolist() == [0.5, 5.0, 1.5, 3.0], sends
        assert timeline.ends.max() == 7.0
