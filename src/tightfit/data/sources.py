"""Data sources of a recipe to rows: which files, which slice of the rows, which reader."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple

from tightfit.core import reading
from tightfit.core.errors import InvalidInputError, UsageError, UserError
from tightfit.core.objectives import ExampleKind
from tightfit.core.reading import open_regular
from tightfit.core.strategy import DataSource
from tightfit.data.formats import RowFormat
from tightfit.data.preferences import recognise
from tightfit.data.readers import (
    COMPRESSIONS,
    WRITE_ROWS,
    Item,
    ReadMeter,
    Row,
    file_mode,
    file_size,
    is_readable_head,
    open_data,
    read_arrow,
    read_csv,
    read_document,
    read_json,
    read_json_lines,
    read_parquet,
    read_text,
    saved_files,
    unreadable,
)
from tightfit.data.tools import Tool, ToolError, read_tools

# Parts of a dataset as people write them: `10`, `1%`, `[:10%]`, `train[10:20]`, `x.jsonl[:5]`.

SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "eval",
    "valid": "eval",
    "val": "eval",
    "dev": "eval",
    "eval": "eval",
    "test": "test",
}
_WORD = re.compile(r"[A-Za-z]+")
_BOUND = re.compile(r"([+-]?)(\d+(?:\.\d+)?)(%?)")
_SUFFIX = re.compile(r"\[[^\[\]]*\]$")
_REMEDY = "write it like 10, 1%, [:10%], train[:10%] or [100:200]"


class SliceBound(NamedTuple):
    """One end of a slice: a row number, or a share of all rows."""

    value: float
    is_percent: bool

    def at(self, num_rows: int) -> int:
        """Rounded to the nearest row, as the `datasets` library rounds."""
        place = round(num_rows * self.value / 100) if self.is_percent else int(self.value)
        return min(max(place + num_rows if self.value < 0 else place, 0), num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSlice:
    """Which rows of a source."""

    text: str = ""
    word: str | None = None
    """`train`, `validation`, ...: which files of a folder."""
    start: SliceBound | None = None
    stop: SliceBound | None = None

    @property
    def needs_count(self) -> bool:
        """Shares and places from the end are known only when all rows are counted."""
        bounds = [bound for bound in (self.start, self.stop) if bound is not None]
        return any(bound.is_percent or bound.value < 0 for bound in bounds)

    def range(self, num_rows: int | None, source: str) -> tuple[int, int | None]:
        """First row and the row to stop before, counted from 0; None: to the end."""
        count = num_rows if num_rows is not None else 2**62
        first = self.start.at(count) if self.start else 0
        last = self.stop.at(count) if self.stop else None
        if last is not None and last <= first:
            counted = "" if num_rows is None else f" of its {num_rows:,} rows"
            raise InvalidInputError(
                f"`{self.text}` takes none{counted} from {source}.", remedy=_REMEDY
            )
        return first, last


def parse_row_slice(text: str) -> RowSlice:
    """A part as people write it. A bare number or share counts from the first row."""
    rest = text.strip()
    word = None
    if found := _WORD.match(rest):
        word, rest = found[0].lower(), rest[found.end() :].strip()
        if word not in SPLIT_WORDS:
            raise _bad(text, f"`{found[0]}` is no split; known are {', '.join(SPLIT_WORDS)}")
    if not rest:
        if word is None:
            raise _bad(text, "it is empty")
        return RowSlice(text=text, word=word)
    if not rest.startswith("["):
        if word is not None:
            raise _bad(text, "after a split's name comes a slice in square brackets")
        return RowSlice(text=text, stop=_bound(rest, text, allow_negative=False))
    if not rest.endswith("]") or rest.count(":") != 1:
        raise _bad(text, "a slice is two places with a colon between, in square brackets")
    low, high = rest[1:-1].split(":")
    return RowSlice(text=text, word=word, start=_end(low, text), stop=_end(high, text))


def split_slice_suffix(path: str) -> tuple[str, str | None]:
    """`train.jsonl[:10%]` as path and part."""
    found = _SUFFIX.search(path)
    return (path, None) if found is None else (path[: found.start()], found[0])


def _end(written: str, text: str) -> SliceBound | None:
    return _bound(written.strip(), text, allow_negative=True) if written.strip() else None


def _bound(written: str, text: str, *, allow_negative: bool) -> SliceBound:
    found = _BOUND.fullmatch(written.replace("_", "").replace(",", ""))
    if found is None:
        raise _bad(text, f"`{written}` is neither a number of rows nor a percentage")
    value, is_percent = float(found[2]), bool(found[3])
    if is_percent and value > 100:
        raise _bad(text, f"{written} is more than all rows")
    if not is_percent and not value.is_integer():
        raise _bad(text, f"{written} is no whole number of rows; add % for a share")
    if found[1] == "-":
        if not allow_negative:
            raise _bad(text, "a number of rows is not negative")
        value = -value
    if not allow_negative and value == 0:
        raise _bad(text, "it takes no rows")
    return SliceBound(value, is_percent)


def _bad(text: str, why: str) -> InvalidInputError:
    return InvalidInputError(f"`{text}` names no part of a dataset: {why}.", remedy=_REMEDY)


# From a path to rows: which files belong to it, and which reader each one needs.

OnRowError = Callable[[UserError], None]
"""Receives the error of a row that cannot be read; reading goes on behind it."""

_READERS: dict[str, Callable[[IO[bytes], Path], Iterator[Item]]] = {
    ".json": read_json,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".csv": read_csv,
    ".tsv": read_csv,
    **dict.fromkeys((".txt", ".text", ".raw", ".utf8", ".md", ".markdown"), read_document),
}
_NOTES = (".md", ".markdown")
"""In a folder that has files with columns as well, these are about the data and not part of it."""
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
    path: Path,
    meter: ReadMeter | None = None,
    on_error: OnRowError | None = None,
    *,
    by_line: bool = False,
) -> Iterator[Row]:
    """Rows of one file; of a text file its lines if `by_line`.

    Raises rather than yield none: an empty dataset is always a mistake. With `on_error`, a row that
    cannot be read is reported and passed over. Where the file itself breaks off, the reading ends.
    """
    num_rows = num_errors = 0
    try:
        for item in _read_items(path, meter, by_line=by_line):
            if isinstance(item, Row):
                num_rows += 1
                yield item
            elif on_error is None:
                raise item
            else:
                num_errors += 1
                on_error(item)
    except InvalidInputError as error:
        if on_error is None or not num_rows:
            raise
        on_error(error)
    if not num_rows and not num_errors:
        raise InvalidInputError(f"{path} holds no rows.", remedy=WRITE_ROWS)


def rows_or_raise(items: Iterable[Item]) -> Iterator[Row]:
    """The rows; the first that cannot be read is raised."""
    for item in items:
        if not isinstance(item, Row):
            raise item
        yield item


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
        files += _files_in(path, word) if stat.S_ISDIR(file_mode(path)) else [path]
    return files


def _files_in(folder: Path, word: str | None) -> list[Path]:
    try:
        found = sorted(_walk(folder))
        if any(map(holds_rows, found)):
            found = [path for path in found if _kind(path) not in _NOTES]
    except OSError as error:
        raise unreadable(folder, error) from error
    if not found:
        raise InvalidInputError(
            f"{folder} holds no data files.", remedy=f"put files there that end in {_known()}"
        )
    if word is None:
        if any(_names(path, folder, _TRAIN) for path in found):
            found = [path for path in found if not _names(path, folder, _HELD_OUT)]
        return found
    words = "|".join(name for name, kind in SPLIT_WORDS.items() if kind == SPLIT_WORDS[word])
    pattern = re.compile(rf"(^|[._-])({words})([._-]|$)", re.IGNORECASE)
    chosen = [path for path in found if _names(path, folder, pattern)]
    if not chosen:
        shown = ", ".join(str(path.relative_to(folder)) for path in found[:6])
        raise InvalidInputError(
            f"{folder} has no files named {word}; it holds {shown}.",
            remedy="name one of these files instead of the folder",
        )
    return chosen


def _names(path: Path, folder: Path, pattern: re.Pattern[str]) -> bool:
    """Whether a file's name, or that of a folder inside the source, names a split."""
    return any(pattern.search(part) for part in path.relative_to(folder).parts)


