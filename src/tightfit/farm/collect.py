"""The end of a farm: every chunk in order into one file, what failed beside it, sums of it all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from tightfit.core.files import write_atomic
from tightfit.farm.folder import FarmFile
from tightfit.farm.leases import FINISHED
from tightfit.farm.results import ChunkHead, read_chunk
from tightfit.farm.shape import done_path, lease_folder, mark_path, numbers_in
from tightfit.farm.snapshot import INDEX, PROMPTS, Snapshot
from tightfit.serve.generate.job import Failure, write_failures
from tightfit.serve.generate.journal import is_unchanged, write_output

OUTPUT_FILE = "output.json"
_BULKY = ("lease", "done", "taken", "full", "tmp", "suspect", "submitters")


class OutputNote(BaseModel):
    """The output as it was written, to know it again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: NonNegativeInt
    digest: str
    num_failed: NonNegativeInt = 0


class Collected(NamedTuple):
    """What the chunks say of themselves, and when each came (the file server's clock)."""

    heads: tuple[ChunkHead, ...]
    commits_s: tuple[float, ...]
    failures: tuple[Failure, ...]
    failures_path: Path | None
    note: OutputNote


def find_missing(folder: Path, farm: FarmFile) -> list[int]:
    """Chunks that are not there, whatever the marks say."""
    shape = farm.shape
    return [c for c in range(shape.num_chunks) if not (folder / done_path(shape, c)).exists()]


def count_kept(folder: Path, farm: FarmFile) -> int:
    """Answers that are published so far, the failed ones included."""
    done = numbers_in([path.name for path in folder.glob("done/*/*")])  # lists, not a look at each
    return sum(farm.num_keys(chunk) for chunk in done)


def reopen(folder: Path, farm: FarmFile, chunks: Sequence[int]) -> None:
    """Have chunks done again. Only while no worker runs: here leases are deleted."""
    shape = farm.shape
    for chunk in chunks:
        bucket = shape.bucket_of(chunk)
        for path in (folder / lease_folder(bucket)).glob(f"{chunk:08d}.*"):
            path.unlink()
        (folder / done_path(shape, chunk)).unlink(missing_ok=True)
        shutil.rmtree(folder / f"suspect/{chunk:08d}", ignore_errors=True)
        for kind in ("taken", "full"):
            (folder / mark_path(kind, bucket)).unlink(missing_ok=True)
    (folder / FINISHED).unlink(missing_ok=True)
    (folder / OUTPUT_FILE).unlink(missing_ok=True)


def collect(folder: Path, farm: FarmFile, out: Path) -> Collected:
    """Write the output whole, and what failed beside it."""
    heads: list[ChunkHead] = []
    failures: list[Failure] = []
    commits_s: list[float] = []
    snapshot = Snapshot(folder)

    def rows() -> Iterator[bytes]:
        for chunk in range(farm.shape.num_chunks):
            path = folder / done_path(farm.shape, chunk)
            head, content = read_chunk(path, farm.num_keys(chunk))
            commits_s.append(path.stat().st_mtime)
            if head.failures:
                prompts = {prompt.index: prompt for prompt in snapshot.read(chunk)}
                failures.extend(note.to_failure(prompts[note.prompt]) for note in head.failures)
            heads.append(head.model_copy(update={"failures": ()}))
            yield from filter(None, content.split(b"\n"))

    try:
        told = write_output(out, rows())
    finally:
        snapshot.close()
    path = write_failures(out, failures)
    note = OutputNote(**told, num_failed=len(failures))
    return Collected(tuple(heads), tuple(commits_s), tuple(failures), path, note)


def write_output_note(folder: Path, note: OutputNote) -> None:
    """The last word: whoever finds it finds everything else, the statistics too."""
    write_atomic(folder / OUTPUT_FILE, note.model_dump_json() + "\n")


def read_output_note(folder: Path) -> OutputNote | None:
    try:
        return OutputNote.model_validate_json((folder / OUTPUT_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def is_collected(folder: Path, out: Path) -> bool:
    """Whether the output is there as this farm wrote it, with nothing left to do."""
    note = read_output_note(folder)
    return note is not None and not note.num_failed and is_unchanged(out, note.model_dump())


def clear(folder: Path) -> None:
    """Leave what knows the output again; the answers themselves are in it."""
    for name in _BULKY:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (PROMPTS, INDEX):
        (folder / name).unlink(missing_ok=True)
