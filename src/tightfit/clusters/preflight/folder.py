"""The shared folder under test: files seen, renamed, and raced for by all nodes."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from tightfit.clusters.preflight.messages import FolderStep

POLL_SECONDS = 0.02
FIRST, RENAMED, GROWN = "first", "renamed", "grown"
EXCLUSIVE, LINKED = "exclusive", "linked"
"""Names that exactly one of all may get."""


def plant(place: Path, nonce: str) -> FolderStep:
    """By the first node: a new folder with what the others are to find."""
    begin = time.monotonic()
    try:
        place.mkdir()
        for name in (FIRST, GROWN):
            _write(place / name, nonce)
    except OSError as error:
        return _failed(error, begin)
    return FolderStep(is_done=True, seconds=time.monotonic() - begin)


def find(place: Path, nonce: str, seconds: float) -> FolderStep:
    """By the others: the file and its words appear here too."""
    if not place.parent.is_dir():
        return FolderStep(is_done=False, detail="there is no such folder")

    def is_there() -> bool:
        list(place.parent.iterdir())  # makes a network file system look again
        return (place / FIRST).read_text() == nonce and (place / GROWN).stat().st_size > 0

    return _await(is_there, seconds)


def race(place: Path, nonce: str) -> FolderStep:
    """By all at once: create exclusively, link, and rename a file of one's own."""
    begin = time.monotonic()
    won = []
    own = place / uuid.uuid4().hex
    try:
        _write(own, nonce)
        for name, attempt in ((EXCLUSIVE, _create), (LINKED, os.link)):
            try:
                attempt(own, place / name)
                won.append(name)
            except FileExistsError:
                continue
        own.rename(place / f"{RENAMED}-{own.name}")
    except OSError as error:
        return _failed(error, begin)
    took = time.monotonic() - begin
    return FolderStep(is_done=True, seconds=took, won=tuple(won), wrote=own.name)


def _create(_own: Path, name: Path) -> None:
    os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))


def see_renamed(place: Path, names: list[str], nonce: str, seconds: float) -> FolderStep:
    """By all: every node's file, under its new name."""

    def is_there() -> bool:
        list(place.iterdir())
        return all((place / f"{RENAMED}-{name}").read_text() == nonce for name in names)

    return _await(is_there, seconds)


def grow(place: Path, nonce: str) -> FolderStep:
    """By the first: a file that the others know gets longer."""
    begin = time.monotonic()
    try:
        _write(place / GROWN, nonce * 2)
    except OSError as error:
        return _failed(error, begin)
    return FolderStep(is_done=True, seconds=time.monotonic() - begin)


def see_grown(place: Path, nonce: str, seconds: float) -> FolderStep:
    """By the others: how long the old size is still shown."""
    return _await(lambda: (place / GROWN).stat().st_size == 2 * len(nonce), seconds)


def remove(place: Path) -> FolderStep:
    begin = time.monotonic()
    shutil.rmtree(place, ignore_errors=True)
    return FolderStep(is_done=True, seconds=time.monotonic() - begin)


def _write(path: Path, text: str) -> None:
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _await(is_there: Callable[[], bool], seconds: float) -> FolderStep:
    begin = time.monotonic()
    why = "what others write there does not appear"
    while time.monotonic() - begin < seconds:
        try:
            if is_there():
                return FolderStep(is_done=True, seconds=time.monotonic() - begin)
        except FileNotFoundError:
            pass
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(POLL_SECONDS)
    return FolderStep(is_done=False, seconds=time.monotonic() - begin, detail=why)


def _failed(error: OSError, begin: float) -> FolderStep:
    why = error.strerror or str(error)
    return FolderStep(is_done=False, seconds=time.monotonic() - begin, detail=why)
