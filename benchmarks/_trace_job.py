"""One job on the real card, in a process of its own: its peaks, its events, or whether it survives.

`measure` runs the training step a few times and reads the allocator and the clock. `events` also
keeps every allocation of loading and the first steps. `cap` runs under a limit from the start.
`surviving` finds the smallest limit under which the steps still run.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from _gauge import Gauge
from _trace_build import (
    build,
    give_optimizer,
    keep_gathered,
    make_batches,
    make_context,
    make_training,
    shrink_job,
    write_config,
)
from _trace_jobs import Job
from tightfit.core.strategy import Training
from tightfit.runtime.libraries import is_out_of_memory
from tightfit.training.batches import Batch, count_trained, to_device
from tightfit.training.distributed import DistContext
from tightfit.training.engine import TorchEngine
from tightfit.training.step import mix_seed, train_step

MEASURE, EVENTS, CAP, SURVIVING = "measure", "events", "cap", "surviving"
MODES = (MEASURE, EVENTS, CAP, SURVIVING)
NUM_RECORDED = 2
"""Steps whose events are kept: the one in which the optimizer's state appears, and a steady one."""
NUM_TIMED = 5
NUM_CAPPED = 3
"""Steps that must pass under a limit."""
TOLERANCE_FRACTION = 0.003
"""Between a limit that survives and one that does not."""
GRAIN_BYTES = 2 * 2**20
"""The allocator grows by multiples of it."""
LEAK_BYTES = 4 * 2**20
"""More than this left behind by a failed try, and the model is built anew."""
LEARNING_RATE = 1e-5
MOST_WIDENINGS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to do with one job."""

    job: Job
    modes: tuple[str, ...]
    device: str
    capacity_bytes: int | None = None
    """For `cap` the limit, for `surviving` where to look first."""


class Run:
    """A job that has been built, and its fixed batches."""

    def __init__(self, job: Job, device: torch.device, folder: Path) -> None:
        self.job = job
        self.gauge = Gauge(device)
        self.context: DistContext = make_context(job, device)
        self.training: Training = make_training(job, folder)
        self.engine: TorchEngine = build(job, self.training, self.context)
        self.batches: list[Batch] = make_batches(job, self.engine.model.config.vocab_size)
        if device.type == "cuda":
            self.batches = [{k: v.pin_memory() for k, v in b.items()} for b in self.batches]
        self.num_trained = [count_trained(b, is_encoder_decoder=False) for b in self.batches]

    def step(self, number: int) -> dict[str, float]:
        """As the training loop does one, from host tensors to a loss that is known."""
        self.gauge.wait()
        start = time.perf_counter()
        batches = [to_device(batch, self.context) for batch in self.batches]
        outcome = train_step(
            self.engine,
            batches,
            divisor=sum(self.num_trained) * self.job.num_ranks,
            learning_rate=LEARNING_RATE,
            seeds=tuple(mix_seed(0, number, index, 0) for index in range(len(self.batches))),
        )
        loss = float(outcome.loss_sum) / sum(self.num_trained)
        self.gauge.wait()
        seconds = time.perf_counter() - start
        if outcome.update.is_skipped:
            raise RuntimeError("The gradients are not finite, so the optimizer was not run.")
        return {"loss": loss, "seconds": seconds}

    def start_over(self) -> None:
        """As after loading: no gradients, no optimizer state, nothing cached."""
        for parameter in self.engine.module.parameters():
            parameter.grad = None
        module = self.engine.module
        self.engine = give_optimizer(self.job, self.training, self.context, module)
        self.gauge.release()

    def rebuild(self) -> None:
        """The model anew, where a failed step has left it in an unknown state."""
        empty: Any = None
        self.engine = empty
        self.gauge.release()
        self.engine = build(self.job, self.training, self.context)
        self.gauge.release()

    def survives(self, capacity_bytes: int) -> bool:
        """Whether the steps pass under the limit; as after loading again afterwards."""
        before = self.gauge.allocated()
        self.gauge.limit(capacity_bytes)
        has_survived = self._try_steps()
        self.gauge.limit(None)
        if not has_survived and self.job.strategy.sharding.is_fsdp:
            self.rebuild()  # FSDP2 remembers in which phase it was
        else:
            self.start_over()
        if self.gauge.allocated() > before + LEAK_BYTES:
            self.rebuild()
        left = self.gauge.allocated() - before
        if left > LEAK_BYTES:
            raise RuntimeError(f"A failed try has left {left} bytes behind.")
        return has_survived

    def _try_steps(self) -> bool:
        try:
            for number in range(NUM_CAPPED):
                self.step(number)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            forget(error)
            return False
        return True


def forget(error: BaseException | None) -> None:
    """Free the tensors that an exception's frames reference."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def run_job(request: Request) -> dict[str, Any]:
    """Everything that was asked about the job, by mode."""
    device = torch.device("cuda", 0) if request.device == "cuda" else torch.device("cpu")
    job = request.job
    if device.type == "cpu":
        job = replace(job, strategy=job.strategy.model_copy(update=shrink_job(job.strategy)))
    else:
        cuda: Any = torch.cuda  # not annotated throughout
        cuda.set_device(device)
        cuda.init()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(job, folder, is_tiny=device.type == "cpu")
        if CAP in request.modes:
            return {CAP: _run_capped(job, device, folder, request.capacity_bytes)}
        return _run_free(job, device, folder, request)


