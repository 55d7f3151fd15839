"""Simulate PyTorch's CUDA caching allocator, and export a predicted step as a memory snapshot.

The allocator cuts *segments* from the device (`cudaMalloc`), splits them into *blocks* and keeps what is freed: memory
is lost to rounding, and to free blocks too small for the next request (fragmentation). Modelled are one device, the
default settings (segments, blocks, best fit, splitting, joining), the pools of each stream, and, without a limit,
expandable segments. Not modelled: blocks that wait for a second stream (`record_stream`), private pools of CUDA graphs,
`max_split_size_mb`, `roundup_power2_divisions`, `garbage_collection_threshold`. With the same requests in the same
order, the sums are those of `torch.cuda.memory_reserved` and `memory_allocated`; the CUDA context, NCCL and cuBLAS
handles are not in them. Neither a GPU nor torch is needed.

Replay the events of a whole step twice, as a second step finds what the first has left cached.

Source: torch, `c10/cuda/CUDACachingAllocator.cpp` (`malloc`, `get_free_block`, `alloc_found_block`, `free_block`,
`should_split`, `try_merge_blocks`, `release_cached_blocks`, `try_allocate_expandable_block`, `map_block`) and, in 2.13,
`c10/core/AllocatorConfig.h` for the sizes. A snapshot has
the format of `torch.cuda.memory._snapshot()`: `segments` at the end, and `device_traces` with every action.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dlojz.base.language import Sentences

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

MIN_BLOCK_BYTES: Final = 512
"""Every request is rounded up to a multiple of this (`kMinBlockSize`)."""
SMALL_BYTES: Final = 2**20
"""Up to this, a request is served from the pool of small blocks (`kSmallSize`)."""
SMALL_SEGMENT_BYTES: Final = 2 * 2**20
"""A segment of the small pool (`kSmallBuffer`)."""
LARGE_SEGMENT_BYTES: Final = 20 * 2**20
"""A segment of the large pool, for requests below `OWN_SEGMENT_BYTES` (`large_segment_size`)."""
OWN_SEGMENT_BYTES: Final = 10 * 2**20
"""From this on, a request gets its own segment (`kMinLargeAlloc`) …"""
SEGMENT_ROUNDING_BYTES: Final = 2 * 2**20
"""… rounded up to a multiple of this (`kRoundLarge`)."""
EXPANDABLE_BYTES: Final = 2**40
"""Addresses kept free for an expandable segment."""
FIRST_ADDRESS: Final = 0x7F0000000000
"""Addresses tell blocks apart, and which of two equal ones comes first."""

Listener = Callable[[str, int, int, int], None]
"""Receives each action as torch's trace names it (`alloc`, `free`, `segment_alloc`, …), the number of its event, the
address and the bytes."""


def segment_bytes(block_bytes: int) -> int:
    """Size the segment that is cut from the device when no cached block can serve a (rounded) request, in bytes."""
    if block_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES


class OutOfDeviceMemoryError(Exception):
    """Out of memory: so many more bytes do not fit, even after the release of all cached segments."""

    def __init__(self, wanted_bytes: int) -> None:
        super().__init__(f"{wanted_bytes} bytes more do not fit")
        self.wanted_bytes = wanted_bytes


class CachedBlock:
    """Piece of a segment, in use or free, between its neighbours in the same segment."""

    __slots__ = ("address", "in_use", "next", "pool", "previous", "requested_bytes", "size_bytes", "storage")

    def __init__(self, address: int, size_bytes: int, pool: Pool) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pool = pool
        self.requested_bytes = 0
        self.in_use = False
        self.storage: int | None = None
        """Number of the storage that uses it, in a replay."""
        self.previous: CachedBlock | None = None
        self.next: CachedBlock | None = None


class Pool:
    """Pool of a stream's small blocks, or of its large ones."""

    __slots__ = ("blocks", "free", "is_small", "segments", "stream", "tail")

    def __init__(self, *, is_small: bool, stream: int = 0) -> None:
        self.is_small, self.stream = is_small, stream
        self.tail: CachedBlock | None = None
        """The last block of an expandable segment: the one that can grow."""
        self.free: list[tuple[int, int]] = []
        """Size and address of the free blocks, sorted: the first that is large enough is the best fit."""
        self.blocks: dict[int, CachedBlock] = {}
        """The free blocks by address."""
        self.segments: dict[int, CachedBlock] = {}
        """The first block of each segment by address."""

    def add(self, block: CachedBlock) -> None:
        """Add a block to the free ones."""
        insort(self.free, (block.size_bytes, block.address))
        self.blocks[block.address] = block

    def take(self, block: CachedBlock) -> None:
        """Remove a block from the free ones."""
        del self.free[bisect_left(self.free, (block.size_bytes, block.address))]  # addresses are unique: this block
        del self.blocks[block.address]

    def join_neighbours(self, block: CachedBlock) -> None:
        """Merge the free neighbours of a block, which is not among the free ones, into it."""
        before, after = block.previous, block.next
        if before is not None and not before.in_use:
            self.take(before)
            # The object before it is dropped, so this one takes its address.
            block.address, block.previous = before.address, before.previous
            block.size_bytes += before.size_bytes
            if block.previous is None:
                # Under this address stood the object that is dropped.
                self.segments[block.address] = block
            else:
                block.previous.next = block
        if after is not None and not after.in_use:
            self.take(after)
            block.next = after.next
            block.size_bytes += after.size_bytes
            if block.next is not None:
                block.next.previous = block
        if block.next is None:
            self.tail = block


