"""`tightfit chat`: Talk to a model in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from tightfit.api.chat import load
from tightfit.api.options.common import Output
from tightfit.api.options.serving import ChatOptions
from tightfit.cli.terminal.output import show_json, write_err, write_out
from tightfit.core.errors import UsageError, UserError
from tightfit.core.files import cache_folder
from tightfit.core.text import sanitize, sanitize_lines
from tightfit.serving.chat import (
    EXIT_COMMANDS,
    Conversation,
    read_command,
    read_messages,
    run_command,
    unescape_message,
)

HISTORY_LINES = 1000


def chat(options: ChatOptions, output: Output) -> None:
    """Load, say what was loaded, and answer until the input ends."""
    if output.as_json and options.once is None:
        raise UsageError(
            "`--json` prints one document, and a chat has many answers.",
            remedy="--once 'TEXT' --json",
        )
    with load(options) as talk:
        info = talk.engine.info
        write_err(
            f"{sanitize(info.model)}: {info.format} on {info.device}, {info.max_context:,} tokens "
            f"of context; {sanitize(info.why)}\n"
        )
        if options.once is not None:
            _answer_once(talk, options.once, as_json=output.as_json)
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

    def leave_at_once() -> None:
        raise KeyboardInterrupt

    for text in read_messages(read_line, forget=leave_at_once):
        if not _answer(talk, text, write_err):
            return


def _talk_in_terminal(talk: Conversation) -> None:
    """Errors are shown and the chat goes on; only the user ends it."""

    def forget() -> None:
        write_out("\n")
        write_err("(Ctrl-D or /exit leaves)\n")

    write_err("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves\n")
    with _line_history():
        for text in read_messages(lambda goes_on: input("... " if goes_on else "> "), forget):
            try:
                if not _answer(talk, text, write_out):
                    return
            except UserError as error:
                write_err(f"{sanitize(error.problem)}\n  try: {sanitize(error.remedy)}\n")
            except KeyboardInterrupt:
                write_err("(stopped)\n")
    write_out("\n")


def _answer(talk: Conversation, text: str, write_command: Callable[[str], None]) -> bool:
    """Answer a message or run a command; False where the chat is to end."""
    command = read_command(text)
    if command is None:
        reply = talk.ask(unescape_message(text), write_out)
    elif command.name in EXIT_COMMANDS:
        return False
    elif command.name == "regenerate":
        reply = talk.ask_again(write_out)
    else:
        write_command(f"{sanitize_lines(run_command(command, talk))}\n")
        return True
    _end_line(reply.text)
    if reply.num_dropped:
        write_err(
            f"(the oldest {reply.num_dropped} messages no longer fit the context and were left "
            "out)\n"
        )
    if reply.done is None:  # stopped by Ctrl-C
        raise KeyboardInterrupt
    return True


def _end_line(text: str) -> None:
    if not text.endswith("\n"):
        write_out("\n")


@contextlib.contextmanager
def _line_history() -> Iterator[None]:
    """Arrow keys and earlier lines, kept from chat to chat where there is a place for them."""
    try:
        import readline
    except ImportError:  # a Python built without it
        yield
        return
    path = None
    with contextlib.suppress(UserError):  # no home: no history
        path = cache_folder() / "chat_history"
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
