"""Answering one HTTP request: prepare it, submit it to the engine, return or stream the result."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from tightfit.core.packages import __version__
from tightfit.core.sampling import Sampling
from tightfit.data.call_syntax import CallSyntax, ParsedAnswer
from tightfit.data.formats import Message, link_results
from tightfit.data.templates import CallStream, parse_answer
from tightfit.data.tools import ToolCall, ToolError, read_calls, read_tools
from tightfit.engines.protocol import Delta, Done, Event, Failed, FinishReason, Request
from tightfit.serving.http.registry import (
    ClientGoneError,
    EngineJob,
    ModelRegistry,
    ServedModel,
    shutting_down_error,
)
from tightfit.serving.http.schemas import (
    CLIENT_GONE,
    MAX_ANSWERS,
    AnswerRequest,
    ApiError,
    ChatRequest,
    CompletionRequest,
    prompt_too_long,
    to_api_error,
)

STREAM_END = "data: [DONE]\n\n"


class ResponseWriter:
    """The bodies that answer one request, whole and as events of a stream."""

    def __init__(
        self, model: ServedModel, body: ChatRequest | CompletionRequest, *, includes_usage: bool
    ) -> None:
        info = model.engine.info
        self.is_chat = is_chat = isinstance(body, ChatRequest)
        self.syntax = answer_syntax(model, body)
        """How calls are found in the answers; None where they are text alone."""
        is_single = isinstance(body, ChatRequest) and body.parallel_tool_calls is False
        self._most_calls = 1 if is_single else None
        self._kind = "chat.completion" if is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": model.id,
            "system_fingerprint": f"tightfit-{__version__}-{info.engine}-{info.format}",
        }
        # OpenAI sends `usage: null` until the last event, and no such key where none is wanted.
        self._no_usage: dict[str, Any] = {"usage": None} if includes_usage else {}

    def whole(self, answers: Sequence[Done], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = []
        for index, done in enumerate(answers):
            if not self.is_chat:
                choices.append(_choice(index, {"text": done.text}, done.reason.value))
                continue
            parsed = ParsedAnswer(done.text)
            if self.syntax is not None:
                parsed = parse_answer(self.syntax, done.text)
            delta, end = self.finish(parsed, done)
            content = parsed.content or (None if "tool_calls" in delta else "")
            message = {"role": "assistant", "content": content, **delta, "refusal": None}
            choices.append(_choice(index, {"message": message}, end))
        return {**self._head, "object": self._kind, "choices": choices, "usage": usage}

    def finish(self, parsed: ParsedAnswer, done: Done) -> tuple[dict[str, Any], str]:
        """Reasoning and calls of an answer, as far as it has them, and why it ended."""
        found: dict[str, Any] = {}
        if parsed.reasoning:
            found["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            found["tool_calls"] = [_call(call) for call in parsed.calls[: self._most_calls]]
        is_call = parsed.calls and done.reason is FinishReason.STOP
        return found, "tool_calls" if is_call else done.reason.value

    def event(self, index: int, delta: dict[str, Any], end: str | None = None) -> str:
        """What is new of one answer, as a chat says it; completions have the text alone."""
        content = {"delta": delta} if self.is_chat else {"text": delta.get("content", "")}
        return self._event([_choice(index, content, end)], self._no_usage)

    def usage_event(self, usage: dict[str, Any]) -> str:
        """The event after all answers."""
        return self._event([], {"usage": usage})

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> str:
        kind = "chat.completion.chunk" if self.is_chat else self._kind
        return format_event({**self._head, "object": kind, "choices": choices, **usage})


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id or secrets.token_hex(5)[:9],  # nine characters, which every template takes
        "type": "function",
        "function": {
            "name": call.name,
            "arguments": json.dumps(call.arguments, ensure_ascii=False),
        },
    }


def _choice(index: int, content: dict[str, Any], end: str | None) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": end}


def count_usage(answers: Sequence[Done], *, num_per_prompt: int) -> dict[str, Any]:
    """Tokens of one request. `answers` lie prompt by prompt, `num_per_prompt` to each.

    A prompt counts once. Of its answers, the later ones may find it in the cache just because
    the first one put it there: the reported number is what all of them found.
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


def format_event(body: dict[str, Any]) -> str:
    """One server-sent event. JSON writes line breaks as escapes, so it is one line."""
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


# From a validated HTTP request to the engine and back, whole or as a stream.

COMPLETION_TOKENS = 16
"""OpenAI's default for `/v1/completions`; a chat answer may fill the context."""
_SEED_BITS = 0x7FFF_FFFF
"""llama.cpp's seeds are 32 bits wide and the largest means `any`."""


