"""generate, chat, load, serve, compare and farm, called from Python as a user would."""

from __future__ import annotations

import dataclasses
import json
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from small_models import make_llama
from tightfit.api.chat import chat, load
from tightfit.api.compare import compare, find_both
from tightfit.api.farm import farm, preview_farm
from tightfit.api.generate import generate, preview_generate
from tightfit.api.options.engines import SamplingOptions
from tightfit.api.options.serving import CompareOptions, ServeOptions
from tightfit.api.serve import ServeWatcher, prepare_server
from tightfit.core.errors import NotFoundError, UsageError, UserError
from tightfit.core.sampling import Sampling


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_llama(folder)
    return str(folder)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "questions.txt"
    path.write_text("how many singers\nwhat is the capital\nwho wrote it\n", "utf-8")
    return path


def test_generate_writes_answers_and_resumes(model: str, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    seen: list[tuple[str, int, int]] = []
    asked: dict[str, Any] = {"prompts": str(prompts), "out": out, "max_new_tokens": 4}

    result = generate(model, **asked, device="cpu", progress=lambda *call: seen.append(call))

    assert (result.out, result.num_answers, result.num_failed) == (out, 3, 0)
    assert result.error is None
    assert [row["prompt_index"] for row in result.read_rows()] == [0, 1, 2]
    assert result.statistics is not None
    assert result.statistics.num_answers == 3
    assert seen[-1] == ("answers", 3, 3)
    assert generate(model, **asked, device="cpu").was_finished


def test_generate_previews_without_loading(model: str, prompts: Path) -> None:
    preview = preview_generate(model, prompts=str(prompts), limit=2, device="cpu")

    assert len(preview.job.prompts) == 2
    assert "how many singers" in preview.rendered[0]
    assert preview.prediction is not None
    assert preview.prediction.estimate.peak_bytes > 0


def test_a_conversation_keeps_its_turns(model: str) -> None:
    with load(model, device="cpu", max_new_tokens=3) as conversation:
        first = conversation.ask("hello")
        conversation.ask("again")

        assert first.done is not None
        assert [turn.role for turn in conversation.turns] == ["user", "assistant"] * 2


def test_chat_answers_one_message(model: str) -> None:
    reply = chat(model, once="hello", device="cpu", max_new_tokens=3)

    assert reply.done is not None
    assert reply.done.num_new_tokens <= 3
    with pytest.raises(UsageError, match="one message"):
        chat(model)


def test_a_server_answers_until_it_is_stopped(model: str) -> None:
    is_ready = threading.Event()

    class Watcher(ServeWatcher):
        def ready(self, ready: object) -> None:  # noqa: ARG002
            is_ready.set()

    server = prepare_server(ServeOptions([model], port=0, device="cpu"), Watcher())
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert is_ready.wait(120)
        with urllib.request.urlopen(f"{server.url}/health", timeout=30) as response:
            assert json.loads(response.read()) == {"status": "ready"}
    finally:
        server.stop()
        thread.join(60)
    assert not thread.is_alive()


def test_a_farm_on_this_machine(model: str, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "farmed.jsonl"
    asked: dict[str, Any] = {"prompts": str(prompts), "out": out, "max_new_tokens": 4}
    asked |= {"device": "cpu", "workers": 1, "seed": 3}

    preview = preview_farm(model, **asked)
    assert [group.num_workers for group in preview.groups] == [1]

    result = farm(model, **asked)

    assert result.statistics is not None
    assert (result.statistics.num_answers, result.num_failed) == (3, 0)
    assert out.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("verb", [generate, farm, load], ids=["generate", "farm", "load"])
def test_a_model_that_is_not_there_is_a_user_error(
    verb: Callable[..., object], prompts: Path, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {} if verb is load else {"prompts": str(prompts)}
    with pytest.raises(NotFoundError):
        verb(str(tmp_path / "nowhere"), **asked)


def test_keywords_are_checked_as_on_the_command_line(model: str, prompts: Path) -> None:
    with pytest.raises(UserError, match="--temperature"):
        generate(model, prompts=str(prompts), temperature=-1.0)


def test_every_sampling_field_is_an_option() -> None:
    fields = {field.name for field in dataclasses.fields(Sampling)} - {
        "ignores_stop_tokens",  # for measuring
        *("logit_bias", "top_logprobs", "grammar"),  # of requests to the server alone
    }

    assert {field.name for field in dataclasses.fields(SamplingOptions)} == fields


def test_compare_names_its_models_apart(model: str, tmp_path: Path) -> None:
    named = find_both(CompareOptions(model, model))
    assert len({name for name, _ in named}) == 2

    with pytest.raises(UsageError, match="was not tuned"):
        find_both(CompareOptions(model))
    with pytest.raises(NotFoundError):
        compare(str(tmp_path / "nowhere"), model)
