"""`tightfit chat`: talk to a model in the terminal, or through a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from tightfit.api.chat import load
from tightfit.cli.flags.serving import ChatFlags
from tightfit.cli.terminal.output import show_json, write_err, write_out
from tightfit.core.errors import UsageError, UserError
from tightfit.core.text import sanitize, sanitize_lines
from tightfit.serving.conversation import Conversation, Reply

HISTORY_LINES = 1000


def chat(flags: ChatFlags) -> None:
    """Load, say what was loaded, and answer until the input ends."""
    if flags.as_json and flags.once is None:
        raise UsageError(
            "`--json` prints one document, and a chat has many answers.",
            remedy="--once 'TEXT' --json",
        )
    with load(flags) as talk:
        info = talk.engine.info
        write_err(
            f"{sanitize(info.model)}: {info.format} on {info.device}, {info.max_context:,} tokens "
            f"of context; {sanitize(info.why)}\n"
        )
        if flags.once is not None:
            _answer_once(talk, flags.once, as_json=flags.as_json)
        elif sys.stdin is None:
            return  # closed: nobody will ask
        elif sys.stdin.isatty() and sys.stdout.isatty():
            _talk_in_terminal(talk)
        else:
            _talk_through_pipe(talk)


def _answer_once(talk: Conversation, text: str, *, as_json: bool) -> None:
    if not as_json:
        reply = talk.ask(text, write_out)
        _end_line(reply.text)
        return
    reply = talk.ask(text)
    done = reply.done
    if done is None:
        raise KeyboardInterrupt
    show_json(
        {
            "answer": reply.text,
            "finish": done.reason.value,
            "num_prompt_tokens": done.num_prompt_tokens,
            "num_new_tokens": done.num_new_tokens,
            "first_token_seconds": done.first_token_s - done.submitted_s,
            "seconds": done.finished_s - done.submitted_s,
        }
    )


def _talk_through_pipe(talk: Conversation) -> None:
    """Answers on stdout and nothing else; a message that cannot be answered ends it."""

    def read_line(_goes_on: bool) -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    from tightfit.serving.chat_commands import (
        EXIT_COMMANDS,
        read_command,
        read_messages,
        run_command,
        unescape_message,
    )

    for text in read_messages(read_line, forget=_leave_at_once):
        command = read_command(text)
        if command is None:
            reply = talk.ask(unescape_message(text), write_out)
        elif command.name in EXIT_COMMANDS:
            return
        elif command.name == "regenerate":
            reply = talk.ask_again(write_out)
        else:
            write_err(f"{sanitize_lines(run_command(command, talk))}\n")
            continue
        _end_line(reply.text)
        _report_dropped(reply)
        if reply.done is None:
            raise KeyboardInterrupt


def _leave_at_once() -> None:
    raise KeyboardInterrupt


def _talk_in_terminal(talk: Conversation) -> None:
    """Faults are told and the chat goes on; only the user ends it."""
    from tightfit.serving.chat_commands import (
        EXIT_COMMANDS,
        read_command,
        read_messages,
        run_command,
        unescape_message,
    )

    def read_line(goes_on: bool) -> str:
        return input("... " if goes_on else "> ")

    def forget() -> None:
        write_out("\n")
        write_err("(Ctrl-D or /exit leaves)\n")

    write_err("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves\n")
    with _line_history():
        for text in read_messages(read_line, forget):
            try:
                command = read_command(text)
                if command is None:
                    reply = talk.ask(unescape_message(text), write_out)
                elif command.name in EXIT_COMMANDS:
                    return
                elif command.name == "regenerate":
                    reply = talk.ask_again(write_out)
                else:
                    write_out(f"{sanitize_lines(run_command(command, talk))}\n")
                    continue
            except UserError as error:
                write_err(f"{sanitize(error.problem)}\n  try: {sanitize(error.remedy)}\n")
                continue
            _end_line(reply.text)
            _report_dropped(reply)
            if reply.done is None:
                write_err("(stopped)\n")
    write_out("\n")


def _end_line(text: str) -> None:
    if not text.endswith("\n"):
        write_out("\n")


def _report_dropped(reply: Reply) -> None:
    if reply.num_dropped:
        write_err(
            f"(the oldest {reply.num_dropped} messages no longer fit the context and were left "
            "out)\n"
        )


@contextlib.contextmanager
def _line_history() -> Iterator[None]:
    """Arrow keys and earlier lines, kept from chat to chat where there is a place for them."""
    try:
        import readline
    except ImportError:  # a Python built without it
        yield
        return
    path = _history_path()
    if path is not None:
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                readline.write_history_file(path)
                path.chmod(0o600)


def _history_path() -> Path | None:
    from tightfit.core.files import cache_folder

    with contextlib.suppress(UserError):
        return cache_folder() / "chat_history"
    return None
