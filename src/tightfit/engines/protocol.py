"""Engine: the protocol through which every command uses a loaded model.

Also what all engines share: checks of a request, the state of an answer, and the blocking,
streaming and batch ways to call one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tightfit.core.errors import InvalidInputError, SetupError, UserError
from tightfit.core.sampling import Sampling
from tightfit.data.templates import StopTextFilter, TextStream

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tightfit.data.templates import Prompter


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, as tokens, and how to answer it."""

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    kept_control: tuple[int, ...] = ()
    """Control tokens that stay in the answer's text, where tool calls are parsed from it."""


class FinishReason(str, Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One token's log-probability, and those of the likeliest tokens at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """Token and log-probability, likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The next piece of an answer. `text` never ends inside a character or a stop text."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """Where the request asked for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of an answer. Times are of `time.monotonic()`."""

    reason: FinishReason
    text: str
    """The whole answer, without stop tokens and stop texts."""
    num_prompt_tokens: int
    num_new_tokens: int
    """Every token that was computed, the stop token included."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were reused from an earlier request."""
    stop_text: str | None = None
    """The stop text that ended it."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of every token of the text, where the request asked for them."""
    submitted_s: float
    first_token_s: float
    finished_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request failed. The engine goes on with others."""

    error: Exception
    """A `UserError` where the user can put it right."""


Event = Delta | Done | Failed
Listener = Callable[[Event], None]
"""Called from the engine's own thread, in order, with deltas and then one `Done` or `Failed`.

Must be quick: hand the event over and return.
"""


class Ticket(Protocol):
    """A submitted request."""

    def cancel(self) -> None:
        """End the answer soon, with `FinishReason.CANCELLED`. Does nothing once it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What is loaded, and where."""

    engine: str
    """`transformers`, `llama.cpp` or `vllm`."""
    version: str
    why: str
    """One sentence: why this engine and this device."""
    model: str
    """The name the user gave."""
    format: str
    """Of the weights: `bf16`, `nf4`, `gptq-4`, `Q4_K_M`, ..."""
    device: str
    """`cpu`, `cuda:0`, `cuda:0-3`."""
    max_context: int
    """Prompt and answer together, of one request."""
    num_slots: int
    """Requests that are computed at once; more than these wait."""
    num_params: int
    weight_bytes: int
    """In memory."""
    kv_bytes_per_token: int
    num_hosts: int = 0
    """Other machines that hold a part of the model."""


class Engine(Protocol):
    """A loaded model. Every method may be called from any thread."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def prompter(self) -> Prompter:
        """Messages and texts to tokens and back, by the artefact's own tokenizer and template."""
        ...

    @property
    def num_vocabulary(self) -> int:
        """Logits of one token."""
        ...

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Queue a request and return at once; the listener receives its events.

        A request that can never run (prompt longer than the context, a token beyond the
        vocabulary) raises `UserError` here. After `close` it raises `UserError` too.
        """
        ...

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits of the next token after each of `tokens`: (len(tokens), vocabulary), fp32.

        Raises `UserError` as `submit` does.
        """
        ...

    def tokenize(self, text: str) -> list[int]:
        """By the engine's own tokenizer; control tokens in the text are recognised, none is added.

        llama.cpp has one of its own; conversion compares it with ours.
        """
        ...

    def close(self) -> None:
        """End every request and free the memory. Safe to call twice."""


class EngineLostError(SetupError):
    """What computes the answers ended by itself: no prompt's fault as far as anyone can tell."""


# Context length and checks of a request.

DEFAULT_CONTEXT = 4096


def choose_context(asked: int | None, known: int | None) -> int:
    """Context in tokens. `known` is the model's own limit; None where its config has none."""
    if asked is None:
        return min(known or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if known is not None and asked > known:
        raise InvalidInputError(
            f"A context of {asked:,} tokens was asked for; the model was made for {known:,}.",
            remedy=f"--context {known} or less",
        )
    return asked


def check_request(request: Request, *, max_context: int, num_vocabulary: int) -> int:
    """The number of new tokens that fit. Raises for a request that can never be answered."""
    num_tokens = len(request.prompt)
    if request.sampling.grammar is not None and request.sampling.ignores_stop_tokens:
        raise InvalidInputError(
            "An answer of a given format ends where the format does.",
            remedy="leave `ignore_eos` out",
        )
    if num_tokens == 0:
        raise InvalidInputError("The prompt is empty.", remedy="send at least one token")
    if request.sampling.max_new_tokens < 1:
        raise InvalidInputError(
            f"{request.sampling.max_new_tokens} new tokens were asked for.",
            remedy="ask for at least 1",
        )
    if num_tokens >= max_context:
        raise InvalidInputError(
            f"The prompt has {num_tokens:,} tokens; prompt and answer together may have "
            f"{max_context:,}.",
            remedy="shorten the prompt, or allow more: --context N, up to the model's own",
        )
    biased = (token for token, _ in request.sampling.logit_bias)
    check_tokens((*request.prompt, *biased), num_vocabulary)
    return min(request.sampling.max_new_tokens, max_context - num_tokens)


def check_tokens(tokens: Iterable[int], num_vocabulary: int) -> None:
    """Raise `InvalidInputError` for a token that the model does not have."""
    strange = next((token for token in tokens if not 0 <= token < num_vocabulary), None)
    if strange is not None:
        raise InvalidInputError(
            f"Token {strange} is beyond the model's {num_vocabulary:,} tokens.",
            remedy="make the prompt with this model's own tokenizer",
        )


# Blocking, streaming and batched calls.


def answer(engine: Engine, request: Request) -> Done:
    """The whole answer. Raises the error of a failed request."""
    for event in stream(engine, request):
        if isinstance(event, Done):
            return event
    raise RuntimeError("the engine ended an answer without a final event")


def stream(engine: Engine, request: Request) -> Iterator[Delta | Done]:
    """Pieces as they come, `Done` last. Closing the iterator cancels the request."""
    events: SimpleQueue[Event] = SimpleQueue()
    ticket = engine.submit(request, events.put)
    try:
        while True:
            event = events.get()
            if isinstance(event, Failed):
                raise event.error
            yield event
            if isinstance(event, Done):
                return
    finally:
        ticket.cancel()


def answer_all(
    engine: Engine,
    requests: Iterable[Request],
    *,
    in_flight: int | None = None,
    on_delta: Callable[[int, Delta], None] = lambda _number, _delta: None,
) -> Iterator[tuple[int, Done | Failed]]:
    """Each request's number and final event, in the order in which they end.

    `on_delta` receives each request's number and pieces, in the engine's thread, before its end.

    Requests are drawn from the iterable only as others end, so that it may be long; never more
    than `in_flight` are handed in, by default twice the engine's slots. One that the engine
    refuses ends as `Failed`. Closing the iterator cancels what is under way.
    """
    most = max(1, 2 * engine.info.num_slots if in_flight is None else in_flight)
    ended: SimpleQueue[tuple[int, Done | Failed]] = SimpleQueue()
    open_tickets: dict[int, Ticket | None] = {}
    numbered = enumerate(requests)
    is_more = True
    try:
        while True:
            while is_more and len(open_tickets) < most:
                number, request = next(numbered, (-1, None))
                if request is None:
                    is_more = False
                    break
                listen = partial(_sort_event, ended, on_delta, number)
                try:
                    open_tickets[number] = engine.submit(request, listen)
                except UserError as error:
                    open_tickets[number] = None
                    listen(Failed(error=error))
            if not open_tickets:
                return
            number, end = ended.get()
            del open_tickets[number]
            yield number, end
    finally:
        for ticket in open_tickets.values():
            if ticket is not None:
                ticket.cancel()


def _sort_event(
    ended: SimpleQueue[tuple[int, Done | Failed]],
    on_delta: Callable[[int, Delta], None],
    number: int,
    event: Event,
) -> None:
    if isinstance(event, Delta):
        on_delta(number, event)
    else:
        ended.put((number, event))


# The state that every engine keeps of an answer, and the parts that all engines share.

Text = TypeVar("Text", TextStream, StopTextFilter)
"""What the engine's pieces become text by: tokens, or text with stop texts in it."""


class BaseAnswer(Generic[Text]):
    """A ticket: one request, its tokens and text so far, and its events.

    Only the engine's thread changes it; `cancel` may come from any.
    """

    def __init__(
        self,
        request: Request,
        listener: Listener,
        stop_ids: Sequence[int],
        text: Text,
    ) -> None:
        self.request = request
        self.stop_ids = frozenset(() if request.sampling.ignores_stop_tokens else stop_ids)
        self.text: Text = text
        self.num_new_tokens = 0
        self.num_cached_tokens = 0
        self.is_cancelled = False
        self.is_over = False
        self._listener = listener
        self._pending: list[int] = []
        """Tokens whose text could not be shown yet."""
        self._pending_logprobs: list[TokenLogprob] = []
        self._logprobs: list[TokenLogprob] = []
        self._submitted_s = time.monotonic()
        self._first_token_s: float | None = None

    def cancel(self) -> None:
        self.is_cancelled = True

    def mark_first_token(self) -> bool:
        """Note the time of the first token. True where this was it."""
        is_first = self._first_token_s is None
        if is_first:
            self._first_token_s = time.monotonic()
        return is_first

    def show(self, text: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Send the text that can be shown now, with all tokens that came since the last one."""
        self._pending += tokens
        self._pending_logprobs += logprobs
        if text:
            self._emit(self._make_delta(text))

    def end(self, reason: FinishReason) -> None:
        """Send the rest of the text and the final event, once."""
        if self.is_over:
            return
        rest = self.text.finish()
        if rest or self._pending:
            self._emit(self._make_delta(rest))
        self.is_over = True
        now = time.monotonic()
        self._emit(
            Done(
                reason=reason,
                text=self.text.text,
                num_prompt_tokens=len(self.request.prompt),
                num_new_tokens=self.num_new_tokens,
                num_cached_tokens=self.num_cached_tokens,
                stop_text=self.text.stopped_by,
                logprobs=tuple(self._logprobs),
                submitted_s=self._submitted_s,
                first_token_s=now if self._first_token_s is None else self._first_token_s,
                finished_s=now,
            )
        )

    def fail(self, error: Exception) -> None:
        if not self.is_over:
            self.is_over = True
            self._emit(Failed(error=error))

    def _make_delta(self, text: str) -> Delta:
        tokens, self._pending = tuple(self._pending), []
        logprobs, self._pending_logprobs = tuple(self._pending_logprobs), []
        self._logprobs += logprobs
        return Delta(text=text, tokens=tokens, logprobs=logprobs)

    def _emit(self, event: Event) -> None:
        try:
            self._listener(event)
        except Exception:  # a broken listener ends its own answer, not the others
            self.is_cancelled = True


class BaseEngine:
    """A loaded model's description and tokenizer, and whether it is still open."""

    def __init__(self, info: EngineInfo, prompter: Prompter, *, num_vocabulary: int) -> None:
        self.info = info
        self.prompter = prompter
        self.num_vocabulary = num_vocabulary
        self._lock = threading.Lock()
        self._is_closed = False

    def tokenize(self, text: str) -> list[int]:
        return self.prompter.tokenizer.encode(text)

    def _check_open(self) -> None:
        if self._is_closed:
            raise UserError(f"{self.info.model} was closed.", remedy="start the command again")

    def _check_request(self, request: Request) -> int:
        """The number of new tokens that fit."""
        return check_request(
            request, max_context=self.info.max_context, num_vocabulary=self.num_vocabulary
        )

    def _set_closed(self) -> bool:
        """Whether it was open until now."""
        with self._lock:
            was_open, self._is_closed = not self._is_closed, True
            return was_open


def name_gpus(count: int) -> str:
    """`cuda:0`, or `cuda:0-3` for several."""
    return "cuda:0" if count <= 1 else f"cuda:0-{count - 1}"
