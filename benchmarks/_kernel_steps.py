"""One training step under torch's profiler: device time by operation and shapes."""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from _kernels import Meter
from _trace_build import keep_gathered, shrink_job, write_config
from _trace_job import Run
from _trace_jobs import Job

NUM_WARM, NUM_TIMED = 3, 6
NUM_BEFORE = 4
"""Steps between the profiler's start, which lets the card rest, and the one it records."""
LEAST_SECONDS = 20e-6
"""Operations of less than this in sum are counted, but have no row."""
LEAST_DIM = 1024
"""A product with a smaller side than this does not show how fast the card multiplies."""
SAMPLE_SECONDS = 0.08

Op = tuple[str, list[Any], int, float]
"""Name, shapes of its inputs, how often, device seconds in sum."""
Readings = dict[str, list[Any]]
"""Of the card, while the steps that are timed ran."""


def measure_steps(job: Job, device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """Rows `steps` and `ops` of one job."""
    is_tiny = device.type == "cpu"
    if is_tiny:
        job = replace(job, strategy=job.strategy.model_copy(update=shrink_job(job.strategy)))
    with tempfile.TemporaryDirectory() as name:
        write_config(job, Path(name), is_tiny=is_tiny)
        run = Run(job, device, Path(name))
        if job.strategy.sharding.is_fsdp:
            keep_gathered(run.engine.module)
        for number in range(NUM_WARM):
            run.step(number)
        with Meter(device, every_seconds=SAMPLE_SECONDS) as meter:
            seconds = [run.step(NUM_WARM + number)["seconds"] for number in range(NUM_TIMED)]
        ops = _profile(run, device)
    readings: Readings = {"clock_mhz": meter.clock_mhz, "power_watts": meter.power_watts}
    return describe_steps(job.name, seconds, readings, ops)


def _profile(run: Run, device: torch.device) -> list[Op]:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    plan = schedule(wait=0, warmup=NUM_BEFORE, active=1, repeat=1)
    with profile(activities=activities, record_shapes=True, schedule=plan) as profiler:
        for number in range(NUM_BEFORE + 1):
            run.step(NUM_WARM + NUM_TIMED + number)
            profiler.step()
    averages = profiler.key_averages(group_by_input_shape=True)
    return [*read_ops(averages, device), *read_kernels(profiler.events() or ())]


def read_ops(events: Iterable[Any], device: torch.device) -> list[Op]:
    """Operations with time of their own on the device.

    Kernels come once more as events of the device, and so do spans such as `Optimizer.step`.
    """
    name = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    autograd: Any = torch.autograd  # does not export it by name
    return [
        (event.key, event.input_shapes, event.count, getattr(event, name) / 1e6)
        for event in events
        if event.device_type == autograd.DeviceType.CPU
        and getattr(event, name) > 0
        and not event.key.startswith("ProfilerStep")
    ]


def read_kernels(events: Iterable[Any]) -> list[Op]:
    """Kernels that no operation started, such as those of an optimizer of ours.

    The profiler lists every kernel by itself, and those of operations once more with these.
    """
    autograd: Any = torch.autograd
    seconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in events:
        if event.device_type == autograd.DeviceType.CPU:
            for kernel in event.kernels:
                seconds[kernel.name] -= kernel.duration / 1e6
                counts[kernel.name] -= 1
        elif not event.is_user_annotation:
            seconds[event.name] += event.time_range.elapsed_us() / 1e6
            counts[event.name] += 1
    return [(name, [], count, seconds[name]) for name, count in counts.items() if count > 0]


def describe_steps(
    name: str, seconds: list[float], readings: Readings, ops: list[Op]
) -> dict[str, list[dict[str, Any]]]:
    """One row for the job, and one for each operation that takes long enough."""
    kept = [op for op in ops if op[3] >= LEAST_SECONDS]
    row = {
        "name": name,
        "step_seconds": statistics.median(seconds),
        "all_step_seconds": [round(each, 5) for each in seconds],
        "device_seconds": round(sum(op[3] for op in ops), 6),
        "left_out_seconds": round(sum(op[3] for op in ops) - sum(op[3] for op in kept), 6),
        "product_seconds": round(sum(op[3] for op in kept if count_flops(op)), 6),
        "product_flops_per_second": rate_products(kept),
        **readings,
    }
    rows = [
        {"job": name, "op": op, "shapes": shapes, "count": count, "seconds": round(each, 7)}
        for op, shapes, count, each in sorted(kept, key=lambda op: -op[3])
    ]
    return {"steps": [row], "ops": rows}


def count_flops(op: Op) -> int:
    """Of a large product; 0 for everything else."""
    name, shapes, count, _ = op
    place = {"aten::mm": 0, "aten::addmm": 1}.get(name)
    if place is None:
        return 0
    (num_rows, depth), (_, num_columns) = shapes[place : place + 2]
    if min(num_rows, depth, num_columns) < LEAST_DIM:
        return 0
    return int(2 * num_rows * depth * num_columns * count)


def rate_products(ops: list[Op]) -> float | None:
    """Of the step's large products together; None where there are none."""
    large = [op for op in ops if count_flops(op)]
    return sum(map(count_flops, large)) / sum(op[3] for op in large) if large else None
