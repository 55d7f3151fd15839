"""The allocator's rules on cases worked out by hand, and what must hold for any sequence of events."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlojz.base.errors import LabError
from dlojz.prediction.allocator import MIN_BLOCK_BYTES, CachingAllocator, Event, replay, segment_bytes

MIB = 2**20


def allocate(*sizes: int) -> list[Event]:
    return list(enumerate(sizes))


def after(events: list[Event], limit_bytes: int | None = None) -> CachingAllocator:
    """The allocator after a replay."""
    allocator = CachingAllocator(limit_bytes=limit_bytes)
    replay(events, allocator)
    return allocator


def blocks_of(allocator: CachingAllocator) -> list[tuple[tuple[int, int | None], ...]]:
    """Size of each block of each segment, and the storage that uses it."""
    return [
        tuple((block.size_bytes, block.storage if block.in_use else None) for block in blocks)
        for blocks in allocator.segments()
    ]


@pytest.mark.parametrize(("asked", "block"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
def test_replay_makes_a_block_a_multiple_of_512(asked: int, block: int) -> None:
    found = replay(allocate(asked))
    assert found.requested_peak_bytes == asked
    assert found.allocated_peak_bytes == block


@pytest.mark.parametrize(
    ("asked", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_a_segment_depends_on_what_is_asked(asked: int, reserved: int) -> None:
    assert segment_bytes(-(-asked // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES) == reserved
    assert replay(allocate(asked)).reserved_peak_bytes == reserved


def test_small_and_large_requests_do_not_share_segments() -> None:
    found = after(allocate(512, 2 * MIB, 512, 3 * MIB))
    assert found.reserved_bytes == 22 * MIB
    assert [blocks[0].pool.is_small for blocks in found.segments()] == [True, False]
    assert blocks_of(found) == [
        ((512, 0), (512, 2), (2 * MIB - 1024, None)),
        ((2 * MIB, 1), (3 * MIB, 3), (15 * MIB, None)),
    ]


def test_a_rest_of_a_large_block_up_to_1_mib_is_not_split_off_and_counts_as_allocated() -> None:
    cached = [(0, 12 * MIB), (0, -12 * MIB)]
    assert after([*cached, (1, 11 * MIB)]).allocated_bytes == 12 * MIB
    assert after([*cached, (1, 11 * MIB - 512)]).allocated_bytes == 11 * MIB - 512


def test_caching_allocator_uses_again_what_is_freed_and_gives_nothing_back() -> None:
    step = [(0, 30 * MIB), (1, 5 * MIB), (1, -5 * MIB), (0, -30 * MIB)]
    allocator = CachingAllocator()
    found = replay(step * 10, allocator)
    assert allocator.device_allocations == 2
    assert allocator.reserved_bytes == found.reserved_peak_bytes == 50 * MIB
    assert allocator.allocated_bytes == 0 and found.allocated_peak_bytes == 35 * MIB


def test_caching_allocator_takes_the_smallest_block_that_is_large_enough() -> None:
    """Free: 40, 30 and 20 MiB; 25 MiB go into the one of 30, whose rest of 5 serves 4 and is too small to split."""
    free = [event for n, mib in enumerate((40, 30, 20)) for event in ((n, mib * MIB), (n, -mib * MIB))]
    first = [(n, delta) for n, delta in free if delta > 0] + [(n, delta) for n, delta in free if delta < 0]
    found = after([*first, (3, 25 * MIB), (4, 4 * MIB), (5, 40 * MIB), (6, 20 * MIB), (7, 8 * MIB)])
    assert found.reserved_bytes == 110 * MIB
    assert blocks_of(found) == [
        ((40 * MIB, 5),),
        ((25 * MIB, 3), (5 * MIB, 4)),
        ((20 * MIB, 6),),
        ((8 * MIB, 7), (12 * MIB, None)),
    ]


def test_replay_joins_neighbours() -> None:
    """Three blocks of 5 MiB share a segment of 20; freed in any order they serve 20 MiB in one piece."""
    for order in ((0, 1, 2), (2, 0, 1), (1, 0, 2), (0, 2, 1)):
        found = replay([*allocate(*[5 * MIB] * 3), *((n, -5 * MIB) for n in order), (3, 20 * MIB)])
        assert found.reserved_peak_bytes == 20 * MIB


def test_replay_fragments_at_a_block_in_use_between_free_ones() -> None:
    blocks = allocate(*[5 * MIB] * 4)
    held = [*blocks, (0, -5 * MIB), (2, -5 * MIB), (4, 8 * MIB)]
    assert replay(held).reserved_peak_bytes == 40 * MIB


def test_caching_allocator_under_a_limit_releases_cached_segments_and_tries_again() -> None:
    events = [(0, 30 * MIB), (0, -30 * MIB), (1, 40 * MIB)]
    assert after(events).reserved_bytes == 70 * MIB
    allocator = CachingAllocator(limit_bytes=64 * MIB)
    assert replay(events, allocator).out_of_memory_event is None
    assert allocator.retries == 1 and allocator.reserved_bytes == 40 * MIB


def test_where_nothing_helps_the_replay_ends_and_says_where() -> None:
    allocator = CachingAllocator(limit_bytes=64 * MIB)
    assert replay([(0, 30 * MIB), (1, 40 * MIB), (0, -30 * MIB)], allocator).out_of_memory_event == 1
    assert allocator.allocated_bytes == 30 * MIB


def test_caching_allocator_cannot_release_a_segment_in_part_use() -> None:
    events = [(0, 5 * MIB), (1, 5 * MIB), (1, -5 * MIB), (2, 24 * MIB)]
    assert replay(events, CachingAllocator(limit_bytes=40 * MIB)).out_of_memory_event == 3


def test_replay_copies_a_storage_that_grows() -> None:
    allocator = CachingAllocator()
    assert replay([(0, 4 * MIB), (0, 4 * MIB), (0, -8 * MIB)], allocator).requested_peak_bytes == 12 * MIB
    assert allocator.allocated_bytes == 0


def test_replay_refuses_events_that_do_not_begin_at_the_beginning() -> None:
    with pytest.raises(LabError, match="event 1 frees 600 bytes of storage 7, which holds 512"):
        replay([(7, 512), (7, -600)])
    with pytest.raises(LabError, match="which holds 0"):
        replay([(7, -600)])


@pytest.mark.parametrize(
    ("events", "reserved_mib"),
    [
        ([(0, 30), (1, 40)], 80),  # two pages of 20; the 10 that are left, and two more pages
        ([(0, 30), (1, 40), (0, -30), (2, 35)], 120),  # the hole of 30 is too small: the end grows from 10 by 40
        ([(0, 30), (1, 40), (0, -30), (2, 8), (3, 11)], 80),  # the hole before the end of 10, which can grow
        ([(0, 30), (0, -30), (1, 60)], 60),  # the free end grows
        ([(0, 30), (1, 40), (1, -40), (2, 90)], 120),  # what is freed joins the end
    ],
)
def test_caching_allocator_grows_an_expandable_segment_at_its_end(events: list[Event], reserved_mib: int) -> None:
    found = [(storage, delta * MIB) for storage, delta in events]
    assert replay(found, CachingAllocator(expandable=True)).reserved_peak_bytes == reserved_mib * MIB


def test_caching_allocator_has_pools_of_its_own_for_each_stream() -> None:
    """What a stream has freed, another does not take."""
    events = [(0, 30 * MIB), (0, -30 * MIB), (1, 30 * MIB)]
    for expandable, one, two in ((False, 30, 60), (True, 40, 80)):
        allocators = [CachingAllocator(expandable=expandable) for _ in range(2)]
        assert replay(events, allocators[0]).reserved_peak_bytes == one * MIB
        assert replay(events, allocators[1], {1: 1}).reserved_peak_bytes == two * MIB


SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(MIB, 64 * MIB))


def check(allocator: CachingAllocator) -> None:
    """Blocks fill their segments without overlap, free neighbours are joined, and the sums are those of the blocks."""
    segments = allocator.segments()
    blocks = [block for segment in segments for block in segment]
    for segment in segments:
        for block, following in itertools.pairwise(segment):
            assert block.address + block.size_bytes == following.address
            assert block.next is following and following.previous is block
            assert block.in_use or following.in_use
    for segment, following in itertools.pairwise(segments):
        assert segment[-1].address + segment[-1].size_bytes <= following[0].address
    assert allocator.reserved_bytes == sum(block.size_bytes for block in blocks)
    assert allocator.allocated_bytes == sum(block.size_bytes for block in blocks if block.in_use)
    free = sorted((block.size_bytes, block.address) for block in blocks if not block.in_use)
    pools = {id(block.pool): block.pool for block in blocks}.values()
    assert sorted(itertools.chain.from_iterable(pool.free for pool in pools)) == free
    assert allocator.reserved_bytes >= allocator.allocated_bytes >= allocator.requested_bytes


@settings(max_examples=60)
@given(requests=st.lists(st.tuples(SIZES, st.booleans(), st.integers(0, 10**6)), max_size=60), expandable=st.booleans())
def test_caching_allocator_blocks_never_overlap_and_sums_hold(
    requests: list[tuple[int, bool, int]], expandable: bool
) -> None:
    allocator, held = CachingAllocator(expandable=expandable), []
    for size_bytes, frees, which in requests:
        held.append(allocator.malloc(size_bytes))
        if frees:
            allocator.free(held.pop(which % len(held)))
        check(allocator)
    for block in held:
        allocator.free(block)
    check(allocator)
    assert allocator.allocated_bytes == allocator.requested_bytes == 0
    reserved_bytes = allocator.reserved_bytes
    allocator.release_cached()
    check(allocator)
    assert allocator.reserved_bytes == 0 <= reserved_bytes


@settings(max_examples=40)
@given(
    requests=st.lists(st.tuples(SIZES, st.booleans(), st.integers(0, 10**6)), max_size=60),
    limit_mib=st.integers(2, 300),
)
def test_caching_allocator_keeps_a_limit_which_changes_nothing_where_not_reached(
    requests: list[tuple[int, bool, int]], limit_mib: int
) -> None:
    events: list[Event] = []
    held: list[Event] = []
    for number, (size_bytes, frees, which) in enumerate(requests):
        held.append((number, size_bytes))
        events.append((number, size_bytes))
        if frees:
            storage, held_bytes = held.pop(which % len(held))
            events.append((storage, -held_bytes))
    free = replay(events)
    allocator = CachingAllocator(limit_bytes=limit_mib * MIB)
    bound = replay(events, allocator)
    assert bound.reserved_peak_bytes <= limit_mib * MIB
    if free.reserved_peak_bytes <= limit_mib * MIB:
        assert bound == free and allocator.retries == 0
    else:
        assert allocator.retries > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("seed", range(4))
def test_replay_allocates_and_reserves_as_torch_does_on_a_gpu(seed: int) -> None:
    drawn = random.Random(seed)
    events: list[Event] = []
    live: dict[int, int] = {}
    for number in range(400):
        if live and drawn.random() < 0.48:
            storage = drawn.choice(list(live))
            events.append((storage, -live.pop(storage)))
        else:
            live[number] = drawn.randint(*drawn.choice(((1, 4096), (4096, MIB), (MIB, 48 * MIB))))
            events.append((number, live[number]))
    torch._C._cuda_clearCublasWorkspaces()  # of tests before this one
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    held: dict[int, torch.Tensor] = {}
    for storage, delta_bytes in events:
        if delta_bytes > 0:
            held[storage] = torch.empty(delta_bytes, dtype=torch.uint8, device="cuda")
        else:
            del held[storage]
    told = replay(events)
    assert before == (0, 0)
    assert torch.cuda.max_memory_allocated() == told.allocated_peak_bytes
    assert torch.cuda.max_memory_reserved() == told.reserved_peak_bytes
