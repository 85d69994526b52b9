"""The HTTP API: middleware, routes, OpenAPI description and error handlers."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tightfit.core.packages import __version__
from tightfit.serving.http.answers import answer, compute, encode_chat, tokenize_text
from tightfit.serving.http.limits import (
    DISCARDED_BYTES,
    MAX_NESTS,
    MAX_QUOTES,
    MAX_VALUES,
    ServerLimits,
)
from tightfit.serving.http.messages import (
    CountRequest,
    MessageAnswer,
    MessageRequest,
    MessageWriter,
    TokenCount,
)
from tightfit.serving.http.metrics import CONTENT_TYPE, Metrics
from tightfit.serving.http.registry import ModelRegistry, ServedModel, ServerPhase
from tightfit.serving.http.responses import ResponseAnswer, ResponseRequest, ResponseWriter
from tightfit.serving.http.schemas import (
    ANSWERING_ERRORS,
    CLIENT_GONE,
    LISTING_ERRORS,
    PLAIN_ERRORS,
    ApiError,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    Health,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
    from_validation_error,
    internal_error,
)
from tightfit.serving.sockets import host_name, is_of_other_site, is_same_origin

# ASGI middleware: request metrics, host check, bearer token, body size.

OPEN_PATHS = ("/health",)


class RequestMetrics:
    """Outermost: counts every answer, and turns what nobody foresaw into a plain 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics, report: Callable[[Exception], None]) -> None:
        self._app = app
        self._metrics = metrics
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websocket is served, and a refusal by silence closes it
        began, status = time.monotonic(), CLIENT_GONE

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            self._report(error)
            if status == CLIENT_GONE:
                await internal_error().respond()(scope, receive, watched_send)
        finally:
            path = str(getattr(scope.get("route"), "path", "other"))
            self._metrics.requests.add(path=path, code=str(status))
            self._metrics.request_seconds.observe(time.monotonic() - began, path=path)


class Guard:
    """Refuses the requests that `check` has an error for."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], ApiError | None]) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._check(scope)
        await (self._app if error is None else error.respond())(scope, receive, send)


def host_check(names: Collection[str]) -> Callable[[Scope], ApiError | None]:
    """Refuses names that a page on the internet could point at this machine (DNS rebinding)."""
    allowed = frozenset(name.lower() for name in names)

    def check(scope: Scope) -> ApiError | None:
        given = [value.decode("latin-1") for key, value in scope["headers"] if key == b"host"]
        if all(host_name(host) in allowed for host in given):
            return None
        return ApiError(
            403,
            "The Host header names another machine than this server is bound to.",
            code="host_not_allowed",
        )

    return check


def token_check(api_key: str) -> Callable[[Scope], ApiError | None]:
    """Refuses everything but `/health` without the bearer token."""

    def check(scope: Scope) -> ApiError | None:
        headers = scope["headers"]
        # Anthropic's clients send the key by itself.
        given = [value for key, value in headers if key == b"authorization"] or [
            b"Bearer " + value for key, value in headers if key == b"x-api-key"
        ]
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        # In constant time, so that timing reveals no prefix of the key.
        is_right = hmac.compare_digest(token.strip(), api_key.encode())
        if scope["path"] in OPEN_PATHS or (is_right and scheme.lower() == b"bearer"):
            return None
        return ApiError(
            401,
            "Send the server's API key: `Authorization: Bearer KEY`.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    return check


def origin_check(allowed: Collection[str]) -> Callable[[Scope], ApiError | None]:
    """Refuses pages of other sites: without a token nothing else keeps them from asking."""

    def check(scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        origin, host = (headers.get(name, b"").decode("latin-1") for name in (b"origin", b"host"))
        if "*" in allowed or origin in allowed or is_same_origin(origin, host):
            return None
        if b"origin" not in headers and not is_of_other_site(headers):
            return None
        return ApiError(
            403,
            "A page of another site asked; `--cors ORIGIN` lets one in.",
            code="origin_not_allowed",
        )

    return check


def framing_check(scope: Scope) -> ApiError | None:
    """Refuses bodies with two lengths, of which a proxy may believe the other one."""
    names = {key for key, _ in scope["headers"]}
    if {b"content-length", b"transfer-encoding"} <= names:
        return ApiError(
            400,
            "The request has both Content-Length and Transfer-Encoding.",
            code="malformed_request",
            headers={"Connection": "close"},
        )
    return None


class BodyLimit:
    """Bodies up to a size; a stated larger one is refused at once, an unstated one as it grows."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stated = [value for key, value in scope["headers"] if key == b"content-length"]
        if any(value.isdigit() and int(value) > self._max_bytes for value in stated):
            await _discard(receive)
            await self._too_large().respond()(scope, receive, send)
            return
        num_bytes = 0

        async def counted_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                if message.get("more_body", False):
                    await _discard(receive)
                raise self._too_large()
            return message

        await self._app(scope, counted_receive, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"The body is larger than {self._max_bytes:,} bytes.", code="body_too_large"
        )


