"""OpenAI's own client against `tightfit serve`, with transformers and with llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from api_processes import MODELS, ServerProcess

pytest_plugins = ("api_served",)

IGNORE_EOS = {"ignore_eos": True}
QUESTION = "How many singers are older than the average?"
LOGPROB_TOLERANCE = {"plain": 2e-3, "gguf": 0.05}
"""llama.cpp rounds activations between its products; transformers is the reference itself."""


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


@pytest.fixture(scope="module")
def reference(tiny: tuple[Path, Path]) -> Any:
    """Scores of a token sequence by transformers itself: (tokens, vocabulary)."""
    import torch
    import transformers

    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(tiny[0], dtype=torch.float32)

    def score(tokens: list[int]) -> Any:
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0]

    return score


@pytest.fixture(scope="module")
def reference_states(tiny: tuple[Path, Path]) -> Any:
    """Last hidden states of a token sequence by transformers itself: (tokens, width)."""
    import torch
    import transformers

    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(tiny[0], dtype=torch.float32)

    def compute(tokens: list[int]) -> Any:
        with torch.inference_mode():
            output = model(torch.tensor([tokens]), output_hidden_states=True)
        return output.hidden_states[-1][0]

    return compute


def _tokens(server: ServerProcess, **body: Any) -> list[int]:
    answer = httpx.post(f"{server.url}/tokenize", json=body, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["count"] == len(answer.json()["tokens"])
    return list(answer.json()["tokens"])


@pytest.mark.parametrize("model", MODELS)
def test_log_probabilities_are_the_models_own(
    server: ServerProcess, client: OpenAI, reference: Any, model: str
) -> None:
    # Whatever is drawn, and how; token 60 is one plain character.
    forced = {"logit_bias": {"60": 100}, "temperature": 2.0, "seed": 4, "max_tokens": 4}
    wanted = {"logprobs": True, "top_logprobs": 3, "extra_body": IGNORE_EOS}
    whole = _ask(client, model, **forced, **wanted).choices[0]
    entries = whole.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == whole.message.content
    streamed = [
        entry
        for chunk in _ask(client, model, stream=True, **forced, **wanted)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]

    prompt = _tokens(server, model=model, messages=_messages())
    scores = reference(prompt + [60] * 3)[-4:].log_softmax(-1)
    for at, entry in enumerate(entries):
        near = LOGPROB_TOLERANCE[model]
        assert entry.logprob == pytest.approx(float(scores[at, 60]), abs=near)
        best = scores[at].topk(3).values.tolist()
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(best, abs=near)


@pytest.mark.parametrize("model", MODELS)
def test_a_text_is_scored_as_evaluation_harnesses_do(
    server: ServerProcess, client: OpenAI, reference: Any, model: str
) -> None:
    text = "The quick brown fox"
    tokens = _tokens(server, model=model, prompt=text)
    scored = client.completions.create(
        model=model, prompt=tokens, max_tokens=0, echo=True, logprobs=1
    )
    found = scored.choices[0]
    logprobs: Any = found.logprobs
    expected = reference(tokens).log_softmax(-1)
    own = [float(expected[at, token]) for at, token in enumerate(tokens[1:])]

    assert found.text.endswith(text)
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(own, abs=2e-3)
    best = expected[:-1].max(-1).values.tolist()
    assert [max(top.values()) for top in logprobs.top_logprobs[1:]] == pytest.approx(best, abs=2e-3)
    assert "".join(logprobs.tokens).endswith(text)
    back = httpx.post(
        f"{server.url}/detokenize",
        json={"model": model, "tokens": tokens},
        trust_env=False,
        timeout=60,
    )
    assert back.json()["prompt"].endswith(text)

    both = client.completions.create(
        model=model, prompt=text, max_tokens=3, echo=True, logprobs=0, temperature=0, stream=True
    )
    pieces = [chunk.choices[0] for chunk in both]
    assert "".join(piece.text for piece in pieces).startswith(text)
    offsets = [at for piece in pieces if piece.logprobs for at in piece.logprobs.text_offset or ()]
    assert offsets == sorted(offsets)
    assert len(offsets) == len(tokens) + 3


@pytest.mark.parametrize("model", MODELS)
def test_penalties_and_biases_change_the_scores(
    server: ServerProcess, client: OpenAI, reference: Any, model: str
) -> None:
    import torch

    prompt = _tokens(server, model=model, prompt="SELECT name FROM singer")
    presence, frequency = 1.5, 0.7
    bias = {70: 1.0, **dict.fromkeys(range(4), -100.0)}  # no control tokens: none ends it
    # llama.cpp counts the prompt's tokens too.
    counts = torch.zeros(len(reference([0])[0]))
    if model == "gguf":
        counts += torch.bincount(torch.tensor(prompt), minlength=len(counts))
    expected: list[int] = []
    for _ in range(24):
        scores = reference(prompt + expected)[-1].clone()
        for token, amount in bias.items():
            scores[token] += amount
        scores -= presence * (counts > 0) + frequency * counts
        expected.append(int(scores.argmax()))
        counts[expected[-1]] += 1
    settings: Any = {"max_tokens": 24, "temperature": 0}
    answer = client.completions.create(
        model=model,
        prompt=prompt,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias={str(token): int(amount) for token, amount in bias.items()},
        logprobs=0,
        **settings,
    )
    said: Any = answer.choices[0].logprobs
    plain: Any = client.completions.create(model=model, prompt=prompt, **settings)
    # llama.cpp names no token that ends inside a character.
    assert len(said.tokens) == len(expected) or model == "gguf"
    back = {"model": model, "tokens": expected}
    text = httpx.post(f"{server.url}/detokenize", json=back, trust_env=False, timeout=60).json()
    assert answer.choices[0].text == text["prompt"]
    assert plain.choices[0].text != text["prompt"]


@pytest.mark.parametrize("model", MODELS)
def test_embeddings_are_the_mean_of_the_last_hidden_states(
    server: ServerProcess, client: OpenAI, reference_states: Any, model: str
) -> None:
    texts = ["The quick brown fox", "SELECT name FROM singer"]
    tokens = [_tokens(server, model=model, prompt=text) for text in texts]
    near = 1e-5 if model == "plain" else 5e-3
    wanted = [reference_states(one).mean(0) for one in tokens]
    wanted = [(state / state.norm()).tolist() for state in wanted]
    # This client asks for base64 by itself.
    found = client.embeddings.create(model=model, input=texts)
    assert [one.index for one in found.data] == [0, 1]
    for one, state in zip(found.data, wanted, strict=True):
        assert one.embedding == pytest.approx(state, abs=near)
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, tokens))
    alone = client.embeddings.create(model=model, input=texts[0], encoding_format="float")
    assert alone.data[0].embedding == pytest.approx(found.data[0].embedding, abs=1e-6)
    given: Any
    for given in (tokens, tokens[0]):
        by_token = client.embeddings.create(model=model, input=given).data[0].embedding
        assert by_token == pytest.approx(found.data[0].embedding, abs=1e-6)
    long = [5 + at % 300 for at in range(1000)]
    state = reference_states(long).mean(0)
    (whole,) = client.embeddings.create(model=model, input=long).data
    assert whole.embedding == pytest.approx((state / state.norm()).tolist(), abs=near)


@pytest.mark.parametrize("model", MODELS)
def test_embeddings_beyond_the_limits_are_refused(client: OpenAI, model: str) -> None:
    width = len(client.embeddings.create(model=model, input="a").data[0].embedding)
    assert client.embeddings.create(model=model, input="a", dimensions=width).data
    refused: list[tuple[Any, str]] = [
        ({"input": "a", "dimensions": width - 1}, "unsupported_parameter"),
        ({"input": "word " * 3000}, "context_length_exceeded"),
        ({"input": ["a", ""]}, "invalid_value"),
        ({"input": []}, "invalid_value"),
        ({"input": ["a"] * 2049}, "invalid_value"),
        ({"input": [[5] * 1000] * 301}, "max_tokens_per_request"),
        ({"input": [10**6]}, "invalid_request"),
        ({"input": "a", "encoding_format": "hex"}, "invalid_value"),
    ]
    for settings, code in refused:
        with pytest.raises(openai.BadRequestError) as error:
            client.embeddings.create(model=model, **settings)
        assert error.value.code == code, settings
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="gpt-9", input="a")


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
