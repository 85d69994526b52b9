"""The two compared models: memory check, loading, and streaming both answers."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import DoesNotFitError, UserError
from tightfit.core.sampling import Sampling
from tightfit.core.strategy import Strategy
from tightfit.core.units import render_bytes
from tightfit.data.formats import SYSTEM, USER, Message
from tightfit.engines.protocol import (
    Delta,
    Done,
    Engine,
    EngineInfo,
    Event,
    Failed,
    Request,
    Ticket,
)
from tightfit.estimation.weights import estimate_weight_bytes
from tightfit.hardware.nvml import read_driver
from tightfit.models.resolve import resolve_model
from tightfit.runtime.artefacts import Artefact

EXTRA_MEMORY_FRACTION = 0.1
"""Beside the weights: keys and values, scratch space, the libraries themselves."""


def estimate_resident_bytes(artefact: Artefact, weights: Dtype | None) -> int:
    """What a loaded model holds, about. None: weights as they are stored.

    Leaves out the cache of a long context, and the adapter, which is small beside its base.
    """
    folder = artefact.base or artefact.path
    if weights is None:
        return round(_file_bytes(folder) * (1 + EXTRA_MEMORY_FRACTION))
    found = estimate_weight_bytes(resolve_model(str(folder)), Strategy(weights=weights))
    return round(found.total * (1 + EXTRA_MEMORY_FRACTION))


def require_room(
    artefacts: Sequence[Artefact],
    weights: Dtype | None,
    *,
    is_one_at_a_time: bool,
    free_bytes: int,
) -> None:
    """Refuse what will not fit into the memory there is, and say what would."""
    try:
        sizes = [estimate_resident_bytes(artefact, weights) for artefact in artefacts]
    except (UserError, OSError):
        return  # a shape we cannot read is no reason not to try
    needed = max(sizes) if is_one_at_a_time else sum(sizes)
    if needed <= free_bytes:
        return
    subject = "The larger of the two models needs" if is_one_at_a_time else "The two models need"
    can_take_turns = not is_one_at_a_time and max(sizes) <= free_bytes
    raise DoesNotFitError(
        f"{subject} about {render_bytes(needed)}; {render_bytes(free_bytes)} are free.",
        remedy="add --one-at-a-time    (slower: each is loaded when it is its turn)"
        if can_take_turns
        else "compare smaller versions: tightfit quantize MODEL --to q4_k_m",
    )


def probe_free_bytes(device: str) -> int:
    """Free memory of the GPUs that `device` means; of this machine where that is none."""
    gpus = () if device == "cpu" else read_driver().gpus
    if device.startswith("cuda:"):
        gpus = tuple(gpu for gpu in gpus if str(gpu.index) == device.removeprefix("cuda:"))
    if not gpus:
        return int(psutil.virtual_memory().available)
    return sum(gpu.free_bytes for gpu in gpus)


def _file_bytes(path: Path) -> int:
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


# One prompt to several models at once, streamed.

MIN_SECONDS_BETWEEN_UPDATES = 0.06
"""Faster than this a reader sees no difference, and a browser only works more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialAnswer:
    """One model's answer so far."""

    text: str = ""
    done: Done | None = None
    error: Exception | None = None

    @property
    def has_ended(self) -> bool:
        return self.done is not None or self.error is not None


class VisitorTickets:
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
    opening = [Message(SYSTEM, system.strip())] if system.strip() else []
    return [*opening, Message(USER, prompt)]


def stream_answers(
    engines: Sequence[Engine],
    messages: Sequence[Message],
    sampling: Sampling,
    *,
    tickets: VisitorTickets,
    visitor: str,
) -> Iterator[tuple[PartialAnswer, ...]]:
    """All engines work at the same time; each step shows every answer as it stands.

    A fault of one leaves the others going. Closing the iterator cancels what is under way.
    """
    events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
    sides = [PartialAnswer() for _ in engines]
    held: list[Ticket] = []
    try:
        for place, engine in enumerate(engines):
            try:
                held.append(_hand_in(engine, messages, sampling, place, events))
                tickets.hold(visitor, held[-1])
            except UserError as error:
                sides[place] = PartialAnswer(error=error)
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
    until = time.monotonic() + MIN_SECONDS_BETWEEN_UPDATES
    while (rest := until - time.monotonic()) > 0:
        try:
            yield events.get(timeout=rest)
        except queue.Empty:
            return


def _advance(side: PartialAnswer, event: Event) -> PartialAnswer:
    if isinstance(event, Delta):
        return replace(side, text=side.text + event.text)
    if isinstance(event, Failed):
        return replace(side, error=event.error)
    return replace(side, text=event.text, done=event)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedModel:
    """A model that can be asked."""

    name: str
    """As the page shows it and the votes keep it."""
    open: Callable[[], Engine]


class ComparedModels:
    """Who is compared. Every method may be called from any thread."""

    def __init__(self, contestants: Sequence[ComparedModel], *, is_one_at_a_time: bool) -> None:
        self.names = tuple(contestant.name for contestant in contestants)
        self._contestants = tuple(contestants)
        self._is_one_at_a_time = is_one_at_a_time
        self._engines: dict[int, Engine] = {}
        self._infos: dict[int, EngineInfo] = {}
        self._turn = threading.Lock()
        self._tickets = VisitorTickets()

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
    ) -> Iterator[tuple[PartialAnswer, ...]]:
        """The answers of the models at `places`, together or, one at a time, after each other."""
        if not self._is_one_at_a_time:
            yield from self._stream_now(places, messages, sampling, visitor)
            return
        sides = [PartialAnswer() for _ in places]
        yield tuple(sides)
        for order, place in enumerate(places):
            with self._turn:
                try:
                    self._bring_in(place)
                except UserError as error:
                    sides[order] = replace(sides[order], error=error)
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
    ) -> Iterator[tuple[PartialAnswer, ...]]:
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
