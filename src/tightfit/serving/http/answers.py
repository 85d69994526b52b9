"""Answering one HTTP request: prepare it, submit it to the engine, return or stream the result."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from fastapi import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from tightfit.core.sampling import Sampling
from tightfit.data.call_syntax import CallSyntax, ParsedAnswer
from tightfit.data.formats import Message, link_results
from tightfit.data.templates import CallStream, parse_answer
from tightfit.data.tools import Tool, ToolError, read_calls, read_tools
from tightfit.engines.protocol import (
    Delta,
    Done,
    Event,
    Failed,
    FinishReason,
    Request,
    TokenLogprob,
)
from tightfit.serving.http.formats import make_grammar
from tightfit.serving.http.limits import MAX_ECHO_LOGITS
from tightfit.serving.http.logprobs import EchoedPrompt, score_prompt
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
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    TokenizeAnswer,
    TokenizeRequest,
    prompt_too_long,
    to_api_error,
)
from tightfit.serving.http.writers import (
    AnswerWriter,
    OpenAIWriter,
    PreparedRequest,
    count_usage,
)

# From a validated HTTP request to the engine and back, whole or as a stream.

COMPLETION_TOKENS = 16
"""OpenAI's default for `/v1/completions`; a chat answer may fill the context."""
_SEED_BITS = 0x7FFF_FFFF
"""llama.cpp's seeds are 32 bits wide and the largest means `any`."""


_Result = TypeVar("_Result")
Body = ChatRequest | CompletionRequest
MakeWriter = Callable[[ServedModel, Body, PreparedRequest], AnswerWriter]


async def answer(
    registry: ModelRegistry,
    body: Body,
    receive: Receive,
    *,
    timeout_seconds: float,
    make_writer: MakeWriter = OpenAIWriter,
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
        job, prepared = await _begin(model, body, num_answers, receive, timeout_seconds)
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    parts = _AnswerParts(model, body)
    writer = make_writer(model, body, prepared)
    if body.stream:
        events = _events(job, writer, parts, num_answers)
        return EventStream(events, job, timeout_seconds=timeout_seconds)
    try:
        async with _watched(job, receive, timeout_seconds=timeout_seconds):
            ends = {i: _done(end) async for i, end in job.events() if not isinstance(end, Delta)}
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    answers = [parts.cut(ends[index]) for index in range(num_answers)]
    parsed = [parts.parse(done) for done in answers]
    usage = count_usage(answers, num_per_prompt=num_per_prompt)
    content = json.dumps(writer.whole(answers, parsed, usage))
    return Response(content, media_type="application/json")


async def _begin(
    model: ServedModel, body: Body, num_answers: int, receive: Receive, timeout_seconds: float
) -> tuple[EngineJob, PreparedRequest]:
    """Hand the request to the engine, once there is room in the queue."""
    loop = asyncio.get_running_loop()
    model.admit(num_answers)
    try:
        preparing = loop.run_in_executor(model.encoder, prepare_request, model, body)
        prepared = await _wait_beside_client(preparing, receive, timeout_seconds=timeout_seconds)
        if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
            prepared = await _score_echoed(model, body, prepared, receive, timeout_seconds)
    except BaseException as error:
        model.num_owed -= num_answers
        if isinstance(error, Exception) and not isinstance(error, ClientGoneError):
            raise to_api_error(error) from error
        raise
    job = model.start(prepared.requests)
    try:
        # Shielded, for a job that was started gives its places back only through the engine.
        await asyncio.shield(loop.run_in_executor(model.encoder, job.submit))
    except asyncio.CancelledError:
        job.stop(ClientGoneError())
        raise
    except Exception as error:
        raise to_api_error(error) from error
    return job, prepared


def prepare_request(model: ServedModel, body: Body) -> PreparedRequest:
    """Template and tokenizer; each prompt `n` times, each with a seed of its own."""
    prompter = model.engine.prompter
    most: int | None
    tools: tuple[Tool, ...] = ()
    if isinstance(body, ChatRequest):
        param, most = "messages", body.most_tokens
        tools = read_offered_tools(model, body)
        prompts = [tuple(prompter.ask(read_messages(body.messages), tools))]
    else:
        param = "prompt"
        # An answer of none is one token that is thrown away: engines compute at least one.
        most = COMPLETION_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        prompts = [
            prompter.continue_text(one) if isinstance(one, str) else one for one in body.prompts
        ]
    grammar = make_grammar(body, prompter, tools)
    held_to = None if grammar is None else grammar.to_json()
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
                sampling=replace(_sampling(body, max_new_tokens, index), grammar=held_to),
                kept_control=kept,
            )
            for index in range(body.n or 1)
        ]
    echoed = []
    if isinstance(body, CompletionRequest) and body.echo:
        decode = prompter.tokenizer.decode
        echoed = [
            EchoedPrompt(text=one if isinstance(one, str) else decode(one)) for one in body.prompts
        ]
        most = MAX_ECHO_LOGITS // max(1, model.engine.num_vocabulary)
        num_tokens = sum(map(len, prompts))
        if body.logprobs is not None and num_tokens > most:
            raise ApiError(
                400,
                f"The prompts have {num_tokens:,} tokens; log-probabilities are sent back with "
                f"`echo` for at most {most:,} of this model in one request.",
                param="echo",
            )
    return PreparedRequest(requests=requests, echoed=echoed)


async def _score_echoed(
    model: ServedModel,
    body: CompletionRequest,
    prepared: PreparedRequest,
    receive: Receive,
    timeout_seconds: float,
) -> PreparedRequest:
    """With the log-probabilities of the prompts' tokens."""
    has_left = threading.Event()
    prompts = [request.prompt for request in prepared.requests[:: body.n or 1]]

    def score() -> list[EchoedPrompt]:
        return [
            replace(one, logprobs=score_prompt(model.engine, tokens, count=body.logprobs or 0))
            for one, tokens in zip(prepared.echoed, prompts, strict=True)
            if not has_left.is_set()
        ]

    try:
        scoring = model.compute_aside(score)
        echoed = await _wait_beside_client(scoring, receive, timeout_seconds=timeout_seconds)
    finally:
        has_left.set()
    return replace(prepared, echoed=echoed)


def encode_chat(model: ServedModel, body: ChatRequest) -> tuple[int, ...]:
    """A conversation's tokens, by the model's own template."""
    tools = read_offered_tools(model, body)
    return tuple(model.engine.prompter.ask(read_messages(body.messages), tools))


def read_offered_tools(model: ServedModel, body: ChatRequest) -> tuple[Tool, ...]:
    """The tools that the model's template shows it."""
    try:
        tools = read_tools(body.offered_tools)
    except ToolError as error:
        raise ApiError(400, f"{error}.", code="invalid_value", param="tools") from error
    if tools and model.engine.prompter.call_syntax is None:
        raise ApiError(
            400,
            f"The chat template of `{model.id}` takes no tools: leave `tools` out.",
            code="unsupported_parameter",
            param="tools",
        )
    return tools


class _AnswerParts:
    """How a request's answers are taken apart."""

    def __init__(self, model: ServedModel, body: Body) -> None:
        self.syntax = answer_syntax(model, body)
        """How calls are found in the answers; None where they are text alone."""
        is_single = isinstance(body, ChatRequest) and body.parallel_tool_calls is False
        self._most_calls = 1 if is_single else None
        self.has_text = not (isinstance(body, CompletionRequest) and body.max_tokens == 0)
        self.num_per_prompt = body.n or 1

    def cut(self, done: Done) -> Done:
        """The answer without the token that nobody asked for."""
        if self.has_text:
            return done
        return replace(done, reason=FinishReason.LENGTH, text="", num_new_tokens=0, logprobs=())

    def parse(self, done: Done) -> ParsedAnswer:
        if self.syntax is None:
            return ParsedAnswer(done.text)
        return self.limit(parse_answer(self.syntax, done.text))

    def limit(self, parsed: ParsedAnswer) -> ParsedAnswer:
        """With no more calls than the request wants."""
        return parsed._replace(calls=parsed.calls[: self._most_calls])


def answer_syntax(model: ServedModel, body: Body) -> CallSyntax | None:
    """How calls are found in answers to this request; None where no call is wanted.

    Where a model writes what it says in channels, its answers are always taken apart.
    """
    syntax = model.engine.prompter.call_syntax
    if syntax is None or not isinstance(body, ChatRequest):
        return None
    return syntax if body.offered_tools or syntax.answer_start else None


def read_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """A request's turns as templates take them."""
    turns: list[Message] = []
    try:
        for one in messages:
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
        presence_penalty=float(body.presence_penalty or 0.0),
        frequency_penalty=float(body.frequency_penalty or 0.0),
        logit_bias=body.biases,
        top_logprobs=body.num_top_logprobs,
        seed=None if body.seed is None else (body.seed + index) & _SEED_BITS,
        stop=body.stops,
        ignores_stop_tokens=bool(body.ignore_eos),
    )


