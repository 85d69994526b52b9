"""Rows of JSON, JSON Lines, CSV, TSV, text, Parquet and Arrow files, one at a time, decompressed
while reading.

Readers yield rows, and in the place of a row that cannot be read the error that says why; they
raise where the file itself breaks off.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import importlib
import json
import lzma
import re
import shlex
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError, UserError
from tightfit.core.reading import describe_kind, join_inside, open_regular, read_json_file
from tightfit.core.text import did_you_mean, printable
from tightfit.data.tools import Tool

# How far reading has come, reported about five times a second.

_EVERY_SECONDS = 0.2
_ROWS_BETWEEN_LOOKS = 64
WRITE_ROWS = (
    'write rows into it, such as {"prompt": "...", "completion": "..."} on each line; '
    "or leave it out"
)
"""The remedy for a file without rows."""


class ReadProgress(NamedTuple):
    """What has been read so far; bytes are those on disk, so compressed ones count as such."""

    num_rows: int
    num_bytes: int
    total_bytes: int

    @property
    def fraction(self) -> float:
        return min(self.num_bytes / self.total_bytes, 1.0) if self.total_bytes else 0.0


class ReadMeter:
    """Counts rows and bytes over all files of a source."""

    def __init__(
        self, report: Callable[[ReadProgress], None] | None = None, *, total_bytes: int = 0
    ) -> None:
        self._report = report
        self._total_bytes = total_bytes
        self._num_rows = 0
        self._done_bytes = 0
        self._position = 0
        self._last = time.monotonic()

    def add_row(self) -> None:
        self._num_rows += 1
        if self._num_rows % _ROWS_BETWEEN_LOOKS == 0:
            self._look()

    def move_to(self, position: int) -> None:
        """Where the reading of the present file stands."""
        self._position = max(self._position, position)
        self._look()

    def close_file(self, size: int) -> None:
        """The present file is done; the next one starts at its own zero."""
        self._done_bytes += size
        self._position = 0

    def finish(self) -> None:
        """Report the last state, however short the time."""
        if self._report is not None:
            self._report(self._state())

    def _look(self) -> None:
        if self._report is not None and time.monotonic() - self._last >= _EVERY_SECONDS:
            self._report(self._state())
            self._last = time.monotonic()

    def _state(self) -> ReadProgress:
        return ReadProgress(self._num_rows, self._done_bytes + self._position, self._total_bytes)


# Row: one example of a dataset, and where it stands on disk.


class Row(NamedTuple):
    """One object of a data file. `number` counts from 1, in what `unit` names."""

    values: Mapping[str, Any]
    path: Path
    number: int
    unit: str
    """`line` where the format has lines a user can go to, else `row`."""
    has_before: bool = False
    """A document too large to be held comes in several rows: part of it came before this one."""
    has_more: bool = False
    """Part of the same document follows."""
    tools: tuple[Tool, ...] = ()
    """Of a file for all rows: what this one may call unless it lists tools itself."""

    @property
    def place(self) -> str:
        return place(self.path, self.number, self.unit)


def place(path: Path, number: int, unit: str = "line") -> str:
    """`train.jsonl line 12`: what an editor and a person both find."""
    return f"{path} {unit} {number}"


def excerpt(value: object, *, most: int = 60) -> str:
    """A value short enough for a message, control characters escaped."""
    text = repr(value) if not isinstance(value, str) else value
    text = text if len(text) <= most else text[: most - 3] + "..."
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def json_type_name(value: object) -> str:
    """The JSON name of a value's type, with its article."""
    names = {bool: "a true/false value", str: "text", int: "a number", float: "a number"}
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, Mapping):
        return "an object"
    return names.get(type(value), f"a {type(value).__name__}")


