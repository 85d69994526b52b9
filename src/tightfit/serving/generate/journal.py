"""The journal of `generate`: answers as they come, each once, whole or not at all.

A line is `CHECKSUM KEY JSON`: the key is `prompt.sample`, or a word for the lines that are no
answers. A line that was cut off or damaged does not count; its answer is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shlex
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tightfit.core.errors import SetupError, UsageError
from tightfit.core.files import atomic_file, describe_write_error, open_locked, sync, write_atomic
from tightfit.core.reading import open_regular

SYNC_ANSWERS = 64
SYNC_SECONDS = 2.0
"""Answers are flushed to the disk after so many of them or so many seconds: a power cut loses no
more than these, and a killed process loses nothing that was written."""
_HEADER, _FINISHED = "header", "finished"
_VERSION = 1
_CHECKSUM_BYTES = 9
"""Eight hexadecimal digits and a space."""
_LINE = re.compile(rb"([0-9a-f]{8}) ((?:\d+)\.(?:\d+)|header|finished) (.*)\n", re.DOTALL)

AnswerSettings = Mapping[str, Any]
"""What an answer depends on, by a name that a person understands: prompts, model, temperature."""


class AnswerKey(NamedTuple):
    """Which answer: the prompt's position in the file, and the sample's number."""

    prompt: int
    sample: int


@dataclass(slots=True, kw_only=True)
class _Content:
    """What a journal on the disk holds."""

    header: dict[str, Any] | None = None
    finished: dict[str, Any] | None = None
    spans: dict[AnswerKey, tuple[int, int]] = field(default_factory=dict)
    """Offset and length of each answer's JSON."""
    num_bytes: int = 0
    """Up to the end of the last whole line."""


def journal_path(out: Path) -> Path:
    """A hidden file beside the output."""
    return out.with_name(f".{out.name}.journal")


class Journal:
    """Answers to one set of prompts under one set of settings. One process at a time."""

    def __init__(self, out: Path, handle: int, content: _Content, header: dict[str, Any]) -> None:
        self.out = out
        self.path = journal_path(out)
        self.seed: int = header["seed"]
        """The base of every answer's seed."""
        self.is_finished = content.finished is not None
        """The output is written, and nothing is left to do."""
        self._handle = handle
        self._header = header
        self._spans = content.spans
        self._end = content.num_bytes
        self._unsynced = 0
        self._synced_s = time.monotonic()
        if content.header is None:
            self._append(_HEADER, header)
            self.sync()
            sync(out.parent)

    @property
    def num_done(self) -> int:
        return len(self._spans)

    def __contains__(self, key: AnswerKey) -> bool:
        return key in self._spans

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, key: AnswerKey, row: Mapping[str, Any]) -> None:
        """Keep an answer. One that is there already stays as it is."""
        if key in self._spans:
            return
        self._spans[key] = self._append(f"{key.prompt}.{key.sample}", row)
        self._unsynced += 1
        is_due = time.monotonic() - self._synced_s >= SYNC_SECONDS
        if is_due or self._unsynced >= SYNC_ANSWERS:
            self.sync()

    def sync(self) -> None:
        """Flush what was written so far to the disk."""
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        self._unsynced, self._synced_s = 0, time.monotonic()

    def rows(self) -> Iterator[bytes]:
        """The answers in order, one JSON text each."""
        for key in sorted(self._spans):
            offset, length = self._spans[key]
            yield os.pread(self._handle, length, offset)

    def finish(self, *, is_complete: bool) -> None:
        """Write the output, whole and in order, then drop the answers in here.

        Where prompts failed the journal is kept: the same command tries those again.
        """
        self.sync()
        facts = write_output(self.out, self.rows())
        if is_complete:
            write_atomic(self.path, _line(_HEADER, self._header) + _line(_FINISHED, facts))
            self.is_finished = True

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _append(self, key: str, value: Mapping[str, Any]) -> tuple[int, int]:
        """Offset and length of the JSON. A line that does not fit on the disk leaves nothing."""
        line = _line(key, value)
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(self._handle, line[written:], self._end + written)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._end)
            raise _cannot_write(self.path, error) from error
        head = line.index(b" ", _CHECKSUM_BYTES) + 1
        begin, self._end = self._end + head, self._end + len(line)
        return begin, len(line) - head - 1


