"""The two models of a page: both in memory, or one at a time where memory is short."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tightfit.core.errors import UserError
from tightfit.data.formats import Message
from tightfit.engines.protocol import Engine, EngineInfo, Sampling
from tightfit.serve.compare.stream import Side, Tickets, stream_answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A model that can be asked."""

    name: str
    """As the page shows it and the votes keep it."""
    open: Callable[[], Engine]


class Models:
    """Who is compared. Every method may be called from any thread."""

    def __init__(self, contestants: Sequence[Contestant], *, is_one_at_a_time: bool) -> None:
        self.names = tuple(contestant.name for contestant in contestants)
        self._contestants = tuple(contestants)
        self._is_one_at_a_time = is_one_at_a_time
        self._engines: dict[int, Engine] = {}
        self._infos: dict[int, EngineInfo] = {}
        self._turn = threading.Lock()
        self._tickets = Tickets()

    def load(self, report: Callable[[str], None] | None = None) -> None:
        """Bring in what stays in memory: both models, or only the first to be asked."""
        places = range(1 if self._is_one_at_a_time else len(self._contestants))
        for place in places:
            if report is not None:
                report(self.names[place])
            self._bring_in(place)

    def info(self, place: int) -> EngineInfo | None:
        """What is known of a model's engine; None before it was first loaded."""
        return self._infos.get(place)

    def stream(
        self,
        places: Sequence[int],
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        visitor: str,
    ) -> Iterator[tuple[Side, ...]]:
        """The answers of the models at `places`, together or, one at a time, after each other."""
        if not self._is_one_at_a_time:
            yield from self._stream_now(places, messages, sampling, visitor)
            return
        sides = [Side() for _ in places]
        yield tuple(sides)
        for order, place in enumerate(places):
            with self._turn:
                try:
                    self._bring_in(place)
                except UserError as fault:
                    sides[order] = replace(sides[order], fault=fault)
                    yield tuple(sides)
                    continue
                for (side,) in self._stream_now((place,), messages, sampling, visitor):
                    sides[order] = side
                    yield tuple(sides)

    def cancel(self, visitor: str) -> None:
        """End what this visitor has under way."""
        self._tickets.cancel(visitor)

    def close(self) -> None:
        """Give all memory back."""
        for place in tuple(self._engines):
            self._engines.pop(place).close()

    def _stream_now(
        self, places: Sequence[int], messages: Sequence[Message], sampling: Sampling, visitor: str
    ) -> Iterator[tuple[Side, ...]]:
        engines = [self._engines[place] for place in places]
        yield from stream_answers(
            engines, messages, sampling, tickets=self._tickets, visitor=visitor
        )

    def _bring_in(self, place: int) -> None:
        if place in self._engines:
            return
        if self._is_one_at_a_time:
            self.close()
        engine = self._contestants[place].open()
        self._engines[place] = engine
        self._infos[place] = engine.info
