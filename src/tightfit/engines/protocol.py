"""Engine: the protocol through which every command uses a loaded model.

Also the checks that all engines share and the blocking, streaming and batch ways to call one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.sampling import Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tightfit.data.prompter import Prompter


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, as tokens, and how to answer it."""

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)


class FinishReason(str, Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The next piece of an answer. `text` never ends inside a character or a stop text."""

    text: str
    tokens: tuple[int, ...] = ()


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

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Queue a request and return at once; the listener receives its events.

        A request that can never run (prompt longer than the context, a token beyond the
        vocabulary) raises `UserError` here. After `close` it raises `UserError` too.
        """
        ...

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits of the next token after each of `tokens`: (len(tokens), vocabulary), fp32."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """By the engine's own tokenizer; control tokens in the text are recognised, none is added.

        llama.cpp has one of its own; conversion compares it with ours.
        """
        ...

    def close(self) -> None:
        """End every request and free the memory. Safe to call twice."""


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
    strange = next((t for t in request.prompt if not 0 <= t < num_vocabulary), None)
    if strange is not None:
        raise InvalidInputError(
            f"Token {strange} is beyond the model's {num_vocabulary:,} tokens.",
            remedy="make the prompt with this model's own tokenizer",
        )
    return min(request.sampling.max_new_tokens, max_context - num_tokens)


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
    engine: Engine, requests: Iterable[Request], *, in_flight: int | None = None
) -> Iterator[tuple[int, Done | Failed]]:
    """Each request's number and final event, in the order in which they end.

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
                else:
                    open_tickets[number] = _submit_numbered(engine, number, request, ended)
            if not open_tickets:
                return
            number, end = ended.get()
            del open_tickets[number]
            yield number, end
    finally:
        for ticket in open_tickets.values():
            if ticket is not None:
                ticket.cancel()


def _submit_numbered(
    engine: Engine, number: int, request: Request, ended: SimpleQueue[tuple[int, Done | Failed]]
) -> Ticket | None:
    def listen(event: Event) -> None:
        if not isinstance(event, Delta):
            ended.put((number, event))

    try:
        return engine.submit(request, listen)
    except UserError as error:
        ended.put((number, Failed(error=error)))
        return None
