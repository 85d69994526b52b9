"""Bytes of a data file, decompressed on the way, with every fault turned into a message."""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
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
from tightfit.core.suggest import did_you_mean
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
    b"ARROW1": "an Arrow file; save it as Parquet",
    b"\xff\xfe": "UTF-16 text; convert it with: iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16 text; convert it with: iconv -f UTF-16 -t UTF-8",
}
_PROBE_BYTES = 4096
_CHUNK_BYTES = 1 << 18
MAX_LINE_BYTES = 256 * 2**20
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


@contextmanager
def open_data(path: Path) -> Iterator[IO[bytes]]:
    """The file's plain bytes. Compression is told by content, so a wrong name is no trap."""
    require_file(path)
    try:
        with path.open("rb") as raw:
            head = raw.read(_PROBE_BYTES)
    except OSError as fault:
        raise unreadable(path, fault) from fault
    if not head:
        raise empty(path)
    with opened(path, _compression(path, head)) as stream:
        yield stream


@contextmanager
def opened(path: Path, compression: str | None) -> Iterator[IO[bytes]]:
    """Open with one decompressor; read faults inside the block become messages."""
    try:
        with _open(path, compression) as stream:
            yield stream
    except UserError:
        raise
    except DAMAGE as fault:
        raise damaged(path, fault) from fault
    except OSError as fault:  # bz2 reports broken data as a plain OSError without an errno
        raise (unreadable(path, fault) if fault.errno else damaged(path, fault)) from fault


def require_file(path: Path) -> None:
    """A regular file that is there; never a pipe, which would hang, nor a device."""
    mode = stat_of(path)
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise InvalidInputError(f"{path} is {kind}.", remedy="name a data file")


def stat_of(path: Path) -> int:
    """The mode bits of an existing path."""
    try:
        return path.stat().st_mode
    except FileNotFoundError as fault:
        raise missing(path) from fault
    except (OSError, ValueError) as fault:
        raise unreadable(path, fault) from fault


def missing(path: Path) -> NotFoundError:
    try:
        beside = [item.name for item in path.parent.iterdir()]
    except OSError:
        beside = []
    return NotFoundError(
        f"There is no data file {path}.{did_you_mean(path.name, beside)}",
        remedy="name an existing file or folder; relative paths start where the command runs",
    )


def unreadable(path: Path, fault: Exception) -> InvalidInputError:
    reason = getattr(fault, "strerror", None) or str(fault)
    return InvalidInputError(
        f"Cannot read {path}: {reason}.", remedy=f"check that it is readable: ls -ld '{path}'"
    )


def damaged(path: Path, fault: Exception) -> InvalidInputError:
    return InvalidInputError(
        f"{path} is truncated or damaged: {fault}.",
        remedy="copy or download the file again; `gzip -t`, `xz -t` or `bzip2 -t` tests it",
    )


def empty(path: Path) -> InvalidInputError:
    return InvalidInputError(f"{path} is empty.", remedy="name a file that holds rows")


def iter_lines(stream: IO[bytes], path: Path) -> Iterator[bytes]:
    """Lines without their line ends, read in chunks so that memory holds one line, not the file."""
    rest = b""
    number = 0
    while chunk := stream.read(_CHUNK_BYTES):
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        number += len(lines)
        yield from lines
        if len(rest) > MAX_LINE_BYTES:
            raise InvalidInputError(
                f"{place(path, number + 1)} is longer than {MAX_LINE_BYTES // 2**20} MiB.",
                remedy="split it into shorter rows; no context is that long",
            )
    if rest:
        yield rest


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


def _open(path: Path, compression: str | None) -> IO[bytes]:
    if compression == "gzip":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if compression == "bzip2":
        return cast(IO[bytes], bz2.open(path, "rb"))
    if compression == "xz":
        return cast(IO[bytes], lzma.open(path, "rb"))
    if compression == "zstd":
        return _open_zstd(path)
    return path.open("rb")


def _open_zstd(path: Path) -> IO[bytes]:
    for name in ("compression.zstd", "zstandard", "pyzstd"):
        try:
            module: Any = importlib.import_module(name)
        except ImportError:
            continue
        return cast(IO[bytes], _ZstdGuard(path, module.open(path, "rb")))
    raise EnvironmentFaultError(
        f"{path} is zstd-compressed and no zstd module is installed.",
        remedy=f"pip install zstandard, or unpack it: zstd -d '{path}'",
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
