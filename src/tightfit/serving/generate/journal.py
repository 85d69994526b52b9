"""The journal of `generate`: answers as they come, each once, whole or not at all.

A line is `CHECKSUM PLACE JSON`: the place is `prompt.sample`, or a word for the lines that are no
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
import stat
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tightfit.core.errors import SetupError, UsageError
from tightfit.core.files import atomic_file, sync
from tightfit.core.locks import open_locked

SYNC_ANSWERS = 64
SYNC_SECONDS = 2.0
"""What is written reaches the disk for good after so many answers or seconds: a power cut can take
no more than these, and a killed process loses nothing that was written."""
_HEADER, _FINISHED = "header", "finished"
_VERSION = 1
_LINE = re.compile(rb"([0-9a-f]{8}) ((?:\d+)\.(?:\d+)|header|finished) (.*)\n", re.DOTALL)

AnswerSettings = Mapping[str, Any]
"""What an answer depends on, by a name that a person understands: prompts, model, temperature."""


class AnswerKey(NamedTuple):
    """Which answer: the prompt's place in the file, and the sample's number."""

    prompt: int
    sample: int


class _Span(NamedTuple):
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a journal on the disk holds."""

    header: dict[str, Any] | None = None
    finished: dict[str, Any] | None = None
    spans: dict[AnswerKey, _Span]
    num_bytes: int = 0
    """Up to the end of the last whole line."""


def journal_path(out: Path) -> Path:
    return out.with_name(f".{out.name}.journal")


class Journal:
    """Answers to one set of prompts under one set of settings. One process at a time."""

    def __init__(self, out: Path, handle: int, found: _Found, header: dict[str, Any]) -> None:
        self.out = out
        self.path = journal_path(out)
        self.seed: int = header["seed"]
        """From which the seed of every answer follows."""
        self.is_finished = False
        """The output is written, and nothing is left to do."""
        self._handle = handle
        self._header = header
        self._spans = found.spans
        self._end = found.num_bytes
        self._unsynced = 0
        self._synced_s = time.monotonic()

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
        content = to_json_line(row)
        start = self._append(f"{key.prompt}.{key.sample}", content)
        self._spans[key] = _Span(start, len(content))
        self._unsynced += 1
        is_due = time.monotonic() - self._synced_s >= SYNC_SECONDS
        if is_due or self._unsynced >= SYNC_ANSWERS:
            self.sync()

    def sync(self) -> None:
        """Have on the disk for good what was written so far."""
        os.fsync(self._handle)
        self._unsynced, self._synced_s = 0, time.monotonic()

    def rows(self) -> Iterator[bytes]:
        """The answers in order, one JSON text each."""
        for key in sorted(self._spans):
            offset, length = self._spans[key]
            yield os.pread(self._handle, length, offset)

    def finish(self, *, is_complete: bool) -> None:
        """Write the output, whole and in order, then let the answers in here go.

        Where prompts failed the journal is kept: the same command tries those again.
        """
        self.sync()
        facts = write_output(self.out, self.rows())
        if is_complete:
            self._replace(_line(_HEADER, to_json_line(self._header)) + _finished_line(facts))
            self.is_finished = True

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _append(self, place: str, content: bytes) -> int:
        """Where the content begins. A line that does not fit on the disk leaves nothing behind."""
        line = _line(place, content)
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(self._handle, line[written:], self._end + written)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._end)
            raise _cannot_write(self.path, error) from error
        self._end += len(line)
        return self._end - 1 - len(content)

    def _replace(self, content: bytes) -> None:
        """Another journal in this one's place, at once: a kill leaves the one or the other."""
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f"{self.path.name[:100]}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            Path(name).chmod(stat.S_IMODE(os.fstat(self._handle).st_mode))
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        sync(self.path.parent)


def open_journal(
    out: Path, settings: AnswerSettings, *, seed: int | None, is_fresh: bool = False
) -> Journal:
    """Take up the journal of `out`, or begin one; hold it against every other process.

    `seed` is part of the settings where the user named one; otherwise the journal's first
    start draws it, so that a run that goes on is the run that began.
    """
    require_folder(out)
    handle = _lock(out)
    try:
        found = _Found(spans={}) if is_fresh else _read(handle)
        header = _check(found, out, settings, is_fresh=is_fresh)
        is_new = header is None
        if header is None:
            found = _Found(spans={})
            drawn = secrets.randbelow(2**31) if seed is None else seed
            header = {"version": _VERSION, "seed": drawn, "settings": dict(settings)}
        os.ftruncate(handle, found.num_bytes)
        journal = Journal(out, handle, found, header)
        if is_new:
            journal._append(_HEADER, to_json_line(header))
            journal.sync()
            sync(out.parent)
        journal.is_finished = found.finished is not None
        return journal
    except BaseException as error:
        if not os.fstat(handle).st_size:
            journal_path(out).unlink(missing_ok=True)  # opened for nothing
        os.close(handle)
        if isinstance(error, OSError):
            raise _cannot_write(journal_path(out), error) from error
        raise


