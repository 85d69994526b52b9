"""A model of torch's CUDA caching allocator, to replay a job's allocations without a GPU.

Source: c10/cuda/CUDACachingAllocator.cpp of about torch 2.10, constants from the headers of 2.13.
Left out: events of blocks that several streams use, CUDA graphs' private pools, and the settings of
`PYTORCH_ALLOC_CONF` that tightfit never sets: `max_split_size_mb`, `garbage_collection_threshold`,
`roundup_power2_divisions`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.core.units import MIB

ADDRESS_BITS = 60
"""A free block's key is its size, shifted, plus its address: keys sort by size, then address."""
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1
MIN_BLOCK_BYTES = 512
"""Sizes are rounded up to it, and no block is smaller.
Source of this and the next four: torch 2.13, c10/core/AllocatorConfig.h."""
SMALL_BYTES = MIB
"""The largest allocation of the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_OWN_SEGMENT_BYTES = 10 * MIB
"""From here on a request gets a segment of its own size, in steps of `SMALL_SEGMENT_BYTES`."""
ADDRESS_SPACE_BYTES = LARGE_SEGMENT_BYTES << 23
"""Address space of an expandable segment: 160 TiB, more than is ever mapped."""


def round_block(num_bytes: int) -> int:
    """Bytes of the block that torch's allocator hands out; nothing for nothing.

    Source: torch c10/cuda/CUDACachingAllocator.cpp, `round_size`, kMinBlockSize.
    """
    return -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def find_peak(sizes: Sequence[int], events: Sequence[int]) -> tuple[int, int]:
    """The largest sum of live bytes, and the position in `events` at which it is reached."""
    live = peak = at = 0
    for position, event in enumerate(events):
        live += sizes[event - 1] if event > 0 else -sizes[-event - 1]
        if live > peak:
            peak, at = live, position
    return peak, at


class BlockPool:
    """Free and unmapped blocks of one pool and stream, kept by address, as plain integers.

    Blocks in use are held by their owner, which hands start and size back to `free`.
    Segments are laid out upwards with a gap between them, so that touching blocks
    always belong to one segment. `cudaMalloc` may order its segments otherwise; that
    matters only between free blocks of equal size.
    """

    __slots__ = (
        "_next_base",
        "is_small",
        "keys",
        "page_bytes",
        "segments",
        "size_at",
        "start_at_end",
        "unmapped",
        "unmapped_at_end",
        "unmapped_size_at",
    )

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.page_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        self.keys: list[int] = []
        self.size_at: dict[int, int] = {}
        self.start_at_end: dict[int, int] = {}
        self.segments: dict[int, int] = {}
        self.unmapped: list[int] = []
        self.unmapped_size_at: dict[int, int] = {}
        self.unmapped_at_end: dict[int, int] = {}
        self._next_base = 0

    def add_segment(self, num_bytes: int) -> int:
        """Add a segment and return its start. The caller decides whether it is free or in use."""
        start = self._next_base if self.segments else 0
        self.segments[start] = num_bytes
        self._next_base = start + -(-num_bytes // self.page_bytes) * self.page_bytes
        self._next_base += self.page_bytes
        return start

    def find(self, num_bytes: int) -> int:
        """Index in `keys` of the best fit, or `len(keys)`.

        A block at the edge of unmapped space counts as large as it could grow, so a
        larger block elsewhere may be the better fit.
        """
        keys = self.keys
        index = bisect_left(keys, num_bytes << ADDRESS_BITS)
        last = len(keys) - 1
        if index >= last:
            return index
        reach = self._reach(keys[index])
        while reach != keys[index] >> ADDRESS_BITS and index < last:
            following = self._reach(keys[index + 1])
            if following >= reach:
                break
            index, reach = index + 1, following
        return index

    def _reach(self, key: int) -> int:
        size = key >> ADDRESS_BITS
        return size + self.unmapped_size_at.get((key & ADDRESS_MASK) + size, 0)

    def take(self, index: int) -> tuple[int, int]:
        """Remove a free block; returns its start and size."""
        key = self.keys.pop(index)
        size, start = key >> ADDRESS_BITS, key & ADDRESS_MASK
        del self.size_at[start], self.start_at_end[start + size]
        return start, size

    def insert(self, start: int, size: int) -> None:
        """Add a free block that touches no other free block."""
        insort(self.keys, size << ADDRESS_BITS | start)
        self.size_at[start] = size
        self.start_at_end[start + size] = start

    def remove(self, start: int, size: int) -> None:
        del self.keys[bisect_left(self.keys, size << ADDRESS_BITS | start)]
        del self.size_at[start], self.start_at_end[start + size]

    def free(self, start: int, size: int) -> None:
        """Free a block, merged with free neighbours on both sides."""
        end = start + size
        before = self.start_at_end.get(start)
        if before is not None:
            self.remove(before, start - before)
            start = before
        after = self.size_at.get(end)
        if after is not None:
            self.remove(end, after)
            end += after
        self.insert(start, end - start)

    def release_whole_segments(self) -> int:
        """Release every segment that is one free block; returns the number of bytes released."""
        whole = [start for start, size in self.segments.items() if self.size_at.get(start) == size]
        for start in whole:
            self.remove(start, self.segments[start])
        return sum(self.segments.pop(start) for start in whole)

    def add_unmapped(self, start: int, size: int) -> None:
        """Add unmapped address space, merged with its neighbours; a whole segment is removed."""
        end = start + size
        before = self.unmapped_at_end.get(start)
        if before is not None:
            self._remove_unmapped(before)
            start = before
        after = self.unmapped_size_at.get(end)
        if after is not None:
            self._remove_unmapped(end)
            end += after
        if self.segments.get(start) == end - start:
            del self.segments[start]
            return
        self._insert_unmapped(start, end - start)

    def _insert_unmapped(self, start: int, size: int) -> None:
        insort(self.unmapped, start)
        self.unmapped_size_at[start] = size
        self.unmapped_at_end[start + size] = start

    def _remove_unmapped(self, start: int) -> int:
        size = self.unmapped_size_at.pop(start)
        del self.unmapped[bisect_left(self.unmapped, start)], self.unmapped_at_end[start + size]
        return size

    def find_room(self, num_bytes: int) -> int:
        """Lowest start of consecutive free and unmapped blocks with room for `num_bytes`.

        Adds a segment where there is none.
        """
        for start in self.unmapped:
            first = self.start_at_end.get(start, start)
            end = first
            while end - first < num_bytes:
                size = self.size_at.get(end) or self.unmapped_size_at.get(end)
                if size is None:
                    break
                end += size
            if end - first >= num_bytes:
                return first
        base = self.add_segment(ADDRESS_SPACE_BYTES)
        self._insert_unmapped(base, ADDRESS_SPACE_BYTES)
        return base

    def pages_to_map(self, start: int, num_bytes: int) -> int:
        """Bytes of the whole pages for `num_bytes` at the start of an unmapped block."""
        wanted = min(num_bytes, self.unmapped_size_at[start])
        return -(-wanted // self.page_bytes) * self.page_bytes

    def map_pages(self, start: int, num_bytes: int) -> None:
        """Map the start of an unmapped block to memory, which becomes a free block."""
        size = self._remove_unmapped(start)
        if size > num_bytes:
            self._insert_unmapped(start + num_bytes, size - num_bytes)
        self.free(start, num_bytes)

    def unmap_free_pages(self) -> int:
        """Unmap all pages without a block in use; returns the number of bytes."""
        page = self.page_bytes
        num_bytes = 0
        for key in list(self.keys):
            size, start = key >> ADDRESS_BITS, key & ADDRESS_MASK
            first, last = -(-start // page) * page, (start + size) // page * page
            if first >= last:
                continue
            self.remove(start, size)
            if first > start:
                self.insert(start, first - start)
            if last < start + size:
                self.insert(last, start + size - last)
            self.add_unmapped(first, last - first)
            num_bytes += last - first
        return num_bytes


NUM_CHECKED_CAPACITIES = 4
"""Tried above the smallest that survives, since survival is not monotonic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Settings of `PYTORCH_ALLOC_CONF` that tightfit uses."""

    expandable_segments: bool = True
    """`tightfit train` sets it; torch's default is False."""


