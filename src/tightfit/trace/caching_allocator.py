"""A model of torch's CUDA caching allocator, to replay a job's allocations without a GPU.

Source: c10/cuda/CUDACachingAllocator.cpp, in a copy that has `large_segment_size` (about torch
2.10); an older copy differs only where `max_split_size` or garbage collection meets expandable
segments, and in `max_non_split_rounding`. Constants from the headers of 2.13.
Left out: events of blocks that several streams use, CUDA graphs' private pools,
`roundup_power2_divisions`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tightfit.core.errors import InvalidInputError
from tightfit.core.units import MIB

ADDRESS_BITS = 60
"""A free block's key is its size above its address: keys sort by size, then by address."""
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
UNLIMITED_BYTES = LARGE_SEGMENT_BYTES << 23
"""Address space of an expandable segment where none is told: 160 TiB, more than is ever mapped."""


class BlockPool:
    """Free and unmapped blocks of one pool and stream, kept by address, as plain integers.

    Blocks in use are held by their owner, which hands start and size back to `give`.
    Segments are laid out upwards with a gap between them, so that touching blocks
    always belong to one segment. `cudaMalloc` may order its segments otherwise; that
    matters only between free blocks of equal size.
    """

    __slots__ = (
        "_next_base",
        "ages",
        "is_small",
        "keys",
        "num_searches",
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
        self.ages: dict[int, int] | None = None
        """Searches made before each free block came, by its start; only where garbage is
        collected."""
        self.num_searches = 0
        self._next_base = 0

    def add_segment(self, num_bytes: int) -> int:
        """A new segment's start. The caller decides whether it is free, in use or unmapped."""
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
        self.num_searches += 1
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

    def first_of(self, num_bytes: int) -> int:
        """Index in `keys` of the smallest block of at least so many bytes, or `len(keys)`."""
        return bisect_left(self.keys, num_bytes << ADDRESS_BITS)

    def size_of(self, index: int) -> int:
        return self.keys[index] >> ADDRESS_BITS

    def start_of(self, index: int) -> int:
        return self.keys[index] & ADDRESS_MASK

    def take(self, index: int) -> tuple[int, int]:
        """Remove a free block: its start and size."""
        key = self.keys.pop(index)
        size, start = key >> ADDRESS_BITS, key & ADDRESS_MASK
        del self.size_at[start], self.start_at_end[start + size]
        return start, size

    def insert(self, start: int, size: int) -> None:
        """Add a free block that touches no other free block."""
        insort(self.keys, size << ADDRESS_BITS | start)
        self.size_at[start] = size
        self.start_at_end[start + size] = start
        if self.ages is not None:
            self.ages[start] = self.num_searches

    def remove(self, start: int, size: int) -> None:
        del self.keys[bisect_left(self.keys, size << ADDRESS_BITS | start)]
        del self.size_at[start], self.start_at_end[start + size]

    def give(self, start: int, size: int) -> None:
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
        """Give back every segment that is one free block; how many bytes that was."""
        return sum(self.release_segment(start) for start in self._whole_segments())

    def _whole_segments(self) -> list[int]:
        return [start for start, size in self.segments.items() if self.size_at.get(start) == size]

    def unused_segments(self) -> list[tuple[int, int]]:
        """Starts of segments that are one free block, and how many searches ago each became so."""
        ages = self.ages or {}
        return [(start, self.num_searches - ages[start]) for start in self._whole_segments()]

    def release_segment(self, start: int) -> int:
        """Give back one segment that is one free block."""
        size = self.segments.pop(start)
        self.remove(start, size)
        return size

    def add_unmapped(self, start: int, size: int) -> None:
        """Address space without memory, merged with such neighbours; gone with a whole segment."""
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

    def find_room(self, num_bytes: int, *, address_space_bytes: int) -> int:
        """Lowest start of free and unmapped blocks in a row that `num_bytes` would fit into.

        A new segment where no such row is left.
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
        pages = -(-max(address_space_bytes, num_bytes) // self.page_bytes)
        base = self.add_segment(pages * self.page_bytes)
        self._insert_unmapped(base, pages * self.page_bytes)
        return base

    def pages_to_map(self, start: int, num_bytes: int) -> int:
        """Bytes of the whole pages that `num_bytes` at an unmapped block's front would take."""
        wanted = min(num_bytes, self.unmapped_size_at[start])
        return -(-wanted // self.page_bytes) * self.page_bytes

    def map_pages(self, start: int, num_bytes: int) -> None:
        """Back an unmapped block's front with memory: a free block from now on."""
        size = self._remove_unmapped(start)
        if size > num_bytes:
            self._insert_unmapped(start + num_bytes, size - num_bytes)
        self.give(start, num_bytes)

    def unmap_free_pages(self) -> int:
        """Give back all pages without a block in use; how many bytes that was."""
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


# A model of torch's CUDA caching allocator, to replay a job's allocations without a GPU.

NUM_CHECKED_CAPACITIES = 4
"""Tried above the smallest that survives, since survival is not monotonic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """What `PYTORCH_ALLOC_CONF` sets, as far as it changes how much memory a job needs."""

    expandable_segments: bool = True
    """What `tightfit train` sets; torch's own default is False."""
    max_split_bytes: int | None = None
    """`max_split_size_mb`: larger blocks are never split."""
    max_rounding_bytes: int = LARGE_SEGMENT_BYTES
    """`max_non_split_rounding_mb`: a block that may not be split serves requests that are
    smaller than itself by less than this."""
    garbage_collection_fraction: float = 0.0
    """`garbage_collection_threshold`; torch heeds it only under a memory fraction."""
    limit: Literal["fraction", "card"] = "fraction"
    """What the capacity is: `set_per_process_memory_fraction`, or the memory the card has.

    They differ only with expandable segments. Torch compares the fraction with the reserve plus
    a whole new segment, though less may be mapped (a free block grows), or more (pages of 20 MiB,
    by which the reserve may pass the fraction). The card refuses when its pages run out.
    """
    address_space_bytes: int = UNLIMITED_BYTES
    """Of one expandable segment; torch takes 9/8 of the card's memory."""

    def __post_init__(self) -> None:
        if self.max_split_bytes is not None and self.max_split_bytes < LARGE_SEGMENT_BYTES:
            raise InvalidInputError(
                f"torch takes no max_split_size below 20 MiB, not {self.max_split_bytes} bytes.",
                remedy="set max_split_size_mb to 20 or more in PYTORCH_ALLOC_CONF",
            )


class CapacityExceeded(Exception):  # noqa: N818  an answer of the model, not a fault
    """A request does not fit, even with all cached blocks released."""


class CachingAllocator:
    """Allocations by keys of the caller's choice, counted as torch's statistics count them.

    `allocated_bytes` are whole blocks: rounded to 512 bytes, and with the rest of a block that
    was too small to split off. `reserved_bytes` are segments, or mapped pages.
    """

    __slots__ = (
        "_collects",
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
        self._collects = (
            settings.garbage_collection_fraction > 0
            and settings.limit == "fraction"
            and capacity_bytes is not None
        )
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.peak_demand_bytes = 0
        """The most that was ever compared with the capacity: a larger one is never felt."""
        self.num_retries = 0
        """How often all cached blocks were released to make room: torch's `num_alloc_retries`."""

    def allocate(self, key: int, num_bytes: int, *, stream: int = 0) -> None:
        """Take a block for `key`; `CapacityExceeded` where even releasing the cache is no help."""
        if num_bytes <= 0:
            return  # torch hands out no block for an empty tensor
        size = -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        pools = self._pools.get(stream) or self._add_stream(stream)
        pool = pools[size > SMALL_BYTES]
        index = pool.find(size)
        if index < len(pool.keys) and self._may_serve(pool, index, size):
            start, whole = pool.take(index)
        else:
            start, whole = self._grow(pool, size)
        if whole != size and self._is_split(pool, size, whole - size):
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
            pool.give(start, size)

    def release_cached(self) -> None:
        """Give back what no block is using: torch's `empty_cache`."""
        for small, large in self._pools.values():
            for pool in (large, small):
                if self._settings.expandable_segments:
                    self.reserved_bytes -= pool.unmap_free_pages()
                else:
                    self.reserved_bytes -= pool.release_whole_segments()

    def _add_stream(self, stream: int) -> tuple[BlockPool, BlockPool]:
        pools = (BlockPool(is_small=True), BlockPool(is_small=False))
        if self._collects:
            pools[1].ages = {}
        self._pools[stream] = pools
        return pools

    def _may_serve(self, pool: BlockPool, index: int, size: int) -> bool:
        """Whether `max_split_size` lets a free block serve a request of this size."""
        limit = self._settings.max_split_bytes
        if limit is None:
            return True
        whole = pool.size_of(index)
        if size < limit:
            return whole < limit
        return whole < size + self._settings.max_rounding_bytes

    def _is_split(self, pool: BlockPool, size: int, rest: int) -> bool:
        if self._settings.expandable_segments or pool.is_small:
            return True
        limit = self._settings.max_split_bytes
        return rest > SMALL_BYTES and (limit is None or size < limit)

    def _grow(self, pool: BlockPool, size: int) -> tuple[int, int]:
        """A block of new memory, releasing cached memory where the capacity asks for it."""
        if self._collects:
            self._collect_garbage()
        block = self._reserve(pool, size)
        if block is None and self._release_oversize(pool, size):
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
        num_bytes = segment_bytes(size)
        is_expandable = self._settings.expandable_segments
        if not (is_expandable and self._settings.limit == "card") and self._is_refused(num_bytes):
            return None
        if is_expandable:
            return self._expand(pool, size)
        self._count_reserved(num_bytes)
        return pool.add_segment(num_bytes), num_bytes

    def _expand(self, pool: BlockPool, size: int) -> tuple[int, int] | None:
        start = pool.find_room(size, address_space_bytes=self._settings.address_space_bytes)
        has = pool.size_at.get(start, 0)
        while has < size:
            wanted = pool.pages_to_map(start + has, size - has)
            if self._settings.limit == "card" and self._is_refused(wanted):
                return None
            pool.map_pages(start + has, wanted)
            self._count_reserved(wanted)
            has = pool.size_at[start]
        pool.remove(start, has)
        return start, has

    def _is_refused(self, num_bytes: int) -> bool:
        demand = self.reserved_bytes + num_bytes
        if self.capacity_bytes is not None and demand > self.capacity_bytes:
            return True
        self.peak_demand_bytes = max(self.peak_demand_bytes, demand)
        return False

    def _count_reserved(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _release_oversize(self, pool: BlockPool, size: int) -> bool:
        """Under `max_split_size`: release one oversize block that is large enough, or several,
        the largest first. Whether that made as much room as was asked for."""
        limit = self._settings.max_split_bytes
        if limit is None or self._settings.expandable_segments:
            return False
        wanted = max(size, limit)
        index = pool.first_of(wanted)
        if index < len(pool.keys):
            self.reserved_bytes -= pool.release_segment(pool.start_of(index))
            return True
        released = 0
        while released < wanted and pool.keys and pool.size_of(-1) >= limit:
            released += pool.release_segment(pool.start_of(-1))
        self.reserved_bytes -= released
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Release large segments that lie unused, the oldest first, once the reserve passes the
        threshold. Age is counted in searches of the pool."""
        if self.capacity_bytes is None:
            return
        threshold = int(self._settings.garbage_collection_fraction * self.capacity_bytes)
        excess = self.reserved_bytes - threshold
        if excess <= 0:
            return
        ages = [
            (pool, start, age)
            for _, pool in self._pools.values()
            for start, age in pool.unused_segments()
        ]
        reclaimed = 0
        while ages and reclaimed < excess:
            average = sum(age for _, _, age in ages) / len(ages)
            reclaimed += sum(
                pool.release_segment(start) for pool, start, age in ages if age >= average
            )
            ages = [unused for unused in ages if unused[2] < average]
        self.reserved_bytes -= reclaimed


def segment_bytes(size: int) -> int:
    """What torch asks the driver for when a request of `size` finds no cached block."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What torch's statistics would say after a job that survived."""

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
    while settings.garbage_collection_fraction > 0 and not survives(top * tolerance_bytes):
        top += -(-top // 16)  # collecting garbage changes what happens in any capacity
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
    live = peak = 0
    rounded = [-(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES for size in sizes]
    for event in events:
        if event > 0:
            live += rounded[event - 1]
            peak = max(peak, live)
        else:
            live -= rounded[-event - 1]
    return peak
