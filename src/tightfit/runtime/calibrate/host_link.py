"""Copies between a GPU and pinned host memory."""

from __future__ import annotations

from functools import partial

import torch

from tightfit.core.units import MIB
from tightfit.hardware.calibration import HostLink
from tightfit.runtime.calibrate.bench import Bench

SIZES = (256 * MIB, 32 * MIB)
"""The smaller one where so much memory cannot be pinned."""


def measure_host_link(bench: Bench) -> HostLink | None:
    if bench.is_cpu:
        return None
    for size in SIZES:
        try:
            there = torch.empty(size, dtype=torch.uint8, device=bench.device)
            here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            up = bench.seconds(partial(there.copy_, here, non_blocking=True))
            down = bench.seconds(partial(here.copy_, there, non_blocking=True))
        except RuntimeError:
            continue
        return HostLink(
            to_device_bytes_per_second=size / up, from_device_bytes_per_second=size / down
        )
    bench.skipped.append("copies from pinned memory: none could be pinned")
    return None
