"""The checks behind `tightfit doctor`: GPUs, driver, memory, disks, packages, clusters, hub.

torch is known by its metadata alone: nothing heavy is imported.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import psutil

from tightfit.core.errors import SetupError
from tightfit.core.findings import Finding, Status
from tightfit.core.frozen import Frozen
from tightfit.core.units import GIB, MIB, render_bytes
from tightfit.hardware.command import RunCommand, run_command
from tightfit.hardware.machine import (
    SLOWED_BY_HEAT,
    SLOWED_BY_POWER_BRAKE,
    DriverReading,
    GpuReading,
    Machine,
    TorchBuild,
    find_obstacle,
    model_cache,
    read_driver,
    read_free_disk,
    read_machine,
    read_text,
    read_torch_build,
    read_version,
)

OK, INFO, WARNING, ERROR = Status.OK, Status.INFO, Status.WARNING, Status.ERROR


def has_nvidia_card(pci: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether an NVIDIA display or 3D controller is on the bus, with or without a driver."""
    try:
        devices = list(pci.iterdir())
    except OSError:
        return False
    return any(
        read_text(device / "vendor") == "0x10de" and read_text(device / "class").startswith("0x03")
        for device in devices
    )


def has_nvswitch(folder: Path = Path("/dev")) -> bool:
    """Whether the GPUs of this machine are connected through NVSwitches."""
    try:
        return any(entry.name.startswith("nvidia-nvswitch") for entry in folder.iterdir())
    except OSError:
        return False


def _list_process_names() -> frozenset[str]:
    names = (process.info.get("name") for process in psutil.process_iter(["name"]))
    return frozenset(name for name in names if name)


def _has_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemProbes:
    """What the checks ask of the machine; each can be replaced in a test."""

    read_gpus: Callable[[], DriverReading] = read_driver
    read_host: Callable[[], Machine] = read_machine
    read_free_disk: Callable[[Path], int | None] = read_free_disk
    read_version: Callable[[str], str | None] = read_version
    read_torch_build: Callable[[], TorchBuild | None] = read_torch_build
    has_nvidia_card: Callable[[], bool] = has_nvidia_card
    has_nvswitch: Callable[[], bool] = has_nvswitch
    list_process_names: Callable[[], frozenset[str]] = _list_process_names
    has_file: Callable[[Path], bool] = _has_file
    run: RunCommand = run_command
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python_version: tuple[int, ...] = tuple(sys.version_info[:3])


class Check(NamedTuple):
    """A finding without its area."""

    name: str
    status: Status
    detail: str
    remedy: str | None = None


class Checkup(Frozen):
    """All findings, in the order they are shown."""

    findings: tuple[Finding, ...]
    worst: Status
    exit_code: int
    """6 where there is an error, else 0."""

    def count(self, status: Status) -> int:
        return Counter(finding.status for finding in self.findings)[status]


def run_checkup(surroundings: SystemProbes | None = None) -> Checkup:
    """Look at everything. Takes a few seconds at most, whatever hangs."""
    here = surroundings or SystemProbes()
    # The two that wait for a network run beside the rest.
    with ThreadPoolExecutor(max_workers=2) as pool:
        slurm = pool.submit(_check_slurm, here)
        kubernetes = pool.submit(_check_kubernetes, here)
        driver = here.read_gpus()
        areas: dict[str, Iterable[Check]] = {
            "python": [_check_python(here)],
            "gpu": chain(_check_driver_and_gpus(here, driver), _check_services(here, driver)),
            "memory": _check_machine(here.read_host(), driver),
            "disk": _check_disks(here),
            "packages": chain(
                _check_torch(here.read_torch_build(), driver), _check_packages(here, driver)
            ),
            "cluster": (check.result() for check in (slurm, kubernetes)),
            "hub": _check_hub(here),
        }
        findings = tuple(
            Finding(area=area, **check._asdict())
            for area, checks in areas.items()
            for check in checks
        )
    worst = max((finding.status for finding in findings), key=list(Status).index)
    return Checkup(
        findings=findings, worst=worst, exit_code=SetupError.exit_code if worst is ERROR else 0
    )


