"""`python -m tightfit.clusters.preflight.agent`: answers questions about its node, line by line.

A question is `{"id": 1, "do": "facts", ...}` on stdin, its answer `{"id": 1, "answer": ...}` or
`{"id": 1, "error": "..."}` on stdout. It ends when stdin closes, and in any case after a while:
nothing is left running on a node.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tightfit.clusters.agents import SendAnswer, open_answers, read_requests
from tightfit.clusters.preflight import folder
from tightfit.clusters.preflight.messages import PROTOCOL
from tightfit.clusters.preflight.probes import (
    Listener,
    find_routes,
    probe_connections,
    probe_facts,
    resolve_names,
    send_datagrams,
    send_stream,
)
from tightfit.core.version import __version__

MAX_LIFE_SECONDS = 180.0


class TorchProcess:
    """torch in a process of its own: it may hang, and is then ended with the agent."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._facts: Any = None
        self._turn = threading.Lock()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tightfit.clusters.preflight.collective"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
        )

    def look(self) -> Any:
        with self._turn:
            if self._facts is None:
                self._facts = self._read()
            return self._facts

    def reduce(self, request: dict[str, Any]) -> Any:
        self.look()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _read(self) -> Any:
        if self._process is None:
            self.start()
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise OSError(f"torch's process ended with {code}")
        return json.loads(line)


class Agent:
    """The questions an agent answers, by name."""

    def __init__(self) -> None:
        self.torch = TorchProcess()
        self.listener = Listener()

    def find(self, name: str) -> Callable[[dict[str, Any]], Any] | None:
        found: Callable[[dict[str, Any]], Any] | None = getattr(self, f"do_{name}", None)
        return found

    def do_facts(self, _request: dict[str, Any]) -> Any:
        return probe_facts()

    def do_clock(self, _request: dict[str, Any]) -> Any:
        return time.time()

    def do_lookup(self, request: dict[str, Any]) -> Any:
        return resolve_names(request["names"])

    def do_routes(self, request: dict[str, Any]) -> Any:
        return find_routes(request["addresses"])

    def do_open(self, request: dict[str, Any]) -> Any:
        return self.listener.open(request["port"])

    def do_close_port(self, _request: dict[str, Any]) -> Any:
        self.listener.close_rendezvous()

    def do_connect(self, request: dict[str, Any]) -> Any:
        return probe_connections(request["targets"], request["seconds"])

    def do_datagrams(self, request: dict[str, Any]) -> Any:
        amounts = {key: request[key] for key in ("sender", "num_small", "num_large")}
        return send_datagrams(request["targets"], **amounts)

    def do_received(self, request: dict[str, Any]) -> Any:
        return self.listener.count_received(request["senders"])

    def do_stream(self, request: dict[str, Any]) -> Any:
        keys = ("node", "address", "port", "seconds")
        return send_stream(**{key: request[key] for key in keys})

    def do_folder(self, request: dict[str, Any]) -> Any:
        step = getattr(folder, request["step"])
        return step(Path(request["place"]), **request["given"])

    def do_torch_start(self, _request: dict[str, Any]) -> Any:
        self.torch.start()

    def do_torch(self, _request: dict[str, Any]) -> Any:
        return self.torch.look()

    def do_reduce(self, request: dict[str, Any]) -> Any:
        return self.torch.reduce(request["given"])


def main() -> int:
    send = open_answers()
    agent = Agent()
    life = threading.Timer(MAX_LIFE_SECONDS, _leave, [agent])
    life.daemon = True
    life.start()
    send({"hello": "tightfit", "protocol": PROTOCOL, "version": __version__})
    for request in read_requests():
        threading.Thread(target=_answer, args=(agent, request, send), daemon=True).start()
    _leave(agent)
    return 0


def _answer(agent: Agent, request: dict[str, Any], send: SendAnswer) -> None:
    """In a thread for each question: none of them may keep the others waiting."""
    reply: dict[str, Any] = {"id": request["id"]}
    try:
        do = agent.find(request["do"])
        if do is None:
            raise ValueError(f"no question is named {request['do']}")
        reply["answer"] = _plain(do(request))
    except Exception as error:
        # Whatever it is, the one who asked has to hear of it.
        reply["error"] = f"{type(error).__name__}: {error}"[:400]
    send(reply)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _leave(agent: Agent) -> None:
    agent.torch.end()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
