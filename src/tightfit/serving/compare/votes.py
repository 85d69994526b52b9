"""Votes on pairs of answers: one JSON line each, on the disk for good before it counts."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from tightfit.core.errors import SetupError
from tightfit.core.files import describe_kind, sync
from tightfit.core.frozen import Frozen
from tightfit.core.locks import take_lock


class VoteChoice(str, Enum):
    """Which model answered better, independent of the side it was shown on."""

    A = "a"
    B = "b"
    TIE = "tie"
    BOTH_BAD = "both_bad"


class VoteSettings(Frozen):
    """How both answers were drawn."""

    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int


class Vote(Frozen):
    """One line of the votes file: all that is needed to learn from it later."""

    id: str
    """Of the pair of answers: it can be voted on once."""
    time: str
    """UTC, ISO 8601."""
    prompt: str
    system: str
    settings: VoteSettings
    name_a: str
    name_b: str
    answer_a: str
    answer_b: str
    vote: VoteChoice
    blind: bool
    """Whether the names were hidden when the vote was cast."""
    left: Literal["a", "b"]
    """Which of the two stood on the left, or on top of a narrow screen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteCounts:
    """Votes counted."""

    a: int = 0
    b: int = 0
    tie: int = 0
    both_bad: int = 0

    @property
    def total(self) -> int:
        return self.a + self.b + self.tie + self.both_bad


class VoteFile:
    """The votes file of one page. May be used from any thread, and by several pages at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._cast: set[str] = {vote.id for vote in read_votes(path)}

    def cast(self, vote: Vote) -> bool:
        """Keep a vote; False where this pair of answers has had one."""
        with self._lock:
            if vote.id in self._cast:
                return False
            append_vote(self.path, vote)
            self._cast.add(vote.id)
            return True

    def count(self, name_a: str, name_b: str) -> VoteCounts:
        """All votes of the file on these two models, whichever of them was called A."""
        return count_votes(read_votes(self.path), name_a, name_b)


def utc_now_text() -> str:
    """The time of a vote."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def append_vote(path: Path, vote: Vote) -> None:
    """Add one line and have it on the disk. A line that does not go in whole leaves no trace."""
    line = (vote.model_dump_json() + "\n").encode()
    try:
        is_new = not path.exists()
        with path.open("ab", buffering=0) as stream:
            # One writer at a time, also of several pages; closing the file releases the lock.
            take_lock(stream.fileno(), wait_seconds=None, is_required=False)
            end = stream.seek(0, os.SEEK_END)
            if end and not _ends_a_line(path):
                line = b"\n" + line  # a line was cut off: by a crash, or by an editor
            try:
                _write_all(stream, line)
                os.fsync(stream.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(stream.fileno(), end)
                raise
        if is_new:
            with contextlib.suppress(OSError):  # some file systems do not open folders
                sync(path.parent)
    except OSError as error:
        raise _cannot_write_votes(path, error) from error


def read_votes(path: Path) -> Iterator[Vote]:
    """Every vote of the file, in order; lines that are none are passed over."""
    try:
        with path.open("rb") as stream:
            for line in stream:
                with contextlib.suppress(ValidationError):
                    yield Vote.model_validate_json(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _cannot_write_votes(path, error) from error


def count_votes(votes: Iterator[Vote], name_a: str, name_b: str) -> VoteCounts:
    """Those on this pair of models, also where it was compared the other way round."""
    counts = dict.fromkeys(VoteChoice, 0)
    other = {VoteChoice.A: VoteChoice.B, VoteChoice.B: VoteChoice.A}
    for vote in votes:
        if (vote.name_a, vote.name_b) == (name_a, name_b):
            counts[vote.vote] += 1
        elif (vote.name_a, vote.name_b) == (name_b, name_a):
            counts[other.get(vote.vote, vote.vote)] += 1
    return VoteCounts(**{choice.value: number for choice, number in counts.items()})


def check_votes_path(path: Path) -> None:
    """Refuse a place that will not take votes, before a model is loaded."""
    try:
        if path.exists():
            kind = describe_kind(path.stat().st_mode)
            if kind is not None:
                raise _cannot_write_votes(path, OSError(f"it is {kind}"))
        elif not path.parent.is_dir():
            raise _cannot_write_votes(path, OSError(f"there is no folder {path.parent}"))
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise _cannot_write_votes(path, OSError("it is not writable"))
    except OSError as error:
        raise _cannot_write_votes(path, error) from error


def _write_all(stream: io.FileIO, line: bytes) -> None:
    """Unbuffered: what is left in a buffer after a fault would be written once more on closing."""
    rest = memoryview(line)
    while rest:
        rest = rest[stream.write(rest) or 0 :]


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) == b"\n"


def _cannot_write_votes(path: Path, error: OSError) -> SetupError:
    return SetupError(
        f"Cannot keep votes in {str(path)!r}: {error.strerror or error}.",
        remedy="--votes FILE in a folder that is writable and has free space",
    )
