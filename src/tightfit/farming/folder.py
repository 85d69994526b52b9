"""The farm's folder beside the output: farm.json, the prompts, chunks and their file names."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, SetupError
from tightfit.core.files import describe_write_error, sync, unique_partial, write_atomic
from tightfit.core.frozen import Frozen
from tightfit.core.reading import open_descriptor, read_bytes
from tightfit.core.sampling import Sampling
from tightfit.data.formats import Message
from tightfit.engines.open import EngineRequest
from tightfit.runtime.model_files import find_artefact
from tightfit.serving.generate.journal import to_json_line
from tightfit.serving.generate.prompts import Prompt

# Chunks of prompts, buckets of chunks, and their file names.

CHUNKS_PER_WORKER = 64
"""So many that the last chunk of the slowest worker is a small part of the whole."""
MAX_PROMPTS_PER_CHUNK = 64
"""What a death can cost."""
CHUNKS_PER_BUCKET = 64
"""One folder each: what a look for work has to list."""


class ChunkLayout(Frozen):
    """Prompts 0..n-1 in chunks of equal size, chunks in buckets of equal size."""

    num_prompts: PositiveInt
    prompts_per_chunk: PositiveInt
    chunks_per_bucket: PositiveInt = CHUNKS_PER_BUCKET

    @property
    def num_chunks(self) -> int:
        return -(-self.num_prompts // self.prompts_per_chunk)

    @property
    def num_buckets(self) -> int:
        return -(-self.num_chunks // self.chunks_per_bucket)

    def prompts_of(self, chunk: int) -> range:
        start = chunk * self.prompts_per_chunk
        return range(start, min(start + self.prompts_per_chunk, self.num_prompts))

    def chunks_of(self, bucket: int) -> range:
        start = bucket * self.chunks_per_bucket
        return range(start, min(start + self.chunks_per_bucket, self.num_chunks))

    def bucket_of(self, chunk: int) -> int:
        return chunk // self.chunks_per_bucket


def choose_chunk_layout(num_prompts: int, num_workers: int) -> ChunkLayout:
    """Chunks small enough that the end is short, large enough to be worth a file each."""
    wanted = num_prompts // (CHUNKS_PER_WORKER * max(1, num_workers))
    return ChunkLayout(
        num_prompts=num_prompts, prompts_per_chunk=max(1, min(MAX_PROMPTS_PER_CHUNK, wanted))
    )


def lease_folder(bucket: int) -> str:
    return f"lease/{bucket:06d}"


def done_folder(bucket: int) -> str:
    return f"done/{bucket:06d}"


def lease_path(shape: ChunkLayout, chunk: int, generation: int) -> str:
    return f"{lease_folder(shape.bucket_of(chunk))}/{chunk:08d}.{generation}"


def done_path(shape: ChunkLayout, chunk: int) -> str:
    return f"{done_folder(shape.bucket_of(chunk))}/{chunk:08d}"


def mark_path(kind: str, bucket: int) -> str:
    """`taken`: every chunk of the bucket was leased; `full`: every one is done."""
    return f"{kind}/{bucket:06d}"


def newest_generations(names: list[str]) -> dict[int, int]:
    """Chunk to its newest generation, from the names in a lease folder."""
    newest: dict[int, int] = {}
    for name in names:
        chunk, _, generation = name.partition(".")
        if chunk.isdigit() and generation.isdigit():
            newest[int(chunk)] = max(newest.get(int(chunk), -1), int(generation))
    return newest


def numbers_in(names: list[str]) -> set[int]:
    return {int(name) for name in names if name.isdigit()}


# A copy of the prompts: one file, and an index of where each chunk starts.

PROMPTS_FILE, INDEX_FILE = "prompts.jsonl", "prompts.index"
_OFFSET = struct.Struct("<Q")


def write_snapshot(folder: Path, shape: ChunkLayout, prompts: Sequence[Prompt]) -> None:
    with (folder / PROMPTS_FILE).open("wb") as rows, (folder / INDEX_FILE).open("wb") as index:
        for chunk in range(shape.num_chunks):
            index.write(_OFFSET.pack(rows.tell()))
            for number in shape.prompts_of(chunk):
                prompt = prompts[number]
                facts = {
                    "index": prompt.index,
                    "place": prompt.place,
                    "messages": prompt.messages,
                    "columns": prompt.columns,
                    "tools": prompt.tools,
                }
                rows.write(to_json_line(facts) + b"\n")
        index.write(_OFFSET.pack(rows.tell()))
        for stream in (rows, index):
            stream.flush()
            os.fsync(stream.fileno())


class PromptSnapshot:
    """Chunks of prompts, read from the copy."""

    def __init__(self, folder: Path) -> None:
        self._rows = open_descriptor(folder / PROMPTS_FILE)
        self._index = open_descriptor(folder / INDEX_FILE)

    def read(self, chunk: int) -> list[Prompt]:
        found = os.pread(self._index, 2 * _OFFSET.size, chunk * _OFFSET.size)
        if len(found) < 2 * _OFFSET.size:
            raise InvalidInputError(
                f"The farm's copy of the prompts ends before chunk {chunk}.",
                remedy="--fresh begins again",
            )
        (start,), (end,) = _OFFSET.iter_unpack(found)
        pieces = []
        while start < end and (piece := os.pread(self._rows, end - start, start)):
            pieces.append(piece)
            start += len(piece)
        try:
            rows = [json.loads(line) for line in b"".join(pieces).split(b"\n") if line]
            return [
                Prompt(
                    index=row["index"],
                    place=row["place"],
                    messages=tuple(Message.restore(turn) for turn in row["messages"]),
                    tools=tuple(row.get("tools", ())),
                    columns=row.get("columns", {}),
                )
                for row in rows
            ]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidInputError(
                f"The farm's copy of the prompts is damaged in chunk {chunk}.",
                remedy="--fresh begins again",
            ) from error

    def close(self) -> None:
        for handle in (self._rows, self._index):
            os.close(handle)


LEASE_SECONDS = 60.0
"""A worker without a heartbeat for so long counts as dead."""
FOLDERS = ("lease", "done", "taken", "full", "tmp", "workers", "suspect", "logs")


class EngineSettings(Frozen):
    """The model and how a worker loads it, by names that mean the same on every node."""

    model: str
    engine: str = "auto"
    weights: Dtype | None = None
    device: str = "auto"
    context: PositiveInt | None = None
    slots: PositiveInt | None = None
    threads: PositiveInt | None = None
    hosts: tuple[str, ...] = ()
    template: str | None = None

    def to_request(self) -> EngineRequest:
        words = self.model_dump(exclude={"model", "weights"})
        return EngineRequest(artefact=find_artefact(self.model), weights=self.weights, **words)


def describe_engine(request: EngineRequest) -> EngineSettings:
    """Paths made absolute: a worker starts in another folder."""
    named = Path(request.artefact.name).expanduser()
    template = request.template
    if template is not None and Path(template).is_file():
        template = str(Path(template).absolute())
    same = EngineSettings.model_fields.keys() - {"model", "template"}
    return EngineSettings(
        model=str(named.absolute()) if named.exists() else request.artefact.name,
        template=template,
        **{name: getattr(request, name) for name in same},
    )


class FarmFile(Frozen):
    """farm.json: everything that an answer depends on, and how the work is cut."""

    version: int = 1
    out: str
    settings: dict[str, Any]
    """What answers depend on, as `generate` keeps it; another job on the same output is refused."""
    seed: NonNegativeInt
    shape: ChunkLayout
    num_samples: PositiveInt = 1
    is_raw: bool = False
    sampling: Sampling
    """Without its seed: each answer has one of its own, derived from `seed`."""
    engine: EngineSettings
    num_workers: PositiveInt
    lease_seconds: PositiveFloat = LEASE_SECONDS

    def is_same_work(self, other: FarmFile) -> bool:
        """Whether chunks and their answers are the same; who does them, and how, may differ."""
        return (self.settings, self.seed, self.shape) == (other.settings, other.seed, other.shape)

    @property
    def num_answers(self) -> int:
        return self.shape.num_prompts * self.num_samples

    def num_keys(self, chunk: int) -> int:
        """Answers that a chunk has, the failed ones included."""
        return len(self.shape.prompts_of(chunk)) * self.num_samples


def farm_path(out: Path) -> Path:
    return out.with_name(f".{out.name}.farm")


def read_farm(folder: Path) -> FarmFile | None:
    """None where no farm was begun."""
    try:
        text = read_bytes(folder / "farm.json")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return FarmFile.model_validate_json(text)
    except ValueError as error:
        raise InvalidInputError(
            f"{folder / 'farm.json'} cannot be read: it is damaged, or of another version.",
            remedy="--fresh begins again; what was answered there is then lost",
        ) from error


def make_farm(folder: Path, farm: FarmFile, prompts: Sequence[Prompt]) -> bool:
    """The whole folder at once: ready to be worked on, or not at all. False: there is one."""
    made = unique_partial(folder)
    try:
        made.mkdir()
        for name in FOLDERS:
            (made / name).mkdir()
        write_snapshot(made, farm.shape, prompts)
        write_atomic(made / "farm.json", farm.model_dump_json(indent=1) + "\n")
        sync(made)
        made.rename(folder)
        sync(folder.parent)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise SetupError(
            f"Cannot write {folder}: {describe_write_error(error, folder)}.",
            remedy="choose a folder that is writable and has free space: --out FILE",
        ) from error
    return True


def remove_farm(folder: Path) -> None:
    """Aside first, at once: a worker that still runs finds nothing rather than a part."""
    aside = unique_partial(folder)
    try:
        os.rename(folder, aside)  # noqa: PTH104
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)
