"""The caching allocator with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`: one segment per pool, which grows.

Layer 3. Invariant: that of `dlojz.predict.caching`; what is reserved is what is mapped.

Memory is mapped behind the addresses of a segment page by page (2 MiB in the small pool, 20 MiB in the large one), so
that a free end of the segment serves whatever is asked next: little is lost to fragmentation.

Source: torch, `c10/cuda/CUDACachingAllocator.cpp` (`find_expandable_block`, `try_allocate_expandable_block`,
`map_block`, `unmap_block`, and the search in `get_free_block`).
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice
from typing import Final

from dlojz.predict.caching import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, Block, CachingAllocator, Pool

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

    def _cached(self, pool: Pool, wanted_bytes: int) -> Block | None:
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

    def _cut(self, pool: Pool, wanted_bytes: int) -> Block | None:
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

    def _room(self, pool: Pool, wanted_bytes: int) -> Block:
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
        fresh = Block(self._next_address, ADDRESS_SPACE_BYTES, pool, mapped=False)
        self._next_address += ADDRESS_SPACE_BYTES
        pool.unmapped[fresh.address] = pool.segments[fresh.address] = fresh
        return fresh

    def _map(self, pool: Pool, block: Block, wanted_bytes: int) -> bool:
        page_bytes = SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES
        mapped_bytes = min(-(-wanted_bytes // page_bytes) * page_bytes, block.size_bytes)
        if not self._fits(mapped_bytes):
            return False
        del pool.unmapped[block.address]
        if mapped_bytes < block.size_bytes:
            rest = Block(block.address + mapped_bytes, block.size_bytes - mapped_bytes, pool, mapped=False)
            block.insert_after(rest)
            pool.unmapped[rest.address] = rest
        block.size_bytes, block.mapped = mapped_bytes, True
        self._has_reserved("segment_map", block.address, mapped_bytes)
        pool.join_neighbours(block)
        pool.add(block)
        return True

    def _unmap(self, pool: Pool, block: Block) -> None:
        page_bytes = SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES
        origin = next(first for first in pool.segments if first <= block.address < first + ADDRESS_SPACE_BYTES)
        start = origin - (origin - block.address) // page_bytes * page_bytes
        end = origin + (block.address + block.size_bytes - origin) // page_bytes * page_bytes
        if end <= start:
            return
        pool.take(block)
        before_bytes, after_bytes = start - block.address, block.address + block.size_bytes - end
        if after_bytes:
            after = Block(end, after_bytes, pool)
            block.insert_after(after)
            pool.add(after)
        block.size_bytes = before_bytes
        unmapped = block
        if before_bytes:
            unmapped = Block(start, end - start, pool, mapped=False)
            block.insert_after(unmapped)
            pool.add(block)
        unmapped.size_bytes, unmapped.mapped = end - start, False
        self._has_reserved("segment_unmap", start, start - end)
        pool.join_neighbours(unmapped)
        pool.unmapped[unmapped.address] = unmapped


def _expandable_bytes(block: Block) -> int:
    following = block.next
    return block.size_bytes + (following.size_bytes if following is not None and not following.mapped else 0)
