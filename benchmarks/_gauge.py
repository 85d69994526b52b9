"""The allocator's readings on a card, stage by stage, and limits on what it may reserve."""

from __future__ import annotations

import gc
from typing import Any

import torch


class Gauge:
    """The allocator's readings; without CUDA all are 0."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def read(self, name: str) -> int:
        return int(torch.cuda.memory_stats().get(name, 0)) if self._is_cuda else 0

    def allocated(self) -> int:
        return self.read("allocated_bytes.all.current")

    def wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def begin(self) -> None:
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def end(self) -> dict[str, int]:
        """One stage: what it peaked at, what it leaves, how many allocations there were so far."""
        self.wait()
        return {
            "peak_allocated_bytes": self.read("allocated_bytes.all.peak"),
            "peak_reserved_bytes": self.read("reserved_bytes.all.peak"),
            "allocated_bytes": self.allocated(),
            "reserved_bytes": self.read("reserved_bytes.all.current"),
            "num_allocations": self.read("allocation.all.allocated"),
        }

    def outside(self) -> int:
        """Context, kernels and libraries' own memory: what torch's allocator does not hold."""
        if not self._is_cuda:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    def limit(self, capacity_bytes: int | None) -> None:
        """Let torch reserve so much and no more; None lifts the limit."""
        if not self._is_cuda:
            return
        total = torch.cuda.get_device_properties(0).total_memory
        wanted = total if capacity_bytes is None else capacity_bytes
        torch.cuda.set_per_process_memory_fraction(min(1.0, (wanted + 0.5) / total), 0)

    def release(self) -> None:
        """Give back what nothing uses, cuBLAS's workspace included."""
        gc.collect()
        if self._is_cuda:
            torch.cuda.synchronize()
            clear: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
            if clear is not None:
                clear()
            torch.cuda.empty_cache()

    def describe(self) -> dict[str, Any]:
        if not self._is_cuda:
            return {}
        cuda: Any = torch.cuda  # not annotated throughout
        segments = cuda.memory_snapshot()
        return {
            "gpu": torch.cuda.get_device_name(),
            "total_memory_bytes": torch.cuda.get_device_properties(0).total_memory,
            "is_expandable": any(segment.get("is_expandable") for segment in segments),
        }
