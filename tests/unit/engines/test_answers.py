"""Blocking, streaming and many-at-once use, with an engine whose every step the test decides."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from tightfit.core.errors import InvalidInputError
from tightfit.engines.protocol import (
    Delta,
    Done,
    Engine,
    Failed,
    FinishReason,
    Listener,
    Request,
    answer,
    answer_all,
    stream,
)


@dataclass
class Handed:
    """A request in the hands of the puppet."""

    request: Request
    listener: Listener
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def end(self, text: str = "ok") -> None:
        self.listener(
            Done(
                reason=FinishReason.STOP,
                text=text,
                num_prompt_tokens=len(self.request.prompt),
                num_new_tokens=1,
                submitted_s=0.0,
                first_token_s=1.0,
                finished_s=2.0,
            )
        )


@dataclass
class Puppet:
    """Refuses prompts that begin with 13; everything else waits for the test."""

    num_slots: int = 2
    handed: list[Handed] = field(default_factory=list)
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    @property
    def info(self) -> Any:
        return self

    def submit(self, request: Request, listener: Listener) -> Handed:
        if request.prompt[0] == 13:
            raise InvalidInputError("13 is refused.", remedy="another number")
        self.handed.append(Handed(request, listener))
        self.arrived.release()
        return self.handed[-1]


def as_engine(puppet: Puppet) -> Engine:
    return cast("Engine", puppet)


def requests(*firsts: int) -> list[Request]:
    return [Request(prompt=(first,)) for first in firsts]


def test_a_stream_ends_with_done() -> None:
    puppet = Puppet()
    events = stream(as_engine(puppet), *requests(1))

    def play() -> None:
        puppet.arrived.acquire()
        puppet.handed[0].listener(Delta(text="o"))
        puppet.handed[0].listener(Delta(text="k"))
        puppet.handed[0].end()

    threading.Thread(target=play).start()
    found = list(events)
    assert [event.text for event in found] == ["o", "k", "ok"]
    assert isinstance(found[-1], Done)


def test_closing_a_stream_cancels() -> None:
    puppet = Puppet()
    events = cast("Any", stream(as_engine(puppet), *requests(1)))

    def play() -> None:
        puppet.arrived.acquire()
        puppet.handed[0].listener(Delta(text="o"))

    threading.Thread(target=play).start()
    assert next(events).text == "o"
    assert not puppet.handed[0].is_cancelled
    events.close()
    assert puppet.handed[0].is_cancelled


def test_an_error_is_raised() -> None:
    class Invalid(Puppet):
        def submit(self, request: Request, listener: Listener) -> Handed:
            listener(Failed(error=ArithmeticError("no")))
            return super().submit(request, listener)

    with pytest.raises(ArithmeticError):
        answer(as_engine(Invalid()), *requests(1))
    with pytest.raises(InvalidInputError):
        answer(as_engine(Puppet()), *requests(13))


def test_all_are_answered_in_the_order_they_end() -> None:
    puppet = Puppet()
    ends = answer_all(as_engine(puppet), requests(1, 2, 3), in_flight=3)
    backwards = threading.Thread(target=lambda: _end_backwards(puppet, 3))
    backwards.start()
    found = [(number, end.text) for number, end in ends if isinstance(end, Done)]
    backwards.join()
    assert found == [(2, "3"), (1, "2"), (0, "1")]


def test_pieces_come_with_the_number_of_their_request() -> None:
    class Spelling(Puppet):
        def submit(self, request: Request, listener: Listener) -> Handed:
            handed = super().submit(request, listener)
            for token in request.prompt[0], 0:
                listener(Delta(text=str(token), tokens=(token,)))
            handed.end()
            return handed

    pieces: list[tuple[int, tuple[int, ...]]] = []
    ends = answer_all(
        as_engine(Spelling()),
        requests(7, 13, 9),
        on_delta=lambda number, delta: pieces.append((number, delta.tokens)),
    )
    assert sorted(number for number, _ in ends) == [0, 1, 2]
    assert pieces == [(0, (7,)), (0, (0,)), (2, (9,)), (2, (0,))]


def _end_backwards(puppet: Puppet, count: int) -> None:
    for _ in range(count):
        puppet.arrived.acquire()
    for one in reversed(puppet.handed):
        one.end(str(one.request.prompt[0]))


def test_no_more_than_allowed_are_handed_in_and_none_drawn_early() -> None:
    puppet = Puppet(num_slots=2)
    drawn = []

    def endless() -> Iterator[Request]:
        for number in range(100):
            drawn.append(number)
            yield Request(prompt=(number + 20,))

    ends = cast("Any", answer_all(as_engine(puppet), endless()))
    for step in range(6):
        threading.Thread(target=lambda at=step: _end_when_there(puppet, at)).start()
        assert next(ends)[0] == step
        assert len(puppet.handed) <= 4 + step
        assert len(drawn) == len(puppet.handed)
    ends.close()
    assert [one.is_cancelled for one in puppet.handed[6:]] == [True] * len(puppet.handed[6:])
    assert len(puppet.handed) > 6


def _end_when_there(puppet: Puppet, at: int) -> None:
    while len(puppet.handed) <= at:
        puppet.arrived.acquire()
    puppet.handed[at].end()


def test_a_refused_request_ends_as_failed_and_the_rest_go_on() -> None:
    class Eager(Puppet):
        def submit(self, request: Request, listener: Listener) -> Handed:
            handed = super().submit(request, listener)
            handed.end()
            return handed

    ends = dict(answer_all(as_engine(Eager()), requests(13, 1, 13, 2, 13), in_flight=1))
    assert [isinstance(ends[number], Done) for number in range(5)] == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert isinstance(ends[0], Failed)
    assert list(answer_all(as_engine(Eager()), [])) == []
