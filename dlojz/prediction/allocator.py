"""Simulate PyTorch's caching allocator: segments and blocks, expandable segments, a snapshot for memory_viz.

A model of torch's CUDA caching allocator: segments, blocks, best fit, splitting, joining.

Blocks never overlap and fill their segments, and reserved ≥ allocated ≥ requested at every moment; with the same
requests in the same order on one stream, the sums are those of `torch.cuda.memory_reserved` and `memory_allocated`.

The allocator cuts *segments* from the device (`cudaMalloc`), splits them into *blocks*, and keeps what is freed for
later. So memory is lost to rounding, and to free blocks too small for what is asked next: fragmentation. Modelled are
one device, one stream and the default settings. Not modelled: blocks that wait for a second stream (`record_stream`),
private pools of CUDA graphs, `max_split_size_mb`, `roundup_power2_divisions`, `garbage_collection_threshold`.

Source: torch, `c10/cuda/CUDACachingAllocator.cpp` (`malloc`, `get_free_block`, `alloc_found_block`, `free_block`,
`try_merge_blocks`, `release_cached_blocks`) and, in 2.13, `c10/core/AllocatorConfig.h` for the sizes.

The caching allocator with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`: one segment per pool, which grows.

That of `dlojz.prediction.allocator`; what is reserved is what is mapped.

Memory is mapped behind the addresses of a segment page by page (2 MiB in the small pool, 20 MiB in the large one), so
that a free end of the segment serves whatever is asked next: little is lost to fragmentation.

Source: torch, `c10/cuda/CUDACachingAllocator.cpp` (`find_expandable_block`, `try_allocate_expandable_block`,
`map_block`, `unmap_block`, and the search in `get_free_block`).

What a GPU's allocator reserves for a sequence of allocations and releases: allocated, reserved, fragmentation.

A replay is exact for the model in `dlojz.prediction.allocator`; it needs no GPU and no torch.

Replay the events of a whole step twice, as a second step finds what the first has left cached; peaks are those of all
events. What lies outside the allocator (the CUDA context, NCCL, cuBLAS handles) is not in these figures.

A predicted step as a memory snapshot, which opens in torch's own viewer (pytorch.org/memory_viz).

What the viewer shows is what the replay of the allocator did, each allocation under the name of the block and phase
that made it; no file is left half written.

Format: what `torch.cuda.memory._snapshot()` returns, `segments` as they are at the end and `device_traces` with every
action. The viewer reads pickles. Here one is written opcode by opcode, of dictionaries, lists, strings and numbers
alone, with opcodes that the viewer knows (torch, `utils/viz/MemoryViz.js`, `unpickle`); none is ever read.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Final

from dlojz.base.errors import LabError
from dlojz.base.language import say

MIN_BLOCK_BYTES: Final = 512
"""Every request is rounded up to a multiple of this (`kMinBlockSize`)."""
SMALL_BYTES: Final = 2**20
"""Up to this, a request is served from the pool of small blocks (`kSmallSize`)."""
SMALL_SEGMENT_BYTES: Final = 2 * 2**20
"""A segment of the small pool (`kSmallBuffer`)."""
LARGE_SEGMENT_BYTES: Final = 20 * 2**20
"""A segment of the large pool, for requests below `OWN_SEGMENT_BYTES` (`large_segment_size`)."""
OWN_SEGMENT_BYTES: Final = 10 * 2**20
"""From this on, a request gets a segment of its own (`kMinLargeAlloc`) …"""
SEGMENT_ROUNDING_BYTES: Final = 2 * 2**20
"""… rounded up to a multiple of this (`kRoundLarge`)."""
FIRST_ADDRESS: Final = 0x7F0000000000
"""Where the addresses begin; they only tell blocks apart, and which of two equal ones comes first."""

Listener = Callable[[str, int, int, int], None]
"""Is told each action as torch's trace names it (`alloc`, `free`, `segment_alloc`, …), the number of the event that
leads to it, the address and the bytes."""


def rounded_bytes(size_bytes: int) -> int:
    """Bytes of the block that serves a request of at least 1 byte: a multiple of 512."""
    return -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def segment_bytes(block_bytes: int) -> int:
    """Bytes of the segment that is cut from the device when no cached block can serve a (rounded) request."""
    if block_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES


class OutOfDeviceMemoryError(Exception):
    """Even after the release of all cached segments, so many more bytes do not fit under the limit."""

    def __init__(self, wanted_bytes: int) -> None:
        super().__init__(f"{wanted_bytes} bytes more do not fit")
        self.wanted_bytes = wanted_bytes


class CachedBlock:
    """A piece of a segment, in use or free, between its neighbours in the same segment."""

    __slots__ = ("address", "in_use", "mapped", "next", "pool", "previous", "requested_bytes", "size_bytes")

    def __init__(self, address: int, size_bytes: int, pool: Pool, *, mapped: bool = True) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pool = pool
        self.mapped = mapped
        """False where an expandable segment has addresses but no memory behind them."""
        self.requested_bytes = 0
        self.in_use = False
        self.previous: CachedBlock | None = None
        self.next: CachedBlock | None = None

    def insert_after(self, block: CachedBlock) -> None:
        """Put a block between this one and the next."""
        block.previous, block.next = self, self.next
        if self.next is not None:
            self.next.previous = block
        self.next = block


class Pool:
    """The small blocks or the large ones.

    Args:
        is_small: which of the two.
    """

    __slots__ = ("blocks", "free", "is_small", "segments", "unmapped")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.free: list[tuple[int, int]] = []
        """Size and address of the free blocks, sorted: the first that is large enough is the best fit."""
        self.blocks: dict[int, CachedBlock] = {}
        """The free blocks by address."""
        self.segments: dict[int, CachedBlock] = {}
        """The first block of each segment by address."""
        self.unmapped: dict[int, CachedBlock] = {}
        """Blocks of an expandable segment that have no memory behind them, by address."""

    def add(self, block: CachedBlock) -> None:
        """Put a block among the free ones."""
        insort(self.free, (block.size_bytes, block.address))
        self.blocks[block.address] = block

    def take(self, block: CachedBlock) -> None:
        """Remove a block from the free ones."""
        del self.free[bisect_left(self.free, (block.size_bytes, block.address))]
        del self.blocks[block.address]

    def join_neighbours(self, block: CachedBlock) -> None:
        """Let a block that is among no others swallow its neighbours of the same kind: free, or unmapped."""
        before, after, mapped = block.previous, block.next, block.mapped
        if before is not None and not before.in_use and before.mapped == mapped:
            self._remove(before)
            block.address, block.previous = before.address, before.previous
            block.size_bytes += before.size_bytes
            if block.previous is None:
                self.segments[block.address] = block
            else:
                block.previous.next = block
        if after is not None and not after.in_use and after.mapped == mapped:
            self._remove(after)
            block.next = after.next
            block.size_bytes += after.size_bytes
            if block.next is not None:
                block.next.previous = block

    def _remove(self, block: CachedBlock) -> None:
        if block.mapped:
            self.take(block)
        else:
            del self.unmapped[block.address]


class CachingAllocator:
    """The allocator itself: `malloc` and `free`, and the sums they lead to.

    Args:
        limit_bytes: what all segments together may take; None is no limit.
        listener: is told each action.
    """

    def __init__(self, *, limit_bytes: int | None = None, listener: Listener | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.listener = listener
        self.event = 0
        """Number of the event that is served, for the listener."""
        self.allocated_bytes = self.reserved_bytes = self.requested_bytes = 0
        self.device_allocations = self.retries = 0
        self.small, self.large = Pool(is_small=True), Pool(is_small=False)
        self._next_address = FIRST_ADDRESS

    def malloc(self, size_bytes: int) -> CachedBlock:
        """A block for so many bytes, at least 1: the smallest free one that is large enough, else from the device.

        Raises:
            OutOfDeviceMemoryError: if a limit is reached.
        """
        wanted_bytes = -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        pool = self.small if wanted_bytes <= SMALL_BYTES else self.large
        block = self._cached(pool, wanted_bytes) or self._new(pool, wanted_bytes)
        rest_bytes = block.size_bytes - wanted_bytes
        if rest_bytes and self._splits(pool, rest_bytes):
            remainder = CachedBlock(block.address + wanted_bytes, rest_bytes, pool)
            block.insert_after(remainder)
            block.size_bytes = wanted_bytes
            pool.add(remainder)
        block.in_use = True
        block.requested_bytes = size_bytes
        self.allocated_bytes += block.size_bytes
        self.requested_bytes += size_bytes
        if self.listener:
            self.listener("alloc", self.event, block.address, size_bytes)
        return block

    def free(self, block: CachedBlock) -> None:
        """Keep a block for later, joined with its free neighbours; nothing is given back to the device."""
        block.in_use = False
        self.allocated_bytes -= block.size_bytes
        self.requested_bytes -= block.requested_bytes
        if self.listener:
            self.listener("free", self.event, block.address, block.requested_bytes)
        block.pool.join_neighbours(block)
        block.pool.add(block)

    def release_cached(self) -> None:
        """Give all segments that no block in use keeps back to the device (`torch.cuda.empty_cache`)."""
        for pool in (self.large, self.small):
            for block in [block for block in pool.blocks.values() if block.previous is None and block.next is None]:
                pool.take(block)
                del pool.segments[block.address]
                self._has_reserved("segment_free", block.address, -block.size_bytes)

    def segments(self) -> list[list[CachedBlock]]:
        """The blocks of each segment, both by address; addresses without memory behind them belong to none."""
        found: list[list[CachedBlock]] = []
        for pool in (self.small, self.large):
            for first in pool.segments.values():
                blocks: list[CachedBlock] = []
                block: CachedBlock | None = first
                while block is not None:
                    if block.mapped:
                        blocks.append(block)
                    if blocks and (block.next is None or not block.next.mapped):
                        found.append(blocks)
                        blocks = []
                    block = block.next
        return sorted(found, key=lambda blocks: blocks[0].address)

    def _splits(self, pool: Pool, rest_bytes: int) -> bool:
        """Whether the rest of a block is kept apart; otherwise it counts as allocated."""
        return pool.is_small or rest_bytes > SMALL_BYTES

    def _cached(self, pool: Pool, wanted_bytes: int) -> CachedBlock | None:
        """Best fit: the smallest free block that is large enough, and the lowest address among equals."""
        at = bisect_left(pool.free, (wanted_bytes, 0))
        if at == len(pool.free):
            return None
        return pool.blocks.pop(pool.free.pop(at)[1])

    def _new(self, pool: Pool, wanted_bytes: int) -> CachedBlock:
        """A block from the device; where the limit is reached, once more after cached segments were released."""
        block = self._cut(pool, wanted_bytes)
        if block is None:
            self.release_cached()
            self.retries += 1
            block = self._cut(pool, wanted_bytes)
        if block is None:
            raise OutOfDeviceMemoryError(wanted_bytes)
        return block

    def _cut(self, pool: Pool, wanted_bytes: int) -> CachedBlock | None:
        size_bytes = segment_bytes(wanted_bytes)
        if not self._fits(size_bytes):
            return None
        block = CachedBlock(self._next_address, size_bytes, pool)
        self._next_address += size_bytes
        pool.segments[block.address] = block
        self._has_reserved("segment_alloc", block.address, size_bytes)
        return block

    def _fits(self, more_bytes: int) -> bool:
        return self.limit_bytes is None or self.reserved_bytes + more_bytes <= self.limit_bytes

    def _has_reserved(self, action: str, address: int, more_bytes: int) -> None:
        self.reserved_bytes += more_bytes
        self.device_allocations += more_bytes > 0
        if self.listener:
            self.listener(action, self.event, address, abs(more_bytes))


ADDRESS_SPACE_BYTES: Final = 2**44
"""Addresses that a segment may grow into: torch takes 9/8 of the device's memory, here they never run out."""


