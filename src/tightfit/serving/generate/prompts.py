"""Prompts of `generate`: lines, rows, or a template over rows, as messages without an answer."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tightfit.core.errors import InvalidInputError, NotFoundError, UsageError, UserError
from tightfit.core.training import DataSource
from tightfit.data.formats import (
    ASSISTANT,
    FORMATS,
    SYSTEM,
    USER,
    Message,
    RowFormat,
    recognise_format,
    to_messages,
)
from tightfit.data.readers import read_json_lines
from tightfit.data.sources import open_source, read_file
from tightfit.data.streams import (
    Row,
    excerpt,
    file_mode,
    iter_lines,
    json_type_name,
    open_data,
    wrong_encoding,
)

STDIN = "-"
_ROW_ENDINGS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".pq", ".arrow")
_PACKED_ENDINGS = (".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """Where prompts come from and what is made of them."""

    path: str
    """A file, a folder of rows, or `-` for stdin."""
    is_whole: bool = False
    """A text file is one prompt, not one in each line."""
    column: str | None = None
    """Of rows: the column that is the prompt."""
    template: str | None = None
    """Of rows: text with {column} in it."""
    system: str | None = None
    """Said first where a row has no system message of its own."""
    is_raw: bool = False
    """A text to be continued: no messages, no chat template."""
    limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question."""

    index: int
    place: str
    """Where it stands, for messages: `prompts.jsonl line 12`."""
    messages: tuple[Message, ...]
    """Of a raw prompt a single one, whose content is the text."""

    @property
    def text(self) -> str:
        """What a raw prompt says."""
        return self.messages[0].content


def read_prompts(request: PromptRequest, stdin: IO[bytes] | None = None) -> list[Prompt]:
    """All prompts, in the file's order. Raises rather than give none."""
    found = itertools.islice(_read(request, stdin), request.limit)
    prompts = [
        Prompt(index=index, place=place, messages=_open(messages, request, place))
        for index, (place, messages) in enumerate(found)
    ]
    if not prompts:
        raise InvalidInputError(
            f"{_named(request.path)} holds no prompts.", remedy="name a file with one in each line"
        )
    return prompts


