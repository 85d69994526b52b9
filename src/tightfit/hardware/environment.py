"""What a check asks of the machine (packages, driver, processes); each can be replaced in a
test.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil

from tightfit.hardware.commands import RunCommand, run_command
from tightfit.hardware.machine import Machine, read_free_disk, read_machine
from tightfit.hardware.nvml import DriverReading, read_driver

_NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"
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


def has_nvidia_card(pci: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether an NVIDIA display or 3D controller sits on the bus, with or without a driver."""
    try:
        devices = list(pci.iterdir())
    except OSError:
        return False
    return any(
        _first_line(device / "vendor") == _NVIDIA_VENDOR
        and _first_line(device / "class").startswith(_DISPLAY_CLASS)
        for device in devices
    )


def has_nvswitch(folder: Path = Path("/dev")) -> bool:
    """Whether the GPUs of this box talk through NVSwitches."""
    try:
        return any(entry.name.startswith("nvidia-nvswitch") for entry in folder.iterdir())
    except OSError:
        return False


def list_process_names() -> frozenset[str]:
    """Names of the processes that can be seen from here."""
    names = (process.info.get("name") for process in psutil.process_iter(["name"]))
    return frozenset(name for name in names if name)


def has_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _first_line(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemProbes:
    """The machine as the checkup sees it."""

    read_gpus: Callable[[], DriverReading] = read_driver
    read_host: Callable[[], Machine] = read_machine
    read_free_disk: Callable[[Path], int | None] = read_free_disk
    read_version: Callable[[str], str | None] = read_version
    read_torch_build: Callable[[], TorchBuild | None] = read_torch_build
    has_nvidia_card: Callable[[], bool] = has_nvidia_card
    has_nvswitch: Callable[[], bool] = has_nvswitch
    list_process_names: Callable[[], frozenset[str]] = list_process_names
    has_file: Callable[[Path], bool] = has_file
    run: RunCommand = run_command
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python_version: tuple[int, ...] = tuple(sys.version_info[:3])
