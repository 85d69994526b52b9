"""This machine: RAM, cores, disks, container limits, packages, and its GPUs by their drivers."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
import resource
import shutil
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from tightfit.hardware.amd import AmdReading, read_amd

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
PROC = Path("/proc")
INFINIBAND = Path("/sys/class/infiniband")
NO_LIMIT_BYTES = 2**60
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
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        memory_bytes=memory.total,
        available_memory_bytes=memory.available,
        memory_limit_bytes=limit if limit is not None and limit < memory.total else None,
        num_cores=cores,
        num_usable_cores=max(1, min(usable, quota or usable)),
        shm_bytes=size[0] if size else None,
        shm_free_bytes=size[1] if size else None,
        locked_memory_limit_bytes=None if locked == resource.RLIM_INFINITY else locked,
        has_infiniband=INFINIBAND.is_dir() and any(INFINIBAND.iterdir()),
    )


def read_busy_threads(machine: Machine) -> float:
    """Threads that wanted to run on the usable cores over the last minute, by the load average."""
    try:
        load = os.getloadavg()[0]
    except OSError:
        return 0.0
    return load * machine.num_usable_cores / max(1, machine.num_cores)


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


NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p",
     "glusterfs", "fuse.sshfs", "fuse.glusterfs", "fuse.juicefs", "wekafs", "panfs", "pvfs2"}
)  # fmt: skip


def is_network_folder(folder: Path) -> bool:
    """By the mount that holds it; False where mounts cannot be listed."""
    return find_file_system(folder) in NETWORK_FILE_SYSTEMS


def find_file_system(folder: Path) -> str | None:
    """The file system's name, as `nfs4` or `ext4`; None where mounts cannot be listed."""
    try:
        place = folder.resolve()
        mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    except (OSError, RuntimeError):  # links in a circle
        return None
    above = (path for path in (place, *place.parents) if path in mounts)
    return next((mounts[path].lower() for path in above), None)


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
    files = [
        *(folder / "memory.max" for folder in list_groups(cgroup, "")),
        *(folder / "memory.limit_in_bytes" for folder in list_groups(cgroup / "memory", "memory")),
    ]
    limits = [int(text) for path in files if (text := read_text(path)).isdigit()]
    return min((limit for limit in limits if 0 < limit < NO_LIMIT_BYTES), default=None)


