"""Blocks read from the shared file system, several at a time, without filling the page cache."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tightfit.core.errors import EnvironmentFaultError
from tightfit.launch.stage.blocks import Layout, digest_block
from tightfit.runtime.staged import Manifest, source_folder

NUM_READERS = 4
"""At once on each node: one alone waits for the storage most of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block's contents on their way."""

    index: int
    data: bytes | bytearray
    digest: bytes


class Source:
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
                    raise EnvironmentFaultError(
                        f"{path} has become shorter while it was read.",
                        remedy="start this again when nobody writes there",
                    )
                parts.append(part)
                done += len(part)
            os.posix_fadvise(handle, *span, os.POSIX_FADV_DONTNEED)
        except OSError as fault:
            raise EnvironmentFaultError(
                f"Cannot read {path}: {fault.strerror or fault}.",
                remedy="see whether the shared file system is well, then start this again",
            ) from fault
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