def open_journal(
    out: Path, settings: AnswerSettings, *, seed: int | None, is_fresh: bool = False
) -> Journal:
    """Open the journal of `out`, or begin one; locked against every other process.

    `seed` is part of the settings where the user named one; otherwise the journal's first
    start draws it, so that a resumed run uses the same seeds.
    """
    check_out_path(out)
    path = journal_path(out)
    try:
        handle = open_locked(path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    if handle is None:
        raise UsageError(
            f"Another `tightfit generate` is writing {out}.",
            remedy="wait for it, or choose another file: --out OTHER",
        )
    try:
        content = _Content() if is_fresh else _read(handle)
        if is_fresh or not _is_usable(content, out, settings):
            content = _Content()
        header = content.header or {
            "version": _VERSION,
            "seed": secrets.randbelow(2**31) if seed is None else seed,
            "settings": dict(settings),
        }
        os.ftruncate(handle, content.num_bytes)
        return Journal(out, handle, content, header)
    except BaseException as error:
        if not os.fstat(handle).st_size:
            path.unlink(missing_ok=True)  # opened for nothing
        os.close(handle)
        if isinstance(error, OSError):
            raise _cannot_write(path, error) from error
        raise


def to_json_line(value: Mapping[str, Any]) -> bytes:
    """JSON without line breaks, in UTF-8; half a surrogate pair stays an escape."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def _is_usable(content: _Content, out: Path, settings: AnswerSettings) -> bool:
    """Whether to resume with this journal; False where a new one may begin, else it raises."""
    if content.header is None:
        if content.spans:
            raise UsageError(
                f"The journal of {out} is damaged: its first line cannot be read.",
                remedy="--fresh begins again and replaces it",
            )
        if os.path.lexists(out):
            raise UsageError(
                f"{out} exists already.",
                remedy="--out OTHER keeps it, and --fresh replaces it when the answers are there",
            )
        return False
    differing = describe_differences(content.header.get("settings", {}), settings)
    if differing:
        if not content.spans and content.finished is None:
            return False  # nothing was answered under the old ones
        begun = "was begun" if content.finished is None else "was made"
        raise UsageError(
            f"{out} {begun} with other settings: {differing}.",
            remedy="--fresh begins again, --out OTHER keeps both, the former settings go on",
        )
    if content.finished is not None and not is_unchanged(out, content.finished):
        if os.path.lexists(out):
            raise UsageError(
                f"{out} was finished and has been changed since.",
                remedy="--out OTHER keeps it, and --fresh replaces it",
            )
        return False  # finished, and the output removed: begin again
    return True


def describe_differences(old: AnswerSettings, new: AnswerSettings) -> str:
    """The settings that differ, by name; empty where none does."""
    parts = []
    for name in dict.fromkeys((*old, *new)):
        was, now = old.get(name), new.get(name)
        if was == now:
            continue
        if all(value is None or len(str(value)) <= 24 for value in (was, now)):
            parts.append(f"{name} was {was}, now {now}")
        else:  # digests
            parts.append(f"the {name} differ" if name.endswith("s") else f"another {name}")
    return "; ".join(parts)


def _read(handle: int) -> _Content:
    """Every whole line. What follows the last line end was cut off while it was written."""
    found = _Content()
    with os.fdopen(os.dup(handle), "rb") as stream:
        stream.seek(0)
        for line in stream:
            if not line.endswith(b"\n"):
                break
            begin, whole = found.num_bytes, _LINE.fullmatch(line)
            found.num_bytes += len(line)
            if whole is None or int(whole[1], 16) != zlib.crc32(line[_CHECKSUM_BYTES:-1]):
                continue
            key, content = whole[2].decode(), whole[3]
            if key == _HEADER:
                found.header = json.loads(content)
            elif key == _FINISHED:
                found.finished = json.loads(content)
            else:
                prompt, sample = map(int, key.split("."))
                span = (begin + whole.start(3), len(content))
                found.spans.setdefault(AnswerKey(prompt, sample), span)
    return found


def _line(key: str, value: Mapping[str, Any]) -> bytes:
    body = key.encode() + b" " + to_json_line(value)
    return b"%08x %b\n" % (zlib.crc32(body), body)


def write_output(out: Path, rows: Iterator[bytes]) -> dict[str, Any]:
    """Write `out` atomically; return its size and digest, to recognise it later."""
    digest, num_bytes = hashlib.blake2b(digest_size=16), 0
    try:
        with atomic_file(out) as partial, partial.open("wb") as stream:
            for row in rows:
                stream.write(row + b"\n")
                digest.update(row + b"\n")
                num_bytes += len(row) + 1
    except OSError as error:
        raise _cannot_write(out, error) from error
    return {"bytes": num_bytes, "digest": digest.hexdigest()}


def is_unchanged(out: Path, finished: Mapping[str, Any]) -> bool:
    """Whether `out` is the file that `write_output` wrote."""
    try:
        if out.stat().st_size != finished.get("bytes"):
            return False
        digest = hashlib.blake2b(digest_size=16)
        with open_regular(out) as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    except OSError:
        return False
    return digest.hexdigest() == finished.get("digest")


def check_out_path(out: Path) -> None:
    """Raise where `out` can be no output file."""
    if not out.name or "\0" in str(out) or out.is_dir():
        raise UsageError(f"{str(out)!r} is no file name.", remedy="--out answers.jsonl")
    if os.path.lexists(out) and not out.is_file():
        raise UsageError(f"{out} is no regular file.", remedy="--out answers.jsonl")
    if not out.parent.is_dir():
        raise SetupError(
            f"Cannot write {out}: there is no folder {out.parent}.",
            remedy=f"mkdir -p {shlex.quote(str(out.parent))}",
        )


def _cannot_write(path: Path, error: OSError) -> SetupError:
    return SetupError(
        f"Cannot write {path}: {describe_write_error(error, path)}.",
        remedy="make room or choose another folder with --out; what was answered so far is kept, "
        "and the same command goes on",
    )