def is_held_out(path: Path) -> bool:
    """Whether a file's own name says that its rows are not to be trained on."""
    return _HELD_OUT.search(path.name) is not None


def _walk(top: Path) -> Iterator[Path]:
    folders = [top]
    while folders:  # not by recursion: folders can lie deeper in each other than Python calls
        folder = folders.pop()
        saved = saved_files(folder)
        if saved is not None:
            yield from (folder / name for name in saved)
            continue
        for item in folder.iterdir():
            if item.name.startswith(".") or item.name in _NOT_ROWS:
                continue
            if item.is_dir() and not item.is_symlink():  # a link upwards would never end
                folders.append(item)
            elif item.is_file() and _kind(item) in (*_READERS, *_PARQUET, _ARROW):
                yield item


def _read_items(path: Path, meter: ReadMeter | None, *, by_line: bool) -> Iterator[Item]:
    kind = _kind(path)
    if kind == _ARROW:
        yield from read_arrow(path, meter)
    elif kind in _PARQUET:
        if path.suffix.lower() in COMPRESSIONS:
            raise InvalidInputError(
                f"{path} is a compressed Parquet file.",
                remedy="unpack it; Parquet compresses its columns itself",
            )
        yield from read_parquet(path, meter)
    elif kind in _READERS:
        with open_data(path, meter) as stream:
            reader = _READERS[kind]
            yield from (read_text if by_line and reader is read_document else reader)(stream, path)
    else:
        file_mode(path)
        raise InvalidInputError(
            f"{path} has no ending that tells its format.",
            remedy=f"rename it to end in {_known()}",
        )