def _check_python(here: SystemProbes) -> Check:
    version = ".".join(map(str, here.python_version))
    kind = "a virtual environment" if sys.prefix != sys.base_prefix else "the system's Python"
    system = f"{platform.system()} {platform.release()}"
    return Check("Python", OK, f"{version} in {kind}, on {system}")


# GPUs, their driver, and the services that machines full of them need.

_FABRIC_NOT_REPORTED, _FABRIC_COMPLETE = 0, 3
"""NVML's `nvmlGpuFabricState_t`; between them 1, not started, and 2, in progress."""
_KERNEL = "kthreadd"
"""The kernel's own process, which only the host's list has."""
_NUM_GPUS_OF_A_SWITCHED_BOX = 8
"""SXM boards with four GPUs are wired directly; eight and more go through NVSwitches."""
_SXM_NAMES = ("SXM4", "H100 80GB HBM3", "H200", "B200")


_RUN_TOOLS = "run by hand: amd-smi static    (or rocm-smi)"


def _check_driver_and_gpus(here: SystemProbes, driver: DriverReading) -> Iterator[Check]:
    for note in driver.notes:
        yield Check("AMD GPUs", WARNING if not driver.gpus else INFO, note, _RUN_TOOLS)
    if driver.is_amd:
        yield from _check_amd(driver)
        return
    if driver.error is not None and here.has_nvidia_card():
        detail = f"an NVIDIA card is on the bus, but its driver does not answer: {driver.error}"
        remedy = "nvidia-smi    (install the driver; after a driver update reboot)"
        yield Check("driver", ERROR, detail, remedy)
        return
    if driver.error is not None:
        detail = f"no NVIDIA GPU here ({driver.error}); planning needs none"
        remedy = "say the hardware in words: tightfit plan MODEL --on 1xT4"
        yield Check("GPUs", INFO, detail, remedy)
        return
    cuda = f", runs CUDA up to {_dotted(driver.cuda_version)}" if driver.cuda_version else ""
    yield Check("driver", OK, f"NVIDIA {driver.driver_version or '(unknown)'}{cuda}")
    if driver.hidden:
        hidden, all_gpus = driver.hidden, driver.hidden + len(driver.gpus)
        yield Check(
            "visible GPUs",
            WARNING if driver.gpus else ERROR,
            f"CUDA_VISIBLE_DEVICES hides {hidden} of {all_gpus}",
            "unset CUDA_VISIBLE_DEVICES, unless the scheduler set it",
        )
    elif not driver.gpus:
        remedy = "nvidia-smi -L    (lists the GPUs)"
        yield Check("GPUs", ERROR, "the driver shows none", remedy)
    for gpu in driver.gpus:
        yield from _check_gpu(gpu)


def _check_amd(driver: DriverReading) -> Iterator[Check]:
    for gpu in driver.gpus:
        yield from _check_gpu(gpu)
    if driver.hidden:
        detail = f"{driver.hidden_by} hides {driver.hidden} of {driver.hidden + len(driver.gpus)}"
        remedy = f"unset {driver.hidden_by}, unless the scheduler set it"
        yield Check("visible GPUs", WARNING, detail, remedy)
    detail = (
        "plans for AMD's cards rest on data sheets: memory and time were not measured on ROCm, "
        "and fp8 products are not planned"
    )
    yield Check("ROCm", INFO, detail, "measure the card: tightfit calibrate")


def _check_gpu(gpu: GpuReading) -> Iterator[Check]:
    name = f"GPU {gpu.index}"
    kind = gpu.architecture or "an architecture that is not stated"
    if gpu.compute_capability is not None:
        kind = _describe_capability(gpu.compute_capability)
    links = f"; {gpu.num_active_nvlinks} NVLinks" if gpu.num_active_nvlinks else ""
    yield Check(
        name,
        OK,
        f"{gpu.name}, {render_bytes(gpu.total_bytes)} ({render_bytes(gpu.free_bytes)} free), "
        f"{kind}{links}",
    )
    if gpu.processes:
        pids = ", ".join(str(process.pid) for process in gpu.processes[:6])
        used = render_bytes(gpu.total_bytes - gpu.free_bytes)
        detail = f"{len(gpu.processes)} processes hold {used} (pid {pids})"
        remedy = f"wait for them, or choose another card; to see them: nvidia-smi -i {gpu.index}"
        yield Check(f"{name} in use", WARNING, detail, remedy)
    if gpu.uncorrected_ecc_errors:
        detail = f"{gpu.uncorrected_ecc_errors} uncorrected ECC errors since the last reset"
        remedy = f"have the card reset: nvidia-smi --gpu-reset -i {gpu.index}    (needs root)"
        yield Check(f"{name} memory errors", ERROR, detail, remedy)
    for bits, why in ((SLOWED_BY_HEAT, "heat"), (SLOWED_BY_POWER_BRAKE, "the power brake")):
        if gpu.slowdown_reasons & bits:
            remedy = f"see to cooling and power: nvidia-smi -q -d PERFORMANCE -i {gpu.index}"
            detail = f"its clocks are held down by {why}"
            yield Check(f"{name} slowed", WARNING, detail, remedy)


