"""Votes on pairs of answers: one JSON line each, flushed to the disk before it counts."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from tightfit.core.errors import SetupError
from tightfit.core.files import describe_write_error, sync, take_lock
from tightfit.core.frozen import Frozen
from tightfit.core.reading import describe_kind, open_regular


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
    """Which of the two was on the left, or on top on a narrow screen."""


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

    def count(self, name_a: str, name_b: str) -> Counter[VoteChoice]:
        """All votes of the file on these two models, whichever of them was called A."""
        other = {VoteChoice.A: VoteChoice.B, VoteChoice.B: VoteChoice.A}
        counts: Counter[VoteChoice] = Counter()
        for vote in read_votes(self.path):
            if (vote.name_a, vote.name_b) == (name_a, name_b):
                counts[vote.vote] += 1
            elif (vote.name_a, vote.name_b) == (name_b, name_a):
                counts[other.get(vote.vote, vote.vote)] += 1
        return counts


def append_vote(path: Path, vote: Vote) -> None:
    """Add one line and flush it to the disk. A line that does not fit leaves no trace."""
    line = (vote.model_dump_json() + "\n").encode()
    try:
        is_new = not path.exists()
        # Unbuffered: a buffer would be written once more on closing after an error.
        with path.open("ab+", buffering=0) as stream:
            # One writer at a time, also of several pages; closing the file releases the lock.
            take_lock(stream.fileno(), wait_seconds=None, is_required=False)
            end = stream.seek(0, os.SEEK_END)
            if end and os.pread(stream.fileno(), 1, end - 1) != b"\n":
                line = b"\n" + line  # a line was cut off: by a crash, or by an editor
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[stream.write(rest) or 0 :]
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
        with open_regular(path) as stream:
            for line in stream:
                with contextlib.suppress(ValidationError):
                    yield Vote.model_validate_json(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _cannot_write_votes(path, error) from error


def check_votes_path(path: Path) -> None:
    """Raise for a path that will not take votes, before a model is loaded."""
    try:
        if path.exists():
            kind = describe_kind(path.stat().st_mode)
            if kind is not None:
                raise OSError(f"it is {kind}")
        elif not path.parent.is_dir():
            raise OSError(f"there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise OSError("it is not writable")
    except OSError as error:
        raise _cannot_write_votes(path, error) from error


def _cannot_write_votes(path: Path, error: OSError) -> SetupError:
    return SetupError(
        f"Cannot keep votes in {str(path)!r}: {describe_write_error(error, path)}.",
        remedy="--votes FILE in a folder that is writable and has free space",
    )
