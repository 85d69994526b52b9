"""A model as numbered blocks: read from its source, and its copy while it grows.

A block of the copy counts only once its record follows it, with the digest of what was written. A
process that is killed at any moment leaves a folder of another name that the next one continues.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tightfit.clusters.staging.home import PROGRESS, make_home, measure_folder, remove_copy
from tightfit.core.errors import SetupError
from tightfit.core.files import PARTIAL, describe_write_error, sync, write_atomic
from tightfit.core.reading import read_bytes
from tightfit.runtime.staged import (
    MANIFEST_ENDING,
    Manifest,
    is_whole,
    read_manifest,
    source_folder,
)

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

    def read(self, index: int) -> bytes:
        """The block from the file system itself.

        Pages that this machine has kept are given up first, so that what is measured is the
        storage, and again afterwards: beside a copy in RAM they would be a second one.
        """
        place = self._layout.locate(index)
        path = self._folder / self._layout.names[place.file]
        span = (place.offset, place.num_bytes)
        try:
            with self._lock:
                if place.file not in self._files:
                    self._files[place.file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                handle = self._files[place.file]
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


# The copy.

_RECORD = struct.Struct(f"!I{DIGEST_BYTES}s")
NUM_THREADS = min(4, os.cpu_count() or 1)
"""That hash at once; hashing is slower than memory and than a fast network."""


class Store:
    """The copy of `wanted` in one home: whole, begun, or not there."""

    def __init__(self, home: Path, wanted: Manifest) -> None:
        self.home = home
        self.wanted = wanted
        self.layout = Layout(wanted)
        self.digests: dict[int, bytes] = {}
        """Of the blocks that are there."""
        self.is_whole = False
        self._files: dict[int, int] = {}
        self._progress: int | None = None
        self._lock = threading.Lock()
        self._partial = home / f"{wanted.key}{PARTIAL}"
        self._progress_path = home / f"{wanted.key}{PROGRESS}"
        self._manifest_path = home / f"{wanted.key}{MANIFEST_ENDING}"
        self._head = hashlib.sha256(wanted.model_dump_json().encode()).digest()
        """Ties records to the very files they are of."""
        self._find()

    @property
    def path(self) -> Path:
        return self.home / self.wanted.key

    @property
    def num_stored_bytes(self) -> int:
        return self.layout.measure(list(self.digests))

    @property
    def missing(self) -> list[int]:
        return [index for index in range(self.layout.num_blocks) if index not in self.digests]

    def _find(self) -> None:
        """What is there of exactly these files. Nothing is changed yet."""
        manifest = read_manifest(self.home, self.wanted.key)
        if manifest is not None and is_whole(self.path, manifest):
            plain = [file.model_copy(update={"digests": ()}) for file in manifest.files]
            listed = [bytes.fromhex(digest) for file in manifest.files for digest in file.digests]
            is_same = manifest.model_copy(update={"files": tuple(plain)}) == self.wanted
            if is_same and len(listed) == self.layout.num_blocks:
                self.is_whole = True
                self.digests = dict(enumerate(listed))
                return
        if not self._partial.is_dir() or self._partial.is_symlink():
            return
        with suppress(OSError):
            data = read_bytes(self._progress_path)
            head, records = data[: len(self._head)], data[len(self._head) :]
            if head == self._head:
                whole = len(records) // _RECORD.size * _RECORD.size  # the last may be cut off
                found = _RECORD.iter_unpack(records[:whole])
                self.digests = {i: digest for i, digest in found if i < self.layout.num_blocks}

    @property
    def num_stale_bytes(self) -> int:
        """What `remove_stale` would free."""
        if self.is_whole:
            return 0
        return measure_folder(self.path) + (0 if self.digests else measure_folder(self._partial))

    def remove_stale(self) -> None:
        """Copies and parts of other versions of the files: nobody may use them any more."""
        if self.is_whole:
            self._progress_path.unlink(missing_ok=True)  # of a staging that was killed at its end
            return
        if not self.digests:
            remove_copy(self.home, self.wanted.key)
        else:
            self._manifest_path.unlink(missing_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)

    def begin(self) -> None:
        """Make ready for what is missing."""
        if self.is_whole or self._progress is not None:
            return
        make_home(self.home)
        self.remove_stale()
        self._partial.mkdir(mode=0o700, exist_ok=True)
        self._write_progress()
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._progress = os.open(self._progress_path, flags)
        for number, file in enumerate(self.wanted.files):
            os.ftruncate(self._open(number), file.size_bytes)

    def _write_progress(self) -> None:
        records = b"".join(_RECORD.pack(*item) for item in self.digests.items())
        write_atomic(self._progress_path, self._head + records)
        self._progress_path.chmod(0o600)

    def _open(self, number: int) -> int:
        """A descriptor of the file, made with its folder where need be."""
        with self._lock:
            if number not in self._files:
                home = self.path if self.is_whole else self._partial
                path = home / self.layout.names[number]
                flags = os.O_NOFOLLOW | os.O_CLOEXEC
                if self.is_whole:
                    self._files[number] = os.open(path, flags | os.O_RDONLY)
                else:
                    path.parent.mkdir(mode=0o700, exist_ok=True)
                    self._files[number] = os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o600)
            return self._files[number]

    def write(self, index: int, data: bytes | memoryview, digest: bytes) -> None:
        """The block, then its record. From any thread."""
        assert self._progress is not None
        place = self.layout.locate(index)
        assert len(data) == place.num_bytes
        handle = self._open(place.file)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(handle, data[done:], place.offset + done)
            with self._lock:
                os.write(self._progress, _RECORD.pack(index, digest))
                self.digests[index] = digest
        except OSError as error:
            raise SetupError(
                f"Cannot write {self._partial}: {describe_write_error(error, self._partial)}.",
                remedy="make room there, then start this again: it goes on where it stopped",
            ) from error

    def read(self, index: int) -> bytes:
        """The block as it lies in the copy."""
        place = self.layout.locate(index)
        return os.pread(self._open(place.file), place.num_bytes, place.offset)

    def find_bad(self) -> list[int]:
        """Blocks whose contents are not what their records say; reads them all back."""
        wanted = sorted(self.digests)
        for number in range(len(self.wanted.files)) if wanted else ():
            handle = self._open(number)
            if not self.is_whole:
                os.fsync(handle)
            # From the disk, where it is one, and not from this machine's memory of the writing.
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)

        def is_bad(index: int) -> bool:
            return digest_block(self.read(index)) != self.digests[index]

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            return [index for index, bad in zip(wanted, pool.map(is_bad, wanted)) if bad]  # noqa: B905

    def drop(self, indices: Iterable[int]) -> None:
        """Forget blocks, so that they are fetched again; a whole copy becomes a partial one."""
        bad = set(indices)
        if not bad:
            return
        self.close()
        if self.is_whole:
            self._manifest_path.unlink(missing_ok=True)
            self.path.rename(self._partial)
            self.is_whole = False
        self.digests = {index: d for index, d in self.digests.items() if index not in bad}
        self._write_progress()

    def finish(self) -> Path:
        """Times as at the source, the last name, and then the manifest that makes it a copy."""
        if self.is_whole:
            return self.path
        assert not self.missing
        for number, file in enumerate(self.wanted.files):
            os.utime(self._open(number), ns=(file.mtime_ns, file.mtime_ns))
            os.fsync(self._open(number))
        self.close()
        self._partial.rename(self.path)
        sync(self.home)
        files = []
        for number, file in enumerate(self.wanted.files):
            digests = tuple(self.digests[i].hex() for i in self.layout.blocks_of(number))
            files.append(file.model_copy(update={"digests": digests}))
        manifest = self.wanted.model_copy(update={"files": tuple(files)})
        write_atomic(self._manifest_path, manifest.model_dump_json() + "\n")
        self._manifest_path.chmod(0o600)
        self._progress_path.unlink(missing_ok=True)
        self.is_whole = True
        return self.path

    def root(self) -> str:
        """One digest over those of all blocks: equal on two nodes where their copies are."""
        joined = b"".join(self.digests[index] for index in sorted(self.digests))
        return hashlib.sha256(joined).hexdigest()

    def close(self) -> None:
        with self._lock:
            for handle in self._files.values():
                os.close(handle)
            self._files.clear()
            if self._progress is not None:
                os.close(self._progress)
                self._progress = None
