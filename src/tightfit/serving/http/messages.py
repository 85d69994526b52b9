"""Anthropic's messages: the request as a chat, and the answer in Anthropic's words."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from tightfit.data.call_syntax import ParsedAnswer
from tightfit.engines.protocol import Done, FinishReason, TokenLogprob
from tightfit.serving.http.registry import ServedModel
from tightfit.serving.http.schemas import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOKEN_ID,
    MAX_TOOLS,
    ApiError,
    ChatRequest,
    Count,
    Listed,
    RequestBody,
    ResponseBody,
    StopText,
    Text,
    TextPart,
)
from tightfit.serving.http.writers import (
    PreparedRequest,
    TokenUsage,
    call_id,
    format_event,
)

MAX_BLOCKS = 1000
"""Of one message."""


class ToolUsePart(RequestBody):
    """A call that the assistant made earlier."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


class ToolResultPart(RequestBody):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | Annotated[Listed[TextPart], Field(max_length=MAX_BLOCKS)] | None = None
    is_error: bool | None = None


class ThinkingPart(RequestBody):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text


Part = Annotated[
    TextPart | ToolUsePart | ToolResultPart | ThinkingPart, Field(discriminator="type")
]
Parts = Annotated[Listed[Part], Field(max_length=MAX_BLOCKS)]


class MessageTurn(RequestBody):
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    content: Text | Parts


class MessageTool(RequestBody):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: Text
    description: Text | None = None
    input_schema: dict[str, Any]


