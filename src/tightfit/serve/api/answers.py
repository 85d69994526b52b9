"""Answering one HTTP request: into the line, to the engine, and back whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from fastapi import Response
from starlette.types import Receive, Scope, Send

from tightfit.engines.protocol import Delta, Done, Event, Failed, FinishReason
from tightfit.serve.api.errors import CLIENT_GONE, ApiError, from_fault
from tightfit.serve.api.hub import stopping
from tightfit.serve.api.job import ClientGoneError, Job
from tightfit.serve.api.orders import Order
from tightfit.serve.api.shapes import DONE, as_event, count_usage

STALL_SECONDS = 60.0
"""How long a reader may take nothing from a full connection before he counts as gone."""


async def answer(order: Order, receive: Receive, *, timeout_seconds: float) -> Response:
    """The response to an order; raises `ApiError` where it is refused before it begins."""
    job = await _begin(order)
    if order.is_streamed:
        return EventStream(_events(job, order), job, timeout_seconds=timeout_seconds)
    try:
        async with _watched(job, receive, timeout_seconds=timeout_seconds):
            answers = await _gather(job, order.num_answers)
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    usage = count_usage(answers, num_per_prompt=order.num_per_prompt)
    body = json.dumps(order.shape.whole(answers, usage))
    return Response(body, media_type="application/json")


async def _begin(order: Order) -> Job:
    loop, model = asyncio.get_running_loop(), order.model
    model.admit(order.num_answers)
    try:
        requests = await loop.run_in_executor(model.desk, order.write_requests)
    except BaseException as fault:
        model.forget(order.num_answers)
        if isinstance(fault, Exception):
            raise from_fault(fault) from fault
        raise
    job = model.start(requests)
    try:
        # Shielded, for a job that was started gives its places back only through the engine.
        await asyncio.shield(loop.run_in_executor(model.desk, job.submit))
    except asyncio.CancelledError:
        job.stop(ClientGoneError())
        raise
    except Exception as fault:
        raise from_fault(fault) from fault
    return job


@contextlib.asynccontextmanager
async def _watched(job: Job, receive: Receive, *, timeout_seconds: float) -> AsyncIterator[None]:
    """While inside, the client's leaving and the clock stop the job; afterwards nothing runs on."""

    async def wait_for_end() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        job.stop(ClientGoneError())

    too_slow = ApiError(
        504, f"The answer took longer than {timeout_seconds:g} seconds.", code="timeout"
    )
    timer = asyncio.get_running_loop().call_later(timeout_seconds, job.stop, too_slow)
    watcher = asyncio.create_task(wait_for_end())
    try:
        yield
    finally:
        timer.cancel()
        watcher.cancel()
        if not job.is_over:
            job.stop(ClientGoneError())


async def _gather(job: Job, num_answers: int) -> list[Done]:
    answers: dict[int, Done] = {}
    async for index, event in job.events():
        if not isinstance(event, Delta):
            answers[index] = _done(event)
    return [answers[index] for index in range(num_answers)]


def _done(event: Event) -> Done:
    """The end of an answer, or why there is none."""
    if isinstance(event, Failed):
        raise from_fault(event.fault) from event.fault
    assert isinstance(event, Done)
    if event.reason is FinishReason.CANCELLED:  # not by this request: the engine is being closed
        raise stopping()
    return event


async def _events(job: Job, order: Order) -> AsyncIterator[str]:
    """The stream's events; a fault is the last of them, as the status has long been sent."""
    shape, num_shown = order.shape, [0] * order.num_answers
    answers: dict[int, Done] = {}
    for index in range(order.num_answers):
        if opening := shape.opening(index):
            yield as_event(opening)
    try:
        async for index, event in job.events():
            if isinstance(event, Delta):
                num_shown[index] += len(event.text)
                yield as_event(shape.piece(index, event.text))
                continue
            answers[index] = done = _done(event)
            if rest := done.text[num_shown[index] :]:
                yield as_event(shape.piece(index, rest))
            yield as_event(shape.closing(index, done))
    except ApiError as fault:
        yield as_event(fault.body)
        return
    if order.includes_usage:
        told = [answers[index] for index in range(order.num_answers)]
        usage = count_usage(told, num_per_prompt=order.num_per_prompt)
        yield as_event(shape.ending(usage))
    yield DONE


class EventStream(Response):
    """Server-sent events, and a job that ends when nobody reads them."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], job: Job, *, timeout_seconds: float) -> None:
        # Proxies that gather an answer before they pass it on are asked not to.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._job = job
        self._timeout_seconds = timeout_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        with contextlib.suppress(ClientGoneError, asyncio.TimeoutError, OSError):
            async with _watched(self._job, receive, timeout_seconds=self._timeout_seconds):
                await send(head)
                async for event in self._events:
                    await asyncio.wait_for(_write(send, event.encode(), True), STALL_SECONDS)
                await asyncio.wait_for(_write(send, b"", False), STALL_SECONDS)


async def _write(send: Send, body: bytes, is_more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": is_more})
