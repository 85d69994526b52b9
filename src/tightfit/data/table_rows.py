"""Rows of CSV, TSV, plain text and Parquet files, one at a time."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from tightfit.core.errors import EnvironmentFaultError, InvalidInputError, UserError
from tightfit.data.meter import Meter
from tightfit.data.row import Row, place
from tightfit.data.streams import (
    MAX_LINE_BYTES,
    iter_lines,
    require_file,
    unreadable,
    wrong_encoding,
)

_DELIMITERS = ",;\t|"
_PARQUET_BATCH = 1024


def read_csv(
    stream: IO[bytes], path: Path, on_fault: Callable[[UserError], None] | None = None
) -> Iterator[Row]:
    """A header line, then one row per record; the delimiter is the header's most frequent one."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
    lines = _decoded_lines(stream, path)
    first = next(lines, "")
    delimiter = max(_DELIMITERS, key=first.count) if ".tsv" not in path.name.lower() else "\t"
    reader = csv.reader(_chain(first, lines), delimiter=delimiter, strict=True)
    try:
        header = _header(next(reader, []), path)
        for cells in reader:
            if len(cells) != len(header):
                if cells and on_fault is None:
                    raise _ragged(path, reader.line_num, len(cells), header)
                if cells and on_fault is not None:
                    on_fault(_ragged(path, reader.line_num, len(cells), header))
                continue
            yield Row(dict(zip(header, cells, strict=True)), path, reader.line_num, "line")
    except csv.Error as fault:
        raise InvalidInputError(
            f"{place(path, reader.line_num)} is not CSV: {fault}.",
            remedy="close every quote and double the quotes inside a field",
        ) from fault


def read_text(
    stream: IO[bytes], path: Path, _on_fault: Callable[[UserError], None] | None = None
) -> Iterator[Row]:
    """Each line that is not blank is one row with the key `text`."""
    for number, line in enumerate(_decoded_lines(stream, path), start=1):
        text = line.strip()
        if text:
            yield Row({"text": text}, path, number, "line")


def read_parquet(path: Path, meter: Meter | None = None) -> Iterator[Row]:
    """Rows in batches; a column is a key."""
    require_file(path)
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as fault:
        raise EnvironmentFaultError(
            f"Reading {path} needs pyarrow, which is not installed.",
            remedy="pip install 'tightfit[data]'",
        ) from fault
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            size, num_rows = path.stat().st_size, max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH):
                if meter is not None:
                    meter.move_to(size * number // num_rows)
                for values in batch.to_pylist():
                    number += 1
                    yield Row(values, path, number, "row")
    except arrow.ArrowException as fault:
        reason = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        raise InvalidInputError(
            f"{path} is not a whole Parquet file: {reason}",
            remedy="copy or download the file again",
        ) from fault
    except OSError as fault:
        raise unreadable(path, fault) from fault


def _decoded_lines(stream: IO[bytes], path: Path) -> Iterator[str]:
    for number, raw in enumerate(iter_lines(stream, path), start=1):
        try:
            # The line end stays: a quoted CSV field may hold it.
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8") + "\n"
        except UnicodeDecodeError as fault:
            raise wrong_encoding(path, number, fault) from fault


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    if first:
        yield first
    yield from rest


def _header(names: list[str], path: Path) -> list[str]:
    cleaned = [name.strip() for name in names]
    twice = sorted({name for name in cleaned if cleaned.count(name) > 1})
    if not any(cleaned):
        raise InvalidInputError(
            f"{path} has no header line.", remedy="name the columns in line 1: prompt,completion"
        )
    if twice:
        raise InvalidInputError(
            f"{place(path, 1)} names the column `{twice[0]}` twice.",
            remedy="give each column a name of its own",
        )
    return cleaned


def _ragged(path: Path, line: int, found: int, header: list[str]) -> InvalidInputError:
    return InvalidInputError(
        f"{place(path, line)} has {found} columns; the header has {len(header)}"
        f" ({', '.join(header[:6])}).",
        remedy="put a field that holds the delimiter or a line break in double quotes",
    )