class CapacityExceeded(Exception):  # noqa: N818  an outcome of the model, not an error
    """A request does not fit, even with all cached blocks released."""


class CachingAllocator:
    """Allocations by keys of the caller's choice, counted as torch's statistics count them.

    `allocated_bytes` are whole blocks: rounded to 512 bytes, and with the rest of a block that
    was too small to split off. `reserved_bytes` are segments, or mapped pages.
    """

    __slots__ = (
        "_live",
        "_pools",
        "_settings",
        "allocated_bytes",
        "capacity_bytes",
        "num_retries",
        "peak_allocated_bytes",
        "peak_demand_bytes",
        "peak_reserved_bytes",
        "reserved_bytes",
    )

    def __init__(self, settings: AllocatorSettings, *, capacity_bytes: int | None = None) -> None:
        self._settings = settings
        self._pools: dict[int, tuple[BlockPool, BlockPool]] = {}
        self._live: dict[int, tuple[BlockPool, int, int]] = {}
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.peak_demand_bytes = 0
        """Largest demand that was compared with the capacity: a larger capacity has no effect."""
        self.num_retries = 0
        """How often all cached blocks were released to make room: torch's `num_alloc_retries`."""

    def allocate(self, key: int, num_bytes: int, *, stream: int = 0) -> None:
        """Allocate a block for `key`; `CapacityExceeded` if releasing the cache does not help."""
        if num_bytes <= 0:
            return  # torch hands out no block for an empty tensor
        size = -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES  # inline: called by the million
        pools = self._pools.get(stream) or self._add_stream(stream)
        pool = pools[size > SMALL_BYTES]
        index = pool.find(size)
        if index < len(pool.keys):
            start, whole = pool.take(index)
        else:
            start, whole = self._grow(pool, size)
        if whole != size and self._is_split(pool, whole - size):
            pool.insert(start + size, whole - size)
            whole = size
        self._live[key] = (pool, start, whole)
        self.allocated_bytes += whole
        if self.allocated_bytes > self.peak_allocated_bytes:  # noqa: PLR1730  max() is slower
            self.peak_allocated_bytes = self.allocated_bytes

    def free(self, key: int) -> None:
        block = self._live.pop(key, None)
        if block is not None:
            pool, start, size = block
            self.allocated_bytes -= size
            pool.free(start, size)

    def release_cached(self) -> None:
        """Release cached memory: torch's `empty_cache`."""
        for small, large in self._pools.values():
            for pool in (large, small):
                if self._settings.expandable_segments:
                    self.reserved_bytes -= pool.unmap_free_pages()
                else:
                    self.reserved_bytes -= pool.release_whole_segments()

    def _add_stream(self, stream: int) -> tuple[BlockPool, BlockPool]:
        pools = (BlockPool(is_small=True), BlockPool(is_small=False))
        self._pools[stream] = pools
        return pools

    def _is_split(self, pool: BlockPool, rest: int) -> bool:
        if self._settings.expandable_segments or pool.is_small:
            return True
        return rest > SMALL_BYTES

    def _grow(self, pool: BlockPool, size: int) -> tuple[int, int]:
        """A block of new memory; cached memory is released where the capacity requires it."""
        block = self._reserve(pool, size)
        if block is None:
            self.release_cached()
            self.num_retries += 1
            block = self._reserve(pool, size)
        if block is None:
            raise CapacityExceeded
        return block

    def _reserve(self, pool: BlockPool, size: int) -> tuple[int, int] | None:
        """A new segment, or the end of an expandable one; None where the capacity forbids it."""
        # torch compares the limit with the reserve plus a whole new segment. With expandable
        # segments less may be mapped (a free block grows), or more (pages of 20 MiB).
        num_bytes = segment_bytes(size)
        if self._is_refused(num_bytes):
            return None
        if self._settings.expandable_segments:
            return self._expand(pool, size)
        self._count_reserved(num_bytes)
        return pool.add_segment(num_bytes), num_bytes

    def _expand(self, pool: BlockPool, size: int) -> tuple[int, int]:
        start = pool.find_room(size)
        free = pool.size_at.get(start, 0)
        while free < size:
            pages = pool.pages_to_map(start + free, size - free)
            pool.map_pages(start + free, pages)
            self._count_reserved(pages)
            free = pool.size_at[start]
        pool.remove(start, free)
        return start, free

    def _is_refused(self, num_bytes: int) -> bool:
        demand = self.reserved_bytes + num_bytes
        if self.capacity_bytes is not None and demand > self.capacity_bytes:
            return True
        self.peak_demand_bytes = max(self.peak_demand_bytes, demand)
        return False

    def _count_reserved(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)


