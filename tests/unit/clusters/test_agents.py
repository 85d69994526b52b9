"""Agents as processes on this machine: answers find their questions, and nobody waits for ever."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait
from contextlib import contextmanager

import psutil
import pytest

from tightfit.clusters import agents
from tightfit.clusters.agents import AgentGoneError, RemoteAgent
from tightfit.core.child_process import Message
from tightfit.core.errors import SetupError

HERE = "env TIGHTFIT_TEST_NODE={node}"
BACKWARDS = """
import os, sys
from tightfit.core.child_process import open_output, read_messages
tell = open_output()
print("a library's words")
os.system("echo a child\\'s words")
tell({"news": os.environ["TIGHTFIT_TEST_NODE"]})
held = []
for request in read_messages():
    held.append(request)
    if len(held) == request["given"]["of"]:
        for request in reversed(held):
            tell({"id": request["id"], "answer": request["given"]["value"]})
        held = []
"""


@pytest.fixture(autouse=True)
def _wait_for_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """All agents here close their pipes; a machine that pauses takes longer to say so."""
    monkeypatch.setattr(agents, "FINAL_OUTPUT_SECONDS", 60.0)


@contextmanager
def agent_of(
    code: str, news: list[Message] | None = None, *, end_seconds: float = 1.0
) -> Iterator[RemoteAgent]:
    received: list[Message] = [] if news is None else news
    words = [sys.executable, "-c", code]
    agent = RemoteAgent("n1", words, prefix=HERE, on_news=received.append)
    try:
        yield agent
    finally:
        agent.close(seconds=end_seconds)


def test_answers_find_their_questions() -> None:
    news: list[Message] = []
    with agent_of(BACKWARDS, news, end_seconds=60.0) as agent:
        asked = [agent.ask("x", value=value, of=3) for value in "abc"]
        assert [future.result(timeout=30) for future in asked] == ["a", "b", "c"]

    assert news == [{"news": "n1"}], "what else is printed is no line of the agent's"
    assert agent.wait_for_exit(0) == 0, "it ends when its stdin closes"


def test_words_before_the_agent_starts_are_not_answers() -> None:
    noise = "print('Welcome'); print('[1]'); print('{\"id\": [1]}', flush=True)\n"
    with agent_of(noise + BACKWARDS) as agent:
        assert agent.ask("x", value="x", of=1).result(timeout=30) == "x"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; print('out'); sys.exit('Permission denied')", ": Permission denied"),
        ("print('no such module')", ": no such module"),
        ("pass", ""),
    ],
)
def test_the_last_words_of_one_that_ends(code: str, words: str) -> None:
    with agent_of(f"import sys; sys.stdin.readline(); {code}") as agent:
        with pytest.raises(AgentGoneError, match="n1 is lost"):
            agent.ask("x").result(timeout=30)
        wait([agent.ended], timeout=30)
        assert agent.last_words == words
        with pytest.raises(AgentGoneError):
            agent.ask("x").result(timeout=30)


def test_a_question_has_a_deadline() -> None:
    with agent_of("import time; time.sleep(600)") as agent, pytest.raises(FutureTimeoutError):
        agent.ask("x").result(timeout=0.2)


def test_one_that_does_not_end_is_ended_with_its_children() -> None:
    child = "import subprocess; p = subprocess.Popen(['sleep', '601']); print(p.pid, flush=True)"
    with agent_of(f"{child}; p.wait()") as agent:
        end = time.monotonic() + 60
        while not agent.last_words and time.monotonic() < end:
            time.sleep(0.02)
        number = int(agent.last_words.removeprefix(": "))
        begin = time.monotonic()

    assert time.monotonic() - begin < 60
    while is_running(number) and time.monotonic() - begin < 60:
        time.sleep(0.02)  # a killed process goes when the kernel comes to it
    assert not is_running(number)


def is_running(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_prefix_that_does_not_exist() -> None:
    with pytest.raises(SetupError, match="no-such-ssh"):
        RemoteAgent("n1", ["true"], prefix="no-such-ssh {node}")


def test_an_agent_ends_with_a_killed_asker() -> None:
    code = (
        "import sys, time\nfrom tightfit.clusters.agents import RemoteAgent\n"
        f"a = RemoteAgent('n', [sys.executable, '-c', {BACKWARDS!r}], prefix={HERE!r})\n"
        "a.ask('x', value=1, of=1).result()\nprint(a._child.pid, flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as asker:
        assert asker.stdout is not None
        number = int(asker.stdout.readline())
        assert is_running(number)
        asker.kill()
    end = time.monotonic() + 60
    while is_running(number):
        assert time.monotonic() < end
        time.sleep(0.05)