class CachingAllocator:
    """Caching allocator: `malloc`, `free`, and the sums they lead to.

    Args:
        limit_bytes: most bytes of all segments together; None is no limit.
        expandable: whether a pool has one segment, which grows at its end (`expandable_segments:True`), so that free
            memory there is never too small for a request. It has no limit.
    """

    def __init__(
        self, *, limit_bytes: int | None = None, listener: Listener | None = None, expandable: bool = False
    ) -> None:
        self.limit_bytes = limit_bytes
        self.listener = listener
        self.expandable = expandable
        self.event = 0
        """Number of the current event, for the listener."""
        self.allocated_bytes = self.reserved_bytes = self.requested_bytes = 0
        self.device_allocations = self.retries = 0
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._next_address = FIRST_ADDRESS

    def malloc(self, size_bytes: int, stream: int = 0) -> CachedBlock:
        """Allocate at least 1 byte: the smallest free block that is large enough, else one from the device.

        Args:
            size_bytes: asked for.
            stream: in whose pools it is found, and to which it returns.

        Raises:
            OutOfDeviceMemoryError: if a limit is reached.
        """
        wanted_bytes = -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        is_small = wanted_bytes <= SMALL_BYTES
        pool = self._pools.setdefault((stream, is_small), Pool(is_small=is_small, stream=stream))
        new = self._grown if self.expandable else self._new
        block = self._cached(pool, wanted_bytes) or new(pool, wanted_bytes)
        # Blocks and requests are multiples of 512 bytes, so a rest is at least one smallest block.
        rest_bytes = block.size_bytes - wanted_bytes
        # A smaller rest is not kept apart: it counts as allocated.
        if rest_bytes and (pool.is_small or self.expandable or rest_bytes > SMALL_BYTES):
            remainder = CachedBlock(block.address + wanted_bytes, rest_bytes, pool)
            remainder.previous, remainder.next = block, block.next
            if block.next is not None:
                block.next.previous = remainder
            else:
                pool.tail = remainder
            block.next, block.size_bytes = remainder, wanted_bytes
            pool.add(remainder)
        block.in_use = True
        block.requested_bytes = size_bytes
        self.allocated_bytes += block.size_bytes
        self.requested_bytes += size_bytes
        if self.listener:
            # The bytes requested, as in torch's trace, not those of the block.
            self.listener("alloc", self.event, block.address, size_bytes)
        return block

    def free(self, block: CachedBlock) -> None:
        """Keep a block for later, joined with its free neighbours; nothing returns to the device."""
        block.in_use = False
        self.allocated_bytes -= block.size_bytes
        self.requested_bytes -= block.requested_bytes
        if self.listener:
            self.listener("free", self.event, block.address, block.requested_bytes)
        block.pool.join_neighbours(block)
        block.pool.add(block)

    def release_cached(self) -> None:
        """Return all segments without a block in use to the device (`torch.cuda.empty_cache`)."""
        for pool in self._pools.values():
            # A free block without neighbours is a whole segment. A list, as `take` changes the dictionary.
            for block in [block for block in pool.blocks.values() if block.previous is None and block.next is None]:
                pool.take(block)
                pool.tail = None
                del pool.segments[block.address]
                self._has_reserved("segment_free", block.address, -block.size_bytes)

    def segments(self) -> list[list[CachedBlock]]:
        """List the blocks of each segment, both by address."""
        segment_blocks: list[list[CachedBlock]] = []
        for pool in self._pools.values():
            for block in pool.segments.values():
                segment_blocks.append([block])
                while (following := segment_blocks[-1][-1].next) is not None:
                    segment_blocks[-1].append(following)
        return sorted(segment_blocks, key=lambda blocks: blocks[0].address)

    def _cached(self, pool: Pool, wanted_bytes: int) -> CachedBlock | None:
        """Best fit: the smallest free block that is large enough, and the lowest address among equals."""
        # No address is below 0: the first free block of this size, or of the next larger one.
        index = bisect_left(pool.free, (wanted_bytes, 0))
        if index == len(pool.free):
            return None
        # A block that can grow counts as large as it may become: any other that is large enough fits better.
        grows = self.expandable and pool.tail is pool.blocks[pool.free[index][1]]
        index += grows and index + 1 < len(pool.free)
        return pool.blocks.pop(pool.free.pop(index)[1])

    def _grown(self, pool: Pool, wanted_bytes: int) -> CachedBlock:
        """Return the free end of a pool's expandable segment, or a block after it, mapping what it lacks."""
        tail = pool.tail
        is_free = tail is not None and not tail.in_use
        lacking_bytes = wanted_bytes - (tail.size_bytes if tail is not None and is_free else 0)
        # Memory is mapped in pages of 2 MiB for small blocks, of 20 MiB for large ones.
        page_bytes = SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES
        more_bytes = -(-lacking_bytes // page_bytes) * page_bytes
        if tail is not None and is_free:
            pool.take(tail)
            tail.size_bytes += more_bytes
            block = tail
        else:
            # So many addresses are kept for each expandable segment that none ever meets the next one.
            address = self._next_address if tail is None else tail.address + tail.size_bytes
            block = CachedBlock(address, more_bytes, pool)
            block.previous = tail
            if tail is None:
                pool.segments[address] = block
                self._next_address += EXPANDABLE_BYTES
            else:
                tail.next = block
        pool.tail = block
        self._has_reserved("segment_map", block.address, more_bytes)
        return block

    def _new(self, pool: Pool, wanted_bytes: int) -> CachedBlock:
        """A block from the device; where the limit is reached, after the release of cached segments."""
        size_bytes = segment_bytes(wanted_bytes)
        if not self._fits(size_bytes):
            # `cudaMalloc` would fail here: torch empties its cache and tries once more.
            self.release_cached()
            self.retries += 1
            if not self._fits(size_bytes):
                raise OutOfDeviceMemoryError(wanted_bytes)
        block = CachedBlock(self._next_address, size_bytes, pool)
        self._next_address += size_bytes
        pool.segments[block.address] = block
        self._has_reserved("segment_alloc", block.address, size_bytes)
        return block

    def _fits(self, more_bytes: int) -> bool:
        return self.limit_bytes is None or self.reserved_bytes + more_bytes <= self.limit_bytes

    def _has_reserved(self, action: str, address: int, more_bytes: int) -> None:
        self.reserved_bytes += more_bytes
        self.device_allocations += more_bytes > 0  # segments cut or pages mapped; a release does not count
        if self.listener:
            self.listener(action, self.event, address, abs(more_bytes))


Event = tuple[int, int]
"""Number of a storage, and the bytes by which it grows (or shrinks, where negative)."""


@dataclass(frozen=True)
class Replay:
    """Result of a replay of allocations and releases.

    Attributes:
        requested_peak_bytes: largest sum of requests.
        allocated_peak_bytes: the same rounded to blocks, as the allocator counts it (`max_memory_allocated`).
        reserved_peak_bytes: largest sum of all segments (`max_memory_reserved`).
        out_of_memory_event: number of the event that found no room even after the release of cached segments, where
            the replay ends; None if none did.
    """

    requested_peak_bytes: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    out_of_memory_event: int | None


def replay(
    events: Iterable[Event], allocator: CachingAllocator | None = None, streams: Mapping[int, int] | None = None
) -> Replay:
    """Replay allocations and releases through the allocator; costs about 3 µs per event.

    A storage that grows or shrinks while it exists is allocated anew before the former block is freed, as torch's
    `resize_` does.

    Args:
        allocator: a fresh one, e.g. with a limit; left as it is after the last event.
        streams: of the storages that another stream than the first (0) has allocated.

    Raises:
        LabError: if a storage shrinks by more than it holds.
    """
    allocator = allocator or CachingAllocator()
    streams = streams or {}
    blocks: dict[int, CachedBlock] = {}
    requested = allocated = reserved = 0
    for number, (storage, delta_bytes) in enumerate(events):
        allocator.event = number
        previous_block = blocks.get(storage)
        size_bytes = delta_bytes if previous_block is None else previous_block.requested_bytes + delta_bytes
        if size_bytes < 0:
            had_bytes = size_bytes - delta_bytes
            raise phrase.refused(
                "storage freed beyond its bytes",
                number=number,
                freed_bytes=-delta_bytes,
                storage=storage,
                had_bytes=had_bytes,
            )
        if size_bytes:
            try:
                blocks[storage] = allocator.malloc(size_bytes, streams.get(storage, 0))
            except OutOfDeviceMemoryError:
                return Replay(requested, allocated, reserved, number)
            blocks[storage].storage = storage
            allocated = max(allocated, allocator.allocated_bytes)
            requested = max(requested, allocator.requested_bytes)
            reserved = max(reserved, allocator.reserved_bytes)
        # Shrunk to nothing: no new block takes its place.
        elif previous_block is not None:
            del blocks[storage]
        if previous_block is not None:
            allocator.free(previous_block)
    return Replay(requested, allocated, reserved, None)


Label = tuple[str, str]
"""Block (or module, or category) and phase of an event."""


def snapshot(
    events: Iterable[Event],
    labels: Iterable[Label] | None = None,
    *,
    limit_bytes: int | None = None,
    streams: Mapping[int, int] | None = None,
) -> dict[str, Any]:
    """Build the snapshot of allocations and releases, in the format of `torch.cuda.memory._snapshot()`.

    Times are the numbers of the events, as a prediction has no clock.

    Args:
        events: storage and the bytes by which it grows or shrinks, in their order.
        labels: block and phase of each event; the viewer shows them as stack of an allocation.
        limit_bytes: of the allocator. Where memory runs out, the trace ends with `oom`.
        streams: as in `replay`.

    Raises:
        LabError: if there are not as many labels as events, or if a storage shrinks by more than it holds.
    """
    events = list(events)
    event_labels = [("", "")] * len(events) if labels is None else list(labels)
    if len(event_labels) != len(events):
        raise phrase.refused("other number of labels", events=len(events), event_labels=len(event_labels))
    # One list for all events with the same label: a step has many events and few labels.
    frames = {label: [{"filename": label[0], "line": 0, "name": label[1]}] for label in dict.fromkeys(event_labels)}
    streams = streams or {}
    trace: list[dict[str, Any]] = []
    frames_at: dict[int, list[dict[str, Any]]] = {}

    def note(action: str, event: int, address: int, size_bytes: int) -> None:
        of_event = frames[event_labels[event]]
        if action == "alloc":
            # The viewer shows, for a block in use, the stack of its allocation.
            frames_at[address] = of_event
        # torch's trace has two entries of a release: requested, and completed once no stream uses the block.
        for name in ("free_requested", "free_completed") if action == "free" else (action,):
            trace.append(_entry(name, event, address, size_bytes, of_event, streams.get(events[event][0], 0)))

    allocator = CachingAllocator(limit_bytes=limit_bytes, listener=note)
    failed = replay(events, allocator, streams).out_of_memory_event
    if failed is not None:
        entry = _entry(
            "oom", failed, 0, events[failed][1], frames[event_labels[failed]], streams.get(events[failed][0], 0)
        )
        trace.append({**entry, "device_free": (limit_bytes or 0) - allocator.reserved_bytes})
    return {
        "segments": [_segment(blocks, frames_at) for blocks in allocator.segments()],
        "device_traces": [trace],
        "allocator_settings": {"expandable_segments": False},
        "external_annotations": [],
    }


def _entry(
    action: str, event: int, address: int, size_bytes: int, frames: list[dict[str, Any]], stream: int
) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size_bytes, "stream": stream, "time_us": event, "frames": frames}