def _describe_capability(capability: tuple[int, int]) -> str:
    # Which formats the card multiplies in hardware (CUDA C++ Programming Guide); int8 is what
    # LLM.int8() needs: tensor cores of 7.5 on.
    since = {"fp16": (5, 3), "bf16": (8, 0), "int8": (7, 5), "fp8": (8, 9)}
    formats = ", ".join(f"{key} {'yes' if capability >= v else 'no'}" for key, v in since.items())
    return f"compute capability {_dotted(capability)}: {formats}"


def _check_services(here: SystemProbes, driver: DriverReading) -> Iterator[Check]:
    """Fabric manager and DCGM, where there are several A100, H100, H200 or B200 on SXM boards."""
    boards = [gpu for gpu in driver.gpus if any(name in gpu.name for name in _SXM_NAMES)]
    if len(boards) < 2:
        return
    processes = here.list_process_names()
    if here.has_nvswitch() or len(boards) >= _NUM_GPUS_OF_A_SWITCHED_BOX:
        yield _check_fabric(boards, processes)
    if "nv-hostengine" in processes:
        yield Check("DCGM", OK, "nv-hostengine runs")
    else:
        detail = "nv-hostengine does not run: nothing monitors the GPUs' health"
        remedy = "install datacenter-gpu-manager, then: dcgmi diag -r 1"
        yield Check("DCGM", INFO, detail, remedy)