class ExpandableAllocator(CachingAllocator):
    """The allocator whose segments grow."""

    def release_cached(self) -> None:
        """Unmap every page that no block in use touches."""
        for pool in (self.large, self.small):
            for block in list(pool.blocks.values()):
                self._unmap(pool, block)

    def _splits(self, pool: Pool, rest_bytes: int) -> bool:
        return True

    def _cached(self, pool: Pool, wanted_bytes: int) -> CachedBlock | None:
        """Best fit, where a block at the growing end counts with all that it may grow to."""
        at = bisect_left(pool.free, (wanted_bytes, 0))
        if at == len(pool.free):
            return None
        block = pool.blocks[pool.free[at][1]]
        for _, address in islice(pool.free, at + 1, None):
            following = pool.blocks[address]
            if _expandable_bytes(following) >= _expandable_bytes(block):
                break
            block = following
        pool.take(block)
        return block

    def _cut(self, pool: Pool, wanted_bytes: int) -> CachedBlock | None:
        """The lowest addresses with room, free or unmapped, and memory behind all of them."""
        block = self._room(pool, wanted_bytes)
        while not block.mapped or block.size_bytes < wanted_bytes:
            unmapped = block if not block.mapped else block.next
            if unmapped is None or not self._map(
                pool, unmapped, wanted_bytes - (block.size_bytes if block.mapped else 0)
            ):
                return None
            block = unmapped
        pool.take(block)
        return block

    def _room(self, pool: Pool, wanted_bytes: int) -> CachedBlock:
        for address in sorted(pool.unmapped):
            start = pool.unmapped[address]
            if start.previous is not None and not start.previous.in_use:
                start = start.previous
            found_bytes, block = 0, start
            while True:
                found_bytes += block.size_bytes
                if found_bytes >= wanted_bytes:
                    return start
                if block.next is None or block.next.in_use:
                    break
                block = block.next
        fresh = CachedBlock(self._next_address, ADDRESS_SPACE_BYTES, pool, mapped=False)
        self._next_address += ADDRESS_SPACE_BYTES
        pool.unmapped[fresh.address] = pool.segments[fresh.address] = fresh
        return fresh

    def _map(self, pool: Pool, block: CachedBlock, wanted_bytes: int) -> bool:
        page_bytes = SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES
        mapped_bytes = min(-(-wanted_bytes // page_bytes) * page_bytes, block.size_bytes)
        if not self._fits(mapped_bytes):
            return False
        del pool.unmapped[block.address]
        if mapped_bytes < block.size_bytes:
            rest = CachedBlock(block.address + mapped_bytes, block.size_bytes - mapped_bytes, pool, mapped=False)
            block.insert_after(rest)
            pool.unmapped[rest.address] = rest
        block.size_bytes, block.mapped = mapped_bytes, True
        self._has_reserved("segment_map", block.address, mapped_bytes)
        pool.join_neighbours(block)
        pool.add(block)
        return True

    def _unmap(self, pool: Pool, block: CachedBlock) -> None:
        page_bytes = SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES
        origin = next(first for first in pool.segments if first <= block.address < first + ADDRESS_SPACE_BYTES)
        start = origin - (origin - block.address) // page_bytes * page_bytes
        end = origin + (block.address + block.size_bytes - origin) // page_bytes * page_bytes
        if end <= start:
            return
        pool.take(block)
        before_bytes, after_bytes = start - block.address, block.address + block.size_bytes - end
        if after_bytes:
            after = CachedBlock(end, after_bytes, pool)
            block.insert_after(after)
            pool.add(after)
        block.size_bytes = before_bytes
        unmapped = block
        if before_bytes:
            unmapped = CachedBlock(start, end - start, pool, mapped=False)
            block.insert_after(unmapped)
            pool.add(block)
        unmapped.size_bytes, unmapped.mapped = end - start, False
        self._has_reserved("segment_unmap", start, start - end)
        pool.join_neighbours(unmapped)
        pool.unmapped[unmapped.address] = unmapped


def _expandable_bytes(block: CachedBlock) -> int:
    following = block.next
    return block.size_bytes + (following.size_bytes if following is not None and not following.mapped else 0)


Event = tuple[int, int]
"""Number of a storage, and the bytes by which it grows (or shrinks, where negative)."""


@dataclass(frozen=True)
class Segment:
    """A piece of device memory that the allocator holds.

    Args:
        address: of its first byte.
        is_small: whether it belongs to the pool of small blocks.
        blocks: size, and the storage that uses it (None: free), by address; the sizes add up to the segment's.
    """

    address: int
    is_small: bool
    blocks: tuple[tuple[int, int | None], ...]

    @property
    def size_bytes(self) -> int:
        """Bytes reserved for it."""
        return sum(size_bytes for size_bytes, _ in self.blocks)

    @property
    def free_bytes(self) -> int:
        """Bytes of its free blocks."""
        return sum(size_bytes for size_bytes, storage in self.blocks if storage is None)


@dataclass(frozen=True)
class Replay:
    """What a sequence of events leads to.

    Args:
        events: what was replayed.
        requested_peak_bytes: largest sum of what was asked for.
        allocated_peak_bytes: the same as the allocator counts it, rounded to blocks (`max_memory_allocated`).
        reserved_peak_bytes: largest sum of all segments (`max_memory_reserved`).
        peak_event: number of the event after which most is allocated, the first of them; -1 if nothing ever is.
        allocated_bytes, reserved_bytes: at the end.
        device_allocations: how often memory was asked of the device (`cudaMalloc`), which is slow.
        retries: how often the limit was reached and cached segments were released (`num_alloc_retries`).
        out_of_memory_event: number of the event that found no room even so, where the replay ends; None if none did.
    """

    events: Sequence[Event]
    limit_bytes: int | None
    expandable_segments: bool
    requested_peak_bytes: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    peak_event: int
    allocated_bytes: int
    reserved_bytes: int
    device_allocations: int
    retries: int
    out_of_memory_event: int | None

    @property
    def fragmentation(self) -> float:
        """Share of the reserved peak that the allocated peak does not need, from 0 to 1: caching and fragmentation."""
        return 1 - self.allocated_peak_bytes / self.reserved_peak_bytes if self.reserved_peak_bytes else 0.0

    @cached_property
    def segments_at_peak(self) -> tuple[Segment, ...]:
        """The segments when most is allocated."""
        return self.segments_after(self.peak_event)

    def segments_after(self, event: int) -> tuple[Segment, ...]:
        """The segments after an event, by address; found by a second replay up to there."""
        allocator = _allocator(self.limit_bytes, self.expandable_segments, None)
        held: dict[int, CachedBlock] = {}
        _run(allocator, self.events[: event + 1], held)
        storage_of = {block.address: storage for storage, block in held.items()}
        return tuple(
            Segment(
                blocks[0].address,
                blocks[0].pool.is_small,
                tuple((block.size_bytes, storage_of[block.address] if block.in_use else None) for block in blocks),
            )
            for blocks in allocator.segments()
        )


def replay(
    events: Iterable[Event],
    *,
    limit_bytes: int | None = None,
    expandable_segments: bool = False,
    listener: Listener | None = None,
) -> Replay:
    """Replay allocations and releases through the allocator; costs about 3 µs per event.

    A storage that grows or shrinks while it exists is allocated anew before the former block is freed, as torch's
    `resize_` does.

    Args:
        events: in their order.
        limit_bytes: what the allocator may reserve (the device's memory less what is outside the allocator).
        expandable_segments: as `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
        listener: is told each action of the allocator.

    Raises:
        LabError: if a storage shrinks by more than it holds.
    """
    events = events if isinstance(events, list | tuple) else tuple(events)
    allocator = _allocator(limit_bytes, expandable_segments, listener)
    requested, allocated, reserved, peak_event, failed = _run(allocator, events, {})
    return Replay(
        events=events,
        limit_bytes=limit_bytes,
        expandable_segments=expandable_segments,
        requested_peak_bytes=requested,
        allocated_peak_bytes=allocated,
        reserved_peak_bytes=reserved,
        peak_event=peak_event,
        allocated_bytes=allocator.allocated_bytes,
        reserved_bytes=allocator.reserved_bytes,
        device_allocations=allocator.device_allocations,
        retries=allocator.retries,
        out_of_memory_event=failed,
    )


def _allocator(limit_bytes: int | None, expandable: bool, listener: Listener | None) -> CachingAllocator:
    kind = ExpandableAllocator if expandable else CachingAllocator
    return kind(limit_bytes=limit_bytes, listener=listener)


def _run(
    allocator: CachingAllocator, events: Sequence[Event], held: dict[int, CachedBlock]
) -> tuple[int, int, int, int, int | None]:
    """Requested, allocated and reserved peaks, the event of the allocated one, and the event that found no room."""
    requested = allocated = reserved = 0
    peak_event = -1
    for number, (storage, delta_bytes) in enumerate(events):
        allocator.event = number
        former = held.get(storage)
        size_bytes = delta_bytes if former is None else former.requested_bytes + delta_bytes
        if size_bytes < 0:
            had_bytes = size_bytes - delta_bytes
            raise LabError(
                say(
                    en=f"event {number} frees {-delta_bytes} bytes of storage {storage}, which holds {had_bytes}: give "
                    "the events of a step from its beginning, in their order.",
                    fr=f"l’événement {number} libère {-delta_bytes} octets du stockage {storage}, qui en a "
                    f"{had_bytes} : donnez les événements d’un pas depuis son début, dans leur ordre.",
                )
            )
        if size_bytes:
            try:
                held[storage] = allocator.malloc(size_bytes)
            except OutOfDeviceMemoryError:
                return requested, allocated, reserved, peak_event, number
            if allocator.allocated_bytes > allocated:
                allocated, peak_event = allocator.allocated_bytes, number
            requested = max(requested, allocator.requested_bytes)
            reserved = max(reserved, allocator.reserved_bytes)
        elif former is not None:
            del held[storage]
        if former is not None:
            allocator.free(former)
    return requested, allocated, reserved, peak_event, None


Label = tuple[str, str]
"""Block (or module, or category) and phase that an event belongs to."""
SUFFIXES: Final = (".pickle", ".html")
_BATCH: Final = 1000
"""Items of a list that the viewer takes at once: it has them all on its stack."""


def snapshot(
    events: Iterable[Event],
    labels: Iterable[Label] | None = None,
    *,
    limit_bytes: int | None = None,
    expandable_segments: bool = False,
) -> dict[str, Any]:
    """The snapshot of a sequence of allocations and releases, in the format of `torch.cuda.memory._snapshot()`.

    Times are the numbers of the events, as a prediction has no clock.

    Args:
        events: storage and the bytes by which it grows or shrinks, in their order.
        labels: block and phase of each event, as many; they are what the viewer shows as stack of an allocation.
        limit_bytes, expandable_segments: as for `replay`. Where memory runs out, the trace ends with `oom`.

    Raises:
        LabError: if there are not as many labels as events, or if a storage shrinks by more than it holds.
    """
    events = list(events)
    named = [("", "")] * len(events) if labels is None else list(labels)
    if len(named) != len(events):
        raise LabError(
            say(
                en=f"each event needs one label, but {len(events)} events and {len(named)} labels were received.",
                fr=f"à chaque événement son étiquette, mais {len(events)} événements et {len(named)} étiquettes ont "
                "été reçus.",
            )
        )
    frames = {label: [{"filename": label[0], "line": 0, "name": label[1]}] for label in dict.fromkeys(named)}
    trace: list[dict[str, Any]] = []
    frames_at: dict[int, list[dict[str, Any]]] = {}

    def note(action: str, event: int, address: int, size_bytes: int) -> None:
        of_event = frames[named[event]]
        if action == "alloc":
            frames_at[address] = of_event
        # torch's trace knows two moments of a release: asked for, and done once no stream uses the block.
        for name in ("free_requested", "free_completed") if action == "free" else (action,):
            trace.append(_entry(name, event, address, size_bytes, of_event))

    done = replay(events, limit_bytes=limit_bytes, expandable_segments=expandable_segments, listener=note)
    failed = done.out_of_memory_event
    if failed is not None:
        free_bytes = (limit_bytes or 0) - done.reserved_bytes
        entry = _entry("oom", failed, 0, events[failed][1], frames[named[failed]])
        trace.append({**entry, "device_free": free_bytes})
    return {
        "segments": _segments(done, events if failed is None else events[:failed], frames_at),
        "device_traces": [trace],
        "allocator_settings": {"expandable_segments": expandable_segments},
        "external_annotations": [],
    }


def _entry(action: str, event: int, address: int, size_bytes: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size_bytes,
        "stream": 0,
        "time_us": event,
        "frames": frames,
    }


def _segments(
    done: Replay, events: Sequence[Event], frames_at: dict[int, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    requested: dict[int, int] = {}
    for storage, delta_bytes in events:
        requested[storage] = requested.get(storage, 0) + delta_bytes
    found = []
    for segment in done.segments_after(len(done.events) - 1):
        blocks: list[dict[str, Any]] = []
        address = segment.address
        for size_bytes, user in segment.blocks:
            block: dict[str, Any] = {"address": address, "size": size_bytes, "requested_size": 0, "frames": []}
            block["state"] = "inactive" if user is None else "active_allocated"
            if user is not None:
                block |= {"requested_size": requested[user], "frames": frames_at[address]}
            blocks.append(block)
            address += size_bytes
        in_use_bytes = segment.size_bytes - segment.free_bytes
        found.append(
            {
                "device": 0,
                "address": segment.address,
                "total_size": segment.size_bytes,
                "allocated_size": in_use_bytes,
                "active_size": in_use_bytes,
                "requested_size": sum(block["requested_size"] for block in blocks),
                "stream": 0,
                "segment_type": "small" if segment.is_small else "large",
                "is_expandable": done.expandable_segments,
                "frames": [],
                "blocks": blocks,
            }
        )
    return found


def write_snapshot(
    path: str | os.PathLike[str],
    events: Iterable[Event],
    labels: Iterable[Label] | None = None,
    *,
    limit_bytes: int | None = None,
    expandable_segments: bool = False,
) -> Path:
    """Write the snapshot: `.pickle` for pytorch.org/memory_viz, `.html` as a page of its own.

    The page is what `torch.cuda._memory_viz.trace_plot` makes of it; it fetches the viewer from the network. A file
    that exists is replaced, at once and whole.

    Returns:
        The path.

    Raises:
        LabError: if the suffix is another one, if the file cannot be written, or as `snapshot`.
    """
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise LabError(
            say(
                en=f"a snapshot is written to a file named .pickle or .html, but {str(target)!r} was received.",
                fr=f"un instantané s’écrit dans un fichier .pickle ou .html, mais {str(target)!r} a été reçu.",
            )
        )
    taken = snapshot(events, labels, limit_bytes=limit_bytes, expandable_segments=expandable_segments)
    if target.suffix == ".html":
        from torch.cuda._memory_viz import trace_plot

        content: bytes = trace_plot(taken).encode()
    else:
        content = pickled(taken)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        reason = error.strerror or str(error)
        raise LabError(
            say(
                en=f"the snapshot cannot be written to {str(target)!r} ({reason}): choose a folder that exists and "
                "that you may write to.",
                fr=f"impossible d’écrire l’instantané dans {str(target)!r} ({reason}) : choisissez un dossier qui "
                "existe et où vous pouvez écrire.",
            )
        ) from None
    return target


def pickled(value: Any) -> bytes:
    """Plain data (dictionaries, lists, strings, integers, floats, booleans, None) as a pickle, protocol 2.

    Strings, lists and dictionaries that occur again are written once and referred to.

    Raises:
        TypeError: for data of another type.
    """
    writer = _Pickler()
    writer.put(value)
    return b"\x80\x02" + b"".join(writer.pieces) + b"."


class _Pickler:
    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.known: dict[str | int, int] = {}

    def put(self, value: Any) -> None:
        key = value if isinstance(value, str) else id(value)
        if isinstance(value, str | list | dict) and key in self.known:
            number = self.known[key]
            self.pieces.append(struct.pack("<cB", b"h", number) if number < 256 else struct.pack("<cI", b"j", number))
        elif isinstance(value, bool) or value is None:
            self.pieces.append({True: b"\x88", False: b"\x89", None: b"N"}[value])
        elif isinstance(value, int):
            self._integer(value)
        elif isinstance(value, float):
            self.pieces.append(struct.pack(">cd", b"G", value))
        elif isinstance(value, str):
            text = value.encode()
            self.pieces.append(struct.pack("<cI", b"X", len(text)) + text)
            self._remember(key)
        elif isinstance(value, list):
            self.pieces.append(b"]")
            self._remember(key)
            for start in range(0, len(value), _BATCH):
                self.pieces.append(b"(")
                for item in value[start : start + _BATCH]:
                    self.put(item)
                self.pieces.append(b"e")
        elif isinstance(value, dict):
            self.pieces.append(b"}")
            self._remember(key)
            self.pieces.append(b"(")
            for name, item in value.items():
                self.put(name)
                self.put(item)
            self.pieces.append(b"u")
        else:
            raise TypeError(f"a snapshot holds plain data, but {type(value).__name__} was received")

    def _integer(self, value: int) -> None:
        if -(2**31) <= value < 2**31:
            self.pieces.append(struct.pack("<ci", b"J", value))
        else:
            size = value.bit_length() // 8 + 1
            self.pieces.append(struct.pack("<cB", b"\x8a", size) + value.to_bytes(size, "little", signed=True))

    def _remember(self, key: str | int) -> None:
        number = len(self.known)
        self.known[key] = number
        self.pieces.append(struct.pack("<cB", b"q", number) if number < 256 else struct.pack("<cI", b"r", number))
