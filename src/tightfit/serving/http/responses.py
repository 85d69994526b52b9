"""OpenAI's responses: the request as a chat, and the answer as output items."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from tightfit.data.call_syntax import ParsedAnswer
from tightfit.engines.protocol import Done, FinishReason, TokenLogprob
from tightfit.serving.http.registry import ServedModel
from tightfit.serving.http.schemas import (
    MAX_MESSAGES,
    MAX_SEED,
    MAX_TOOLS,
    ApiError,
    ChatRequest,
    Count,
    JsonFormat,
    Listed,
    OnlyFalse,
    RequestBody,
    ResponseBody,
    Text,
    TextFormat,
)
from tightfit.serving.http.writers import (
    PreparedRequest,
    TokenUsage,
    call_arguments,
    call_id,
    format_event,
)


class InputText(RequestBody):
    """A piece of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


class InputMessage(RequestBody):
    """One turn of a conversation."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[Listed[InputText], Field(max_length=MAX_MESSAGES)]


class InputCall(RequestBody):
    """A call that the assistant made earlier."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class InputResult(RequestBody):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Text | Annotated[Listed[InputText], Field(max_length=MAX_MESSAGES)]


class InputReasoning(RequestBody):
    """Reasoning of an earlier answer. Not looked at."""

    type: Literal["reasoning"]


_ITEMS = {
    "message": "item",
    "function_call": "call",
    "function_call_output": "result",
    "reasoning": "thought",
}
"""By `type`: what an error's place calls the alternative, unlike any field."""


def _kind_of_item(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _ITEMS.get(kind or "message") if isinstance(kind, str | None) else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("item")]
    | Annotated[InputCall, Tag("call")]
    | Annotated[InputResult, Tag("result")]
    | Annotated[InputReasoning, Tag("thought")],
    Discriminator(
        _kind_of_item,
        custom_error_type="item_type",
        custom_error_message=f"The `type` of an item is one of {', '.join(_ITEMS)}",
    ),
]


class ResponseTool(RequestBody):
    """A function that the model may call."""

    type: Literal["function"]
    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class NamedResponseTool(RequestBody):
    """The tool that is to be called."""

    type: Literal["function"]
    name: Text


class ResponseSchema(RequestBody):
    """Values of a JSON schema."""

    type: Literal["json_schema"]
    name: Text | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseText(RequestBody):
    """What the whole answer is."""

    format: (
        Annotated[TextFormat | JsonFormat | ResponseSchema, Field(discriminator="type")] | None
    ) = None