def to_json_line(value: Mapping[str, Any]) -> bytes:
    """JSON without line breaks, in UTF-8; half a surrogate pair stays an escape."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def _check(
    found: _Found, out: Path, settings: AnswerSettings, *, is_fresh: bool
) -> dict[str, Any] | None:
    """The header to go on under; None where there is none and a new one may begin."""
    if is_fresh:
        return None
    if found.header is None:
        if found.spans:
            raise UsageError(
                f"The journal of {out} is damaged: its first line cannot be read.",
                remedy="--fresh begins again and replaces it",
            )
        if _exists(out):
            raise UsageError(
                f"{out} exists already.",
                remedy="--out OTHER keeps it, and --fresh replaces it when the answers are there",
            )
        return None
    differing = describe_differences(found.header.get("settings", {}), settings)
    if differing and not found.spans and found.finished is None:
        return None  # nothing was answered under the old ones
    if differing:
        begun = "was made" if found.finished is not None else "was begun"
        raise UsageError(
            f"{out} {begun} with other settings: {differing}.",
            remedy="--fresh begins again, --out OTHER keeps both, the former settings go on",
        )
    if found.finished is not None and not is_unchanged(out, found.finished):
        if _exists(out):
            raise UsageError(
                f"{out} was finished and has been changed since.",
                remedy="--out OTHER keeps it, and --fresh replaces it",
            )
        return None  # finished, and the output taken away: begin again
    return found.header


def describe_differences(old: AnswerSettings, new: AnswerSettings) -> str:
    names = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
    return "; ".join(_difference(name, old.get(name), new.get(name)) for name in names)


def _difference(name: str, old: object, new: object) -> str:
    if all(value is None or len(str(value)) <= 24 for value in (old, new)):
        return f"{name} was {old}, now {new}"
    return f"the {name} differ" if name.endswith("s") else f"another {name}"


def _read(handle: int) -> _Found:
    """Every whole line. What stands behind the last line end was cut off while it was written."""
    header = finished = None
    spans: dict[AnswerKey, _Span] = {}
    end = 0
    with os.fdopen(os.dup(handle), "rb") as stream:
        stream.seek(0)
        for line in stream:
            begin, whole = end, _LINE.fullmatch(line)
            if not line.endswith(b"\n"):
                break
            end += len(line)
            if whole is None or int(whole[1], 16) != zlib.crc32(line[9:-1]):
                continue
            place, content = whole[2].decode(), whole[3]
            if place == _HEADER:
                header = json.loads(content)
            elif place == _FINISHED:
                finished = json.loads(content)
            else:
                key = AnswerKey(*map(int, place.split(".")))
                spans.setdefault(key, _Span(begin + whole.start(3), len(content)))
    return _Found(header=header, finished=finished, spans=spans, num_bytes=end)


def _line(place: str, content: bytes) -> bytes:
    body = place.encode() + b" " + content
    return b"%08x %b\n" % (zlib.crc32(body), body)


def _finished_line(facts: dict[str, Any]) -> bytes:
    return _line(_FINISHED, to_json_line(facts))


def write_output(out: Path, rows: Iterator[bytes]) -> dict[str, Any]:
    """`out` in one go beside a partial file; its size and digest, to know it again."""
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
    try:
        if out.stat().st_size != finished.get("bytes"):
            return False
        digest = hashlib.blake2b(digest_size=16)
        with out.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    except OSError:
        return False
    return digest.hexdigest() == finished.get("digest")


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def require_folder(out: Path) -> None:
    if not out.name or "\0" in str(out) or out.is_dir():
        raise UsageError(f"{str(out)!r} is no file name.", remedy="--out answers.jsonl")
    if _exists(out) and not out.is_file():
        raise UsageError(f"{out} is no regular file.", remedy="--out answers.jsonl")
    if not out.parent.is_dir():
        raise SetupError(
            f"Cannot write {out}: there is no folder {out.parent}.",
            remedy=f"mkdir -p {shlex.quote(str(out.parent))}",
        )


def _lock(out: Path) -> int:
    """The journal, opened and held. The kernel lets go when the process ends, however it ends."""
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
    return handle


def _cannot_write(path: Path, error: OSError) -> SetupError:
    return SetupError(
        f"Cannot write {path}: {error.strerror or error}.",
        remedy="make room or choose another folder with --out; what was answered so far is kept, "
        "and the same command goes on",
    )
