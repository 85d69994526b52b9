"""The prompts as they were when the farm began: one file, and where each chunk starts in it."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from tightfit.core.errors import InvalidInputError
from tightfit.data.formats import Message
from tightfit.farm.shape import Shape
from tightfit.serve.generate.journal import as_json_line
from tightfit.serve.generate.prompts import Prompt

PROMPTS, INDEX = "prompts.jsonl", "prompts.index"
_OFFSET = struct.Struct("<Q")


def write_snapshot(folder: Path, shape: Shape, prompts: Sequence[Prompt]) -> None:
    with (folder / PROMPTS).open("wb") as rows, (folder / INDEX).open("wb") as index:
        for chunk in range(shape.num_chunks):
            index.write(_OFFSET.pack(rows.tell()))
            for number in shape.prompts_of(chunk):
                rows.write(_as_line(prompts[number]))
        index.write(_OFFSET.pack(rows.tell()))
        for stream in (rows, index):
            stream.flush()
            os.fsync(stream.fileno())


class Snapshot:
    """Chunks of prompts, each read where it lies."""

    def __init__(self, folder: Path) -> None:
        self._rows = os.open(folder / PROMPTS, os.O_RDONLY | os.O_CLOEXEC)
        self._index = os.open(folder / INDEX, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, chunk: int) -> list[Prompt]:
        found = os.pread(self._index, 2 * _OFFSET.size, chunk * _OFFSET.size)
        if len(found) < 2 * _OFFSET.size:
            raise InvalidInputError(
                f"The farm's copy of the prompts ends before chunk {chunk}.",
                remedy="--fresh begins again",
            )
        start, end = _OFFSET.unpack(found[:8])[0], _OFFSET.unpack(found[8:])[0]
        pieces = []
        while start < end and (piece := os.pread(self._rows, end - start, start)):
            pieces.append(piece)
            start += len(piece)
        return [_read_line(line) for line in b"".join(pieces).split(b"\n") if line]

    def close(self) -> None:
        for handle in (self._rows, self._index):
            os.close(handle)


def _as_line(prompt: Prompt) -> bytes:
    told = {"index": prompt.index, "place": prompt.place, "messages": list(prompt.messages)}
    return as_json_line(told) + b"\n"


def _read_line(line: bytes) -> Prompt:
    told = json.loads(line)
    messages = tuple(Message(*turn) for turn in told["messages"])
    return Prompt(index=told["index"], place=told["place"], messages=messages)
