"""`tightfit serve` as users run it: addresses, keys, signals, callers that go."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from api_client import wait_until
from api_processes import MODELS, TIGHTFIT, ServerProcess, server_process

pytest_plugins = ("api_served",)

NUM_TRIES = 3
HELLO: Any = [{"role": "user", "content": "How many singers?"}]


def _serve(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TIGHTFIT, "serve", *map(str, words)],
        check=False,
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, **variables},
    )


@pytest.mark.parametrize("model", MODELS)
def test_a_caller_who_goes_stops_the_computing(server: ServerProcess, model: str) -> None:
    computed = []
    for _ in range(NUM_TRIES):  # a busy machine may let us sleep until all is computed
        before = server.gauge("tightfit_generated_tokens_total")
        stream = server.client.chat.completions.create(
            model=model,
            messages=HELLO,
            temperature=1,
            stream=True,
            n=16,  # so that it would take a while
            extra_body={"ignore_eos": True},  # else it may end by itself
        )
        next(iter(stream))
        was_running = server.gauge("tightfit_answers_running") >= 1
        stream.close()
        wait_until(lambda: server.gauge("tightfit_answers_running") == 0, seconds=60)
        computed.append(server.gauge("tightfit_generated_tokens_total") - before)
        if was_running and computed[-1] < 8_000:  # of about 16,000
            return
    pytest.fail(f"it went on after the caller was gone: {computed} tokens")


def test_beyond_loopback_every_request_needs_the_key(tiny: tuple[Path, Path]) -> None:
    with server_process(tiny[1], "--host", "0.0.0.0") as server:
        key = server.ready["api_key"]
        assert len(key) >= 32
        with pytest.raises(openai.AuthenticationError):
            server.client.models.list()
        bare = httpx.post(f"{server.url}/v1/chat/completions", json={}, trust_env=False, timeout=60)
        assert bare.status_code == 401
        health = httpx.get(f"{server.url}/health", trust_env=False, timeout=60)
        assert health.json() == {"status": "ready"}
        answer = server.client_with(key).chat.completions.create(
            model="tiny-file", messages=HELLO, max_tokens=4, temperature=0
        )
        assert answer.choices[0].finish_reason == "length"


def test_another_machines_name_is_refused(server: ServerProcess) -> None:
    headers = {"Host": "evil.example"}
    response = httpx.get(f"{server.url}/v1/models", headers=headers, trust_env=False, timeout=60)
    assert response.status_code == 403


def test_a_signal_while_streaming_ends_the_answer_and_the_process(tiny: tuple[Path, Path]) -> None:
    for _ in range(NUM_TRIES):  # as above
        with server_process(tiny[1], "--drain", 0) as server:
            stream = server.client.chat.completions.create(
                model="tiny-file",
                messages=HELLO,
                stream=True,
                n=16,  # so that it would take a while
                extra_body={"ignore_eos": True},
            )
            events = iter(stream)
            next(events)
            began_s = time.monotonic()
            server.process.terminate()
            code = _read_to_the_end(events)
            assert server.process.wait(30) == 0
            assert time.monotonic() - began_s < 30
            assert server.process.stderr is not None
            said = server.process.stderr.read()
            assert said.endswith("stopped\n")
            assert "Traceback" not in said
        if code is not None:
            assert code == "shutting_down"
            return
    pytest.fail("the answers went on to their end")


def _read_to_the_end(events: Iterator[Any]) -> str | None:
    """The code of the error that broke it off; None where nothing did."""
    try:
        for _ in events:
            pass
    except openai.APIError as reported:
        return reported.code
    return None


def test_a_signal_lets_a_short_answer_end(tiny: tuple[Path, Path]) -> None:
    with server_process(tiny[1], "--drain", 60) as server:
        stream = server.client.chat.completions.create(
            model="tiny-file",
            messages=HELLO,
            stream=True,
            max_tokens=200,
            extra_body={"ignore_eos": True},
        )
        events = iter(stream)
        next(events)
        server.process.terminate()
        assert list(events)[-1].choices[0].finish_reason == "length"
        assert server.process.wait(30) == 0


def test_a_taken_port_is_told_before_anything_is_loaded(tiny: tuple[Path, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = _serve(tiny[1], "--port", port, "--json")
    assert done.returncode == 6
    assert f"Port {port}" in json.loads(done.stdout)["error"]
    assert "loading" not in done.stderr


def test_what_cannot_be_loaded_is_told(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    assert _serve(tmp_path / "nothing").returncode == 3
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny[1].read_bytes()[:20_000])
    done = _serve(broken, "--port", 0)
    assert done.returncode in (3, 4)
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr
    same = _serve(tiny[0], tiny[0].parent / "tiny-file.gguf", "--name", "tiny", "--name", "tiny")
    assert same.returncode == 2
