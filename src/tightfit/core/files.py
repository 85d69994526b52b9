"""Atomic writes: a file on disk is either the old one or the new one, whole."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tightfit.core.errors import EnvironmentFaultError


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write to a temporary name beside `path`, fsync, rename, fsync the folder."""
    data = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as fault:
        raise _cannot_write(path, fault) from fault
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except OSError as fault:
        Path(temporary).unlink(missing_ok=True)
        raise _cannot_write(path, fault) from fault
    _sync_folder(path.parent)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _sync_folder(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # some file systems do not open folders; the rename itself is done
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def _cannot_write(path: Path, fault: OSError) -> EnvironmentFaultError:
    return EnvironmentFaultError(
        f"Cannot write {path}: {fault.strerror or fault}.",
        remedy="choose a folder that is writable and has free space",
    )
