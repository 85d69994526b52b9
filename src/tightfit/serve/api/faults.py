"""What the web framework refuses by itself, said in the API's own shape and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from tightfit.serve.api.errors import ApiError
from tightfit.serve.api.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    TextPart,
)

_FIELDS = frozenset(
    name
    for model in (ChatRequest, CompletionRequest, ChatMessage, TextPart, StreamOptions)
    for name in model.model_fields
)


def from_http(fault: HTTPException, *, method: str, path: str) -> ApiError:
    """Unknown paths and methods, and bodies that could not be read."""
    if isinstance(fault, ApiError):
        return fault
    if fault.status_code == 404:
        return ApiError(404, f"There is no {path[:200]} here.", code="unknown_url")
    if fault.status_code == 405:
        return ApiError(
            405,
            f"{path[:200]} does not take {method[:20]}.",
            code="method_not_allowed",
            headers=fault.headers,
        )
    return ApiError(fault.status_code, str(fault.detail), headers=fault.headers)


def from_validation(fault: RequestValidationError, content_type: str) -> ApiError:
    """The first thing that is wrong with a body."""
    first: Mapping[str, Any] = fault.errors()[0]
    kind, place = first["type"], tuple(first["loc"])
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"The body is not JSON: {reason} at character {place[-1]}.")
    if kind == "unsupported":
        told = first["ctx"]
        return ApiError(
            400, told["message"], code="unsupported_parameter", param=str(told["param"])
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
