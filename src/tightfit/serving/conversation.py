"""A conversation with an engine: turns, truncation to the context, streamed answers."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tightfit.core.errors import InvalidInputError
from tightfit.core.sampling import Sampling
from tightfit.data.formats import ASSISTANT, SYSTEM, USER, Message
from tightfit.engines.protocol import Delta, Done, Engine, FinishReason, Request, stream

MIN_ANSWER_TOKENS = 16
ANSWER_FRACTION = 0.25
"""Of the context, kept free for the answer unless its own limit is smaller."""
_KEPT_MARKS = "\n\t\u200c\u200d"
"""Line breaks, tabs, and the joiners that Persian and composed emoji are written with."""

OnText = Callable[[str], None]


def _ignore(_text: str) -> None:
    pass


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

    def ask(self, text: str, show: OnText = _ignore) -> Reply:
        """Send a message and show the answer as it comes. Ctrl-C stops it and keeps what came."""
        self.turns.append(Message(USER, text))
        try:
            return self._answer(show)
        except BaseException:
            if self.turns and self.turns[-1].role == USER:
                self.turns.pop()  # a message without an answer is not kept
            raise

    def ask_again(self, show: OnText = _ignore) -> Reply:
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
        self._first = 0

    def replace_turns(self, messages: Sequence[Message]) -> None:
        """Go on from another conversation."""
        kept = list(messages)
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
        events = stream(self.engine, Request(prompt=tokens, sampling=self._seeded()))
        try:
            for event in events:
                if isinstance(event, Delta):
                    pieces.append(event.text)
                    show(printable_text(event.text))
                else:
                    done = event
        except KeyboardInterrupt:
            _close(events)
        # The engine's whole text where it ended: pieces may lack what a stop text swallowed.
        is_whole = done is not None and done.reason is not FinishReason.CANCELLED
        text = done.text if is_whole and done is not None else "".join(pieces)
        self.turns.append(Message(ASSISTANT, text))
        if done is not None:
            self.tally.add(done)
        return Reply(text=text, done=done, num_dropped=self._first - before)

    def _seeded(self) -> Sampling:
        """Another answer wants another seed, where there is one at all."""
        seed = self.sampling.seed
        return (
            self.sampling if seed is None else replace(self.sampling, seed=seed + self._num_again)
        )

    def _fit(self) -> tuple[int, ...]:
        """Tokens of what is sent: the oldest turns go until there is room for an answer."""
        context = self.engine.info.max_context
        kept = max(MIN_ANSWER_TOKENS, int(context * ANSWER_FRACTION))
        room = context - min(self.sampling.max_new_tokens, kept, context // 2)
        opening = [] if self.system is None else [Message(SYSTEM, self.system)]
        while True:
            sent = [*opening, *self.turns[self._first :]]
            tokens = self.engine.prompter.ask(sent)
            if len(tokens) <= room:
                return tokens
            oldest = self._next_question()
            if oldest is None:
                raise InvalidInputError(
                    f"The message and the system prompt take {len(tokens):,} tokens; there is "
                    f"room for {room:,} beside an answer.",
                    remedy="say it shorter, or start with a larger --context",
                )
            self._first = oldest

    def _next_question(self) -> int | None:
        """The next place that a conversation can begin with; None at the last question."""
        places = range(self._first + 1, len(self.turns))
        return next((place for place in places if self.turns[place].role == USER), None)


def printable_text(text: str) -> str:
    """A model's words without what a terminal would obey: escapes, bells, direction marks."""
    return "".join(char for char in text if char in _KEPT_MARKS or _is_shown(char))


def _is_shown(char: str) -> bool:
    return char.isprintable() or unicodedata.category(char) == "Zs"


def _close(events: Iterator[Delta | Done]) -> None:
    """Closing cancels the request; the generator is there for that."""
    close = getattr(events, "close", None)
    if close is not None:
        close()
