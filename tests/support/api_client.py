"""A server of the HTTP API in a thread of the test's own process."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import httpx

from tightfit.engines.protocol import Engine
from tightfit.serving.http.app import ApiSettings
from tightfit.serving.http.limits import ServerLimits
from tightfit.serving.http.registry import ServerPhase
from tightfit.serving.http.server import ApiServer
from tightfit.serving.sockets import bind_socket


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that answers, and a client of it."""

    server: ApiServer
    http: httpx.Client
    thread: threading.Thread

    @property
    def url(self) -> str:
        return self.server.bound.url

    def chat(self, content: str, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def serving(
    *engines: Engine,
    names: tuple[str, ...] = ("scripted", "other"),
    host: str = "127.0.0.1",
    drain_seconds: float = 5.0,
    **settings: Any,
) -> Iterator[Served]:
    """Engines behind the API until the block ends; they are closed with it.

    `settings`: those of `ApiSettings` and of its limits.
    """
    names_of_limits = {field.name for field in fields(ServerLimits)}
    limits = {name: settings.pop(name) for name in names_of_limits & settings.keys()}
    given = ApiSettings(limits=ServerLimits(**limits), **settings)
    server = ApiServer(bind_socket(host, 0), given, drain_seconds=drain_seconds)
    loaded = [
        (engine, (name, f"{name}-alias")) for engine, name in zip(engines, names, strict=False)
    ]
    thread = threading.Thread(target=lambda: server.run(lambda: loaded), daemon=True)
    thread.start()
    key = settings.get("api_key")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"http://127.0.0.1:{server.bound.port}"
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
        wait_until(lambda: server.registry.phase is ServerPhase.READY)
        served = Served(server=server, http=http, thread=thread)
        try:
            yield served
        finally:
            served.stop()


def wait_until(is_so: Any, *, seconds: float = 30.0) -> None:
    """Fail the test if something does not become so in time."""
    end_s = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.01)


def read_events(response: httpx.Response) -> list[Any]:
    """The JSON of every event; the end mark as a text."""
    reported = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [one if one == "[DONE]" else json.loads(one) for one in reported]
