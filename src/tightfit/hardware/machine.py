"""RAM, cores, shared memory and disk of this machine, container limits, peak memory."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

# The most memory that this process was resident with, mapped files included.

_KIB = 1024
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Source: proc_pid_clear_refs(5)."""


def reset_peak_memory() -> None:
    """Start the kernel's high-water mark anew, where it lets us."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text(_RESET_PEAK)


def read_peak_memory_bytes() -> int:
    """Since `reset_peak_memory`, or ever where there is no such mark.

    From the kernel's own mark, which starts anew with a program; `ru_maxrss` carries over what
    the process was before it became this program.
    """
    if _STATUS.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())):
        return int(found[1]) * _KIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else _KIB * peak


SHM = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")
INFINIBAND = Path("/sys/class/infiniband")
_NO_LIMIT_BYTES = 2**60
"""cgroup v1 writes "no limit" as a number near 2**63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This machine as a process here may use it."""

    memory_bytes: int
    available_memory_bytes: int
    memory_limit_bytes: int | None
    """The container's or job's limit, where it is lower than the RAM."""
    num_cores: int
    num_usable_cores: int
    """Those that this process may run on, and that its CPU quota pays for."""
    shm_bytes: int | None
    shm_free_bytes: int | None
    locked_memory_limit_bytes: int | None
    """`ulimit -l`; None for unlimited."""
    has_infiniband: bool = False

    @property
    def usable_memory_bytes(self) -> int:
        return min(self.memory_bytes, self.memory_limit_bytes or self.memory_bytes)


def read_machine(*, cgroup: Path = CGROUP, shm: Path = SHM) -> Machine:
    """Ask the kernel."""
    memory = psutil.virtual_memory()
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    quota = _cpu_quota(cgroup)
    limit = _memory_limit(cgroup)
    size = _disk(shm)
    return Machine(
        memory_bytes=memory.total,
        available_memory_bytes=memory.available,
        memory_limit_bytes=limit if limit is not None and limit < memory.total else None,
        num_cores=cores,
        num_usable_cores=max(1, min(usable, quota or usable)),
        shm_bytes=size[0] if size else None,
        shm_free_bytes=size[1] if size else None,
        locked_memory_limit_bytes=_locked_memory(),
        has_infiniband=INFINIBAND.is_dir() and any(INFINIBAND.iterdir()),
    )


def read_free_disk(path: Path) -> int | None:
    """Free bytes on the disk where `path` is or would be made."""
    size = _disk(path)
    return size[1] if size else None


def model_cache(environ: Mapping[str, str]) -> Path:
    """Where the hub library keeps models, by its own rules."""
    for key, tail in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if environ.get(key):
            return _expanded(environ[key]) / tail
    return _expanded(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def find_obstacle(path: Path) -> Path | None:
    """What stands where a folder of this path should be, like a file; None where none does."""
    for place in (path, *path.parents):
        try:
            mode = place.stat().st_mode
        except OSError:
            continue
        return None if stat.S_ISDIR(mode) else place
    return None


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # `~somebody` without such a user, or a user without a home
        return Path(text)


def _disk(path: Path) -> tuple[int, int] | None:
    """Total and free bytes, asked of the nearest folder that exists."""
    try:
        above = path.absolute().parents
    except OSError:  # the current folder was deleted
        above = path.parents
    for folder in (path, *above):
        try:
            usage = shutil.disk_usage(folder)
        except OSError:
            continue
        return usage.total, usage.free
    return None


def _memory_limit(cgroup: Path) -> int | None:
    """The tightest limit on the way from this process's group to the root, v2 or v1."""
    limits = [
        int(text)
        for folder, name in (
            *((folder, "memory.max") for folder in _groups(cgroup, "")),
            *((folder, "memory.limit_in_bytes") for folder in _groups(cgroup / "memory", "memory")),
        )
        if (text := _read(folder / name)).isdigit()
    ]
    real = [limit for limit in limits if 0 < limit < _NO_LIMIT_BYTES]
    return min(real, default=None)


def _cpu_quota(cgroup: Path) -> int | None:
    """Whole cores that the quota pays for, rounded up."""
    quotas = []
    for folder in _groups(cgroup, ""):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(-(-int(quota) // int(period)))
    for folder in _groups(cgroup / "cpu", "cpu"):
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(-(-int(quota) // int(period)))
    return min(quotas, default=None)


def _groups(root: Path, controller: str) -> list[Path]:
    """This process's folder under `root`, then each one above it."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            own = root / path.lstrip("/")
            return [own, *(folder for folder in own.parents if folder.is_relative_to(root))]
    return [root]


def _locked_memory() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
