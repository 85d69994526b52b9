"""Torch's memory snapshots become events that the allocator model replays."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tightfit.core.units import MIB
from tightfit.trace.caching_allocator import AllocatorSettings, CachingAllocator, replay

ROOT = Path(__file__).parents[3]
CLASSIC = AllocatorSettings(expandable_segments=False)
BASE = 0x7F00_0000_0000


@pytest.fixture(scope="module")
def reader() -> ModuleType:
    path = ROOT / "benchmarks" / "_snapshot.py"
    spec = importlib.util.spec_from_file_location("_snapshot", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("_snapshot", module)
    spec.loader.exec_module(module)
    return module


def entry(action: str, offset: int, size: int, stream: int = 0) -> dict[str, Any]:
    """One row of a trace, with the fields torch gives it."""
    place: dict[str, Any] = {"device_free": 0} if action == "oom" else {"addr": BASE + offset}
    return {
        "action": action, **place, "size": size, "stream": stream, "frames": [], "time_us": 0,
        "compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0),
    }  # fmt: skip


def segment(offset: int, stream: int, *blocks: tuple[int, int, str]) -> dict[str, Any]:
    """One segment with blocks of (bytes, bytes asked for, state)."""
    address = BASE + offset
    rows: list[dict[str, Any]] = []
    for size, requested, state in blocks:
        rows.append({"address": address, "size": size, "requested_size": requested})
        rows[-1] |= {"state": state, "frames": []}
        address += size
    total = sum(size for size, _, _ in blocks)
    return {
        "device": 0, "address": BASE + offset, "total_size": total, "stream": stream,
        "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
        "allocated_size": 0, "active_size": 0, "requested_size": 0, "frames": [],
        "blocks": rows,
    }  # fmt: skip


def free(offset: int, size: int) -> list[dict[str, Any]]:
    return [entry("free_requested", offset, size), entry("free_completed", offset, size)]


def test_a_whole_trace(reader: ModuleType) -> None:
    """30 MiB come and go, 5 MiB stay, a second stream gets 40; one cache is emptied."""
    trace = [
        entry("segment_alloc", 0, 30 * MIB),
        entry("alloc", 0, 30 * MIB - 100),
        entry("segment_alloc", 64 * MIB, 20 * MIB),
        entry("alloc", 64 * MIB, 5 * MIB),
        *free(0, 30 * MIB - 100),
        entry("alloc", 0, 29 * MIB + 1),
        *free(0, 29 * MIB + 1),
        entry("oom", 0, 90 * MIB),
        entry("segment_free", 0, 30 * MIB),
        entry("segment_alloc", 128 * MIB, 40 * MIB, 99),
        entry("alloc", 128 * MIB, 40 * MIB, 99),
        entry("snapshot", 0, 0),
    ]
    segments = [
        segment(64 * MIB, 0, (5 * MIB, 5 * MIB, "active_allocated"), (15 * MIB, 0, "inactive")),
        segment(128 * MIB, 99, (40 * MIB, 40 * MIB, "active_allocated")),
        {**segment(256 * MIB, 0, (6 * MIB, 6 * MIB, "active_allocated")), "device": 1},
    ]
    recorded = reader.read_snapshot({"segments": segments, "device_traces": [trace, []]})

    assert recorded["sizes"] == [30 * MIB - 100, 5 * MIB, 29 * MIB + 1, 40 * MIB]
    assert recorded["events"] == [1, 2, -1, 3, -3, 4]
    assert recorded["streams"] == [0, 0, 0, 1]
    assert recorded["peak_allocated_bytes"] == 45 * MIB
    assert recorded["peak_reserved_bytes"] == 60 * MIB
    assert (recorded["num_ooms"], recorded["num_existing"], recorded["num_private"]) == (1, 0, 0)
    assert json.loads(json.dumps(recorded)) == recorded


def test_what_stood_there_before_comes_first(reader: ModuleType) -> None:
    """Recorded late, and on expandable segments: a block dies, a block stays, pages come and go."""
    trace = [
        *free(4 * MIB, 4 * MIB),
        entry("segment_map", 20 * MIB, 20 * MIB),
        entry("alloc", 8 * MIB, 30 * MIB),
        *free(8 * MIB, 30 * MIB),
        entry("segment_unmap", 20 * MIB, 20 * MIB),
    ]
    stays = (4 * MIB, 4 * MIB - 7, "active_allocated")
    snapshot = {
        "segments": [segment(0, 0, stays, (16 * MIB, 0, "inactive"))],
        "device_traces": [trace],
    }
    recorded = reader.read_snapshot(snapshot)

    assert recorded["sizes"] == [4 * MIB - 7, 4 * MIB, 30 * MIB]
    assert recorded["events"] == [1, 2, -2, 3, -3]
    assert recorded["num_existing"] == 2
    assert recorded["peak_allocated_bytes"] == 34 * MIB
    assert recorded["peak_reserved_bytes"] == 40 * MIB


def test_a_block_another_stream_still_uses_ends_late(reader: ModuleType) -> None:
    trace = [
        entry("segment_alloc", 0, 20 * MIB),
        entry("alloc", 0, 8 * MIB),
        entry("free_requested", 0, 8 * MIB),
        entry("alloc", 8 * MIB, 8 * MIB),
        entry("free_completed", 0, 8 * MIB),
    ]
    kept = (8 * MIB, 8 * MIB, "active_allocated")
    segments = [segment(0, 0, (8 * MIB, 0, "inactive"), kept, (4 * MIB, 0, "inactive"))]
    recorded = reader.read_snapshot({"segments": segments, "device_traces": [trace]})

    assert recorded["events"] == [1, 2, -1]
    assert recorded["peak_allocated_bytes"] == 8 * MIB


@pytest.mark.parametrize("settings", [CLASSIC, AllocatorSettings()])
def test_a_trace_replays_to_its_own_peaks(reader: ModuleType, settings: AllocatorSettings) -> None:
    """A trace as the model would write it comes back with the reserve that it had."""
    rng = random.Random(0)
    allocator = CachingAllocator(settings)
    trace: list[dict[str, Any]] = []
    live: dict[int, int] = {}
    for key in range(1, 400):
        size = rng.choice([1000, 700_000, 3 * MIB, 12 * MIB, 31 * MIB, 50 * MIB])
        before = allocator.reserved_bytes
        allocator.allocate(key, size)
        if allocator.reserved_bytes > before:
            action = "segment_map" if settings.expandable_segments else "segment_alloc"
            trace.append(entry(action, 0, allocator.reserved_bytes - before))
        trace.append(entry("alloc", key * 1024 * MIB, size))
        live[key] = size
        while live and rng.random() < 0.48:
            ended = rng.choice(list(live))
            allocator.free(ended)
            trace += free(ended * 1024 * MIB, live.pop(ended))
    segments = [
        segment(key * 1024 * MIB, 0, (size, size, "active_allocated")) for key, size in live.items()
    ]
    cached = allocator.reserved_bytes - sum(live.values())
    segments.append(segment(10**6 * MIB, 0, (cached, 0, "inactive")))
    recorded = reader.read_snapshot({"segments": segments, "device_traces": [trace]})
    again = replay(recorded["sizes"], recorded["events"], settings, streams=recorded["streams"])

    assert recorded["num_existing"] == 0
    assert again is not None
    assert again.peak_reserved_bytes == recorded["peak_reserved_bytes"]
    if settings.expandable_segments:
        assert again.peak_allocated_bytes == recorded["peak_allocated_bytes"]


def test_a_snapshot_that_torch_made(reader: ModuleType) -> None:
    """Torch turns a profile of CPU tensors into a snapshot: the same fields, without segments."""
    import torch
    from torch.cuda._memory_viz import _profile_to_snapshot
    from torch.profiler import ProfilerActivity, profile

    kept = torch.ones(1024, 1024)
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True
    ) as seen:
        first = kept @ kept
        second = first + kept
        del first
        second.sum()
        del second
    make: Any = _profile_to_snapshot  # has no annotations
    snapshot = make(seen)
    cpu = len(snapshot["device_traces"]) - 1
    recorded = reader.read_snapshot(snapshot, device=cpu)
    large = {1 + i for i, size in enumerate(recorded["sizes"]) if size == 4 * MIB}

    assert [event for event in recorded["events"] if abs(event) in large] == [1, 2, 3, -2, -3]
    assert recorded["num_existing"] == 1, "`kept` was there before"
    assert recorded["peak_allocated_bytes"] // MIB == 12