def digest_prompts(prompts: Sequence[Prompt]) -> str:
    """One digest over everything that is asked, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(json.dumps(prompt.messages).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


_Found = tuple[str, tuple[Message, ...]]


def _read(request: PromptRequest, stdin: IO[bytes] | None) -> Iterator[_Found]:
    rows: Iterator[Row] | None
    if request.path == STDIN:
        if stdin is None:
            raise UsageError("There is no stdin to read.", remedy="--prompts FILE")
        data = stdin.read()
        rows = _rows_on_stdin(data, request)
        lines = None if rows is not None else _lines(io.BytesIO(data), Path("stdin"), request)
    else:
        path = Path(request.path).expanduser()
        rows = _rows_of(request) if _holds_rows(path) else None
        lines = None if rows is not None else _lines_of(path, request)
    if rows is not None:
        if request.is_whole:
            raise UsageError(
                f"{_named(request.path)} holds rows; `--whole` is for a text file.",
                remedy="leave `--whole` out",
            )
        for row in rows:
            yield row.place, tuple(_of_row(row, request))
    elif lines is not None:
        yield from lines


def _holds_rows(path: Path) -> bool:
    if path.is_dir() or str(path).endswith("]"):  # a part of a data file: rows.jsonl[:10]
        return True
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in _PACKED_ENDINGS:
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in _ROW_ENDINGS


def _rows_of(request: PromptRequest) -> Iterator[Row]:
    opened = open_source(DataSource(path=request.path))
    rows = itertools.chain.from_iterable(map(read_file, opened.files))
    take = opened.take
    if take.needs_count:
        total = sum(1 for path in opened.files for _ in read_file(path))
        return itertools.islice(rows, *take.range(total, opened.name))
    return itertools.islice(rows, *take.range(None, opened.name))


def _rows_on_stdin(data: bytes, request: PromptRequest) -> Iterator[Row] | None:
    """Stdin has no file name to go by: rows where its first line is a JSON object."""
    first = next((line for line in data.splitlines() if line.strip()), b"")
    try:
        is_object = first.lstrip().startswith(b"{") and isinstance(json.loads(first), dict)
    except ValueError:
        is_object = False
    if not is_object or request.is_whole:
        return None
    return read_json_lines(io.BytesIO(data), Path("stdin"))


def _lines_of(path: Path, request: PromptRequest) -> Iterator[_Found]:
    file_mode(path)
    with open_data(path) as stream:
        yield from _lines(stream, path, request)


def _lines(stream: IO[bytes], path: Path, request: PromptRequest) -> Iterator[_Found]:
    for option, value in (("--column", request.column), ("--template", request.template)):
        if value is not None:
            raise UsageError(
                f"{_named(request.path)} is plain text, which has no columns for `{option}`.",
                remedy="name a .jsonl, .json, .csv or .parquet file",
            )
    if request.is_whole:
        text = _decode(b"\n".join(iter_lines(stream, path)), path, 1)
        if text.strip():
            yield str(path), (Message(USER, text),)
        return
    for number, raw in enumerate(iter_lines(stream, path), start=1):
        line = _decode(raw, path, number).rstrip("\r\n")
        if line.strip():
            yield f"{path} line {number}", (Message(USER, line),)


def _decode(raw: bytes, path: Path, number: int) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise wrong_encoding(path, number, error) from error


def _of_row(row: Row, request: PromptRequest) -> list[Message]:
    if request.template is not None:
        return [Message(USER, fill_template(request.template, row.values, row.place))]
    if request.column is not None:
        return [Message(USER, _cell(row.values, request.column, row.place))]
    asked, row_format = _without_answer(row)
    messages = to_messages(asked, row_format)
    if row_format.name == "text":
        return [Message(USER, messages[0].content)]  # read as an answer when it is trained on
    while messages and messages[-1].role == ASSISTANT:
        messages.pop()
    if not messages:
        raise InvalidInputError(
            f"{row.place} asks nothing: it holds answers alone.",
            remedy="put a user message into that row, or leave it out of the file",
        )
    return messages


def _without_answer(row: Row) -> tuple[Row, RowFormat]:
    """The row with its answer emptied, in the format whose questions it has."""
    row_format = _asking_format(row)
    if row_format.name in ("chat", "text"):
        return row, row_format
    emptied = {row_format.keys[-1][0]: ""}
    return row._replace(values={**row.values, **emptied}), row_format


def _asking_format(row: Row) -> RowFormat:
    try:
        return recognise_format(row)
    except UserError as error:
        held = set(row.values)
        for row_format in FORMATS:
            questions = row_format.keys[:-1]
            if questions and all(held.intersection(group) for group in questions):
                return row_format
        raise InvalidInputError(
            f"{row.place} has none of the keys that ask something. Its keys: "
            f"{', '.join(f'`{excerpt(key, most=40)}`' for key in list(row.values)[:12])}.",
            remedy="--column NAME, or --template-text 'Answer this: {NAME}'",
        ) from error


def fill_template(template: str, values: Mapping[str, Any], place: str) -> str:
    """`template` with each {column} replaced by the row's value; {{ and }} are braces."""
    pieces: list[str] = []
    for literal, name, _, _ in _parse(template):
        pieces.append(literal)
        if name is not None:
            pieces.append(_cell(values, name, place))
    return "".join(pieces)


def check_template(template: str) -> None:
    """Raise where a template can never be filled, before any row is read."""
    columns = [part for part in _parse(template) if part[1] is not None]
    for _, name, spec, conversion in columns:
        if spec or conversion or not name:
            raise _bad_template(f"`{{{name}}}` is no plain column name")
    if not columns:
        raise _bad_template("it names no column, so that every prompt would be the same")


def _parse(template: str) -> list[tuple[str, str | None, str | None, str | None]]:
    try:
        return list(string.Formatter().parse(template))
    except ValueError as error:
        raise _bad_template(str(error)) from error


def _bad_template(why: str) -> InvalidInputError:
    return InvalidInputError(
        f"The prompt template cannot be used: {why}.",
        remedy="write columns like {question}, and braces that mean themselves as {{ and }}",
    )


def _cell(values: Mapping[str, Any], name: str, place: str) -> str:
    if name not in values:
        held = ", ".join(f"`{excerpt(key, most=40)}`" for key in list(values)[:12])
        raise NotFoundError(f"{place} has no column `{name}`.", remedy=f"use one of: {held}")
    value = values[name]
    if isinstance(value, str):
        return value
    if value is None:
        raise InvalidInputError(
            f"{place}: the column `{name}` is empty.", remedy="fill it in, or leave that row out"
        )
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"{place}: the column `{name}` holds {json_type_name(value)}, which has no text.",
            remedy="name a column that holds text",
        ) from error


def _open(messages: tuple[Message, ...], request: PromptRequest, place: str) -> tuple[Message, ...]:
    if request.is_raw:
        if len(messages) != 1:
            raise InvalidInputError(
                f"{place} is a conversation; `--raw` continues a single text.",
                remedy="leave `--raw` out, or name the text with --column NAME",
            )
        return messages
    if request.system is None or messages[0].role == SYSTEM:
        return messages
    return (Message(SYSTEM, request.system), *messages)


def _named(path: str) -> str:
    return "stdin" if path == STDIN else path
