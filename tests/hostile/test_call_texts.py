"""Answers as a hostile model would write them, through every parser of calls: linear in time."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import time

import pytest

from hostile_trials import count_cases
from tightfit.data.call_syntax import CALL_SYNTAXES, CallSyntax
from tightfit.data.tools import ToolError, read_tools

STARTS = (
    *("", "{", "<tool_call>", "<tool_call>\n<function=a>\n<parameter=b>", "[TOOL_CALLS]a"),
    *("[TOOL_CALLS] a [CALL_ID]", "to=functions.a<|message|>", "<|python_tag|>", "```json\n"),
    *("<|tool_call>call:a{b:", "<|tool_call>call:a{b:[", "<start_function_call>call:a{"),
)
UNITS = (
    *(" ", "\n", "a", "{", "[", '"', "{}", "1,", "b:1,", "{}; ", '{"name":"a","parameters":{}};'),
    *("<tool_call>", "<function=a><parameter=", "<parameter=b>1</parameter>", "[TOOL_CALLS]a{}"),
    *(
        "<|start|>",
        "<|message|>",
        "<|end|>",
        "<|tool_call>",
        "<channel|>",
        "``` ",
        '<|"|>',
        "call:",
    ),
)
VALUES = (
    *("{1, 2}", "b'x'", "1j", "...", "{(1, 2): 3}", "0x" + "f" * 5000, "1e999", "NaN", "Infinity"),
    *("-" * 20_000 + "1", "+".join("1" * 20_000), "(" * 20_000, "[" * 200, "9" * 5000, "None"),
)
CHARS = 1_000_000


@pytest.mark.parametrize("syntax", CALL_SYNTAXES.values(), ids=CALL_SYNTAXES)
def test_a_repeated_text_takes_linear_time(syntax: CallSyntax) -> None:
    """What is slow at 20,000 characters would take hours at a million."""
    for start, unit in itertools.product(STARTS, UNITS):
        assert _seconds(syntax, start + unit * (20_000 // len(unit))) < 1.0, (start, unit)


@pytest.mark.parametrize("name", ["llama", "mistral", "json", "hermes"])
def test_a_million_characters_of_calls(name: str) -> None:
    call = '{"name":"a","parameters":{}};'
    calls = {"llama": call, "mistral": "[TOOL_CALLS]a{}", "json": "\n", "hermes": "<tool_call>{}"}
    text = {"json": "```json\n"}.get(name, "") + calls[name] * (CHARS // len(calls[name]))
    assert _seconds(CALL_SYNTAXES[name], text) < 10.0


@pytest.mark.parametrize("syntax", CALL_SYNTAXES.values(), ids=CALL_SYNTAXES)
def test_arguments_can_be_sent_as_json(syntax: CallSyntax) -> None:
    """Whatever a parser accepts is standard JSON again, as clients read it."""
    rng = random.Random(syntax.name)
    shapes = (
        "<tool_call>{'name': 'a', 'arguments': {'b': %s}}</tool_call>",
        '<tool_call>{"name": "a", "arguments": {"b": %s}}</tool_call>',
        "<tool_call><function=a><parameter=b>%s</parameter></function></tool_call>",
        '{"name": "a", "parameters": {"b": %s}}',
        '{"name": "a", "arguments": {"b": %s}}',
        "[TOOL_CALLS]a{\"b\": %s}",
        "<|start|>assistant to=functions.a<|message|>{\"b\": %s}",
        "<|tool_call>call:a{b:%s}",
        "<start_function_call>call:a{b:%s}",
    )  # fmt: skip
    texts = [shape % value for shape, value in itertools.product(shapes, VALUES)]
    for text in texts + [_cut(rng, rng.choice(texts)) for _ in range(count_cases(100))]:
        try:
            calls = syntax.parse(text).calls
        except ToolError:
            continue
        for call in calls:
            json.dumps(call.arguments, ensure_ascii=False, allow_nan=False)


def test_many_tools_are_compared_in_linear_time() -> None:
    tools = [{"name": f"f{number}"} for number in range(50_000)]
    began = time.thread_time()
    assert len(read_tools(tools)) == len(tools)
    with pytest.raises(ToolError, match="twice"):
        read_tools([*tools, tools[-1]])
    assert time.thread_time() - began < 10.0


def _seconds(syntax: CallSyntax, text: str) -> float:
    began = time.thread_time()
    with contextlib.suppress(ToolError):
        syntax.parse(text)
    return time.thread_time() - began


def _cut(rng: random.Random, text: str) -> str:
    at, to = sorted(rng.choices(range(len(text)), k=2))
    return text[:at] + rng.choice(UNITS) + text[to:]