def _run_free(job: Job, device: torch.device, folder: Path, request: Request) -> dict[str, Any]:
    gauge = Gauge(device)
    recorder = Recorder(is_on=EVENTS in request.modes and device.type == "cuda")
    context_bytes = gauge.outside()
    recorder.start()
    gauge.begin()
    run = Run(job, device, folder)
    stages = {"load": gauge.end()}
    steps = []
    for number in range(1, NUM_RECORDED + NUM_TIMED + 1):
        gauge.begin()
        steps.append(run.step(number))
        stages[f"step {number}"] = gauge.end()
        if number == NUM_RECORDED:
            recorder.stop()
    if job.strategy.sharding.is_fsdp and SURVIVING not in request.modes:
        keep_gathered(run.engine.module)
        steps = [run.step(number) for number in range(NUM_RECORDED + NUM_TIMED)]
    report = _describe_steps(run, stages, steps)
    report |= {"context_bytes": context_bytes, "outside_torch_bytes": gauge.outside()}
    done: dict[str, Any] = {MEASURE: report | gauge.describe()}
    if EVENTS in request.modes:
        done[EVENTS] = recorder.read(stages)
    if SURVIVING in request.modes:
        done[SURVIVING] = _find_surviving(run, report, request.capacity_bytes)
    return done


def _describe_steps(
    run: Run, stages: dict[str, dict[str, int]], steps: list[dict[str, float]]
) -> dict[str, Any]:
    stepped = [stage for name, stage in stages.items() if name != "load"]
    timed = [step["seconds"] for step in steps[NUM_RECORDED:]]
    return {
        "peak_allocated_bytes": max(stage["peak_allocated_bytes"] for stage in stepped),
        "peak_reserved_bytes": max(stage["peak_reserved_bytes"] for stage in stepped),
        "load_peak_allocated_bytes": stages["load"]["peak_allocated_bytes"],
        "load_peak_reserved_bytes": stages["load"]["peak_reserved_bytes"],
        "allocated_after_load_bytes": stages["load"]["allocated_bytes"],
        "allocated_after_first_step_bytes": stages["step 1"]["allocated_bytes"],
        "step_seconds": statistics.median(timed),
        "all_step_seconds": [round(step["seconds"], 5) for step in steps],
        "loss": round(steps[-1]["loss"], 4),
        "num_trained_tokens": run.num_trained,
        "batch_shapes": [list(batch["input_ids"].shape) for batch in run.batches],
        "num_alloc_retries": run.gauge.read("num_alloc_retries"),
        "attention": run.engine.model.config._attn_implementation,
        "stages": stages,
    }


