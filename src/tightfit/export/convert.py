"""Convert a model between Meta's, Hugging Face's and llama.cpp's formats."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import psutil
from pydantic import NonNegativeFloat, PositiveInt

from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError, UsageError
from tightfit.core.frozen import Frozen
from tightfit.core.progress import Progress
from tightfit.core.units import render_bytes
from tightfit.export.gguf_writer import GgufPlan, plan_gguf, write_gguf
from tightfit.export.meta_checkpoint import MetaPlan, plan_meta, write_meta
from tightfit.hardware.machine import read_peak_memory_bytes, reset_peak_memory
from tightfit.runtime.artefacts import Artefact, ArtefactKind, find_artefact
from tightfit.runtime.gguf.unpack import UnpackPlan, plan_unpack, write_unpacked
from tightfit.runtime.output_folder import check_file_target, check_room, check_target


class SourceKind(str, Enum):
    """The format of the weights on disk."""

    META = "meta"
    HF = "hf"
    GGUF = "gguf"


KIND_NAMES = {
    SourceKind.META: "Meta's original checkpoint",
    SourceKind.HF: "a Hugging Face folder",
    SourceKind.GGUF: "a GGUF file",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertSource:
    """A model that was found."""

    name: str
    """As the user said it."""
    kind: SourceKind
    path: Path
    home: Path
    """Default folder of the result."""
    stem: str
    """The result's file is named after it."""
    title: str
    """What the model is called."""


def find_convert_source(name: str) -> ConvertSource:
    """Find the model; raise for kinds that cannot be converted."""
    path = Path(name).expanduser()
    here = path.absolute()
    if (path / "params.json").is_file() and not (path / "config.json").is_file():
        kind = SourceKind.META
        stem = here.name
        return ConvertSource(
            name=name, kind=kind, path=path, home=here.parent, stem=stem, title=stem
        )
    gguf = _find_gguf(path)
    if gguf is not None:
        home, stem = gguf.absolute().parent, gguf.stem
        kind = SourceKind.GGUF
        return ConvertSource(name=name, kind=kind, path=gguf, home=home, stem=stem, title=stem)
    artefact = find_artefact(name)
    _require_plain(artefact)
    if artefact.run is not None:
        home, stem = artefact.run.path.absolute(), artefact.path.name
        title = home.name
    else:
        # A model of the hub's cache, whose folder is named by a commit hash.
        home = here.parent if path.exists() else Path.cwd()
        stem = title = here.name if path.exists() else name.rsplit("/", 1)[-1]
    kind = SourceKind.HF
    return ConvertSource(
        name=name, kind=kind, path=artefact.path, home=home, stem=stem, title=title
    )


def choose_format(source: ConvertSource, wanted: str | None) -> str:
    """`gguf` or `hf`; by default the one that the source is not."""
    to = wanted or ("gguf" if source.kind is SourceKind.HF else "hf")
    if to == source.kind.value:
        remedy = (
            f"tightfit quantize {source.name} --to q8_0 makes a smaller one"
            if to == "gguf"
            else "--to gguf"
        )
        raise UsageError(f"{source.name} is {KIND_NAMES[source.kind]} already.", remedy=remedy)
    if source.kind is SourceKind.META and to == "gguf":
        between = source.home / f"{source.stem}-hf"
        raise UsageError(
            "Meta's checkpoints become GGUF by way of a Hugging Face folder.",
            remedy=f"tightfit convert {source.name} --to hf, then "
            f"tightfit convert {between} --to gguf",
        )
    return to


def default_target(source: ConvertSource, to: str, dtype: str | None) -> Path:
    """Beside the source: `NAME-f16.gguf` or `NAME-hf`."""
    ending = f"-{dtype}.gguf" if to == "gguf" else "-hf"
    return source.home / f"{source.stem}{ending}"


def _find_gguf(path: Path) -> Path | None:
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise NotFoundError(f"There is no file {path}.", remedy="check the path")
        return path
    if not path.is_dir() or (path / "config.json").is_file() or (path / "plan.json").is_file():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise UsageError(
            f"{path} holds {len(found)} GGUF files.", remedy=f"name one of them: {found[0]}"
        )
    return found[0] if found else None


def _require_plain(artefact: Artefact) -> None:
    if artefact.kind is ArtefactKind.ADAPTER:
        raise InvalidInputError(
            f"{artefact.name} is an adapter, and only whole models can be converted.",
            remedy=f"merge first: tightfit merge {artefact.name}",
        )
    if artefact.kind is not ArtefactKind.MODEL:
        raise InvalidInputError(
            f"{artefact.name} is quantized ({artefact.kind.value}), and its original values are "
            "lost.",
            remedy="convert the model that it was made from",
        )


# The conversion.

