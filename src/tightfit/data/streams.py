"""Bytes of a data file, decompressed while reading: rows, progress and read errors."""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import shlex
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError, UserError
from tightfit.core.files import describe_kind
from tightfit.core.suggest import did_you_mean
from tightfit.core.validation import printable

# How far reading has come, told to whoever watches about five times a second.

_EVERY_SECONDS = 0.2
_ROWS_BETWEEN_LOOKS = 64


class ReadProgress(NamedTuple):
    """What has been read so far; bytes are those on disk, so compressed ones count as such."""

    num_rows: int
    num_bytes: int
    total_bytes: int

    @property
    def fraction(self) -> float:
        return min(self.num_bytes / self.total_bytes, 1.0) if self.total_bytes else 0.0


class ReadMeter:
    """Counts rows and bytes over all files of a source. Telling nobody costs next to nothing."""

    def __init__(
        self, tell: Callable[[ReadProgress], None] | None = None, *, total_bytes: int = 0
    ) -> None:
        self._tell = tell
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
        """Tell the last state, however short the time."""
        if self._tell is not None:
            self._tell(self._state())

    def _look(self) -> None:
        if self._tell is not None and time.monotonic() - self._last >= _EVERY_SECONDS:
            self._tell(self._state())
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


def not_an_object_error(where: str, value: object) -> InvalidInputError:
    """A row must be a mapping from names to values; anything else has no prompt or answer."""
    return InvalidInputError(
        f"{where} is {json_type_name(value)}, not an object with keys: {excerpt(value)}",
        remedy='write each row as an object, like {"prompt": "...", "completion": "..."}',
    )


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
MAX_EXPANSION = 100
"""Text packs to a fifth, logs to a twentieth; what packs so much better is a bomb."""
_EXPANSION_GRACE_BYTES = 16 * 2**20
DECOMPRESSION_ERRORS = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


