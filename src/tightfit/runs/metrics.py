"""metrics.jsonl: one line per optimizer step and per evaluation, and statistics of them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError

from tightfit.core.errors import SetupError
from tightfit.core.files import describe_write_error, write_atomic
from tightfit.core.frozen import Frozen
from tightfit.core.reading import read_bytes
from tightfit.core.units import GIB


def _null_is_nan(value: object) -> object:
    return float("nan") if value is None else value


Count = Annotated[int, Field(ge=0, lt=2**63)]
MaybeNan = Annotated[float, BeforeValidator(_null_is_nan)]
"""JSON has no NaN: one that is not finite is written as null, and read back as NaN."""


class PreferenceRecord(Frozen):
    """Of a step or evaluation with preferences. A reward is beta times the log-ratio of an answer
    to the reference's or, without a reference, beta times its log-probability per token."""

    reward_chosen: float | None = None
    """Mean over chosen, or good, answers; None where there was none; so the next."""
    reward_rejected: float | None = None
    reward_margin: float | None = None
    """The difference of the two."""
    reward_accuracy: float | None = None
    """Share of pairs whose chosen answer has the higher reward; None for labelled answers."""
    kl: float | None = None
    """KTO's estimate of the divergence from the reference, in nats."""
    chosen_nll: float | None = None
    """Cross-entropy per token of the chosen answers: ORPO's other loss."""
    preference_loss: float | None = None
    """The loss without ORPO's cross-entropy."""


class StepRecord(Frozen):
    """One optimizer step over all ranks."""

    kind: Literal["step"] = "step"
    step: Count
    """From 1."""
    epoch: float
    """Passes over the data, this step included."""
    loss: MaybeNan
    """Mean over the step's trained tokens of all ranks; with preferences over its pairs."""
    learning_rate: float
    grad_norm: float | None
    """Before clipping; None where the optimizer step was skipped (fp16 overflow)."""
    num_tokens: Count
    """Real tokens, padding left out, over all ranks."""
    num_trained_tokens: Count
    seconds: float
    """Wall time since the end of the step before, waiting for data included."""
    data_wait_seconds: float
    tokens_per_second: float
    mfu_fraction: float | None
    """Model FLOPs over the card's peak; None where the peak is not known."""
    gpu_allocated_bytes: Count
    """Peak of this step on rank 0's device; resident memory on a CPU."""
    gpu_reserved_bytes: Count
    host_bytes: Count
    """Resident memory of rank 0."""
    num_alloc_retries: Count = 0
    """Times the allocator had to free its cache and try again, since the start."""
    router_loss: float | None = None
    """The load-balancing loss, without its weight; `loss` is without it. None where it is off."""
    expert_load_max: float | None = None
    """Tokens of the most loaded expert of any layer over the mean of that layer's. None without
    experts, or where they are not counted; so the next."""
    idle_experts_fraction: float | None = None
    """Share of all layers' experts to which no token of the step was sent."""
    preference: PreferenceRecord | None = None
    """None where no preferences are learnt."""


class EvalRecord(Frozen):
    """One pass over the held-back rows."""

    kind: Literal["eval"] = "eval"
    step: Count
    """Optimizer steps done before it."""
    loss: MaybeNan
    perplexity: MaybeNan | None
    """None where the loss is of preferences."""
    num_trained_tokens: Count
    seconds: float
    preference: PreferenceRecord | None = None


class EventRecord(Frozen):
    """Something worth a line: a resume, a change of plan, a skipped step."""

    kind: Literal["event"] = "event"
    step: Count
    text: str


PLAN_CHANGE = "out of memory with "
"""How the event of a change of plan begins."""

Record = StepRecord | EvalRecord | EventRecord
_KINDS: dict[str, type[StepRecord] | type[EvalRecord] | type[EventRecord]] = {
    "step": StepRecord,
    "eval": EvalRecord,
    "event": EventRecord,
}


