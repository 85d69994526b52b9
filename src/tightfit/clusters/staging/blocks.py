"""A model as a row of numbered blocks: where each lies, and reading them from shared storage."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tightfit.core.errors import SetupError
from tightfit.runtime.staged import Manifest, source_folder

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLocation:
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

    def locate(self, index: int) -> BlockLocation:
        if not 0 <= index < self.num_blocks:
            raise IndexError(f"there is no block {index}")
        file = bisect_right(self._starts, index) - 1  # past empty files, which start here too
        offset = (index - self._starts[file]) * self.block_bytes
        return BlockLocation(
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


# Blocks read from the shared file system, several at a time, without filling the page cache.

NUM_READERS = 4
"""At once on each node: one alone waits for the storage most of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block's contents on their way."""

    index: int
    data: bytes | bytearray
    digest: bytes


class BlockSource:
    """The files of a manifest where they came from."""

    def __init__(self, wanted: Manifest) -> None:
        self._folder = source_folder(Path(wanted.source))
        self._layout = Layout(wanted)
        self._files: dict[int, int] = {}
        self._lock = threading.Lock()

    def _open(self, number: int) -> int:
        with self._lock:
            if number not in self._files:
                path = self._folder / self._layout.names[number]
                self._files[number] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._files[number]

    def read(self, index: int) -> bytes:
        """The block from the file system itself.

        Pages that this machine has kept are given up first, so that what is measured is the
        storage, and again afterwards: beside a copy in RAM they would be a second one.
        """
        place = self._layout.locate(index)
        path = self._folder / self._layout.names[place.file]
        try:
            handle = self._open(place.file)
            span = (place.offset, place.num_bytes)
            os.posix_fadvise(handle, *span, os.POSIX_FADV_DONTNEED)
            parts = []
            done = 0
            while done < place.num_bytes:
                part = os.pread(handle, place.num_bytes - done, place.offset + done)
                if not part:
                    raise SetupError(
                        f"{path} has become shorter while it was read.",
                        remedy="start this again when nobody writes there",
                    )
                parts.append(part)
                done += len(part)
            os.posix_fadvise(handle, *span, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise SetupError(
                f"Cannot read {path}: {error.strerror or error}.",
                remedy="see whether the shared file system is well, then start this again",
            ) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        with self._lock:
            for handle in self._files.values():
                os.close(handle)
            self._files.clear()


def read_ahead(
    read: Callable[[int], bytes], indices: Sequence[int], *, until: float | None = None
) -> Iterator[Block]:
    """The blocks in order, the next few of them under way; no new one is begun after `until`."""

    def fetch(index: int) -> Block:
        data = read(index)
        return Block(index=index, data=data, digest=digest_block(data))

    waiting: deque[Future[Block]] = deque()
    with ThreadPoolExecutor(NUM_READERS) as pool:
        try:
            for index in indices:
                if until is not None and time.monotonic() > until:
                    break
                waiting.append(pool.submit(fetch, index))
                if len(waiting) > NUM_READERS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