def _check_fabric(boards: Sequence[GpuReading], processes: frozenset[str]) -> Check:
    """Hopper and later report the fabric's state; of earlier boards only the service tells."""
    # From inside a container the service is not seen, but the state it left in the cards is.
    states, is_running = {gpu.fabric_state for gpu in boards}, "nv-fabricmanager" in processes
    if states == {_FABRIC_COMPLETE} or (is_running and not states & {1, 2}):
        return Check("fabric manager", OK, "the NVSwitch fabric is up")
    if not is_running and states <= {None, _FABRIC_NOT_REPORTED} and _KERNEL not in processes:
        return Check(
            "fabric manager",
            INFO,
            "nvidia-fabricmanager cannot be seen from inside a container, and these GPUs do not "
            "report the fabric's state",
            "where CUDA fails with error 802, on the host: systemctl status nvidia-fabricmanager",
        )
    why = "has not brought the fabric up" if is_running else "is not running"
    return Check(
        "fabric manager",
        ERROR,
        f"nvidia-fabricmanager {why}: CUDA will fail to start on these GPUs (error 802)",
        "systemctl enable --now nvidia-fabricmanager    (same version as the driver; needs root)",
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


# RAM, cores, shared memory and disks, compared with what training asks of them.

LITTLE_MEMORY_BYTES = 8 * GIB
CONTAINER_SHM_BYTES = 64 * MIB
"""Docker's default. NCCL and data loader workers die of it."""
LITTLE_SHM_BYTES = GIB
LITTLE_LOCKED_MEMORY_BYTES = 64 * MIB
"""InfiniBand pins its buffers; below this NCCL cannot register them."""
CORES_PER_GPU = 2


def _check_machine(machine: Machine, driver: DriverReading) -> Iterator[Check]:
    """RAM, cores, /dev/shm and locked memory."""
    usable, detail = machine.usable_memory_bytes, render_bytes(machine.memory_bytes)
    if machine.memory_limit_bytes is not None:
        detail = f"{render_bytes(usable)}, a limit on this process ({detail} in the machine)"
    detail += f", {render_bytes(min(machine.available_memory_bytes, usable))} available"
    largest = max((gpu.total_bytes for gpu in driver.gpus), default=0)
    if usable < max(LITTLE_MEMORY_BYTES, largest):
        why = "less than one GPU holds" if usable < largest else "little for loading a model"
        remedy = "ask for more memory for the job or container (Slurm --mem, docker --memory)"
        yield Check("RAM", WARNING, f"{detail}: {why}", remedy)
    else:
        yield Check("RAM", INFO if machine.memory_limit_bytes else OK, detail)
    yield _check_cores(machine, num_gpus=len(driver.gpus))
    yield _check_shm(machine)
    locked = machine.locked_memory_limit_bytes
    if machine.has_infiniband and locked is not None and locked < LITTLE_LOCKED_MEMORY_BYTES:
        detail = f"limited to {render_bytes(locked)}; InfiniBand needs it unlimited"
        remedy = "ulimit -l unlimited    (Slurm: PropagateResourceLimitsExcept=MEMLOCK)"
        yield Check("locked memory", WARNING, detail, remedy)


def _check_cores(machine: Machine, *, num_gpus: int) -> Check:
    usable, detail = machine.num_usable_cores, f"{machine.num_cores}"
    if usable < machine.num_cores:
        detail = f"{usable} of {machine.num_cores} may be used (affinity or quota)"
    if num_gpus and usable < CORES_PER_GPU * num_gpus:
        detail += f": fewer than {CORES_PER_GPU} for each of {num_gpus} GPUs; loading will lag"
        remedy = (
            "ask for more cores for the job or container (Slurm --cpus-per-task, docker --cpus)"
        )
        return Check("cores", WARNING, detail, remedy)
    return Check("cores", INFO if usable < machine.num_cores else OK, detail)


def _check_shm(machine: Machine) -> Check:
    if machine.shm_bytes is None:
        remedy = "mount -t tmpfs tmpfs /dev/shm    (needs root)"
        return Check("/dev/shm", ERROR, "is not there", remedy)
    free = machine.shm_free_bytes or 0
    detail = f"{render_bytes(machine.shm_bytes)}, {render_bytes(free)} free"
    remedy = "docker run --shm-size=16g or --ipc=host; Kubernetes: a Memory emptyDir at /dev/shm"
    if machine.shm_bytes <= CONTAINER_SHM_BYTES:
        detail += ": a container's default, too small for several GPUs or data loaders"
        return Check("/dev/shm", ERROR, detail, remedy)
    if free < LITTLE_SHM_BYTES:
        detail += ": little for several GPUs"
        return Check("/dev/shm", WARNING, detail, remedy)
    return Check("/dev/shm", OK, detail)


def _check_disks(here: SystemProbes) -> Iterator[Check]:
    """Free space where models are kept, where runs are written, and for temporary files."""
    temporary = Path(here.environ.get("TMPDIR") or tempfile.gettempdir())
    rows = [
        ("model cache", model_cache(here.environ), 20 * GIB, "export HF_HOME=/a/larger/disk"),
        ("temporary files", temporary, 2 * GIB, "export TMPDIR=/a/larger/disk"),
    ]
    try:
        rows.insert(1, ("this folder", Path.cwd(), 10 * GIB, "run in a folder on a larger disk"))
    except OSError:
        detail, remedy = "the folder this runs in was deleted", "cd ~    (or to any other folder)"
        yield Check("this folder", ERROR, detail, remedy)
    for name, path, little, remedy in rows:
        obstacle, free = find_obstacle(path), here.read_free_disk(path)
        if obstacle is not None:
            detail = f"{path} cannot be a folder: {obstacle} is not one"
            yield Check(name, ERROR, detail, remedy.replace("larger/disk", "folder"))
        elif free is None:
            yield Check(name, WARNING, f"{path} cannot be looked at", remedy)
        else:
            detail = f"{render_bytes(free)} free at {path}"
            status = OK if free >= little else ERROR if free < little // 20 else WARNING
            yield Check(name, status, detail, None if status is OK else remedy)


# torch and its companions by their metadata, and whether torch suits the driver and the cards.

MIN_DRIVER_BY_CUDA = {11: 450, 12: 525, 13: 580}
"""By CUDA's major version. Source: docs.nvidia.com/deploy/cuda-compatibility, minor versions."""
_INSTALL = "pip install 'tightfit[train]'"
_TRAINING = ("transformers", "peft", "accelerate", "datasets", "safetensors")
_OPTIONAL = {
    "bitsandbytes": "4-bit and 8-bit weights, 8-bit optimizers",
    "liger-kernel": "fused kernels",
    "deepspeed": "ZeRO with offload",
    "flash-attn": "FlashAttention kernels",
}
_FLASH_ATTENTION_NEEDS = (8, 0)


def _check_torch(torch: TorchBuild | None, driver: DriverReading) -> Iterator[Check]:
    if torch is None:
        yield Check("torch", INFO, "not installed; planning needs none", _INSTALL)
        return
    built = "built for the CPU alone"
    if torch.cuda:
        built = f"built for CUDA {_dotted(torch.cuda)}"
    elif torch.hip:
        built = f"built for ROCm {torch.hip}"
    yield Check("torch", OK, f"{torch.version}, {built}")
    if driver.is_amd:
        if not torch.hip:
            detail = f"torch {torch.version} cannot use the {driver.gpus[0].name} here"
            yield Check("torch and GPU", ERROR, detail, _REINSTALL_FOR_ROCM)
        return
    capabilities = {
        (gpu.name, gpu.compute_capability) for gpu in driver.gpus if gpu.compute_capability
    }
    if not capabilities:
        return
    matched = re.match(r"[0-9]+", driver.driver_version or "")
    release = int(matched.group()) if matched else None
    oldest_card = min(capability for _, capability in capabilities)
    wheel = "cu130" if (release or 0) >= MIN_DRIVER_BY_CUDA[13] else "cu128"
    remedy = _reinstall("cu126" if oldest_card < (7, 5) else wheel)
    if torch.cuda is None:
        detail = f"torch {torch.version} cannot use the {driver.gpus[0].name} here"
        yield Check("torch and GPU", ERROR, detail, remedy)
        return
    major, needed = torch.cuda[0], MIN_DRIVER_BY_CUDA.get(torch.cuda[0], 0)
    if release is not None and release < needed:
        detail = f"torch for CUDA {major} needs driver {needed} or newer; here is "
        remedy = f"update the driver, or: {remedy}"
        yield Check("torch and driver", ERROR, f"{detail}{driver.driver_version}", remedy)
    oldest = oldest_capability(torch)
    for name, capability in sorted(capabilities):
        is_too_new = capability >= (10, 0) and torch.cuda < (12, 8)
        if capability < oldest or is_too_new:
            detail = f"torch {torch.version} for CUDA {_dotted(torch.cuda)} has no kernels for "
            detail += f"compute capability {_dotted(capability)}"
            remedy = _reinstall("cu128" if is_too_new else "cu126")
            yield Check(f"torch and {name}", ERROR, detail, remedy)


_REINSTALL_FOR_ROCM = "install torch for ROCm: pytorch.org/get-started/locally names the wheels"


def _reinstall(wheel: str) -> str:
    index = "https://download.pytorch.org/whl"
    return f"pip install --force-reinstall torch --index-url {index}/{wheel}"


def oldest_capability(torch: TorchBuild) -> tuple[int, int]:
    """The oldest compute capability that the wheel of this torch has kernels for.

    Source: PyTorch's RELEASE.md, CUDA support matrix; pytorch issues 157517 (Maxwell and
    Pascal leave the 12.8 builds), 172352 (Volta leaves them with 2.11).
    """
    cuda = torch.cuda or (0, 0)
    if cuda >= (13, 0):
        return (7, 5)
    if cuda >= (12, 8):
        release = tuple(int(part) for part in re.findall(r"[0-9]+", torch.version)[:2])
        return (7, 0) if (2, 8) <= release < (2, 11) else (7, 5)
    return (5, 0)


def _check_packages(here: SystemProbes, driver: DriverReading) -> Iterator[Check]:
    versions = {name: here.read_version(name) for name in (*_TRAINING, *_OPTIONAL)}
    for name in _TRAINING:
        if version := versions[name]:
            yield Check(name, OK, version)
    if missing := [name for name in _TRAINING if versions[name] is None]:
        detail = f"not installed: {', '.join(missing)}; planning needs none of them"
        yield Check("training", INFO, detail, _INSTALL)
    needed = _FLASH_ATTENTION_NEEDS
    old = [gpu for gpu in driver.gpus if (gpu.compute_capability or needed) < needed]
    for name, purpose in _OPTIONAL.items():
        version = versions[name]
        if version is None:
            yield Check(name, INFO, f"not installed ({purpose}); optional")
        elif name == "flash-attn" and old:
            detail = f"{version} does not run on {old[0].name}: it needs compute capability 8.0"
            remedy = "plan with --attention sdpa on this card"
            yield Check(name, WARNING, detail, remedy)
        else:
            yield Check(name, OK, f"{version} ({purpose})")


# Slurm, Kubernetes and the model hub: reachable or not, and with which rights.

TIMEOUT_SECONDS = 3.0
_TRUE = ("1", "true", "yes", "on")
_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def _check_slurm(here: SystemProbes) -> Check:
    try:
        version = here.run(("sinfo", "--version"), TIMEOUT_SECONDS).strip()
    except SetupError:
        return Check("Slurm", INFO, "not on this machine")
    try:
        partitions = here.run(("sinfo", "-h", "-o", "%R"), TIMEOUT_SECONDS).split()
    except SetupError as error:
        detail = f"{version} is installed, but its controller does not answer: {error.problem}"
        return Check("Slurm", WARNING, detail, "scontrol ping    (is slurmctld up?)")
    names = ", ".join(dict.fromkeys(partitions)) or "none that this user may use"
    return Check("Slurm", OK, f"{version}; partitions: {names}")


def _check_kubernetes(here: SystemProbes) -> Check:
    """Whether `kubectl` answers. Silence is a warning only where a cluster is configured."""
    try:
        here.run(("kubectl", "version", "--client"), TIMEOUT_SECONDS)
    except SetupError:
        return Check("Kubernetes", INFO, "no kubectl on this machine")
    try:
        ask = ("kubectl", "get", "nodes", "-o", "name", "--request-timeout=2s")
        nodes = here.run(ask, TIMEOUT_SECONDS).split()
    except SetupError as error:
        paths = [path for path in here.environ.get("KUBECONFIG", "").split(":") if path]
        paths.append(f"{here.environ.get('HOME', '')}/.kube/config")
        in_pod = "KUBERNETES_SERVICE_HOST" in here.environ
        if not in_pod and not any(here.has_file(Path(path)) for path in paths):
            detail = "kubectl is here, no cluster is configured"
            return Check("Kubernetes", INFO, detail)
        detail = f"the configured cluster does not answer: {error.problem}"
        return Check("Kubernetes", WARNING, detail, "kubectl cluster-info")
    return Check("Kubernetes", OK, f"{len(nodes)} nodes")


def _check_hub(here: SystemProbes) -> Iterator[Check]:
    """Token and offline switches. The token itself is never shown."""
    where = find_token(here.environ, has_file=here.has_file)
    if where:
        yield Check("token", OK, f"found in {where}")
    else:
        detail = "none; gated models cannot be downloaded"
        yield Check("token", INFO, detail, "hf auth login")
    values = {name: here.environ.get(name, "").strip().casefold() for name in _OFFLINE_VARIABLES}
    if offline := [name for name, value in values.items() if value in _TRUE]:
        detail = f"on, by {', '.join(offline)}: only cached models"
        remedy = f"to download: unset {' '.join(offline)}"
        yield Check("offline mode", INFO, detail, remedy)
    else:
        yield Check("offline mode", OK, "off")


def find_token(environ: Mapping[str, str], *, has_file: Callable[[Path], bool]) -> str | None:
    """Where the hub's token is; None where there is none. The token itself is not read."""
    for name in _TOKEN_VARIABLES:
        if environ.get(name, "").strip():
            return f"the variable {name}"
    path = find_token_file(environ)
    return f"the file {path}" if has_file(path) else None


def find_token_file(environ: Mapping[str, str]) -> Path:
    """Where `hf auth login` leaves the token, be it there or not."""
    stated = environ.get("HF_TOKEN_PATH")
    # The token stays in its default folder where only the cache was moved.
    keys = ("HF_HOME", "XDG_CACHE_HOME")
    home = model_cache({key: environ[key] for key in keys if key in environ}).parent
    return Path(stated) if stated else home / "token"
