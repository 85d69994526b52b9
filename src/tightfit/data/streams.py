"""Bytes of a data file, decompressed on the way, with every fault turned into a message."""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import shlex
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from tightfit.core.errors import (
    EnvironmentFaultError,
    InvalidInputError,
    NotFoundError,
    UserError,
)
from tightfit.core.faults import printable
from tightfit.core.files import describe_kind
from tightfit.core.suggest import did_you_mean
from tightfit.data.meter import Meter
from tightfit.data.row import place

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
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


@contextmanager
def open_data(path: Path, meter: Meter | None = None) -> Iterator[IO[bytes]]:
    """The file's plain bytes. Compression is told by content, so a wrong name is no trap."""
    require_file(path)
    try:
        with path.open("rb") as raw:
            head = raw.read(_PROBE_BYTES)
    except OSError as fault:
        raise unreadable(path, fault) from fault
    if not head:
        raise empty(path)
    with opened(path, _compression(path, head), meter or Meter()) as stream:
        yield stream


@contextmanager
def opened(path: Path, compression: str | None, meter: Meter) -> Iterator[IO[bytes]]:
    """Open with one decompressor; read faults inside the block become messages."""
    try:
        with path.open("rb") as raw, _unpack(path, raw, compression) as stream:
            watched = _Watched(path, raw, stream, meter, is_packed=compression is not None)
            yield cast(IO[bytes], watched)
    except UserError:
        raise
    except DAMAGE as fault:
        raise damaged(path, fault) from fault
    except OSError as fault:  # bz2 reports broken data as a plain OSError without an errno
        raise (unreadable(path, fault) if fault.errno else damaged(path, fault)) from fault


class _Watched:
    """A stream that reports where its file stands, and stops one that unpacks without end."""

    def __init__(
        self, path: Path, raw: IO[bytes], stream: IO[bytes], meter: Meter, *, is_packed: bool
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
    mode = stat_of(path)
    if not stat.S_ISREG(mode):
        kind = describe_kind(mode) or "not a regular file"
        raise InvalidInputError(f"{path} is {kind}.", remedy="name a data file")


def stat_of(path: Path) -> int:
    """The mode bits of an existing path."""
    try:
        return path.stat().st_mode
    except FileNotFoundError as fault:
        raise missing(path) from fault
    except (OSError, ValueError) as fault:
        raise unreadable(path, fault) from fault


def size_of(path: Path) -> int:
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
        return EnvironmentFaultError(
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
    raise EnvironmentFaultError(
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
        except Exception as fault:
            raise damaged(self._path, fault) from fault
