"""Which kind of example a row is, told by its keys, and the messages it stands for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tightfit.core.errors import InvalidInputError
from tightfit.core.suggest import nearest
from tightfit.data.streams import Row, excerpt, json_type_name

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"

_ROLES = {
    "system": SYSTEM,
    "developer": SYSTEM,
    "user": USER,
    "human": USER,
    "prompter": USER,
    "assistant": ASSISTANT,
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
    "bot": ASSISTANT,
    "function_call": ASSISTANT,
    "tool": TOOL,
    "function": TOOL,
    "observation": TOOL,
    "ipython": TOOL,
}


_THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")

SUMMARY_REQUEST = "Summarize this:"
"""Said before a dialogue or article: alone, it does not tell a model what is wanted of it."""


class Message(NamedTuple):
    """One turn. `role` is `system`, `user`, `assistant` or `tool`."""

    role: str
    content: str


class Turns(NamedTuple):
    """A row reduced to what length counting needs: all that is read, all that is learnt."""

    prompt: str
    answer: str
    num_messages: int
    """Zero for plain text, which no chat template wraps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """One way to write examples. Of each group in `keys`, a row holds at least one name."""

    name: str
    keys: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...] = ()
    example: str

    def matches(self, names: Iterable[str]) -> bool:
        held = set(names)
        return all(held.intersection(group) for group in self.keys)


FORMATS = (
    RowFormat(
        name="chat",
        keys=(("messages", "conversations", "conversation"),),
        example='{"messages": [{"role": "user", "content": "..."}, ...]}',
    ),
    RowFormat(
        name="alpaca",
        keys=(("instruction",), ("output", "response")),
        optional=("input", "context", "system"),
        example='{"instruction": "...", "input": "...", "output": "..."}',
    ),
    RowFormat(
        name="question-context-answer",
        keys=(("question",), ("context",), ("answer", "answers", "query")),
        example='{"question": "...", "context": "...", "answer": "..."}',
    ),
    RowFormat(
        name="dialogue-summary",
        keys=(("dialogue", "document", "article"), ("summary", "highlights")),
        example='{"dialogue": "...", "summary": "..."}',
    ),
    RowFormat(
        name="prompt-completion",
        keys=(
            ("prompt", "question", "query", "input"),
            ("completion", "response", "answer", "output"),
        ),
        optional=("system",),
        example='{"prompt": "...", "completion": "..."}',
    ),
    RowFormat(name="text", keys=(("text", "content"),), example='{"text": "..."}'),
)
_BY_NAME = {row_format.name: row_format for row_format in FORMATS}


def recognise_format(row: Row) -> RowFormat:
    """The first known format whose keys the row has."""
    for row_format in FORMATS:
        if row_format.matches(row.values):
            return row_format
    raise _unknown(row)


def format_named(name: str) -> RowFormat:
    """A format by its name, as `DataProfile.format` says it."""
    return _BY_NAME[name]


def to_messages(row: Row, row_format: RowFormat) -> list[Message]:
    """The conversation a row stands for; plain text is one assistant message."""
    groups = [_value(row, row_format, group) for group in row_format.keys]
    if row_format.name == "chat":
        return _messages(row, groups[0])
    if row_format.name == "text":
        return [Message(ASSISTANT, _text(row, "text", groups[0]))]
    opening = [Message(SYSTEM, text)] if (text := _optional(row, "system")) else []
    if row_format.name == "prompt-completion" and isinstance(groups[0], list):
        return opening + _messages(row, groups[0]) + _as_answer(row, groups[1])
    prompt = "\n\n".join(_text(row, "prompt", value) for value in groups[:-1])
    if row_format.name == "alpaca":
        extra = _optional(row, "input") or _optional(row, "context")
        prompt = f"{prompt}\n\n{extra}" if extra else prompt
    if row_format.name == "dialogue-summary":
        prompt = f"{SUMMARY_REQUEST}\n\n{prompt}"
    return [*opening, Message(USER, prompt), *_as_answer(row, groups[-1])]


def to_turns(row: Row, row_format: RowFormat) -> Turns:
    """What is read and what is learnt, as two texts: every assistant message is learnt."""
    messages = to_messages(row, row_format)
    if row_format.name == "text":
        return Turns("", messages[0].content, 0)
    answer = "\n".join(message.content for message in messages if message.role == ASSISTANT)
    prompt = "\n".join(message.content for message in messages if message.role != ASSISTANT)
    return Turns(prompt, answer, len(messages))


