"""A user's folder of staged models: made safely, locked per model, listed, cleaned; free space."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tightfit.core.errors import NotFoundError, SetupError, UsageError
from tightfit.core.files import (
    PARTIAL,
    describe_write_error,
    open_locked,
    read_holder,
    write_holder,
)
from tightfit.core.frozen import Frozen
from tightfit.core.units import GIB, render_bytes
from tightfit.hardware.machine import CGROUP, NO_LIMIT_BYTES, PROC, list_groups, read_text
from tightfit.runtime.staged import (
    MANIFEST_ENDING,
    Manifest,
    home_in,
    is_fresh,
    is_whole,
    iterate_manifests,
)

PROGRESS = ".progress"
LOCK = ".lock"


class StagedCopy(Frozen):
    """One staged model, or what an interrupted staging left of it."""

    key: str
    source: str
    """Empty where only a part is there."""
    path: str
    num_bytes: int
    state: str
    """`whole`, `stale` (its source has changed or gone), `damaged` or `partial`."""
    is_busy: bool = False
    """A staging is at work on it."""


def find_home(to: Path) -> Path:
    """This user's folder in `to`, whether it is there yet or not; refuses unsafe places."""
    try:
        facts = to.stat()
    except OSError as error:
        raise NotFoundError(
            f"There is no folder {to} on {socket.gethostname()}.",
            remedy="--to a folder that every node has, like /dev/shm or the path of its local disk",
        ) from error
    if not stat.S_ISDIR(facts.st_mode):
        raise UsageError(f"{to} is not a folder.", remedy="--to /dev/shm")
    mode = stat.S_IMODE(facts.st_mode)
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise SetupError(
            f"Every user may rename what lies in {to}: it is writable for all and not sticky.",
            remedy=f"have it made sticky (chmod +t {to}), or --to a folder of your own",
        )
    if facts.st_uid not in (0, os.getuid()):
        raise SetupError(
            f"{to} belongs to another user (id {facts.st_uid}), who could change the copy.",
            remedy="--to /dev/shm, or a folder of your own",
        )
    home = home_in(to)
    _refuse_foreign(home)
    return home


def make_home(home: Path) -> Path:
    """The folder itself, closed to others."""
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        _refuse_foreign(home)
        home.chmod(0o700)
    except OSError as error:
        raise SetupError(
            f"Cannot write {home} on {socket.gethostname()}: {describe_write_error(error, home)}.",
            remedy="--to a folder that is writable on every node",
        ) from error
    return home


def _refuse_foreign(home: Path) -> None:
    """In a place that belongs to everybody, somebody may have been there first."""
    try:
        facts = home.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        what = "a link" if stat.S_ISLNK(facts.st_mode) else f"owned by user id {facts.st_uid}"
        raise SetupError(
            f"{home} on {socket.gethostname()} is {what}, and not a folder of yours.",
            remedy=f"have it removed there: ls -ld {home}; or --to another place",
        )


@contextmanager
def lock_model(home: Path, key: str) -> Iterator[None]:
    """One staging per model and node; the kernel lets go when its process dies."""
    handle = take_lock(home, key)
    if handle is None:
        holder = read_holder(home / f"{key}{LOCK}")
        process = "" if holder is None else f" (process {holder[0]})"
        raise UsageError(
            f"Another `tightfit stage`{process} is at work on {key} on {socket.gethostname()}.",
            remedy="wait for it to end, then start this again: it finds what is there",
        )
    try:
        yield
    finally:
        os.close(handle)


def take_lock(home: Path, key: str) -> int | None:
    """An open descriptor that holds the lock; None where another process does."""
    handle = open_locked(home / f"{key}{LOCK}", mode=0o600, flags=os.O_NOFOLLOW)
    if handle is not None:
        write_holder(handle)
    return handle


def list_copies(home: Path) -> list[StagedCopy]:
    """Everything in one home, by key."""
    if not home.is_dir():
        return []
    found = {}
    for manifest in iterate_manifests(home):
        path = home / manifest.key
        state = "damaged"
        if is_whole(path, manifest):
            state = "whole" if is_still_fresh(manifest) else "stale"
        found[manifest.key] = _describe_copy(home, manifest.key, path, state, manifest.source)
    endings = (PARTIAL, PROGRESS, LOCK, MANIFEST_ENDING)
    names = {path.name for path in home.iterdir()}
    keys = {next((n.removesuffix(end) for end in endings if n.endswith(end)), n) for n in names}
    for key in keys - set(found):
        for path in (home / f"{key}{PARTIAL}", home / key):
            if path.exists() and key not in found:
                found[key] = _describe_copy(home, key, path, "partial")
    return [found[key] for key in sorted(found)]


def _describe_copy(home: Path, key: str, path: Path, state: str, source: str = "") -> StagedCopy:
    is_busy = False
    if (home / f"{key}{LOCK}").exists():
        handle = take_lock(home, key)
        is_busy = handle is None
        if handle is not None:
            os.close(handle)
    return StagedCopy(
        key=key,
        source=source,
        path=str(path),
        num_bytes=measure_folder(path),
        state=state,
        is_busy=is_busy,
    )


