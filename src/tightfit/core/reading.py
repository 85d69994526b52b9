"""Files that a stranger may have made: only regular ones, of a bounded size and a bounded depth.

An `UnreadableFileError` is an OSError too, and a `NotJsonError` a ValueError: whoever can go on
without a file catches them with what the system and the parser raise; to the user they are one
message with a remedy.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections import Counter
from io import BufferedReader
from pathlib import Path
from typing import Any

from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError, UserError
from tightfit.core.text import printable
from tightfit.core.units import GIB, KIB, MIB

MAX_DOCUMENT_BYTES = 64 * MIB
"""Of one JSON file. The largest public tokenizer.json is half of it."""
_PIECE_BYTES = 64 * KIB
MAX_DEPTH = 100
"""Of lists and mappings inside each other. A config or a plan has fewer than ten."""
MAX_DIGITS = 100
"""Of one whole number; a 64-bit one has twenty."""
MAX_NAME_BYTES = 255
"""Of a file name: NAME_MAX of every Linux file system."""
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


class UnreadableFileError(InvalidInputError, OSError):
    """A file that is not opened, or not read to its end."""


class NotJsonError(InvalidInputError, ValueError):
    """Text that is not JSON, or is JSON beyond the limits."""


def describe_kind(mode: int) -> str | None:
    """`a folder`, `a device`, `a pipe`, `a socket`; None for a regular file."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), None)


def open_descriptor(path: Path, *, remedy: str = "name a regular file") -> int:
    """A descriptor of a regular file to be read; a pipe would wait for ever, a device never end.

    OSError where there is no such file or it may not be read.
    """
    try:
        # Looked at before it is opened, which can act on a device; opened without waiting, as
        # another may be in its place by then.
        _check_is_regular(path, path.stat().st_mode, remedy)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except UnreadableFileError:
        raise
    except ValueError as error:  # a NUL byte
        raise UnreadableFileError(f"{_shown(path)} is not a file name.", remedy=remedy) from error
    try:
        _check_is_regular(path, os.fstat(descriptor).st_mode, remedy)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: Path, *, remedy: str = "name a regular file") -> BufferedReader:
    """The same as a stream of bytes."""
    return os.fdopen(open_descriptor(path, remedy=remedy), "rb")


def read_bytes(
    path: Path, *, most_bytes: int = MAX_DOCUMENT_BYTES, remedy: str = "name a regular file"
) -> bytes:
    """The whole content of a regular file of at most `most_bytes`."""
    with open_regular(path, remedy=remedy) as stream:
        is_larger = os.fstat(stream.fileno()).st_size > most_bytes
        data = bytearray()
        # Not `most_bytes` at once, which would be allocated for the smallest file.
        while not is_larger and (piece := stream.read(_PIECE_BYTES)):
            data += piece
            is_larger = len(data) > most_bytes
    if is_larger:
        raise UnreadableFileError(
            f"{_shown(path)} is larger than {render_limit(most_bytes)}.", remedy=remedy
        )
    return bytes(data)


def read_text(
    path: Path, *, most_bytes: int = MAX_DOCUMENT_BYTES, remedy: str = "name a regular file"
) -> str:
    """The same as UTF-8 text; a byte order mark is left out."""
    data = read_bytes(path, most_bytes=most_bytes, remedy=remedy)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UnreadableFileError(
            f"{_shown(path)} line {line} is not UTF-8 text.", remedy="save it as UTF-8"
        ) from error


def read_json_file(
    path: Path, *, most_bytes: int = MAX_DOCUMENT_BYTES, allows_infinity: bool = False
) -> Any:
    """The value that a JSON file holds."""
    remedy = "bring the file back from where it came, or name another"
    data = read_bytes(path, most_bytes=most_bytes, remedy=remedy)
    return parse_json(data, source=_shown(path), allows_infinity=allows_infinity)


def parse_json(
    data: bytes | str,
    *,
    source: str,
    allows_infinity: bool = False,
    allows_repeated_keys: bool = True,
) -> Any:
    """JSON as Python values; malformed, cut short or beyond a limit is one error.

    `allows_infinity`: also NaN, which Python writes and the standard does not know.
    """

    def parse_float(text: str) -> float:
        number = float(text)
        if not math.isfinite(number) and not allows_infinity:
            raise ValueError(f"{printable(text, most=20)} is not a finite number")
        return number

    try:
        value = json.loads(
            data if isinstance(data, str) else data.decode("utf-8-sig"),
            parse_int=_parse_int,
            parse_float=parse_float,
            parse_constant=parse_float,
            object_pairs_hook=None if allows_repeated_keys else _without_repeats,
        )
        _check_depth(value)
        _check_text(data, value)
    except RecursionError as error:
        raise _not_json(source, _TOO_DEEP) from error
    except ValueError as error:
        raise _not_json(source, str(error)) from error
    return value


