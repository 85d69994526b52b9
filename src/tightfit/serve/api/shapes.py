"""Answers as OpenAI's clients read them: whole, and in the pieces of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tightfit import __version__
from tightfit.engines.protocol import Done
from tightfit.serve.api.hub import ServedModel

DONE = "data: [DONE]\n\n"


class Shape(Protocol):
    """How one kind of request is answered."""

    def whole(self, answers: Sequence[Done], usage: dict[str, Any]) -> dict[str, Any]: ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """What comes before the first piece of an answer."""
        ...

    def piece(self, index: int, text: str) -> dict[str, Any]: ...

    def closing(self, index: int, done: Done) -> dict[str, Any]: ...

    def ending(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The event that tells the usage, after all answers."""
        ...


class _Named:
    """What every body of one request begins with."""

    def __init__(self, model: ServedModel, *, prefix: str, includes_usage: bool) -> None:
        info = model.engine.info
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": model.id,
            "system_fingerprint": f"tightfit-{__version__}-{info.engine}-{info.format}",
        }
        self._includes_usage = includes_usage

    def _body(self, kind: str, choices: Iterable[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": list(choices)}

    def _event(self, kind: str, choices: Iterable[dict[str, Any]]) -> dict[str, Any]:
        # OpenAI sends `usage: null` until the last event, and no such key where none is wanted.
        usage = {"usage": None} if self._includes_usage else {}
        return {**self._body(kind, choices), **usage}


class ChatShape(_Named):
    """`/v1/chat/completions`."""

    _chunk = "chat.completion.chunk"

    def __init__(self, model: ServedModel, *, includes_usage: bool) -> None:
        super().__init__(model, prefix="chatcmpl", includes_usage=includes_usage)

    def whole(self, answers: Sequence[Done], usage: dict[str, Any]) -> dict[str, Any]:
        choices = (
            {
                "index": index,
                "message": {"role": "assistant", "content": done.text, "refusal": None},
                "logprobs": None,
                "finish_reason": done.reason.value,
            }
            for index, done in enumerate(answers)
        )
        return {**self._body("chat.completion", choices), "usage": usage}

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._choice(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return self._choice(index, {"content": text})

    def closing(self, index: int, done: Done) -> dict[str, Any]:
        return self._choice(index, {}, done.reason.value)

    def ending(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._body(self._chunk, ()), "usage": usage}

    def _choice(self, index: int, delta: dict[str, str], end: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": end}
        return self._event(self._chunk, [choice])


class CompletionShape(_Named):
    """`/v1/completions`."""

    _kind = "text_completion"

    def __init__(self, model: ServedModel, *, includes_usage: bool) -> None:
        super().__init__(model, prefix="cmpl", includes_usage=includes_usage)

    def whole(self, answers: Sequence[Done], usage: dict[str, Any]) -> dict[str, Any]:
        choices = (
            _text_choice(index, done.text, done.reason.value) for index, done in enumerate(answers)
        )
        return {**self._body(self._kind, choices), "usage": usage}

    def opening(self, index: int) -> dict[str, Any] | None:  # noqa: ARG002
        return None

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return self._event(self._kind, [_text_choice(index, text, None)])

    def closing(self, index: int, done: Done) -> dict[str, Any]:
        return self._event(self._kind, [_text_choice(index, "", done.reason.value)])

    def ending(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._body(self._kind, ()), "usage": usage}


def _text_choice(index: int, text: str, end: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": end}


def count_usage(answers: Sequence[Done], *, num_per_prompt: int) -> dict[str, Any]:
    """Tokens of one request. `answers` lie prompt by prompt, `num_per_prompt` to each.

    A prompt counts once. Of its answers, the later ones may find it in the cache just because
    the first one put it there: what is told is what all of them found.
    """
    groups = [
        answers[at : at + num_per_prompt] for at in range(0, len(answers), max(num_per_prompt, 1))
    ]
    prompt = sum(group[0].num_prompt_tokens for group in groups)
    cached = sum(min(done.num_cached_tokens for done in group) for group in groups)
    new = sum(done.num_new_tokens for done in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def as_event(body: dict[str, Any]) -> str:
    """One server-sent event. JSON writes line breaks as escapes, so it is one line."""
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"