COMPRESSIONS = {
    ".gz": ("gzip", b"\x1f\x8b"),
    ".bz2": ("bzip2", b"BZh"),
    ".xz": ("xz", b"\xfd7zXZ\x00"),
    ".zst": ("zstd", b"\x28\xb5\x2f\xfd"),
}
_FOREIGN = {
    b"PAR1": "a Parquet file; name it .parquet",
    b"SQLite format 3": "an SQLite database; export its table to JSON Lines",
    b"PK\x03\x04": "a zip archive (or a spreadsheet); unpack it or save it as CSV",
    b"%PDF": "a PDF; extract its text first",
    b"GGUF": "a GGUF model, not a dataset",
    b"ARROW1": "an Arrow file; name it .arrow",
    b"\xff\xfe": "UTF-16 text; convert it with: iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16 text; convert it with: iconv -f UTF-16 -t UTF-8",
}
_PROBE_BYTES = 4096
_CHUNK_BYTES = 1 << 18
MAX_LINE_BYTES = 64 * 2**20
"""Of one row. The longest sequence that can be asked for has fewer characters."""
MAX_BLANK_BYTES = 8 * 2**20
"""Of blank lines in a row, which would cost seconds and mean nothing."""
MAX_JSON_BYTES = 4 * 2**30
"""Of one JSON text, which is held in memory twice while it is decoded."""
MAX_EXPANSION = 100
"""Text packs to a fifth, logs to a twentieth; what packs so much better is a bomb."""
_EXPANSION_GRACE_BYTES = 16 * 2**20
DECOMPRESSION_ERRORS = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


