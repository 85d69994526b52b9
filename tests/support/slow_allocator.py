"""A second model of torch's caching allocator: slow, with nothing but lists of blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from tightfit.core.units import MIB
from tightfit.trace.caching_allocator import AllocatorSettings, CapacityExceeded


@dataclass
class Segment:
    """Blocks in a row: `[bytes, state]`, the state being a key in use, "free" or "unmapped"."""

    number: int
    is_small: bool
    blocks: list[list[int | str]]

    @property
    def page(self) -> int:
        return 2 * MIB if self.is_small else 20 * MIB

    def merge(self) -> None:
        merged: list[list[int | str]] = []
        for size, state in self.blocks:
            if merged and state in ("free", "unmapped") and merged[-1][1] == state:
                merged[-1][0] += size  # type: ignore[operator]
            elif size:
                merged.append([size, state])
        self.blocks = merged


@dataclass
class SlowAllocator:
    """The same rules with nothing but lists, searched from end to end."""

    settings: AllocatorSettings
    capacity: int | None
    segments: list[Segment] = field(default_factory=list)
    num_made: int = 0
    retries: int = 0

    def total(self, *, used: bool) -> int:
        return sum(
            int(size)
            for segment in self.segments
            for size, state in segment.blocks
            if state != "unmapped" and (not used or state != "free")
        )

    def allocate(self, key: int, num_bytes: int) -> None:
        size = (num_bytes + 511) // 512 * 512
        if not size:
            return
        place = self.best_fit(size) or self.grow(size)
        segment, index = place
        rest = int(segment.blocks[index][0]) - size
        splits_always = segment.is_small or self.settings.expandable_segments
        is_split = rest >= 512 if splits_always else rest > MIB
        if is_split:
            segment.blocks[index : index + 1] = [[size, key], [rest, "free"]]
        else:
            segment.blocks[index][1] = key

    def free(self, key: int) -> None:
        for segment in self.segments:
            for block in segment.blocks:
                if block[1] == key:
                    block[1] = "free"
            segment.merge()

    def best_fit(self, size: int) -> tuple[Segment, int] | None:
        fits = []
        for segment in self.segments:
            for index, (has, state) in enumerate(segment.blocks):
                if state == "free" and int(has) >= size and segment.is_small == (size <= MIB):
                    behind = segment.blocks[index + 1 : index + 2]
                    more = int(behind[0][0]) if behind and behind[0][1] == "unmapped" else 0
                    fits.append((int(has), segment.number, index, int(has) + more, segment))
        fits.sort(key=lambda fit: fit[:3])
        if not fits:
            return None
        position = 0
        while position + 1 < len(fits) and fits[position + 1][3] < fits[position][3]:
            position += 1
        _, _, index, _, segment = fits[position]
        return segment, index

    def grow(self, size: int) -> tuple[Segment, int]:
        place = self.reserve(size)
        if place is None:
            self.release()
            self.retries += 1
            place = self.reserve(size)
        if place is None:
            raise CapacityExceeded
        return place

    def reserve(self, size: int) -> tuple[Segment, int] | None:
        if size <= MIB:
            segment_size = 2 * MIB
        elif size < 10 * MIB:
            segment_size = 20 * MIB
        else:
            segment_size = (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        if self.exceeds(segment_size):
            return None
        if self.settings.expandable_segments:
            return self.expand(size)
        return self.new_segment(size, [[segment_size, "free"]]), 0

    def exceeds(self, num_bytes: int) -> bool:
        return self.capacity is not None and self.total(used=False) + num_bytes > self.capacity

    def new_segment(self, size: int, blocks: list[list[int | str]]) -> Segment:
        self.num_made += 1
        self.segments.append(Segment(self.num_made, size <= MIB, blocks))
        return self.segments[-1]

    def room(self, size: int) -> tuple[Segment, int]:
        for segment in self.segments:
            for index, (_, state) in enumerate(segment.blocks):
                if state != "unmapped" or segment.is_small != (size <= MIB):
                    continue
                first = index - 1 if index and segment.blocks[index - 1][1] == "free" else index
                room = 0
                for has, other in segment.blocks[first:]:
                    if other not in ("free", "unmapped"):
                        break
                    room += int(has)
                if room >= size:
                    return segment, first
        return self.new_segment(size, [[20 * MIB << 23, "unmapped"]]), 0

    def expand(self, size: int) -> tuple[Segment, int]:
        segment, index = self.room(size)
        while True:
            has, state = segment.blocks[index]
            if state == "free" and int(has) >= size:
                return segment, index
            at = index if state == "unmapped" else index + 1
            missing = size if state == "unmapped" else size - int(has)
            behind = int(segment.blocks[at][0])
            pages = (min(missing, behind) + segment.page - 1) // segment.page * segment.page
            segment.blocks[at : at + 1] = [[pages, "free"], [behind - pages, "unmapped"]]
            segment.merge()

    def release(self) -> None:
        if not self.settings.expandable_segments:
            self.segments = [s for s in self.segments if [b[1] for b in s.blocks] != ["free"]]
            return
        for segment in self.segments:
            start = 0
            blocks: list[list[int | str]] = []
            for size, state in segment.blocks:
                end = start + int(size)
                first, last = -(-start // segment.page), end // segment.page
                if state == "free" and first < last:
                    first, last = first * segment.page, last * segment.page
                    blocks += [[first - start, state], [last - first, "unmapped"]]
                    blocks += [[end - last, state]]
                else:
                    blocks.append([size, state])
                start = end
            segment.blocks = blocks
            segment.merge()
        self.segments = [s for s in self.segments if [b[1] for b in s.blocks] != ["unmapped"]]
