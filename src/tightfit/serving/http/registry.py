"""The models that are served, their names and queues, and the requests in progress."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from functools import partial
from typing import TypeVar

import psutil

from tightfit.engines.protocol import Delta, Done, Engine, Event, Failed, Request, Ticket
from tightfit.serving.http.limits import MAX_SIDE_JOBS
from tightfit.serving.http.metrics import Metrics
from tightfit.serving.http.schemas import ApiError, unknown_model

_Result = TypeVar("_Result")


class ClientGoneError(Exception):
    """The client has disconnected."""


class EngineJob:
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
        self._waiting: dict[int, list[Delta]] = {}
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
                ticket = self._engine.submit(request, partial(self._pass_on, index))
            except Exception as error:  # those after it were never handed in
                for unsent in range(index, len(self._requests)):
                    self._pass_on(unsent, Failed(error=error))
                self._cancel_tickets()
                raise
            with self._lock:
                self._tickets.append(ticket)
                is_late = self._is_cancelled
            if is_late:
                ticket.cancel()

    def stop(self, reason: Exception) -> None:
        """Cancel every request; readers of the events get `reason`. Call it in the event loop."""
        if self._stopped_by is None:
            self._stopped_by = reason
        self._news.set()
        self._cancel_tickets()

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """The number of the request and its next event, until all have ended."""
        num_ended = 0
        while num_ended < len(self._requests):
            await self._news.wait()
            self._news.clear()
            if self._stopped_by is not None:
                raise self._stopped_by
            waiting, self._waiting = self._waiting, {}
            ended, self._ended = self._ended, []
            for index, pieces in waiting.items():
                yield (
                    index,
                    Delta(
                        text="".join(piece.text for piece in pieces),
                        logprobs=tuple(one for piece in pieces for one in piece.logprobs),
                    ),
                )
            for index, event in ended:
                num_ended += 1
                yield index, event

    def _cancel_tickets(self) -> None:
        with self._lock:
            self._is_cancelled = True
            tickets = tuple(self._tickets)
        for ticket in tickets:
            ticket.cancel()

    def _pass_on(self, index: int, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._take, index, event)

    def _take(self, index: int, event: Event) -> None:
        if isinstance(event, Delta):
            if self._stopped_by is None and (event.text or event.logprobs):
                self._waiting.setdefault(index, []).append(event)
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


# The served models, by every name they have, and their queues.

RETRY_SECONDS = 2
"""The Retry-After of a full queue."""
LOADING_RETRY_SECONDS = 5


class ServerPhase(str, Enum):
    """What the server is doing."""

    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


class ServedModel:
    """One loaded model, its names, and its unfinished answers."""

    def __init__(
        self, engine: Engine, names: Sequence[str], *, max_queue: int, metrics: Metrics
    ) -> None:
        self.engine = engine
        self.names = tuple(dict.fromkeys(names))
        self.created = int(time.time())
        self.jobs: set[EngineJob] = set()
        self.num_owed = 0
        """Answers submitted to the engine, or about to be, that have not ended."""
        self.encoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tightfit-prompts")
        """Where templates and tokenizers run, so that a long prompt holds up no other stream."""
        self._side = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tightfit-side")
        """For what is no answer's prompt, so that it holds up none."""
        self.num_side = 0
        """Pieces of such work that have not ended."""
        self._capacity = engine.info.num_slots + max_queue
        self._metrics = metrics

    @property
    def id(self) -> str:
        return self.names[0]

    @property
    def num_running(self) -> int:
        return min(self.num_owed, self.engine.info.num_slots)

    @property
    def num_waiting(self) -> int:
        return self.num_owed - self.num_running

    def admit(self, num_answers: int) -> None:
        """Reserve queue places for the answers, or raise 503. An idle model takes any request."""
        if self.num_owed and self.num_owed + num_answers > self._capacity:
            raise ApiError(
                503,
                f"{self.num_running} answers are being computed and {self.num_waiting} wait: the "
                "queue is full. Try again later.",
                code="queue_full",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
        self.num_owed += num_answers

    def compute_aside(self, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """The result of work that belongs to no answer's prompt, or raise 503.

        A place is given back when the work ends or is dropped: cancelling does not end what runs.
        """
        if self.num_side >= MAX_SIDE_JOBS:
            raise ApiError(
                503,
                f"{self.num_side} requests for tokens or log-probabilities wait. Try again later.",
                code="queue_full",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
        loop = asyncio.get_running_loop()

        def give_back() -> None:
            self.num_side -= 1

        def on_end(_: Future[_Result]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(give_back)

        future = self._side.submit(work)
        self.num_side += 1
        future.add_done_callback(on_end)
        return asyncio.wrap_future(future)

    def close(self) -> None:
        """Begin nothing more."""
        for executor in (self.encoder, self._side):
            executor.shutdown(wait=False, cancel_futures=True)

    def start(self, requests: Sequence[Request]) -> EngineJob:
        """A job for requests that were admitted; its places come back as the engine ends them."""
        job: EngineJob

        def on_end(event: Event) -> None:
            self.num_owed -= 1
            self._count(event)
            if job.is_over:
                self.jobs.discard(job)

        job = EngineJob(self.engine, requests, on_end)
        self.jobs.add(job)
        return job

    def _count(self, event: Event) -> None:
        metrics, model = self._metrics, self.id
        if isinstance(event, Failed):
            metrics.answers.add(model=model, end="failed")
        if not isinstance(event, Done):
            return
        metrics.answers.add(model=model, end=event.reason.value)
        metrics.prompt_tokens.add(event.num_prompt_tokens, model=model)
        metrics.cached_tokens.add(event.num_cached_tokens, model=model)
        metrics.new_tokens.add(event.num_new_tokens, model=model)
        metrics.answer_seconds.observe(event.finished_s - event.submitted_s, model=model)
        if event.num_new_tokens:
            waited = event.first_token_s - event.submitted_s
            metrics.first_token_seconds.observe(waited, model=model)
        if event.num_new_tokens > 1:
            rest = event.finished_s - event.first_token_s
            metrics.token_seconds.observe(rest / (event.num_new_tokens - 1), model=model)


class ModelRegistry:
    """Every served model and what the server is doing. Lives in the event loop."""

    def __init__(self, metrics: Metrics) -> None:
        self.phase = ServerPhase.LOADING
        self.models: tuple[ServedModel, ...] = ()
        self.metrics = metrics

    def open(self, models: Sequence[ServedModel]) -> None:
        """Everything is loaded: answer from now on."""
        self.models = tuple(models)
        if self.phase is ServerPhase.LOADING:
            self.phase = ServerPhase.READY

    def find(self, name: str | None) -> ServedModel:
        """The model by any of its names; without one, the only model there is."""
        known = self.list()
        if name is None:
            if len(known) == 1:
                return known[0]
            ids = ", ".join(f"`{model.id}`" for model in known)
            raise ApiError(400, f"Name one of the models in `model`: {ids}.", param="model")
        for model in known:
            if name in model.names:
                return model
        raise unknown_model(name, tuple(model.id for model in known))

    def list(self) -> tuple[ServedModel, ...]:
        """The models, once they are loaded."""
        if self.phase is ServerPhase.LOADING:
            raise ApiError(
                503,
                "The models are still being loaded.",
                code="model_loading",
                headers={"Retry-After": str(LOADING_RETRY_SECONDS)},
            )
        return self.models

    def require_open(self) -> None:
        """New answers are not begun once the server is being stopped."""
        if self.phase is ServerPhase.STOPPING:
            raise shutting_down_error()

    def stop_jobs(self, reason: Callable[[], Exception]) -> None:
        """End every answer that is still owed."""
        for model in self.models:
            for job in tuple(model.jobs):
                job.stop(reason())

    def render_metrics(self) -> str:
        """The metrics page, with every model's queue as it is now."""
        metrics = self.metrics
        metrics.resident_bytes.set(psutil.Process().memory_info().rss)
        for model in self.models:
            info = model.engine.info
            metrics.slots.set(info.num_slots, model=model.id)
            metrics.weight_bytes.set(info.weight_bytes, model=model.id)
            metrics.running.set(model.num_running, model=model.id)
            metrics.waiting.set(model.num_waiting, model=model.id)
            metrics.info.set(
                1,
                model=model.id,
                engine=info.engine,
                version=info.version,
                format=info.format,
                device=info.device,
                slots=str(info.num_slots),
                max_context=str(info.max_context),
            )
        return metrics.render()


def shutting_down_error() -> ApiError:
    return ApiError(
        503,
        "The server is being stopped.",
        code="shutting_down",
        headers={"Retry-After": str(LOADING_RETRY_SECONDS)},
    )
