"""ASGI middleware of the HTTP API: request metrics, host check, bearer token, body size."""

from __future__ import annotations

import hmac
import ipaddress
import time
from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tightfit.serving.http.errors import CLIENT_GONE, ApiError, internal_error
from tightfit.serving.http.metrics import Metrics

OPEN_PATHS = ("/health",)
DISCARDED_BYTES = 64 * 2**20
"""Of a body that is too large, so much is read and dropped: a client that is still sending when
the connection closes never sees the answer."""


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


class HostGuard:
    """Refuses names that a page on the internet could point at this machine (DNS rebinding)."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = [value.decode("latin-1") for key, value in scope["headers"] if key == b"host"]
        if all(host_name(host) in self._names for host in given):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            403,
            "The Host header names another machine than this server is bound to.",
            code="host_not_allowed",
        )
        await error.respond()(scope, receive, send)


def host_name(host: str) -> str:
    """A Host header without its port and an IPv6 address's brackets."""
    text = host.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    name = text.partition(":")[0]
    return name.rstrip(".")


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


class TokenGuard:
    """Lets nothing but `/health` by without the bearer token."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "Send the server's API key: `Authorization: Bearer KEY`.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.respond()(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        given = [value for key, value in scope["headers"] if key == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        # In constant time, so that timing reveals no prefix of the key.
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._api_key)


class BodyLimit:
    """Bodies up to a size; a stated larger one is refused at once, an unstated one as it grows."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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


async def _discard(receive: Receive) -> None:
    num_bytes = 0
    while num_bytes <= DISCARDED_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
