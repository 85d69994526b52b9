"""A conversation with an engine, and the input of a terminal chat: messages and commands."""

from __future__ import annotations

import contextlib
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tightfit.core.errors import InvalidInputError, NotFoundError, UsageError
from tightfit.core.files import write_atomic
from tightfit.core.reading import read_json_file
from tightfit.core.sampling import SAMPLING_OPTIONS, Sampling
from tightfit.core.text import did_you_mean
from tightfit.data.formats import ASSISTANT, FORMATS, SYSTEM, USER, Message
from tightfit.data.sources import read_file
from tightfit.data.templates import parse_answer
from tightfit.data.tools import Tool
from tightfit.engines.protocol import Delta, Done, Engine, FinishReason, Request, stream
from tightfit.serving.generate.journal import to_json_line

MIN_ANSWER_TOKENS = 16
ANSWER_FRACTION = 0.25
"""Of the context, kept free for the answer unless its own limit is smaller."""
_KEPT_MARKS = "\n\t\u200c\u200d"
"""Line breaks, tabs, and the joiners that Persian and composed emoji are written with."""

OnText = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer."""

    text: str
    done: Done | None
    """None where it was stopped before the engine had ended it."""
    num_dropped: int
    """Messages that no longer fit the context, and were left out for this answer."""


@dataclass(slots=True, kw_only=True)
class ChatTotals:
    """What a session amounts to so far."""

    num_answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    last: Done | None = None

    def add(self, done: Done) -> None:
        self.num_answers += 1
        self.prompt_tokens += done.num_prompt_tokens
        self.cached_tokens += done.num_cached_tokens
        self.new_tokens += done.num_new_tokens
        self.seconds += done.finished_s - done.submitted_s
        self.last = done


@dataclass(slots=True, kw_only=True)
class Conversation:
    """Turns with one model. All turns are kept; those that fit the context are sent."""

    engine: Engine
    sampling: Sampling
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    tools: tuple[Tool, ...] = ()
    """Of a loaded conversation; the model may call them."""
    tally: ChatTotals = field(default_factory=ChatTotals)
    _first: int = 0
    """Of the turns, the oldest that is still sent."""
    _num_again: int = 0

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unload the model."""
        self.engine.close()

    def ask(self, text: str, show: OnText = id) -> Reply:
        """Send a message and show the answer as it comes. Ctrl-C stops it and keeps what came."""
        self.turns.append(Message(USER, text))
        try:
            return self._answer(show)
        except BaseException:
            if self.turns and self.turns[-1].role == USER:
                self.turns.pop()  # a message without an answer is not kept
            raise

    def ask_again(self, show: OnText = id) -> Reply:
        """Another answer to the last message."""
        if not self.turns or self.turns[-1].role != ASSISTANT:
            raise InvalidInputError(
                "There is no answer to give again.", remedy="ask something first"
            )
        old = self.turns.pop()
        self._num_again += 1
        try:
            return self._answer(show)
        except BaseException:
            if self.turns[-1].role == USER:
                self.turns.append(old)
            raise

    def reset(self) -> None:
        """Forget all turns; the system prompt stays."""
        self.turns.clear()
        self.tools = ()
        self._first = 0

    def replace_turns(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Go on from another conversation."""
        kept = list(messages)
        self.tools = tuple(tools)
        self.system = kept.pop(0).content if kept and kept[0].role == SYSTEM else None
        self.turns[:] = kept
        self._first = 0

    def messages(self) -> list[Message]:
        """Everything, from the system prompt on."""
        opening = [] if self.system is None else [Message(SYSTEM, self.system)]
        return [*opening, *self.turns]

    def _answer(self, show: OnText) -> Reply:
        before = self._first
        tokens = self._fit()
        pieces: list[str] = []
        done: Done | None = None
        sampling = self.sampling
        if sampling.seed is not None:  # another answer wants another seed
            sampling = replace(sampling, seed=sampling.seed + self._num_again)
        prompter = self.engine.prompter
        kept = prompter.call_control if self.tools else ()
        request = Request(prompt=tokens, sampling=sampling, kept_control=kept)
        events = stream(self.engine, request)
        try:
            for event in events:
                if isinstance(event, Delta):
                    pieces.append(event.text)
                    show(printable_text(event.text))
                else:
                    done = event
        except KeyboardInterrupt:
            getattr(events, "close", lambda: None)()  # cancels the request
        # The engine's whole text where it ended: pieces may lack what a stop text swallowed.
        is_whole = done is not None and done.reason is not FinishReason.CANCELLED
        text = done.text if is_whole and done is not None else "".join(pieces)
        answer = Message(ASSISTANT, text)
        if self.tools and prompter.call_syntax is not None:
            parsed = parse_answer(prompter.call_syntax, text)
            answer = Message(ASSISTANT, parsed.content, parsed.calls, parsed.reasoning)
        self.turns.append(answer)
        if done is not None:
            self.tally.add(done)
        return Reply(text=text, done=done, num_dropped=self._first - before)

    def _fit(self) -> tuple[int, ...]:
        """Tokens of what is sent: the oldest turns go until there is room for an answer."""
        context = self.engine.info.max_context
        kept = max(MIN_ANSWER_TOKENS, int(context * ANSWER_FRACTION))
        room = context - min(self.sampling.max_new_tokens, kept, context // 2)
        opening = [] if self.system is None else [Message(SYSTEM, self.system)]
        while True:
            tokens = self.engine.prompter.ask([*opening, *self.turns[self._first :]], self.tools)
            if len(tokens) <= room:
                return tokens
            # A conversation begins with a question.
            later = range(self._first + 1, len(self.turns))
            oldest = next((index for index in later if self.turns[index].role == USER), None)
            if oldest is None:
                raise InvalidInputError(
                    f"The message and the system prompt take {len(tokens):,} tokens; there is "
                    f"room for {room:,} beside an answer.",
                    remedy="say it shorter, or start with a larger --context",
                )
            self._first = oldest


def printable_text(text: str) -> str:
    """A model's words without what a terminal would obey: escapes, bells, direction marks."""
    return "".join(
        char
        for char in text
        if char.isprintable() or char in _KEPT_MARKS or unicodedata.category(char) == "Zs"
    )


# Input of a terminal chat: multi-line messages, and commands such as `/reset` or `/set`.

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
    """One line, lines that end with a backslash, or a block between quotes."""
    line = read_line(False)
    is_block = line.lstrip().startswith(QUOTES)
    if is_block:
        line = line.lstrip().removeprefix(QUOTES)
    lines: list[str] = []
    with contextlib.suppress(EOFError):  # the end of the input ends the message too
        while not line.rstrip().endswith(QUOTES) if is_block else line.endswith("\\"):
            lines.append(line if is_block else line[:-1])
            line = read_line(True)
        lines.append(line.rstrip().removesuffix(QUOTES) if is_block else line)
    text = "\n".join(lines)
    return text.strip("\n") if is_block else text.strip()


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
    name, rest = command
    if name in ("save", "save!", "load"):
        if not rest:
            raise UsageError(f"`/{name}` wants a file name.", remedy=f"/{name} chat.jsonl")
        path = Path(rest).expanduser()
        if name == "load":
            talk.replace_turns(*load_conversation(path))
            return f"Going on from {len(talk.turns)} messages."
        save_conversation(talk, path, replaces=name == "save!")
        return f"Saved {path}."
    if name == "stats":
        return describe_totals(talk.tally, talk.engine.info.max_context)
    if name == "set":
        talk.sampling = change_sampling(talk.sampling, rest)
        return f"{rest.replace('=', ' ').split()[0]} is set."
    text = COMMAND_HELP
    if name == "system":
        talk.system = rest or None
        text = "System prompt set." if rest else "No system prompt any more."
    elif name == "reset":
        talk.reset()
        text = "The conversation is forgotten."
    return text


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
    row: dict[str, Any] = {"messages": [message.as_object() for message in talk.messages()]}
    if talk.tools:
        row["tools"] = talk.tools
    write_atomic(path, to_json_line(row) + b"\n")


def load_conversation(path: Path) -> tuple[list[Message], tuple[Tool, ...]]:
    """Messages and tools of the first row of a file in the messages format."""
    if not path.is_file():
        raise NotFoundError(f"There is no file {path}.", remedy="/load FILE that /save wrote")
    if path.suffix.lower() in (".jsonl", ".json", ".ndjson"):
        row = next(read_file(path))
        if "messages" in row.values or "conversations" in row.values:
            return FORMATS["chat"].to_conversation(row)
    try:
        values = read_json_file(path)
        turns = [Message(str(turn["role"]), str(turn["content"])) for turn in values["messages"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{path} holds no conversation.", remedy="/load FILE that /save wrote"
        ) from error
    return turns, ()