def join_inside(folder: Path, name: object) -> Path:
    """The file of this folder that a name in another file means; never one outside of it.

    The file itself may be a link, as those of a hub cache are.
    """
    why = None
    if not isinstance(name, str) or not name.strip("/. ") or not name.isprintable():
        why = "is not a file name"
    elif any(len(part.encode("utf-8", "replace")) > MAX_NAME_BYTES for part in name.split("/")):
        why = f"has a name of more than {MAX_NAME_BYTES} bytes"
    elif name.startswith("/") or ".." in name.split("/"):
        why = "leads out of its folder"
    elif (parent := (folder / name).parent) != folder:
        home = folder.resolve()
        why = None if parent.resolve().is_relative_to(home) else "leads out of its folder"
    if why is not None:
        raise InvalidInputError(
            f"{_shown(folder)}: `{printable(str(name))}` {why}.",
            remedy="bring the files back from where they came",
        )
    return folder / str(name)


def as_user_error(error: OSError) -> UserError | None:
    """What a user can put right about a path that the system refuses; None for any other error."""
    if isinstance(error, UserError):
        return error
    reason = (error.strerror or str(error)).lower()
    if error.filename is None or error.errno not in _REMEDIES:
        return None
    kind, remedy = _REMEDIES[error.errno]
    name = os.fsdecode(error.filename) if not isinstance(error.filename, int) else "a file"
    return kind(f"{printable(name, most=400)}: {reason}.", remedy=remedy)


_REMEDIES: dict[int | None, tuple[type[UserError], str]] = {
    errno.ENAMETOOLONG: (
        InvalidInputError,
        f"name a path of at most 4,096 bytes, each part of at most {MAX_NAME_BYTES}",
    ),
    errno.ELOOP: (InvalidInputError, "name the file itself: its links lead in a circle"),
    errno.ENOTDIR: (InvalidInputError, "name a path whose folders are folders"),
    errno.EISDIR: (InvalidInputError, "name a file in that folder"),
    errno.ENXIO: (InvalidInputError, "name a regular file"),
    errno.ENODEV: (InvalidInputError, "name a regular file"),
    errno.ENOENT: (NotFoundError, "name a file or folder that exists"),
    errno.EEXIST: (SetupError, "name another path, or move what is there away"),
    errno.EACCES: (SetupError, "ask its owner for permission: ls -ld shows who has it"),
    errno.EPERM: (SetupError, "ask its owner for permission: ls -ld shows who has it"),
    errno.EROFS: (SetupError, "choose a folder that is writable"),
    errno.ENOSPC: (SetupError, "choose a folder that has free space"),
    errno.EDQUOT: (SetupError, "choose a folder that has free space"),
}


def render_limit(num_bytes: int) -> str:
    """A whole number of GiB, MiB or KiB, or else of bytes."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit and num_bytes % unit == 0:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes:,} bytes"


def _check_is_regular(path: Path, mode: int, remedy: str) -> None:
    if not stat.S_ISREG(mode):
        kind = describe_kind(mode) or "not a regular file"
        raise UnreadableFileError(f"{_shown(path)} is {kind}, not a file.", remedy=remedy)


def _shown(path: Path) -> str:
    return printable(str(path), most=400)


_TOO_DEEP = f"it is nested too deeply (more than {MAX_DEPTH} levels)"


def _parse_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"it holds a number of more than {MAX_DIGITS} digits")
    return int(text)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"`{printable(twice)}` is in it twice")
    return found


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for holder in level
            if isinstance(holder, dict | list)
            for item in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _check_text(data: bytes | str, value: Any) -> None:
    """JSON can spell half of a surrogate pair, which no file and no terminal takes."""
    if not _HALF_PAIR.search(data.encode("utf-8", "replace") if isinstance(data, str) else data):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text in it holds half of a surrogate pair") from error


def _not_json(source: str, why: str) -> NotJsonError:
    return NotJsonError(
        f"{source} is not valid JSON: {printable(why.split(';', maxsplit=1)[0], most=160)}.",
        remedy="fetch the file again, or correct it by hand",
    )