async def answer(
    registry: ModelRegistry,
    body: ChatRequest | CompletionRequest,
    receive: Receive,
    *,
    timeout_seconds: float,
) -> Response:
    """The response to a request; raises `ApiError` where it is refused before it begins."""
    registry.require_open()
    model = registry.find(body.model)
    num_prompts, num_per_prompt = body.num_prompts, body.n or 1
    num_answers = num_prompts * num_per_prompt
    if num_answers > MAX_ANSWERS:
        raise ApiError(
            400,
            f"{num_prompts} prompts with {num_per_prompt} answers each are {num_answers} answers; "
            f"one request may ask for {MAX_ANSWERS}.",
            param="n",
        )
    try:
        job = await _begin(model, body, num_answers, receive)
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    writer = ResponseWriter(model, body, includes_usage=body.includes_usage)
    if body.stream:
        events = _events(job, writer, body, num_answers)
        return EventStream(events, job, timeout_seconds=timeout_seconds)
    try:
        async with _watched(job, receive, timeout_seconds=timeout_seconds):
            ends = {i: _done(end) async for i, end in job.events() if not isinstance(end, Delta)}
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    answers = [ends[index] for index in range(num_answers)]
    usage = count_usage(answers, num_per_prompt=num_per_prompt)
    return Response(json.dumps(writer.whole(answers, usage)), media_type="application/json")


