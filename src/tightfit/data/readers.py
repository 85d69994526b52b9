"""Rows of JSON, JSON Lines, CSV, TSV, text, Parquet and Arrow files, one at a time."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from tightfit.core.errors import InvalidInputError, SetupError, UserError
from tightfit.core.suggest import did_you_mean
from tightfit.data.streams import (
    MAX_LINE_BYTES,
    ReadMeter,
    Row,
    check_is_text,
    file_size,
    iter_lines,
    not_an_object_error,
    place,
    require_file,
    unreadable,
    wrong_encoding,
)

LIST_KEYS = ("data", "train", "rows", "examples")
"""Where an object that wraps a whole dataset keeps its rows."""
_CHUNK_CHARS = 1 << 18
_SPACES = re.compile(r"[ \t\r\n]*")
_BOM = "\ufeff"


def read_json_lines(
    stream: IO[bytes], path: Path, on_fault: Callable[[UserError], None] | None = None
) -> Iterator[Row]:
    """One object per line; blank lines are passed over, and broken ones where faults are told."""
    for number, raw in enumerate(iter_lines(stream, path), start=1):
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")  # noqa: PLW2901
        if raw and not raw.isspace():
            try:
                value = _parse_line(raw, path, number)
            except InvalidInputError as error:
                if on_fault is None:
                    raise
                on_fault(error)
            else:
                yield Row(value, path, number, "line")


def _parse_line(raw: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise wrong_encoding(path, number, error) from error
    except json.JSONDecodeError as error:
        raise _not_json(path, number, error.msg, f"column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise _not_json(path, number, _why(error), "") from error
    if not isinstance(value, dict):
        raise not_an_object_error(place(path, number), value)
    return value


def read_json(
    stream: IO[bytes], path: Path, on_fault: Callable[[UserError], None] | None = None
) -> Iterator[Row]:
    """A list of objects, an object that holds such a list, or objects one after another.

    Lists and runs of objects are streamed; only an object around a list is held whole.
    """
    text = _Text(stream, path)
    first = text.peek()
    if first == "":
        raise InvalidInputError(f"{path} holds no rows.", remedy="name a file that holds rows")
    if first == "[":
        yield from _read_list(text, path, on_fault)
        return
    line, value = text.value()
    if text.peek() == "":
        yield from _read_wrapped(value, path, line)
        return
    while True:
        if not isinstance(value, dict):
            raise not_an_object_error(place(path, line), value)
        yield Row(value, path, line, "line")
        if text.peek() == "":
            return
        line, value = text.value()


def _read_list(
    text: _Text, path: Path, on_fault: Callable[[UserError], None] | None
) -> Iterator[Row]:
    text.take()
    if text.peek() == "]":
        return
    while True:
        line, value = text.value()
        if isinstance(value, dict):
            yield Row(value, path, line, "line")
        elif on_fault is None:
            raise not_an_object_error(place(path, line), value)
        else:
            on_fault(not_an_object_error(place(path, line), value))
        mark = text.peek()
        if mark not in ("]", ","):
            reason = "the list is cut off" if mark == "" else f"expected `,` or `]`, not `{mark}`"
            raise _not_json(path, text.line, reason, text.column)
        text.take()
        if mark == "]":
            break
    if text.peek():
        raise _not_json(path, text.line, "text after the end of the list", text.column)


def _read_wrapped(value: Any, path: Path, line: int) -> Iterator[Row]:
    if not isinstance(value, dict):
        raise not_an_object_error(place(path, line), value)
    key = next((key for key in LIST_KEYS if isinstance(value.get(key), list)), None)
    lists = [name for name, item in value.items() if _is_list_of_objects(item)]
    if key is None and lists and "messages" not in lists and "conversations" not in lists:
        raise InvalidInputError(
            f"{path} keeps its rows under `{lists[0]}`.{did_you_mean(lists[0], LIST_KEYS)}",
            remedy="rename that key to `data`, or write the rows as JSON Lines",
        )
    if key is None:
        yield Row(value, path, line, "line")
        return
    for number, item in enumerate(value[key], start=1):
        if not isinstance(item, dict):
            raise not_an_object_error(place(path, number, f"`{key}` row"), item)
        yield Row(item, path, number, f"`{key}` row")


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(i, dict) for i in value[:3])


class _Text:
    """A JSON text read piece by piece: a window on the file that slides past decoded values."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream = stream
        self._path = path
        self._decoder = json.JSONDecoder()
        self._bytes = b""
        self._window = ""
        self._at = 0
        self._is_done = False
        self.line = 1
        self._column = 1
        self._fill()
        check_is_text(path, self._window[:4096].encode())
        self._window = self._window.removeprefix(_BOM)

    def peek(self) -> str:
        """The next character that is no space, left in place; empty at the end."""
        while True:
            found = _SPACES.match(self._window, self._at)
            end = found.end() if found else self._at
            self._move(end)
            if end < len(self._window):
                return self._window[end]
            if not self._fill():
                return ""

    def take(self) -> None:
        """Step over the character just peeked."""
        self._move(self._at + 1)

    def value(self) -> tuple[int, Any]:
        """The next JSON value and the line it starts on."""
        if self.peek() == "":
            raise _not_json(self._path, self.line, "the file is cut off", self.column)
        start = self.line
        while True:
            try:
                value, end = self._decoder.raw_decode(self._window, self._at)
            except RecursionError as error:
                raise _not_json(self._path, start, _why(error), "") from error
            except json.JSONDecodeError as error:
                # A cut-off window and a broken text fail alike; only the end of the file tells.
                offset = error.pos - self._at
                if not self._is_cut_off(error) or not self._grow():
                    self._move(min(self._at + offset, len(self._window)))
                    raise _not_json(self._path, self.line, error.msg, self.column) from error
            except ValueError as error:
                raise _not_json(self._path, start, _why(error), "") from error
            else:
                # A bare number may go on in the next chunk.
                if end == len(self._window) and not isinstance(value, dict | list) and self._grow():
                    continue
                self._move(end)
                return start, value

    @property
    def column(self) -> str:
        return f"column {self._column}"

    def _is_cut_off(self, fault: json.JSONDecodeError) -> bool:
        """Could more text mend it? Faults far from the window's end are real, wherever it ends."""
        is_open_string = fault.msg.startswith("Unterminated string")
        return is_open_string or fault.pos >= len(self._window.rstrip()) - 16

    def _grow(self) -> bool:
        """Double what is held, so that decoding anew stays linear in all."""
        held = len(self._window) - self._at
        if held and sys.getsizeof(self._window) >= MAX_LINE_BYTES:
            raise InvalidInputError(
                f"{place(self._path, self.line)} begins one JSON value of more than "
                f"{MAX_LINE_BYTES // 2**20} MiB, or a text that is never closed.",
                remedy="write the rows as JSON Lines, one object per line; "
                f"`jq -c '.data[]' {self._path.name} > rows.jsonl` does so for a list under `data`",
            )
        return self._fill(max(held, _CHUNK_CHARS))

    def _fill(self, num_bytes: int = _CHUNK_CHARS) -> bool:
        """Let go of what was decoded and hold `num_bytes` more, joined once."""
        pieces = [self._window[self._at :]]
        while num_bytes > 0 and not self._is_done:
            chunk = self._stream.read(_CHUNK_CHARS)
            self._is_done = not chunk
            num_bytes -= len(chunk)
            pieces.append(self._decode(chunk, pieces))
        self._window, self._at = "".join(pieces), 0
        return len(pieces) > 1 and len(self._window) > len(pieces[0])

    def _decode(self, chunk: bytes, before: list[str]) -> str:
        data = self._bytes + chunk
        try:
            self._bytes = b""
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            is_split = chunk and error.reason == "unexpected end of data"
            if not is_split:
                line = self.line + sum(piece.count("\n") for piece in before)
                line += data.count(b"\n", 0, error.start)
                raise wrong_encoding(self._path, line, error) from error
            self._bytes = data[error.start :]
            return data[: error.start].decode("utf-8")

    def _move(self, end: int) -> None:
        num_lines = self._window.count("\n", self._at, end)
        if num_lines:
            self.line += num_lines
            self._column = end - self._window.rindex("\n", self._at, end)
        else:
            self._column += end - self._at
        self._at = end


