"""From data sources as a recipe names them to rows: files, parts, formats, faults told."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.training import DataSource
from tightfit.data.formats import RowFormat, recognise_format
from tightfit.data.meter import Meter
from tightfit.data.read import OnFault, data_files, read_file
from tightfit.data.row import Row
from tightfit.data.streams import size_of, unreadable
from tightfit.data.take import SPLIT_WORDS, Take, parse_take, split_suffix

_HELD_OUT_WORDS = ("validation", "test")
_HASH_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSource:
    """A source with its files found and its part understood; nothing is read yet."""

    source: DataSource
    files: tuple[Path, ...]
    take: Take

    @property
    def name(self) -> str:
        """As the user wrote it."""
        return self.source.path + (f" {self.source.take}" if self.source.take else "")


def open_source(source: DataSource) -> OpenedSource:
    """Find the files and read the part that is asked for."""
    path, take = _path_and_take(source)
    word = take.word
    if not Path(path).is_dir():
        _check_word(path, word)
        return OpenedSource(source=source, files=tuple(data_files(path)), take=take)
    if word is None and source.split == "eval":
        word = _held_out_word(path)
    return OpenedSource(source=source, files=tuple(data_files(path, word=word)), take=take)


def read_source(
    opened: OpenedSource, meter: Meter, on_fault: OnFault | None = None
) -> Iterator[tuple[Row, RowFormat]]:
    """The rows of the part that was asked for, each with its file's format.

    A row in no known format is a fault like any other; where a file's first rows
    are all like that, its reading ends with the first message.
    """
    take = opened.take
    total = _count_rows(opened, on_fault) if take.needs_count else None
    first, last = take.range(total, opened.name)
    rows = itertools.islice(_all_rows(opened.files, meter, on_fault), first, last)
    num_rows = 0
    for row in _with_format(rows, on_fault):
        num_rows += 1
        yield row
    if not num_rows and on_fault is None:
        raise InvalidInputError(
            f"{opened.name} gives no rows.", remedy="name a part that holds rows"
        )


def digest_sources(sources: Sequence[OpenedSource]) -> str:
    """One digest over names, settings and contents."""
    digest = hashlib.blake2b(digest_size=16)
    for opened in sources:
        digest.update(opened.source.model_dump_json().encode())
        for path in opened.files:
            digest.update(f"\n{path} ".encode("utf-8", "surrogateescape"))
            digest.update(_digest_file(path))
    return digest.hexdigest()


def _digest_file(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_HASH_BYTES):
                digest.update(chunk)
    except OSError as fault:
        raise unreadable(path, fault) from fault
    return digest.digest()


def _path_and_take(source: DataSource) -> tuple[str, Take]:
    path = str(Path(source.path).expanduser()) if source.path.startswith("~/") else source.path
    written = source.take
    bare, suffix = split_suffix(path)
    if suffix is not None and not Path(path).exists():
        if written is not None:
            raise InvalidInputError(
                f"{source.path} names a part, and `take: {written}` another.",
                remedy="keep one of the two",
            )
        path, written = bare, suffix
    return path, Take() if written is None else parse_take(written)


def _check_word(path: str, word: str | None) -> None:
    """A file that calls itself one split is not another."""
    if word is None:
        return
    parts = re.split(r"[._-]", Path(path).name.lower())
    said = {SPLIT_WORDS[part] for part in parts if part in SPLIT_WORDS}
    if said and SPLIT_WORDS[word] not in said:
        raise InvalidInputError(
            f"{path} is a single file and not the {word} split by its name.",
            remedy="leave the split's name out, or name the folder that holds all splits",
        )


def _held_out_word(folder: str) -> str | None:
    """Which held-out files an evaluation source means; None: it has none, so all its files."""
    for word in _HELD_OUT_WORDS:
        try:
            data_files(folder, word=word)
        except InvalidInputError:
            continue
        return word
    return None


def _count_rows(opened: OpenedSource, on_fault: OnFault | None) -> int:
    quiet = (lambda _: None) if on_fault is not None else None
    return sum(1 for _ in _all_rows(opened.files, Meter(), quiet))


def _all_rows(files: Sequence[Path], meter: Meter, on_fault: OnFault | None) -> Iterator[Row]:
    for path in files:
        try:
            yield from read_file(path, meter, on_fault)
        except InvalidInputError as fault:
            if on_fault is None:
                raise
            on_fault(fault)
        meter.close_file(size_of(path))


def _with_format(rows: Iterator[Row], on_fault: OnFault | None) -> Iterator[tuple[Row, RowFormat]]:
    known: dict[Path, RowFormat] = {}
    for row in rows:
        row_format = known.get(row.path)
        if row_format is None:
            try:
                row_format = known[row.path] = recognise_format(row)
            except UserError as fault:
                if on_fault is None:
                    raise
                on_fault(fault)
                continue
        yield row, row_format
