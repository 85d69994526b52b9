"""Row formats, one record each: the keys it has, and how a row becomes messages."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tightfit.core.errors import InvalidInputError
from tightfit.core.text import list_some, nearest
from tightfit.data.call_syntax import HERMES
from tightfit.data.readers import Row, excerpt, json_type_name
from tightfit.data.tools import (
    Tool,
    ToolCall,
    ToolError,
    drop_filled_nulls,
    enclosed,
    read_calls,
    read_literal,
    read_tools,
    tool_names,
)

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
    "tool_call": ASSISTANT,
    "tool": TOOL,
    "tool_response": TOOL,
    "function": TOOL,
    "observation": TOOL,
    "ipython": TOOL,
}
_CALL_ROLES = ("function_call", "tool_call")
"""ShareGPT's: the text is the call, as JSON."""

THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
"""What data and templates call reasoning that is kept apart from the answer."""
TOOL_KEYS = ("tools", "functions")

SUMMARY_REQUEST = "Summarize this:"
"""Put before a dialogue or article, which alone does not say what is wanted of a model."""


class Message(NamedTuple):
    """One turn. `role` is `system`, `user`, `assistant` or `tool`."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """Kept apart from the answer."""
    name: str = ""
    """Of the tool whose result this is."""
    call_id: str = ""
    """Of the call whose result this is."""

    @property
    def is_empty(self) -> bool:
        """Neither text nor calls."""
        return not (self.tool_calls or self.content.strip() or self.reasoning.strip())

    @property
    def text(self) -> str:
        """Reasoning, content and calls as one text: for counting and for showing."""
        calls = (call.as_json() for call in self.tool_calls)
        return "\n".join(part for part in (self.reasoning, self.content, *calls) if part)

    def as_object(self, thought: str = THOUGHT_KEYS[0]) -> dict[str, Any]:
        """As data files, OpenAI's clients and transformers' templates have it."""
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            found[thought] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                    **({"id": call.id} if call.id else {}),
                }
                for call in self.tool_calls
            ]
        if self.name:
            found["name"] = self.name
        if self.call_id:
            found["tool_call_id"] = self.call_id
        return found

    @classmethod
    def restore(cls, fields: Sequence[Any]) -> Message:
        """From the list that JSON makes of one."""
        message = cls(*fields)
        return message._replace(tool_calls=tuple(ToolCall(*call) for call in message.tool_calls))


class Conversation(NamedTuple):
    """Messages, and the tools that the assistant may call."""

    messages: list[Message]
    tools: tuple[Tool, ...] = ()

    def first(self, count: int) -> Conversation:
        """Up to a message, with the same tools."""
        return Conversation(self.messages[:count], self.tools)


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


_SAYING_KEYS = ("content", "value", "tool_calls", "function_call")


def _holds_objects(values: list[Any]) -> bool:
    return bool(values) and isinstance(values[0], Mapping)


def _holds_parts(content: list[Any]) -> bool:
    return all(isinstance(part, Mapping) and "text" in part for part in content)


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
    if isinstance(content, list) and (known != TOOL or _holds_parts(content)):
        content = _parts(row, content, number)
    if content is None and not any(key in item for key in _SAYING_KEYS):
        raise _bad(row, f"message {number} has no `content`")
    if known == TOOL and content is not None and not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)  # a result may be any value
    text = _text(row, f"message {number}", "" if content is None else content)
    if known == TOOL:
        name, call_id = item.get("name"), item.get("tool_call_id")
        return Message(
            known,
            text,
            name=name if isinstance(name, str) else "",
            call_id=call_id if isinstance(call_id, str) else "",
        )
    if known != ASSISTANT:
        return Message(known, text)
    thought = next((item[key] for key in THOUGHT_KEYS if item.get(key) is not None), None)
    calls = item.get("tool_calls") or item.get("function_call")
    if not calls and role.lower() in _CALL_ROLES:
        calls, text = text, ""
    try:
        made = read_calls(calls) if calls else ()
    except ToolError as error:
        raise _bad(row, f"message {number}: {error}") from None
    return Message(known, text, made, reasoning=thought.strip() if isinstance(thought, str) else "")


def _parts(row: Row, parts: list[Any], number: int) -> str:
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise _bad(row, f"message {number} holds a part that is not text")
        texts.append(text)
    return "".join(texts)


# Tools of a row: its column, or Hermes' text, and whether calls and results fit them.


def read_conversation(row: Row, messages: list[Message]) -> Conversation:
    """Messages with the tools that their row lists; calls and results are checked."""
    given = next((row.values[key] for key in TOOL_KEYS if row.values.get(key) is not None), None)
    try:
        tools = row.tools if given is None else read_tools(given)
        messages, tools = _read_hermes(messages, tools)
        return Conversation(_checked(messages, tools), tools)
    except ToolError as error:
        raise _bad(row, str(error)) from None


_TOOLS_MARKS = ("<tools>", "</tools>")
_RESPONSE_MARKS = ("<tool_response>", "</tool_response>")
_CALL_END = "</tool_call>"
_TOOLS_HEADING = (
    "You may call one or more functions to assist with the user query.",
    "# Tools",
)
"""What Qwen's template writes before its tools, the last line first."""


