"""What a user's name for a model to convert means, and where the result goes by default."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tightfit.core.errors import InvalidInputError, NotFoundError, UsageError
from tightfit.runtime.artefacts import Artefact, ArtefactKind, find_artefact


class SourceKind(str, Enum):
    """How the weights lie on the disk."""

    META = "meta"
    HF = "hf"
    GGUF = "gguf"


SAID = {
    SourceKind.META: "Meta's original checkpoint",
    SourceKind.HF: "a Hugging Face folder",
    SourceKind.GGUF: "a GGUF file",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model that was found."""

    name: str
    """As the user said it."""
    kind: SourceKind
    path: Path
    home: Path
    """The folder that the result goes into unless told otherwise."""
    stem: str
    """What the result's file is called after."""
    title: str
    """What the model is called."""


def find_source(name: str) -> Source:
    """Look at the files; refuse what cannot be converted by what it is."""
    path = Path(name).expanduser()
    here = path.absolute()
    if (path / "params.json").is_file() and not (path / "config.json").is_file():
        kind = SourceKind.META
        stem = here.name
        return Source(name=name, kind=kind, path=path, home=here.parent, stem=stem, title=stem)
    gguf = _find_gguf(path)
    if gguf is not None:
        home, stem = gguf.absolute().parent, gguf.stem
        kind = SourceKind.GGUF
        return Source(name=name, kind=kind, path=gguf, home=home, stem=stem, title=stem)
    artefact = find_artefact(name)
    _require_plain(artefact)
    if artefact.run is not None:
        home, stem = artefact.run.path.absolute(), artefact.path.name
        title = home.name
    else:
        # An id of the hub's cache, whose folder is called by a number.
        home = here.parent if path.exists() else Path.cwd()
        stem = title = here.name if path.exists() else name.rsplit("/", 1)[-1]
    kind = SourceKind.HF
    return Source(name=name, kind=kind, path=artefact.path, home=home, stem=stem, title=title)


def choose_format(source: Source, wanted: str | None) -> str:
    """`gguf` or `hf`; the other one of the two where nothing is said."""
    to = wanted or ("gguf" if source.kind is SourceKind.HF else "hf")
    if to == source.kind.value:
        remedy = (
            f"tightfit quantize {source.name} --to q8_0 makes a smaller one"
            if to == "gguf"
            else "--to gguf"
        )
        raise UsageError(f"{source.name} is {SAID[source.kind]} already.", remedy=remedy)
    if source.kind is SourceKind.META and to == "gguf":
        between = source.home / f"{source.stem}-hf"
        raise UsageError(
            "Meta's checkpoints become GGUF by way of a Hugging Face folder.",
            remedy=f"tightfit convert {source.name} --to hf, then "
            f"tightfit convert {between} --to gguf",
        )
    return to


def default_target(source: Source, to: str, dtype: str | None) -> Path:
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
            f"{artefact.name} is quantized ({artefact.kind.value}), and its values cannot be had "
            "back.",
            remedy="convert the model that it was made from",
        )