async def _begin(
    model: ServedModel, body: ChatRequest | CompletionRequest, num_answers: int, receive: Receive
) -> EngineJob:
    """Hand the request to the engine, once there is room in the queue."""
    loop = asyncio.get_running_loop()
    model.admit(num_answers)
    encoding = loop.run_in_executor(model.encoder, encode_requests, model, body)
    leaving = asyncio.create_task(_wait_for_leaving(receive))
    try:
        await asyncio.wait((encoding, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not encoding.done():  # nobody waits for the answer: others' prompts are next
            raise ClientGoneError
        requests = encoding.result()
    except BaseException as error:
        model.num_owed -= num_answers
        if isinstance(error, Exception) and not isinstance(error, ClientGoneError):
            raise to_api_error(error) from error
        raise
    finally:
        leaving.cancel()
        encoding.cancel()
    job = model.start(requests)
    try:
        # Shielded, for a job that was started gives its places back only through the engine.
        await asyncio.shield(loop.run_in_executor(model.encoder, job.submit))
    except asyncio.CancelledError:
        job.stop(ClientGoneError())
        raise
    except Exception as error:
        raise to_api_error(error) from error
    return job


def encode_requests(model: ServedModel, body: ChatRequest | CompletionRequest) -> list[Request]:
    """Template and tokenizer; each prompt `n` times, each with a seed of its own."""
    prompter = model.engine.prompter
    most: int | None
    prompts: list[tuple[int, ...]]
    if isinstance(body, ChatRequest):
        param, most = "messages", body.most_tokens
        try:
            tools = read_tools(body.offered_tools)
        except ToolError as error:
            raise ApiError(400, f"{error}.", code="invalid_value", param="tools") from error
        if tools and prompter.call_syntax is None:
            raise ApiError(
                400,
                f"The chat template of `{model.id}` takes no tools: leave `tools` out.",
                code="unsupported_parameter",
                param="tools",
            )
        prompts = [prompter.ask(_read_messages(body), tools)]
    else:
        param, most = "prompt", body.max_tokens or COMPLETION_TOKENS
        prompts = [
            prompter.continue_text(one) if isinstance(one, str) else one for one in body.prompts
        ]
    max_context = model.engine.info.max_context
    kept = prompter.call_control if answer_syntax(model, body) is not None else ()
    requests = []
    for tokens in prompts:
        if not tokens:
            raise ApiError(400, "The prompt is empty.", param=param)
        room = max_context - len(tokens)
        if room < 1:
            raise prompt_too_long(len(tokens), max_context, param=param)
        max_new_tokens = room if most is None else min(most, room)
        requests += [
            Request(
                prompt=tokens,
                sampling=_sampling(body, max_new_tokens, index),
                kept_control=kept,
            )
            for index in range(body.n or 1)
        ]
    return requests


def answer_syntax(model: ServedModel, body: ChatRequest | CompletionRequest) -> CallSyntax | None:
    """How calls are found in answers to this request; None where no call is wanted.

    Where a model writes what it says in channels, its answers are always taken apart.
    """
    syntax = model.engine.prompter.call_syntax
    if syntax is None or not isinstance(body, ChatRequest):
        return None
    return syntax if body.offered_tools or syntax.answer_start else None


def _read_messages(body: ChatRequest) -> list[Message]:
    turns: list[Message] = []
    try:
        for one in body.messages:
            calls = [call.model_dump(exclude_none=True) for call in one.tool_calls or ()]
            # `developer` is what newer clients call the system.
            turns.append(
                Message(
                    "system" if one.role == "developer" else one.role,
                    one.text,
                    tool_calls=read_calls(calls),
                    reasoning=one.reasoning_content or "",
                    call_id=one.tool_call_id or "",
                )
            )
        return link_results(turns)
    except ToolError as error:
        raise ApiError(400, f"{error}.", code="invalid_value", param="messages") from error


def _sampling(body: AnswerRequest, max_new_tokens: int, index: int) -> Sampling:
    is_greedy = body.temperature == 0 or body.top_p == 0
    temperature = 1.0 if body.temperature is None else body.temperature
    return Sampling(
        max_new_tokens=max_new_tokens,
        temperature=0.0 if is_greedy else float(temperature),
        top_p=float(body.top_p) if body.top_p else 1.0,
        top_k=max(body.top_k or 0, 0),
        min_p=float(body.min_p or 0.0),
        repetition_penalty=float(body.repetition_penalty or 1.0),
        seed=None if body.seed is None else (body.seed + index) & _SEED_BITS,
        stop=body.stops,
        ignores_stop_tokens=bool(body.ignore_eos),
    )


async def _wait_for_leaving(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@contextlib.asynccontextmanager
async def _watched(
    job: EngineJob, receive: Receive, *, timeout_seconds: float
) -> AsyncIterator[None]:
    """While inside, the client's leaving and the clock stop the job; afterwards nothing runs on."""

    async def wait_for_end() -> None:
        await _wait_for_leaving(receive)
        job.stop(ClientGoneError())

    too_slow = ApiError(
        504, f"The answer took longer than {timeout_seconds:g} seconds.", code="timeout"
    )
    timer = asyncio.get_running_loop().call_later(timeout_seconds, job.stop, too_slow)
    watcher = asyncio.create_task(wait_for_end())
    try:
        yield
    finally:
        timer.cancel()
        watcher.cancel()
        if not job.is_over:
            job.stop(ClientGoneError())


def _done(event: Event) -> Done:
    """The end of an answer, or why there is none."""
    if isinstance(event, Failed):
        raise to_api_error(event.error) from event.error
    assert isinstance(event, Done)
    if event.reason is FinishReason.CANCELLED:  # not by this request: the engine is being closed
        raise shutting_down_error()
    return event


async def _events(
    job: EngineJob,
    writer: ResponseWriter,
    body: ChatRequest | CompletionRequest,
    num_answers: int,
) -> AsyncIterator[str]:
    """The stream's events; an error is the last of them, as the status has long been sent."""
    num_shown = [0] * num_answers
    calls = [CallStream(writer.syntax) if writer.syntax else None for _ in range(num_answers)]
    answers: dict[int, Done] = {}
    if writer.is_chat:
        for index in range(num_answers):
            yield writer.event(index, {"role": "assistant", "content": ""})
    try:
        async for index, event in job.events():
            if isinstance(event, Delta):
                num_shown[index] += len(event.text)
                held = calls[index]
                if text := event.text if held is None else held.push(event.text):
                    yield writer.event(index, {"content": text})
                continue
            answers[index] = done = _done(event)
            for piece in _ending(writer, calls[index], index, done, done.text[num_shown[index] :]):
                yield piece
    except ApiError as error:
        yield format_event(error.body)
        return
    if body.includes_usage:
        ended = [answers[index] for index in range(num_answers)]
        yield writer.usage_event(count_usage(ended, num_per_prompt=body.n or 1))
    yield STREAM_END


def _ending(
    writer: ResponseWriter, held: CallStream | None, index: int, done: Done, rest: str
) -> Iterator[str]:
    """The events after an answer's last token: text that was held back, calls, and the end."""
    parsed = ParsedAnswer(done.text)
    if held is not None:
        shown = held.push(rest)
        rest, parsed = held.finish()
        rest = shown + rest
    if rest:
        yield writer.event(index, {"content": rest})
    delta, end = writer.finish(parsed, done)
    for number, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = number
    if delta:
        yield writer.event(index, delta)
    yield writer.event(index, {}, end)


class EventStream(Response):
    """Server-sent events, and a job that ends when nobody reads them."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[str], job: EngineJob, *, timeout_seconds: float
    ) -> None:
        # Proxies that gather an answer before they pass it on are asked not to.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._job = job
        self._timeout_seconds = timeout_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        with contextlib.suppress(ClientGoneError, OSError):
            async with _watched(self._job, receive, timeout_seconds=self._timeout_seconds):
                await send(head)
                piece = {"type": "http.response.body", "body": b"", "more_body": True}
                async for event in self._events:
                    await send({**piece, "body": event.encode()})
                await send({**piece, "more_body": False})
