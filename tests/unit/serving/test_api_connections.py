"""Slow, silent and crowding clients of the HTTP API, and pages of other sites."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from api_client import Served, serving, wait_until
from hostile_requests import CHAT, COMPLETION, Answer, http_request, idle_connections, read_answers
from scripted_engine import ScriptedEngine, ScriptedPrompter
from tightfit.serving.http.limits import SPARE_FILES, reserve_connections
from tightfit.serving.http.schemas import ErrorBody
from tightfit.serving.sockets import is_same_origin

BODY = json.dumps({"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}).encode()


@contextlib.contextmanager
def _connection(served: Served) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", served.server.bound.port), timeout=30) as raw:
        yield raw


def _read(raw: socket.socket) -> list[Answer]:
    received = b""
    while piece := raw.recv(65_536):
        received += piece
    return list(read_answers(received))


def _code(answer: Answer) -> str | None:
    return ErrorBody.model_validate_json(answer.body, strict=True).error.code


@pytest.mark.parametrize(
    "sent", [http_request(BODY)[:-5], http_request(BODY)[:40], b"GET /health HTTP/1.1\r\nHost: a"]
)
def test_a_request_that_does_not_arrive_gets_408_and_others_their_answers(sent: bytes) -> None:
    with serving(ScriptedEngine(), request_seconds=0.5) as served, _connection(served) as raw:
        raw.sendall(sent)
        assert served.chat("abc", max_tokens=1).status_code == 200
        (answer,) = _read(raw)
        assert (answer.status, _code(answer)) == (408, "request_timeout")


def test_a_connection_that_says_nothing_is_closed_without_a_word() -> None:
    with serving(ScriptedEngine(), request_seconds=0.2) as served, _connection(served) as raw:
        assert _read(raw) == []


def test_the_clock_does_not_start_again_with_every_byte() -> None:
    with serving(ScriptedEngine(), request_seconds=0.5) as served, _connection(served) as raw:
        raw.settimeout(0.05)
        received = b""
        for _ in range(100):
            with contextlib.suppress(TimeoutError):
                raw.sendall(b"X")
                received = raw.recv(1000)
                break
        assert [one.status for one in read_answers(received)] == [408]


def test_when_all_connections_are_taken_the_longest_silent_one_is_closed() -> None:
    engine = ScriptedEngine(num_slots=1, token_seconds=0.01, max_context=10**6)
    with serving(engine, max_connections=20) as served:
        port = served.server.bound.port
        with _connection(served) as talking:
            talking.sendall(http_request(BODY.replace(b"3}", b"200}")))
            wait_until(lambda: bool(engine.tickets))
            with idle_connections(port, 60) as opened:
                assert opened[0].recv(1) == b""
                assert [one.status for one in _read(talking)] == [200]  # it was never silent
                assert served.chat("abc", max_tokens=1).status_code == 200


def test_where_all_connections_are_being_answered_one_more_gets_503() -> None:
    engine = ScriptedEngine(num_slots=1, token_seconds=0.05, max_context=10**6)
    with serving(engine, max_connections=1) as served:
        served.http.close()  # its idle connection would make room
        with _connection(served) as talking:
            talking.sendall(http_request(BODY.replace(b"3}", b"9000}")))
            wait_until(lambda: bool(engine.tickets))
            with _connection(served) as third:
                (answer,) = _read(third)
            assert (answer.status, _code(answer)) == (503, "too_many_connections")
            assert answer.headers["retry-after"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 70_000, 431),
        (b"junk\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (http_request(BODY, headers=["Transfer-Encoding: chunked"]), 400),
        (http_request(BODY, headers=["Content-Length: 7"]), 400),
        (http_request(BODY).replace(b"Content-Length: ", b"Content-Length: -"), 400),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
        (http_request(BODY, headers=["Origin: https://evil.example"]), 403),
        (http_request(BODY, headers=["Origin: null"]), 403),
        (http_request(BODY, headers=["Origin:"]), 403),
        (
            http_request(BODY, headers=["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors"]),
            403,
        ),
        (http_request(BODY, headers=["Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: no-cors"]), 403),
    ],
)
def test_what_is_no_proper_request_is_refused_in_the_same_shape(sent: bytes, status: int) -> None:
    with serving(ScriptedEngine()) as served, _connection(served) as raw:
        raw.sendall(sent)
        (answer,) = _read(raw)
        assert answer.status == status
        assert _code(answer)
        assert served.http.get("/health").status_code == 200


def test_a_page_of_a_named_origin_may_ask() -> None:
    with serving(ScriptedEngine(), cors_origins=("https://page.example",)) as served:
        for origin, status in (
            ("https://page.example", 200),
            (served.url, 200),
            ("https://other.example", 403),
        ):
            response = served.http.post(
                CHAT,
                content=BODY,
                headers={"Content-Type": "application/json", "Origin": origin},
            )
            assert response.status_code == status, origin


def test_an_origin_is_the_same_by_name_and_port() -> None:
    assert is_same_origin("http://localhost:80", "LOCALHOST:80")
    assert not is_same_origin("http://localhost:81", "localhost:80")
    assert not is_same_origin("null", "localhost")
    assert not is_same_origin("", "")


def test_bodies_of_many_values_keep_nobody_waiting() -> None:
    many = 2_000_000
    bodies = [
        b'{"prompt": [' + b"1," * many + b"1]}",
        b'{"prompt": [' + b"[1]," * (many // 2) + b"[1]]}",
        b'{"prompt": "a", "user": [' + b"[]," * (many // 2) + b"[]]}",
        b'{"prompt": ["' + b'","' * (many // 2) + b'"]}',
        b'{"messages": [' + b'{"role":"user","content":"a"},' * (many // 16) + b"{}]}",
    ]
    statuses: list[int] = []
    waits = []
    with serving(ScriptedEngine()) as served:

        def send() -> None:
            with httpx.Client(base_url=served.url, timeout=60, trust_env=False) as http:
                for body in bodies:
                    headers = {"Content-Type": "application/json"}
                    route = CHAT if b"messages" in body else COMPLETION
                    statuses.append(http.post(route, content=body, headers=headers).status_code)

        sender = threading.Thread(target=send)
        sender.start()
        while sender.is_alive():
            began = time.monotonic()
            assert served.http.get("/health").status_code == 200
            waits.append(time.monotonic() - began)
        sender.join()
        # Marks within a text are no values.
        text = '"[1,{},' * 150_000
        assert served.chat(text, max_tokens=1).json()["error"]["code"] == "context_length_exceeded"
    assert statuses == [413] * len(bodies)
    assert max(waits) < 2.0


class _SlowPrompter(ScriptedPrompter):
    """Encodes a prompt only when it is allowed to."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.num_encoded = 0

    def continue_text(self, text: str, *, begins: bool = True) -> tuple[int, ...]:
        self.may_go_on.wait(60)
        self.num_encoded += 1
        return super().continue_text(text, begins=begins)


