"""Staged copies of models in RAM disks: their format, and finding the one of a folder.

`clusters/staging` writes what is defined here. A copy lies in `PLACE/tightfit-UID/KEY`, its
manifest beside it as `KEY.json`: the copy itself holds the model's files and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, NonNegativeInt, PositiveInt

from tightfit.core.errors import SetupError
from tightfit.core.files import cache_folder, write_atomic
from tightfit.core.frozen import Frozen
from tightfit.runtime.model_files import CHAT_TEMPLATES_FOLDER
from tightfit.runtime.tensor_files import list_weight_files

if TYPE_CHECKING:
    from tightfit.runtime.model_files import Artefact

VARIABLE = "TIGHTFIT_STAGE"
"""Folders to look in, joined by `:`; `none` uses no staged copy."""
RAM_DISK = Path("/dev/shm")
MANIFEST_ENDING = ".json"
_MAX_MANIFEST_BYTES = 64 << 20
_COMPANION_ENDINGS = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_NOT_COMPANIONS = ("trainer_state.json", "optimizer.json")
_SPLIT_GGUF = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")


def _check_name(name: str) -> str:
    path = PurePosixPath(name)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts or len(path.parts) > 2:
        raise ValueError("not the name of a model's file")
    return name


class StagedFile(Frozen):
    """One file, as it was at its source when it was copied."""

    name: Annotated[str, AfterValidator(_check_name)]
    size_bytes: NonNegativeInt
    mtime_ns: int
    digests: tuple[str, ...] = ()
    """Hex digest of each block; empty until the copy is complete."""


class Manifest(Frozen):
    """The files of a copy, and their source."""

    version: Literal[1] = 1
    source: str
    """The real path of the folder, or of a GGUF file."""
    block_bytes: PositiveInt
    files: tuple[StagedFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def key(self) -> str:
        return make_key(Path(self.source))


def make_key(source: Path) -> str:
    """The copy's name: readable, and unique for each source path."""
    digest = hashlib.sha256(os.fsencode(source)).hexdigest()[:12]
    is_snapshot = source.parent.name == "snapshots"  # of the hub cache: named by a commit
    name = source.parent.parent.name if is_snapshot else source.name
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:60].lstrip('.')}-{digest}"


def real_source(path: Path) -> Path:
    return Path(os.path.realpath(path))


def list_model_files(source: Path) -> list[str]:
    """Names of the files that loading `source` reads: weights, config, tokenizer, templates.

    Only the format that is loaded, if there are several. For a GGUF file: itself, and the other
    parts if it is split; the names are then relative to its folder.
    """
    if source.is_file():
        split = _SPLIT_GGUF.fullmatch(source.name)
        if split is None:
            return [source.name]
        start, count = split.groups()
        return [f"{start}-{part:05d}-of-{count}.gguf" for part in range(1, int(count) + 1)]
    weights = [str(path.relative_to(source)) for path in list_weight_files(source)]
    others = [
        path.name
        for path in source.iterdir()
        if path.suffix in _COMPANION_ENDINGS
        and not path.name.startswith((".", "training_", "pytorch_model.bin.index"))
        and path.name not in _NOT_COMPANIONS
        and path.is_file()
    ]
    templates = (source / CHAT_TEMPLATES_FOLDER).glob("*.jinja")
    others += [f"{CHAT_TEMPLATES_FOLDER}/{path.name}" for path in templates if path.is_file()]
    return sorted({*weights, *others})


def source_folder(source: Path) -> Path:
    """The folder that a manifest's names are relative to."""
    return source.parent if source.is_file() else source


def read_source(source: Path, *, block_bytes: int) -> Manifest:
    """The manifest of a copy of `source`, without digests. Follows links, as loading does."""
    real = real_source(source)
    folder = source_folder(real)
    files = []
    for name in list_model_files(real):
        facts = (folder / name).stat()
        files.append(StagedFile(name=name, size_bytes=facts.st_size, mtime_ns=facts.st_mtime_ns))
    return Manifest(source=str(real), block_bytes=block_bytes, files=tuple(files))


def home_in(place: Path) -> Path:
    """This user's folder in a directory that may be shared."""
    return place / f"tightfit-{os.getuid()}"


