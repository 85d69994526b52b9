"""From a path to rows: which files belong to it, and which reader each one needs."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from tightfit.core.errors import InvalidInputError, UsageError
from tightfit.data.json_rows import read_json, read_json_lines
from tightfit.data.meter import Meter
from tightfit.data.row import Row
from tightfit.data.streams import COMPRESSIONS, open_data, stat_of, unreadable
from tightfit.data.table_rows import read_csv, read_parquet, read_text

_StreamReader = Callable[[IO[bytes], Path], Iterator[Row]]

_READERS: dict[str, _StreamReader] = {
    ".json": read_json,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".txt": read_text,
    ".text": read_text,
    ".raw": read_text,
    ".utf8": read_text,
}
_PARQUET = (".parquet", ".pq")
_NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""What the `datasets` library writes beside its data."""
_HELD_OUT = re.compile(r"(^|[._-])(test|valid|validation|dev|eval)([._-]|$)", re.IGNORECASE)
_TRAIN = re.compile(r"(^|[._-])train([._-]|$)", re.IGNORECASE)


def read_rows(source: Path | str | Sequence[Path | str]) -> Iterator[Row]:
    """Rows of a file, of a folder's files, or of several of both, in order, one at a time."""
    for path in data_files(source):
        yield from read_file(path)


def read_file(path: Path, meter: Meter | None = None) -> Iterator[Row]:
    """Rows of one file. Raises rather than yield none: an empty dataset is always a mistake."""
    num_rows = 0
    for row in _rows_of(path, meter):
        num_rows += 1
        yield row
    if not num_rows:
        raise InvalidInputError(f"{path} holds no rows.", remedy="name a file that holds rows")


def data_files(source: Path | str | Sequence[Path | str]) -> list[Path]:
    """The files behind a source, sorted inside each folder.

    In a folder with files named `train`, those named test, validation, dev or
    eval are left out: they are held back from training on purpose.
    """
    sources = [source] if isinstance(source, str | Path) else list(source)
    if not sources:
        raise InvalidInputError("No data file was named.", remedy="name a data file or folder")
    files: list[Path] = []
    for item in sources:
        if not str(item).strip():
            raise UsageError("An empty name is no data file.", remedy="name a data file or folder")
        path = Path(item).expanduser() if str(item).startswith("~/") else Path(item)
        files += _files_in(path) if stat.S_ISDIR(stat_of(path)) else [path]
    return files


def _files_in(folder: Path) -> list[Path]:
    try:
        found = sorted(_walk(folder))
    except OSError as fault:
        raise unreadable(folder, fault) from fault
    if not found:
        raise InvalidInputError(
            f"{folder} holds no data files.", remedy=f"put files there that end in {_known()}"
        )
    if any(_TRAIN.search(path.name) for path in found):
        found = [path for path in found if not _HELD_OUT.search(path.name)]
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for item in folder.iterdir():
        if item.name.startswith(".") or item.name in _NOT_ROWS:
            continue
        if item.is_dir() and not item.is_symlink():  # a link upwards would never end
            yield from _walk(item)
        elif item.is_file() and _kind(item) in (*_READERS, *_PARQUET):
            yield item


def _rows_of(path: Path, meter: Meter | None) -> Iterator[Row]:
    kind = _kind(path)
    if kind in _PARQUET:
        if path.suffix.lower() in COMPRESSIONS:
            raise InvalidInputError(
                f"{path} is a compressed Parquet file.",
                remedy="unpack it; Parquet compresses its columns itself",
            )
        yield from read_parquet(path, meter)
        return
    reader = _READERS.get(kind)
    if reader is None:
        stat_of(path)
        raise InvalidInputError(
            f"{path} has no ending that tells its format.",
            remedy=f"rename it to end in {_known()}",
        )
    with open_data(path, meter) as stream:
        yield from reader(stream, path)


def _kind(path: Path) -> str:
    """The ending that tells the format, compression endings set aside."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _known() -> str:
    return ", ".join((*_READERS, _PARQUET[0])) + " (also .gz, .bz2, .xz, .zst)"
