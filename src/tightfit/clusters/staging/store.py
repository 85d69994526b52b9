"""One model's copy while it grows: blocks on the disk, and a record of those that are there.

A block counts only once its record follows it, with the digest of what was written. A process
that is killed at any moment leaves a folder of another name that the next one goes on with.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tightfit.clusters.staging.blocks import DIGEST_BYTES, Layout, digest_block
from tightfit.clusters.staging.home import PROGRESS, make_home, measure_folder, remove_copy
from tightfit.core.errors import SetupError
from tightfit.core.files import PARTIAL, sync, write_atomic
from tightfit.runtime.staged import (
    MANIFEST_ENDING,
    Manifest,
    StagedFile,
    is_whole,
    read_manifest,
)

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
        held = read_manifest(self.home, self.wanted.key)
        if held is not None and _strip(held) == self.wanted and is_whole(self.path, held):
            self.is_whole = True
            listed = [bytes.fromhex(digest) for file in held.files for digest in file.digests]
            self.digests = dict(enumerate(listed))
            if len(listed) == self.layout.num_blocks:
                return
            self.is_whole, self.digests = False, {}
        if self._partial.is_dir() and not self._partial.is_symlink():
            self.digests = self._read_progress()

    @property
    def _partial(self) -> Path:
        return self.home / f"{self.wanted.key}{PARTIAL}"

    @property
    def _progress_path(self) -> Path:
        return self.home / f"{self.wanted.key}{PROGRESS}"

    def _head(self) -> bytes:
        """Ties records to the very files they are of."""
        return hashlib.sha256(self.wanted.model_dump_json().encode()).digest()

    def _read_progress(self) -> dict[int, bytes]:
        try:
            data = self._progress_path.read_bytes()
        except OSError:
            return {}
        head = self._head()
        if data[: len(head)] != head:
            return {}
        whole = (len(data) - len(head)) // _RECORD.size * _RECORD.size
        records = _RECORD.iter_unpack(data[len(head) : len(head) + whole])
        return {index: digest for index, digest in records if index < self.layout.num_blocks}

    @property
    def num_stale_bytes(self) -> int:
        """What `remove_stale` would free."""
        if self.is_whole:
            return 0
        return measure_folder(self.path) + (0 if self.digests else measure_folder(self._partial))

    def remove_stale(self) -> None:
        """Copies and parts of other versions of the files: nobody may use them any more."""
        if self.is_whole:
            return
        if not self.digests:
            remove_copy(self.home, self.wanted.key)
        else:
            (self.home / f"{self.wanted.key}{MANIFEST_ENDING}").unlink(missing_ok=True)
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
        write_atomic(self._progress_path, self._head() + records)
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
                f"Cannot write {self._partial}: {error.strerror or error}.",
                remedy="make room there, then start this again: it goes on where it stopped",
            ) from error

    def read(self, index: int) -> bytes:
        """The block as it lies in the copy."""
        place = self.layout.locate(index)
        return os.pread(self._open(place.file), place.num_bytes, place.offset)

    def find_bad(self, indices: Iterable[int] | None = None) -> list[int]:
        """Blocks whose contents are not what their records say; reads them all back."""
        wanted = sorted(self.digests if indices is None else indices)
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
            (self.home / f"{self.wanted.key}{MANIFEST_ENDING}").unlink(missing_ok=True)
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
        manifest = self._manifest()
        target = self.home / f"{self.wanted.key}{MANIFEST_ENDING}"
        write_atomic(target, manifest.model_dump_json() + "\n")
        target.chmod(0o600)
        self._progress_path.unlink(missing_ok=True)
        self.is_whole = True
        return self.path

    def _manifest(self) -> Manifest:
        files = [
            file.model_copy(
                update={
                    "digests": tuple(self.digests[i].hex() for i in self.layout.blocks_of(number))
                }
            )
            for number, file in enumerate(self.wanted.files)
        ]
        return self.wanted.model_copy(update={"files": tuple(files)})

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


def _strip(manifest: Manifest) -> Manifest:
    """As it is before any block is there."""
    files = tuple(
        StagedFile(name=file.name, size_bytes=file.size_bytes, mtime_ns=file.mtime_ns)
        for file in manifest.files
    )
    return manifest.model_copy(update={"files": files})
