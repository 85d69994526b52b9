"""Agents: processes on nodes that answer requests over pipes."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import count
from types import MappingProxyType
from typing import Any

from pydantic_core import to_jsonable_python

from tightfit.clusters.nodes import node_command
from tightfit.clusters.site import Site
from tightfit.core.child_process import ChildProcess, Message, SendMessage, read_messages
from tightfit.core.errors import SetupError, error_from_message, error_to_message
from tightfit.core.files import find_write_error

FINAL_OUTPUT_SECONDS = 1.0
"""For an agent that closed its stdout to end, so that all of its stderr is there."""


class AgentGoneError(Exception):
    """The agent has ended, or cannot be reached any more."""


class RemoteAgent:
    """An agent on a node. Each request carries a number, and its answer the same."""

    def __init__(
        self,
        node: str,
        argv: Sequence[str],
        *,
        prefix: str,
        env: Mapping[str, str] = MappingProxyType({}),
        on_news: Callable[[Message], None] = lambda _: None,
    ) -> None:
        """`on_news` receives, in the agent's own thread, messages that answer no request."""
        words = node_command(node, argv, prefix=prefix, env=env)
        try:
            self._child = ChildProcess(words)
        except OSError as error:
            raise SetupError(
                f"`{words[0]}`, which is to reach {node}, does not start: "
                f"{error.strerror or error}.",
                remedy="say how a command runs on a node: --run-with 'ssh {node}'",
            ) from error
        self.ended: Future[None] = Future()
        """Done once the agent has closed its stdout and everything it sent was received."""
        self.last_message_at = time.monotonic()
        self._node = node
        self._on_news = on_news
        self._numbers = count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def last_words(self) -> str:
        """`: Permission denied`, to end a sentence with; empty if it printed nothing."""
        line = self._child.last_line
        return f": {line}" if line else ""

    def ask(self, do: str, **given: Any) -> Future[Any]:
        """The answer, or the error that the agent reported, or AgentGoneError."""
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answer
        is_sent = self._child.send({"id": number, "do": do, "given": given})
        if not is_sent:
            wait([self.ended], timeout=FINAL_OUTPUT_SECONDS)
        if not is_sent or self.ended.done():
            self._give_up()
        return answer

    def wait_for_exit(self, seconds: float) -> int | None:
        """Its exit code, or that of ssh or srun; None if it still runs."""
        return self._child.wait(seconds)

    def close(self, *, seconds: float) -> None:
        """Close its stdin, which ends it, on whichever node; then kill the local end of it."""
        self._child.end(seconds=seconds)
        self._listener.join(timeout=FINAL_OUTPUT_SECONDS)

    def _listen(self) -> None:
        try:
            for message in self._child:
                self.last_message_at = time.monotonic()
                number = message.get("id")
                answer = None
                if isinstance(number, int):  # a login shell may print any JSON
                    with self._lock:
                        answer = self._waiting.pop(number, None)
                if answer is None:
                    self._on_news(message)
                else:
                    settle(answer, message, node=self._node)
        finally:  # whatever happened, nobody may wait forever
            self._child.wait(FINAL_OUTPUT_SECONDS)
            self.ended.set_result(None)
            self._give_up()

    def _give_up(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.set_exception(AgentGoneError(f"{self._node} is lost{self.last_words}"))


def settle(answer: Future[Any], reply: Message, *, node: str) -> None:
    """Set what `answer_request` replied as the future's result or exception."""
    if "answer" in reply:
        answer.set_result(reply["answer"])
    else:
        answer.set_exception(error_from_message(reply["error"], place=f"{node}: "))


# The agent's side.

Handlers = Mapping[str, Callable[..., Any]]
"""The requests that an agent answers, by name."""


def serve_requests(handlers: Handlers, send: SendMessage) -> None:
    """Answer until stdin closes. Each request has its own thread, so that none delays another."""
    for request in read_messages():

        def work(request: Message = request) -> None:
            send({"id": request["id"], **answer_request(handlers, request)})

        threading.Thread(target=work, daemon=True).start()


def answer_request(handlers: Handlers, request: Message) -> Message:
    """The reply to one request; an error is a reply too."""
    try:
        if request["do"] not in handlers:
            raise ValueError(f"no question is named {request['do']}")
        return {"answer": to_jsonable_python(handlers[request["do"]](**request["given"]))}
    except Exception as error:
        return {"error": error_to_message(find_write_error(error) or error)}


def after_setup(site: Site, argv: Sequence[str]) -> list[str]:
    """A command that runs after the site's set-up lines."""
    if not site.setup:
        return list(argv)
    return ["bash", "-c", "\n".join([*site.setup, f"exec {shlex.join(argv)}"])]
