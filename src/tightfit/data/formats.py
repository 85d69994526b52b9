"""Row formats, one record each: the keys it has, and how a row becomes messages."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tightfit.core.errors import InvalidInputError
from tightfit.core.text import list_some, nearest
from tightfit.data.readers import Row, excerpt, json_type_name

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
"""Put before a dialogue or article, which alone does not say what is wanted of a model."""


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
    # Reasoning kept apart from the answer. Reasoning models write it before, between tags
    # (Qwen3's and DeepSeek-R1's chat templates), and their templates know it in the text.
    thought = next((item[key] for key in _THOUGHT_KEYS if item.get(key) is not None), None)
    if known == ASSISTANT and isinstance(thought, str) and thought.strip():
        content = f"<think>\n{thought.strip()}\n</think>\n\n{content or ''}"
    calls = item.get("tool_calls")
    if calls:
        content = (content or "") + json.dumps(calls, default=str)
    if content is None and not any(key in item for key in ("content", "value", "tool_calls")):
        raise _bad(row, f"message {number} has no `content`")
    return Message(known, _text(row, f"message {number}", "" if content is None else content))


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
    shown = "" if value is None else f": {excerpt(value)}"
    raise _bad(row, f"expected text as {key}, found {json_type_name(value)}{shown}")


def _bad(row: Row, problem: str) -> InvalidInputError:
    return InvalidInputError(
        f"{row.place}: {problem}.", remedy="correct that row, or leave it out of the file"
    )


def _listed(names: Iterable[str]) -> str:
    return list_some([f"`{excerpt(name, most=40)}`" for name in names], most=12) or "none"


# The records. Each function takes a row and the values of its key groups, in order.

Make = Callable[[Row, list[Any]], list[Message]]


def _from_chat(row: Row, values: list[Any]) -> list[Message]:
    return _messages(row, values[0])


def _from_text(row: Row, values: list[Any]) -> list[Message]:
    return [Message(ASSISTANT, _text(row, "text", values[0]))]


def _from_prompt(row: Row, values: list[Any]) -> list[Message]:
    """All texts but the last are the prompt, the last is the answer."""
    opening = [Message(SYSTEM, text)] if (text := _optional(row, "system")) else []
    if isinstance(values[0], list) and len(values) == 2:
        return opening + _messages(row, values[0]) + _as_answer(row, values[1])
    prompt = "\n\n".join(_text(row, "prompt", value) for value in values[:-1])
    return [*opening, Message(USER, prompt), *_as_answer(row, values[-1])]


def _from_alpaca(row: Row, values: list[Any]) -> list[Message]:
    prompt, answer = _text(row, "prompt", values[0]), values[1]
    extra = _optional(row, "input") or _optional(row, "context")
    return _from_prompt(row, [prompt, extra, answer] if extra else [prompt, answer])


def _from_dialogue(row: Row, values: list[Any]) -> list[Message]:
    return _from_prompt(row, [SUMMARY_REQUEST, *values])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """One way to write examples. Of each group in `keys`, a row holds at least one name."""

    name: str
    keys: tuple[tuple[str, ...], ...]
    example: str
    make: Make
    title: str = ""
    """What `prepare` calls it, where its name says too little."""

    def matches(self, names: Iterable[str]) -> bool:
        held = set(names)
        return all(held.intersection(group) for group in self.keys)

    def to_messages(self, row: Row) -> list[Message]:
        """The conversation that a row holds; plain text is one assistant message."""
        return self.make(row, [self._value(row, group) for group in self.keys])

    def to_turns(self, row: Row) -> Turns:
        """What is read and what is learnt, as two texts: every assistant message is learnt."""
        messages = self.to_messages(row)
        if self.name == "text":
            return Turns("", messages[0].content, 0)
        answer = "\n".join(message.content for message in messages if message.role == ASSISTANT)
        prompt = "\n".join(message.content for message in messages if message.role != ASSISTANT)
        return Turns(prompt, answer, len(messages))

    def _value(self, row: Row, group: tuple[str, ...]) -> Any:
        for key in group:
            if key in row.values:
                return row.values[key]
        wanted = " or ".join(f"`{key}`" for key in group)
        raise InvalidInputError(
            f"{row.place} lacks {wanted}; the rows before it are {self.name}. "
            f"It has: {_listed(row.values)}.",
            remedy=f"write every row of one file alike: {self.example}",
        )


FORMATS = {
    row_format.name: row_format
    for row_format in (
        RowFormat(
            name="chat",
            keys=(("messages", "conversations", "conversation"),),
            example='{"messages": [{"role": "user", "content": "..."}, ...]}',
            make=_from_chat,
            title="conversations (messages)",
        ),
        RowFormat(
            name="alpaca",
            keys=(("instruction",), ("output", "response")),
            example='{"instruction": "...", "input": "...", "output": "..."}',
            make=_from_alpaca,
            title="Alpaca (instruction, input, output)",
        ),
        RowFormat(
            name="question-context-answer",
            keys=(("question",), ("context",), ("answer", "answers", "query")),
            example='{"question": "...", "context": "...", "answer": "..."}',
            make=_from_prompt,
            title="question, context, answer",
        ),
        RowFormat(
            name="dialogue-summary",
            keys=(("dialogue", "document", "article"), ("summary", "highlights")),
            example='{"dialogue": "...", "summary": "..."}',
            make=_from_dialogue,
            title="dialogue, summary",
        ),
        RowFormat(
            name="prompt-completion",
            keys=(
                ("prompt", "question", "query", "input"),
                ("completion", "response", "answer", "output"),
            ),
            example='{"prompt": "...", "completion": "..."}',
            make=_from_prompt,
            title="prompt, completion",
        ),
        RowFormat(
            name="text",
            keys=(("text", "content"),),
            example='{"text": "..."}',
            make=_from_text,
            title="plain text",
        ),
    )
}
"""By name; the first that matches a row is its format."""


def recognise_format(row: Row) -> RowFormat:
    """The first known format whose keys the row has."""
    found = next(
        (row_format for row_format in FORMATS.values() if row_format.matches(row.values)), None
    )
    if found is not None:
        return found
    known = sorted(
        {key for row_format in FORMATS.values() for group in row_format.keys for key in group}
    )
    hints = [
        f"`{key}`: did you mean `{near[0]}`?"
        for key in list(row.values)[:20]
        if key not in known and (near := nearest(str(key), known, most=1))
    ]
    examples = "; ".join(f"{item.name} {item.example}" for item in FORMATS.values())
    raise InvalidInputError(
        f"{row.place} is in no known format. Its keys: {_listed(row.values)}."
        + ("" if not hints else " " + " ".join(hints)),
        remedy=f"rename the keys to one of: {examples}",
    )