def _segment(blocks: Sequence[CachedBlock], frames_at: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    used_blocks = [block for block in blocks if block.in_use]
    in_use_bytes = sum(block.size_bytes for block in used_blocks)
    return {
        "device": 0,
        "address": blocks[0].address,
        "total_size": sum(block.size_bytes for block in blocks),
        "allocated_size": in_use_bytes,
        "active_size": in_use_bytes,
        "requested_size": sum(block.requested_bytes for block in used_blocks),
        "stream": blocks[0].pool.stream,
        "segment_type": "small" if blocks[0].pool.is_small else "large",
        "is_expandable": False,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size_bytes,
                "requested_size": block.requested_bytes if block.in_use else 0,
                "state": "active_allocated" if block.in_use else "inactive",
                "frames": frames_at[block.address] if block.in_use else [],
            }
            for block in blocks
        ],
    }


def write_snapshot(
    path: str | os.PathLike[str],
    events: Iterable[Event],
    labels: Iterable[Label] | None = None,
    *,
    limit_bytes: int | None = None,
    streams: Mapping[int, int] | None = None,
) -> Path:
    """Write the snapshot as an HTML page with torch's viewer, which the page fetches from the network.

    An existing file is replaced atomically.

    Raises:
        LabError: if the suffix is not `.html`, if the file cannot be written, or as `snapshot`.
    """
    target = Path(path)
    if target.suffix != ".html":
        raise phrase.refused("no html file", target=str(target))
    memory_snapshot = snapshot(events, labels, limit_bytes=limit_bytes, streams=streams)
    # Loads torch, which the rest of this module does without.
    from torch.cuda._memory_viz import trace_plot

    # In the same folder, as a rename is atomic within one file system only.
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(trace_plot(memory_snapshot).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        reason = error.strerror or str(error)
        raise phrase.refused("snapshot cannot be written", target=str(target), reason=reason) from None
    return target
