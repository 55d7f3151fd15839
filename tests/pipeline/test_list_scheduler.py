"""The list scheduler: known schedules come back, each by one knob."""

import pytest

from dlojz.base.errors import LabError
from dlojz.pipeline.orders.synchronous import eager_one_f_one_b, gpipe, looped, looped_bfs, naive, one_f_one_b, zigzag
from dlojz.pipeline.orders.zero_bubble import RankState, backward_first, forward_first, list_schedule, zb_h1, zb_h2
from dlojz.pipeline.schedule import FORWARD, Action, Costs, Schedule
from dlojz.pipeline.simulator import UNIT_COSTS, peak_activations, simulate
from dlojz.pipeline.validity import problems

SIZES = [(1, 3), (2, 4), (4, 8), (4, 4), (8, 16), (5, 11)]


def figures(schedule: Schedule, costs: Costs = UNIT_COSTS) -> tuple[object, ...]:
    """What two schedules have in common that differ in names of micro-batches at most."""
    timeline = simulate(schedule, costs)
    return timeline.makespan, timeline.span, peak_activations(schedule)


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
class TestOneKnob:
    """From GPipe, one change each."""

    def test_forward_first_is_gpipe(self, ranks: int, micro_batches: int) -> None:
        assert list_schedule(ranks, micro_batches).orders == gpipe(ranks, micro_batches).orders

    def test_a_cap_makes_it_1f1b(self, ranks: int, micro_batches: int) -> None:
        expected = one_f_one_b(ranks, micro_batches).orders
        for priority in (forward_first, backward_first):
            made = list_schedule(ranks, micro_batches, priority=priority, cap=lambda rank: ranks - rank)
            assert made.orders == expected

    def test_a_wider_cap_makes_it_eager(self, ranks: int, micro_batches: int) -> None:
        caps = [2 * (ranks - rank) - 1 for rank in range(ranks)]
        made = list_schedule(ranks, micro_batches, priority="backward-first", cap=caps)
        assert made.orders == eager_one_f_one_b(ranks, micro_batches).orders

    def test_a_cap_of_one_makes_it_naive(self, ranks: int, micro_batches: int) -> None:
        for priority in (forward_first, backward_first):
            assert (
                list_schedule(ranks, micro_batches, priority=priority, cap=1).orders
                == naive(ranks, micro_batches).orders
            )

    def test_looped_placement_makes_it_bfs(self, ranks: int, micro_batches: int) -> None:
        made = list_schedule(ranks, micro_batches, placement=looped(ranks, 2))
        # Micro-batches go backward in order here, in reverse order there: the figures are the same.
        assert figures(made) == figures(looped_bfs(ranks, micro_batches, 2))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 8), (4, 16), (8, 16)])
def test_a_split_backward_makes_it_like_the_zero_bubble_schedules(ranks: int, micro_batches: int) -> None:
    wide = list_schedule(ranks, micro_batches, priority="backward-first", cap=2 * ranks - 1, split=True)
    assert figures(wide) == figures(zb_h2(ranks, micro_batches))
    tight = list_schedule(ranks, micro_batches, priority="backward-first", cap=ranks, split=True)
    planned = zb_h1(ranks, micro_batches)
    assert peak_activations(tight) == peak_activations(planned)
    assert simulate(tight).makespan == simulate(planned).makespan + 2


@pytest.mark.parametrize(("waves", "fraction"), [(1, 0.3333), (2, 0.2131), (4, 0.1193)])
def test_a_zigzag_makes_it_hanayo(waves: int, fraction: float) -> None:
    placement = zigzag(4, 2 * waves)
    made = list_schedule(4, 4, placement=placement, priority="backward-first")
    assert round(simulate(made).bubble_fraction, 4) == fraction
    equal = Costs(backward_weight=0.0)  # B = F
    made = list_schedule(4, 4, placement=placement, priority="backward-first", costs=equal)
    assert simulate(made, equal).bubble_fraction == pytest.approx(3 / (2 * waves * 4 + 3), abs=1e-12)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_what_it_makes_can_be_executed_with_any_costs(split: bool, cap: float | None) -> None:
    costs = Costs(
        forward=(1.1, 2.3, 0.7),
        backward_input=(1.9, 0.2, 1.3),
        backward_weight=(0.6, 1.7, 1.1),
        latency=0.3,
        kept_for_weight=0.4,
    )
    for priority in (forward_first, backward_first):
        made = list_schedule(3, 7, priority=priority, cap=cap, split=split, costs=costs)
        assert problems(made, cap, costs) == []


def test_list_schedule_takes_a_priority_of_a_students_own() -> None:
    def fewest_micro_batches_first(action: Action, state: RankState) -> float | None:
        if action.kind == FORWARD and state.held >= state.ranks - state.rank:
            return None
        return -action.micro_batch if action.kind == FORWARD else -1000

    made = list_schedule(4, 8, priority=fewest_micro_batches_first)
    assert made.orders == one_f_one_b(4, 8).orders


def test_list_schedule_waits_for_a_slow_stage_rather_than_begin_backwards() -> None:
    costs = Costs(forward=(3.0, 1.0, 1.0))
    assert list_schedule(3, 5, costs=costs).orders == gpipe(3, 5).orders


def test_list_schedule_refuses_what_cannot_be_scheduled() -> None:
    with pytest.raises(LabError, match="nobody can go on"):
        list_schedule(2, 4, placement=looped(2, 2), cap=1)
    with pytest.raises(LabError, match="nobody can go on: rank 0 keeps 0 stage-micro-batches of at most 0"):
        list_schedule(2, 4, cap=0)
    with pytest.raises(LabError, match="priority"):
        list_schedule(2, 4, priority="sideways")  # type: ignore[arg-type]
    with pytest.raises(LabError, match="must give every one of the 3 ranks"):
        list_schedule(3, 4, placement=(0, 1, 1))
    with pytest.raises(LabError, match="cap holds 2 values for 3 ranks"):
        list_schedule(3, 4, cap=(1, 2))
    with pytest.raises(LabError, match="micro_batches must be a whole number of at least 1"):
        list_schedule(3, 0)
