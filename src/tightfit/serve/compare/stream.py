"""One prompt to several models at once, and their answers as they grow."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tightfit.core.errors import UserError
from tightfit.data.formats import SYSTEM, USER, Message
from tightfit.engines.protocol import (
    Delta,
    Done,
    Engine,
    Event,
    Failed,
    Request,
    Sampling,
    Ticket,
)

LEAST_SECONDS_BETWEEN = 0.06
"""Faster than this a reader sees no difference, and a browser only works more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One model's answer so far."""

    text: str = ""
    done: Done | None = None
    fault: Exception | None = None

    @property
    def has_ended(self) -> bool:
        return self.done is not None or self.fault is not None


class Tickets:
    """What one visitor has under way, so that a button can end it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, list[Ticket]] = {}

    def hold(self, visitor: str, ticket: Ticket) -> None:
        with self._lock:
            self._held.setdefault(visitor, []).append(ticket)

    def cancel(self, visitor: str) -> None:
        """End all of it. Harmless where nothing runs."""
        with self._lock:
            tickets = self._held.pop(visitor, [])
        for ticket in tickets:
            ticket.cancel()

    def release(self, visitor: str, tickets: Sequence[Ticket]) -> None:
        """Forget what has ended."""
        with self._lock:
            kept = [held for held in self._held.get(visitor, ()) if held not in tickets]
            if kept:
                self._held[visitor] = kept
            else:
                self._held.pop(visitor, None)


def make_messages(system: str, prompt: str) -> list[Message]:
    """One question, behind a system prompt where there is one."""
    said = [Message(SYSTEM, system.strip())] if system.strip() else []
    return [*said, Message(USER, prompt)]


def stream_answers(
    engines: Sequence[Engine],
    messages: Sequence[Message],
    sampling: Sampling,
    *,
    tickets: Tickets,
    visitor: str,
) -> Iterator[tuple[Side, ...]]:
    """All engines work at the same time; each step shows every answer as it stands.

    A fault of one leaves the others going. Closing the iterator cancels what is under way.
    """
    events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
    sides = [Side() for _ in engines]
    held: list[Ticket] = []
    try:
        for place, engine in enumerate(engines):
            try:
                held.append(_hand_in(engine, messages, sampling, place, events))
                tickets.hold(visitor, held[-1])
            except UserError as fault:
                sides[place] = Side(fault=fault)
        yield tuple(sides)
        while not all(side.has_ended for side in sides):
            for place, event in _collect(events):
                sides[place] = _advance(sides[place], event)
            yield tuple(sides)
    finally:
        for ticket in held:
            with contextlib.suppress(Exception):
                ticket.cancel()
        tickets.release(visitor, held)


def _hand_in(
    engine: Engine,
    messages: Sequence[Message],
    sampling: Sampling,
    place: int,
    events: queue.SimpleQueue[tuple[int, Event]],
) -> Ticket:
    request = Request(prompt=engine.prompter.ask(messages), sampling=sampling)
    return engine.submit(request, lambda event: events.put((place, event)))


def _collect(
    events: queue.SimpleQueue[tuple[int, Event]],
) -> Iterator[tuple[int, Event]]:
    """Wait for something to happen, then take all that happens shortly after."""
    yield events.get()
    until = time.monotonic() + LEAST_SECONDS_BETWEEN
    while (rest := until - time.monotonic()) > 0:
        try:
            yield events.get(timeout=rest)
        except queue.Empty:
            return


def _advance(side: Side, event: Event) -> Side:
    if isinstance(event, Delta):
        return replace(side, text=side.text + event.text)
    if isinstance(event, Failed):
        return replace(side, fault=event.fault)
    return replace(side, text=event.text, done=event)
