"""The agents of all nodes: started together, asked together, ended together."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

from tightfit.core.errors import UserError
from tightfit.launch.agents.remote import AgentGoneError, Line, RemoteAgent
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
    """One node's agent."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.fault: str | None = None
        """Why it does not run."""
        self._remote: RemoteAgent | None = None
        self._hello: Future[Line] = Future()

    def start(self, how: Start, seconds: float) -> None:
        """Until it has said hello; `fault` tells what went wrong."""
        try:
            remote = self._remote = RemoteAgent(
                self.node, how.argv, prefix=how.prefix, env=how.env, on_news=self._greet
            )
        except UserError as fault:
            self.fault = fault.problem
            return
        either: list[Future[Any]] = [self._hello, remote.ended]
        wait(either, timeout=seconds, return_when=FIRST_COMPLETED)
        if self._hello.done():
            self.fault = _find_mismatch(self._hello.result())
        elif remote.ended.done():
            code = remote.wait_for_exit(END_SECONDS)
            self.fault = f"ended with exit code {code}{remote.last_words}"
        else:
            self.fault = f"no answer in {seconds:.0f} s{remote.last_words}"

    def _greet(self, line: Line) -> None:
        if "hello" in line and not self._hello.done():
            self._hello.set_result(line)

    def ask(self, question: str, seconds: float, given: Mapping[str, Any]) -> Any:
        """The answer, or SilentAgentError when the time is over."""
        if self.fault is not None or self._remote is None:
            raise SilentAgentError(self.fault or "it was not started")
        asked = self._remote.ask({"do": question, **given})
        try:
            told = asked.result(timeout=max(seconds, 0.0) + GRACE_SECONDS)
        except FutureTimeoutError:
            raise SilentAgentError(f"no answer in {seconds:.0f} s") from None
        except AgentGoneError as fault:
            raise SilentAgentError(str(fault)) from None
        if "fault" in told:
            raise SilentAgentError(str(told["fault"]))
        return told["answer"]

    def end(self) -> None:
        if self._remote is not None:
            self._remote.close(seconds=END_SECONDS)


def _find_mismatch(hello: Line) -> str | None:
    if hello.get("protocol") == PROTOCOL:
        return None
    return f"tightfit {hello.get('version')} there does not speak with the one of this machine"


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