def segment_bytes(size: int) -> int:
    """Bytes that torch requests from the driver when no cached block has `size` bytes."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """torch's memory statistics after a job that did not run out of memory."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_retries: int


def replay(
    sizes: Sequence[int],
    events: Sequence[int],
    settings: AllocatorSettings,
    *,
    capacity_bytes: int | None = None,
    streams: Sequence[int] = (),
) -> Replay | None:
    """Run a recording's events (see `Recording`) through the allocator; None: out of memory.

    `streams[i]` is the CUDA stream of allocation `i`, whose free blocks no other stream uses;
    without it all share one.
    """
    allocator = CachingAllocator(settings, capacity_bytes=capacity_bytes)
    if not _survives(allocator, sizes, events, streams):
        return None
    return Replay(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        num_retries=allocator.num_retries,
    )


def _survives(
    allocator: CachingAllocator,
    sizes: Sequence[int],
    events: Sequence[int],
    streams: Sequence[int],
) -> bool:
    allocate, free = allocator.allocate, allocator.free
    try:
        for event in events:
            if event < 0:
                free(-event)
            elif streams:
                allocate(event, sizes[event - 1], stream=streams[event - 1])
            else:
                allocate(event, sizes[event - 1])
    except CapacityExceeded:
        return False
    return True


