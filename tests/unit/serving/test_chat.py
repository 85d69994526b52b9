"""Chat: turns and their trimming, commands, and the real command in a pseudo-terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from small_models import make_llama
from tightfit.core.errors import InvalidInputError, UsageError
from tightfit.core.sampling import Sampling
from tightfit.data.call_syntax import HERMES
from tightfit.data.formats import Message, recognise_format
from tightfit.data.sources import read_rows
from tightfit.data.tools import Tool, ToolCall, tool_names
from tightfit.engines.protocol import Delta, Done, EngineInfo, FinishReason, Listener, Request
from tightfit.serving.chat import (
    Conversation,
    change_sampling,
    printable_text,
    read_command,
    read_messages,
    run_command,
    unescape_message,
)

LONG = 32_768
"""Tokens of a context that takes minutes to fill."""


class WordPrompter:
    """A token for each word."""

    call_syntax = HERMES
    call_control = ()

    def ask(self, messages: list[Message], tools: tuple[Tool, ...] = ()) -> tuple[int, ...]:
        self.tools = tools
        assert [m.role for m in messages if m.role != "system"][0::2] == ["user"] * (
            (len([m for m in messages if m.role != "system"]) + 1) // 2
        ), "begins with a question, and turns alternate"
        return tuple(range(sum(len(message.content.split()) for message in messages)))


@dataclass
class ScriptedEngine:
    """Answers what it is told to, at once; keeps what was sent."""

    answers: list[str]
    max_context: int = 64
    requests: list[Request] = field(default_factory=list)
    prompter: WordPrompter = field(default_factory=WordPrompter)
    was_cancelled: bool = False

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            engine="scripted", version="", why="", model="m", format="", device="cpu",
            max_context=self.max_context, num_slots=1, num_params=1, weight_bytes=1,
            kv_bytes_per_token=1,
        )  # fmt: skip

    def submit(self, request: Request, listener: Listener) -> ScriptedEngine:
        self.requests.append(request)
        text = self.answers.pop(0)
        for word in text.split(" "):
            listener(Delta(text=word + " "))
        listener(
            Done(
                reason=FinishReason.STOP,
                text=text,
                num_prompt_tokens=len(request.prompt),
                num_new_tokens=len(text.split()),
                submitted_s=0.0,
                first_token_s=1.0,
                finished_s=3.0,
            )
        )
        return self

    def cancel(self) -> None:
        self.was_cancelled = True


def talk_to(engine: Any, **settings: Any) -> Conversation:
    return Conversation(engine=engine, sampling=Sampling(max_new_tokens=8), **settings)


def quiet(_: str) -> None:
    pass


def test_the_oldest_turns_go_when_the_context_is_full_and_that_is_said() -> None:
    engine = ScriptedEngine(answers=["a " * 9 + "a"] * 8, max_context=64)
    talk = talk_to(engine, system="be brief")

    dropped = [talk.ask("q " * 10, quiet).num_dropped for _ in range(8)]

    assert dropped[:2] == [0, 0]
    assert sum(dropped) == len(talk.turns) - 2 * 3, "three turns of twenty fit beside an answer"
    assert all(len(request.prompt) <= 64 - 8 for request in engine.requests)
    assert len(talk.messages()) == 17, "all that was said is kept"


def test_a_message_that_can_never_fit_is_refused_and_not_kept() -> None:
    talk = talk_to(ScriptedEngine(answers=["fine"], max_context=32))
    with pytest.raises(InvalidInputError, match="room for"):
        talk.ask("q " * 40, quiet)
    assert talk.turns == []
    assert talk.ask("short", quiet).text == "fine"


def test_ctrl_c_keeps_what_came_and_cancels() -> None:
    engine = ScriptedEngine(answers=["one two three", "then"])
    talk = talk_to(engine)
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        if len(shown) == 2:
            raise KeyboardInterrupt

    reply = talk.ask("hi", show)

    assert reply.done is None
    assert reply.text == "one two "
    assert engine.was_cancelled
    assert talk.ask("and?", quiet).text == "then"
    assert [m.role for m in talk.turns] == ["user", "assistant"] * 2


def test_regenerating_replaces_the_answer_with_another_seed() -> None:
    engine = ScriptedEngine(answers=["one", "two", "three"])
    talk = talk_to(engine)
    talk.sampling = Sampling(seed=5, temperature=1.0)
    with pytest.raises(InvalidInputError):
        talk.ask_again(quiet)
    talk.ask("hi", quiet)
    talk.ask_again(quiet)
    talk.ask_again(quiet)

    assert [m.content for m in talk.turns] == ["hi", "three"]
    assert len({request.sampling.seed for request in engine.requests}) == 3
    assert len({request.prompt for request in engine.requests}) == 1


@given(text=st.text())
def test_nothing_a_terminal_obeys_is_shown(text: str) -> None:
    shown = printable_text(text + "\x1b[31m\x07\x9b0m\r\u202e")
    for char in shown:
        assert char in "\n\t" or ord(char) >= 32
        assert not 0x7F <= ord(char) <= 0x9F
        assert char not in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    assert printable_text("a\tb\nä 日本 👩\u200d🔧") == "a\tb\nä 日本 👩\u200d🔧"


def test_commands_are_told_from_messages() -> None:
    assert read_command("hello") is None
    assert read_command("//etc is a folder") is None
    assert unescape_message("//etc is a folder") == "/etc is a folder"
    assert read_command("/SET temperature 0.7") == ("set", "temperature 0.7")
    with pytest.raises(UsageError, match=r"Did you mean `reset`"):
        read_command("/rest")


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("temperature 0.7", "temperature", 0.7),
        ("top-k=40", "top_k", 40),
        ("max_new_tokens 9", "max_new_tokens", 9),
        ("seed none", "seed", None),
    ],
)
def test_settings_change_by_name(text: str, name: str, value: object) -> None:
    assert getattr(change_sampling(Sampling(seed=1), text), name) == value


@pytest.mark.parametrize("text", ["", "warmth 3", "temperature", "temperature -1", "top_p nan"])
def test_settings_out_of_bounds_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        change_sampling(Sampling(), text)


def test_a_saved_chat_is_a_row_for_training_and_loads_again(tmp_path: Path) -> None:
    talk = talk_to(ScriptedEngine(answers=["ä\nb"]), system="be brief")
    talk.ask("hi", quiet)
    path = tmp_path / "chat.jsonl"

    run_command(read_command(f"/save {path}"), talk)  # type: ignore[arg-type]

    with pytest.raises(UsageError, match="exists already"):
        run_command(read_command(f"/save {path}"), talk)  # type: ignore[arg-type]
    (row,) = read_rows(path)
    assert recognise_format(row).to_messages(row) == talk.messages()
    other = talk_to(ScriptedEngine(answers=[]))
    run_command(read_command(f"/load {path}"), other)  # type: ignore[arg-type]
    assert other.messages() == talk.messages()
    assert "1 answers" in run_command(read_command("/stats"), talk)  # type: ignore[arg-type]


def test_a_loaded_row_with_tools_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]
    path.write_text(json.dumps({"messages": said, "tools": [{"name": "f"}]}))
    engine = ScriptedEngine(answers=['<tool_call>\n{"name": "f", "arguments": {"a": 1}}'])
    talk = talk_to(engine)

    run_command(read_command(f"/load {path}"), talk)  # type: ignore[arg-type]
    talk.ask("call it", quiet)
    run_command(read_command(f"/save! {path}"), talk)  # type: ignore[arg-type]

    assert tool_names(engine.prompter.tools) == ["f"]
    (row,) = read_rows(path)
    messages, tools = recognise_format(row).to_conversation(row)
    assert messages[-1].tool_calls == (ToolCall("f", {"a": 1}),)
    assert tool_names(tools) == ["f"]


def test_messages_of_several_lines() -> None:
    lines = iter(['"""', "one", "", "two", '"""', "a\\", "b", '"""x"""', "", "last\\"])

    def read_line(_: bool) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    assert list(read_messages(read_line, quiet_forget)) == ["one\n\ntwo", "a\nb", "x", "last"]


def quiet_forget() -> None:
    raise AssertionError("nobody interrupted")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("chat"))


def environment(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TIGHTFIT_CACHE": str(home),
        "HF_HUB_OFFLINE": "1",
        "TERM": "dumb",
    }


def chat_line(model: Path, *more: str) -> list[str]:
    line = [sys.executable, "-m", "tightfit.cli.app", "chat", str(model), "--device", "cpu"]
    return [*line, *more]


class Terminal:
    """A real process behind a pseudo-terminal."""

    def __init__(self, line: list[str], home: Path) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            line,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(home),
            start_new_session=True,
            preexec_fn=_own_terminal,  # noqa: PLW1509
        )
        os.close(slave)
        self.seen = ""

    def interrupt_until(self, text: str) -> None:
        """Ctrl-C, and once more where it came after readline's prompt but before it waits for
        keys: then Python tells of it only when the next key comes."""
        for _ in range(5):
            self.say("\x03")
            with contextlib.suppress(AssertionError):
                self.read_until(text, seconds=10)
                return
        raise AssertionError(f"{text!r} did not come")

    def read_until(self, text: str, *, seconds: float = 300) -> str:
        """What came up to and with `text`."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], 0.5)
            if ready:
                try:
                    self.seen += os.read(self.master, 65536).decode("utf-8", "replace")
                except OSError:
                    break
            assert time.monotonic() < end, f"{text!r} did not come: {self.seen!r}"
        head, found, self.seen = self.seen.partition(text)
        assert found, f"{text!r} did not come: {head!r}"
        return head + found

    def read_some(self) -> None:
        """Wait for whatever comes next."""
        self.seen = os.read(self.master, 65536).decode("utf-8", "replace")

    def say(self, text: str) -> None:
        os.write(self.master, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A model that never ends an answer itself: whoever stops it may take minutes to do so."""
    import torch
    import transformers

    library: Any = transformers
    folder = make_llama(tmp_path / "endless", max_position_embeddings=LONG)
    made = library.LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        made.lm_head.weight[made.config.eos_token_id] = 0  # others are always likelier
    made.save_pretrained(folder)
    return folder


@pytest.fixture
def terminal(endless: Path, tmp_path: Path) -> Iterator[Terminal]:
    line = chat_line(endless, "--max-new-tokens", f"{LONG}", "--context", f"{LONG}")
    opened = Terminal(line, tmp_path)
    yield opened
    opened.close()


def test_a_chat_in_a_real_terminal(terminal: Terminal, tmp_path: Path) -> None:
    start = terminal.read_until("> ")
    assert "fp32 on cpu" in start
    assert "transformers, because" in start
    terminal.say("/set max_new_tokens 5\n")
    terminal.read_until("max_new_tokens is set.")
    terminal.read_until("> ")
    terminal.say('"""\nseveral\nlines\n"""\n')
    terminal.read_until("... ")
    terminal.read_until("> ")
    terminal.say("/stats\n")
    terminal.read_until("session: 1 answers")
    terminal.read_until("> ")
    terminal.say(f"/set max_new_tokens {LONG}\n")
    terminal.read_until("> ")
    terminal.say("tell me everything\n")
    terminal.read_until("everything\r\n")
    terminal.read_some()
    terminal.say("\x03")
    terminal.read_until("(stopped)")
    terminal.read_until("> ")
    saved = tmp_path / "saved.jsonl"
    terminal.say(f"/save {saved}\n")
    terminal.read_until("Saved")
    terminal.read_until("> ")
    terminal.interrupt_until("(Ctrl-D or /exit leaves)")
    terminal.read_until("> ")  # a Ctrl-D typed before the prompt stands is lost to the terminal
    terminal.say("\x04")
    assert terminal.process.wait(60) == 0
    turns = json.loads(saved.read_text("utf-8"))["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2
    assert turns[0]["content"] == "several\nlines"
    assert turns[3]["content"], "what came before Ctrl-C is kept"
    history = (tmp_path / "chat_history").read_text("utf-8")
    assert "tell me everything" in history


def test_a_pipe_gets_answers_alone(model: Path, tmp_path: Path) -> None:
    line = chat_line(model, "--max-new-tokens", "6")
    reported = "hi there\n/set max_new_tokens 3\nhi again\n"
    done = subprocess.run(
        line, input=reported, capture_output=True, text=True, env=environment(tmp_path),
        timeout=300, check=False,
    )  # fmt: skip
    once = subprocess.run(
        [*line, "--once", "hi there", "--json"], capture_output=True, text=True,
        env=environment(tmp_path), timeout=300, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    answer = json.loads(once.stdout)
    assert answer["num_new_tokens"] <= 6
    assert done.stdout.startswith(printable_text(answer["answer"]))
    assert "is set" not in done.stdout
    assert "fp32 on cpu" in done.stderr
