"""One pool of torch's CUDA caching allocator: its free blocks, its segments, and how they grow."""

from __future__ import annotations

from bisect import bisect_left, insort

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
BOUNDLESS_BYTES = LARGE_SEGMENT_BYTES << 23
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
