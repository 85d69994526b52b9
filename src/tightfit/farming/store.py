"""The file operations that coordinate a farm, safe on NFS: no locks, no rename races."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

_STALE_TRIES = 3
_Result = TypeVar("_Result")
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
"""A pipe in the place of a file is an empty one, and nothing waits for it."""
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC


class StoredFile(NamedTuple):
    """A file as it was when it was opened."""

    mtime_s: float
    """On the file server's clock."""
    content: bytes


def is_farm_removed(error: OSError) -> bool:
    """Whether an error says that the farm was removed; over NFS a deleted folder is stale."""
    return error.errno in (errno.ENOENT, errno.ESTALE)


class Store(Protocol):
    """A folder that every worker sees. Paths are relative to it, with at most one new folder."""

    def create(self, path: str, content: bytes = b"") -> bool:
        """Make a file; False where there is one already. Of many at once, one gets True."""

    def publish(self, path: str, content: bytes) -> bool:
        """Make a file that appears whole and on the disk; False where there is one already."""

    def replace(self, path: str, content: bytes) -> None:
        """Write a file whole, in place of an earlier one."""

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
        try:
            handle = self._in_folder(path, lambda: os.open(path, _NEW, 0o644, dir_fd=self._root))
        except FileExistsError:
            return False
        try:
            if content:
                os.write(handle, content)
        finally:
            os.close(handle)
        return True

    def publish(self, path: str, content: bytes) -> bool:
        temporary = self._write_temporary(content)
        root = self._root
        try:
            self._in_folder(
                path, lambda: os.link(temporary, path, src_dir_fd=root, dst_dir_fd=root)
            )
        except FileExistsError:
            # The reply to a first try may have been lost: then the file is ours all the same.
            return os.stat(temporary, dir_fd=root).st_nlink == 2
        else:
            return True
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
                handle = os.open(path, _READ, dir_fd=self._root)
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

    def _in_folder(self, path: str, call: Callable[[], _Result]) -> _Result:
        """`call`, and once more after the folder of `path` was made where it was missing.

        One level only: where the farm itself is gone, nothing of it is to come back.
        """
        try:
            return call()
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(Path(path).parent, dir_fd=self._root)
            return call()

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

    def _forget(self, temporary: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=self._root)
