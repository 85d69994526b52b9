"""Connections of clients that may be slow, silent or hostile: clocks and limits under uvicorn."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, ClassVar

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from tightfit.serving.http.limits import BACKLOG, ServerLimits
from tightfit.serving.http.schemas import ApiError

_MALFORMED = "The request is not HTTP/1.1."


class _LimitedProtocol(H11Protocol):
    """uvicorn's connection, closed when its client takes too long or the server is full."""

    limits: ClassVar[ServerLimits]
    waiting: ClassVar[dict[_LimitedProtocol, None]]
    """Connections that wait for their client and owe nothing; longest first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            silent = next(iter(self.waiting), None)
            if silent is None:
                self._refuse(
                    ApiError(
                        503,
                        "Too many connections are being answered. Try again later.",
                        code="too_many_connections",
                        headers={"Retry-After": "2"},
                    )
                )
                return
            silent._abort()
        self._watch_client()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._request_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()  # uvicorn does so only after an orderly end
        self.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_client()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_unread()
        else:
            self._watch_client()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_unread()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None and not self.transport.is_closing():
            self._stall_timer.cancel()
            self._stall_timer = None

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """In the API's shape; uvicorn calls this inside its `except`."""
        hint = getattr(sys.exc_info()[1], "error_status_hint", 400)
        if hint == 431:
            most = self.limits.max_head_bytes
            self._refuse(
                ApiError(431, f"The headers are larger than {most:,} bytes.", code="head_too_large")
            )
        else:
            self._refuse(ApiError(400, _MALFORMED, code="malformed_request"))

    def _watch_client(self) -> None:
        """Start or end the clock of a request that is coming; note whether it may be closed."""
        waits, is_coming = self._find_state()
        if not waits:
            self.waiting.pop(self, None)
        elif self not in self.waiting:
            self.waiting[self] = None
        if is_coming and self._request_timer is None:
            seconds = self.limits.request_seconds
            self._request_timer = self.loop.call_later(seconds, self._give_up)
        elif not is_coming and self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _find_state(self) -> tuple[bool, bool]:
        """Whether the server waits for the client; and for a request, not for whether one comes."""
        if self.transport.is_closing():
            return False, False
        if self.conn.their_state is h11.SEND_BODY:
            return True, True
        # Between two requests the connection is idle, for which uvicorn has a clock.
        is_idle = self.conn.their_state is h11.IDLE
        return is_idle, is_idle and self.timeout_keep_alive_task is None

    def _give_up(self) -> None:
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self.transport.close()  # a browser's spare connection expects no answer
            return
        self._refuse(
            ApiError(
                408,
                f"The request did not arrive within {self.limits.request_seconds:g} seconds.",
                code="request_timeout",
            )
        )

    def _refuse(self, error: ApiError) -> None:
        """Answer, where no answer has begun, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the app is to send nothing after this
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            body = json.dumps(error.body).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
                *(error.headers or {}).items(),
            ]
            head = h11.Response(status_code=error.status_code, headers=headers)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._abort_unread()

    def _abort(self) -> None:
        self.waiting.pop(self, None)
        self.connections.discard(self)  # now: its loss is noticed a turn of the loop later
        self.transport.abort()

    def _abort_unread(self) -> None:
        """A closed connection whose last bytes nobody reads would stay open for ever."""
        if self.transport.get_write_buffer_size():
            self._abort_later()

    def _abort_later(self) -> None:
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(
                self.limits.stall_seconds, self.transport.abort
            )


def make_config(app: Any, limits: ServerLimits, **settings: Any) -> Config:
    """How uvicorn serves an app within these limits."""
    given = limits

    class Limited(_LimitedProtocol):
        limits = given
        waiting: ClassVar[dict[_LimitedProtocol, None]] = {}

    return Config(
        app,
        http=Limited,
        ws="none",
        log_config=None,
        log_level="error",  # else every malformed request is a line on stderr
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=limits.idle_seconds,
        h11_max_incomplete_event_size=limits.max_head_bytes,
        **settings,
    )
