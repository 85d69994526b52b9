"""What a node tells about itself: versions, devices, memory, limits. Loads no torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
from ipaddress import ip_network
from pathlib import Path

import psutil

from tightfit import __version__
from tightfit.launch.preflight.messages import Device, Facts

PACKAGES = ("torch", "transformers", "peft", "accelerate", "deepspeed", "bitsandbytes")
_BUILD = re.compile(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


def probe_facts() -> Facts:
    memory = psutil.virtual_memory()
    shm = _usage("/dev/shm")
    driver, gpus = _probe_gpus()
    return Facts(
        hostname=socket.gethostname(),
        python=platform.python_version(),
        packages=probe_packages(),
        driver=driver,
        gpus=gpus,
        devices=probe_devices(),
        memory_bytes=memory.total,
        free_memory_bytes=memory.available,
        shm_bytes=shm[0],
        shm_free_bytes=shm[1],
        disk_free_bytes=_usage(tempfile.gettempdir())[1],
        num_cores=len(os.sched_getaffinity(0)),
        max_open_files=_limit(resource.RLIMIT_NOFILE) or 0,
        max_locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
    )


def probe_packages() -> dict[str, str | None]:
    """Versions by their metadata; tightfit's is the one that runs."""
    found: dict[str, str | None] = {"tightfit": __version__}
    for name in PACKAGES:
        found[name] = _version(name)
    found["torch's CUDA"] = _read_torch_build()
    found["NCCL"] = next(
        (v for v in map(_version, ("nvidia-nccl-cu13", "nvidia-nccl-cu12")) if v is not None), None
    )
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read_torch_build() -> str | None:
    """torch/version.py says for which CUDA it was built; reading is cheaper than importing."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        found = _BUILD.search(Path(spec.origin).with_name("version.py").read_text())
    except (OSError, ValueError):
        return None
    return found[1] if found else "none"


def probe_devices() -> tuple[Device, ...]:
    stats = psutil.net_if_stats()
    return tuple(
        Device(
            name=name,
            is_up=name in stats and stats[name].isup,
            mtu=stats[name].mtu if name in stats else 0,
            bits_per_second=_speed(stats[name].speed if name in stats else 0),
            addresses=tuple(
                _with_prefix(entry.address, entry.netmask)
                for entry in entries
                if entry.family in (socket.AF_INET, socket.AF_INET6)
            ),
        )
        for name, entries in psutil.net_if_addrs().items()
    )


def _speed(megabits: int) -> float:
    """Devices that do not know their speed tell 0, -1 or 65535."""
    return megabits * 1e6 if 0 < megabits < 65_535 or megabits > 65_535 else 0.0


def _with_prefix(address: str, netmask: str | None) -> str:
    plain = address.partition("%")[0]
    if not netmask:
        return plain
    if ":" in netmask:
        bits = sum(bin(int(part or "0", 16)).count("1") for part in netmask.split(":"))
        return f"{plain}/{bits}"
    return f"{plain}/{ip_network(f'0.0.0.0/{netmask}').prefixlen}"


def _probe_gpus() -> tuple[str | None, tuple[str, ...]]:
    from tightfit.hardware.nvml import read_driver

    reading = read_driver()
    return reading.driver_version, tuple(gpu.name for gpu in reading.gpus)


def _usage(path: str) -> tuple[int, int]:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return 0, 0
    return usage.total, usage.free


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft
