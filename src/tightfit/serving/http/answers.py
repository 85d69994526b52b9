"""Answering one HTTP request: prepare it, submit it to the engine, return or stream the result."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Response
from starlette.types import Receive, Scope, Send

from tightfit.core.sampling import Sampling
from tightfit.core.version import __version__
from tightfit.data.formats import Message
from tightfit.engines.protocol import Delta, Done, Event, Failed, FinishReason, Request
from tightfit.serving.http.errors import CLIENT_GONE, ApiError, prompt_too_long, to_api_error
from tightfit.serving.http.registry import (
    ClientGoneError,
    EngineJob,
    ModelRegistry,
    ServedModel,
    shutting_down_error,
)
from tightfit.serving.http.schemas import MAX_ANSWERS, AnswerRequest, ChatRequest, CompletionRequest

STREAM_END = "data: [DONE]\n\n"


class ResponseShape(Protocol):
    """How one kind of request is answered."""

    def whole(self, answers: Sequence[Done], usage: dict[str, Any]) -> dict[str, Any]: ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """What comes before the first piece of an answer."""
        ...

    def piece(self, index: int, text: str) -> dict[str, Any]: ...

    def closing(self, index: int, done: Done) -> dict[str, Any]: ...

    def ending(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The event with the usage, after all answers."""
        ...


class _ResponseHeader:
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


class ChatResponseShape(_ResponseHeader):
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


class CompletionResponseShape(_ResponseHeader):
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


# From a validated HTTP request to engine requests.

COMPLETION_TOKENS = 16
"""OpenAI's default for `/v1/completions`; a chat answer may fill the context."""
_SEED_BITS = 0x7FFF_FFFF
"""llama.cpp's seeds are 32 bits wide and the largest means `any`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """One HTTP request for answers."""

    model: ServedModel
    num_answers: int
    num_per_prompt: int
    write_requests: Callable[[], list[Request]]
    """Runs the template and the tokenizer, which takes a while for long prompts."""
    shape: ResponseShape
    is_streamed: bool
    includes_usage: bool


def prepare_chat(registry: ModelRegistry, body: ChatRequest) -> PreparedRequest:
    """A conversation to be gone on with."""
    model = registry.find(body.model)

    def write_requests() -> list[Request]:
        messages = [Message(_role(message.role), message.text) for message in body.messages]
        tokens = model.engine.prompter.ask(messages)
        return _requests(model, body, tokens, most=body.most_tokens, param="messages")

    return _prepare_request(
        model,
        body,
        num_prompts=1,
        write_requests=write_requests,
        shape=ChatResponseShape(model, includes_usage=body.includes_usage),
    )


def prepare_completion(registry: ModelRegistry, body: CompletionRequest) -> PreparedRequest:
    """Texts to be continued."""
    model = registry.find(body.model)
    prompts = body.prompts

    def write_requests() -> list[Request]:
        prompter = model.engine.prompter
        encoded = [
            prompter.continue_text(prompt) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
        most = body.max_tokens or COMPLETION_TOKENS
        return [
            request
            for tokens in encoded
            for request in _requests(model, body, tokens, most=most, param="prompt")
        ]

    return _prepare_request(
        model,
        body,
        num_prompts=len(prompts),
        write_requests=write_requests,
        shape=CompletionResponseShape(model, includes_usage=body.includes_usage),
    )


def _prepare_request(
    model: ServedModel,
    body: AnswerRequest,
    *,
    num_prompts: int,
    write_requests: Callable[[], list[Request]],
    shape: ResponseShape,
) -> PreparedRequest:
    num_per_prompt = body.n or 1
    num_answers = num_prompts * num_per_prompt
    if num_answers > MAX_ANSWERS:
        raise ApiError(
            400,
            f"{num_prompts} prompts with {num_per_prompt} answers each are {num_answers} answers; "
            f"one request may ask for {MAX_ANSWERS}.",
            param="n",
        )
    return PreparedRequest(
        model=model,
        num_answers=num_answers,
        num_per_prompt=num_per_prompt,
        write_requests=write_requests,
        shape=shape,
        is_streamed=bool(body.stream),
        includes_usage=body.includes_usage,
    )


def _role(name: str) -> str:
    """`developer` is what newer clients call the system."""
    return "system" if name == "developer" else name


def _requests(
    model: ServedModel,
    body: AnswerRequest,
    tokens: Sequence[int],
    *,
    most: int | None,
    param: str,
) -> list[Request]:
    """The same prompt `n` times, each with a seed of its own."""
    max_context = model.engine.info.max_context
    if not tokens:
        raise ApiError(400, "The prompt is empty.", param=param)
    if len(tokens) >= max_context:
        raise prompt_too_long(len(tokens), max_context, param=param)
    room = max_context - len(tokens)
    max_new_tokens = room if most is None else min(most, room)
    return [
        Request(prompt=tuple(tokens), sampling=_sampling(body, max_new_tokens, index))
        for index in range(body.n or 1)
    ]


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


# Answering one HTTP request, whole or as a stream.

STALL_SECONDS = 60.0
"""How long a client may read nothing from a full connection before it counts as disconnected."""


async def answer(
    prepared: PreparedRequest, receive: Receive, *, timeout_seconds: float
) -> Response:
    """The response to an order; raises `ApiError` where it is refused before it begins."""
    job = await _begin(prepared)
    if prepared.is_streamed:
        return EventStream(_events(job, prepared), job, timeout_seconds=timeout_seconds)
    try:
        async with _watched(job, receive, timeout_seconds=timeout_seconds):
            answers = await _gather(job, prepared.num_answers)
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    usage = count_usage(answers, num_per_prompt=prepared.num_per_prompt)
    body = json.dumps(prepared.shape.whole(answers, usage))
    return Response(body, media_type="application/json")


async def _begin(prepared: PreparedRequest) -> EngineJob:
    loop, model = asyncio.get_running_loop(), prepared.model
    model.admit(prepared.num_answers)
    try:
        requests = await loop.run_in_executor(model.desk, prepared.write_requests)
    except BaseException as error:
        model.forget(prepared.num_answers)
        if isinstance(error, Exception):
            raise to_api_error(error) from error
        raise
    job = model.start(requests)
    try:
        # Shielded, for a job that was started gives its places back only through the engine.
        await asyncio.shield(loop.run_in_executor(model.desk, job.submit))
    except asyncio.CancelledError:
        job.stop(ClientGoneError())
        raise
    except Exception as error:
        raise to_api_error(error) from error
    return job


@contextlib.asynccontextmanager
async def _watched(
    job: EngineJob, receive: Receive, *, timeout_seconds: float
) -> AsyncIterator[None]:
    """While inside, the client's leaving and the clock stop the job; afterwards nothing runs on."""

    async def wait_for_end() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
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


