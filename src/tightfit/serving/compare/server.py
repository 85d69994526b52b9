"""Serving the page: a port of this machine, loopback unless a password guards it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from tightfit.core.errors import SetupError, UsageError
from tightfit.serving.compare.page import Asgi, Scope, Send

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 7860
WRONG_NAME = "Open this page as http://127.0.0.1:PORT/, or start it with --host and --password.\n"
SECONDS_TO_END = 2
"""For open streams when the page is stopped."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, password: str | None) -> None:
    """Beyond this machine only behind a password."""
    if not is_loopback(host) and not password:
        raise UsageError(
            f"--host {host} lets other machines in, and no password was given.",
            remedy="add --password WORD, or leave out --host and reach it by ssh -L",
        )


@contextlib.contextmanager
def bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """A socket of our own, so that the port is known, and taken, before a model is loaded."""
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((bare, port))
        except OSError as error:
            raise SetupError(
                f"Cannot listen on {host}:{port}: {error.strerror or error}.",
                remedy="--port 0    (any free port)",
            ) from error
        yield held
    finally:
        held.close()


def address_of(held: socket.socket, host: str) -> str:
    """What to type into a browser."""
    port = held.getsockname()[1]
    bare = host.strip("[]")
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(bare, bare)
    return f"http://[{shown}]:{port}/" if ":" in shown else f"http://{shown}:{port}/"


def only_by_own_name(app: Asgi) -> Asgi:
    """The same app, for requests that name this machine as loopback.

    A page of another site can have its own name point here, and would then be let in by the
    browser as if it were ours.
    """

    async def guarded(scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            named = next((value for key, value in scope["headers"] if key == b"host"), b"")
            if not is_loopback(_host_of(named.decode("latin-1"))):
                await _refuse(send)
                return
        await app(scope, receive, send)

    return guarded


def _host_of(named: str) -> str:
    try:
        return urlsplit(f"//{named}").hostname or ""
    except ValueError:
        return ""


async def _refuse(send: Send) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": 421, "headers": headers})
    await send({"type": "http.response.body", "body": WRONG_NAME.encode()})


def serve_app(app: Asgi, held: socket.socket, *, on_ready: Callable[[], None]) -> None:
    """Serve until interrupted. `on_ready` is called once requests are answered."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_ready()

    settings: dict[str, Any] = {
        "log_level": "error",
        "access_log": False,
        "server_header": False,
        "timeout_graceful_shutdown": SECONDS_TO_END,
        "lifespan": "on",
    }
    is_near = is_loopback(held.getsockname()[0])
    guarded = only_by_own_name(app) if is_near else app
    Server(uvicorn.Config(guarded, **settings)).run(sockets=[held])