def is_still_fresh(manifest: Manifest) -> bool:
    """Whether this node sees the source's files as the manifest has them."""
    try:
        return is_fresh(manifest)
    except (OSError, ValueError):
        return False


def clean_home(
    home: Path, key: str | None = None, *, only_partial: bool = False
) -> list[StagedCopy]:
    """Remove copies, those of one key or all; returns what was removed. Busy ones stay."""
    removed = []
    for copy in list_copies(home):
        if key not in (None, copy.key) or (only_partial and copy.state != "partial"):
            continue
        handle = take_lock(home, copy.key)
        if handle is None:
            continue
        try:
            remove_copy(home, copy.key)
            (home / f"{copy.key}{LOCK}").unlink(missing_ok=True)
        finally:
            os.close(handle)
        removed.append(copy)
    remove_litter(home)
    return removed


def remove_litter(home: Path) -> None:
    """Locks of nothing, and the home itself once it is empty."""
    if not home.is_dir():
        return
    for path in home.glob(f"*{LOCK}"):
        key = path.name.removesuffix(LOCK)
        if not (home / key).exists() and not (home / f"{key}{PARTIAL}").exists():
            handle = take_lock(home, key)
            if handle is not None:
                path.unlink(missing_ok=True)
                os.close(handle)
    if not any(home.iterdir()):
        home.rmdir()


def remove_copy(home: Path, key: str) -> None:
    """The manifest first: what is half removed is nobody's copy."""
    (home / f"{key}{MANIFEST_ENDING}").unlink(missing_ok=True)
    (home / f"{key}{PROGRESS}").unlink(missing_ok=True)
    for path in (home / key, home / f"{key}{PARTIAL}"):
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)


def measure_folder(folder: Path) -> int:
    """Bytes that its files really take, which of a partial one is less than their lengths."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            facts = path.lstat()
            if stat.S_ISREG(facts.st_mode):
                total += min(facts.st_size, facts.st_blocks * 512)
    return total


# Whether a node has room for a copy: on the disk, and, for a RAM disk, in its memory as well.

MARGIN_FRACTION = 0.01
"""File systems need a little for themselves."""
LEAST_LEFT_BYTES = GIB
LEAST_LEFT_FRACTION = 0.05
"""Memory that a copy in RAM leaves at least, where nobody says how much the job needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSpace:
    """What a copy may take at one place of one node."""

    disk_bytes: int
    is_memory: bool
    """The place is a RAM disk: what lies there is missing to programs."""
    memory_bytes: int
    """Free, or freed by the kernel when asked for, within the job's limit."""
    total_memory_bytes: int


def read_free_space(path: Path, *, cgroup: Path = CGROUP, proc: Path = PROC) -> FreeSpace:
    """Ask the kernel about the place where `path` is or would be made."""
    home = path
    while not home.exists() and home != home.parent:
        home = home.parent
    disk = os.statvfs(home)
    device = home.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    is_memory = False
    for line in read_text(proc / "self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [number]:
            is_memory = after.split()[:1] in (["tmpfs"], ["ramfs"])
            break
    memory = psutil.virtual_memory()
    limits = list(_read_limits(cgroup, proc))
    return FreeSpace(
        disk_bytes=disk.f_bavail * disk.f_frsize,
        is_memory=is_memory,
        memory_bytes=min([memory.available, *(limit - used for limit, used in limits)]),
        total_memory_bytes=min([memory.total, *(limit for limit, _ in limits)]),
    )


def find_shortage(
    room: FreeSpace, needed_bytes: int, *, leave_bytes: int | None = None
) -> str | None:
    """Why the copy does not fit, as a sentence without its start; None where it does."""
    if needed_bytes == 0:
        return None
    needed = int(needed_bytes * (1 + MARGIN_FRACTION))
    if room.disk_bytes < needed:
        return f"it needs {render_bytes(needed_bytes)} and {render_bytes(room.disk_bytes)} are free"
    least = max(LEAST_LEFT_BYTES, int(LEAST_LEFT_FRACTION * room.total_memory_bytes))
    left = room.memory_bytes - needed
    wanted = least if leave_bytes is None else leave_bytes
    if room.is_memory and left < wanted:
        return (
            f"it needs {render_bytes(needed_bytes)} of memory, of which "
            f"{render_bytes(max(0, room.memory_bytes))} are left, and {render_bytes(wanted)} are "
            "to stay free for the job"
        )
    return None


def _read_limits(cgroup: Path, proc: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of this process's groups, up to the root; v2 and v1.

    The kernel counts clean pages of files as used, but gives them back, so they are not counted.
    """
    old = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for root, controller, (limit_file, used_file, idle_name) in (
        (cgroup, "", ("memory.max", "memory.current", "inactive_file")),
        (cgroup / "memory", "memory", old),
    ):
        for folder in list_groups(root, controller, proc=proc):
            limit, used = read_text(folder / limit_file), read_text(folder / used_file)
            if limit.isdigit() and used.isdigit() and int(limit) < NO_LIMIT_BYTES:
                facts = read_text(folder / "memory.stat")
                idle = re.search(rf"^{idle_name} (\d+)$", facts, re.MULTILINE)
                yield int(limit), max(0, int(used) - (int(idle[1]) if idle else 0))
