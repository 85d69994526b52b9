"""A model as a row of numbered blocks: where each lies, and sets of them as short lists."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tightfit.runtime.staged import Manifest

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one block lies."""

    file: int
    offset: int
    num_bytes: int


class Layout:
    """Blocks of a manifest's files, in order; none spans two files."""

    def __init__(self, manifest: Manifest) -> None:
        self.block_bytes = manifest.block_bytes
        self.names = [file.name for file in manifest.files]
        self._sizes = [file.size_bytes for file in manifest.files]
        self._starts = []
        self.num_blocks = 0
        for size in self._sizes:
            self._starts.append(self.num_blocks)
            self.num_blocks += -(-size // self.block_bytes)

    def locate(self, index: int) -> Place:
        if not 0 <= index < self.num_blocks:
            raise IndexError(f"there is no block {index}")
        file = bisect_right(self._starts, index) - 1  # past empty files, which start here too
        offset = (index - self._starts[file]) * self.block_bytes
        return Place(
            file=file, offset=offset, num_bytes=min(self.block_bytes, self._sizes[file] - offset)
        )

    def blocks_of(self, file: int) -> range:
        start = self._starts[file]
        return range(start, start + -(-self._sizes[file] // self.block_bytes))

    def measure(self, indices: Iterable[int]) -> int:
        """Bytes of these blocks together."""
        return sum(self.locate(index).num_bytes for index in indices)


def digest_block(data: bytes | bytearray | memoryview) -> bytes:
    """SHA-256, which CPUs have instructions for, cut to 128 bits: enough against accidents."""
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


def to_ranges(indices: Iterable[int]) -> list[list[int]]:
    """`[first, past the last]` of each run, so that a million blocks are a line of text."""
    ranges: list[list[int]] = []
    for index in sorted(indices):
        if ranges and ranges[-1][1] == index:
            ranges[-1][1] = index + 1
        else:
            ranges.append([index, index + 1])
    return ranges


def from_ranges(ranges: Sequence[Sequence[int]]) -> set[int]:
    return {index for first, end in ranges for index in range(first, end)}