class Recorder:
    """Every event of the allocator from the start on, as `_snapshot.py` writes them."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._snapshot: Any = None

    def start(self) -> None:
        if self._is_on:
            from _snapshot import start_recording

            start_recording()

    def stop(self) -> None:
        if self._is_on:
            self._snapshot = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(None)

    def read(self, stages: dict[str, dict[str, int]]) -> dict[str, Any]:
        """The events, and how many allocations each stage had seen at its end."""
        marks = {name: stage["num_allocations"] for name, stage in stages.items()}
        kept = dict(list(marks.items())[: NUM_RECORDED + 1])
        if self._snapshot is None:
            return {"marks": kept}
        from _snapshot import read_snapshot

        peaks = [stages[name] for name in kept]
        try:
            recorded: dict[str, Any] = {**read_snapshot(self._snapshot)}
        except Exception as error:  # the card's time is worth more than a reader that can be mended
            return {"marks": kept, "fault": repr(error), "trace": _flatten(self._snapshot)}
        return recorded | {
            "max_memory_allocated_bytes": max(peak["peak_allocated_bytes"] for peak in peaks),
            "max_memory_reserved_bytes": max(peak["peak_reserved_bytes"] for peak in peaks),
            "marks": kept,
        }


def _flatten(snapshot: Any) -> list[list[Any]]:
    fields = ("action", "addr", "size", "stream")
    return [[entry.get(field) for field in fields] for entry in snapshot["device_traces"][0]]


def _run_capped(
    job: Job, device: torch.device, folder: Path, capacity_bytes: int | None
) -> dict[str, Any]:
    """Load and step under the limit, as on a card of that size."""
    gauge = Gauge(device)
    gauge.limit(capacity_bytes)
    stage = "load"
    try:
        run = Run(job, device, folder)
        for number in range(1, NUM_CAPPED + 1):
            stage = f"step {number}"
            run.step(number)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"has_survived": False, "stage": stage, "capacity_bytes": capacity_bytes}
    return {
        "has_survived": True,
        "capacity_bytes": capacity_bytes,
        "peak_reserved_bytes": gauge.read("reserved_bytes.all.peak"),
        "num_alloc_retries": gauge.read("num_alloc_retries"),
    }


def _find_surviving(run: Run, measured: dict[str, Any], guess_bytes: int | None) -> dict[str, Any]:
    run.start_over()
    allocated, reserved = measured["peak_allocated_bytes"], measured["peak_reserved_bytes"]
    tolerance = max(GRAIN_BYTES, int(allocated * TOLERANCE_FRACTION))
    tries: list[dict[str, Any]] = []

    def survives(capacity_bytes: int) -> bool:
        has_survived = run.survives(capacity_bytes)
        tries.append({"capacity_bytes": capacity_bytes, "has_survived": has_survived})
        return has_survived

    low, high = search_capacity(
        survives, low=allocated, high=reserved, guess=guess_bytes, tolerance=tolerance
    )
    return {"smallest_surviving_bytes": high, "largest_failing_bytes": low, "tries": tries}


def search_capacity(
    survives: Callable[[int], bool], *, low: int, high: int, guess: int | None, tolerance: int
) -> tuple[int, int]:
    """A limit that fails and one that survives, no further apart than `tolerance`.

    Nothing survives below what is allocated (`low`). The peak reserved without a limit (`high`)
    should survive; it is tried before it is believed.
    """
    is_proven = False
    stride = tolerance
    candidate = guess
    while candidate is not None and low < candidate < high:
        if survives(candidate):
            high, is_proven = candidate, True
            candidate -= stride
        else:
            low = candidate
            candidate = None if is_proven else candidate + stride
        stride *= 2
    while high - low > tolerance:
        middle = (low + high) // 2 // GRAIN_BYTES * GRAIN_BYTES
        if not low < middle < high:
            break
        if survives(middle):
            high, is_proven = middle, True
        else:
            low = middle
    for _ in range(0 if is_proven else MOST_WIDENINGS):
        if survives(high):
            break
        low, high = high, high + 2 * tolerance
    else:
        if not is_proven:
            raise RuntimeError(f"Nothing survived up to {high} bytes.")
    return low, high


def attempt(request: Request) -> dict[str, Any]:
    """`run_job`, with its errors as part of the result."""
    try:
        return {"status": "ok", **run_job(request)}
    except Exception as error:
        status = "out of memory" if is_out_of_memory(error) else "error"
        where = "".join(traceback.format_exception(error, limit=-6))
        summary = {"status": status, "fault": str(error)[:600], "traceback": where[-4000:]}
        with contextlib.suppress(Exception):
            forget(error)
        return summary
