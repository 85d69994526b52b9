"""Answers held to a format, and calls that were required, on both engines."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

from api_processes import MODELS, ServerProcess
from random_schemas import draw_schema

pytest_plugins = ("api_served",)

NUM_SCHEMAS = 15
"""For each engine; `benchmarks/measure_formats.py` asks for 1,000."""
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 8},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                },
                "required": ["city"],
            },
        },
    }
    for name in ("get_weather", "get_news")
]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> OpenAI:
    return server.client


def _ask(client: OpenAI, model: str, **settings: Any) -> Any:
    question: Any = [{"role": "user", "content": "The quick brown fox"}]
    given = {"temperature": 1.0, "max_tokens": 600, "messages": question, **settings}
    return client.chat.completions.create(model=model, **given).choices[0]


@pytest.mark.parametrize("model", MODELS)
def test_random_schemas_are_kept(client: OpenAI, model: str) -> None:
    drawn = random.Random(11)
    for seed in range(NUM_SCHEMAS):
        schema = draw_schema(drawn)
        said = _ask(
            client,
            model,
            seed=seed,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "it", "schema": schema, "strict": True},
            },
        )
        assert said.finish_reason == "stop", said.message.content
        check = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        check.validate(json.loads(said.message.content))


@pytest.mark.parametrize("model", MODELS)
def test_patterns_and_objects_are_kept(client: OpenAI, model: str) -> None:
    for form in (r"[A-Z]{2}-\d{3}( dark| light)?", r"(yes|no), \w{1,6}\."):
        said = _ask(client, model, response_format={"type": "regex", "pattern": form})
        assert re.fullmatch(form, said.message.content)
    spaced = {"type": "json_object"}
    said = _ask(client, model, response_format=spaced, max_tokens=900, temperature=0.2, seed=1)
    if said.finish_reason == "stop":  # nothing bounds the object itself
        assert isinstance(json.loads(said.message.content), dict)
    assert said.message.content.startswith("{")
    text = client.completions.create(
        model=model,
        prompt="SELECT",
        max_tokens=50,
        extra_body={"response_format": {"type": "regex", "pattern": " name FROM [a-z]{1,5};"}},
    )
    assert re.fullmatch(" name FROM [a-z]{1,5};", text.choices[0].text)


@pytest.mark.parametrize("model", MODELS)
def test_required_calls_come_and_fit_their_schema(client: OpenAI, model: str) -> None:
    schema = TOOLS[0]["function"]["parameters"]
    for seed in range(3):
        said = _ask(client, model, tools=TOOLS, tool_choice="required", seed=seed)
        assert said.finish_reason == "tool_calls"
        assert said.message.content is None
        for call in said.message.tool_calls:
            assert call.function.name in ("get_weather", "get_news")
            jsonschema.validate(json.loads(call.function.arguments), schema)
    named: Any = {"type": "function", "function": {"name": "get_news"}}
    said = _ask(client, model, tools=TOOLS, tool_choice=named)
    assert [call.function.name for call in said.message.tool_calls] == ["get_news"]
    one = _ask(client, model, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert len(one.message.tool_calls) == 1
    streamed = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "fox"}],
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
        max_tokens=300,
    )
    deltas = [chunk.choices[0].delta for chunk in streamed]
    assert "".join(delta.content or "" for delta in deltas) == ""
    assert sum(len(delta.tool_calls or ()) for delta in deltas) == 1
    with pytest.raises(openai.BadRequestError, match="not in `tools`"):
        _ask(client, model, tools=TOOLS, tool_choice={**named, "function": {"name": "other"}})


@pytest.mark.parametrize("model", MODELS)
def test_a_format_and_an_endless_answer_exclude_each_other(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="ends where the format does"):
        _ask(
            client,
            model,
            response_format={"type": "json_object"},
            extra_body={"ignore_eos": True},
        )
