"""The few file operations that a farm is coordinated by, safe on NFS: no locks, no rename races."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path
from typing import NamedTuple, Protocol

_STALE_TRIES = 3


class Seen(NamedTuple):
    """A file as it was when it was opened."""

    mtime_s: float
    """On the file server's clock."""
    content: bytes


class Store(Protocol):
    """A folder that every worker sees. Paths are relative to it, with at most one new folder."""

    def create(self, path: str, content: bytes = b"") -> bool:
        """Make a file; False where there is one already. Of many at once, one gets True."""

    def publish(self, path: str, content: bytes) -> bool:
        """Make a file that appears whole and on the disk; False where there is one already."""

    def replace(self, path: str, content: bytes) -> None:
        """Put a file in its place, whole."""

    def look(self, path: str) -> Seen | None:
        """A file's age and content as the server has them now; None where there is none."""

    def names(self, folder: str) -> list[str]:
        """What is in a folder; nothing where there is none."""

    def beat(self, path: str) -> float:
        """Set a file's time to the server's, and tell it."""


class FolderStore:
    """A folder on a local or shared file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

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
            with contextlib.suppress(OSError):
                temporary.unlink()

    def replace(self, path: str, content: bytes) -> None:
        temporary = self._write_temporary(content, is_synced=False)
        try:
            temporary.replace(self.root / path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def look(self, path: str) -> Seen | None:
        for _ in range(_STALE_TRIES):
            try:
                # Opening asks the server; a stat alone may answer from a cache of a minute ago.
                handle = os.open(self.root / path, os.O_RDONLY)
            except FileNotFoundError:
                return None
            try:
                pieces = []
                while piece := os.read(handle, 1 << 20):
                    pieces.append(piece)
                return Seen(os.fstat(handle).st_mtime, b"".join(pieces))
            except OSError as fault:
                if fault.errno != errno.ESTALE:  # replaced between the two
                    raise
            finally:
                os.close(handle)
        return None

    def names(self, folder: str) -> list[str]:
        try:
            return os.listdir(self.root / folder)  # noqa: PTH208  (a million names)
        except FileNotFoundError:
            return []

    def beat(self, path: str) -> float:
        target = self.root / path
        os.utime(target)  # no time is sent: the server takes its own
        return target.stat().st_mtime

    def _open_new(self, path: str) -> int | None:
        target = self.root / path
        for is_last in (False, True):
            try:
                return os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                return None
            except FileNotFoundError:
                if is_last:
                    raise
                _make_folder(target.parent)
        return None

    def _write_temporary(self, content: bytes, *, is_synced: bool = True) -> Path:
        temporary = self.root / "tmp" / secrets.token_hex(12)
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(handle, view) :]
            if is_synced:
                os.fsync(handle)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        finally:
            os.close(handle)
        return temporary

    def _link(self, temporary: Path, path: str) -> bool:
        target = self.root / path
        for is_last in (False, True):
            try:
                os.link(temporary, target)
            except FileExistsError:
                # The reply to a first try may have been lost: then the file is ours all the same.
                return temporary.stat().st_nlink == 2
            except FileNotFoundError:
                if is_last:
                    raise
                _make_folder(target.parent)
            else:
                return True
        return False


def _make_folder(folder: Path) -> None:
    """One level only: where the farm itself is gone, nothing of it is to come back."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
