"""What is to be quantized, and where the results go."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tightfit.core.errors import InvalidInputError, UsageError
from tightfit.core.faults import printable
from tightfit.export.quantize.summary import SUMMARY_FILE
from tightfit.export.quantize.targets import Family, Target
from tightfit.models.gguf_spec import read_gguf_model
from tightfit.models.resolve import resolve_model
from tightfit.models.spec import ModelSpec
from tightfit.runtime.artefacts import Artefact, ArtefactKind, find_artefact

MERGED = "merged"
QUANTIZED = "quantized"
_PLAIN_ENDING = re.compile(r"[-._](f16|bf16|f32|fp16|fp32)$", re.IGNORECASE)
_WEIGHTS = (".safetensors", ".bin", ".gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An unquantized model: a Hugging Face folder or a GGUF file."""

    artefact: Artefact
    name: str
    """What the results are called after."""
    home: Path
    """Where they go unless told."""
    spec: ModelSpec

    @property
    def path(self) -> Path:
        return self.artefact.path

    @property
    def is_gguf(self) -> bool:
        return self.artefact.kind is ArtefactKind.GGUF

    @property
    def size_bytes(self) -> int:
        return weight_bytes(self.path)

    @property
    def stamp(self) -> str:
        """Changes with the model's files."""
        digest = hashlib.blake2b(digest_size=10)
        for path in [self.path] if self.is_gguf else sorted(self.path.iterdir()):
            stat = path.stat()
            digest.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where each result goes."""

    home: Path
    of: Mapping[Target, Path]
    summary: Path | None
    """None: one result, which lies beside the user's own files."""


def find_source(name: str, targets: Sequence[Target]) -> Source:
    """The model that `name` means, if these targets can be made of it."""
    artefact = _unwrap(find_artefact(name))
    if artefact.kind in (ArtefactKind.GPTQ, ArtefactKind.BITSANDBYTES):
        raise InvalidInputError(
            f"{name} is quantized already ({artefact.kind.value}).",
            remedy="name the model it was made from",
        )
    is_gguf = artefact.kind is ArtefactKind.GGUF
    others = [target.value for target in targets if target.family is not Family.GGUF]
    if is_gguf and others:
        raise UsageError(
            f"{', '.join(others)} cannot be made of a GGUF file.",
            remedy=f"name the model's folder, or make one: tightfit convert {name} --to hf",
        )
    spec = read_gguf_model(artefact.path) if is_gguf else resolve_model(str(artefact.path))
    if spec.is_encoder_decoder and any(t.family is not Family.BITS for t in targets):
        raise InvalidInputError(
            f"{name} is an encoder-decoder model, which GPTQ and GGUF are not made for here.",
            remedy="--to nf4 or --to int8",
        )
    return Source(artefact=artefact, name=_title(artefact), home=_home(artefact), spec=spec)


def choose_places(source: Source, targets: Sequence[Target], out: Path | None) -> Places:
    """One target: `out` is the result, or a folder it goes to. Several: the folder for all."""
    names = {target: target.file_name(source.name) for target in targets}
    if len(targets) > 1:
        home = out or _folder_for_all(source)
        if home.is_file() or home.suffix.lower() == ".gguf":
            raise UsageError(
                f"--out {home} is one file for {len(targets)} formats.", remedy="--out FOLDER"
            )
        return Places(
            home=home,
            of={target: home / name for target, name in names.items()},
            summary=home / SUMMARY_FILE,
        )
    target = targets[0]
    home = source.home if out is None else out
    if out is not None and not (out.is_dir() and not (out / "config.json").is_file()):
        _check_ending(out, target)
        return Places(home=out.parent, of={target: out}, summary=None)
    keeps = source.artefact.run is not None and out is None
    summary = home / SUMMARY_FILE if keeps else None
    return Places(home=home, of={target: home / names[target]}, summary=summary)


def weight_bytes(path: Path) -> int:
    """Of a file, or of the weights in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(item.stat().st_size for item in path.iterdir() if item.suffix in _WEIGHTS)


def _unwrap(artefact: Artefact) -> Artefact:
    """A LoRA run's merged model in its adapter's place."""
    if artefact.kind is not ArtefactKind.ADAPTER:
        return artefact
    merged = None if artefact.run is None else artefact.run.path / MERGED
    if merged is None or not (merged / "config.json").is_file():
        raise InvalidInputError(
            f"{printable(artefact.name, most=400)} is an adapter, and only a whole model can be "
            "quantized.",
            remedy=f"tightfit merge {artefact.name}",
        )
    return replace(
        artefact, kind=ArtefactKind.MODEL, path=merged, base=None, tokenizer=merged, strategy=None
    )


def _title(artefact: Artefact) -> str:
    if artefact.run is not None:
        return artefact.run.path.resolve().name
    if artefact.kind is ArtefactKind.GGUF:
        return _PLAIN_ENDING.sub("", artefact.path.stem)
    named = Path(artefact.name).expanduser()
    return named.resolve().name if named.is_dir() else artefact.name.rstrip("/").rsplit("/", 1)[-1]


def _home(artefact: Artefact) -> Path:
    """A run's own folder; else beside the model; a cached hub id's results go here."""
    if artefact.run is not None:
        return artefact.run.path / QUANTIZED
    named = Path(artefact.name).expanduser()
    return named.parent if named.exists() and named.resolve() != Path.cwd() else Path()


def _folder_for_all(source: Source) -> Path:
    if source.artefact.run is not None:
        return source.home
    return source.home / f"{source.name}-{QUANTIZED}"


def _check_ending(out: Path, target: Target) -> None:
    is_file = target.family is Family.GGUF
    if is_file != (out.suffix.lower() == ".gguf"):
        kind = "a file that ends in .gguf" if is_file else "a folder"
        raise UsageError(
            f"--out {out}: {target.value} is {kind}.",
            remedy=f"--out {target.file_name('model')}",
        )
