"""TeraPipe: the order of slices, its closed form, and the lengths of slices against brute force."""

import random
from collections.abc import Iterator

import pytest

from dlojz.base.errors import LabError
from dlojz.pipeline.orders.synchronous import gpipe, terapipe
from dlojz.pipeline.schedule import FORWARD, Costs
from dlojz.pipeline.simulator import simulate
from dlojz.pipeline.validity import (
    causal_slice_flops,
    causal_slice_time,
    pipelined_time,
    plan_slices,
    problems,
    slice_times,
)


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        for rest in compositions(total - first):
            yield (first, *rest)


def test_slices_run_forward_in_order_and_backward_in_reverse() -> None:
    schedule = terapipe(2, 2, 3)
    assert " ".join(str(one) for one in schedule.orders[1]) == (
        "1F0 1F0.1 1F0.2 1F1 1F1.1 1F1.2 1B0.2 1B0.1 1B0 1B1.2 1B1.1 1B1"
    )
    assert problems(schedule) == []


def test_every_size_can_be_executed_and_one_slice_is_gpipe() -> None:
    for ranks in (1, 2, 4):
        for micro_batches in (1, 3):
            for token_slices in (1, 2, 5):
                assert problems(terapipe(ranks, micro_batches, token_slices)) == []
            assert terapipe(ranks, micro_batches, 1).orders == gpipe(ranks, micro_batches).orders


def test_slices_in_the_wrong_order_are_named() -> None:
    schedule = terapipe(2, 1, 3)
    order = list(schedule.orders[0])
    order[0], order[1] = order[1], order[0]
    order[3], order[4] = order[4], order[3]
    found = problems(schedule.with_orders([order, schedule.orders[1]]))
    assert [problem.split(",")[0] for problem in found] == [
        "rank 0 runs 0F0.1 before 0F0",
        "rank 0 runs 0B0.1 before 0B0.2",
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_the_simulated_forward_of_a_sequence_is_the_closed_form(ranks: int) -> None:
    numbers = random.Random(ranks)
    for _ in range(20):
        times = tuple(float(numbers.randint(1, 9)) for _ in range(numbers.randint(2, 6)))
        schedule = terapipe(ranks, 1, len(times))
        timeline = simulate(schedule, Costs(slice_times=times))
        forward = max(
            end for action, end in zip(schedule.actions, timeline.ends, strict=True) if action.kind == FORWARD
        )
        assert forward == pipelined_time(times, ranks) == sum(times) + (ranks - 1) * max(times)


def test_equal_slices_make_the_bubble_of_as_many_micro_batches() -> None:
    """(p − 1) / (m s + p − 1), as GPipe with s times as many micro-batches."""
    for slices in (1, 2, 4, 8):
        assert simulate(terapipe(4, 2, slices)).bubble_fraction == pytest.approx(3 / (2 * slices + 3), rel=1e-12)


def test_flops_of_slices_add_up_to_those_of_the_sequence() -> None:
    hidden, tokens = 64, 32
    whole = causal_slice_flops(tokens, 0, hidden)
    assert whole == 24 * tokens * hidden**2 + 2 * tokens * (tokens + 1) * hidden
    for lengths in ((32,), (16, 16), (10, 7, 15), (1,) * 32):
        assert sum(slice_times(lengths, lambda length, context: causal_slice_flops(length, context, hidden))) == whole
    assert causal_slice_flops(8, 24, hidden) > causal_slice_flops(8, 0, hidden)
    assert causal_slice_flops(8, 8, hidden, layers=3) == 3 * causal_slice_flops(8, 8, hidden)


def test_the_plan_is_the_best_of_all_cuts() -> None:
    numbers = random.Random(0)
    for _ in range(40):
        tokens, ranks = numbers.randint(1, 9), numbers.randint(1, 6)
        table = {(n, c): float(numbers.randint(1, 30)) for n in range(1, tokens + 1) for c in range(tokens)}

        def time(length: int, context: int, table: dict[tuple[int, int], float] = table) -> float:
            return table[length, context]

        best = min(pipelined_time(slice_times(cut, time), ranks) for cut in compositions(tokens))
        plan = plan_slices(tokens, ranks, time)
        assert plan.total == best
        assert sum(plan.lengths) == tokens
        assert plan.total == pipelined_time(plan.times, ranks)


def test_later_slices_are_shorter_and_more_ranks_want_more_slices() -> None:
    time = causal_slice_time(hidden=64, flops_per_s=1e9, overhead_s=1e-3)
    # One layer: 24 s h² for its products, and 4 h for each token and one that it looks at, 100 + 1 to 100 + 8.
    assert time(8, 100) == pytest.approx(1e-3 + (24 * 8 * 64**2 + 4 * 64 * (8 * 100 + 36)) / 1e9, rel=1e-12)
    few, many = (plan_slices(256, ranks, time, grid=8) for ranks in (2, 8))
    assert len(few.lengths) < len(many.lengths)
    assert all(length % 8 == 0 for length in many.lengths)
    assert many.lengths[0] > many.lengths[-1]  # a token costs more the more stand before it
    equal = pipelined_time(slice_times((256 // 8,) * 8, time), 8)
    assert many.total < equal
    assert plan_slices(256, 1, time, grid=8).lengths == (256,)  # one rank: every slice only adds its overhead


def test_terapipe_and_plan_slices_refuse_what_cannot_be_with_what_can() -> None:
    with pytest.raises(LabError, match="token_slices must be a whole number of at least 1, but 0 was received"):
        terapipe(2, 2, 0)
    with pytest.raises(LabError, match=r"tokens=10, grid=8.*use grid=1"):
        plan_slices(10, 2, lambda length, context: 1.0, grid=8)
    with pytest.raises(LabError, match="-1.0 was received for 1 tokens after 0"):
        plan_slices(2, 2, lambda length, context: -1.0)
    with pytest.raises(LabError, match="flops_per_s must be above 0"):
        causal_slice_time(64, 0.0)
