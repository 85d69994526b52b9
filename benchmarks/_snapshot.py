"""A real job's allocator events: recorded by torch on a GPU, kept as integers, replayed anywhere.

    start_recording()                       # before the model is built
    ...                                     # the job
    recorded = stop_recording(device=0)     # write as JSON
    replay(recorded["sizes"], recorded["events"], settings, streams=recorded["streams"])

Names of actions and fields: `torch.cuda.memory._snapshot` and torch/csrc/cuda/Module.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypedDict

GROWS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class RecordedEvents(TypedDict):
    """`sizes`, `events` and `streams` are what `tightfit.trace` replays."""

    sizes: list[int]
    """As asked for, not rounded."""
    events: list[int]
    streams: list[int]
    """Of each allocation; numbered in order of appearance, torch's default stream 0."""
    num_existing: int
    """Allocations from before the recording, put at the front in order of address. The free
    blocks between them are lost, so record from the start where the reserve matters."""
    num_ooms: int
    num_private: int
    """Allocations in private pools (CUDA graphs), which the allocator model does not know."""
    peak_allocated_bytes: int
    """Live blocks, rounded to 512 bytes. What torch could not split off is not in a trace."""
    peak_reserved_bytes: int
    max_memory_allocated_bytes: int
    """Torch's own statistics since the recording began; 0 if not asked for."""
    max_memory_reserved_bytes: int
    num_alloc_retries: int


def start_recording(device: int = 0) -> None:
    """Record every event from here on, without stacks, and reset torch's peaks."""
    import torch

    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)


def stop_recording(device: int = 0) -> RecordedEvents:
    """What was recorded, with torch's own peaks. Call it before anything else is freed."""
    import torch

    snapshot = torch.cuda.memory._snapshot()
    statistics = torch.cuda.memory_stats(device)
    torch.cuda.memory._record_memory_history(None)
    recorded = read_snapshot(snapshot, device=device)
    recorded["max_memory_allocated_bytes"] = statistics["allocated_bytes.all.peak"]
    recorded["max_memory_reserved_bytes"] = statistics["reserved_bytes.all.peak"]
    recorded["num_alloc_retries"] = statistics["num_alloc_retries"]
    return recorded


def read_snapshot(snapshot: dict[str, Any], *, device: int = 0) -> RecordedEvents:
    """The events of one device, and the peaks they lead to.

    A block ends with `free_completed`, when it can be used again; torch's statistics count it
    until `free_requested`, and so do the peaks here. The two differ only for blocks that a
    second stream was still using.
    """
    trace = snapshot["device_traces"][device]
    segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
    existing = _existing_blocks(trace, segments)
    blocks = existing + [entry for entry in trace if entry["action"] == "alloc"]
    numbers: dict[int, int] = {0: 0}
    events, live = list(range(1, len(existing) + 1)), {}
    for number, block in enumerate(existing, start=1):
        live[block["addr"]] = number
    made = len(existing)
    for entry in trace:
        if entry["action"] == "alloc":
            made += 1
            live[entry["addr"]] = made
            events.append(made)
        elif entry["action"] == "free_completed":
            events.append(-live.pop(entry["addr"]))
    return {
        "sizes": [block["size"] for block in blocks],
        "events": events,
        "streams": [numbers.setdefault(block["stream"], len(numbers)) for block in blocks],
        "num_existing": len(existing),
        "num_ooms": sum(entry["action"] == "oom" for entry in trace),
        "num_private": sum(tuple(block.get("pool_id", (0, 0))) != (0, 0) for block in blocks),
        "peak_allocated_bytes": _peak_allocated(existing, trace),
        "peak_reserved_bytes": _peak_reserved(segments, trace),
        "max_memory_allocated_bytes": 0,
        "max_memory_reserved_bytes": 0,
        "num_alloc_retries": 0,
    }


def _existing_blocks(
    trace: list[dict[str, Any]], segments: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Blocks that were there when the recording began: freed in it, or live at its end."""
    made: set[int] = set()
    found = {}
    for entry in trace:
        if entry["action"] == "alloc":
            made.add(entry["addr"])
        elif entry["action"] == "free_completed":
            if entry["addr"] not in made:
                found[entry["addr"]] = entry
            made.discard(entry["addr"])
    for block in _live_blocks(segments):
        if block["addr"] not in made:
            found[block["addr"]] = block
    return [found[address] for address in sorted(found)]


def _live_blocks(segments: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                size = block.get("requested_size", block["size"])
                yield {"addr": address, "size": size, "stream": segment["stream"]}
            address += block["size"]


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // 512) * 512


def _peak_allocated(existing: list[dict[str, Any]], trace: list[dict[str, Any]]) -> int:
    counts = {"alloc": 1, "free_requested": -1}
    # A block that was only waiting for another stream when the recording began counts no more.
    asked = {entry["addr"] for entry in trace if entry["action"] == "free_requested"}
    ended = {entry["addr"] for entry in trace if entry["action"] == "free_completed"}
    live = sum(
        _rounded(block["size"])
        for block in existing
        if block["addr"] in asked or block["addr"] not in ended
    )
    peak = live
    for entry in trace:
        live += counts.get(entry["action"], 0) * _rounded(entry["size"])
        peak = max(peak, live)
    return peak


def _peak_reserved(segments: list[dict[str, Any]], trace: list[dict[str, Any]]) -> int:
    """Counted back from the segments at the end, so that it holds for any start."""
    changes = [GROWS.get(entry["action"], 0) * entry["size"] for entry in trace]
    reserved: int = sum(segment["total_size"] for segment in segments) - sum(changes)
    peak = reserved
    for change in changes:
        reserved += change
        peak = max(peak, reserved)
    return peak
