"""Clients that go, read slowly or stay too long, and servers that are stopped."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from api_client import Served, read_events, serving, wait_until
from scripted_engine import ScriptedEngine
from tightfit.serving.http.limits import MAX_SIDE_JOBS
from tightfit.serving.http.registry import ServerPhase

LONG = 100_000


def _send(served: Served, *, buffer_bytes: int | None = None, **fields: object) -> socket.socket:
    """A chat request on a connection of its own, its answer not read."""
    body = json.dumps({"messages": [{"role": "user", "content": "abc"}], **fields}).encode()
    raw = socket.socket()
    if buffer_bytes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    raw.connect(("127.0.0.1", served.server.bound.port))
    raw.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    return raw


def _engine(**changes: object) -> ScriptedEngine:
    settings = {"num_slots": 1, "token_seconds": 0.01, "max_context": LONG, **changes}
    return ScriptedEngine(**settings)  # type: ignore[arg-type]


def test_a_client_that_leaves_mid_stream_frees_its_slot() -> None:
    engine = _engine()
    with serving(engine) as served:
        raw = _send(served, stream=True)
        raw.settimeout(60)
        reported = b""
        while b"data: " not in reported:  # headers and the first piece may come apart
            reported += raw.recv(10_000)
        raw.close()
        assert engine.tickets[0].is_over.wait(60)
        assert engine.tickets[0].num_computed < LONG // 10
        wait_until(lambda: served.server.registry.models[0].num_owed == 0)
        assert served.chat("abc", max_tokens=1).status_code == 200
        assert 'end="cancelled"} 1\n' in served.http.get("/metrics").text


def test_a_client_that_leaves_before_a_whole_answer_frees_its_slot() -> None:
    engine = _engine()
    with serving(engine) as served:
        raw = _send(served, n=2)
        wait_until(lambda: len(engine.tickets) == 2 and engine.tickets[0].num_computed > 0)
        raw.close()
        for ticket in engine.tickets:
            wait_until(ticket.is_over.is_set, seconds=60)
        # None, or a few where the machine pauses between the ends of the first and the second.
        assert engine.tickets[1].num_computed < 10
        wait_until(lambda: 'code="499"} 1\n' in served.http.get("/metrics").text)


def test_requests_for_tokens_have_a_limit_of_their_own_and_delay_no_answer() -> None:
    engine, goes_on = _engine(token_seconds=0), threading.Event()

    def continue_text(text: str, *, begins: bool = True) -> tuple[int, ...]:
        del begins
        goes_on.wait(60)
        return tuple(map(ord, text))

    engine.prompter.continue_text = continue_text
    body = {"prompt": "abc"}
    with serving(engine) as served, ThreadPoolExecutor(MAX_SIDE_JOBS) as pool:
        model = served.server.registry.models[0]
        waiting = [
            pool.submit(served.http.post, "/tokenize", json=body) for _ in range(MAX_SIDE_JOBS)
        ]
        wait_until(lambda: model.num_side == MAX_SIDE_JOBS)
        refused = served.http.post("/v1/messages/count_tokens", json={
            "messages": [{"role": "user", "content": "abc"}]})  # fmt: skip
        answered = served.chat("abc", max_tokens=1)
        goes_on.set()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert answered.status_code == 200
        assert [one.result().json()["count"] for one in waiting] == [3] * MAX_SIDE_JOBS
        wait_until(lambda: model.num_side == 0)
        assert served.http.post("/tokenize", json=body).status_code == 200


def test_a_slow_reader_costs_his_answer_and_no_more() -> None:
    engine = _engine(token_seconds=0)
    with serving(engine) as served:
        raw = _send(served, stream=True, max_tokens=50_000)
        assert engine_ended(engine)
        job_free = served.server.registry.models[0]
        wait_until(lambda: job_free.num_owed == 0)
        time.sleep(0.2)
        # A reader that takes his time still gets every character, once and in order.
        reported = b""
        raw.settimeout(60)
        while b"[DONE]" not in reported:
            reported += raw.recv(100_000)
        raw.close()
    events = [json.loads(one[6:]) for one in _dechunk(reported).split("\n\n") if "choices" in one]
    said = "".join(c["delta"].get("content", "") for event in events for c in event["choices"])
    assert said == ("abc" * 20_000)[:50_000]
    assert len(events) < 20_000  # what waited was joined


def test_a_reader_who_takes_nothing_is_let_go() -> None:
    engine = _engine(token_seconds=0.0001, max_context=10**6)
    with serving(engine, stall_seconds=0.3) as served:
        # Small buffers, so that little has to be said before nothing more goes through.
        served.server.bound.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        raw = _send(served, buffer_bytes=8192, stream=True)
        wait_until(lambda: bool(engine.tickets))  # it is owed now, or was: a reader goes soon
        wait_until(lambda: served.server.registry.models[0].num_owed == 0, seconds=60)
        assert engine.tickets[0].num_computed < 10**6 - 3
        raw.settimeout(60)
        reported = b""
        while piece := raw.recv(1_000_000):
            reported = reported[-100:] + piece
        raw.close()
        assert b"[DONE]" not in reported


def engine_ended(engine: ScriptedEngine) -> bool:
    wait_until(lambda: bool(engine.tickets))
    return engine.tickets[0].is_over.wait(120)


def _dechunk(told: bytes) -> str:
    body, said = told.partition(b"\r\n\r\n")[2], b""
    while body:
        size, _, body = body.partition(b"\r\n")
        said, body = said + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return said.decode()


def test_a_stopping_server_lets_answers_end() -> None:
    engine = _engine(token_seconds=0.01)
    with serving(engine, drain_seconds=60) as served:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(served.chat("abc", max_tokens=60)))
        asking.start()
        wait_until(lambda: bool(engine.tickets))
        served.server.stop()
        asking.join(60)
        assert answers[0].json()["usage"]["completion_tokens"] == 60
    assert engine.is_closed


def test_answers_that_outlast_the_limit_are_stopped_in_an_orderly_way() -> None:
    engine = _engine()
    with serving(engine, drain_seconds=0.3) as served:
        streams: list[list[object]] = []
        wholes: list[httpx.Response] = []
        asking = [
            threading.Thread(target=lambda: streams.append(_read(served))),
            threading.Thread(target=lambda: wholes.append(served.chat("abc"))),
        ]
        for one in asking:
            one.start()
        wait_until(lambda: len(engine.tickets) == 2)
        wait_until(lambda: any(ticket.num_computed for ticket in engine.tickets))
        began_s = time.monotonic()
        served.server.stop()
        for one in asking:
            one.join(30)
        served.thread.join(30)
        assert time.monotonic() - began_s < 60  # the answers alone would take minutes
        assert served.server.registry.phase is ServerPhase.STOPPING
    last = streams[0][-1]
    assert isinstance(last, dict)
    assert last["error"]["code"] == "shutting_down"
    assert wholes[0].status_code == 503
    assert wholes[0].json()["error"]["code"] == "shutting_down"
    assert engine.is_closed


def _read(served: Served) -> list[object]:
    body = {"messages": [{"role": "user", "content": "abc"}], "stream": True}
    with httpx.Client(base_url=served.url, trust_env=False, timeout=30) as client:
        return read_events(client.post("/v1/chat/completions", json=body))
