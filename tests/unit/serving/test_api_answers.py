"""Answers of the HTTP API over an engine whose every token is known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from api_client import Served, read_events, serving, wait_until
from scripted_engine import ScriptedEngine
from tightfit.serving.http.schemas import ChatChunk, ChatCompletion, Completion


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(num_slots=2)


@pytest.fixture(scope="module")
def served(engine: ScriptedEngine) -> Iterator[Served]:
    with serving(engine) as running:
        yield running


def test_chat_answer_has_the_described_shape_and_counts(served: Served) -> None:
    response = served.chat("abc", model="scripted", max_tokens=7, temperature=0)

    assert response.status_code == 200
    answer = ChatCompletion.model_validate_json(response.content, strict=True)
    assert answer.choices[0].message.content == "abcabca"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == 10
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_chat_without_limit_may_fill_the_context(served: Served) -> None:
    body = served.chat("abcd").json()

    assert body["usage"]["total_tokens"] == 1000


def test_a_larger_limit_than_the_context_is_cut(served: Served) -> None:
    body = served.chat("abcd", max_tokens=10_000).json()

    assert body["usage"]["completion_tokens"] == 996
    assert body["choices"][0]["finish_reason"] == "length"


def test_newer_limit_name_wins(served: Served) -> None:
    body = served.chat("abcd", max_tokens=9, max_completion_tokens=2).json()

    assert body["usage"]["completion_tokens"] == 2


def test_stop_text_ends_the_answer_and_is_not_part_of_it(served: Served) -> None:
    body = served.chat("abc", stop="c").json()

    assert body["choices"][0]["message"]["content"] == "ab"
    assert body["choices"][0]["finish_reason"] == "stop"


def test_stream_says_the_same_as_the_whole(served: Served) -> None:
    events = read_events(
        served.chat("xyz", stream=True, max_tokens=5, stream_options={"include_usage": True})
    )

    assert events.pop() == "[DONE]"
    chunks = [ChatChunk.model_validate(event) for event in events]
    assert all("usage" in event for event in events)
    assert chunks[0].choices[0].delta.role == "assistant"
    said = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert said == "xyzxy"
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_without_usage_has_no_such_key(served: Served) -> None:
    events = read_events(served.chat("xyz", stream=True, max_tokens=2))

    assert all("usage" not in event for event in events[:-1])


def test_content_may_be_a_list_of_texts(served: Served) -> None:
    content = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}

    answer = served.http.post("/v1/chat/completions", json=body).json()

    assert answer["choices"][0]["message"]["content"] == "abcd"


def test_choices_share_a_prompt_and_have_seeds_of_their_own(
    served: Served, engine: ScriptedEngine
) -> None:
    before = len(engine.tickets)
    body = served.chat("abc", n=3, seed=2**63 - 1, max_tokens=4).json()

    seeds = [ticket.request.sampling.seed for ticket in engine.tickets[before:]]
    assert len(set(seeds)) == 3
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 12


def test_sampling_reaches_the_engine(served: Served, engine: ScriptedEngine) -> None:
    served.chat(
        "abc", max_tokens=1, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2
    )

    sampling = engine.tickets[-1].request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.seed) == (0.1, 1.2, None)


def test_temperature_is_openais_default_and_zero_top_p_is_greedy(
    served: Served, engine: ScriptedEngine
) -> None:
    served.chat("abc", max_tokens=1)
    assert engine.tickets[-1].request.sampling.temperature == 1.0
    served.chat("abc", max_tokens=1, top_p=0)
    assert engine.tickets[-1].request.sampling.temperature == 0.0


def test_completions_of_several_prompts_come_in_order(served: Served) -> None:
    response = served.http.post(
        "/v1/completions", json={"prompt": ["ab", "xyz"], "n": 2, "max_tokens": 4}
    )

    answer = Completion.model_validate_json(response.content, strict=True)
    assert [choice.text for choice in answer.choices] == ["abab", "abab", "xyzx", "xyzx"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 16


def test_completions_take_tokens_and_default_to_sixteen(served: Served) -> None:
    body = served.http.post("/v1/completions", json={"prompt": [97, 98]}).json()
    assert body["choices"][0]["text"] == "ab" * 8

    body = served.http.post("/v1/completions", json={"prompt": [[97], [98]], "max_tokens": 2})
    assert [choice["text"] for choice in body.json()["choices"]] == ["aa", "bb"]


def test_completions_stream(served: Served) -> None:
    body = {"prompt": "ab", "max_tokens": 3, "stream": True, "n": 2}
    events = read_events(served.http.post("/v1/completions", json=body))

    assert events.pop() == "[DONE]"
    chunks = [Completion.model_validate(event) for event in events]
    for index in range(2):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(choice.text for choice in mine) == "aba"
        assert mine[-1].finish_reason == "length"


def test_fields_that_clients_send_and_that_change_nothing_are_let_by(served: Served) -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logprobs": False,
        "logit_bias": {},
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "something_new": {"deep": [1, 2]},
        "stop": None,
        "n": None,
    }
    assert served.chat("abc", max_tokens=1, **harmless).status_code == 200


def test_models_by_every_name(served: Served) -> None:
    (card,) = served.http.get("/v1/models").json()["data"]
    assert (card["id"], card["aliases"]) == ("scripted", ["scripted-alias"])
    for name in ("scripted", "scripted-alias"):
        assert served.http.get(f"/v1/models/{name}").json() == card
        assert served.chat("abc", model=name, max_tokens=1).json()["model"] == "scripted"


def test_two_models_answer_by_name_and_one_must_be_named() -> None:
    short, long = ScriptedEngine(max_context=10), ScriptedEngine(max_context=20)
    with serving(short, long, names=("short", "long")) as served:
        assert served.chat("ab", model="short").json()["usage"]["total_tokens"] == 10
        assert served.chat("ab", model="long-alias").json()["usage"]["total_tokens"] == 20
        unnamed = served.chat("ab")
        assert unnamed.status_code == 400
        assert "`short`, `long`" in unnamed.json()["error"]["message"]
    assert short.is_closed
    assert long.is_closed


def test_every_place_is_given_back(served: Served) -> None:
    for content in ("abc", "!", "?", "refuse me"):
        served.chat(content, max_tokens=2, n=2)
    wait_until(lambda: served.server.registry.models[0].num_owed == 0)
    assert served.server.registry.models[0].jobs == set()