@contextmanager
def open_data(path: Path, meter: ReadMeter | None = None) -> Iterator[IO[bytes]]:
    """The file's plain bytes. Compression is recognised by content, whatever the name."""
    require_file(path)
    try:
        with open_regular(path) as raw:
            head = raw.read(_PROBE_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    if not head:
        raise InvalidInputError(f"{path} is empty.", remedy=WRITE_ROWS)
    compression = _compression(path, head)
    try:
        with open_regular(path) as raw, _unpack(path, raw, compression) as stream:
            is_packed = compression is not None
            metered = _MeteredStream(path, raw, stream, meter or ReadMeter(), is_packed=is_packed)
            yield cast(IO[bytes], metered)
    except UserError:
        raise
    except DECOMPRESSION_ERRORS as error:
        raise damaged(path, error) from error
    except OSError as error:  # bz2 reports broken data as a plain OSError without an errno
        raise (unreadable(path, error) if error.errno else damaged(path, error)) from error


class _MeteredStream:
    """A stream that reports where its file stands, and stops one that unpacks without end."""

    def __init__(
        self, path: Path, raw: IO[bytes], stream: IO[bytes], meter: ReadMeter, *, is_packed: bool
    ) -> None:
        self._path = path
        self._raw = raw
        self._stream = stream
        self._meter = meter
        self._is_packed = is_packed
        self._num_unpacked = 0

    def read(self, size: int) -> bytes:
        try:
            chunk = self._stream.read(size)
        except (OSError, *DECOMPRESSION_ERRORS):
            raise
        except Exception as error:  # zstd modules raise errors of their own
            raise damaged(self._path, error) from error
        position = self._raw.tell()
        self._meter.move_to(position)
        if self._is_packed:
            self._num_unpacked += len(chunk)
            if self._num_unpacked > _EXPANSION_GRACE_BYTES + MAX_EXPANSION * position:
                raise InvalidInputError(
                    f"{self._path} unpacks to more than {MAX_EXPANSION} times its size, "
                    "which no text does.",
                    remedy="look at it before it is unpacked: it repeats itself without end",
                )
        return chunk


def require_file(path: Path) -> None:
    """A regular file that is there; never a pipe, which would hang, nor a device."""
    mode = file_mode(path)
    if not stat.S_ISREG(mode):
        kind = describe_kind(mode) or "not a regular file"
        raise InvalidInputError(f"{path} is {kind}.", remedy="name a data file")


def file_mode(path: Path) -> int:
    """The mode bits of an existing path."""
    try:
        return path.stat().st_mode
    except FileNotFoundError as error:
        beside: list[str] = []
        folder = "a folder that was deleted"
        with suppress(OSError):
            beside = [item.name for item in path.parent.iterdir()]
        with suppress(OSError):
            folder = printable(str(path.absolute().parent), most=400)
        raise NotFoundError(
            f"There is no data file {printable(str(path), most=400)}."
            f"{did_you_mean(path.name, beside)}",
            remedy=f"name an existing file or folder; this one was looked for in {folder} "
            "(a path in a recipe starts at the recipe's folder, any other where the command runs)",
        ) from error
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def file_size(path: Path) -> int:
    """Bytes on disk; 0 where they cannot be read, which reading will report."""
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0


def unreadable(path: Path, error: Exception) -> UserError:
    shown = printable(str(path), most=400)
    if isinstance(error, PermissionError):
        return SetupError(
            f"Cannot read {shown}: permission denied.",
            remedy=f"ask its owner for read permission; who may read it: ls -ld {_shell(path)}",
        )
    reason = getattr(error, "strerror", None) or str(error)
    return InvalidInputError(
        f"Cannot read {shown}: {reason}.",
        remedy=f"check that it is readable: ls -ld {_shell(path)}",
    )


def _shell(path: Path) -> str:
    return shlex.quote(printable(str(path), most=400))


def damaged(path: Path, error: Exception) -> InvalidInputError:
    return InvalidInputError(
        f"{path} is truncated or damaged: {error}.",
        remedy="copy or download the file again; `gzip -t`, `xz -t` or `bzip2 -t` tests it",
    )


def iter_lines(stream: IO[bytes], path: Path) -> Iterator[bytes]:
    """Lines without their line ends, read in chunks so that memory holds one line, not the file."""
    pieces: list[bytes] = []
    num_held = num_blank = number = 0
    while chunk := stream.read(_CHUNK_BYTES):
        if not number and not pieces:
            check_is_text(path, chunk[:_PROBE_BYTES])
        num_blank = num_blank + len(chunk) if chunk.isspace() else 0
        if num_blank > MAX_BLANK_BYTES:
            raise InvalidInputError(
                f"{place(path, number + 1)} comes after {MAX_BLANK_BYTES // 2**20} MiB of blanks.",
                remedy=f"leave the blank lines out: grep -v '^[[:space:]]*$' {_shell(path)} > rows",
            )
        first, *lines = chunk.split(b"\n")
        pieces.append(first)
        num_held += len(first)
        if num_held > MAX_LINE_BYTES:
            raise InvalidInputError(
                f"{place(path, number + 1)} begins a row of more than "
                f"{MAX_LINE_BYTES // 2**20} MiB.",
                remedy="split it into shorter rows; no context is that long",
            )
        if lines:
            rest = lines.pop()
            number += 1 + len(lines)
            yield b"".join(pieces)
            yield from lines
            pieces, num_held = [rest], len(rest)
    if num_held:
        yield b"".join(pieces)


def check_is_text(path: Path, head: bytes) -> None:
    """Refuse what is clearly no UTF-8 text, naming what it looks like."""
    for magic, name in _FOREIGN.items():
        if head.startswith(magic):
            raise InvalidInputError(f"{path} is not text.", remedy=f"it looks like {name}")
    if b"\x00" in head:
        raise InvalidInputError(
            f"{path} is not text: it holds NUL bytes.",
            remedy="name a JSON, JSON Lines, CSV, TSV, text or Parquet file",
        )


def is_readable_head(path: Path, head: bytes) -> bool:
    """Whether a file that begins so is compressed, or can be text."""
    try:
        if _compression(path, head) is None:
            check_is_text(path, head[:_PROBE_BYTES])
    except InvalidInputError:
        return False
    return True


def wrong_encoding(path: Path, line: int, error: UnicodeDecodeError) -> InvalidInputError:
    byte = error.object[error.start]
    return InvalidInputError(
        f"{place(path, line)} is not UTF-8: byte 0x{byte:02x}.",
        remedy=f"convert it: iconv -f LATIN1 -t UTF-8 '{path}' > utf8{path.suffix}",
    )


def _compression(path: Path, head: bytes) -> str | None:
    for name, magic in COMPRESSIONS.values():
        if head.startswith(magic):
            return name
    claimed = COMPRESSIONS.get(path.suffix.lower())
    if claimed:
        raise InvalidInputError(
            f"{path} is named like {claimed[0]} but its content is not {claimed[0]}.",
            remedy=f"rename it without {path.suffix}, or compress it again",
        )
    return None


def _unpack(path: Path, raw: IO[bytes], compression: str | None) -> IO[bytes]:
    if compression is None:
        return raw
    if compression != "zstd":
        module: Any = {"gzip": gzip, "bzip2": bz2, "xz": lzma}[compression]
        return cast(IO[bytes], module.open(raw, "rb"))
    for name in ("compression.zstd", "zstandard", "pyzstd"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        return cast(IO[bytes], module.open(raw, "rb"))
    raise SetupError(
        f"{path} is zstd-compressed and no zstd module is installed.",
        remedy=f"pip install zstandard, or unpack it: zstd -d {_shell(path)}",
    )


Item = Row | InvalidInputError
LIST_KEYS = ("data", "train", "rows", "examples")
"""Where an object that wraps a whole dataset keeps its rows."""
_SPACES = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def read_json_lines(stream: IO[bytes], path: Path) -> Iterator[Item]:
    """One object per line; blank lines are passed over."""
    for number, raw in enumerate(iter_lines(stream, path), start=1):
        line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
        if line and not line.isspace():
            yield _parse_line(line, path, number)


def _parse_line(raw: bytes, path: Path, number: int) -> Item:
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return wrong_encoding(path, number, error)
    except json.JSONDecodeError as error:
        return _not_json(path, number, error.msg, f"column {error.colno}")
    except (ValueError, RecursionError) as error:
        return _not_json(path, number, _why(error), "")
    return _as_row(value, path, number)


def _is_text(name: str) -> bool:
    """Whether it can be written; JSON can spell half of a surrogate pair."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _as_row(value: Any, path: Path, number: int, unit: str = "line") -> Item:
    if isinstance(value, dict):
        if any(not name.isprintable() and not _is_text(name) for name in value):
            return InvalidInputError(
                f"{place(path, number, unit)} has a key with half of a surrogate pair.",
                remedy="write the key as text",
            )
        return Row(value, path, number, unit)
    return InvalidInputError(
        f"{place(path, number, unit)} is {json_type_name(value)}, not an object with keys: "
        f"{excerpt(value)}",
        remedy='write each row as an object, like {"prompt": "...", "completion": "..."}',
    )


def read_json(stream: IO[bytes], path: Path) -> Iterator[Item]:
    """A list of objects, an object that holds such a list, or objects one after another.

    The text is held in memory; files beyond that belong into JSON Lines.
    """
    text = _JsonText(stream, path)
    first = text.peek()
    if first == "":
        raise InvalidInputError(f"{path} holds no rows.", remedy=WRITE_ROWS)
    if first == "[":
        yield from _read_list(text, path)
        return
    line, value = text.value()
    if text.peek() == "":
        yield from _read_wrapped(value, path, line)
        return
    yield _as_row(value, path, line)
    while text.peek() != "":
        line, value = text.value()
        yield _as_row(value, path, line)


def _read_list(text: _JsonText, path: Path) -> Iterator[Item]:
    text.take()
    if text.peek() == "]":
        return
    while True:
        line, value = text.value()
        yield _as_row(value, path, line)
        mark = text.peek()
        if mark not in ("]", ","):
            reason = "the list is cut off" if mark == "" else f"expected `,` or `]`, not `{mark}`"
            raise text.error(reason)
        text.take()
        if mark == "]":
            break
    if text.peek():
        raise text.error("text after the end of the list")


def _read_wrapped(value: Any, path: Path, line: int) -> Iterator[Item]:
    held = value if isinstance(value, dict) else {}
    key = next((key for key in LIST_KEYS if isinstance(held.get(key), list)), None)
    lists = [name for name, item in held.items() if _is_list_of_objects(item)]
    if key is None and lists and "messages" not in lists and "conversations" not in lists:
        raise InvalidInputError(
            f"{path} keeps its rows under `{lists[0]}`.{did_you_mean(lists[0], LIST_KEYS)}",
            remedy="rename that key to `data`, or write the rows as JSON Lines",
        )
    if key is None:
        yield _as_row(value, path, line)
        return
    for number, item in enumerate(held[key], start=1):
        yield _as_row(item, path, number, f"`{key}` row")


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(i, dict) for i in value[:3])


class _JsonText:
    """A JSON text and how far it has been read, by line and column."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        chunks: list[bytes] = []
        num_bytes = 0
        while chunk := stream.read(_CHUNK_BYTES):
            if not chunks:
                check_is_text(path, chunk[:_PROBE_BYTES])
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > MAX_JSON_BYTES:
                raise InvalidInputError(
                    f"{path} is one JSON text of more than {MAX_JSON_BYTES // 2**30} GiB.",
                    remedy="write the rows as JSON Lines, one object per line; "
                    f"`jq -c '.[]' {path.name} > rows.jsonl` does so for a list",
                )
        data = b"".join(chunks)
        try:
            self._text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise wrong_encoding(path, 1 + data.count(b"\n", 0, error.start), error) from error
        self._path = path
        self._at = 0
        self._line = 1

    def peek(self) -> str:
        """The next character that is no space, left in place; empty at the end."""
        found = _SPACES.match(self._text, self._at)
        self._move(found.end() if found else self._at)
        return self._text[self._at : self._at + 1]

    def take(self) -> None:
        """Step over the character just peeked."""
        self._at += 1

    def value(self) -> tuple[int, Any]:
        """The next JSON value and the line it starts on."""
        if self.peek() == "":
            raise self.error("the file is cut off")
        start = self._line
        try:
            value, end = _DECODER.raw_decode(self._text, self._at)
        except json.JSONDecodeError as error:
            self._move(error.pos)
            raise self.error(error.msg) from error
        except (ValueError, RecursionError) as error:
            raise _not_json(self._path, start, _why(error), "") from error
        self._move(end)
        return start, value

    def error(self, reason: str) -> InvalidInputError:
        """That the text is not JSON here."""
        column = self._at - self._text.rfind("\n", 0, self._at)
        return _not_json(self._path, self._line, reason, f"column {column}")

    def _move(self, end: int) -> None:
        self._line += self._text.count("\n", self._at, end)
        self._at = end


def _why(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).split(";")[0]


_CLEARER = {
    "Unterminated string starting at": "a text that begins here is never closed",
    "Invalid control character at": "an invalid control character, like a raw line break in a text",
}
"""Where the library's own words need a position after them."""


def _not_json(path: Path, line: int, reason: str, where: str) -> InvalidInputError:
    at = f" {where}" if where else ""
    why = _CLEARER.get(reason, reason[:1].lower() + reason[1:])
    return InvalidInputError(
        f"{place(path, line)}{at} is not JSON: {why}.",
        remedy=f"correct that line; `python3 -m json.tool --json-lines '{path}'` checks JSON Lines"
        if path.name.endswith(("l", "l.gz"))
        else f"correct that line; `python3 -m json.tool '{path}'` checks the whole file",
    )


# Rows of CSV, TSV, plain text and Parquet files, one at a time.

_DELIMITERS = ",;\t|"
_BATCH_ROWS = 1024


def read_csv(stream: IO[bytes], path: Path) -> Iterator[Item]:
    """A header line, then one row per record; the delimiter is the header's most frequent one."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
    lines = decoded_lines(stream, path)
    first = next(lines, "")
    delimiter = max(_DELIMITERS, key=first.count) if ".tsv" not in path.name.lower() else "\t"
    reader = csv.reader(chain([first] if first else [], lines), delimiter=delimiter, strict=True)
    try:
        header = _header(next(reader, []), path)
        for cells in reader:
            if len(cells) == len(header):
                yield Row(dict(zip(header, cells, strict=True)), path, reader.line_num, "line")
            elif cells:
                yield InvalidInputError(
                    f"{place(path, reader.line_num)} has {len(cells)} columns; the header has "
                    f"{len(header)} ({', '.join(header[:6])}).",
                    remedy="put a field that holds the delimiter or a line break in double quotes",
                )
    except csv.Error as error:
        raise InvalidInputError(
            f"{place(path, reader.line_num)} is not CSV: {error}.",
            remedy="close every quote and double the quotes inside a field",
        ) from error


MAX_PART_CHARS = 4_000_000
"""Of a document that are read at once; a million tokens or so."""


def read_document(stream: IO[bytes], path: Path) -> Iterator[Item]:
    """The whole file is one row with the key `text`, line breaks and blank lines kept; a long one
    comes in parts that end with a line."""
    held: list[str] = []
    num_chars, first, waiting = 0, 1, None
    for number, line in enumerate(decoded_lines(stream, path), start=1):
        if num_chars and num_chars + len(line) > MAX_PART_CHARS:
            part = _as_part(held, path, first, waiting)
            if part is not None and waiting is not None:
                yield waiting._replace(has_more=True)
            waiting = part or waiting
            held, num_chars, first = [], 0, number
        held.append(line.removesuffix("\r\n") + "\n" if line.endswith("\r\n") else line)
        num_chars += len(line)
    part = _as_part(held, path, first, waiting)
    if part is not None and waiting is not None:
        yield waiting._replace(has_more=True)
    last = part or waiting
    if last is not None:
        text = last.values["text"].removesuffix("\n")
        yield last._replace(values={"text": text})


def _as_part(held: list[str], path: Path, first: int, before: Row | None) -> Row | None:
    """None where there is nothing but spaces."""
    text = "".join(held)
    if not text.strip():
        return None
    return Row({"text": text}, path, first, "line", has_before=before is not None)


def read_text(stream: IO[bytes], path: Path) -> Iterator[Item]:
    """Each line that is not blank is one row with the key `text`."""
    for number, line in enumerate(decoded_lines(stream, path), start=1):
        if text := line.strip():
            yield Row({"text": text}, path, number, "line")


def read_parquet(path: Path, meter: ReadMeter | None = None) -> Iterator[Row]:
    """Rows in batches; a column is a key."""
    arrow = _import_arrow(path)
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            size, num_rows = path.stat().st_size, max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                if meter is not None:
                    meter.move_to(size * number // num_rows)
                batch.validate(full=True)
                for values in batch.to_pylist():
                    number += 1
                    yield Row(values, path, number, "row")
    except (arrow.ArrowException, OSError) as error:
        raise _not_arrow(path, "Parquet", "copy or download the file again", error) from error


def _import_arrow(path: Path) -> Any:
    require_file(path)
    try:
        import pyarrow
    except ImportError as error:
        raise SetupError(
            f"Reading {path} needs pyarrow, which is not installed.",
            remedy="pip install 'tightfit[data]'",
        ) from error
    return pyarrow


def _not_arrow(path: Path, kind: str, remedy: str, error: Exception) -> UserError:
    if isinstance(error, OSError) and error.errno:
        return unreadable(path, error)
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return InvalidInputError(f"{path} is not a whole {kind} file: {reason}", remedy=remedy)


def decoded_lines(stream: IO[bytes], path: Path) -> Iterator[str]:
    """The lines as text, each with a line break at its end."""
    for number, raw in enumerate(iter_lines(stream, path), start=1):
        try:
            # The line end stays: a quoted CSV field may hold it.
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8") + "\n"
        except UnicodeDecodeError as error:
            raise wrong_encoding(path, number, error) from error


def _header(names: list[str], path: Path) -> list[str]:
    cleaned = [name.strip() for name in names]
    twice = sorted({name for name in cleaned if cleaned.count(name) > 1})
    if not any(cleaned):
        raise InvalidInputError(
            f"{path} has no header line.", remedy="name the columns in line 1: prompt,completion"
        )
    if twice:
        raise InvalidInputError(
            f"{place(path, 1)} names the column `{twice[0]}` twice.",
            remedy="give each column a name of its own",
        )
    return cleaned


# Rows of Arrow files, as the `datasets` library saves them: streams or files, one batch held.

_FILE_MAGIC = b"ARROW1"
_STATE = "state.json"


def read_arrow(path: Path, meter: ReadMeter | None = None) -> Iterator[Row]:
    """A column is a key. `save_to_disk` writes the stream format, others the file format."""
    arrow = _import_arrow(path)
    number, size = 0, file_size(path)
    try:
        with arrow.memory_map(str(path)) as source:
            for batch in _batches(arrow, source):
                # Offsets beyond a buffer would be read as they are, and crash the process.
                batch.validate(full=True)
                if meter is not None:
                    meter.move_to(min(int(source.tell()), size))
                for piece in range(0, batch.num_rows, _BATCH_ROWS):
                    for values in batch.slice(piece, _BATCH_ROWS).to_pylist():
                        number += 1
                        yield Row(values, path, number, "row")
    except (arrow.ArrowException, OSError) as error:
        raise _not_arrow(path, "Arrow", "save or copy the dataset again", error) from error


def _batches(arrow: Any, source: Any) -> Iterator[Any]:
    is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    source.seek(0)
    if not is_file:
        yield from arrow.ipc.open_stream(source)
        return
    reader = arrow.ipc.open_file(source)
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


def saved_files(folder: Path) -> list[str] | None:
    """File names that a saved dataset's `state.json` lists; None where it is no such folder.

    Other Arrow files beside them are caches of `map` and `filter`.
    """
    try:
        state = read_json_file(folder / _STATE)
        return [join_inside(folder, item["filename"]).name for item in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
