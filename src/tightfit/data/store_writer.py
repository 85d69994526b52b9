"""Writing encoded rows: tokens stream to disk, only a few numbers per row stay in memory."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tightfit.data.token_store import (
    DESCRIPTION_FILE,
    TOKENS_FILE,
    TRAINED_FILE,
    StoreDescription,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A row ready to be written, with what its source says of it."""

    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]
    num_trained: int
    """Without a row's first token, which nothing predicts."""
    has_stop: bool
    num_lost: int
    """Tokens cut off to fit."""
    file: int
    number: int
    digest: int
    """Of the example it came from: the same text has the same one."""


def _column(kind: str) -> array[int]:
    return array(kind)


@dataclass(slots=True, kw_only=True)
class RowTable:
    """Columns over all rows written, in order."""

    starts: array[int] = field(default_factory=lambda: _column("q"))
    lengths: array[int] = field(default_factory=lambda: _column("i"))
    num_trained: array[int] = field(default_factory=lambda: _column("i"))
    num_lost: array[int] = field(default_factory=lambda: _column("q"))
    has_stop: array[int] = field(default_factory=lambda: _column("b"))
    files: array[int] = field(default_factory=lambda: _column("i"))
    numbers: array[int] = field(default_factory=lambda: _column("q"))
    digests: array[int] = field(default_factory=lambda: _column("Q"))

    def column(self, name: str) -> NDArray[np.int64]:
        """A column for arithmetic; digests keep their unsigned kind."""
        import numpy as np

        held: array[int] = getattr(self, name)
        return np.frombuffer(held, dtype=held.typecode) if held else np.zeros(0, held.typecode)


class StoreWriter:
    """The shared files of one encoding, being written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = RowTable()
        self.num_tokens = 0
        self._tokens: IO[bytes] = (folder / TOKENS_FILE).open("wb")
        self._trained: IO[bytes] = (folder / TRAINED_FILE).open("wb")

    def add(self, row: NewRow) -> None:
        table = self.table
        table.starts.append(self.num_tokens)
        table.lengths.append(len(row.tokens))
        table.num_trained.append(row.num_trained)
        table.num_lost.append(row.num_lost)
        table.has_stop.append(row.has_stop)
        table.files.append(row.file)
        table.numbers.append(row.number)
        table.digests.append(row.digest)
        self._tokens.write(row.tokens.tobytes())
        self._trained.write(row.trained.tobytes())
        self.num_tokens += len(row.tokens)

    def close(self) -> None:
        """Everything on disk for good."""
        for stream in (self._tokens, self._trained):
            if not stream.closed:
                stream.flush()
                os.fsync(stream.fileno())
                stream.close()

    def abandon(self) -> None:
        for stream in (self._tokens, self._trained):
            stream.close()

    def write_store(
        self, name: str, rows: NDArray[np.int64], description: StoreDescription
    ) -> None:
        """One store over some of the rows."""
        import numpy as np

        folder = self.folder / name
        folder.mkdir()
        for column in ("starts", "lengths", "num_trained", "files", "numbers"):
            with (folder / f"{column}.npy").open("wb") as stream:
                np.save(stream, self.table.column(column)[rows])
                stream.flush()
                os.fsync(stream.fileno())
        with (folder / DESCRIPTION_FILE).open("w", encoding="utf-8") as stream_text:
            stream_text.write(description.model_dump_json(indent=2) + "\n")
            stream_text.flush()
            os.fsync(stream_text.fileno())
