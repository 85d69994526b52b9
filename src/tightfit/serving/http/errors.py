"""Errors of the HTTP API: one response body, and one place for every status."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException, Response
from pydantic import BaseModel, ConfigDict

from tightfit.core.errors import UserError

CLIENT_GONE = 499
"""What the metrics count where nobody was left to answer; never sent."""


class ErrorDetail(BaseModel):
    """What went wrong, for a reader and for a program."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: str
    param: str | None
    """The field of the request that it is about."""
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success, in OpenAI's shape."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail


_KINDS = {
    403: "permission_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class ApiError(HTTPException):
    """A refusal with its status; the routes raise it and one handler writes it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code=status, detail=message, headers=dict(headers or {}))
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status_code, "invalid_request_error")
        detail = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": detail}

    def respond(self) -> Response:
        """The whole HTTP answer."""
        return Response(
            json.dumps(self.body),
            status_code=self.status_code,
            media_type="application/json",
            headers=self.headers,
        )


def unknown_model(name: str, known: tuple[str, ...]) -> ApiError:
    listed = ", ".join(f"`{one}`" for one in known)
    return ApiError(
        404,
        f"The model `{name[:200]}` is not served here. There is: {listed}.",
        code="model_not_found",
        param="model",
    )


def prompt_too_long(num_tokens: int, max_context: int, *, param: str) -> ApiError:
    return ApiError(
        400,
        f"The prompt has {num_tokens:,} tokens; prompt and answer together may have "
        f"{max_context:,}, so at most {max_context - 1:,} are left for the prompt.",
        code="context_length_exceeded",
        param=param,
    )


def internal_error() -> ApiError:
    return ApiError(500, "This is a bug in tightfit.", code="internal_error")


def to_api_error(error: Exception) -> ApiError:
    """What an engine could not do: the caller's to mend, or ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, error.problem, code="invalid_request")
    return ApiError(
        500, f"The answer could not be made: {type(error).__name__}.", code="internal_error"
    )


def _documented(description: str, *headers: str) -> dict[str, Any]:
    found: dict[str, Any] = {"model": ErrorBody, "description": description}
    if headers:
        found["headers"] = {name: {"schema": {"type": "string"}} for name in headers}
    return found


_REFUSALS: dict[int | str, dict[str, Any]] = {
    401: _documented(
        "The server asks for a bearer token, and it was missing or wrong (`invalid_api_key`).",
        "WWW-Authenticate",
    ),
    403: _documented(
        "The Host header names another machine, as a page that rebinds its name would "
        "(`host_not_allowed`)."
    ),
    500: _documented("A bug or a failing engine (`internal_error`)."),
}
LISTING_ERRORS = _REFUSALS | {
    404: _documented("No such model is served (`model_not_found`)."),
    503: _documented("The models are still being loaded (`model_loading`).", "Retry-After"),
}
ANSWERING_ERRORS = _REFUSALS | {
    400: _documented(
        "The body is not JSON, a field has a wrong value, something is asked for that no engine "
        "here does (`unsupported_parameter`), or the prompt is longer than the context "
        "(`context_length_exceeded`)."
    ),
    404: _documented("No such model is served (`model_not_found`)."),
    413: _documented("The body is larger than the server takes (`body_too_large`)."),
    503: _documented(
        "The queue is full (`queue_full`), the models are still being loaded (`model_loading`) "
        "or the server is being stopped (`shutting_down`).",
        "Retry-After",
    ),
    504: _documented("The answer took longer than the server allows (`timeout`)."),
}
PLAIN_ERRORS = dict(_REFUSALS)
