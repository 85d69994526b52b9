"""Convert a model between Meta's, Hugging Face's and llama.cpp's formats."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import psutil
from pydantic import NonNegativeFloat, PositiveInt

from tightfit.core.dtypes import Dtype, find_plain_dtype
from tightfit.core.errors import InvalidInputError, NotFoundError, UsageError
from tightfit.core.frozen import Frozen
from tightfit.core.progress import Progress
from tightfit.export.gguf_adapter import GgufAdapterPlan, plan_gguf_adapter
from tightfit.export.gguf_writer import GgufPlan, plan_gguf
from tightfit.export.meta_checkpoint import plan_meta
from tightfit.hardware.machine import read_peak_memory_bytes, reset_peak_memory
from tightfit.runtime.gguf.unpack import plan_unpack
from tightfit.runtime.libraries import torch_dtype
from tightfit.runtime.model_files import ArtefactKind, find_artefact
from tightfit.runtime.output_folder import (
    check_file_target,
    check_resources,
    check_target,
    measure_bytes,
)
from tightfit.runtime.tensor_files import FolderPlan


class SourceKind(str, Enum):
    """The format of the weights on disk."""

    META = "meta"
    HF = "hf"
    GGUF = "gguf"
    ADAPTER = "adapter"


KIND_NAMES = {
    SourceKind.META: "Meta's original checkpoint",
    SourceKind.HF: "a Hugging Face folder",
    SourceKind.GGUF: "a GGUF file",
    SourceKind.ADAPTER: "an adapter",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertSource:
    """A model that was found."""

    name: str
    """As the user wrote it."""
    kind: SourceKind
    path: Path
    home: Path
    """Default folder of the result."""
    stem: str
    """The result's file is named after it."""
    title: str
    """What the model is called."""
    base: Path | None = None
    """Of an adapter: the folder of the model it was trained on."""
    has_engine: bool = True
    """Whether an engine here loads it, to compare the result with."""


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
    """`gguf`, `hf` or `gguf-lora`."""
    dtype: str
    forecast: ConvertForecast
    size_bytes: PositiveInt
    seconds: NonNegativeFloat
    peak_host_bytes: PositiveInt
    notes: tuple[str, ...]
    """What a user should know about the result."""
    next_command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion that is planned and not started."""

    source: ConvertSource
    target: Path
    format: str
    dtype: str
    forecast: ConvertForecast
    plan: GgufPlan | GgufAdapterPlan | FolderPlan
    started: float

    def run(self, report: Progress | None = None) -> ConvertResult:
        """Convert and measure."""
        forecast = self.forecast
        check_resources("conversion", self.target, forecast.disk_bytes, forecast.host_bytes)
        notes = self.plan.write(self.target, report)
        words = ["verify", self.source.name, str(self.target)]
        if not self.source.has_engine:
            words = ["chat", str(self.target)]
        elif self.source.base is not None:
            words = ["convert", str(self.source.base), "--to", "gguf"]
        return ConvertResult(
            source=self.source.name,
            source_kind=self.source.kind,
            path=str(self.target),
            format=self.format,
            dtype=self.dtype,
            forecast=forecast,
            size_bytes=measure_bytes(self.target),
            seconds=time.monotonic() - self.started,
            peak_host_bytes=read_peak_memory_bytes(),
            notes=notes,
            next_command=shlex.join(["tightfit", *words]),
        )


def plan_conversion(
    name: str,
    *,
    to: str | None = None,
    dtype: str | None = None,
    target: Path | None = None,
    force: bool = False,
) -> Conversion:
    """Recognise the model and predict what its conversion takes; nothing is written."""
    reset_peak_memory()
    started = time.monotonic()
    source = find_convert_source(name)
    to = _choose_format(source, to)
    if to != "hf":
        is_adapter = source.base is not None
        dtype = dtype or ("f32" if is_adapter else "f16")
        ending = f"lora-{dtype}" if is_adapter else dtype
        target = target or source.home / f"{source.stem}-{ending}.gguf"
        if target.suffix.lower() != ".gguf":  # programs recognise GGUF files by their ending
            raise UsageError(
                f"{target} does not end in .gguf.", remedy=f"--out {shlex.quote(f'{target}.gguf')}"
            )
        check_file_target(target, force=force)
    else:
        target = target or source.home / f"{source.stem}-hf"
        check_target(target, force=force, sources=(source.path,))
    stored = None if dtype is None else find_plain_dtype(dtype)
    plan: GgufPlan | GgufAdapterPlan | FolderPlan
    if source.base is not None:
        plan = plan_gguf_adapter(
            source.path, source.base, dtype=stored or Dtype.FP32, name=source.title
        )
    elif source.kind is SourceKind.HF:
        plan = plan_gguf(source.path, dtype=stored or Dtype.FP16, name=source.title)
    else:
        make_plan = plan_meta if source.kind is SourceKind.META else plan_unpack
        plan = make_plan(source.path, None if stored is None else torch_dtype(stored))
        stored = stored or find_plain_dtype(str(plan.outputs[0].dtype))
    held = psutil.Process().memory_info().rss
    return Conversion(
        source=source,
        target=target,
        format=to,
        dtype=(stored or Dtype.FP16).gguf_name,
        forecast=ConvertForecast(disk_bytes=plan.disk_bytes, host_bytes=held + plan.extra_bytes),
        plan=plan,
        started=started,
    )


def convert_to_gguf(
    source: Path,
    target: Path,
    *,
    dtype: Dtype = Dtype.FP16,
    tokenizer: Path | None = None,
    report: Progress | None = None,
) -> Path:
    """Write a Hugging Face folder as a GGUF file; `tokenizer`: a folder with another one."""
    check_file_target(target, force=False)
    plan_gguf(source, dtype=dtype, tokenizer=tokenizer).write(target, report)
    return target


def find_convert_source(name: str) -> ConvertSource:
    """Find the model; raise for kinds that cannot be converted."""
    path = Path(name).expanduser()
    here = path.absolute()

    def found(kind: SourceKind, path: Path, home: Path, stem: str, title: str) -> ConvertSource:
        return ConvertSource(name=name, kind=kind, path=path, home=home, stem=stem, title=title)

    if (path / "params.json").is_file() and not (path / "config.json").is_file():
        source = found(SourceKind.META, path, here.parent, here.name, here.name)
        return replace(source, has_engine=False)
    gguf = _find_gguf(path)
    if gguf is not None:
        return found(SourceKind.GGUF, gguf, gguf.absolute().parent, gguf.stem, gguf.stem)
    artefact = find_artefact(name)
    is_adapter = artefact.kind is ArtefactKind.ADAPTER
    if not is_adapter and artefact.kind is not ArtefactKind.MODEL:
        raise InvalidInputError(
            f"{artefact.name} is quantized ({artefact.kind.value}), and its original values are "
            "lost.",
            remedy="convert the model that it was made from",
        )
    home, stem, title = here.parent, here.name, here.name
    if artefact.run is not None:
        home = artefact.run.path.absolute()
        stem, title = artefact.path.name, home.name
    elif not path.exists():  # a model of the hub's cache, whose folder is named by a commit hash
        home, stem = Path.cwd(), name.rsplit("/", 1)[-1]
        title = stem
    kind = SourceKind.ADAPTER if is_adapter else SourceKind.HF
    return replace(found(kind, artefact.path, home, stem, title), base=artefact.base)


def _find_gguf(path: Path) -> Path | None:
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise NotFoundError(f"There is no file {path}.", remedy="check the path")
        return path
    others = ("config.json", "plan.json", "adapter_config.json")
    if not path.is_dir() or any((path / name).is_file() for name in others):
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise UsageError(
            f"{path} holds {len(found)} GGUF files.", remedy=f"name one of them: {found[0]}"
        )
    return found[0] if found else None


def _choose_format(source: ConvertSource, wanted: str | None) -> str:
    """`gguf` or `hf`; by default the one that the source is not. Of adapters `gguf-lora`."""
    is_adapter = source.kind is SourceKind.ADAPTER
    if is_adapter and wanted != "gguf-lora":
        raise InvalidInputError(
            f"{source.name} is an adapter, and only whole models can be converted.",
            remedy=f"merge first: tightfit merge {source.name}; or for llama.cpp to load beside "
            "its base: --to gguf-lora",
        )
    if not is_adapter and wanted == "gguf-lora":
        raise UsageError(
            f"{source.name} is {KIND_NAMES[source.kind]}, not an adapter.", remedy="--to gguf"
        )
    if is_adapter:
        return "gguf-lora"
    to = wanted or ("gguf" if source.kind is SourceKind.HF else "hf")
    if to == source.kind.value:
        smaller = f"tightfit quantize {source.name} --to q8_0 makes a smaller one"
        raise UsageError(
            f"{source.name} is {KIND_NAMES[source.kind]} already.",
            remedy=smaller if to == "gguf" else "--to gguf",
        )
    if source.kind is SourceKind.META and to == "gguf":
        raise UsageError(
            "Meta's checkpoints become GGUF by way of a Hugging Face folder.",
            remedy=f"tightfit convert {source.name} --to hf, then "
            f"tightfit convert {source.home / f'{source.stem}-hf'} --to gguf",
        )
    return to
