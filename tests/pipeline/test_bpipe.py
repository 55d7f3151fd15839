"""BPipe: 1F1B's computation, balanced memory, and what its transfers cost."""

import math

import pytest

from dlojz.pipeline.orders.synchronous import bpipe, most_kept, one_f_one_b
from dlojz.pipeline.schedule import COMPUTES, EVICT, LOAD, Costs
from dlojz.pipeline.simulator import peak_activations, simulate
from dlojz.pipeline.validity import problems

FAST = Costs()


def transfers(ranks: int, micro_batches: int) -> tuple[int, int]:
    kinds = [action.kind for action in bpipe(ranks, micro_batches).actions]
    return kinds.count(EVICT), kinds.count(LOAD)


@pytest.mark.parametrize("ranks", [4, 6, 8, 16])
def test_bpipe_keeps_on_no_rank_more_than_half_the_ranks_and_one(ranks: int) -> None:
    limit = math.ceil((ranks + 2) / 2)
    assert most_kept(ranks) == limit
    for micro_batches in (1, ranks, ranks + 1, 2 * ranks, 3 * ranks + 1):
        schedule = bpipe(ranks, micro_batches)
        peaks = peak_activations(schedule, FAST)
        assert max(peaks) == (limit if micro_batches >= limit else micro_batches)
        assert problems(schedule) == []
    assert peak_activations(one_f_one_b(ranks, 2 * ranks))[0] == ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
def test_bpipe_keeps_the_limit_for_odd_and_small_numbers_of_ranks_too(ranks: int) -> None:
    for micro_batches in (1, ranks, 2 * ranks + 1):
        assert max(peak_activations(bpipe(ranks, micro_batches))) <= most_kept(ranks) <= max(ranks, 2)
    if ranks <= 3:
        assert transfers(ranks, 9) == (0, 0)


def test_bpipe_computes_what_1f1b_does() -> None:
    for ranks, micro_batches in ((4, 8), (8, 10), (5, 3)):
        schedule = bpipe(ranks, micro_batches)
        computed = tuple(tuple(one for one in order if one.kind in COMPUTES) for order in schedule.orders)
        assert computed == one_f_one_b(ranks, micro_batches).orders
        assert simulate(schedule).makespan == 3 * (micro_batches + ranks - 1)


def test_bpipe_has_evictions_and_loads_where_they_stand() -> None:
    assert " ".join(str(one) for one in bpipe(4, 8).orders[0]) == (
        "0F0 0F1 0F2 0E2 0F3 0B0 0F4 0E4 0B1 0L2 0F5 0B2 0F6 0E6 0B3 0L4 0F7 0B4 0L6 0B5 0B6 0B7"
    )


def test_each_eviction_is_loaded_back_once_and_only_ranks_above_the_limit_evict() -> None:
    for ranks in (4, 6, 8, 16):
        for micro_batches in (ranks, 3 * ranks):
            schedule = bpipe(ranks, micro_batches)
            for rank, order in enumerate(schedule.orders):
                evicted = [one.micro_batch for one in order if one.kind == EVICT]
                loaded = [one.micro_batch for one in order if one.kind == LOAD]
                assert sorted(evicted) == sorted(loaded) == sorted(set(evicted))
                assert bool(evicted) == (ranks - rank > most_kept(ranks))
        # m = p: each rank evicts just what it has too much at once.
        assert transfers(ranks, ranks)[0] == sum(max(ranks - rank - most_kept(ranks), 0) for rank in range(ranks))
    assert transfers(4, 8) == (3, 3)


def test_bpipe_hides_a_load_behind_one_forward_and_shows_it_beyond() -> None:
    schedule = bpipe(4, 8)
    makespans = [simulate(schedule, Costs(eviction_transfer=time)).makespan for time in (0, 1, 1.5, 2, 3)]
    assert makespans[:2] == [33, 33]
    # Rank 0 waits for two loads in its steady state (2 and 4), each for what exceeds the forward in front of it.
    assert makespans[2:] == [33.5, 34, 35]
    assert simulate(schedule, Costs(evict=0.5, load=0.5)).makespan > 33


def test_a_slow_link_raises_the_peak_by_what_is_under_way() -> None:
    """Evicted activations are given back when they have arrived; the simulated rank does not wait for it."""
    assert max(peak_activations(bpipe(8, 16), Costs(eviction_transfer=1.0))) == most_kept(8) + 1