def test_a_prompt_whose_client_is_gone_is_not_encoded() -> None:
    engine = ScriptedEngine()
    engine.prompter = prompter = _SlowPrompter()
    with serving(engine) as served:
        model = served.server.registry.models[0]
        sent = http_request(json.dumps({"prompt": "abc"}).encode(), "/v1/completions")
        with contextlib.ExitStack() as connections:
            for _ in range(10):
                connections.enter_context(_connection(served)).sendall(sent)
            wait_until(lambda: model.num_owed == 10)
        wait_until(lambda: model.num_owed == 0)
        prompter.may_go_on.set()
        assert served.chat("abc", max_tokens=1).status_code == 200
        assert prompter.num_encoded <= 1  # the one that had begun
        assert engine.tickets[:-1] == []


def test_a_long_list_of_wrong_items_is_one_error() -> None:
    with serving(ScriptedEngine()) as served:
        for name, path in (("messages", CHAT), ("prompt", "/v1/completions")):
            body = f'{{"{name}": [{",".join(["{}"] * 40_000)}]}}'.encode()
            response = served.http.post(
                path, content=body, headers={"Content-Type": "application/json"}
            )
            assert response.status_code == 400
            assert response.elapsed.total_seconds() < 20


def test_open_files_are_raised_to_what_the_connections_need() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, SPARE_FILES), hard))
        assert reserve_connections(200) == 200
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 200 + SPARE_FILES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
