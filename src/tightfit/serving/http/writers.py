"""What an answer looks like on the wire: a writer for each API, whole and as events of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tightfit.core.packages import __version__
from tightfit.data.call_syntax import ParsedAnswer
from tightfit.data.tools import ToolCall
from tightfit.engines.protocol import Done, FinishReason, Request, TokenLogprob
from tightfit.serving.http.logprobs import EchoedPrompt, LogprobWriter
from tightfit.serving.http.registry import ServedModel
from tightfit.serving.http.schemas import ApiError, ChatRequest, CompletionRequest

STREAM_END = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """Tokens of one request."""

    num_prompt: int
    num_new: int
    num_cached: int
    """Of the prompt, found in the cache of an earlier request."""


def count_usage(answers: Sequence[Done], *, num_per_prompt: int) -> TokenUsage:
    """`answers` lie prompt by prompt, `num_per_prompt` to each.

    A prompt counts once. Of its answers, the later ones may find it in the cache just because
    the first one put it there: the reported number is what all of them found.
    """
    groups = [
        answers[at : at + num_per_prompt] for at in range(0, len(answers), max(num_per_prompt, 1))
    ]
    return TokenUsage(
        num_prompt=sum(group[0].num_prompt_tokens for group in groups),
        num_new=sum(done.num_new_tokens for done in answers),
        num_cached=sum(min(done.num_cached_tokens for done in group) for group in groups),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """What the engine gets, and what of the prompts is sent back."""

    requests: list[Request]
    echoed: list[EchoedPrompt]


class AnswerWriter(Protocol):
    """One request's answers in the words of its API."""

    def whole(
        self, answers: Sequence[Done], parsed: Sequence[ParsedAnswer], usage: TokenUsage
    ) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...

    def open(self, num_answers: int) -> Iterator[str]:
        """Events before any text."""
        ...

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[str]:
        """What is new of one answer."""
        ...

    def end(
        self, index: int, parsed: ParsedAnswer, done: Done, logprobs: Sequence[TokenLogprob]
    ) -> Iterator[str]:
        """Calls and reasoning of one answer, as far as it has them, and why it ended."""
        ...

    def close(
        self, answers: Sequence[Done], parsed: Sequence[ParsedAnswer], usage: TokenUsage
    ) -> Iterator[str]:
        """Events after all answers."""
        ...

    def error(self, error: ApiError) -> str:
        """The last event of a stream that cannot go on."""
        ...


def format_event(body: dict[str, Any], *, name: str | None = None) -> str:
    """One server-sent event. JSON writes line breaks as escapes, so it is one line."""
    line = f"data: {json.dumps(body, separators=(',', ':'))}\n\n"
    return line if name is None else f"event: {name}\n{line}"


def name_version(model: ServedModel) -> str:
    """What made an answer, for `system_fingerprint`."""
    info = model.engine.info
    return f"tightfit-{__version__}-{info.engine}-{info.format}"


def write_usage(usage: TokenUsage) -> dict[str, Any]:
    """As chat and completions report it."""
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_new,
        "total_tokens": usage.num_prompt + usage.num_new,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
    }


def call_id(call: ToolCall) -> str:
    return call.id or secrets.token_hex(5)[:9]  # nine characters, which every template takes


def call_arguments(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)


