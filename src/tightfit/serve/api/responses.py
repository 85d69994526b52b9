"""The bodies that the HTTP API gives, for its description; `shapes.py` writes them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Finish = Literal["stop", "length"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(_Body):
    cached_tokens: int
    """Of the prompt, read from the cache of an earlier request."""


class Usage(_Body):
    """A prompt counts once, however many answers it has; the token that ends an answer counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AnswerMessage(_Body):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Body):
    index: int
    message: AnswerMessage
    logprobs: None
    finish_reason: Finish


class ChatCompletion(_Body):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(_Body):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_Body):
    index: int
    delta: ChatDelta
    logprobs: None
    finish_reason: Finish | None


class ChatChunk(_Body):
    """One `data:` line of a stream. `usage` is there only where `include_usage` asked for it."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChoice(_Body):
    index: int
    text: str
    logprobs: None
    finish_reason: Finish | None


class Completion(_Body):
    """A whole answer, or one `data:` line of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(_Body):
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


class ModelList(_Body):
    object: Literal["list"]
    data: list[ModelCard]


class Health(_Body):
    status: Literal["loading", "ready", "stopping"]
