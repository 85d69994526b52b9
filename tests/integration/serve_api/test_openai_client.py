"""OpenAI's own client against `tightfit serve`, with transformers and with llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from api_processes import MODELS, ServerProcess

pytest_plugins = ("api_served",)

QUESTION = "How many singers are older than the average?"


def _messages(text: str = QUESTION) -> Any:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> OpenAI:
    return server.client


def _ask(client: OpenAI, model: str, **settings: Any) -> Any:
    given = {"messages": _messages(), "max_tokens": 24, "temperature": 0, **settings}
    return client.chat.completions.create(model=model, **given)


def _expected(folder: Path, question: str, num_tokens: int) -> tuple[str, int, int]:
    """What transformers' own `generate` says to its own rendering; tokens of prompt and answer."""
    import torch
    import transformers

    library: Any = transformers
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = tokenizer.apply_chat_template(
        _messages(question), add_generation_prompt=True, tokenize=False
    )
    given = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    made = model.generate(**given, max_new_tokens=num_tokens, do_sample=False)
    num_prompt = given["input_ids"].shape[1]
    new = made[0][num_prompt:]
    return tokenizer.decode(new, skip_special_tokens=True), num_prompt, len(new)


def test_greedy_answers_are_those_of_transformers_generate(
    client: OpenAI, tiny: tuple[Path, Path]
) -> None:
    ends = set()
    for question, limit in ((QUESTION, 24), ("The quick brown fox", 24), ("name", 3)):
        expected, num_prompt, num_new = _expected(tiny[0], question, limit)
        for model in MODELS:
            answer = _ask(client, model, messages=_messages(question), max_tokens=limit)
            said = answer.choices[0].message.content
            # llama.cpp keeps back a character whose last bytes the limit cut off.
            assert said.rstrip("\ufffd") == expected.rstrip("\ufffd"), model
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
                num_prompt,
                num_new,
            )
            ends.add((answer.choices[0].finish_reason, num_new == limit))
    assert ends == {("stop", False), ("length", True)}


@pytest.mark.parametrize("model", MODELS)
def test_streams_say_the_same_and_count_the_same(client: OpenAI, model: str) -> None:
    settings = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
    whole = _ask(client, model, **settings)
    usage_too = {"include_usage": True}
    chunks = list(_ask(client, model, stream=True, stream_options=usage_too, **settings))

    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == whole.choices[0].message.content
    assert len(chunks) > 5
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


@pytest.mark.parametrize("model", MODELS)
def test_stop_texts(client: OpenAI, model: str) -> None:
    whole = _ask(client, model).choices[0].message.content
    stop = whole[8:10]
    cut = _ask(client, model, stop=[stop, "never said"]).choices[0]

    assert cut.message.content == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    streamed = "".join(
        c.choices[0].delta.content or "" for c in _ask(client, model, stop=stop, stream=True)
    )
    assert streamed == cut.message.content


@pytest.mark.parametrize("model", MODELS)
def test_seeds_repeat_and_choices_differ(client: OpenAI, model: str) -> None:
    def sample(seed: int) -> list[str]:
        answer = _ask(client, model, temperature=1.0, seed=seed, n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens <= 72
        return [choice.message.content for choice in answer.choices]

    first = sample(11)
    assert len(set(first)) == 3
    assert sample(11) == first
    assert sample(12345) != first


@pytest.mark.parametrize("model", MODELS)
def test_streamed_choices_are_kept_apart(client: OpenAI, model: str) -> None:
    settings = {"temperature": 1.0, "seed": 5, "n": 3}
    whole = [choice.message.content for choice in _ask(client, model, **settings).choices]
    said = ["", "", ""]
    for chunk in _ask(client, model, stream=True, **settings):
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    assert said == whole


@pytest.mark.parametrize("model", MODELS)
def test_completions_of_texts_and_tokens(client: OpenAI, model: str) -> None:
    texts = ["The quick brown fox", "SELECT name"]
    many = client.completions.create(model=model, prompt=texts, max_tokens=8, temperature=0)
    alone = [
        client.completions.create(model=model, prompt=text, max_tokens=8, temperature=0)
        for text in texts
    ]
    assert [choice.text for choice in many.choices] == [one.choices[0].text for one in alone]
    assert many.usage is not None
    streamed = client.completions.create(
        model=model, prompt=texts[0], max_tokens=8, temperature=0, stream=True
    )
    assert "".join(c.choices[0].text for c in streamed) == alone[0].choices[0].text
    tokens = client.completions.create(model=model, prompt=[5, 6, 7], max_tokens=4)
    assert tokens.usage is not None
    assert tokens.usage.prompt_tokens == 3


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["plain", "gguf"]
    assert client.models.retrieve("tiny-file").id == "gguf"
    assert client.models.retrieve("tiny").id == "plain"


@pytest.mark.parametrize("model", MODELS)
def test_errors_are_the_clients_own_kinds(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as too_long:
        _ask(client, model, messages=_messages("word " * 5000))
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as bad_token:
        client.completions.create(model=model, prompt=[10**6], max_tokens=4)
    assert bad_token.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as tools:
        _ask(client, model, tools=[{"type": "function", "function": {"name": "f"}}])
    assert tools.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError) as unknown:
        _ask(client, "gpt-9")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.APIStatusError) as too_large:
        _ask(client, model, messages=_messages("a" * (5 * 2**20)))
    assert too_large.value.status_code == 413
    assert _ask(client, model).choices  # and it still answers


def test_an_error_in_a_stream_reaches_the_client(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        _ask(client, "plain", stream=True, messages=_messages("word " * 5000))
