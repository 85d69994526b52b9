"""Input of a terminal chat: multi-line messages, and commands such as `/reset` or `/set`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tightfit.core.errors import InvalidInputError, NotFoundError, UsageError
from tightfit.core.files import write_atomic
from tightfit.core.sampling import SAMPLING_OPTIONS, Sampling
from tightfit.core.suggest import did_you_mean
from tightfit.data.formats import Message, format_named, to_messages
from tightfit.data.sources import read_file
from tightfit.serving.conversation import ChatTotals, Conversation
from tightfit.serving.generate.journal import to_json_line

QUOTES = '"""'

ReadLine = Callable[[bool], str]
"""The next line without its line end; the argument says whether a message continues.

Raises `EOFError` at the end, and `KeyboardInterrupt` on Ctrl-C."""


def read_messages(read_line: ReadLine, forget: Callable[[], None]) -> Iterator[str]:
    """Every message until the input ends. Ctrl-C forgets the message that was begun."""
    while True:
        try:
            message = _read_one_message(read_line)
        except EOFError:
            return
        except KeyboardInterrupt:
            forget()
            continue
        if message.strip():
            yield message


def _read_one_message(read_line: ReadLine) -> str:
    line = read_line(False)
    if line.lstrip().startswith(QUOTES):
        return _read_block(line.lstrip().removeprefix(QUOTES), read_line)
    lines: list[str] = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        try:
            line = read_line(True)
        except EOFError:
            return "\n".join(lines)
    return "\n".join([*lines, line]).strip()


def _read_block(line: str, read_line: ReadLine) -> str:
    lines: list[str] = []
    while not line.rstrip().endswith(QUOTES):
        lines.append(line)
        try:
            line = read_line(True)
        except EOFError:
            return "\n".join(lines).strip("\n")
    lines.append(line.rstrip().removesuffix(QUOTES))
    return "\n".join(lines).strip("\n")


# Commands: `/reset`, `/set temperature 0.7`, ...

COMMAND_HELP = f"""\
/help               this list
/reset              forget the conversation
/system TEXT        another system prompt; without TEXT, none
/regenerate         another answer to the last message
/set NAME VALUE     {", ".join(SAMPLING_OPTIONS)}
/stats              tokens, speed, and how full the context is
/save FILE          the conversation as a row that `tightfit train` reads; /save! replaces a file
/load FILE          go on from a saved conversation
/exit               leave; so does Ctrl-D
Ctrl-C stops an answer. \"\"\" begins and ends a message of several lines, and so does a \\ at a
line's end. //TEXT is a message that begins with a slash."""
EXIT_COMMANDS = ("exit", "quit", "bye")


class ChatCommand(NamedTuple):
    """A word behind a slash, and the rest of the line."""

    name: str
    rest: str


COMMAND_NAMES = (
    "help",
    "reset",
    "system",
    "regenerate",
    "set",
    "stats",
    "save",
    "save!",
    "load",
    *EXIT_COMMANDS,
)


def read_command(text: str) -> ChatCommand | None:
    """None for a message. An unknown command is an error, not sent to the model."""
    if not text.startswith("/") or text.startswith("//") or "\n" in text:
        return None
    name, _, rest = text[1:].strip().partition(" ")
    name = name.lower()
    if name not in COMMAND_NAMES:
        raise UsageError(
            f"There is no command `/{name[:40]}`.{did_you_mean(name, COMMAND_NAMES)}",
            remedy="/help lists them; //TEXT sends a message that begins with a slash",
        )
    return ChatCommand(name, rest.strip())


def unescape_message(text: str) -> str:
    """What is sent: a doubled slash at the start is one."""
    return text[1:] if text.startswith("//") else text


def run_command(command: ChatCommand, talk: Conversation) -> str:
    """Run a command that needs no answer; returns the text to show."""
    if command.name in ("save", "save!"):
        path = _file(command)
        save_conversation(talk, path, replaces=command.name == "save!")
        return f"Saved {path}."
    if command.name == "load":
        talk.replace_turns(load_conversation(_file(command)))
        return f"Going on from {len(talk.turns)} messages."
    if command.name == "stats":
        return describe_totals(talk.tally, talk.engine.info.max_context)
    return COMMAND_HELP if command.name == "help" else _change(command, talk)


