"""What the HTTP API refuses, and that every refusal has one shape."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from api_client import Served, read_events, serving, wait_until
from scripted_engine import ScriptedEngine
from tightfit.serving.http.registry import ServerPhase
from tightfit.serving.http.responses import ResponseRequest
from tightfit.serving.http.schemas import ErrorBody

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedEngine(), max_body_bytes=20_000) as running:
        yield running


def _error(response: httpx.Response, status: int) -> Any:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    return ErrorBody.model_validate_json(response.content, strict=True).error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 10_000,
        b'{"messages": ' + b"9" * 5000 + b"}",
        b'{"temperature": NaN, "messages": [{"role": "user", "content": "a"}]}',
        b'{"temperature": 1e999, "messages": [{"role": "user", "content": "a"}]}',
    ],
)
def test_malformed_bodies_are_refused(served: Served, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    _error(served.http.post(CHAT, content=body, headers=headers), 400)


def test_a_body_of_another_type_is_refused_as_a_page_elsewhere_would_send_it(
    served: Served,
) -> None:
    content = json.dumps({"messages": HELLO})
    error = _error(
        served.http.post(CHAT, content=content, headers={"Content-Type": "text/plain"}), 400
    )

    assert "application/json" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "abc"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "pope", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
        ({"logprobs": 0}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"model": 5}, "model"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"tools": "f"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
        ),
        ({"response_format": {"type": "regex", "pattern": "(a*)*"}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"messages": [*HELLO, {"role": "tool", "content": "4"}]}, "messages"),
    ],
)
def test_wrong_values_name_their_field(served: Served, fields: dict[str, Any], param: str) -> None:
    error = _error(served.http.post(CHAT, json={"messages": HELLO, **fields}), 400)

    assert error.param == param
    assert error.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "a", "format": "wav"}}, "audio"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [*HELLO, {"role": "function", "content": "4"}]}, "messages[1].role"),
    ],
)
def test_what_would_change_the_answer_is_not_overlooked(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    error = _error(served.http.post(CHAT, json={"messages": HELLO, **fields}), 400)

    assert (error.code, error.param) == ("unsupported_parameter", param)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"best_of": 3}, "unsupported_parameter"),
        ({"suffix": "x"}, "unsupported_parameter"),
        ({"logprobs": 21}, "invalid_value"),
        ({"logprobs": True}, "invalid_value"),
        ({"echo": 1}, "invalid_value"),
        ({"max_tokens": -1}, "invalid_value"),
    ],
)
def test_completions_refuse_theirs(served: Served, fields: dict[str, Any], code: str) -> None:
    error = _error(served.http.post("/v1/completions", json={"prompt": "a", **fields}), 400)

    assert (error.code, error.param) == (code, next(iter(fields)))


_CALL = {"type": "function_call", "name": "f", "arguments": "{}"}
_IMAGE = [{"role": "user", "content": [{"type": "image", "source": {}}]}]


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("responses", {}, "invalid_value", "input"),
        ("responses", {"input": 3}, "invalid_value", "input"),
        ("responses", {"input": [_CALL]}, "invalid_value", "input[0].call_id"),
        ("responses", {"input": [{"type": "computer_call"}]}, "invalid_value", "input[0]"),
        (
            *("responses", {"input": "a", "previous_response_id": "resp_1"}),
            *("unsupported_parameter", "previous_response_id"),
        ),
        ("messages", {"messages": HELLO}, "invalid_value", "max_tokens"),
        (
            *("messages", {"messages": HELLO, "max_tokens": 1, "tools": [{"name": "f"}]}),
            *("invalid_value", "tools[0].input_schema"),
        ),
        (
            *("messages", {"messages": _IMAGE, "max_tokens": 1}),
            *("invalid_value", "messages[0].content[0]"),
        ),
    ],
)
def test_other_forms_name_the_field_too(
    served: Served, path: str, body: dict[str, Any], code: str, param: str
) -> None:
    error = _error(served.http.post(f"/v1/{path}", json=body), 400)

    assert (error.code, error.param) == (code, param)
    assert param in error.message


def test_a_response_that_comes_back_is_one_turn() -> None:
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]}
    result = {"type": "function_call_output", "call_id": "c", "output": "4"}
    request = ResponseRequest.model_validate(
        {"input": [*HELLO, said, {**_CALL, "call_id": "c"}, result]}
    )

    turns = request.as_request().messages
    assert [turn.role for turn in turns] == ["user", "assistant", "tool"]
    assert (turns[1].text, len(turns[1].tool_calls or ())) == ("so", 1)


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [1.5], [-1], [2**40], [["a"]], None, {}, 5])
def test_prompts_that_are_none(served: Served, prompt: Any) -> None:
    _error(served.http.post("/v1/completions", json={"prompt": prompt}), 400)


def test_a_token_beyond_the_vocabulary_is_the_callers(served: Served) -> None:
    error = _error(served.http.post("/v1/completions", json={"prompt": [2**30]}), 400)

    assert "vocabulary" in error.message


def test_too_many_answers_at_once(served: Served) -> None:
    body = {"prompt": ["a"] * 10, "n": 10}
    assert _error(served.http.post("/v1/completions", json=body), 400).param == "n"


def test_prompt_as_long_as_the_context(served: Served) -> None:
    error = _error(served.chat("a" * 1000), 400)

    assert (error.code, error.param) == ("context_length_exceeded", "messages")
    assert "1,000 tokens" in error.message
    assert served.chat("a" * 999).json()["usage"]["completion_tokens"] == 1


def test_body_too_large_whether_or_not_its_size_is_told(served: Served) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "a" * 30_000}]}).encode()
    headers = {"Content-Type": "application/json"}

    assert _error(served.http.post(CHAT, content=body, headers=headers), 413).code == (
        "body_too_large"
    )
    pieces = (body[at : at + 1000] for at in range(0, len(body), 1000))
    assert _error(served.http.post(CHAT, content=pieces, headers=headers), 413).code == (
        "body_too_large"
    )
    assert served.chat("abc", max_tokens=1).status_code == 200


def test_unknown_model_lists_those_there_are(served: Served) -> None:
    error = _error(served.chat("abc", model="gpt-9"), 404)

    assert (error.code, error.param) == ("model_not_found", "model")
    assert "`scripted`" in error.message
    _error(served.http.get("/v1/models/gpt-9"), 404)
    _error(served.http.get("/v1/models/a/b%2Fc"), 404)


@pytest.mark.parametrize("path", ["/", "/docs", "/redoc", "/v1", "/v1/images", "/v1/chat"])
def test_unknown_paths(served: Served, path: str) -> None:
    assert _error(served.http.get(path), 404).code == "unknown_url"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", CHAT, "POST"), ("POST", "/v1/models", "GET"), ("DELETE", "/health", "GET")],
)
def test_other_methods_are_told_what_is_allowed(
    served: Served, method: str, path: str, allowed: str
) -> None:
    response = served.http.request(method, path)

    assert _error(response, 405).code == "method_not_allowed"
    assert response.headers["allow"] == allowed


def test_a_template_that_refuses_and_an_engine_that_fails(served: Served) -> None:
    assert "template" in _error(served.chat("refuse me"), 400).message
    assert _error(served.chat("?"), 400).message == "The script says so."
    assert _error(served.chat("!"), 500).code == "internal_error"


def test_an_error_after_the_stream_began_is_its_last_event(served: Served) -> None:
    events = read_events(served.chat("!", stream=True))

    assert events[-1]["error"]["code"] == "internal_error"
    assert "[DONE]" not in events


def test_a_full_queue_is_told_when_to_come_back() -> None:
    engine = ScriptedEngine(num_slots=1, token_seconds=0.02)
    with serving(engine, max_queue=1) as served:
        model = served.server.registry.models[0]
        first = [threading.Thread(target=served.chat, args=("abc",)) for _ in range(2)]
        for one in first:
            one.start()
        wait_until(lambda: model.num_owed == 2)

        response = served.chat("abc", max_tokens=1)

        assert _error(response, 503).code == "queue_full"
        assert int(response.headers["retry-after"]) > 0
        page = served.http.get("/metrics").text
        assert 'tightfit_answers_running{model="scripted"} 1\n' in page
        assert 'tightfit_answers_waiting{model="scripted"} 1\n' in page
        engine.token_seconds = 0
        for one in first:
            one.join()
        assert served.chat("abc", max_tokens=1).status_code == 200


def test_an_idle_model_takes_a_request_larger_than_its_queue() -> None:
    with serving(ScriptedEngine(num_slots=1), max_queue=0) as served:
        body = served.chat("abc", n=5, max_tokens=2).json()
        assert [choice["message"]["content"] for choice in body["choices"]] == ["ab"] * 5


def test_an_answer_that_takes_too_long_ends_with_504_and_frees_its_slot() -> None:
    engine = ScriptedEngine(num_slots=1, token_seconds=0.05)
    with serving(engine, answer_seconds=0.3) as served:
        assert _error(served.chat("abc"), 504).code == "timeout"
        assert engine.tickets[-1].is_over.wait(60)
        assert engine.tickets[-1].num_computed < 500  # about half of the whole answer

        events = read_events(served.chat("abc", stream=True))
        assert events[-1]["error"]["code"] == "timeout"


def test_while_loading_only_health_answers() -> None:
    with serving(ScriptedEngine()) as served:
        served.server.registry.phase = ServerPhase.LOADING
        assert served.http.get("/health").json() == {"status": "loading"}
        for response in (served.chat("abc"), served.http.get("/v1/models")):
            assert _error(response, 503).code == "model_loading"
            assert "retry-after" in response.headers
        served.server.registry.phase = ServerPhase.READY
        assert served.http.get("/health").status_code == 200


def test_a_bug_is_a_plain_500_and_is_reported() -> None:
    reported: list[Exception] = []
    with serving(ScriptedEngine(), report_error=reported.append) as served:
        served.server.registry.metrics.info = None  # type: ignore[assignment]
        assert _error(served.http.get("/metrics"), 500).code == "internal_error"
    assert isinstance(reported[0], AttributeError)