def _read_hermes(
    messages: list[Message], tools: tuple[Tool, ...]
) -> tuple[list[Message], tuple[Tool, ...]]:
    """Tools in the system text, `<tool_call>` in answers and `<tool_response>` in results.

    Only where tools are known: elsewhere such text may be what the row is about.
    """
    if messages and messages[0].role == SYSTEM:
        system, declared = _tools_in_text(messages[0].content)
        if declared or (tools and system != messages[0].content):
            opening = [Message(SYSTEM, system)] if system else []
            messages, tools = opening + messages[1:], tools or declared
    if not tools:
        return messages, tools
    read: list[Message] = []
    for message in messages:
        if message.role == ASSISTANT and not message.tool_calls:
            read.append(_calls_in_text(message))
        elif message.role in (TOOL, USER) and _RESPONSE_MARKS[0] in message.content:
            read += _results_in_text(message)
        else:
            read.append(message)
    return read, tools


def _results_in_text(message: Message) -> list[Message]:
    """Each marked result as a message; a user's message only where it holds nothing else."""
    found = list(enclosed(message.content, *_RESPONSE_MARKS))
    ends = [0, *(end for _, _, end in found)]
    starts = [*(start for start, _, _ in found), len(message.content)]
    rest = "".join(message.content[a:b] for a, b in zip(ends, starts, strict=True)).strip()
    if not found or (rest and message.role != TOOL):
        return [message]
    return [message._replace(role=TOOL, content=text.strip()) for _, text, _ in found]


def _tools_in_text(text: str) -> tuple[str, tuple[Tool, ...]]:
    """The system text without the declaration of its tools, and these."""
    for _, inside, end in enclosed(text, *_TOOLS_MARKS):
        body = inside.strip()
        if not body.startswith(("[", "{")):
            continue  # the tag is only mentioned
        try:
            value = read_literal(body)
        except ToolError:  # one schema a line, as Qwen's template writes them
            value = [read_literal(line) for line in body.splitlines() if line.strip()]
        first = text.find(_TOOLS_MARKS[0])
        sentence = max(text.rfind(".", 0, first), text.rfind("\n", 0, first)) + 1
        before = text[:sentence].strip()
        for heading in _TOOLS_HEADING:
            before = before.removesuffix(heading).rstrip()
        # How to write a call, which the model's own template says in its own way.
        after = text[end:]
        after = after[after.rfind(_CALL_END) + len(_CALL_END) :] if _CALL_END in after else after
        kept = (before, after.strip())
        return "\n\n".join(part for part in kept if part), read_tools(value)
    return text, ()


def _calls_in_text(message: Message) -> Message:
    if HERMES.starts[0] not in message.content:
        return message
    try:
        parsed = HERMES.parse(message.content)
    except ToolError as error:
        raise ToolError(f"a tool call in the text {error}") from None
    return message._replace(content=parsed.content, tool_calls=parsed.calls)


