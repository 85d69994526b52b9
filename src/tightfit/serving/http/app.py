"""The HTTP API: routes, OpenAPI description, error handlers and middleware."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from tightfit.core.version import __version__
from tightfit.serving.http.answers import answer, prepare_chat, prepare_completion
from tightfit.serving.http.errors import (
    ANSWERING_ERRORS,
    LISTING_ERRORS,
    PLAIN_ERRORS,
    ApiError,
    internal_error,
)
from tightfit.serving.http.metrics import CONTENT_TYPE
from tightfit.serving.http.middleware import BodyLimit, HostGuard, RequestMetrics, TokenGuard
from tightfit.serving.http.registry import ModelRegistry, ServedModel, ServerPhase
from tightfit.serving.http.schemas import (
    ChatChunk,
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    Completion,
    CompletionRequest,
    Health,
    ModelCard,
    ModelList,
    StreamOptions,
    TextPart,
)

_FIELDS = frozenset(
    name
    for model in (ChatRequest, CompletionRequest, ChatMessage, TextPart, StreamOptions)
    for name in model.model_fields
)


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


def from_validation_error(error: RequestValidationError, content_type: str) -> ApiError:
    """The first thing that is wrong with a body."""
    first: Mapping[str, Any] = error.errors()[0]
    kind, place = first["type"], tuple(first["loc"])
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"The body is not JSON: {reason} at character {place[-1]}.")
    if kind == "unsupported":
        context = first["ctx"]
        return ApiError(
            400, context["message"], code="unsupported_parameter", param=str(context["param"])
        )
    if len(place) == 1 and "json" not in content_type.lower():
        return ApiError(400, "Send JSON, with the header `Content-Type: application/json`.")
    if len(place) == 1:
        return ApiError(400, "The body must be a JSON object.")
    param = _path(place[1:])
    return ApiError(400, f"`{param}`: {first['msg']}.", code="invalid_value", param=param)


def _path(place: Sequence[str | int]) -> str:
    """`messages[0].content`, without the names that the checker gives to alternatives."""
    path = ""
    for step in place:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step in _FIELDS:
            path += f".{step}" if path else step
    return path


DEFAULT_MAX_QUEUE = 128
DEFAULT_TIMEOUT_SECONDS = 600.0
DEFAULT_MAX_BODY_BYTES = 4 * 2**20

_DESCRIPTION = """\
OpenAI's chat and completions over models on this machine. Fields that OpenAI's clients send and
that change nothing here are let by; those that would change the answer and cannot be honoured are
refused with 400. Every error has the body `{"error": {"message", "type", "param", "code"}}`.
"""


def _nothing(_told: object) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """What the server accepts and how long it waits."""

    api_key: str | None = None
    """None: no token is asked for."""
    host_names: Collection[str] | None = None
    """Names that a Host header may say; None: any."""
    cors_origins: tuple[str, ...] = ()
    max_queue: int = DEFAULT_MAX_QUEUE
    """Answers that may wait for a slot, for each model."""
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    report: Callable[[str], None] = _nothing
    """Called with one line about what happens outside of an answer."""
    report_error: Callable[[Exception], None] = _nothing
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
    _add_answers(app, registry, settings)
    _add_lists(app, registry)
    _add_health(app, registry)
    _add_description(app, needs_key=settings.api_key is not None)

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> Response:
        return from_http_exception(error, method=request.method, path=request.url.path).respond()

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> Response:
        return from_validation_error(error, request.headers.get("content-type", "")).respond()

    @app.exception_handler(Exception)
    async def confess(request: Request, error: Exception) -> Response:  # noqa: ARG001
        return internal_error().respond()

    return _guarded(app, registry, settings)


def _guarded(app: ASGIApp, registry: ModelRegistry, settings: ApiSettings) -> ASGIApp:
    guarded: ASGIApp = BodyLimit(app, settings.max_body_bytes)
    if settings.api_key is not None:
        guarded = TokenGuard(guarded, settings.api_key)
    if settings.cors_origins:  # outside the token: a browser asks leave without one
        guarded = CORSMiddleware(
            guarded,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
        )
    if settings.host_names is not None:
        guarded = HostGuard(guarded, settings.host_names)
    return RequestMetrics(guarded, registry.metrics, settings.report_error)


def _add_answers(app: FastAPI, registry: ModelRegistry, settings: ApiSettings) -> None:
    @app.post(
        "/v1/chat/completions",
        operation_id="create_chat_completion",
        summary="Answer a conversation",
        responses={200: _streamed(ChatCompletion, ChatChunk), **ANSWERING_ERRORS},
        response_class=Response,
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        registry.require_open()
        order = prepare_chat(registry, body)
        return await answer(order, request.receive, timeout_seconds=settings.timeout_seconds)

    @app.post(
        "/v1/completions",
        operation_id="create_completion",
        summary="Continue a text",
        responses={200: _streamed(Completion, Completion), **ANSWERING_ERRORS},
        response_class=Response,
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        registry.require_open()
        order = prepare_completion(registry, body)
        return await answer(order, request.receive, timeout_seconds=settings.timeout_seconds)


def _add_lists(app: FastAPI, registry: ModelRegistry) -> None:
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


def _add_health(app: FastAPI, registry: ModelRegistry) -> None:
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


def _streamed(whole: type[Any], chunk: type[Any]) -> dict[str, Any]:
    lines = (
        "With `stream`: lines `data: {...}`, each of the shape of "
        f"`{chunk.__name__}`, and at the end `data: [DONE]`. A fault after the stream began is a "
        'line `data: {"error": ...}`.'
    )
    return {
        "model": whole,
        "description": "The answer.",
        "content": {"text/event-stream": {"schema": {"type": "string", "description": lines}}},
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
