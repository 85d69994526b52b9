"""Results of a farm: one published file per chunk, collected into the output at the end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import NonNegativeInt, ValidationError

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.files import write_atomic
from tightfit.core.frozen import Frozen
from tightfit.core.reading import read_bytes
from tightfit.core.units import GIB
from tightfit.farming.folder import (
    INDEX_FILE,
    PROMPTS_FILE,
    FarmFile,
    PromptSnapshot,
    done_path,
    lease_folder,
    mark_path,
    numbers_in,
)
from tightfit.farming.leases import FINISHED, LeaseReason
from tightfit.serving.generate.journal import is_unchanged, write_output
from tightfit.serving.generate.run import FailedAnswer, write_failures


class FailureRecord(Frozen):
    """An answer that could not be given."""

    prompt: int
    sample: int
    problem: str
    remedy: str


class ChunkHeader(Frozen):
    """Who did a chunk, how, and what could not be answered."""

    chunk: int
    worker: str
    node: str
    partition: str
    generation: int
    why: LeaseReason
    seconds: float
    num_answers: int
    num_prompt_tokens: int
    num_new_tokens: int
    failures: tuple[FailureRecord, ...] = ()


class AnsweredRow(NamedTuple):
    """One answer as a row, and its tokens."""

    row: bytes
    num_prompt_tokens: int
    num_new_tokens: int


def pack_chunk(head: ChunkHeader, rows: Sequence[bytes]) -> bytes:
    """A chunk as it is published: its header and its rows, one line each."""
    return b"\n".join((head.model_dump_json().encode(), *rows)) + b"\n"


MAX_CHUNK_BYTES = 4 * GIB


def read_chunk(path: Path, num_keys: int) -> tuple[ChunkHeader, bytes]:
    """A published chunk; its answers must be as many as are missing from the failures."""
    content = read_bytes(path, most_bytes=MAX_CHUNK_BYTES)
    first, _, rows = content.partition(b"\n")
    try:
        head = ChunkHeader.model_validate_json(first)
        if rows.count(b"\n") + len(head.failures) != num_keys:
            raise ValueError("answers are missing")
    except ValueError as error:
        raise InvalidInputError(
            f"{path} is damaged.", remedy=f"rm {path}, and the same command answers it again"
        ) from error
    return head, rows


# Collecting every chunk into the output.

OUTPUT_FILE = "output.json"
_INTERMEDIATE_FOLDERS = ("lease", "done", "taken", "full", "tmp", "suspect", "submitters")


class OutputRecord(Frozen):
    """The output as it was written, to know it again."""

    bytes: NonNegativeInt
    digest: str
    num_failed: NonNegativeInt = 0


class CollectedOutput(NamedTuple):
    """What the chunks say of themselves, and when each came (the file server's clock)."""

    heads: tuple[ChunkHeader, ...]
    commits_s: tuple[float, ...]
    failures: tuple[FailedAnswer, ...]
    failures_path: Path | None
    note: OutputRecord


def find_missing_chunks(folder: Path, farm: FarmFile) -> list[int]:
    """Chunks that are not there, whatever the marks say."""
    shape = farm.shape
    return [c for c in range(shape.num_chunks) if not (folder / done_path(shape, c)).exists()]


def count_published_answers(folder: Path, farm: FarmFile) -> int:
    """Answers that are published so far, the failed ones included."""
    done = numbers_in([path.name for path in folder.glob("done/*/*")])  # lists, not a look at each
    return sum(farm.num_keys(chunk) for chunk in done)


def reopen_chunks(folder: Path, farm: FarmFile, chunks: Sequence[int]) -> None:
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


def collect_output(folder: Path, farm: FarmFile, out: Path) -> CollectedOutput:
    """Write the output whole, and what failed beside it."""
    heads: list[ChunkHeader] = []
    failures: list[FailedAnswer] = []
    commits_s: list[float] = []
    snapshot = PromptSnapshot(folder)

    def rows() -> Iterator[bytes]:
        for chunk in range(farm.shape.num_chunks):
            path = folder / done_path(farm.shape, chunk)
            head, content = read_chunk(path, farm.num_keys(chunk))
            commits_s.append(path.stat().st_mtime)
            if head.failures:
                prompts = {prompt.index: prompt for prompt in snapshot.read(chunk)}
                for one in head.failures:
                    error = UserError(one.problem, remedy=one.remedy)
                    failures.append(FailedAnswer(prompts[one.prompt], one.sample, error))
            heads.append(head.model_copy(update={"failures": ()}))
            yield from filter(None, content.split(b"\n"))

    try:
        facts = write_output(out, rows())
    finally:
        snapshot.close()
    path = write_failures(out, failures)
    note = OutputRecord(**facts, num_failed=len(failures))
    return CollectedOutput(tuple(heads), tuple(commits_s), tuple(failures), path, note)


def write_output_record(folder: Path, note: OutputRecord) -> None:
    """The last word: whoever finds it finds everything else, the statistics too."""
    write_atomic(folder / OUTPUT_FILE, note.model_dump_json() + "\n")


def read_output_record(folder: Path) -> OutputRecord | None:
    try:
        return OutputRecord.model_validate_json(read_bytes(folder / OUTPUT_FILE))
    except (OSError, ValidationError):
        return None


def is_collected(folder: Path, out: Path) -> bool:
    """Whether the output is there as this farm wrote it, with nothing left to do."""
    note = read_output_record(folder)
    return note is not None and not note.num_failed and is_unchanged(out, note.model_dump())


def remove_intermediate_files(folder: Path) -> None:
    """Leave what knows the output again; the answers themselves are in it."""
    for name in _INTERMEDIATE_FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (PROMPTS_FILE, INDEX_FILE):
        (folder / name).unlink(missing_ok=True)
