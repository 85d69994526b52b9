"""Tools and calls as a hostile file or client would send them, through published templates.

Every one ends as a text within the sandbox's limits, or as one error that says what is wrong.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

pytest.importorskip("trl", reason="un-skip with: pip install -e '.[dev]'")

from hostile_trials import count_cases
from tightfit.core.errors import InvalidInputError, UserError
from tightfit.data.call_syntax import CALL_SYNTAXES
from tightfit.data.formats import FORMATS, Message
from tightfit.data.readers import Row
from tightfit.data.templates import Prompter
from tightfit.data.tokenizer import load_tokenizer
from tightfit.data.tools import ToolCall, ToolError, read_tools
from tool_chats import FAMILIES, plant_family

NUM_CASES = count_cases(40)
SECONDS = 5.0
MARKS = [
    '<|"|>',
    "<|im_end|>",
    "<tool_call>",
    "</tools>",
    "{{ 1 }}",
    "\ud800",
    "\0",
    '"',
    "\\",
    "é",
]


@cache
def prompter(name: str) -> Prompter:
    return Prompter(load_tokenizer(plant_family(Path(mkdtemp()) / name, FAMILIES[name])))


def schema(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string", "description": "d"}
    for at in range(depth):
        kind = ("object", "array")[at % 2]
        made = {"type": kind, "description": "d", "properties": {"a": made}, "items": made}
    return {"type": "object", "properties": {"a": made}}


@pytest.mark.parametrize("name", FAMILIES)
def test_large_and_deep_schemas_stay_within_the_limits(name: str) -> None:
    deep = {"name": "deep", "description": "d", "parameters": schema(7)}
    properties = {f"p{at}": {"type": "string", "description": "d" * 50} for at in range(3000)}
    wide = {"name": "wide", "description": "d", "parameters": {"properties": properties}}
    for tool in (deep, wide, {**deep, "description": "d" * 500_000}):
        began = time.thread_time()
        with contextlib.suppress(InvalidInputError):
            prompter(name).ask([Message("user", "hi")], read_tools([tool]))
        assert time.thread_time() - began < SECONDS


@pytest.mark.parametrize("name", FAMILIES)
def test_random_tools_end_in_a_text_or_one_error(name: str) -> None:
    rng = random.Random(name)

    def value(depth: int = 3) -> Any:
        kind = rng.randrange(8 if depth else 5)
        if kind < 3:
            return "".join(rng.choices(MARKS, k=rng.randrange(4)))
        if kind < 5:
            return rng.choice([None, True, -1, 1e300, 10**40])
        if kind == 5:
            return [value(depth - 1) for _ in range(rng.randrange(3))]
        keys = ["type", "properties", "items", "enum", "required", "description", "oneOf", "a"]
        return {rng.choice(keys): value(depth - 1) for _ in range(rng.randrange(4))}

    for _ in range(NUM_CASES):
        function = {"name": value(0) or "f", "description": value(1), "parameters": value()}
        arguments = value()
        call = {"function": {"name": function["name"], "arguments": rng.choice([
            arguments, json.dumps(arguments)])}}  # fmt: skip
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": value(0), "tool_calls": [call]},
            {"role": "tool", "content": value()},
        ]
        row = Row({"messages": messages, "tools": [function]}, Path("a"), 1, "line")
        try:
            read, tools = FORMATS["chat"].to_conversation(row)
            prompter(name).ask(read, tools)
        except (UserError, UnicodeEncodeError):  # half a character: callers know it
            continue


@pytest.mark.parametrize("name", FAMILIES)
def test_no_text_of_tools_or_calls_becomes_a_control_token(name: str) -> None:
    used = prompter(name)
    controls = [used.tokenizer.token_name(i) for i in used.control_ids]
    plain, spelt = (
        used.ask(
            [
                Message("user", "hi"),
                Message("assistant", "", tool_calls=(ToolCall("f", {"a": text}, "abcdefghi"),)),
                Message("tool", text, name="f", call_id="abcdefghi"),
            ],
            read_tools(
                [{"name": "f", "description": text, "parameters": {"properties": {"a": {
                    "type": "string", "description": text, "enum": [text]}}}}]
            ),
        )
        for text in ("x", " ".join(controls))
    )  # fmt: skip

    assert [i for i in spelt if i in used.control_ids] == [
        i for i in plain if i in used.control_ids
    ]


@pytest.mark.parametrize("syntax", CALL_SYNTAXES.values(), ids=CALL_SYNTAXES)
def test_random_answers_are_parsed_or_refused(syntax: Any) -> None:
    rng = random.Random(syntax.name)
    pieces = [*syntax.starts, *syntax.control, '{"name": "f", "arguments": {}}', "[", "{", "}", ":"]
    pieces += [
        "call:f",
        "<function=f>",
        "<parameter=a>",
        "null",
        "</tool_call>",
        "\n",
        "to=functions.f",
    ]
    for _ in range(NUM_CASES * 20):
        text = "".join(rng.choices(pieces, k=rng.randrange(12))) + "[" * rng.choice([0, 0, 9999])
        began = time.thread_time()
        with contextlib.suppress(ToolError):
            syntax.parse(text)
        assert time.thread_time() - began < SECONDS
