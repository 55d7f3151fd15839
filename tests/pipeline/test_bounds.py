"""The lower bounds: closed forms where there are some, and nothing ever beats them."""

import random

import pytest

from dlojz.pipeline.analysis import lower_bound, lower_bound_of, span_bound_of
from dlojz.pipeline.orders.synchronous import gpipe, looped, one_f_one_b, terapipe, zigzag
from dlojz.pipeline.orders.zero_bubble import list_schedule, zb_h1, zb_h2
from dlojz.pipeline.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Costs, Schedule
from dlojz.pipeline.schedule_catalogue import SCHEDULES, build
from dlojz.pipeline.simulator import simulate
from dlojz.pipeline.validity import least_waits, problems


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (1, 5), (2, 4), (4, 2), (4, 8), (8, 16)])
def test_lower_bound_of_equal_stages_has_a_closed_form(ranks: int, micro_batches: int) -> None:
    """(m + p − 1)(F + B), and, split, (m + p − 1)(F + I) + W for m ≤ p, m (F + I + W) + (p − 1) F else."""
    assert lower_bound_of(ranks, micro_batches) == 3 * (micro_batches + ranks - 1)
    split = lower_bound_of(ranks, micro_batches, split=True)
    if micro_batches <= ranks:
        assert split == 2 * (micro_batches + ranks - 1) + 1
    else:
        assert split == 3 * micro_batches + ranks - 1
    assert span_bound_of(ranks, micro_batches) == lower_bound_of(ranks, micro_batches)


def test_lower_bound_and_span_bound_have_the_research_values() -> None:
    """p = 4, m = 8: 33 whole, 27 split, 51 for two chunks in a V; span 24; GPipe and 1F1B meet the first."""
    assert lower_bound(one_f_one_b(4, 8)) == lower_bound(gpipe(4, 8)) == 33 == simulate(gpipe(4, 8)).makespan
    assert lower_bound(zb_h1(4, 8)) == 27 == simulate(zb_h1(4, 8)).makespan
    assert span_bound_of(4, 8, split=True) == 24 == simulate(zb_h2(4, 8)).span
    assert lower_bound_of(4, 8, placement=zigzag(4, 2), split=True) == 51
    assert span_bound_of(4, 8, placement=zigzag(4, 2), split=True) == 48


def test_lower_bound_has_heads_and_tails_lengthened_by_latency() -> None:
    costs = Costs(latency=0.25)
    assert lower_bound(gpipe(4, 8), costs) == 33 + 2 * 3 * 0.25 == simulate(gpipe(4, 8), costs).makespan
    # A turn of the V is on one rank: one hop less there, so the first three only.
    assert lower_bound_of(4, 1, costs, placement=zigzag(4, 2)) == 8 * 3 + 2 * 6 * 0.25
    assert lower_bound_of(4, 1, costs, placement=looped(4, 2)) == 8 * 3 + 2 * 7 * 0.25


def test_lower_bound_of_unbalanced_stages() -> None:
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
            assert lower_bound(schedule, costs) <= simulate(schedule, costs).makespan


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
        same = {"placement": placement, "split": split}
        assert lower_bound_of(ranks, micro_batches, costs, **same) == lower_bound(made, costs)  # type: ignore[arg-type]
        assert span_bound_of(ranks, micro_batches, costs, **same) <= timeline.span  # type: ignore[arg-type]


# -- token slices