def append_record(path: Path, record: Record) -> None:
    """Add a line in one write, so that a reader never sees half of it.

    A line that a crash cut off is ended first, or it would swallow this one.
    """
    line = record.model_dump_json().encode() + b"\n"
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if not _ends_a_line(handle):
                line = b"\n" + line
            if os.write(handle, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(handle)
    except OSError as error:
        why = describe_write_error(error, path, num_bytes=len(line))
        raise SetupError(
            f"Cannot write {str(path)!r}: {why}.",
            remedy="make room on that disk, then the same command again goes on from the last "
            "checkpoint",
        ) from error


def _ends_a_line(handle: int) -> bool:
    size = os.fstat(handle).st_size
    return size == 0 or os.pread(handle, 1, size - 1) == b"\n"


def read_records(path: Path) -> list[Record]:
    """All whole lines; what a crash cut off or a disk garbled is passed over."""
    try:
        lines = read_bytes(path, most_bytes=GIB).split(b"\n")
    except OSError:
        return []
    records: list[Record] = []
    for line in lines:
        try:
            values = json.loads(line)
            records.append(_KINDS[values["kind"]].model_validate(values))
        except (ValueError, KeyError, TypeError, RecursionError, ValidationError):
            continue
    return records


def drop_after_step(path: Path, step: int) -> None:
    """Drop steps beyond `step`: a resumed run does them again. Events have happened, and stay."""
    kept = [
        record
        for record in read_records(path)
        if record.step <= step or isinstance(record, EventRecord)
    ]
    write_records(path, kept)


def write_records(path: Path, records: Iterable[Record]) -> None:
    write_atomic(path, "".join(record.model_dump_json() + "\n" for record in records))


# Step records boiled down to the few numbers people compare runs by.

NUM_WARMUP_STEPS = 2
"""Left out of speeds where enough follow: caches fill, kernels are chosen or compiled."""
LEAST_SETTLED_STEPS = 3
LONG_STEP_FACTOR = 3.0
"""A step this much longer than the median holds an evaluation, a save or a restart."""
MOST_SMOOTHED_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast the settled steps were. None: nothing to tell it from."""

    seconds_per_step: float | None
    tokens_per_second: float | None
    mfu_fraction: float | None
    data_wait_fraction: float | None


def measure_speed(steps: Sequence[StepRecord]) -> Speed:
    """Medians and totals over the steps that are neither warm-up nor interrupted."""
    settled = list_settled(steps)
    seconds = sum(record.seconds for record in settled)
    waited = sum(max(0.0, record.data_wait_seconds) for record in settled)
    tokens = sum(record.num_tokens for record in settled)
    mfus = [r.mfu_fraction for r in settled if r.mfu_fraction is not None]
    return Speed(
        seconds_per_step=median_of(record.seconds for record in settled),
        tokens_per_second=keep_finite(tokens / seconds) if seconds > 0 else None,
        mfu_fraction=median_of(mfus),
        data_wait_fraction=keep_finite(min(1.0, waited / seconds)) if seconds > 0 else None,
    )


def list_settled(steps: Sequence[StepRecord]) -> list[StepRecord]:
    timed = [record for record in steps if isfinite(record.seconds) and record.seconds > 0]
    if len(timed) >= NUM_WARMUP_STEPS + LEAST_SETTLED_STEPS:
        timed = timed[NUM_WARMUP_STEPS:]
    if not timed:
        return []
    limit = LONG_STEP_FACTOR * median(record.seconds for record in timed)
    return [record for record in timed if record.seconds <= limit]


def measure_losses(steps: Sequence[StepRecord]) -> tuple[float | None, float | None]:
    """Mean of the first and of the last few finite losses."""
    finite = [record.loss for record in steps if isfinite(record.loss)]
    if not finite:
        return None, None
    return keep_finite(mean(finite[: _window(finite)])), measure_last(finite)


def measure_last(values: Iterable[float | None]) -> float | None:
    """Mean of the last few finite values; None without one."""
    finite = [value for value in values if value is not None and isfinite(value)]
    return keep_finite(mean(finite[-_window(finite) :])) if finite else None


def _window(values: Sequence[float]) -> int:
    return min(MOST_SMOOTHED_STEPS, max(1, len(values) // 20))


def median_of(values: Iterable[float]) -> float | None:
    finite = [value for value in values if isfinite(value)]
    return keep_finite(median(finite)) if finite else None


def mean(values: Sequence[float]) -> float:
    """The library's own raises where a sum overflows; here it is infinite."""
    return sum(values) / len(values)


def keep_finite(value: float | None) -> float | None:
    """JSON has no NaN: None in its place."""
    return value if value is not None and isfinite(value) else None
