"""Tool calls through OpenAI's own client: parsed from each model's way of writing them.

The engine repeats its prompt, so each test says what the model would have written; `#` ends it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openai", reason="un-skip with: pip install -e '.[dev]'")
from openai import BadRequestError, OpenAI

from api_client import Served, serving
from random_schemas import draw_text
from scripted_engine import ScriptedEngine
from tightfit.data.call_syntax import CALL_SYNTAXES
from tightfit.data.grammar import read_grammar
from tightfit.serving.http.schemas import ChatCompletion

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather now",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ROME, OSLO = {"city": "Rome", "days": 2}, {"city": "Öslo {x}"}
NAMED = '{"name": "get_weather", "arguments": %s}'
# By syntax: what the model writes, and the content, calls and reasoning in it.
WRITTEN: dict[str, tuple[str, str | None, list[Any]]] = {
    "hermes": (
        f"I look.\n<tool_call>\n{NAMED % json.dumps(ROME)}\n</tool_call>\n"
        f"<tool_call>\n{NAMED % json.dumps(OSLO)}\n</tool_call>",
        "I look.",
        [ROME, OSLO],
    ),
    "qwen-tags": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        None,
        [ROME],
    ),
    "llama": ('{"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}', None, [ROME]),
    "mistral": (
        f'[TOOL_CALLS] [{NAMED % json.dumps(ROME)}, {NAMED % json.dumps(OSLO)[:-1]}, "id": "a"}}]',
        None,
        [ROME, OSLO],
    ),
    "harmony": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{json.dumps(ROME)}",
        None,
        [ROME],
    ),
    "gemma": (
        '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>',
        None,
        [ROME],
    ),
    "function-gemma": (
        "<start_function_call>call:get_weather{city:<escape>Rome<escape>,days:2}"
        "<end_function_call>",
        None,
        [ROME],
    ),
    "json": (f"```json\n{NAMED % json.dumps(ROME)}\n```", None, [ROME]),
}
ALSO = {
    "llama": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 2}',
}


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(num_slots=2)


@pytest.fixture(scope="module")
def served(engine: ScriptedEngine) -> Iterator[Served]:
    with serving(engine) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def ask(client: OpenAI, text: str, **settings: Any) -> Any:
    given = {"tools": TOOLS, "stop": "#", "model": "scripted", **settings}
    messages = [{"role": "user", "content": f"{text}#"}]
    return client.chat.completions.create(**{"messages": messages, **given})


def called(message: Any) -> list[Any]:
    assert all(call.function.name == "get_weather" for call in message.tool_calls)
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    return [json.loads(call.function.arguments) for call in message.tool_calls]


@pytest.mark.parametrize("name", CALL_SYNTAXES)
def test_calls_are_parsed(name: str, client: OpenAI, engine: ScriptedEngine) -> None:
    engine.prompter.call_syntax = CALL_SYNTAXES[name]
    text, content, calls = WRITTEN[name]

    answer = ask(client, text)

    [choice] = answer.choices
    assert called(choice.message) == calls
    assert (choice.message.content, choice.finish_reason) == (content, "tool_calls")
    ChatCompletion.model_validate(answer.model_dump(exclude_unset=True), strict=True)
    if name in ALSO:
        assert called(ask(client, ALSO[name]).choices[0].message) == [ROME]


@pytest.mark.parametrize("name", CALL_SYNTAXES)
def test_streams_hold_calls_back_and_send_them_whole(
    name: str, client: OpenAI, engine: ScriptedEngine
) -> None:
    engine.prompter.call_syntax = CALL_SYNTAXES[name]
    text, content, calls = WRITTEN[name]

    chunks = [chunk.choices[0] for chunk in ask(client, text, stream=True)]

    said = "".join(chunk.delta.content or "" for chunk in chunks)
    assert said.strip() == (content or "")
    sent = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [json.loads(call.function.arguments) for call in sent] == calls
    assert [call.index for call in sent] == list(range(len(calls)))
    assert chunks[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("name", CALL_SYNTAXES)
def test_text_is_text_also_where_it_looks_like_a_call(
    name: str, client: OpenAI, engine: ScriptedEngine
) -> None:
    syntax = engine.prompter.call_syntax = CALL_SYNTAXES[name]
    start = syntax.starts[0] if syntax.starts and not syntax.answer_start else ""
    for text in ("It is warm.", '{"rain": true}', f"so {start}oh"):
        whole = ask(client, f"{syntax.answer_start}{text}").choices[0]
        chunks = [c.choices[0] for c in ask(client, f"{syntax.answer_start}{text}", stream=True)]

        assert (whole.message.content, whole.message.tool_calls) == (text, None)
        assert whole.finish_reason == chunks[-1].finish_reason == "stop"
        assert "".join(chunk.delta.content or "" for chunk in chunks) == text


def test_reasoning_in_a_channel_is_kept_apart(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.prompter.call_syntax = CALL_SYNTAXES["harmony"]
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4"

    message = ask(client, text, tools=[]).choices[0].message

    assert (message.content, message.reasoning_content) == ("4", "hm")


def test_choice_of_tools(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.prompter.call_syntax = CALL_SYNTAXES["hermes"]
    text = WRITTEN["hermes"][0]

    none = ask(client, text, tool_choice="none").choices[0]
    single = ask(client, text, parallel_tool_calls=False).choices[0]
    cut = ask(client, text, max_tokens=30).choices[0]

    assert (none.message.content, none.message.tool_calls) == (text, None)
    assert called(single.message) == [ROME]
    assert (cut.message.tool_calls, cut.finish_reason) == (None, "length")


@pytest.mark.parametrize("name", CALL_SYNTAXES)
def test_required_calls_are_written_as_they_are_read(
    client: OpenAI, engine: ScriptedEngine, name: str
) -> None:
    engine.prompter.call_syntax = syntax = CALL_SYNTAXES[name]
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    if syntax.write is None:
        with pytest.raises(BadRequestError) as caught:
            ask(client, "a", tool_choice="required")
        assert caught.value.param == "tool_choice"
        return
    for wanted in ("required", named):
        ask(client, "a", tool_choice=wanted, max_tokens=1)
        held_to = engine.tickets[-1].request.sampling.grammar
        assert held_to is not None
        for seed in range(20):
            text = draw_text(read_grammar(held_to), random.Random(seed))
            parsed = syntax.parse(text)
            assert parsed.content == ""
            assert {call.name for call in parsed.calls} == {"get_weather"}
            assert len(parsed.calls) == 1 or wanted == "required"


def test_calls_and_results_of_earlier_turns(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.prompter.call_syntax = CALL_SYNTAXES["hermes"]
    first = ask(client, WRITTEN["hermes"][0]).choices[0].message
    messages = [{"role": "user", "content": "Rain?"}, first]
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"{at}#"}
        for at, call in enumerate(first.tool_calls)
    ]

    answer = ask(client, "", messages=[*messages, *results]).choices[0]

    assert answer.message.content == "1"
    wrong = {**results[0], "tool_call_id": "other"}
    for sent in ([*messages, wrong], [messages[0], results[0]]):
        with pytest.raises(BadRequestError) as caught:
            ask(client, "", messages=sent)
        assert caught.value.param == "messages"


def test_a_template_without_tools_refuses_them(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.prompter.call_syntax = None

    with pytest.raises(BadRequestError) as caught:
        ask(client, "hello")

    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tools")