def _why(fault: Exception) -> str:
    return "nested too deeply" if isinstance(fault, RecursionError) else str(fault).split(";")[0]


_SAID_BETTER = {
    "Unterminated string starting at": "a text that begins here is never closed",
    "Invalid control character at": "an invalid control character, like a raw line break in a text",
}
"""Where the library's own words need a position after them."""


def _not_json(path: Path, line: int, reason: str, where: str) -> InvalidInputError:
    at = f" {where}" if where else ""
    said = _SAID_BETTER.get(reason, reason[:1].lower() + reason[1:])
    return InvalidInputError(
        f"{place(path, line)}{at} is not JSON: {said}.",
        remedy=f"correct that line; `python3 -m json.tool --json-lines '{path}'` checks JSON Lines"
        if path.name.endswith(("l", "l.gz"))
        else f"correct that line; `python3 -m json.tool '{path}'` checks the whole file",
    )


# Rows of CSV, TSV, plain text and Parquet files, one at a time.

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
    except csv.Error as error:
        raise InvalidInputError(
            f"{place(path, reader.line_num)} is not CSV: {error}.",
            remedy="close every quote and double the quotes inside a field",
        ) from error


def read_text(
    stream: IO[bytes], path: Path, _on_fault: Callable[[UserError], None] | None = None
) -> Iterator[Row]:
    """Each line that is not blank is one row with the key `text`."""
    for number, line in enumerate(_decoded_lines(stream, path), start=1):
        text = line.strip()
        if text:
            yield Row({"text": text}, path, number, "line")


