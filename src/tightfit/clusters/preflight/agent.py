"""`python -m tightfit.clusters.preflight.agent`: answers questions about its node, line by line.

A question is `{"id": 1, "do": "facts", ...}` on stdin, its answer `{"id": 1, "answer": ...}` or
`{"id": 1, "fault": "..."}` on stdout. It ends when stdin closes, and in any case after a while:
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

from tightfit import __version__
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

    def reduce(self, wish: dict[str, Any]) -> Any:
        self.look()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(wish) + "\n")
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

    def do_facts(self, _wish: dict[str, Any]) -> Any:
        return probe_facts()

    def do_clock(self, _wish: dict[str, Any]) -> Any:
        return time.time()

    def do_lookup(self, wish: dict[str, Any]) -> Any:
        return resolve_names(wish["names"])

    def do_routes(self, wish: dict[str, Any]) -> Any:
        return find_routes(wish["addresses"])

    def do_open(self, wish: dict[str, Any]) -> Any:
        return self.listener.open(wish["port"])

    def do_close_port(self, _wish: dict[str, Any]) -> Any:
        self.listener.close_rendezvous()

    def do_knock(self, wish: dict[str, Any]) -> Any:
        return probe_connections(wish["targets"], wish["seconds"])

    def do_spray(self, wish: dict[str, Any]) -> Any:
        amounts = {key: wish[key] for key in ("sender", "num_small", "num_large")}
        return send_datagrams(wish["targets"], **amounts)

    def do_heard(self, wish: dict[str, Any]) -> Any:
        return self.listener.tell_heard(wish["senders"])

    def do_stream(self, wish: dict[str, Any]) -> Any:
        keys = ("node", "address", "port", "seconds")
        return send_stream(**{key: wish[key] for key in keys})

    def do_folder(self, wish: dict[str, Any]) -> Any:
        step = getattr(folder, wish["step"])
        return step(Path(wish["place"]), **wish["given"])

    def do_torch_start(self, _wish: dict[str, Any]) -> Any:
        self.torch.start()

    def do_torch(self, _wish: dict[str, Any]) -> Any:
        return self.torch.look()

    def do_reduce(self, wish: dict[str, Any]) -> Any:
        return self.torch.reduce(wish["given"])


def main() -> int:
    tell = open_answers()
    agent = Agent()
    life = threading.Timer(MAX_LIFE_SECONDS, _leave, [agent])
    life.daemon = True
    life.start()
    tell({"hello": "tightfit", "protocol": PROTOCOL, "version": __version__})
    for wish in read_requests():
        threading.Thread(target=_answer, args=(agent, wish, tell), daemon=True).start()
    _leave(agent)
    return 0


def _answer(agent: Agent, wish: dict[str, Any], tell: SendAnswer) -> None:
    """In a thread for each question: none of them may keep the others waiting."""
    told: dict[str, Any] = {"id": wish["id"]}
    try:
        do = agent.find(wish["do"])
        if do is None:
            raise ValueError(f"no question is named {wish['do']}")
        told["answer"] = _plain(do(wish))
    except Exception as fault:
        # Whatever it is, the one who asked has to hear of it.
        told["fault"] = f"{type(fault).__name__}: {fault}"[:400]
    tell(told)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _leave(agent: Agent) -> None:
    agent.torch.end()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
