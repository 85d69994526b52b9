"""Rows with tools: every usual spelling becomes one conversation; what does not fit is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from chat_models import make_model

from tightfit.core.errors import InvalidInputError
from tightfit.core.objectives import ExampleKind
from tightfit.core.strategy import DataSource
from tightfit.data.formats import FORMATS, Conversation
from tightfit.data.preferences import PreferenceFormat, recognise
from tightfit.data.readers import Row
from tightfit.data.sources import digest_sources, open_source, read_source
from tightfit.data.templates import Prompter
from tightfit.data.tokenizer import load_tokenizer
from tightfit.evaluation.scored_models import read_questions

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather now",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
WRAPPED = {"type": "function", "function": WEATHER}
ASKED = {"role": "user", "content": "Rain in Rome?"}
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Rome", "days": 2}'},
}
OPENAI: dict[str, Any] = {
    "tools": [WRAPPED],
    "messages": [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": true}'},
        {"role": "assistant", "content": "Yes."},
    ],
}
SHAREGPT: dict[str, Any] = {
    "tools": json.dumps([WEATHER]),
    "conversations": [
        {"from": "human", "value": "Rain in Rome?"},
        {"from": "function_call", "value": json.dumps(
            {"name": "get_weather", "arguments": {"city": "Rome", "days": 2}})},
        {"from": "observation", "value": '{"rain": true}'},
        {"from": "gpt", "value": "Yes."},
    ],
}  # fmt: skip
HERMES: dict[str, Any] = {
    "conversations": [
        {"from": "system", "value": "You are a function calling AI model. You are provided with "
         "function signatures within <tools> </tools> XML tags. You may call some. "
         f"Here are the available tools: <tools> {json.dumps([WRAPPED])} </tools> For each call "
         "return a json object within tags:\n<tool_call>\n{tool_call}\n</tool_call>"},
        {"from": "human", "value": "Rain in Rome?"},
        {"from": "gpt", "value": "<tool_call>\n{'name': 'get_weather', "
         "'arguments': {'city': 'Rome', 'days': 2}}\n</tool_call>"},
        {"from": "tool", "value": '<tool_response>\n{"rain": true}\n</tool_response>'},
        {"from": "gpt", "value": "Yes."},
    ],
}  # fmt: skip
OLDER: dict[str, Any] = {
    "functions": [WEATHER],
    "messages": [
        ASKED,
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
        {"role": "function", "name": "get_weather", "content": '{"rain": true}'},
        {"role": "assistant", "content": "Yes."},
    ],
}


def read(values: dict[str, Any]) -> Conversation:
    return FORMATS["chat"].to_conversation(Row(values, Path("a.jsonl"), 3, "line"))


@pytest.mark.parametrize("values", [OPENAI, SHAREGPT, HERMES, OLDER])
def test_every_spelling_is_one_conversation(values: dict[str, Any]) -> None:
    messages, tools = read(values)

    assert [dict(tool) for tool in tools] == [WRAPPED]
    asked, called, result, answer = (m for m in messages if m.role != "system")
    assert asked.content == "Rain in Rome?"
    [call] = called.tool_calls
    assert called.content == ""
    assert (call.name, call.arguments) == ("get_weather", {"city": "Rome", "days": 2})
    assert (result.role, result.content, result.name) == ("tool", '{"rain": true}', "get_weather")
    assert result.call_id == call.id
    assert answer.content == "Yes."


def test_hermes_text_about_calls_leaves_the_system_message() -> None:
    assert read(HERMES).messages[0].content == "You are a function calling AI model."


def test_marks_that_are_never_closed_are_read_in_linear_time() -> None:
    began = time.thread_time()
    system = {"role": "system", "content": "<tools>" * 50_000 + " no end"}
    said = [{"role": "tool", "content": "<tool_response>" * 50_000}]
    asked = {"role": "assistant", "tool_calls": [CALL]}

    messages, _ = read({"tools": [WRAPPED], "messages": [system, ASKED, asked, *said]})

    assert len(messages) == 4
    assert time.thread_time() - began < 2


def test_parallel_results_find_their_calls() -> None:
    calls = [{**CALL, "id": "a"}, {**CALL, "id": "b"}]
    results = [{"role": "tool", "tool_call_id": i, "content": i} for i in ("b", "a")]
    asked = [ASKED, {"role": "assistant", "tool_calls": calls}]

    messages, _ = read({"tools": [WRAPPED], "messages": [*asked, *results]})

    assert [message.call_id for message in messages[2:]] == ["b", "a"]


def test_nulls_that_arrow_fills_in_are_dropped() -> None:
    """A Parquet file gives every row the keys of all rows."""
    tool = {**WRAPPED, "function": {**WEATHER, "strict": None}}
    filled = {"city": "Rome", "days": None, "amount": None}
    call = {"function": {"name": "get_weather", "arguments": filled}}

    messages, tools = read(
        {"tools": [tool], "messages": [ASKED, {"role": "assistant", "tool_calls": [call]}]}
    )

    assert dict(tools[0]) == WRAPPED
    assert messages[1].tool_calls[0].arguments == {"city": "Rome", "days": None}


def changed(**call: Any) -> dict[str, Any]:
    made = {**CALL, "function": {**CALL["function"], **call}}
    return {**OPENAI, "messages": [ASKED, {"role": "assistant", "tool_calls": [made]}]}


RESULT: dict[str, Any] = {"role": "tool", "content": "yes"}
NESTED: Any = {}
for _ in range(100):
    NESTED = {"properties": {"a": NESTED}}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (changed(name="get_wether"), "calls `get_wether`, which is not listed"),
        ({**changed(), "tools": None}, "not listed in `tools` (none)"),
        (changed(arguments="{city"), "the arguments of `get_weather` cannot be read as JSON"),
        (changed(arguments='{"city": NaN}'), "NaN is no JSON"),
        (changed(arguments="[1]"), "the arguments of `get_weather` are not an object"),
        (changed(arguments="[" * 100_000), "deep"),
        (changed(name=""), "no function name"),
        ({**OPENAI, "messages": [ASKED, RESULT]}, "a tool's result without a call before it"),
        (
            {**OPENAI, "messages": [*OPENAI["messages"][:3], RESULT]},
            "message 4 is a tool's result without a call",
        ),
        (
            {**OPENAI, "messages": [*OPENAI["messages"][:2], {**RESULT, "tool_call_id": "x"}]},
            "the result of `x`",
        ),
        ({**OPENAI, "tools": "[{"}, "`tools` cannot be read as JSON"),
        ({**OPENAI, "tools": [WRAPPED, WRAPPED]}, "listed twice"),
        ({**OPENAI, "tools": [{"type": "web_search"}]}, "of type `web_search`"),
        ({**OPENAI, "tools": [{"type": "function"}]}, "no `function` with a `name`"),
        ({**OPENAI, "tools": [{**WEATHER, "parameters": []}]}, "not a JSON schema"),
        ({**OPENAI, "tools": [{**WEATHER, "parameters": {"type": "string"}}]}, "of an object"),
        (
            {**OPENAI, "tools": [{**WEATHER, "parameters": {"properties": {"a": "b"}}}]},
            "holds what is no schema",
        ),
        ({**OPENAI, "tools": [{**WEATHER, "parameters": NESTED}]}, "nested more than 32 deep"),
    ],
)
def test_what_does_not_fit_is_refused_with_row_and_reason(
    values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        read(values)

    assert "a.jsonl line 3" in caught.value.problem
    assert reason in caught.value.problem


def test_text_that_looks_like_a_call_stays_text_without_tools() -> None:
    said = "Write <tool_call>{...}</tool_call>."

    [_, message] = read({"messages": [ASKED, {"role": "assistant", "content": said}]}).messages

    assert message.content == said
    assert message.tool_calls == ()


def test_beside_a_plain_question_tools_may_be_anything() -> None:
    row = Row(
        {"instruction": "Build it.", "output": "Done.", "tools": "a saw"}, Path("a"), 1, "line"
    )

    assert FORMATS["alpaca"].to_conversation(row).tools == ()


def read_file(folder: Path, tools: Any, *rows: dict[str, Any]) -> list[Conversation]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tools.json").write_text(tools if isinstance(tools, str) else json.dumps(tools))
    source = DataSource(path=str(folder / "rows.jsonl"), tools=str(folder / "tools.json"))
    found = read_source(open_source(source))
    return [row_format.to_conversation(row) for row, row_format in found]


def test_a_file_of_tools_is_for_rows_without_a_list(tmp_path: Path) -> None:
    messages = OPENAI["messages"]
    other = {"name": "other"}
    rows: list[dict[str, Any]] = [
        {"messages": messages},
        {"messages": messages, "tools": None},
        {"messages": messages[:1] + messages[3:], "tools": [other]},
        {"messages": messages[:1] + messages[3:], "tools": []},
    ]

    found = read_file(tmp_path, [WEATHER], *rows)

    names = [[tool["function"]["name"] for tool in one.tools] for one in found]
    assert names == [["get_weather"], ["get_weather"], ["other"], []]
    assert found[0] == read(OPENAI)
    [plain] = read_file(tmp_path, WEATHER, {"prompt": "Rain?", "completion": "No.", "tools": "x"})
    assert [dict(tool) for tool in plain.tools] == [WRAPPED]
    pair = {"prompt": [ASKED], "chosen": messages[1:2], "rejected": messages[3:]}
    row = Row(pair, Path("a.jsonl"), 1, "line", tools=found[0].tools)
    pairs = recognise(row, ExampleKind.PAIR)
    assert isinstance(pairs, PreferenceFormat)
    assert pairs.read(row).tools == found[0].tools


@pytest.mark.parametrize(
    ("tools", "row", "message"),
    [
        ("[]", OPENAI, "tools.json lists no tools"),
        ("[{", OPENAI, "tools.json: `tools` cannot be read as JSON"),
        ([{"name": ""}], OPENAI, "tools.json: tool 1 has no name"),
        (
            [{"name": "a"}],
            {"messages": OPENAI["messages"]},
            "line 1: message 2 calls `get_weather`",
        ),
        ([WEATHER], {"text": "plain"}, "line 1: plain text calls no tools"),
    ],
)
def test_a_file_of_tools_that_does_not_fit(
    tools: Any, row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_file(tmp_path, tools, row)


def test_a_changed_file_of_tools_is_other_data(tmp_path: Path) -> None:
    digests = []
    for tools in ([WEATHER], [WEATHER, {"name": "other"}]):
        read_file(tmp_path, tools, OPENAI)
        source = DataSource(path=str(tmp_path / "rows.jsonl"), tools=str(tmp_path / "tools.json"))
        digests.append(digest_sources([open_source(source)]))
    assert digests[0] != digests[1]


def test_eval_asks_for_the_last_call(tmp_path: Path) -> None:
    """Behind it stand its result and an answer, before which nothing is to be called."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(OPENAI) + "\n")
    prompter = Prompter(load_tokenizer(make_model(tmp_path / "model", "chatml")), "hermes")
    source = DataSource(path=str(tmp_path / "rows.jsonl"))

    (_, [last]) = read_questions(source, prompter)
    (_, [called]) = read_questions(source, prompter, prefers_calls=True)

    assert (last.gold, last.gold_calls) == ("Yes.", ())
    assert [call.name for call in called.gold_calls] == ["get_weather"]
    assert [message.role for message in called.messages] == ["user"]