class MessageToolChoice(RequestBody):
    """`any`: the answer is a call; `tool`: of the one that is named."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestBody):
    """What reasoning may be asked for: none. A model has its own way."""

    type: Literal["disabled"]


class CountRequest(RequestBody):
    """`POST /v1/messages/count_tokens`."""

    model: Text | None = None
    messages: Annotated[Listed[MessageTurn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Text | Annotated[Listed[TextPart], Field(max_length=MAX_BLOCKS)] | None = None
    tools: Annotated[Listed[MessageTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None

    def as_chat(self, **settings: Any) -> ChatRequest:
        """The same as a chat."""
        choice = self.tool_choice
        chosen: Any = None
        if choice is not None:
            names = {"any": "required", "auto": "auto", "none": "none"}
            named = {"type": "function", "function": {"name": choice.name or ""}}
            chosen = names.get(choice.type, named)
        given = {
            "model": self.model,
            "messages": list(self._turns()),
            "tools": [_as_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": chosen,
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
            **settings,
        }
        return ChatRequest.model_validate(given)

    def _turns(self) -> Iterator[dict[str, Any]]:
        if self.system:
            yield {"role": "system", "content": _join(self.system)}
        for turn in self.messages:
            parts = turn.content
            if isinstance(parts, str):
                yield {"role": turn.role, "content": parts}
                continue
            for part in parts:
                if isinstance(part, ToolResultPart):
                    said = _join(part.content or "")
                    yield {"role": "tool", "tool_call_id": part.tool_use_id, "content": said}
            text = "".join(part.text for part in parts if isinstance(part, TextPart))
            calls = [_as_call(part) for part in parts if isinstance(part, ToolUsePart)]
            thought = "".join(part.thinking for part in parts if isinstance(part, ThinkingPart))
            if text or calls or not any(isinstance(part, ToolResultPart) for part in parts):
                made: dict[str, Any] = {"role": turn.role, "content": text}
                if calls:
                    made["tool_calls"] = calls
                if thought:
                    made["reasoning_content"] = thought
                yield made


class MessageRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: Count
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    stop_sequences: Annotated[Listed[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    metadata: Any = None
    """Not looked at."""

    def as_request(self) -> ChatRequest:
        return self.as_chat(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            stream=self.stream,
        )


def _join(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _as_tool(tool: MessageTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _as_call(part: ToolUsePart) -> dict[str, Any]:
    written = json.dumps(part.input, ensure_ascii=False)
    return {
        "id": part.id,
        "type": "function",
        "function": {"name": part.name, "arguments": written},
    }


# The answer.


class AnswerBlock(ResponseBody):
    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessageUsage(ResponseBody):
    input_tokens: int
    """Without those that were found in the cache."""
    output_tokens: int
    cache_read_input_tokens: int


class MessageAnswer(ResponseBody):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(ResponseBody):
    input_tokens: int


class MessageWriter:
    """Anthropic's answer: blocks of text, reasoning and calls."""

    def __init__(self, model: ServedModel, _: object, prepared: PreparedRequest) -> None:
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model.id,
        }
        self._num_prompt = len(prepared.requests[0].prompt)
        self._num_blocks = 0
        self._is_open = False
        """The last block is text, and more may come."""

    def whole(
        self, answers: Sequence[Done], parsed: Sequence[ParsedAnswer], usage: TokenUsage
    ) -> dict[str, Any]:
        blocks = list(_blocks(parsed[0]))
        if not blocks:
            blocks = [{"type": "text", "text": ""}]
        return {
            **self._head,
            "content": blocks,
            **_ending(answers[0], parsed[0]),
            "usage": _usage(usage),
        }

    def open(self, num_answers: int) -> Iterator[str]:  # noqa: ARG002
        usage = {"input_tokens": self._num_prompt, "output_tokens": 0}
        nothing: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        yield _event("message_start", message={**self._head, **nothing})

    def text(
        self,
        index: int,  # noqa: ARG002
        text: str,
        logprobs: Sequence[TokenLogprob],  # noqa: ARG002
    ) -> Iterator[str]:
        if not self._is_open:
            yield self._start({"type": "text", "text": ""})
            self._is_open = True
        yield self._delta({"type": "text_delta", "text": text})

    def end(
        self,
        index: int,  # noqa: ARG002
        parsed: ParsedAnswer,
        done: Done,  # noqa: ARG002
        logprobs: Sequence[TokenLogprob],  # noqa: ARG002
    ) -> Iterator[str]:
        if self._is_open:
            yield self._stop()
        for block in _blocks(parsed._replace(content="")):
            if block["type"] == "thinking":
                yield self._start({**block, "thinking": ""})
                yield self._delta({"type": "thinking_delta", "thinking": block["thinking"]})
            else:
                yield self._start({**block, "input": {}})
                written = json.dumps(block["input"], ensure_ascii=False)
                yield self._delta({"type": "input_json_delta", "partial_json": written})
            yield self._stop()

    def close(
        self, answers: Sequence[Done], parsed: Sequence[ParsedAnswer], usage: TokenUsage
    ) -> Iterator[str]:
        ending = _ending(answers[0], parsed[0])
        yield _event("message_delta", delta=ending, usage=_usage(usage))
        yield _event("message_stop")

    def error(self, error: ApiError) -> str:
        return _event("error", **error.body)

    def _start(self, block: dict[str, Any]) -> str:
        return _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _stop(self) -> str:
        self._is_open = False
        self._num_blocks += 1
        return _event("content_block_stop", index=self._num_blocks - 1)


def _blocks(parsed: ParsedAnswer) -> Iterator[dict[str, Any]]:
    if parsed.reasoning:
        yield {"type": "thinking", "thinking": parsed.reasoning, "signature": ""}
    if parsed.content:
        yield {"type": "text", "text": parsed.content}
    for call in parsed.calls:
        yield {
            "type": "tool_use",
            "id": call_id(call),
            "name": call.name,
            "input": dict(call.arguments),
        }


def _ending(done: Done, parsed: ParsedAnswer) -> dict[str, Any]:
    reason = "end_turn"
    if done.reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif parsed.calls:
        reason = "tool_use"
    elif done.stop_text is not None:
        reason = "stop_sequence"
    stop = done.stop_text if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(usage: TokenUsage) -> dict[str, int]:
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "output_tokens": usage.num_new,
        "cache_read_input_tokens": usage.num_cached,
    }


def _event(name: str, **content: Any) -> str:
    return format_event({"type": name, **content}, name=name)