def _cpu_quota(cgroup: Path) -> int | None:
    """Whole cores that the quota pays for, rounded up."""
    pairs = [read_text(folder / "cpu.max").split(" ") for folder in list_groups(cgroup, "")]
    pairs += [
        [read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")]
        for folder in list_groups(cgroup / "cpu", "cpu")
    ]
    quotas = [
        -(-int(quota) // int(period))
        for quota, period in (pair for pair in pairs if len(pair) == 2)
        if quota.isdigit() and period.isdigit() and int(period)
    ]
    return min(quotas, default=None)


def list_groups(root: Path, controller: str, *, proc: Path = PROC) -> list[Path]:
    """This process's folder under `root`, then each one above it.

    `controller`: `memory`, `cpu`; empty for cgroup v2.
    """
    for line in read_text(proc / "self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            own = root / path.lstrip("/")
            return [own, *(folder for folder in own.parents if folder.is_relative_to(root))]
    return [root]


def read_text(path: Path) -> str:
    """The stripped text; empty where the file cannot be read."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


# Installed packages, by their metadata.

_BUILD = re.compile(r"^(cuda|hip)\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """What the installed torch was built for."""

    version: str
    cuda: tuple[int, int] | None
    hip: str | None = None


def read_version(package: str) -> str | None:
    """Installed version by metadata; None where it is not installed."""
    try:
        return metadata.version(package)
    except (metadata.PackageNotFoundError, ValueError):
        return None


def read_torch_build() -> TorchBuild | None:
    """Read the text of torch/version.py; importing torch takes seconds."""
    try:
        distribution = metadata.distribution("torch")
        text = Path(str(distribution.locate_file("torch/version.py"))).read_text("utf-8")
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return None
    return parse_torch_build(distribution.version, text)


def parse_torch_build(version: str, text: str) -> TorchBuild:
    """From the metadata's version and the text of torch/version.py."""
    built = dict(_BUILD.findall(text))
    numbers = re.match(r"([0-9]+)\.([0-9]+)", built.get("cuda", ""))
    cuda = (int(numbers[1]), int(numbers[2])) if numbers else None
    return TorchBuild(version=version, cuda=cuda, hip=built.get("hip"))


# What the NVIDIA driver says about the GPUs of this machine, by NVML; no CUDA, no torch. Where it
# shows none, what the tools of AMD's driver say.

MAX_NVLINKS = 36
UNCORRECTED, VOLATILE = 1, 0
CLOCK_SM, CLOCK_MEMORY = 1, 2
SLOWED_BY_HEAT = 0x20 | 0x40
SLOWED_BY_POWER_BRAKE = 0x80


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that holds memory on a GPU."""

    pid: int
    memory_bytes: int | None
    """None where the driver does not say, as inside containers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One device as its driver shows it. None: this driver or card does not say."""

    index: int
    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int] | None
    """None: not NVIDIA's."""
    architecture: str = ""
    """AMD's: `gfx942`."""
    processes: tuple[GpuProcess, ...] = ()
    num_active_nvlinks: int = 0
    num_cores: int | None = None
    max_sm_hz: float | None = None
    max_memory_hz: float | None = None
    memory_bus_bits: int | None = None
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    uncorrected_ecc_errors: int | None = None
    slowdown_reasons: int = 0
    """Bits of NVML's clock event reasons."""
    fabric_state: int | None = None
    """Of an NVSwitch box: 1 not started, 2 in progress, 3 complete. 0 or None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReading:
    """All GPUs, or why there are none to see."""

    gpus: tuple[GpuReading, ...] = ()
    driver_version: str | None = None
    cuda_version: tuple[int, int] | None = None
    """The newest CUDA that the driver runs."""
    error: str | None = None
    """Why NVML could not be asked; None where it answered."""
    hidden: int = 0
    """GPUs that the variable `hidden_by` takes away."""
    hidden_by: str = "CUDA_VISIBLE_DEVICES"
    notes: tuple[str, ...] = ()
    """What could not be read of AMD's cards, or was left out."""

    @property
    def is_amd(self) -> bool:
        return any(gpu.compute_capability is None for gpu in self.gpus)


def read_driver(
    nvml: Any = None,
    *,
    environ: Mapping[str, str] | None = None,
    ask_amd: Callable[[], AmdReading] = read_amd,
) -> DriverReading:
    """Ask NVML, and AMD's tools where it shows no GPU: one torch uses one make of them.

    `nvml` is pynvml or anything with the same calls. Never raises for a driver.
    """
    settings = os.environ if environ is None else environ
    reading = _read_nvidia(nvml, settings)
    if reading.gpus or reading.hidden:
        return reading
    found = ask_amd()
    if not found.cards:
        return replace(reading, notes=found.notes)
    return _show_amd(found, settings)


_HIP_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""HIP reads the first that is set, among what ROCR_VISIBLE_DEVICES leaves.
Source: rocm.docs.amd.com, GPU isolation techniques."""


def _show_amd(found: AmdReading, environ: Mapping[str, str]) -> DriverReading:
    gpus = [
        GpuReading(
            index=card.index,
            name=card.name,
            uuid=card.uuid,
            total_bytes=card.total_bytes,
            free_bytes=card.total_bytes - card.used_bytes,
            compute_capability=None,
            architecture=card.architecture,
        )
        for card in found.cards
    ]
    by_hip = next((key for key in _HIP_VARIABLES if key in environ), _HIP_VARIABLES[0])
    hidden_by = by_hip
    visible = gpus
    for key in ("ROCR_VISIBLE_DEVICES", by_hip):
        if key in environ:
            left = _list_visible(visible, environ[key])
            hidden_by = key if len(left) < len(visible) else hidden_by
            visible = [replace(gpu, index=number) for number, gpu in enumerate(left)]
    hidden = len(gpus) - len(visible)
    return DriverReading(gpus=tuple(visible), hidden=hidden, hidden_by=hidden_by, notes=found.notes)


def _read_nvidia(nvml: Any, environ: Mapping[str, str]) -> DriverReading:
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return DriverReading(error="the package nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError) as error:
        return DriverReading(error=str(error))
    try:
        readings: list[GpuReading] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            readings += [_read_gpu(nvml, part, index) for part in _list_parts(nvml, device)]
        version = _ask(nvml, "nvmlSystemGetCudaDriverVersion")
        shown = environ.get("CUDA_VISIBLE_DEVICES")
        visible = readings if shown is None else _list_visible(readings, shown)
        return DriverReading(
            gpus=tuple(visible),
            driver_version=_text(_ask(nvml, "nvmlSystemGetDriverVersion")),
            cuda_version=(version // 1000, version % 1000 // 10) if version else None,
            hidden=len(readings) - len(visible),
        )
    except nvml.NVMLError as error:
        return DriverReading(error=str(error))
    finally:
        _ask(nvml, "nvmlShutdown")


def _list_parts(nvml: Any, device: Any) -> list[Any]:
    """The device itself, or its MIG slices where it is divided: CUDA then sees only those."""
    mode = _ask(nvml, "nvmlDeviceGetMigMode", device)
    if not mode or mode[0] != 1:
        return [device]
    count = _ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", device) or 0
    parts = [
        _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", device, index) for index in range(count)
    ]
    return [part for part in parts if part is not None]


def _read_gpu(nvml: Any, device: Any, index: int) -> GpuReading:
    def ask(name: str, *arguments: object) -> Any:
        return _ask(nvml, f"nvmlDeviceGet{name}", device, *arguments)

    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    sm_mhz, memory_mhz = ask("MaxClockInfo", CLOCK_SM), ask("MaxClockInfo", CLOCK_MEMORY)
    # None: past the card's last link, or a card without any.
    states = (ask("NvLinkState", link) for link in range(MAX_NVLINKS))
    links = list(takewhile(lambda state: state is not None, states))
    fabric = None
    if shape := getattr(nvml, "c_nvmlGpuFabricInfo_t", None):
        info = shape()
        if ask("GpuFabricInfo", ctypes.byref(info)) is not None:
            fabric = int(info.state)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device)
    return GpuReading(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(device)) or "unknown GPU",
        uuid=_text(ask("UUID")) or "",
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        compute_capability=(int(major), int(minor)),
        processes=tuple(
            GpuProcess(pid=int(one.pid), memory_bytes=one.usedGpuMemory)
            for one in ask("ComputeRunningProcesses") or ()
        ),
        num_active_nvlinks=links.count(1),
        num_cores=ask("NumGpuCores"),
        max_sm_hz=sm_mhz * 1e6 if sm_mhz else None,
        max_memory_hz=memory_mhz * 1e6 if memory_mhz else None,
        memory_bus_bits=ask("MemoryBusWidth"),
        pcie_generation=ask("MaxPcieLinkGeneration"),
        pcie_lanes=ask("MaxPcieLinkWidth"),
        uncorrected_ecc_errors=ask("TotalEccErrors", UNCORRECTED, VOLATILE),
        slowdown_reasons=ask("CurrentClocksThrottleReasons") or 0,
        fabric_state=fabric,
    )


def _list_visible(readings: Sequence[GpuReading], setting: str) -> list[GpuReading]:
    """The GPUs CUDA will show. As CUDA does, stop at the first entry that names none of them."""

    def is_named(reading: GpuReading, entry: str) -> bool:
        if entry.isascii() and entry.isdigit():
            return reading.index == int(entry[:9])
        return entry.startswith(("GPU-", "MIG-")) and reading.uuid.startswith(entry)

    chosen: list[GpuReading] = []
    for entry in (part.strip() for part in setting.split(",")):
        match = next((one for one in readings if is_named(one, entry)), None)
        if match is None:
            break
        if match not in chosen:
            chosen.append(match)
    return chosen


def _ask(nvml: Any, name: str, *arguments: object) -> Any:
    """None where this card, driver or pynvml does not know the question."""
    call = getattr(nvml, name, None)
    if call is None:
        return None
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes | None) -> str | None:
    """Older pynvml gives bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