def _change(command: ChatCommand, talk: Conversation) -> str:
    if command.name == "reset":
        talk.reset()
        return "The conversation is forgotten."
    if command.name == "system":
        talk.system = command.rest or None
        return "System prompt set." if command.rest else "No system prompt any more."
    talk.sampling = change_sampling(talk.sampling, command.rest)
    return f"{command.rest.replace('=', ' ').split()[0]} is set."


def change_sampling(sampling: Sampling, text: str) -> Sampling:
    """`temperature 0.7`, `seed none`."""
    name, _, value = text.replace("=", " ").partition(" ")
    name, value = name.strip().lower().replace("-", "_"), value.strip()
    if name not in SAMPLING_OPTIONS:
        raise UsageError(
            f"`{name[:40]}` cannot be set.{did_you_mean(name, SAMPLING_OPTIONS)}",
            remedy=f"/set NAME VALUE with one of: {', '.join(SAMPLING_OPTIONS)}",
        )
    if name == "seed" and value.lower() == "none":
        return replace(sampling, seed=None)
    option = SAMPLING_OPTIONS[name]
    try:
        number: Any = option.kind(value)
    except ValueError:
        number = float("nan")
    if not option.least <= number <= option.most:
        raise UsageError(
            f"`{value[:40]}` is no {name} from {option.least:g} to {option.most:g}.",
            remedy=f"/set {name} {option.example:g}",
        )
    return replace(sampling, **{name: number})


def describe_totals(tally: ChatTotals, max_context: int) -> str:
    """The session and its last answer, in a few lines."""
    last = tally.last
    if last is None:
        return "Nothing was answered yet."
    waited = last.first_token_s - last.submitted_s
    spoke = max(last.finished_s - last.first_token_s, 1e-9)
    rate = (last.num_new_tokens - 1) / spoke if last.num_new_tokens > 1 else 0.0
    used = last.num_prompt_tokens + last.num_new_tokens
    return (
        f"last answer: {last.num_prompt_tokens:,} prompt tokens ({last.num_cached_tokens:,} "
        f"cached), {last.num_new_tokens:,} new; first token after {waited:.2f} s, then "
        f"{rate:.1f} tokens/s\n"
        f"session: {tally.num_answers:,} answers, {tally.prompt_tokens:,} prompt and "
        f"{tally.new_tokens:,} new tokens in {tally.seconds:.1f} s\n"
        f"context: {used:,} of {max_context:,} tokens"
    )


def save_conversation(talk: Conversation, path: Path, *, replaces: bool) -> None:
    """One row in the messages format."""
    if path.exists() and not replaces:
        raise UsageError(f"{path} exists already.", remedy=f"/save! {path} replaces it")
    row = {"messages": [message._asdict() for message in talk.messages()]}
    write_atomic(path, to_json_line(row) + b"\n")


def load_conversation(path: Path) -> list[Message]:
    """The first row of a file in the messages format."""
    if not path.is_file():
        raise NotFoundError(f"There is no file {path}.", remedy="/load FILE that /save wrote")
    if path.suffix.lower() in (".jsonl", ".json", ".ndjson"):
        row = next(read_file(path))
        if "messages" in row.values or "conversations" in row.values:
            return to_messages(row, format_named("chat"))
    try:
        values = json.loads(path.read_bytes())
        turns = [Message(str(turn["role"]), str(turn["content"])) for turn in values["messages"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{path} holds no conversation.", remedy="/load FILE that /save wrote"
        ) from error
    return turns


def _file(command: ChatCommand) -> Path:
    if not command.rest:
        raise UsageError(
            f"`/{command.name}` wants a file name.", remedy=f"/{command.name} chat.jsonl"
        )
    return Path(command.rest).expanduser()