def sliced(draw: random.Random, placement: list[int], micro_batches: int, slices: int, *, split: bool) -> Schedule:
    """A legal order of slices that nobody would write: at every step, any action that may run."""
    backward, last = (BACKWARD_INPUT if split else BACKWARD), len(placement) - 1
    needs: dict[Action, list[Action]] = {}
    for stage in range(len(placement)):
        for one in range(micro_batches):
            for part in range(slices):
                there, back = (Action(kind, stage, one, token_slice=part) for kind in (FORWARD, backward))
                needs[there] = [there._replace(stage=stage - 1)] * (stage > 0)
                needs[there] += [there._replace(token_slice=part - 1)] * (part > 0)
                needs[back] = [there._replace(token_slice=slices - 1)]
                needs[back] += [back._replace(stage=stage + 1)] * (stage < last)
                needs[back] += [back._replace(token_slice=part + 1)] * (part < slices - 1)
                if split:
                    needs[back._replace(kind=BACKWARD_WEIGHT)] = [back]
    preferred = {action: draw.random() for action in needs}
    keeps = draw.random() < 0.5  # to what it prefers, else another action at every step
    done: set[Action] = set()
    orders: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    while len(done) < len(needs):
        ready = [action for action, needed in needs.items() if action not in done and done.issuperset(needed)]
        action = min(ready, key=preferred.__getitem__) if keeps else draw.choice(ready)
        done.add(action)
        orders[placement[action.stage]].append(action)
    return Schedule.of("custom", orders, placement, micro_batches, token_slices=slices)


def slice_costs(draw: random.Random, stages: int, slices: int) -> Costs:
    costs = costs_of(draw, stages, whole=False, together=False)
    return costs.with_(slice_times=tuple(draw.randint(1, 8) / 4 for _ in range(slices)))


@pytest.mark.parametrize("split", [False, True])
def test_lower_bound_is_beaten_by_no_order_of_slices(split: bool) -> None:
    """Unequal stages, unequal slices, one or two chunks per rank."""
    draw = random.Random(5)
    for number in range(250):
        ranks, slices, micro_batches = draw.randint(1, 4), draw.randint(2, 4), draw.randint(1, 3)
        placement = list(draw.choice((looped, zigzag))(ranks, draw.choice((1, 1, 2))))
        schedule = sliced(draw, placement, micro_batches, slices, split=split)
        assert number > 20 or problems(schedule) == []
        costs = slice_costs(draw, len(placement), slices)
        assert lower_bound(schedule, costs) <= simulate(schedule, costs).makespan


def test_terapipe_meets_the_bound_on_equal_stages_and_with_one_sequence() -> None:
    """(m Σ t + (p − 1) max t)(F + B) + 2 (p − 1) c; one sequence alone meets it on unequal stages too."""
    draw = random.Random(7)
    for _ in range(100):
        ranks, slices, micro_batches = draw.randint(1, 6), draw.randint(2, 5), draw.randint(1, 4)
        times = tuple(draw.randint(1, 8) / 4 for _ in range(slices))
        equal = Costs(forward=0.75, backward=1.5, latency=0.25, slice_times=times)
        schedule = terapipe(ranks, micro_batches, slices)
        form = (micro_batches * sum(times) + (ranks - 1) * max(times)) * 2.25 + 2 * (ranks - 1) * 0.25
        assert lower_bound(schedule, equal) == simulate(schedule, equal).makespan == form
        alone, unequal = terapipe(ranks, 1, slices), slice_costs(draw, ranks, slices)
        assert lower_bound(alone, unequal) == simulate(alone, unequal).makespan


def test_a_wait_is_that_of_the_slowest_way_through_the_stages() -> None:
    """F = (1, 3, 2), slices (1, 4), c = 1, by hand.

    Before the second stage the long slice: 4 · 1 + 1, less what the short one fills there at the rate it comes: it
    runs 3 where 1 has passed, so 5 − 2 m; the short one comes after 1 + 1 = 2, the idle time of m = 2 and more. Before
    the third: 4 · (1 + 3) + 2, and 1 − 2 for each short slice before it; or, from the second stage on, 2 + 4 · 3 + 1
    and 3 − 2 for the one short slice before it.
    """
    assert [least_waits((1, 3, 2), (1, 1), (1, 4), m) for m in (1, 2, 9)] == [[0, 3, 17], [0, 2, 16], [0, 2, 16]]