def staging_places() -> tuple[Path, ...]:
    """Where copies may be: from the environment, where this user staged before, /dev/shm."""
    stated = os.environ.get(VARIABLE, "")
    if stated.strip().lower() == "none":
        return ()
    named = [Path(part).expanduser() for part in stated.split(os.pathsep) if part.strip()]
    return tuple(dict.fromkeys([*named, *_read_places(), RAM_DISK]))


def remember_place(place: Path) -> None:
    """Make later commands look in a place beside /dev/shm too; ignores write errors."""
    known = _read_places()
    if place == RAM_DISK or place in known:
        return
    try:
        path = _places_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "".join(f"{line}\n" for line in (*known, place)))
    except (OSError, SetupError):
        return


def _places_path() -> Path:
    return cache_folder() / "stage-places.txt"


def _read_places() -> list[Path]:
    try:
        lines = _places_path().read_text("utf-8").splitlines()
    except (OSError, ValueError, SetupError):
        return []
    return [Path(line) for line in lines if Path(line).is_absolute()]


def find_staged(source: Path) -> Path | None:
    """The complete, current copy of a folder or GGUF file; None if there is none. Never raises."""
    try:
        real = real_source(source)
        for place in staging_places():
            home = home_in(place)
            manifest = read_manifest(home, make_key(real))
            if manifest is not None and manifest.source == str(real) and is_fresh(manifest):
                copy = home / manifest.key
                if is_whole(copy, manifest):
                    return copy / real.name if real.is_file() else copy
    except (OSError, ValueError):
        return None
    return None


def read_manifest(home: Path, key: str) -> Manifest | None:
    """The manifest of a finished copy, if only this user can have written it."""
    path = home / f"{key}{MANIFEST_ENDING}"
    try:
        if not is_own_folder(home) or not is_own_file(path):
            return None
        with path.open("rb") as stream:
            return Manifest.model_validate_json(stream.read(_MAX_MANIFEST_BYTES))
    except (OSError, ValueError):
        return None


def is_own_folder(path: Path) -> bool:
    """Whether this is a real folder of this user that no other user can write to."""
    facts = path.lstat()
    return (
        stat.S_ISDIR(facts.st_mode)
        and facts.st_uid == os.getuid()
        and not stat.S_IMODE(facts.st_mode) & 0o022
    )


def is_own_file(path: Path) -> bool:
    facts = path.lstat()
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid()


def is_fresh(manifest: Manifest) -> bool:
    """Whether the source is unchanged: the same files, sizes and times."""
    now = read_source(Path(manifest.source), block_bytes=manifest.block_bytes)
    then = [(file.name, file.size_bytes, file.mtime_ns) for file in manifest.files]
    return then == [(file.name, file.size_bytes, file.mtime_ns) for file in now.files]


def is_whole(copy: Path, manifest: Manifest) -> bool:
    """Whether every file is intact by owner, size and time; reads no contents."""
    try:
        return is_own_folder(copy) and all(
            is_own_file(copy / file.name)
            and (copy / file.name).lstat().st_size == file.size_bytes
            and (copy / file.name).lstat().st_mtime_ns == file.mtime_ns
            for file in manifest.files
        )
    except OSError:
        return False


def prefer_staged(folder: Path) -> Path:
    """The folder's staged copy if there is one, else the folder itself."""
    return find_staged(folder) or folder


def use_staged(artefact: Artefact) -> tuple[Artefact, str]:
    """The artefact with its weights read from a staged copy, and a sentence that says so.

    Tokenizer and adapter are small, and stay where they are.
    """
    path = artefact.base or artefact.path
    copy = find_staged(path)
    if copy is None:
        return artefact, ""
    changed = replace(artefact, base=copy) if artefact.base else replace(artefact, path=copy)
    return changed, describe_use(copy)


def describe_use(copy: Path) -> str:
    return f"Its weights are read from the staged copy {copy}."


def iterate_manifests(home: Path) -> Iterator[Manifest]:
    """The manifests of finished copies in one user folder."""
    try:
        paths = sorted(home.glob(f"*{MANIFEST_ENDING}"))
    except OSError:
        return
    for path in paths:
        found = read_manifest(home, path.name.removesuffix(MANIFEST_ENDING))
        if found is not None and found.key == path.name.removesuffix(MANIFEST_ENDING):
            yield found
