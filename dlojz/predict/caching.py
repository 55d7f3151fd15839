"""A model of torch's CUDA caching allocator: segments, blocks, best fit, splitting, joining.

Layer 3. Invariant: blocks never overlap and fill their segments, and reserved ≥ allocated ≥ requested at every moment;
with the same requests in the same order on one stream, the sums are those of `torch.cuda.memory_reserved` and
`memory_allocated`.

The allocator cuts *segments* from the device (`cudaMalloc`), splits them into *blocks*, and keeps what is freed for
later. So memory is lost to rounding, and to free blocks too small for what is asked next: fragmentation. Modelled are
one device, one stream and the default settings. Not modelled: blocks that wait for a second stream (`record_stream`),
private pools of CUDA graphs, `max_split_size_mb`, `roundup_power2_divisions`, `garbage_collection_threshold`.

Source: torch, `c10/cuda/CUDACachingAllocator.cpp` (`malloc`, `get_free_block`, `alloc_found_block`, `free_block`,
`try_merge_blocks`, `release_cached_blocks`) and, in 2.13, `c10/core/AllocatorConfig.h` for the sizes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Final

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


class Block:
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
        self.previous: Block | None = None
        self.next: Block | None = None

    def insert_after(self, block: Block) -> None:
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
        self.blocks: dict[int, Block] = {}
        """The free blocks by address."""
        self.segments: dict[int, Block] = {}
        """The first block of each segment by address."""
        self.unmapped: dict[int, Block] = {}
        """Blocks of an expandable segment that have no memory behind them, by address."""

    def add(self, block: Block) -> None:
        """Put a block among the free ones."""
        insort(self.free, (block.size_bytes, block.address))
        self.blocks[block.address] = block

    def take(self, block: Block) -> None:
        """Remove a block from the free ones."""
        del self.free[bisect_left(self.free, (block.size_bytes, block.address))]
        del self.blocks[block.address]

    def join_neighbours(self, block: Block) -> None:
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

    def _remove(self, block: Block) -> None:
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

    def malloc(self, size_bytes: int) -> Block:
        """A block for so many bytes, at least 1: the smallest free one that is large enough, else from the device.

        Raises:
            OutOfDeviceMemoryError: if a limit is reached.
        """
        wanted_bytes = -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        pool = self.small if wanted_bytes <= SMALL_BYTES else self.large
        block = self._cached(pool, wanted_bytes) or self._new(pool, wanted_bytes)
        rest_bytes = block.size_bytes - wanted_bytes
        if rest_bytes and self._splits(pool, rest_bytes):
            remainder = Block(block.address + wanted_bytes, rest_bytes, pool)
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

    def free(self, block: Block) -> None:
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

    def segments(self) -> list[list[Block]]:
        """The blocks of each segment, both by address; addresses without memory behind them belong to none."""
        found: list[list[Block]] = []
        for pool in (self.small, self.large):
            for first in pool.segments.values():
                blocks: list[Block] = []
                block: Block | None = first
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

    def _cached(self, pool: Pool, wanted_bytes: int) -> Block | None:
        """Best fit: the smallest free block that is large enough, and the lowest address among equals."""
        at = bisect_left(pool.free, (wanted_bytes, 0))
        if at == len(pool.free):
            return None
        return pool.blocks.pop(pool.free.pop(at)[1])

    def _new(self, pool: Pool, wanted_bytes: int) -> Block:
        """A block from the device; where the limit is reached, once more after cached segments were released."""
        block = self._cut(pool, wanted_bytes)
        if block is None:
            self.release_cached()
            self.retries += 1
            block = self._cut(pool, wanted_bytes)
        if block is None:
            raise OutOfDeviceMemoryError(wanted_bytes)
        return block

    def _cut(self, pool: Pool, wanted_bytes: int) -> Block | None:
        size_bytes = segment_bytes(wanted_bytes)
        if not self._fits(size_bytes):
            return None
        block = Block(self._next_address, size_bytes, pool)
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