@contextmanager
def open_data(path: Path, meter: ReadMeter | None = None) -> Iterator[IO[bytes]]:
    """The file's plain bytes. Compression is told by content, so a wrong name is no trap."""
    require_file(path)
    try:
        with path.open("rb") as raw:
            head = raw.read(_PROBE_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    if not head:
        raise empty(path)
    with opened(path, _compression(path, head), meter or ReadMeter()) as stream:
        yield stream


@contextmanager
def opened(path: Path, compression: str | None, meter: ReadMeter) -> Iterator[IO[bytes]]:
    """Open with one decompressor; read faults inside the block become messages."""
    try:
        with path.open("rb") as raw, _unpack(path, raw, compression) as stream:
            watched = _Watched(path, raw, stream, meter, is_packed=compression is not None)
            yield cast(IO[bytes], watched)
    except UserError:
        raise
    except DECOMPRESSION_ERRORS as error:
        raise damaged(path, error) from error
    except OSError as error:  # bz2 reports broken data as a plain OSError without an errno
        raise (unreadable(path, error) if error.errno else damaged(path, error)) from error


class _Watched:
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
        chunk = self._stream.read(size)
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
        raise missing(path) from error
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def file_size(path: Path) -> int:
    """Bytes on disk; 0 where nobody can tell, which the reading itself will complain about."""
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0


def missing(path: Path) -> NotFoundError:
    try:
        beside = [item.name for item in path.parent.iterdir()]
    except OSError:
        beside = []
    near = did_you_mean(path.name, beside)
    return NotFoundError(
        f"There is no data file {printable(str(path), most=400)}.{near}",
        remedy=f"name an existing file or folder; this one was looked for in {_folder_of(path)} "
        "(a path in a recipe starts at the recipe's folder, any other where the command runs)",
    )


def _folder_of(path: Path) -> str:
    try:
        return printable(str(path.absolute().parent), most=400)
    except OSError:  # the current folder was deleted
        return "a folder that was deleted"


def unreadable(path: Path, fault: Exception) -> UserError:
    shown = printable(str(path), most=400)
    if isinstance(fault, PermissionError):
        return SetupError(
            f"Cannot read {shown}: permission denied.",
            remedy=f"ask its owner for read permission; who may read it: ls -ld {_shell(path)}",
        )
    reason = getattr(fault, "strerror", None) or str(fault)
    return InvalidInputError(
        f"Cannot read {shown}: {reason}.",
        remedy=f"check that it is readable: ls -ld {_shell(path)}",
    )


def _shell(path: Path) -> str:
    return shlex.quote(printable(str(path), most=400))


def damaged(path: Path, fault: Exception) -> InvalidInputError:
    return InvalidInputError(
        f"{path} is truncated or damaged: {fault}.",
        remedy="copy or download the file again; `gzip -t`, `xz -t` or `bzip2 -t` tests it",
    )


def empty(path: Path) -> InvalidInputError:
    return InvalidInputError(f"{path} is empty.", remedy="name a file that holds rows")


def iter_lines(stream: IO[bytes], path: Path) -> Iterator[bytes]:
    """Lines without their line ends, read in chunks so that memory holds one line, not the file."""
    pieces: list[bytes] = []
    num_held = num_blank = number = 0
    blank_since = 1
    while chunk := stream.read(_CHUNK_BYTES):
        if not number and not pieces:
            check_is_text(path, chunk[:_PROBE_BYTES])
        if not chunk.isspace():
            num_blank, blank_since = 0, number + 1 + chunk.count(b"\n")
        else:
            num_blank += len(chunk)
        first, *lines = chunk.split(b"\n")
        pieces.append(first)
        num_held += len(first)
        if num_held > MAX_LINE_BYTES:
            raise too_long(path, number + 1)
        if num_blank > MAX_BLANK_BYTES:
            raise _too_blank(path, blank_since)
        if lines:
            rest = lines.pop()
            number += 1 + len(lines)
            yield b"".join(pieces)
            yield from lines
            pieces, num_held = [rest], len(rest)
    if num_held:
        yield b"".join(pieces)


def too_long(path: Path, line: int) -> InvalidInputError:
    return InvalidInputError(
        f"{place(path, line)} begins a row of more than {MAX_LINE_BYTES // 2**20} MiB.",
        remedy="split it into shorter rows; no context is that long",
    )


def _too_blank(path: Path, line: int) -> InvalidInputError:
    return InvalidInputError(
        f"{place(path, line)} begins {MAX_BLANK_BYTES // 2**20} MiB of nothing but blanks.",
        remedy=f"leave the blank lines out: grep -v '^[[:space:]]*$' {_shell(path)} > rows",
    )


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


def wrong_encoding(path: Path, line: int, fault: UnicodeDecodeError) -> InvalidInputError:
    byte = fault.object[fault.start]
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
    if compression == "gzip":
        return cast(IO[bytes], gzip.open(raw, "rb"))
    if compression == "bzip2":
        return cast(IO[bytes], bz2.open(raw, "rb"))
    if compression == "xz":
        return cast(IO[bytes], lzma.open(raw, "rb"))
    if compression == "zstd":
        return _unpack_zstd(path, raw)
    return raw


def _unpack_zstd(path: Path, raw: IO[bytes]) -> IO[bytes]:
    for name in ("compression.zstd", "zstandard", "pyzstd"):
        try:
            module: Any = importlib.import_module(name)
        except ImportError:
            continue
        return cast(IO[bytes], _ZstdGuard(path, module.open(raw, "rb")))
    raise SetupError(
        f"{path} is zstd-compressed and no zstd module is installed.",
        remedy=f"pip install zstandard, or unpack it: zstd -d {_shell(path)}",
    )


class _ZstdGuard:
    """zstd modules raise errors of their own; this gives them the type the others share."""

    def __init__(self, path: Path, stream: Any) -> None:
        self._path = path
        self._stream = stream

    def __enter__(self) -> _ZstdGuard:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def read(self, size: int = -1) -> bytes:
        try:
            return bytes(self._stream.read(size))
        except OSError:
            raise
        except Exception as error:
            raise damaged(self._path, error) from error
