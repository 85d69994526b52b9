"""From a path to rows: which files belong to it, and which reader each one needs."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from tightfit.core.errors import InvalidInputError, UsageError, UserError
from tightfit.data.arrow_rows import read_arrow, saved_files
from tightfit.data.json_rows import read_json, read_json_lines
from tightfit.data.meter import Meter
from tightfit.data.row import Row
from tightfit.data.streams import COMPRESSIONS, open_data, stat_of, unreadable
from tightfit.data.table_rows import read_csv, read_parquet, read_text
from tightfit.data.take import SPLIT_WORDS

OnFault = Callable[[UserError], None]
"""Told of a row that cannot be read; reading goes on behind it."""
_StreamReader = Callable[[IO[bytes], Path, OnFault | None], Iterator[Row]]

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
_ARROW = ".arrow"
_NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""What the `datasets` library writes beside its data."""
_HELD_OUT = re.compile(r"(^|[._-])(test|valid|validation|dev|eval)([._-]|$)", re.IGNORECASE)
_TRAIN = re.compile(r"(^|[._-])train([._-]|$)", re.IGNORECASE)


def read_rows(source: Path | str | Sequence[Path | str]) -> Iterator[Row]:
    """Rows of a file, of a folder's files, or of several of both, in order, one at a time."""
    for path in data_files(source):
        yield from read_file(path)


def read_file(
    path: Path, meter: Meter | None = None, on_fault: OnFault | None = None
) -> Iterator[Row]:
    """Rows of one file. Raises rather than yield none: an empty dataset is always a mistake.

    With `on_fault`, a row that cannot be read is told and passed over. Where the
    file itself breaks off, the reading ends there.
    """
    num_rows = num_faults = 0

    def tell(fault: UserError) -> None:
        nonlocal num_faults
        num_faults += 1
        if on_fault is not None:
            on_fault(fault)

    try:
        for row in _rows_of(path, meter, None if on_fault is None else tell):
            num_rows += 1
            yield row
    except InvalidInputError as fault:
        if on_fault is None or not num_rows:
            raise
        tell(fault)
    if not num_rows and not num_faults:
        raise InvalidInputError(f"{path} holds no rows.", remedy="name a file that holds rows")


def data_files(source: Path | str | Sequence[Path | str], *, word: str | None = None) -> list[Path]:
    """The files behind a source, sorted inside each folder.

    In a folder with files named `train`, those named test, validation, dev or
    eval are left out: they are held back from training on purpose. With `word`
    (a split's name) only the files of that split are meant.
    """
    sources = [source] if isinstance(source, str | Path) else list(source)
    if not sources:
        raise InvalidInputError("No data file was named.", remedy="name a data file or folder")
    files: list[Path] = []
    for item in sources:
        if not str(item).strip():
            raise UsageError("An empty name is no data file.", remedy="name a data file or folder")
        path = Path(item).expanduser() if str(item).startswith("~/") else Path(item)
        files += _files_in(path, word) if stat.S_ISDIR(stat_of(path)) else [path]
    return files


def _files_in(folder: Path, word: str | None) -> list[Path]:
    try:
        found = sorted(_walk(folder))
    except OSError as fault:
        raise unreadable(folder, fault) from fault
    if not found:
        raise InvalidInputError(
            f"{folder} holds no data files.", remedy=f"put files there that end in {_known()}"
        )
    if word is not None:
        return _of_split(found, folder, word)
    if any(_names(path, folder, _TRAIN) for path in found):
        found = [path for path in found if not _names(path, folder, _HELD_OUT)]
    return found


def _names(path: Path, folder: Path, pattern: re.Pattern[str]) -> bool:
    """Does a file's name, or that of a folder inside the source, speak of a split?"""
    return any(pattern.search(part) for part in path.relative_to(folder).parts)


def _of_split(found: list[Path], folder: Path, word: str) -> list[Path]:
    kind = SPLIT_WORDS[word]
    words = "|".join(name for name, meant in SPLIT_WORDS.items() if meant == kind)
    pattern = re.compile(rf"(^|[._-])({words})([._-]|$)", re.IGNORECASE)
    chosen = [path for path in found if _names(path, folder, pattern)]
    if not chosen:
        shown = ", ".join(str(path.relative_to(folder)) for path in found[:6])
        raise InvalidInputError(
            f"{folder} has no files named {word}; it holds {shown}.",
            remedy="name one of these files instead of the folder",
        )
    return chosen


def _walk(folder: Path) -> Iterator[Path]:
    saved = saved_files(folder)
    if saved is not None:
        yield from (folder / name for name in saved)
        return
    for item in folder.iterdir():
        if item.name.startswith(".") or item.name in _NOT_ROWS:
            continue
        if item.is_dir() and not item.is_symlink():  # a link upwards would never end
            yield from _walk(item)
        elif item.is_file() and _kind(item) in (*_READERS, *_PARQUET, _ARROW):
            yield item


def _rows_of(path: Path, meter: Meter | None, on_fault: OnFault | None) -> Iterator[Row]:
    kind = _kind(path)
    if kind == _ARROW:
        yield from read_arrow(path, meter)
        return
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
        yield from reader(stream, path, on_fault)


def _kind(path: Path) -> str:
    """The ending that tells the format, compression endings set aside."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _known() -> str:
    return ", ".join((*_READERS, _PARQUET[0], _ARROW)) + " (also .gz, .bz2, .xz, .zst)"
