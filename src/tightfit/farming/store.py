"""The file operations that coordinate a farm, safe on NFS: no locks, no rename races.

`FolderStore` works on a shared folder; `MemoryStore` counts requests for simulations and tests.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

_STALE_TRIES = 3
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC


class StoredFile(NamedTuple):
    """A file as it was when it was opened."""

    mtime_s: float
    """On the file server's clock."""
    content: bytes


def is_farm_removed(error: OSError) -> bool:
    """Whether a fault says that the farm was taken away; over NFS a deleted folder is stale."""
    return error.errno in (errno.ENOENT, errno.ESTALE)


class Store(Protocol):
    """A folder that every worker sees. Paths are relative to it, with at most one new folder."""

    def create(self, path: str, content: bytes = b"") -> bool:
        """Make a file; False where there is one already. Of many at once, one gets True."""

    def publish(self, path: str, content: bytes) -> bool:
        """Make a file that appears whole and on the disk; False where there is one already."""

    def replace(self, path: str, content: bytes) -> None:
        """Put a file in its place, whole."""

    def look(self, path: str) -> StoredFile | None:
        """A file's age and content as the server has them now; None where there is none."""

    def names(self, folder: str) -> list[str]:
        """What is in a folder; nothing where there is none."""

    def beat(self, path: str) -> float:
        """Set a file's time to the server's, and return it."""


class FolderStore:
    """A folder on a local or shared file system.

    It is held open: where another takes its name (`--fresh`), nothing of ours gets into that one.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._root)

    def is_at(self, root: Path) -> bool:
        """Whether this is still the folder of that name."""
        try:
            return os.path.samestat(os.fstat(self._root), root.stat())
        except FileNotFoundError:
            return False

    def create(self, path: str, content: bytes = b"") -> bool:
        # NFS 3 and later send O_EXCL as an exclusive create, whose repeat is known as such.
        handle = self._open_new(path)
        if handle is None:
            return False
        try:
            if content:
                os.write(handle, content)
        finally:
            os.close(handle)
        return True

    def publish(self, path: str, content: bytes) -> bool:
        temporary = self._write_temporary(content)
        try:
            return self._link(temporary, path)
        finally:
            self._forget(temporary)

    def replace(self, path: str, content: bytes) -> None:
        temporary = self._write_temporary(content, is_synced=False)
        try:
            os.rename(temporary, path, src_dir_fd=self._root, dst_dir_fd=self._root)
        except BaseException:
            self._forget(temporary)
            raise

    def look(self, path: str) -> StoredFile | None:
        for _ in range(_STALE_TRIES):
            try:
                # Opening asks the server; a stat alone may answer from a cache of a minute ago.
                handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._root)
            except FileNotFoundError:
                return None
            try:
                pieces = []
                while piece := os.read(handle, 1 << 20):
                    pieces.append(piece)
                return StoredFile(os.fstat(handle).st_mtime, b"".join(pieces))
            except OSError as error:
                if error.errno != errno.ESTALE:  # replaced between the two
                    raise
            finally:
                os.close(handle)
        return None

    def names(self, folder: str) -> list[str]:
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._root)
        except FileNotFoundError:
            return []
        try:
            return os.listdir(handle)  # noqa: PTH208  (a million names)
        finally:
            os.close(handle)

    def beat(self, path: str) -> float:
        os.utime(path, dir_fd=self._root)  # no time is sent: the server takes its own
        return os.stat(path, dir_fd=self._root).st_mtime

    def _open_new(self, path: str) -> int | None:
        for is_last in (False, True):
            try:
                return os.open(path, _NEW, 0o644, dir_fd=self._root)
            except FileExistsError:
                return None
            except FileNotFoundError:
                if is_last:
                    raise
                self._make_folder(path)
        return None

    def _write_temporary(self, content: bytes, *, is_synced: bool = True) -> str:
        temporary = f"tmp/{secrets.token_hex(12)}"
        handle = os.open(temporary, _NEW, 0o644, dir_fd=self._root)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(handle, view) :]
            if is_synced:
                os.fsync(handle)
        except BaseException:
            self._forget(temporary)
            raise
        finally:
            os.close(handle)
        return temporary

    def _link(self, temporary: str, path: str) -> bool:
        for is_last in (False, True):
            try:
                os.link(temporary, path, src_dir_fd=self._root, dst_dir_fd=self._root)
            except FileExistsError:
                # The reply to a first try may have been lost: then the file is ours all the same.
                return os.stat(temporary, dir_fd=self._root).st_nlink == 2
            except FileNotFoundError:
                if is_last:
                    raise
                self._make_folder(path)
            else:
                return True
        return False

    def _forget(self, temporary: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=self._root)

    def _make_folder(self, path: str) -> None:
        """One level only: where the farm itself is gone, nothing of it is to come back."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(Path(path).parent, dir_fd=self._root)


# A store in memory that counts requests, for simulations and tests.

NAMES_PER_LISTING = 128
"""What one reply of an NFS server to READDIR holds, at 64 bytes a name and 8 KiB a reply."""
NFS_REQUESTS_PER_CALL = {
    "create": 2,
    "write": 3,
    "publish": 6,
    "replace": 4,
    "look": 3,
    "miss": 1,
    "beat": 1,
}
"""Requests to an NFS 4 server. `create`: OPEN, CLOSE; `write`: with a WRITE between; `publish`:
OPEN, WRITE, COMMIT, CLOSE, LINK, REMOVE; `replace`: OPEN, WRITE, CLOSE, RENAME; `look`: OPEN, READ,
CLOSE, of which a `miss` is the first; `beat`: SETATTR, whose reply has the time."""


class MemoryStore:
    """Folders as dictionaries. `clock` is the file server's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.calls: Counter[str] = Counter()
        """By operation."""
        self.num_requests = 0
        """To a file server, had there been one."""
        self._clock = clock
        self._folders: dict[str, dict[str, StoredFile]] = defaultdict(dict)

    def create(self, path: str, content: bytes = b"") -> bool:
        is_new = self._add(path, content)
        self._count("create", "miss" if not is_new else "write" if content else "create")
        return is_new

    def publish(self, path: str, content: bytes) -> bool:
        self._count("publish", "publish")
        return self._add(path, content)

    def replace(self, path: str, content: bytes) -> None:
        self._count("replace", "replace")
        folder, name = _split_path(path)
        self._folders[folder][name] = StoredFile(self._clock(), content)

    def look(self, path: str) -> StoredFile | None:
        folder, name = _split_path(path)
        found = self._folders[folder].get(name)
        self._count("look", "look" if found else "miss")
        return found

    def names(self, folder: str) -> list[str]:
        found = list(self._folders[folder])
        self.calls["names"] += 1
        self.num_requests += 1 + len(found) // NAMES_PER_LISTING
        return found

    def beat(self, path: str) -> float:
        self._count("beat", "beat")
        folder, name = _split_path(path)
        seen = self._folders[folder].get(name)
        if seen is None:
            raise FileNotFoundError(path)
        self._folders[folder][name] = StoredFile(self._clock(), seen.content)
        return self._clock()

    def _add(self, path: str, content: bytes) -> bool:
        folder, name = _split_path(path)
        if name in self._folders[folder]:
            return False
        self._folders[folder][name] = StoredFile(self._clock(), content)
        return True

    def _count(self, call: str, cost: str) -> None:
        self.calls[call] += 1
        self.num_requests += NFS_REQUESTS_PER_CALL[cost]


def _split_path(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition("/")
    return folder, name