class BoundedRoute(APIRoute):
    """Refuses a body of too many values before it is parsed: nobody else is answered meanwhile."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            try:
                body = await request.body()
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE)
            check_num_values(body)
            return await handle(request)

        return bounded


def check_num_values(body: bytes) -> None:
    """Raise `ApiError` for JSON of more values than a prompt has tokens, or than chats nest."""
    too_many = body.count(b'"') > MAX_QUOTES
    if not too_many:
        # Outside of texts, where commas and brackets are not JSON's.
        plain = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
        too_many = (
            plain.count(b",") > MAX_VALUES or plain.count(b"[") + plain.count(b"{") > MAX_NESTS
        )
    if too_many:
        raise ApiError(
            413,
            f"The body holds more than {MAX_VALUES:,} values, or more than {MAX_NESTS:,} lists and "
            "objects: send fewer prompts or messages in one request.",
            code="body_too_large",
        )


async def _discard(receive: Receive) -> None:
    num_bytes = 0
    while num_bytes <= DISCARDED_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


def from_http_exception(error: HTTPException, *, method: str, path: str) -> ApiError:
    """Unknown paths and methods, and bodies that could not be read."""
    if isinstance(error, ApiError):
        return error
    if error.status_code == 404:
        return ApiError(404, f"There is no {path[:200]} here.", code="unknown_url")
    if error.status_code == 405:
        return ApiError(
            405,
            f"{path[:200]} does not take {method[:20]}.",
            code="method_not_allowed",
            headers=error.headers,
        )
    return ApiError(error.status_code, str(error.detail), headers=error.headers)


_DESCRIPTION = """\
OpenAI's chat, completions and responses and Anthropic's messages, over models on this machine.
Fields that clients send and that change nothing here are let by; those that would change the answer
and cannot be honoured are refused with 400. Every error has the body
`{"error": {"message", "type", "param", "code"}}`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Whom the server answers, and within which limits."""

    api_key: str | None = None
    """None: no token is asked for."""
    host_names: Collection[str] | None = None
    """Names that a Host header may say; None: any."""
    cors_origins: tuple[str, ...] = ()
    limits: ServerLimits = field(default_factory=ServerLimits)
    report: Callable[[str], None] = lambda _line: None
    """Called with one line about what happens outside of an answer."""
    report_error: Callable[[Exception], None] = lambda _error: None
    """Called with an unexpected error, after the client got status 500."""


def make_api_app(registry: ModelRegistry, settings: ApiSettings) -> ASGIApp:
    """The whole API as one ASGI application."""
    app = FastAPI(
        title="tightfit",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,  # their pages load scripts from the internet
        redoc_url=None,
        openapi_url=None,
    )
    app.router.route_class = BoundedRoute
    _add_answers(app, registry, settings.limits.answer_seconds)
    _add_state(app, registry)
    _add_description(app, needs_key=settings.api_key is not None)

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> Response:
        return from_http_exception(error, method=request.method, path=request.url.path).respond()

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> Response:
        return from_validation_error(
            error.errors(), request.headers.get("content-type", "")
        ).respond()

    @app.exception_handler(Exception)
    async def report_bug(request: Request, error: Exception) -> Response:  # noqa: ARG001
        return internal_error().respond()

    return _add_guards(app, registry, settings)


def _add_guards(app: ASGIApp, registry: ModelRegistry, settings: ApiSettings) -> ASGIApp:
    guarded: ASGIApp = BodyLimit(app, settings.limits.max_body_bytes)
    if settings.api_key is not None:
        guarded = Guard(guarded, token_check(settings.api_key))
    else:
        guarded = Guard(guarded, origin_check(settings.cors_origins))
    if settings.cors_origins:  # outside the token: a browser asks leave without one
        guarded = CORSMiddleware(
            guarded,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
        )
    if settings.host_names is not None:
        guarded = Guard(guarded, host_check(settings.host_names))
    guarded = Guard(guarded, framing_check)
    return RequestMetrics(guarded, registry.metrics, settings.report_error)


def _add_answers(app: FastAPI, registry: ModelRegistry, timeout_seconds: float) -> None:
    @app.post(
        "/v1/chat/completions",
        operation_id="create_chat_completion",
        summary="Answer a conversation",
        responses={200: _streamed(ChatCompletion, ChatChunk), **ANSWERING_ERRORS},
        response_class=Response,
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await answer(registry, body, request.receive, timeout_seconds=timeout_seconds)

    @app.post(
        "/v1/completions",
        operation_id="create_completion",
        summary="Continue a text",
        responses={200: _streamed(Completion, Completion), **ANSWERING_ERRORS},
        response_class=Response,
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await answer(registry, body, request.receive, timeout_seconds=timeout_seconds)

    @app.post(
        "/v1/responses",
        operation_id="create_response",
        summary="Answer a conversation, as output items",
        responses={200: _streamed(ResponseAnswer, None), **ANSWERING_ERRORS},
        response_class=Response,
    )
    async def responses(body: ResponseRequest, request: Request) -> Response:
        return await answer(
            registry,
            convert(body.as_request),
            request.receive,
            timeout_seconds=timeout_seconds,
            make_writer=lambda model, _, prepared: ResponseWriter(model, body, prepared),
        )

    @app.post(
        "/v1/messages",
        operation_id="create_message",
        summary="Answer a conversation, in Anthropic's form",
        responses={200: _streamed(MessageAnswer, None), **ANSWERING_ERRORS},
        response_class=Response,
    )
    async def messages(body: MessageRequest, request: Request) -> Response:
        return await answer(
            registry,
            convert(body.as_request),
            request.receive,
            timeout_seconds=timeout_seconds,
            make_writer=MessageWriter,
        )

    @app.post(
        "/v1/messages/count_tokens",
        operation_id="count_message_tokens",
        summary="The tokens of a conversation, in Anthropic's form",
        responses={200: {"model": TokenCount}, **ANSWERING_ERRORS},
        response_class=Response,
    )
    async def count_message_tokens(body: CountRequest, request: Request) -> Response:
        model = registry.find(body.model)
        chat = convert(body.as_chat)
        return await compute(
            model,
            lambda: TokenCount(input_tokens=len(encode_chat(model, chat))),
            request.receive,
            timeout_seconds=timeout_seconds,
        )

    @app.post(
        "/tokenize",
        operation_id="tokenize",
        summary="A text's or a conversation's tokens",
        responses={200: {"model": TokenizeAnswer}, **ANSWERING_ERRORS},
        response_class=Response,
    )
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        model = registry.find(body.model)
        return await compute(
            model,
            lambda: tokenize_text(model, body),
            request.receive,
            timeout_seconds=timeout_seconds,
        )

    @app.post(
        "/detokenize",
        operation_id="detokenize",
        summary="The text of tokens",
        responses={200: {"model": DetokenizeAnswer}, **ANSWERING_ERRORS},
        response_class=Response,
    )
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        model = registry.find(body.model)
        tokenizer = model.engine.prompter.tokenizer
        return await compute(
            model,
            lambda: DetokenizeAnswer(prompt=tokenizer.decode(body.tokens)),
            request.receive,
            timeout_seconds=timeout_seconds,
        )


def _add_state(app: FastAPI, registry: ModelRegistry) -> None:
    listing = {code: error for code, error in LISTING_ERRORS.items() if code != 404}

    @app.get(
        "/v1/models",
        operation_id="list_models",
        summary="The models that are served",
        responses={200: {"model": ModelList}, **listing},
    )
    async def list_models() -> ModelList:
        return ModelList(object="list", data=[_card(model) for model in registry.list()])

    @app.get(
        "/v1/models/{model_id:path}",
        operation_id="retrieve_model",
        summary="One model, by any of its names",
        responses={200: {"model": ModelCard}, **LISTING_ERRORS},
    )
    async def retrieve_model(model_id: str) -> ModelCard:
        return _card(registry.find(model_id))

    @app.get(
        "/health",
        operation_id="health",
        summary="Whether requests are answered; needs no token",
        responses={
            200: {"model": Health, "description": "Ready."},
            503: {"model": Health, "description": "Loading or being stopped."},
            403: PLAIN_ERRORS[403],
        },
    )
    async def health(response: Response) -> Health:
        if registry.phase is not ServerPhase.READY:
            response.status_code = 503
        return Health(status=registry.phase.value)

    @app.get(
        "/metrics",
        operation_id="metrics",
        summary="Counters for Prometheus",
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
            **PLAIN_ERRORS,
        },
        response_class=Response,
    )
    async def metrics() -> Response:
        return Response(registry.render_metrics(), headers={"Content-Type": CONTENT_TYPE})


def _add_description(app: FastAPI, *, needs_key: bool) -> None:
    @app.get(
        "/openapi.json",
        operation_id="openapi",
        summary="This description",
        responses={200: {"description": "OpenAPI 3.1."}, **PLAIN_ERRORS},
    )
    async def openapi() -> dict[str, Any]:
        return app.openapi()

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app, needs_key=needs_key)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _describe(app: FastAPI, *, needs_key: bool) -> dict[str, Any]:
    found = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    for operations in found["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # here such a body is a 400
            if not needs_key:
                operation["responses"].pop("401", None)
    for unused in ("HTTPValidationError", "ValidationError"):
        found["components"]["schemas"].pop(unused, None)
    if needs_key:
        scheme = {"type": "http", "scheme": "bearer", "description": "The server's API key."}
        found["components"]["securitySchemes"] = {"bearer": scheme}
        found["security"] = [{"bearer": []}]
        found["paths"]["/health"]["get"]["security"] = []
    return found


_EVENT = {
    "type": "object",
    "description": "One server-sent event.",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


def convert(make: Callable[[], ChatRequest]) -> ChatRequest:
    """A request of another form as a chat; what is wrong with it is the caller's."""
    try:
        return make()
    except ValidationError as error:
        raise from_validation_error(error.errors(), "json") from error


def _streamed(whole: type[Any], chunk: type[Any] | None) -> dict[str, Any]:
    if chunk is None:
        return {
            "model": whole,
            "description": "The answer; with `stream`, the events of this API.",
            "content": {"text/event-stream": {"schema": _EVENT}},
        }
    lines = (
        "With `stream`: lines `data: {...}`, each of the shape of "
        f"`{chunk.__name__}`, and at the end `data: [DONE]`. An error after the stream began is a "
        'line `data: {"error": ...}`.'
    )
    return {
        "model": whole,
        "description": f"The answer. {lines}",
        "content": {"text/event-stream": {"schema": _EVENT}},
    }


def _card(model: ServedModel) -> ModelCard:
    info = model.engine.info
    return ModelCard(
        id=model.id,
        object="model",
        created=model.created,
        owned_by="tightfit",
        aliases=list(model.names[1:]),
        engine=info.engine,
        format=info.format,
        device=info.device,
        max_context=info.max_context,
    )
