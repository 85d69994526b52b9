"""environment.json: versions, machine and command of a run's last start; network file systems."""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import psutil
from pydantic import NonNegativeInt, ValidationError

from tightfit.core.files import write_atomic
from tightfit.core.frozen import Frozen
from tightfit.core.version import __version__
from tightfit.hardware.environment import read_torch_build, read_version
from tightfit.hardware.machine import read_machine
from tightfit.hardware.nvml import DriverReading, read_driver
from tightfit.runs.run_folder import RunFolder

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


# environment.json: versions, machine and command line of a run's last start.

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "bitsandbytes",
    "deepspeed",
    "liger-kernel",
    "flash-attn",
)
_CPUINFO = Path("/proc/cpuinfo")


class Environment(Frozen):
    """What the run stood on. Read by metadata and NVML; torch is never imported for it."""

    tightfit: str
    python: str
    platform: str
    packages: dict[str, str]
    """Name to version; what is not installed is not there."""
    torch_cuda: str | None = None
    """The CUDA that torch was built for; None where it was built for the CPU."""
    driver: str | None = None
    driver_cuda: str | None = None
    """The newest CUDA that the driver runs."""
    gpus: tuple[str, ...] = ()
    hostname: str
    cpu: str
    num_cores: NonNegativeInt
    memory_bytes: NonNegativeInt
    """RAM, or the container's limit where that is lower."""
    argv: tuple[str, ...]
    started_at: str
    """UTC, ISO 8601."""


def probe_environment(
    argv: Sequence[str], *, read_gpus: Callable[[], DriverReading] = read_driver
) -> Environment:
    """Look at this machine, at what is installed, and keep the command line."""
    machine, driver, build = read_machine(), read_gpus(), read_torch_build()
    found = {name: read_version(name) for name in PACKAGES}
    return Environment(
        tightfit=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: version for name, version in found.items() if version is not None},
        torch_cuda=_dotted(build.cuda) if build is not None else None,
        driver=driver.driver_version,
        driver_cuda=_dotted(driver.cuda_version),
        gpus=tuple(gpu.name for gpu in driver.gpus),
        hostname=socket.gethostname(),
        cpu=_name_cpu(),
        num_cores=machine.num_usable_cores,
        memory_bytes=machine.memory_limit_bytes or machine.memory_bytes,
        # A file name need not be text; JSON must be.
        argv=tuple(word.encode("utf-8", "backslashreplace").decode() for word in argv),
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def write_environment(run: RunFolder, environment: Environment) -> None:
    write_atomic(run.environment_path, environment.model_dump_json(indent=2) + "\n")


def read_environment(run: RunFolder) -> Environment | None:
    """None where it is missing or another version wrote it: nothing depends on it."""
    try:
        return Environment.model_validate_json(run.environment_path.read_bytes())
    except (OSError, ValidationError):
        return None


def _dotted(version: tuple[int, int] | None) -> str | None:
    return f"{version[0]}.{version[1]}" if version else None


def _name_cpu() -> str:
    """The model's name where the kernel tells one, else the architecture."""
    try:
        text = _CPUINFO.read_text("utf-8", "replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()
