"""Models from one format to another: Meta's own, Hugging Face's, llama.cpp's."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveInt

from tightfit.core.errors import EnvironmentFaultError, UsageError
from tightfit.core.units import render_bytes
from tightfit.export.convert.gguf_write import GgufPlan, Watch, plan_gguf, write_gguf
from tightfit.export.convert.meta import MetaPlan, plan_meta, write_meta
from tightfit.export.convert.source import (
    Source,
    SourceKind,
    choose_format,
    default_target,
    find_source,
)
from tightfit.hardware.own_memory import read_peak_bytes, reset_peak
from tightfit.runtime.finished_folder import check_room, check_target
from tightfit.runtime.gguf.unpack import UnpackPlan, plan_unpack, write_unpacked
from tightfit.runtime.whole_output import check_file_target

DTYPES = ("f32", "f16", "bf16")
_TORCH_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_Plan = GgufPlan | MetaPlan | UnpackPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufRequest:
    """A Hugging Face folder to be written as one GGUF file."""

    source: Path
    target: Path
    dtype: str = "f16"
    """`f32`, `f16` or `bf16`: of the matrices. Vectors and norms stay 32 bit."""
    tokenizer: Path | None = None
    """A folder with another tokenizer than the source's own."""
    report: Watch | None = None
    force: bool = False
    """Replace a target that exists."""


def convert_to_gguf(request: GgufRequest) -> Path:
    """Write the file and return its path."""
    check_file_target(request.target, force=request.force)
    plan = plan_gguf(request.source, dtype=request.dtype, tokenizer=request.tokenizer)
    write_gguf(plan, request.target, request.report)
    return request.target


def convert_meta(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    force: bool = False,
    report: Watch | None = None,
) -> Path:
    """Meta's params.json, consolidated.*.pth and tokenizer.model as a Hugging Face folder."""
    check_target(target, force=force, sources=(source,))
    write_meta(plan_meta(source, _torch_dtype(dtype)), target, watch=report)
    return target


def convert_gguf_to_hf(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    force: bool = False,
    report: Watch | None = None,
) -> Path:
    """A GGUF file as a Hugging Face folder; quantized values are unpacked."""
    check_target(target, force=force, sources=(source,))
    write_unpacked(plan_unpack(source, _torch_dtype(dtype)), target, watch=report)
    return target


class Forecast(BaseModel):
    """What a conversion will take."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    disk_bytes: PositiveInt
    host_bytes: PositiveInt


class Conversion(BaseModel):
    """What came of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    source_kind: SourceKind
    path: str
    format: str
    """`gguf` or `hf`."""
    dtype: str
    forecast: Forecast
    size_bytes: PositiveInt
    seconds: NonNegativeFloat
    peak_host_bytes: PositiveInt
    notes: tuple[str, ...]
    """What a user should know about the result."""
    next_command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRequest:
    """What `tightfit convert` was asked."""

    source: str
    to: str | None = None
    dtype: str | None = None
    target: Path | None = None
    force: bool = False
    announce: Callable[[Source, Path, Forecast], None] | None = None
    """Told before anything is written."""
    report: Watch | None = None


def convert_model(request: ConvertRequest) -> Conversion:
    """Recognise, predict, convert, measure."""
    reset_peak()
    started = time.monotonic()
    source = find_source(request.source)
    to = choose_format(source, request.to)
    dtype = request.dtype or ("f16" if to == "gguf" else None)
    target = request.target or default_target(source, to, dtype)
    if to == "gguf":
        _require_ending(target)
        check_file_target(target, force=request.force)
    else:
        check_target(target, force=request.force, sources=(source.path,))
    plan = _make_plan(source, dtype)
    forecast = _foresee(plan)
    if request.announce is not None:
        request.announce(source, target, forecast)
    _check_resources(target, forecast)
    notes = _write(plan, target, request.report)
    return Conversion(
        source=source.name,
        source_kind=source.kind,
        path=str(target),
        format=to,
        dtype=dtype or _dtype_of(plan),
        forecast=forecast,
        size_bytes=_measure(target),
        seconds=time.monotonic() - started,
        peak_host_bytes=read_peak_bytes(),
        notes=tuple(notes),
        next_command=_next_command(source, target),
    )


def _require_ending(target: Path) -> None:
    """Every program knows these files by their ending, this one too."""
    if target.suffix.lower() != ".gguf":
        raise UsageError(
            f"{target} does not end in .gguf.", remedy=f"--out {shlex.quote(f'{target}.gguf')}"
        )


def _make_plan(source: Source, dtype: str | None) -> _Plan:
    if source.kind is SourceKind.META:
        return plan_meta(source.path, _torch_dtype(dtype))
    if source.kind is SourceKind.GGUF:
        return plan_unpack(source.path, _torch_dtype(dtype))
    return plan_gguf(source.path, dtype=dtype or "f16", name=source.title)


def _foresee(plan: _Plan) -> Forecast:
    held = psutil.Process().memory_info().rss
    return Forecast(disk_bytes=plan.disk_bytes, host_bytes=held + plan.extra_bytes)


def _check_resources(target: Path, forecast: Forecast) -> None:
    check_room(target, forecast.disk_bytes)
    needed = forecast.host_bytes - psutil.Process().memory_info().rss
    free = psutil.virtual_memory().available
    if needed > free:
        raise EnvironmentFaultError(
            f"The conversion needs {render_bytes(needed)} more memory; {render_bytes(free)} is "
            "free.",
            remedy="end other programs, or convert on a machine with more memory",
        )


def _write(plan: _Plan, target: Path, report: Watch | None) -> list[str]:
    if isinstance(plan, GgufPlan):
        return write_gguf(plan, target, report)
    if isinstance(plan, MetaPlan):
        write_meta(plan, target, watch=report)
    else:
        write_unpacked(plan, target, watch=report)
    return list(plan.notes)


def _dtype_of(plan: _Plan) -> str:
    if isinstance(plan, GgufPlan):
        return plan.dtype
    name = str(plan.outputs[0].dtype).removeprefix("torch.")
    return next((short for short, long in _TORCH_NAMES.items() if long == name), name)


def _torch_dtype(name: str | None) -> Any:
    import torch

    if name is None:
        return None
    if name not in _TORCH_NAMES:
        raise UsageError(f"`{name}` is no format of values.", remedy="f16, bf16 or f32")
    return getattr(torch, _TORCH_NAMES[name])


def _measure(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _next_command(source: Source, target: Path) -> str:
    """Meta's own format has no engine here to compare with."""
    if source.kind is SourceKind.META:
        return f"tightfit chat {shlex.quote(str(target))}"
    return f"tightfit verify {shlex.quote(source.name)} {shlex.quote(str(target))}"
