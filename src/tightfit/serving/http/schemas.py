"""Request and response bodies of the HTTP API, in OpenAI's format.

Unknown request fields are ignored. A field that would change the answer and that no engine
supports is refused; its schema accepts only the value that requests nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES = 16
MAX_ANSWERS = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1


def _require_characters(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no character and which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("Text must not hold half of a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_require_characters)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
StopText = Annotated[Text, Field(max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Nothing = Annotated[list[Any], Field(max_length=0)]
Zero = Annotated[float, Field(ge=0, le=0)]


class _RequestBody(BaseModel):
    # Strict, because "3" for a number is a caller's mistake that a guess would hide.
    model_config = ConfigDict(extra="ignore", strict=True)


class StreamOptions(_RequestBody):
    """What a stream sends beside the answer."""

    include_usage: bool | None = None
    """One more event before the end, with the number of tokens."""


def _is_unset(value: Any) -> bool:
    return not value


def _is_text(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and value.get("type") in (None, "text"))


_TEXT_ONLY = "Only text goes in and comes out here"
_UNSUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "logprobs": (
        lambda value: value in (None, False),
        "Log probabilities are not available: leave `logprobs` out.",
    ),
    "top_logprobs": (
        lambda value: value in (None, 0),
        "Log probabilities are not available: leave `top_logprobs` out.",
    ),
    "tools": (_is_unset, "Tools are not supported: leave `tools` out."),
    "functions": (_is_unset, "Functions are not supported: leave `functions` out."),
    "tool_choice": (
        lambda value: value in (None, "none", "auto"),
        "Tools are not supported: leave `tool_choice` out.",
    ),
    "function_call": (
        lambda value: value in (None, "none", "auto"),
        "Functions are not supported: leave `function_call` out.",
    ),
    "audio": (_is_unset, f"{_TEXT_ONLY}: leave `audio` out."),
    "modalities": (
        lambda value: value in (None, [], ["text"]),
        f'{_TEXT_ONLY}: leave `modalities` out, or send ["text"].',
    ),
    "response_format": (
        _is_text,
        "Answers cannot be held to a format: leave `response_format` out and ask for it in words.",
    ),
    "frequency_penalty": (
        _is_unset,
        "`frequency_penalty` is not supported; `repetition_penalty` is.",
    ),
    "presence_penalty": (
        _is_unset,
        "`presence_penalty` is not supported; `repetition_penalty` is.",
    ),
    "logit_bias": (_is_unset, "`logit_bias` is not supported: leave it out."),
    "suffix": (_is_unset, "`suffix` is not supported: leave it out."),
    "echo": (_is_unset, "`echo` is not supported: the prompt is not sent back."),
    "best_of": (
        lambda value: value in (None, 1),
        "`best_of` is not supported: ask for `n` answers and choose.",
    ),
}


def unsupported_field_error(message: str, param: str) -> PydanticCustomError:
    """A fault that carries the field's name as callers know it."""
    return PydanticCustomError("unsupported", "{message}", {"message": message, "param": param})


class AnswerRequest(_RequestBody):
    """What chat and completions share."""

    model: Text | None = None
    """An id of `/v1/models`. May be left out where only one model is served."""
    max_tokens: Count | None = None
    """Most tokens of an answer. Cut where the context ends."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0: always the likeliest token. Left out: 1."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None
    """Not OpenAI's. 0 or -1: every token may be drawn."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Not OpenAI's."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    """Not OpenAI's. 1: none."""
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    """The same seed gives the same answer; with `n`, each answer has a seed of its own from it."""
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    ignore_eos: bool | None = None
    """Not OpenAI's. Go on to `max_tokens`, for measuring."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    user: Any = None
    """Not looked at."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name, (is_harmless, message) in _UNSUPPORTED.items():
                if name in given and not is_harmless(given[name]):
                    raise unsupported_field_error(message, name)
        return given

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TextPart(_RequestBody):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


class ChatMessage(_RequestBody):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class TextFormat(_RequestBody):
    """The only format of answers: text."""

    type: Literal["text"] | None = None


class ChatRequest(AnswerRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    """The newer name of `max_tokens`, and stronger than it."""
    logprobs: Literal[False] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None
    response_format: TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    audio: Annotated[dict[str, Any], Field(max_length=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_media(cls, given: Any) -> Any:
        messages = given.get("messages") if isinstance(given, dict) else None
        for number, message in enumerate(messages if isinstance(messages, list) else ()):
            if isinstance(message, dict):
                _refuse_in(message, f"messages[{number}]")
        return given

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def _refuse_in(message: dict[str, Any], place: str) -> None:
    if message.get("role") in ("tool", "function"):
        raise unsupported_field_error(
            "Tools are not supported: leave their messages out.", f"{place}.role"
        )
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise unsupported_field_error(
                f"`{name}` is not supported: leave it out.", f"{place}.{name}"
            )
    parts = message.get("content")
    for number, part in enumerate(parts if isinstance(parts, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise unsupported_field_error(
                f"{_TEXT_ONLY}: a part of type `{kind[:40]}` is not supported.",
                f"{place}.content[{number}].type",
            )


class CompletionRequest(AnswerRequest):
    """`POST /v1/completions`."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_ANSWERS)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_ANSWERS),
        ]
    )
    """A text, several, or the same as tokens."""
    logprobs: Literal[False] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    echo: Literal[False] | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """Each prompt by itself."""
        given = self.prompt
        if isinstance(given, str):
            return (given,)
        if isinstance(given[0], int):
            return (tuple(one for one in given if isinstance(one, int)),)
        return tuple(one if isinstance(one, str) else tuple(_tokens(one)) for one in given)


def _tokens(given: Any) -> list[int]:
    return list(given)


# Response bodies, for the OpenAPI description; `answers.py` writes them.

Finish = Literal["stop", "length"]


class _ResponseBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(_ResponseBody):
    cached_tokens: int
    """Of the prompt, read from the cache of an earlier request."""


class Usage(_ResponseBody):
    """A prompt counts once, however many answers it has; the token that ends an answer counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AnswerMessage(_ResponseBody):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_ResponseBody):
    index: int
    message: AnswerMessage
    logprobs: None
    finish_reason: Finish


class ChatCompletion(_ResponseBody):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(_ResponseBody):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_ResponseBody):
    index: int
    delta: ChatDelta
    logprobs: None
    finish_reason: Finish | None


class ChatChunk(_ResponseBody):
    """One `data:` line of a stream. `usage` is there only where `include_usage` asked for it."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChoice(_ResponseBody):
    index: int
    text: str
    logprobs: None
    finish_reason: Finish | None


class Completion(_ResponseBody):
    """A whole answer, or one `data:` line of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(_ResponseBody):
    """One model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    aliases: list[str]
    """Other names it answers to."""
    engine: str
    format: str
    device: str
    max_context: int
    """Tokens of prompt and answer together."""


class ModelList(_ResponseBody):
    object: Literal["list"]
    data: list[ModelCard]


class Health(_ResponseBody):
    status: Literal["loading", "ready", "stopping"]
