"""What torch's CPU allocator reports of a piece of work: live bytes and their peak."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_MARK_BYTES = 1_234_567
_MEMORY = "[memory]"
_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")


@dataclass(slots=True)
class Told:
    """What the allocator reported."""

    live_bytes: int = 0
    """When the work was done."""
    peak_bytes: int = 0
    """Since the mark, if there was one."""


def mark_start() -> None:
    """The peak counts from here."""
    torch.empty(_MARK_BYTES, dtype=torch.uint8)


@contextmanager
def listening() -> Iterator[Told]:
    """The result is filled in at the end."""
    reported = Told()
    gc.collect()  # what earlier work left in cycles must not be given back while we listen
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield reported
    profiler: Any = profiled.profiler
    for num_bytes in _list_sizes(profiler.kineto_results.experimental_event_tree()):
        reported.live_bytes += num_bytes
        reported.peak_bytes = max(reported.peak_bytes, reported.live_bytes)
        if num_bytes == -_MARK_BYTES:
            reported.peak_bytes = reported.live_bytes


def _list_sizes(events: Any) -> list[int]:
    """Bytes taken, or given back if negative, in order; without the scratch of products."""
    found: list[tuple[int, int]] = []

    def walk(some: Any) -> None:
        for event in some:
            if event.name in _PRODUCTS:
                found.extend(_list_kept(event.children))
                continue
            if event.name == _MEMORY:
                found.append(_read(event))
            walk(event.children)

    walk(events)
    return [num_bytes for _, num_bytes in sorted(found, key=lambda pair: pair[0])]


def _list_kept(events: Any) -> list[tuple[int, int]]:
    """Of one product, what it does not give back itself: a CPU without 16-bit instructions has a
    copy in fp32 meanwhile."""
    kept: list[tuple[int, int]] = []
    for event in events:
        if event.name == _MEMORY:
            when, num_bytes = _read(event)
            taken = next((one for one in kept if one[1] == -num_bytes > 0), None)
            kept.remove(taken) if taken else kept.append((when, num_bytes))
        kept += _list_kept(event.children)
    return kept


def _read(event: Any) -> tuple[int, int]:
    return event.start_time_ns, event.extra_fields.alloc_size
