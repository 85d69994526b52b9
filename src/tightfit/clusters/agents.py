"""Agents: processes on nodes that answer requests, one line of JSON each, over their pipes.

`open_answers` and `read_requests` are the agent's side; `RemoteAgent` is the caller's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from tightfit.clusters.nodes import start_on_node

SendAnswer = Callable[[dict[str, Any]], None]


def open_answers() -> SendAnswer:
    """Take stdout for answers alone; whatever a library prints goes to stderr from now on."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    turn = threading.Lock()

    def tell(line: dict[str, Any]) -> None:
        with turn:
            out.write(json.dumps(line).encode() + b"\n")
            out.flush()

    return tell


def read_requests() -> Iterator[dict[str, Any]]:
    """Until stdin closes, which is how an agent is told to end."""
    for line in sys.stdin.buffer:
        yield json.loads(line)


# An agent as the one who asks sees it: requests out, answers or its last words back.

AgentLine = dict[str, Any]
"""What one line of JSON says."""
FINAL_OUTPUT_SECONDS = 1.0
"""For what an agent said at its end to arrive."""
_MOST_LETTERS = 300


class AgentGoneError(Exception):
    """The agent has ended, or cannot be reached any more."""


def _ignore(_line: AgentLine) -> None: ...


class RemoteAgent:
    """A command on a node that reads requests from stdin and answers them on stdout.

    Each request carries a number, and its answer the same. `on_news` hears, in a thread of the
    agent's own, what it says unasked.
    """

    def __init__(
        self,
        node: str,
        argv: Sequence[str],
        *,
        prefix: str,
        env: Mapping[str, str] = MappingProxyType({}),
        on_news: Callable[[AgentLine], None] = _ignore,
    ) -> None:
        self.ended: Future[None] = Future()
        """Done once it will say no more, and all it said was heard."""
        self._on_news = on_news
        self._waiting: dict[int, Future[AgentLine]] = {}
        self._next = 0
        self._numbering = threading.Lock()
        self._sending = threading.Lock()
        self._complaint = self._noise = ""
        self._process = start_on_node(node, argv, prefix=prefix, env=env)
        self._overhearing = threading.Thread(target=self._overhear, daemon=True)
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._overhearing.start()
        self._listening.start()

    @property
    def last_words(self) -> str:
        """`: Permission denied`, to end a sentence with; empty where it said nothing."""
        words = self._complaint or self._noise
        return f": {words[:_MOST_LETTERS]}" if words else ""

    def ask(self, request: Mapping[str, Any]) -> Future[AgentLine]:
        """The line that answers, or AgentGoneError; wait for it as long as you like."""
        answer: Future[AgentLine] = Future()
        with self._numbering:
            self._next += 1
            number = self._next
            self._waiting[number] = answer
        is_sent = self._send({"id": number, **request})
        if not is_sent:
            wait([self.ended], timeout=FINAL_OUTPUT_SECONDS)
        if not is_sent or self.ended.done():
            self._give_up()
        return answer

    def wait_for_exit(self, seconds: float) -> int | None:
        """Its exit code, or that of ssh or srun; None where it goes on."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=seconds)
        return None

    def close(self, *, seconds: float) -> None:
        """Close its stdin, which ends it, wherever it is; then by force the local end of it."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        if self.wait_for_exit(seconds) is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.wait_for_exit(seconds)
        for thread in (self._listening, self._overhearing):
            thread.join(timeout=FINAL_OUTPUT_SECONDS)

    def _send(self, line: AgentLine) -> bool:
        assert self._process.stdin is not None
        try:
            with self._sending:
                self._process.stdin.write(json.dumps(line).encode() + b"\n")
                self._process.stdin.flush()
        except (OSError, ValueError):  # the latter: it was closed
            return False
        return True

    def _listen(self) -> None:
        try:
            self._sort_lines()
        finally:  # whatever it was: nobody may wait for ever
            self._overhearing.join(timeout=FINAL_OUTPUT_SECONDS)
            self.ended.set_result(None)
            self._give_up()

    def _sort_lines(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for text in lines:
                line = _parse(text)
                if line is None:
                    self._noise = _read(text) or self._noise
                else:
                    self._sort(line)

    def _overhear(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for text in lines:
                self._complaint = _read(text) or self._complaint

    def _sort(self, line: AgentLine) -> None:
        number = line.get("id")
        with self._numbering:
            answer = self._waiting.pop(number, None) if isinstance(number, int) else None
        if answer is None:
            self._on_news(line)
        else:
            answer.set_result(line)

    def _give_up(self) -> None:
        with self._numbering:
            waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.set_exception(AgentGoneError(f"the agent is gone{self.last_words}"))


def _read(text: bytes) -> str:
    return text.decode(errors="replace").strip()


def _parse(text: bytes) -> AgentLine | None:
    """None for what a login shell or a module system prints before the agent starts."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
