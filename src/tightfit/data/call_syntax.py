"""How models write tool calls, one record each: its marks, and how an answer's text is parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tightfit.data.grammar import Node, Repeat, choice, sequence
from tightfit.data.tools import (
    ToolCall,
    ToolError,
    check_depth,
    enclosed,
    load_json,
    make_decoder,
    read_calls,
    read_literal,
)


class ParsedAnswer(NamedTuple):
    """An answer's text taken apart."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """Where the syntax keeps it apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """What the grammar of a request's calls is made of."""

    arguments: Mapping[str, Node]
    """By the tool's name."""
    most: int
    """Calls in one answer."""
    template: str
    """Of the model, where a syntax has variants."""

    def calls(self, write_call: Callable[[str, Node], Node], separator: str = "") -> Node:
        """One call or several, of any of the tools."""
        one = choice(
            *(write_call(name, arguments) for name, arguments in self.arguments.items()),
            is_distinct=True,
        )
        if self.most == 1:
            return one
        return sequence(one, Repeat(sequence(separator, one), 0, self.most - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """One way to write calls."""

    name: str
    template_marks: tuple[tuple[str, ...], ...]
    """A chat template that holds all texts of one of these groups writes calls this way."""
    starts: tuple[str, ...]
    """Texts at which calls begin; behind the first one there is no content."""
    control: tuple[str, ...] = ()
    """Control tokens that the parser reads: engines leave them in the text."""
    is_bare: bool = False
    """An answer that begins as JSON may be a call without any mark."""
    answer_start: str = ""
    """What is before it is not content."""
    thought: tuple[str, str] | None = None
    """Marks around reasoning, which stands first and is not content."""
    read: Callable[[str], ParsedAnswer]
    write: Callable[[CallForm], Node] | None = None
    """The grammar of one call or several; None where none is known."""

    def parse(self, text: str) -> ParsedAnswer:
        """Content and calls. Raises `ToolError` for a call that is begun and malformed."""
        try:
            return self.read(text)
        except RecursionError:
            raise ToolError("is nested too deep") from None

    def may_begin_call(self, text: str) -> bool:
        """Whether an answer that begins so may turn out to be a call without a mark."""
        begun = text.lstrip()
        return self.is_bare and (not begun or begun[0] in "{[`")


# JSON inside marks.

_DECODER = make_decoder()
_SPACE = re.compile(r"\s*")
_SEPARATORS = re.compile(r"[ \n;]*")


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where the next other character is. Nothing is copied: an answer may have many calls."""
    found = pattern.match(text, at)
    assert found is not None  # it matches the empty text
    return found.end()


def _take_json(text: str, at: int) -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends."""
    at = _skip(_SPACE, text, at)
    try:
        value, end = _DECODER.raw_decode(text, at)
    except ValueError as error:
        raise ToolError(f"is not JSON ({error})") from None
    check_depth(value)
    return value, end


def _read_hermes(text: str) -> ParsedAnswer:
    start, end = "<tool_call>", "</tool_call>"
    if start not in text:
        return ParsedAnswer(text)
    calls: list[ToolCall] = []
    for piece in text.split(start)[1:]:
        try:
            value, _ = _take_json(piece, 0)
        except ToolError:
            value = read_literal(piece.partition(end)[0])
        calls += read_calls(value)
    return ParsedAnswer(text.partition(start)[0].rstrip(), tuple(calls))


def _read_tags(text: str) -> ParsedAnswer:
    if "<tool_call>" not in text:
        return ParsedAnswer(text)
    before, _, rest = text.partition("<tool_call>")
    calls = []
    for function in rest.split("<function=")[1:]:
        name, _, body = function.partition("</function>")[0].partition(">")
        arguments = {}
        for _, parameter, _ in enclosed(body, "<parameter=", "</parameter>"):
            key, _, value = parameter.partition(">")
            arguments[key] = _json_or_text(value.removeprefix("\n").removesuffix("\n"))
        calls.append(ToolCall(name.strip(), arguments))
    if not calls:
        raise ToolError("has no <function=NAME>")
    return ParsedAnswer(before.rstrip(), tuple(calls))


def _json_or_text(text: str) -> Any:
    try:
        return load_json(text)
    except ToolError:
        return text


_PYTHON_TAG = "<|python_tag|>"


def _read_llama(text: str) -> ParsedAnswer:
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    is_marked = _PYTHON_TAG in text
    if is_marked:
        before, _, body = text.partition(_PYTHON_TAG)
        return ParsedAnswer(before.rstrip(), tuple(_json_calls(body)))
    if not body.startswith("{"):
        return ParsedAnswer(text)
    try:
        return ParsedAnswer("", tuple(_json_calls(body)))
    except ToolError:
        if '"name"' in body and '"parameters"' in body:
            raise
        return ParsedAnswer(text)  # JSON that is an answer


def _json_calls(body: str) -> Iterator[ToolCall]:
    """Objects one after the other, as Llama separates them: by a semicolon, or by space."""
    at = 0
    while (at := _skip(_SEPARATORS, body, at)) < len(body):
        value, at = _take_json(body, at)
        yield from read_calls(value)


_MISTRAL = "[TOOL_CALLS]"
# Each run of spaces is matched by one part alone: two would share it out in every way.
_NAMED_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{)")


def _read_mistral(text: str) -> ParsedAnswer:
    if _MISTRAL not in text:
        return ParsedAnswer(text)
    calls: list[ToolCall] = []
    for piece in text.split(_MISTRAL)[1:]:
        named = _NAMED_CALL.match(piece)
        value, _ = _take_json(piece, named.end() if named else 0)
        if named:
            value = {"id": named[2], "name": named[1], "arguments": value}
        calls += read_calls(value)
    return ParsedAnswer(text.partition(_MISTRAL)[0].rstrip(), tuple(calls))


# Harmony: each message has a header with its channel and recipient.

_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_ENDS = re.compile(r"<\|(?:end|call|return)\|>")


def _read_harmony(text: str) -> ParsedAnswer:
    if "<|message|>" not in text:
        return ParsedAnswer(text)
    calls: list[ToolCall] = []
    parts: dict[str, list[str]] = {"analysis": [], "content": []}
    for message in text.split("<|start|>"):
        header, _, body = message.partition("<|message|>")
        body = _ENDS.split(body)[0]
        if recipient := _RECIPIENT.search(header):
            calls += read_calls({"name": recipient[1], "arguments": body.strip()})
        elif body:
            is_thought = "<|channel|>analysis" in header
            parts["analysis" if is_thought else "content"].append(body)
    return ParsedAnswer("\n".join(parts["content"]), tuple(calls), "\n".join(parts["analysis"]))


# Gemma: a notation of its own, with a mark of its own for quotes.

_GEMMA_CALL = re.compile(r"\s*call:([^\s{]+)\s*")
_GEMMA_NO_KEY = frozenset("{}[],")
_GEMMA_WORD = re.compile(r"[^,}\]]*")


class _GemmaReader:
    """`call:name{key:value,...}`: a text stands between quotes, a list in brackets."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self._at = 0

    def call(self) -> ToolCall:
        found = _GEMMA_CALL.match(self._text)
        if not found:
            raise ToolError("does not begin with `call:NAME`")
        self._at = found.end()
        return ToolCall(found[1], self._object(0))

    def _value(self, depth: int) -> Any:
        if depth > 30:
            raise ToolError("is nested too deep")
        while self._takes(" "):
            continue
        if self._takes(self._quote):
            end = self._text.find(self._quote, self._at)
            if end < 0:
                raise ToolError("has a text without an end")
            text, self._at = self._text[self._at : end], end + len(self._quote)
            return text
        if self._text.startswith("{", self._at):
            return self._object(depth)
        if self._takes("["):
            items: list[Any] = []
            while not self._takes("]"):
                items.append(self._value(depth + 1))
                if not self._takes(",") and not self._text.startswith("]", self._at):
                    raise ToolError("has a list without an end")
            return items
        word = _GEMMA_WORD.match(self._text, self._at)
        assert word is not None  # it matches the empty text
        if not word[0].strip():
            raise ToolError("has an argument without a value")
        self._at = word.end()
        return _json_or_text(word[0].strip())

    def _object(self, depth: int) -> dict[str, Any]:
        if not self._takes("{"):
            raise ToolError("has no arguments in braces")
        made: dict[str, Any] = {}
        while not self._takes("}"):
            if self._takes(self._quote):
                end = self._text.find(self._quote, self._at)
                key, self._at = self._text[self._at : end], end + len(self._quote)
                if end < 0 or not self._takes(":"):
                    raise ToolError("has a key without a value")
            else:
                end = self._text.find(":", self._at)
                key = self._text[self._at : end].strip()
                if end < 0 or not key or not _GEMMA_NO_KEY.isdisjoint(key):
                    raise ToolError("has arguments without an end")
                self._at = end + 1
            made[key] = self._value(depth + 1)
            if not self._takes(",") and not self._text.startswith("}", self._at):
                raise ToolError("has arguments without an end")
        return made

    def _takes(self, mark: str) -> bool:
        is_there = self._text.startswith(mark, self._at)
        self._at += len(mark) * is_there
        return is_there


_GEMMA_THOUGHT = ("<|channel>", "<channel|>")


def _gemma(start: str, quote: str) -> Callable[[str], ParsedAnswer]:
    def read(text: str) -> ParsedAnswer:
        # Reasoning stands first, in a channel of its own.
        thought, reasoning = text.lstrip(), ""
        opening, end = _GEMMA_THOUGHT
        if thought.startswith(opening):
            thought, _, text = thought.partition(end)
            reasoning = thought.removeprefix(opening).removeprefix("thought").strip()
        before, *pieces = text.split(start)
        calls = tuple(_GemmaReader(piece, quote).call() for piece in pieces)
        return ParsedAnswer(before.rstrip() if calls else before, calls, reasoning)

    return read


_FENCE = "```"


def _unfence(text: str) -> str:
    """What stands in a fence, where it is the whole text."""
    body = text.strip()
    if len(body) < 2 * len(_FENCE) or not (body.startswith(_FENCE) and body.endswith(_FENCE)):
        return body
    return body[len(_FENCE) : -len(_FENCE)].removeprefix("json").strip()


def _read_json(text: str) -> ParsedAnswer:
    body = _unfence(text)
    if not body.startswith(("{", "[")):
        return ParsedAnswer(text)
    try:
        value, end = _take_json(body, 0)
        calls = () if body[end:].strip() else read_calls(value)
    except ToolError:
        if '"name"' in body and '"arguments"' in body:
            raise
        return ParsedAnswer(text)
    return ParsedAnswer("", calls) if calls else ParsedAnswer(text)


# Grammars of calls: as templates show them to the model.


def _as_object(key: str) -> Callable[[str, Node], Node]:
    """A call as JSON, with its arguments under this key."""

    def write(name: str, arguments: Node) -> Node:
        written = json.dumps(name, ensure_ascii=False)
        return sequence(f'{{"name": {written}, "{key}": ', arguments, "}")

    return write


def _write_hermes(form: CallForm) -> Node:
    write = _as_object("arguments")
    return form.calls(
        lambda name, arguments: sequence("<tool_call>\n", write(name, arguments), "\n</tool_call>"),
        "\n",
    )


def _write_mistral(form: CallForm) -> Node:
    if "[ARGS]" in form.template:
        return form.calls(lambda name, arguments: sequence(f"{_MISTRAL}{name}[ARGS]", arguments))
    return sequence(f"{_MISTRAL}[", form.calls(_as_object("arguments"), ", "), "]")


def _write_llama(form: CallForm) -> Node:
    return form.calls(_as_object("parameters"), "; ")


def _write_json(form: CallForm) -> Node:
    calls = form.calls(_as_object("arguments"), ", ")
    return calls if form.most == 1 else sequence("[", calls, "]")


def _write_harmony(form: CallForm) -> Node:
    # It ends its turn with each call: there is one.
    def write(name: str, arguments: Node) -> Node:
        head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        return sequence(head, arguments)

    return replace(form, most=1).calls(write)


# The records.

GEMMA = CallSyntax(
    name="gemma",
    template_marks=(("<|tool_call>",),),
    starts=("<|tool_call>",),
    control=("<|tool_call>", "<tool_call|>", '<|"|>', *_GEMMA_THOUGHT),
    thought=_GEMMA_THOUGHT,
    read=_gemma("<|tool_call>", '<|"|>'),
)
FUNCTION_GEMMA = CallSyntax(
    name="function-gemma",
    template_marks=(("<start_function_call>",),),
    starts=("<start_function_call>",),
    control=("<start_function_call>", "<end_function_call>", "<escape>"),
    read=_gemma("<start_function_call>", "<escape>"),
)
HARMONY = CallSyntax(
    name="harmony",
    template_marks=(("<|channel|>", "<|message|>"),),
    starts=("<|end|>", "<|call|>", "<|return|>", "<|start|>"),
    control=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"),
    answer_start="<|channel|>final<|message|>",
    read=_read_harmony,
    write=_write_harmony,
)
MISTRAL = CallSyntax(
    name="mistral",
    template_marks=((_MISTRAL,),),
    starts=(_MISTRAL,),
    control=(_MISTRAL, "[CALL_ID]", "[ARGS]"),
    read=_read_mistral,
    write=_write_mistral,
)
QWEN_TAGS = CallSyntax(
    name="qwen-tags",
    template_marks=(("<tool_call>", "<function="),),
    starts=("<tool_call>",),
    control=("<tool_call>", "</tool_call>"),
    read=_read_tags,
)
HERMES = CallSyntax(
    name="hermes",
    template_marks=(("<tool_call>",),),
    starts=("<tool_call>",),
    control=("<tool_call>", "</tool_call>"),
    read=_read_hermes,
    write=_write_hermes,
)
LLAMA = CallSyntax(
    name="llama",
    template_marks=((_PYTHON_TAG,), ("<|start_header_id|>", '"parameters": ')),
    starts=(_PYTHON_TAG,),
    control=(_PYTHON_TAG,),
    is_bare=True,
    read=_read_llama,
    write=_write_llama,
)
PLAIN_JSON = CallSyntax(
    name="json", template_marks=((),), starts=(), is_bare=True, read=_read_json, write=_write_json
)
CALL_SYNTAXES = {
    syntax.name: syntax
    for syntax in (
        GEMMA,
        FUNCTION_GEMMA,
        HARMONY,
        MISTRAL,
        QWEN_TAGS,
        HERMES,
        LLAMA,
        PLAIN_JSON,
    )
}
"""By name. The first whose marks a template holds is the template's; JSON fits any."""


def find_syntax(template: str) -> CallSyntax:
    """How the model of this chat template writes calls."""
    return next(
        syntax
        for syntax in CALL_SYNTAXES.values()
        if any(all(mark in template for mark in marks) for marks in syntax.template_marks)
    )
