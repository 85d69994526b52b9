"""Engine: the one protocol that chat, generate, serve, verify and eval speak to a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tightfit.data.prompter import Prompter


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen, and when to end."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    """0: greedy, whatever the other settings say."""
    top_p: float = 1.0
    top_k: int = 0
    """0: every token may be drawn."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """None: another answer every time. The same seed and engine give the same answer."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer and are not part of it, beside the model's own stop tokens."""
    ignores_stop_tokens: bool = False
    """Go on to `max_new_tokens`, for measuring."""


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
    """Prompt tokens whose keys and values were still there from an earlier request."""
    submitted_s: float
    first_token_s: float
    finished_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request could not be answered. The engine itself still lives unless it says otherwise."""

    fault: Exception
    """A `UserError` where the user can put it right."""


Event = Delta | Done | Failed
Listener = Callable[[Event], None]
"""Called from the engine's own thread, in order, with deltas and then one `Done` or `Failed`.

Must be quick: hand the event over and return.
"""


class Ticket(Protocol):
    """A request that was handed in."""

    def cancel(self) -> None:
        """End the answer soon, with `FinishReason.CANCELLED`. Harmless when it has ended."""


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
    """As they lie in memory."""
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
        """Hand a request in and return at once; what becomes of it reaches the listener.

        A request that can never run (prompt longer than the context, a token beyond the
        vocabulary) raises `UserError` here. After `close` it raises `UserError` too.
        """
        ...

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Scores of every next token after each of `tokens`: (len(tokens), vocabulary), fp32."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """By the engine's own tokenizer; control tokens count wherever they stand; none is added.

        llama.cpp has one of its own, which the check after conversion holds against ours.
        """
        ...

    def close(self) -> None:
        """End every request and give the memory back. Safe to call twice."""