class ResponseRequest(RequestBody):
    """`POST /v1/responses`. Nothing is kept here: each request has the whole conversation."""

    model: Text | None = None
    input: Text | Annotated[Listed[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    """Not OpenAI's."""
    tools: Annotated[Listed[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    stream: bool | None = None
    background: OnlyFalse | None = None
    previous_response_id: Annotated[str, Field(max_length=0)] | None = None
    """Answers are not kept: send the conversation in `input`."""
    conversation: Annotated[str, Field(max_length=0)] | None = None
    store: Any = None
    """Not looked at, as `metadata`, `user`, `reasoning` and `truncation`."""

    def as_request(self) -> ChatRequest:
        """The same as a chat."""
        choice: Any = self.tool_choice
        if isinstance(self.tool_choice, NamedResponseTool):
            choice = {"type": "function", "function": {"name": self.tool_choice.name}}
        given = {
            "model": self.model,
            "messages": list(self._turns()),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "tools": [_as_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._format(),
            "stream": self.stream,
        }
        return ChatRequest.model_validate(given)

    def _format(self) -> dict[str, Any] | None:
        wanted = None if self.text is None else self.text.format
        if isinstance(wanted, ResponseSchema):
            return {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}
        return None if wanted is None else {"type": wanted.type}

    def _turns(self) -> Iterator[dict[str, Any]]:
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        turns: list[dict[str, Any]] = []
        for item in self.input:
            if isinstance(item, InputMessage):
                turns.append({"role": item.role, "content": _join(item.content)})
            elif isinstance(item, InputResult):
                said = _join(item.output)
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": said})
            elif isinstance(item, InputCall):
                if not turns or turns[-1]["role"] != "assistant":
                    turns.append({"role": "assistant", "content": ""})
                # An answer's text and its calls are items of their own, and one turn.
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                turns[-1].setdefault("tool_calls", []).append(call)
        yield from turns


def _join(content: str | Sequence[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _as_tool(tool: ResponseTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.parameters or {}}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


# The answer.


class OutputItem(ResponseBody):
    """A message, a call or reasoning, by `type`."""

    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponseUsage(ResponseBody):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(ResponseBody):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class ResponseWriter:
    """OpenAI's response: items of text, reasoning and calls."""

    def __init__(self, model: ServedModel, body: ResponseRequest, _: PreparedRequest) -> None:
        wanted = None if body.text is None else body.text.format
        written: dict[str, Any] = {"type": "text"}
        if wanted is not None:
            written = wanted.model_dump(by_alias=True, exclude_none=True)
        choice = body.tool_choice or "auto"
        self._head: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model.id,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": written},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [
                {"strict": False, "parameters": None, **tool.model_dump(exclude_none=True)}
                for tool in body.tools or ()
            ],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }
        self._num_events = 0
        self._output: list[dict[str, Any]] = []
        """Items that have ended."""
        self._message: dict[str, Any] | None = None
        """The one whose text is coming."""
        self._pieces: list[str] = []

    def whole(
        self, answers: Sequence[Done], parsed: Sequence[ParsedAnswer], usage: TokenUsage
    ) -> dict[str, Any]:
        found = parsed[0]
        output = [_reasoning(found.reasoning)] if found.reasoning else []
        if found.content or not found.calls:
            output.append(_message(found.content, _status(answers[0])))
        output += _calls(found)
        return self._response(output, answers[0], usage)

    def open(self, num_answers: int) -> Iterator[str]:  # noqa: ARG002
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def text(
        self,
        index: int,  # noqa: ARG002
        text: str,
        logprobs: Sequence[TokenLogprob],  # noqa: ARG002
    ) -> Iterator[str]:
        if self._message is None:
            yield from self._open_message()
        assert self._message is not None
        self._pieces.append(text)
        yield self._part_event("response.output_text.delta", delta=text, logprobs=[])

    def end(
        self,
        index: int,  # noqa: ARG002
        parsed: ParsedAnswer,
        done: Done,
        logprobs: Sequence[TokenLogprob],  # noqa: ARG002
    ) -> Iterator[str]:
        if self._message is None and not parsed.calls:
            yield from self._open_message()
        if self._message is not None:
            yield from self._close_message(_status(done))
        if parsed.reasoning:
            yield from self._item(_reasoning(parsed.reasoning))
        for call in _calls(parsed):
            place = {"item_id": call["id"], "output_index": len(self._output)}
            written = call["arguments"]
            begun = {**call, "status": "in_progress", "arguments": ""}
            yield self._event(
                "response.output_item.added", item=begun, output_index=len(self._output)
            )
            yield self._event("response.function_call_arguments.delta", delta=written, **place)
            yield self._event("response.function_call_arguments.done", arguments=written, **place)
            yield self._end_item(call)

    def close(
        self,
        answers: Sequence[Done],
        parsed: Sequence[ParsedAnswer],  # noqa: ARG002
        usage: TokenUsage,
    ) -> Iterator[str]:
        response = self._response(self._output, answers[0], usage)
        yield self._event(f"response.{response['status']}", response=response)

    def error(self, error: ApiError) -> str:
        detail = error.body["error"]
        return self._event("error", **{key: detail[key] for key in ("message", "param", "code")})

    def _response(
        self, output: list[dict[str, Any]], done: Done, usage: TokenUsage
    ) -> dict[str, Any]:
        status = _status(done)
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        counted = {
            "input_tokens": usage.num_prompt,
            "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
            "output_tokens": usage.num_new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.num_prompt + usage.num_new,
        }
        ended = {"status": status, "incomplete_details": details, "output": output}
        return {**self._head, **ended, "usage": counted}

    def _open_message(self) -> Iterator[str]:
        self._message = {**_message("", "in_progress"), "content": []}
        yield self._event(
            "response.output_item.added", item=self._message, output_index=len(self._output)
        )
        yield self._part_event("response.content_part.added", part=_part(""))

    def _close_message(self, status: str) -> Iterator[str]:
        assert self._message is not None
        text = "".join(self._pieces)
        yield self._part_event("response.output_text.done", text=text, logprobs=[])
        yield self._part_event("response.content_part.done", part=_part(text))
        ended = {**self._message, "content": [_part(text)], "status": status}
        self._message, self._pieces = None, []
        yield self._end_item(ended)

    def _item(self, item: dict[str, Any]) -> Iterator[str]:
        yield self._event("response.output_item.added", item=item, output_index=len(self._output))
        yield self._end_item(item)

    def _end_item(self, item: dict[str, Any]) -> str:
        self._output.append(item)
        place = len(self._output) - 1
        return self._event("response.output_item.done", item=item, output_index=place)

    def _part_event(self, name: str, **content: Any) -> str:
        assert self._message is not None
        place = {"item_id": self._message["id"], "output_index": len(self._output)}
        return self._event(name, **place, content_index=0, **content)

    def _event(self, name: str, **content: Any) -> str:
        self._num_events += 1
        numbered = {"type": name, "sequence_number": self._num_events - 1, **content}
        return format_event(numbered, name=name)


def _status(done: Done) -> str:
    return "incomplete" if done.reason is FinishReason.LENGTH else "completed"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(text: str, status: str) -> dict[str, Any]:
    return {
        "id": f"msg_{secrets.token_hex(16)}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [_part(text)],
    }


def _reasoning(text: str) -> dict[str, Any]:
    return {
        "id": f"rs_{secrets.token_hex(16)}",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }


def _calls(parsed: ParsedAnswer) -> list[dict[str, Any]]:
    return [
        {
            "id": f"fc_{secrets.token_hex(16)}",
            "type": "function_call",
            "status": "completed",
            "call_id": call_id(call),
            "name": call.name,
            "arguments": call_arguments(call),
        }
        for call in parsed.calls
    ]