async def compute(
    model: ServedModel,
    work: Callable[[], BaseModel],
    receive: Receive,
    *,
    timeout_seconds: float,
) -> Response:
    """The result of a short piece of work, done beside the answers' prompts."""
    try:
        made = await _wait_beside_client(
            model.compute_aside(work), receive, timeout_seconds=timeout_seconds
        )
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    except Exception as error:
        raise to_api_error(error) from error
    return Response(made.model_dump_json(exclude_none=True), media_type="application/json")


def tokenize_text(model: ServedModel, body: TokenizeRequest) -> TokenizeAnswer:
    """The tokens that an answer to this text, or to these messages, would follow."""
    prompter = model.engine.prompter
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Send `prompt` or `messages`.", param="prompt")
    if body.messages is not None:
        chat = ChatRequest.model_construct(messages=body.messages, tools=body.tools)
        tokens = encode_chat(model, chat)
    else:
        tokens = prompter.continue_text(body.prompt or "", begins=body.add_special_tokens)
    names = None
    if body.return_token_strs:
        names = [prompter.tokenizer.token_name(token) for token in tokens]
    return TokenizeAnswer(
        count=len(tokens),
        max_model_len=model.engine.info.max_context,
        tokens=list(tokens),
        token_strs=names,
    )


async def _wait_beside_client(
    work: asyncio.Future[_Result], receive: Receive, *, timeout_seconds: float
) -> _Result:
    """The work's result. Where nobody waits for it any longer, what is not begun is dropped."""
    leaving = asyncio.create_task(_wait_for_leaving(receive))
    try:
        await asyncio.wait(
            (work, leaving), timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if work.done():
            return work.result()
        raise ClientGoneError() if leaving.done() else _too_slow(timeout_seconds)
    finally:
        leaving.cancel()
        work.cancel()


def _too_slow(seconds: float) -> ApiError:
    return ApiError(504, f"The answer took longer than {seconds:g} seconds.", code="timeout")


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

    timer = asyncio.get_running_loop().call_later(
        timeout_seconds, job.stop, _too_slow(timeout_seconds)
    )
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
    job: EngineJob, writer: AnswerWriter, parts: _AnswerParts, num_answers: int
) -> AsyncIterator[str]:
    """The stream's events; an error is the last of them, as the status has long been sent."""
    shown = [_ShownAnswer(parts) for _ in range(num_answers)]
    ends: dict[int, tuple[Done, ParsedAnswer]] = {}
    for piece in writer.open(num_answers):
        yield piece
    try:
        async for index, event in job.events():
            if isinstance(event, Delta):
                if text := shown[index].push(event):
                    for piece in writer.text(index, text, shown[index].take_logprobs()):
                        yield piece
                continue
            done = parts.cut(_done(event))
            rest, parsed = shown[index].finish(done)
            if rest:
                for piece in writer.text(index, rest, shown[index].take_logprobs()):
                    yield piece
            for piece in writer.end(index, parsed, done, shown[index].take_logprobs()):
                yield piece
            ends[index] = done, parsed
    except ApiError as error:
        yield writer.error(error)
        return
    answers = [ends[index][0] for index in range(num_answers)]
    usage = count_usage(answers, num_per_prompt=parts.num_per_prompt)
    for piece in writer.close(answers, [ends[index][1] for index in range(num_answers)], usage):
        yield piece


class _ShownAnswer:
    """One answer of a stream: what was shown of it, and what is held back as it may be a call."""

    def __init__(self, parts: _AnswerParts) -> None:
        self._parts = parts
        self._calls = CallStream(parts.syntax) if parts.syntax else None
        self._num_chars = 0
        """That the engine sent."""
        self._logprobs: list[TokenLogprob] = []
        """Of tokens that were not shown yet."""

    def push(self, event: Delta) -> str:
        """What can be shown now."""
        self._num_chars += len(event.text)
        if not self._parts.has_text:
            return ""
        self._logprobs += event.logprobs
        return event.text if self._calls is None else self._calls.push(event.text)

    def finish(self, done: Done) -> tuple[str, ParsedAnswer]:
        """What is still to be shown, and the whole answer."""
        rest = done.text[self._num_chars :]
        if self._calls is None:
            return rest, ParsedAnswer(done.text)
        shown = self._calls.push(rest)
        rest, parsed = self._calls.finish()
        return shown + rest, self._parts.limit(parsed)

    def take_logprobs(self) -> list[TokenLogprob]:
        taken, self._logprobs = self._logprobs, []
        return taken


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