def _kind(path: Path) -> str:
    """The ending that tells the format, compression endings set aside."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def holds_rows(path: Path) -> bool:
    """Whether a file's name says that it has rows with columns, not plain text."""
    kind = _kind(path)
    return _READERS.get(kind, read_document) is not read_document or kind in (*_PARQUET, _ARROW)


def _known() -> str:
    return ", ".join((*_READERS, _PARQUET[0], _ARROW)) + " (also .gz, .bz2, .xz, .zst)"


_HELD_OUT_WORDS = ("validation", "test")
_HASH_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSource:
    """A source with its files found and its part understood; nothing is read yet."""

    source: DataSource
    files: tuple[Path, ...]
    take: RowSlice
    tools: tuple[Tool, ...] = ()
    """Of the source's own file of tools."""

    @property
    def inputs(self) -> tuple[Path, ...]:
        """All files on which the rows depend."""
        tools = self.source.tools
        return self.files if tools is None else (*self.files, Path(tools).expanduser())

    @property
    def name(self) -> str:
        """As the user wrote it."""
        return self.source.path + (f" {self.source.take}" if self.source.take else "")


def open_source(source: DataSource) -> OpenedSource:
    """Find the files, and read the part that is asked for and the tools."""
    opened = _find_files(source)
    return opened if source.tools is None else replace(opened, tools=_read_tools(source.tools))


def _read_tools(name: str) -> tuple[Tool, ...]:
    path = Path(name).expanduser()
    remedy = 'write a JSON list: [{"name": "...", "parameters": {"type": "object", ...}}, ...]'
    try:
        tools = read_tools(reading.read_text(path, remedy=remedy))
    except OSError as error:
        raise unreadable(path, error) from error
    except ToolError as error:
        raise InvalidInputError(f"{path}: {error}.", remedy=remedy) from None
    if not tools:
        raise InvalidInputError(f"{path} lists no tools.", remedy=remedy)
    return tools


