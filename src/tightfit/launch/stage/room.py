"""Whether a node has room for a copy: on the disk, and, for a RAM disk, in its memory as well."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from tightfit.core.units import GIB, render_bytes

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")
MARGIN_FRACTION = 0.01
"""File systems need a little for themselves."""
LEAST_LEFT_BYTES = GIB
LEAST_LEFT_FRACTION = 0.05
"""Memory that a copy in RAM leaves at least, where nobody says how much the job needs."""
_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a copy may take at one place of one node."""

    disk_bytes: int
    is_memory: bool
    """The place is a RAM disk: what lies there is missing to programs."""
    memory_bytes: int
    """Free, or freed by the kernel when asked for, within the job's limit."""
    total_memory_bytes: int


def read_room(path: Path, *, cgroup: Path = CGROUP, proc: Path = PROC) -> Room:
    """Ask the kernel about the place where `path` is or would be made."""
    home = path
    while not home.exists() and home != home.parent:
        home = home.parent
    disk = os.statvfs(home)
    memory = psutil.virtual_memory()
    limits = list(_read_limits(cgroup, proc))
    return Room(
        disk_bytes=disk.f_bavail * disk.f_frsize,
        is_memory=_is_memory(home, proc),
        memory_bytes=min([memory.available, *(limit - used for limit, used in limits)]),
        total_memory_bytes=min([memory.total, *(limit for limit, _ in limits)]),
    )


def find_shortage(room: Room, needed_bytes: int, *, leave_bytes: int | None = None) -> str | None:
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


def _is_memory(path: Path, proc: Path) -> bool:
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in _read(proc / "self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [number]:
            return after.split()[:1] in (["tmpfs"], ["ramfs"])
    return False


def _read_limits(cgroup: Path, proc: Path) -> list[tuple[int, int]]:
    """Limit and use of this process's groups, up to the root; v2 and v1.

    Clean pages of files count as used by the kernel and are given back by it, so they are not.
    """
    found = []
    for line in _read(proc / "self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, names = cgroup, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroup / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = root / path.lstrip("/")
        for folder in (own, *(above for above in own.parents if above.is_relative_to(root))):
            limit, used = _read(folder / names[0]).strip(), _read(folder / names[1]).strip()
            if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT_BYTES:
                idle = _read_stat(folder / "memory.stat", names[2])
                found.append((int(limit), max(0, int(used) - idle)))
    return found


def _read_stat(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
