"""The agents of all nodes: started together, asked together, ended together."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tightfit.core.errors import UserError
from tightfit.launch.nodes import start_on
from tightfit.launch.preflight.messages import PROTOCOL

AGENT = "tightfit.launch.preflight.agent"
END_SECONDS = 1.0
GRACE_SECONDS = 0.5
"""For an answer to travel, on top of what the question itself may take."""


class SilentAgentError(Exception):
    """A node gave no answer, or a fault in place of one; the text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How the agents are started."""

    prefix: str
    argv: tuple[str, ...] = (sys.executable, "-m", AGENT)
    env: Mapping[str, str]


class Agent:
    """One node's agent, and the threads that read what it says."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.fault: str | None = None
        """Why it does not run."""
        self._process: subprocess.Popen[bytes] | None = None
        self._hello: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._waiting: dict[int, queue.Queue[dict[str, Any] | None]] = {}
        self._turn = threading.Lock()
        self._next = 0
        self._said: deque[str] = deque(maxlen=20)

    def start(self, how: Start, seconds: float) -> None:
        """Until it has said hello; `fault` tells what went wrong."""
        try:
            self._process = start_on(self.node, how.argv, prefix=how.prefix, env=how.env)
        except UserError as fault:
            self.fault = fault.problem
            return
        for read in (self._read_answers, self._read_complaints):
            threading.Thread(target=read, daemon=True).start()
        try:
            hello = self._hello.get(timeout=seconds)
        except queue.Empty:
            self.fault = f"no answer in {seconds:.0f} s{self._last_words()}"
            return
        if hello is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=END_SECONDS)
            time.sleep(0.1)  # for its last words to be read
            code = self._process.returncode
            self.fault = f"ended with exit code {code}{self._last_words()}"
        elif hello.get("protocol") != PROTOCOL:
            self.fault = (
                f"tightfit {hello.get('version')} there does not speak with the one of this machine"
            )

    def ask(self, question: str, seconds: float, given: Mapping[str, Any]) -> Any:
        """The answer, or SilentAgentError when the time is over."""
        if self.fault is not None or self._process is None or self._process.stdin is None:
            raise SilentAgentError(self.fault or "it was not started")
        answer: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with self._turn:
            self._next += 1
            number = self._next
            self._waiting[number] = answer
            line = json.dumps({"id": number, "do": question, **given}) + "\n"
            try:
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
            except OSError:
                raise SilentAgentError(f"the agent is gone{self._last_words()}") from None
        try:
            told = answer.get(timeout=max(seconds, 0.0) + GRACE_SECONDS)
        except queue.Empty:
            raise SilentAgentError(f"no answer in {seconds:.0f} s") from None
        if told is None:
            raise SilentAgentError(f"the agent is gone{self._last_words()}")
        if "fault" in told:
            raise SilentAgentError(str(told["fault"]))
        return told["answer"]

    def end(self) -> None:
        """Close its stdin, which ends it, wherever it is; then the local end of the pipe."""
        process = self._process
        if process is None:
            return
        with suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=END_SECONDS)

    def _read_answers(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                told = _parse(line)
                if told is None:
                    self._said.append(line.decode(errors="replace").strip())
                elif "hello" in told:
                    self._hello.put(told)
                elif told.get("id") in self._waiting:
                    self._waiting.pop(told["id"]).put(told)
        self._hello.put(None)
        for answer in list(self._waiting.values()):
            answer.put(None)

    def _read_complaints(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._said.append(line.decode(errors="replace").strip())

    def _last_words(self) -> str:
        words = [line for line in self._said if line]
        return f": {words[-1][:300]}" if words else ""


def _parse(line: bytes) -> dict[str, Any] | None:
    """None for what a login shell or a module system prints before the agent starts."""
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


class Crew:
    """All agents. Questions go to all at once; who is silent is left out of the answers."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.agents = {node: Agent(node) for node in nodes}
        self.silent: dict[tuple[str, str], str] = {}
        """Questions that a node did not answer, and why."""
        self._pool = ThreadPoolExecutor(max_workers=2 * len(nodes) + 2)

    def start(self, how: Start, seconds: float) -> None:
        list(self._pool.map(lambda agent: agent.start(how, seconds), self.agents.values()))

    @property
    def present(self) -> list[str]:
        return [node for node, agent in self.agents.items() if agent.fault is None]

    def ask(
        self, question: str, seconds: float, given: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        """What each present node answers; `given` by node, and only to the nodes in it."""
        nodes = self.present if given is None else [n for n in given if n in self.present]
        asked = {
            node: self._pool.submit(
                self.agents[node].ask, question, seconds, (given or {}).get(node, {})
            )
            for node in nodes
        }
        answers = {}
        for node, future in asked.items():
            try:
                answers[node] = future.result()
            except SilentAgentError as fault:
                self.silent[(node, question)] = str(fault)
        return answers

    def end(self) -> None:
        list(self._pool.map(Agent.end, self.agents.values()))
        self._pool.shutdown(wait=False)