def _find_files(source: DataSource) -> OpenedSource:
    path = str(Path(source.path).expanduser()) if source.path.startswith("~/") else source.path
    written = source.take
    bare, suffix = split_slice_suffix(path)
    if suffix is not None and not Path(path).exists():
        if written is not None:
            raise InvalidInputError(
                f"{source.path} names a part, and `take: {written}` another.",
                remedy="keep one of the two",
            )
        path, written = bare, suffix
    take = RowSlice() if written is None else parse_row_slice(written)
    word: str | None = take.word
    if not Path(path).is_dir():
        if word is not None:
            # A file that calls itself one split is not another.
            parts = re.split(r"[._-]", Path(path).name.lower())
            named = {SPLIT_WORDS[part] for part in parts if part in SPLIT_WORDS}
            if named and SPLIT_WORDS[word] not in named:
                raise InvalidInputError(
                    f"{path} is a single file and not the {word} split by its name.",
                    remedy="leave the split's name out, or name the folder that holds all splits",
                )
        return OpenedSource(source=source, files=tuple(data_files(path)), take=take)
    # An evaluation source means a folder's held-out files, or all of them where it has none.
    words = _HELD_OUT_WORDS if word is None and source.split == "eval" else ()
    for held_out in words:
        with suppress(InvalidInputError):
            files = tuple(data_files(path, word=held_out))
            return OpenedSource(source=source, files=files, take=take)
    return OpenedSource(source=source, files=tuple(data_files(path, word=word)), take=take)


def read_part(
    opened: OpenedSource, meter: ReadMeter | None = None, on_error: OnRowError | None = None
) -> Iterator[Row]:
    """The rows of the part that was asked for."""
    total = None
    if opened.take.needs_count:
        quiet = None if on_error is None else lambda _: None
        total = sum(1 for _ in _all_rows(opened, ReadMeter(), quiet))
    first, last = opened.take.range(total, opened.name)
    rows = _all_rows(opened, meter or ReadMeter(), on_error)
    return itertools.islice(rows, first, last)


def read_source(
    opened: OpenedSource,
    meter: ReadMeter | None = None,
    on_error: OnRowError | None = None,
    *,
    example: ExampleKind = ExampleKind.ANSWER,
) -> Iterator[tuple[Row, RowFormat]]:
    """As `read_part`, each row with its file's format.

    A row in no known format is an error like any other; where a file's first rows
    are all like that, its reading ends with the first message.
    """
    known: dict[Path, RowFormat] = {}
    num_rows = 0
    for row in read_part(opened, meter, on_error):
        if row.path not in known:
            try:
                known[row.path] = recognise(row, example)
            except UserError as error:
                if on_error is None:
                    raise
                on_error(error)
                continue
        num_rows += 1
        yield row, known[row.path]
    if not num_rows and on_error is None:
        raise InvalidInputError(
            f"{opened.name} gives no rows.", remedy="name a part that holds rows"
        )


def digest_sources(sources: Sequence[OpenedSource]) -> str:
    """One digest over names, settings and contents."""
    digest = hashlib.blake2b(digest_size=16)
    for opened in sources:
        digest.update(opened.source.model_dump_json(exclude={"tools"}).encode())
        if opened.tools:
            digest.update(json.dumps(opened.tools).encode())
        for path in opened.files:
            digest.update(f"\n{path} ".encode("utf-8", "surrogateescape"))
            one = hashlib.blake2b(digest_size=16)
            try:
                with open_regular(path) as stream:
                    chunk = stream.read(_HASH_BYTES)
                    one.update(chunk)
                    # What is no text is not read on, however long it is.
                    if _kind(path) not in _READERS or is_readable_head(path, chunk):
                        while chunk := stream.read(_HASH_BYTES):
                            one.update(chunk)
            except OSError as error:
                raise unreadable(path, error) from error
            digest.update(one.digest())
    return digest.hexdigest()


def _all_rows(opened: OpenedSource, meter: ReadMeter, on_error: OnRowError | None) -> Iterator[Row]:
    by_line = opened.source.text_rows == "line"
    for path in opened.files:
        try:
            rows = read_file(path, meter, on_error, by_line=by_line)
            yield from (row._replace(tools=opened.tools) for row in rows) if opened.tools else rows
        except InvalidInputError as error:
            if on_error is None:
                raise
            on_error(error)
        meter.close_file(file_size(path))
