"""Job: the answers to one HTTP request, handed over from an engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence

from tightfit.engines.protocol import Delta, Done, Engine, Event, Failed, Request, Ticket


class ClientGoneError(Exception):
    """Nobody is left to read the answer."""


class Job:
    """Several requests to one engine whose events come back as one stream.

    Pieces that nobody has fetched yet are joined, so that a reader who is slower than the
    engine costs the text of his answers and not an entry for every token.
    """

    def __init__(
        self, engine: Engine, requests: Sequence[Request], on_end: Callable[[Event], None]
    ) -> None:
        """Made in the event loop. `on_end` is called there, once for each request that ended."""
        self._engine = engine
        self._requests = tuple(requests)
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._waiting: dict[int, list[str]] = {}
        self._ended: list[tuple[int, Done | Failed]] = []
        self._num_open = len(self._requests)
        self._stopped_by: Exception | None = None
        self._lock = threading.Lock()
        self._tickets: list[Ticket] = []
        self._is_cancelled = False

    def submit(self) -> None:
        """Hand every request in, or raise why one was refused. Any thread: it may take a moment."""
        for index, request in enumerate(self._requests):
            try:
                if self._is_cancelled:
                    raise self._stopped_by or ClientGoneError()
                ticket = self._engine.submit(request, self._listener(index))
            except Exception as fault:  # those after it were never handed in
                for unsent in range(index, len(self._requests)):
                    self._pass_on(unsent, Failed(fault=fault))
                self._cancel_tickets()
                raise
            with self._lock:
                self._tickets.append(ticket)
                is_late = self._is_cancelled
            if is_late:
                ticket.cancel()

    def stop(self, reason: Exception) -> None:
        """End everything soon; whoever reads the events is told `reason`. In the event loop."""
        if self._stopped_by is None:
            self._stopped_by = reason
        self._news.set()
        self._cancel_tickets()

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """The number of the request and what became of it, until all have ended."""
        num_told = 0
        while num_told < len(self._requests):
            await self._news.wait()
            self._news.clear()
            if self._stopped_by is not None:
                raise self._stopped_by
            waiting, self._waiting = self._waiting, {}
            ended, self._ended = self._ended, []
            for index, pieces in waiting.items():
                yield index, Delta(text="".join(pieces))
            for index, event in ended:
                num_told += 1
                yield index, event

    def _cancel_tickets(self) -> None:
        with self._lock:
            self._is_cancelled = True
            tickets = tuple(self._tickets)
        for ticket in tickets:
            ticket.cancel()

    def _listener(self, index: int) -> Callable[[Event], None]:
        return lambda event: self._pass_on(index, event)

    def _pass_on(self, index: int, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._take, index, event)

    def _take(self, index: int, event: Event) -> None:
        if isinstance(event, Delta):
            if self._stopped_by is None and event.text:
                self._waiting.setdefault(index, []).append(event.text)
                self._news.set()
            return
        self._num_open -= 1
        self._ended.append((index, event))
        self._news.set()
        self._on_end(event)

    @property
    def is_over(self) -> bool:
        """The engine has ended every request."""
        return self._num_open == 0