_TORCH_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_ConvertPlan = GgufPlan | MetaPlan | UnpackPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufRequest:
    """A Hugging Face folder to be written as one GGUF file."""

    source: Path
    target: Path
    dtype: str = "f16"
    """`f32`, `f16` or `bf16`: of the matrices. Vectors and norms stay 32 bit."""
    tokenizer: Path | None = None
    """A folder with another tokenizer than the source's own."""
    report: Progress | None = None
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
    report: Progress | None = None,
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
    report: Progress | None = None,
) -> Path:
    """A GGUF file as a Hugging Face folder; quantized values are dequantized."""
    check_target(target, force=force, sources=(source,))
    write_unpacked(plan_unpack(source, _torch_dtype(dtype)), target, watch=report)
    return target


class ConvertForecast(Frozen):
    """What a conversion will take."""

    disk_bytes: PositiveInt
    host_bytes: PositiveInt


class ConvertResult(Frozen):
    """The result of a conversion."""

    source: str
    source_kind: SourceKind
    path: str
    format: str
    """`gguf` or `hf`."""
    dtype: str
    forecast: ConvertForecast
    size_bytes: PositiveInt
    seconds: NonNegativeFloat
    peak_host_bytes: PositiveInt
    notes: tuple[str, ...]
    """What a user should know about the result."""
    next_command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRequest:
    """A source, a format and how to write it."""

    source: str
    to: str | None = None
    dtype: str | None = None
    target: Path | None = None
    force: bool = False
    announce: Callable[[ConvertSource, Path, ConvertForecast], None] | None = None
    """Called with source, target and forecast before anything is written."""
    report: Progress | None = None


def convert_model(request: ConvertRequest) -> ConvertResult:
    """Recognise, predict, convert, measure."""
    reset_peak_memory()
    started = time.monotonic()
    source = find_convert_source(request.source)
    to = choose_format(source, request.to)
    dtype = request.dtype or ("f16" if to == "gguf" else None)
    target = request.target or default_target(source, to, dtype)
    if to == "gguf":
        _require_ending(target)
        check_file_target(target, force=request.force)
    else:
        check_target(target, force=request.force, sources=(source.path,))
    plan = _make_plan(source, dtype)
    forecast = _forecast(plan)
    if request.announce is not None:
        request.announce(source, target, forecast)
    _check_resources(target, forecast)
    notes = _write(plan, target, request.report)
    return ConvertResult(
        source=source.name,
        source_kind=source.kind,
        path=str(target),
        format=to,
        dtype=dtype or _dtype_of(plan),
        forecast=forecast,
        size_bytes=_measure(target),
        seconds=time.monotonic() - started,
        peak_host_bytes=read_peak_memory_bytes(),
        notes=tuple(notes),
        next_command=_next_command(source, target),
    )


def _require_ending(target: Path) -> None:
    """Programs recognise GGUF files by their ending."""
    if target.suffix.lower() != ".gguf":
        raise UsageError(
            f"{target} does not end in .gguf.", remedy=f"--out {shlex.quote(f'{target}.gguf')}"
        )


def _make_plan(source: ConvertSource, dtype: str | None) -> _ConvertPlan:
    if source.kind is SourceKind.META:
        return plan_meta(source.path, _torch_dtype(dtype))
    if source.kind is SourceKind.GGUF:
        return plan_unpack(source.path, _torch_dtype(dtype))
    return plan_gguf(source.path, dtype=dtype or "f16", name=source.title)


def _forecast(plan: _ConvertPlan) -> ConvertForecast:
    held = psutil.Process().memory_info().rss
    return ConvertForecast(disk_bytes=plan.disk_bytes, host_bytes=held + plan.extra_bytes)


def _check_resources(target: Path, forecast: ConvertForecast) -> None:
    check_room(target, forecast.disk_bytes)
    needed = forecast.host_bytes - psutil.Process().memory_info().rss
    free = psutil.virtual_memory().available
    if needed > free:
        raise SetupError(
            f"The conversion needs {render_bytes(needed)} more memory; {render_bytes(free)} is "
            "free.",
            remedy="end other programs, or convert on a machine with more memory",
        )


def _write(plan: _ConvertPlan, target: Path, report: Progress | None) -> list[str]:
    if isinstance(plan, GgufPlan):
        return write_gguf(plan, target, report)
    if isinstance(plan, MetaPlan):
        write_meta(plan, target, watch=report)
    else:
        write_unpacked(plan, target, watch=report)
    return list(plan.notes)


def _dtype_of(plan: _ConvertPlan) -> str:
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


def _next_command(source: ConvertSource, target: Path) -> str:
    """Meta's own format has no engine here to compare with."""
    if source.kind is SourceKind.META:
        return f"tightfit chat {shlex.quote(str(target))}"
    return f"tightfit verify {shlex.quote(source.name)} {shlex.quote(str(target))}"