def find_smallest_capacity(
    sizes: Sequence[int],
    events: Sequence[int],
    settings: AllocatorSettings,
    *,
    tolerance_bytes: int = SMALL_SEGMENT_BYTES,
    streams: Sequence[int] = (),
) -> int:
    """The least memory that torch's allocator needs for the job, without the CUDA context.

    Bisects between the live bytes and the capacity that is never felt. A job may survive in
    some capacity and fail in a larger one, where it releases its cache at a worse moment; so
    `NUM_CHECKED_CAPACITIES` evenly spaced capacities above the answer are tried too, from the
    top, and where one fails the answer is bisected anew above it. All of them survive in what
    is returned, nothing more is proven. Steps are multiples of the tolerance; all that torch
    reserves is a multiple of 2 MiB, so the default is exact.

    Costs one replay, one per bisection (12 for 8 GiB between the bounds) and the checks; those
    that fail end early.
    """

    def survives(capacity_bytes: int) -> bool:
        allocator = CachingAllocator(settings, capacity_bytes=capacity_bytes)
        return _survives(allocator, sizes, events, streams)

    def bisect(failing: int, surviving: int) -> int:
        while surviving - failing > 1:
            middle = (failing + surviving) // 2
            if survives(middle * tolerance_bytes):
                surviving = middle
            else:
                failing = middle
        return surviving

    free_of_limits = CachingAllocator(settings)
    _survives(free_of_limits, sizes, events, streams)
    top = -(-free_of_limits.peak_demand_bytes // tolerance_bytes)
    # Live bytes cannot survive in less, but for the page by which the reserve may pass a fraction.
    least = estimate_least_bytes(sizes, events) - LARGE_SEGMENT_BYTES
    smallest = bisect(max(0, min(least // tolerance_bytes, top)) - 1, top)
    above = top
    for point in range(NUM_CHECKED_CAPACITIES, 0, -1):
        checked = smallest + (top - smallest) * point // (NUM_CHECKED_CAPACITIES + 1)
        if smallest < checked < above:
            if not survives(checked * tolerance_bytes):
                smallest = bisect(checked, above)
                break
            above = checked
    return smallest * tolerance_bytes


def estimate_least_bytes(sizes: Sequence[int], events: Sequence[int]) -> int:
    """Peak of the live bytes, each allocation rounded to whole blocks: no reserve can be less."""
    return find_peak([round_block(size) for size in sizes], events)[0]
