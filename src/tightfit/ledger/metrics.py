"""metrics.jsonl: one line per optimizer step and per evaluation, readable while it grows."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tightfit.core.errors import EnvironmentFaultError
from tightfit.core.files import write_atomic


def _null_is_nan(value: object) -> object:
    return float("nan") if value is None else value


Count = Annotated[int, Field(ge=0, lt=2**63)]
MaybeNan = Annotated[float, BeforeValidator(_null_is_nan)]
"""JSON has no NaN: one that is not finite is written as null, and read back as NaN."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StepRecord(_Frozen):
    """One optimizer step over all ranks."""

    kind: Literal["step"] = "step"
    step: Count
    """From 1."""
    epoch: float
    """Passes over the data, this step included."""
    loss: MaybeNan
    """Mean over the step's trained tokens of all ranks."""
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


class EvalRecord(_Frozen):
    """One pass over the held-back rows."""

    kind: Literal["eval"] = "eval"
    step: Count
    """Optimizer steps done before it."""
    loss: MaybeNan
    perplexity: MaybeNan
    num_trained_tokens: Count
    seconds: float


class EventRecord(_Frozen):
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
    except OSError as fault:
        raise EnvironmentFaultError(
            f"Cannot write {str(path)!r}: {fault.strerror or fault}.",
            remedy="make room on that disk, then the same command again goes on from the last "
            "checkpoint",
        ) from fault


def _ends_a_line(handle: int) -> bool:
    size = os.fstat(handle).st_size
    return size == 0 or os.pread(handle, 1, size - 1) == b"\n"


def read_records(path: Path) -> list[Record]:
    """All whole lines; what a crash cut off or a disk garbled is passed over."""
    try:
        lines = path.read_bytes().split(b"\n")
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


def forget_after(path: Path, step: int) -> None:
    """Drop steps beyond `step`: a resumed run does them again. Events have happened, and stay."""
    kept = [
        record
        for record in read_records(path)
        if record.step <= step or isinstance(record, EventRecord)
    ]
    write_records(path, kept)


def write_records(path: Path, records: Iterable[Record]) -> None:
    write_atomic(path, "".join(record.model_dump_json() + "\n" for record in records))
