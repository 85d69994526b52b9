"""How prompts are cut into chunks and chunks into buckets, and what their files are called."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, PositiveInt

CHUNKS_PER_WORKER = 64
"""So many that the last chunk of the slowest worker is a small part of the whole."""
MOST_PROMPTS_PER_CHUNK = 64
"""What a death can cost."""
CHUNKS_PER_BUCKET = 64
"""One folder each: what a look for work has to list."""


class Shape(BaseModel):
    """Prompts 0..n-1 in chunks of equal size, chunks in buckets of equal size."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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


def choose_shape(num_prompts: int, num_workers: int) -> Shape:
    """Chunks small enough that the end is short, large enough to be worth a file each."""
    wanted = num_prompts // (CHUNKS_PER_WORKER * max(1, num_workers))
    return Shape(
        num_prompts=num_prompts, prompts_per_chunk=max(1, min(MOST_PROMPTS_PER_CHUNK, wanted))
    )


def lease_folder(bucket: int) -> str:
    return f"lease/{bucket:06d}"


def done_folder(bucket: int) -> str:
    return f"done/{bucket:06d}"


def lease_path(shape: Shape, chunk: int, generation: int) -> str:
    return f"{lease_folder(shape.bucket_of(chunk))}/{chunk:08d}.{generation}"


def done_path(shape: Shape, chunk: int) -> str:
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
