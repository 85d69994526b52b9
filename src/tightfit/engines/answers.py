"""Blocking, streaming and many-at-once ways to use an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from queue import SimpleQueue

from tightfit.core.errors import UserError
from tightfit.engines.protocol import Delta, Done, Engine, Event, Failed, Request, Ticket


def answer(engine: Engine, request: Request) -> Done:
    """The whole answer. Raises the fault where there is none."""
    for event in stream(engine, request):
        if isinstance(event, Done):
            return event
    raise RuntimeError("the engine ended an answer without saying how")


def stream(engine: Engine, request: Request) -> Iterator[Delta | Done]:
    """Pieces as they come, `Done` last. Closing the iterator cancels the request."""
    events: SimpleQueue[Event] = SimpleQueue()
    ticket = engine.submit(request, events.put)
    try:
        while True:
            event = events.get()
            if isinstance(event, Failed):
                raise event.fault
            yield event
            if isinstance(event, Done):
                return
    finally:
        ticket.cancel()


def answer_all(
    engine: Engine, requests: Iterable[Request], *, in_flight: int | None = None
) -> Iterator[tuple[int, Done | Failed]]:
    """Each request's number and end, in the order in which they end.

    Requests are drawn from the iterable only as others end, so that it may be long; never more
    than `in_flight` are handed in, by default twice the engine's slots. One that the engine
    refuses ends as `Failed`. Closing the iterator cancels what is under way.
    """
    most = max(1, 2 * engine.info.num_slots if in_flight is None else in_flight)
    ended: SimpleQueue[tuple[int, Done | Failed]] = SimpleQueue()
    open_tickets: dict[int, Ticket | None] = {}
    numbered = enumerate(requests)
    is_more = True
    try:
        while True:
            while is_more and len(open_tickets) < most:
                number, request = next(numbered, (-1, None))
                if request is None:
                    is_more = False
                else:
                    open_tickets[number] = _hand_in(engine, number, request, ended)
            if not open_tickets:
                return
            number, end = ended.get()
            del open_tickets[number]
            yield number, end
    finally:
        for ticket in open_tickets.values():
            if ticket is not None:
                ticket.cancel()


def _hand_in(
    engine: Engine, number: int, request: Request, ended: SimpleQueue[tuple[int, Done | Failed]]
) -> Ticket | None:
    def listen(event: Event) -> None:
        if not isinstance(event, Delta):
            ended.put((number, event))

    try:
        return engine.submit(request, listen)
    except UserError as fault:
        ended.put((number, Failed(fault=fault)))
        return None
