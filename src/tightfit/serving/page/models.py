"""The models of the page, none to two: memory check, loading, and streaming their answers."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
from tightfit.hardware.machine import read_driver
from tightfit.runtime.model_files import Artefact
from tightfit.runtime.resolve import resolve_model

EXTRA_MEMORY_FRACTION = 0.1
"""Beside the weights: keys and values, scratch space, the libraries themselves."""


def estimate_resident_bytes(artefact: Artefact, weights: Dtype | None) -> int:
    """Memory of a loaded model, about. None: weights as they are stored.

    Leaves out the cache of a long context, and the adapter, which is small beside its base.
    """
    source = artefact.base or artefact.path
    if weights is None:
        files = [source] if source.is_file() else source.glob("*.safetensors")
        size = sum(file.stat().st_size for file in files)
    else:
        size = estimate_weight_bytes(resolve_model(str(source)), Strategy(weights=weights)).total
    return round(size * (1 + EXTRA_MEMORY_FRACTION))


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
    if len(sizes) == 1:
        subject = "The model needs"
    can_take_turns = not is_one_at_a_time and max(sizes) <= free_bytes < needed
    raise DoesNotFitError(
        f"{subject} about {render_bytes(needed)}; {render_bytes(free_bytes)} are free.",
        remedy="add --one-at-a-time    (slower: each is loaded when it is its turn)"
        if can_take_turns
        else "take smaller versions: tightfit quantize MODEL --to q4_k_m",
    )


def probe_free_bytes(device: str) -> int:
    """Free memory of the GPUs that `device` means; of this machine where that is none."""
    gpus = () if device == "cpu" else read_driver().gpus
    if device.startswith("cuda:"):
        gpus = tuple(gpu for gpu in gpus if str(gpu.index) == device.removeprefix("cuda:"))
    if not gpus:
        return int(psutil.virtual_memory().available)
    return sum(gpu.free_bytes for gpu in gpus)


# One prompt to several models at once, streamed.

MIN_SECONDS_BETWEEN_UPDATES = 0.06
"""A reader sees no difference below this, and a browser only works more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialAnswer:
    """One model's answer so far."""

    text: str = ""
    done: Done | None = None
    error: Exception | None = None

    @property
    def has_ended(self) -> bool:
        return self.done is not None or self.error is not None


def make_messages(system: str, prompt: str) -> list[Message]:
    """One question, behind a system prompt where there is one."""
    opening = [Message(SYSTEM, system.strip())] if system.strip() else []
    return [*opening, Message(USER, prompt)]


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


class PageModels:
    """The models of the page. Every method may be called from any thread."""

    def __init__(
        self, openers: Mapping[str, Callable[[], Engine]], *, is_one_at_a_time: bool
    ) -> None:
        """`openers` load a model, by the name that the page shows and the votes keep."""
        self.names = tuple(openers)
        self._openers = tuple(openers.values())
        self._is_one_at_a_time = is_one_at_a_time
        self._engines: dict[int, Engine] = {}
        self._infos: dict[int, EngineInfo] = {}
        self._turn = threading.Lock()
        self._tickets: dict[str, list[Ticket]] = {}
        """By visitor, so that a button can cancel them."""
        self._tickets_lock = threading.Lock()

    def load(self, report: Callable[[str], None] | None = None) -> None:
        """Load what stays in memory: both models, or only the first to be asked."""
        for index in range(min(1, len(self.names)) if self._is_one_at_a_time else len(self.names)):
            if report is not None:
                report(self.names[index])
            self._load(index)

    def choose(
        self,
        openers: Mapping[str, Callable[[], Engine]],
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Load these in place of those that are there. What fails leaves no model behind."""
        with self._turn:
            self.close()
            self._infos.clear()
            self.names, self._openers = tuple(openers), tuple(openers.values())
            try:
                self.load(report)
            except BaseException:
                self.close()
                self.names, self._openers = (), ()
                raise

    def info(self, index: int) -> EngineInfo | None:
        """The facts of a model's engine; None before it was first loaded."""
        return self._infos.get(index)

    def stream(
        self,
        indices: Sequence[int],
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        visitor: str,
    ) -> Iterator[tuple[PartialAnswer, ...]]:
        """The answers of these models, together or, one at a time, after each other."""
        if not self._is_one_at_a_time:
            yield from self._stream(indices, messages, sampling, visitor)
            return
        sides = [PartialAnswer() for _ in indices]
        yield tuple(sides)
        for order, index in enumerate(indices):
            with self._turn:
                try:
                    self._load(index)
                except UserError as error:
                    sides[order] = replace(sides[order], error=error)
                    yield tuple(sides)
                    continue
                for (side,) in self._stream((index,), messages, sampling, visitor):
                    sides[order] = side
                    yield tuple(sides)

    def cancel(self, visitor: str) -> None:
        """Cancel this visitor's requests. Harmless where nothing runs."""
        with self._tickets_lock:
            tickets = self._tickets.pop(visitor, [])
        for ticket in tickets:
            ticket.cancel()

    def close(self) -> None:
        """Free all memory."""
        for index in tuple(self._engines):
            self._engines.pop(index).close()

    def _load(self, index: int) -> None:
        if index in self._engines:
            return
        if index >= len(self._openers):
            raise _not_loaded()
        if self._is_one_at_a_time:
            self.close()
        engine = self._openers[index]()
        self._engines[index] = engine
        self._infos[index] = engine.info

    def _stream(
        self, indices: Sequence[int], messages: Sequence[Message], sampling: Sampling, visitor: str
    ) -> Iterator[tuple[PartialAnswer, ...]]:
        """All engines work at the same time; each step gives every answer so far.

        An error of one leaves the others going. Closing the iterator cancels the requests.
        """
        events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        sides = [PartialAnswer() for _ in indices]
        tickets: list[Ticket] = []
        try:
            for number, index in enumerate(indices):
                engine = self._engines.get(index)
                if engine is None:
                    sides[number] = PartialAnswer(error=_not_loaded())
                    continue

                def listen(event: Event, number: int = number) -> None:
                    events.put((number, event))

                try:
                    request = Request(prompt=engine.prompter.ask(messages), sampling=sampling)
                    ticket = engine.submit(request, listen)
                except UserError as error:
                    sides[number] = PartialAnswer(error=error)
                    continue
                tickets.append(ticket)
                with self._tickets_lock:
                    self._tickets.setdefault(visitor, []).append(ticket)
            yield tuple(sides)
            while not all(side.has_ended for side in sides):
                for number, event in _collect(events):
                    sides[number] = _advance(sides[number], event)
                yield tuple(sides)
        finally:
            for ticket in tickets:
                with contextlib.suppress(Exception):
                    ticket.cancel()
            with self._tickets_lock:
                kept = [one for one in self._tickets.pop(visitor, []) if one not in tickets]
                if kept:
                    self._tickets[visitor] = kept


def _not_loaded() -> UserError:
    return UserError("This model is no longer loaded.", remedy="load it again, above")