async def _gather(job: EngineJob, num_answers: int) -> list[Done]:
    answers: dict[int, Done] = {}
    async for index, event in job.events():
        if not isinstance(event, Delta):
            answers[index] = _done(event)
    return [answers[index] for index in range(num_answers)]


def _done(event: Event) -> Done:
    """The end of an answer, or why there is none."""
    if isinstance(event, Failed):
        raise to_api_error(event.error) from event.error
    assert isinstance(event, Done)
    if event.reason is FinishReason.CANCELLED:  # not by this request: the engine is being closed
        raise shutting_down_error()
    return event


async def _events(job: EngineJob, prepared: PreparedRequest) -> AsyncIterator[str]:
    """The stream's events; a fault is the last of them, as the status has long been sent."""
    shape, num_shown = prepared.shape, [0] * prepared.num_answers
    answers: dict[int, Done] = {}
    for index in range(prepared.num_answers):
        if opening := shape.opening(index):
            yield format_event(opening)
    try:
        async for index, event in job.events():
            if isinstance(event, Delta):
                num_shown[index] += len(event.text)
                yield format_event(shape.piece(index, event.text))
                continue
            answers[index] = done = _done(event)
            if rest := done.text[num_shown[index] :]:
                yield format_event(shape.piece(index, rest))
            yield format_event(shape.closing(index, done))
    except ApiError as error:
        yield format_event(error.body)
        return
    if prepared.includes_usage:
        ended = [answers[index] for index in range(prepared.num_answers)]
        usage = count_usage(ended, num_per_prompt=prepared.num_per_prompt)
        yield format_event(shape.ending(usage))
    yield STREAM_END


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
        with contextlib.suppress(ClientGoneError, asyncio.TimeoutError, OSError):
            async with _watched(self._job, receive, timeout_seconds=self._timeout_seconds):
                await send(head)
                async for event in self._events:
                    await asyncio.wait_for(_write(send, event.encode(), True), STALL_SECONDS)
                await asyncio.wait_for(_write(send, b"", False), STALL_SECONDS)


async def _write(send: Send, body: bytes, is_more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": is_more})
