"""What a GPU's allocator reserves for a sequence of allocations and releases: allocated, reserved, fragmentation.

Layer 3. Invariant: a replay is exact for the model in `dlojz.predict.caching`; it needs no GPU and no torch.

Replay the events of a whole step twice, as a second step finds what the first has left cached; peaks are those of all
events. What lies outside the allocator (the CUDA context, NCCL, cuBLAS handles) is not in these figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from dlojz.predict.caching import Block, CachingAllocator, Listener, OutOfDeviceMemoryError
from dlojz.predict.expandable import ExpandableAllocator
from dlojz.schema import LabError
from dlojz.text import say

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
        held: dict[int, Block] = {}
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
    allocator: CachingAllocator, events: Sequence[Event], held: dict[int, Block]
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
