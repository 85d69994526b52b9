"""A stand-in for pynvml: the same call names and return types, for cards that are not here."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

MIB = 2**20


class NVMLError(Exception):
    """As pynvml's, the root of all its errors."""


class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818 - pynvml's own name
    pass


class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801, N818 - pynvml's own name
    def __str__(self) -> str:
        return "NVML Shared Library Not Found"


class FabricInfo(ctypes.Structure):
    _fields_ = (
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
    )


@dataclass(frozen=True, kw_only=True)
class Card:
    """What one device answers. None raises NotSupported, as drivers do."""

    name: str | bytes
    total_bytes: int
    compute_capability: tuple[int, int]
    free_bytes: int | None = None
    num_nvlinks: int = 0
    processes: tuple[tuple[int, int | None], ...] = ()
    num_cores: int | None = None
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    bus_bits: int | None = None
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    ecc_errors: int | None = None
    slowdown_reasons: int = 0
    fabric_state: int | None = None
    slices: tuple[Card, ...] = ()


@dataclass
class FakeNvml:
    """Give it to `read_driver` in pynvml's place."""

    cards: Sequence[Card] = ()
    driver: str | bytes = "550.54.15"
    cuda: int = 12040
    is_missing: bool = False
    is_open: bool = field(default=False, init=False)

    NVMLError = NVMLError
    c_nvmlGpuFabricInfo_t = FabricInfo  # noqa: N815 - pynvml's own name

    def nvmlInit(self) -> None:  # noqa: N802
        if self.is_missing:
            raise NVMLError_LibraryNotFound
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlSystemGetDriverVersion(self) -> str | bytes:  # noqa: N802
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        assert self.is_open
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:  # noqa: N802
        return self.cards[index]

    def nvmlDeviceGetName(self, card: Card) -> str | bytes:  # noqa: N802
        return card.name

    def nvmlDeviceGetUUID(self, card: Card) -> str:  # noqa: N802
        for position, one in enumerate(self.cards):
            if one is card:
                return f"GPU-{position:08d}-aaaa"
        return "MIG-00000000-aaaa"

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:  # noqa: N802
        free = card.total_bytes if card.free_bytes is None else card.free_bytes
        return SimpleNamespace(total=card.total_bytes, free=free, used=card.total_bytes - free)

    def nvmlDeviceGetCudaComputeCapability(self, card: Card) -> list[int]:  # noqa: N802
        return list(card.compute_capability)

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in card.processes]

    def nvmlDeviceGetNvLinkState(self, card: Card, link: int) -> int:  # noqa: N802
        if link >= card.num_nvlinks:
            raise NVMLError_NotSupported
        return 1

    def nvmlDeviceGetMaxClockInfo(self, card: Card, kind: int) -> int:  # noqa: N802
        return _told({1: card.sm_mhz, 2: card.memory_mhz}[kind])

    def nvmlDeviceGetNumGpuCores(self, card: Card) -> int:  # noqa: N802
        return _told(card.num_cores)

    def nvmlDeviceGetMemoryBusWidth(self, card: Card) -> int:  # noqa: N802
        return _told(card.bus_bits)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: Card) -> int:  # noqa: N802
        return _told(card.pcie_generation)

    def nvmlDeviceGetMaxPcieLinkWidth(self, card: Card) -> int:  # noqa: N802
        return _told(card.pcie_lanes)

    def nvmlDeviceGetTotalEccErrors(self, card: Card, kind: int, counter: int) -> int:  # noqa: N802
        assert (kind, counter) == (1, 0), "uncorrected, since the last reset"
        return _told(card.ecc_errors)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: Card) -> int:  # noqa: N802
        return card.slowdown_reasons

    def nvmlDeviceGetGpuFabricInfo(self, card: Card, info: Any) -> int:  # noqa: N802
        info._obj.state = _told(card.fabric_state)
        return 0

    def nvmlDeviceGetMigMode(self, card: Card) -> list[int]:  # noqa: N802
        if card.compute_capability < (8, 0):
            raise NVMLError_NotSupported
        return [int(bool(card.slices)), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:  # noqa: N802, ARG002
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, index: int) -> Card:  # noqa: N802
        if index >= len(card.slices):
            raise NVMLError_NotSupported
        return card.slices[index]


def _told(value: int | None) -> int:
    if value is None:
        raise NVMLError_NotSupported
    return value


T4 = Card(
    name="Tesla T4",
    total_bytes=15360 * MIB,
    free_bytes=14900 * MIB,
    compute_capability=(7, 5),
    ecc_errors=0,
)
V100 = Card(
    name="Tesla V100-SXM2-32GB",
    total_bytes=32768 * MIB,
    free_bytes=32500 * MIB,
    compute_capability=(7, 0),
    num_nvlinks=6,
    ecc_errors=0,
)
H100 = Card(
    name="NVIDIA H100 80GB HBM3",
    total_bytes=81559 * MIB,
    free_bytes=81000 * MIB,
    compute_capability=(9, 0),
    num_nvlinks=18,
    ecc_errors=0,
    fabric_state=1,
)
