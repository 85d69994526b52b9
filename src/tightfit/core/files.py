"""Files and folders that are whole or not there: atomic writes, locks, the cache folder."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tightfit.core.errors import InvalidInputError, SetupError, UsageError
from tightfit.core.reading import describe_kind, read_json_file
from tightfit.core.units import MIB, render_bytes

PARTIAL = ".partial"
"""Ending of a file or folder that is not whole yet; never read."""


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write to a temporary name beside `path`, fsync, rename, fsync the folder.

    Only a regular file is ever replaced, and it keeps its mode. A link stays a
    link: what it points to is replaced. Missing folders are not made.
    """
    data = content.encode() if isinstance(content, str) else content
    target = _resolve_target(path)
    mode = _mode_to_keep(path, target)
    remove_abandoned(target.parent)
    temporary = target.with_name(f".{target.name[:100]}.{_own_ending()}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(mode)
        temporary.replace(target)
    except BaseException as error:  # an interrupt must leave no litter either
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise _cannot_write(path, error, num_bytes=len(data)) from error
        raise
    _sync_folder(target.parent)


def partial_path(target: Path) -> Path:
    """Where `target` is written until it is whole: `NAME.partial` beside it."""
    return target.with_name(target.name + PARTIAL)


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """A path to write to; renamed to `target` when the block succeeds, removed when it fails."""
    partial = partial_path(target)
    try:
        yield partial
        sync(partial)
        partial.replace(target)
        _sync_folder(target.parent)
    except BaseException as error:  # an interrupt must leave no litter either
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise _name_file(error, partial) from None
        raise


@contextmanager
def atomic_folder(
    target: Path, *, is_shared: bool = False, is_whole: Callable[[Path], bool] = Path.is_dir
) -> Iterator[Path]:
    """An empty folder to fill; renamed to `target` when the block succeeds, else removed.

    A folder that is at `target` already is replaced. With `is_shared`, several processes may
    make the same content at once: each fills a folder of its own, and the first to finish wins
    unless its result is not `is_whole`.
    """
    partial = partial_path(target)
    if is_shared:
        partial = unique_partial(target)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if not (is_shared and target.exists() and is_whole(target)):
            publish_folder(partial, target)
    except OSError as error:
        # Another process has put its folder there in between.
        is_taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
        if not (is_shared and is_taken and is_whole(target)):
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish_folder(partial: Path, target: Path) -> None:
    """Write everything in `partial` through to the disk, then rename it to `target`.

    A folder that is there already is moved away first and removed last.
    """
    mode = 0o666 & ~_umask()
    for path in sorted(partial.rglob("*")):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)  # safetensors writes files that only their owner can read
            sync(path)
        elif path.is_dir():
            _sync_folder(path)
    _sync_folder(partial)
    old = target.with_name(f"{target.name}.old{PARTIAL}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    _sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def unique_partial(target: Path) -> Path:
    """A temporary name beside `target` of this process's own; abandoned ones are removed."""
    remove_abandoned(target.parent)
    return target.with_name(f"{target.name}.{_own_ending()}{PARTIAL}")


@contextmanager
def temporary_folder(home: Path | None = None, *, name: str = "tightfit") -> Iterator[Path]:
    """A folder that only this user may enter, removed at the end; in `TMPDIR` without a `home`.

    What killed processes have left there is removed first.
    """
    where = home or Path(tempfile.gettempdir())
    folder = unique_partial(where / name)
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise SetupError(
            f"Cannot make a folder in {str(where)!r}: {describe_write_error(error, folder)}.",
            remedy="choose a folder that is writable and has free space"
            if home
            else "export TMPDIR=/a/folder/with/space",
        ) from error
    try:
        yield folder
    except OSError as error:
        raise _name_file(error, folder) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Temporary names say which process of which machine they are of, so that it can be told when
# nobody is at work on them any more. No lock: shared file systems may have none.

_ENDING = re.compile(r"\.([0-9a-f]{6})-(\d+)-([0-9a-f]{6})-\d+(\.partial)?$")
_PROCESS = secrets.token_hex(3)
"""Of this process and its forks: a process id may be used again."""
_COUNTER = itertools.count()
_FOREIGN_SECONDS = 86400.0
"""Age at which files of another machine, or of this one before its last boot, are abandoned."""
_looked_at: set[tuple[int, Path]] = set()


@cache
def _machine() -> str:
    """A digest of host, boot and PID namespace: within one, a process id names one process."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(str(Path("/proc/self/ns/pid").stat().st_ino))
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=3).hexdigest()


def _own_ending() -> str:
    return f"{_machine()}-{os.getpid()}-{_PROCESS}-{next(_COUNTER)}"


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files of processes that have ended; once per process and folder."""
    key = (os.getpid(), folder)
    if key in _looked_at:
        return
    _looked_at.add(key)
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if _is_abandoned(entry):
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        os.unlink(entry.path)  # noqa: PTH108


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    found = _ENDING.search(entry.name)
    if found is None:
        return False
    facts = entry.stat(follow_symlinks=False)
    if facts.st_uid != os.geteuid():
        return False
    machine, pid, process, _ = found.groups()
    if machine != _machine():
        return time.time() - facts.st_mtime > _FOREIGN_SECONDS
    return process != _PROCESS if int(pid) == os.getpid() else not _is_running(int(pid))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's
        return True
    return True


def check_writable(path: Path) -> None:
    """Raise what `write_atomic` would, before the work whose result is to be written."""
    target = _resolve_target(path)
    _mode_to_keep(path, target)
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise _cannot_write(path, error) from error


def sync(path: Path) -> None:
    """Have a file or folder on the disk for good."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _resolve_target(path: Path) -> Path:
    """The file to replace: `path` itself, or where its links end."""
    text = str(path)
    if "\0" in text:
        raise InvalidInputError(f"{text!r} is not a file name.", remedy="leave out the NUL byte")
    if text in ("", "."):
        raise UsageError("No file to write was named.", remedy="name a file, like plan.json")
    try:
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        if target.is_symlink():
            raise SetupError(
                f"Cannot write {text!r}: its links lead in a circle.",
                remedy=f"ls -l {_shell(path)}",
            )
        if not target.parent.exists():
            raise SetupError(
                f"Cannot write {text!r}: there is no folder {str(target.parent)!r}.",
                remedy=f"mkdir -p {_shell(target.parent)}",
            )
    except OSError as error:
        raise _cannot_write(path, error) from error
    return target


def _mode_to_keep(path: Path, target: Path) -> int:
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return 0o666 & ~_umask()
    except OSError as error:
        raise _cannot_write(path, error) from error
    kind = describe_kind(mode)
    if kind is not None:
        raise SetupError(
            f"Cannot write {str(path)!r}: it is {kind}, and only a file can be replaced.",
            remedy="name a file; to print the result instead, use --json"
            if kind != "a folder"
            else f"name a file in it, like {_shell(path / 'plan.json')}",
        )
    return stat.S_IMODE(mode)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # some file systems do not open folders; the rename itself is done
        sync(folder)


def _shell(path: Path) -> str:
    return shlex.quote(str(path))


def _cannot_write(path: Path, error: OSError, *, num_bytes: int | None = None) -> SetupError:
    return SetupError(
        f"Cannot write {str(path)!r}: {describe_write_error(error, path, num_bytes=num_bytes)}.",
        remedy="choose a folder that is writable and has free space",
    )


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FAILING = (errno.EROFS, errno.EIO)


def find_write_error(error: BaseException) -> SetupError | None:
    """The `SetupError` for an `OSError` of a full, read-only or failing disk; else None."""
    if not isinstance(error, OSError) or error.errno not in (*_NO_ROOM, *_FAILING):
        return None
    return _cannot_write(Path(error.filename2 or error.filename or "."), error)


def _name_file(error: OSError, path: Path) -> OSError:
    """The error with the file it concerns: failed writes carry none."""
    if error.filename is None and error.errno is not None:
        error.filename = str(path)
    return error


def describe_write_error(error: OSError, path: Path, *, num_bytes: int | None = None) -> str:
    """Why a write failed; on a full disk also how much is free and how much is needed."""
    reason = error.strerror or str(error)
    if error.errno not in _NO_ROOM:
        return reason
    home = nearest_folder(path.parent)
    with suppress(OSError):
        reason += f"; {home} has {render_bytes(shutil.disk_usage(home).free)} free"
        if num_bytes is not None:
            reason += f", {render_bytes(num_bytes)} are needed"
    return reason


# Where things that can be made again are kept: encoded data, unpacked models.


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    home = path.absolute()
    while not home.is_dir() and home != home.parent:
        home = home.parent
    return home


def cache_folder() -> Path:
    """`TIGHTFIT_CACHE`, else `XDG_CACHE_HOME/tightfit`, else `~/.cache/tightfit`. Not made here.

    A relative `XDG_CACHE_HOME` is ignored, as the XDG base directory
    specification asks (specifications.freedesktop.org/basedir-spec, version 0.8).
    """
    if named := os.environ.get("TIGHTFIT_CACHE"):
        return Path(named).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if shared and Path(shared).is_absolute():
        return Path(shared) / "tightfit"
    try:
        return Path.home() / ".cache" / "tightfit"
    except RuntimeError as error:  # no HOME and no entry in the password file, as in containers
        raise SetupError(
            "There is no home folder to keep encoded data in.",
            remedy="export TIGHTFIT_CACHE=/a/folder/with/space",
        ) from error


# File locks: one process at a time. The kernel releases a lock when its holder ends, however.

_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""From a file system without locks, as Lustre is often mounted."""
_SHORTEST_POLL_SECONDS = 0.05
_LONGEST_POLL_SECONDS = 1.0


def take_lock(
    descriptor: int, *, wait_seconds: float | None = 0.0, is_required: bool = True
) -> bool:
    """Lock an open file; False if another process still holds it after `wait_seconds`.

    `wait_seconds=None` waits without limit. With `is_required=False`, a file system that has
    no locks counts as locked; otherwise its OSError is raised.
    """
    try:
        if wait_seconds is None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return True
        return _poll(descriptor, wait_seconds)
    except OSError as error:
        if is_required or error.errno not in _UNSUPPORTED:
            raise
        return True


def _poll(descriptor: int, wait_seconds: float) -> bool:
    end = time.monotonic() + wait_seconds
    pause = min(max(wait_seconds / 100, _SHORTEST_POLL_SECONDS), _LONGEST_POLL_SECONDS)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # EACCES: a lock held by another NFS client
            if time.monotonic() >= end:
                return False
            time.sleep(pause)
        else:
            return True


def open_locked(
    path: Path,
    *,
    wait_seconds: float | None = 0.0,
    is_required: bool = True,
    mode: int = 0o644,
    flags: int = 0,
) -> int | None:
    """A descriptor of `path`, made if missing, that holds its lock; None if another process does.

    The holder may replace or remove the file while we wait, so the file that was locked is
    compared with the one at `path`, and opened again if they differ.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, mode)
        try:
            if not take_lock(descriptor, wait_seconds=wait_seconds, is_required=is_required):
                os.close(descriptor)
                return None
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # noqa: PTH116
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def write_holder(descriptor: int) -> None:
    """Name this process in a lock file that it holds, for `read_holder`."""
    holder = {"pid": os.getpid(), "host": socket.gethostname()}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def read_holder(path: Path) -> tuple[int, str] | None:
    """The process and host that a lock file names; None where it names none."""
    try:
        holder = read_json_file(path, most_bytes=MIB)
        return int(holder["pid"]), str(holder["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def locked_file(
    path: Path,
    *,
    wait_seconds: float | None = 0.0,
    is_required: bool = True,
    mode: int = 0o644,
) -> Iterator[int]:
    """Hold the lock of `path` inside the block; BlockingIOError if another process holds it."""
    descriptor = open_locked(path, wait_seconds=wait_seconds, is_required=is_required, mode=mode)
    if descriptor is None:
        raise BlockingIOError(errno.EWOULDBLOCK, "locked by another process", str(path))
    try:
        yield descriptor
    finally:
        os.close(descriptor)
