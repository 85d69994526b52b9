"""Anthropic's, LangChain's and `llm`'s own clients, and OpenAI's responses, on both engines.

Each says the same as OpenAI's chat of the same messages at temperature 0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest

from api_processes import MODELS, ServerProcess

pytest_plugins = ("api_served",)

QUESTION = "How many singers are older than the average?"
SYSTEM = "Be brief."
NUM_TOKENS = 24
GREEDY = {"temperature": 0}
"""This client has no argument for it."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def openai_client(server: ServerProcess) -> Any:
    return server.client


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Iterator[Any]:
    with anthropic.Anthropic(
        base_url=server.url,
        api_key="none",
        max_retries=0,
        http_client=anthropic.DefaultHttpxClient(trust_env=False),
    ) as client:
        yield client


@pytest.fixture
def http_client() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False) as client:
        yield client


def _chat(client: Any, model: str, **settings: Any) -> Any:
    turns: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    given = {"messages": turns, "max_tokens": NUM_TOKENS, "temperature": 0, **settings}
    return client.chat.completions.create(model=model, **given)


@pytest.mark.parametrize("model", MODELS)
def test_anthropics_client(claude: Any, openai_client: Any, model: str) -> None:
    expected = _chat(openai_client, model)
    asked: Any = {
        "model": model,
        "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
    }
    whole = claude.messages.create(**asked, max_tokens=NUM_TOKENS, extra_body=GREEDY)
    text = expected.choices[0].message.content
    assert whole.content[0].text == text
    ends = {"stop": "end_turn", "length": "max_tokens"}
    assert whole.stop_reason == ends[expected.choices[0].finish_reason]
    usage = whole.usage
    num_prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert num_prompt == expected.usage.prompt_tokens
    assert usage.output_tokens == expected.usage.completion_tokens
    assert claude.messages.count_tokens(**asked).input_tokens == num_prompt

    with claude.messages.stream(**asked, max_tokens=NUM_TOKENS, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == text
        ended = stream.get_final_message()
    assert (ended.content[0].text, ended.stop_reason) == (text, whole.stop_reason)

    stop = text[8:10]
    cut = claude.messages.create(
        **asked, max_tokens=NUM_TOKENS, extra_body=GREEDY, stop_sequences=["never", stop]
    )
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]


@pytest.mark.parametrize("model", MODELS)
def test_anthropics_tools(claude: Any, model: str) -> None:
    asked: Any = {
        "model": model,
        "max_tokens": 300,
        "tools": [{"name": "get_weather", "description": "Now", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    first = claude.messages.create(**asked, messages=turns)
    (call,) = first.content
    assert (first.stop_reason, call.type) == ("tool_use", "tool_use")
    jsonschema.validate(call.input, SCHEMA)

    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns += [
        {"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
        {"role": "user", "content": [result, {"type": "text", "text": "Again."}]},
    ]
    with claude.messages.stream(**asked, messages=turns) as stream:
        second = stream.get_final_message()
    jsonschema.validate(second.content[0].input, SCHEMA)
    with pytest.raises(anthropic.BadRequestError, match="call"):
        claude.messages.create(
            **asked, messages=[{"role": "user", "content": [{**result, "tool_use_id": "x"}]}]
        )
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**{**asked, "model": "claude-9"}, messages=turns)


@pytest.mark.parametrize("model", MODELS)
def test_responses(openai_client: Any, model: str) -> None:
    expected = _chat(openai_client, model)
    text = expected.choices[0].message.content
    asked: Any = {
        "model": model,
        "instructions": SYSTEM,
        "input": QUESTION,
        "max_output_tokens": NUM_TOKENS,
        "temperature": 0,
    }
    whole = openai_client.responses.create(**asked)
    assert whole.output_text == text
    statuses = {"stop": "completed", "length": "incomplete"}
    assert whole.status == statuses[expected.choices[0].finish_reason]
    assert whole.usage is not None
    assert whole.usage.input_tokens == expected.usage.prompt_tokens
    assert whole.usage.output_tokens == expected.usage.completion_tokens

    with openai_client.responses.stream(**asked) as stream:
        events = list(stream)
        ended = stream.get_final_response() if whole.status == "completed" else None
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert ended is None or ended.output_text == text

    tool: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
    given = {**asked, "tools": [tool], "tool_choice": "required", "max_output_tokens": 300}
    called = openai_client.responses.create(**given, parallel_tool_calls=False)
    (call,) = called.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    items: Any = [{"role": "user", "content": QUESTION}, call.model_dump(), result]
    form: Any = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}}
    held = openai_client.responses.create(
        **{**asked, "input": items, "max_output_tokens": 200}, text=form
    )
    jsonschema.validate(json.loads(held.output_text), SCHEMA)
    with openai_client.responses.stream(**given, parallel_tool_calls=False) as stream:
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    jsonschema.validate(json.loads(streamed.arguments), SCHEMA)


@pytest.mark.parametrize("model", MODELS)
def test_langchain(
    server: ServerProcess, openai_client: Any, http_client: httpx.Client, model: str
) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI

    text = _chat(openai_client, model).choices[0].message.content
    settings: Any = {
        "base_url": f"{server.url}/v1",
        "api_key": "none",
        "model": model,
        "temperature": 0,
        "max_retries": 0,
        "http_client": http_client,
    }
    turns = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]
    chat = ChatOpenAI(**settings, max_tokens=NUM_TOKENS)
    assert chat.invoke(turns).content == text
    assert "".join(str(chunk.content) for chunk in chat.stream(turns)) == text

    structured = ChatOpenAI(**settings, max_tokens=200).with_structured_output(
        {**SCHEMA, "title": "Trip"}, method="json_schema"
    )
    found: Any = structured.invoke(turns)
    jsonschema.validate(found, SCHEMA)
    tool = {"type": "function", "function": {"name": "trip", "parameters": SCHEMA}}
    bound = ChatOpenAI(**settings, max_tokens=300).bind_tools([tool], tool_choice="any")
    for call in bound.invoke(turns).tool_calls:
        jsonschema.validate(call["args"], SCHEMA)


@pytest.mark.parametrize("model", MODELS)
def test_langchains_embeddings(
    server: ServerProcess, openai_client: Any, http_client: httpx.Client, model: str
) -> None:
    from langchain_openai import OpenAIEmbeddings

    texts = [QUESTION, SYSTEM]
    direct = openai_client.embeddings.create(model=model, input=texts)
    make: Any = OpenAIEmbeddings
    embeddings = make(
        base_url=f"{server.url}/v1",
        api_key="none",
        model=model,
        max_retries=0,
        http_client=http_client,
        check_embedding_ctx_length=False,  # or it makes tokens of OpenAI's own vocabulary
    )
    found = embeddings.embed_documents(texts)
    for one, wanted in zip(found, direct.data, strict=True):
        assert one == pytest.approx(wanted.embedding, abs=1e-6)
    assert embeddings.embed_query(SYSTEM) == pytest.approx(found[1], abs=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_llm(server: ServerProcess, openai_client: Any, tmp_path: Path, model: str) -> None:
    known = [{"model_id": "here", "model_name": model, "api_base": f"{server.url}/v1"}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(known))
    options = ("-o", "temperature", "0", "-o", "max_tokens", str(NUM_TOKENS), "--no-log")
    done = subprocess.run(
        [sys.executable, "-m", "llm", "-m", "here", "-s", SYSTEM, "--key", "none", *options],
        input=QUESTION,
        env={**os.environ, "LLM_USER_PATH": str(tmp_path), "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == _chat(openai_client, model).choices[0].message.content.strip()