class OpenAIWriter:
    """Chat and completions."""

    def __init__(
        self,
        model: ServedModel,
        body: ChatRequest | CompletionRequest,
        prepared: PreparedRequest,
    ) -> None:
        self._is_chat = is_chat = isinstance(body, ChatRequest)
        self._kind = "chat.completion" if is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": model.id,
            "system_fingerprint": name_version(model),
        }
        # OpenAI sends `usage: null` until the last event, and no such key where none is wanted.
        self._no_usage: dict[str, Any] = {"usage": None} if body.includes_usage else {}
        self._includes_usage = body.includes_usage
        num_per_prompt = body.n or 1
        self._echoed = [prompt for prompt in prepared.echoed for _ in range(num_per_prompt)]
        self._logprobs: list[LogprobWriter] | None = None
        if body.num_top_logprobs is not None:
            tokenizer = model.engine.prompter.tokenizer
            self._logprobs = [
                LogprobWriter(tokenizer, is_chat=is_chat)
                for _ in range(body.num_prompts * num_per_prompt)
            ]

    def whole(
        self, answers: Sequence[Done], parsed: Sequence[ParsedAnswer], usage: TokenUsage
    ) -> dict[str, Any]:
        choices = []
        for index, (done, found) in enumerate(zip(answers, parsed, strict=True)):
            if not self._is_chat:
                prompt = self._echoed[index] if self._echoed else EchoedPrompt(text="")
                logprobs = self._write_logprobs(
                    index, (*prompt.logprobs, *done.logprobs), begins_prompt=bool(prompt.logprobs)
                )
                content: dict[str, Any] = {"text": prompt.text + done.text}
                choices.append(_choice(index, content, done.reason.value, logprobs))
                continue
            delta, end = _finish(found, done)
            text = found.content or (None if "tool_calls" in delta else "")
            message = {"role": "assistant", "content": text, **delta, "refusal": None}
            logprobs = self._write_logprobs(index, done.logprobs)
            choices.append(_choice(index, {"message": message}, end, logprobs))
        return {
            **self._head,
            "object": self._kind,
            "choices": choices,
            "usage": write_usage(usage),
        }

    def open(self, num_answers: int) -> Iterator[str]:
        if self._is_chat:
            for index in range(num_answers):
                yield self._event(index, {"role": "assistant", "content": ""})
        for index, prompt in enumerate(self._echoed):
            logprobs = None
            if prompt.logprobs:
                logprobs = self._write_logprobs(index, prompt.logprobs, begins_prompt=True)
            yield self._event(index, {"content": prompt.text}, logprobs=logprobs)

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[str]:
        written = self._write_logprobs(index, logprobs)
        yield self._event(index, {"content": text}, logprobs=written)

    def end(
        self, index: int, parsed: ParsedAnswer, done: Done, logprobs: Sequence[TokenLogprob]
    ) -> Iterator[str]:
        delta, end = _finish(parsed, done)
        for number, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = number
        if delta:
            yield self._event(index, delta)
        written = self._write_logprobs(index, logprobs) if logprobs else None
        yield self._event(index, {}, end, logprobs=written)

    def close(
        self,
        answers: Sequence[Done],  # noqa: ARG002
        parsed: Sequence[ParsedAnswer],  # noqa: ARG002
        usage: TokenUsage,
    ) -> Iterator[str]:
        if self._includes_usage:
            yield self._write_event([], {"usage": write_usage(usage)})
        yield STREAM_END

    def error(self, error: ApiError) -> str:
        return format_event(error.body)

    def _write_logprobs(
        self, index: int, entries: Sequence[TokenLogprob], *, begins_prompt: bool = False
    ) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        return self._logprobs[index].write(entries, begins_prompt=begins_prompt)

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        end: str | None = None,
        *,
        logprobs: dict[str, Any] | None = None,
    ) -> str:
        """What is new of one answer, as a chat says it; completions have the text alone."""
        content = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        return self._write_event([_choice(index, content, end, logprobs)], self._no_usage)

    def _write_event(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> str:
        kind = "chat.completion.chunk" if self._is_chat else self._kind
        return format_event({**self._head, "object": kind, "choices": choices, **usage})


def _finish(parsed: ParsedAnswer, done: Done) -> tuple[dict[str, Any], str]:
    found: dict[str, Any] = {}
    if parsed.reasoning:
        found["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        found["tool_calls"] = [
            {
                "id": call_id(call),
                "type": "function",
                "function": {"name": call.name, "arguments": call_arguments(call)},
            }
            for call in parsed.calls
        ]
    is_call = parsed.calls and done.reason is FinishReason.STOP
    return found, "tool_calls" if is_call else done.reason.value


def _choice(
    index: int, content: dict[str, Any], end: str | None, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": end}
