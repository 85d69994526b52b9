"""What is published for a chunk: one line about it, then its answers in order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.engines.protocol import Done
from tightfit.farm.leases import Why
from tightfit.serve.generate.job import Failure, make_row
from tightfit.serve.generate.journal import as_json_line
from tightfit.serve.generate.prompts import Prompt


class FailureNote(BaseModel):
    """An answer that could not be given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: int
    sample: int
    problem: str
    remedy: str

    def to_failure(self, prompt: Prompt) -> Failure:
        return Failure(prompt, self.sample, UserError(self.problem, remedy=self.remedy))


class ChunkHead(BaseModel):
    """Who did a chunk, how, and what could not be answered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    chunk: int
    worker: str
    node: str
    partition: str
    generation: int
    why: Why
    seconds: float
    num_answers: int
    num_prompt_tokens: int
    num_new_tokens: int
    failures: tuple[FailureNote, ...] = ()


class Answered(NamedTuple):
    """One answer as a row, and its tokens."""

    row: bytes
    num_prompt_tokens: int
    num_new_tokens: int


def make_answer(prompt: Prompt, sample: int, done: Done, *, is_raw: bool) -> Answered:
    row = as_json_line(make_row(prompt, sample, done, is_raw))
    return Answered(row, done.num_prompt_tokens, done.num_new_tokens)


def pack_chunk(head: ChunkHead, rows: Sequence[bytes]) -> bytes:
    return b"\n".join((head.model_dump_json().encode(), *rows)) + b"\n"


def read_chunk(path: Path, num_keys: int) -> tuple[ChunkHead, bytes]:
    """A published chunk; its answers must be as many as are missing from the failures."""
    content = path.read_bytes()
    first, _, rows = content.partition(b"\n")
    try:
        head = ChunkHead.model_validate_json(first)
    except ValueError as fault:
        raise _damaged(path) from fault
    if rows.count(b"\n") + len(head.failures) != num_keys:
        raise _damaged(path)
    return head, rows


def _damaged(path: Path) -> InvalidInputError:
    return InvalidInputError(
        f"{path} is damaged.", remedy=f"rm {path}, and the same command answers it again"
    )