def _value(row: Row, row_format: RowFormat, group: tuple[str, ...]) -> Any:
    for key in group:
        if key in row.values:
            return row.values[key]
    wanted = " or ".join(f"`{key}`" for key in group)
    raise InvalidInputError(
        f"{row.place} lacks {wanted}; the rows before it are {row_format.name}. "
        f"It has: {_listed(row.values)}.",
        remedy=f"write every row of one file alike: {row_format.example}",
    )


def _as_answer(row: Row, value: Any) -> list[Message]:
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return _messages(row, value)
    if isinstance(value, Mapping) and "text" in value:  # SQuAD keeps its answers in a list there
        value = value["text"]
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        value = json.dumps(value)  # an answer may be a bare number; NaN is a missing one
    return [Message(ASSISTANT, _text(row, "the answer", value))]


def _messages(row: Row, value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else f"{json_type_name(value)}: {excerpt(value)}"
        raise _bad(row, f"expected a list of messages, found {found}")
    return [_message(row, item, number) for number, item in enumerate(value, start=1)]


def _message(row: Row, item: Any, number: int) -> Message:
    if not isinstance(item, Mapping):
        raise _bad(row, f"message {number} is {json_type_name(item)}, not an object")
    role = item.get("role", item.get("from"))
    known = _ROLES.get(role.lower()) if isinstance(role, str) else None
    if known is None:
        near = nearest(role, _ROLES) if isinstance(role, str) else []
        hint = f"; did you mean `{near[0]}`" if near else ""
        found = "no `role`" if role is None else f"the unknown role `{excerpt(role)}`"
        raise _bad(row, f"message {number} has {found}{hint}")
    content = item.get("content", item.get("value"))
    if isinstance(content, list):
        content = _parts(row, content, number)
    if known == ASSISTANT and isinstance(thought := _thought(item), str) and thought.strip():
        content = f"<think>\n{thought.strip()}\n</think>\n\n{content or ''}"
    calls = item.get("tool_calls")
    if calls:
        content = (content or "") + json.dumps(calls, default=str)
    if content is None and not any(key in item for key in ("content", "value", "tool_calls")):
        raise _bad(row, f"message {number} has no `content`")
    return Message(known, _text(row, f"message {number}", "" if content is None else content))


def _thought(item: Mapping[str, Any]) -> Any:
    """Reasoning kept apart from the answer. Reasoning models write it before, between tags
    (Qwen3's and DeepSeek-R1's chat templates), and their templates know it in the text."""
    return next((item[key] for key in _THOUGHT_KEYS if item.get(key) is not None), None)


def _parts(row: Row, parts: list[Any], number: int) -> str:
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise _bad(row, f"message {number} holds a part that is not text")
        texts.append(text)
    return "".join(texts)


def _optional(row: Row, key: str) -> str:
    value = row.values.get(key)
    return "" if value is None else _text(row, key, value)


def _text(row: Row, key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise _bad(row, f"expected text as {key}, found {json_type_name(value)}: {excerpt(value)}")


def _bad(row: Row, problem: str) -> InvalidInputError:
    return InvalidInputError(
        f"{row.place}: {problem}.", remedy="correct that row, or leave it out of the file"
    )


def _unknown(row: Row) -> InvalidInputError:
    known = sorted({key for row_format in FORMATS for group in row_format.keys for key in group})
    hints = [
        f"`{key}`: did you mean `{near[0]}`?"
        for key in list(row.values)[:20]
        if key not in known and (near := nearest(str(key), known, most=1))
    ]
    examples = "; ".join(f"{item.name} {item.example}" for item in FORMATS)
    return InvalidInputError(
        f"{row.place} is in no known format. Its keys: {_listed(row.values)}."
        + ("" if not hints else " " + " ".join(hints)),
        remedy=f"rename the keys to one of: {examples}",
    )


def _listed(names: Iterable[str]) -> str:
    held = [f"`{excerpt(name, most=40)}`" for name in names]
    more = f" and {len(held) - 12} more" if len(held) > 12 else ""
    return (", ".join(held[:12]) + more) or "none"