def read_parquet(path: Path, meter: ReadMeter | None = None) -> Iterator[Row]:
    """Rows in batches; a column is a key."""
    require_file(path)
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise SetupError(
            f"Reading {path} needs pyarrow, which is not installed.",
            remedy="pip install 'tightfit[data]'",
        ) from error
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
    except arrow.ArrowException as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidInputError(
            f"{path} is not a whole Parquet file: {reason}",
            remedy="copy or download the file again",
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


def _decoded_lines(stream: IO[bytes], path: Path) -> Iterator[str]:
    for number, raw in enumerate(iter_lines(stream, path), start=1):
        try:
            # The line end stays: a quoted CSV field may hold it.
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8") + "\n"
        except UnicodeDecodeError as error:
            raise wrong_encoding(path, number, error) from error


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


# Rows of Arrow files, as the `datasets` library saves them: streams or files, one batch held.

_FILE_MAGIC = b"ARROW1"
_STATE = "state.json"


def read_arrow(path: Path, meter: ReadMeter | None = None) -> Iterator[Row]:
    """A column is a key. `save_to_disk` writes the stream format, others the file format."""
    require_file(path)
    try:
        import pyarrow as arrow
    except ImportError as error:
        raise SetupError(
            f"Reading {path} needs pyarrow, which is not installed.",
            remedy="pip install 'tightfit[data]'",
        ) from error
    number, size = 0, file_size(path)
    try:
        with arrow.memory_map(str(path)) as source:
            for batch in _batches(arrow, source):
                if meter is not None:
                    meter.move_to(min(int(source.tell()), size))
                for piece in range(0, batch.num_rows, 1024):
                    for values in batch.slice(piece, 1024).to_pylist():
                        number += 1
                        yield Row(values, path, number, "row")
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise unreadable(path, error) from error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidInputError(
            f"{path} is not a whole Arrow file: {reason}", remedy="save or copy the dataset again"
        ) from error


def _batches(arrow: Any, source: Any) -> Iterator[Any]:
    is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    source.seek(0)
    if not is_file:
        yield from arrow.ipc.open_stream(source)
        return
    reader = arrow.ipc.open_file(source)
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


def saved_files(folder: Path) -> list[str] | None:
    """File names that a saved dataset's `state.json` lists; None where it is no such folder.

    Other Arrow files beside them are caches of `map` and `filter`.
    """
    try:
        state = json.loads((folder / _STATE).read_bytes())
        return [str(item["filename"]) for item in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