def _checked(messages: list[Message], tools: tuple[Tool, ...]) -> list[Message]:
    """Results with the name and id of their calls, which are of listed tools."""
    names = tool_names(tools)
    checked: list[Message] = []
    for number, message in enumerate(messages, start=1):
        for call in message.tool_calls:
            if call.name not in names:
                listed = _listed(names) if names else "none"
                raise ToolError(
                    f"message {number} calls `{excerpt(call.name)}`, which is not listed in "
                    f"`tools` ({listed})"
                )
        calls = tuple(drop_filled_nulls(call, tools) for call in message.tool_calls)
        checked.append(message._replace(tool_calls=calls) if calls else message)
    # Without tools, a result may answer to a call that is written as text.
    has_calls = bool(tools) or any(message.tool_calls for message in messages)
    return link_results(checked) if has_calls else checked


def link_results(messages: Sequence[Message]) -> list[Message]:
    """Results with the name and id of their calls. Raises `ToolError` for one without a call."""
    linked: list[Message] = []
    waiting: list[ToolCall] = []
    for number, given in enumerate(messages, start=1):
        message = given
        if message.tool_calls:
            waiting = list(message.tool_calls)
        elif message.role == TOOL:
            message = _linked(message, waiting, number)
        else:
            waiting = []
        linked.append(message)
    return linked


def _linked(message: Message, waiting: list[ToolCall], number: int) -> Message:
    """The result of the call with its id; without an id, of the first that has none yet."""
    if not waiting:
        raise ToolError(f"message {number} is a tool's result without a call before it")
    at = 0
    if message.call_id and any(call.id for call in waiting):
        known = [call.id for call in waiting]
        if message.call_id not in known:
            raise ToolError(
                f"message {number} is the result of `{excerpt(message.call_id)}`, a call that "
                "was not made before it"
            )
        at = known.index(message.call_id)
    call = waiting.pop(at)
    return message._replace(name=call.name, call_id=call.id)


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

    def to_conversation(self, row: Row) -> Conversation:
        """The messages and tools that a row holds; plain text is one assistant message."""
        values = [self._value(row, group) for group in self.keys]
        messages = self.make(row, values)
        if row.tools and self.name == "text":
            raise _bad(row, "plain text calls no tools, and the source names a file of them")
        # Beside plain questions, a column called `tools` may be about anything.
        has_turns = any(isinstance(value, list) and _holds_objects(value) for value in values)
        if not has_turns and row.tools:
            kept = {key: value for key, value in row.values.items() if key not in TOOL_KEYS}
            return read_conversation(row._replace(values=kept), messages)
        return read_conversation(row, messages) if has_turns else Conversation(messages)

    def to_messages(self, row: Row) -> list[Message]:
        """As `to_conversation`, where tools play no part."""
        return self.to_conversation(row).messages

    def to_turns(self, row: Row) -> Turns:
        """What is read and what is learnt, as two texts: every assistant message is learnt."""
        messages, tools = self.to_conversation(row)
        if self.name == "text":
            return Turns("", messages[0].content, 0)
        answer = "\n".join(message.text for message in messages if message.role == ASSISTANT)
        asked = [message.content for message in messages if message.role != ASSISTANT]
        prompt = "\n".join([*(json.dumps(tool, default=str) for tool in tools), *asked])
        return Turns(prompt, answer, len(messages))

    def _value(self, row: Row, group: tuple[str, ...]) -> Any:
        return row.values[self.find_key(row, group)]

    def find_key(self, row: Row, group: tuple[str, ...]) -> str:
        """The first name of a group that the row has."""
        for key in group:
            if key in row.values:
                return key
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


def recognise_format(row: Row, formats: Sequence[RowFormat] = tuple(FORMATS.values())) -> RowFormat:
    """The first of these formats whose keys the row has."""
    found = next((row_format for row_format in formats if row_format.matches(row.values)), None)
    if found is not None:
        return found
    known = sorted({key for row_format in formats for group in row_format.keys for key in group})
    hints = [
        f"`{key}`: did you mean `{near[0]}`?"
        for key in list(row.values)[:20]
        if key not in known and (near := nearest(str(key), known, most=1))
    ]
    examples = "; ".join(f"{item.name} {item.example}" for item in formats)
    raise InvalidInputError(
        f"{row.place} is in no known format. Its keys: {_listed(row.values)}."
        + ("" if not hints else " " + " ".join(hints)),
        remedy=f"rename the keys to one of: {examples}",
    )
