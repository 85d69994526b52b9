"""Prompts of `generate`: lines, rows, or a template over rows, as messages without an answer."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tightfit.core.errors import InvalidInputError, NotFoundError, UsageError, UserError
from tightfit.core.strategy import DataSource
from tightfit.data.formats import (
    ASSISTANT,
    FORMATS,
    SYSTEM,
    USER,
    Conversation,
    Message,
    RowFormat,
    recognise_format,
)
from tightfit.data.readers import (
    Row,
    decoded_lines,
    excerpt,
    file_mode,
    json_type_name,
    open_data,
    read_json_lines,
)
from tightfit.data.sources import holds_rows, open_source, read_part, rows_or_raise
from tightfit.data.tools import Tool

STDIN = "-"


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
    """The system message, where a row has none of its own."""
    is_raw: bool = False
    """A text to be continued: no messages, no chat template."""
    limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question."""

    index: int
    place: str
    """Where it was read, for error messages: `prompts.jsonl line 12`."""
    messages: tuple[Message, ...]
    """Of a raw prompt a single one, whose content is the text."""
    tools: tuple[Tool, ...] = ()
    """That the answer may call."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's own, which its answer brings back; a line of text has none."""

    @property
    def text(self) -> str:
        """Of a raw prompt."""
        return self.messages[0].content


def read_prompts(request: PromptRequest, stdin: IO[bytes] | None = None) -> list[Prompt]:
    """All prompts, in the file's order. Raises rather than give none."""
    found = itertools.islice(_read(request, stdin), request.limit)
    prompts = [
        Prompt(
            index=index,
            place=place,
            messages=_finish(tuple(asked.messages), request, place),
            tools=asked.tools,
            columns=columns,
        )
        for index, (place, asked, columns) in enumerate(found)
    ]
    if not prompts:
        raise InvalidInputError(
            f"{_source_name(request)} holds no prompts.",
            remedy="name a file with one in each line",
        )
    return prompts


def digest_prompts(prompts: Sequence[Prompt]) -> str:
    """One digest over everything that is asked, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        # Columns come back in the answers: with other ones it is another output.
        facts = [prompt.messages, prompt.columns] if prompt.columns else prompt.messages
        digest.update(json.dumps(facts).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


_Asked = tuple[str, Conversation, Mapping[str, Any]]
"""Where a prompt is in the file, its messages and tools, and its row's columns."""


def _read(request: PromptRequest, stdin: IO[bytes] | None) -> Iterator[_Asked]:
    """Every prompt of the file."""
    rows: Iterator[Row] | None = None
    if request.path == STDIN:
        if stdin is None:
            raise UsageError("There is no stdin to read.", remedy="--prompts FILE")
        path, stream = Path("stdin"), io.BytesIO(stdin.read())
        if not request.is_whole and _begins_with_object(stream.getvalue()):
            rows = rows_or_raise(read_json_lines(stream, path))
        else:
            yield from _read_text(stream, path, request)
    else:
        path = Path(request.path).expanduser()
        # A bracket ends the name of a part of a data file: rows.jsonl[:10].
        if path.is_dir() or str(path).endswith("]") or holds_rows(path):
            rows = read_part(open_source(DataSource(path=request.path, text_rows="line")))
        else:
            file_mode(path)
            with open_data(path) as opened:
                yield from _read_text(opened, path, request)
    if rows is None:
        return
    if request.is_whole:
        raise UsageError(
            f"{_source_name(request)} holds rows; `--whole` is for a text file.",
            remedy="leave `--whole` out",
        )
    for row in rows:
        columns = {str(name): _as_json_value(value) for name, value in row.values.items()}
        yield row.place, _row_messages(row, request), columns


def _as_json_value(value: Any) -> Any:
    """A cell as JSON has it: Parquet's times and bytes as text, what is no number as null."""
    if isinstance(value, Mapping):
        return {str(key): _as_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json_value(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def _begins_with_object(data: bytes) -> bool:
    """Stdin has no file name to go by: it has rows where its first line is a JSON object."""
    first = next((line for line in data.splitlines() if line.strip()), b"")
    try:
        return first.lstrip().startswith(b"{") and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _read_text(stream: IO[bytes], path: Path, request: PromptRequest) -> Iterator[_Asked]:
    for option, value in (("--column", request.column), ("--template", request.template)):
        if value is not None:
            raise UsageError(
                f"{_source_name(request)} is plain text, which has no columns for `{option}`.",
                remedy="name a .jsonl, .json, .csv or .parquet file",
            )
    lines = decoded_lines(stream, path)
    if request.is_whole:
        text = "".join(lines).removesuffix("\n")
        if text.strip():
            yield str(path), _question(text), {}
        return
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"{path} line {number}", _question(line.rstrip("\r\n")), {}


def _question(text: str) -> Conversation:
    return Conversation([Message(USER, text)])


def _row_messages(row: Row, request: PromptRequest) -> Conversation:
    """The row's messages up to where the answer belongs, and its tools."""
    if request.template is not None:
        return _question(fill_template(request.template, row.values, row.place))
    if request.column is not None:
        return _question(_cell(row.values, request.column, row.place))
    row_format = _asking_format(row)
    if row_format.name not in ("chat", "text"):
        answer_key = row_format.keys[-1][0]
        row = row._replace(values={**row.values, answer_key: ""})
    messages, tools = row_format.to_conversation(row)
    if row_format.name == "text":  # an answer when it is trained on, here a prompt
        return _question(messages[0].content)
    while messages and messages[-1].role == ASSISTANT:
        messages.pop()
    if not messages:
        raise InvalidInputError(
            f"{row.place} asks nothing: it holds answers alone.",
            remedy="put a user message into that row, or leave it out of the file",
        )
    return Conversation(messages, tools)


def _asking_format(row: Row) -> RowFormat:
    """The row's format; without an answer, the first one whose questions it has."""
    try:
        return recognise_format(row)
    except UserError as error:
        for row_format in FORMATS.values():
            questions = row_format.keys[:-1]
            if questions and all(set(group) & set(row.values) for group in questions):
                return row_format
        raise InvalidInputError(
            f"{row.place} has none of the keys that ask something. Its keys: "
            f"{_list_columns(row.values)}.",
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
        remedy="write columns like {question}, and literal braces as {{ and }}",
    )


def _list_columns(values: Mapping[str, Any]) -> str:
    return ", ".join(f"`{excerpt(key, most=40)}`" for key in list(values)[:12])


def _cell(values: Mapping[str, Any], name: str, place: str) -> str:
    if name not in values:
        raise NotFoundError(
            f"{place} has no column `{name}`.", remedy=f"use one of: {_list_columns(values)}"
        )
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


def _finish(
    messages: tuple[Message, ...], request: PromptRequest, place: str
) -> tuple[Message, ...]:
    """With the system message; a raw prompt must be a single text."""
    if request.is_raw and len(messages) != 1:
        raise InvalidInputError(
            f"{place} is a conversation; `--raw` continues a single text.",
            remedy="leave `--raw` out, or name the text with --column NAME",
        )
    if request.is_raw or request.system is None or messages[0].role == SYSTEM:
        return messages
    return (Message(SYSTEM, request.system), *messages)


def _source_name(request: PromptRequest) -> str:
    return "stdin" if request.path == STDIN else request.path
